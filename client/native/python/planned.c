/* The type `dmesh._native.PlannedCall`: base of plans whose calls are validated once and then run without Python.
 *
 * A subclass has the method `_call` of the same arguments, which takes all calls before `prepare`, and all unusual ones.
 */
#include "endpoint.h"

static const char *const NAMES[] = {"_call", "_resume", "_interrupted"};
enum { CALL, RESUME, INTERRUPTED, NAME_COUNT };

typedef struct {
    PyObject_HEAD
    PyObject *group;
    dmesh_endpoint *endpoint;     /* NULL: nothing is prepared */
    struct dmesh_attempt attempt; /* source and result are owned here */
    PyObject *names[NAME_COUNT];
} dmesh_planned_call;

#define OBJECTS(DO) DO(self->group) DO(self->endpoint) DO(self->attempt.source) DO(self->attempt.result)

static int planned_traverse(dmesh_planned_call *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    OBJECTS(DMESH_VISIT)
    return 0;
}

static int planned_clear(dmesh_planned_call *self) {
    OBJECTS(DMESH_CLEAR)
    return 0;
}

static void planned_dealloc(dmesh_planned_call *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    planned_clear(self);
    for (int n = 0; n < NAME_COUNT; n++)
        Py_XDECREF(self->names[n]);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *planned_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs; /* they are the subclass's */
    dmesh_planned_call *self = (dmesh_planned_call *)type->tp_alloc(type, 0);
    for (int n = 0; self && n < NAME_COUNT; n++)
        if (!(self->names[n] = PyUnicode_InternFromString(NAMES[n])))
            Py_CLEAR(self);
    return (PyObject *)self;
}

/* prepare(group, endpoint, name, arguments): calls like this one run in the endpoint from now on, if it takes them. The
 * arguments are those of `enum dmesh_argument`, in its order. */
static PyObject *planned_prepare(dmesh_planned_call *self, PyTypeObject *type, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames) {
    if (nargs != 4 || kwnames || !PyUnicode_CheckExact(args[2]) || !PyTuple_CheckExact(args[3]) ||
        PyTuple_GET_SIZE(args[3]) != DMESH_ARGUMENTS - 1) {
        PyErr_SetString(PyExc_TypeError, "prepare takes a group, its endpoint, a function's name and all its arguments");
        return NULL;
    }
    const struct dmesh_spec *spec = dmesh_spec_of(PyUnicode_AsUTF8(args[2]));
    PyObject *given[DMESH_ARGUMENTS] = {NULL};
    for (const enum dmesh_argument *place = spec ? spec->arguments : NULL; place && *place; place++)
        given[*place] = PyTuple_GET_ITEM(args[3], *place - 1);
    struct dmesh_attempt attempt = {0};
    dmesh_endpoint *endpoint = (dmesh_endpoint *)args[1];
    planned_clear(self);
    if (!spec || Py_TYPE(endpoint) != dmesh_state_of(PyType_GetModule(type))->endpoint ||
        !dmesh_endpoint_accept(endpoint, &attempt, spec->kind, given)) {
        Py_XDECREF(attempt.result);
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    Py_XINCREF(attempt.source); /* the attempt borrows it */
    self->attempt = attempt;
    self->group = Py_NewRef(args[0]);
    self->endpoint = (dmesh_endpoint *)Py_NewRef((PyObject *)endpoint);
    Py_RETURN_TRUE;
}

/* Takes another array of the planned dtype and shape as the contribution; false if Python must look at it. */
static int replace_source(struct dmesh_attempt *attempt, PyObject *x) {
    PyArrayObject *planned = attempt->source, *array = (PyArrayObject *)x, *result = (PyArrayObject *)attempt->result;
    if (!attempt->call.source || !PyArray_CheckExact(x) || !PyArray_ISCARRAY_RO(array) ||
        PyArray_TYPE(array) != PyArray_TYPE(planned) || PyArray_NDIM(array) != PyArray_NDIM(planned) ||
        !PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(planned), PyArray_NDIM(array)))
        return 0;
    const char *first = PyArray_BYTES(array), *second = result ? PyArray_BYTES(result) : NULL;
    const int in_place = first == second && attempt->call.kind == DMESH_ALL_REDUCE;
    if (result && !in_place && first < second + PyArray_NBYTES(result) && second < first + PyArray_NBYTES(array))
        return 0;
    attempt->source = array;
    attempt->call.source = (const unsigned char *)first;
    return 1;
}

/* Carries out an attempt that the endpoint takes. Its objects must live as long. */
static PyObject *run(dmesh_planned_call *self, PyObject *group, dmesh_endpoint *endpoint, struct dmesh_attempt *attempt) {
    PyObject *result = dmesh_endpoint_carry_out(endpoint, attempt, 1);
    if (result == (PyObject *)endpoint) { /* others have not come yet */
        PyObject *both[] = {group, result};
        PyObject *answer = PyObject_VectorcallMethod(self->names[RESUME], both, 2, NULL);
        Py_DECREF(result);
        result = answer;
    }
    if (!result)
        dmesh_fail_group(self->names[INTERRUPTED], group, endpoint);
    return result;
}

static PyObject *planned_call(PyObject *object, PyObject *args, PyObject *kwargs) {
    dmesh_planned_call *self = (dmesh_planned_call *)object;
    const Py_ssize_t nargs = PyTuple_GET_SIZE(args);
    PyObject *x = nargs == 1 ? PyTuple_GET_ITEM(args, 0) : Py_None;
    struct dmesh_attempt attempt = self->attempt;
    if (self->endpoint && nargs <= 1 && !kwargs && dmesh_endpoint_is_free(self->endpoint) &&
        (x == Py_None || replace_source(&attempt, x))) {
        /* Another thread may prepare the plan anew meanwhile. */
        PyObject *group = Py_NewRef(self->group), *endpoint = Py_NewRef((PyObject *)self->endpoint);
        PyObject *source = Py_XNewRef((PyObject *)attempt.source);
        Py_XINCREF(attempt.result);
        PyObject *result = run(self, group, (dmesh_endpoint *)endpoint, &attempt);
        Py_XDECREF(source);
        Py_DECREF(endpoint);
        Py_DECREF(group);
        return result;
    }
    PyObject *slow = PyObject_GetAttr(object, self->names[CALL]);
    PyObject *result = slow ? PyObject_Call(slow, args, kwargs) : NULL;
    Py_XDECREF(slow);
    return result;
}

static PyMethodDef planned_methods[] = {
    {"prepare", (PyCFunction)(void (*)(void))planned_prepare, METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     "Let the endpoint of a group take calls like this one; return whether it does."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot planned_slots[] = {
    {Py_tp_doc, "Base of plans whose calls run natively."},
    {Py_tp_new, planned_new},
    {Py_tp_call, planned_call},
    {Py_tp_methods, planned_methods},
    {Py_tp_traverse, planned_traverse},
    {Py_tp_clear, planned_clear},
    {Py_tp_dealloc, planned_dealloc},
    {0, NULL},
};

PyType_Spec dmesh_planned_call_spec = {
    .name = "dmesh._native.PlannedCall",
    .basicsize = sizeof(dmesh_planned_call),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = planned_slots,
};
