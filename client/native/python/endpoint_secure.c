/* Encrypted connections of an endpoint: Python objects like `dmesh.security.secure_socket.SecureSocket`.
 *
 * They encrypt from the arrays and decrypt into them. Calls run without the GIL, and take it for each read and write; Python
 * releases it while OpenSSL works.
 */
#include "endpoint.h"

#include <errno.h>

/* State of a thread that has released the GIL; NULL while it has it. */
static _Thread_local PyThreadState *released;

void dmesh_release_gil(void) { released = PyEval_SaveThread(); }

void dmesh_take_gil(void) {
    PyThreadState *state = released;
    released = NULL; /* first: what runs next may release it again */
    PyEval_RestoreThread(state);
}

static PyObject *views_of(const struct iovec *parts, size_t count, int flags) {
    PyObject *views = PyList_New((Py_ssize_t)count);
    for (size_t at = 0; views && at < count; at++) {
        PyObject *view = PyMemoryView_FromMemory(parts[at].iov_base, (Py_ssize_t)parts[at].iov_len, flags);
        if (view)
            PyList_SET_ITEM(views, (Py_ssize_t)at, view);
        else
            Py_CLEAR(views);
    }
    return views;
}

static PyObject *connection_of(const dmesh_endpoint *self, int descriptor) {
    PyObject *key = PyLong_FromLong(descriptor), *found = key ? PyDict_GetItemWithError(self->connections, key) : NULL;
    Py_XDECREF(key);
    if (!found && !PyErr_Occurred())
        PyErr_Format(PyExc_KeyError, "connection %d is not encrypted", descriptor);
    return found;
}

/* Whether the exception that is set is the system's or OpenSSL's, and not one of a signal handler. */
static int is_of_connection(PyObject *error) {
    PyObject *code = PyObject_IsInstance(error, PyExc_OSError) > 0 ? PyObject_GetAttrString(error, "errno") : NULL;
    const int found = code && code != Py_None;
    Py_XDECREF(code);
    return found;
}

/* Translates the exception that is set to an errno. One from outside, like Ctrl-C, stays set: it ends the call, and the
 * connection, for nobody knows how much has been read or written. */
static int translate(dmesh_endpoint *self) {
    PyObject *type, *error, *trace;
    if (PyErr_ExceptionMatches(PyExc_BlockingIOError)) {
        PyErr_Clear();
        return EAGAIN;
    }
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (is_of_connection(error)) {
        Py_DECREF(type);
        Py_XDECREF(trace);
        PyException_SetTraceback(error, Py_None); /* its frames keep arrays, and views of memory that may be freed */
        PyException_SetContext(error, NULL);
        Py_XSETREF(self->cause, error);
    } else {
        PyErr_Restore(type, error, trace);
    }
    return ECONNRESET;
}

/* Calls a method of a connection with the GIL. Returns a number of bytes, or -1 with errno set. */
static ssize_t call(dmesh_endpoint *self, int descriptor, const struct iovec *parts, size_t count, int sends, int flags,
                    _Atomic int *hidden) {
    PyObject *connection, *views = NULL, *result = NULL, *more = NULL;
    const int without = released != NULL;
    ssize_t moved = -1;
    int error = EINTR;
    if (without)
        dmesh_take_gil();
    if (PyErr_CheckSignals() == 0) { /* here, an interruption loses nothing */
        connection = connection_of(self, descriptor);
        if (connection && (views = views_of(parts, count, sends ? PyBUF_READ : PyBUF_WRITE)))
            result = sends ? PyObject_CallMethod(connection, "sendmsg", "O", views)
                           : PyObject_CallMethod(connection, "recvmsg_into", "Oii", views, 0, flags);
        if (result)
            moved = PyLong_AsSsize_t(sends ? result : PyTuple_GetItem(result, 0));
        if (moved < 0)
            error = translate(self);
        if (!sends && !PyErr_Occurred() && !(more = PyObject_GetAttrString(connection, "hidden")))
            moved = -1;
        if (more)
            *hidden = more == Py_True;
        Py_XDECREF(more);
        Py_XDECREF(result);
        Py_XDECREF(views);
    }
    if (without)
        dmesh_release_gil();
    errno = error;
    return moved;
}

static ssize_t send_parts(void *owner, int descriptor, const struct iovec *parts, size_t count) {
    return call(owner, descriptor, parts, count, 1, 0, NULL);
}

static ssize_t receive_parts(void *owner, int descriptor, const struct iovec *parts, size_t count, int flags,
                             _Atomic int *hidden) {
    return call(owner, descriptor, parts, count, 0, flags, hidden);
}

void dmesh_endpoint_secure(dmesh_endpoint *self, PyObject *connections) {
    self->connections = Py_NewRef(connections);
    self->secure = (struct dmesh_secure){.owner = self, .send = send_parts, .receive = receive_parts};
    dmesh_tcp_secure(self->tcp, &self->secure);
}
