/* Large collectives in shared memory, piece by piece through staging buffers that stay in the caches.
 *
 * The callers' arrays are private. So each rank copies what others need of a piece into its staging buffer, all wait for
 * the epoch, and each copies or reduces what it needs from the buffers of the others; then the next piece follows. Two
 * staging buffers alternate, as flags do, with one epoch per piece. Each rank thus reads its input once from main memory
 * and writes its output once; the rest is traffic between caches. The pieces that a rank reduces for all (all-reduce)
 * go to a second pair of buffers, from which the others copy them one epoch later.
 *
 * Arrays in shared memory need no staging: peers read inputs and write outputs in place. Neither do large inputs of
 * which each byte goes to one rank, if that rank may read this process's memory. In its first epoch each rank
 * says whether one of its arrays is reachable. Only if one is, all exchange the locations and start over.
 */
#ifndef DMESH_SHM_STAGED_H
#define DMESH_SHM_STAGED_H

#include "registered.h"
#include "shm.h"

/* A member's arrays as this process sees them; NULL if it cannot. */
struct dmesh_peer_arrays {
    const unsigned char *source;
    unsigned char *target;
    int owner; /* process in which `source` is an address; 0: this one */
};

enum dmesh_phase {
    DMESH_OFFERING, /* it is not known yet whether any array is reachable */
    DMESH_LOCATING, /* one is: the members exchange locations */
    DMESH_MOVING,   /* `peers` is valid */
};

struct dmesh_staged {
    struct dmesh_call call;
    uint64_t hash;
    size_t length; /* bytes to process: of one block, or of the whole array for collectives without blocks */
    size_t piece;  /* bytes of them per step */
    size_t steps;  /* 0: no call */
    size_t step;   /* current one */
    size_t done;   /* bytes of this rank's share of the step that are processed */
    int closes;    /* whether an epoch follows the last step */
    int posted;    /* the step's epoch */
    int64_t began; /* when all ranks had posted the first epoch */
    int streams;   /* whether results bypass the caches: they are large, and read later, if at all */
    enum dmesh_phase phase;
    struct dmesh_location source, target; /* of this rank's arrays */
    struct dmesh_peer_arrays peers[DMESH_MEMBERS];
};

/* Prepares a call; writes nothing to shared memory. */
void dmesh_staged_init(const struct dmesh_shm *shm, struct dmesh_staged *staged, const struct dmesh_call *call,
                       uint64_t hash);

/* Offers this rank's arrays to the peers, before the call begins. All members must do so, or none. */
void dmesh_staged_offer(const struct dmesh_shm *shm, struct dmesh_staged *staged, struct dmesh_location source,
                        struct dmesh_location target);

/* Carries the call out, or goes on with it after DMESH_PENDING, or an interruption by a signal. Returns DMESH_PENDING at
 * `deadline` even if no rank is missing. DMESH_RESOLVE: the caller fills in `peers`, calls `dmesh_staged_resolved`, and
 * calls this again. DMESH_DISCONNECTED: the memory of `culprit` is not readable; most likely its process has ended. */
enum dmesh_status dmesh_staged_run(struct dmesh_shm *shm, struct dmesh_staged *staged, int64_t deadline);

/* A member's two locations, of its source and its target, after DMESH_RESOLVE. */
const struct dmesh_location *dmesh_staged_locations(const struct dmesh_shm *shm, int member);

/* Ends the exchange of locations: `peers` is filled in. */
void dmesh_staged_resolved(const struct dmesh_shm *shm, struct dmesh_staged *staged);

/* Whether peers read or write this rank's arrays in place, until the call is complete. */
int dmesh_staged_is_exposed(const struct dmesh_staged *staged);

#endif
