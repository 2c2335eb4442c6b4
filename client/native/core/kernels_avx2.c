/* The kernels for x86 CPUs of 2013 and later. Wider vectors would bring little: from 64 KB up memory decides. */
#include "reduce.h"

#ifdef __x86_64__
#include <immintrin.h>

#define DMESH_TARGET __attribute__((target("avx2,f16c,fma")))
#define DMESH_EIGHT_HALVES
#define DMESH_FUSED_MULTIPLY_ADD
#include "kernels.h"

dmesh_kernel_table dmesh_kernels_avx2 = DMESH_KERNELS;
#endif
