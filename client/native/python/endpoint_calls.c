/* Calls that an endpoint takes whole. Usual arguments are accepted here; all others are left to Python, which also raises
 * the errors. Nothing is sent here. */
#include "endpoint.h"

#define SPEC(name, kind, positional, ...) {#name, kind, positional, {__VA_ARGS__}},
const struct dmesh_spec dmesh_specs[DMESH_CALL_COUNT] = {DMESH_CALLS(SPEC)};

const struct dmesh_spec *dmesh_spec_of(const char *name) {
    for (int n = 0; n < DMESH_CALL_COUNT; n++)
        if (strcmp(dmesh_specs[n].name, name) == 0)
            return &dmesh_specs[n];
    return NULL;
}

static const char *const OP_NAMES[DMESH_OPS] = { /* in the order of `enum dmesh_op` */
    "sum", "prod", "min", "max", "mean", "any", "all", "bitwise_and", "bitwise_or", "bitwise_xor",
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
    static const struct {
        int number, dtype;
    } OTHERS[] = {{NPY_DOUBLE, DMESH_F64}, {NPY_FLOAT, DMESH_F32}, {NPY_HALF, DMESH_F16},
                  {NPY_BOOL, DMESH_BOOL},  {NPY_CFLOAT, DMESH_C64}, {NPY_CDOUBLE, DMESH_C128}};
    const int number = PyArray_TYPE(array);
    if (PyTypeNum_ISINTEGER(number)) /* of 1, 2, 4 or 8 bytes; each signed type before the unsigned one */
        return DMESH_I8 + 2 * __builtin_ctz((unsigned)PyArray_ITEMSIZE(array)) + !PyTypeNum_ISSIGNED(number);
    for (size_t n = 0; n < sizeof OTHERS / sizeof *OTHERS; n++)
        if (OTHERS[n].number == number)
            return OTHERS[n].dtype;
    return number == self->bfloat16 ? DMESH_BF16 : -1;
}

/* Returns the member that a Python integer names; -1 if there is none. */
static int position_of(const dmesh_endpoint *self, PyObject *value) {
    if (!PyLong_CheckExact(value))
        return -1;
    int overflow;
    const long position = PyLong_AsLongAndOverflow(value, &overflow);
    return overflow || position < 0 || position >= self->shm.size ? -1 : (int)position;
}

/* Takes an array as the contribution. */
static int accept_array(const dmesh_endpoint *self, struct dmesh_attempt *attempt, PyObject *x) {
    if (!PyArray_CheckExact(x))
        return 0;
    PyArrayObject *array = (PyArrayObject *)x;
    const int ndim = PyArray_NDIM(array), dtype = dtype_of(self, array);
    const npy_intp count = PyArray_SIZE(array);
    if (!PyArray_ISCARRAY_RO(array) || ndim > DMESH_DIMENSIONS || !count || dtype < 0)
        return 0;
    attempt->descriptor.dtype = dtype;
    attempt->descriptor.ndim = ndim;
    for (int axis = 0; axis < ndim; axis++)
        attempt->descriptor.shape[axis] = PyArray_DIM(array, axis);
    attempt->source = array;
    attempt->call.source = (const unsigned char *)PyArray_DATA(array);
    attempt->call.contribution = (size_t)(count * PyArray_ITEMSIZE(array));
    attempt->call.count = (size_t)count;
    return 1;
}

static int overlaps(PyArrayObject *a, PyArrayObject *b) {
    const char *first = PyArray_BYTES(a), *second = PyArray_BYTES(b);
    return first < second + PyArray_NBYTES(b) && second < first + PyArray_NBYTES(a);
}

/* Whether an array that overlaps the contribution may be the result: it is the same, or one of them is the other's block of
 * this rank. */
static int is_in_place(const struct dmesh_attempt *attempt, PyArrayObject *array, int ndim, const npy_intp *shape, int me) {
    PyArrayObject *like = attempt->source;
    const struct dmesh_pattern *pattern = &dmesh_patterns[attempt->call.kind];
    const size_t own = (size_t)me * attempt->call.block;
    if (pattern->source_blocks != pattern->target_blocks)
        return pattern->target_blocks ? PyArray_BYTES(array) + own == PyArray_BYTES(like)
                                      : PyArray_BYTES(array) == PyArray_BYTES(like) + own;
    return PyArray_DATA(array) == PyArray_DATA(like) && PyArray_NDIM(like) == ndim &&
           PyArray_CompareLists(PyArray_DIMS(like), shape, ndim);
}

/* Provides the result, of the contribution's dtype: `out`, or a new array. May fail with an exception set. */
static int provide(struct dmesh_attempt *attempt, PyObject *out, int ndim, const npy_intp *shape, int me) {
    PyArrayObject *like = attempt->source, *array = (PyArrayObject *)out;
    if (out == Py_None) {
        PyArray_Descr *descr = PyArray_DESCR(like);
        Py_INCREF(descr);
        attempt->result = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, NULL, NULL, 0, NULL);
    } else if (PyArray_CheckExact(out) && PyArray_ISCARRAY(array) && PyArray_TYPE(array) == PyArray_TYPE(like) &&
               PyArray_NDIM(array) == ndim && PyArray_CompareLists(PyArray_DIMS(array), shape, ndim) &&
               (!overlaps(array, like) || is_in_place(attempt, array, ndim, shape, me))) {
        attempt->result = Py_NewRef(out);
    }
    if (attempt->result)
        attempt->call.target = (unsigned char *)PyArray_DATA((PyArrayObject *)attempt->result);
    return attempt->result != NULL;
}

/* Whether the call crosses the network less often if it is hierarchical. */
static int can_be_hierarchical(const dmesh_endpoint *self, const struct dmesh_call *call) {
    const struct dmesh_pattern *pattern = &dmesh_patterns[call->kind];
    if (call->kind == DMESH_ALL_GATHER)
        return call->contribution * (size_t)self->shm.size >= self->max_flat;
    return (pattern->reduces || call->kind == DMESH_BROADCAST) && call->contribution >= self->max_flat;
}

static int accept(const dmesh_endpoint *self, struct dmesh_attempt *attempt, enum dmesh_kind kind, PyObject *const *given) {
    const struct dmesh_pattern *pattern = &dmesh_patterns[kind];
    const int size = self->shm.size, transfers = kind == DMESH_TRANSFER;
    struct dmesh_call *call = &attempt->call;
    PyObject *x = given[DMESH_X], *axis = given[DMESH_AXIS], *out = given[DMESH_OUT];
    if (!dmesh_endpoint_is_free(self) || self->is_p2p != transfers)
        return 0;
    if (transfers && (out == NULL) != (self->shm.me == 0)) /* the wrong end */
        return 0;
    call->kind = kind;
    attempt->descriptor.kind = kind;
    if (kind == DMESH_BARRIER)
        return 1;
    if (given[DMESH_ROOT])
        attempt->descriptor.argument = call->root = position_of(self, given[DMESH_ROOT]);
    if (transfers && x == Py_None && out)
        x = out; /* what a receiver expects is like its result */
    if (call->root < 0 || !accept_array(self, attempt, x) || can_be_hierarchical(self, call))
        return 0;
    int ndim = PyArray_NDIM(attempt->source);
    npy_intp dimensions[DMESH_DIMENSIONS + 1], *shape = dimensions + 1;
    for (int n = 0; n < ndim; n++)
        shape[n] = PyArray_DIM(attempt->source, n);
    /* With axis 0, blocks are rows along the first axis; without one, there is another axis for them. */
    const int along = axis && axis != Py_None;
    if ((along && (!ndim || position_of(self, axis) != 0)) || (pattern->source_blocks && (!ndim || shape[0] % size)))
        return 0;
    call->block = pattern->source_blocks ? call->contribution / (size_t)size : call->contribution;
    if (pattern->reduces) {
        attempt->descriptor.op = op_of(given[DMESH_OP]);
        if (pattern->source_blocks)
            call->count /= (size_t)size;
        if (attempt->descriptor.op < 0 ||
            !(call->kernel = dmesh_kernel_of(attempt->descriptor.op, attempt->descriptor.dtype)))
            return 0;
    }
    if (kind == DMESH_REDUCE_SCATTER) {
        attempt->descriptor.argument = along;
        if (!along && shape[0] != size)
            return 0;
        shape[0] /= size;
        shape += !along, ndim -= !along;
    } else if (kind != DMESH_ALL_TO_ALL && pattern->target_blocks) {
        if (along)
            shape[0] *= size;
        else
            *--shape = size, ndim++;
    }
    const int gets_result = dmesh_gets_result(call, self->shm.me);
    if (out && gets_result ? !provide(attempt, out, ndim, shape, self->shm.me) : out && out != Py_None)
        return 0;
    if (!dmesh_contributes(call, self->shm.me))
        call->source = NULL;
    return !self->tcp || kind != DMESH_ALL_TO_ALL || call->target != call->source;
}

int dmesh_endpoint_accept(const dmesh_endpoint *self, struct dmesh_attempt *attempt, enum dmesh_kind kind,
                          PyObject *const *given) {
    const int accepted = accept(self, attempt, kind, given);
    attempt->hash = dmesh_descriptor_hash(&attempt->descriptor);
    return accepted;
}

PyObject *dmesh_endpoint_call(dmesh_endpoint *self, const struct dmesh_spec *spec, PyObject *const *given, int waits) {
    struct dmesh_attempt attempt = {0};
    /* A buffer alone may be larger than what comes: then Python takes it. */
    const int open = spec->kind == DMESH_TRANSFER && given[DMESH_OUT] && given[DMESH_X] == Py_None;
    const int accepted = dmesh_endpoint_accept(self, &attempt, spec->kind, given);
    const int expected = accepted && open ? dmesh_endpoint_expects(self, &attempt.descriptor, waits) : accepted;
    if (expected > 0)
        return dmesh_endpoint_carry_out(self, &attempt, waits);
    Py_XDECREF(attempt.result);
    if (expected < 0)
        return NULL;
    PyErr_Clear(); /* if there was no memory for the result, Python finds that out again, and tells the others */
    Py_RETURN_NOTIMPLEMENTED;
}

void dmesh_fail_group(PyObject *interrupted, PyObject *group, dmesh_endpoint *endpoint) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *args[] = {group, (PyObject *)endpoint, value};
    PyObject *done = PyObject_VectorcallMethod(interrupted, args, 3, NULL);
    if (done) {
        Py_DECREF(done);
        PyErr_Restore(type, value, trace);
    } else { /* another one came meanwhile */
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
}
