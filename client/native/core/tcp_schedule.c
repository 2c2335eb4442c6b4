/* Data of each collective for each peer; see `tcp.h`. */
#include "tcp_peer.h"

#include <string.h>

/* A member's part of `nbytes`, in whole elements. */
static struct dmesh_span part(const struct dmesh_tcp *tcp, const unsigned char *data, size_t nbytes, int member) {
    const size_t share = ((nbytes + (size_t)tcp->size - 1) / (size_t)tcp->size + 63) & ~(size_t)63;
    const size_t offset = dmesh_least((size_t)member * share, nbytes);
    return (struct dmesh_span){data ? (unsigned char *)data + offset : NULL, dmesh_least(share, nbytes - offset)};
}

static struct dmesh_span block(const unsigned char *data, size_t nbytes, int member) {
    return (struct dmesh_span){data ? (unsigned char *)data + (size_t)member * nbytes : NULL, nbytes};
}

/* Sets up the exchange with one member. */
static void arrange(struct dmesh_tcp *tcp, int member) {
    const struct dmesh_call *call = &tcp->call;
    const int me = tcp->me, root = call->root, rooted = me == root;
    const struct dmesh_span all_out = {(unsigned char *)call->source, call->contribution};
    const struct dmesh_span all_in = {call->target, call->contribution};
    const struct dmesh_span own = part(tcp, NULL, call->contribution, me);
    struct dmesh_span *out = tcp->tcp[member].out.spans, *in = tcp->tcp[member].in.spans;
    switch (call->kind) {
    case DMESH_ALL_REDUCE:
        if (tcp->two_phases) {
            out[DMESH_CONTRIBUTIONS] = part(tcp, call->source, call->contribution, member);
            in[DMESH_CONTRIBUTIONS] = own;
            out[DMESH_RESULTS] = part(tcp, call->target, call->contribution, me);
            in[DMESH_RESULTS] = part(tcp, call->target, call->contribution, member);
        } else {
            out[DMESH_CONTRIBUTIONS] = all_out;
            in[DMESH_CONTRIBUTIONS].nbytes = call->contribution;
        }
        break;
    case DMESH_REDUCE:
        if (tcp->two_phases) {
            out[DMESH_CONTRIBUTIONS] = part(tcp, call->source, call->contribution, member);
            in[DMESH_CONTRIBUTIONS] = own;
            if (member == root)
                out[DMESH_RESULTS] = own;
            if (rooted)
                in[DMESH_RESULTS] = part(tcp, call->target, call->contribution, member);
        } else if (rooted) {
            in[DMESH_CONTRIBUTIONS].nbytes = call->contribution;
        } else if (member == root) {
            out[DMESH_CONTRIBUTIONS] = all_out;
        }
        break;
    case DMESH_REDUCE_SCATTER:
        out[DMESH_CONTRIBUTIONS] = block(call->source, call->block, member);
        in[DMESH_CONTRIBUTIONS].nbytes = call->block;
        break;
    case DMESH_BROADCAST:
        if (tcp->two_phases) {
            /* The root sends each member a part, and each member sends its part to all others. */
            const unsigned char *data = rooted ? call->source : call->target;
            if (rooted)
                out[DMESH_CONTRIBUTIONS] = part(tcp, data, call->contribution, member);
            else if (member == root)
                in[DMESH_CONTRIBUTIONS] = part(tcp, data, call->contribution, me);
            if (member != root)
                out[DMESH_RESULTS] = part(tcp, data, call->contribution, me);
            if (!rooted)
                in[DMESH_RESULTS] = part(tcp, data, call->contribution, member);
        } else if (rooted) {
            out[DMESH_CONTRIBUTIONS] = all_out;
        } else if (member == root) {
            in[DMESH_CONTRIBUTIONS] = all_in;
        }
        break;
    case DMESH_ALL_GATHER:
        out[DMESH_CONTRIBUTIONS] = all_out;
        in[DMESH_CONTRIBUTIONS] = block(call->target, call->block, member);
        break;
    case DMESH_GATHER:
        if (rooted)
            in[DMESH_CONTRIBUTIONS] = block(call->target, call->block, member);
        else if (member == root)
            out[DMESH_CONTRIBUTIONS] = all_out;
        break;
    case DMESH_SCATTER:
        if (rooted)
            out[DMESH_CONTRIBUTIONS] = block(call->source, call->block, member);
        else if (member == root)
            in[DMESH_CONTRIBUTIONS] = (struct dmesh_span){call->target, call->block};
        break;
    case DMESH_ALL_TO_ALL:
        out[DMESH_CONTRIBUTIONS] = block(call->source, call->block, member);
        in[DMESH_CONTRIBUTIONS] = block(call->target, call->block, member);
        break;
    case DMESH_TRANSFER:
        if (me == 0)
            out[DMESH_CONTRIBUTIONS] = all_out;
        else
            in[DMESH_CONTRIBUTIONS] = all_in;
        break;
    case DMESH_BARRIER:
    case DMESH_PERMUTE:
    case DMESH_KINDS:
        break;
    }
}

/* Sets up this rank's own part. */
static void arrange_own(struct dmesh_tcp *tcp) {
    const struct dmesh_call *call = &tcp->call;
    const int me = tcp->me, rooted = me == call->root;
    const struct dmesh_span nothing = {NULL, 0};
    tcp->source = tcp->target = tcp->copy = nothing;
    tcp->copy_from = call->source;
    switch (call->kind) {
    case DMESH_ALL_REDUCE:
    case DMESH_REDUCE:
        if (tcp->two_phases) {
            tcp->source = part(tcp, call->source, call->contribution, me);
            tcp->target = part(tcp, call->target, call->contribution, me);
        } else if (call->kind == DMESH_ALL_REDUCE || rooted) {
            tcp->source = (struct dmesh_span){(unsigned char *)call->source, call->contribution};
            tcp->target = (struct dmesh_span){call->target, call->contribution};
        }
        break;
    case DMESH_REDUCE_SCATTER:
        tcp->source = block(call->source, call->block, me);
        tcp->target = (struct dmesh_span){call->target, call->block};
        break;
    case DMESH_BROADCAST:
        if (rooted)
            tcp->copy = (struct dmesh_span){call->target, call->contribution};
        break;
    case DMESH_ALL_GATHER:
    case DMESH_GATHER:
        if (call->target)
            tcp->copy = block(call->target, call->block, me);
        break;
    case DMESH_SCATTER:
        if (rooted) {
            tcp->copy = (struct dmesh_span){call->target, call->block};
            tcp->copy_from = block(call->source, call->block, me).data;
        }
        break;
    case DMESH_ALL_TO_ALL:
        tcp->copy = block(call->target, call->block, me);
        tcp->copy_from = block(call->source, call->block, me).data;
        break;
    case DMESH_BARRIER:
    case DMESH_TRANSFER:
    case DMESH_PERMUTE:
    case DMESH_KINDS:
        break;
    }
    tcp->folds = tcp->source.data != NULL;
}

/* Bytes of the largest part of any member: they determine the number of pieces, which is the same on all members. */
static size_t largest(const struct dmesh_tcp *tcp) {
    const struct dmesh_call *call = &tcp->call;
    if (tcp->two_phases)
        return part(tcp, NULL, call->contribution, 0).nbytes;
    switch (call->kind) {
    case DMESH_REDUCE_SCATTER:
    case DMESH_ALL_GATHER:
    case DMESH_GATHER:
    case DMESH_SCATTER:
    case DMESH_ALL_TO_ALL:
        return call->block;
    default:
        return call->contribution;
    }
}

static void write_header(struct dmesh_traffic *traffic, uint64_t number, uint64_t hash) {
    const uint64_t follows = traffic->spans[DMESH_CONTRIBUTIONS].nbytes + traffic->spans[DMESH_RESULTS].nbytes;
    const uint64_t words[] = {number, hash, follows};
    memcpy(traffic->header, words, sizeof words);
}

/* Resets the progress; stream i begins with item i. */
static void reset(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic) {
    memset(traffic, 0, offsetof(struct dmesh_traffic, cursors));
    for (int stream = 0; stream < tcp->used; stream++)
        traffic->cursors[stream] = (struct dmesh_cursor){.item = (size_t)stream};
}

void dmesh_tcp_begin(struct dmesh_tcp *tcp, const struct dmesh_call *call, uint64_t hash) {
    const size_t others = (size_t)tcp->size - 1;
    /* At most one piece: a rank that reduces in place in one step must have sent all of it before. */
    const int small = call->contribution <= tcp->piece_bytes && call->contribution * others <= tcp->one_step_bytes;
    tcp->call = *call;
    tcp->number++;
    tcp->folded = 0;
    tcp->two_phases = !small && (call->kind == DMESH_ALL_REDUCE ||
                                   (others > 1 && (call->kind == DMESH_REDUCE || call->kind == DMESH_BROADCAST)));
    tcp->pieces = (largest(tcp) + tcp->piece_bytes - 1) / tcp->piece_bytes;
    tcp->used = (int)dmesh_least((size_t)tcp->streams, dmesh_items(tcp));
    if (!tcp->used)
        tcp->used = 1; /* for the headers */
    arrange_own(tcp);
    for (int member = 0; member < tcp->size; member++) {
        struct dmesh_tcp_peer *peer = &tcp->tcp[member];
        reset(tcp, &peer->out);
        reset(tcp, &peer->in);
        for (int stream = 0; stream < tcp->used; stream++)
            peer->streams[stream].blocked = 0;
        if (member == tcp->me)
            continue;
        arrange(tcp, member);
        write_header(&peer->out, tcp->number, hash);
        /* Collectives end when all members have come. A small transfer goes in one direction; a larger one ends for its
         * sender when the receiver's header has come. */
        const int both = call->kind != DMESH_TRANSFER || call->contribution > DMESH_SEND_BUFFER;
        peer->out.active = both || tcp->me == 0;
        peer->in.active = both || tcp->me == 1;
    }
}
