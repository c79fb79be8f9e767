// Matrix products with packed weights: out[rows, n] = x[rows, k] * weight[n, k]^T.
//
// Packed weight: panels of 32 columns, each [k / 2][32][2] bf16, so that a panel is one sequential stream and a pair of
// k values times a broadcast pair of x needs no horizontal sum. Every output is one chain of sums along k whatever the
// number of rows, so a row's result does not depend on the rows beside it.

constexpr int PANEL = 32;
constexpr int PREFETCH_AHEAD = 1024;         // elements
constexpr int64_t CACHED_X_BYTES = 393216;  // of the second-level cache
#if defined(ISA_AVX512BF16) || defined(ISA_AVX512)
constexpr int MAX_TILE_ROWS = 14;
#else
constexpr int MAX_TILE_ROWS = 6;
#endif

template <int ROWS>
INLINE void gemm_tile_sums(const bf16* x, int64_t x_stride, const bf16* panel, int64_t k, Vec (&sum)[ROWS][2]) {
    UNROLL for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = splat(0.0f);
    for (int64_t i = 0; i < k; i += 2) {
        const Words w0 = load_words(panel + i * PANEL), w1 = load_words(panel + i * PANEL + 32);
        __builtin_prefetch(panel + i * PANEL + PREFETCH_AHEAD);
        __builtin_prefetch(panel + i * PANEL + PREFETCH_AHEAD + 32);
        UNROLL for (int r = 0; r < ROWS; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * x_stride + i, 4);
            const Words xs = splat_word(pair);
            sum[r][0] = dot<bf16>(sum[r][0], w0, xs);
            sum[r][1] = dot<bf16>(sum[r][1], w1, xs);
        }
    }
}

// Stores `count` of the 16 values at `to` as T.
template <class T>
INLINE void store_some(T* to, Vec x, int64_t count) {
    if (count >= 16) return store(to, x);
    T buffer[16];
    store(buffer, x);
    for (int64_t j = 0; j < count; j++) to[j] = buffer[j];
}

template <int ROWS>
void gemm_tile(const GemmArgs& a, int64_t row, int64_t panel) {
    Vec sum[ROWS][2];
    const bf16* weight = (const bf16*)a.weight + panel * PANEL * a.k;
    gemm_tile_sums<ROWS>((const bf16*)a.x + row * a.x_stride, a.x_stride, weight, a.k, sum);
    const int64_t column = panel * PANEL, left = a.n - column;
    UNROLL for (int r = 0; r < ROWS; r++) {
        Vec low = sum[r][0], high = sum[r][1];
        if (a.bias) {
            low = low + load(a.bias + column);
            high = high + load(a.bias + column + 16);
        }
        const int64_t at = (row + r) * a.out_stride;
        if (a.epilogue == SILU_MUL) {
            const Vec gate = rounded<bf16>(silu(rounded<bf16>(low)));
            store_some((bf16*)a.out + at + column / 2, gate * rounded<bf16>(high), left / 2);
        } else if (a.epilogue == STORE_FLOAT32) {
            store_some((float*)a.out + at + column, low, left);
            store_some((float*)a.out + at + column + 16, high, left - 16);
        } else {
            store_some((bf16*)a.out + at + column, low, left);
            store_some((bf16*)a.out + at + column + 16, high, left - 16);
        }
    }
}

template <int ROWS>
void gemm_rows(const GemmArgs& a, int64_t row, int64_t rows, int64_t panel) {
    if (rows == ROWS) return gemm_tile<ROWS>(a, row, panel);
    if constexpr (ROWS > 1) gemm_rows<ROWS - 1>(a, row, rows, panel);
}

// Rows go in tiles of nearly equal height; as many tiles as stay in the second-level cache meet each panel in turn.
void gemm(const GemmArgs& a, Team& team) {
    const int64_t rows = *a.rows, panels = (a.n + PANEL - 1) / PANEL;
    if (rows == 0) return;
    const int64_t tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    const int64_t chunk = larger<int64_t>(1, CACHED_X_BYTES / (2 * a.k * MAX_TILE_ROWS)), chunks = (tiles + chunk - 1) / chunk;
    const int64_t run = larger<int64_t>(1, panels / (8 * team.size)), runs = (panels + run - 1) / run;
    team.share(chunks * runs, [&](int64_t item) {
        const int64_t first_tile = item / runs * chunk, last_tile = smaller(tiles, first_tile + chunk);
        const int64_t first_panel = item % runs * run, last_panel = smaller(panels, first_panel + run);
        for (int64_t panel = first_panel; panel < last_panel; panel++)
            for (int64_t tile = first_tile; tile < last_tile; tile++) {
                const int64_t row = tile * rows / tiles, end = (tile + 1) * rows / tiles;
                gemm_rows<MAX_TILE_ROWS>(a, row, end - row, panel);
            }
    });
}

// Row-major [n, k] to panels; columns beyond n are zeros.
void pack_weight(const PackArgs& a, Team& team) {
    const uint16_t* weight = (const uint16_t*)a.weight;
    team.share((a.n + PANEL - 1) / PANEL, [&](int64_t panel) {
        uint16_t* out = (uint16_t*)a.out + panel * PANEL * a.k;
        for (int64_t i = 0; i < a.k; i++)
            for (int64_t j = 0; j < PANEL; j++) {
                const int64_t column = panel * PANEL + j;
                out[(i / 2 * PANEL + j) * 2 + i % 2] = column < a.n ? weight[column * a.k + i] : 0;
            }
    });
}
