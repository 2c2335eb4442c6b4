/* Arrays that ranks access in place: what an endpoint tells of its own arrays, and how it maps those of others. */
#include "endpoint.h"

static int is_attached(const dmesh_endpoint *self, const unsigned char *nonce) {
    for (size_t n = 0; n < self->attachments; n++)
        if (memcmp(self->attached[n], nonce, DMESH_NONCE) == 0)
            return 1;
    return 0;
}

/* Maps a segment, and keeps it mapped as long as the endpoint lives. */
static int attach(dmesh_endpoint *self, int member, const struct dmesh_location *location) {
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

struct dmesh_location dmesh_endpoint_locate(const dmesh_endpoint *self, const void *data, size_t nbytes) {
    struct dmesh_location location = {.where = DMESH_PRIVATE};
    if (data && self->registered)
        location = dmesh_registered_locate(&self->registered->registered, data, nbytes);
    if (data && location.where == DMESH_PRIVATE && self->processes && nbytes >= self->single_copy_from)
        location = (struct dmesh_location){.where = DMESH_IN_PROCESS, .offset = (uintptr_t)data, .nbytes = nbytes};
    return location;
}

int dmesh_endpoint_resolve(dmesh_endpoint *self, int member, const struct dmesh_location *location, size_t nbytes,
                           unsigned char **found, int *owner) {
    *found = NULL;
    *owner = 0;
    if (location->where == DMESH_PRIVATE)
        return 0;
    if (location->where == DMESH_IN_PROCESS) {
        if (!self->processes || location->nbytes < nbytes) {
            PyErr_Format(PyExc_RuntimeError, "member %d offers %llu bytes of its process, and %zu were to be read%s",
                         member, (unsigned long long)location->nbytes, nbytes,
                         self->processes ? "" : ", which this process may not");
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
    if (!is_attached(self, location->nonce) && attach(self, member, location) < 0)
        return -1;
    *found = dmesh_registered_resolve(&self->registered->registered, location, nbytes);
    if (!*found)
        PyErr_Format(PyExc_RuntimeError, "member %d offers an array that is not in the memory that it shares", member);
    return *found ? 0 : -1;
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

/* Reads a list of process ids, one per member; NULL with an exception set if it is none. */
static int *read_processes(const dmesh_endpoint *self, PyObject *list) {
    if (PyList_GET_SIZE(list) != self->shm.size) {
        PyErr_Format(PyExc_ValueError, "%zd processes for %d members", PyList_GET_SIZE(list), self->shm.size);
        return NULL;
    }
    int *found = PyMem_Calloc((size_t)self->shm.size, sizeof *found);
    if (!found) {
        PyErr_NoMemory();
        return NULL;
    }
    for (int member = 0; member < self->shm.size; member++) {
        const long process = PyLong_AsLong(PyList_GET_ITEM(list, member));
        if (process < 1 || process > INT_MAX) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "%ld is no process", process);
            PyMem_Free(found);
            return NULL;
        }
        found[member] = (int)process;
    }
    return found;
}

PyObject *dmesh_endpoint_advertise(dmesh_endpoint *self, PyObject *args) {
    PyObject *registered, *attach, *retire, *processes;
    if (!PyArg_ParseTuple(args, "O!OOO!", dmesh_state_of(PyType_GetModule(Py_TYPE(self)))->registered, &registered,
                          &attach, &retire, &PyList_Type, &processes))
        return NULL;
    int *found = NULL;
    if (PyList_GET_SIZE(processes) && !(found = read_processes(self, processes)))
        return NULL;
    PyMem_Free(self->processes);
    self->processes = found;
    Py_XSETREF(self->registered, (dmesh_registered_object *)Py_NewRef(registered));
    Py_XSETREF(self->attach, Py_NewRef(attach));
    Py_XSETREF(self->retire, Py_NewRef(retire));
    Py_RETURN_NONE;
}
