// Numbers in fewer bits and back, [Note: Blocks of integers] of compression.py: in the namespace of one instruction set.
// A byte of int4 is made of two neighbours as a processor with the low byte first reads them.

constexpr int64_t CODE_TILE = UPDATE_TILE;  // as many as `draw` draws
constexpr float ROUNDER = 0x1.8p23f;        // added to a number below 2^22, it leaves the nearest integer in the low bits

INLINE int64_t bytes_of_codes(const CodingArguments &a, int64_t elements) {
    return a.levels == LEVELS_OF_INT4 ? (elements + 1) / 2 : elements;
}

// What is finite and has become infinite becomes the largest number instead. The number of those.
FUNCTION int64_t saturate(int32_t type, const float *values, uint16_t *halves, int64_t count) {
    const uint32_t infinite = type == BF16 ? 0x7F80 : 0x7C00;
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t beyond = (halves[i] & 0x7FFFu) == infinite && magnitude(values[i]) < INFINITE;
        halves[i] = static_cast<uint16_t>(halves[i] - beyond);  // the number before infinity
        found += beyond;
    }
    return found;
}

// Elements [begin, end).
FUNCTION void compress_floats(const CodingArguments &a, int64_t begin, int64_t end) {
    float room[CODE_TILE];
    uint16_t *halves = static_cast<uint16_t *>(a.codes);
    int64_t found = 0;
    for (int64_t at = begin; at < end; at += CODE_TILE) {
        const int64_t count = end - at < CODE_TILE ? end - at : CODE_TILE;
        const float *values = widened(a.wide_type, a.wide, at, room, count);
        narrow(a.code_type, values, halves, at, count);
        if (!all_finite(a.code_type, halves, at, count)) found += saturate(a.code_type, values, halves + at, count);
    }
    if (found && a.saturated) __atomic_fetch_add(a.saturated, found, __ATOMIC_RELAXED);
}

FUNCTION uint32_t largest_of(const float *values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = larger(largest, magnitude(values[i]));
    return largest;
}

// words: of a tile.
template <bool noisy>
FUNCTION void round_to_integers(const float *__restrict values, const uint32_t *__restrict words,
                                int8_t *__restrict codes, int64_t count, float scale, int32_t levels) {
    for (int64_t i = 0; i < count; i++) {
        float value = values[i] / scale;
        if (noisy) value = value + static_cast<float>(static_cast<int32_t>(words[i] >> 8)) * 0x1p-24f;
        const float shifted = value + ROUNDER;
        int32_t whole = static_cast<int32_t>(bits_of(shifted) - bits_of(ROUNDER));
        if (noisy) whole -= shifted - ROUNDER > value;
        whole = whole > levels ? levels : whole;
        codes[i] = static_cast<int8_t>(whole < -levels ? -levels : whole);
    }
}

FUNCTION void pack_pairs(const int8_t *__restrict codes, uint8_t *__restrict to, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i++) {
        uint16_t both;
        __builtin_memcpy(&both, codes + 2 * i, sizeof both);
        to[i] = static_cast<uint8_t>((both & 15) | (both >> 4 & 0xF0));
    }
}

FUNCTION void unpack_pairs(const uint8_t *__restrict from, int8_t *__restrict codes, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i++) {
        const uint32_t low = (from[i] & 15u) ^ 8u, high = (from[i] >> 4) ^ 8u;
        const uint16_t both = static_cast<uint16_t>(((low - 8) & 0xFF) | (high - 8) << 8);
        __builtin_memcpy(codes + 2 * i, &both, sizeof both);
    }
}

// A tile of a block whose scale is neither zero nor NaN.
FUNCTION void compress_tile(const CodingArguments &a, const float *values, int64_t at, int64_t count, float scale) {
    uint32_t words[CODE_TILE];
    int8_t room[CODE_TILE];
    const bool packs = a.levels == LEVELS_OF_INT4;
    int8_t *codes = packs ? room : static_cast<int8_t *>(a.codes) + at;
    if (a.noisy) {
        draw(words, static_cast<uint64_t>(a.first + at), a.key_0, a.key_1);
        round_to_integers<true>(values, words, codes, count, scale, a.levels);
    } else {
        round_to_integers<false>(values, words, codes, count, scale, a.levels);
    }
    if (!packs) return;
    if (count & 1) room[count] = 0;
    pack_pairs(room, static_cast<uint8_t *>(a.codes) + at / 2, (count + 1) / 2);
}

// Blocks [begin, end).
FUNCTION void compress_blocks(const CodingArguments &a, int64_t begin, int64_t end) {
    float room[CODE_TILE];
    const float levels = static_cast<float>(a.levels);
    for (int64_t block = begin; block < end; block++) {
        const int64_t start = block * a.block, length = a.count - start < a.block ? a.count - start : a.block;
        uint32_t largest = 0;
        const float *values = nullptr;
        for (int64_t at = 0; at < length; at += CODE_TILE) {
            const int64_t count = length - at < CODE_TILE ? length - at : CODE_TILE;
            values = widened(a.wide_type, a.wide, start + at, room, count);
            largest = larger(largest, largest_of(values, count));
        }
        const bool finite = largest < INFINITE;
        const float scale = finite ? float_of(largest) / levels : __builtin_nanf("");
        a.scales[block] = scale;
        if (!finite || scale == 0.0f) {
            uint8_t *codes = static_cast<uint8_t *>(a.codes) + bytes_of_codes(a, start);
            __builtin_memset(codes, 0, static_cast<size_t>(bytes_of_codes(a, length)));
            continue;
        }
        for (int64_t at = 0; at < length; at += CODE_TILE) {
            const int64_t count = length - at < CODE_TILE ? length - at : CODE_TILE;
            if (length > CODE_TILE) values = widened(a.wide_type, a.wide, start + at, room, count);
            compress_tile(a, values, start + at, count, scale);
        }
    }
}

FUNCTION void widen_integers(const int8_t *__restrict codes, float *__restrict to, int64_t count, float scale) {
    for (int64_t i = 0; i < count; i++) to[i] = static_cast<float>(codes[i]) * scale;
}

// What is missing in `decoded` of `whole`; zero where that is not finite.
FUNCTION void subtract(const float *whole, const float *decoded, float *out, int64_t count, float divisor) {
    EACH_ALONE
    for (int64_t i = 0; i < count; i++) {
        const float left = whole[i] - decoded[i];
        out[i] = magnitude(left) < INFINITE ? left : 0.0f;
    }
    if (divisor == 1.0f) return;
    EACH_ALONE
    for (int64_t i = 0; i < count; i++) out[i] = out[i] / divisor;
}

// A tile's numbers, fp32, to where they are wanted, in which form.
FUNCTION void give_tile(const CodingArguments &a, const float *decoded, int64_t at, int64_t count) {
    if (a.whole)
        subtract(a.whole + at, decoded, static_cast<float *>(a.wide) + at, count, a.divisor);
    else
        narrow(a.wide_type, decoded, a.wide, at, count);
}

FUNCTION float *place_of_tile(const CodingArguments &a, int64_t at, float *room) {
    return a.wide_type == FP32 && !a.whole ? static_cast<float *>(a.wide) + at : room;
}

// Elements [begin, end).
FUNCTION void decompress_floats(const CodingArguments &a, int64_t begin, int64_t end) {
    float room[CODE_TILE];
    for (int64_t at = begin; at < end; at += CODE_TILE) {
        const int64_t count = end - at < CODE_TILE ? end - at : CODE_TILE;
        give_tile(a, widened(a.code_type, a.codes, at, place_of_tile(a, at, room), count), at, count);
    }
}

// Blocks [begin, end).
FUNCTION void decompress_blocks(const CodingArguments &a, int64_t begin, int64_t end) {
    float room[CODE_TILE];
    int8_t integers[CODE_TILE];
    const bool packed = a.levels == LEVELS_OF_INT4;
    for (int64_t block = begin; block < end; block++) {
        const int64_t start = block * a.block, length = a.count - start < a.block ? a.count - start : a.block;
        for (int64_t at = start; at < start + length; at += CODE_TILE) {
            const int64_t left = start + length - at, count = left < CODE_TILE ? left : CODE_TILE;
            const int8_t *codes = static_cast<const int8_t *>(a.codes) + at;
            if (packed) {
                unpack_pairs(static_cast<const uint8_t *>(a.codes) + at / 2, integers, (count + 1) / 2);
                codes = integers;
            }
            float *place = place_of_tile(a, at, room);
            widen_integers(codes, place, count, a.scales[block]);
            give_tile(a, place, at, count);
        }
    }
}
