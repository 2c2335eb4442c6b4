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
    struct dmesh_shm shm;  /* over TCP only `size`, `me` and `culprit` are used */
    struct dmesh_tcp *tcp; /* NULL in shared memory */
    unsigned forks;        /* `dmesh_forks` of the process that owns it */
    Py_buffer *views;
    int viewed;
    int bfloat16; /* NumPy's number of that type */
    unsigned long long issued;
    unsigned long long completed;
    unsigned long long number;           /* of the pending call, if the endpoint took it whole */
    unsigned long long max_all_reduce;   /* bytes from which an all-reduce is left to Python */
    unsigned long long single_copy_from; /* bytes from which private arrays are read in place by peers */
    long long completed_at;
    char is_p2p;
    char whole;   /* whether the endpoint took the last call whole: it made the result, and counts the call */
    char closed;  /* no more calls begin */
    char pending; /* a call has begun and is not complete */
    enum dmesh_status status;
    struct dmesh_call call;
    struct dmesh_staged staged;          /* `steps` is 0 if the call takes one epoch */
    struct dmesh_transfer transfer;      /* active during a transfer in shared memory */
    Py_buffer data, into;                /* of a call that Python started; `obj` is NULL if there is none */
    PyObject *source, *result;           /* of a pending call that the endpoint took whole */
    dmesh_registered_object *registered; /* NULL unless all members exchange the locations of arrays */
    PyObject *attach;                    /* maps a peer's segment */
    PyObject *retire;                    /* keeps arrays that peers may still touch, when the endpoint goes */
    int *processes;                      /* of each member, if each may read the memory of all others; else NULL */
    unsigned char (*attached)[DMESH_NONCE]; /* segments that stay mapped as long as the endpoint lives */
    size_t attachments;
    PyObject *on_complete;
    PyObject *keep_alive;
    struct dmesh_entry kept[DMESH_KEPT];
} dmesh_endpoint;

/* A call that is being prepared; the source is borrowed until it begins. */
struct dmesh_attempt {
    struct dmesh_descriptor descriptor;
    struct dmesh_call call;
    PyArrayObject *source;
    PyObject *result; /* owned */
};

static inline struct dmesh_entry *dmesh_entry_of(dmesh_endpoint *self, unsigned long long number) {
    return &self->kept[number % DMESH_KEPT];
}

/* Whether this process was forked from the one that owns the endpoint, whose memory and connections it must not use. */
static inline int dmesh_is_forked(const dmesh_endpoint *self) { return self->forks != dmesh_forks; }

/* Whether the endpoint can take a call: none is under way, and it is open. */
static inline int dmesh_is_ready(const dmesh_endpoint *self) {
    return !self->closed && self->issued == self->completed && !dmesh_is_forked(self);
}

/* arguments.c: the usual arguments of calls. Each function returns false if Python must look at them. */

/* Returns the member that a Python integer names; -1 if there is none. */
int dmesh_position_of(const dmesh_endpoint *self, PyObject *value);

/* Takes an array as the contribution of a call. */
int dmesh_accept(const dmesh_endpoint *self, struct dmesh_attempt *attempt, enum dmesh_kind kind, PyObject *x);

/* Returns the kernel of a reduction, or NULL: there is none, or the result's dtype is not that of the array. */
const dmesh_kernel *dmesh_kernel_of(int op, int dtype);

/* Takes the op of a reduction of `count` elements. */
int dmesh_accept_op(struct dmesh_attempt *attempt, PyObject *op, size_t count);

/* Provides the result, of the contribution's dtype: `out`, or a new array. May fail with an exception set. */
int dmesh_provide(struct dmesh_attempt *attempt, PyObject *out, int ndim, const npy_intp *shape);
int dmesh_provide_like(struct dmesh_attempt *attempt, PyObject *out);

/* The same with a row for each member; `extends`: concatenated along the first axis. */
int dmesh_provide_rows(const dmesh_endpoint *self, struct dmesh_attempt *attempt, PyObject *out, int extends);

/* endpoint_memory.c: arrays that ranks access in place. */

/* Returns the location of this rank's array: in shared memory, or in this process if it is large and peers may read it. */
struct dmesh_location dmesh_endpoint_locate(const dmesh_endpoint *self, const void *data, size_t nbytes);

/* Maps a member's array of `nbytes` bytes; NULL if it is private. `owner`: the process in which that is an address, or 0
 * for this one. Returns -1 with an exception set if it cannot be mapped. */
int dmesh_endpoint_resolve(dmesh_endpoint *self, int member, const struct dmesh_location *location, size_t nbytes,
                           unsigned char **found, int *owner);

/* Passes the arrays of a pending call to `retire`, if peers may still access them. */
void dmesh_endpoint_retire(dmesh_endpoint *self);

PyObject *dmesh_endpoint_advertise(dmesh_endpoint *self, PyObject *args);

/* endpoint_calls.c and endpoint_p2p.c: calls. */

/* Begins a collective. Only `dmesh_endpoint_run` waits for others. */
void dmesh_endpoint_begin(dmesh_endpoint *self, const struct dmesh_call *call, uint64_t hash);

/* Goes on with the call for some nanoseconds, without the GIL. DMESH_ABORTED may come with an exception set. */
enum dmesh_status dmesh_endpoint_run(dmesh_endpoint *self, int64_t nanoseconds);

/* The same for a transfer in shared memory, until `deadline`. */
enum dmesh_status dmesh_endpoint_run_p2p(dmesh_endpoint *self, int64_t deadline);

/* Checks that a call can start, and takes its buffers, either of which may be None; -1 with an exception set. */
int dmesh_endpoint_take_buffers(dmesh_endpoint *self, PyObject *data, PyObject *into);

/* Returns NotImplemented, for a call that is left to Python. */
PyObject *dmesh_decline(struct dmesh_attempt *attempt);

/* Counts a call, and records when it begins; returns its number. */
unsigned long long dmesh_record_start(dmesh_endpoint *self, const struct dmesh_attempt *attempt);

/* Completes a call, or keeps it for `progress`; returns what the method returns. */
PyObject *dmesh_conclude(dmesh_endpoint *self, struct dmesh_attempt *attempt, unsigned long long number);

PyObject *dmesh_endpoint_progress(dmesh_endpoint *self, PyObject *seconds);
PyObject *dmesh_endpoint_start(dmesh_endpoint *self, PyObject *args);
PyObject *dmesh_endpoint_over_sockets(PyObject *type, PyObject *args);

/* Returns an endpoint of a group of `size` that is not connected to anything yet. */
dmesh_endpoint *dmesh_endpoint_blank(PyTypeObject *type, int size, int me, int is_p2p);

/* Methods that take or begin a call. */
#define DMESH_CALLS(CALL)                                                                                            \
    CALL(barrier)                                                                                                    \
    CALL(all_reduce)                                                                                                 \
    CALL(reduce)                                                                                                     \
    CALL(reduce_scatter)                                                                                             \
    CALL(broadcast)                                                                                                  \
    CALL(all_gather)                                                                                                 \
    CALL(gather)                                                                                                     \
    CALL(all_to_all)                                                                                                 \
    CALL(send)                                                                                                       \
    CALL(recv)                                                                                                       \
    CALL(start_send)                                                                                                 \
    CALL(start_recv)

/* The same as `send` and `recv`, but without waiting: what has not come to its end is `pending`. */
PyObject *dmesh_endpoint_isend(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *dmesh_endpoint_irecv(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs);

#define DMESH_DECLARE_CALL(name)                                                                                    \
    PyObject *dmesh_endpoint_##name(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs);
DMESH_CALLS(DMESH_DECLARE_CALL)

/* Nanoseconds that a call waits here for others. After that Python waits, which asks the missing ranks, reports, and
 * times out. */
enum { DMESH_BUDGET = 1000 * 1000 };
/* Bytes from which peers read an array in this process, instead of getting it piece by piece: one copy instead of two,
 * but every page has to be looked up. Of the two ranks of a transfer only the receiver works then, which is better when
 * there are more ranks than cores. */
enum {
    DMESH_SINGLE_COPY_FROM = 48 << 20,
    DMESH_SINGLE_COPY_OVERSUBSCRIBED_TRANSFERS_FROM = 4 << 20,
};
enum { DMESH_LARGE = 64 * 1024 };         /* bytes from which a call over TCP has 20 times the budget */
enum { DMESH_SLICE = 100 * 1000 * 1000 }; /* nanoseconds of TCP traffic between looks at Python's signals */

#define DMESH_NARGS(count)                                                                                                \
    if (nargs != (count)) {                                                                                         \
        PyErr_Format(PyExc_TypeError, "%s takes %d arguments, got %zd", __func__, (count), nargs);                  \
        return NULL;                                                                                                \
    }

#endif
