/* Kernels of float16 and bfloat16, for the CPU that DMESH_TARGET says. Needs kernels_floats.h.
 *
 * Sums, products and means are folded in float32 and rounded once. The smallest and largest of bfloat16 are found
 * in float32, too, as NumPy does with a dtype that is not its own: it matters for NaN and zeros. */

/* Conversions of float16 and bfloat16, rounded to the nearest even: without branches, so that loops of them become
 * vectors, and without arithmetic on subnormal numbers, which is slow. */
static inline uint32_t bits_of_f32(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

static inline float f32_of_bits(uint32_t bits) {
    float a;
    memcpy(&a, &bits, sizeof a);
    return a;
}

/* As `condition ? a : b`, but always calculates both: else compilers jump around floating-point arithmetic, for fear
 * that it traps, and make no vectors. */
static inline uint32_t pick(int condition, uint32_t a, uint32_t b) {
    const uint32_t mask = -(uint32_t)condition;
    return (a & mask) | (b & ~mask);
}

static inline float f32_of_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t rest = half & 0x7fff;
    const uint32_t rebias = (uint32_t)(127 - 15) << 23;
    const uint32_t normal = (rest << 13) + rebias;
    /* Infinity and NaN have the largest exponent in both; NaN keeps its payload. */
    const uint32_t special = normal + rebias;
    const uint32_t subnormal = bits_of_f32((float)(int32_t)rest * 0x1p-24f);
    return f32_of_bits(sign | pick(rest < 0x0400, subnormal, pick(rest >= 0x7c00, special, normal)));
}

static inline uint16_t f16_of_f32(float a) {
    const uint32_t bits = bits_of_f32(a);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t rest = bits & 0x7fffffff;
    const uint32_t rebias = (uint32_t)(127 - 15) << 23;
    /* Half of the last place, less one if what stays is even; a carry goes into the exponent, and on to infinity. */
    const uint32_t rounded = (rest - rebias + 0xfff + (rest >> 13 & 1)) >> 13;
    /* A half's subnormal places are the last ones of 0.5: the addition rounds. */
    const uint32_t subnormal = bits_of_f32(f32_of_bits(rest) + 0.5f) - bits_of_f32(0.5f);
    const uint32_t payload = rest >> 13 & 0x3ff;
    /* A NaN whose payload is lost would be an infinity. */
    const uint32_t nan = 0x7c00 | payload | (payload == 0);
    uint32_t half = pick(rest < (uint32_t)(127 - 14) << 23, subnormal, rounded);
    half = pick(rest >= (uint32_t)(127 + 16) << 23, 0x7c00, half);
    half = pick(rest > 0x7f800000, nan, half);
    return (uint16_t)(sign | half);
}

static inline float f32_of_bf16(uint16_t half) { return f32_of_bits((uint32_t)half << 16); }

/* NaN loses its payload and keeps its sign, as in ml_dtypes. */
static inline uint16_t bf16_of_f32(float a) {
    const uint32_t bits = bits_of_f32(a);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t nan = (bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16_t)pick((bits & 0x7fffffff) > 0x7f800000, nan, rounded);
}

/* float16 is compared without conversion. A number whose order is that of the half: both zeros are equal. */
static inline int16_t f16_order(uint16_t half) {
    const int16_t rest = (int16_t)(half & 0x7fff);
    return (int16_t)(half & 0x8000 ? -rest : rest);
}

static inline int f16_is_nan(uint16_t half) { return (half & 0x7fff) > 0x7c00; }

static inline uint16_t pick_f16(int condition, uint16_t a, uint16_t b) {
    const uint16_t mask = (uint16_t)-condition;
    return (uint16_t)((a & mask) | (b & (uint16_t)~mask));
}

/* The first NaN, or else the first one of two that are equal. */
static inline uint16_t smaller_f16(uint16_t a, uint16_t b) {
    const int number = !f16_is_nan(b), first = f16_order(a) <= f16_order(b);
    return pick_f16(f16_is_nan(a) | (number & first), a, b);
}

static inline uint16_t larger_f16(uint16_t a, uint16_t b) {
    const int number = !f16_is_nan(b), first = f16_order(a) >= f16_order(b);
    return pick_f16(f16_is_nan(a) | (number & first), a, b);
}

FUSED_PASSES(min_f16, mem_u16, mem_u16, KEEP, smaller_f16, AS_IT_IS)
FUSED_PASSES(max_f16, mem_u16, mem_u16, KEEP, larger_f16, AS_IT_IS)

#ifdef DMESH_EIGHT_HALVES

/* Eight at a time, with the CPU's own conversions of float16, which compilers do not find by themselves; of bfloat16
 * they would make vectors twice as slow. The last few elements are folded in registers of eight, too. */
static inline DMESH_TARGET __m128i load_halves(const void *fp16, size_t some) {
    __m128i eight = _mm_setzero_si128();
    memcpy(&eight, fp16, some < 8 ? some * sizeof(uint16_t) : sizeof eight);
    return eight;
}
static inline DMESH_TARGET void store_halves(void *fp16, __m128i eight, size_t some) {
    memcpy(fp16, &eight, some < 8 ? some * sizeof(uint16_t) : sizeof eight);
}
static inline DMESH_TARGET __m256 load_floats(const void *floats, size_t some) {
    __m256 eight = _mm256_setzero_ps();
    memcpy(&eight, floats, some < 8 ? some * sizeof(float) : sizeof eight);
    return eight;
}
static inline DMESH_TARGET void store_floats(void *floats, __m256 eight, size_t some) {
    memcpy(floats, &eight, some < 8 ? some * sizeof(float) : sizeof eight);
}

static inline DMESH_TARGET __m256 floats_of_f16(__m128i fp16) { return _mm256_cvtph_ps(fp16); }
static inline DMESH_TARGET __m128i f16_of_floats(__m256 floats) {
    return _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline DMESH_TARGET __m256 floats_of_bf16(__m128i fp16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(fp16), 16));
}
static inline DMESH_TARGET __m128i bf16_of_floats(__m256 floats) { /* bf16_of_f32, eight times */
    const __m256i bits = _mm256_castps_si256(floats);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i quiet = _mm256_and_si256(nan, _mm256_set1_epi32((int)0xffc00000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(floats, floats, _CMP_UNORD_Q));
    const __m256i wide = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

static inline DMESH_TARGET __m256 add_8(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
static inline DMESH_TARGET __m256 multiply_8(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
static inline DMESH_TARGET __m256 smaller_8(__m256 a, __m256 b) { /* the later one of two that are equal */
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
static inline DMESH_TARGET __m256 larger_8(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
static inline DMESH_TARGET __m256 divide_8(__m256 a, unsigned ways) {
    return _mm256_div_ps(a, _mm256_set1_ps((float)ways));
}

/* A pass that stores the result of DO for `some` elements, from element i on. */
#define EIGHTS_PASS(NAME, STORE, OUT, DO)         \
    DMESH_PASS(NAME) {                            \
        OUT *o = out;                             \
        size_t i = 0, some = 8;                   \
        (void)in, (void)ways;                     \
        for (; count - i >= 8; i += 8) {          \
            STORE(o + i, DO, some);               \
        }                                         \
        if (i < count) {                          \
            some = count - i;                     \
            STORE(o + i, DO, some);               \
        }                                         \
    }

/* TYPE is f16 or bf16. */
#define EIGHTS_INPUT(TYPE, INPUT) floats_of_##TYPE(load_halves((const mem_u16 *)in[INPUT] + i, some))
#define EIGHTS_ACCUMULATOR(FROM) load_floats((const mem_f32 *)(FROM) + i, some)
#define TWO(TYPE, FOLD) FOLD(EIGHTS_INPUT(TYPE, 0), EIGHTS_INPUT(TYPE, 1))
#define THREE(TYPE, FOLD) FOLD(TWO(TYPE, FOLD), EIGHTS_INPUT(TYPE, 2))
#define FOUR(TYPE, FOLD) FOLD(THREE(TYPE, FOLD), EIGHTS_INPUT(TYPE, 3))

#define HALF_KERNELS(NAME, TYPE, FOLD, FINISH)                                                                \
    EIGHTS_PASS(NAME##_2, store_halves, mem_u16, TYPE##_of_floats(FINISH(TWO(TYPE, FOLD##_8), ways)))         \
    EIGHTS_PASS(NAME##_3, store_halves, mem_u16, TYPE##_of_floats(FINISH(THREE(TYPE, FOLD##_8), ways)))       \
    EIGHTS_PASS(NAME##_4, store_halves, mem_u16, TYPE##_of_floats(FINISH(FOUR(TYPE, FOLD##_8), ways)))        \
    EIGHTS_PASS(NAME##_first, store_floats, mem_f32, EIGHTS_INPUT(TYPE, 0))                                   \
    EIGHTS_PASS(NAME##_more, store_floats, mem_f32, FOLD##_8(EIGHTS_ACCUMULATOR(out), EIGHTS_INPUT(TYPE, 0))) \
    EIGHTS_PASS(NAME##_finish, store_halves, mem_u16, TYPE##_of_floats(FINISH(EIGHTS_ACCUMULATOR(in[0]), ways)))
#define DIVIDED divide_8

#else

#define HALF_KERNELS(NAME, TYPE, FOLD, FINISH)                                                              \
    static inline uint16_t finish_##NAME(float a, unsigned ways) {                                          \
        (void)ways;                                                                                         \
        return TYPE##_of_f32(FINISH(a, ways));                                                              \
    }                                                                                                       \
    FUSED_PASSES(NAME, mem_u16, mem_u16, f32_of_##TYPE, FOLD##_f32, finish_##NAME)                          \
    PARTED_PASSES(NAME, mem_u16, mem_f32, mem_u16, f32_of_##TYPE, FOLD##_f32, finish_##NAME)
#define DIVIDED divide_f32

#endif

HALF_KERNELS(sum_f16, f16, add, AS_IT_IS)
HALF_KERNELS(prod_f16, f16, multiply, AS_IT_IS)
HALF_KERNELS(mean_f16, f16, add, DIVIDED)
HALF_KERNELS(sum_bf16, bf16, add, AS_IT_IS)
HALF_KERNELS(prod_bf16, bf16, multiply, AS_IT_IS)
HALF_KERNELS(min_bf16, bf16, smaller, AS_IT_IS)
HALF_KERNELS(max_bf16, bf16, larger, AS_IT_IS)
HALF_KERNELS(mean_bf16, bf16, add, DIVIDED)

#define HALF_TABLE(TYPE, MIN, MAX, SINGLE_IS_COPY)                                               \
    {                                                                                            \
        [DMESH_SUM] = FUSED_AND_PARTED(sum_##TYPE, uint16_t, float, uint16_t, SINGLE_IS_COPY),   \
        [DMESH_PROD] = FUSED_AND_PARTED(prod_##TYPE, uint16_t, float, uint16_t, SINGLE_IS_COPY), \
        [DMESH_MIN] = MIN,                                                                       \
        [DMESH_MAX] = MAX,                                                                       \
        [DMESH_MEAN] = FUSED_AND_PARTED(mean_##TYPE, uint16_t, float, uint16_t, false),          \
    }

#define HALF_TABLES                                                                                  \
    [DMESH_F16] = HALF_TABLE(f16, SAME_TYPE(min_f16, uint16_t), SAME_TYPE(max_f16, uint16_t), true), \
    [DMESH_BF16] = HALF_TABLE(bf16, FUSED_AND_PARTED(min_bf16, uint16_t, float, uint16_t, false),    \
                              FUSED_AND_PARTED(max_bf16, uint16_t, float, uint16_t, false), false)
