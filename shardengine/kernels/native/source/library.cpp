// The C interface: which instruction set, how the work is shared, and nothing of the arithmetic, which is in the files
// that bodies.h names and is compiled once per instruction set. No library but libc and libm's square root.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "arguments.h"
#include "checksums.h"
#include "threads.h"

#if defined(__x86_64__)  // immintrin.h alone would take as long to compile as all of this
typedef float FourFloats __attribute__((vector_size(16)));
typedef float EightFloats __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
typedef int EightInts __attribute__((vector_size(32)));
typedef short SixteenShorts __attribute__((vector_size(32)));
typedef char Bytes __attribute__((vector_size(32)));
typedef short EightHalves __attribute__((vector_size(16)));
#if defined(__clang__)
typedef _Float16 EightNumbers __attribute__((vector_size(16)));
#define WIDENED(halves) __builtin_convertvector((EightNumbers)(halves), EightFloats)
#else
#define WIDENED(halves) __builtin_ia32_vcvtph2ps256(halves)
#endif
#endif

#if defined(__clang__)  // says of a loop that no element needs another one's result
#define EACH_ALONE _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH_ALONE _Pragma("GCC ivdep")
#endif

static constexpr int64_t BLOCK = 1 << 16;  // elements of a block of a sum of squares
static constexpr int64_t STRIPE = 512;     // columns whose sums are made together

struct Bodies {
    void (*update)(const UpdateArguments &, int64_t, int64_t);
    void (*ordered_sum)(const SumArguments &, int64_t, int64_t);
    double (*squares_of_block)(const void *, int32_t, int64_t);
    double (*sum_of_blocks)(const double *, int64_t);
    void (*squares_of_rows)(const RowArguments &, int64_t, int64_t);
    void (*squares_of_columns)(const RowArguments &, int64_t, int64_t);
    void (*exact_squares)(const float *, int64_t, double *, double *);
    void (*direction_of_rows)(const RowArguments &, const Direction &, double *, int64_t, int64_t);
    void (*flatten)(const CopyArguments &, int64_t, int64_t);
    void (*compress_floats)(const CodingArguments &, int64_t, int64_t);
    void (*compress_blocks)(const CodingArguments &, int64_t, int64_t);
    void (*decompress_floats)(const CodingArguments &, int64_t, int64_t);
    void (*decompress_blocks)(const CodingArguments &, int64_t, int64_t);
};

#define BODY scalar
#define TARGET
#include "bodies.h"

#if defined(__x86_64__)
#define WITH_F16C
#define WITH_PACKS
#define BODY avx2
#define TARGET __attribute__((target("avx2,f16c")))
#include "bodies.h"
#undef WITH_PACKS
#define BODY avx512
#define TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#include "bodies.h"
#elif defined(__aarch64__)
#define WITH_NEON
#define BODY neon
#define TARGET
#include "bodies.h"
#endif

struct InstructionSet {
    const char *name;
    bool (*is_there)();
    const Bodies *bodies;
};

static bool always() { return true; }

#if defined(__x86_64__)
static bool has_avx2() {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The best last.
static const InstructionSet SETS[] = {
    {"scalar", always, &scalar::bodies},
#if defined(__x86_64__)
    {"avx2", has_avx2, &avx2::bodies},
    {"avx512", has_avx512, &avx512::bodies},
#elif defined(__aarch64__)
    {"neon", always, &neon::bodies},
#endif
};
static constexpr int SET_COUNT = sizeof SETS / sizeof SETS[0];

static constexpr int64_t LEAST = 1 << 18;  // elements per thread: starting one takes as long as a tenth of them
static constexpr int64_t LINE = 64;        // elements that no two threads share

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char *shardengine_key() { return SHARDENGINE_KEY; }

// Of the structures, in units of 8 bytes, each in 8 bits.
EXPORTED int64_t shardengine_sizes() {
    constexpr size_t sizes[] = {sizeof(UpdateArguments), sizeof(SumArguments), sizeof(RowArguments), sizeof(Direction),
                                sizeof(CopyArguments), sizeof(CodingArguments)};
    int64_t all = 0;
    for (const size_t size : sizes) all = all << 8 | static_cast<int64_t>(size / 8);
    return all;
}

// The number of the instruction set called `name`; of the best one that this processor has where it is empty.
// -1: not in this library, -2: this processor lacks it.
EXPORTED int shardengine_instruction_set(const char *name) {
    for (int i = SET_COUNT - 1; i >= 0; i--) {
        if (!*name && SETS[i].is_there()) return i;
        if (!strcmp(name, SETS[i].name)) return SETS[i].is_there() ? i : -2;
    }
    return -1;
}

// Whether the CRC-32 of this instruction set is faster than a table's.
EXPORTED int shardengine_fast_crc32(int set) {
#if defined(__x86_64__)
    return set > 0 && __builtin_cpu_supports("pclmul");
#else
    return set < 0;
#endif
}

// The CRC-32 of what had the CRC-32 `value`, followed by `count` bytes.
EXPORTED uint32_t shardengine_crc32(int set, uint32_t value, const void *memory, int64_t count) {
    const uint8_t *bytes = static_cast<const uint8_t *>(memory);
#if defined(__x86_64__)
    if (shardengine_fast_crc32(set)) return ~crc_of_lanes(~value, bytes, count);
#endif
    (void)set;
    return ~crc_of_bytes(~value, bytes, count);
}

EXPORTED void shardengine_update(int set, int threads, const UpdateArguments *arguments) {
    if (arguments->skip && *arguments->skip) return;
    int64_t elements = 0;
    for (int64_t i = 0; i < arguments->span_count; i++) {
        const int64_t length = arguments->spans[3 * i + 1] - arguments->spans[3 * i];
        elements += length > 0 ? length : 0;
    }
    in_parallel(elements, LINE, LEAST, threads, [&](int64_t begin, int64_t end) {
        SETS[set].bodies->update(*arguments, begin, end);
    });
}

EXPORTED void shardengine_ordered_sum(int set, int threads, const SumArguments *arguments) {
    in_parallel(arguments->length, LINE, LEAST, threads, [&](int64_t begin, int64_t end) {
        SETS[set].bodies->ordered_sum(*arguments, begin, end);
    });
}

// -1 where there is no memory for the sums of the blocks.
EXPORTED double shardengine_sum_of_squares(int set, int threads, const void *values, int32_t type, int64_t count) {
    const Bodies &bodies = *SETS[set].bodies;
    const char *bytes = static_cast<const char *>(values);
    const int64_t size = type == FP32 ? 4 : 2, blocks = (count + BLOCK - 1) / BLOCK;
    if (blocks < 2) return count ? bodies.squares_of_block(values, type, count) : 0.0;
    double *sums = static_cast<double *>(malloc(sizeof(double) * static_cast<size_t>(blocks)));
    if (!sums) return -1.0;
    in_parallel(blocks, 1, LEAST / BLOCK, threads, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) {
            const int64_t from = block * BLOCK, length = count - from < BLOCK ? count - from : BLOCK;
            sums[block] = bodies.squares_of_block(bytes + from * size, type, length);
        }
    });
    const double result = bodies.sum_of_blocks(sums, blocks);
    free(sums);
    return result;
}

// An exact sum to which threads add, in any order.
struct ExactSum {
    double total = 0.0, lack = 0.0;
    bool busy = false;

    void add(double value, double left) {
        while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {
        }
        const double sum = total + value, taken = sum - total;
        lack = lack + left + ((total - (sum - taken)) + (value - taken));
        total = sum;
        __atomic_clear(&busy, __ATOMIC_RELEASE);
    }

    void give(double *sum) const {
        sum[0] = total + lack;
        sum[1] = lack - (sum[0] - total);
    }
};

static int64_t at_least_one(int64_t count) { return count > 1 ? count : 1; }

// sums and lacks: zeros.
EXPORTED void shardengine_squares(int set, int threads, const RowArguments *arguments) {
    const RowArguments &a = *arguments;
    const Bodies &bodies = *SETS[set].bodies;
    const int64_t first = a.first_row(), stripes = (a.columns + STRIPE - 1) / STRIPE;
    const int64_t width = a.columns < STRIPE ? a.columns : STRIPE;
    in_parallel(a.last_row() - first, 1, at_least_one(LEAST / a.columns), threads, [&](int64_t begin, int64_t end) {
        bodies.squares_of_rows(a, first + begin, first + end);
    });
    const int64_t units = (a.last_matrix() - a.first_matrix()) * stripes;
    in_parallel(units, 1, at_least_one(LEAST / (width * a.rows)), threads, [&](int64_t begin, int64_t end) {
        bodies.squares_of_columns(a, begin, end);
    });
}

EXPORTED void shardengine_exact_squares(int set, int threads, const float *values, int64_t count, double *out) {
    ExactSum whole;
    in_parallel(count, LINE, LEAST, threads, [&](int64_t begin, int64_t end) {
        double sum, left;
        SETS[set].bodies->exact_squares(values + begin, end - begin, &sum, &left);
        whole.add(sum, left);
    });
    whole.give(out);
}

// sum: of the direction's squares, or null.
EXPORTED void shardengine_direction(
    int set, int threads, const RowArguments *arguments, const Direction *direction, double *sum
) {
    ExactSum whole;
    const int64_t first = arguments->first_row(), least = at_least_one(LEAST / arguments->columns);
    in_parallel(arguments->last_row() - first, 1, least, threads, [&](int64_t begin, int64_t end) {
        double own[2] = {0.0, 0.0};
        double *place = sum ? own : nullptr;
        SETS[set].bodies->direction_of_rows(*arguments, *direction, place, first + begin, first + end);
        if (sum) whole.add(own[0], own[1]);
    });
    if (sum) whole.give(sum);
}

EXPORTED void shardengine_flatten(int set, int threads, const CopyArguments *arguments) {
    in_parallel(arguments->length, LINE, LEAST, threads, [&](int64_t begin, int64_t end) {
        SETS[set].bodies->flatten(*arguments, begin, end);
    });
}

// In pieces of elements, or of blocks where there are any.
using CodingBody = void (*)(const CodingArguments &, int64_t, int64_t);

static void in_pieces(int threads, const CodingArguments &a, CodingBody of_floats, CodingBody of_blocks) {
    const auto blocks = [&](int64_t begin, int64_t end) { of_blocks(a, begin, end); };
    const auto elements = [&](int64_t begin, int64_t end) { of_floats(a, begin, end); };
    if (!a.levels) {
        in_parallel(a.count, LINE, LEAST, threads, elements);
        return;
    }
    const int64_t granule = at_least_one(LINE * 2 / a.block);  // 64 bytes of int4
    in_parallel((a.count + a.block - 1) / a.block, granule, at_least_one(LEAST / a.block), threads, blocks);
}

EXPORTED void shardengine_compress(int set, int threads, const CodingArguments *arguments) {
    const Bodies &bodies = *SETS[set].bodies;
    in_pieces(threads, *arguments, bodies.compress_floats, bodies.compress_blocks);
}

EXPORTED void shardengine_decompress(int set, int threads, const CodingArguments *arguments) {
    const Bodies &bodies = *SETS[set].bodies;
    in_pieces(threads, *arguments, bodies.decompress_floats, bodies.decompress_blocks);
}
