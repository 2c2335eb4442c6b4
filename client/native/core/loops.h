/* The loops of the kernels, and the names of their elements.
 *
 * Included by the files that hold kernels; they define DMESH_TARGET, the CPU for which functions are compiled.
 * The loops are written so that the compiler vectorizes them. */
#ifndef DMESH_LOOPS_H
#define DMESH_LOOPS_H

#include "kernels.h"

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

/* Parts of the loops: LOAD(element) makes an operand, FOLD(a, b) folds two operands, FINISH(a, ways) makes the result. */
#define KEEP(a) (a)
#define AS_IT_IS(a, ways) (a)

/* NAME_2, NAME_3, NAME_4: from inputs to the result. */
#define FUSED_PASSES(NAME, IN, OUT, LOAD, FOLD, FINISH)                                              \
    DMESH_PASS(NAME##_2) {                                                                           \
        OUT *o = out;                                                                                \
        const IN *a = in[0], *b = in[1];                                                             \
        (void)ways;                                                                                  \
        DMESH_INDEPENDENT                                                                            \
        for (size_t i = 0; i < count; i++) {                                                         \
            o[i] = FINISH(FOLD(LOAD(a[i]), LOAD(b[i])), ways);                                       \
        }                                                                                            \
    }                                                                                                \
    DMESH_PASS(NAME##_3) {                                                                           \
        OUT *o = out;                                                                                \
        const IN *a = in[0], *b = in[1], *c = in[2];                                                 \
        (void)ways;                                                                                  \
        DMESH_INDEPENDENT                                                                            \
        for (size_t i = 0; i < count; i++) {                                                         \
            o[i] = FINISH(FOLD(FOLD(LOAD(a[i]), LOAD(b[i])), LOAD(c[i])), ways);                     \
        }                                                                                            \
    }                                                                                                \
    DMESH_PASS(NAME##_4) {                                                                           \
        OUT *o = out;                                                                                \
        const IN *a = in[0], *b = in[1], *c = in[2], *d = in[3];                                     \
        (void)ways;                                                                                  \
        DMESH_INDEPENDENT                                                                            \
        for (size_t i = 0; i < count; i++) {                                                         \
            o[i] = FINISH(FOLD(FOLD(FOLD(LOAD(a[i]), LOAD(b[i])), LOAD(c[i])), LOAD(d[i])), ways);   \
        }                                                                                            \
    }

/* NAME_first, NAME_more, NAME_finish: through an accumulator. */
#define PARTED_PASSES(NAME, IN, ACCUMULATOR, OUT, LOAD, FOLD, FINISH) \
    DMESH_PASS(NAME##_first) {                                        \
        ACCUMULATOR *o = out;                                         \
        const IN *a = in[0];                                          \
        (void)ways;                                                   \
        DMESH_INDEPENDENT                                             \
        for (size_t i = 0; i < count; i++) {                          \
            o[i] = LOAD(a[i]);                                        \
        }                                                             \
    }                                                                 \
    DMESH_PASS(NAME##_more) {                                         \
        ACCUMULATOR *o = out;                                         \
        const IN *a = in[0];                                          \
        (void)ways;                                                   \
        DMESH_INDEPENDENT                                             \
        for (size_t i = 0; i < count; i++) {                          \
            o[i] = FOLD(o[i], LOAD(a[i]));                            \
        }                                                             \
    }                                                                 \
    DMESH_PASS(NAME##_finish) {                                       \
        OUT *o = out;                                                 \
        const ACCUMULATOR *a = in[0];                                 \
        (void)ways;                                                   \
        DMESH_INDEPENDENT                                             \
        for (size_t i = 0; i < count; i++) {                          \
            o[i] = FINISH(a[i], ways);                                \
        }                                                             \
    }

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

#endif
