// What LoRA adapters add to a product: out = epilogue(base + x * a^T * b^T), row by row, each with its adapter's a and b.
//
// Sums are float32. A row's are one chain along k for each value of x * a^T, and one along the rank for each output, from
// the base on: they do not depend on the rows beside it.

constexpr int MAX_PARTS = 3;
constexpr int LORA_ROWS = MANY_REGISTERS ? 8 : 4;  // that share one reading of an adapter

// x * a^T of some rows, for each part of a product.
struct Shrunk {
    float values[MAX_PARTS][MAX_LORA_RANK][LORA_ROWS];
};

// a: [rank / 16 rounded up][k / 2][16][2].
template <int ROWS>
void shrink(const LoraArgs& a, const LoraPart& part, const int64_t* rows, float (*out)[LORA_ROWS]) {
    const bf16* x[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) x[r] = (const bf16*)a.x + rows[r] * a.x_stride;
    const bf16* weight = (const bf16*)part.a;
    for (int64_t first = 0; first < part.rank; first += 16, weight += 16 * a.k) {
        Vec sum[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) sum[r] = splat(0.0f);
        for (int64_t i = 0; i < a.k; i += 2) {
            const Words words = load_words(weight + i * 16);
            UNROLL for (int r = 0; r < ROWS; r++) sum[r] = dot<bf16>(sum[r], words, broadcast_word(x[r] + i));
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            float lanes[16];
            store(lanes, sum[r]);
            for (int j = 0; j < 16; j++) out[first + j][r] = lanes[j];
        }
    }
}

// Adds to 16 outputs of a part, from `column` of it on. b: [rows / 16][rank][16].
template <int ROWS>
INLINE void expand(const LoraPart& part, const float (*shrunk)[LORA_ROWS], int64_t column, Vec (&sum)[ROWS]) {
    const bf16* weight = (const bf16*)part.b + column * part.rank;
    for (int64_t i = 0; i < part.rank; i++) {
        const Vec b = load(weight + i * 16);
        UNROLL for (int r = 0; r < ROWS; r++) sum[r] = fma(b, splat(shrunk[i][r]), sum[r]);
    }
}

template <int ROWS>
INLINE void load_base(const LoraArgs& a, const int64_t* rows, int64_t column, Vec (&sum)[ROWS]) {
    UNROLL for (int r = 0; r < ROWS; r++) sum[r] = load(a.base + rows[r] * a.base_stride + column);
}

// parts: null where these rows have no adapter.
template <int ROWS>
void lora_tile(const LoraArgs& a, const LoraPart* parts, const int64_t* rows) {
    static thread_local Array<Shrunk> room;  // on the heap: every thread of the process would pay for it at its start
    Shrunk& shrunk = *room.at_least(1);
    if (parts)
        for (int64_t p = 0; p < a.parts; p++)
            if (parts[p].a) shrink<ROWS>(a, parts[p], rows, shrunk.values[p]);
    const bool gated = a.epilogue == SILU_MUL || a.epilogue == GELU_MUL;
    const int64_t ends[MAX_PARTS] = {a.skip + a.size0, a.skip + a.size0 + a.size1, a.n};
    for (int64_t column = 0, p = 0; column < a.n; column += gated ? 32 : 16) {
        Vec sum[ROWS];
        load_base<ROWS>(a, rows, column, sum);
        if (gated) {
            Vec up[ROWS];
            load_base<ROWS>(a, rows, column + 16, up);
            if (parts && parts[0].a) expand<ROWS>(parts[0], shrunk.values[0], column / 2, sum);
            if (parts && parts[1].a) expand<ROWS>(parts[1], shrunk.values[1], column / 2, up);
            UNROLL for (int r = 0; r < ROWS; r++)
                store((bf16*)a.out + rows[r] * a.out_stride + column / 2, activated(sum[r], up[r], a.epilogue));
            continue;
        }
        while (column >= ends[p]) p++;
        const int64_t first = p ? ends[p - 1] : a.skip;
        if (parts && column >= first && parts[p].a) expand<ROWS>(parts[p], shrunk.values[p], column - first, sum);
        UNROLL for (int r = 0; r < ROWS; r++) store((bf16*)a.out + rows[r] * a.out_stride + column, sum[r]);
    }
}

template <int ROWS>
void lora_rows(const LoraArgs& a, const LoraPart* parts, const int64_t* rows, int64_t count) {
    if (count == ROWS) return lora_tile<ROWS>(a, parts, rows);
    if constexpr (ROWS > 1) lora_rows<ROWS - 1>(a, parts, rows, count);
}

void lora(const LoraArgs& a, Team& team) {
    const LoraStep& step = *a.step;
    const Rows all = team.rows(a.rows);
    // Where in a group's rows, which ascend, those from `row` on begin.
    auto find = [&](int64_t group, int64_t row) {
        int64_t first = step.starts[group], end = step.starts[group + 1];
        while (first < end) {
            const int64_t middle = (first + end) / 2;
            if (step.rows[middle] < row) first = middle + 1;
            else end = middle;
        }
        return first;
    };
    auto rows_of = [&](int64_t group) { return Rows{find(group, all.first), find(group, all.end)}; };
    int64_t tiles = 0;
    for (int64_t group = 0; group < step.groups; group++) {
        const Rows own = rows_of(group);
        tiles += (own.end - own.first + LORA_ROWS - 1) / LORA_ROWS;
    }
    team.share(tiles, [&](int64_t tile) {
        for (int64_t group = 0; group < step.groups; group++) {
            const Rows own = rows_of(group);
            const int64_t count = (own.end - own.first + LORA_ROWS - 1) / LORA_ROWS;
            if (tile < count) {
                const int64_t first = own.first + tile * LORA_ROWS;
                const LoraPart* parts = step.parts[group] ? step.parts[group] + a.first_part : nullptr;
                return lora_rows<LORA_ROWS>(a, parts, step.rows + first, smaller<int64_t>(LORA_ROWS, own.end - first));
            }
            tile -= count;
        }
    });
}
