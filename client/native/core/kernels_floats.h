/* Kernels of float32, float64 and their complex numbers, for the CPU that DMESH_TARGET says. */

/* The smaller or larger one of two: the first NaN, or else the later one of two that are equal. Written as x86's
 * own instruction does it, which becomes one instruction and a blend. */
#define FLOAT_KERNELS(TYPE, C_TYPE)                                                                         \
    static inline C_TYPE add_##TYPE(C_TYPE a, C_TYPE b) { return a + b; }                                   \
    static inline C_TYPE multiply_##TYPE(C_TYPE a, C_TYPE b) { return a * b; }                              \
    static inline C_TYPE smaller_##TYPE(C_TYPE a, C_TYPE b) { return a != a ? a : a < b ? a : b; }          \
    static inline C_TYPE larger_##TYPE(C_TYPE a, C_TYPE b) { return a != a ? a : a > b ? a : b; }           \
    static inline C_TYPE divide_##TYPE(C_TYPE a, unsigned ways) { return a / (C_TYPE)ways; }                \
    FUSED_PASSES(sum_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, add_##TYPE, AS_IT_IS)                            \
    FUSED_PASSES(prod_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, multiply_##TYPE, AS_IT_IS)                      \
    FUSED_PASSES(min_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, smaller_##TYPE, AS_IT_IS)                        \
    FUSED_PASSES(max_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, larger_##TYPE, AS_IT_IS)                         \
    FUSED_PASSES(mean_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, add_##TYPE, divide_##TYPE)                      \
    PARTED_PASSES(mean_##TYPE, mem_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, add_##TYPE, divide_##TYPE)
FLOAT_KERNELS(f32, float)
FLOAT_KERNELS(f64, double)

/* The compiler must not decide by itself where to fuse (-ffp-contract=off). */
#ifdef DMESH_FUSED_MULTIPLY_ADD
#define MULTIPLY_ADD(a, b, c) _Generic((a), float: __builtin_fmaf, double: __builtin_fma)(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

/* Complex numbers are ordered as pairs; one with a NaN in it is less and greater than any without.
 *
 * NumPy divides by a complex number even where it is real: n + 0i. The zero counts, for infinities and signs. */
#define COMPLEX_KERNELS(TYPE, FLOAT)                                                                    \
    static inline TYPE add_##TYPE(TYPE a, TYPE b) { return (TYPE){a.re + b.re, a.im + b.im}; }          \
    static inline bool nan_##TYPE(TYPE a) { return a.re != a.re || a.im != a.im; }                      \
    static inline TYPE smaller_##TYPE(TYPE a, TYPE b) {                                                 \
        bool less = (a.re < b.re && b.im == b.im) || (a.re == b.re && a.im <= b.im);                    \
        return nan_##TYPE(a) || less ? a : b;                                                           \
    }                                                                                                   \
    static inline TYPE larger_##TYPE(TYPE a, TYPE b) {                                                  \
        bool greater = (a.re > b.re && b.im == b.im) || (a.re == b.re && a.im >= b.im);                 \
        return nan_##TYPE(a) || greater ? a : b;                                                        \
    }                                                                                                   \
    static inline TYPE divide_##TYPE(TYPE a, unsigned ways) {                                           \
        const FLOAT scale = 1 / (FLOAT)ways, zero = 0;                                                  \
        return (TYPE){(a.re + a.im * zero) * scale, (a.im - a.re * zero) * scale};                      \
    }                                                                                                   \
    static inline DMESH_TARGET TYPE multiply_##TYPE(TYPE a, TYPE b) {                                   \
        return (TYPE){MULTIPLY_ADD(a.re, b.re, -(a.im * b.im)), MULTIPLY_ADD(a.re, b.im, a.im * b.re)}; \
    }                                                                                                   \
    FUSED_PASSES(prod_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, multiply_##TYPE, AS_IT_IS)                  \
    FUSED_PASSES(min_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, smaller_##TYPE, AS_IT_IS)                    \
    FUSED_PASSES(max_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, larger_##TYPE, AS_IT_IS)                     \
    FUSED_PASSES(mean_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, add_##TYPE, divide_##TYPE)                  \
    PARTED_PASSES(mean_##TYPE, mem_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, add_##TYPE, divide_##TYPE)
COMPLEX_KERNELS(c64, float)
COMPLEX_KERNELS(c128, double)

#define FLOAT_TABLE(TYPE, C_TYPE, SUM)                                               \
    {                                                                                \
        [DMESH_SUM] = SUM,                                                           \
        [DMESH_PROD] = SAME_TYPE(prod_##TYPE, C_TYPE),                               \
        [DMESH_MIN] = SAME_TYPE(min_##TYPE, C_TYPE),                                 \
        [DMESH_MAX] = SAME_TYPE(max_##TYPE, C_TYPE),                                 \
        [DMESH_MEAN] = FUSED_AND_PARTED(mean_##TYPE, C_TYPE, C_TYPE, C_TYPE, false), \
    }

/* Complex numbers are added as twice as many floats. */
#define FLOAT_TABLES                                                         \
    [DMESH_F32] = FLOAT_TABLE(f32, float, SAME_TYPE(sum_f32, float)),        \
    [DMESH_F64] = FLOAT_TABLE(f64, double, SAME_TYPE(sum_f64, double)),      \
    [DMESH_C64] = FLOAT_TABLE(c64, c64, SAME_TYPE_LANES(sum_f32, float, 2)), \
    [DMESH_C128] = FLOAT_TABLE(c128, c128, SAME_TYPE_LANES(sum_f64, double, 2))
