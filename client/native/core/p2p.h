/* Point-to-point channel: transfers between two ranks in shared memory. Member 0 sends, member 1 receives.
 *
 * The sender copies a piece into its next slot and posts an epoch; the receiver copies it out and posts its own epoch.
 * There are two slots, so the sender waits only for a receiver that is two pieces behind; and at the end, unless the
 * array is in one slot and no larger than DMESH_SEND_BUFFER, for the last piece to be taken. A large array that the
 * receiver can reach is not copied to slots: the first epoch tells its location, and the receiver reads it in place.
 *
 * With the first piece, the sender writes an envelope, behind the staging buffers: only a receiver that does not know what
 * will come looks at it, so it costs the others nothing.
 */
#ifndef DMESH_P2P_H
#define DMESH_P2P_H

#include "registered.h"
#include "shm.h"

struct dmesh_transfer {
    unsigned char *data; /* read by the sender, written by the receiver */
    size_t nbytes;
    size_t done;
    uint64_t hash;
    uint64_t piece; /* number of the next one */
    int active;
    const struct dmesh_envelope *envelope; /* of the sender */
    struct dmesh_location location; /* of the sender's array */
    const unsigned char *from;      /* the sender's array as the receiver sees it, once it is resolved */
    int owner;                      /* process in which `from` is an address; 0: this one */
    int64_t began;                  /* when the receiver saw the first piece */
};

/* Bytes of a member's region: the receiver's has flags only. */
static inline size_t dmesh_p2p_region_size(int member, size_t slot_bytes, size_t staging_bytes) {
    return offsetof(struct dmesh_region, slots) +
           (member ? 0 : 2 * slot_bytes + 2 * staging_bytes + 2 * sizeof(struct dmesh_envelope));
}

/* Prepares a transfer. The sender may then set `location`, if the receiver understands locations. The envelope, the
 * sender's, must stay as it is. */
void dmesh_p2p_begin(struct dmesh_transfer *transfer, uint64_t hash, void *data, size_t nbytes,
                     const struct dmesh_envelope *envelope);

/* Waits, between two transfers, until the sender has begun the next one. Deadline 0: hardly waits. */
enum dmesh_status dmesh_p2p_await(struct dmesh_shm *shm, int64_t deadline);

/* Copies the envelope of a transfer that the sender has begun; false if it makes no sense. */
int dmesh_p2p_envelope(const struct dmesh_shm *shm, struct dmesh_envelope *envelope);

/* Carries out this rank's half, or goes on with it after DMESH_PENDING, or an interruption by a signal. Returns
 * DMESH_PENDING at `deadline`; 0: without waiting. DMESH_RESOLVE: the caller sets `from` according to `location`, and
 * calls this again. DMESH_DISCONNECTED: the sender's memory is not readable, or no longer valid. */
enum dmesh_status dmesh_p2p_run(struct dmesh_shm *shm, struct dmesh_transfer *transfer, int64_t deadline);

/* Whether this member waits for the other one; another thread may be at the transfer. */
int dmesh_p2p_waits(const struct dmesh_shm *shm, const struct dmesh_transfer *transfer);

#endif
