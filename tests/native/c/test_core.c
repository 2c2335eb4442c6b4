/* Tests of client/native/core from C, without Python: `test_core NAME` runs one of them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "p2p.h"
#include "shm_staged.h"
#include "tcp.h"

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                     \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

enum { SIZE = 3, SLOT = 256, STAGING = 4096, LARGE = 10000 };

static int64_t soon(void) { return dmesh_now() + INT64_C(30000000000); }

/* ---- a group in memory that threads and forked processes share ---------------------------------------------- */

static struct dmesh_region *regions[SIZE];
static uint64_t salts[SIZE] = {11, 22, 33};

static void make_regions(void) {
    const size_t nbytes = dmesh_region_size(SLOT, STAGING);
    for (int rank = 0; rank < SIZE; rank++) {
        regions[rank] = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(regions[rank] != MAP_FAILED);
    }
}

static struct dmesh_shm group_of(int rank, int size) {
    return (struct dmesh_shm){.size = size, .me = rank, .slot_bytes = SLOT, .staging_bytes = STAGING,
                              .regions = regions, .salts = salts};
}

static enum dmesh_status small(struct dmesh_shm *shm, const struct dmesh_call *call, uint64_t hash) {
    dmesh_shm_begin(shm, call, hash);
    const enum dmesh_status status = dmesh_shm_wait(shm, soon());
    if (status == DMESH_OK)
        dmesh_shm_end(shm, call);
    return status;
}

static struct dmesh_call sum_of(const int32_t *source, int32_t *target, size_t count) {
    return (struct dmesh_call){.kind = DMESH_ALL_REDUCE, .source = (const unsigned char *)source,
                               .target = (unsigned char *)target, .contribution = 4 * count, .count = count,
                               .kernel = dmesh_kernel_for(DMESH_I32, DMESH_SUM, DMESH_ISA_BEST)};
}

/* Lengths of blocks, from each rank to each. */
typedef size_t lengths[SIZE][SIZE];

static struct dmesh_blocks blocks_of(int rank, const lengths table) {
    struct dmesh_blocks blocks = {0};
    size_t end = 0;
    for (int peer = 0; peer < SIZE; peer++) {
        blocks.sends[peer] = 4 * table[rank][peer];
        blocks.send_at[peer] = blocks.own;
        blocks.own += blocks.sends[peer];
        blocks.receives[peer] = 4 * table[peer][rank];
        blocks.receive_at[peer] = end;
        end += blocks.receives[peer];
        for (int other = 0; other < SIZE; other++) {
            blocks.origin[peer] += other < rank ? 4 * table[peer][other] : 0;
            if (4 * table[peer][other] > blocks.largest)
                blocks.largest = 4 * table[peer][other];
        }
    }
    return blocks;
}

/* Exchanges and reduces blocks of different lengths: `carry_out` runs a call of one rank. */
static void exchange_blocks(int rank, void (*carry_out)(const struct dmesh_call *call, void *of), void *of) {
    static const lengths TABLES[] = {
        {{1, 2, 0}, {0, 0, 0}, {20, 30, 10}},             /* in one epoch */
        {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}},
        {{0, 3000, 1}, {5, 0, 0}, {1000, 2000, 7000}},    /* in pieces */
        {{0, 5000, 0}, {0, 0, 0}, {5000, 0, 0}},          /* a permutation */
    };
    static int32_t inputs[SIZE][LARGE], outputs[SIZE][LARGE];
    int32_t *input = inputs[rank], *output = outputs[rank];
    for (int n = 0; n < LARGE; n++)
        input[n] = (rank + 1) * n;
    for (size_t n = 0; n < sizeof TABLES / sizeof *TABLES; n++) {
        const struct dmesh_blocks blocks = blocks_of(rank, TABLES[n]);
        struct dmesh_call call = {.kind = n == 3 ? DMESH_PERMUTE : DMESH_ALL_TO_ALL, .blocks = &blocks,
                                  .source = (unsigned char *)input, .target = (unsigned char *)output};
        for (int peer = 0; peer < SIZE; peer++) {
            const struct dmesh_blocks theirs = blocks_of(peer, TABLES[n]);
            call.contribution = theirs.own > call.contribution ? theirs.own : call.contribution;
        }
        memset(output, 0xff, 4 * LARGE);
        carry_out(&call, of);
        int32_t *at = output;
        for (int peer = 0; peer < SIZE; peer++)
            for (size_t k = 0; k < blocks.receives[peer] / 4; k++)
                CHECK(*at++ == (peer + 1) * (int32_t)(blocks.origin[peer] / 4 + k));
        CHECK(*at == -1);
    }
    for (size_t scale = 1; scale <= 400; scale += 399) {
        const lengths table = {{0, 3 * scale, scale}, {0, 3 * scale, scale}, {0, 3 * scale, scale}};
        const struct dmesh_blocks blocks = blocks_of(rank, table);
        struct dmesh_blocks own = blocks;
        for (int peer = 0; peer < SIZE; peer++)
            own.receive_at[peer] = 0;
        const size_t count = blocks.receives[0] / 4;
        struct dmesh_call call = sum_of(input, output, count);
        call.kind = DMESH_REDUCE_SCATTER;
        call.contribution = 16 * scale;
        call.blocks = &own;
        call.target = count ? call.target : NULL;
        carry_out(&call, of);
        for (size_t k = 0; k < count; k++)
            CHECK(output[k] == 6 * (int32_t)(blocks.origin[0] / 4 + k));
    }
}

static void in_shared_memory(const struct dmesh_call *call, void *of) {
    struct dmesh_shm *shm = of;
    struct dmesh_staged staged;
    if (call->contribution <= SLOT) {
        CHECK(small(shm, call, 77) == DMESH_OK);
        return;
    }
    dmesh_staged_init(shm, &staged, call, 78);
    CHECK(dmesh_staged_run(shm, &staged, soon()) == DMESH_OK);
}

/* Each rank's calls; all ranks run the same. */
static void run_calls(int rank) {
    struct dmesh_shm shm = group_of(rank, SIZE);
    static int32_t input[SIZE][LARGE], output[SIZE][LARGE];
    for (int n = 0; n < LARGE; n++)
        input[rank][n] = (rank + 1) * n;
    for (int turn = 0; turn < 100; turn++) {
        const struct dmesh_call call = sum_of(input[rank], output[rank], 10);
        CHECK(small(&shm, &call, 1000 + (uint64_t)turn) == DMESH_OK);
        CHECK(output[rank][9] == 6 * 9);
    }
    struct dmesh_staged staged;
    const struct dmesh_call sum = sum_of(input[rank], output[rank], LARGE);
    dmesh_staged_init(&shm, &staged, &sum, 1);
    CHECK(dmesh_staged_run(&shm, &staged, soon()) == DMESH_OK);
    for (int n = 0; n < LARGE; n++)
        CHECK(output[rank][n] == 6 * n);
    exchange_blocks(rank, in_shared_memory, &shm);
    const struct dmesh_call barrier = {.kind = DMESH_BARRIER};
    const enum dmesh_status status = small(&shm, &barrier, rank == 2 ? 7 : 8);
    CHECK(status == DMESH_MISMATCH && (rank == 2 ? shm.culprit == 0 : shm.culprit == 2));
}

static void *thread_calls(void *rank) {
    run_calls((int)(intptr_t)rank);
    return NULL;
}

static void test_threads(void) {
    pthread_t threads[SIZE];
    make_regions();
    for (intptr_t rank = 0; rank < SIZE; rank++)
        CHECK(pthread_create(&threads[rank], NULL, thread_calls, (void *)rank) == 0);
    for (int rank = 0; rank < SIZE; rank++)
        pthread_join(threads[rank], NULL);
}

/* Forks one process per rank, and checks that all succeed. */
static void in_processes(int size, void (*run)(int rank)) {
    for (int rank = 0; rank < size; rank++) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(60);
            run(rank);
            _exit(0);
        }
    }
    for (int rank = 0; rank < size; rank++) {
        int status;
        CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static void test_processes(void) {
    make_regions();
    in_processes(SIZE, run_calls);
}

static void transfer(int rank) {
    struct dmesh_shm shm = group_of(rank, 2);
    for (size_t count = 1; count <= LARGE; count *= 10) {
        static int32_t data[LARGE];
        for (size_t n = 0; n < count; n++)
            data[n] = rank == 0 ? (int32_t)(n * count) : -1;
        struct dmesh_transfer moved;
        const struct dmesh_envelope described = {.order = count, .ndim = 1, .shape = {(int64_t)count}};
        if (rank == 1) {
            struct dmesh_envelope found;
            CHECK(dmesh_p2p_await(&shm, soon()) == DMESH_OK && dmesh_p2p_envelope(&shm, &found));
            CHECK(found.order == count && found.ndim == 1 && found.shape[0] == (int64_t)count);
        }
        dmesh_p2p_begin(&moved, count, data, 4 * count, &described);
        CHECK(dmesh_p2p_run(&shm, &moved, soon()) == DMESH_OK);
        for (size_t n = 0; n < count; n++)
            CHECK(data[n] == (int32_t)(n * count));
    }
}

static void test_p2p(void) {
    make_regions();
    in_processes(2, transfer);
}

/* A sender gives up while its array is read in place: the receiver must not report success. */
static void test_p2p_aborted_sender(void) {
    make_regions();
    struct dmesh_shm sender = group_of(0, 2), receiver = group_of(1, 2);
    static int32_t from[LARGE], into[LARGE];
    struct dmesh_transfer sent, received;
    const struct dmesh_envelope described = {.ndim = 0};
    dmesh_p2p_begin(&sent, 5, from, sizeof from, &described);
    sent.location.where = DMESH_IN_PROCESS;
    CHECK(dmesh_p2p_run(&sender, &sent, 0) == DMESH_PENDING);
    dmesh_p2p_begin(&received, 5, into, sizeof into, NULL);
    CHECK(dmesh_p2p_run(&receiver, &received, soon()) == DMESH_RESOLVE);
    CHECK(received.location.where == DMESH_IN_PROCESS);
    received.from = (const unsigned char *)from;
    dmesh_shm_abort(&sender);
    CHECK(dmesh_p2p_run(&receiver, &received, soon()) == DMESH_DISCONNECTED && receiver.culprit == 0);
}

/* A reduction over arrays in shared memory, in one step, ends soon after an abort, and goes on after a deadline. */
static void test_long_reductions(void) {
    enum { COUNT = 16 << 20 };
    make_regions();
    struct dmesh_shm shm = group_of(0, 1);
    int32_t *source = malloc(4 * COUNT), *target = calloc(COUNT, 4);
    CHECK(source && target);
    for (int n = 0; n < COUNT; n++)
        source[n] = 1;
    const struct dmesh_call call = sum_of(source, target, COUNT);
    struct dmesh_staged staged;
    int interruptions = 0;
    for (int aborts = 0; aborts < 2; aborts++) {
        dmesh_staged_init(&shm, &staged, &call, 3);
        staged.source.where = staged.target.where = DMESH_IN_SEGMENT;
        staged.peers[0] = (struct dmesh_peer_arrays){.source = call.source, .target = call.target};
        dmesh_staged_resolved(&shm, &staged);
        CHECK(staged.steps == 1 && dmesh_staged_is_exposed(&staged));
        if (aborts)
            dmesh_shm_abort(&shm);
        enum dmesh_status status;
        while ((status = dmesh_staged_run(&shm, &staged, dmesh_now())) == DMESH_PENDING)
            interruptions++;
        CHECK(status == (aborts ? DMESH_ABORTED : DMESH_OK));
        CHECK(target[0] == 1 && target[COUNT - 1] == !aborts);
        memset(target, 0, 4 * (size_t)COUNT);
    }
    CHECK(interruptions > 10);
    free(source);
    free(target);
}

/* ---- TCP ---------------------------------------------------------------------------------------------------- */

static int sockets[SIZE][SIZE];
static int noticed[2]; /* connects ranks 0 and 1 */

static void over_tcp(const struct dmesh_call *call, void *tcp) {
    dmesh_tcp_begin(tcp, call, 77, NULL);
    CHECK(dmesh_tcp_run(tcp, soon()) == DMESH_OK);
}

static void tcp_calls(int rank) {
    struct dmesh_tcp *tcp = dmesh_tcp_new(SIZE, rank, 1, 64, 64, 1, sockets[rank], -1);
    static int32_t input[LARGE], output[LARGE];
    CHECK(tcp);
    for (int n = 0; n < LARGE; n++)
        input[n] = (rank + 1) * n;
    for (size_t count = 1; count <= LARGE; count *= 10) {
        const struct dmesh_call call = sum_of(input, output, count);
        dmesh_tcp_begin(tcp, &call, count, NULL);
        CHECK(dmesh_tcp_run(tcp, soon()) == DMESH_OK);
        CHECK(output[count - 1] == 6 * (int32_t)(count - 1));
    }
    exchange_blocks(rank, over_tcp, tcp);
    const struct dmesh_call barrier = {.kind = DMESH_BARRIER};
    dmesh_tcp_begin(tcp, &barrier, 99, NULL);
    if (rank != 2) {
        CHECK(dmesh_tcp_run(tcp, soon()) == DMESH_DISCONNECTED && tcp->culprit == 2);
        char byte = 0; /* Its own end must not come before the other one has noticed that of rank 2. */
        CHECK(write(noticed[rank], &byte, 1) == 1 && read(noticed[rank], &byte, 1) == 1);
    }
    dmesh_tcp_free(tcp);
}

static void test_tcp(void) {
    pid_t children[SIZE];
    for (int one = 0; one < SIZE; one++)
        for (int other = 0; other <= one; other++) {
            int pair[2] = {-1, -1};
            CHECK(one == other || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
            sockets[one][other] = pair[0];
            sockets[other][one] = pair[1];
        }
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, noticed) == 0);
    for (int rank = 0; rank < SIZE; rank++) {
        CHECK((children[rank] = fork()) >= 0);
        if (children[rank] == 0) {
            alarm(60);
            for (int other = 0; other < SIZE; other++)
                for (int peer = 0; peer < SIZE; peer++)
                    if (other != rank && other != peer)
                        close(sockets[other][peer]);
            tcp_calls(rank);
            _exit(0);
        }
    }
    for (int one = 0; one < SIZE; one++)
        for (int other = 0; other < SIZE; other++)
            if (one != other)
                close(sockets[one][other]);
    for (int rank = 0; rank < SIZE; rank++) {
        int status;
        CHECK(waitpid(children[rank], &status, 0) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* ---- registered memory and kernels -------------------------------------------------------------------------- */

static void test_registered(void) {
    struct dmesh_registered table = {0};
    static unsigned char first[1000], again[1000];
    int owners[3];
    for (int n = 2; n >= 0; n--) {
        struct dmesh_mapping mapping = {.base = first + 300 * n, .at = {.nbytes = 200}, .owner = &owners[n]};
        memset(mapping.at.nonce, n, DMESH_NONCE);
        CHECK(dmesh_registered_add(&table, 1, mapping) == 0);
    }
    const struct dmesh_location found = dmesh_registered_locate(&table, first + 650, 50);
    CHECK(found.where == DMESH_IN_SEGMENT && found.offset == 50 && found.nonce[0] == 2);
    CHECK(dmesh_registered_locate(&table, first + 650, 151).where == DMESH_PRIVATE);
    CHECK(dmesh_registered_locate(&table, first + 250, 1).where == DMESH_PRIVATE);
    CHECK(dmesh_registered_resolve(&table, &found, 50) == NULL); /* it is not another process's */
    struct dmesh_mapping mapping = {.base = first, .at = {.nbytes = 100}, .owner = &owners[0]};
    memset(mapping.at.nonce, 2, DMESH_NONCE);
    CHECK(dmesh_registered_drop(&table, mapping.at.nonce) == &owners[2]);
    CHECK(dmesh_registered_add(&table, 0, mapping) == 0);
    mapping.base = again;
    mapping.owner = &owners[1];
    CHECK(dmesh_registered_add(&table, 0, mapping) == 0);
    CHECK(dmesh_registered_resolve(&table, &found, 50) == first + 50);
    CHECK(dmesh_registered_resolve(&table, &found, 51) == NULL);
    CHECK(dmesh_registered_drop(&table, mapping.at.nonce) == &owners[0]); /* the oldest goes first */
    CHECK(dmesh_registered_resolve(&table, &found, 50) == again + 50);
    dmesh_registered_free(&table);
}

static void test_kernels(void) {
    const double first[] = {1, 2, 3}, second[] = {10, 20, 30};
    double sum[3], mean[3];
    const void *inputs[] = {first, second};
    void *outputs[] = {sum, mean};
    dmesh_reduce(dmesh_kernel_for(DMESH_F64, DMESH_SUM, DMESH_ISA_BEST), inputs, 2, outputs, 2, 3, 0);
    CHECK(sum[2] == 33 && mean[2] == 33);
    dmesh_reduce(dmesh_kernel_for(DMESH_F64, DMESH_MEAN, DMESH_ISA_BASELINE), inputs, 2, &outputs[1], 1, 3, 1);
    CHECK(mean[0] == 5.5 && mean[2] == 16.5);
    CHECK(!dmesh_kernel_for(DMESH_F64, DMESH_BITWISE_AND, DMESH_ISA_BEST));
}

static const struct {
    const char *name;
    void (*run)(void);
} TESTS[] = {
    {"threads", test_threads},       {"processes", test_processes},
    {"p2p", test_p2p},               {"p2p_aborted_sender", test_p2p_aborted_sender},
    {"tcp", test_tcp},               {"long_reductions", test_long_reductions},
    {"registered", test_registered}, {"kernels", test_kernels},
};

int main(int argc, char **argv) {
    alarm(120);
    for (size_t n = 0; n < sizeof TESTS / sizeof *TESTS; n++)
        if (argc > 1 && strcmp(argv[1], TESTS[n].name) == 0) {
            TESTS[n].run();
            return 0;
        }
    fprintf(stderr, "no such test\n");
    return 2;
}
