/* Calls under way: begins them, goes on with them and completes them, and maps the arrays that ranks access in place. */
#include "endpoint.h"

/* Nanoseconds that a whole call waits here for others, and 20 times as long if it is large, before Python waits, which asks
 * the missing ranks, reports, and times out. */
enum { BUDGET = 1000 * 1000 };
enum { LARGE = 64 * 1024 };         /* bytes from which a call over TCP is large */
enum { SLICE = 100 * 1000 * 1000 }; /* nanoseconds of TCP traffic between looks at Python's signals */

/* ---- arrays that ranks access in place ---------------------------------------------------------------------- */

/* Maps a segment, unless it is mapped already, and keeps it mapped as long as the endpoint lives. */
static int attach(dmesh_endpoint *self, int member, const struct dmesh_location *location) {
    for (size_t n = 0; n < self->attachments; n++)
        if (memcmp(self->attached[n], location->nonce, DMESH_NONCE) == 0)
            return 0;
    PyObject *done = PyObject_CallFunction(self->attach, "iy#Ki", member, (const char *)location->nonce,
                                           (Py_ssize_t)DMESH_NONCE, (unsigned long long)location->nbytes,
                                           (int)location->descriptor);
    if (!done)
        return -1;
    Py_DECREF(done);
    unsigned char(*grown)[DMESH_NONCE] = PyMem_Realloc(self->attached, (self->attachments + 1) * sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    self->attached = grown;
    memcpy(self->attached[self->attachments++], location->nonce, DMESH_NONCE);
    return 0;
}

/* Whether the peers read a large private array of a call in this process, which takes a single copy. */
static int is_read_in_place(const dmesh_endpoint *self, enum dmesh_kind kind, size_t nbytes) {
    if (self->single_copy_from != ULLONG_MAX)
        return self->can_read_peers && nbytes >= self->single_copy_from;
    return self->can_read_peers && dmesh_shm_path(&self->shm, kind, nbytes) == DMESH_SINGLE_COPY;
}

/* Returns the location of this rank's array: in shared memory, or in this process if peers read it there. */
static struct dmesh_location locate(const dmesh_endpoint *self, const void *data, size_t nbytes, int in_place) {
    struct dmesh_location location = {.where = DMESH_PRIVATE};
    if (data && self->registered)
        location = dmesh_registered_locate(&self->registered->registered, data, nbytes);
    if (data && location.where == DMESH_PRIVATE && in_place)
        location = (struct dmesh_location){.where = DMESH_IN_PROCESS, .offset = (uintptr_t)data, .nbytes = nbytes};
    return location;
}

/* Maps a member's array of `nbytes` bytes; NULL if it is private. `owner`: the process in which that is an address, or 0
 * for this one. Returns -1 with an exception set if it cannot be mapped. */
static int resolve(dmesh_endpoint *self, int member, const struct dmesh_location *location, size_t nbytes,
                   unsigned char **found, int *owner) {
    *found = NULL;
    *owner = 0;
    if (location->where == DMESH_PRIVATE)
        return 0;
    if (location->where == DMESH_IN_PROCESS) {
        if (!self->can_read_peers || location->nbytes < nbytes) {
            PyErr_Format(PyExc_RuntimeError, "member %d offers %llu bytes of its process, and %zu were to be read%s",
                         member, (unsigned long long)location->nbytes, nbytes,
                         self->can_read_peers ? "" : ", which this process may not");
            return -1;
        }
        *found = (unsigned char *)(uintptr_t)location->offset;
        *owner = self->processes[member];
        return 0;
    }
    if (!self->registered) {
        PyErr_Format(PyExc_RuntimeError, "member %d offers an array, but shares none with this one", member);
        return -1;
    }
    if (attach(self, member, location) < 0)
        return -1;
    *found = dmesh_registered_resolve(&self->registered->registered, location, nbytes);
    if (!*found)
        PyErr_Format(PyExc_RuntimeError, "member %d offers an array that is not in the memory that it shares", member);
    return *found ? 0 : -1;
}

/* Maps the arrays that the members of a group have offered; -1 with an exception set if that fails. */
static int resolve_all(dmesh_endpoint *self) {
    struct dmesh_staged *staged = &self->staged;
    const struct dmesh_blocks *blocks = staged->call.blocks;
    for (int member = 0; member < self->shm.size; member++) {
        struct dmesh_peer_arrays *peer = &staged->peers[member];
        const size_t nbytes = blocks ? blocks->origin[member] + blocks->receives[member] : staged->call.contribution;
        if (member == self->shm.me) {
            peer->source = staged->source.where ? staged->call.source : NULL;
            peer->target = staged->target.where ? staged->call.target : NULL;
            continue;
        }
        struct dmesh_location locations[2]; /* a copy that nobody changes while it is checked */
        memcpy(locations, dmesh_staged_locations(&self->shm, member), sizeof locations);
        unsigned char *source;
        int written;
        if (resolve(self, member, &locations[0], nbytes, &source, &peer->owner) < 0 ||
            resolve(self, member, &locations[1], nbytes, &peer->target, &written) < 0)
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

/* Maps the array that the sender of a transfer has offered. */
static int resolve_sent(dmesh_endpoint *self) {
    struct dmesh_transfer *transfer = &self->transfer;
    unsigned char *from;
    if (resolve(self, 0, &transfer->location, transfer->nbytes, &from, &transfer->owner) < 0)
        return -1;
    transfer->from = from;
    if (!from)
        PyErr_SetString(PyExc_RuntimeError, "the sender offers an array, but not its location");
    return from ? 0 : -1;
}

void dmesh_endpoint_retire(dmesh_endpoint *self) {
    if (!self->pending || !self->retire || self->is_p2p || !self->staged.steps ||
        !dmesh_staged_is_exposed(&self->staged) || dmesh_is_forked(self))
        return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallFunction(self->retire, "((OOOO))", self->source ? self->source : Py_None,
                                           self->result ? self->result : Py_None,
                                           self->data.obj ? self->data.obj : Py_None,
                                           self->into.obj ? self->into.obj : Py_None);
    if (!done)
        PyErr_WriteUnraisable(self->retire);
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
}

PyObject *dmesh_endpoint_advertise(dmesh_endpoint *self, PyObject *args) {
    PyObject *registered, *attach, *retire, *processes;
    int found[DMESH_MEMBERS];
    if (!PyArg_ParseTuple(args, "O!OOO!", dmesh_state_of(PyType_GetModule(Py_TYPE(self)))->registered, &registered,
                          &attach, &retire, &PyList_Type, &processes))
        return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(processes);
    if (count && count != self->shm.size)
        return PyErr_Format(PyExc_ValueError, "%zd processes for %d members", count, self->shm.size);
    for (Py_ssize_t member = 0; member < count; member++) {
        const long process = PyLong_AsLong(PyList_GET_ITEM(processes, member));
        if (process < 1 || process > INT_MAX)
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%ld is no process", process);
        found[member] = (int)process;
    }
    if (count > 0)
        memcpy(self->processes, found, (size_t)count * sizeof *found);
    self->can_read_peers = count > 0;
    self->shm.measurer = count > 0 ? self->is_p2p != 0 : -1; /* of a transfer, the receiver */
    if (self->shm.measurer == self->shm.me)
        dmesh_shm_measure(&self->shm, !self->is_p2p              ? DMESH_SINGLE_COPY_FROM
                                      : self->shm.oversubscribed ? DMESH_SINGLE_COPY_OVERSUBSCRIBED_TRANSFERS_FROM
                                                                 : SIZE_MAX);
    Py_XSETREF(self->registered, (dmesh_registered_object *)Py_NewRef(registered));
    Py_XSETREF(self->attach, Py_NewRef(attach));
    Py_XSETREF(self->retire, Py_NewRef(retire));
    Py_RETURN_NONE;
}

/* ---- calls -------------------------------------------------------------------------------------------------- */

/* Describes a transfer, of a place among all to the receiver: by its dtype and shape, or if the dtype is -1 by a text. */
static void describe(dmesh_endpoint *self, unsigned long long order, int dtype, int ndim, const int64_t *shape,
                     const char *text, size_t text_bytes) {
    struct dmesh_envelope *envelope = &self->envelope;
    envelope->order = order;
    envelope->dtype = dtype;
    envelope->ndim = ndim;
    for (int axis = 0; axis < ndim; axis++)
        envelope->shape[axis] = shape[axis];
    envelope->text_bytes = dmesh_least(text_bytes, DMESH_TEXT);
    memcpy(envelope->text, text, envelope->text_bytes);
}

/* Begins a call; only `run` waits for others. */
static void begin(dmesh_endpoint *self, const struct dmesh_call *call, uint64_t hash) {
    const size_t nbytes = call->contribution;
    self->call = *call;
    self->staged.steps = 0;
    if (self->tcp) {
        dmesh_tcp_begin(self->tcp, call, hash, &self->envelope);
    } else if (self->is_p2p) {
        const int sends = self->shm.me == 0;
        dmesh_p2p_begin(&self->transfer, hash, sends ? (unsigned char *)call->source : call->target, nbytes,
                        &self->envelope);
        if (self->registered && sends && nbytes > self->shm.slot_bytes)
            self->transfer.location = locate(self, call->source, nbytes, is_read_in_place(self, call->kind, nbytes));
    } else if (nbytes > self->shm.slot_bytes) {
        dmesh_staged_init(&self->shm, &self->staged, call, hash);
        if (self->registered)
            dmesh_staged_offer(&self->shm, &self->staged,
                               locate(self, call->source, dmesh_own(call), is_read_in_place(self, call->kind, nbytes)),
                               locate(self, call->target, nbytes, 0));
    } else {
        dmesh_shm_begin(&self->shm, call, hash);
    }
}

/* Goes on with the call until `deadline`, which for a call of one epoch may be 0: it does not wait then. */
static enum dmesh_status advance(dmesh_endpoint *self, int64_t deadline) {
    if (self->tcp)
        return dmesh_tcp_run(self->tcp, deadline);
    if (self->is_p2p)
        return dmesh_p2p_run(&self->shm, &self->transfer, deadline);
    if (self->staged.steps)
        return dmesh_staged_run(&self->shm, &self->staged, deadline);
    const enum dmesh_status status = dmesh_shm_wait(&self->shm, deadline);
    if (status == DMESH_OK)
        dmesh_shm_end(&self->shm, &self->call);
    return status;
}

/* Goes on with the call for some nanoseconds, without the GIL. DMESH_ABORTED may come with an exception set. */
static enum dmesh_status run(dmesh_endpoint *self, int64_t nanoseconds) {
    const int64_t deadline = dmesh_now() + (self->tcp && nanoseconds > SLICE ? SLICE : nanoseconds);
    for (;;) {
        dmesh_release_gil(); /* the arrays stay alive: the endpoint or its caller holds them */
        const enum dmesh_status status = advance(self, deadline);
        dmesh_take_gil();
        if (self->tcp)
            self->shm.culprit = self->tcp->culprit;
        if (status != DMESH_RESOLVE)
            return status;
        if ((self->is_p2p ? resolve_sent(self) : resolve_all(self)) < 0)
            return DMESH_ABORTED;
    }
}

/* Completes a call that the endpoint took whole, and calls `on_complete`. Returns the result, which it takes, or None. */
static PyObject *complete(dmesh_endpoint *self, unsigned long long number, PyObject *result) {
    self->completed_at = dmesh_entry_of(self, number)->completed_at = dmesh_now();
    self->completed = number;
    if (!result)
        result = Py_NewRef(Py_None);
    if (self->on_complete == Py_None)
        return result;
    PyObject *on_complete = Py_NewRef(self->on_complete); /* another thread may replace it meanwhile */
    PyObject *done = PyObject_CallNoArgs(on_complete);
    Py_DECREF(on_complete);
    if (!done)
        Py_CLEAR(result);
    Py_XDECREF(done);
    return result;
}

PyObject *dmesh_endpoint_carry_out(dmesh_endpoint *self, struct dmesh_attempt *attempt, int waits) {
    const unsigned long long number = ++self->issued;
    const size_t nbytes = attempt->call.contribution;
    struct dmesh_entry *entry = dmesh_entry_of(self, number);
    *entry = (struct dmesh_entry){.number = number, .descriptor = attempt->descriptor, .nbytes = (npy_intp)nbytes,
                                  .began = dmesh_now()};
    self->whole = 1;
    if (self->is_p2p)
        describe(self, number + self->others, attempt->descriptor.dtype, attempt->descriptor.ndim, attempt->descriptor.shape, "", 0);
    begin(self, &attempt->call, attempt->hash);
    const int streams = self->tcp || nbytes > self->shm.slot_bytes;
    self->status = streams ? DMESH_PENDING : advance(self, 0);
    if (self->status == DMESH_PENDING) {
        entry->waited_from = streams || self->is_p2p ? -1 : dmesh_now(); /* -1: waiting and moving data alternate */
        if (waits || streams)
            self->status = run(self, waits * (int64_t)BUDGET * ((self->tcp ? nbytes > LARGE : streams) ? 20 : 1));
    }
    if (self->status == DMESH_OK)
        return complete(self, number, attempt->result);
    self->source = Py_XNewRef((PyObject *)attempt->source);
    self->result = attempt->result;
    self->number = number;
    self->pending = 1;
    return PyErr_Occurred() ? NULL : Py_NewRef((PyObject *)self);
}

PyObject *dmesh_endpoint_progress(dmesh_endpoint *self, PyObject *argument) {
    const double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    if (!self->pending || dmesh_is_forked(self)) {
        PyErr_SetString(PyExc_RuntimeError, "no call is under way in this endpoint");
        return NULL;
    }
    self->status = run(self, seconds < 1e6 ? (int64_t)(seconds * 1e9) : (int64_t)1e15);
    if (self->status != DMESH_OK)
        return PyErr_Occurred() ? NULL : Py_NewRef((PyObject *)self);
    self->pending = 0;
    PyBuffer_Release(&self->data);
    PyBuffer_Release(&self->into);
    if (!self->whole)
        Py_RETURN_NONE;
    PyObject *result = self->result;
    self->result = NULL;
    Py_CLEAR(self->source);
    return complete(self, self->number, result);
}

/* Whether blocks lie in this rank's buffers, and in the largest contribution. */
static int blocks_fit(const dmesh_endpoint *self, const struct dmesh_call *call) {
    const struct dmesh_blocks *blocks = call->blocks;
    const size_t most = call->contribution, room = self->into.obj ? (size_t)self->into.len : 0;
    int fit = blocks->own <= most && blocks->largest <= most && most / (size_t)self->shm.size <= blocks->largest;
    for (int member = 0; member < self->shm.size; member++) {
        const size_t sends = blocks->sends[member], receives = blocks->receives[member];
        fit &= sends <= blocks->largest && sends <= blocks->own && blocks->send_at[member] <= blocks->own - sends;
        fit &= receives <= blocks->largest && blocks->origin[member] <= most - receives;
        fit &= receives <= room && blocks->receive_at[member] <= room - receives;
    }
    return fit;
}

/* Begins a call between flat buffers of bytes, each of which may be None; `progress` goes on. */
static PyObject *start(dmesh_endpoint *self, struct dmesh_call *call, uint64_t hash, PyObject *source, PyObject *target) {
    if (self->pending || dmesh_is_forked(self)) {
        PyErr_SetString(PyExc_RuntimeError, self->pending ? "a call is under way in this endpoint already"
                                                          : "this endpoint belongs to the parent process");
        return NULL;
    }
    if (source != Py_None && PyObject_GetBuffer(source, &self->data, PyBUF_SIMPLE) < 0)
        return NULL;
    if (target != Py_None && PyObject_GetBuffer(target, &self->into, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&self->data);
        return NULL;
    }
    call->source = self->data.obj ? self->data.buf : NULL;
    call->target = self->into.obj ? self->into.buf : NULL;
    if (call->blocks) {
        self->blocks.own = self->data.obj ? (size_t)self->data.len : 0;
        if (!blocks_fit(self, call)) {
            PyBuffer_Release(&self->data);
            PyBuffer_Release(&self->into);
            PyErr_SetString(PyExc_ValueError, "the blocks do not fit into the buffers");
            return NULL;
        }
    }
    if (call->kind == DMESH_TRANSFER)
        call->contribution = (size_t)(source != Py_None ? self->data.len : self->into.len);
    self->whole = 0;
    self->pending = 1;
    self->status = DMESH_PENDING;
    begin(self, call, hash);
    Py_RETURN_NONE;
}

/* Takes the layout of blocks of different lengths: for each member five numbers, in the order of `struct dmesh_blocks`, then
 * the bytes of the largest block of any member. */
static void take_blocks(dmesh_endpoint *self, const char *layout) {
    struct dmesh_blocks *blocks = &self->blocks;
    uint64_t words[5];
    for (int member = 0; member < self->shm.size; member++, layout += sizeof words) {
        memcpy(words, layout, sizeof words);
        blocks->sends[member] = words[0];
        blocks->send_at[member] = words[1];
        blocks->receives[member] = words[2];
        blocks->receive_at[member] = words[3];
        blocks->origin[member] = words[4];
    }
    memcpy(words, layout, sizeof *words);
    blocks->largest = words[0];
}

PyObject *dmesh_endpoint_start(dmesh_endpoint *self, PyObject *args) {
    int kind, op, dtype, root;
    unsigned long long hash;
    Py_ssize_t nbytes, block, layout_bytes = 0;
    PyObject *source, *target;
    const char *layout = NULL;
    if (!PyArg_ParseTuple(args, "iiiiKnnOO|z#", &kind, &op, &dtype, &root, &hash, &nbytes, &block, &source, &target, &layout,
                          &layout_bytes))
        return NULL;
    const int known = kind >= 0 && kind < DMESH_KINDS, reduces = known && dmesh_patterns[kind].reduces;
    const dmesh_kernel *kernel = reduces ? dmesh_kernel_of(op, dtype) : NULL;
    if (self->is_p2p || !known || kind == DMESH_TRANSFER || (reduces && !kernel) || (kind == DMESH_PERMUTE && !layout) ||
        root < 0 || root >= self->shm.size || nbytes < 0 || block < 0 ||
        (layout && layout_bytes != (5 * self->shm.size + 1) * (Py_ssize_t)sizeof(uint64_t)))
        return PyErr_Format(PyExc_ValueError, "no collective %d with op %d, dtype %d, root %d in this endpoint", kind, op,
                            dtype, root);
    struct dmesh_call call = {.kind = (enum dmesh_kind)kind, .root = root, .contribution = (size_t)nbytes,
                              .block = (size_t)block, .kernel = kernel};
    if (layout && !self->pending) {
        take_blocks(self, layout);
        call.blocks = &self->blocks;
    }
    const size_t reduced = layout ? self->blocks.receives[self->shm.me] : dmesh_share(&call);
    call.count = kernel ? reduced / dmesh_kernel_input_size(kernel) : 0;
    return start(self, &call, hash, source, target);
}

/* Waits until the sender has begun to send: with the GIL, if for no time. Returns whether there is an envelope now; -1 with
 * an exception set if it was interrupted. */
static int await(dmesh_endpoint *self, struct dmesh_envelope *envelope, int64_t nanoseconds) {
    const unsigned long long epoch = self->shm.epoch, issued = self->issued, number = self->tcp ? self->tcp->number : 0;
    enum dmesh_status status;
    if (self->tcp && dmesh_tcp_waits_for(self->tcp, 0))
        return 0; /* another thread is at a transfer */
    if (nanoseconds <= 0) {
        status = self->tcp ? dmesh_tcp_await(self->tcp, envelope, number, 0) : dmesh_p2p_await(&self->shm, 0);
    } else {
        const int64_t deadline = dmesh_now() + nanoseconds;
        dmesh_release_gil();
        status = self->tcp ? dmesh_tcp_await(self->tcp, envelope, number, deadline) : dmesh_p2p_await(&self->shm, deadline);
        dmesh_take_gil();
    }
    if (PyErr_Occurred())
        return -1;
    /* Another thread may have begun a call meanwhile. */
    if (self->pending || self->shm.epoch != epoch || self->issued != issued)
        return 0;
    if (status == DMESH_OK && !self->tcp && !dmesh_p2p_envelope(&self->shm, envelope))
        status = DMESH_CORRUPT;
    if (status == DMESH_CORRUPT || status == DMESH_DISCONNECTED) {
        self->status = status;
        self->shm.culprit = 0;
    }
    return status == DMESH_OK;
}

int dmesh_endpoint_expects(dmesh_endpoint *self, const struct dmesh_descriptor *descriptor, int waits) {
    struct dmesh_envelope envelope;
    int found = await(self, &envelope, 0);
    if (!found && waits)
        found = await(self, &envelope, BUDGET);
    if (found <= 0)
        return found;
    return envelope.dtype == descriptor->dtype && envelope.ndim == descriptor->ndim &&
           memcmp(envelope.shape, descriptor->shape, (size_t)envelope.ndim * sizeof *envelope.shape) == 0;
}

/* Returns what the sender has begun to send: order, dtype, shape and text; None if that is nothing, or a call is under way. */
PyObject *dmesh_endpoint_arrival(dmesh_endpoint *self, PyObject *argument) {
    const double seconds = PyFloat_AsDouble(argument);
    struct dmesh_envelope envelope;
    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    if (!self->is_p2p || self->shm.me == 0 || dmesh_is_forked(self)) {
        PyErr_SetString(PyExc_RuntimeError, "nothing arrives at this endpoint");
        return NULL;
    }
    if (self->pending)
        Py_RETURN_NONE;
    const int found = await(self, &envelope, (int64_t)((seconds < 1e6 ? seconds : 1e6) * 1e9));
    if (found <= 0)
        return found ? NULL : Py_NewRef(Py_None);
    npy_intp lengths[DMESH_DIMENSIONS];
    for (int axis = 0; axis < envelope.ndim; axis++)
        lengths[axis] = (npy_intp)envelope.shape[axis];
    return Py_BuildValue("(KiNN)", (unsigned long long)envelope.order, envelope.dtype,
                         PyArray_IntTupleFromIntp(envelope.ndim, lengths),
                         PyUnicode_DecodeUTF8(envelope.text, (Py_ssize_t)envelope.text_bytes, "replace"));
}

/* Begins to send or receive bytes, as the endpoint's position says. */
PyObject *dmesh_endpoint_start_transfer(dmesh_endpoint *self, PyObject *args) {
    struct dmesh_call call = {.kind = DMESH_TRANSFER};
    const int sends = self->shm.me == 0;
    unsigned long long hash, order = 0;
    PyObject *buffer, *lengths = NULL;
    int dtype = -1;
    const char *text = "";
    Py_ssize_t text_bytes = 0, ndim = 0;
    int64_t shape[DMESH_DIMENSIONS];
    if (!PyArg_ParseTuple(args, "KO|KiO!s#", &hash, &buffer, &order, &dtype, &PyTuple_Type, &lengths, &text, &text_bytes))
        return NULL;
    if (lengths && (ndim = PyTuple_GET_SIZE(lengths)) > DMESH_DIMENSIONS)
        return PyErr_Format(PyExc_ValueError, "%zd dimensions are too many", ndim);
    for (Py_ssize_t axis = 0; axis < ndim; axis++)
        shape[axis] = PyLong_AsLongLong(PyTuple_GET_ITEM(lengths, axis));
    if (PyErr_Occurred())
        return NULL;
    if (!self->is_p2p) {
        PyErr_SetString(PyExc_RuntimeError, "this endpoint is not one for transfers");
        return NULL;
    }
    if (!self->pending)
        describe(self, order, dtype, (int)ndim, shape, text, (size_t)text_bytes);
    return start(self, &call, hash, sends ? buffer : Py_None, sends ? Py_None : buffer);
}
