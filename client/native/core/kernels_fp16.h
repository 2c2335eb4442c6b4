/* Kernels of float16 and bfloat16, for the CPU that DMESH_TARGET says. Needs kernels_floats.h.
 *
 * Sums, products and means are folded in float32 and rounded once. The smallest and largest of bfloat16 are found
 * in float32, too, as NumPy does with a dtype that is not its own: it matters for NaN and zeros. */

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

#define HALF_TABLES                                                                   \
    [DMESH_F16] = {                                                                   \
        [DMESH_SUM] = FUSED_AND_PARTED(sum_f16, uint16_t, float, uint16_t, true),     \
        [DMESH_PROD] = FUSED_AND_PARTED(prod_f16, uint16_t, float, uint16_t, true),   \
        [DMESH_MIN] = SAME_TYPE(min_f16, uint16_t),                                   \
        [DMESH_MAX] = SAME_TYPE(max_f16, uint16_t),                                   \
        [DMESH_MEAN] = FUSED_AND_PARTED(mean_f16, uint16_t, float, uint16_t, false),  \
    },                                                                                \
    [DMESH_BF16] = {                                                                  \
        [DMESH_SUM] = FUSED_AND_PARTED(sum_bf16, uint16_t, float, uint16_t, false),   \
        [DMESH_PROD] = FUSED_AND_PARTED(prod_bf16, uint16_t, float, uint16_t, false), \
        [DMESH_MIN] = FUSED_AND_PARTED(min_bf16, uint16_t, float, uint16_t, false),   \
        [DMESH_MAX] = FUSED_AND_PARTED(max_bf16, uint16_t, float, uint16_t, false),   \
        [DMESH_MEAN] = FUSED_AND_PARTED(mean_bf16, uint16_t, float, uint16_t, false), \
    }
