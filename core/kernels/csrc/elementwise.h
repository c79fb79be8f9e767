// The operations between the matrix products: embedding, and RMSNorm with the sum that comes before it.

template <class T>
void embed(const EmbedArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        memcpy((T*)a.out + row * a.size, (const T*)a.table + a.ids[row] * a.size, a.size * sizeof(T));
    });
}

// 1 / sqrt(mean of squares + eps) of the values that value(i), value(i + 16), ... give, `size` in all.
template <class Value>
INLINE Vec inverse_rms(int64_t size, double eps, Value value) {
    Vec squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += 16) {
        const Vec v = value(i);
        squares = fma(v, v, squares);
    }
    return splat(1.0f / sqrtf(lane_sum(squares) / (float)size + (float)eps));
}

// What a weight of T's own width multiplies is rounded to T first.
template <class T, class W>
INLINE Vec weighted(Vec normalised, const W* weight) {
    if constexpr (sizeof(W) == sizeof(T)) normalised = rounded<T>(normalised);
    return normalised * load(weight);
}

// `size` is a multiple of 16. The residual is kept in T, as the reference does.
template <class T, class W>
void rms_norm(const RmsNormArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        const T* residual = (const T*)a.residual + (a.row_index ? a.row_index[row] : row) * a.size;
        T* sums = a.x ? (T*)(a.sum ? a.sum : a.residual) + row * a.size : nullptr;
        const T* x = (const T*)a.x + row * a.size;
        const W *x_weight = (const W*)a.x_weight, *weight = (const W*)a.weight;
        T* out = (T*)a.out + row * a.size;
        auto sum = [&](int64_t i, Vec addend) __attribute__((always_inline)) {
            store(sums + i, load(residual + i) + addend);
            return load(sums + i);
        };
        Vec scale;
        if (!a.x) {
            scale = inverse_rms(a.size, a.eps, [&](int64_t i) { return load(residual + i); });
        } else if (!x_weight) {
            scale = inverse_rms(a.size, a.eps, [&](int64_t i) { return sum(i, load(x + i)); });
        } else {
            const Vec x_scale = inverse_rms(a.size, a.eps, [&](int64_t i) { return load(x + i); });
            scale = inverse_rms(a.size, a.eps, [&](int64_t i) {
                return sum(i, rounded<T>(weighted<T>(load(x + i) * x_scale, x_weight + i)));
            });
        }
        const T* total = a.x ? sums : residual;
        if (!weight) {
            memcpy(out, total, a.size * sizeof(T));
            return;
        }
        for (int64_t i = 0; i < a.size; i += 16) store(out + i, weighted<T>(load(total + i) * scale, weight + i));
    });
}
