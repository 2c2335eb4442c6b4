#define _GNU_SOURCE
#include "wait.h"

#include <errno.h>
#include <sched.h>
#include <time.h>

#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__) || defined(__arm__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() ((void)0)
#endif

/* A peer on another core is seen within 0.1 to 0.4 us. A longer spin does harm: two ranks on one core lose that time at
 * each step. */
enum { SPINS = 100 };
/* Waking a sleeper takes 17 to 23 us, yielding about 0.5 us: sleep only in long waits. */
static const int64_t YIELDING = 300 * 1000;
/* Longest sleep between looks at `stop`; where sleepers cannot be woken, between looks at the word. */
#ifdef __linux__
static const int64_t NAP = 50 * 1000 * 1000;
#else
static const int64_t NAP = 500 * 1000;
#endif
static const int64_t SECOND = 1000 * 1000 * 1000;

int64_t dmesh_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SECOND + now.tv_nsec;
}

/* The value of the word; if it is `awaited`, everything that was written before it can be read. */
static inline enum dmesh_status look(struct dmesh_word word, uint64_t previous, uint64_t awaited) {
    const uint64_t found = atomic_load_explicit(word.value, memory_order_acquire);
    return found == awaited ? DMESH_OK : found == previous ? DMESH_PENDING : DMESH_CORRUPT;
}

#ifdef __linux__
/* The 32 bits of the word that change with every value. */
static uint32_t *low_half(_Atomic uint64_t *value) {
    return (uint32_t *)value + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

static enum dmesh_status sleep_until(struct dmesh_word word, uint64_t previous, int64_t nanoseconds) {
    const struct timespec limit = {nanoseconds / SECOND, nanoseconds % SECOND};
    /* Announced before the kernel compares the value: either it has changed by then, or its writer sees the sleeper.
     * The fence in `dmesh_post` pairs with this. */
    atomic_fetch_add_explicit(word.sleepers, 1, memory_order_seq_cst);
    const long failed = syscall(SYS_futex, low_half(word.value), FUTEX_WAIT, (uint32_t)previous, &limit, NULL, 0);
    const int error = errno;
    atomic_fetch_sub_explicit(word.sleepers, 1, memory_order_relaxed);
    return failed && error == EINTR ? DMESH_ABORTED : DMESH_PENDING;
}

void dmesh_wake(struct dmesh_word word) {
    syscall(SYS_futex, low_half(word.value), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
#else
static enum dmesh_status sleep_until(struct dmesh_word word, uint64_t previous, int64_t nanoseconds) {
    const struct timespec limit = {nanoseconds / SECOND, nanoseconds % SECOND};
    (void)word, (void)previous;
    return nanosleep(&limit, NULL) && errno == EINTR ? DMESH_ABORTED : DMESH_PENDING;
}

void dmesh_wake(struct dmesh_word word) { (void)word; }
#endif

void dmesh_post(struct dmesh_word word, uint64_t value) {
    atomic_store_explicit(word.value, value, memory_order_release);
    /* Without it the load could come before the store: a sleeper would miss the value, and this thread the sleeper. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(word.sleepers, memory_order_relaxed))
        dmesh_wake(word);
}

enum dmesh_status dmesh_wait(struct dmesh_word word, uint64_t previous, uint64_t awaited, int64_t deadline,
                             const _Atomic int *stop, int oversubscribed) {
    enum dmesh_status found = look(word, previous, awaited);
    for (int n = oversubscribed ? 0 : SPINS; n && found == DMESH_PENDING; n--) {
        PAUSE();
        found = look(word, previous, awaited);
    }
    const int64_t began = found == DMESH_PENDING && deadline ? dmesh_now() : 0;
    for (int64_t now = began; found == DMESH_PENDING && now < deadline; now = dmesh_now()) {
        if (atomic_load_explicit(stop, memory_order_relaxed))
            return DMESH_ABORTED;
        if (now - began < YIELDING) {
            for (int n = 0; n < 8 && found == DMESH_PENDING; n++) {
                sched_yield();
                found = look(word, previous, awaited);
            }
            continue;
        }
        const enum dmesh_status slept = sleep_until(word, previous, deadline - now < NAP ? deadline - now : NAP);
        found = look(word, previous, awaited);
        if (slept == DMESH_ABORTED && found == DMESH_PENDING)
            return DMESH_ABORTED;
    }
    return found;
}
