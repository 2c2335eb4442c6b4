#include "shm_staged.h"

#include <string.h>

/* Results from this size on bypass the caches, unless they replace the inputs, whose lines are cached already. */
static const size_t STREAMED = (size_t)8 << 20;
/* Bytes between looks at the clock and at `stop`: well below a millisecond. A multiple of 64. */
static const size_t SLICE = (size_t)2 << 20;

/* A member's buffer for what it reduces after an epoch. */
static unsigned char *reduced_of(const struct dmesh_shm *shm, int member, uint64_t epoch) {
    return dmesh_shm_staging(shm, member, epoch) + 2 * shm->staging_bytes;
}

static void deliver(const struct dmesh_staged *staged, unsigned char *into, const unsigned char *from, size_t nbytes) {
    (staged->streams ? dmesh_copy_stream : dmesh_copy)(into, from, nbytes);
}

static const struct dmesh_pattern *pattern_of(const struct dmesh_staged *staged) {
    return &dmesh_patterns[staged->call.kind];
}

/* Whether each rank reduces a part of every piece for others. */
static int shares_pieces(const struct dmesh_staged *staged) {
    return pattern_of(staged)->reduces && !pattern_of(staged)->source_blocks;
}

/* Whether each byte goes to one rank, which copies it. Bytes that several ranks read, or that are reduced, are better
 * staged, where they are found in the caches. */
static int is_personal(const struct dmesh_shm *shm, const struct dmesh_staged *staged) {
    return staged->call.kind == DMESH_PERMUTE || (staged->call.kind == DMESH_BROADCAST && shm->size == 2) ||
           (pattern_of(staged)->source_blocks && !pattern_of(staged)->reduces);
}

/* Chooses the size of the pieces: that of a staging buffer, or everything at once if nothing is staged. */
static void choose_pieces(const struct dmesh_shm *shm, struct dmesh_staged *staged) {
    const int blocks = pattern_of(staged)->source_blocks, shares = shares_pieces(staged);
    const size_t parts = blocks || shares ? (size_t)shm->size : 1;
    const size_t section = shm->staging_bytes / parts / 64 * 64; /* item sizes of all kernels divide 64 */
    int needs_staging = 0, in_place = 0;
    for (int member = 0; member < shm->size; member++) {
        const struct dmesh_peer_arrays *peer = &staged->peers[member];
        /* Of a permutation, each knows its own source only. */
        const int contributes = staged->call.kind == DMESH_PERMUTE || dmesh_contributes(&staged->call, member);
        needs_staging |= contributes && !peer->source;
        needs_staging |= shares && dmesh_gets_result(&staged->call, member) && !peer->target;
        in_place |= peer->source || peer->target;
    }
    staged->length = dmesh_share(&staged->call);
    staged->piece = !needs_staging ? staged->length : shares ? section * parts : section;
    staged->steps = (staged->length + staged->piece - 1) / staged->piece;
    /* Peers may still read this rank's arrays or buffers, or write to its result. */
    staged->closes = in_place || shares;
}

void dmesh_staged_init(const struct dmesh_shm *shm, struct dmesh_staged *staged, const struct dmesh_call *call,
                       uint64_t hash) {
    *staged = (struct dmesh_staged){.call = *call, .hash = hash, .phase = DMESH_MOVING};
    staged->streams = call->contribution >= STREAMED && call->target != call->source;
    choose_pieces(shm, staged);
}

void dmesh_staged_offer(const struct dmesh_shm *shm, struct dmesh_staged *staged, struct dmesh_location source,
                        struct dmesh_location target) {
    const enum dmesh_kind kind = staged->call.kind;
    if ((kind == DMESH_ALL_TO_ALL || kind == DMESH_PERMUTE) && staged->call.target == staged->call.source)
        source.where = DMESH_PRIVATE; /* it is overwritten while others would read it */
    if (source.where == DMESH_IN_PROCESS && !is_personal(shm, staged))
        source.where = DMESH_PRIVATE;
    if (!shares_pieces(staged) || target.where == DMESH_IN_PROCESS)
        target.where = DMESH_PRIVATE; /* no other rank writes to it, or can */
    staged->phase = DMESH_OFFERING;
    staged->source = source;
    staged->target = target;
}

int dmesh_staged_is_exposed(const struct dmesh_staged *staged) {
    return staged->source.where != DMESH_PRIVATE || staged->target.where != DMESH_PRIVATE;
}

void dmesh_staged_resolved(const struct dmesh_shm *shm, struct dmesh_staged *staged) {
    staged->phase = DMESH_MOVING;
    staged->step = 0;
    staged->posted = 0;
    choose_pieces(shm, staged);
}

/* Bytes `begin` to `end` of the array, or of a block. */
struct range {
    size_t begin, end;
};

static struct range piece_of(const struct dmesh_staged *staged, size_t step) {
    const size_t begin = step * staged->piece;
    return (struct range){begin, dmesh_least(begin + staged->piece, staged->length)};
}

/* The part of a piece that a block of `nbytes` has; the pieces are those of the largest block. */
static struct range clip(struct range piece, size_t nbytes) {
    const size_t end = dmesh_least(piece.end, nbytes);
    return (struct range){dmesh_least(piece.begin, end), end};
}

/* The part of a piece that a member reduces: a multiple of 64 bytes; the last parts may be shorter or empty. */
static struct range part_of(const struct dmesh_shm *shm, struct range piece, int member) {
    const size_t share = (piece.end - piece.begin + (size_t)shm->size - 1) / (size_t)shm->size;
    const size_t section = (share + 63) / 64 * 64;
    const size_t begin = dmesh_least(piece.begin + (size_t)member * section, piece.end);
    return (struct range){begin, dmesh_least(begin + section, piece.end)};
}

/* Offset in a staging buffer of the data for a member. */
static size_t section_at(const struct dmesh_shm *shm, const struct dmesh_staged *staged, struct range piece,
                         int member) {
    if (shares_pieces(staged))
        return part_of(shm, piece, member).begin - piece.begin;
    return pattern_of(staged)->source_blocks ? (size_t)member * staged->piece : 0;
}

/* Copies what others need of a piece into this rank's staging buffer. */
static void stage(struct dmesh_shm *shm, const struct dmesh_staged *staged) {
    const struct dmesh_call *call = &staged->call;
    const struct range piece = piece_of(staged, staged->step);
    unsigned char *buffer = dmesh_shm_staging(shm, shm->me, shm->epoch + 1);
    const unsigned char *source = call->source;
    if (!source || staged->peers[shm->me].source)
        return; /* others read it in place */
    if (shares_pieces(staged)) {
        const struct range own = part_of(shm, piece, shm->me); /* which no other rank reads */
        dmesh_publish(&shm->copies, buffer, source + piece.begin, own.begin - piece.begin);
        dmesh_publish(&shm->copies, buffer + (own.end - piece.begin), source + own.end, piece.end - own.end);
    } else if (pattern_of(staged)->source_blocks) {
        for (int member = 0; member < shm->size; member++) {
            const struct range part = clip(piece, dmesh_given(call, shm->me, member));
            if (member != shm->me && part.end > part.begin)
                dmesh_publish(&shm->copies, buffer + section_at(shm, staged, piece, member),
                              source + dmesh_source_offset(call, member) + part.begin, part.end - part.begin);
        }
    } else if (!pattern_of(staged)->to_root || shm->me != call->root) {
        const struct range part = clip(piece, dmesh_own(call));
        dmesh_publish(&shm->copies, buffer, source + part.begin, part.end - part.begin);
    }
}

/* A member's contribution: at `offset` in its array, or at `at` in its staging buffer. */
static const unsigned char *contribution(const struct dmesh_shm *shm, const struct dmesh_staged *staged, int member,
                                         size_t offset, size_t at) {
    if (member == shm->me)
        return staged->call.source + offset;
    if (staged->peers[member].source)
        return staged->peers[member].source + offset;
    return dmesh_shm_staging(shm, member, shm->epoch) + at;
}

/* Reduces `nbytes` of all contributions in rank order: at `offset` in the arrays, at `at` in the staging buffers. */
static void reduce(const struct dmesh_shm *shm, const struct dmesh_staged *staged, size_t offset, size_t at,
                   size_t nbytes, void *const *outputs, unsigned outs, int streams) {
    const void *inputs[DMESH_MEMBERS];
    for (int member = 0; member < shm->size; member++)
        inputs[member] = contribution(shm, staged, member, offset, at);
    const size_t count = nbytes / dmesh_kernel_input_size(staged->call.kernel);
    dmesh_reduce(staged->call.kernel, inputs, (unsigned)shm->size, outputs, outs, count, streams);
}

/* Reduces bytes `slice` of the array, which are in this rank's part of a piece, for all ranks that get the result. */
static void reduce_part(struct dmesh_shm *shm, const struct dmesh_staged *staged, struct range piece,
                        struct range slice) {
    const size_t nbytes = slice.end - slice.begin;
    const size_t at = slice.begin - piece.begin;
    void *outputs[DMESH_MEMBERS];
    unsigned outs = 0;
    int needs_staging = 0;
    for (int member = 0; member < shm->size; member++) {
        if (!dmesh_gets_result(&staged->call, member))
            continue;
        unsigned char *target = member == shm->me ? staged->call.target : staged->peers[member].target;
        if (target)
            outputs[outs++] = target + slice.begin;
        else
            needs_staging = 1;
    }
    unsigned char *reduced = reduced_of(shm, shm->me, shm->epoch) + (slice.begin - part_of(shm, piece, shm->me).begin);
    const int non_temporal = shm->copies.mode == DMESH_NON_TEMPORAL;
    if (!needs_staging) {
        const enum dmesh_copy_mode mode = staged->streams ? DMESH_NON_TEMPORAL : dmesh_copy_choose(&shm->results);
        const int64_t began = dmesh_now();
        reduce(shm, staged, slice.begin, at, nbytes, outputs, outs, mode == DMESH_NON_TEMPORAL);
        dmesh_copy_learn(&shm->results, mode, nbytes, dmesh_now() - began);
    } else if (!outs || (non_temporal && staged->streams)) {
        outputs[outs++] = reduced;
        reduce(shm, staged, slice.begin, at, nbytes, outputs, outs, non_temporal);
    } else if (staged->streams) {
        void *only[] = {reduced};
        reduce(shm, staged, slice.begin, at, nbytes, only, 1, 0);
        for (unsigned out = 0; out < outs; out++)
            deliver(staged, outputs[out], reduced, nbytes);
    } else {
        reduce(shm, staged, slice.begin, at, nbytes, outputs, outs, 0);
        dmesh_publish(&shm->copies, reduced, outputs[0], nbytes);
    }
}

/* Copies what the others reduced of a piece, one epoch after they could begin to. */
static void collect_reduced(const struct dmesh_shm *shm, const struct dmesh_staged *staged, size_t step) {
    const struct range piece = piece_of(staged, step);
    if (!staged->call.target || staged->peers[shm->me].target)
        return; /* this rank gets no result, or the others have written it in place */
    for (int member = 0; member < shm->size; member++) {
        const struct range part = part_of(shm, piece, member);
        if (member != shm->me && part.end > part.begin)
            deliver(staged, staged->call.target + part.begin, reduced_of(shm, member, shm->epoch - 1),
                    part.end - part.begin);
    }
}

/* Copies `nbytes` of a member's contribution. DMESH_DISCONNECTED if they are not readable. */
static enum dmesh_status fetch(struct dmesh_shm *shm, const struct dmesh_staged *staged, int member, size_t offset,
                               size_t at, unsigned char *into, size_t nbytes) {
    const unsigned char *from = contribution(shm, staged, member, offset, at);
    const int owner = member == shm->me ? 0 : staged->peers[member].owner;
    if (!owner && into != from)
        deliver(staged, into, from, nbytes);
    if (!owner || !dmesh_cma_read(owner, into, (uintptr_t)from, nbytes))
        return DMESH_OK;
    shm->culprit = member;
    return DMESH_DISCONNECTED;
}

/* Copies or reduces bytes `slice` of a piece, relative to its begin, from all contributions that this rank needs. */
static enum dmesh_status take(struct dmesh_shm *shm, const struct dmesh_staged *staged, struct range piece,
                              struct range slice) {
    const struct dmesh_call *call = &staged->call;
    const struct range whole = {piece.begin + slice.begin, piece.begin + slice.end};
    const size_t begin = whole.begin, at = section_at(shm, staged, piece, shm->me) + slice.begin;
    enum dmesh_status status = DMESH_OK;
    if (pattern_of(staged)->reduces) {
        const struct range part = clip(whole, dmesh_taken(call, shm->me, shm->me));
        void *outputs[] = {call->target + begin};
        if (call->target && part.end > part.begin)
            reduce(shm, staged, dmesh_source_offset(call, shm->me) + begin, at, part.end - part.begin, outputs, 1, 0);
        return DMESH_OK;
    }
    for (int turn = 0; call->target && status == DMESH_OK && turn < shm->size; turn++) {
        const int member = (shm->me + turn) % shm->size; /* each starts with another one */
        const struct range part = clip(whole, dmesh_taken(call, shm->me, member));
        if (part.end > part.begin)
            status = fetch(shm, staged, member, dmesh_origin(call, shm->me, member) + begin, at,
                           call->target + dmesh_target_offset(call, member) + begin, part.end - part.begin);
    }
    return status;
}

/* Does this rank's share of a step, slice by slice: an abort ends it soon, and a deadline interrupts it. */
static enum dmesh_status process(struct dmesh_shm *shm, struct dmesh_staged *staged, int64_t deadline) {
    const int reduces = shares_pieces(staged);
    if (reduces && staged->step && !staged->done)
        collect_reduced(shm, staged, staged->step - 1);
    if (staged->step == staged->steps)
        return DMESH_OK; /* the last epoch, in which nothing is staged */
    const struct range piece = piece_of(staged, staged->step);
    const struct range share = reduces ? part_of(shm, piece, shm->me) : piece;
    while (staged->done < share.end - share.begin) {
        const size_t left = share.end - share.begin - staged->done, nbytes = dmesh_least(left, SLICE);
        enum dmesh_status status = DMESH_OK;
        if (reduces) {
            const size_t begin = share.begin + staged->done;
            reduce_part(shm, staged, piece, (struct range){begin, begin + nbytes});
        } else {
            status = take(shm, staged, piece, (struct range){staged->done, staged->done + nbytes});
        }
        if (status != DMESH_OK)
            return status;
        staged->done += nbytes;
        if (nbytes == left)
            break;
        if (atomic_load_explicit(&shm->stop, memory_order_relaxed))
            return DMESH_ABORTED;
        if (dmesh_now() >= deadline)
            return DMESH_PENDING;
    }
    return DMESH_OK;
}

/* ---- exchanging locations ----------------------------------------------------------------------------------- */

static unsigned char *offer_of(const struct dmesh_shm *shm, int member, uint64_t epoch) {
    return dmesh_shm_slot(shm, member, epoch, 1);
}

/* Whether an array of any member is reachable, as the first epoch tells. */
static int any_offers(const struct dmesh_shm *shm) {
    for (int member = 0; member < shm->size; member++)
        if (*offer_of(shm, member, shm->epoch))
            return 1;
    return 0;
}

const struct dmesh_location *dmesh_staged_locations(const struct dmesh_shm *shm, int member) {
    return (const struct dmesh_location *)dmesh_shm_slot(shm, member, shm->epoch, 2 * sizeof(struct dmesh_location));
}

/* Writes what others need before the next epoch, and posts it. */
static void post(struct dmesh_shm *shm, struct dmesh_staged *staged) {
    uint64_t hash = staged->hash + staged->step;
    if (staged->phase == DMESH_LOCATING) {
        const struct dmesh_location locations[] = {staged->source, staged->target};
        memcpy(dmesh_shm_slot(shm, shm->me, shm->epoch + 1, sizeof locations), locations, sizeof locations);
        hash ^= DMESH_LOCATIONS;
    } else {
        if (staged->step < staged->steps)
            stage(shm, staged);
        if (staged->phase == DMESH_OFFERING)
            *offer_of(shm, shm->me, shm->epoch + 1) = (unsigned char)dmesh_staged_is_exposed(staged);
    }
    dmesh_shm_post(shm, hash);
    staged->posted = 1;
}

/* Reports what the call took, if all contributions took the same path, and none was in shared memory. */
static void learn(struct dmesh_shm *shm, const struct dmesh_staged *staged) {
    int single = 0, contributions = 0;
    for (int member = 0; member < shm->size; member++) {
        const struct dmesh_peer_arrays *peer = &staged->peers[member];
        const int is_own = member == shm->me;
        if (staged->call.kind != DMESH_PERMUTE && !dmesh_contributes(&staged->call, member))
            continue;
        if (is_own ? staged->source.where == DMESH_IN_SEGMENT : peer->source && !peer->owner)
            return;
        single += is_own ? staged->source.where == DMESH_IN_PROCESS : peer->source != NULL;
        contributions++;
    }
    if (single == 0 || single == contributions)
        dmesh_shm_learn(shm, staged->call.kind, staged->call.contribution, single ? DMESH_SINGLE_COPY : DMESH_STAGED,
                        dmesh_now() - staged->began);
}

enum dmesh_status dmesh_staged_run(struct dmesh_shm *shm, struct dmesh_staged *staged, int64_t deadline) {
    while (staged->step < staged->steps + (size_t)staged->closes) {
        if (!staged->posted)
            post(shm, staged);
        enum dmesh_status status = dmesh_shm_wait(shm, deadline);
        if (status != DMESH_OK)
            return status;
        if (!staged->began)
            staged->began = dmesh_now();
        if (staged->phase == DMESH_LOCATING)
            return DMESH_RESOLVE;
        if (staged->phase == DMESH_OFFERING) {
            staged->phase = any_offers(shm) ? DMESH_LOCATING : DMESH_MOVING;
            if (staged->phase == DMESH_LOCATING) {
                staged->posted = 0;
                continue;
            }
        }
        status = process(shm, staged, deadline);
        if (status != DMESH_OK)
            return status;
        staged->posted = 0;
        staged->done = 0;
        staged->step++;
        if (dmesh_now() >= deadline && staged->step < staged->steps + (size_t)staged->closes)
            return DMESH_PENDING; /* so that the caller sees signals */
    }
    learn(shm, staged);
    return DMESH_OK;
}
