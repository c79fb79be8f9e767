// Weights of int8 with a scale to each column, and x as int8, quantised as it comes; GGUF's blocks are in quant_blocks.h.
//
// The dot product of the hardware takes unsigned by signed bytes, so weights are kept unsigned, `ZERO` above their value,
// and ZERO times the sum of x is taken off again.

// acc + the four products of unsigned bytes of w and signed bytes of x in each lane.
INLINE Ints dot_bytes(Ints acc, Words w, Words x) {
#if defined(ISA_AVX512VNNI) || defined(ISA_AVX512BF16)
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
