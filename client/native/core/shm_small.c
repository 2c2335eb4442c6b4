#include "collective.h"

#include "copy.h"

/* Mixes in one word, as splitmix64's finalizer does. */
static inline uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0xBF58476D1CE4E5B9);
    return hash ^ hash >> 29;
}

uint64_t dmesh_descriptor_hash(const struct dmesh_descriptor *descriptor) {
    uint64_t hash = UINT64_C(0x9E3779B97F4A7C15);
    hash = mix(hash, (uint64_t)(uint32_t)descriptor->kind | (uint64_t)(uint32_t)descriptor->op << 32);
    hash = mix(hash, (uint64_t)(uint32_t)descriptor->argument | (uint64_t)(uint32_t)descriptor->dtype << 32);
    hash = mix(hash, (uint64_t)(uint32_t)descriptor->ndim);
    for (int axis = 0; axis < descriptor->ndim; axis++)
        hash = mix(hash, (uint64_t)descriptor->shape[axis]);
    return hash;
}

static void copy(unsigned char *into, const unsigned char *from, size_t nbytes) {
    if (into != from)
        dmesh_copy(into, from, nbytes);
}

/* A member's contribution; this rank's own is read from its array, which is as good and warmer. */
static const unsigned char *contribution(const struct dmesh_shm *shm, const struct dmesh_call *call,
                                         int member) {
    return member == shm->me ? call->source : dmesh_shm_slot(shm, member, call->contribution);
}

/* Reduces the part of all contributions that begins at `offset`, in rank order. */
static void fold(const struct dmesh_shm *shm, const struct dmesh_call *call, size_t offset) {
    const void *inputs[DMESH_MEMBERS];
    void *outputs[] = {call->target};
    for (int member = 0; member < shm->size; member++)
        inputs[member] = contribution(shm, call, member) + offset;
    dmesh_reduce(call->kernel, inputs, (unsigned)shm->size, outputs, 1, call->count, 0);
}

void dmesh_shm_begin(struct dmesh_shm *shm, const struct dmesh_call *call, uint64_t hash) {
    if (call->source)
        dmesh_publish(&shm->copies, dmesh_shm_own_slot(shm, call->contribution), call->source, call->contribution);
    dmesh_shm_post(shm, hash);
}

void dmesh_shm_end(const struct dmesh_shm *shm, const struct dmesh_call *call) {
    const int me = shm->me;
    const size_t block = call->block;
    if (!call->target)
        return;
    switch (call->kind) {
    case DMESH_ALL_REDUCE:
    case DMESH_REDUCE:
        fold(shm, call, 0);
        break;
    case DMESH_REDUCE_SCATTER:
        fold(shm, call, (size_t)me * block);
        break;
    case DMESH_BROADCAST:
        copy(call->target, contribution(shm, call, call->root), call->contribution);
        break;
    case DMESH_PERMUTE:
        if (call->root >= 0)
            copy(call->target, contribution(shm, call, call->root), call->contribution);
        break;
    case DMESH_SCATTER:
        copy(call->target, contribution(shm, call, call->root) + (size_t)me * block, block);
        break;
    case DMESH_ALL_GATHER:
    case DMESH_GATHER:
        for (int member = 0; member < shm->size; member++)
            copy(call->target + (size_t)member * block, contribution(shm, call, member), block);
        break;
    case DMESH_ALL_TO_ALL:
        for (int member = 0; member < shm->size; member++)
            copy(call->target + (size_t)member * block,
                 contribution(shm, call, member) + (size_t)me * block, block);
        break;
    case DMESH_BARRIER:
    case DMESH_TRANSFER:
    case DMESH_KINDS:
        break;
    }
}
