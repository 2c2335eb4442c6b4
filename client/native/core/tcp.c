#define _GNU_SOURCE
#include "tcp.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "copy.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores the signal anyway */
#endif

enum {
    INBOX = 16 * 1024, /* largest first piece that is read together with the header */
    LARGEST_PIECE = 256 * 1024,
    SMALLEST_PIECE = 32 * 1024,
    ROUNDS = 400, /* rounds over all connections before this thread sleeps: 0.1 to 0.4 ms */
    LOOKS = 8,    /* rounds with progress between looks at the clock */
    MATCHED = 16, /* bytes of a header that are the same on both ends */
};
static const int64_t NAP = 50 * 1000 * 1000; /* longest sleep between looks at `stop` */

/* ---- pieces ------------------------------------------------------------------------------------------------- */

/* Order of the pieces: contribution 0, then contribution k and result k - 1 alternately, then the last result.
 * Contribution k and result k - 1 go on stream k % `used`: members contribute more to a root than it returns, or less. */
static size_t item_of(const struct dmesh_tcp *tcp, int phase, size_t piece) {
    if (!tcp->two_phases)
        return piece;
    if (phase == DMESH_CONTRIBUTIONS)
        return piece ? 2 * piece - 1 : 0;
    return piece + 1 == tcp->pieces ? 2 * piece + 1 : 2 * piece + 2;
}

static int piece_of(const struct dmesh_tcp *tcp, size_t item, size_t *piece) {
    if (!tcp->two_phases || item == 0) {
        *piece = item;
        return DMESH_CONTRIBUTIONS;
    }
    if (item + 1 == 2 * tcp->pieces) {
        *piece = tcp->pieces - 1;
        return DMESH_RESULTS;
    }
    *piece = item & 1 ? (item + 1) / 2 : item / 2 - 1;
    return item & 1 ? DMESH_CONTRIBUTIONS : DMESH_RESULTS;
}

static int stream_of(const struct dmesh_tcp *tcp, size_t item) {
    return (int)((tcp->two_phases ? (item + 1) / 2 : item) % (size_t)tcp->used);
}

/* The item that follows on the same stream. */
static size_t item_after(const struct dmesh_tcp *tcp, size_t item) {
    if (!tcp->two_phases)
        return item + (size_t)tcp->used;
    return item & 1 ? item + 1 : item + 2 * (size_t)tcp->used - 1;
}

static size_t extent(const struct dmesh_tcp *tcp, const struct dmesh_span *span, size_t piece) {
    const size_t offset = piece * tcp->piece_bytes;
    return offset < span->nbytes ? dmesh_least(tcp->piece_bytes, span->nbytes - offset) : 0;
}

static const struct dmesh_span SCRATCH = {NULL, 0};

/* Place of an owner's piece: in its array, or else in the scratch memory. */
static unsigned char *piece_at(const struct dmesh_tcp *tcp, const struct dmesh_span *span, int owner, size_t piece) {
    if (span->data)
        return span->data + piece * tcp->piece_bytes;
    return tcp->scratch + ((piece & (tcp->depth - 1)) * (size_t)tcp->size + (size_t)owner) * tcp->piece_bytes;
}

/* The same without the first `done` bytes. */
static struct iovec rest_of(const struct dmesh_tcp *tcp, const struct dmesh_span *span, int owner, size_t piece,
                            size_t done) {
    return (struct iovec){piece_at(tcp, span, owner, piece) + done, extent(tcp, span, piece) - done};
}

/* Moves a stream past pieces that are empty or done; returns whether one is left. */
static int seek(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic, int stream) {
    struct dmesh_cursor *at = &traffic->cursors[stream];
    for (; at->item < dmesh_items(tcp); at->item = item_after(tcp, at->item), at->done = 0) {
        size_t piece;
        const int phase = piece_of(tcp, at->item, &piece);
        if (at->done < extent(tcp, &traffic->spans[phase], piece))
            return 1;
    }
    return 0;
}

/* Whether a piece is not empty and not done. */
static int lacks(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic, int phase, size_t piece) {
    const size_t item = item_of(tcp, phase, piece);
    const int stream = tcp->used == 1 ? 0 : stream_of(tcp, item);
    return extent(tcp, &traffic->spans[phase], piece) && seek(tcp, traffic, stream) &&
           traffic->cursors[stream].item <= item;
}

static int is_over(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic) {
    if (!traffic->active)
        return 1;
    if (traffic->header_done < traffic->header_bytes)
        return 0;
    for (int stream = 0; stream < tcp->used; stream++)
        if (seek(tcp, traffic, stream))
            return 0;
    return 1;
}

/* ---- one connection ------------------------------------------------------------------------------------------ */

/* Fails the call for good. */
static int fail(struct dmesh_tcp *tcp, int member, enum dmesh_status status) {
    tcp->culprit = member;
    tcp->failure = status;
    return -1;
}

/* Whether an encrypted connection is worth a try, which costs more than a system call. */
static int is_ready(int connection, short events) {
    struct pollfd wait = {.fd = connection, .events = events};
    return poll(&wait, 1, 0) > 0;
}

/* Like `sendmsg` without waiting. */
static ssize_t put(struct dmesh_tcp *tcp, int member, int stream, struct iovec *parts, size_t count) {
    const struct dmesh_secure *secure = tcp->secure;
    const int connection = tcp->peers[member].streams[stream].to;
    if (!secure) {
        const struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        return sendmsg(connection, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    if (!tcp->peers[member].streams[stream].blocked || is_ready(connection, POLLOUT))
        return secure->send(secure->owner, connection, parts, count);
    errno = EAGAIN;
    return -1;
}

/* Like `recvmsg` without waiting. */
static ssize_t get(const struct dmesh_tcp *tcp, int connection, struct iovec *parts, size_t count, int flags,
                   _Atomic int *hidden) {
    const struct dmesh_secure *secure = tcp->secure;
    if (!secure) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        return recvmsg(connection, &message, flags | MSG_DONTWAIT);
    }
    if (*hidden || is_ready(connection, POLLIN))
        return secure->receive(secure->owner, connection, parts, count, flags, hidden);
    errno = EAGAIN;
    return -1;
}

/* Adds what is left of a header and its envelope; returns how many parts were added. */
static size_t add_header(struct dmesh_traffic *traffic, struct iovec *parts) {
    const size_t done = traffic->header_done, behind = done < DMESH_TCP_HEADER ? 0 : done - DMESH_TCP_HEADER;
    size_t count = 0;
    if (done < DMESH_TCP_HEADER)
        parts[count++] = (struct iovec){traffic->header + done, DMESH_TCP_HEADER - done};
    if (DMESH_TCP_HEADER + behind < traffic->header_bytes)
        parts[count++] = (struct iovec){traffic->envelope + behind, traffic->header_bytes - DMESH_TCP_HEADER - behind};
    return count;
}

/* Writes to one stream as much as possible; returns whether anything was written, or -1 if the call has failed, or was
 * interrupted. */
static int write_some(struct dmesh_tcp *tcp, int member, int stream) {
    struct dmesh_tcp_peer *peer = &tcp->peers[member];
    struct dmesh_traffic *out = &peer->out;
    struct dmesh_cursor *at = &out->cursors[stream];
    struct iovec parts[3];
    size_t count = 0, piece;
    if (!out->active)
        return 0;
    const size_t greets = stream ? 0 : out->header_bytes - out->header_done;
    if (greets)
        count = add_header(out, parts);
    if (seek(tcp, out, stream)) {
        const int phase = piece_of(tcp, at->item, &piece);
        if (phase == DMESH_CONTRIBUTIONS || piece < tcp->folded)
            parts[count++] = rest_of(tcp, &out->spans[phase], tcp->me, piece, at->done);
    }
    if (!count)
        return 0;
    const ssize_t written = put(tcp, member, stream, parts, count);
    if (written < 0 && errno == EINTR)
        return -1;
    peer->streams[stream].blocked = written < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (written < 0)
        return peer->streams[stream].blocked ? 0 : fail(tcp, member, DMESH_DISCONNECTED);
    const size_t greeting = dmesh_least(greets, (size_t)written);
    out->header_done += greeting;
    at->done += (size_t)written - greeting;
    return 1;
}

/* Buffer for a first piece that comes with the header. It is no memory of the user's: nothing may appear there before the
 * header shows that all ranks have made the same call. */
static struct iovec inbox(const struct dmesh_tcp *tcp, struct dmesh_traffic *in, int member) {
    const int begins = seek(tcp, in, 0) && in->cursors[0].item == 0;
    const size_t first = begins ? extent(tcp, &in->spans[DMESH_CONTRIBUTIONS], 0) : 0;
    if (first == 0 || first > INBOX)
        return (struct iovec){NULL, 0};
    return (struct iovec){piece_at(tcp, &SCRATCH, member, 0) + in->early, first - in->early};
}

/* Takes a complete header of the same call; returns 1, or -1 if the call has failed. */
static int check(struct dmesh_tcp *tcp, int member) {
    struct dmesh_traffic *in = &tcp->peers[member].in;
    unsigned char *data = in->spans[DMESH_CONTRIBUTIONS].data;
    uint64_t nbytes;
    memcpy(&nbytes, in->header + 16, sizeof nbytes);
    if (nbytes != in->spans[DMESH_CONTRIBUTIONS].nbytes + in->spans[DMESH_RESULTS].nbytes)
        return fail(tcp, member, DMESH_CORRUPT);
    if (in->early && data)
        memcpy(data, piece_at(tcp, &SCRATCH, member, 0), in->early);
    in->cursors[0].done = in->early;
    return 1;
}

/* The span of a stream's next piece; NULL if there is none, or it has no place: in the scratch memory it has one only once
 * the piece before it there is reduced. */
static const struct dmesh_span *next_in(const struct dmesh_tcp *tcp, struct dmesh_traffic *in, int stream, size_t *piece) {
    if (!seek(tcp, in, stream))
        return NULL;
    const struct dmesh_span *span = &in->spans[piece_of(tcp, in->cursors[stream].item, piece)];
    return span->data || *piece < tcp->folded + tcp->depth ? span : NULL;
}

/* Reads from one stream; returns whether anything was read, or -1 if the call has failed, or was interrupted. */
static int read_some(struct dmesh_tcp *tcp, int member, int stream) {
    struct dmesh_tcp_peer *peer = &tcp->peers[member];
    struct dmesh_traffic *in = &peer->in;
    struct dmesh_cursor *at = &in->cursors[stream];
    const struct dmesh_span *span;
    struct iovec parts[3];
    size_t count = 0, piece;
    if (!in->active)
        return 0;
    const int greets = in->header_done < in->header_bytes;
    if (greets) {
        if (stream)
            return 0;
        count = add_header(in, parts);
        parts[count] = inbox(tcp, in, member);
        count += parts[count].iov_len > 0;
    } else if ((span = next_in(tcp, in, stream, &piece))) {
        parts[count++] = rest_of(tcp, span, member, piece, at->done);
    } else {
        return 0;
    }
    const ssize_t got = get(tcp, peer->streams[stream].from, parts, count, 0, &peer->streams[stream].hidden);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return errno == EINTR ? -1 : 0;
    if (got <= 0)
        return fail(tcp, member, DMESH_DISCONNECTED);
    if (!greets) {
        at->done += (size_t)got;
        return 1;
    }
    const size_t greeting = dmesh_least(in->header_bytes - in->header_done, (size_t)got);
    in->header_done += greeting;
    in->early += (size_t)got - greeting;
    /* What follows the header of another call may be shorter than expected, and never come. */
    if (in->header_done >= DMESH_TCP_HEADER && memcmp(in->header, peer->out.header, MATCHED) != 0)
        return fail(tcp, member, DMESH_MISMATCH);
    return in->header_done < in->header_bytes ? 1 : check(tcp, member);
}

/* Adds what to poll for on one stream; returns how many were added. */
static nfds_t add_waits(const struct dmesh_tcp *tcp, struct dmesh_tcp_peer *peer, int stream, struct pollfd *waits) {
    struct dmesh_traffic *out = &peer->out, *in = &peer->in;
    size_t piece;
    nfds_t count = 0;
    if (out->active && peer->streams[stream].blocked &&
        ((!stream && out->header_done < out->header_bytes) || seek(tcp, out, stream)))
        waits[count++] = (struct pollfd){.fd = peer->streams[stream].to, .events = POLLOUT};
    if (in->active && (in->header_done < in->header_bytes ? !stream : next_in(tcp, in, stream, &piece) != NULL))
        waits[count++] = (struct pollfd){.fd = peer->streams[stream].from, .events = POLLIN};
    return count;
}

/* ---- folding ------------------------------------------------------------------------------------------------ */

/* Whether all contributions to a piece of this rank's part are here, and its result has a place. */
static int can_fold(struct dmesh_tcp *tcp, size_t piece) {
    const int in_place = tcp->folds && !tcp->two_phases && tcp->target.data == tcp->call.source;
    for (int member = 0; member < tcp->size; member++) {
        struct dmesh_traffic *in = &tcp->peers[member].in, *out = &tcp->peers[member].out;
        if (in->active && extent(tcp, &in->spans[DMESH_CONTRIBUTIONS], piece) &&
            (in->header_done < in->header_bytes || lacks(tcp, in, DMESH_CONTRIBUTIONS, piece)))
            return 0;
        if (in_place && !is_over(tcp, out))
            return 0; /* the result would overwrite data that has not been sent */
        if (tcp->folds && !tcp->target.data && piece >= tcp->depth && out->active &&
            lacks(tcp, out, DMESH_RESULTS, piece - tcp->depth))
            return 0; /* its place holds a result that has not been sent */
    }
    return 1;
}

static int fold(struct dmesh_tcp *tcp) {
    int moved = 0;
    for (; tcp->folded < tcp->pieces && can_fold(tcp, tcp->folded); tcp->folded++, moved = 1) {
        const size_t piece = tcp->folded, nbytes = extent(tcp, &tcp->source, piece);
        if (!tcp->folds || !nbytes)
            continue;
        const void *inputs[DMESH_MEMBERS];
        for (int member = 0; member < tcp->size; member++)
            inputs[member] = piece_at(tcp, member == tcp->me ? &tcp->source : &SCRATCH, member, piece);
        void *outputs[] = {piece_at(tcp, &tcp->target, tcp->me, piece)};
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
        if (!is_over(tcp, &tcp->peers[member].out) || !is_over(tcp, &tcp->peers[member].in))
            return 0;
    return 1;
}

/* Reads and writes once on each connection; returns whether anything has moved, or -1 if the call has failed, or was
 * interrupted. */
static int turn(struct dmesh_tcp *tcp) {
    int moved = 0;
    for (int step = 1; step < tcp->size; step++) {
        /* Each starts with another peer, so that not all write to the same one. */
        const int to = (tcp->me + step) % tcp->size, from = (tcp->me + tcp->size - step) % tcp->size;
        for (int stream = 0; stream < tcp->used; stream++) {
            int written, read;
            if ((written = write_some(tcp, to, stream)) < 0 || (read = read_some(tcp, from, stream)) < 0)
                return -1;
            moved |= written | read;
        }
    }
    return moved;
}

/* Sleeps until a connection can be gone on with; -1 if a signal came. */
static int rest(struct dmesh_tcp *tcp, int64_t nanoseconds) {
    struct pollfd waits[2 * DMESH_MEMBERS * DMESH_STREAMS];
    nfds_t count = 0;
    for (int member = 0; member < tcp->size; member++)
        for (int stream = 0; stream < tcp->used; stream++)
            count += add_waits(tcp, &tcp->peers[member], stream, waits + count);
    const int64_t milliseconds = (nanoseconds + 999999) / 1000000;
    return poll(waits, count, (int)milliseconds) < 0 && errno == EINTR ? -1 : 0;
}

enum dmesh_status dmesh_tcp_run(struct dmesh_tcp *tcp, int64_t deadline) {
    unsigned moves = 0, idle = 0;
    while (tcp->failure == DMESH_PENDING) {
        const int moved = turn(tcp);
        if (moved < 0)
            break;
        if (tcp->copy.nbytes) { /* after others got something to do */
            if (tcp->copy.data != tcp->copy_from)
                dmesh_copy(tcp->copy.data, tcp->copy_from, tcp->copy.nbytes);
            tcp->copy.nbytes = 0;
        }
        const int progressed = fold(tcp) | moved;
        if (is_done(tcp)) /* in a group that fails, `discard_from` may have taken some of the bytes, and others follow */
            return atomic_load_explicit(&tcp->stop, memory_order_relaxed) ? DMESH_ABORTED : DMESH_OK;
        if (progressed) {
            idle = 0;
            if (++moves % LOOKS)
                continue;
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
    return tcp->failure;
}

enum dmesh_status dmesh_tcp_await(struct dmesh_tcp *tcp, struct dmesh_envelope *envelope, uint64_t number, int64_t deadline) {
    const int connection = tcp->peers[0].streams[0].from;
    const size_t least = offsetof(struct dmesh_envelope, text);
    unsigned char header[DMESH_TCP_HEADER];
    struct iovec parts[] = {{header, sizeof header}, {envelope, sizeof *envelope}};
    for (unsigned idle = 0;; idle++) {
        const ssize_t got = get(tcp, connection, parts, 2, MSG_PEEK, &tcp->peers[0].streams[0].hidden);
        if (tcp->number != number)
            return DMESH_PENDING; /* these may be bytes of the array */
        const size_t behind = got < (ssize_t)sizeof header ? 0 : (size_t)got - sizeof header;
        if (!got || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
            return fail(tcp, 0, DMESH_DISCONNECTED), tcp->failure;
        if (got < 0 && errno == EINTR)
            return DMESH_ABORTED;
        if (behind >= least && !dmesh_envelope_is_valid(envelope))
            return fail(tcp, 0, DMESH_CORRUPT), tcp->failure;
        if (behind >= least && behind >= dmesh_envelope_size(envelope))
            return DMESH_OK;
        const int64_t now = dmesh_now();
        if (atomic_load_explicit(&tcp->stop, memory_order_relaxed))
            return DMESH_ABORTED;
        if (now >= deadline)
            return DMESH_PENDING;
        const int64_t left = deadline - now < NAP ? deadline - now : NAP;
        struct pollfd wait = {.fd = connection, .events = POLLIN};
        if (idle < ROUNDS || got > 0) /* a part of it is readable already */
            sched_yield();
        else if (poll(&wait, 1, (int)((left + 999999) / 1000000)) < 0 && errno == EINTR)
            return DMESH_ABORTED;
    }
}

int dmesh_tcp_waits_for(const struct dmesh_tcp *tcp, int member) {
    if (member == tcp->me)
        return 0;
    /* Another thread may be at it: copies, which it does not see. */
    struct dmesh_traffic out = tcp->peers[member].out, in = tcp->peers[member].in;
    return !is_over(tcp, &out) || !is_over(tcp, &in);
}

void dmesh_tcp_abort(struct dmesh_tcp *tcp) { atomic_store(&tcp->stop, 1); }

struct dmesh_tcp *dmesh_tcp_new(int size, int me, int streams, size_t piece_bytes, size_t one_step_bytes, int owns,
                                const int *descriptors, int receipts) {
    struct dmesh_tcp *tcp = calloc(1, sizeof *tcp + (size_t)size * sizeof *tcp->peers);
    if (!tcp)
        return NULL;
    const size_t share = ((size_t)1 << 20) / (size_t)size & ~(size_t)4095;
    *tcp = (struct dmesh_tcp){.size = size, .me = me, .streams = streams, .used = 1, .owns = owns,
                              .one_step_bytes = one_step_bytes, .failure = DMESH_PENDING};
    tcp->piece_bytes = piece_bytes              ? piece_bytes
                       : share < SMALLEST_PIECE ? SMALLEST_PIECE
                                                : dmesh_least(share, LARGEST_PIECE);
    for (tcp->depth = 2; tcp->depth < (size_t)streams; tcp->depth *= 2)
        continue; /* so that no stream waits long for a place while another one is slower */
    tcp->scratch = malloc(tcp->depth * (size_t)size * tcp->piece_bytes);
    if (!tcp->scratch) {
        free(tcp);
        return NULL;
    }
    for (int member = 0; member < size; member++)
        for (int stream = 0; stream < streams; stream++)
            tcp->peers[member].streams[stream].to = tcp->peers[member].streams[stream].from =
                descriptors[member * streams + stream];
    if (receipts >= 0 && me && !(tcp->envelope = calloc(1, sizeof *tcp->envelope))) {
        free(tcp->scratch);
        free(tcp);
        return NULL;
    }
    if (receipts >= 0)
        *(me ? &tcp->peers[0].streams[0].to : &tcp->peers[1].streams[0].from) = receipts;
    return tcp;
}

void dmesh_tcp_secure(struct dmesh_tcp *tcp, const struct dmesh_secure *secure) {
    tcp->secure = secure;
    for (int member = 0; member < tcp->size; member++)
        for (int stream = 0; stream < tcp->streams; stream++)
            tcp->peers[member].streams[stream].hidden = 1; /* it may have come with the end of the handshake */
}

void dmesh_tcp_free(struct dmesh_tcp *tcp) {
    for (int member = 0; tcp->owns && member < tcp->size; member++)
        for (int stream = 0; stream < tcp->streams && member != tcp->me; stream++) {
            const int to = tcp->peers[member].streams[stream].to, from = tcp->peers[member].streams[stream].from;
            close(to);
            if (from != to)
                close(from);
        }
    free(tcp->envelope);
    free(tcp->scratch);
    free(tcp);
}
