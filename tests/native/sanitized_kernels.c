/* Runs every kernel over memory that ends where the arrays end, for the address and undefined behaviour sanitizers.
 *
 * The values are random bits, which are right nowhere in particular: that they are reduced right is tested elsewhere.
 * Here no kernel may touch a byte beside its arrays, nor do what C leaves undefined. */
#include "copy.h"
#include "reduce.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WAYS = 6, MOST_OUTS = 3 };

static const size_t counts[] = {0, 1, 2, 7, 8, 9, 15, 33, 64, 127, 513, 1030};

static uint64_t state = 88172645463325252u;

static unsigned char random_byte(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned char)(state >> 24);
}

/* An array that starts at an odd address, and ends where the allocation ends. */
struct array {
    unsigned char *memory;
    unsigned char *content;
};

static struct array make(size_t size) {
    struct array made;
    made.memory = malloc(size + 1);
    if (!made.memory) {
        abort();
    }
    made.content = made.memory + 1;
    for (size_t i = 0; i < size; i++) {
        made.content[i] = random_byte();
    }
    return made;
}

static void check(const dmesh_kernel *kernel, unsigned ways, unsigned outs, size_t count, unsigned flags,
                  bool in_place) {
    struct array in[MOST_WAYS], out[MOST_OUTS];
    const void *inputs[MOST_WAYS];
    void *outputs[MOST_OUTS];
    const size_t size = count * dmesh_kernel_output_size(kernel);
    for (unsigned i = 0; i < ways; i++) {
        in[i] = make(count * dmesh_kernel_input_size(kernel));
        inputs[i] = in[i].content;
    }
    for (unsigned i = 0; i < outs; i++) {
        out[i] = make(size);
        outputs[i] = in_place && i < ways ? in[ways - 1 - i].content : out[i].content;
    }
    dmesh_reduce(kernel, inputs, ways, outputs, outs, count, flags);
    for (unsigned i = 1; i < outs; i++) {
        if (memcmp(outputs[0], outputs[i], size) != 0) {
            fprintf(stderr, "outputs differ\n");
            exit(1);
        }
    }
    for (unsigned i = 0; i < ways; i++) {
        free(in[i].memory);
    }
    for (unsigned i = 0; i < outs; i++) {
        free(out[i].memory);
    }
}

int main(void) {
    unsigned long runs = 0;
    for (int dtype = -1; dtype <= DMESH_DTYPES; dtype++) {
        for (int op = -1; op <= DMESH_OPS; op++) {
            for (int isa = DMESH_ISA_BEST; isa <= DMESH_ISA_BASELINE; isa++) {
                const dmesh_kernel *kernel = dmesh_kernel_for((enum dmesh_dtype)dtype, (enum dmesh_op)op, isa);
                if (!kernel) {
                    continue;
                }
                const bool in_place = dmesh_kernel_input_size(kernel) == dmesh_kernel_output_size(kernel);
                for (unsigned ways = 1; ways <= MOST_WAYS; ways++) {
                    for (unsigned outs = 1; outs <= MOST_OUTS; outs++) {
                        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                            check(kernel, ways, outs, counts[i], 0, false);
                            check(kernel, ways, outs, counts[i], 1, in_place);
                            check(kernel, ways, outs, counts[i], 0, in_place);
                            runs += 3;
                        }
                    }
                }
            }
        }
    }
    for (int isa = DMESH_ISA_BEST; isa <= DMESH_ISA_BASELINE; isa++) {
        for (int dtype = DMESH_F16; dtype <= DMESH_F64; dtype++) {
            const dmesh_row_sums add = dmesh_row_sums_for((enum dmesh_dtype)dtype, (enum dmesh_isa)isa);
            const size_t item = dtype == DMESH_F16 ? 2 : dtype == DMESH_F32 ? 4 : 8;
            for (size_t length = 0; add && length < 4000; length = length < 70 ? length + 1 : 2 * length - 60) {
                for (size_t rows = 1; rows <= 3; rows++) {
                    struct array from = make(rows * length * item), to = make(rows * (item < 4 ? 4 : item));
                    add(from.content, rows, length, to.content);
                    free(from.memory);
                    free(to.memory);
                    runs++;
                }
            }
        }
    }
    for (size_t size = 0; size < 300; size++) {
        struct array to = make(size), from = make(size);
        (size % 2 ? dmesh_copy : dmesh_copy_stream)(to.content, from.content, size);
        runs += memcmp(to.content, from.content, size) == 0;
        free(to.memory);
        free(from.memory);
    }
    printf("%lu runs\n", runs);
    return 0;
}
