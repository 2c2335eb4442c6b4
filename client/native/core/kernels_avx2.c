/* The kernels for x86 CPUs of 2013 and later. Wider vectors would bring little: from 64 KB up memory decides. */
#include "kernels.h"

#ifdef DMESH_HAVE_AVX2_KERNELS

#include <immintrin.h>

#define DMESH_TARGET __attribute__((target("avx2,f16c,fma")))
#define DMESH_EIGHT_HALVES
#define DMESH_FUSED_MULTIPLY_ADD

#include "loops.h"

#include "fp16.h"
#include "kernels_integers.h"
#include "kernels_floats.h"
#include "kernels_fp16.h"

dmesh_kernel_table dmesh_kernels_avx2 = {INTEGER_TABLES, FLOAT_TABLES, HALF_TABLES};

#else

typedef int dmesh_no_kernels_here; /* ISO C forbids a file with nothing in it. */

#endif
