/* Copies of memory: into the caches, and past them. */
#ifndef DMESH_COPY_H
#define DMESH_COPY_H

#include <stddef.h>

/* Copies into the caches. Source and destination do not overlap.
 *
 * Not memcpy, because C libraries take x86's `rep movsb` from some kilobytes up, which AMD's Zen 3 does twelve times
 * more slowly than a loop where the destination lies up to 63 bytes further in its page than the source: as large
 * arrays, which begin 16 bytes after a page does, lie beside mapped memory, which begins with one. */
void dmesh_copy(void *to, const void *from, size_t size);

/* Copies past the caches, where the CPU can: megabytes whose copy would only drive other data out of them, and
 * whose lines need not be fetched to be overwritten. Source and destination do not overlap, or are the same. When
 * it returns, the copy is visible to any thread that sees a later store of this one. */
void dmesh_copy_stream(void *to, const void *from, size_t size);

/* The same in parts: dmesh_stream_end() must follow the last part, before the copy is announced, because such stores
 * are not ordered with others. */
void dmesh_stream_part(void *to, const void *from, size_t size);
void dmesh_stream_end(void);

#endif
