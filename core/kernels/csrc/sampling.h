// From logits to tokens: the largest entry, or a draw after min-p, top-k and top-p; and log-probabilities with ranks.
//
// A row is one thread's, and sums are taken in one order, so that a row's result depends on nothing but the row. Entries
// are ordered by value and then by lower id. What is kept of a row is always a beginning of that order: a `Cut`. Cuts are
// found by bisection over the order of floats, which needs no sorting and no second look at ties.

constexpr int64_t GROUP_SIZE = 512;  // entries to a partial sum, and to sixteen maxima

// Bit j: lane j of x is not below lane j of bound.
INLINE uint32_t lanes_at_least(Vec x, Vec bound) {
#if LANES_16
    return _mm512_cmp_ps_mask((__m512)x.part[0], (__m512)bound.part[0], _CMP_GE_OQ);
#else
    uint32_t bits = 0;
    EACH_PART {
        const vint inside = x.part[i] >= bound.part[i];
#if defined(ISA_AVX2)
        bits |= (uint32_t)_mm256_movemask_ps((__m256)inside) << (i * LANES);
#elif defined(__x86_64__)
        bits |= (uint32_t)_mm_movemask_ps((__m128)inside) << (i * LANES);
#else
        for (int j = 0; j < LANES; j++) bits |= (uint32_t)(inside[j] & 1) << (i * LANES + j);
#endif
    }
    return bits;
#endif
}

// Lane by lane: x where value is not below bound, else 0.
INLINE Vec where_at_least(Vec value, Vec bound, Vec x) {
    EACH_PART x.part[i] = value.part[i] >= bound.part[i] ? x.part[i] : vfloat{};
    return x;
}

// Lane j: that of x where bit j is set, else -inf.
INLINE Vec lanes_of(uint32_t bits, Vec x) {
#if LANES_16
    x.part[0] = (vfloat)_mm512_mask_blend_ps((__mmask16)bits, _mm512_set1_ps(-INFINITY), (__m512)x.part[0]);
#else
    alignas(64) static constexpr uint32_t LANE[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                                      256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    const Words lane = load_words(LANE);
    EACH_PART x.part[i] = (lane.part[i] & bits) != 0 ? x.part[i] : splat(-INFINITY).part[i];
#endif
    return x;
}

// Sixteen sums in double precision of values that come in single.
struct Doubles {
    double lane[16] = {};

    INLINE void add(Vec x) {
        alignas(64) float values[16];
        store(values, x);
        for (int j = 0; j < 16; j++) lane[j] += values[j];
    }

    double sum() const {
        double sums[16];
        memcpy(sums, lane, sizeof sums);
        for (int width = 8; width; width /= 2)
            for (int j = 0; j < width; j++) sums[j] += sums[j + width];
        return sums[0];
    }
};

// A float's place in the order of floats, and the float at a place.
INLINE int32_t place_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

INLINE float float_at(int32_t place) {
    const int32_t bits = place ^ ((place >> 31) & 0x7fffffff);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float next_above(float x) { return float_at(place_of(x + 0.0f) + 1); }  // the two zeros are one
INLINE float next_below(float x) { return -next_above(-x); }

// The last float of low..high for which the test holds; it holds for low, and from some float on it no longer does.
template <class Test>
INLINE float last_float(float low, float high, Test holds) {
    int64_t held = place_of(low), failed = (int64_t)place_of(high) + 1;
    while (failed - held > 1) {
        const int64_t middle = held + (failed - held) / 2;
        (holds(float_at((int32_t)middle)) ? held : failed) = middle;
    }
    return float_at((int32_t)held);
}

// The entries above `value`, and those equal to it up to the id `last`.
struct Cut {
    float value = -INFINITY;
    int64_t last = INT64_MAX;

    // The bound that entries i..i+15 must reach.
    INLINE Vec bounds(int64_t i) const {
        if (i + 15 <= last) return splat(value);
        return keep_lanes(splat(value), 0, (int)larger<int64_t>(last + 1 - i, 0), next_above(value));
    }
};

// Some of a row's entries, in the order of their ids. Without weights each weighs 1.
struct Entries {
    float* values;  // up to whole vectors behind the end: -inf
    float* weights;
    int32_t* ids;
    int64_t count;

    double weight_from(float value) const {
        const Vec bound = splat(value);
        Doubles total;
        for (int64_t start = 0; start < count; start += GROUP_SIZE) {
            const int64_t end = smaller(count, start + GROUP_SIZE);
            Vec sum = splat(0.0f);
            for (int64_t i = start; i < end; i += 16)
                sum = sum + where_at_least(load(values + i), bound, weights ? load(weights + i) : splat(1.0f));
            total.add(sum);
        }
        return total.sum();
    }

    // The cut of a top-p prefix: the fewest entries, taken in the order, whose weight and `before` (that of all entries
    // above these) come to `wanted`. The last of them has a value within low..high.
    Cut cut_at(double before, double wanted, float low, float high) const {
        Cut cut;
        cut.value = last_float(low, high, [&](float v) { return before + weight_from(v) >= wanted; });
        double weight = before + weight_from(next_above(cut.value));
        for (int64_t i = 0; i < count; i++) {
            if (values[i] != cut.value) continue;
            cut.last = ids[i];
            weight += weights ? weights[i] : 1.0;
            if (weight >= wanted) break;
        }
        return cut;
    }
};

// One row of logits, with what a first pass over it finds, and room to work in.
class LogitsRow {
public:
    // `x` is read as long as this lives. Entries whose bit in `allowed` (or null) is not set count as -inf.
    LogitsRow(const float* x, int64_t n, const uint32_t* allowed = nullptr)
        : n(n), x_(allowed ? masked(x, n, allowed) : x), groups_((n + GROUP_SIZE - 1) / GROUP_SIZE) {
        static thread_local Array<float> floats;
        static thread_local Array<int32_t> ids;
        static thread_local Array<double> doubles;
        const int64_t size = groups_ * GROUP_SIZE;
        maxima_ = floats.at_least(3 * size + 16 * groups_);
        weights_ = maxima_ + 16 * groups_;
        gathered_ = {weights_ + size, weights_ + 2 * size, ids.at_least(size), 0};
        sums_ = doubles.at_least(groups_);
        for (int64_t i = 0; i < 16; i++) tail_[i] = n / 16 * 16 + i < n ? x_[n / 16 * 16 + i] : -INFINITY;
        scan();
    }

    const int64_t n;
    float best;      // NaN where any entry is
    int64_t best_id;  // the first of the largest, or the first NaN

    // Entries i..i+15, i a multiple of 16; behind the end they are -inf.
    INLINE Vec at(int64_t i) const { return load(i + 16 <= n ? x_ + i : tail_); }

    INLINE float operator[](int64_t i) const { return x_[i]; }

    const float* values() const { return x_; }

    // How many entries are not below the value.
    int64_t count_from(float value) const { return smaller(n, mass_from<false>(value).count); }

    // The cut that keeps the k largest entries, k <= n.
    Cut largest(int64_t k) {
        const Entries maxima{maxima_, nullptr, nullptr, 16 * groups_};
        float low = -INFINITY;
        if (k <= maxima.count) low = last_float(low, best, [&](float v) { return maxima.weight_from(v) >= (double)k; });
        gather(low, INFINITY, false);
        return gathered_.cut_at(0.0, (double)k, low, best);
    }

    // The ids of the entries that `largest(k)` just kept, largest first; ids: [k].
    void sorted(const Cut& cut, int64_t k, int32_t* ids) {
        int64_t count = 0;
        for (int64_t i = 0; i < gathered_.count && count < k; i++) {
            const float value = gathered_.values[i];
            if (value > cut.value || (value == cut.value && gathered_.ids[i] <= cut.last)) ids[count++] = gathered_.ids[i];
        }
        for (; count < k; count++) ids[count] = 0;  // only where a NaN is among the entries
        merge_sort(ids, gathered_.ids, k);
    }

    // Weighs the entries that the cut keeps: exp((x - best) / temperature). Returns the sum; the other weights are 0.
    double weigh(const Cut& cut, float temperature) {
        const Vec top = splat(best), heat = splat(temperature), log2_e = splat(1.44269504f);
        return each_group(cut, [&](int64_t i, Vec bound) {
            return where_at_least(at(i), bound, exp2((at(i) - top) / heat * log2_e));
        });
    }

    // Sets the weights behind the cut to 0. Returns the sum of the others.
    double keep(const Cut& cut) {
        return each_group(cut, [&](int64_t i, Vec bound) { return where_at_least(at(i), bound, load(weights_ + i)); });
    }

    // Top-p: the cut of the smallest prefix of the order, within `kept`, whose weight comes to `wanted` (p times `total`,
    // which is what `weigh` found).
    Cut nucleus(double wanted, double total, const Cut& kept, float temperature) {
        // All entries below this share of the likeliest weigh less together than what may be missing.
        const float share = larger(logf((float)((total - wanted) / (double)n)) - 0.1f, -90.0f);
        float low = larger(larger(kept.value, next_below(best + share * temperature)), -FLT_MAX);
        float high = next_above(best);
        Mass inside = mass_from<true>(low), above{};
        if (inside.weight < wanted) return kept;
        while (inside.count - above.count > FEW) {
            const float middle = low / 2 + high / 2;
            if (middle <= low || middle >= high) break;
            const Mass mass = mass_from<true>(middle);
            if (mass.weight >= wanted) {
                low = middle;
                inside = mass;
            } else {
                high = middle;
                above = mass;
            }
        }
        gather(low, high, true);
        return gathered_.cut_at(above.weight, wanted, low, next_below(high));
    }

    // The first entry, in the order of ids, at which the sum of weights exceeds `target`; the last that weighs anything
    // where rounding put the target at or past the total.
    int64_t invert(double target) const {
        double before = 0.0, start = 0.0;
        int64_t group = 0, id = best_id;
        for (int64_t g = 0; g < groups_; g++) {
            if (!(sums_[g] > 0.0)) continue;
            group = g;
            start = before;
            before += sums_[g];
            if (before > target) break;
        }
        for (int64_t i = group * GROUP_SIZE; i < smaller(n, (group + 1) * GROUP_SIZE); i++) {
            if (!(weights_[i] > 0.0f)) continue;
            id = i;
            start += weights_[i];
            if (start > target) break;
        }
        return id;
    }

private:
    static constexpr int64_t FEW = 1024;  // so many entries are gathered before their cut is sought

    struct Mass {
        double weight = 0.0;
        int64_t count = 0;
    };

    static const float* masked(const float* x, int64_t n, const uint32_t* allowed) {
        static thread_local Array<float> buffer;
        float* out = buffer.at_least(n);
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) store(out + i, lanes_of(allowed[i / 32] >> i % 32, load(x + i)));
        for (; i < n; i++) out[i] = allowed[i / 32] >> i % 32 & 1 ? x[i] : -INFINITY;
        return out;
    }

    void scan() {
        Vec top = splat(-INFINITY), odd = splat(0.0f);
        for (int64_t g = 0; g < groups_; g++) {
            Vec maxima = splat(-INFINITY);
            for (int64_t i = g * GROUP_SIZE; i < smaller(n, (g + 1) * GROUP_SIZE); i += 16) {
                const Vec x = at(i);
                maxima = max(x, maxima);
                for (int p = 0; p < PARTS; p++) odd.part[p] = x.part[p] == x.part[p] ? odd.part[p] : x.part[p];
            }
            store(maxima_ + 16 * g, maxima);
            top = max(maxima, top);
        }
        best = lane_max(top);
        const float sum = lane_sum(odd);
        if (sum != sum) best = sum;
        best_id = first_of_best();
    }

    int64_t first_of_best() const {
        const bool finite = best == best;
        for (int64_t g = 0; g < groups_; g++) {
            if (finite && !lanes_at_least(load(maxima_ + 16 * g), splat(best))) continue;
            for (int64_t i = g * GROUP_SIZE; i < smaller(n, (g + 1) * GROUP_SIZE); i++)
                if (finite ? x_[i] == best : x_[i] != x_[i]) return i;
        }
        return 0;
    }

    INLINE bool reaches(int64_t group, Vec bound) const { return lanes_at_least(load(maxima_ + 16 * group), bound); }

    // How many entries are not below the value, and what they weigh.
    template <bool WEIGHED>
    Mass mass_from(float value) const {
        const Vec bound = splat(value);
        Doubles weight, count;
        for (int64_t g = 0; g < groups_; g++) {
            if (!reaches(g, bound)) continue;
            Vec weights = splat(0.0f), counts = splat(0.0f);
            for (int64_t i = g * GROUP_SIZE; i < smaller(n, (g + 1) * GROUP_SIZE); i += 16) {
                counts = counts + where_at_least(at(i), bound, splat(1.0f));
                if (WEIGHED) weights = weights + where_at_least(at(i), bound, load(weights_ + i));
            }
            count.add(counts);
            if (WEIGHED) weight.add(weights);
        }
        return {weight.sum(), (int64_t)count.sum()};
    }

    // Collects the entries of low..high, high itself left out.
    void gather(float low, float high, bool weighed) {
        Entries& out = gathered_;
        out.weights = weighed ? weights_ + 2 * groups_ * GROUP_SIZE : nullptr;
        int64_t count = 0;
        for (int64_t g = 0; g < groups_; g++) {
            if (!reaches(g, splat(low))) continue;
            for (int64_t i = g * GROUP_SIZE; i < smaller(n, (g + 1) * GROUP_SIZE); i += 16) {
                uint32_t bits = lanes_at_least(at(i), splat(low)) & ~lanes_at_least(at(i), splat(high));
                if (i + 16 > n) bits &= (1u << (n - i)) - 1;
                for (; bits; bits &= bits - 1, count++) {
                    const int64_t id = i + __builtin_ctz(bits);
                    out.values[count] = x_[id];
                    out.ids[count] = (int32_t)id;
                    if (weighed) out.weights[count] = weights_[id];
                }
            }
        }
        for (int64_t i = count; i % 16; i++) out.values[i] = -INFINITY;
        out.count = count;
    }

    // Stores new weights where the cut keeps any, and every group's sum. Returns the sum of all.
    template <class Weigh>
    INLINE double each_group(const Cut& cut, Weigh weigh) {
        double total = 0.0;
        for (int64_t g = 0; g < groups_; g++) {
            Vec sum = splat(0.0f);
            if (reaches(g, splat(cut.value)))
                for (int64_t i = g * GROUP_SIZE; i < smaller(n, (g + 1) * GROUP_SIZE); i += 16) {
                    const Vec bound = cut.bounds(i);
                    const Vec weight = lanes_at_least(at(i), bound) ? weigh(i, bound) : splat(0.0f);
                    store(weights_ + i, weight);
                    sum = sum + weight;
                }
            sums_[g] = lane_sum(sum);
            total += sums_[g];
        }
        return total;
    }

    // Sorts ids by value, largest first; equal values stay in order. `spare`: [count].
    void merge_sort(int32_t* ids, int32_t* spare, int64_t count) const {
        int32_t *from = ids, *to = spare;
        for (int64_t width = 1; width < count; width *= 2) {
            for (int64_t start = 0; start < count; start += 2 * width) {
                const int64_t middle = smaller(start + width, count), end = smaller(start + 2 * width, count);
                int64_t a = start, b = middle;
                for (int64_t i = start; i < end; i++)
                    to[i] = b == end || (a < middle && !(x_[from[b]] > x_[from[a]])) ? from[a++] : from[b++];
            }
            int32_t* sorted = to;
            to = from;
            from = sorted;
        }
        if (from != ids) memcpy(ids, from, count * sizeof(int32_t));
    }

    const float* x_;
    const int64_t groups_;
    alignas(64) float tail_[16];
    float* maxima_;   // [groups, 16]: the largest of every sixteenth entry
    float* weights_;  // [groups, GROUP_SIZE]
    double* sums_;    // [groups], of weights
    Entries gathered_;
};

// Entries that are less likely than min_p beside the likeliest.
static float min_p_bound(float best, float temperature, double min_p) {
    const float least = (float)log(min_p);
    return next_above(last_float(-INFINITY, best, [&](float v) { return (v - best) / temperature < least; }));
}

// Draws from one row. Returns what was kept through `cut`.
static int64_t draw_row(LogitsRow& row, float temperature, double min_p, int64_t top_k, double top_p, double uniform, Cut& cut) {
    if (top_k > 0 && top_k < row.n) cut = row.largest(top_k);
    if (min_p > 0.0) {
        const float bound = min_p_bound(row.best, temperature, min_p);
        if (bound > cut.value) cut = Cut{bound, INT64_MAX};
    }
    double total = row.weigh(cut, temperature);
    if (top_p < 1.0) {
        cut = row.nucleus(top_p * total, total, cut, temperature);
        total = row.keep(cut);
    }
    return row.invert(uniform * total);
}

// Logits over temperature where the cut keeps them, else -inf. Shifted on the way, so that they do not overflow.
static void write_processed(const LogitsRow& row, float temperature, const Cut& cut, float* out) {
    const float offset = clamp(row.best / temperature, -FLT_MAX, FLT_MAX);
    for (int64_t i = 0; i < row.n; i++) {
        const bool kept = row[i] > cut.value || (row[i] == cut.value && i <= cut.last);
        out[i] = kept ? (row[i] - row.best) / temperature + offset : -INFINITY;
    }
}

void draw(const DrawArgs& a, Team& team) {
    team.share(*a.rows, [&](int64_t i) {
        const float* x = a.logits + i * a.stride;
        LogitsRow row(x, a.n, a.allowed ? a.allowed[i] : nullptr);
        const float temperature = (float)a.temperature[i];
        const bool random = temperature > 0.0f && row.best - row.best == 0.0f;
        Cut cut;
        a.largest[i] = row.best;
        a.token_ids[i] = random ? draw_row(row, temperature, a.min_p[i], a.top_k[i], a.top_p[i], a.uniforms[i], cut) : row.best_id;
        if (!a.processed) return;
        float* processed = a.processed + i * a.n;
        if (random) write_processed(row, temperature, cut, processed);
        else memcpy(processed, row.values(), a.n * sizeof(float));
    });
}

void logprobs(const LogprobsArgs& a, Team& team) {
    team.share(*a.rows, [&](int64_t i) {
        LogitsRow row(a.logits + i * a.stride, a.n);
        int32_t* ids = a.ids + i * a.width;
        float* values = a.values + i * a.width;
        if (a.find_largest && a.width > 1) row.sorted(row.largest(a.width - 1), a.width - 1, ids + 1);
        const float shift = a.normalize ? (float)(row.best + log(row.weigh(Cut{}, 1.0f))) : 0.0f;
        for (int64_t j = 0; j < a.width; j++) values[j] = row[ids[j]] - shift;
        a.ranks[i] = (int32_t)row.count_from(row[ids[0]]);
    });
}

// Products go through double precision, which holds them exactly: no compiler may then fuse them with a sum.
void penalties(const PenaltiesArgs& a, Team& team) {
    team.share(*a.rows, [&](int64_t i) {
        float* logits = a.logits + a.lines[i] * a.stride;
        const int64_t* ids = a.ids[i];
        for (int64_t j = 0; j < a.sizes[i]; j++) {
            const float count = a.generated[i][j], x = logits[ids[j]];
            const float cost = (float)((double)a.frequency[i] * count) + (count > 0.0f ? a.presence[i] : 0.0f);
            const float scaled = x > 0.0f ? x / a.repetition[i] : (float)((double)x * a.repetition[i]);
            const float penalised = scaled - cost;
            logits[ids[j]] = penalised > FLT_MAX ? FLT_MAX : penalised;
        }
    });
}
