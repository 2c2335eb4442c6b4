/* Collectives, as both media carry them out. */
#ifndef DMESH_COLLECTIVE_H
#define DMESH_COLLECTIVE_H

#include <stddef.h>
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
    DMESH_PERMUTE,  /* always with blocks */
    DMESH_KINDS,
};

enum {
    DMESH_DIMENSIONS = 8,
    DMESH_MEMBERS = 256,
    DMESH_TEXT = 1000, /* most bytes of the text of an envelope, which is a multiple of a cache line then */
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

/* Description of a sent array, for a receiver that does not know what will come. */
struct dmesh_envelope {
    uint64_t order; /* the number of the sender's transfers to this receiver up to this one, over whatever medium */
    int32_t dtype;  /* an `enum dmesh_dtype`; -1: `text` describes it */
    int32_t ndim;
    int64_t shape[DMESH_DIMENSIONS];
    uint64_t text_bytes;
    char text[DMESH_TEXT];
};

/* Bytes of an envelope that travel. */
static inline size_t dmesh_envelope_size(const struct dmesh_envelope *envelope) {
    return offsetof(struct dmesh_envelope, text) + (size_t)envelope->text_bytes;
}

/* Whether an envelope from another process makes sense. */
static inline int dmesh_envelope_is_valid(const struct dmesh_envelope *envelope) {
    return envelope->ndim >= 0 && envelope->ndim <= DMESH_DIMENSIONS && envelope->dtype >= -1 &&
           envelope->dtype < DMESH_DTYPES && envelope->text_bytes <= DMESH_TEXT;
}

/* Flow of data of a kind of collective. */
struct dmesh_pattern {
    char from_root;     /* the root contributes; else all ranks do */
    char to_root;       /* the root gets a result; else all ranks do */
    char source_blocks; /* a contribution has a block for each rank; else all of it is for everyone */
    char target_blocks; /* a result has a block from each rank */
    char reduces;       /* the contributions become one by a reduction */
};

extern const struct dmesh_pattern dmesh_patterns[DMESH_KINDS];

/* Layout of blocks whose lengths differ, in bytes, by member. In a reduction all that is received has the same place. */
struct dmesh_blocks {
    size_t sends[DMESH_MEMBERS];       /* bytes for each member, */
    size_t send_at[DMESH_MEMBERS];     /* and where they begin in this rank's contribution */
    size_t receives[DMESH_MEMBERS];    /* bytes of each member, */
    size_t receive_at[DMESH_MEMBERS];  /* where they begin in this rank's result, */
    size_t origin[DMESH_MEMBERS];      /* and where in the member's contribution */
    size_t own;                        /* bytes of this rank's contribution */
    size_t largest;                    /* bytes of the largest block of any member: the same on all */
};

/* A call of one rank. */
struct dmesh_call {
    enum dmesh_kind kind;
    int root;
    const unsigned char *source; /* NULL if this rank contributes nothing */
    unsigned char *target;       /* NULL if it gets nothing; may be `source` */
    size_t contribution;         /* bytes of each rank's contribution; with `blocks`, of the largest one */
    size_t block;                /* bytes of one rank's block, for collectives that have blocks */
    const struct dmesh_blocks *blocks; /* NULL if all blocks have the same length */
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

/* Most bytes of a contribution that one rank gets. */
static inline size_t dmesh_share(const struct dmesh_call *call) {
    if (call->blocks)
        return call->blocks->largest;
    return dmesh_patterns[call->kind].source_blocks ? call->block : call->contribution;
}

/* Bytes of rank `me`'s contribution that a member gets, and where they begin in it. */
static inline size_t dmesh_given(const struct dmesh_call *call, int me, int getter) {
    if (call->blocks)
        return call->blocks->sends[getter];
    return dmesh_contributes(call, me) && dmesh_gets_result(call, getter) ? dmesh_share(call) : 0;
}

static inline size_t dmesh_source_offset(const struct dmesh_call *call, int getter) {
    if (call->blocks)
        return call->blocks->send_at[getter];
    return dmesh_patterns[call->kind].source_blocks ? (size_t)getter * call->block : 0;
}

/* Bytes that rank `me` gets of a member's contribution, and where they begin in it and in the result. */
static inline size_t dmesh_taken(const struct dmesh_call *call, int me, int contributor) {
    if (call->blocks)
        return call->blocks->receives[contributor];
    return dmesh_contributes(call, contributor) && dmesh_gets_result(call, me) ? dmesh_share(call) : 0;
}

static inline size_t dmesh_origin(const struct dmesh_call *call, int me, int contributor) {
    return call->blocks ? call->blocks->origin[contributor] : dmesh_source_offset(call, me);
}

static inline size_t dmesh_target_offset(const struct dmesh_call *call, int contributor) {
    if (call->blocks)
        return call->blocks->receive_at[contributor];
    return dmesh_patterns[call->kind].target_blocks ? (size_t)contributor * call->block : 0;
}

/* Bytes of this rank's own contribution. */
static inline size_t dmesh_own(const struct dmesh_call *call) {
    return call->blocks ? call->blocks->own : call->contribution;
}

#endif
