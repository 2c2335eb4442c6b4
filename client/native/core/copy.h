/* Copies of memory, into the caches and past them, and the choice between the two.
 *
 * Cores that share a cache hand lines to each other through it. Between cores that do not (other dies or sockets), writing
 * a line that the other core has read last costs a round trip per line. Non-temporal stores cost none, and the reader
 * fetches from main memory instead of the other core's cache. Which is faster depends on where the processes run, and
 * that changes. So the copies themselves are measured. */
#ifndef DMESH_COPY_H
#define DMESH_COPY_H

#include <stddef.h>
#include <stdint.h>

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

enum dmesh_copy_mode { DMESH_CACHED, DMESH_NON_TEMPORAL, DMESH_COPY_MODES };

struct dmesh_copy_policy {
    enum dmesh_copy_mode mode;       /* the faster one, as far as known */
    uint32_t cost[DMESH_COPY_MODES]; /* recent ps per byte; 0: unknown */
    uint32_t trials;                 /* copies in the other mode that are due */
    uint32_t uses;                   /* copies in the faster mode since the last trials */
    int fixed;                       /* `mode` does not change: for tests */
};

/* Copies data for another process in the faster mode; visible to others as after `dmesh_copy_stream`. */
void dmesh_publish(struct dmesh_copy_policy *copies, void *to, const void *from, size_t size);

/* For stores that are no copies: choose the mode, and learn its cost. */
enum dmesh_copy_mode dmesh_copy_choose(const struct dmesh_copy_policy *copies);
void dmesh_copy_learn(struct dmesh_copy_policy *copies, enum dmesh_copy_mode mode, size_t size, int64_t nanoseconds);

/* Paths of a large private array to its reader. Which one is faster depends on whether the cores share a cache, too. */
enum dmesh_path {
    DMESH_STAGED,      /* two copies, through a staging buffer */
    DMESH_SINGLE_COPY, /* one copy by the kernel, which looks up every page */
    DMESH_PATHS,
};

struct dmesh_path_policy {
    enum dmesh_path best;       /* the faster one, as far as known */
    uint32_t cost[DMESH_PATHS]; /* recent ps per byte; 0: unknown */
    uint32_t uses;              /* of the best one since the last trial of the other one */
    int trial;                  /* the next array takes the other one */
};

enum dmesh_path dmesh_path_choose(const struct dmesh_path_policy *paths);
void dmesh_path_learn(struct dmesh_path_policy *paths, enum dmesh_path path, size_t size, int64_t nanoseconds);

#endif
