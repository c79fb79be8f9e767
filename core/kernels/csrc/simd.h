// Sixteen lanes of float and the few operations the kernels need, on whatever the instruction set offers.
//
// Included once per instruction set, inside that set's namespace and after its target pragma (see isa_*.cpp).
// LANES is the native vector's width in floats; a Vec is 16 / LANES of them, so kernels are written once.
// A "word" is 4 bytes: two bf16 or one float. Packed layouts are rows of 16 words, which `dot` consumes directly.

#if defined(ISA_AVX512) || defined(ISA_AVX512VNNI) || defined(ISA_AVX512BF16)
#define LANES_16 1
constexpr int LANES = 16;
#elif defined(ISA_AVX2)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PARTS = 16 / LANES;

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vword __attribute__((vector_size(4 * LANES)));
typedef int16_t vshort __attribute__((vector_size(4 * LANES)));
typedef int8_t vbyte __attribute__((vector_size(LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));

struct Vec {
    vfloat part[PARTS];
};
struct Ints {
    vint part[PARTS];
};
struct Words {
    vword part[PARTS];
};

// These stand in for std::min and the like: a template of the standard library that is instantiated here would be compiled
// for this set, and the linker might then hand it to code that runs on a lesser CPU.
template <class T>
INLINE T smaller(T a, T b) {
    return b < a ? b : a;
}

template <class T>
INLINE T larger(T a, T b) {
    return a < b ? b : a;
}

template <class T>
INLINE T clamp(T x, T low, T high) {
    return smaller(larger(x, low), high);
}

// Growing scratch memory, 64-byte aligned, kept for the thread's life.
template <class T>
struct Array {
    T* data = nullptr;
    int64_t size = 0, capacity = 0;

    ~Array() { free(data); }

    T* at_least(int64_t count) {
        if (count > capacity) {
            const int64_t bytes = (2 * count * (int64_t)sizeof(T) + 63) / 64 * 64;
            T* grown = (T*)aligned_alloc(64, bytes);
            if (!grown) abort();
            if (data) memcpy((void*)grown, data, size * sizeof(T));
            free(data);
            data = grown;
            capacity = bytes / (int64_t)sizeof(T);
        }
        return data;
    }

    void append(T item) {
        at_least(size + 1);
        data[size++] = item;
    }
};

#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

INLINE Vec splat(float x) {
    Vec r;
    EACH_PART r.part[i] = vfloat{} + x;
    return r;
}

INLINE Words splat_word(uint32_t x) {
    Words r;
    EACH_PART r.part[i] = vword{} + x;
    return r;
}

INLINE Words load_words(const void* from) {
    Words r;
    memcpy(&r, from, 64);
    return r;
}

INLINE Words broadcast_word(const void* from) {
    uint32_t word;
    memcpy(&word, from, 4);
    return splat_word(word);
}

INLINE Words operator&(Words a, Words b) {
    EACH_PART a.part[i] &= b.part[i];
    return a;
}

INLINE Vec load(const float* from) {
    Vec r;
    memcpy(&r, from, 64);
    return r;
}

INLINE Vec load(const bf16* from) {
    Vec r;
#if LANES_16  // GCC makes five instructions a part of the general form
    r.part[0] = (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(ISA_AVX2)
    EACH_PART {
        const __m128i half = _mm_loadu_si128((const __m128i*)(from + i * LANES));
        r.part[i] = (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
    }
#else
    EACH_PART {
        vhalf half;
        memcpy(&half, from + i * LANES, sizeof half);
        r.part[i] = (vfloat)(__builtin_convertvector(half, vword) << 16);
    }
#endif
    return r;
}

INLINE void store(float* to, Vec x) { memcpy(to, &x, 64); }

INLINE void store(bf16* to, Vec x) {
#ifdef ISA_AVX512BF16
    __m256bh half = _mm512_cvtneps_pbh((__m512)x.part[0]);
    memcpy(to, &half, 32);
#else
    vword halves[PARTS];
    EACH_PART {
        const vword bits = (vword)x.part[i], rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const vint nan = x.part[i] != x.part[i];
        halves[i] = nan ? vword{} + 0x7fc0 : rounded;
    }
#if defined(ISA_AVX2)  // GCC packs each part by itself
    const __m256i packed = _mm256_packus_epi32((__m256i)halves[0], (__m256i)halves[1]);
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
#else
    EACH_PART {
        const vhalf half = __builtin_convertvector(halves[i], vhalf);
        memcpy(to + i * LANES, &half, sizeof half);
    }
#endif
#endif
}

INLINE Vec operator+(Vec a, Vec b) {
    EACH_PART a.part[i] += b.part[i];
    return a;
}

INLINE Vec operator-(Vec a, Vec b) {
    EACH_PART a.part[i] -= b.part[i];
    return a;
}

INLINE Vec operator*(Vec a, Vec b) {
    EACH_PART a.part[i] *= b.part[i];
    return a;
}

INLINE Vec operator/(Vec a, Vec b) {
    EACH_PART a.part[i] /= b.part[i];
    return a;
}

INLINE Vec max(Vec a, Vec b) {
    EACH_PART a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return a;
}

// a * b + c, fused where the set has it (the compiler contracts the expression).
INLINE Vec fma(Vec a, Vec b, Vec c) {
    EACH_PART c.part[i] = a.part[i] * b.part[i] + c.part[i];
    return c;
}

// Lane j keeps x where first <= j < last, else takes `other`.
INLINE Vec keep_lanes(Vec x, int first, int last, float other) {
    EACH_PART {
        vint lane;
        for (int j = 0; j < LANES; j++) lane[j] = i * LANES + j;
        vint inside = (lane >= first) & (lane < last);
        x.part[i] = inside ? x.part[i] : vfloat{} + other;
    }
    return x;
}

INLINE float lane_sum(Vec x) {
#if LANES_16
    return _mm512_reduce_add_ps((__m512)x.part[0]);
#endif
    alignas(64) float a[16];
    store(a, x);
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++) a[j] += a[j + width];
    return a[0];
}

INLINE float lane_max(Vec x) {
#if LANES_16
    return _mm512_reduce_max_ps((__m512)x.part[0]);
#endif
    alignas(64) float a[16];
    store(a, x);
    for (int width = 8; width; width /= 2)
        for (int j = 0; j < width; j++) a[j] = a[j] > a[j + width] ? a[j] : a[j + width];
    return a[0];
}

// 2^x to about 2e-7 relative, 1 at 0; 0 below -126, clamped above 127.99 (infinite with AVX-512).
INLINE Vec exp2(Vec x) {
    EACH_PART {
        vfloat v = x.part[i];
#if LANES_16
        const vfloat whole = (vfloat)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const vfloat f = v - whole;
#else
        const vint vanishes = v < -126.0f;
        v = vanishes ? vfloat{} - 126.0f : v;
        v = v > 127.99f ? vfloat{} + 127.99f : v;
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
        const vfloat shifted = v + magic;
        const vint exponent = ((vint)shifted - 0x4b400000) << 23;
        const vfloat f = v - (shifted - magic);
#endif
        // Of least relative error on [-1/2, 1/2] among those that are 1 at 0.
        vfloat p = f * 1.326472036150199e-3f + 9.671513022418676e-3f;
        p = p * f + 5.550733777663784e-2f;
        p = p * f + 2.402224207698149e-1f;
        p = p * f + 6.931469775578154e-1f;
        p = p * f + 1.0f;
#if LANES_16
        x.part[i] = (vfloat)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
        x.part[i] = (vfloat)(((vint)p + exponent) & ~vanishes);
#endif
    }
    return x;
}

// x / (1 + 2^z), which is x times the sigmoid of -z in powers of two.
INLINE Vec times_sigmoid(Vec x, Vec z) {
    const Vec divisor = splat(1.0f) + exp2(z);
#if LANES_16
    // An estimate and a step of Newton's method are within an ulp in a fraction of a division's time. Of an infinite
    // divisor the estimate is exact, and the step would be none.
    const __m512 d = (__m512)divisor.part[0], estimate = _mm512_rcp14_ps(d);
    const __m512 error = _mm512_fnmadd_ps(d, estimate, _mm512_set1_ps(1.0f));
    const __mmask16 finite = _mm512_cmp_ps_mask(d, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    x.part[0] *= (vfloat)_mm512_mask_fmadd_ps(estimate, finite, error, estimate);
    return x;
#else
    return x / divisor;
#endif
}

// times_sigmoid(x, silu_power(x)) is x * sigmoid(x).
INLINE Vec silu_power(Vec x) { return x * splat(-1.44269504f); }

// times_sigmoid(x, gelu_power(x)) is GELU by tanh, x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3): half
// of 1 + tanh(u) is sigmoid(2u).
INLINE Vec gelu_power(Vec x) { return x * fma(x * x, splat(-0.102943240f), splat(-2.30220819f)); }

// acc + the products of one word of `a` and one of `b`, lane by lane: two bf16 products, or one of floats.
template <class T>
INLINE Vec dot(Vec acc, Words a, Words b);

template <>
INLINE Vec dot<float>(Vec acc, Words a, Words b) {
    EACH_PART acc.part[i] = (vfloat)a.part[i] * (vfloat)b.part[i] + acc.part[i];
    return acc;
}

template <>
INLINE Vec dot<bf16>(Vec acc, Words a, Words b) {
#ifdef ISA_AVX512BF16
    acc.part[0] = (vfloat)_mm512_dpbf16_ps((__m512)acc.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0]);
#else
    EACH_PART {
        vfloat low = (vfloat)(a.part[i] << 16) * (vfloat)(b.part[i] << 16) + acc.part[i];
        acc.part[i] = (vfloat)(a.part[i] & 0xffff0000u) * (vfloat)(b.part[i] & 0xffff0000u) + low;
    }
#endif
    return acc;
}

INLINE float to_float(float x) { return x; }

INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}

template <class T>
INLINE T round_to(float x);

template <>
INLINE float round_to<float>(float x) {
    return x;
}

template <>
INLINE bf16 round_to<bf16>(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return bf16{0x7fc0};
    return bf16{(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// x as it reads back after being stored as T.
template <class T>
INLINE Vec rounded(Vec x) {
    T buffer[16];
    store(buffer, x);
    return load(buffer);
}

INLINE Words shift_right(Words x, int bits) {
    EACH_PART x.part[i] >>= bits;
    return x;
}

// 16 half-precision values.
INLINE Vec load_half(const void* from) {
    Vec r;
#if LANES_16
    r.part[0] = (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    EACH_PART {
        vhalf half;
        memcpy(&half, (const uint16_t*)from + i * LANES, sizeof half);
        const vword bits = __builtin_convertvector(half, vword), magnitude = (bits & 0x7fff) << 13;
        // Exponents are rebased by a multiplication, which is right for subnormal values too.
        vword wide = (vword)((vfloat)magnitude * 0x1p112f);
        const vint special = (vint)(bits & 0x7c00) == 0x7c00;
        wide |= (vword)special & 0x7f800000u;
        r.part[i] = (vfloat)(wide | (bits & 0x8000) << 16);
    }
#endif
    return r;
}

// 16 unsigned (T = uint8_t) or signed (int8_t) bytes.
template <class T>
INLINE Vec load_bytes(const void* from) {
    typedef T bytes __attribute__((vector_size(LANES)));
    Vec r;
    EACH_PART {
        bytes some;
        memcpy(&some, (const uint8_t*)from + i * LANES, sizeof some);
        r.part[i] = __builtin_convertvector(__builtin_convertvector(some, vint), vfloat);
    }
    return r;
}

INLINE Words operator|(Words a, Words b) {
    EACH_PART a.part[i] |= b.part[i];
    return a;
}

INLINE Words shift_left(Words x, int bits) {
    EACH_PART x.part[i] <<= bits;
    return x;
}

INLINE Ints splat_int(int32_t x) {
    Ints r;
    EACH_PART r.part[i] = vint{} + x;
    return r;
}

INLINE Ints operator+(Ints a, Ints b) {
    EACH_PART a.part[i] += b.part[i];
    return a;
}

INLINE int32_t lane_sum(Ints x) {
    int32_t lanes[16], sum = 0;
    memcpy(lanes, &x, 64);
    for (int32_t lane : lanes) sum += lane;
    return sum;
}

INLINE Vec to_floats(Ints x) {
    Vec r;
    EACH_PART r.part[i] = __builtin_convertvector(x.part[i], vfloat);
    return r;
}

// The nearest integers of values below 2^22 in magnitude.
INLINE Ints nearest(Vec x) {
    Ints r;
    EACH_PART r.part[i] = (vint)(x.part[i] + 12582912.0f) - 0x4b400000;
    return r;
}

// Stores 16 integers as bytes and returns them.
INLINE Ints store_bytes(int8_t* to, Ints x) {
    EACH_PART {
        const vbyte bytes = __builtin_convertvector(x.part[i], vbyte);
        memcpy(to + i * LANES, &bytes, sizeof bytes);
    }
    return x;
}

// Products of unsigned bytes of w and signed ones of x, added by pairs into 16-bit lanes, which must hold them.
#if LANES_16
INLINE vshort multiply_add_bytes(vword w, vword x) { return (vshort)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
#elif defined(ISA_AVX2)
INLINE vshort multiply_add_bytes(vword w, vword x) { return (vshort)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
#endif

// Products of neighbouring 16-bit values, added by pairs into 32-bit lanes.
INLINE vint multiply_add_pairs(vshort a, vshort b) {
#if LANES_16
    return (vint)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(ISA_AVX2)
    return (vint)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (vint)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((vint)a << 16 >> 16) * ((vint)b << 16 >> 16) + ((vint)a >> 16) * ((vint)b >> 16);
#endif
}
