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

/* ---- paths of large arrays ------------------------------------------------------------------------------------ */

enum { SMALLEST = 21, SIZES = 8 }; /* logarithm of the fewest bytes that are measured; sizes of a kind */

/* Number of a kind and size; -1: arrays that are always staged. */
static int number_of(enum dmesh_kind kind, size_t nbytes) {
    static const signed char kinds[DMESH_KINDS] = {[DMESH_TRANSFER] = 1, [DMESH_BROADCAST] = 1, [DMESH_ALL_TO_ALL] = 2,
                                                   [DMESH_SCATTER] = 3, [DMESH_PERMUTE] = 4};
    int size = -1;
    for (size_t left = nbytes >> SMALLEST; left && size < SIZES - 1; left >>= 1)
        size++;
    return size < 0 || !kinds[kind] ? -1 : (kinds[kind] - 1) * SIZES + size;
}

static void publish_paths(struct dmesh_shm *shm) {
    uint64_t bits = 0;
    for (int number = 0; number < DMESH_MEASURED_ARRAYS; number++)
        bits |= (uint64_t)(dmesh_path_choose(&shm->paths[number]) == DMESH_SINGLE_COPY) << number;
    atomic_store_explicit(&shm->regions[shm->me]->single_copy, bits, memory_order_relaxed);
}

enum dmesh_path dmesh_shm_path(const struct dmesh_shm *shm, enum dmesh_kind kind, size_t nbytes) {
    const int number = number_of(kind, nbytes);
    if (shm->measurer < 0 || number < 0)
        return DMESH_STAGED;
    const uint64_t bits = atomic_load_explicit(&shm->regions[shm->measurer]->single_copy, memory_order_relaxed);
    return bits >> number & 1 ? DMESH_SINGLE_COPY : DMESH_STAGED;
}

void dmesh_shm_learn(struct dmesh_shm *shm, enum dmesh_kind kind, size_t nbytes, enum dmesh_path path, int64_t nanoseconds) {
    const int number = number_of(kind, nbytes);
    if (shm->measurer != shm->me || number < 0)
        return;
    const enum dmesh_path before = dmesh_path_choose(&shm->paths[number]);
    dmesh_path_learn(&shm->paths[number], path, nbytes, nanoseconds);
    if (dmesh_path_choose(&shm->paths[number]) != before)
        publish_paths(shm);
}

void dmesh_shm_measure(struct dmesh_shm *shm, size_t nbytes) {
    for (int number = 0; number < DMESH_MEASURED_ARRAYS; number++)
        shm->paths[number].best = (size_t)1 << (SMALLEST + number % SIZES) >= nbytes ? DMESH_SINGLE_COPY : DMESH_STAGED;
    publish_paths(shm);
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
