#include "copy.h"

#include <string.h>

#include "wait.h"

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64 };

/* Copies whole lines from `source` to `target`, and leaves `size` bytes. */
#define COPY_LINES(STORE)                                                \
    for (; size >= LINE; target += LINE, source += LINE, size -= LINE) { \
        __m128i a = _mm_loadu_si128((const __m128i *)source);            \
        __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));     \
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));     \
        __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));     \
        STORE((__m128i *)target, a);                                     \
        STORE((__m128i *)(target + 16), b);                              \
        STORE((__m128i *)(target + 32), c);                              \
        STORE((__m128i *)(target + 48), d);                              \
    }

void dmesh_copy(void *to, const void *from, size_t size) {
    unsigned char *target = to;
    const unsigned char *source = from;
    COPY_LINES(_mm_storeu_si128)
    memcpy(target, source, size);
}

void dmesh_stream_part(void *to, const void *from, size_t size) {
    unsigned char *target = to;
    const unsigned char *source = from;
    if (to == from)
        return;
    /* Only whole lines go past the caches: a line that is written in part costs more that way than any other. */
    size_t head = -(uintptr_t)target % LINE;
    if (size < head + LINE)
        head = size;
    memcpy(target, source, head);
    target += head, source += head, size -= head;
    COPY_LINES(_mm_stream_si128)
    memcpy(target, source, size);
}

void dmesh_stream_end(void) { _mm_sfence(); }

#else

/* Other compilers and CPUs have no such store that C could name, or their memcpy decides by itself. */
void dmesh_copy(void *to, const void *from, size_t size) { memcpy(to, from, size); }

void dmesh_stream_part(void *to, const void *from, size_t size) {
    if (to != from)
        memcpy(to, from, size);
}

void dmesh_stream_end(void) {}

#endif

void dmesh_copy_stream(void *to, const void *from, size_t size) {
    dmesh_stream_part(to, from, size);
    dmesh_stream_end();
}

enum {
    SMALLEST = 8 * 1024, /* bytes from which reading the clock does not matter */
    SLOW = 150,          /* ps per byte: below 7 GB/s the other mode may be faster */
    FACTOR = 2,          /* a non-temporal copy must be so many times faster: its reader has more to do */
    PERIOD = 64,         /* copies in the faster mode between trials of the other one */
    TRIALS = 4,
    PATH_PERIOD = 32,    /* arrays on the faster path between trials of the other one, */
    SLOW_PATH_PERIOD = 128, /* if that one takes more than half as long again */
};

/* Adds a measurement to a recent cost. A thread that is interrupted during a copy seems slow, so slow copies count little. */
static void update(uint32_t *cost, size_t size, int64_t nanoseconds) {
    const uint64_t measured = (uint64_t)nanoseconds * 1000 / size + 1;
    if (!*cost)
        *cost = measured < UINT32_MAX / 4 ? (uint32_t)measured : UINT32_MAX / 4;
    else if (measured < *cost)
        *cost = (uint32_t)((*cost + measured) / 2);
    else
        *cost += (uint32_t)((measured < 2 * (uint64_t)*cost ? measured : 2 * (uint64_t)*cost) - *cost) / 4;
}

enum dmesh_copy_mode dmesh_copy_choose(const struct dmesh_copy_policy *copies) {
    return copies->trials ? !copies->mode : copies->mode;
}

void dmesh_copy_learn(struct dmesh_copy_policy *copies, enum dmesh_copy_mode mode, size_t size, int64_t nanoseconds) {
    if (copies->fixed)
        return;
    update(&copies->cost[mode], size, nanoseconds);
    if (copies->trials) {
        if (--copies->trials)
            return;
        const int non_temporal = copies->cost[DMESH_CACHED] > SLOW &&
                                 (uint64_t)copies->cost[DMESH_NON_TEMPORAL] * FACTOR < copies->cost[DMESH_CACHED];
        copies->mode = non_temporal ? DMESH_NON_TEMPORAL : DMESH_CACHED;
    } else if (++copies->uses % PERIOD == 0 &&
               (copies->mode == DMESH_NON_TEMPORAL || copies->cost[DMESH_CACHED] > SLOW)) {
        copies->trials = TRIALS; /* the other mode may be faster, or was before */
    }
}

void dmesh_publish(struct dmesh_copy_policy *copies, void *to, const void *from, size_t size) {
    if (size < SMALLEST) {
        dmesh_copy(to, from, size);
        return;
    }
    const enum dmesh_copy_mode mode = dmesh_copy_choose(copies);
    const int64_t began = dmesh_now();
    (mode == DMESH_NON_TEMPORAL ? dmesh_copy_stream : dmesh_copy)(to, from, size);
    dmesh_copy_learn(copies, mode, size, dmesh_now() - began);
}

enum dmesh_path dmesh_path_choose(const struct dmesh_path_policy *paths) {
    return paths->trial ? !paths->best : paths->best;
}

void dmesh_path_learn(struct dmesh_path_policy *paths, enum dmesh_path path, size_t size, int64_t nanoseconds) {
    update(&paths->cost[path], size, nanoseconds);
    const uint64_t best = paths->cost[paths->best], other = paths->cost[!paths->best];
    if (path != paths->best) {
        paths->trial = 0;
        paths->uses = 0;
        if (best && other * 10 < best * 9)
            paths->best = path;
    } else if (++paths->uses >= (!other ? 2 : other * 2 > best * 3 ? SLOW_PATH_PERIOD : PATH_PERIOD)) {
        paths->trial = 1; /* an array of another member may still take the best one */
    }
}
