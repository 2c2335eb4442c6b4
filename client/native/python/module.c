/* The module dmesh._native: `abi`, `build`, `sum_rows`, and the types. */
#define DMESH_FILLS_NUMPY_TABLE
#include "module.h"

#include <pthread.h>

/* The build passes the -fsanitize= flags' argument; the compiler's own macros do not tell of all sanitizers. */
#ifndef DMESH_SANITIZERS
#define DMESH_SANITIZERS ""
#endif

#if defined(__clang__)
#define DMESH_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define DMESH_COMPILER "gcc " __VERSION__
#else
#define DMESH_COMPILER "unknown"
#endif

/* The instructions that all code may use; functions with several versions choose theirs when they are loaded. */
#if defined(__AVX512F__)
#define DMESH_SIMD "avx512"
#elif defined(__AVX2__)
#define DMESH_SIMD "avx2"
#elif defined(__SSE2__)
#define DMESH_SIMD "sse2"
#elif defined(__ARM_FEATURE_SVE)
#define DMESH_SIMD "sve"
#elif defined(__ARM_NEON)
#define DMESH_SIMD "neon"
#else
#define DMESH_SIMD "none"
#endif

unsigned dmesh_forks;

static void count_fork(void) { dmesh_forks++; }

/* Returns the names in a list separated by commas as a tuple, or NULL with an exception set. */
static PyObject *split_names(const char *names) {
    PyObject *text = *names ? PyUnicode_FromString(names) : NULL;
    PyObject *list = *names ? text ? PyObject_CallMethod(text, "split", "s", ",") : NULL : PyList_New(0);
    PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(text);
    return tuple;
}

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddType(module, type) < 0)
        Py_CLEAR(type);
    return type;
}

static int module_exec(PyObject *module) {
    dmesh_state *state = dmesh_state_of(module);
    static int counts_forks; /* of the process: once for all interpreters */
    if (!counts_forks && pthread_atfork(NULL, NULL, count_fork) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    counts_forks = 1;
    /* Returns at once if another interpreter did it before: NumPy's table is the process's. */
    if (PyArray_ImportNumPyAPI() < 0)
        return -1;
    PyTypeObject *fast_path = NULL, *planned_call;
    if (!(state->registered = add_type(module, &dmesh_registered_spec)) ||
        !(state->endpoint = add_type(module, &dmesh_endpoint_spec)) ||
        !(fast_path = add_type(module, &dmesh_fast_path_spec)))
        return -1;
    Py_DECREF(fast_path);
    if (!(planned_call = add_type(module, &dmesh_planned_call_spec)))
        return -1;
    Py_DECREF(planned_call);
    PyObject *sanitizers = split_names(DMESH_SANITIZERS);
    PyObject *build = sanitizers ? Py_BuildValue("{s:s, s:s, s:N}", "compiler", DMESH_COMPILER, "simd", DMESH_SIMD,
                                                 "sanitizers", sanitizers)
                                 : NULL;
    const int failed = !build || PyModule_AddObjectRef(module, "build", build) < 0;
    Py_XDECREF(build);
    return failed ? -1 : PyModule_AddIntConstant(module, "abi", DMESH_NATIVE_ABI);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    Py_VISIT(dmesh_state_of(module)->registered);
    Py_VISIT(dmesh_state_of(module)->endpoint);
    return 0;
}

static int module_clear(PyObject *module) {
    Py_CLEAR(dmesh_state_of(module)->registered);
    Py_CLEAR(dmesh_state_of(module)->endpoint);
    return 0;
}

static void module_free(void *module) { (void)module_clear((PyObject *)module); }

static PyMethodDef module_methods[] = {
    {"sum_rows", dmesh_sum_rows, METH_O, "sum_rows(rows, /)\n--\n\nReturn the sum of each row of a matrix."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    /* Not one GIL for each: NumPy's C API does not allow it. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_SUPPORTED},
#endif
#ifdef Py_mod_gil
    /* The GIL protects the numbering of calls. */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dmesh._native",
    .m_doc = "The native core of dmesh. Ask dmesh.native.core() for it, which decides whether it is used.",
    .m_size = sizeof(dmesh_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
