/* The type `dmesh._native.FastPath`: a public function, or a method of groups, whose usual calls run without Python.
 *
 * It wraps the Python function of the same arguments. If the group has a native endpoint that takes the
 * call, no Python runs; otherwise it calls the function.
 */
#include "endpoint.h"

#include <structmember.h>

/* Names, interned: of the arguments that an endpoint understands, in the order of `enum dmesh_argument`; of those that are
 * left to Python unless they have their defaults; and of attributes of groups and generations. */
static const char *const NAMES[] = {
    "", "x", "op", "root", "axis", "dst", "src", "out", "group", "timeout", "async_op", "compress",
    "_generation", "endpoint", "outgoing", "incoming", "_resume", "_interrupted", "_completed", "_begun",
    "context", "parts",
};
enum name { GROUP = DMESH_ARGUMENTS, TIMEOUT, ASYNC_OP, COMPRESS, GENERATION, ENDPOINT, OUTGOING, INCOMING, RESUME,
            INTERRUPTED, COMPLETED, BEGUN, CONTEXT, PARTS, NAME_COUNT };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    const struct dmesh_spec *spec;
    enum dmesh_argument peer; /* DMESH_DST or DMESH_SRC of a transfer, else 0 */
    PyObject *slow;         /* the Python function; its argument `group` names the group */
    PyObject *process;      /* the variable `runtime.context.process`; NULL in a method */
    PyObject *world;        /* the class of the part of its context that has the group of all clients; NULL in a method */
    PyObject *method;       /* the method of groups that a function makes; NULL in a method */
    PyTypeObject *endpoint; /* the type */
    PyObject *names[NAME_COUNT];
    PyObject *only_group; /* a tuple of that name */
    PyObject *defaults[DMESH_ARGUMENTS]; /* of its arguments; NULL where one must be given */
} dmesh_fast_path;

/* Sorts the arguments, borrowed; false if Python must look at them. */
static int sort(const dmesh_fast_path *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **given,
                int *async) {
    const struct dmesh_spec *spec = self->spec;
    PyObject *const *names = self->names;
    if (nargs > spec->positional)
        return 0;
    memcpy(given, self->defaults, sizeof self->defaults);
    for (Py_ssize_t n = 0; n < nargs; n++)
        given[spec->arguments[n]] = args[n];
    const Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t n = 0; n < named; n++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, n), *value = args[nargs + n];
        if (name == names[GROUP] && self->process)
            continue;
        if (name == names[ASYNC_OP] && value == Py_True && self->peer) {
            *async = 1;
            continue;
        }
        const int optional = name == names[TIMEOUT] || (name == names[COMPRESS] && spec->kind == DMESH_ALL_REDUCE);
        if (name == names[ASYNC_OP] ? value == Py_False : optional && value == Py_None)
            continue; /* as if it were not given */
        /* If it is given by position, too, Python raises the error. */
        const enum dmesh_argument *place = spec->arguments + nargs;
        while (*place && name != names[*place])
            place++;
        if (!*place)
            return 0;
        given[*place] = value;
    }
    for (const enum dmesh_argument *place = spec->arguments; *place; place++)
        if (!given[*place])
            return 0;
    return 1;
}

/* The endpoint for a call, as a new reference; NULL if there is none that can take it. */
static dmesh_endpoint *find(const dmesh_fast_path *self, PyObject *group, PyObject *const *given) {
    const enum name where = self->peer == DMESH_DST ? OUTGOING : self->peer == DMESH_SRC ? INCOMING : ENDPOINT;
    PyObject *generation = PyObject_GetAttr(group, self->names[GENERATION]);
    PyObject *found = generation ? PyObject_GetAttr(generation, self->names[where]) : NULL;
    Py_XDECREF(generation);
    if (found && self->peer) {
        /* A list with a place for each member. */
        PyObject *list = found, *position = given[self->peer];
        found = NULL;
        if (PyList_CheckExact(list) && PyLong_CheckExact(position)) {
            const Py_ssize_t peer = PyLong_AsSsize_t(position);
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

/* Calls the Python function: of a method, with the group as its argument of that name. */
static PyObject *call_function(const dmesh_fast_path *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    if (self->process)
        return PyObject_Vectorcall(self->slow, args, nargsf, kwnames);
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf), named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    if (nargs < 1)
        return PyErr_Format(PyExc_TypeError, "%s is a method of groups", self->spec->name);
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

/* Returns the group of all clients, as a new reference; NULL without an exception if Python must look for it. */
static PyObject *find_world(const dmesh_fast_path *self) {
    PyObject *process = NULL, *context = NULL, *parts = NULL, *group = NULL;
    if (PyContextVar_Get(self->process, NULL, &process) == 0 && process &&
        (context = PyObject_GetAttr(process, self->names[CONTEXT])) && context != Py_None &&
        (parts = PyObject_GetAttr(context, self->names[PARTS])) && PyDict_CheckExact(parts)) {
        PyObject *world = PyDict_GetItemWithError(parts, self->world);
        group = world ? PyObject_GetAttr(world, self->names[GROUP]) : NULL;
    }
    Py_XDECREF(parts);
    Py_XDECREF(context);
    Py_XDECREF(process);
    if (!group)
        PyErr_Clear();
    return group;
}

/* Returns the group of a call, as a new reference; NULL if Python must look for it. */
static PyObject *group_of(const dmesh_fast_path *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (!self->process)
        return nargs ? Py_NewRef(args[0]) : NULL;
    const Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t n = 0; n < named; n++)
        if (PyTuple_GET_ITEM(kwnames, n) == self->names[GROUP] && args[nargs + n] != Py_None)
            return Py_NewRef(args[nargs + n]);
    return find_world(self);
}

static PyObject *fast_path_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    dmesh_fast_path *self = (dmesh_fast_path *)callable;
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf), skipped = self->process ? 0 : 1;
    PyObject *given[DMESH_ARGUMENTS], *group = NULL, *result;
    dmesh_endpoint *endpoint = NULL;
    int async = 0;
    if (nargs >= skipped && sort(self, args + skipped, nargs - skipped, kwnames, given, &async) &&
        (group = group_of(self, args, nargs, kwnames)))
        endpoint = find(self, group, given);
    if (!endpoint) {
        Py_XDECREF(group);
        return call_function(self, args, nargsf, kwnames);
    }
    result = dmesh_endpoint_call(endpoint, self->spec, given, !async);
    if (result == Py_NotImplemented) {
        Py_DECREF(result);
        result = call_function(self, args, nargsf, kwnames);
    } else {
        const int begun = result == (PyObject *)endpoint;
        if (begun || (async && result)) {
            PyObject *both[] = {group, result};
            PyObject *name = self->names[!begun ? COMPLETED : async ? BEGUN : RESUME];
            PyObject *answer = PyObject_VectorcallMethod(name, both, 2, NULL);
            Py_DECREF(result);
            result = answer;
        }
        if (!result)
            dmesh_fail_group(self->names[INTERRUPTED], group, endpoint);
    }
    Py_DECREF(endpoint);
    Py_DECREF(group);
    return result;
}

static dmesh_fast_path *make(PyTypeObject *type, const struct dmesh_spec *spec, PyObject *slow, PyObject *process,
                             PyObject *world) {
    dmesh_fast_path *self = (dmesh_fast_path *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = fast_path_call;
    self->spec = spec;
    self->peer = spec->kind == DMESH_TRANSFER ? spec->arguments[1] : 0;
    self->slow = Py_NewRef(slow);
    self->process = Py_XNewRef(process);
    self->world = Py_XNewRef(world);
    self->endpoint = (PyTypeObject *)Py_NewRef(dmesh_state_of(PyType_GetModule(type))->endpoint);
    int failed = 0;
    for (int n = 0; n < NAME_COUNT; n++)
        failed |= !(self->names[n] = PyUnicode_InternFromString(NAMES[n]));
    failed |= !(self->only_group = self->names[GROUP] ? PyTuple_Pack(1, self->names[GROUP]) : NULL);
    for (const enum dmesh_argument *place = spec->arguments; *place; place++)
        if (*place != DMESH_X && *place != self->peer)
            failed |= !(self->defaults[*place] = *place == DMESH_OP     ? PyUnicode_InternFromString("sum")
                                                 : *place == DMESH_ROOT ? PyLong_FromLong(0)
                                                                        : Py_NewRef(Py_None));
    if (failed)
        Py_CLEAR(self);
    return self;
}

/* FastPath(name, function, process, world): calls that name no group go to the `group` of the part of class `world` of the
 * context of the variable `process`. */
static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const char *name;
    PyObject *slow, *process, *world;
    static char *keywords[] = {"name", "function", "process", "world", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOO!O!", keywords, &name, &slow, &PyContextVar_Type, &process,
                                     &PyType_Type, &world))
        return NULL;
    const struct dmesh_spec *spec = dmesh_spec_of(name);
    if (!spec || !PyCallable_Check(slow))
        return PyErr_Format(PyExc_ValueError, "no fast path for %s", name);
    dmesh_fast_path *self = make(type, spec, slow, process, world);
    if (self && !(self->method = (PyObject *)make(type, spec, slow, NULL, NULL)))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *fast_path_get(PyObject *self, PyObject *group, PyObject *type) {
    (void)type;
    return group && group != Py_None ? PyMethod_New(self, group) : Py_NewRef(self);
}

#define OBJECTS(DO) DO(self->slow) DO(self->process) DO(self->world) DO(self->method) DO(self->endpoint)

static int fast_path_traverse(dmesh_fast_path *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    OBJECTS(DMESH_VISIT)
    return 0;
}

static int fast_path_clear(dmesh_fast_path *self) {
    OBJECTS(DMESH_CLEAR)
    return 0;
}

static void fast_path_dealloc(dmesh_fast_path *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fast_path_clear(self);
    for (int n = 0; n < NAME_COUNT; n++)
        Py_XDECREF(self->names[n]);
    for (int n = 0; n < DMESH_ARGUMENTS; n++)
        Py_XDECREF(self->defaults[n]);
    Py_XDECREF(self->only_group);
    type->tp_free(self);
    Py_DECREF(type);
}

/* __name__, __signature__ and the like are those of the function. */
static PyObject *fast_path_getattr(PyObject *self, PyObject *name) {
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(((dmesh_fast_path *)self)->slow, name);
}

/* A descriptor of the type, where `help` looks. */
static PyObject *fast_path_doc(PyObject *self, void *closure) {
    (void)closure;
    return PyObject_GetAttrString(((dmesh_fast_path *)self)->slow, "__doc__");
}

static PyGetSetDef fast_path_getset[] = {
    {"__doc__", fast_path_doc, NULL, NULL, NULL},
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
    {Py_tp_members, fast_path_members},
    {Py_tp_getset, fast_path_getset},
    {Py_tp_traverse, fast_path_traverse},
    {Py_tp_clear, fast_path_clear},
    {Py_tp_dealloc, fast_path_dealloc},
    {0, NULL},
};

PyType_Spec dmesh_fast_path_spec = {
    .name = "dmesh._native.FastPath",
    .basicsize = sizeof(dmesh_fast_path),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = fast_path_slots,
};
