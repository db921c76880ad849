// Optimizer states in bf16 and in codes of 8 bits, and weights with remainders, widened and narrowed one whole tile at
// a time, a tile being a block of codes: moments.py: [Note: States of 8 bits], whose letters these are. In the
// namespace of one instruction set.
//
// Such a step takes what widening, drawing and narrowing take, more than its bytes. So loops have a length that the
// compiler knows, and what is not finite is looked for once a tile and has loops of its own.

constexpr int64_t UPDATE_TILE = 256;  // small: conversions run while the memory of the next one is on its way: measured
constexpr uint32_t INFINITE = 0x7F800000, LEAST_SCALE = 0x0D800000;  // as bits: infinity, 2^-100
constexpr uint32_t GOLDEN = 0x9E3779B9;

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

// One of a rule's moments in a tile; all null where the rule does not have it.
struct Moment {
    void *kept;        // halves or codes, null: neither, for `wide` is what is kept
    float *scale;      // of codes, else null
    float *wide;       // fp32
    uint32_t largest;  // of halves and codes: the largest magnitude in `wide`, as bits
};

FUNCTION Moment moment_at(int32_t type, void *memory, float *scales, int64_t at, float *room) {
    if (!memory) return {nullptr, nullptr, nullptr, 0};
    if (type == FP32) return {nullptr, nullptr, static_cast<float *>(memory) + at, 0};
    if (type == BF16) return {static_cast<uint16_t *>(memory) + at, nullptr, room, 0};
    return {static_cast<uint8_t *>(memory) + at, scales + at / UPDATE_TILE, room, 0};
}

template <bool has_sign> INLINE float wide_moment(uint16_t half, float) { return float_of_bf16(half); }

template <bool has_sign> INLINE float wide_moment(uint8_t code, float scale) {
    using C = Code<has_sign>;
    const uint32_t size = has_sign ? code & 127 : code;
    const float value = ((float_of(C::BASE + (size << 19)) - C::CUT) * C::UNIT) * scale;
    return has_sign ? float_of(bits_of(value) ^ static_cast<uint32_t>(code & 128) << 24) : value;
}

INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// In the order of magnitudes, NaN above all.
INLINE uint32_t magnitude(float value) { return bits_of(value) & 0x7FFFFFFF; }

INLINE uint32_t mixed(uint32_t word) {  // random_bits.py: [Note: Random bits]
    word = (word ^ word >> 16) * 0x85EBCA6B;
    word = (word ^ word >> 13) * 0xC2B2AE35;
    return word ^ word >> 16;
}

INLINE uint32_t random_word(uint64_t number, uint32_t key_0, uint32_t key_1) {
    const uint32_t low = static_cast<uint32_t>(number), high = static_cast<uint32_t>(number >> 32);
    return mixed(mixed(low ^ key_0) + high * GOLDEN + key_1);
}

// The random words of elements from number `first` on.
FUNCTION void draw(uint32_t *__restrict words, uint64_t first, uint32_t key_0, uint32_t key_1) {
    const uint32_t high = static_cast<uint32_t>(first >> 32) * GOLDEN + key_1, low = static_cast<uint32_t>(first);
    if (low > 0xFFFFFFFFu - UPDATE_TILE) {  // few
        for (int64_t i = 0; i < UPDATE_TILE; i++)
            words[i] = random_word(first + static_cast<uint64_t>(i), key_0, key_1);
        return;
    }
    for (uint32_t i = 0; i < UPDATE_TILE; i++) words[i] = mixed(mixed((low + i) ^ key_0) + high);
}

// Those of states: random_bits.py: [Note: Random bits in a row].
FUNCTION void draw_in_rows(uint32_t *__restrict words, uint64_t first, uint32_t key_0, uint32_t key_1) {
    for (int64_t done = 0; done < UPDATE_TILE;) {
        const uint64_t number = first + static_cast<uint64_t>(done);
        const uint32_t begin = static_cast<uint32_t>(number & 255);
        const int64_t of_row = 256 - begin, left = UPDATE_TILE - done, many = of_row < left ? of_row : left;
        uint32_t *to = words + done, next = random_word(number >> 8, key_0, key_1) + begin * GOLDEN;
        for (int64_t i = 0; i < many; i++, next += GOLDEN) to[i] = mixed(next);
        done += many;
    }
}

// What is a size when it is shifted right by 19, of one element or a vector of them. word: the random one, of which a
// state with a sign takes the lower half and one without the upper half.
template <bool has_sign, bool random, class Floats, class Words>
INLINE Words shifted_size(Words bits, Words word, float part) {
    using C = Code<has_sign>;
    const Words noise = random ? (word >> (has_sign ? 0 : 16) & 0xFFFF) << 3 : word * 0;
    const Floats number = same_bits<Floats>(bits & 0x7FFFFFFF) * part + C::CUT;
    return same_bits<Words>(number) + noise + ((random ? 4 : 1 << 18) - C::BASE);
}

// words: null where nothing is drawn.
template <bool has_sign, bool random>
FUNCTION void narrow_codes(const float *__restrict values, const uint32_t *__restrict words, uint8_t *__restrict codes,
                           float part) {
#if defined(WITH_PACKS)  // a compiler narrows by masks and shuffles; these instructions narrow to the nearest in range
    for (int64_t i = 0; i < UPDATE_TILE; i += 32) {
        EightInts sizes[4], signs[4];
        for (int j = 0; j < 4; j++) {
            EightWords bits, word = {};
            __builtin_memcpy(&bits, values + i + 8 * j, sizeof bits);
            if (random) __builtin_memcpy(&word, words + i + 8 * j, sizeof word);
            sizes[j] = same_bits<EightInts>(shifted_size<has_sign, random, EightFloats>(bits, word, part)) >> 19;
            signs[j] = same_bits<EightInts>(bits);
        }
        // to 16 bits and to 8, each half of a vector by itself
        const SixteenShorts low = __builtin_ia32_packssdw256(sizes[0], sizes[1]);
        const SixteenShorts high = __builtin_ia32_packssdw256(sizes[2], sizes[3]);
        Bytes packed = __builtin_ia32_packuswb256(low, high);
        if (has_sign) {
            const SixteenShorts low_signs = __builtin_ia32_packssdw256(signs[0], signs[1]);
            const SixteenShorts high_signs = __builtin_ia32_packssdw256(signs[2], signs[3]);
            packed = __builtin_ia32_packsswb256(low, high) | (__builtin_ia32_packsswb256(low_signs, high_signs) & -128);
        }
        constexpr EightInts ORDER = {0, 4, 1, 5, 2, 6, 3, 7};
        const EightInts ordered = __builtin_ia32_permvarsi256(same_bits<EightInts>(packed), ORDER);
        __builtin_memcpy(codes + i, &ordered, sizeof ordered);
    }
#else
    using C = Code<has_sign>;
    for (int64_t i = 0; i < UPDATE_TILE; i++) {
        const uint32_t bits = bits_of(values[i]), word = random ? words[i] : 0;
        int32_t size = static_cast<int32_t>(shifted_size<has_sign, random, float>(bits, word, part)) >> 19;
        size = size > C::MOST ? C::MOST : size;
        size = size < 0 ? 0 : size;
        codes[i] = static_cast<uint8_t>(has_sign ? size | static_cast<int32_t>(bits >> 24 & 128) : size);
    }
#endif
}

// fp32 → bf16, 16 bits of a random word from bit `shift` on being added. finite: whether all values are known to be.
template <int shift, bool finite>
FUNCTION void round_at_random(const float *__restrict from, const uint32_t *__restrict words, uint16_t *__restrict to) {
    for (int64_t i = 0; i < UPDATE_TILE; i++) {
        const uint32_t bits = bits_of(from[i]), size = magnitude(from[i]), added = words[i] >> shift & 0xFFFF;
        const uint32_t below = finite ? ~0u : 0 - ((size - INFINITE) >> 31);
        const uint32_t nan = finite ? 0 : 0 - ((INFINITE - size) >> 31);
        to[i] = static_cast<uint16_t>(((bits + (added & below)) >> 16 & ~nan) | (0x7FC0 & nan));
    }
}

// What is kept of a moment becomes what is in `wide`, rounded. words: null where nothing is drawn.
template <bool has_sign> FUNCTION void narrow_moment(int32_t type, const Moment &moment, const uint32_t *words) {
    constexpr int SHIFT = has_sign ? 0 : 16;
    if (!moment.kept) return;
    if (type == BF16) {
        uint16_t *halves = static_cast<uint16_t *>(moment.kept);
        if (!words)
            narrow_bf16(moment.wide, halves, UPDATE_TILE);
        else if (moment.largest < INFINITE)
            round_at_random<SHIFT, true>(moment.wide, words, halves);
        else
            round_at_random<SHIFT, false>(moment.wide, words, halves);
        return;
    }
    uint8_t *codes = static_cast<uint8_t *>(moment.kept);
    if (moment.largest < LEAST_SCALE || moment.largest >= INFINITE) {
        *moment.scale = moment.largest < LEAST_SCALE ? 0.0f : __builtin_nanf("");
        __builtin_memset(codes, 0, UPDATE_TILE);
        return;
    }
    *moment.scale = float_of(moment.largest);
    const float part = Code<has_sign>::TOP / float_of(moment.largest);
    if (words)
        narrow_codes<has_sign, true>(moment.wide, words, codes, part);
    else
        narrow_codes<has_sign, false>(moment.wide, nullptr, codes, part);
}

// moments.py: [Note: Remainders].
FUNCTION void join(const uint16_t *__restrict weights, const int8_t *__restrict remainders, float *__restrict to) {
    for (int64_t i = 0; i < UPDATE_TILE; i++) {
        const int32_t bits = weights[i], size = bits & 0x7FFF, left = remainders[i];
        const int32_t finite = (size - 0x7F80) >> 31, some = (0 - size) >> 31, positive = ~(left >> 31);
        to[i] = float_of((static_cast<uint32_t>(bits) << 16) +
                         (static_cast<uint32_t>(left & finite & (some | positive)) << 8));
    }
}

// words: null where nothing is drawn. finite: whether all values are known to be.
template <bool random, bool finite>
FUNCTION void split(const float *__restrict from, const uint32_t *__restrict words, uint16_t *__restrict weights,
                    int8_t *__restrict remainders) {
    for (int64_t i = 0; i < UPDATE_TILE; i++) {
        const uint32_t bits = bits_of(from[i]), size = magnitude(from[i]);
        const uint32_t noise = random ? mixed(words[i] + GOLDEN) & 0xFF : 0x7F + (bits >> 8 & 1);
        const uint32_t below = finite ? ~0u : 0 - ((size - INFINITE) >> 31);
        const uint32_t nan = finite ? 0 : 0 - ((INFINITE - size) >> 31);
        const uint32_t upper = (bits + noise) >> 8, high = (upper + 0x7F + (upper >> 8 & 1)) >> 8;
        const int32_t left = static_cast<int32_t>(upper - (high << 8)), kept = left > 127 ? 127 : left;
        weights[i] = static_cast<uint16_t>((high & below) | (bits >> 16 & ~below & ~nan) | (0x7FC0 & nan));
        remainders[i] = static_cast<int8_t>(kept & static_cast<int32_t>(below));
    }
}

FUNCTION void narrow_with_remainders(const float *from, const uint32_t *words, uint16_t *weights, int8_t *remainders) {
    if (!words)
        split<false, false>(from, nullptr, weights, remainders);
    else if (all_finite(FP32, from, 0, UPDATE_TILE))
        split<true, true>(from, words, weights, remainders);
    else
        split<true, false>(from, words, weights, remainders);
}
