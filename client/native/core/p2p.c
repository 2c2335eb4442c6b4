#include "p2p.h"

#include <string.h>

enum { SENDER = 0, RECEIVER = 1 };
enum { SLICE = 1 << 20, STREAMED = 8 << 20 };

void dmesh_p2p_begin(struct dmesh_transfer *transfer, uint64_t hash, void *data, size_t nbytes,
                     const struct dmesh_envelope *envelope) {
    *transfer = (struct dmesh_transfer){.data = data, .nbytes = nbytes, .hash = hash, .active = 1, .envelope = envelope};
}

/* The sender's envelope for an epoch. */
static struct dmesh_envelope *envelope_of(const struct dmesh_shm *shm, uint64_t epoch) {
    unsigned char *envelopes = shm->regions[SENDER]->slots + 2 * shm->slot_bytes + 2 * shm->staging_bytes;
    return (struct dmesh_envelope *)(void *)envelopes + (epoch & 1);
}

enum dmesh_status dmesh_p2p_await(struct dmesh_shm *shm, int64_t deadline) {
    return dmesh_shm_wait_for(shm, SENDER, shm->epoch + 1, deadline);
}

int dmesh_p2p_envelope(const struct dmesh_shm *shm, struct dmesh_envelope *envelope) {
    const struct dmesh_envelope *from = envelope_of(shm, shm->epoch + 1);
    memcpy(envelope, from, offsetof(struct dmesh_envelope, text));
    if (!dmesh_envelope_is_valid(envelope))
        return 0;
    memcpy(envelope->text, from->text, (size_t)envelope->text_bytes);
    return 1;
}

/* Bytes of the next piece: the whole transfer if it fits into a slot, else at most a staging buffer. */
static size_t piece_of(const struct dmesh_shm *shm, const struct dmesh_transfer *transfer) {
    return dmesh_least(transfer->nbytes - transfer->done,
                       transfer->nbytes <= shm->slot_bytes ? shm->slot_bytes : shm->staging_bytes);
}

/* The sender's buffer for the piece of an epoch. */
static unsigned char *buffer_of(const struct dmesh_shm *shm, const struct dmesh_transfer *transfer, uint64_t epoch) {
    return transfer->nbytes <= shm->slot_bytes ? dmesh_shm_slot(shm, SENDER, epoch, transfer->nbytes)
                                               : dmesh_shm_staging(shm, SENDER, epoch);
}

/* Another thread may look at `active`. */
static void end(struct dmesh_transfer *transfer) { __atomic_store_n(&transfer->active, 0, __ATOMIC_RELAXED); }

static enum dmesh_status send(struct dmesh_shm *shm, struct dmesh_transfer *transfer, int64_t deadline) {
    while (transfer->done < transfer->nbytes || !transfer->piece) {
        const uint64_t epoch = shm->epoch + 1;
        if (epoch > 2) { /* its buffer was used two epochs ago */
            const enum dmesh_status status = dmesh_shm_wait_for(shm, RECEIVER, epoch - 2, deadline);
            if (status != DMESH_OK)
                return status;
        }
        if (!transfer->piece)
            memcpy(envelope_of(shm, epoch), transfer->envelope, dmesh_envelope_size(transfer->envelope));
        if (transfer->location.where && transfer->nbytes > shm->slot_bytes) {
            memcpy(shm->regions[SENDER]->flags[epoch & 1].contribution, &transfer->location, sizeof transfer->location);
            dmesh_shm_post(shm, transfer->hash ^ DMESH_LOCATIONS);
            transfer->done = transfer->nbytes;
            transfer->piece++;
            break;
        }
        const size_t nbytes = piece_of(shm, transfer);
        if (nbytes)
            dmesh_publish(&shm->copies, buffer_of(shm, transfer, epoch), transfer->data + transfer->done, nbytes);
        dmesh_shm_post(shm, transfer->hash + transfer->piece++);
        transfer->done += nbytes;
        if (deadline && dmesh_now() >= deadline && transfer->done < transfer->nbytes)
            return DMESH_PENDING; /* so that the caller sees signals */
    }
    if (transfer->nbytes > shm->slot_bytes || transfer->nbytes > DMESH_SEND_BUFFER) { /* or it is in its slot */
        const enum dmesh_status status = dmesh_shm_wait_for(shm, RECEIVER, shm->epoch, deadline);
        if (status != DMESH_OK)
            return status;
    }
    end(transfer);
    return DMESH_OK;
}

/* Ends the receiver's half of a transfer. */
static enum dmesh_status received(struct dmesh_shm *shm, struct dmesh_transfer *transfer, enum dmesh_path path) {
    if (transfer->began)
        dmesh_shm_learn(shm, DMESH_TRANSFER, transfer->nbytes, path, dmesh_now() - transfer->began);
    end(transfer);
    return DMESH_OK;
}

/* Reads the sender's array in place. */
static enum dmesh_status read_all(struct dmesh_shm *shm, struct dmesh_transfer *transfer, int64_t deadline) {
    while (transfer->done < transfer->nbytes) {
        const size_t left = transfer->nbytes - transfer->done, nbytes = dmesh_least(left, SLICE);
        unsigned char *into = transfer->data + transfer->done;
        const unsigned char *from = transfer->from + transfer->done;
        if (!transfer->owner) {
            (transfer->nbytes >= STREAMED ? dmesh_copy_stream : dmesh_copy)(into, from, nbytes);
        } else if (dmesh_cma_read(transfer->owner, into, (uintptr_t)from, nbytes)) {
            shm->culprit = SENDER;
            return DMESH_DISCONNECTED;
        }
        transfer->done += nbytes;
        if (transfer->done == transfer->nbytes)
            break;
        if (atomic_load_explicit(&shm->stop, memory_order_relaxed))
            return DMESH_ABORTED;
        if (dmesh_now() >= deadline)
            return DMESH_PENDING;
    }
    /* The data must be read before the mark is: an aborted sender may have changed the array meanwhile. */
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load(&shm->regions[SENDER]->aborted)) {
        shm->culprit = SENDER;
        return DMESH_DISCONNECTED;
    }
    dmesh_shm_post(shm, transfer->hash);
    if (transfer->owner)
        return received(shm, transfer, DMESH_SINGLE_COPY);
    end(transfer);
    return DMESH_OK;
}

static enum dmesh_status receive(struct dmesh_shm *shm, struct dmesh_transfer *transfer, int64_t deadline) {
    do {
        const uint64_t epoch = shm->epoch + 1;
        const enum dmesh_status status = dmesh_shm_wait_for(shm, SENDER, epoch, deadline);
        if (status != DMESH_OK)
            return status;
        if (!transfer->began && transfer->nbytes > shm->slot_bytes)
            transfer->began = dmesh_now();
        const uint64_t hash = shm->regions[SENDER]->flags[epoch & 1].hash ^ shm->salts[SENDER];
        if (!transfer->piece && transfer->nbytes > shm->slot_bytes && hash == (transfer->hash ^ DMESH_LOCATIONS)) {
            if (transfer->from)
                return read_all(shm, transfer, deadline);
            memcpy(&transfer->location, shm->regions[SENDER]->flags[epoch & 1].contribution, sizeof transfer->location);
            return DMESH_RESOLVE;
        }
        if (hash != transfer->hash + transfer->piece) {
            shm->culprit = SENDER;
            return DMESH_MISMATCH;
        }
        const size_t nbytes = piece_of(shm, transfer);
        if (nbytes)
            dmesh_copy(transfer->data + transfer->done, buffer_of(shm, transfer, epoch), nbytes);
        transfer->piece++;
        transfer->done += nbytes;
        dmesh_shm_post(shm, hash);
        if (deadline && dmesh_now() >= deadline && transfer->done < transfer->nbytes)
            return DMESH_PENDING;
    } while (transfer->done < transfer->nbytes);
    return received(shm, transfer, DMESH_STAGED);
}

int dmesh_p2p_waits(const struct dmesh_shm *shm, const struct dmesh_transfer *transfer) {
    if (!__atomic_load_n(&transfer->active, __ATOMIC_RELAXED))
        return 0;
    /* A sender that has gone may have left what it has sent. */
    const uint64_t next = __atomic_load_n(&shm->epoch, __ATOMIC_RELAXED) + 1;
    const struct dmesh_flag *flag = &shm->regions[SENDER]->flags[next & 1];
    return shm->me == SENDER || atomic_load_explicit(&flag->epoch, memory_order_acquire) != next;
}

enum dmesh_status dmesh_p2p_run(struct dmesh_shm *shm, struct dmesh_transfer *transfer, int64_t deadline) {
    return shm->me == SENDER ? send(shm, transfer, deadline) : receive(shm, transfer, deadline);
}
