/* Endpoints over TCP connections. */
#include "endpoint.h"

PyObject *dmesh_endpoint_over_sockets(PyObject *type, PyObject *args) {
    PyObject *descriptors;
    int position, pipe = 0, owns = 1, streams = 1;
    Py_ssize_t piece_bytes = 0, one_step_bytes = 0;
    if (!PyArg_ParseTuple(args, "O!i|pnpni", &PyList_Type, &descriptors, &position, &pipe, &piece_bytes, &owns, &one_step_bytes,
                          &streams))
        return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(descriptors), size = streams > 0 ? count / streams : 0;
    if (streams < 1 || streams > DMESH_STREAMS || count % streams || size < 2 || size > DMESH_MEMBERS ||
        (pipe && size != 2) || position < 0 || position >= size || piece_bytes < 0 || piece_bytes % 64 || piece_bytes > PTRDIFF_MAX / (DMESH_STREAMS * DMESH_MEMBERS) || one_step_bytes < 0) {
        PyErr_Format(PyExc_ValueError,
                     "no connections: %zd descriptors, %d for each member, for pieces of %zd bytes, one_step_bytes up to %zd",
                     count, streams, piece_bytes, one_step_bytes);
        return NULL;
    }
    int found[DMESH_MEMBERS * DMESH_STREAMS];
    for (Py_ssize_t index = 0; index < count; index++) {
        const Py_ssize_t member = index / streams;
        const long descriptor = PyLong_AsLong(PyList_GET_ITEM(descriptors, index));
        if (descriptor == -1 && PyErr_Occurred())
            return NULL;
        if (descriptor > INT_MAX || (descriptor < 0) != (member == position)) {
            PyErr_Format(PyExc_ValueError, "%ld is no connection with member %zd", descriptor, member);
            return NULL;
        }
        found[index] = (int)descriptor;
    }
    dmesh_endpoint *self = dmesh_endpoint_blank((PyTypeObject *)type, (int)size, position, pipe);
    if (!self)
        return NULL;
    self->tcp = dmesh_tcp_new((int)size, position, streams, (size_t)piece_bytes, (size_t)one_step_bytes, owns, found);
    if (!self->tcp) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}
