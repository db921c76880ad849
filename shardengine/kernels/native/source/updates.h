// The update of optimizers, [Note: One update] of reference_update.py: in the namespace of one instruction set.
// Every operation is rounded on its own (the flags of build.py forbid to fuse them), so that vector body and tail agree.

enum Form { FORM_ADAM, FORM_LION, FORM_PLAIN, FORM_MOMENTUM, FORM_FIRST };

struct Numbers {
    float scale;  // the factor, negated where the rule maximizes: that changes nothing but the sign
    float rate, decay, l2, keep, take, keep_square, take_square, epsilon;
};

using Step = void (*)(float *, const float *, Moment &, Moment &, int64_t, const Numbers &);

// Kept: what is kept of an element of a moment. What is not fp32 is widened here, where division and root take their
// time anyway, and its largest magnitude found; the tile is a whole one then.
template <Form form, bool nesterov, class Kept>
FUNCTION void step(float *__restrict weight, const float *__restrict gradient, Moment &first, Moment &second,
                   int64_t given_count, const Numbers &numbers) {
    constexpr bool widens = sizeof(Kept) < sizeof(float);
    constexpr bool has_average = form != FORM_PLAIN, has_square = form == FORM_ADAM;
    const Numbers n = numbers;
    const int64_t count = widens ? UPDATE_TILE : given_count;
    const Kept *kept_average = static_cast<const Kept *>(first.kept);
    const Kept *kept_square = static_cast<const Kept *>(second.kept);
    float *average = first.wide, *square = second.wide;
    const float average_scale = first.scale ? *first.scale : 1.0f, square_scale = second.scale ? *second.scale : 1.0f;
    uint32_t largest_average = 0, largest_square = 0;
    EACH_ALONE  // but for the largest, which a compiler sees
    for (int64_t i = 0; i < count; i++) {
        const float g = gradient[i] * n.scale;
        const float w = weight[i] * n.decay;
        float direction = g, m = 0.0f, v = 0.0f;
        if constexpr (widens) {
            if (has_average) m = wide_moment<true>(kept_average[i], average_scale);
            if (has_square) v = wide_moment<false>(kept_square[i], square_scale);
        } else {
            if (has_average) m = average[i];
            if (has_square) v = square[i];
        }
        if (form == FORM_ADAM) {
            m = m * n.keep + g * n.take;
            v = v * n.keep_square + (g * n.take_square) * g;
            direction = m / (__builtin_sqrtf(v) + n.epsilon);
        } else if (form == FORM_LION) {
            const float mixed = m * n.keep + g * n.take;
            direction = (mixed > 0.0f ? 1.0f : 0.0f) - (mixed < 0.0f ? 1.0f : 0.0f);
            m = m * n.keep_square + g * n.take_square;
        } else if (form != FORM_PLAIN) {
            m = form == FORM_FIRST ? g : m * n.keep + g * n.take;
            direction = nesterov ? g + m * n.keep : m;
        }
        if (has_average) average[i] = m;
        if (has_square) square[i] = v;
        weight[i] = w - direction * n.rate;
        if (widens) largest_average = larger(largest_average, magnitude(m));
        if (widens) largest_square = larger(largest_square, magnitude(v));
    }
    first.largest = largest_average;
    second.largest = largest_square;
}

template <class Kept> FUNCTION Step chosen_step_of(const UpdateArguments &a) {
    if (a.kind == ADAM) return step<FORM_ADAM, false, Kept>;
    if (a.kind == LION) return step<FORM_LION, false, Kept>;
    if (a.first_step) return a.nesterov ? step<FORM_FIRST, true, Kept> : step<FORM_FIRST, false, Kept>;
    return a.nesterov ? step<FORM_MOMENTUM, true, Kept> : step<FORM_MOMENTUM, false, Kept>;
}

FUNCTION Step chosen_step(const UpdateArguments &a) {
    if (a.kind == SGD && a.keep == 0.0f) return step<FORM_PLAIN, false, float>;
    if (a.state_type == FP32) return chosen_step_of<float>(a);
    return a.state_type == BF16 ? chosen_step_of<uint16_t>(a) : chosen_step_of<uint8_t>(a);
}

FUNCTION void add_l2(const float *gradient, const float *weight, float *out, int64_t count, const Numbers &numbers) {
    const Numbers n = numbers;
    EACH_ALONE
    for (int64_t i = 0; i < count; i++) out[i] = gradient[i] * n.scale + (weight[i] * n.decay) * n.l2;
}

// fp32 alone.
FUNCTION void update_in_place(const UpdateArguments &a, const Numbers &numbers, Step step, int64_t at, int64_t count) {
    Moment average = moment_at(FP32, a.average, nullptr, at, nullptr);
    Moment square = moment_at(FP32, a.square, nullptr, at, nullptr);
    const float *gradient = static_cast<const float *>(a.gradient) + at;
    step(static_cast<float *>(a.weight) + at, gradient, average, square, count, numbers);
}

// A whole tile.
FUNCTION void update_tile(const UpdateArguments &a, Numbers numbers, Step step, int64_t at, int64_t first) {
    alignas(64) float wide_gradient[UPDATE_TILE], wide_weight[UPDATE_TILE];
    alignas(64) float wide_average[UPDATE_TILE], wide_square[UPDATE_TILE];
    alignas(64) uint32_t words[UPDATE_TILE];
    const uint64_t number = static_cast<uint64_t>(first);
    const float *gradient = widened(a.gradient_type, a.gradient, at, wide_gradient, UPDATE_TILE);
    uint16_t *halves = static_cast<uint16_t *>(a.weight) + at;  // where weights are that
    float *weight = wide_weight;
    if (a.remainder)
        join(halves, a.remainder + at, weight);
    else
        weight = const_cast<float *>(widened(a.weight_type, a.weight, at, wide_weight, UPDATE_TILE));
    if (a.l2 != 0.0f) {  // a pass of its own: few ask for it
        add_l2(gradient, weight, wide_gradient, UPDATE_TILE, numbers);
        gradient = wide_gradient;
        numbers.scale = 1.0f;
    }
    Moment average = moment_at(a.state_type, a.average, a.average_scale, at, wide_average);
    Moment square = moment_at(a.state_type, a.square, a.square_scale, at, wide_square);
    step(weight, gradient, average, square, UPDATE_TILE, numbers);
    const uint32_t *drawn = a.state_stochastic && (a.state_type != FP32 || a.remainder) ? words : nullptr;
    if (drawn) draw_in_rows(words, number, a.state_key_0, a.state_key_1);
    narrow_moment<true>(a.state_type, average, drawn);
    narrow_moment<false>(a.state_type, square, drawn);
    if (a.remainder) {
        narrow_with_remainders(weight, drawn, halves, a.remainder + at);
    } else if (a.stochastic && a.weight_type == BF16) {
        draw(words, number, a.key_0, a.key_1);
        if (all_finite(FP32, weight, 0, UPDATE_TILE))
            round_at_random<0, true>(weight, words, halves);
        else
            round_at_random<0, false>(weight, words, halves);
    } else {
        narrow(a.weight_type, weight, a.weight, at, UPDATE_TILE);
    }
    if (a.low) narrow(a.low_type, weight, a.low, at, UPDATE_TILE);
}

// A tile that is not whole, in rooms for a whole one. Behind its elements are zeros, whose moments are never larger than
// those of its elements.
FUNCTION void update_part(const UpdateArguments &a, const Numbers &numbers, Step step, int64_t at, int64_t first,
                          int64_t count) {
    constexpr int PARTS = 6, GRADIENT = 1;
    const int32_t types[PARTS] = {a.weight_type, a.gradient_type, a.state_type, a.state_type, CODES, a.low_type};
    void *const all[PARTS] = {a.weight, const_cast<void *>(a.gradient), a.average, a.square, a.remainder, a.low};
    alignas(64) uint8_t rooms[PARTS][UPDATE_TILE * sizeof(float)];
    void *memory[PARTS], *room[PARTS];
    size_t sizes[PARTS];
    for (int i = 0; i < PARTS; i++) {
        const int64_t size = types[i] == FP32 ? 4 : types[i] == CODES ? 1 : 2;
        sizes[i] = all[i] ? static_cast<size_t>(size * count) : 0;
        memory[i] = all[i] ? static_cast<uint8_t *>(all[i]) + size * at : nullptr;
        room[i] = all[i] ? rooms[i] : nullptr;
        if (!all[i]) continue;
        __builtin_memcpy(rooms[i], memory[i], sizes[i]);
        __builtin_memset(rooms[i] + sizes[i], 0, sizeof rooms[i] - sizes[i]);
    }
    UpdateArguments whole = a;
    whole.weight = room[0];
    whole.gradient = room[GRADIENT];
    whole.average = room[2];
    whole.square = room[3];
    whole.remainder = static_cast<int8_t *>(room[4]);
    whole.low = room[5];
    if (a.average_scale) whole.average_scale += at / UPDATE_TILE;
    if (a.square_scale) whole.square_scale += at / UPDATE_TILE;
    update_tile(whole, numbers, step, 0, first);
    for (int i = 0; i < PARTS; i++)
        if (all[i] && i != GRADIENT) __builtin_memcpy(memory[i], rooms[i], sizes[i]);
}

// Elements [begin, end) of those in all spans, counted through.
FUNCTION void update(const UpdateArguments &a, int64_t begin, int64_t end) {
    const float factor = a.factor ? *a.factor : 1.0f;
    const Numbers numbers = {a.maximize ? -factor : factor, a.rate, a.decay, a.l2, a.keep, a.take,
                             a.keep_square, a.take_square, a.epsilon};
    const Step step = chosen_step(a);
    // Nothing to convert: a long tile is faster, for the first divisions of a tile wait for its memory.
    const bool plain = a.weight_type == FP32 && a.gradient_type == FP32 && a.state_type == FP32;
    const bool in_place = plain && a.l2 == 0.0f && !a.low;
    const int64_t tile = in_place ? end - begin : UPDATE_TILE;
    int64_t passed = 0;
    for (int64_t i = 0; i < a.span_count && passed < end; i++) {
        const int64_t start = a.spans[3 * i], length = a.spans[3 * i + 1] - start, first = a.spans[3 * i + 2];
        int64_t at = begin > passed ? begin - passed : 0;
        const int64_t until = end - passed < length ? end - passed : length;
        const bool whole = a.state_type == CODES;  // a block belongs to the part in which it begins
        if (whole) at = (at + UPDATE_TILE - 1) / UPDATE_TILE * UPDATE_TILE;
        for (; at < until; at += tile) {
            const int64_t left = (whole ? length : until) - at, count = left < tile ? left : tile;
            if (in_place)
                update_in_place(a, numbers, step, start + at, count);
            else if (count == UPDATE_TILE)
                update_tile(a, numbers, step, start + at, first + at);
            else
                update_part(a, numbers, step, start + at, first + at, count);
        }
        passed += length > 0 ? length : 0;
    }
}
