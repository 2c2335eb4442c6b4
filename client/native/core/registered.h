/* Memory of other processes: the shared segments that this one has mapped or shares itself, and private memory.
 *
 * The table of segments is used with the GIL held, or by one thread. */
#ifndef DMESH_REGISTERED_H
#define DMESH_REGISTERED_H

#include <stddef.h>
#include <stdint.h>

enum { DMESH_NONCE = 16 };

/* Mixed into the hash of an epoch in which locations are exchanged. */
#define DMESH_LOCATIONS UINT64_C(0x5368617265644D65)

enum dmesh_where {
    DMESH_PRIVATE = 0, /* no other process can reach the array; the rest of the location has no meaning */
    DMESH_IN_SEGMENT,  /* in shared memory */
    DMESH_IN_PROCESS,  /* in a process whose memory others may read */
};

/* Location of an array, as ranks send it to each other. */
struct dmesh_location {
    unsigned char nonce[DMESH_NONCE]; /* of the segment */
    uint64_t nbytes;                  /* of the segment; in a process: of the array */
    uint64_t offset;                  /* of the array in the segment; in a process: its address */
    int32_t descriptor;               /* of the segment's file, in the process that shares it */
    int32_t where;                    /* an `enum dmesh_where` */
};

/* A segment that is mapped in this process. */
struct dmesh_mapping {
    unsigned char *base;
    struct dmesh_location at; /* with offset 0 */
    void *owner;              /* keeps it mapped as long as it is registered */
};

struct dmesh_registered {
    struct dmesh_mapping *own;    /* sorted by address */
    struct dmesh_mapping *others; /* oldest first */
    size_t owned, known;
};

/* Registers a segment; -1 if there is no memory for that. */
int dmesh_registered_add(struct dmesh_registered *registered, int own, struct dmesh_mapping mapping);

/* Removes a segment; the oldest one, if it was mapped again in the meantime. Returns its owner, or NULL. */
void *dmesh_registered_drop(struct dmesh_registered *registered, const unsigned char *nonce);

/* Returns the location of `nbytes` bytes at an address: private unless they are in a segment of this process. */
struct dmesh_location dmesh_registered_locate(const struct dmesh_registered *registered, const void *address,
                                              size_t nbytes);

/* Returns the address of `nbytes` bytes at a location in another process's segment; NULL if they are not mapped. */
unsigned char *dmesh_registered_resolve(const struct dmesh_registered *registered, const struct dmesh_location *location,
                                        size_t nbytes);

/* Frees the table, not the segments. */
void dmesh_registered_free(struct dmesh_registered *registered);

/* Copies `nbytes` bytes at `address` in the private memory of process `owner`: the kernel copies them once ("cross-memory
 * attach"), if this process may trace that one. Returns 0, or an `errno`: EFAULT if they are not mapped there, ESRCH if
 * there is no such process, EPERM if it may not be read, ENOSYS if the system cannot do it. */
int dmesh_cma_read(int owner, void *into, uint64_t address, size_t nbytes);

#endif
