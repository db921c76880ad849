// The update of optimizers, [Note: One update] of reference_update.py: in the namespace of one instruction set.
// Every operation is rounded on its own (the flags of build.py forbid to fuse them), so that vector body and tail agree.

enum Form { FORM_ADAM, FORM_LION, FORM_PLAIN, FORM_MOMENTUM, FORM_FIRST };

struct Numbers {
    float scale;  // the factor, negated where the rule maximizes: that changes nothing but the sign
    float rate, decay, l2, keep, take, keep_square, take_square, epsilon;
};

using Step = void (*)(float *, const float *, float *, float *, int64_t, const Numbers &);

template <Form form, bool nesterov = false>
FUNCTION void step(float *__restrict weight, const float *__restrict gradient, float *__restrict average,
                   float *__restrict square, int64_t count, const Numbers &numbers) {
    const Numbers n = numbers;
    for (int64_t i = 0; i < count; i++) {
        const float g = gradient[i] * n.scale;
        const float w = weight[i] * n.decay;
        float direction = g;
        if (form == FORM_ADAM) {
            const float m = average[i] * n.keep + g * n.take;
            const float v = square[i] * n.keep_square + (g * n.take_square) * g;
            average[i] = m;
            square[i] = v;
            direction = m / (__builtin_sqrtf(v) + n.epsilon);
        } else if (form == FORM_LION) {
            const float m = average[i], mixed = m * n.keep + g * n.take;
            direction = (mixed > 0.0f ? 1.0f : 0.0f) - (mixed < 0.0f ? 1.0f : 0.0f);
            average[i] = m * n.keep_square + g * n.take_square;
        } else if (form != FORM_PLAIN) {
            const float m = form == FORM_FIRST ? g : average[i] * n.keep + g * n.take;
            average[i] = m;
            direction = nesterov ? g + m * n.keep : m;
        }
        weight[i] = w - direction * n.rate;
    }
}

FUNCTION Step chosen_step(const UpdateArguments &a) {
    if (a.kind == ADAM) return step<FORM_ADAM>;
    if (a.kind == LION) return step<FORM_LION>;
    if (a.keep == 0.0f) return step<FORM_PLAIN>;
    if (a.first_step) return a.nesterov ? step<FORM_FIRST, true> : step<FORM_FIRST>;
    return a.nesterov ? step<FORM_MOMENTUM, true> : step<FORM_MOMENTUM>;
}

FUNCTION void add_l2(const float *gradient, const float *weight, float *out, int64_t count, const Numbers &numbers) {
    const Numbers n = numbers;
    EACH_ALONE
    for (int64_t i = 0; i < count; i++) out[i] = gradient[i] * n.scale + (weight[i] * n.decay) * n.l2;
}

FUNCTION void update_tile(const UpdateArguments &a, Numbers numbers, Step step, int64_t at, int64_t first,
                          int64_t count) {
    float wide_gradient[UPDATE_TILE], wide_weight[UPDATE_TILE], wide_average[UPDATE_TILE], wide_square[UPDATE_TILE];
    const float *gradient = widened(a.gradient_type, a.gradient, at, wide_gradient, count);
    float *weight = wide_weight;
    if (a.remainder)
        join(static_cast<const uint16_t *>(a.weight) + at, a.remainder + at, wide_weight, count);
    else
        weight = const_cast<float *>(widened(a.weight_type, a.weight, at, wide_weight, count));
    if (a.l2 != 0.0f) {  // a pass of its own: few ask for it
        add_l2(gradient, weight, wide_gradient, count, numbers);
        gradient = wide_gradient;
        numbers.scale = 1.0f;
    }
    float *average = widened_state<true>(a.state_type, a.average, a.average_scale, at, wide_average, count);
    float *square = widened_state<false>(a.state_type, a.square, a.square_scale, at, wide_square, count);
    step(weight, gradient, average, square, count, numbers);
    uint32_t words[UPDATE_TILE];
    const uint32_t *drawn = a.state_stochastic ? words : nullptr;
    if (drawn) draw_in_rows(words, count, static_cast<uint64_t>(first), a.state_key_0, a.state_key_1);
    if (a.state_type != FP32) {
        narrow_state<true>(a.state_type, average, a.average, a.average_scale, at, drawn, 0, count);
        narrow_state<false>(a.state_type, square, a.square, a.square_scale, at, drawn, 16, count);
    }
    if (a.remainder) {
        split(weight, drawn, static_cast<uint16_t *>(a.weight) + at, a.remainder + at, count);
    } else if (a.stochastic && a.weight_type == BF16) {
        draw(words, count, static_cast<uint64_t>(first), a.key_0, a.key_1);
        for (int64_t i = 0; i < count; i++) words[i] &= 0xFFFF;
        narrow_bf16_with(weight, words, static_cast<uint16_t *>(a.weight) + at, count);
    } else {
        narrow(a.weight_type, weight, a.weight, at, count);
    }
    if (a.low) narrow(a.low_type, weight, a.low, at, count);
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
            update_tile(a, numbers, step, start + at, first + at, count);
        }
        passed += length > 0 ? length : 0;
    }
}
