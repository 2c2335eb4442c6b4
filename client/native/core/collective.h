/* Collectives, as both media carry them out, and small ones in one epoch of a shared-memory group. */
#ifndef DMESH_COLLECTIVE_H
#define DMESH_COLLECTIVE_H

#include "reduce.h"
#include "shm.h"

enum dmesh_kind {
    DMESH_BARRIER,
    DMESH_ALL_REDUCE,
    DMESH_REDUCE,
    DMESH_REDUCE_SCATTER,
    DMESH_BROADCAST,
    DMESH_ALL_GATHER,
    DMESH_GATHER,
    DMESH_SCATTER,
    DMESH_ALL_TO_ALL,
    DMESH_TRANSFER, /* point to point: see `p2p.h` */
    DMESH_PERMUTE,  /* in shared memory only */
    DMESH_KINDS,
};

enum { DMESH_DIMENSIONS = 8, DMESH_MEMBERS = 64 };

/* Wire descriptor of a call: everything that all ranks must agree on. */
struct dmesh_descriptor {
    int32_t kind;
    int32_t op;       /* an `enum dmesh_op`; 0 for calls that reduce nothing */
    int32_t argument; /* the root, or the axis + 1 of a reduce-scatter */
    int32_t dtype;    /* an `enum dmesh_dtype` */
    int32_t ndim;
    int64_t shape[DMESH_DIMENSIONS];
};

/* 64 bits by which members compare their calls; equal descriptors have equal hashes on all machines. */
uint64_t dmesh_descriptor_hash(const struct dmesh_descriptor *descriptor);

/* A call of one rank. */
struct dmesh_call {
    enum dmesh_kind kind;
    int root;                    /* of a permutation: this rank's source, or -1 */
    const unsigned char *source; /* NULL if this rank contributes nothing */
    unsigned char *target;       /* NULL if it gets nothing; may be `source` */
    size_t contribution;         /* bytes of each rank's contribution */
    size_t block;                /* bytes of one rank's block, for collectives that have blocks */
    size_t count;                /* elements that this rank reduces */
    const dmesh_kernel *kernel;
};

/* Contributes to a call in one epoch. Of `source`, only `dmesh_shm_end` reads more. */
void dmesh_shm_begin(struct dmesh_shm *shm, const struct dmesh_call *call, uint64_t hash);

/* Writes this rank's result, once the epoch is complete. */
void dmesh_shm_end(const struct dmesh_shm *shm, const struct dmesh_call *call);

#endif
