// Optimizer states in bf16 and in codes of 8 bits, widened and narrowed one tile at a time, a tile being a block of codes:
// moments.py: [Note: States of 8 bits], whose letters these are. In the namespace of one instruction set.

constexpr int64_t UPDATE_TILE = 256;  // small: conversions run while the memory of the next tile is on its way: measured

template <bool has_sign> struct Code;
template <> struct Code<true> {
    static constexpr uint32_t BASE = 0x3B800000;
    static constexpr int32_t MOST = 127;
    static constexpr float CUT = 0x1p-8f, TOP = 247.0f / 256.0f, UNIT = 1.0f / TOP;
};
template <> struct Code<false> {
    static constexpr uint32_t BASE = 0x37800000 + (1 << 19);
    static constexpr int32_t MOST = 255;
    static constexpr float CUT = 0x1p-16f, TOP = 65535.0f / 65536.0f, UNIT = 1.0f / TOP;
};

template <bool has_sign>
FUNCTION void widen_codes(const uint8_t *__restrict codes, float scale, float *__restrict to, int64_t count) {
    using C = Code<has_sign>;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t code = codes[i], size = has_sign ? code & 127 : code;
        const float value = ((float_of(C::BASE + (size << 19)) - C::CUT) * C::UNIT) * scale;
        to[i] = has_sign ? float_of(bits_of(value) ^ (code & 128) << 24) : value;
    }
}

FUNCTION uint32_t largest_size(const float *__restrict values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t size = bits_of(values[i]) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    return largest;
}

// noise: of each element what is added to the bits of its number.
template <bool has_sign>
FUNCTION void narrow_codes(const float *__restrict values, const uint32_t *__restrict noise, uint8_t *__restrict codes,
                           float *scale, int64_t count) {
    using C = Code<has_sign>;
    const uint32_t largest = largest_size(values, count);
    if (largest < 0x0D800000 || largest >= 0x7F800000) {  // 2^-100, infinity
        *scale = largest < 0x0D800000 ? 0.0f : __builtin_nanf("");
        __builtin_memset(codes, 0, static_cast<size_t>(count));
        return;
    }
    *scale = float_of(largest);
    const float part = C::TOP / float_of(largest);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(values[i]);
        const float number = float_of(bits & 0x7FFFFFFF) * part + C::CUT;
        int32_t size = static_cast<int32_t>(bits_of(number) + noise[i] - C::BASE) >> 19;
        size = size > C::MOST ? C::MOST : size;
        size = size < 0 ? 0 : size;
        codes[i] = static_cast<uint8_t>(has_sign ? size | static_cast<int32_t>(bits >> 24 & 128) : size);
    }
}

FUNCTION void narrow_bf16_with(const float *__restrict from, const uint32_t *__restrict noise, uint16_t *__restrict to,
                               int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(from[i]), size = bits & 0x7FFFFFFF, added = noise[i];
        const uint32_t finite = 0 - ((size - 0x7F800000) >> 31), nan = 0 - ((0x7F800000 - size) >> 31);
        to[i] = static_cast<uint16_t>(((bits + (added & finite)) >> 16 & ~nan) | (0x7FC0 & nan));
    }
}

INLINE uint32_t mixed(uint32_t word) {  // random_bits.py: [Note: Random bits]
    word = (word ^ word >> 16) * 0x85EBCA6B;
    word = (word ^ word >> 13) * 0xC2B2AE35;
    return word ^ word >> 16;
}

INLINE uint32_t random_word(uint64_t number, uint32_t key_0, uint32_t key_1) {
    const uint32_t low = static_cast<uint32_t>(number), high = static_cast<uint32_t>(number >> 32);
    return mixed(mixed(low ^ key_0) + high * 0x9E3779B9u + key_1);
}

// The random words of elements from number `first` on.
FUNCTION void draw(uint32_t *__restrict words, int64_t count, uint64_t first, uint32_t key_0, uint32_t key_1) {
    const uint32_t high = static_cast<uint32_t>(first >> 32) * 0x9E3779B9u + key_1;
    const uint32_t low = static_cast<uint32_t>(first), number = static_cast<uint32_t>(count);
    if (low > 0xFFFFFFFFu - number) {  // few
        for (int64_t i = 0; i < count; i++) words[i] = random_word(first + static_cast<uint64_t>(i), key_0, key_1);
        return;
    }
    for (uint32_t i = 0; i < number; i++) words[i] = mixed(mixed((low + i) ^ key_0) + high);
}

// Those of states: random_bits.py: [Note: Random bits in a row].
FUNCTION void draw_in_rows(uint32_t *__restrict words, int64_t count, uint64_t first, uint32_t key_0, uint32_t key_1) {
    for (int64_t done = 0; done < count;) {
        const uint64_t number = first + static_cast<uint64_t>(done);
        const uint32_t begin = static_cast<uint32_t>(number & 255), left = static_cast<uint32_t>(count - done);
        const uint32_t many = left < 256 - begin ? left : 256 - begin;
        const uint32_t row = random_word(number >> 8, key_0, key_1) + begin * 0x9E3779B9u;
        uint32_t *to = words + done;
        for (uint32_t i = 0; i < many; i++) to[i] = mixed(row + i * 0x9E3779B9u);
        done += many;
    }
}

// moments.py: [Note: Remainders].
FUNCTION void join(const uint16_t *__restrict weights, const int8_t *__restrict remainders, float *__restrict to,
                   int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const int32_t bits = weights[i], size = bits & 0x7FFF, left = remainders[i];
        const int32_t finite = (size - 0x7F80) >> 31, some = (0 - size) >> 31, positive = ~(left >> 31);
        to[i] = float_of((static_cast<uint32_t>(bits) << 16) +
                         (static_cast<uint32_t>(left & finite & (some | positive)) << 8));
    }
}

// words: random ones, null: to nearest.
FUNCTION void split(const float *__restrict from, const uint32_t *__restrict words, uint16_t *__restrict weights,
                    int8_t *__restrict remainders, int64_t count) {
    uint32_t noise[UPDATE_TILE];
    for (int64_t i = 0; i < count; i++)
        noise[i] = words ? mixed(words[i] + 0x9E3779B9u) & 0xFF : 0x7F + (bits_of(from[i]) >> 8 & 1);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(from[i]), size = bits & 0x7FFFFFFF;
        const uint32_t finite = 0 - ((size - 0x7F800000) >> 31), nan = 0 - ((0x7F800000 - size) >> 31);
        const uint32_t upper = (bits + noise[i]) >> 8, high = (upper + 0x7F + (upper >> 8 & 1)) >> 8;
        const int32_t left = static_cast<int32_t>(upper - (high << 8)), kept = left > 127 ? 127 : left;
        weights[i] = static_cast<uint16_t>((high & finite) | (bits >> 16 & ~finite & ~nan) | (0x7FC0 & nan));
        remainders[i] = static_cast<int8_t>(kept & static_cast<int32_t>(finite));
    }
}

// A tile of a state as fp32: where it lies, or else in `room`. Null: there is no such state.
template <bool has_sign>
FUNCTION float *widened_state(int32_t type, void *memory, const float *scales, int64_t at, float *room, int64_t count) {
    if (!memory) return nullptr;
    if (type == CODES)
        widen_codes<has_sign>(static_cast<const uint8_t *>(memory) + at, scales[at / UPDATE_TILE], room, count);
    else
        return const_cast<float *>(widened(type, memory, at, room, count));
    return room;
}

// The opposite. words: random ones, of which the bits from `shift` on are this state's; null: to nearest.
template <bool has_sign>
FUNCTION void narrow_state(int32_t type, const float *values, void *memory, float *scales, int64_t at,
                           const uint32_t *words, int shift, int64_t count) {
    if (!memory) return;
    uint32_t noise[UPDATE_TILE];
    const bool codes = type == CODES;
    const uint32_t factor = codes ? 8 : 1, least = codes ? 4 : 0;
    for (int64_t i = 0; i < count; i++) noise[i] = words ? (words[i] >> shift & 0xFFFF) * factor + least : 1 << 18;
    if (codes)
        narrow_codes<has_sign>(values, noise, static_cast<uint8_t *>(memory) + at, scales + at / UPDATE_TILE, count);
    else if (words)
        narrow_bf16_with(values, noise, static_cast<uint16_t *>(memory) + at, count);
    else
        narrow(type, values, memory, at, count);
}
