/* The module dmesh._native: `abi`, `build`, and the parts listed in module.h. */
#define DMESH_FILLS_NUMPY_TABLE
#include "module.h"

#include <pthread.h>

/* The build loops the -fsanitize= flags' argument; the compiler's own macros do not advertise of all sanitizers. */
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

PyDoc_STRVAR(module_doc,
             "The native core of dmesh. Ask dmesh.native.core() for it, which decides whether it is used.");

/* Returns the names in a list separated by commas as a tuple, or NULL with an exception set. */
static PyObject *split_names(const char *names)
{
    PyObject *text = PyUnicode_FromString(names);
    PyObject *comma = PyUnicode_FromString(",");
    PyObject *list = NULL, *tuple = NULL;
    if (text != NULL && comma != NULL)
        list = *names == '\0' ? PyList_New(0) : PyUnicode_Split(text, comma, -1);
    if (list != NULL)
        tuple = PyList_AsTuple(list);
    Py_XDECREF(list);
    Py_XDECREF(comma);
    Py_XDECREF(text);
    return tuple;
}

static int module_exec(PyObject *module)
{
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
    PyObject *sanitizers = split_names(DMESH_SANITIZERS);
    if (sanitizers == NULL)
        return -1;
    state->build = Py_BuildValue("{s:s, s:s, s:N}", "compiler", DMESH_COMPILER, "simd", DMESH_SIMD, "sanitizers",
                                 sanitizers);
    if (state->build == NULL)
        return -1;
    if (PyModule_AddObjectRef(module, "build", state->build) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "abi", DMESH_NATIVE_ABI);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(dmesh_state_of(module)->build);
    Py_VISIT(dmesh_state_of(module)->registered);
    Py_VISIT(dmesh_state_of(module)->endpoint);
    return 0;
}

static int module_clear(PyObject *module)
{
    Py_CLEAR(dmesh_state_of(module)->build);
    Py_CLEAR(dmesh_state_of(module)->registered);
    Py_CLEAR(dmesh_state_of(module)->endpoint);
    return 0;
}

static void module_free(void *module)
{
    (void)module_clear((PyObject *)module);
}

#define DMESH_PART_SLOT(name) {Py_mod_exec, dmesh_##name##_exec},

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    DMESH_PARTS(DMESH_PART_SLOT)
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
    .m_doc = module_doc,
    .m_size = sizeof(dmesh_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module_definition);
}
