/* Parts of a kernel, and the loops that they are made of; private to the files of the reductions.
 *
 * The files that hold kernels define DMESH_TARGET, the CPU for which functions are compiled. The loops are written so that
 * the compiler vectorizes them. */
#ifndef DMESH_KERNELS_H
#define DMESH_KERNELS_H

#include "reduce.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

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

typedef const struct {
    struct dmesh_kernel folds[DMESH_DTYPES][DMESH_OPS];
    dmesh_row_sums row_sums[DMESH_DTYPES];
} dmesh_kernel_table;

/* The same kernels, compiled for several kinds of CPUs. */
extern dmesh_kernel_table dmesh_kernels_baseline;
#ifdef __x86_64__
extern dmesh_kernel_table dmesh_kernels_avx2; /* AVX2, F16C and FMA */
#endif

#ifdef DMESH_TARGET

/* Elements in memory, at any address, of any type of their owner. */
#define DMESH_ANYWHERE __attribute__((aligned(1), may_alias))
typedef uint8_t DMESH_ANYWHERE mem_u8;
typedef int8_t DMESH_ANYWHERE mem_i8;
typedef uint16_t DMESH_ANYWHERE mem_u16;
typedef int16_t DMESH_ANYWHERE mem_i16;
typedef uint32_t DMESH_ANYWHERE mem_u32;
typedef int32_t DMESH_ANYWHERE mem_i32;
typedef uint64_t DMESH_ANYWHERE mem_u64;
typedef int64_t DMESH_ANYWHERE mem_i64;
typedef float DMESH_ANYWHERE mem_f32;
typedef double DMESH_ANYWHERE mem_f64;
typedef struct __attribute__((packed, may_alias)) {
    float re, im;
} c64, mem_c64;
typedef struct __attribute__((packed, may_alias)) {
    double re, im;
} c128, mem_c128;

/* An output may be an input, element for element: no iteration of a loop depends on another one. Without being
 * told, the compiler would find the overlap at run time and take its slow loop. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* not every loop has vectors on every CPU */
#define DMESH_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define DMESH_INDEPENDENT _Pragma("GCC ivdep")
#else
#define DMESH_INDEPENDENT
#endif

#define DMESH_PASS(NAME) \
    DMESH_TARGET static void NAME(void *out, const void *const *in, size_t count, unsigned ways)

/* A pass that makes each ELEMENT of the output from a[i] to d[i], those of up to four inputs. */
#define DMESH_LOOP(NAME, WAYS, IN, OUT, ELEMENT)                                                              \
    DMESH_PASS(NAME) {                                                                                        \
        OUT *o = out;                                                                                         \
        const IN *a = in[0], *b = in[WAYS < 2 ? 0 : 1], *c = in[WAYS < 3 ? 0 : 2], *d = in[WAYS < 4 ? 0 : 3]; \
        (void)b, (void)c, (void)d, (void)ways;                                                                \
        DMESH_INDEPENDENT                                                                                     \
        for (size_t i = 0; i < count; i++)                                                                    \
            o[i] = ELEMENT;                                                                                   \
    }

/* Parts of the loops: LOAD(element) makes an operand, FOLD(a, b) folds two operands, FINISH(a, ways) makes the result. */
#define KEEP(a) (a)
#define AS_IT_IS(a, ways) (a)

/* NAME_2, NAME_3, NAME_4: from inputs to the result. */
#define FUSED_PASSES(NAME, IN, OUT, LOAD, FOLD, FINISH)                                            \
    DMESH_LOOP(NAME##_2, 2, IN, OUT, FINISH(FOLD(LOAD(a[i]), LOAD(b[i])), ways))                   \
    DMESH_LOOP(NAME##_3, 3, IN, OUT, FINISH(FOLD(FOLD(LOAD(a[i]), LOAD(b[i])), LOAD(c[i])), ways)) \
    DMESH_LOOP(NAME##_4, 4, IN, OUT, FINISH(FOLD(FOLD(FOLD(LOAD(a[i]), LOAD(b[i])), LOAD(c[i])), LOAD(d[i])), ways))

/* NAME_first, NAME_more, NAME_finish: through an accumulator. */
#define PARTED_PASSES(NAME, IN, ACCUMULATOR, OUT, LOAD, FOLD, FINISH)   \
    DMESH_LOOP(NAME##_first, 1, IN, ACCUMULATOR, LOAD(a[i]))            \
    DMESH_LOOP(NAME##_more, 1, IN, ACCUMULATOR, FOLD(o[i], LOAD(a[i]))) \
    DMESH_LOOP(NAME##_finish, 1, ACCUMULATOR, OUT, FINISH(a[i], ways))

/* Entries of a table of kernels, by their loops. */
#define SAME_TYPE_LANES(NAME, TYPE, LANES)                                                              \
    {                                                                                                   \
        .item = sizeof(TYPE), .accumulator = sizeof(TYPE), .result = sizeof(TYPE), .lanes = LANES,      \
        .same_type = true, .single_is_copy = true, .fused = { NAME##_2, NAME##_3, NAME##_4 }            \
    }
#define SAME_TYPE(NAME, TYPE) SAME_TYPE_LANES(NAME, TYPE, 1)
#define PARTED(NAME, IN, ACCUMULATOR, OUT)                                                              \
    {                                                                                                   \
        .item = sizeof(IN), .accumulator = sizeof(ACCUMULATOR), .result = sizeof(OUT), .lanes = 1,      \
        .first = NAME##_first, .more = NAME##_more, .finish = NAME##_finish                             \
    }
#define FUSED_AND_PARTED(NAME, IN, ACCUMULATOR, OUT, SINGLE_IS_COPY)                                    \
    {                                                                                                   \
        .item = sizeof(IN), .accumulator = sizeof(ACCUMULATOR), .result = sizeof(OUT), .lanes = 1,      \
        .single_is_copy = SINGLE_IS_COPY, .fused = { NAME##_2, NAME##_3, NAME##_4 },                    \
        .first = NAME##_first, .more = NAME##_more, .finish = NAME##_finish                             \
    }

#include "kernels_integers.h"
#include "kernels_floats.h"
#include "kernels_fp16.h"
#include "kernels_rows.h"

/* All kernels, for the file's CPU. */
#define DMESH_KERNELS {.folds = {INTEGER_TABLES, FLOAT_TABLES, HALF_TABLES}, .row_sums = {ROW_SUMS}}

#endif

#endif
