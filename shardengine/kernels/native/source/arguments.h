// What the library is handed: one structure per operation. library.py declares the same fields in the same order and
// compares the sizes. Pointers are to memory that the caller keeps alive for the call.
#pragma once
#include <stdint.h>

enum Type : int32_t { FP32, BF16, FP16, CODES };
enum Kind : int32_t { ADAM, SGD, LION };

struct UpdateArguments {
    void *weight;
    const void *gradient;
    void *average, *square;  // the first and the second moment, null where the rule has none
    float *average_scale, *square_scale;  // of moments in codes, else null
    int8_t *remainder;        // of a bf16 weight, null: none
    void *low;                // null: not wanted
    const float *factor;      // null: none
    const uint8_t *skip;      // null: never
    const int64_t *spans;     // rows (start, end, first)
    int64_t span_count;
    float rate, decay, l2, keep, take, keep_square, take_square, epsilon;
    int32_t kind, maximize, nesterov, first_step, weight_type, gradient_type, low_type, state_type;
    int32_t stochastic, state_stochastic;
    uint32_t key_0, key_1, state_key_0, state_key_1;
};

// A slice of a parameter, `count` elements from its element `offset` on, as rows that lie together: factored.py.
struct RowArguments {
    const float *values;
    int64_t count, offset, rows, columns;  // the last two: of one matrix
    int64_t all_rows;                      // those of all matrices
    double *sums, *lacks;                  // of all rows, then of all columns

    int64_t first_row() const { return offset / columns; }
    int64_t last_row() const { return (offset + count + columns - 1) / columns; }
    int64_t first_matrix() const { return first_row() / rows; }
    int64_t last_matrix() const { return (last_row() + rows - 1) / rows; }
    // The elements of a row, in `values`, and the column of the first one.
    int64_t from(int64_t row) const { return row * columns > offset ? row * columns - offset : 0; }
    int64_t to(int64_t row) const { return (row + 1) * columns < offset + count ? (row + 1) * columns - offset : count; }
    int64_t column(int64_t row) const { return row * columns > offset ? 0 : offset - row * columns; }
};

// What is made of such a slice with the scales of all rows, then of all columns.
struct Direction {
    const double *scales;
    double most;
    float *out;  // null: not wanted
    float keep, rate;
    int32_t moves;
};

struct SumArguments {
    const void *const *terms;
    const int32_t *types;  // of the terms
    int64_t count, length;
    const void *total;  // null: none
    void *out;
    uint8_t *nonfinite;  // null: not asked
    int32_t total_type, out_type, rounded_type, reduce_type;
    float divisor;
};

// Tensors of one type that lie in `out`, between zeros or, where they are added, what is there.
struct CopyArguments {
    const int64_t *addresses, *starts, *lengths;  // of the tensors, ascending
    int64_t count, length;                        // of tensors, of `out`
    void *out;
    int32_t type, out_type;
    float scale;
    int32_t adds, streams;
};

static constexpr int32_t LEVELS_OF_INT4 = 7;

// Numbers and what is made of them in fewer bits.
struct CodingArguments {
    void *wide;           // the numbers: only read where they are compressed
    void *codes;          // halves, or integers of `levels` to either side
    float *scales;        // of blocks of integers
    const float *whole;   // decompressed numbers are taken from these, what is left is divided; null: they are not
    int64_t *saturated;   // null: not counted
    int64_t count, block, first;
    int32_t wide_type, code_type, levels;  // levels: 0 for halves
    float divisor;
    int32_t noisy;
    uint32_t key_0, key_1;
};
