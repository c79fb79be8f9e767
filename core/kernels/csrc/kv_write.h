// Writing keys and values to their slots of the paged cache, alone or together with the rotary embedding.

template <class T>
void write_kv_head(void* k_cache, void* v_cache, int64_t slot, int64_t kv_head, int64_t num_blocks, int64_t head_dim,
                   const T* k, const T* v) {
    if (slot < 0) return;
    constexpr int P = PER_WORD<T>;
    const int64_t base = (kv_head * num_blocks + slot / BLOCK) * BLOCK * head_dim, offset = slot % BLOCK;
    T* keys = (T*)k_cache + base + offset * P;
    for (int64_t d = 0; d < head_dim; d += P) memcpy(keys + d * BLOCK, k + d, 4);
    T* values = (T*)v_cache + base + offset / P * P * head_dim + offset % P;
    for (int64_t d = 0; d < head_dim; d++) values[d * P] = v[d];
}

template <class T>
void write_kv(const WriteKvArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        for (int64_t h = 0; h < a.num_kv_heads; h++)
            write_kv_head<T>(a.k_cache, a.v_cache, a.step->slot_mapping[row], h, a.num_blocks, a.head_dim,
                             (const T*)a.k + row * a.k_stride + h * a.head_dim, (const T*)a.v + row * a.v_stride + h * a.head_dim);
    });
}

// One head in place: normalised with `norm` where given, then the first rotary_dim values rotated by halves.
template <class T, class W>
void rotate_head(const RotaryArgs& a, T* head, const W* norm, const float* cos_sin) {
    float x[MAX_HEAD_DIM];
    for (int64_t d = 0; d < a.head_dim; d += 16) store(x + d, load(head + d));
    if (norm) {
        const Vec scale = inverse_rms(a.head_dim, a.eps, [&](int64_t d) { return load(x + d); });
        for (int64_t d = 0; d < a.head_dim; d += 16)
            store(x + d, rounded<T>(weighted<T>(load(x + d) * scale, norm + d)));
    }
    const int64_t half = a.rotary_dim / 2;
    if (cos_sin) {
        int64_t d = 0;
        for (; d + 16 <= half; d += 16) {
            const Vec low = load(x + d), high = load(x + d + half), c = load(cos_sin + d), s = load(cos_sin + half + d);
            store(x + d, low * c - high * s);
            store(x + d + half, high * c + low * s);
        }
        for (; d < half; d++) {
            const float low = x[d], high = x[d + half], c = cos_sin[d], s = cos_sin[half + d];
            x[d] = low * c - high * s;
            x[d + half] = high * c + low * s;
        }
    }
    for (int64_t d = 0; d < a.head_dim; d += 16) store(head + d, load(x + d));
}

template <class T, class W>
void rotary(const RotaryArgs& a, Team& team) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    team.share_rows(a.rows, [&](int64_t item) {
        const int64_t row = item / a.num_kv_heads, kv_head = item % a.num_kv_heads;
        T* q = (T*)a.qkv + row * a.stride;
        T* k = q + (a.num_heads + kv_head) * a.head_dim;
        const float* cos_sin = a.cos_sin ? a.cos_sin + a.step->positions[row] * a.rotary_dim : nullptr;
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
            rotate_head(a, q + h * a.head_dim, (const W*)a.q_norm, cos_sin);
        if (!a.k_cache) return;
        rotate_head(a, k, (const W*)a.k_norm, cos_sin);
        write_kv_head<T>(a.k_cache, a.v_cache, a.step->slot_mapping[row], kv_head, a.num_blocks, a.head_dim, k,
                         k + a.num_kv_heads * a.head_dim);
    }, a.num_kv_heads);
}
