// Matrix products with packed weights: out[rows, n] = x[rows, k] * weight[n, k]^T, for every weight format.
//
// A packed weight is a row of panels, each 32 columns wide and one sequential stream, with the words of its columns side
// by side: a word of weights times a broadcast word of x needs no horizontal sum. Every output is one chain of sums along
// k whatever the number of rows, so a row's result does not depend on the rows beside it.

constexpr int FEW_ROWS = 4;  // which wait for memory
constexpr int64_t CACHED_X_BYTES = 393216;  // of the second-level cache
constexpr int64_t PAGE_BYTES = 4096;
constexpr bool MANY_REGISTERS = LANES == 16;

// How near to keep weights that are needed once: nowhere, but CPUs before those with BF16 read at half the speed when told so.
#ifdef ISA_AVX512BF16
constexpr int NEEDED_ONCE = 0;
#else
constexpr int NEEDED_ONCE = 3;
#endif

// Fetches 128 bytes of weights that come `ahead` of these. Few rows need their weights once and wait for them: theirs are
// the next ones. Many rows use a panel again and again, and meanwhile fetch the next.
template <int ROWS>
INLINE void fetch(const void* weight, int64_t ahead) {
    constexpr bool FEW = ROWS <= FEW_ROWS;
    constexpr int LOCALITY = FEW ? NEEDED_ONCE : 2;
    const uint8_t* at = (const uint8_t*)weight + (FEW ? 2048 : ahead);
    __builtin_prefetch(at, 0, LOCALITY);
    __builtin_prefetch(at + 64, 0, LOCALITY);
}

// Packed: [k / 2][32][2] bf16.
struct Bf16Weight {
    static constexpr int TILE_ROWS = MANY_REGISTERS ? 14 : 4;

    static int64_t panel_bytes(int64_t k) { return k * PANEL * 2; }

    template <int ROWS>
    INLINE static void multiply(const GemmArgs& a, int64_t row, int64_t panel, int64_t ahead, Vec (&sum)[ROWS][2]) {
        const bf16* x = (const bf16*)a.x + row * a.x_stride;
        const bf16* weight = (const bf16*)a.weight + panel * PANEL * a.k;
        for (int64_t i = 0; i < a.k; i += 2) {
            const Words low = load_words(weight + i * PANEL), high = load_words(weight + i * PANEL + 32);
            fetch<ROWS>(weight + i * PANEL, ahead);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Words xs = broadcast_word(x + r * a.x_stride + i);
                sum[r][0] = dot<bf16>(sum[r][0], low, xs);
                sum[r][1] = dot<bf16>(sum[r][1], high, xs);
            }
        }
    }

    static void pack_panel(const PackArgs& a, int64_t panel, void* to) {
        const uint16_t* weight = (const uint16_t*)a.weight;
        uint16_t* out = (uint16_t*)to;
        for (int64_t i = 0; i < a.k; i++)
            for (int64_t j = 0; j < PANEL; j++) {
                const int64_t column = panel * PANEL + j;
                out[(i / 2 * PANEL + j) * 2 + i % 2] = column < a.n ? weight[column * a.k + i] : 0;
            }
    }
};

// Stores `count` of the 16 values at `to` as T.
template <class T>
INLINE void store_some(T* to, Vec x, int64_t count) {
    if (count >= 16) return store(to, x);
    T buffer[16];
    store(buffer, x);
    for (int64_t j = 0; j < count; j++) to[j] = buffer[j];
}

// What a gated epilogue makes of the gate's and the other columns.
INLINE Vec activated(Vec gate, Vec up, int64_t epilogue) {
    const Vec x = rounded<bf16>(gate), power = epilogue == SILU_MUL ? silu_power(x) : gelu_power(x);
    return rounded<bf16>(times_sigmoid(x, power)) * rounded<bf16>(up);
}

template <class Weight, int ROWS>
void gemm_tile(const GemmArgs& a, int64_t row, int64_t panel, int64_t ahead) {
    Vec sum[ROWS][2];
    UNROLL for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = splat(0.0f);
    Weight::template multiply<ROWS>(a, row, panel, ahead, sum);
    const int64_t column = panel * PANEL, left = a.n - column;
    UNROLL for (int r = 0; r < ROWS; r++) {
        Vec low = sum[r][0], high = sum[r][1];
        if (a.bias) {
            low = low + load(a.bias + column);
            high = high + load(a.bias + column + 16);
        }
        const int64_t at = (row + r) * a.out_stride;
        if (a.epilogue == SILU_MUL || a.epilogue == GELU_MUL) {
            store_some((bf16*)a.out + at + column / 2, activated(low, high, a.epilogue), left / 2);
        } else if (a.epilogue == STORE_FLOAT32) {
            store_some((float*)a.out + at + column, low, left);
            store_some((float*)a.out + at + column + 16, high, left - 16);
        } else {
            store_some((bf16*)a.out + at + column, low, left);
            store_some((bf16*)a.out + at + column + 16, high, left - 16);
        }
    }
}

template <class Weight, int ROWS>
void gemm_rows(const GemmArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t ahead) {
    if (rows == ROWS) return gemm_tile<Weight, ROWS>(a, row, panel, ahead);
    if constexpr (ROWS > 1) gemm_rows<Weight, ROWS - 1>(a, row, rows, panel, ahead);
}

// Memory is read fastest in long stretches: of the panels that few rows meet, each thread has most of its share at once,
// and the rest goes to whoever is done first.
INLINE int64_t own_panels(int64_t panels, const Team& team) { return panels * 5 / 6 / team.size; }

// Rows go in tiles of nearly equal height; as many tiles as stay in the second-level cache meet each panel in turn.
template <class Weight>
void gemm(const GemmArgs& a, Team& team) {
    const Rows all = team.rows(a.rows);
    const int64_t rows = all.end - all.first, panels = (a.n + PANEL - 1) / PANEL;
    if (rows == 0) return;
    const int64_t tiles = (rows + Weight::TILE_ROWS - 1) / Weight::TILE_ROWS;
    const int64_t chunk = larger<int64_t>(1, CACHED_X_BYTES / (2 * a.k * Weight::TILE_ROWS)), chunks = (tiles + chunk - 1) / chunk;
    const bool few = rows <= FEW_ROWS;
    const int64_t run = few ? 1 : larger<int64_t>(1, panels / (8 * team.size)), runs = (panels + run - 1) / run;
    team.share_by_rank(chunks * runs, few ? own_panels(panels, team) : 0, few ? panels / (32 * team.size) + 1 : 1, [&](int64_t item) {
        const int64_t first_tile = item / runs * chunk, last_tile = smaller(tiles, first_tile + chunk);
        const int64_t first_panel = item % runs * run, last_panel = smaller(panels, first_panel + run);
        for (int64_t panel = first_panel; panel < last_panel; panel++) {
            const int64_t next = panel + 1 < last_panel ? panel + 1 : first_panel + run * team.size;
            for (int64_t tile = first_tile; tile < last_tile; tile++) {
                const int64_t row = tile * rows / tiles, end = (tile + 1) * rows / tiles;
                const int64_t ahead = tile == first_tile ? (next - panel) * Weight::panel_bytes(a.k) : 0;
                gemm_rows<Weight, Weight::TILE_ROWS>(a, all.first + row, end - row, panel, ahead);
            }
        }
    });
}

// The weights that this thread reads first, where few rows will wait for them.
template <class Weight>
Bytes first_weights(const GemmArgs& a, const Team& team) {
    if (*a.rows > FEW_ROWS) return {};
    const int64_t bytes = own_panels((a.n + PANEL - 1) / PANEL, team) * Weight::panel_bytes(a.k);
    const uint8_t* first = (const uint8_t*)a.weight + team.rank * bytes;
    return {first, first + bytes};
}

// The system puts a page into the memory of the processor that touches it first. Each thread touches the panels that it
// reads first when rows are few, as `gemm` shares them out; the pages that go to whoever is done first are spread over all.
template <class Weight>
void place_weight(const PlaceArgs& a, Team& team) {
    const int64_t panels = (a.n + PANEL - 1) / PANEL, panel_bytes = Weight::panel_bytes(a.k);
    const int64_t own = own_panels(panels, team) * panel_bytes;
    volatile uint8_t* out = (uint8_t*)a.out;
    for (int64_t at = team.rank * own; at < (team.rank + 1) * own; at += PAGE_BYTES) out[at] = 0;
    for (int64_t at = team.size * own + team.rank * PAGE_BYTES; at < panels * panel_bytes; at += team.size * PAGE_BYTES) out[at] = 0;
}

// Row-major weights to panels; columns beyond n are zeros.
template <class Weight>
void pack_weight(const PackArgs& a, Team& team) {
    team.share((a.n + PANEL - 1) / PANEL, [&](int64_t panel) {
        Weight::pack_panel(a, panel, (uint8_t*)a.out + panel * Weight::panel_bytes(a.k));
    });
}
