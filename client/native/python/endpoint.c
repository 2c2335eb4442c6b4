/* The type `dmesh._native.Endpoint`: construction, attributes, records of calls.
 *
 * Everything except waiting and copying happens with the GIL held, which keeps the numbering of calls consistent.
 */
#include "endpoint.h"

#include <stddef.h>
#include <structmember.h>

#include "copy.h"

PyDoc_STRVAR(progress_doc, "progress(seconds): waits for the members; returns what the call returns, or the endpoint itself "
                           "if it is not complete. `mismatched`, `corrupt` and `disconnected` tell more then.");

/* Whether a member keeps the pending call from completing. */
static int waits_for(const dmesh_endpoint *self, int member) {
    if (self->tcp)
        return dmesh_tcp_waits_for(self->tcp, member);
    if (member == self->shm.me)
        return 0;
    return self->is_p2p ? dmesh_p2p_waits(&self->shm, &self->transfer)
                        : !dmesh_shm_has_posted(&self->shm, member);
}

PyDoc_STRVAR(missing_doc, "missing(): positions of the members that have not come to the last call. Any thread.");
static PyObject *endpoint_missing(dmesh_endpoint *self, PyObject *unused) {
    (void)unused;
    PyObject *found = PyList_New(0);
    for (int member = 0; found && member < self->shm.size; member++) {
        PyObject *position = waits_for(self, member) ? PyLong_FromLong(member) : NULL;
        if (position ? PyList_Append(found, position) < 0 : PyErr_Occurred() != NULL)
            Py_CLEAR(found);
        Py_XDECREF(position);
    }
    return found;
}

PyDoc_STRVAR(supports_doc, "supports(descriptor): whether `start` can carry out a call: a reduction only if there is a "
                           "kernel for its op and dtype.");
static PyObject *endpoint_supports(dmesh_endpoint *self, PyObject *descriptor) {
    int kind, op, argument, dtype;
    PyObject *shape;
    (void)self;
    if (!PyArg_ParseTuple(descriptor, "iiiiO", &kind, &op, &argument, &dtype, &shape))
        return NULL;
    const int reduces = kind == DMESH_ALL_REDUCE || kind == DMESH_REDUCE || kind == DMESH_REDUCE_SCATTER;
    return PyBool_FromLong(!reduces || dmesh_kernel_of(op, dtype));
}

PyDoc_STRVAR(start_doc, "start(kind, op, dtype, root, hash, nbytes, block, source, target): begins a collective between "
                        "flat buffers of bytes, or None; `progress` goes on.\n\n"
                        "root: of a permutation, the position of this rank's source, or -1. hash: 64 bits that must be "
                        "the same on all members. nbytes: of each contribution. block: of one rank's block.");

static PyObject *descriptor_tuple(const struct dmesh_descriptor *descriptor) {
    PyObject *shape = PyTuple_New(descriptor->ndim);
    for (int axis = 0; shape && axis < descriptor->ndim; axis++) {
        PyObject *length = PyLong_FromLongLong(descriptor->shape[axis]);
        if (!length) {
            Py_CLEAR(shape);
            break;
        }
        PyTuple_SET_ITEM(shape, axis, length);
    }
    return shape ? Py_BuildValue("(iiiiN)", descriptor->kind, descriptor->op, descriptor->argument, descriptor->dtype, shape) : NULL;
}

/* For how long a call that is over has waited for others; -1 if that is not known. */
static int64_t waited(const struct dmesh_entry *entry) {
    return entry->waited_from > 0 ? entry->completed_at - entry->waited_from : entry->waited_from;
}

PyDoc_STRVAR(recent_doc, "recent(most=256): the last calls that were taken whole, oldest first: (number, (kind, op, "
                         "argument, dtype, shape), nbytes, began, completed_at, waited), times in ns of the monotonic "
                         "clock, 0 for not yet; waited: ns spent waiting for others, -1 if unknown.");
static PyObject *endpoint_recent(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {
    const unsigned long long most = nargs ? PyLong_AsUnsignedLongLong(args[0]) : DMESH_KEPT;
    if (nargs > 1 || most > DMESH_KEPT) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "recent() takes one number of up to %d calls", DMESH_KEPT);
        return NULL;
    }
    PyObject *found = PyList_New(0);
    unsigned long long number = self->issued < most ? 1 : self->issued - most + 1;
    for (; found && number <= self->issued; number++) {
        const struct dmesh_entry *entry = dmesh_entry_of(self, number);
        if (!number || entry->number != number)
            continue; /* Python made that one, or has it now */
        PyObject *line = Py_BuildValue("(KNnLLL)", number, descriptor_tuple(&entry->descriptor), (Py_ssize_t)entry->nbytes,
                                       (long long)entry->began, (long long)entry->completed_at,
                                       (long long)(entry->completed_at ? waited(entry) : -1));
        if (!line || PyList_Append(found, line) < 0)
            Py_CLEAR(found);
        Py_XDECREF(line);
    }
    return found;
}

PyDoc_STRVAR(totals_doc, "totals(): (calls, elapsed, waited): the number of completed calls in `recent`, and the ns that "
                        "they took and waited in all, as far as known.");
static PyObject *endpoint_totals(dmesh_endpoint *self, PyObject *unused) {
    (void)unused;
    long long calls = 0, elapsed = 0, waiting = 0;
    for (int place = 0; place < DMESH_KEPT; place++) {
        const struct dmesh_entry *entry = &self->kept[place];
        if (!entry->number || !entry->completed_at)
            continue;
        const int64_t wait = waited(entry);
        calls++;
        elapsed += entry->completed_at - entry->began;
        waiting += wait > 0 ? wait : 0;
    }
    return Py_BuildValue("(LLL)", calls, elapsed, waiting);
}

PyDoc_STRVAR(forget_doc, "forget(number): leaves a call out of `recent`: its record is kept elsewhere.");
static PyObject *endpoint_forget(dmesh_endpoint *self, PyObject *argument) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (dmesh_entry_of(self, number)->number == number)
        dmesh_entry_of(self, number)->number = 0;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(next_sequence_doc, "next_sequence(): counts a call that Python makes, and returns its number.");
static PyObject *endpoint_next_sequence(dmesh_endpoint *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(++self->issued);
}

PyDoc_STRVAR(close_doc, "close(): lets no more calls begin; a pending one goes on.");
static PyObject *endpoint_close(dmesh_endpoint *self, PyObject *unused) {
    (void)unused;
    self->closed = 1;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(abort_doc, "abort(): closes the endpoint, and makes `progress` return at once. Any thread.");
static PyObject *endpoint_abort(dmesh_endpoint *self, PyObject *unused) {
    if (self->tcp)
        dmesh_tcp_abort(self->tcp);
    else if (!dmesh_is_forked(self))
        dmesh_shm_abort(&self->shm);
    return endpoint_close(self, unused);
}

/* ---- the type --------------------------------------------------------------------------------------------- */

static int bfloat16_number(void) {
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    PyObject *type = module ? PyObject_GetAttrString(module, "bfloat16") : NULL;
    PyArray_Descr *descr = NULL;
    int number = -1;
    if (type && PyArray_DescrConverter(type, &descr))
        number = descr->type_num;
    Py_XDECREF(descr);
    Py_XDECREF(type);
    Py_XDECREF(module);
    return number;
}

static void endpoint_release(dmesh_endpoint *self) {
    while (self->viewed)
        PyBuffer_Release(&self->views[--self->viewed]);
    PyMem_Free(self->views);
    PyMem_Free(self->attached);
    PyMem_Free(self->processes);
    PyMem_Free(self->shm.regions);
    PyMem_Free(self->shm.salts);
    if (self->tcp)
        dmesh_tcp_free(self->tcp);
    self->tcp = NULL;
    self->views = NULL;
    self->shm.regions = NULL;
    self->shm.salts = NULL;
}

dmesh_endpoint *dmesh_endpoint_blank(PyTypeObject *type, int size, int me, int is_p2p) {
    const int bfloat16 = bfloat16_number();
    if (bfloat16 < 0)
        return NULL;
    dmesh_endpoint *self = (dmesh_endpoint *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->on_complete = Py_NewRef(Py_None);
    self->shm.size = size;
    self->shm.me = me;
    self->is_p2p = (char)is_p2p;
    self->forks = dmesh_forks;
    self->bfloat16 = bfloat16;
    self->max_all_reduce = ULLONG_MAX;
    self->single_copy_from = ULLONG_MAX;
    return self;
}

PyDoc_STRVAR(endpoint_doc, "Endpoint(regions, salts, position, slot_bytes, staging_bytes, oversubscribed, pipe=False): an "
                           "endpoint in shared memory.\n\n"
                           "regions: (writable buffer, offset) of each member's region. salts: 64 bits that each member "
                           "mixes into its hashes. position: this member's. slot_bytes, staging_bytes: sizes of each "
                           "slot and staging buffer of a region. oversubscribed: there are more ranks than cores. pipe: "
                           "for transfers from member 0 to member 1.");
static PyObject *endpoint_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *regions, *salts;
    int position, oversubscribed, pipe = 0;
    Py_ssize_t slot_bytes, staging_bytes;
    static char *names[] = {"regions", "salts", "position", "slot_bytes", "staging_bytes", "oversubscribed", "pipe", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!innp|p", names, &PyList_Type, &regions, &PyList_Type, &salts,
                                     &position, &slot_bytes, &staging_bytes, &oversubscribed, &pipe))
        return NULL;
    const Py_ssize_t size = PyList_GET_SIZE(regions);
    if (PyList_GET_SIZE(salts) != size || size < 1 || size > DMESH_MEMBERS || (pipe && size != 2) || position < 0 ||
        position >= size || slot_bytes < (pipe ? DMESH_INLINE : 128) || slot_bytes % 64 ||
        slot_bytes > PTRDIFF_MAX / 16 || staging_bytes < size * 64 || staging_bytes % 64 ||
        staging_bytes > PTRDIFF_MAX / 16) {
        PyErr_Format(PyExc_ValueError, "no group of %zd members with %zd bytes each", size, slot_bytes);
        return NULL;
    }
    dmesh_endpoint *self = dmesh_endpoint_blank(type, (int)size, position, pipe);
    if (!self)
        return NULL;
    self->shm.slot_bytes = (size_t)slot_bytes;
    self->shm.staging_bytes = (size_t)staging_bytes;
    self->shm.oversubscribed = oversubscribed;
    self->single_copy_from = !pipe     ? DMESH_SINGLE_COPY_FROM
                      : oversubscribed ? DMESH_SINGLE_COPY_OVERSUBSCRIBED_TRANSFERS_FROM
                                : ULLONG_MAX;
    self->views = PyMem_Calloc((size_t)size, sizeof *self->views);
    self->shm.regions = PyMem_Calloc((size_t)size, sizeof *self->shm.regions);
    self->shm.salts = PyMem_Calloc((size_t)size, sizeof *self->shm.salts);
    if (!self->views || !self->shm.regions || !self->shm.salts) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t member = 0; member < size; member++) {
        PyObject *buffer;
        Py_ssize_t offset;
        self->shm.salts[member] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(salts, member));
        if (PyErr_Occurred())
            goto failed;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(regions, member), "On", &buffer, &offset))
            goto failed;
        Py_buffer *view = &self->views[member];
        if (PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE) < 0)
            goto failed;
        self->viewed++;
        const size_t needs = pipe ? dmesh_p2p_region_size((int)member, (size_t)slot_bytes, (size_t)staging_bytes)
                                  : dmesh_region_size((size_t)slot_bytes, (size_t)staging_bytes);
        if (offset < 0 || offset > view->len || (size_t)(view->len - offset) < needs ||
            ((uintptr_t)view->buf + (uintptr_t)offset) % 64) {
            PyErr_Format(PyExc_ValueError, "the region of member %zd, at %zd of %zd bytes, is not there or not aligned",
                         member, offset, view->len);
            goto failed;
        }
        self->shm.regions[member] = (struct dmesh_region *)((char *)view->buf + offset);
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int endpoint_traverse(dmesh_endpoint *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->on_complete);
    Py_VISIT(self->keep_alive);
    Py_VISIT(self->retire);
    Py_VISIT(self->registered);
    Py_VISIT(self->attach);
    Py_VISIT(self->source);
    Py_VISIT(self->result);
    return 0;
}

static int endpoint_clear(dmesh_endpoint *self) {
    Py_CLEAR(self->on_complete);
    Py_CLEAR(self->keep_alive);
    Py_CLEAR(self->retire);
    Py_CLEAR(self->registered);
    Py_CLEAR(self->attach);
    Py_CLEAR(self->source);
    Py_CLEAR(self->result);
    return 0;
}

static void endpoint_dealloc(dmesh_endpoint *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyObject_GC_UnTrack(self);
    endpoint_clear(self);
    if (self->data.obj)
        PyBuffer_Release(&self->data);
    if (self->into.obj)
        PyBuffer_Release(&self->into);
    endpoint_release(self);
    type->tp_free(self);
    Py_DECREF(type);
}

enum attribute { MISMATCHED, CORRUPT, DISCONNECTED, OVER_TCP, CAN_READ_PEERS, PENDING, NON_TEMPORAL, FIRST_NUMBER,
                 SLOT_BYTES = FIRST_NUMBER, STAGING_BYTES, ONE_STEP_BYTES, STREAMS, CULPRIT };

static PyObject *get(dmesh_endpoint *self, void *which) {
    const enum attribute attribute = (enum attribute)(intptr_t)which;
    const size_t found[] = {
        [MISMATCHED] = self->status == DMESH_MISMATCH,
        [CORRUPT] = self->status == DMESH_CORRUPT,
        [DISCONNECTED] = self->status == DMESH_DISCONNECTED,
        [OVER_TCP] = self->tcp != NULL,
        [CAN_READ_PEERS] = self->processes != NULL,
        [PENDING] = (size_t)self->pending,
        [NON_TEMPORAL] = self->shm.copies.mode == DMESH_NON_TEMPORAL,
        [SLOT_BYTES] = self->tcp ? self->tcp->piece_bytes : self->shm.slot_bytes,
        [STAGING_BYTES] = self->shm.staging_bytes,
        [ONE_STEP_BYTES] = self->tcp ? self->tcp->one_step_bytes : 0,
        [STREAMS] = self->tcp ? (size_t)self->tcp->streams : 0,
        [CULPRIT] = (size_t)self->shm.culprit,
    };
    return attribute < FIRST_NUMBER ? PyBool_FromLong((long)found[attribute]) : PyLong_FromSize_t(found[attribute]);
}

static int set_non_temporal(dmesh_endpoint *self, PyObject *value, void *unused) {
    (void)unused;
    const int non_temporal = value ? PyObject_IsTrue(value) : -1;
    if (non_temporal < 0) {
        if (!value)
            PyErr_SetString(PyExc_AttributeError, "non_temporal cannot be deleted");
        return -1;
    }
    const struct dmesh_copy_policy fixed = {.mode = non_temporal ? DMESH_NON_TEMPORAL : DMESH_CACHED, .fixed = 1};
    self->shm.copies = self->shm.results = fixed;
    return 0;
}

#define ATTRIBUTE(name, which, set, doc) {name, (getter)get, (setter)set, doc, (void *)(intptr_t)which}

static PyGetSetDef endpoint_getset[] = {
    ATTRIBUTE("mismatched", MISMATCHED, NULL, "Whether `culprit` has made another call."),
    ATTRIBUTE("corrupt", CORRUPT, NULL, "Whether `culprit` has written or sent invalid data."),
    ATTRIBUTE("disconnected", DISCONNECTED, NULL,
              "Whether the connection with `culprit` has ended, or its memory is not readable."),
    ATTRIBUTE("over_tcp", OVER_TCP, NULL, "Whether it is over TCP."),
    ATTRIBUTE("can_read_peers", CAN_READ_PEERS, NULL, "Whether members may read the memory of each other's processes."),
    ATTRIBUTE("pending", PENDING, NULL, "Whether a call is under way."),
    ATTRIBUTE("non_temporal", NON_TEMPORAL, set_non_temporal,
              "Whether data for others bypasses the caches; once set, it does not change any more."),
    ATTRIBUTE("slot_bytes", SLOT_BYTES, NULL, "Bytes that a rank can contribute in one epoch; over TCP, of a piece."),
    ATTRIBUTE("staging_bytes", STAGING_BYTES, NULL, "Bytes of a staging buffer."),
    ATTRIBUTE("one_step_bytes", ONE_STEP_BYTES, NULL,
              "Bytes that one rank sends in all, up to which a call over TCP takes one step."),
    ATTRIBUTE("streams", STREAMS, NULL, "TCP connections with each member; 0 in shared memory."),
    ATTRIBUTE("culprit", CULPRIT, NULL, "Position of a member; see `mismatched`, `corrupt`, `disconnected`."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef endpoint_members[] = {
    {"issued", T_ULONGLONG, offsetof(dmesh_endpoint, issued), 0, "Number of the last call that was made."},
    {"completed", T_ULONGLONG, offsetof(dmesh_endpoint, completed), 0, "Number of the last completed call."},
    {"completed_at", T_LONGLONG, offsetof(dmesh_endpoint, completed_at), READONLY, "Its completion, in ns."},
    {"pending_sequence", T_ULONGLONG, offsetof(dmesh_endpoint, number), READONLY,
     "Number of the pending call, if the endpoint took it whole."},
    {"max_all_reduce", T_ULONGLONG, offsetof(dmesh_endpoint, max_all_reduce), 0,
     "Bytes from which an all-reduce is left to Python."},
    {"single_copy_from", T_ULONGLONG, offsetof(dmesh_endpoint, single_copy_from), 0,
     "Bytes from which peers read private arrays in this process."},
    {"on_complete", T_OBJECT_EX, offsetof(dmesh_endpoint, on_complete), 0,
     "Called when a call that the endpoint took whole is complete, unless None."},
    {"keep_alive", T_OBJECT, offsetof(dmesh_endpoint, keep_alive), 0, "Object that lives as long as the endpoint."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(advertise_doc, "advertise(registered, attach, retire, processes): from now on, peers access large arrays in "
                            "registered memory in place. All members must do so, or none.\n\n"
                            "attach(position, nonce, nbytes, descriptor) registers a member's segment. retire(objects) "
                            "keeps arrays that peers may still access when the endpoint goes. processes: the process ids "
                            "of the members, if each may read the memory of all others; else empty.");

#define CALL_METHOD(name) {#name, (PyCFunction)(void (*)(void))dmesh_endpoint_##name, METH_FASTCALL, NULL},

PyDoc_STRVAR(over_sockets_doc, "over_sockets(descriptors, position, pipe=False, piece_bytes=0, owns=True, one_step_bytes=0, "
                               "streams=1): an endpoint over TCP.\n\n"
                               "descriptors: `streams` connections with each member; -1 for this member's position. owns: "
                               "they are closed with the endpoint, once it is made. piece_bytes: bytes of a piece; 0 for "
                               "the default. one_step_bytes: bytes that one rank sends in all, up to which a call takes "
                               "one step. The last three are the same on all members. The others: see Endpoint.");

static PyMethodDef endpoint_methods[] = {
    {"over_sockets", (PyCFunction)dmesh_endpoint_over_sockets, METH_VARARGS | METH_CLASS, over_sockets_doc},
    DMESH_CALLS(CALL_METHOD)
    {"start", (PyCFunction)dmesh_endpoint_start, METH_VARARGS, start_doc},
    {"supports", (PyCFunction)endpoint_supports, METH_O, supports_doc},
    {"advertise", (PyCFunction)dmesh_endpoint_advertise, METH_VARARGS, advertise_doc},
    {"progress", (PyCFunction)dmesh_endpoint_progress, METH_O, progress_doc},
    {"missing", (PyCFunction)endpoint_missing, METH_NOARGS, missing_doc},
    {"recent", (PyCFunction)(void (*)(void))endpoint_recent, METH_FASTCALL, recent_doc},
    {"totals", (PyCFunction)endpoint_totals, METH_NOARGS, totals_doc},
    {"forget", (PyCFunction)endpoint_forget, METH_O, forget_doc},
    {"next_sequence", (PyCFunction)endpoint_next_sequence, METH_NOARGS, next_sequence_doc},
    {"close", (PyCFunction)endpoint_close, METH_NOARGS, close_doc},
    {"abort", (PyCFunction)endpoint_abort, METH_NOARGS, abort_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot endpoint_slots[] = {
    {Py_tp_doc, (void *)endpoint_doc},
    {Py_tp_new, endpoint_new},
    {Py_tp_dealloc, endpoint_dealloc},
    {Py_tp_finalize, dmesh_endpoint_retire},
    {Py_tp_traverse, endpoint_traverse},
    {Py_tp_clear, endpoint_clear},
    {Py_tp_methods, endpoint_methods},
    {Py_tp_getset, endpoint_getset},
    {Py_tp_members, endpoint_members},
    {0, NULL},
};

static PyType_Spec endpoint_spec = {
    .name = "dmesh._native.Endpoint",
    .basicsize = sizeof(dmesh_endpoint),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = endpoint_slots,
};

int dmesh_endpoint_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &endpoint_spec, NULL);
    if (!type)
        return -1;
    dmesh_state_of(module)->endpoint = type;
    return PyModule_AddType(module, (PyTypeObject *)type);
}
