/* Kernels of bool, integers and times, for the CPU that DMESH_TARGET says. */

/* Sums and products wrap around, which is defined for unsigned numbers only; the bits are those of signed ones.
 * Short operands are made unsigned first, or C would multiply them as signed int. */
#define ADD(a, b) ((a) + (b))
#define MULTIPLY_SHORT(a, b) ((uint32_t)(a) * (b))
#define MULTIPLY(a, b) ((a) * (b))
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))

#define BITS_KERNELS(BITS, TYPE, PRODUCT)                                                  \
    static inline TYPE add_u##BITS(TYPE a, TYPE b) { return (TYPE)ADD(a, b); }             \
    static inline TYPE multiply_u##BITS(TYPE a, TYPE b) { return (TYPE)PRODUCT(a, b); }    \
    FUSED_PASSES(sum_u##BITS, mem_u##BITS, mem_u##BITS, KEEP, add_u##BITS, AS_IT_IS)       \
    FUSED_PASSES(prod_u##BITS, mem_u##BITS, mem_u##BITS, KEEP, multiply_u##BITS, AS_IT_IS) \
    FUSED_PASSES(and_u##BITS, mem_u##BITS, mem_u##BITS, KEEP, AND, AS_IT_IS)               \
    FUSED_PASSES(or_u##BITS, mem_u##BITS, mem_u##BITS, KEEP, OR, AS_IT_IS)                 \
    FUSED_PASSES(xor_u##BITS, mem_u##BITS, mem_u##BITS, KEEP, XOR, AS_IT_IS)
BITS_KERNELS(8, uint8_t, MULTIPLY_SHORT)
BITS_KERNELS(16, uint16_t, MULTIPLY_SHORT)
BITS_KERNELS(32, uint32_t, MULTIPLY)
BITS_KERNELS(64, uint64_t, MULTIPLY)

#define TO_DOUBLE(a) ((double)(a))
#define DIVIDE_DOUBLE(a, ways) ((a) / (double)(ways))

#define ORDER_KERNELS(TYPE, C_TYPE)                                                              \
    static inline C_TYPE smaller_##TYPE(C_TYPE a, C_TYPE b) { return SMALLER(a, b); }            \
    static inline C_TYPE larger_##TYPE(C_TYPE a, C_TYPE b) { return LARGER(a, b); }              \
    FUSED_PASSES(min_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, smaller_##TYPE, AS_IT_IS)             \
    FUSED_PASSES(max_##TYPE, mem_##TYPE, mem_##TYPE, KEEP, larger_##TYPE, AS_IT_IS)              \
    PARTED_PASSES(mean_##TYPE, mem_##TYPE, mem_f64, mem_f64, TO_DOUBLE, ADD, DIVIDE_DOUBLE)
ORDER_KERNELS(i8, int8_t)
ORDER_KERNELS(u8, uint8_t)
ORDER_KERNELS(i16, int16_t)
ORDER_KERNELS(u16, uint16_t)
ORDER_KERNELS(i32, int32_t)
ORDER_KERNELS(u32, uint32_t)
ORDER_KERNELS(i64, int64_t)
ORDER_KERNELS(u64, uint64_t)

/* Every byte but 0 is true, as for NumPy's logical functions, which also do the bitwise ones. */
#define TRUTH_U64(a) ((uint64_t)((a) != 0))
#define TRUTH_F64(a) ((double)((a) != 0))
#define BOTH(a, b) (((a) != 0) & ((b) != 0))
#define EITHER(a, b) (((a) | (b)) != 0)
#define ONE_OF(a, b) (((a) != 0) ^ ((b) != 0))
static inline uint8_t both_bool(uint8_t a, uint8_t b) { return (uint8_t)BOTH(a, b); }
static inline uint8_t either_bool(uint8_t a, uint8_t b) { return (uint8_t)EITHER(a, b); }
static inline uint8_t one_of_bool(uint8_t a, uint8_t b) { return (uint8_t)ONE_OF(a, b); }
FUSED_PASSES(all_bool, mem_u8, mem_u8, KEEP, both_bool, AS_IT_IS)
FUSED_PASSES(any_bool, mem_u8, mem_u8, KEEP, either_bool, AS_IT_IS)
FUSED_PASSES(xor_bool, mem_u8, mem_u8, KEEP, one_of_bool, AS_IT_IS)
PARTED_PASSES(sum_bool, mem_u8, mem_u64, mem_u64, TRUTH_U64, ADD, AS_IT_IS)
PARTED_PASSES(prod_bool, mem_u8, mem_u64, mem_u64, TRUTH_U64, MULTIPLY, AS_IT_IS)
PARTED_PASSES(mean_bool, mem_u8, mem_f64, mem_f64, TRUTH_F64, ADD, DIVIDE_DOUBLE)

/* NaT, the smallest number, wins. In the minimum it does so by itself; in the maximum the numbers are compared one
 * lower, by which it becomes the largest. */
static inline int64_t later_time(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a - 1) > (int64_t)((uint64_t)b - 1) ? a : b;
}
static inline int64_t add_time(int64_t a, int64_t b) {
    const int unknown = (a == INT64_MIN) | (b == INT64_MIN);
    return unknown ? INT64_MIN : (int64_t)((uint64_t)a + (uint64_t)b);
}
static inline int64_t divide_time(int64_t a, unsigned ways) {
    return a == INT64_MIN ? a : a / (int64_t)ways;
}
FUSED_PASSES(max_time, mem_i64, mem_i64, KEEP, later_time, AS_IT_IS)
FUSED_PASSES(sum_time, mem_i64, mem_i64, KEEP, add_time, AS_IT_IS)
PARTED_PASSES(mean_time, mem_i64, mem_i64, mem_i64, KEEP, add_time, divide_time)

#define INTEGER_TABLE(TYPE, BITS)                                     \
    {                                                                 \
        [DMESH_SUM] = SAME_TYPE(sum_u##BITS, uint##BITS##_t),         \
        [DMESH_PROD] = SAME_TYPE(prod_u##BITS, uint##BITS##_t),       \
        [DMESH_MIN] = SAME_TYPE(min_##TYPE, uint##BITS##_t),          \
        [DMESH_MAX] = SAME_TYPE(max_##TYPE, uint##BITS##_t),          \
        [DMESH_MEAN] = PARTED(mean_##TYPE, uint##BITS##_t, double, double), \
        [DMESH_BITWISE_AND] = SAME_TYPE(and_u##BITS, uint##BITS##_t), \
        [DMESH_BITWISE_OR] = SAME_TYPE(or_u##BITS, uint##BITS##_t),   \
        [DMESH_BITWISE_XOR] = SAME_TYPE(xor_u##BITS, uint##BITS##_t), \
    }

#define INTEGER_TABLES                                                 \
    [DMESH_BOOL] = {                                                   \
        [DMESH_SUM] = PARTED(sum_bool, uint8_t, uint64_t, uint64_t),   \
        [DMESH_PROD] = PARTED(prod_bool, uint8_t, uint64_t, uint64_t), \
        [DMESH_MIN] = SAME_TYPE(all_bool, uint8_t),                    \
        [DMESH_MAX] = SAME_TYPE(any_bool, uint8_t),                    \
        [DMESH_MEAN] = PARTED(mean_bool, uint8_t, double, double),     \
        [DMESH_ANY] = SAME_TYPE(any_bool, uint8_t),                    \
        [DMESH_ALL] = SAME_TYPE(all_bool, uint8_t),                    \
        [DMESH_BITWISE_AND] = SAME_TYPE(all_bool, uint8_t),            \
        [DMESH_BITWISE_OR] = SAME_TYPE(any_bool, uint8_t),             \
        [DMESH_BITWISE_XOR] = SAME_TYPE(xor_bool, uint8_t),            \
    },                                                                 \
    [DMESH_I8] = INTEGER_TABLE(i8, 8), [DMESH_U8] = INTEGER_TABLE(u8, 8),       \
    [DMESH_I16] = INTEGER_TABLE(i16, 16), [DMESH_U16] = INTEGER_TABLE(u16, 16), \
    [DMESH_I32] = INTEGER_TABLE(i32, 32), [DMESH_U32] = INTEGER_TABLE(u32, 32), \
    [DMESH_I64] = INTEGER_TABLE(i64, 64), [DMESH_U64] = INTEGER_TABLE(u64, 64), \
    [DMESH_TIMEDELTA64] = {                                            \
        [DMESH_SUM] = SAME_TYPE(sum_time, int64_t),                    \
        [DMESH_MIN] = SAME_TYPE(min_i64, int64_t),                     \
        [DMESH_MAX] = SAME_TYPE(max_time, int64_t),                    \
        [DMESH_MEAN] = PARTED(mean_time, int64_t, int64_t, int64_t),   \
    },                                                                 \
    [DMESH_DATETIME64] = {                                             \
        [DMESH_MIN] = SAME_TYPE(min_i64, int64_t),                     \
        [DMESH_MAX] = SAME_TYPE(max_time, int64_t),                    \
    }
