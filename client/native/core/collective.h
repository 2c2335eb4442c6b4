/* Collectives, as both media carry them out. */
#ifndef DMESH_COLLECTIVE_H
#define DMESH_COLLECTIVE_H

#include <stdint.h>

#include "reduce.h"

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
    DMESH_TRANSFER, /* point to point, from member 0: see `p2p.h` */
    DMESH_PERMUTE,  /* in shared memory only */
    DMESH_KINDS,
};

enum {
    DMESH_DIMENSIONS = 8,
    DMESH_MEMBERS = 64,
    DMESH_SEND_BUFFER = 16 * 1024, /* largest send that may return before its receiver's call: SEND_BUFFER of tuning.py */
};

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

/* Flow of data of a kind of collective. */
struct dmesh_pattern {
    char from_root;     /* the root contributes; else all ranks do */
    char to_root;       /* the root gets a result; else all ranks do */
    char source_blocks; /* a contribution has a block for each rank; else all of it is for everyone */
    char target_blocks; /* a result has a block from each rank */
    char reduces;       /* the contributions become one by a reduction */
};

extern const struct dmesh_pattern dmesh_patterns[DMESH_KINDS];

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

static inline size_t dmesh_least(size_t a, size_t b) { return a < b ? a : b; }

static inline int dmesh_contributes(const struct dmesh_call *call, int member) {
    return !dmesh_patterns[call->kind].from_root || member == call->root;
}

static inline int dmesh_gets_result(const struct dmesh_call *call, int member) {
    return !dmesh_patterns[call->kind].to_root || member == call->root;
}

/* Bytes of a contribution that one rank gets, and where they begin in it and in the result. */
static inline size_t dmesh_share(const struct dmesh_call *call) {
    return dmesh_patterns[call->kind].source_blocks ? call->block : call->contribution;
}

static inline size_t dmesh_source_offset(const struct dmesh_call *call, int getter) {
    return dmesh_patterns[call->kind].source_blocks ? (size_t)getter * call->block : 0;
}

static inline size_t dmesh_target_offset(const struct dmesh_call *call, int contributor) {
    return dmesh_patterns[call->kind].target_blocks ? (size_t)contributor * call->block : 0;
}

#endif
