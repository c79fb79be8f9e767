// Attention over a paged KV cache, for any mix of decodes and prompt chunks.
//
// A block holds 16 tokens (an engine's block may be several of them). K lies as [head_dim / p][16][p] and V as
// [16 / p][head_dim][p] (p values to a word), so that scores of 16 tokens, or 16 dimensions of the output, come from one
// load and a broadcast, with no horizontal sum.
// The context is cut at fixed positions into partitions. Each is attended by itself and merged into the running result
// in order, whoever computed it: a token's output does not depend on the batch, the chunk or the number of threads.

constexpr int PARTITION = 512;
constexpr int AHEAD = 6;  // blocks to fetch ahead where a context's blocks lie scattered, which hides them from the hardware
constexpr int PARTITION_BLOCKS = PARTITION / BLOCK;
constexpr int64_t MAX_ROOM = 1 << 24;  // floats for split contexts: a million tokens of 8 kv heads and head_dim 128
#if defined(ISA_AVX512BF16) || defined(ISA_AVX512)
constexpr int ROW_GROUP = 6;
constexpr int SIDE = 4;  // blocks, or 16-wide slices of head_dim, held in registers together
#else
constexpr int ROW_GROUP = 4;
constexpr int SIDE = 1;
#endif

template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

// One query tile: `tokens` consecutive tokens of one request, for all query heads of one kv head.
struct Tile {
    int64_t req, first_token, tokens;
    int64_t first_position;       // of first_token, in the sequence
    int64_t first_part, end_part;  // partitions that any of its rows attends to
    int64_t first_piece;           // of all tiles' partitions counted through, its first
    int64_t room_before;           // floats that earlier tiles' partials take for one kv head
};

// What a tile's rows have of the context so far: each row's largest score (in powers of two), its sum of weights, and
// its unnormalised weighted sum of V. It lies in one stretch of floats.
struct Partial {
    float* const max;  // [rows, up to whole vectors], -inf where nothing was attended to
    float* const sum;  // likewise
    float* const out;  // [rows, head_dim]

    Partial(float* at, int64_t rows) : max(at), sum(at + padded(rows)), out(at + 2 * padded(rows)) {}

    static int64_t size(int64_t rows, int64_t head_dim) { return 2 * padded(rows) + rows * head_dim; }
    static int64_t padded(int64_t rows) { return (rows + 15) / 16 * 16; }
};

template <class T>
struct Attention {
    const AttentionArgs& a;
    const Step& step;
    const int64_t group, words, block_words;  // query heads to a kv head; words to a head; words to a block and head
    const uint32_t per_entry;                 // blocks of 16 tokens to an entry of the block table
    const float score_scale;                  // makes a dot product an exponent of 2

    explicit Attention(const AttentionArgs& args)
        : a(args), step(*args.step), group(a.num_heads / a.num_kv_heads), words(a.head_dim / PER_WORD<T>),
          block_words(BLOCK * words), per_entry((uint32_t)(step.block_size / BLOCK)), score_scale((float)args.scale * 1.44269504f) {}

    const uint32_t* block(const void* cache, int64_t req, int64_t index, int64_t kv_head) const {
        const uint32_t entry = (uint32_t)index / per_entry, within = (uint32_t)index % per_entry;
        const int64_t id = (int64_t)step.block_table[step.table_rows[req] * step.block_table_stride + entry] * per_entry + within;
        return (const uint32_t*)cache + (kv_head * a.num_blocks + id) * block_words;
    }

    // Where what the row of `position` attends to ends, in a context of `length`.
    int64_t end_of(int64_t position, int64_t length) const {
        if (!a.bidirectional) return position + 1;
        return a.window ? smaller(position + a.window, length) : length;
    }

    // [first, end) of the context that the row of `position` attends to, relative to and within the partition.
    void range(int64_t position, int64_t length, int64_t part, int& first, int& end) const {
        const int64_t start = part * PARTITION, low = a.window ? position - a.window + 1 : 0;
        first = (int)clamp<int64_t>(low - start, 0, PARTITION);
        end = (int)clamp<int64_t>(end_of(position, length) - start, first, PARTITION);
    }

    // `ahead`: blocks to fetch meanwhile, or null.
    template <int ROWS, int BLOCKS>
    INLINE void score_group(const uint32_t* const* q, const uint32_t* const* k, const uint32_t* const* ahead,
                            float* const* scores) const {
        Vec sum[ROWS][BLOCKS];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int b = 0; b < BLOCKS; b++) sum[r][b] = splat(0.0f);
        for (int64_t w = 0; w < words; w++) {
            Words keys[BLOCKS];
            UNROLL for (int b = 0; b < BLOCKS; b++) {
                keys[b] = load_words(k[b] + w * BLOCK);
                if (ahead) __builtin_prefetch(ahead[b] + w * BLOCK, 0, 2);
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Words query = splat_word(q[r][w]);
                UNROLL for (int b = 0; b < BLOCKS; b++) sum[r][b] = dot<T>(sum[r][b], keys[b], query);
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int b = 0; b < BLOCKS; b++) store(scores[r] + b * BLOCK, sum[r][b]);
    }

    template <int ROWS>
    void score_rows(int rows, const uint32_t* const* q, const uint32_t* const* k, bool scattered, int blocks,
                    float* const* scores) const {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return score_rows<ROWS - 1>(rows, q, k, scattered, blocks, scores);
        // Few rows wait for memory, which is read fastest as one stream; many rows keep several blocks' sums in registers.
        constexpr int BLOCKS = ROWS < 4 ? 1 : SIDE;
        float* at[ROWS];
        for (int b = 0; b < blocks;) {
            for (int r = 0; r < ROWS; r++) at[r] = scores[r] + b * BLOCK;
            if (b + BLOCKS <= blocks) {
                score_group<ROWS, BLOCKS>(q, k + b, scattered ? k + b + AHEAD : nullptr, at);
                b += BLOCKS;
            } else {
                score_group<ROWS, 1>(q, k + b, scattered ? k + b + AHEAD : nullptr, at);
                b++;
            }
        }
    }

    // Scores, not yet scaled, in whole blocks [first, end).
    void cap_scores(float* scores, int first, int end) const {
        const Vec reach = splat((float)(a.softcap / a.scale)), factor = splat(2.0f * score_scale / (float)a.softcap);
        for (int i = first; i < end; i += BLOCK) {
            const Vec tanh = splat(1.0f) - times_sigmoid(splat(2.0f), load(scores + i) * factor);
            store(scores + i, reach * tanh);
        }
    }

    // The largest of the scores in [first, end), in powers of two; -inf where there are none. What shares a block with
    // them becomes -inf.
    float largest_score(float* scores, int first, int end) const {
        if (first >= end) return -INFINITY;
        auto hide_outside = [&](int block) {
            store(scores + block, keep_lanes(load(scores + block), first - block, end - block, -INFINITY));
        };
        const int first_block = first / BLOCK * BLOCK;
        if (first != first_block) hide_outside(first_block);
        if (end % BLOCK) hide_outside(end / BLOCK * BLOCK);
        Vec top = load(scores + first_block);
        for (int i = first_block + BLOCK; i < end; i += BLOCK) top = max(top, load(scores + i));
        return lane_max(top) * score_scale;
    }

    // Scores in [first, end) become weights 2^(score - largest), rounded to T into `weights`; all others in [0, padded)
    // become 0. Returns the sum of the weights before they are rounded.
    float weights_of(const float* scores, T* weights, int first, int end, int padded, float largest) const {
        const int first_block = first >= end ? padded : first / BLOCK * BLOCK, end_block = (end + BLOCK - 1) / BLOCK * BLOCK;
        for (int i = 0; i < first_block; i += BLOCK) store(weights + i, splat(0.0f));
        const Vec factor = splat(score_scale), shift = splat(-largest);
        Vec total = splat(0.0f);
        for (int i = first_block; i < end_block; i += BLOCK) {
            const Vec w = exp2(fma(load(scores + i), factor, shift));
            store(weights + i, w);
            total = total + w;
        }
        for (int i = larger(first_block, end_block); i < padded; i += BLOCK) store(weights + i, splat(0.0f));
        return lane_sum(total);
    }

    template <int ROWS, int SLICES>
    INLINE void weigh_group(const T* const* weights, const uint32_t* const* v, bool scattered, int first, int end, int64_t d,
                            float* const* out) const {
        Vec sum[ROWS][SLICES];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int s = 0; s < SLICES; s++) sum[r][s] = splat(0.0f);
        auto add = [&](const uint32_t* value, int token, Words keep) __attribute__((always_inline)) {
            Words values[SLICES];
            UNROLL for (int s = 0; s < SLICES; s++) values[s] = load_words(value + s * 16) & keep;
            UNROLL for (int r = 0; r < ROWS; r++) {
                uint32_t word;
                memcpy(&word, weights[r] + token, 4);
                const Words w = splat_word(word);
                UNROLL for (int s = 0; s < SLICES; s++) sum[r][s] = dot<T>(sum[r][s], values[s], w);
            }
        };
        constexpr int P = PER_WORD<T>;
        const int whole = end / P * P;
        for (int token = first / P * P; token < whole;) {
            const int block_end = smaller(whole, (token / BLOCK + 1) * BLOCK);
            const uint32_t* value = v[token / BLOCK] + token % BLOCK / P * a.head_dim + d;
            const uint32_t* ahead = v[token / BLOCK + AHEAD] + token % BLOCK / P * a.head_dim + d;
            for (; token < block_end; token += P, value += a.head_dim, ahead += a.head_dim) {
                if (scattered) UNROLL for (int s = 0; s < SLICES; s++) __builtin_prefetch(ahead + s * 16, 0, 2);
                add(value, token, splat_word(~0u));
            }
        }
        // The last token may share its word with a slot that was never written: whatever lies there must not count.
        if (whole < end) add(v[whole / BLOCK] + whole % BLOCK / P * a.head_dim + d, whole, splat_word(0xffffu));
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int s = 0; s < SLICES; s++) store(out[r] + d + s * 16, sum[r][s]);
    }

    template <int ROWS>
    void weigh_rows(int rows, const T* const* weights, const uint32_t* const* v, bool scattered, int first, int end, float* const* out) const {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return weigh_rows<ROWS - 1>(rows, weights, v, scattered, first, end, out);
        for (int64_t d = 0; d < a.head_dim;) {
            if (d + 16 * SIDE <= a.head_dim) {
                weigh_group<ROWS, SIDE>(weights, v, scattered, first, end, d, out);
                d += 16 * SIDE;
            } else {
                weigh_group<ROWS, 1>(weights, v, scattered, first, end, d, out);
                d += 16;
            }
        }
    }

    // Attends a tile to one partition.
    void attend_partition(const Tile& tile, int64_t kv_head, int64_t part, const Partial& to) const {
        alignas(64) static thread_local float scores[ROW_GROUP][PARTITION];
        alignas(64) static thread_local T weights[ROW_GROUP][PARTITION];
        const int rows = (int)(tile.tokens * group);
        int first = PARTITION, end = 0, row_first[MAX_ROWS], row_end[MAX_ROWS];
        for (int r = 0; r < rows; r++) {
            range(tile.first_position + r / group, step.seq_lens[tile.req], part, row_first[r], row_end[r]);
            if (row_first[r] < row_end[r]) {
                first = smaller(first, row_first[r]);
                end = larger(end, row_end[r]);
            }
        }
        const int first_block = first / BLOCK, end_block = (end + BLOCK - 1) / BLOCK;
        const uint32_t *k[PARTITION_BLOCKS + AHEAD], *v[PARTITION_BLOCKS + AHEAD];
        bool scattered = false;
        for (int b = first_block; b < end_block; b++) {
            k[b] = block(a.k_cache, tile.req, part * PARTITION_BLOCKS + b, kv_head);
            v[b] = block(a.v_cache, tile.req, part * PARTITION_BLOCKS + b, kv_head);
            scattered |= b > first_block && k[b] != k[b - 1] + block_words;
        }
        // What AHEAD looks at past the last block: after this partition's keys its values, after those the next one's keys.
        const int64_t context_blocks = (step.seq_lens[tile.req] + BLOCK - 1) / BLOCK;
        for (int i = 0; i < AHEAD; i++) {
            const int64_t next = (part + 1) * PARTITION_BLOCKS + i;
            k[end_block + i] = v[smaller(first_block + i, end_block - 1)];
            v[end_block + i] = next < context_blocks ? block(a.k_cache, tile.req, next, kv_head) : v[end_block - 1];
        }
        for (int r = 0; r < rows; r += ROW_GROUP) {
            const int count = smaller(ROW_GROUP, rows - r);
            const uint32_t* q[ROW_GROUP];
            float *score_rows_at[ROW_GROUP], *out_rows[ROW_GROUP];
            const T* weight_rows[ROW_GROUP];
            for (int i = 0; i < count; i++) {
                const int64_t token = tile.first_token + (r + i) / group, head = kv_head * group + (r + i) % group;
                q[i] = (const uint32_t*)((const T*)a.q + token * a.q_stride + head * a.head_dim);
                score_rows_at[i] = scores[i] + first_block * BLOCK;
                weight_rows[i] = weights[i];
                out_rows[i] = to.out + (r + i) * a.head_dim;
            }
            score_rows<ROW_GROUP>(count, q, k + first_block, scattered, end_block - first_block, score_rows_at);
            if (a.softcap != 0)
                for (int i = 0; i < count; i++) cap_scores(scores[i], first_block * BLOCK, end_block * BLOCK);
            for (int i = 0; i < count; i++) to.max[r + i] = largest_score(scores[i], row_first[r + i], row_end[r + i]);
            for (int i = 0; i < count; i++)
                to.sum[r + i] =
                    weights_of(scores[i], weights[i], row_first[r + i], row_end[r + i], end_block * BLOCK, to.max[r + i]);
            weigh_rows<ROW_GROUP>(count, weight_rows, v, scattered, first, end, out_rows);
        }
    }

    // Adds a partition's result to the running one. The order of partitions is always ascending.
    void merge(int64_t rows, const Partial& to, const Partial& part) const {
        alignas(64) float keep[MAX_ROWS], add[MAX_ROWS];
        for (int64_t r = 0; r < rows; r += 16) {
            const Vec old = load(to.max + r), other = load(part.max + r), top = max(max(old, other), splat(-1e30f));
            const Vec keeps = exp2(old - top), adds = exp2(other - top);
            store(to.max + r, top);
            store(to.sum + r, load(to.sum + r) * keeps + load(part.sum + r) * adds);
            store(keep + r, keeps);
            store(add + r, adds);
        }
        for (int64_t r = 0; r < rows; r++) {
            float *sums = to.out + r * a.head_dim, *part_sums = part.out + r * a.head_dim;
            const Vec keeps = splat(keep[r]), adds = splat(add[r]);
            for (int64_t d = 0; d < a.head_dim; d += 16) store(sums + d, load(sums + d) * keeps + load(part_sums + d) * adds);
        }
    }

    void finish(const Tile& tile, int64_t kv_head, const Partial& result) const {
        for (int r = 0; r < tile.tokens * group; r++) {
            T* out = (T*)a.out + (tile.first_token + r / group) * a.out_stride + (kv_head * group + r % group) * a.head_dim;
            const Vec inverse = splat(1.0f / result.sum[r]);
            for (int64_t d = 0; d < a.head_dim; d += 16) store(out + d, load(result.out + r * a.head_dim + d) * inverse);
        }
    }

    // Cuts the step's tokens into tiles, the same list in every thread; returns how many partitions they have in all.
    int64_t cut(Array<Tile>& tiles) const {
        const int64_t tile_tokens = larger<int64_t>(1, MAX_ROWS / group);
        int64_t pieces = 0, room = 0;
        for (int64_t req = 0; req < step.num_reqs; req++) {
            const int64_t begin = step.query_start_loc[req], end = step.query_start_loc[req + 1];
            for (int64_t token = begin; token < end; token += tile_tokens) {
                const int64_t tokens = smaller(tile_tokens, end - token), position = step.seq_lens[req] - (end - token);
                const int64_t low = a.window ? larger<int64_t>(0, position - a.window + 1) : 0;
                const int64_t last = end_of(position + tokens - 1, step.seq_lens[req]) - 1;
                const int64_t first_part = low / PARTITION, end_part = last / PARTITION + 1;
                tiles.append({req, token, tokens, position, first_part, end_part, pieces, room});
                room += (end_part - first_part) * Partial::size(tokens * group, a.head_dim);
                pieces += end_part - first_part;
            }
        }
        return pieces;
    }

    int64_t room_to_split(const Array<Tile>& tiles) const {
        const Tile& last = tiles.data[tiles.size - 1];
        const int64_t room = (last.end_part - last.first_part) * Partial::size(last.tokens * group, a.head_dim);
        return (last.room_before + room) * a.num_kv_heads;
    }

    // With fewer tiles than would keep every thread busy, partitions are shared out instead and merged afterwards.
    void attend_split(Team& team, const Array<Tile>& tiles, int64_t pieces) const {
        float* const floats = team.room(room_to_split(tiles));
        auto partial = [&](const Tile& tile, int64_t part, int64_t kv_head) {
            const int64_t rows = tile.tokens * group, place = (part - tile.first_part) * a.num_kv_heads + kv_head;
            return Partial(floats + tile.room_before * a.num_kv_heads + place * Partial::size(rows, a.head_dim), rows);
        };
        team.share(pieces * a.num_kv_heads, [&](int64_t item) {
            const int64_t piece = item / a.num_kv_heads, kv_head = item % a.num_kv_heads;
            const Tile* tile = tiles.data;
            while (piece - tile->first_piece >= tile->end_part - tile->first_part) tile++;
            const int64_t part = tile->first_part + piece - tile->first_piece;
            attend_partition(*tile, kv_head, part, partial(*tile, part, kv_head));
        });
        team.sync();
        team.share(tiles.size * a.num_kv_heads, [&](int64_t item) {
            const Tile& tile = tiles.data[item / a.num_kv_heads];
            const int64_t kv_head = item % a.num_kv_heads;
            const Partial result = partial(tile, tile.first_part, kv_head);
            for (int64_t part = tile.first_part + 1; part < tile.end_part; part++)
                merge(tile.tokens * group, result, partial(tile, part, kv_head));
            finish(tile, kv_head, result);
        });
    }

    void attend_tile(const Tile& tile, int64_t kv_head) const {
        static thread_local Array<float> buffer;
        const int64_t rows = tile.tokens * group, size = Partial::size(rows, a.head_dim);
        float* at = buffer.at_least(2 * size);
        const Partial result(at, rows), next(at + size, rows);
        attend_partition(tile, kv_head, tile.first_part, result);
        for (int64_t part = tile.first_part + 1; part < tile.end_part; part++) {
            attend_partition(tile, kv_head, part, next);
            merge(tile.tokens * group, result, next);
        }
        finish(tile, kv_head, result);
    }

    void run(Team& team) const {
        static thread_local Array<Tile> tiles;
        tiles.size = 0;
        const int64_t pieces = cut(tiles), count = tiles.size * a.num_kv_heads;
        const bool few = team.size > 1 && count < 4 * team.size && pieces > tiles.size;
        if (few && room_to_split(tiles) <= MAX_ROOM) return attend_split(team, tiles, pieces);
        team.share(count, [&](int64_t item) { attend_tile(tiles.data[item / a.num_kv_heads], item % a.num_kv_heads); });
    }
};

void attention(const AttentionArgs& a, Team& team) {
    if (a.dtype == BFLOAT16) Attention<bf16>(a).run(team);
    else Attention<float>(a).run(team);
}
