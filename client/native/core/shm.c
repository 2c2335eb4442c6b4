#include "shm.h"

static struct dmesh_word word_of(const struct dmesh_shm *shm, int member, uint64_t epoch) {
    struct dmesh_region *region = shm->regions[member];
    return (struct dmesh_word){&region->flags[epoch & 1].epoch, &region->sleepers};
}

void dmesh_shm_post(struct dmesh_shm *shm, uint64_t hash) {
    __atomic_store_n(&shm->epoch, shm->epoch + 1, __ATOMIC_RELAXED); /* `dmesh_shm_has_posted` may read it */
    shm->hash = hash;
    shm->next = 0;
    shm->regions[shm->me]->flags[shm->epoch & 1].hash = hash ^ shm->salts[shm->me];
    dmesh_post(word_of(shm, shm->me, shm->epoch), shm->epoch);
}

enum dmesh_status dmesh_shm_wait_for(struct dmesh_shm *shm, int member, uint64_t epoch, int64_t deadline) {
    /* The word has the value of two epochs ago, which has the same parity. */
    const enum dmesh_status status = dmesh_wait(word_of(shm, member, epoch), epoch < 2 ? 0 : epoch - 2, epoch, deadline,
                                                &shm->stop, shm->oversubscribed);
    if (status == DMESH_CORRUPT)
        shm->culprit = member;
    return status;
}

enum dmesh_status dmesh_shm_wait(struct dmesh_shm *shm, int64_t deadline) {
    for (; shm->next < shm->size; shm->next++) {
        const int member = shm->next;
        if (member == shm->me)
            continue;
        const enum dmesh_status status = dmesh_shm_wait_for(shm, member, shm->epoch, deadline);
        if (status != DMESH_OK)
            return status;
        if ((shm->regions[member]->flags[shm->epoch & 1].hash ^ shm->salts[member]) != shm->hash) {
            shm->culprit = member;
            return DMESH_MISMATCH;
        }
    }
    return DMESH_OK;
}

int dmesh_shm_has_posted(const struct dmesh_shm *shm, int member) {
    const uint64_t epoch = __atomic_load_n(&shm->epoch, __ATOMIC_RELAXED);
    return atomic_load_explicit(&shm->regions[member]->flags[epoch & 1].epoch, memory_order_acquire) == epoch;
}

void dmesh_shm_abort(struct dmesh_shm *shm) {
    atomic_store(&shm->stop, 1);
    atomic_store(&shm->regions[shm->me]->aborted, 1);
    /* What this rank writes to its arrays from now on must not become visible before the mark. */
    atomic_thread_fence(memory_order_seq_cst);
    for (int member = 0; member < shm->size; member++)
        if (member != shm->me) {
            /* It may sleep at either flag: the region does not tell its epoch. */
            dmesh_wake(word_of(shm, member, 0));
            dmesh_wake(word_of(shm, member, 1));
        }
}

/* ---- small collectives -------------------------------------------------------------------------------------- */

/* A member's contribution; this rank's own is read from its array, which is as good and warmer. */
static const unsigned char *contribution(const struct dmesh_shm *shm, const struct dmesh_call *call, int member) {
    return member == shm->me ? call->source : dmesh_shm_slot(shm, member, shm->epoch, call->contribution);
}

void dmesh_shm_begin(struct dmesh_shm *shm, const struct dmesh_call *call, uint64_t hash) {
    if (call->source)
        dmesh_publish(&shm->copies, dmesh_shm_slot(shm, shm->me, shm->epoch + 1, call->contribution), call->source,
                      dmesh_own(call));
    dmesh_shm_post(shm, hash);
}

void dmesh_shm_end(const struct dmesh_shm *shm, const struct dmesh_call *call) {
    if (!call->target)
        return;
    if (dmesh_patterns[call->kind].reduces) {
        const size_t offset = dmesh_source_offset(call, shm->me);
        const void *inputs[DMESH_MEMBERS];
        void *outputs[] = {call->target};
        for (int member = 0; member < shm->size; member++)
            inputs[member] = contribution(shm, call, member) + offset;
        dmesh_reduce(call->kernel, inputs, (unsigned)shm->size, outputs, 1, call->count, 0);
        return;
    }
    for (int member = 0; member < shm->size; member++) {
        const size_t nbytes = dmesh_taken(call, shm->me, member);
        if (!nbytes)
            continue;
        unsigned char *into = call->target + dmesh_target_offset(call, member);
        const unsigned char *from = contribution(shm, call, member) + dmesh_origin(call, shm->me, member);
        if (into != from)
            dmesh_copy(into, from, nbytes);
    }
}
