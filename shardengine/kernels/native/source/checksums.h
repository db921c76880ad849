// CRC-32 as zlib has it (reflected polynomial 0xEDB88320, state inverted at both ends): byte by byte, and by carry-less
// multiplication (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009,
// with the last 16 bytes left to the table instead of a Barrett reduction). Knows no threads.
#pragma once
#include <stdint.h>
#include <string.h>

struct CrcTable {
    uint32_t of[256];
    constexpr CrcTable() : of() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t state = byte;
            for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ (state & 1 ? 0xEDB88320u : 0u);
            of[byte] = state;
        }
    }
};
static constexpr CrcTable CRC_TABLE;

static uint32_t crc_of_bytes(uint32_t state, const uint8_t *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++) state = (state >> 8) ^ CRC_TABLE.of[(state ^ bytes[i]) & 0xFF];
    return state;
}

#if defined(__x86_64__)
typedef long long Lane __attribute__((vector_size(16)));

static constexpr int LANES_OF_CRC = 4;

// x^exponent modulo the polynomial, its bits in reflected order and shifted by one, as a product of such numbers wants it.
static constexpr long long reflected_power(int exponent) {
    uint32_t rest = 1, reflected = 0;
    for (int i = 0; i < exponent; i++) rest = (rest << 1) ^ (rest >> 31 ? 0x04C11DB7u : 0u);
    for (int bit = 0; bit < 32; bit++) reflected |= (rest >> bit & 1) << (31 - bit);
    return static_cast<long long>(static_cast<uint64_t>(reflected) << 1);
}

#define WITH_CLMUL __attribute__((target("pclmul,sse2")))

// The lane whose remainder, `bits` further on in the message, is that of `lane` here.
template <int bits> WITH_CLMUL static inline Lane moved_on(Lane lane) {
    constexpr long long low = reflected_power(bits + 32), high = reflected_power(bits - 32);
    const Lane powers = {low, high};
    return __builtin_ia32_pclmulqdq128(lane, powers, 0x00) ^ __builtin_ia32_pclmulqdq128(lane, powers, 0x11);
}

WITH_CLMUL static inline Lane lane_at(const uint8_t *bytes) {
    Lane lane;
    memcpy(&lane, bytes, sizeof lane);
    return lane;
}

WITH_CLMUL static uint32_t crc_of_lanes(uint32_t state, const uint8_t *bytes, int64_t count) {
    constexpr int64_t STRIDE = LANES_OF_CRC * static_cast<int64_t>(sizeof(Lane));
    if (count < 2 * STRIDE) return crc_of_bytes(state, bytes, count);
    Lane lanes[LANES_OF_CRC];
    for (int i = 0; i < LANES_OF_CRC; i++) lanes[i] = lane_at(bytes + 16 * i);
    lanes[0] ^= Lane{static_cast<long long>(state), 0};
    int64_t at = STRIDE;
    for (; at + STRIDE <= count; at += STRIDE)
        for (int i = 0; i < LANES_OF_CRC; i++)
            lanes[i] = moved_on<LANES_OF_CRC * 128>(lanes[i]) ^ lane_at(bytes + at + 16 * i);
    for (int i = 1; i < LANES_OF_CRC; i++) lanes[i] ^= moved_on<128>(lanes[i - 1]);
    uint8_t last[sizeof(Lane)];
    memcpy(last, &lanes[LANES_OF_CRC - 1], sizeof last);
    return crc_of_bytes(crc_of_bytes(0, last, sizeof last), bytes + at, count - at);
}
#endif
