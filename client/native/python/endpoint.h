/* One rank's endpoint of a group, or of one pair of ranks: the Python type, and the calls that go through it. */
#ifndef DMESH_ENDPOINT_H
#define DMESH_ENDPOINT_H

#include "module.h"
#include "p2p.h"
#include "shm_staged.h"
#include "tcp.h"

enum { DMESH_KEPT = 256 }; /* calls whose records are kept */

/* Record of a call. */
struct dmesh_entry {
    unsigned long long number;
    struct dmesh_descriptor descriptor;
    npy_intp nbytes;
    int64_t began, completed_at;
    int64_t waited_from; /* when it began to wait for others; 0: it did not; -1: unknown */
};

typedef struct {
    PyObject_HEAD
    struct dmesh_registered registered;
} dmesh_registered_object;

typedef struct {
    PyObject_HEAD
    struct dmesh_shm shm;  /* over TCP only `size`, `me`, `slot_bytes` (of a piece) and `culprit` are used */
    struct dmesh_tcp *tcp; /* NULL in shared memory */
    int streams;           /* TCP connections with each member */
    Py_ssize_t one_step_bytes; /* of `tcp` */
    unsigned forks;        /* `dmesh_forks` of the process that owns it */
    Py_buffer views[DMESH_MEMBERS]; /* of the memory with the members' regions */
    struct dmesh_region *regions[DMESH_MEMBERS];
    uint64_t salts[DMESH_MEMBERS];
    int bfloat16; /* NumPy's number of that type */
    unsigned long long issued;
    unsigned long long completed;
    unsigned long long number;           /* of the pending call, if the endpoint took it whole */
    unsigned long long max_flat;   /* bytes from which calls that can be hierarchical are left to Python */
    unsigned long long single_copy_from; /* bytes from which private arrays are read in place; ULLONG_MAX: as measured */
    long long completed_at;
    char is_p2p;
    char whole;   /* whether the endpoint took the last call whole: it made the result, and counts the call */
    char closed;  /* no more calls begin */
    char pending; /* a call has begun and is not complete */
    enum dmesh_status status;
    struct dmesh_call call;
    struct dmesh_blocks blocks;          /* of a call whose blocks have different lengths */
    struct dmesh_staged staged;          /* `steps` is 0 if the call takes one epoch */
    struct dmesh_transfer transfer;      /* in shared memory */
    struct dmesh_envelope envelope;      /* of the transfer that is sent; over TCP also what is expected */
    unsigned long long others;           /* transfers to the same receiver over other media */
    int held;                            /* no call is taken whole */
    Py_buffer data, into;                /* of a call that Python started; `obj` is NULL if there is none */
    PyObject *source, *result;           /* of a pending call that the endpoint took whole */
    dmesh_registered_object *registered; /* NULL unless all members exchange the locations of arrays */
    PyObject *attach;                    /* maps a peer's segment */
    PyObject *retire;                    /* keeps arrays that peers may still touch, when the endpoint goes */
    char can_read_peers;                 /* each member may read the memory of all others */
    int processes[DMESH_MEMBERS];        /* of the members, then */
    unsigned char (*attached)[DMESH_NONCE]; /* segments that stay mapped as long as the endpoint lives */
    size_t attachments;
    PyObject *on_complete;
    PyObject *keep_alive;
    PyObject *connections; /* encrypted ones, by their descriptors; NULL if they are not encrypted */
    PyObject *cause;       /* exception that ended one of them */
    struct dmesh_secure secure;
    struct dmesh_entry kept[DMESH_KEPT];
} dmesh_endpoint;

static inline struct dmesh_entry *dmesh_entry_of(dmesh_endpoint *self, unsigned long long number) {
    return &self->kept[number % DMESH_KEPT];
}

/* Whether this process was forked from the one that owns the endpoint, whose memory and connections it must not use. */
static inline int dmesh_is_forked(const dmesh_endpoint *self) { return self->forks != dmesh_forks; }

/* Arguments of calls that an endpoint takes whole. */
enum dmesh_argument { DMESH_X = 1, DMESH_OP, DMESH_ROOT, DMESH_AXIS, DMESH_DST, DMESH_SRC, DMESH_OUT, DMESH_ARGUMENTS };

/* A call that an endpoint can take whole; its method has these arguments in this order, without the peer of a transfer. */
struct dmesh_spec {
    const char *name;
    enum dmesh_kind kind;
    int positional; /* arguments that the public function takes by position */
    enum dmesh_argument arguments[DMESH_ARGUMENTS]; /* 0 follows the last one */
};

/* CALL(name, kind, positional, arguments) */
#define DMESH_CALLS(CALL)                                                                        \
    CALL(barrier, DMESH_BARRIER, 0, 0)                                                           \
    CALL(all_reduce, DMESH_ALL_REDUCE, 2, DMESH_X, DMESH_OP, DMESH_OUT)                          \
    CALL(reduce, DMESH_REDUCE, 3, DMESH_X, DMESH_OP, DMESH_ROOT, DMESH_OUT)                      \
    CALL(reduce_scatter, DMESH_REDUCE_SCATTER, 2, DMESH_X, DMESH_OP, DMESH_AXIS, DMESH_OUT)      \
    CALL(broadcast, DMESH_BROADCAST, 2, DMESH_X, DMESH_ROOT, DMESH_OUT)                          \
    CALL(all_gather, DMESH_ALL_GATHER, 1, DMESH_X, DMESH_AXIS, DMESH_OUT)                        \
    CALL(gather, DMESH_GATHER, 2, DMESH_X, DMESH_ROOT, DMESH_OUT)                                \
    CALL(all_to_all, DMESH_ALL_TO_ALL, 1, DMESH_X, DMESH_OUT)                                    \
    CALL(send, DMESH_TRANSFER, 2, DMESH_X, DMESH_DST)                                            \
    CALL(recv, DMESH_TRANSFER, 2, DMESH_X, DMESH_SRC, DMESH_OUT)

#define DMESH_NUMBER_CALL(name, ...) DMESH_CALL_##name,
enum { DMESH_CALLS(DMESH_NUMBER_CALL) DMESH_CALL_COUNT };

extern const struct dmesh_spec dmesh_specs[DMESH_CALL_COUNT];

/* Returns the call of a name; NULL if no endpoint takes it whole. */
const struct dmesh_spec *dmesh_spec_of(const char *name);

/* Takes a whole call, whose arguments are in `given` by `enum dmesh_argument`. Returns the result; NotImplemented if the
 * call is unusual and nothing has happened; or the endpoint itself, if the call has begun and others have not come in
 * time, or have not come yet if it does not wait. */
PyObject *dmesh_endpoint_call(dmesh_endpoint *self, const struct dmesh_spec *spec, PyObject *const *given, int waits);

/* Returns the kernel of a reduction, or NULL: there is none, or the result's dtype is not that of the array. */
const dmesh_kernel *dmesh_kernel_of(int op, int dtype);

/* A call that is being prepared; the source is borrowed until it begins. */
struct dmesh_attempt {
    struct dmesh_descriptor descriptor;
    uint64_t hash; /* of the descriptor */
    struct dmesh_call call;
    PyArrayObject *source;
    PyObject *result; /* owned */
};

/* Whether the endpoint can take a call now: no other one is under way, and it has not been closed. */
static inline int dmesh_endpoint_is_free(const dmesh_endpoint *self) {
    return !self->closed && !self->held && self->issued == self->completed && !dmesh_is_forked(self);
}

/* Takes the arguments of a call, and provides its result; false if Python must look at them. */
int dmesh_endpoint_accept(const dmesh_endpoint *self, struct dmesh_attempt *attempt, enum dmesh_kind kind,
                          PyObject *const *given);

/* Lets a group's method `interrupted` deal with the exception that is set, which stays set. */
void dmesh_fail_group(PyObject *interrupted, PyObject *group, dmesh_endpoint *endpoint);

/* endpoint_secure.c: encrypted connections. */

/* Lets the calls use encrypted connections. */
void dmesh_endpoint_secure(dmesh_endpoint *self, PyObject *connections);

/* Like Py_BEGIN_ALLOW_THREADS and Py_END_ALLOW_THREADS around what uses them: it takes the GIL itself for them. */
void dmesh_release_gil(void);
void dmesh_take_gil(void);

/* endpoint_run.c: calls under way. */

/* Carries out a call that the endpoint takes whole; what has not come to its end is `pending`. Returns what the method
 * returns. */
PyObject *dmesh_endpoint_carry_out(dmesh_endpoint *self, struct dmesh_attempt *attempt, int waits);

/* Whether the next array that comes is as described; waits for it a while, if asked to. -1 with an exception set if it was
 * interrupted. */
int dmesh_endpoint_expects(dmesh_endpoint *self, const struct dmesh_descriptor *descriptor, int waits);

/* Passes the arrays of a pending call to `retire`, if peers may still access them. */
void dmesh_endpoint_retire(dmesh_endpoint *self);

/* Methods: see `dmesh.native.Endpoint`. */
PyObject *dmesh_endpoint_progress(dmesh_endpoint *self, PyObject *seconds);
PyObject *dmesh_endpoint_start(dmesh_endpoint *self, PyObject *args);
PyObject *dmesh_endpoint_start_transfer(dmesh_endpoint *self, PyObject *args);
PyObject *dmesh_endpoint_arrival(dmesh_endpoint *self, PyObject *seconds);
PyObject *dmesh_endpoint_advertise(dmesh_endpoint *self, PyObject *args);

/* Bytes from which peers read an array in this process, instead of getting it piece by piece, until both paths have been
 * measured: one copy instead of two, but every page has to be looked up. Of the two ranks of a transfer only the receiver
 * works then, which is better when there are more ranks than cores. */
enum {
    DMESH_SINGLE_COPY_FROM = 48 << 20,
    DMESH_SINGLE_COPY_OVERSUBSCRIBED_TRANSFERS_FROM = 4 << 20,
};

#endif
