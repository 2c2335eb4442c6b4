/* Waiting for a word that another process writes in shared memory. */
#ifndef DMESH_WAIT_H
#define DMESH_WAIT_H

#include <stdatomic.h>
#include <stdint.h>

/* Status of a wait, or of a call. */
enum dmesh_status {
    DMESH_OK = 0,
    DMESH_PENDING,      /* other ranks are missing, or there is more to do */
    DMESH_ABORTED,      /* `stop` was set, or a signal came: the caller must check for both */
    DMESH_MISMATCH,     /* `culprit` has made another call */
    DMESH_CORRUPT,      /* `culprit` has written what no rank may write */
    DMESH_RESOLVE,      /* the caller must map peers' arrays: see `shm_staged.h`, `p2p.h` */
    DMESH_DISCONNECTED, /* the memory of `culprit`, or the connection with it, is gone */
};

/* A word that one process writes and others wait for. */
struct dmesh_word {
    _Atomic uint64_t *value;
    _Atomic uint32_t *sleepers; /* number of threads that sleep until it changes; written by them */
};

/* Nanoseconds of the monotonic clock. */
int64_t dmesh_now(void);

/* Writes a word after everything that was written before, and wakes the sleepers. */
void dmesh_post(struct dmesh_word word, uint64_t value);

/* Waits until the word changes from `previous` to `awaited`: spins for a microsecond or two, unless there are more ranks
 * than cores; then yields the core, then sleeps. Deadline 0: only spins, without system calls. Returns soon after `stop`
 * is set, even if nothing wakes it. DMESH_CORRUPT: the word has neither of the values. */
enum dmesh_status dmesh_wait(struct dmesh_word word, uint64_t previous, uint64_t awaited, int64_t deadline,
                             const _Atomic int *stop, int oversubscribed);

/* Wakes all sleepers without changing the word. */
void dmesh_wake(struct dmesh_word word);

#endif
