/* Sums of rows of float16, float32 and float64, for the CPU that DMESH_TARGET says. Needs kernels_fp16.h.
 *
 * Element i of a block is added to lane i % GROUP, whatever the CPU's vectors are, so that all CPUs compute the same bits.
 * A lane adds as many elements as NumPy's do. Then lanes are added in pairs, the blocks in pairs, and the last lanes. */
enum {
    ROW_GROUP = 256,      /* bytes of the lanes: several vectors, for an addition takes cycles */
    ROW_PASSES = 16,      /* elements of a lane in a block */
    ROW_KEPT = 64,        /* bytes of the lanes that a block's sum keeps */
    ROW_LEVELS = 48,      /* a row has fewer than 2^48 blocks */
    ROW_AHEAD = 2 * 4096, /* bytes; the CPU's own prefetching stops at the end of each page */
    ROW_LINE = 64,
};

#define LANE_f32 KEEP
#define LANE_f64 KEEP
#define LANE_f16 f32_of_f16

/* IN is the type of the elements, SUM that of the lanes. */
#define ROW_SUMS_KERNEL(TYPE, IN, SUM)                                                                                 \
    enum { GROUP_##TYPE = ROW_GROUP / sizeof(SUM), KEPT_##TYPE = ROW_KEPT / sizeof(SUM) };                             \
                                                                                                                       \
    /* Adds a block, or less. */                                                                                       \
    static inline DMESH_TARGET void add_block_##TYPE(const IN *x, size_t count, SUM *sum) {                            \
        SUM a[GROUP_##TYPE];                                                                                           \
        for (size_t lane = 0; lane < GROUP_##TYPE; lane++)                                                             \
            a[lane] = 0;                                                                                               \
        for (; count >= GROUP_##TYPE; count -= GROUP_##TYPE, x += GROUP_##TYPE) {                                      \
            for (size_t at = 0; at < sizeof(IN) * GROUP_##TYPE; at += ROW_LINE)                                        \
                __builtin_prefetch((const void *)((uintptr_t)x + ROW_AHEAD + at));                                     \
            for (size_t lane = 0; lane < GROUP_##TYPE; lane++)                                                         \
                a[lane] += LANE_##TYPE(x[lane]);                                                                       \
        }                                                                                                              \
        for (size_t lane = 0; lane < count; lane++)                                                                    \
            a[lane] += LANE_##TYPE(x[lane]);                                                                           \
        for (size_t lane = 0; lane < KEPT_##TYPE; lane++)                                                              \
            sum[lane] = (a[lane] + a[lane + KEPT_##TYPE]) + (a[lane + 2 * KEPT_##TYPE] + a[lane + 3 * KEPT_##TYPE]);   \
    }                                                                                                                  \
                                                                                                                       \
    DMESH_TARGET static void row_sums_##TYPE(const void *rows, size_t count, size_t length, void *sums) {              \
        const size_t block = ROW_PASSES * GROUP_##TYPE;                                                                \
        const IN *x = rows;                                                                                            \
        for (size_t row = 0; row < count; row++) {                                                                     \
            SUM pairs[ROW_LEVELS][KEPT_##TYPE]; /* at level n the sum of 2^n blocks, if `blocks` has that bit */       \
            SUM sum[KEPT_##TYPE];                                                                                      \
            size_t left = length, blocks = 0, level;                                                                   \
            for (; left >= block; left -= block, x += block) {                                                         \
                add_block_##TYPE(x, block, sum);                                                                       \
                for (level = 0; blocks >> level & 1; level++)                                                          \
                    for (size_t lane = 0; lane < KEPT_##TYPE; lane++)                                                  \
                        sum[lane] += pairs[level][lane];                                                               \
                memcpy(pairs[level], sum, sizeof sum);                                                                 \
                blocks++;                                                                                              \
            }                                                                                                          \
            add_block_##TYPE(x, left, sum);                                                                            \
            x += left;                                                                                                 \
            for (level = 0; blocks >> level; level++)                                                                  \
                for (size_t lane = 0; lane < KEPT_##TYPE && blocks >> level & 1; lane++)                               \
                    sum[lane] += pairs[level][lane];                                                                   \
            for (size_t half = KEPT_##TYPE / 2; half; half /= 2)                                                       \
                for (size_t lane = 0; lane < half; lane++)                                                             \
                    sum[lane] += sum[lane + half];                                                                     \
            ((SUM *)sums)[row] = sum[0];                                                                               \
        }                                                                                                              \
    }
ROW_SUMS_KERNEL(f16, mem_u16, mem_f32)
ROW_SUMS_KERNEL(f32, mem_f32, mem_f32)
ROW_SUMS_KERNEL(f64, mem_f64, mem_f64)

#define ROW_SUMS [DMESH_F16] = row_sums_f16, [DMESH_F32] = row_sums_f32, [DMESH_F64] = row_sums_f64
