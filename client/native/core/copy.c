#include "copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LINE = 64 };

#ifdef __SSE2__

void dmesh_copy(void *to, const void *from, size_t size) {
    unsigned char *target = to;
    const unsigned char *source = from;
    for (; size >= LINE; target += LINE, source += LINE, size -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_storeu_si128((__m128i *)target, a);
        _mm_storeu_si128((__m128i *)(target + 16), b);
        _mm_storeu_si128((__m128i *)(target + 32), c);
        _mm_storeu_si128((__m128i *)(target + 48), d);
    }
    memcpy(target, source, size);
}

void dmesh_stream_part(void *to, const void *from, size_t size) {
    unsigned char *target = to;
    const unsigned char *source = from;
    if (to == from) {
        return;
    }
    /* Only whole lines go past the caches: a line that is written in part costs more that way than any other. */
    size_t head = -(uintptr_t)target % LINE;
    if (size < head + LINE) {
        memcpy(target, source, size);
        return;
    }
    memcpy(target, source, head);
    target += head, source += head, size -= head;
    for (; size >= LINE; target += LINE, source += LINE, size -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)(target + 16), b);
        _mm_stream_si128((__m128i *)(target + 32), c);
        _mm_stream_si128((__m128i *)(target + 48), d);
    }
    memcpy(target, source, size);
}

void dmesh_stream_end(void) { _mm_sfence(); }

#else

/* Other compilers and CPUs have no such store that C could name, or their memcpy decides by itself. */
void dmesh_copy(void *to, const void *from, size_t size) { memcpy(to, from, size); }

void dmesh_stream_part(void *to, const void *from, size_t size) {
    if (to != from) {
        memcpy(to, from, size);
    }
}

void dmesh_stream_end(void) {}

#endif

void dmesh_copy_stream(void *to, const void *from, size_t size) {
    dmesh_stream_part(to, from, size);
    dmesh_stream_end();
}
