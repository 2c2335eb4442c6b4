/* The function `dmesh._native.sum_rows`; `dmesh.native.Core` documents it. */
#include "module.h"

#include <math.h>

#include "reduce.h"

PyObject *dmesh_sum_rows(PyObject *module, PyObject *argument) {
    (void)module;
    if (!PyArray_Check(argument))
        return PyErr_Format(PyExc_TypeError, "expected an array, got %s", Py_TYPE(argument)->tp_name);
    PyArrayObject *rows = (PyArrayObject *)argument;
    const int type = PyArray_TYPE(rows);
    const enum dmesh_dtype dtype = type == NPY_HALF     ? DMESH_F16
                                   : type == NPY_FLOAT  ? DMESH_F32
                                   : type == NPY_DOUBLE ? DMESH_F64
                                                        : DMESH_DTYPES;
    const dmesh_row_sums add = dmesh_row_sums_for(dtype, DMESH_ISA_BEST);
    if (!add || PyArray_NDIM(rows) != 2 || !PyArray_IS_C_CONTIGUOUS(rows) || !PyArray_ISNOTSWAPPED(rows)) {
        PyErr_SetString(PyExc_TypeError, "expected a matrix in C order of float16, float32 or float64");
        return NULL;
    }
    PyObject *sums = PyArray_SimpleNew(1, PyArray_DIMS(rows), type == NPY_HALF ? NPY_FLOAT : type);
    if (!sums)
        return NULL;
    const size_t count = (size_t)PyArray_DIM(rows, 0), length = (size_t)PyArray_DIM(rows, 1);
    void *out = PyArray_DATA((PyArrayObject *)sums);
    int finite = 1;
    Py_BEGIN_ALLOW_THREADS
    add(PyArray_DATA(rows), count, length, out);
    for (size_t row = 0; row < count; row++)
        finite &= isfinite(type == NPY_DOUBLE ? ((double *)out)[row] : ((float *)out)[row]) != 0;
    Py_END_ALLOW_THREADS
    if (finite)
        return sums;
    Py_DECREF(sums);
    Py_RETURN_NONE;
}
