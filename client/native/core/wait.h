/* Waiting for a word that another process writes in shared memory. */
#ifndef DMESH_WAIT_H
#define DMESH_WAIT_H

#include <stdatomic.h>
#include <stdint.h>

/* A word that one process writes and others wait for. */
struct dmesh_word {
    _Atomic uint64_t *value;
    _Atomic uint32_t *sleepers; /* number of threads that sleep until it changes; written by them */
};

struct dmesh_wait_policy {
    int oversubscribed; /* more ranks than cores: a spinning rank may keep the one it waits for from running */
};

enum dmesh_wait_result {
    DMESH_ARRIVED = 0, /* the word has the awaited value */
    DMESH_TIMED_OUT,
    DMESH_INTERRUPTED, /* `stop` was set, or a signal came: the caller must check for both */
    DMESH_UNEXPECTED,  /* the word has neither the previous nor the awaited value */
};

/* Nanoseconds of the monotonic clock. */
int64_t dmesh_now(void);

/* Writes a word after everything that was written before, and wakes the sleepers. */
void dmesh_post(struct dmesh_word word, uint64_t value);

/* Whether the word is `awaited`. If so, everything that was written before it can be read. */
static inline int dmesh_reached(struct dmesh_word word, uint64_t awaited) {
    return atomic_load_explicit(word.value, memory_order_acquire) == awaited;
}

/* Polls a word for a microsecond or two: a peer on another core needs no longer. */
enum dmesh_wait_result dmesh_spin(struct dmesh_word word, uint64_t previous, uint64_t awaited,
                                  const struct dmesh_wait_policy *policy);

/* Waits until the word changes from `previous` to `awaited`: spins unless the cores are oversubscribed, then yields the
 * core, then sleeps. Returns soon after `stop` is set, even if nothing wakes it. */
enum dmesh_wait_result dmesh_wait(struct dmesh_word word, uint64_t previous, uint64_t awaited, int64_t deadline,
                                  const _Atomic int *stop, const struct dmesh_wait_policy *policy);

/* Wakes all sleepers without changing the word. */
void dmesh_wake(struct dmesh_word word);

#endif
