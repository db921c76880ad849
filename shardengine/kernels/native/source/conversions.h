// fp32 from and to bf16 and fp16, to nearest even, NaN stays NaN: in the namespace of one instruction set.
// Integer code that any compiler vectorises; fp16 by instructions where the set has them, with the same bits.

template <class To, class From> INLINE To same_bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

INLINE uint32_t bits_of(float value) { return same_bits<uint32_t>(value); }

INLINE float float_of(uint32_t bits) { return same_bits<float>(bits); }

INLINE uint16_t bf16_of(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

INLINE float float_of_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

// Both conversions of fp16 compute every case and select one.
INLINE uint16_t fp16_of(float value) {
    const uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFF, sign = (bits >> 16) & 0x8000;
    const uint32_t normal = (size + 0xFFF + ((size >> 13) & 1) - (112u << 23)) >> 13;
    const uint32_t tiny = bits_of(float_of(size) + 0.5f) - 0x3F000000;  // 0.5 has the last place of subnormal fp16
    const uint32_t nan = 0x7E00 | (size >> 13 & 0x3FF);
    uint32_t result = size < 0x38800000 ? tiny : normal;
    result = size >= 0x47800000 ? 0x7C00 : result;
    result = size > 0x7F800000 ? nan : result;
    return static_cast<uint16_t>(sign | result);
}

INLINE float float_of_fp16(uint16_t half) {
    const uint32_t size = half & 0x7FFF, sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t tiny = bits_of(static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f);
    uint32_t result = size < 0x400 ? tiny : (size << 13) + (112u << 23);
    result = size >= 0x7C00 ? (size << 13) | 0x7F800000 | (size > 0x7C00 ? 0x400000 : 0) : result;
    return float_of(sign | result);
}

APART void widen_bf16(const uint16_t *__restrict from, float *__restrict to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = float_of_bf16(from[i]);
}

APART void narrow_bf16(const float *__restrict from, uint16_t *__restrict to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = bf16_of(from[i]);
}

APART void widen_fp16(const uint16_t *__restrict from, float *__restrict to, int64_t count) {
    int64_t i = 0;
#if defined(WITH_F16C)
    for (const int64_t whole = count / 8 * 8; i < whole; i += 8) {
        EightHalves halves;
        __builtin_memcpy(&halves, from + i, sizeof halves);
        const EightFloats wide = WIDENED(halves);
        __builtin_memcpy(to + i, &wide, sizeof wide);
    }
#elif defined(WITH_NEON)
    for (const int64_t whole = count / 4 * 4; i < whole; i += 4)
        vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
    for (; i < count; i++) to[i] = float_of_fp16(from[i]);
}

APART void narrow_fp16(const float *__restrict from, uint16_t *__restrict to, int64_t count) {
    int64_t i = 0;
#if defined(WITH_F16C)
    for (const int64_t whole = count / 8 * 8; i < whole; i += 8) {
        EightFloats wide;
        __builtin_memcpy(&wide, from + i, sizeof wide);
        const EightHalves halves = __builtin_ia32_vcvtps2ph256(wide, 0);  // 0: to nearest even
        __builtin_memcpy(to + i, &halves, sizeof halves);
    }
#elif defined(WITH_NEON)
    for (const int64_t whole = count / 4 * 4; i < whole; i += 4)
        vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
    for (; i < count; i++) to[i] = fp16_of(from[i]);
}

// The elements from number `at` on of `memory` as fp32: where they lie, or else in `room`.
FUNCTION const float *widened(int32_t type, const void *memory, int64_t at, float *room, int64_t count) {
    if (type == FP32) return static_cast<const float *>(memory) + at;
    const uint16_t *halves = static_cast<const uint16_t *>(memory) + at;
    if (type == BF16)
        widen_bf16(halves, room, count);
    else
        widen_fp16(halves, room, count);
    return room;
}

FUNCTION void narrow(int32_t type, const float *from, void *memory, int64_t at, int64_t count) {
    if (type == FP32) {
        float *to = static_cast<float *>(memory) + at;
        if (to != from) __builtin_memcpy(to, from, sizeof(float) * static_cast<size_t>(count));
        return;
    }
    uint16_t *halves = static_cast<uint16_t *>(memory) + at;
    if (type == BF16)
        narrow_bf16(from, halves, count);
    else
        narrow_fp16(from, halves, count);
}

FUNCTION bool all_finite(int32_t type, const void *memory, int64_t at, int64_t count) {
    uint32_t beyond = 0;
    if (type == FP32) {
        const uint32_t *words = static_cast<const uint32_t *>(memory) + at;
        for (int64_t i = 0; i < count; i++) beyond |= (words[i] & 0x7F800000) == 0x7F800000;
    } else {
        const uint16_t *halves = static_cast<const uint16_t *>(memory) + at, mask = type == BF16 ? 0x7F80 : 0x7C00;
        for (int64_t i = 0; i < count; i++) beyond |= (halves[i] & mask) == mask;
    }
    return !beyond;
}
