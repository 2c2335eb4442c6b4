/* Collectives over TCP connections, for groups whose members do not share memory.
 *
 * Each member has connections with every other one that carry the calls of this group alone, one after the other. So
 * nothing has to be matched, and the thread that makes a call reads and writes all connections itself. In one direction,
 * a call sends to a peer:
 *
 *     header: number of the call | descriptor hash | bytes that follow      (three little-endian words of 64 bits)
 *     envelope, from the sender of a transfer
 *     pieces
 *
 * A rank without data for a peer sends the header alone: a collective ends when all members have come to it. There may be
 * several connections with each peer, its *streams*, where a network gives one connection less than it has in all. The
 * header goes on stream 0, and the pieces go to the streams in turn, each contribution with the result of the one before
 * it. Both ends know the order. No other stream is read
 * before the header has been checked.
 *
 * A transfer is a call of two members in one direction. Those of both directions share their connections with the peer, so
 * that an answer acknowledges what it answers: Linux would send a packet of its own, which takes as long as a send. So
 * nothing but the arrays may go there. The receiver of a large array sends its header, the *receipt*, on a connection of
 * its own.
 *
 * Each element of a result is reduced by one member, in rank order: the same bits as in shared memory. In a small
 * all-reduce, each rank sends everything to all others, in one step. Large ones, and reduces and broadcasts to more than
 * one rank, take two steps. In the first, each member gets the *contributions* to its part; in the second, it sends the
 * *results* of its part to the others. The steps overlap: the results of one piece travel while the next piece is
 * contributed.
 */
#ifndef DMESH_TCP_H
#define DMESH_TCP_H

#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "collective.h"
#include "wait.h"

enum {
    DMESH_TCP_HEADER = 24,
    DMESH_STREAMS = 8, /* most connections with a peer */
};

/* The phases of a call, in which `dmesh_traffic.spans` have an entry each. */
enum { DMESH_CONTRIBUTIONS, DMESH_RESULTS };

/* Bytes of one phase in one direction. */
struct dmesh_span {
    unsigned char *data; /* NULL: in the scratch memory, piece by piece */
    size_t nbytes;
};

/* Progress of one stream in one direction. */
struct dmesh_cursor {
    size_t item; /* the current piece; see `item_of` in tcp.c */
    size_t done; /* bytes of it that are through */
};

/* Traffic of one call with one peer in one direction. */
struct dmesh_traffic {
    int active;
    unsigned char header[DMESH_TCP_HEADER];
    unsigned char *envelope;                    /* of a transfer, behind the header */
    size_t header_bytes;                        /* of header and envelope */
    size_t header_done;                         /* bytes of them that are through */
    size_t early;                               /* bytes of the first piece that came before the header was checked */
    struct dmesh_span spans[2];                 /* contributions and results */
    struct dmesh_cursor cursors[DMESH_STREAMS]; /* of the streams in use */
};

/* Encrypted connections, which their owner reads and writes: like `sendmsg` and `recvmsg`, without waiting. After EAGAIN, the
 * next `send` must begin with the same bytes. `hidden`: whether more may be there than `poll` shows. */
struct dmesh_secure {
    void *owner;
    ssize_t (*send)(void *owner, int connection, const struct iovec *parts, size_t count);
    ssize_t (*receive)(void *owner, int connection, const struct iovec *parts, size_t count, int flags,
                       _Atomic int *hidden);
};

struct dmesh_tcp_peer {
    struct {
        int to, from; /* connections that are written and read, the same but in transfers; -1 for this rank itself */
        int blocked;  /* the send buffer is full */
        _Atomic int hidden; /* see `dmesh_secure`; a thread that looks at what comes may set it during a transfer */
    } streams[DMESH_STREAMS];
    struct dmesh_traffic out, in;
};

struct dmesh_tcp {
    int size, me;
    int streams;           /* of each peer */
    int used;              /* streams that carry data in this call, at least one */
    int owns;              /* whether the connections are closed with it */
    _Atomic uint64_t number; /* of the call */
    size_t piece_bytes;
    size_t one_step_bytes; /* bytes that one rank sends in all, up to which one step is faster than two */
    size_t depth;          /* pieces that each member has in the scratch memory; a power of 2 */
    unsigned char *scratch;
    struct dmesh_call call;
    int two_phases;
    size_t pieces;
    size_t folded;                    /* pieces that this rank has reduced */
    int folds;                        /* whether it reduces anything */
    struct dmesh_span source, target; /* its own part, before and after */
    struct dmesh_span copy;           /* its own block, from `copy_from` */
    const unsigned char *copy_from;
    enum dmesh_status failure; /* DMESH_PENDING unless it has failed for good */
    int culprit;
    _Atomic int stop;
    struct dmesh_envelope *envelope; /* of a transfer that is received; NULL unless transfers are */
    const struct dmesh_secure *secure; /* NULL: the connections are not encrypted */
    struct dmesh_tcp_peer peers[]; /* each member */
};

/* Takes a group's connections: `streams` descriptors for each member, -1 for this one. `piece_bytes`: bytes of a piece, a
 * multiple of 64; 0 for what suits the number of members. `one_step_bytes`: bytes that one rank sends in all, up to which a
 * call of at most one piece takes one step. These are the same on all members. `receipts`: for transfers from member 0 to
 * member 1, the connection for receipts; -1 for collectives. NULL if there is no memory. */
struct dmesh_tcp *dmesh_tcp_new(int size, int me, int streams, size_t piece_bytes, size_t one_step_bytes, int owns,
                                const int *descriptors, int receipts);

/* Lets their owner read and write the connections, which are encrypted. */
void dmesh_tcp_secure(struct dmesh_tcp *tcp, const struct dmesh_secure *secure);

/* Closes the connections, if they are its own. */
void dmesh_tcp_free(struct dmesh_tcp *tcp);

/* Pieces of a call in one direction, in all phases. */
static inline size_t dmesh_items(const struct dmesh_tcp *tcp) { return (tcp->two_phases ? 2 : 1) * tcp->pieces; }

/* Prepares a call; sends nothing yet. An all-to-all must not be in place. The envelope of a transfer, which must stay as
 * it is, is what is sent, or what is expected. */
void dmesh_tcp_begin(struct dmesh_tcp *tcp, const struct dmesh_call *call, uint64_t hash,
                     const struct dmesh_envelope *envelope);

/* Waits, after transfer `number` and before the next one, until the latter's envelope has come, and copies it. Deadline 0: does
 * not wait. DMESH_PENDING also if another thread has begun it. */
enum dmesh_status dmesh_tcp_await(struct dmesh_tcp *tcp, struct dmesh_envelope *envelope, uint64_t number, int64_t deadline);

/* Carries the call out, or goes on with it after DMESH_PENDING, or an interruption by a signal. Returns DMESH_PENDING at
 * `deadline` even if no rank is missing, and when a read or a write was interrupted. DMESH_DISCONNECTED: the connection with `culprit` has ended. */
enum dmesh_status dmesh_tcp_run(struct dmesh_tcp *tcp, int64_t deadline);

/* Whether the call waits for a member. Any thread. */
int dmesh_tcp_waits_for(const struct dmesh_tcp *tcp, int member);

/* Ends all waits, now and later. Any thread. */
void dmesh_tcp_abort(struct dmesh_tcp *tcp);

#endif
