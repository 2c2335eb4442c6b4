#include "shm.h"

static struct dmesh_word word_at(const struct dmesh_shm *shm, int member, uint64_t epoch) {
    struct dmesh_region *region = shm->regions[member];
    return (struct dmesh_word){&region->flags[epoch & 1].epoch, &region->sleepers};
}

static struct dmesh_word word_of(const struct dmesh_shm *shm, int member) { return word_at(shm, member, shm->epoch); }

/* The previous value of the current epoch's word: that of two epochs ago, which has the same parity. */
static uint64_t previous(const struct dmesh_shm *shm) { return shm->epoch < 2 ? 0 : shm->epoch - 2; }

void dmesh_shm_post(struct dmesh_shm *shm, uint64_t hash) {
    __atomic_store_n(&shm->epoch, shm->epoch + 1, __ATOMIC_RELAXED); /* `dmesh_shm_has_posted` may read it */
    shm->hash = hash;
    shm->next = 0;
    struct dmesh_flag *flag = &shm->regions[shm->me]->flags[shm->epoch & 1];
    flag->hash = hash ^ shm->salts[shm->me];
    dmesh_post(word_of(shm, shm->me), shm->epoch);
}

static enum dmesh_status status_of(struct dmesh_shm *shm, int member, enum dmesh_wait_result result) {
    switch (result) {
    case DMESH_TIMED_OUT:
        return DMESH_PENDING;
    case DMESH_INTERRUPTED:
        return DMESH_ABORTED;
    case DMESH_UNEXPECTED:
        shm->culprit = member;
        return DMESH_CORRUPT;
    case DMESH_ARRIVED:
        break;
    }
    if ((shm->regions[member]->flags[shm->epoch & 1].hash ^ shm->salts[member]) == shm->hash)
        return DMESH_OK;
    shm->culprit = member;
    return DMESH_MISMATCH;
}

enum dmesh_status dmesh_shm_spin(struct dmesh_shm *shm) {
    for (; shm->next < shm->size; shm->next++) {
        if (shm->next == shm->me)
            continue;
        const enum dmesh_status status = status_of(
            shm, shm->next, dmesh_spin(word_of(shm, shm->next), previous(shm), shm->epoch, &shm->policy));
        if (status != DMESH_OK)
            return status;
    }
    return DMESH_OK;
}

enum dmesh_status dmesh_shm_wait(struct dmesh_shm *shm, int64_t deadline) {
    for (; shm->next < shm->size; shm->next++) {
        if (shm->next == shm->me)
            continue;
        const enum dmesh_status status =
            status_of(shm, shm->next,
                      dmesh_wait(word_of(shm, shm->next), previous(shm), shm->epoch, deadline, &shm->stop, &shm->policy));
        if (status != DMESH_OK)
            return status;
    }
    return DMESH_OK;
}

int dmesh_shm_has_posted(const struct dmesh_shm *shm, int member) {
    const uint64_t epoch = __atomic_load_n(&shm->epoch, __ATOMIC_RELAXED);
    return dmesh_reached(word_at(shm, member, epoch), epoch);
}

void dmesh_shm_abort(struct dmesh_shm *shm) {
    atomic_store(&shm->stop, 1);
    atomic_store(&shm->regions[shm->me]->aborted, 1);
    /* What this rank writes to its arrays from now on must not become visible before the mark. */
    atomic_thread_fence(memory_order_seq_cst);
    for (int member = 0; member < shm->size; member++)
        if (member != shm->me) {
            /* It may sleep at either flag: the region does not tell its epoch. */
            struct dmesh_region *region = shm->regions[member];
            dmesh_wake((struct dmesh_word){&region->flags[0].epoch, &region->sleepers});
            dmesh_wake((struct dmesh_word){&region->flags[1].epoch, &region->sleepers});
        }
}
