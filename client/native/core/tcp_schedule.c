/* Data of each collective for each peer; see `tcp.h`. */
#include "tcp.h"

#include <string.h>

static struct dmesh_span span(const unsigned char *data, size_t offset, size_t nbytes) {
    return (struct dmesh_span){data ? (unsigned char *)data + offset : NULL, nbytes};
}

/* A member's part of `nbytes`, in whole elements. */
static struct dmesh_span part(const struct dmesh_tcp *tcp, const unsigned char *data, size_t nbytes, int member) {
    const size_t share = ((nbytes + (size_t)tcp->size - 1) / (size_t)tcp->size + 63) & ~(size_t)63;
    const size_t offset = dmesh_least((size_t)member * share, nbytes);
    return span(data, offset, dmesh_least(share, nbytes - offset));
}

/* Sets up the exchange with one member. */
static void arrange(struct dmesh_tcp *tcp, int member) {
    const struct dmesh_call *call = &tcp->call;
    const struct dmesh_pattern *pattern = &dmesh_patterns[call->kind];
    const size_t share = dmesh_share(call);
    const int me = tcp->me;
    struct dmesh_span *out = tcp->peers[member].out.spans, *in = tcp->peers[member].in.spans;
    const int sends = dmesh_contributes(call, me), receives = dmesh_contributes(call, member);
    if (tcp->two_phases) {
        /* Each member gets its part of the contributions, and sends the result to all that get it; the root of a broadcast
         * has it already. */
        const int broadcasts = pattern->from_root;
        const unsigned char *result = broadcasts && sends ? call->source : call->target;
        if (sends)
            out[DMESH_CONTRIBUTIONS] = part(tcp, call->source, share, member);
        if (receives)
            in[DMESH_CONTRIBUTIONS] = part(tcp, pattern->reduces ? NULL : call->target, share, me);
        if (broadcasts ? !receives : dmesh_gets_result(call, member))
            out[DMESH_RESULTS] = part(tcp, result, share, me);
        if (broadcasts ? !sends : dmesh_gets_result(call, me))
            in[DMESH_RESULTS] = part(tcp, call->target, share, member);
        return;
    }
    const size_t given = dmesh_given(call, me, member), taken = dmesh_taken(call, me, member);
    if (given)
        out[DMESH_CONTRIBUTIONS] = span(call->source, dmesh_source_offset(call, member), given);
    if (taken)
        in[DMESH_CONTRIBUTIONS] = span(pattern->reduces ? NULL : call->target, dmesh_target_offset(call, member), taken);
}

/* Sets up this rank's own part. */
static void arrange_own(struct dmesh_tcp *tcp) {
    const struct dmesh_call *call = &tcp->call;
    const int me = tcp->me, reduces = dmesh_patterns[call->kind].reduces;
    const size_t share = dmesh_share(call), taken = dmesh_taken(call, me, me);
    tcp->source = tcp->target = tcp->copy = (struct dmesh_span){NULL, 0};
    if (tcp->two_phases && reduces) {
        tcp->source = part(tcp, call->source, share, me);
        tcp->target = part(tcp, call->target, share, me);
    } else if (call->target && taken) {
        const struct dmesh_span source = span(call->source, dmesh_source_offset(call, me), taken);
        const struct dmesh_span target = span(call->target, dmesh_target_offset(call, me), taken);
        *(reduces ? &tcp->target : &tcp->copy) = target;
        if (reduces)
            tcp->source = source;
        tcp->copy_from = source.data;
    }
    tcp->folds = tcp->source.data != NULL;
}

/* Resets the progress; stream i begins with contribution i, as `item_of` in tcp.c numbers it. */
static void reset(const struct dmesh_tcp *tcp, struct dmesh_traffic *traffic) {
    memset(traffic, 0, offsetof(struct dmesh_traffic, cursors));
    for (int stream = 0; stream < tcp->used; stream++)
        traffic->cursors[stream] = (struct dmesh_cursor){.item = (size_t)(tcp->two_phases && stream ? 2 * stream - 1 : stream)};
}

void dmesh_tcp_begin(struct dmesh_tcp *tcp, const struct dmesh_call *call, uint64_t hash,
                     const struct dmesh_envelope *envelope) {
    const size_t others = (size_t)tcp->size - 1;
    /* At most one piece: a rank that reduces in place in one step must have sent all of it before. */
    const int small = call->contribution <= tcp->piece_bytes && call->contribution * others <= tcp->one_step_bytes;
    tcp->call = *call;
    tcp->number++;
    tcp->folded = 0;
    tcp->two_phases = !small && (call->kind == DMESH_ALL_REDUCE ||
                                   (others > 1 && (call->kind == DMESH_REDUCE || call->kind == DMESH_BROADCAST)));
    /* As many pieces on all members as the largest part of any of them has. */
    const size_t share = dmesh_share(call), largest = tcp->two_phases ? part(tcp, NULL, share, 0).nbytes : share;
    tcp->pieces = (largest + tcp->piece_bytes - 1) / tcp->piece_bytes;
    tcp->used = (int)dmesh_least((size_t)tcp->streams, tcp->pieces + (size_t)(tcp->two_phases && tcp->pieces));
    if (!tcp->used)
        tcp->used = 1; /* for the headers */
    arrange_own(tcp);
    for (int member = 0; member < tcp->size; member++) {
        struct dmesh_tcp_peer *peer = &tcp->peers[member];
        reset(tcp, &peer->out);
        reset(tcp, &peer->in);
        for (int stream = 0; stream < tcp->used; stream++)
            peer->streams[stream].blocked = 0;
        if (member == tcp->me)
            continue;
        arrange(tcp, member);
        const struct dmesh_span *spans = peer->out.spans;
        const uint64_t words[] = {tcp->number, hash, spans[DMESH_CONTRIBUTIONS].nbytes + spans[DMESH_RESULTS].nbytes};
        memcpy(peer->out.header, words, sizeof words);
        /* Collectives end when all members have come. A small transfer goes in one direction; a larger one ends for its
         * sender when the receiver's header has come. */
        const int both = call->kind != DMESH_TRANSFER || call->contribution > DMESH_SEND_BUFFER;
        peer->out.active = both || tcp->me == 0;
        peer->in.active = both || tcp->me == 1;
        peer->out.header_bytes = peer->in.header_bytes = DMESH_TCP_HEADER;
        if (call->kind == DMESH_TRANSFER) {
            struct dmesh_traffic *forth = tcp->me ? &peer->in : &peer->out;
            forth->header_bytes += dmesh_envelope_size(envelope);
            forth->envelope = tcp->me ? (unsigned char *)tcp->envelope : (unsigned char *)envelope;
        }
    }
}
