/* The type `dmesh._native.RegisteredMemory`: shared segments with arrays, for all endpoints of a client.
 * `dmesh.native.RegisteredMemory` documents it. */
#include "endpoint.h"

static int nonce_of(PyObject *bytes, unsigned char *nonce) {
    if (!PyBytes_CheckExact(bytes) || PyBytes_GET_SIZE(bytes) != DMESH_NONCE) {
        PyErr_Format(PyExc_ValueError, "a segment's name has %d bytes", DMESH_NONCE);
        return -1;
    }
    memcpy(nonce, PyBytes_AS_STRING(bytes), DMESH_NONCE);
    return 0;
}

static void release(void *owner) {
    if (owner) {
        PyBuffer_Release(owner);
        PyMem_Free(owner);
    }
}

static PyObject *registered_add(dmesh_registered_object *self, PyObject *args) {
    PyObject *memory, *nonce;
    int descriptor, own;
    struct dmesh_mapping mapping = {0};
    if (!PyArg_ParseTuple(args, "OOip", &memory, &nonce, &descriptor, &own) || nonce_of(nonce, mapping.at.nonce) < 0)
        return NULL;
    Py_buffer *buffer = PyMem_Malloc(sizeof *buffer);
    if (!buffer)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(memory, buffer, PyBUF_WRITABLE) < 0) {
        PyMem_Free(buffer);
        return NULL;
    }
    mapping.base = buffer->buf;
    mapping.at.nbytes = (uint64_t)buffer->len;
    mapping.at.descriptor = descriptor;
    mapping.owner = buffer;
    if (dmesh_registered_add(&self->registered, own, mapping) < 0) {
        release(buffer);
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *registered_drop(dmesh_registered_object *self, PyObject *argument) {
    unsigned char nonce[DMESH_NONCE];
    if (nonce_of(argument, nonce) < 0)
        return NULL;
    release(dmesh_registered_drop(&self->registered, nonce));
    Py_RETURN_NONE;
}

static PyObject *registered_contains(dmesh_registered_object *self, PyObject *argument) {
    if (!PyArray_Check(argument))
        return PyErr_Format(PyExc_TypeError, "expected an array, got %s", Py_TYPE(argument)->tp_name);
    PyArrayObject *array = (PyArrayObject *)argument;
    if (!PyArray_ISCARRAY_RO(array))
        Py_RETURN_FALSE;
    const size_t nbytes = (size_t)PyArray_NBYTES(array);
    return PyBool_FromLong(dmesh_registered_locate(&self->registered, PyArray_DATA(array), nbytes).where != DMESH_PRIVATE);
}

static PyObject *registered_reads(dmesh_registered_object *self, PyObject *args) {
    (void)self;
    int process;
    unsigned long long address;
    const char *expected;
    Py_ssize_t nbytes;
    char found[256];
    if (!PyArg_ParseTuple(args, "iKy#", &process, &address, &expected, &nbytes))
        return NULL;
    if ((size_t)nbytes > sizeof found)
        return PyErr_Format(PyExc_ValueError, "%zd bytes are too many to compare", nbytes);
    return PyBool_FromLong(dmesh_cma_read(process, found, address, (size_t)nbytes) == 0 &&
                           memcmp(found, expected, (size_t)nbytes) == 0);
}

static void registered_dealloc(dmesh_registered_object *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (size_t at = 0; at < self->registered.owned; at++)
        release(self->registered.own[at].owner);
    for (size_t at = 0; at < self->registered.known; at++)
        release(self->registered.others[at].owner);
    dmesh_registered_free(&self->registered);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef registered_methods[] = {
    {"add", (PyCFunction)registered_add, METH_VARARGS, NULL},
    {"drop", (PyCFunction)registered_drop, METH_O, NULL},
    {"contains", (PyCFunction)registered_contains, METH_O, NULL},
    {"can_read", (PyCFunction)registered_reads, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot registered_slots[] = {
    {Py_tp_dealloc, registered_dealloc},
    {Py_tp_methods, registered_methods},
    {0, NULL},
};

PyType_Spec dmesh_registered_spec = {
    .name = "dmesh._native.RegisteredMemory",
    .basicsize = sizeof(dmesh_registered_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = registered_slots,
};
