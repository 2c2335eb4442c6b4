#include "tcp_peer.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "copy.h"

enum {
    LARGEST_PIECE = 256 * 1024,
    SMALLEST_PIECE = 32 * 1024,
    ROUNDS = 400, /* rounds over all connections before this thread sleeps: 0.1 to 0.4 ms */
    LOOKS = 8,    /* rounds with progress between looks at the clock */
};
static const int64_t NAP = 50 * 1000 * 1000; /* longest sleep between looks at `stop` */

/* ---- folding ------------------------------------------------------------------------------------------------ */

/* Whether all contributions to a piece of this rank's part are here, and its result has a place. */
static int can_fold(struct dmesh_tcp *tcp, size_t piece) {
    const int in_place = tcp->folds && !tcp->two_phases && tcp->target.data == tcp->call.source;
    for (int member = 0; member < tcp->size; member++) {
        struct dmesh_traffic *in = &tcp->tcp[member].in, *out = &tcp->tcp[member].out;
        if (in->active && dmesh_extent(tcp, &in->spans[DMESH_CONTRIBUTIONS], piece) &&
            (in->header_done < DMESH_TCP_HEADER || dmesh_lacks(tcp, in, DMESH_CONTRIBUTIONS, piece)))
            return 0;
        if (in_place && !dmesh_is_over(tcp, out))
            return 0; /* the result would overwrite data that has not been sent */
        if (tcp->folds && !tcp->target.data && piece >= tcp->depth && out->active &&
            dmesh_lacks(tcp, out, DMESH_RESULTS, piece - tcp->depth))
            return 0; /* its place holds a result that has not been sent */
    }
    return 1;
}

static int fold(struct dmesh_tcp *tcp) {
    int moved = 0;
    for (; tcp->folded < tcp->pieces && can_fold(tcp, tcp->folded); tcp->folded++, moved = 1) {
        const size_t piece = tcp->folded, nbytes = dmesh_extent(tcp, &tcp->source, piece);
        if (!tcp->folds || !nbytes)
            continue;
        const struct dmesh_span scratch = {NULL, 0};
        const void *inputs[DMESH_MEMBERS];
        for (int member = 0; member < tcp->size; member++)
            inputs[member] = dmesh_piece_at(tcp, member == tcp->me ? &tcp->source : &scratch, member, piece);
        void *outputs[] = {dmesh_piece_at(tcp, &tcp->target, tcp->me, piece)};
        dmesh_reduce(tcp->call.kernel, inputs, (unsigned)tcp->size, outputs, 1,
                     nbytes / dmesh_kernel_input_size(tcp->call.kernel), 0);
    }
    return moved;
}

/* ---- carrying them out -------------------------------------------------------------------------------------- */

static int is_done(struct dmesh_tcp *tcp) {
    if (tcp->folded < tcp->pieces)
        return 0;
    for (int member = 0; member < tcp->size; member++)
        if (!dmesh_is_over(tcp, &tcp->tcp[member].out) || !dmesh_is_over(tcp, &tcp->tcp[member].in))
            return 0;
    return 1;
}

/* Reads and writes once on each connection; returns whether anything has moved, or negative with `status`. */
static int turn(struct dmesh_tcp *tcp, enum dmesh_status *status) {
    int moved = 0;
    for (int step = 1; step < tcp->size; step++) {
        /* Each starts with another peer, so that not all write to the same one. */
        const int to = (tcp->me + step) % tcp->size, from = (tcp->me + tcp->size - step) % tcp->size;
        for (int stream = 0; stream < tcp->used; stream++) {
            const int written = dmesh_tcp_write(tcp, to, stream);
            if (written < 0) {
                tcp->culprit = to;
                *status = DMESH_DISCONNECTED;
                return -1;
            }
            const int read = dmesh_tcp_read(tcp, from, stream, status);
            if (read < 0) {
                tcp->culprit = from;
                if (read == -1)
                    *status = DMESH_DISCONNECTED;
                return -1;
            }
            moved |= written | read;
        }
    }
    return moved;
}

/* Sleeps until a connection can be gone on with; -1 if a signal came. */
static int rest(struct dmesh_tcp *tcp, int64_t nanoseconds) {
    struct pollfd waits[DMESH_MEMBERS * DMESH_STREAMS];
    nfds_t count = 0;
    for (int member = 0; member < tcp->size; member++) {
        struct dmesh_tcp_peer *peer = &tcp->tcp[member];
        for (int stream = 0; stream < tcp->used; stream++) {
            const short events = dmesh_tcp_poll_events(tcp, peer, stream);
            if (events)
                waits[count++] = (struct pollfd){.fd = peer->streams[stream].fd, .events = events};
        }
    }
    const int64_t milliseconds = (nanoseconds + 999999) / 1000000;
    return poll(waits, count, (int)milliseconds) < 0 && errno == EINTR ? -1 : 0;
}

enum dmesh_status dmesh_tcp_run(struct dmesh_tcp *tcp, int64_t deadline) {
    enum dmesh_status *const failure = &tcp->failure;
    unsigned moves = 0, idle = 0;
    while (*failure == DMESH_PENDING) {
        const int moved = turn(tcp, failure);
        if (moved < 0)
            break;
        if (tcp->copy.nbytes) { /* after others got something to do */
            if (tcp->copy.data != tcp->copy_from)
                dmesh_copy(tcp->copy.data, tcp->copy_from, tcp->copy.nbytes);
            tcp->copy.nbytes = 0;
        }
        if (fold(tcp) | moved) {
            if (is_done(tcp))
                return DMESH_OK;
            idle = 0;
            if (++moves % LOOKS)
                continue;
        } else if (is_done(tcp)) {
            return DMESH_OK;
        }
        if (atomic_load_explicit(&tcp->stop, memory_order_relaxed))
            return DMESH_ABORTED;
        const int64_t now = dmesh_now();
        if (now >= deadline)
            return DMESH_PENDING;
        if (!idle++)
            continue;
        if (idle < ROUNDS)
            sched_yield();
        else if (rest(tcp, deadline - now < NAP ? deadline - now : NAP) < 0)
            return DMESH_ABORTED;
    }
    return *failure;
}

int dmesh_tcp_waits_for(const struct dmesh_tcp *tcp, int member) {
    if (member == tcp->me)
        return 0;
    /* Another thread may be at it: copies, which it does not see. */
    struct dmesh_traffic out = tcp->tcp[member].out, in = tcp->tcp[member].in;
    return !dmesh_is_over(tcp, &out) || !dmesh_is_over(tcp, &in);
}

void dmesh_tcp_abort(struct dmesh_tcp *tcp) { atomic_store(&tcp->stop, 1); }

struct dmesh_tcp *dmesh_tcp_new(int size, int me, int streams, size_t piece_bytes, size_t one_step_bytes, int owns,
                                    const int *descriptors) {
    struct dmesh_tcp *tcp = calloc(1, sizeof *tcp + (size_t)size * sizeof *tcp->tcp);
    if (!tcp)
        return NULL;
    const size_t share = ((size_t)1 << 20) / (size_t)size & ~(size_t)4095;
    tcp->failure = DMESH_PENDING;
    tcp->size = size;
    tcp->me = me;
    tcp->streams = streams;
    tcp->used = 1;
    tcp->owns = owns;
    tcp->one_step_bytes = one_step_bytes;
    tcp->piece_bytes = piece_bytes ? piece_bytes : share < SMALLEST_PIECE ? SMALLEST_PIECE : dmesh_least(share, LARGEST_PIECE);
    for (tcp->depth = 2; tcp->depth < (size_t)streams; tcp->depth *= 2)
        continue; /* so that no stream waits long for a place while another one is slower */
    tcp->scratch = malloc(tcp->depth * (size_t)size * tcp->piece_bytes);
    if (!tcp->scratch) {
        free(tcp);
        return NULL;
    }
    for (int member = 0; member < size; member++)
        for (int stream = 0; stream < streams; stream++)
            tcp->tcp[member].streams[stream].fd = descriptors[member * streams + stream];
    return tcp;
}

void dmesh_tcp_free(struct dmesh_tcp *tcp) {
    for (int member = 0; tcp->owns && member < tcp->size; member++)
        for (int stream = 0; stream < tcp->streams; stream++)
            if (tcp->tcp[member].streams[stream].fd >= 0)
                close(tcp->tcp[member].streams[stream].fd);
    free(tcp->scratch);
    free(tcp);
}
