/* Arguments of whole calls. Usual arguments are accepted here; all others are left to Python, which also raises the
 * errors. Nothing is sent here. */
#include "endpoint.h"

static const char *const OP_NAMES[DMESH_OPS] = {
    [DMESH_SUM] = "sum",
    [DMESH_PROD] = "prod",
    [DMESH_MIN] = "min",
    [DMESH_MAX] = "max",
    [DMESH_MEAN] = "mean",
    [DMESH_ANY] = "any",
    [DMESH_ALL] = "all",
    [DMESH_BITWISE_AND] = "bitwise_and",
    [DMESH_BITWISE_OR] = "bitwise_or",
    [DMESH_BITWISE_XOR] = "bitwise_xor",
};

static int op_of(PyObject *name) {
    if (PyUnicode_CheckExact(name))
        for (int op = 0; op < DMESH_OPS; op++)
            if (PyUnicode_CompareWithASCIIString(name, OP_NAMES[op]) == 0)
                return op;
    return -1;
}

const dmesh_kernel *dmesh_kernel_of(int op, int dtype) {
    const int widens = dtype == DMESH_BOOL ? op == DMESH_SUM || op == DMESH_PROD || op == DMESH_MEAN
                                           : dtype < DMESH_F16 && op == DMESH_MEAN;
    return widens ? NULL : dmesh_kernel_for((enum dmesh_dtype)dtype, (enum dmesh_op)op, DMESH_ISA_BEST);
}

static int dtype_of(const dmesh_endpoint *self, PyArrayObject *array) {
    const int number = PyArray_TYPE(array);
    switch (number) {
    case NPY_BOOL:
        return DMESH_BOOL;
    case NPY_HALF:
        return DMESH_F16;
    case NPY_FLOAT:
        return DMESH_F32;
    case NPY_DOUBLE:
        return DMESH_F64;
    case NPY_CFLOAT:
        return DMESH_C64;
    case NPY_CDOUBLE:
        return DMESH_C128;
    }
    if (PyTypeNum_ISINTEGER(number)) {
        const int is_signed = PyTypeNum_ISSIGNED(number);
        switch (PyArray_ITEMSIZE(array)) {
        case 1:
            return is_signed ? DMESH_I8 : DMESH_U8;
        case 2:
            return is_signed ? DMESH_I16 : DMESH_U16;
        case 4:
            return is_signed ? DMESH_I32 : DMESH_U32;
        case 8:
            return is_signed ? DMESH_I64 : DMESH_U64;
        }
    }
    return number == self->bfloat16 ? DMESH_BF16 : -1;
}

int dmesh_position_of(const dmesh_endpoint *self, PyObject *value) {
    if (!PyLong_CheckExact(value))
        return -1;
    int overflow;
    const long position = PyLong_AsLongAndOverflow(value, &overflow);
    return overflow || position < 0 || position >= self->shm.size ? -1 : (int)position;
}

int dmesh_accept(const dmesh_endpoint *self, struct dmesh_attempt *attempt, enum dmesh_kind kind, PyObject *x) {
    if (!dmesh_is_ready(self) || !PyArray_CheckExact(x))
        return 0;
    PyArrayObject *array = (PyArrayObject *)x;
    const int ndim = PyArray_NDIM(array);
    if (!PyArray_ISCARRAY_RO(array) || ndim > DMESH_DIMENSIONS || !PyArray_SIZE(array))
        return 0;
    const int dtype = dtype_of(self, array);
    if (dtype < 0)
        return 0;
    attempt->descriptor.kind = kind;
    attempt->descriptor.dtype = dtype;
    attempt->descriptor.ndim = ndim;
    for (int axis = 0; axis < ndim; axis++)
        attempt->descriptor.shape[axis] = PyArray_DIM(array, axis);
    attempt->source = array;
    attempt->call.kind = kind;
    attempt->call.source = (const unsigned char *)PyArray_DATA(array);
    attempt->call.contribution = (size_t)PyArray_NBYTES(array);
    return 1;
}

int dmesh_accept_op(struct dmesh_attempt *attempt, PyObject *op, size_t count) {
    const int number = op_of(op);
    if (number < 0)
        return 0;
    attempt->descriptor.op = number;
    attempt->call.count = count;
    attempt->call.kernel = dmesh_kernel_of(number, attempt->descriptor.dtype);
    return attempt->call.kernel != NULL;
}

static int overlaps(PyArrayObject *a, PyArrayObject *b) {
    const char *first = PyArray_BYTES(a), *second = PyArray_BYTES(b);
    return first < second + PyArray_NBYTES(b) && second < first + PyArray_NBYTES(a);
}

int dmesh_provide(struct dmesh_attempt *attempt, PyObject *out, int ndim, const npy_intp *shape) {
    PyArrayObject *like = attempt->source;
    if (out == Py_None) {
        PyArray_Descr *descr = PyArray_DESCR(like);
        Py_INCREF(descr);
        attempt->result = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, NULL, NULL, 0, NULL);
        if (!attempt->result)
            return 0;
    } else {
        if (!PyArray_CheckExact(out))
            return 0;
        PyArrayObject *array = (PyArrayObject *)out;
        if (!PyArray_ISCARRAY(array) || PyArray_TYPE(array) != PyArray_TYPE(like) ||
            PyArray_NDIM(array) != ndim || !PyArray_CompareLists(PyArray_DIMS(array), shape, ndim))
            return 0;
        if (overlaps(array, like) &&
            !(PyArray_DATA(array) == PyArray_DATA(like) && PyArray_NDIM(like) == ndim &&
              PyArray_CompareLists(PyArray_DIMS(like), shape, ndim)))
            return 0;
        attempt->result = Py_NewRef(out);
    }
    attempt->call.target = (unsigned char *)PyArray_DATA((PyArrayObject *)attempt->result);
    return 1;
}

int dmesh_provide_like(struct dmesh_attempt *attempt, PyObject *out) {
    return dmesh_provide(attempt, out, PyArray_NDIM(attempt->source), PyArray_DIMS(attempt->source));
}

int dmesh_provide_rows(const dmesh_endpoint *self, struct dmesh_attempt *attempt, PyObject *out, int extends) {
    npy_intp shape[DMESH_DIMENSIONS + 1];
    const int ndim = PyArray_NDIM(attempt->source);
    memcpy(shape + !extends, PyArray_DIMS(attempt->source), (size_t)ndim * sizeof *shape);
    shape[0] = extends ? shape[0] * self->shm.size : self->shm.size;
    return dmesh_provide(attempt, out, ndim + !extends, shape);
}
