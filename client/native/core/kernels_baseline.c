/* The kernels for every CPU that the compiler builds for: SSE2 on x86-64, NEON on aarch64. */
#define DMESH_TARGET
#ifdef __FP_FAST_FMA
#define DMESH_FUSED_MULTIPLY_ADD
#endif
#include "kernels.h"

dmesh_kernel_table dmesh_kernels_baseline = DMESH_KERNELS;
