#define _GNU_SOURCE
#include "cma.h"

#include <errno.h>

#ifdef __linux__
#include <sys/uio.h>

int dmesh_cma_read(int owner, void *into, uint64_t address, size_t nbytes) {
    size_t done = 0;
    while (done < nbytes) {
        const struct iovec here = {(char *)into + done, nbytes - done};
        const struct iovec there = {(void *)(uintptr_t)(address + done), nbytes - done};
        const ssize_t got = process_vm_readv(owner, &here, 1, &there, 1, 0);
        if (got <= 0)
            return got ? errno : EFAULT;
        done += (size_t)got;
    }
    return 0;
}
#else
int dmesh_cma_read(int owner, void *into, uint64_t address, size_t nbytes) {
    (void)owner, (void)into, (void)address, (void)nbytes;
    return ENOSYS;
}
#endif
