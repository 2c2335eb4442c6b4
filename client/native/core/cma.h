/* Reads of another process's private memory: the kernel copies it once ("cross-memory attach"), if this process may
 * trace that one. */
#ifndef DMESH_CMA_H
#define DMESH_CMA_H

#include <stddef.h>
#include <stdint.h>

/* Copies `nbytes` bytes at `address` in process `owner`. Returns 0, or an `errno`: EFAULT if they are not mapped there,
 * ESRCH if there is no such process, EPERM if it may not be read, ENOSYS if the system cannot do it. */
int dmesh_cma_read(int owner, void *into, uint64_t address, size_t nbytes);

#endif
