/* Common header of the bindings.
 *
 * Variables that change are in dmesh_state, because several interpreters may load the module; dmesh_forks belongs to the
 * process. Data that threads share without the GIL is atomic. Floating point follows the build's flags
 * (-ffp-contract=off, never -ffast-math or -march=native): all machines compute the same bits. Headers of one system
 * only (linux/futex.h, ...) stay inside #ifdef.
 */
#ifndef DMESH_NATIVE_MODULE_H
#define DMESH_NATIVE_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The oldest NumPy that pyproject.toml allows, 1.26, has this API; newer ones keep it. */
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
/* One table of NumPy's functions for all parts, which module.c fills. */
#define PY_ARRAY_UNIQUE_SYMBOL dmesh_native_array_api
#ifndef DMESH_FILLS_NUMPY_TABLE
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* Grows with every change after which Python code written for the old module would misuse the new one, or the other
 * way round. dmesh/native.py has the same number and refuses a module with another one. */
#define DMESH_NATIVE_ABI 13

/* Types of one interpreter's copy of the module. New members go into traverse and clear in module.c, too. */
typedef struct {
    PyTypeObject *registered, *endpoint;
} dmesh_state;

/* Forks between the process that loaded the module and this one. */
extern unsigned dmesh_forks;

static inline dmesh_state *dmesh_state_of(PyObject *module) { return (dmesh_state *)PyModule_GetState(module); }

/* For lists of a type's objects. */
#define DMESH_VISIT(object) Py_VISIT(object);
#define DMESH_CLEAR(object) Py_CLEAR(object);

/* Types of the module; client/dmesh/_native.pyi declares them for Python. */
extern PyType_Spec dmesh_registered_spec, dmesh_endpoint_spec, dmesh_fast_path_spec, dmesh_planned_call_spec;

PyObject *dmesh_sum_rows(PyObject *module, PyObject *rows);

#endif
