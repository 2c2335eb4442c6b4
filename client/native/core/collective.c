#include "collective.h"

const struct dmesh_pattern dmesh_patterns[DMESH_KINDS] = {
    [DMESH_ALL_REDUCE] = {.reduces = 1},
    [DMESH_REDUCE] = {.reduces = 1, .to_root = 1},
    [DMESH_REDUCE_SCATTER] = {.reduces = 1, .source_blocks = 1},
    [DMESH_BROADCAST] = {.from_root = 1},
    [DMESH_ALL_GATHER] = {.target_blocks = 1},
    [DMESH_GATHER] = {.to_root = 1, .target_blocks = 1},
    [DMESH_SCATTER] = {.from_root = 1, .source_blocks = 1},
    [DMESH_ALL_TO_ALL] = {.source_blocks = 1, .target_blocks = 1},
    [DMESH_TRANSFER] = {.from_root = 1},
    [DMESH_PERMUTE] = {.from_root = 1},
};

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
