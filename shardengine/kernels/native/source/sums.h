// Sums over ranks and sums of squares, [Note: One arithmetic] and [Note: Sum of squares] of reference.py: in the
// namespace of one instruction set.

constexpr int64_t SUM_TILE = 256;
constexpr int MOST_LEVELS = 32;

FUNCTION void add(const float *a, const float *b, float *__restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}

// In place: what is left of fp32 values after a trip through `type`.
FUNCTION void round_to(int32_t type, float *values, int64_t count) {
    uint16_t halves[SUM_TILE];
    if (type == FP32) return;
    narrow(type, values, halves, 0, count);
    widened(type, halves, 0, values, count);
}

// The tree over ranks as a stack: after term i as many pairs are closed as i has ones at its end; an odd one out waits.
// room: two tiles per level. The result lies in a term or in the room.
FUNCTION const float *tree_of_terms(const SumArguments &a, int64_t at, float (*room)[2][SUM_TILE], int64_t count) {
    const float *stack[MOST_LEVELS];
    int depth = 0;
    for (int64_t i = 0; i < a.count; i++) {
        stack[depth] = widened(a.types[i], a.terms[i], at, room[depth][0], count);
        depth++;
        int64_t closed = i + 1 < a.count ? i : INT64_MAX;  // after the last term all that wait are added
        for (; (closed & 1) && depth > 1; closed >>= 1) {
            float *sum = room[depth - 2][1];
            if (stack[depth - 2] == sum)
                for (int64_t j = 0; j < count; j++) sum[j] = sum[j] + stack[depth - 1][j];
            else
                add(stack[depth - 2], stack[depth - 1], sum, count);
            round_to(a.reduce_type, sum, count);
            stack[depth - 2] = sum;
            depth--;
        }
    }
    return stack[0];
}

template <bool with_total, bool divided>
FUNCTION void finish(const float *sum, const float *total, float divisor, float *out, int64_t count) {
    // each element is read before it is written, and `out` may be what is read: nothing is carried between elements
    EACH_ALONE
    for (int64_t i = 0; i < count; i++) {
        float value = sum[i];
        if (with_total) value = total[i] + value;
        if (divided) value = value / divisor;
        out[i] = value;
    }
}

FUNCTION void ordered_sum(const SumArguments &a, int64_t begin, int64_t end) {
    float room[MOST_LEVELS][2][SUM_TILE], wide_total[SUM_TILE], result[SUM_TILE];
    bool finite = true;
    for (int64_t at = begin; at < end; at += SUM_TILE) {
        const int64_t count = end - at < SUM_TILE ? end - at : SUM_TILE;
        const float *sum = tree_of_terms(a, at, room, count);
        float *place = a.out_type == FP32 ? static_cast<float *>(a.out) + at : result;
        if (a.total) {
            const float *total = widened(a.total_type, a.total, at, wide_total, count);
            if (a.divisor != 1.0f)
                finish<true, true>(sum, total, a.divisor, place, count);
            else
                finish<true, false>(sum, total, 1.0f, place, count);
        } else if (a.divisor != 1.0f) {
            finish<false, true>(sum, nullptr, a.divisor, place, count);
        } else if (place != sum) {
            finish<false, false>(sum, nullptr, 1.0f, place, count);
        }
        if (a.rounded_type != a.out_type) round_to(a.rounded_type, place, count);
        if (a.out_type != FP32) narrow(a.out_type, place, a.out, at, count);
        if (a.nonfinite) finite = finite && all_finite(a.out_type, a.out, at, count);
    }
    if (!finite) __atomic_store_n(a.nonfinite, 1, __ATOMIC_RELAXED);
}

constexpr int64_t LANES = 4096, ROWS_AT_ONCE = 4;

// fp32, or bf16, which widens on the fly.
INLINE double wide_of(float value) { return value; }
INLINE double wide_of(uint16_t half) { return float_of_bf16(half); }

template <class Element>
APART void add_squares(const Element *__restrict row, double *__restrict sums, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const double wide = wide_of(row[i]);
        sums[i] = sums[i] + wide * wide;
    }
}

// What ROWS_AT_ONCE calls of add_squares do, with a quarter of the traffic to the sums.
template <class Element>
APART void add_squares_of_rows(const Element *a, int64_t stride, double *__restrict sums, int64_t count) {
    const Element *b = a + stride, *c = b + stride, *d = c + stride;
    for (int64_t i = 0; i < count; i++) {
        const double wide_a = wide_of(a[i]), wide_b = wide_of(b[i]), wide_c = wide_of(c[i]), wide_d = wide_of(d[i]);
        double sum = sums[i];
        sum = sum + wide_a * wide_a;
        sum = sum + wide_b * wide_b;
        sum = sum + wide_c * wide_c;
        sums[i] = sum + wide_d * wide_d;
    }
}

FUNCTION void add_values(const double *__restrict values, double *__restrict sums, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = sums[i] + values[i];
}

FUNCTION void add_pairs(const double *__restrict from, double *__restrict to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = from[2 * i] + from[2 * i + 1];
}

// Neighbours added pair by pair; count: a power of two, at most LANES.
FUNCTION double tree_of_lanes(const double *lanes, int64_t count) {
    double room[2][LANES / 2];
    for (int turn = 0; count > 1; turn ^= 1) {
        count /= 2;
        add_pairs(lanes, room[turn], count);
        lanes = room[turn];
    }
    return lanes[0];
}

// How many lanes `count` elements need, a power of two: lanes that are all zeros add nothing.
FUNCTION int64_t cleared_lanes(double *sums, int64_t count) {
    int64_t lanes = 1;
    while (lanes < count && lanes < LANES) lanes *= 2;
    for (int64_t i = 0; i < lanes; i++) sums[i] = 0.0;
    return lanes;
}

template <class Element> FUNCTION double squares_of_elements(const Element *elements, int64_t count) {
    double sums[LANES];
    const int64_t lanes = cleared_lanes(sums, count);
    int64_t at = 0;
    for (; at + ROWS_AT_ONCE * LANES <= count; at += ROWS_AT_ONCE * LANES)
        add_squares_of_rows(elements + at, LANES, sums, LANES);
    for (; at < count; at += lanes) add_squares(elements + at, sums, count - at < lanes ? count - at : lanes);
    return tree_of_lanes(sums, lanes);
}

FUNCTION double squares_of_block(const void *memory, int32_t type, int64_t count) {
    if (type == BF16) return squares_of_elements(static_cast<const uint16_t *>(memory), count);
    if (type == FP32) return squares_of_elements(static_cast<const float *>(memory), count);
    float room[BLOCK];
    widen_fp16(static_cast<const uint16_t *>(memory), room, count);
    return squares_of_elements(room, count);
}

FUNCTION double sum_of_blocks(const double *values, int64_t count) {
    double sums[LANES];
    const int64_t lanes = cleared_lanes(sums, count);
    for (int64_t at = 0; at < count; at += lanes)
        add_values(values + at, sums, count - at < lanes ? count - at : lanes);
    return tree_of_lanes(sums, lanes);
}
