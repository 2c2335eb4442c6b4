/* Collectives that an endpoint takes whole, from Python's arguments to the result, and those that Python starts.
 *
 * The methods that are named after collectives return the result; or NotImplemented, if the call is unusual and nothing
 * has happened; or the endpoint itself, if the call has begun and others have not come in time.
 */
#include "endpoint.h"

PyObject *dmesh_decline(struct dmesh_attempt *attempt) {
    Py_XDECREF(attempt->result);
    PyErr_Clear(); /* if there was no memory for the result, Python finds that out again, and tells the others */
    Py_RETURN_NOTIMPLEMENTED;
}

/* Completes a call that the endpoint took whole, and calls `on_complete`. */
static int complete(dmesh_endpoint *self, unsigned long long number) {
    self->completed_at = dmesh_entry_of(self, number)->completed_at = dmesh_now();
    self->completed = number;
    if (self->on_complete == Py_None)
        return 0;
    PyObject *on_complete = Py_NewRef(self->on_complete); /* another thread may replace it meanwhile */
    PyObject *done = PyObject_CallNoArgs(on_complete);
    Py_XDECREF(done);
    Py_DECREF(on_complete);
    return done ? 0 : -1;
}

/* Maps the arrays that the members have offered; -1 with an exception set if that fails. */
static int resolve_all(dmesh_endpoint *self) {
    struct dmesh_staged *staged = &self->staged;
    const size_t nbytes = staged->call.contribution;
    for (int member = 0; member < self->shm.size; member++) {
        struct dmesh_peer_arrays *peer = &staged->peers[member];
        if (member == self->shm.me) {
            peer->source = staged->source.where ? staged->call.source : NULL;
            peer->target = staged->target.where ? staged->call.target : NULL;
            continue;
        }
        struct dmesh_location locations[2]; /* a copy that nobody changes while it is checked */
        memcpy(locations, dmesh_staged_locations(&self->shm, member), sizeof locations);
        unsigned char *source;
        int written;
        if (dmesh_endpoint_resolve(self, member, &locations[0], nbytes, &source, &peer->owner) < 0 ||
            dmesh_endpoint_resolve(self, member, &locations[1], nbytes, &peer->target, &written) < 0)
            return -1;
        if (written) {
            PyErr_Format(PyExc_RuntimeError, "member %d offers its process to be written to", member);
            return -1;
        }
        peer->source = source;
    }
    dmesh_staged_resolved(&self->shm, staged);
    return 0;
}

void dmesh_endpoint_begin(dmesh_endpoint *self, const struct dmesh_call *call, uint64_t hash) {
    self->call = *call;
    self->staged.steps = 0;
    if (self->tcp) {
        dmesh_tcp_begin(self->tcp, call, hash);
    } else if (call->contribution > self->shm.slot_bytes) {
        dmesh_staged_init(&self->shm, &self->staged, call, hash);
        if (self->registered)
            dmesh_staged_offer(&self->staged, dmesh_endpoint_locate(self, call->source, call->contribution),
                               dmesh_endpoint_locate(self, call->target, call->contribution));
    } else {
        dmesh_shm_begin(&self->shm, call, hash);
    }
}

static enum dmesh_status run_tcp(dmesh_endpoint *self, int64_t nanoseconds) {
    enum dmesh_status status;
    const int64_t deadline = dmesh_now() + (nanoseconds < DMESH_SLICE ? nanoseconds : DMESH_SLICE);
    Py_BEGIN_ALLOW_THREADS
    status = dmesh_tcp_run(self->tcp, deadline);
    Py_END_ALLOW_THREADS
    self->shm.culprit = self->tcp->culprit;
    return status;
}

static enum dmesh_status run_staged(dmesh_endpoint *self, int64_t deadline) {
    for (;;) {
        enum dmesh_status status;
        Py_BEGIN_ALLOW_THREADS /* the arrays stay alive: the endpoint or its caller holds them */
        status = dmesh_staged_run(&self->shm, &self->staged, deadline);
        Py_END_ALLOW_THREADS
        if (status != DMESH_RESOLVE)
            return status;
        if (resolve_all(self) < 0)
            return DMESH_ABORTED;
    }
}

enum dmesh_status dmesh_endpoint_run(dmesh_endpoint *self, int64_t nanoseconds) {
    if (self->tcp)
        return run_tcp(self, nanoseconds);
    const int64_t deadline = dmesh_now() + nanoseconds;
    if (self->transfer.active)
        return dmesh_endpoint_run_p2p(self, deadline);
    if (self->staged.steps)
        return run_staged(self, deadline);
    enum dmesh_status status;
    Py_BEGIN_ALLOW_THREADS
    status = dmesh_shm_wait(&self->shm, deadline);
    Py_END_ALLOW_THREADS
    if (status == DMESH_OK && !self->is_p2p)
        dmesh_shm_end(&self->shm, &self->call);
    return status;
}

/* Begins the call of an attempt, and waits for at most the budget. */
static enum dmesh_status begin(dmesh_endpoint *self, const struct dmesh_attempt *attempt) {
    const size_t nbytes = attempt->call.contribution;
    struct dmesh_entry *entry = dmesh_entry_of(self, self->issued);
    dmesh_endpoint_begin(self, &attempt->call, dmesh_descriptor_hash(&attempt->descriptor));
    int64_t budget = DMESH_BUDGET;
    if (self->tcp || self->staged.steps) {
        entry->waited_from = -1; /* waiting and moving data alternate */
        budget *= !self->tcp || nbytes > DMESH_LARGE ? 20 : 1;
    } else {
        const enum dmesh_status status = dmesh_shm_wait(&self->shm, 0);
        if (status == DMESH_OK)
            dmesh_shm_end(&self->shm, &attempt->call);
        if (status != DMESH_PENDING)
            return status;
        entry->waited_from = dmesh_now();
    }
    return dmesh_endpoint_run(self, budget);
}

unsigned long long dmesh_record_start(dmesh_endpoint *self, const struct dmesh_attempt *attempt) {
    const unsigned long long number = ++self->issued;
    struct dmesh_entry *entry = dmesh_entry_of(self, number);
    entry->number = number;
    entry->descriptor = attempt->descriptor;
    entry->nbytes = (npy_intp)attempt->call.contribution;
    entry->completed_at = entry->waited_from = 0;
    entry->began = dmesh_now();
    self->whole = 1;
    return number;
}

PyObject *dmesh_conclude(dmesh_endpoint *self, struct dmesh_attempt *attempt, unsigned long long number) {
    if (self->status == DMESH_OK) {
        if (complete(self, number) < 0) {
            Py_XDECREF(attempt->result);
            return NULL;
        }
        if (attempt->result)
            return attempt->result;
        Py_RETURN_NONE;
    }
    self->source = Py_XNewRef((PyObject *)attempt->source);
    self->result = attempt->result;
    self->number = number;
    self->pending = 1;
    return PyErr_Occurred() ? NULL : Py_NewRef((PyObject *)self);
}

static PyObject *carry_out(dmesh_endpoint *self, struct dmesh_attempt *attempt) {
    const unsigned long long number = dmesh_record_start(self, attempt);
    self->status = begin(self, attempt);
    return dmesh_conclude(self, attempt, number);
}

PyObject *dmesh_endpoint_barrier(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)args;
    DMESH_NARGS(0)
    struct dmesh_attempt attempt = {0};
    if (!dmesh_is_ready(self))
        return dmesh_decline(&attempt);
    attempt.descriptor.kind = attempt.call.kind = DMESH_BARRIER;
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_all_reduce(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(3)
    struct dmesh_attempt attempt = {0};
    if (!dmesh_accept(self, &attempt, DMESH_ALL_REDUCE, args[0]) ||
        attempt.call.contribution >= self->max_all_reduce ||
        !dmesh_accept_op(&attempt, args[1], (size_t)PyArray_SIZE(attempt.source)) || !dmesh_provide_like(&attempt, args[2]))
        return dmesh_decline(&attempt);
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_reduce(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(4)
    struct dmesh_attempt attempt = {0};
    const int root = attempt.call.root = attempt.descriptor.argument = dmesh_position_of(self, args[2]);
    if (root < 0 || !dmesh_accept(self, &attempt, DMESH_REDUCE, args[0]) ||
        !dmesh_accept_op(&attempt, args[1], (size_t)PyArray_SIZE(attempt.source)))
        return dmesh_decline(&attempt);
    if (self->shm.me == root ? !dmesh_provide_like(&attempt, args[3]) : args[3] != Py_None)
        return dmesh_decline(&attempt);
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_reduce_scatter(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(4)
    struct dmesh_attempt attempt = {0};
    const int size = self->shm.size;
    if (!dmesh_accept(self, &attempt, DMESH_REDUCE_SCATTER, args[0]) || !PyArray_NDIM(attempt.source))
        return dmesh_decline(&attempt);
    PyArrayObject *array = attempt.source;
    const int ndim = PyArray_NDIM(array);
    npy_intp shape[DMESH_DIMENSIONS];
    memcpy(shape, PyArray_DIMS(array), (size_t)ndim * sizeof *shape);
    /* Without an axis there is a row for each member; along axis 0, as many rows. */
    const int stacked = args[2] == Py_None;
    if (stacked ? shape[0] != size
                : !PyLong_CheckExact(args[2]) || dmesh_position_of(self, args[2]) != 0 || shape[0] % size)
        return dmesh_decline(&attempt);
    attempt.descriptor.argument = !stacked;
    shape[0] /= size;
    attempt.call.block = attempt.call.contribution / (size_t)size;
    if (!dmesh_accept_op(&attempt, args[1], (size_t)(PyArray_SIZE(array) / size)) ||
        !dmesh_provide(&attempt, args[3], ndim - stacked, shape + stacked))
        return dmesh_decline(&attempt);
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_broadcast(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(3)
    struct dmesh_attempt attempt = {0};
    const int root = attempt.call.root = attempt.descriptor.argument = dmesh_position_of(self, args[1]);
    if (root < 0 || !dmesh_accept(self, &attempt, DMESH_BROADCAST, args[0]) || !dmesh_provide_like(&attempt, args[2]))
        return dmesh_decline(&attempt);
    if (self->shm.me != root)
        attempt.call.source = NULL;
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_all_gather(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(3)
    struct dmesh_attempt attempt = {0};
    const int extends = args[1] != Py_None;
    if (!dmesh_accept(self, &attempt, DMESH_ALL_GATHER, args[0]) ||
        (extends && (dmesh_position_of(self, args[1]) != 0 || !PyArray_NDIM(attempt.source))))
        return dmesh_decline(&attempt);
    attempt.call.block = attempt.call.contribution;
    if (!dmesh_provide_rows(self, &attempt, args[2], extends))
        return dmesh_decline(&attempt);
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_gather(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(3)
    struct dmesh_attempt attempt = {0};
    const int root = attempt.call.root = attempt.descriptor.argument = dmesh_position_of(self, args[1]);
    if (root < 0 || !dmesh_accept(self, &attempt, DMESH_GATHER, args[0]))
        return dmesh_decline(&attempt);
    attempt.call.block = attempt.call.contribution;
    if (self->shm.me == root ? !dmesh_provide_rows(self, &attempt, args[2], 0) : args[2] != Py_None)
        return dmesh_decline(&attempt);
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_all_to_all(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(2)
    struct dmesh_attempt attempt = {0};
    const int size = self->shm.size;
    if (!dmesh_accept(self, &attempt, DMESH_ALL_TO_ALL, args[0]) || !PyArray_NDIM(attempt.source) ||
        PyArray_DIM(attempt.source, 0) % size || !dmesh_provide_like(&attempt, args[1]) ||
        (self->tcp && attempt.call.target == attempt.call.source))
        return dmesh_decline(&attempt);
    attempt.call.block = attempt.call.contribution / (size_t)size;
    return carry_out(self, &attempt);
}

PyObject *dmesh_endpoint_progress(dmesh_endpoint *self, PyObject *argument) {
    const double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    if (!self->pending || dmesh_is_forked(self)) {
        PyErr_SetString(PyExc_RuntimeError, "no call is under way in this endpoint");
        return NULL;
    }
    self->status = dmesh_endpoint_run(self, seconds < 1e6 ? (int64_t)(seconds * 1e9) : (int64_t)1e15);
    if (self->status != DMESH_OK)
        return PyErr_Occurred() ? NULL : Py_NewRef((PyObject *)self);
    self->pending = 0;
    if (self->data.obj)
        PyBuffer_Release(&self->data);
    if (self->into.obj)
        PyBuffer_Release(&self->into);
    if (!self->whole)
        Py_RETURN_NONE;
    PyObject *result = self->result;
    self->result = NULL;
    Py_CLEAR(self->source);
    if (complete(self, self->number) < 0) {
        Py_XDECREF(result);
        return NULL;
    }
    return result ? result : Py_NewRef(Py_None);
}

int dmesh_endpoint_take_buffers(dmesh_endpoint *self, PyObject *data, PyObject *into) {
    if (self->pending || dmesh_is_forked(self)) {
        PyErr_SetString(PyExc_RuntimeError, self->pending ? "a call is under way in this endpoint already"
                                                          : "this endpoint belongs to the parent process");
        return -1;
    }
    if (data != Py_None && PyObject_GetBuffer(data, &self->data, PyBUF_SIMPLE) < 0)
        return -1;
    if (into != Py_None && PyObject_GetBuffer(into, &self->into, PyBUF_WRITABLE) < 0) {
        if (self->data.obj)
            PyBuffer_Release(&self->data);
        return -1;
    }
    self->whole = 0;
    self->pending = 1;
    self->status = DMESH_PENDING;
    return 0;
}

PyObject *dmesh_endpoint_start(dmesh_endpoint *self, PyObject *args) {
    int kind, op, dtype, root;
    unsigned long long hash;
    Py_ssize_t nbytes, block;
    PyObject *source, *target;
    if (!PyArg_ParseTuple(args, "iiiiKnnOO", &kind, &op, &dtype, &root, &hash, &nbytes, &block, &source, &target))
        return NULL;
    const int reduces = kind == DMESH_ALL_REDUCE || kind == DMESH_REDUCE || kind == DMESH_REDUCE_SCATTER;
    const dmesh_kernel *kernel = reduces ? dmesh_kernel_of(op, dtype) : NULL;
    if (self->is_p2p || kind < 0 || kind >= DMESH_KINDS || kind == DMESH_TRANSFER || (reduces && !kernel) ||
        (kind == DMESH_PERMUTE && self->tcp) || root >= self->shm.size || nbytes < 0 || block < 0)
        return PyErr_Format(PyExc_ValueError, "no collective %d with op %d, dtype %d, root %d in this endpoint", kind, op,
                            dtype, root);
    if (dmesh_endpoint_take_buffers(self, source, target) < 0)
        return NULL;
    const struct dmesh_call call = {
        .kind = (enum dmesh_kind)kind,
        .root = root,
        .source = self->data.obj ? self->data.buf : NULL,
        .target = self->into.obj ? self->into.buf : NULL,
        .contribution = (size_t)nbytes,
        .block = (size_t)block,
        .count = kernel ? (size_t)(kind == DMESH_REDUCE_SCATTER ? block : nbytes) / dmesh_kernel_input_size(kernel) : 0,
        .kernel = kernel,
    };
    dmesh_endpoint_begin(self, &call, hash);
    Py_RETURN_NONE;
}
