// Weights in GGUF's own blocks: a row's values by 32, or by 256 in super-blocks whose eight blocks have scales of their own.
// Packing changes the order and spreads 6-bit scales to bytes; dequantised values are the file's, to the bit.
//
// The words of a packed block, for each of 32 columns: value 4i + b is byte b of word i of eight. Those of 8 bits lie so;
// of others the low nibbles of words i and i + 4 share a word, and the higher bits follow in one word, or two.

template <int BITS>
INLINE void unpack(const uint8_t* packed, Words (&values)[8]) {
    auto word = [&](int i) { return load_words(packed + i * 4 * PANEL); };
    if constexpr (BITS == 8) {
        UNROLL for (int i = 0; i < 8; i++) values[i] = word(i);
        return;
    }
    const Words low = splat_word(0x0f0f0f0fu);
    UNROLL for (int i = 0; i < 4; i++) {
        const Words w = word(i);
        values[i] = w & low;
        values[i + 4] = shift_right(w, 4) & low;
    }
    if constexpr (BITS == 5) {
        const Words high = word(4), bit = splat_word(0x10101010u);
        UNROLL for (int i = 0; i < 8; i++)
            values[i] = values[i] | ((i < 4 ? shift_left(high, 4 - i) : shift_right(high, i - 4)) & bit);
    }
    if constexpr (BITS == 6) {
        const Words bits = splat_word(0x30303030u);
        UNROLL for (int half = 0; half < 2; half++) {
            const Words high = word(4 + half);
            UNROLL for (int i = 0; i < 4; i++)
                values[4 * half + i] =
                    values[4 * half + i] | ((i < 2 ? shift_left(high, 4 - 2 * i) : shift_right(high, 2 * i - 4)) & bits);
        }
    }
}

// 32 values of one column into its words of a packed block, of fewer than 8 bits.
template <int BITS>
INLINE void pack_values(const uint8_t* values, uint8_t* packed, int column) {
    uint32_t words[6] = {};
    UNROLL for (int i = 0; i < 8; i++) {
        uint32_t four;
        memcpy(&four, values + 4 * i, 4);
        words[i % 4] |= (four & 0x0f0f0f0fu) << i / 4 * 4;
        if (BITS == 5) words[4] |= (four >> 4 & 0x01010101u) << i;
        if (BITS == 6) words[4 + i / 4] |= (four >> 4 & 0x03030303u) << i % 4 * 2;
    }
    UNROLL for (int i = 0; i < BITS; i++) memcpy(packed + (i * PANEL + column) * 4, words + i, 4);
}

// Of 16 columns, value v of the 32.
template <int BITS>
INLINE void store_values(const uint8_t* packed, uint8_t (&values)[GROUP][16]) {
    Words words[8];
    unpack<BITS>(packed, words);
    for (int i = 0; i < 8; i++) {
        uint8_t bytes[64];
        memcpy(bytes, words + i, 64);
        for (int j = 0; j < 64; j++) values[4 * i + j % 4][j / 4] = bytes[j];
    }
}

// Sums of products of words first..first + count - 1, of values of BITS bits, with x, from `acc` on.
template <int BITS>
INLINE Ints dot_words(Ints acc, const Words (&values)[8], int first, int count, const int8_t* x) {
#if defined(ISA_AVX2) || defined(ISA_AVX512)
    constexpr int FIT = 32767 / (2 * 127 * ((1 << BITS) - 1));  // words whose products add up in 16 bits
    if constexpr (FIT > 0) {
        UNROLL for (int i = first; i < first + count; i += FIT) {
            UNROLL for (int p = 0; p < PARTS; p++) {
                vshort sums{};
                UNROLL for (int j = i; j < i + FIT; j++) sums += multiply_add_bytes(values[j].part[p], broadcast_word(x + 4 * j).part[p]);
                acc.part[p] += multiply_add_pairs(sums, vshort{} + 1);
            }
        }
        return acc;
    }
#endif
    UNROLL for (int i = first; i < first + count; i++) acc = dot_bytes(acc, values[i], broadcast_word(x + 4 * i));
    return acc;
}

// A half-precision scale to 32 values, and a minimum too where there is one. Packed, per 32 columns: scales, minima, words.
template <int BITS, bool HAS_MINIMUM>
struct BlockWeight {
    static constexpr int TILE_ROWS = MANY_REGISTERS ? 6 : 2;
    static constexpr int ZERO = HAS_MINIMUM ? 0 : 1 << (BITS - 1);
    static constexpr int HEAD = HAS_MINIMUM ? 4 : 2;        // bytes before the values of a block in the file
    static constexpr int BLOCK_BYTES = HEAD + 4 * BITS;     // in the file
    static constexpr int PACKED_BYTES = PANEL * BLOCK_BYTES;  // of 32 columns

    static int64_t panel_bytes(int64_t k) { return k / GROUP * PACKED_BYTES; }

    template <int ROWS>
    INLINE static void multiply(const GemmArgs& a, int64_t row, int64_t panel, int64_t ahead, Vec (&sum)[ROWS][2]) {
        const int64_t blocks = a.k / GROUP;
        const int8_t* x = (const int8_t*)a.x + row * a.x_stride;
        const uint8_t* packed = (const uint8_t*)a.weight + panel * panel_bytes(a.k);
        for (int64_t block = 0; block < blocks; block++, packed += PACKED_BYTES) {
            if (ROWS > 4) UNROLL for (int at = 0; at < PACKED_BYTES; at += 128) fetch<ROWS>(packed + at, ahead);
            UNROLL for (int half = 0; half < 2; half++) {
                Words values[8];
                unpack<BITS>(packed + HEAD * PANEL + 64 * half, values);
                const Vec scale = load_half(packed + 32 * half);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const int64_t at = (row + r) * blocks + block;
                    const Ints acc =
                        dot_words<BITS>(splat_int(-ZERO * a.x_sums[at]), values, 0, 8, x + r * a.x_stride + block * GROUP);
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
                pack_block(from + HEAD, out + HEAD * PANEL, j);
            }
    }

    // A block in the file: fifth bits, then bytes, or nibbles as they are packed: value i low and i + 16 high in byte i.
    INLINE static void pack_block(const uint8_t* from, uint8_t* packed, int column) {
        constexpr int FIFTHS = BITS == 5 ? 4 : 0;
        auto put = [&](int i, uint32_t word) { memcpy(packed + (i * PANEL + column) * 4, &word, 4); };
        UNROLL for (int i = 0; i < (BITS == 8 ? 8 : 4); i++) {
            uint32_t word;
            memcpy(&word, from + FIFTHS + 4 * i, 4);
            put(i, BITS == 8 ? word ^ 0x80808080u : word);
        }
        if constexpr (BITS == 5) {
            uint32_t bits, word = 0;
            memcpy(&bits, from, 4);
            // The product puts four neighbouring bits into the lowest of four bytes.
            UNROLL for (int i = 0; i < 8; i++) word |= ((bits >> 4 * i & 15) * 0x00204081u & 0x01010101u) << i;
            put(4, word);
        }
    }

    // Row `id` of the matrix, [k] floats.
    static void dequantize(const uint8_t* weight, int64_t k, int64_t id, float* to) {
        const int half = id % PANEL / 16, lane = id % 16;
        const uint8_t* packed = weight + id / PANEL * panel_bytes(k);
        for (int64_t block = 0; block < k / GROUP; block++, packed += PACKED_BYTES) {
            uint8_t values[GROUP][16];
            store_values<BITS>(packed + HEAD * PANEL + 64 * half, values);
            float scales[16], minima[16] = {};
            store(scales, load_half(packed + 32 * half));
            if (HAS_MINIMUM) store(minima, load_half(packed + 2 * PANEL + 32 * half));
            for (int v = 0; v < GROUP; v++)
                to[block * GROUP + v] = (float)(values[v][lane] - ZERO) * scales[lane] + minima[lane];
        }
    }
};

constexpr int SUPER_BLOCK = 256;

// 4 and 5 bits: a scale and a minimum of 6 bits to 32 values, in units of the super-block's two halves. 6 bits: a signed
// scale of 8 bits to 16 values, in units of its one, and values above -32. Packed, per 32 columns: units, then per 32
// values two bytes a column (scales, minima; or scales of the first 16, of the others), words.
template <int BITS>
struct SuperBlockWeight {
    static constexpr int TILE_ROWS = MANY_REGISTERS ? 6 : 2;
    static constexpr bool HAS_MINIMUM = BITS < 6;
    static constexpr int FILE_BYTES = HAS_MINIMUM ? 16 + SUPER_BLOCK * BITS / 8 : 210;
    static constexpr int HEAD = HAS_MINIMUM ? 4 * PANEL : 2 * PANEL;
    static constexpr int GROUP_BYTES = PANEL * (2 + 4 * BITS);
    static constexpr int GROUPS = SUPER_BLOCK / GROUP;
    static constexpr int PACKED_BYTES = HEAD + GROUPS * GROUP_BYTES;
    typedef typename std::conditional<HAS_MINIMUM, uint8_t, int8_t>::type Scale;

    static int64_t panel_bytes(int64_t k) { return k / SUPER_BLOCK * PACKED_BYTES; }

    template <int ROWS>
    INLINE static void multiply(const GemmArgs& a, int64_t row, int64_t panel, int64_t ahead, Vec (&sum)[ROWS][2]) {
        const int8_t* x = (const int8_t*)a.x + row * a.x_stride;
        const uint8_t* units = (const uint8_t*)a.weight + panel * panel_bytes(a.k);
        const int64_t groups = a.k / GROUP;
        for (int64_t group = 0; group < groups; units += PACKED_BYTES)
            for (const uint8_t *packed = units + HEAD, *end = units + PACKED_BYTES; packed < end; packed += GROUP_BYTES, group++) {
                if (ROWS > 4) UNROLL for (int at = 0; at < GROUP_BYTES; at += 128) fetch<ROWS>(packed + at, ahead);
                UNROLL for (int half = 0; half < 2; half++) {
                    Words values[8];
                    unpack<BITS>(packed + 2 * PANEL + 64 * half, values);
                    const Vec unit = load_half(units + 32 * half);
                    const Vec first = unit * load_bytes<Scale>(packed + 16 * half);
                    const Vec other = (HAS_MINIMUM ? load_half(units + 2 * PANEL + 32 * half) : unit) *
                                      load_bytes<Scale>(packed + PANEL + 16 * half);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const int8_t* of_row = x + r * a.x_stride + group * GROUP;
                        Vec& total = sum[r][half];
                        if constexpr (HAS_MINIMUM) {
                            const int64_t at = (row + r) * groups + group;
                            const Ints acc = dot_words<BITS>(splat_int(0), values, 0, 8, of_row);
                            total = fma(to_floats(acc), first * splat(a.x_scales[at]), total);
                            total = fma(other, splat(-a.x_scales[at] * (float)a.x_sums[at]), total);
                        } else {
                            const int64_t at = 2 * ((row + r) * groups + group);
                            const Ints low = dot_words<BITS>(splat_int(-32 * a.x_sums[at]), values, 0, 4, of_row);
                            const Ints high = dot_words<BITS>(splat_int(-32 * a.x_sums[at + 1]), values, 4, 4, of_row);
                            total = fma(to_floats(low), first * splat(a.x_scales[at]), total);
                            total = fma(to_floats(high), other * splat(a.x_scales[at + 1]), total);
                        }
                    }
                }
            }
    }

    static void pack_panel(const PackArgs& a, int64_t panel, void* to) {
        const int64_t blocks = a.k / SUPER_BLOCK;
        uint8_t* out = (uint8_t*)to;
        for (int64_t block = 0; block < blocks; block++, out += PACKED_BYTES)
            for (int j = 0; j < PANEL; j++) {
                const int64_t column = panel * PANEL + j;
                uint8_t from[FILE_BYTES] = {};
                if (column < a.n) memcpy(from, (const uint8_t*)a.weight + (column * blocks + block) * FILE_BYTES, FILE_BYTES);
                memcpy(out + 2 * j, from + (HAS_MINIMUM ? 0 : 208), 2);
                if (HAS_MINIMUM) memcpy(out + 2 * PANEL + 2 * j, from + 2, 2);
                for (int group = 0; group < GROUPS; group++) {
                    uint8_t values[GROUP], *packed = out + HEAD + group * GROUP_BYTES;
                    read(from, group, values, packed[j], packed[PANEL + j]);
                    pack_values<BITS>(values, packed + 2 * PANEL, j);
                }
            }
    }

    // Of 32 values of a super-block in the file, the unsigned values and the two bytes of scales.
    static void read(const uint8_t* from, int group, uint8_t (&values)[GROUP], uint8_t& first, uint8_t& other) {
        if (HAS_MINIMUM) {
            const uint8_t *scale = from + 4 + group % 4, *minimum = scale + 4, mixed = scale[8];
            first = group < 4 ? *scale & 63 : (mixed & 15) | (*scale >> 2 & 0x30);
            other = group < 4 ? *minimum & 63 : (mixed >> 4) | (*minimum >> 2 & 0x30);
            const uint8_t *high = from + 16, *low = from + (BITS == 5 ? 48 : 16) + group / 2 * 32;
            for (int i = 0; i < GROUP; i++) {
                values[i] = group % 2 ? low[i] >> 4 : low[i] & 15;
                if (BITS == 5) values[i] |= (high[i] >> group & 1) << 4;
            }
        } else {
            first = from[192 + 2 * group];
            other = from[193 + 2 * group];
            const int part = group % 4;  // of 128 values: four times 32, two to a byte of nibbles, four to one of high bits
            const uint8_t *low = from + group / 4 * 64 + part % 2 * 32, *high = from + 128 + group / 4 * 32;
            for (int i = 0; i < GROUP; i++)
                values[i] = (part < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * part & 3) << 4;
        }
    }

    // Row `id` of the matrix, [k] floats.
    static void dequantize(const uint8_t* weight, int64_t k, int64_t id, float* to) {
        const int half = id % PANEL / 16, lane = id % 16;
        const uint8_t* units = weight + id / PANEL * panel_bytes(k);
        for (int64_t block = 0; block < k / SUPER_BLOCK; block++, units += PACKED_BYTES) {
            float unit[16], minimum_unit[16] = {};
            store(unit, load_half(units + 32 * half));
            if (HAS_MINIMUM) store(minimum_unit, load_half(units + 2 * PANEL + 32 * half));
            for (int group = 0; group < GROUPS; group++) {
                const uint8_t *packed = units + HEAD + group * GROUP_BYTES, *scales = packed + 16 * half + lane;
                uint8_t values[GROUP][16];
                store_values<BITS>(packed + 2 * PANEL + 64 * half, values);
                const float minimum = minimum_unit[lane] * (float)scales[PANEL];
                for (int v = 0; v < GROUP; v++) {
                    const float scale = unit[lane] * (float)(Scale)scales[HAS_MINIMUM || v < 16 ? 0 : PANEL];
                    const int value = values[v][lane] - (HAS_MINIMUM ? 0 : 32);
                    *to++ = HAS_MINIMUM ? (float)value * scale - minimum : (float)value * scale;
                }
            }
        }
    }
};

template <class Weight>
void embed_blocks(const EmbedBlocksArgs& a, Team& team) {
    team.share_rows(a.rows, [&](int64_t row) {
        static thread_local Array<float> values;
        float* from = values.at_least(a.size);
        Weight::dequantize((const uint8_t*)a.table, a.size, a.ids[row], from);
        const Vec scale = splat((float)a.scale);
        for (int64_t i = 0; i < a.size; i += 16) {
            if (a.dtype == FLOAT32)
                store((float*)a.out + row * a.size + i, load(from + i) * scale);
            else
                store((bf16*)a.out + row * a.size + i, rounded<bf16>(load(from + i)) * scale);
        }
    });
}
