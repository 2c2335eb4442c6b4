#include "reduce.h"

#include "copy.h"
#include "kernels.h"

#include <stdatomic.h>

#ifdef __x86_64__
#include <cpuid.h>
#endif

/* An accumulator and its result fit into the smallest first-level cache beside the parts of four inputs. */
enum { BLOCK = 4096, LINE = 64 };

static dmesh_kernel_table *table_for_this_cpu(void) {
#ifdef __x86_64__
    /* Asks the CPU directly: compilers' builtins do not know all features, or lack their library. */
    const unsigned wanted = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & wanted) == wanted) {
        /* The operating system must save the wide registers, too. */
        const unsigned saved = 1 << 1 | 1 << 2;
        __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        if ((a & saved) == saved && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2))
            return &dmesh_kernels_avx2;
    }
#endif
    return &dmesh_kernels_baseline;
}

static dmesh_kernel_table *table_of(enum dmesh_isa isa) {
    if (isa == DMESH_ISA_BASELINE)
        return &dmesh_kernels_baseline;
    /* Asked once, because a virtual machine takes microseconds to answer; twice does no harm. */
    static dmesh_kernel_table *_Atomic known;
    dmesh_kernel_table *table = atomic_load_explicit(&known, memory_order_relaxed);
    if (!table) {
        table = table_for_this_cpu();
        atomic_store_explicit(&known, table, memory_order_relaxed);
    }
    return table;
}

const dmesh_kernel *dmesh_kernel_for(enum dmesh_dtype dtype, enum dmesh_op op, enum dmesh_isa isa) {
    if ((unsigned)dtype >= DMESH_DTYPES || (unsigned)op >= DMESH_OPS)
        return NULL;
    const dmesh_kernel *kernel = &table_of(isa)->folds[dtype][op];
    return kernel->item ? kernel : NULL;
}

dmesh_row_sums dmesh_row_sums_for(enum dmesh_dtype dtype, enum dmesh_isa isa) {
    return (unsigned)dtype < DMESH_DTYPES ? table_of(isa)->row_sums[dtype] : NULL;
}

size_t dmesh_kernel_input_size(const dmesh_kernel *kernel) { return (size_t)kernel->item * kernel->lanes; }

size_t dmesh_kernel_output_size(const dmesh_kernel *kernel) { return (size_t)kernel->result * kernel->lanes; }

static void give(void *to, const void *from, size_t size, bool stream) {
    if (stream) {
        dmesh_stream_part(to, from, size);
    } else if (to != from) {
        dmesh_copy(to, from, size);
    }
}

/* Folds some elements of all inputs, from element `start` on. Whatever `out` is, it is written after all of them
 * are read, or each of its elements after that of all inputs. */
static void fold(const dmesh_kernel *kernel, const void *const *inputs, unsigned ways, size_t start, size_t count,
                 void *out) {
    _Alignas(LINE) unsigned char accumulator[BLOCK];
    const void *in[DMESH_FUSED_WAYS];
    const size_t offset = start * kernel->item;
    unsigned done = 0;

    if (kernel->same_type || (ways <= DMESH_FUSED_WAYS && ways > 1 && kernel->fused[0])) {
        unsigned held = 0;
        while (done < ways) {
            while (held < DMESH_FUSED_WAYS && done < ways)
                in[held++] = (const unsigned char *)inputs[done++] + offset;
            void *target = done == ways ? out : accumulator;
            kernel->fused[held - 2](target, in, count, ways);
            in[0] = target;
            held = 1;
        }
        return;
    }
    for (; done < ways; done++) {
        in[0] = (const unsigned char *)inputs[done] + offset;
        (done ? kernel->more : kernel->first)(accumulator, in, count, ways);
    }
    in[0] = accumulator;
    kernel->finish(out, in, count, ways);
}

void dmesh_reduce(const dmesh_kernel *kernel, const void *const *inputs, unsigned ways, void *const *outputs,
                  unsigned outs, size_t count, int stream) {
    count *= kernel->lanes;
    if (ways == 1 && kernel->single_is_copy) {
        for (unsigned out = 0; out < outs; out++)
            give(outputs[out], inputs[0], count * kernel->item, stream);
    } else if (outs == 1 && !stream && ways > 1 && ways <= DMESH_FUSED_WAYS && kernel->fused[ways - 2]) {
        kernel->fused[ways - 2](outputs[0], inputs, count, ways);
    } else {
        _Alignas(LINE) unsigned char result[BLOCK];
        const size_t widest = kernel->accumulator > kernel->result ? kernel->accumulator : kernel->result;
        size_t block = BLOCK / widest;
        /* The blocks of what is streamed begin and end with whole lines, if the array can be cut there. */
        size_t part = stream ? -(uintptr_t)outputs[0] % LINE / kernel->result : 0;
        part = part ? part : block;
        for (size_t start = 0; start < count; start += part, part = block) {
            part = count - start < part ? count - start : part;
            const size_t offset = start * kernel->result, size = part * kernel->result;
            void *from = stream ? result : (unsigned char *)outputs[0] + offset;
            fold(kernel, inputs, ways, start, part, from);
            for (unsigned out = stream ? 0 : 1; out < outs; out++)
                give((unsigned char *)outputs[out] + offset, from, size, stream);
        }
    }
    if (stream)
        dmesh_stream_end();
}
