/* Traffic with one peer in one call: the place, the stream, and the progress of each piece. */
#ifndef DMESH_TCP_PEER_H
#define DMESH_TCP_PEER_H

#include "tcp.h"

/* Order of the pieces: contribution 0, then contribution k and result k - 1 alternately, then the last result.
 * Item i goes on stream i % `used`. */
static inline size_t dmesh_item_of(const struct dmesh_tcp *tcp, int phase, size_t piece) {
    if (!tcp->two_phases)
        return piece;
    if (phase == DMESH_CONTRIBUTIONS)
        return piece ? 2 * piece - 1 : 0;
    return piece + 1 == tcp->pieces ? 2 * piece + 1 : 2 * piece + 2;
}

static inline int dmesh_piece_of(const struct dmesh_tcp *tcp, size_t item, size_t *piece) {
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

static inline size_t dmesh_items(const struct dmesh_tcp *tcp) {
    return (tcp->two_phases ? 2 : 1) * tcp->pieces;
}

static inline size_t dmesh_extent(const struct dmesh_tcp *tcp, const struct dmesh_span *span, size_t piece) {
    const size_t offset = piece * tcp->piece_bytes;
    return offset < span->nbytes ? dmesh_least(tcp->piece_bytes, span->nbytes - offset) : 0;
}

/* Place of an owner's piece: in its array, or else in the scratch memory. */
static inline unsigned char *dmesh_piece_at(const struct dmesh_tcp *tcp, const struct dmesh_span *span, int owner,
                                        size_t piece) {
    if (span->data)
        return span->data + piece * tcp->piece_bytes;
    return tcp->scratch + ((piece & (tcp->depth - 1)) * (size_t)tcp->size + (size_t)owner) * tcp->piece_bytes;
}

/* Whether an incoming piece has a place: in the scratch memory only once the one before it there is reduced. */
static inline int dmesh_piece_fits(const struct dmesh_tcp *tcp, const struct dmesh_span *span, size_t piece) {
    return span->data || piece < tcp->folded + tcp->depth;
}

/* Goes on one stream non_temporal pieces that are empty or through; returns whether there is one left. */
static inline int dmesh_seek(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic, int stream) {
    struct dmesh_cursor *at = &traffic->cursors[stream];
    for (; at->item < dmesh_items(tcp); at->item += (size_t)tcp->used, at->done = 0) {
        size_t piece;
        const int phase = dmesh_piece_of(tcp, at->item, &piece);
        if (at->done < dmesh_extent(tcp, &traffic->spans[phase], piece))
            return 1;
    }
    return 0;
}

/* Whether a piece is not empty and not done. */
static inline int dmesh_lacks(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic, int phase,
                              size_t piece) {
    const size_t item = dmesh_item_of(tcp, phase, piece);
    const int stream = tcp->used == 1 ? 0 : (int)(item % (size_t)tcp->used);
    return dmesh_extent(tcp, &traffic->spans[phase], piece) && dmesh_seek(tcp, traffic, stream) &&
           traffic->cursors[stream].item <= item;
}

static inline int dmesh_is_over(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic) {
    if (!traffic->active)
        return 1;
    if (traffic->header_done < DMESH_TCP_HEADER)
        return 0;
    for (int stream = 0; stream < tcp->used; stream++)
        if (dmesh_seek(tcp, traffic, stream))
            return 0;
    return 1;
}

/* Writes to one stream as much as possible; returns whether anything was written, or -1 if the connection has ended. */
int dmesh_tcp_write(struct dmesh_tcp *tcp, int member, int stream);

/* Reads from one stream; returns whether anything was read, -1 if the connection has ended, or -2 with `status`. */
int dmesh_tcp_read(struct dmesh_tcp *tcp, int member, int stream, enum dmesh_status *status);

/* Events of one stream to poll for; 0 for none. */
short dmesh_tcp_poll_events(const struct dmesh_tcp *tcp, struct dmesh_tcp_peer *peer, int stream);

#endif
