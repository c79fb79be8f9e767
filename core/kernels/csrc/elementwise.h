// The operations between the matrix products: embedding, RMSNorm with the residual sum, SiLU-and-mul.

template <class T>
void embed(const EmbedArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        memcpy((T*)a.out + row * a.size, (const T*)a.table + a.ids[row] * a.size, a.size * sizeof(T));
    });
}

// `size` is a multiple of 16. The residual is kept in T, as the reference does.
template <class T>
void rms_norm(const RmsNormArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        T* residual = (T*)a.residual + (a.row_index ? a.row_index[row] : row) * a.size;
        const T *x = a.x ? (const T*)a.x + row * a.size : nullptr, *weight = (const T*)a.weight;
        T* out = (T*)a.out + row * a.size;
        Vec squares = splat(0.0f);
        for (int64_t i = 0; i < a.size; i += 16) {
            if (x) store(residual + i, load(residual + i) + load(x + i));
            const Vec h = load(residual + i);
            squares = fma(h, h, squares);
        }
        if (!weight) {
            memcpy(out, residual, a.size * sizeof(T));
            return;
        }
        const Vec scale = splat(1.0f / sqrtf(lane_sum(squares) / (float)a.size + (float)a.eps));
        for (int64_t i = 0; i < a.size; i += 16) store(out + i, rounded<T>(load(residual + i) * scale) * load(weight + i));
    });
}

template <class T>
void silu_mul(const SiluMulArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        const T* gate = (const T*)a.gate_up + row * 2 * a.size;
        T* out = (T*)a.out + row * a.size;
        int64_t i = 0;
        for (; i + 16 <= a.size; i += 16) store(out + i, rounded<T>(silu(load(gate + i))) * load(gate + a.size + i));
        for (; i < a.size; i++) {
            const float g = to_float(gate[i]), activated = to_float(round_to<T>(g / (1.0f + expf(-g))));
            out[i] = round_to<T>(activated * to_float(gate[a.size + i]));
        }
    });
}
