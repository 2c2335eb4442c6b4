/* Parts of a kernel; private to the files of the reductions. */
#ifndef DMESH_KERNELS_H
#define DMESH_KERNELS_H

#include "reduce.h"

#include <stdbool.h>
#include <stdint.h>

/* One pass over `count` elements of some inputs. `ways` is the number of all inputs of the reduction, by which a
 * mean is divided. */
typedef void (*dmesh_pass)(void *out, const void *const *in, size_t count, unsigned ways);

enum { DMESH_FUSED_WAYS = 4 };

struct dmesh_kernel {
    uint8_t item;        /* bytes of an element of the inputs; 0: no such kernel */
    uint8_t accumulator; /* bytes of an element of the accumulator */
    uint8_t result;      /* bytes of an element of the outputs */
    uint8_t lanes;       /* elements of the loops per element of the caller's arrays */
    bool same_type;      /* accumulator and result are of the inputs' type, and nothing is done at the end */
    bool single_is_copy; /* the reduction of one input is that input */

    /* From all of 2, 3 and 4 inputs to the result, in one pass; NULL: in parts only. */
    dmesh_pass fused[DMESH_FUSED_WAYS - 1];

    /* In parts, for any number of inputs; NULL for kernels of one type, which use the fused loops. */
    dmesh_pass first;  /* accumulator = in[0] */
    dmesh_pass more;   /* accumulator = accumulator op in[0] */
    dmesh_pass finish; /* out = result of the accumulator in[0] */
};

typedef const struct dmesh_kernel dmesh_kernel_table[DMESH_DTYPES][DMESH_OPS];

/* The same kernels, compiled for several kinds of CPUs. */
extern dmesh_kernel_table dmesh_kernels_baseline;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define DMESH_HAVE_AVX2_KERNELS 1
extern dmesh_kernel_table dmesh_kernels_avx2; /* AVX2, F16C and FMA */
#endif

#endif
