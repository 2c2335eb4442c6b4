/* The type `dmesh._native.Endpoint`: construction, attributes, records of calls. `dmesh.native.Endpoint` documents it.
 *
 * Everything except waiting and copying happens with the GIL held, which keeps the numbering of calls consistent.
 */
#include "endpoint.h"

#include <structmember.h>

/* Whether a member keeps the pending call from completing. */
static int waits_for(const dmesh_endpoint *self, int member) {
    if (self->tcp)
        return dmesh_tcp_waits_for(self->tcp, member);
    if (member == self->shm.me)
        return 0;
    return self->is_p2p ? dmesh_p2p_waits(&self->shm, &self->transfer)
                        : !dmesh_shm_has_posted(&self->shm, member);
}

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

static PyObject *endpoint_supports(dmesh_endpoint *self, PyObject *descriptor) {
    int kind, op, argument, dtype;
    PyObject *shape;
    (void)self;
    if (!PyArg_ParseTuple(descriptor, "iiiiO", &kind, &op, &argument, &dtype, &shape))
        return NULL;
    const int reduces = kind >= 0 && kind < DMESH_KINDS && dmesh_patterns[kind].reduces;
    return PyBool_FromLong(!reduces || dmesh_kernel_of(op, dtype));
}

static PyObject *descriptor_tuple(const struct dmesh_descriptor *descriptor) {
    npy_intp lengths[DMESH_DIMENSIONS];
    for (int axis = 0; axis < descriptor->ndim; axis++)
        lengths[axis] = (npy_intp)descriptor->shape[axis];
    return Py_BuildValue("(iiiiN)", descriptor->kind, descriptor->op, descriptor->argument, descriptor->dtype,
                         PyArray_IntTupleFromIntp(descriptor->ndim, lengths));
}

/* For how long a call that is over has waited for others; -1 if that is not known. */
static int64_t waited(const struct dmesh_entry *entry) {
    return entry->waited_from > 0 ? entry->completed_at - entry->waited_from : entry->waited_from;
}

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

static PyObject *endpoint_forget(dmesh_endpoint *self, PyObject *argument) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (dmesh_entry_of(self, number)->number == number)
        dmesh_entry_of(self, number)->number = 0;
    Py_RETURN_NONE;
}

static PyObject *endpoint_next_sequence(dmesh_endpoint *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(++self->issued);
}

static PyObject *endpoint_close(dmesh_endpoint *self, PyObject *unused) {
    (void)unused;
    self->closed = 1;
    Py_RETURN_NONE;
}

static PyObject *endpoint_abort(dmesh_endpoint *self, PyObject *unused) {
    if (self->tcp)
        dmesh_tcp_abort(self->tcp);
    else if (!dmesh_is_forked(self))
        dmesh_shm_abort(&self->shm);
    return endpoint_close(self, unused);
}

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

/* Returns an endpoint of a group of `size` that is not connected to anything yet. */
static dmesh_endpoint *blank(PyTypeObject *type, int size, int me, int is_p2p) {
    const int bfloat16 = bfloat16_number();
    if (bfloat16 < 0)
        return NULL;
    dmesh_endpoint *self = (dmesh_endpoint *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->on_complete = Py_NewRef(Py_None);
    self->shm.regions = self->regions;
    self->shm.salts = self->salts;
    self->shm.size = size;
    self->shm.me = me;
    self->shm.measurer = -1;
    self->is_p2p = (char)is_p2p;
    self->forks = dmesh_forks;
    self->bfloat16 = bfloat16;
    self->max_flat = ULLONG_MAX;
    self->single_copy_from = ULLONG_MAX;
    return self;
}

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
        staging_bytes > PTRDIFF_MAX / 16)
        return PyErr_Format(PyExc_ValueError, "no group of %zd members with %zd bytes each", size, slot_bytes);
    dmesh_endpoint *self = blank(type, (int)size, position, pipe);
    if (!self)
        return NULL;
    self->shm.slot_bytes = (size_t)slot_bytes;
    self->shm.staging_bytes = (size_t)staging_bytes;
    self->shm.oversubscribed = oversubscribed;
    for (Py_ssize_t member = 0; member < size; member++) {
        PyObject *buffer;
        Py_ssize_t offset;
        self->salts[member] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(salts, member));
        Py_buffer *view = &self->views[member];
        if (PyErr_Occurred() || !PyArg_ParseTuple(PyList_GET_ITEM(regions, member), "On", &buffer, &offset) ||
            PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE) < 0)
            goto failed;
        const size_t needs = pipe ? dmesh_p2p_region_size((int)member, (size_t)slot_bytes, (size_t)staging_bytes)
                                  : dmesh_region_size((size_t)slot_bytes, (size_t)staging_bytes);
        if (offset < 0 || offset > view->len || (size_t)(view->len - offset) < needs ||
            ((uintptr_t)view->buf + (uintptr_t)offset) % 64) {
            PyErr_Format(PyExc_ValueError, "the region of member %zd, at %zd of %zd bytes, is not there or not aligned",
                         member, offset, view->len);
            goto failed;
        }
        self->regions[member] = (struct dmesh_region *)((char *)view->buf + offset);
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyObject *endpoint_over_sockets(PyObject *type, PyObject *args) {
    PyObject *descriptors, *secure = NULL;
    int position, receipts = -1, owns = 1, streams = 1;
    Py_ssize_t piece_bytes = 0, one_step_bytes = 0;
    if (!PyArg_ParseTuple(args, "O!i|inpniO!", &PyList_Type, &descriptors, &position, &receipts, &piece_bytes, &owns,
                          &one_step_bytes, &streams, &PyDict_Type, &secure))
        return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(descriptors), size = streams > 0 ? count / streams : 0;
    if (streams < 1 || streams > DMESH_STREAMS || count % streams || size < 2 || size > DMESH_MEMBERS ||
        (receipts >= 0 && size != 2) || position < 0 || position >= size || piece_bytes < 0 || piece_bytes % 64 ||
        piece_bytes > PTRDIFF_MAX / (DMESH_STREAMS * DMESH_MEMBERS) || one_step_bytes < 0)
        return PyErr_Format(PyExc_ValueError, "no connections: %zd descriptors, %d for each member, for pieces of %zd bytes, "
                            "one_step_bytes up to %zd", count, streams, piece_bytes, one_step_bytes);
    int found[DMESH_MEMBERS * DMESH_STREAMS];
    for (Py_ssize_t index = 0; index < count; index++) {
        const Py_ssize_t member = index / streams;
        const long descriptor = PyLong_AsLong(PyList_GET_ITEM(descriptors, index));
        if (descriptor == -1 && PyErr_Occurred())
            return NULL;
        if (descriptor > INT_MAX || (descriptor < 0) != (member == position))
            return PyErr_Format(PyExc_ValueError, "%ld is no connection with member %zd", descriptor, member);
        found[index] = (int)descriptor;
    }
    dmesh_endpoint *self = blank((PyTypeObject *)type, (int)size, position, receipts >= 0);
    if (!self)
        return NULL;
    self->tcp = dmesh_tcp_new((int)size, position, streams, (size_t)piece_bytes, (size_t)one_step_bytes, owns, found,
                              receipts);
    if (!self->tcp) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->shm.slot_bytes = self->tcp->piece_bytes;
    self->one_step_bytes = one_step_bytes;
    self->streams = streams;
    if (secure && PyDict_GET_SIZE(secure))
        dmesh_endpoint_secure(self, secure);
    return (PyObject *)self;
}

#define OBJECTS(DO)                                                                                                  \
    DO(self->on_complete) DO(self->keep_alive) DO(self->retire) DO(self->registered) DO(self->attach)                \
    DO(self->source) DO(self->result) DO(self->connections) DO(self->cause)

static int endpoint_traverse(dmesh_endpoint *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    OBJECTS(DMESH_VISIT)
    return 0;
}

static int endpoint_clear(dmesh_endpoint *self) {
    OBJECTS(DMESH_CLEAR)
    return 0;
}

static void endpoint_dealloc(dmesh_endpoint *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyObject_GC_UnTrack(self);
    endpoint_clear(self);
    PyBuffer_Release(&self->data);
    PyBuffer_Release(&self->into);
    for (int member = 0; member < self->shm.size; member++)
        PyBuffer_Release(&self->views[member]);
    PyMem_Free(self->attached);
    if (self->tcp)
        dmesh_tcp_free(self->tcp);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *has_status(dmesh_endpoint *self, void *status) {
    return PyBool_FromLong(self->status == (enum dmesh_status)(intptr_t)status);
}

static PyObject *is_over_tcp(dmesh_endpoint *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->tcp != NULL);
}

static PyObject *get_non_temporal(dmesh_endpoint *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->shm.copies.mode == DMESH_NON_TEMPORAL);
}

static PyObject *get_single_copies(dmesh_endpoint *self, void *unused) {
    (void)unused;
    const int measurer = self->shm.measurer;
    return PyLong_FromUnsignedLongLong(
        measurer < 0 ? 0 : atomic_load_explicit(&self->regions[measurer]->single_copy, memory_order_relaxed));
}

/* For tests: data for others bypasses the caches, or does not; the copies are not measured any more. */
static int set_non_temporal(dmesh_endpoint *self, PyObject *value, void *unused) {
    (void)unused;
    const int non_temporal = value ? PyObject_IsTrue(value) : 0;
    if (non_temporal < 0)
        return -1;
    const struct dmesh_copy_policy fixed = {.mode = non_temporal ? DMESH_NON_TEMPORAL : DMESH_CACHED, .fixed = 1};
    self->shm.copies = self->shm.results = fixed;
    return 0;
}

static PyGetSetDef endpoint_getset[] = {
    {"mismatched", (getter)has_status, NULL, NULL, (void *)DMESH_MISMATCH},
    {"corrupt", (getter)has_status, NULL, NULL, (void *)DMESH_CORRUPT},
    {"disconnected", (getter)has_status, NULL, NULL, (void *)DMESH_DISCONNECTED},
    {"over_tcp", (getter)is_over_tcp, NULL, NULL, NULL},
    {"single_copies", (getter)get_single_copies, NULL, NULL, NULL},
    {"non_temporal", (getter)get_non_temporal, (setter)set_non_temporal, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef endpoint_members[] = {
    {"issued", T_ULONGLONG, offsetof(dmesh_endpoint, issued), 0, NULL},
    {"completed", T_ULONGLONG, offsetof(dmesh_endpoint, completed), 0, NULL},
    {"others", T_ULONGLONG, offsetof(dmesh_endpoint, others), 0, NULL},
    {"held", T_INT, offsetof(dmesh_endpoint, held), 0, NULL},
    {"completed_at", T_LONGLONG, offsetof(dmesh_endpoint, completed_at), READONLY, NULL},
    {"can_read_peers", T_BOOL, offsetof(dmesh_endpoint, can_read_peers), READONLY, NULL},
    {"pending", T_BOOL, offsetof(dmesh_endpoint, pending), READONLY, NULL},
    {"pending_sequence", T_ULONGLONG, offsetof(dmesh_endpoint, number), READONLY, NULL},
    {"culprit", T_INT, offsetof(dmesh_endpoint, shm.culprit), READONLY, NULL},
    {"slot_bytes", T_PYSSIZET, offsetof(dmesh_endpoint, shm.slot_bytes), READONLY, NULL},
    {"staging_bytes", T_PYSSIZET, offsetof(dmesh_endpoint, shm.staging_bytes), READONLY, NULL},
    {"one_step_bytes", T_PYSSIZET, offsetof(dmesh_endpoint, one_step_bytes), READONLY, NULL},
    {"streams", T_INT, offsetof(dmesh_endpoint, streams), READONLY, NULL},
    {"max_flat", T_ULONGLONG, offsetof(dmesh_endpoint, max_flat), 0, NULL},
    {"single_copy_from", T_ULONGLONG, offsetof(dmesh_endpoint, single_copy_from), 0, NULL},
    {"on_complete", T_OBJECT_EX, offsetof(dmesh_endpoint, on_complete), 0, NULL},
    {"cause", T_OBJECT, offsetof(dmesh_endpoint, cause), READONLY, NULL},
    {"keep_alive", T_OBJECT, offsetof(dmesh_endpoint, keep_alive), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* The method of a call that the endpoint takes whole. */
static PyObject *call_whole(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs, const struct dmesh_spec *spec) {
    PyObject *given[DMESH_ARGUMENTS] = {NULL};
    Py_ssize_t count = 0;
    for (const enum dmesh_argument *argument = spec->arguments; *argument; argument++)
        if (*argument != DMESH_DST && *argument != DMESH_SRC && count++ < nargs)
            given[*argument] = args[count - 1];
    if (nargs != count)
        return PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", spec->name, count, nargs);
    return dmesh_endpoint_call(self, spec, given, 1);
}

#define DEFINE_CALL(name, ...)                                                                                       \
    static PyObject *call_##name(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs) {                    \
        return call_whole(self, args, nargs, &dmesh_specs[DMESH_CALL_##name]);                                       \
    }
DMESH_CALLS(DEFINE_CALL)

#define CALL_METHOD(name, ...) {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL, NULL},

static PyMethodDef endpoint_methods[] = {
    {"over_sockets", (PyCFunction)endpoint_over_sockets, METH_VARARGS | METH_CLASS, NULL},
    DMESH_CALLS(CALL_METHOD)
    {"start", (PyCFunction)dmesh_endpoint_start, METH_VARARGS, NULL},
    {"start_send", (PyCFunction)dmesh_endpoint_start_transfer, METH_VARARGS, NULL},
    {"start_recv", (PyCFunction)dmesh_endpoint_start_transfer, METH_VARARGS, NULL},
    {"supports", (PyCFunction)endpoint_supports, METH_O, NULL},
    {"advertise", (PyCFunction)dmesh_endpoint_advertise, METH_VARARGS, NULL},
    {"arrival", (PyCFunction)dmesh_endpoint_arrival, METH_O, NULL},
    {"progress", (PyCFunction)dmesh_endpoint_progress, METH_O, NULL},
    {"missing", (PyCFunction)endpoint_missing, METH_NOARGS, NULL},
    {"recent", (PyCFunction)(void (*)(void))endpoint_recent, METH_FASTCALL, NULL},
    {"totals", (PyCFunction)endpoint_totals, METH_NOARGS, NULL},
    {"forget", (PyCFunction)endpoint_forget, METH_O, NULL},
    {"next_sequence", (PyCFunction)endpoint_next_sequence, METH_NOARGS, NULL},
    {"close", (PyCFunction)endpoint_close, METH_NOARGS, NULL},
    {"abort", (PyCFunction)endpoint_abort, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot endpoint_slots[] = {
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

PyType_Spec dmesh_endpoint_spec = {
    .name = "dmesh._native.Endpoint",
    .basicsize = sizeof(dmesh_endpoint),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = endpoint_slots,
};
