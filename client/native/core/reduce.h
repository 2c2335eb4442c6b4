/* Reductions of arrays in memory: the arithmetic of the collectives, and sums within an array.
 *
 * A kernel folds the same elements of several inputs, in the order of the inputs, and writes the result to
 * several outputs. It reads every input once and writes every output once. The results have the same bits as
 * dmesh.collectives.reduction, which is NumPy, with three exceptions that are NumPy's own:
 *
 *   - Where two operands of a sum or a product are NaN, the result is one of them, but which one NumPy decides by
 *     the place of the element in the array. Here it is the CPU's choice.
 *   - The minimum and the maximum of -0.0 and +0.0 are the later one of the two on x86 (the earlier one for
 *     float16), as there NumPy's vectors and tails do alike. Elsewhere NumPy asks the CPU, which may order zeros.
 *   - NumPy rounds a product of complex numbers in another way where the CPU has fused multiply-add, and so does
 *     DMESH_ISA_BEST. DMESH_ISA_BASELINE is NumPy on an x86 without it.
 *
 * All functions can be called from several threads at once. None allocates memory, or fails. The CPU's rounding
 * mode must be the default one, to the nearest even, without flushing of subnormal numbers.
 */
#ifndef DMESH_REDUCE_H
#define DMESH_REDUCE_H

#include <stddef.h>

enum dmesh_dtype {
    DMESH_BOOL, /* one byte, 0 or 1 */
    DMESH_I8, DMESH_U8, DMESH_I16, DMESH_U16, DMESH_I32, DMESH_U32, DMESH_I64, DMESH_U64,
    DMESH_F16, DMESH_BF16, DMESH_F32, DMESH_F64,
    DMESH_C64, DMESH_C128,
    DMESH_TIMEDELTA64, /* 64 bits, of which the smallest number is NaT */
    DMESH_DATETIME64,
    DMESH_DTYPES
};

enum dmesh_op {
    DMESH_SUM, DMESH_PROD, DMESH_MIN, DMESH_MAX, DMESH_MEAN,
    DMESH_ANY, DMESH_ALL, DMESH_BITWISE_AND, DMESH_BITWISE_OR, DMESH_BITWISE_XOR,
    DMESH_OPS
};

enum dmesh_isa {
    DMESH_ISA_BEST,     /* best instructions of this CPU */
    DMESH_ISA_BASELINE, /* instructions of every CPU of the architecture: for tests and comparisons */
};

/* One op for one dtype. */
typedef struct dmesh_kernel dmesh_kernel;

/* Returns a kernel, or NULL where there is none: NumPy does the rest.
 *
 * `dtype` is that in which the contributions travel (`Reduction.peer`): any and all know DMESH_BOOL only. */
const dmesh_kernel *dmesh_kernel_for(enum dmesh_dtype dtype, enum dmesh_op op, enum dmesh_isa isa);

/* The bytes of an element of the inputs and of the outputs. They differ where the result has another dtype
 * (`Reduction.result`): int64 for sum and prod of bool, float64 for the mean of bool and of integers. */
size_t dmesh_kernel_input_size(const dmesh_kernel *kernel);
size_t dmesh_kernel_output_size(const dmesh_kernel *kernel);

/* Folds `count` elements of each of `ways` inputs into each of `outs` outputs.
 *
 * No pointer needs to be aligned. An output can be the same memory as an input, element for element, if their
 * elements have one size; any other overlap is an error of the caller. `ways` and `outs` are at least 1; `mean`
 * divides by `ways`. If it `streams`, outputs bypass the caches: for megabytes that are not read soon; when the call
 * returns, they are visible to any thread that sees a later store of this one. */
void dmesh_reduce(const dmesh_kernel *kernel, const void *const *inputs, unsigned ways, void *const *outputs,
                  unsigned outs, size_t count, int streams);

/* Adds the `length` elements of each of `count` rows, which follow each other in memory, and writes the sums. No pointer
 * needs to be aligned.
 *
 * Sums are pairwise, with the error bound of NumPy's, and have the same bits on every CPU and at every address. A sum of
 * zeros is +0.0, as NumPy's is. Sums of float16 are float32. */
typedef void (*dmesh_row_sums)(const void *rows, size_t count, size_t length, void *sums);

/* Returns NULL for all dtypes but DMESH_F16, DMESH_F32 and DMESH_F64. */
dmesh_row_sums dmesh_row_sums_for(enum dmesh_dtype dtype, enum dmesh_isa isa);

#endif
