/* The type `dmesh._native.FastPath`: a public function, or a method of groups, whose usual calls run without Python.
 *
 * It wraps the Python function of the same arguments. If the group has a native endpoint that takes the
 * call, no Python runs; otherwise it calls the function.
 */
#include "endpoint.h"

#include <stddef.h>
#include <structmember.h>

enum { ARGUMENTS = 4 };

enum start { NEEDED, NONE, ZERO, SUM }; /* default of an argument */
enum where { GROUP, TO, FROM };         /* endpoint: that of the group, or of transfers to or from argument 1 */

struct spec {
    const char *name;
    PyObject *(*call)(dmesh_endpoint *self, PyObject *const *args, Py_ssize_t nargs);
    enum where where;
    int positional; /* number of positional arguments, without `self` */
    int count;      /* number of arguments that the endpoint understands */
    const char *names[ARGUMENTS];
    enum start starts[ARGUMENTS];
};

static const struct spec SPECS[] = {
    {"barrier", dmesh_endpoint_barrier, GROUP, 0, 0, {0}, {0}},
    {"all_reduce", dmesh_endpoint_all_reduce, GROUP, 2, 3, {"x", "op", "out"}, {NEEDED, SUM, NONE}},
    {"reduce", dmesh_endpoint_reduce, GROUP, 3, 4, {"x", "op", "root", "out"}, {NEEDED, SUM, ZERO, NONE}},
    {"reduce_scatter", dmesh_endpoint_reduce_scatter, GROUP, 2, 4, {"x", "op", "axis", "out"}, {NEEDED, SUM, NONE, NONE}},
    {"broadcast", dmesh_endpoint_broadcast, GROUP, 2, 3, {"x", "root", "out"}, {NEEDED, ZERO, NONE}},
    {"all_gather", dmesh_endpoint_all_gather, GROUP, 1, 3, {"x", "axis", "out"}, {NEEDED, NONE, NONE}},
    {"gather", dmesh_endpoint_gather, GROUP, 2, 3, {"x", "root", "out"}, {NEEDED, ZERO, NONE}},
    {"all_to_all", dmesh_endpoint_all_to_all, GROUP, 1, 2, {"x", "out"}, {NEEDED, NONE}},
    {"send", dmesh_endpoint_send, TO, 2, 2, {"x", "dst"}, {NEEDED, NEEDED}},
    {"recv", dmesh_endpoint_recv, FROM, 2, 3, {"x", "src", "out"}, {NEEDED, NEEDED, NONE}},
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    const struct spec *spec;
    PyObject *slow;      /* the Python function; its argument `group` names the group */
    PyObject *resolve;   /* returns the group of a function that was given none; NULL in a method */
    PyObject *method;    /* the method of groups that a function makes; NULL in a method */
    PyObject *group, *only_group; /* the name of that argument, and a tuple of it */
    PyTypeObject *endpoint;  /* the type */
    PyObject *names[ARGUMENTS];
    PyObject *timeout, *async_op, *compress;         /* names of arguments that are left to Python; the last may be NULL */
    PyObject *sum, *zero;
    PyObject *generation, *endpoints, *go_on, *interrupted;    /* names of attributes of groups */
    PyObject *completed, *begun;
} dmesh_fast_path;

/* Sorts the arguments, borrowed; false if Python must look at them. */
static int sort(const dmesh_fast_path *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **sorted,
                int *async) {
    const struct spec *spec = self->spec;
    if (nargs > spec->positional)
        return 0;
    for (int n = 0; n < spec->count; n++) {
        const enum start start = spec->starts[n];
        sorted[n] = n < nargs        ? args[n]
                    : start == NONE ? Py_None
                    : start == SUM  ? self->sum
                    : start == ZERO ? self->zero
                                    : NULL;
    }
    const Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t n = 0; n < named; n++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, n), *value = args[nargs + n];
        if (name == self->group && self->resolve)
            continue;
        if (name == self->async_op && value == Py_True && spec->where != GROUP) {
            *async = 1;
            continue;
        }
        if (name == self->async_op ? value == Py_False
                                   : (name == self->timeout || name == self->compress) && value == Py_None)
            continue; /* as if it were not given */
        int place = (int)nargs; /* if it is given by position, too, Python raises the error */
        while (place < spec->count && name != self->names[place])
            place++;
        if (place == spec->count)
            return 0;
        sorted[place] = value;
    }
    for (int n = 0; n < spec->count; n++)
        if (!sorted[n])
            return 0;
    return 1;
}

/* The endpoint for a call, as a new reference; NULL if there is none that can take it. */
static dmesh_endpoint *find(const dmesh_fast_path *self, PyObject *group, PyObject *const *sorted) {
    PyObject *generation = PyObject_GetAttr(group, self->generation);
    PyObject *found = generation ? PyObject_GetAttr(generation, self->endpoints) : NULL;
    Py_XDECREF(generation);
    if (found && self->spec->where != GROUP) {
        /* A list with a place for each member. */
        PyObject *list = found;
        found = NULL;
        if (PyList_CheckExact(list) && PyLong_CheckExact(sorted[1])) {
            const Py_ssize_t peer = PyLong_AsSsize_t(sorted[1]);
            if (peer >= 0 && peer < PyList_GET_SIZE(list))
                found = Py_NewRef(PyList_GET_ITEM(list, peer));
        }
        Py_DECREF(list);
    }
    if (found && Py_TYPE(found) == self->endpoint)
        return (dmesh_endpoint *)found;
    Py_XDECREF(found);
    PyErr_Clear();
    return NULL;
}

/* Lets the group deal with the exception that is set, which stays set. */
static void fail_group(const dmesh_fast_path *self, PyObject *group, dmesh_endpoint *endpoint) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *args[] = {group, (PyObject *)endpoint, value};
    PyObject *done = PyObject_VectorcallMethod(self->interrupted, args, 3, NULL);
    if (done) {
        Py_DECREF(done);
        PyErr_Restore(type, value, trace);
    } else { /* another one came meanwhile */
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
}

/* Calls the Python function: of a method, with the group as its argument of that name. */
static PyObject *call_function(const dmesh_fast_path *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    if (self->resolve)
        return PyObject_Vectorcall(self->slow, args, nargsf, kwnames);
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf), named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    if (nargs < 1) {
        PyErr_Format(PyExc_TypeError, "%s is a method of groups", self->spec->name);
        return NULL;
    }
    PyObject **all = PyMem_Malloc((size_t)(nargs + named) * sizeof *all);
    PyObject *names = named ? PySequence_Concat(kwnames, self->only_group) : Py_NewRef(self->only_group);
    PyObject *result = NULL;
    if (!all)
        PyErr_NoMemory();
    if (all && names) {
        memcpy(all, args + 1, (size_t)(nargs - 1 + named) * sizeof *all);
        all[nargs - 1 + named] = args[0];
        result = PyObject_Vectorcall(self->slow, all, (size_t)(nargs - 1), names);
    }
    Py_XDECREF(names);
    PyMem_Free(all);
    return result;
}

/* Returns the group of a call, as a new reference; NULL if Python must look for it. */
static PyObject *group_of(const dmesh_fast_path *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (!self->resolve)
        return nargs ? Py_NewRef(args[0]) : NULL;
    const Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t n = 0; n < named; n++)
        if (PyTuple_GET_ITEM(kwnames, n) == self->group && args[nargs + n] != Py_None)
            return Py_NewRef(args[nargs + n]);
    PyObject *world = PyObject_CallOneArg(self->resolve, Py_None);
    if (!world)
        PyErr_Clear();
    return world;
}

static PyObject *fast_path_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    dmesh_fast_path *self = (dmesh_fast_path *)callable;
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf), skipped = self->resolve ? 0 : 1;
    PyObject *sorted[ARGUMENTS] = {0};
    dmesh_endpoint *endpoint = NULL;
    PyObject *group = NULL;
    int async = 0;
    if (nargs >= skipped && sort(self, args + skipped, nargs - skipped, kwnames, sorted, &async) &&
        (group = group_of(self, args, nargs, kwnames)))
        endpoint = find(self, group, sorted);
    if (!endpoint) {
        Py_XDECREF(group);
        return call_function(self, args, nargsf, kwnames);
    }
    Py_ssize_t count = self->spec->count;
    if (self->spec->where != GROUP) { /* the endpoint knows its peer */
        sorted[1] = sorted[2];
        count--;
    }
    const enum where where = self->spec->where;
    PyObject *result = (!async        ? self->spec->call
                        : where == TO ? dmesh_endpoint_isend
                                      : dmesh_endpoint_irecv)(endpoint, sorted, count);
    if (result == Py_NotImplemented) {
        Py_DECREF(result);
        result = call_function(self, args, nargsf, kwnames);
    } else {
        if (result == (PyObject *)endpoint) {
            Py_DECREF(result);
            PyObject *both[] = {group, (PyObject *)endpoint};
            result = PyObject_VectorcallMethod(async ? self->begun : self->go_on, both, 2, NULL);
        } else if (async && result) {
            PyObject *both[] = {group, result};
            PyObject *future = PyObject_VectorcallMethod(self->completed, both, 2, NULL);
            Py_DECREF(result);
            result = future;
        }
        if (!result)
            fail_group(self, group, endpoint);
    }
    Py_DECREF(endpoint);
    Py_DECREF(group);
    return result;
}

static dmesh_fast_path *make(PyTypeObject *type, const struct spec *spec, PyObject *slow, PyObject *resolve) {
    dmesh_fast_path *self = (dmesh_fast_path *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = fast_path_call;
    self->spec = spec;
    self->slow = Py_NewRef(slow);
    self->resolve = Py_XNewRef(resolve);
    self->endpoint = (PyTypeObject *)Py_NewRef(dmesh_state_of(PyType_GetModule(type))->endpoint);
    int failed = 0;
    for (int n = 0; n < spec->count; n++)
        failed |= !(self->names[n] = PyUnicode_InternFromString(spec->names[n]));
    failed |= !(self->timeout = PyUnicode_InternFromString("timeout"));
    failed |= !(self->async_op = PyUnicode_InternFromString("async_op"));
    if (spec->call == dmesh_endpoint_all_reduce)
        failed |= !(self->compress = PyUnicode_InternFromString("compress"));
    failed |= !(self->group = PyUnicode_InternFromString("group"));
    failed |= !(self->only_group = self->group ? PyTuple_Pack(1, self->group) : NULL);
    failed |= !(self->sum = PyUnicode_InternFromString("sum"));
    failed |= !(self->zero = PyLong_FromLong(0));
    failed |= !(self->generation = PyUnicode_InternFromString("_generation"));
    failed |= !(self->endpoints = PyUnicode_InternFromString(spec->where == GROUP ? "endpoint"
                                                         : spec->where == TO  ? "outgoing"
                                                                              : "incoming"));
    failed |= !(self->go_on = PyUnicode_InternFromString("_resume"));
    failed |= !(self->interrupted = PyUnicode_InternFromString("_interrupted"));
    failed |= !(self->completed = PyUnicode_InternFromString("_completed"));
    failed |= !(self->begun = PyUnicode_InternFromString("_begun"));
    if (failed)
        Py_CLEAR(self);
    return self;
}

/* FastPath(name, function, resolve): `resolve(None)` returns the group of a call that names none. */
static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const char *name;
    PyObject *slow, *resolve;
    static char *keywords[] = {"name", "function", "resolve", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOO", keywords, &name, &slow, &resolve))
        return NULL;
    const struct spec *spec = NULL;
    for (size_t n = 0; n < sizeof SPECS / sizeof *SPECS; n++)
        if (strcmp(SPECS[n].name, name) == 0)
            spec = &SPECS[n];
    if (!spec || !PyCallable_Check(slow) || !PyCallable_Check(resolve))
        return PyErr_Format(PyExc_ValueError, "no fast path for %s", name);
    dmesh_fast_path *self = make(type, spec, slow, resolve);
    if (self && !(self->method = (PyObject *)make(type, spec, slow, NULL)))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *fast_path_get(PyObject *self, PyObject *group, PyObject *type) {
    (void)type;
    return group && group != Py_None ? PyMethod_New(self, group) : Py_NewRef(self);
}

static int fast_path_traverse(dmesh_fast_path *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->slow);
    Py_VISIT(self->resolve);
    Py_VISIT(self->method);
    Py_VISIT(self->endpoint);
    return 0;
}

static int fast_path_clear(dmesh_fast_path *self) {
    Py_CLEAR(self->slow);
    Py_CLEAR(self->resolve);
    Py_CLEAR(self->method);
    Py_CLEAR(self->endpoint);
    return 0;
}

static void fast_path_dealloc(dmesh_fast_path *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fast_path_clear(self);
    for (int n = 0; n < ARGUMENTS; n++)
        Py_XDECREF(self->names[n]);
    Py_XDECREF(self->timeout);
    Py_XDECREF(self->async_op);
    Py_XDECREF(self->compress);
    Py_XDECREF(self->group);
    Py_XDECREF(self->only_group);
    Py_XDECREF(self->sum);
    Py_XDECREF(self->zero);
    Py_XDECREF(self->generation);
    Py_XDECREF(self->endpoints);
    Py_XDECREF(self->go_on);
    Py_XDECREF(self->interrupted);
    Py_XDECREF(self->completed);
    Py_XDECREF(self->begun);
    type->tp_free(self);
    Py_DECREF(type);
}

/* __doc__, __name__ and the like are those of the method that it takes the place of. */
static PyObject *fast_path_getattr(PyObject *self, PyObject *name) {
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(((dmesh_fast_path *)self)->slow, name);
}

static PyObject *get_doc(dmesh_fast_path *self, void *unused) {
    (void)unused;
    return PyObject_GetAttrString(self->slow, "__doc__");
}

static PyGetSetDef fast_path_getset[] = {
    {"__doc__", (getter)get_doc, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef fast_path_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(dmesh_fast_path, slow), READONLY, "The Python function."},
    {"method", T_OBJECT_EX, offsetof(dmesh_fast_path, method), READONLY, "The method of groups."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(dmesh_fast_path, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, fast_path_new}, /* no doc: each has that of its function */
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, fast_path_get},
    {Py_tp_getattro, fast_path_getattr},
    {Py_tp_getset, fast_path_getset},
    {Py_tp_members, fast_path_members},
    {Py_tp_traverse, fast_path_traverse},
    {Py_tp_clear, fast_path_clear},
    {Py_tp_dealloc, fast_path_dealloc},
    {0, NULL},
};

static PyType_Spec fast_path_spec = {
    .name = "dmesh._native.FastPath",
    .basicsize = sizeof(dmesh_fast_path),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = fast_path_slots,
};

int dmesh_fast_path_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &fast_path_spec, NULL);
    if (!type)
        return -1;
    const int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}
