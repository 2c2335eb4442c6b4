/* Epochs of a shared-memory group: all ranks of one host meet in memory that each of them has mapped.
 *
 * Each rank has a region of its own per group. Only that rank writes to it, except for the count of sleepers:
 *
 *     flag 0 | flag 1 | sleepers | slot 0 | slot 1 | staging buffers (see `shm_staged.h`)
 *
 * In an *epoch* each rank writes its contribution to its slot, then the number of the epoch to its flag, and waits until
 * the flags of all other ranks have that number. Epochs alternate between the two flags and slots. No rank posts epoch
 * n + 1 before it has read what it needs of epoch n, and none starts epoch n + 2 before all have posted n + 1. So nothing
 * is overwritten while it is read.
 *
 * Groups use a region one after the other, each with a new random salt. A rank that has not heard of the end of one
 * group therefore never mistakes a flag of the next group for one of its own.
 */
#ifndef DMESH_SHM_H
#define DMESH_SHM_H

#include <stddef.h>

#include "collective.h"
#include "copy.h"
#include "wait.h"

enum { DMESH_INLINE = 48 };
enum { DMESH_MEASURED_ARRAYS = 32 }; /* kinds and sizes of arrays whose paths are measured; see `dmesh_shm_learn` */

/* One cache line, so that a small contribution travels together with its announcement. */
struct dmesh_flag {
    _Alignas(64) _Atomic uint64_t epoch;      /* the last epoch for which the rest was written */
    uint64_t hash;                            /* descriptor hash of the call, salted: all members must agree on it */
    unsigned char contribution[DMESH_INLINE]; /* a short one; longer ones are in the slot */
};

struct dmesh_region {
    struct dmesh_flag flags[2];
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic uint32_t aborted; /* the owner may have reused its arrays: data read from them is not valid */
    uint64_t left;            /* the salt of a member that has left: Python reads and writes it */
    _Atomic uint64_t single_copy; /* of the measuring member: arrays that go by a single copy, a bit for a kind and size */
    _Alignas(64) unsigned char slots[];
};

struct dmesh_shm {
    int size, me;
    size_t slot_bytes;                 /* of each of the two slots of a region */
    size_t staging_bytes;              /* of each of the four staging buffers of a region */
    struct dmesh_region **regions;     /* of each member, by position */
    uint64_t *salts;                   /* of each member: mixed into the hashes that it writes */
    int oversubscribed;                /* more ranks than cores: who spins may keep the awaited rank from running */
    struct dmesh_copy_policy copies;   /* for contributions */
    struct dmesh_copy_policy results;  /* for results that are written into peers' arrays */
    struct dmesh_path_policy paths[DMESH_MEASURED_ARRAYS];
    int measurer;                      /* member that measures and chooses the paths of all arrays; -1: none */
    uint64_t epoch;                    /* the last one posted */
    uint64_t hash;                     /* of that epoch */
    int next;                          /* first member that has not been seen in that epoch */
    int culprit;
    _Atomic int stop;
};

/* Bytes of a region; a multiple of a cache line if those of its slots and staging buffers are. */
static inline size_t dmesh_region_size(size_t slot_bytes, size_t staging_bytes) {
    return offsetof(struct dmesh_region, slots) + 2 * slot_bytes + 4 * staging_bytes;
}

/* A member's slot for a contribution of `nbytes` to an epoch. */
static inline unsigned char *dmesh_shm_slot(const struct dmesh_shm *shm, int member, uint64_t epoch, size_t nbytes) {
    struct dmesh_region *region = shm->regions[member];
    return nbytes <= DMESH_INLINE ? region->flags[epoch & 1].contribution : region->slots + (epoch & 1) * shm->slot_bytes;
}

/* A member's staging buffer for an epoch. */
static inline unsigned char *dmesh_shm_staging(const struct dmesh_shm *shm, int member, uint64_t epoch) {
    return shm->regions[member]->slots + 2 * shm->slot_bytes + (epoch & 1) * shm->staging_bytes;
}

/* Starts the next epoch: publishes what was written to this rank's slot. */
void dmesh_shm_post(struct dmesh_shm *shm, uint64_t hash);

/* Waits for the others; with deadline 0 only for a microsecond or two, without system calls. May be called again after
 * DMESH_PENDING and DMESH_ABORTED. */
enum dmesh_status dmesh_shm_wait(struct dmesh_shm *shm, int64_t deadline);

/* Waits until a member has posted an epoch. */
enum dmesh_status dmesh_shm_wait_for(struct dmesh_shm *shm, int member, uint64_t epoch, int64_t deadline);

/* Whether a member has posted the current epoch. Any thread. */
int dmesh_shm_has_posted(const struct dmesh_shm *shm, int member);

/* Ends all waits and long folds, now and later, and marks this rank's region as aborted. Any thread. */
void dmesh_shm_abort(struct dmesh_shm *shm);

/* Chooses the path of arrays of `nbytes` bytes in calls of a kind, as the measuring member has found the faster one. */
enum dmesh_path dmesh_shm_path(const struct dmesh_shm *shm, enum dmesh_kind kind, size_t nbytes);

/* Reports what the path of an array took, and tells the other members the choice for the next one. */
void dmesh_shm_learn(struct dmesh_shm *shm, enum dmesh_kind kind, size_t nbytes, enum dmesh_path path, int64_t nanoseconds);

/* Makes this member measure, and begin with a single copy of arrays from `nbytes` bytes on. */
void dmesh_shm_measure(struct dmesh_shm *shm, size_t nbytes);

/* A small collective, in one epoch: contributes. Of `source`, only `dmesh_shm_end` reads more. */
void dmesh_shm_begin(struct dmesh_shm *shm, const struct dmesh_call *call, uint64_t hash);

/* Writes this rank's result, once the epoch is complete. */
void dmesh_shm_end(const struct dmesh_shm *shm, const struct dmesh_call *call);

#endif
