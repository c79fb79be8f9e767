// Quantised weights: int8 with a scale to each column, and GGUF's blocks of 32 values. x is int8, quantised as it comes.
//
// The dot product of the hardware takes unsigned by signed bytes, so weights are kept unsigned, `ZERO` above their value,
// and ZERO times the sum of x is taken off again. Blocks keep the file's scales and bits; only their order changes.

// acc + the four products of unsigned bytes of w and signed bytes of x in each lane.
INLINE Ints dot_bytes(Ints acc, Words w, Words x) {
#ifdef ISA_AVX512BF16
    acc.part[0] = (vint)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)w.part[0], (__m512i)x.part[0]);
#else
    EACH_PART {
        const vword even = w.part[i] & 0x00ff00ffu, odd = w.part[i] >> 8 & 0x00ff00ffu;
        const vshort x_even = (vshort)x.part[i] << 8 >> 8, x_odd = (vshort)x.part[i] >> 8;
        acc.part[i] += multiply_add_pairs((vshort)even, x_even) + multiply_add_pairs((vshort)odd, x_odd);
    }
#endif
    return acc;
}

// Packed: [k / 4][32][4] bytes, 128 above the value.
struct Int8Weight {
    static constexpr int TILE_ROWS = MANY_REGISTERS ? 7 : 4;  // 7: integer and float sums all stay in registers

    static int64_t panel_bytes(int64_t k) { return k * PANEL; }

    template <int ROWS>
    INLINE static void multiply(const GemmArgs& a, int64_t row, int64_t panel, int64_t ahead, Vec (&sum)[ROWS][2]) {
        const int8_t* x = (const int8_t*)a.x + row * a.x_stride;
        const uint8_t* weight = (const uint8_t*)a.weight + panel * PANEL * a.k;
        const int64_t blocks = a.k / a.x_block;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t at = row * blocks + block, first = block * a.x_block;
            Ints acc[ROWS][2];
            UNROLL for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = splat_int(0);
            for (int64_t i = first; i < first + a.x_block; i += 4) {
                const Words low = load_words(weight + i * PANEL), high = load_words(weight + i * PANEL + 64);
                fetch<ROWS>(weight + i * PANEL, ahead);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Words xs = broadcast_word(x + r * a.x_stride + i);
                    acc[r][0] = dot_bytes(acc[r][0], low, xs);
                    acc[r][1] = dot_bytes(acc[r][1], high, xs);
                }
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Vec scale = splat(a.x_scales[at + r * blocks]);
                sum[r][0] = fma(to_floats(acc[r][0]), scale, sum[r][0]);
                sum[r][1] = fma(to_floats(acc[r][1]), scale, sum[r][1]);
            }
        }
        const Vec low = load(a.weight_scales + panel * PANEL), high = load(a.weight_scales + panel * PANEL + 16);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Vec excess = splat(128.0f * a.x_totals[row + r]);
            sum[r][0] = (sum[r][0] - excess) * low;
            sum[r][1] = (sum[r][1] - excess) * high;
        }
    }

    static void pack_panel(const PackArgs& a, int64_t panel, void* to) {
        const int8_t* weight = (const int8_t*)a.weight;
        uint8_t* out = (uint8_t*)to;
        for (int64_t i = 0; i < a.k; i++)
            for (int64_t j = 0; j < PANEL; j++) {
                const int64_t column = panel * PANEL + j;
                out[(i / 4 * PANEL + j) * 4 + i % 4] = 128 + (column < a.n ? weight[column * a.k + i] : 0);
            }
    }
};

// GGUF's formats in the file: per 32 values a half-precision scale, Q4_1 a minimum too, then the values. 4-bit blocks
// hold value i in the low and i + 16 in the high half of byte i. Packed, per 32 columns: scales, minima, words of values.
template <int BITS, bool HAS_MINIMUM>
struct BlockWeight {
    static constexpr int TILE_ROWS = MANY_REGISTERS ? 6 : 2;
    static constexpr int ZERO = HAS_MINIMUM ? 0 : 1 << (BITS - 1);
    static constexpr int HEAD = HAS_MINIMUM ? 4 : 2;                // bytes before the values of a block in the file
    static constexpr int VALUE_WORDS = GROUP * BITS / 32;           // of one column
    static constexpr int BLOCK_BYTES = HEAD + 4 * VALUE_WORDS;      // in the file
    static constexpr int PACKED_BYTES = PANEL * BLOCK_BYTES;        // of 32 columns

    static int64_t panel_bytes(int64_t k) { return k / GROUP * PACKED_BYTES; }

    // The eight words of values of columns first..first+15 of a packed block.
    INLINE static void unpack(const uint8_t* packed, int first, Words (&values)[8]) {
        const uint8_t* words = packed + HEAD * PANEL + 4 * first;
        UNROLL for (int i = 0; i < VALUE_WORDS; i++) {
            const Words w = load_words(words + i * 4 * PANEL);
            if constexpr (BITS == 8) {
                values[i] = w;
            } else {
                values[i] = w & splat_word(0x0f0f0f0fu);
                values[i + 4] = shift_right(w, 4) & splat_word(0x0f0f0f0fu);
            }
        }
    }

    template <int ROWS>
    INLINE static void multiply(const GemmArgs& a, int64_t row, int64_t panel, int64_t ahead, Vec (&sum)[ROWS][2]) {
        const int64_t blocks = a.k / GROUP;
        const int8_t* x = (const int8_t*)a.x + row * a.x_stride;
        const uint8_t* packed = (const uint8_t*)a.weight + panel * panel_bytes(a.k);
        for (int64_t block = 0; block < blocks; block++, packed += PACKED_BYTES) {
            if (ROWS > 4) UNROLL for (int at = 0; at < PACKED_BYTES; at += 128) fetch<ROWS>(packed + at, ahead);
            UNROLL for (int half = 0; half < 2; half++) {
                Words values[8];
                unpack(packed, 16 * half, values);
                const Vec scale = load_half(packed + 32 * half);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const int64_t at = (row + r) * blocks + block;
                    Ints acc = splat_int(-ZERO * a.x_sums[at]);
                    UNROLL for (int i = 0; i < 8; i++)
                        acc = dot_bytes(acc, values[i], broadcast_word(x + r * a.x_stride + block * GROUP + 4 * i));
                    const Vec x_scale = splat(a.x_scales[at]);
                    sum[r][half] = fma(to_floats(acc), scale * x_scale, sum[r][half]);
                    if constexpr (HAS_MINIMUM) {
                        const Vec minimum = load_half(packed + 2 * PANEL + 32 * half);
                        sum[r][half] = fma(minimum, splat(a.x_scales[at] * (float)a.x_sums[at]), sum[r][half]);
                    }
                }
            }
        }
    }

    static void pack_panel(const PackArgs& a, int64_t panel, void* to) {
        const int64_t blocks = a.k / GROUP;
        uint8_t* out = (uint8_t*)to;
        for (int64_t block = 0; block < blocks; block++, out += PACKED_BYTES)
            for (int j = 0; j < PANEL; j++) {
                const int64_t column = panel * PANEL + j;
                uint8_t from[BLOCK_BYTES] = {};
                if (column < a.n) memcpy(from, (const uint8_t*)a.weight + (column * blocks + block) * BLOCK_BYTES, BLOCK_BYTES);
                for (int i = 0; i < HEAD / 2; i++) memcpy(out + i * 2 * PANEL + 2 * j, from + 2 * i, 2);
                for (int i = 0; i < VALUE_WORDS; i++) {
                    uint32_t word;
                    memcpy(&word, from + HEAD + 4 * i, 4);
                    if (BITS == 8) word ^= 0x80808080u;
                    memcpy(out + HEAD * PANEL + (i * PANEL + j) * 4, &word, 4);
                }
            }
    }
};

// Symmetric: the largest magnitude of a block becomes 127.
void quantize(const QuantizeArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        const bf16* x = (const bf16*)a.x + row * a.x_stride;
        int8_t* out = (int8_t*)a.out + row * a.k;
        const int64_t blocks = a.k / a.block;
        float row_total = 0.0f;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * a.block, end = first + a.block;
            Vec top = splat(0.0f);
            for (int64_t i = first; i < end; i += 16) {
                const Vec v = load(x + i);
                top = max(top, max(v, splat(0.0f) - v));
            }
            const float largest = lane_max(top);
            const Vec inverse = splat(largest > 0.0f ? 127.0f / largest : 0.0f);
            Ints total = splat_int(0);
            for (int64_t i = first; i < end; i += 16) total = total + store_bytes(out + i, nearest(load(x + i) * inverse));
            const float scale = largest / 127.0f;
            const int32_t sum = lane_sum(total);
            a.scales[row * blocks + block] = scale;
            a.sums[row * blocks + block] = sum;
            row_total += scale * (float)sum;
        }
        a.totals[row] = row_total;
    });
}
