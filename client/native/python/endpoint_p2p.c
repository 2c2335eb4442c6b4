/* Transfers between two ranks: those that the endpoint takes whole, and those that Python starts. */
#include "endpoint.h"

enum dmesh_status dmesh_endpoint_run_p2p(dmesh_endpoint *self, int64_t deadline) {
    for (;;) {
        enum dmesh_status status;
        Py_BEGIN_ALLOW_THREADS
        status = dmesh_p2p_run(&self->shm, &self->transfer, deadline);
        Py_END_ALLOW_THREADS
        if (status != DMESH_RESOLVE)
            return status;
        unsigned char *from;
        if (dmesh_endpoint_resolve(self, 0, &self->transfer.location, self->transfer.nbytes, &from, &self->transfer.owner) < 0)
            return DMESH_ABORTED;
        if (!from) {
            PyErr_SetString(PyExc_RuntimeError, "the sender offers an array, but not its location");
            return DMESH_ABORTED;
        }
        self->transfer.from = from;
    }
}

/* Begins a transfer; a large array that the receiver can reach is not copied to slots. */
static void begin(dmesh_endpoint *self, uint64_t hash, void *data, size_t nbytes) {
    if (self->tcp) {
        const struct dmesh_call call = {.kind = DMESH_TRANSFER, .source = data, .target = data, .contribution = nbytes};
        dmesh_tcp_begin(self->tcp, &call, hash);
        return;
    }
    dmesh_p2p_begin(&self->transfer, hash, data, nbytes);
    if (self->registered && self->shm.me == 0 && nbytes > self->shm.slot_bytes)
        self->transfer.location = dmesh_endpoint_locate(self, data, nbytes);
}

/* Begins this rank's half of a transfer, and waits for at most the budget; not at all if it need not. */
static PyObject *carry_out(dmesh_endpoint *self, struct dmesh_attempt *attempt, void *data, int waits) {
    const unsigned long long number = dmesh_record_start(self, attempt);
    const size_t nbytes = attempt->call.contribution;
    begin(self, dmesh_descriptor_hash(&attempt->descriptor), data, nbytes);
    self->status = DMESH_PENDING;
    const int fits = !self->tcp && nbytes <= self->shm.slot_bytes;
    if (fits)
        self->status = dmesh_p2p_run(&self->shm, &self->transfer, 0);
    if (self->status == DMESH_PENDING) {
        dmesh_entry_of(self, number)->waited_from = -1; /* waiting and moving data alternate */
        const size_t large = self->tcp ? DMESH_LARGE : self->shm.slot_bytes;
        if (waits || !fits)
            self->status = dmesh_endpoint_run(self, waits * (nbytes > large ? 20 : 1) * (int64_t)DMESH_BUDGET);
    }
    return dmesh_conclude(self, attempt, number);
}

static PyObject *transmit(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs, int waits) {
    DMESH_NARGS(1)
    struct dmesh_attempt attempt = {0};
    if (!self->is_p2p || !dmesh_accept(self, &attempt, DMESH_TRANSFER, args[0]))
        return dmesh_decline(&attempt);
    return carry_out(self, &attempt, PyArray_DATA(attempt.source), waits);
}

static PyObject *receive(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs, int waits) {
    DMESH_NARGS(2)
    struct dmesh_attempt attempt = {0};
    PyObject *like = args[0] == Py_None ? args[1] : args[0];
    if (!self->is_p2p || !dmesh_accept(self, &attempt, DMESH_TRANSFER, like) || !dmesh_provide_like(&attempt, args[1]))
        return dmesh_decline(&attempt);
    return carry_out(self, &attempt, attempt.call.target, waits);
}

PyObject *dmesh_endpoint_send(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    return transmit(self, args, nargs, 1);
}

PyObject *dmesh_endpoint_recv(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    return receive(self, args, nargs, 1);
}

PyObject *dmesh_endpoint_isend(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    return transmit(self, args, nargs, 0);
}

PyObject *dmesh_endpoint_irecv(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    return receive(self, args, nargs, 0);
}

static PyObject *start(dmesh_endpoint *self, PyObject *hash, PyObject *data, PyObject *into) {
    const uint64_t number = PyLong_AsUnsignedLongLong(hash);
    if (number == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    if (!self->is_p2p) {
        PyErr_SetString(PyExc_RuntimeError, "this endpoint is not one for transfers");
        return NULL;
    }
    if (dmesh_endpoint_take_buffers(self, data, into) < 0)
        return NULL;
    const Py_buffer *buffer = self->data.obj ? &self->data : &self->into;
    begin(self, number, buffer->buf, (size_t)buffer->len);
    Py_RETURN_NONE;
}

/* start_send(hash, data): begins to send bytes; `progress` goes on. */
PyObject *dmesh_endpoint_start_send(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(2)
    return start(self, args[0], args[1], Py_None);
}

/* start_recv(hash, into): begins to receive bytes; `progress` goes on. */
PyObject *dmesh_endpoint_start_recv(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    DMESH_NARGS(2)
    return start(self, args[0], Py_None, args[1]);
}
