#define _GNU_SOURCE
#include "registered.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifdef __linux__
#include <sys/uio.h>
#endif

int dmesh_registered_add(struct dmesh_registered *registered, int own, struct dmesh_mapping mapping) {
    struct dmesh_mapping **list = own ? &registered->own : &registered->others;
    size_t *count = own ? &registered->owned : &registered->known;
    struct dmesh_mapping *grown = realloc(*list, (*count + 1) * sizeof *grown);
    if (!grown)
        return -1;
    *list = grown;
    size_t at = *count;
    for (; own && at > 0 && grown[at - 1].base > mapping.base; at--)
        grown[at] = grown[at - 1];
    grown[at] = mapping;
    ++*count;
    return 0;
}

static void *drop(struct dmesh_mapping *list, size_t *count, const unsigned char *nonce) {
    for (size_t at = 0; at < *count; at++)
        if (memcmp(list[at].at.nonce, nonce, DMESH_NONCE) == 0) {
            void *owner = list[at].owner;
            memmove(list + at, list + at + 1, (--*count - at) * sizeof *list);
            return owner;
        }
    return NULL;
}

void *dmesh_registered_drop(struct dmesh_registered *registered, const unsigned char *nonce) {
    void *owner = drop(registered->own, &registered->owned, nonce);
    return owner ? owner : drop(registered->others, &registered->known, nonce);
}

struct dmesh_location dmesh_registered_locate(const struct dmesh_registered *registered, const void *address,
                                              size_t nbytes) {
    struct dmesh_location location = {.where = DMESH_PRIVATE};
    /* The first `low` segments begin at or before `address`; those from `high` on, later. */
    size_t low = 0, high = registered->owned;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (registered->own[middle].base <= (const unsigned char *)address)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low)
        return location;
    const struct dmesh_mapping *mapping = &registered->own[low - 1];
    const uint64_t offset = (uint64_t)((const unsigned char *)address - mapping->base);
    if (offset > mapping->at.nbytes || nbytes > mapping->at.nbytes - offset)
        return location;
    location = mapping->at;
    location.offset = offset;
    location.where = DMESH_IN_SEGMENT;
    return location;
}

unsigned char *dmesh_registered_resolve(const struct dmesh_registered *registered, const struct dmesh_location *location,
                                        size_t nbytes) {
    for (size_t at = 0; at < registered->known; at++) {
        const struct dmesh_mapping *mapping = &registered->others[at];
        if (memcmp(mapping->at.nonce, location->nonce, DMESH_NONCE) == 0)
            return location->offset <= mapping->at.nbytes && nbytes <= mapping->at.nbytes - location->offset
                       ? mapping->base + location->offset
                       : NULL;
    }
    return NULL;
}

void dmesh_registered_free(struct dmesh_registered *registered) {
    free(registered->own);
    free(registered->others);
    *registered = (struct dmesh_registered){0};
}

#ifdef __linux__
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
