// Sums of squares over rows and columns, [Note: Exact sums] of factored.py, and directions: in the namespace of one
// instruction set. Rows and columns are those of [Note: Rows in memory] there.

constexpr int64_t EXACT_LANES = 16;

INLINE void add_exactly(double value, double &total, double &lack) {
    const double sum = total + value, taken = sum - total;
    lack = lack + ((total - (sum - taken)) + (value - taken));
    total = sum;
}

// The sum and what it lacks, as two numbers of which the first is the sum's rounded value.
INLINE void settle(double total, double lack, double &sum, double &left) {
    sum = total + lack;
    left = lack - (sum - total);
}

struct ExactLanes {
    double total[EXACT_LANES], lack[EXACT_LANES];
};

FUNCTION void clear(ExactLanes &lanes) {
    for (int64_t j = 0; j < EXACT_LANES; j++) lanes.total[j] = lanes.lack[j] = 0.0;
}

FUNCTION void add_squares_exactly(const float *__restrict values, int64_t count, ExactLanes &__restrict lanes) {
    double total[EXACT_LANES], lack[EXACT_LANES];
    for (int64_t j = 0; j < EXACT_LANES; j++) total[j] = lanes.total[j], lack[j] = lanes.lack[j];
    int64_t i = 0;
    for (; i + EXACT_LANES <= count; i += EXACT_LANES)
        for (int64_t j = 0; j < EXACT_LANES; j++) {
            const double wide = values[i + j];
            add_exactly(wide * wide, total[j], lack[j]);
        }
    for (int64_t j = 0; i + j < count; j++) {
        const double wide = values[i + j];
        add_exactly(wide * wide, total[j], lack[j]);
    }
    for (int64_t j = 0; j < EXACT_LANES; j++) lanes.total[j] = total[j], lanes.lack[j] = lack[j];
}

FUNCTION void sum_of_lanes(const ExactLanes &lanes, double &sum, double &left) {
    double total = 0.0, lack = 0.0;
    for (int64_t j = 0; j < EXACT_LANES; j++) {
        add_exactly(lanes.total[j], total, lack);
        lack = lack + lanes.lack[j];
    }
    settle(total, lack, sum, left);
}

FUNCTION void exact_squares(const float *values, int64_t count, double *sum, double *left) {
    ExactLanes lanes;
    clear(lanes);
    add_squares_exactly(values, count, lanes);
    sum_of_lanes(lanes, *sum, *left);
}

// Rows [begin, end), counted over all matrices.
FUNCTION void squares_of_rows(const RowArguments &a, int64_t begin, int64_t end) {
    if (a.columns == 1) {
        for (int64_t row = begin; row < end; row++) {
            const double wide = a.values[row - a.offset];
            a.sums[row] = wide * wide;
        }
        return;
    }
    for (int64_t row = begin; row < end; row++)
        exact_squares(a.values + a.from(row), a.to(row) - a.from(row), a.sums + row, a.lacks + row);
}

APART void add_row_exactly(
    const float *__restrict values, double *__restrict total, double *__restrict lack, int64_t count
) {
    for (int64_t j = 0; j < count; j++) {
        const double wide = values[j];
        add_exactly(wide * wide, total[j], lack[j]);
    }
}

// Stripes [begin, end) of columns, counted over the matrices of which there are elements.
FUNCTION void squares_of_columns(const RowArguments &a, int64_t begin, int64_t end) {
    double total[STRIPE], lack[STRIPE];
    for (int64_t stripe = begin; stripe < end; stripe++) {
        const int64_t stripes = (a.columns + STRIPE - 1) / STRIPE, matrix = a.first_matrix() + stripe / stripes;
        const int64_t left = stripe % stripes * STRIPE, place = a.all_rows + matrix * a.columns;
        const int64_t right = left + STRIPE < a.columns ? left + STRIPE : a.columns;
        int64_t row = matrix * a.rows, last = row + a.rows;
        row = row > a.first_row() ? row : a.first_row();
        last = last < a.last_row() ? last : a.last_row();
        if (a.columns == 1) {
            exact_squares(a.values + a.from(row), a.to(last - 1) - a.from(row), a.sums + place, a.lacks + place);
            continue;
        }
        for (int64_t j = 0; j < right - left; j++) total[j] = lack[j] = 0.0;
        for (; row < last; row++) {
            const int64_t from = a.from(row), to = a.to(row), start = a.column(row);  // of elements, and their column
            const int64_t skipped = start < left ? left - start : 0, end_here = right - start;
            const int64_t count = (to - from < end_here ? to - from : end_here) - skipped;
            if (count > 0) {
                const int64_t lane = start + skipped - left;
                add_row_exactly(a.values + from + skipped, total + lane, lack + lane, count);
            }
        }
        for (int64_t j = 0; j < right - left; j++)
            settle(total[j], lack[j], a.sums[place + left + j], a.lacks[place + left + j]);
    }
}

INLINE float scaled(float value, double scale, double most) {
    scale = scale > most ? most : scale;
    return static_cast<float>(value * scale);
}

APART void scale_row(
    const float *__restrict values, double of_row, const double *__restrict of_columns, double most,
    float *__restrict out, int64_t count
) {
    for (int64_t j = 0; j < count; j++) out[j] = scaled(values[j], of_row * of_columns[j], most);
}

APART void scale_column(
    const float *__restrict values, const double *__restrict of_rows, double of_column, double most,
    float *__restrict out, int64_t count
) {
    for (int64_t j = 0; j < count; j++) out[j] = scaled(values[j], of_rows[j] * of_column, most);
}

FUNCTION void move_along(const float *__restrict direction, float keep, float rate, float *__restrict out, int64_t count) {
    for (int64_t j = 0; j < count; j++) out[j] = out[j] * keep - direction[j] * rate;
}

// Of rows [begin, end) the direction: to `out`, or, where `moves`, out = out · keep - direction · rate (out null: neither);
// and the exact sum of its squares, to `sum` (null: it is not wanted).
FUNCTION void direction_of_rows(
    const RowArguments &a, const Direction &d, double *sum, int64_t begin, int64_t end
) {
    float room[STRIPE];
    ExactLanes lanes;
    clear(lanes);
    const double *of_columns = d.scales + a.all_rows;
    float *out = d.out;
    for (int64_t row = begin; row < end;) {
        const int64_t matrix = row / a.rows;
        int64_t next = row + 1;
        if (a.columns == 1) next = (matrix + 1) * a.rows < end ? (matrix + 1) * a.rows : end;
        const int64_t from = a.from(row), to = a.to(next - 1);
        for (int64_t at = from; at < to; at += STRIPE) {
            const int64_t count = to - at < STRIPE ? to - at : STRIPE;
            float *place = out && !d.moves ? out + at : room;
            if (a.columns == 1)
                scale_column(a.values + at, d.scales + row + (at - from), of_columns[matrix], d.most, place, count);
            else
                scale_row(
                    a.values + at, d.scales[row], of_columns + matrix * a.columns + a.column(row) + (at - from), d.most,
                    place, count
                );
            if (sum) add_squares_exactly(place, count, lanes);
            if (d.moves) move_along(place, d.keep, d.rate, out + at, count);
        }
        row = next;
    }
    if (sum) sum_of_lanes(lanes, sum[0], sum[1]);
}
