#define _GNU_SOURCE
#include "tcp_peer.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores the signal anyway */
#endif

enum { INBOX = 16 * 1024 }; /* largest first piece that is read together with the header */

int dmesh_tcp_write(struct dmesh_tcp *tcp, int member, int stream) {
    struct dmesh_tcp_peer *peer = &tcp->tcp[member];
    struct dmesh_traffic *out = &peer->out;
    struct dmesh_stream *through = &peer->streams[stream];
    struct dmesh_cursor *at = &out->cursors[stream];
    struct iovec parts[2];
    size_t count = 0, piece;
    if (!out->active)
        return 0;
    const size_t greets = stream ? 0 : DMESH_TCP_HEADER - out->header_done;
    if (greets)
        parts[count++] = (struct iovec){out->header + out->header_done, greets};
    if (dmesh_seek(tcp, out, stream)) {
        const int phase = dmesh_piece_of(tcp, at->item, &piece);
        if (phase == DMESH_CONTRIBUTIONS || piece < tcp->folded) {
            const struct dmesh_span *span = &out->spans[phase];
            parts[count++] = (struct iovec){dmesh_piece_at(tcp, span, tcp->me, piece) + at->done,
                                            dmesh_extent(tcp, span, piece) - at->done};
        }
    }
    if (!count)
        return 0;
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    const ssize_t written = sendmsg(through->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (written < 0) {
        through->blocked = errno == EAGAIN || errno == EWOULDBLOCK;
        return through->blocked || errno == EINTR ? 0 : -1;
    }
    through->blocked = 0;
    const size_t greeting = dmesh_least(greets, (size_t)written);
    out->header_done += greeting;
    at->done += (size_t)written - greeting;
    return 1;
}

/* Buffer for a first piece that comes with the header. It is no memory of the user's: nothing may appear there before the
 * header shows that all ranks have made the same call. */
static struct iovec inbox(const struct dmesh_tcp *tcp, struct dmesh_traffic *in, int member) {
    const int begins = dmesh_seek(tcp, in, 0) && in->cursors[0].item == 0;
    const size_t first = begins ? dmesh_extent(tcp, &in->spans[DMESH_CONTRIBUTIONS], 0) : 0;
    const struct dmesh_span scratch = {NULL, 0};
    if (first == 0 || first > INBOX)
        return (struct iovec){NULL, 0};
    return (struct iovec){dmesh_piece_at(tcp, &scratch, member, 0) + in->early, first - in->early};
}

/* Checks a complete header. */
static enum dmesh_status check(struct dmesh_tcp *tcp, int member) {
    struct dmesh_traffic *in = &tcp->tcp[member].in;
    const unsigned char *expected = tcp->tcp[member].out.header;
    uint64_t nbytes;
    memcpy(&nbytes, in->header + 16, sizeof nbytes);
    tcp->culprit = member;
    if (memcmp(in->header, expected, 16) != 0) /* without the number of bytes */
        return DMESH_MISMATCH;
    if (nbytes != in->spans[DMESH_CONTRIBUTIONS].nbytes + in->spans[DMESH_RESULTS].nbytes)
        return DMESH_CORRUPT;
    if (in->early && in->spans[DMESH_CONTRIBUTIONS].data) {
        const struct dmesh_span scratch = {NULL, 0};
        memcpy(in->spans[DMESH_CONTRIBUTIONS].data, dmesh_piece_at(tcp, &scratch, member, 0), in->early);
    }
    in->cursors[0].done = in->early;
    return DMESH_OK;
}

int dmesh_tcp_read(struct dmesh_tcp *tcp, int member, int stream, enum dmesh_status *status) {
    struct dmesh_tcp_peer *peer = &tcp->tcp[member];
    struct dmesh_traffic *in = &peer->in;
    struct dmesh_cursor *at = &in->cursors[stream];
    struct iovec parts[2];
    size_t count = 0, piece;
    if (!in->active)
        return 0;
    const int greets = in->header_done < DMESH_TCP_HEADER;
    if (greets) {
        if (stream)
            return 0;
        parts[count++] = (struct iovec){in->header + in->header_done, DMESH_TCP_HEADER - in->header_done};
        parts[count] = inbox(tcp, in, member);
        count += parts[count].iov_len > 0;
    } else if (dmesh_seek(tcp, in, stream)) {
        const struct dmesh_span *span = &in->spans[dmesh_piece_of(tcp, at->item, &piece)];
        if (!dmesh_piece_fits(tcp, span, piece))
            return 0;
        parts[count++] = (struct iovec){dmesh_piece_at(tcp, span, member, piece) + at->done,
                                        dmesh_extent(tcp, span, piece) - at->done};
    } else {
        return 0;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    const ssize_t got = recvmsg(peer->streams[stream].fd, &message, MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    if (got == 0)
        return -1;
    if (!greets) {
        at->done += (size_t)got;
        return 1;
    }
    const size_t greeting = dmesh_least(DMESH_TCP_HEADER - in->header_done, (size_t)got);
    in->header_done += greeting;
    in->early += (size_t)got - greeting;
    if (in->header_done < DMESH_TCP_HEADER)
        return 1;
    const enum dmesh_status found = check(tcp, member);
    if (found == DMESH_OK)
        return 1;
    *status = found;
    return -2;
}

short dmesh_tcp_poll_events(const struct dmesh_tcp *tcp, struct dmesh_tcp_peer *peer, int stream) {
    struct dmesh_traffic *out = &peer->out, *in = &peer->in;
    short events = 0;
    if (peer->streams[stream].blocked && out->active &&
        ((!stream && out->header_done < DMESH_TCP_HEADER) || dmesh_seek(tcp, out, stream)))
        events |= POLLOUT;
    if (in->active && in->header_done < DMESH_TCP_HEADER) {
        if (!stream)
            events |= POLLIN;
    } else if (in->active && dmesh_seek(tcp, in, stream)) {
        size_t piece;
        const int phase = dmesh_piece_of(tcp, in->cursors[stream].item, &piece);
        if (dmesh_piece_fits(tcp, &in->spans[phase], piece))
            events |= POLLIN;
    }
    return events;
}
