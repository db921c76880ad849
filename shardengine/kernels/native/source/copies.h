// Many tensors into one, as `flatten` of operations.py has it: in the namespace of one instruction set.

constexpr int64_t COPY_TILE = 256;
constexpr int64_t CACHE_LINE = 64;

#if defined(__x86_64__)
#if defined(WITH_F16C)
typedef EightFloats StreamLane;
#else
typedef FourFloats StreamLane;
#endif

// Past the caches: a line of which all is written is not read first. That needs an address that is a multiple of the
// lane's size, and later writes of this thread wait for it only at a fence.
INLINE void stream(uint8_t *to, const StreamLane &lane) {
#if defined(__clang__)
    __builtin_nontemporal_store(lane, reinterpret_cast<StreamLane *>(to));
#elif defined(WITH_F16C)
    __builtin_ia32_movntps256(reinterpret_cast<float *>(to), lane);
#else
    __builtin_ia32_movntps(reinterpret_cast<float *>(to), lane);
#endif
}

// Whole lines, to where one begins. from: null, zeros.
FUNCTION void stream_lines(uint8_t *to, const uint8_t *from, int64_t bytes) {
    constexpr int64_t LANE = sizeof(StreamLane), PER_LINE = CACHE_LINE / LANE;
    StreamLane lanes[PER_LINE] = {};
    for (int64_t at = 0; at < bytes; at += CACHE_LINE) {
        if (from)
            for (int64_t i = 0; i < PER_LINE; i++) __builtin_memcpy(&lanes[i], from + at + i * LANE, LANE);
        for (int64_t i = 0; i < PER_LINE; i++) stream(to + at + i * LANE, lanes[i]);
    }
}
#endif

INLINE void end_stream() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

// from: null, zeros.
FUNCTION void copy_bytes(uint8_t *to, const uint8_t *from, int64_t bytes, bool streams) {
#if defined(__x86_64__)
    if (streams && bytes >= 4 * CACHE_LINE) {
        const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % CACHE_LINE);
        const int64_t lines = (bytes - head) / CACHE_LINE * CACHE_LINE;
        copy_bytes(to, from, head, false);
        stream_lines(to + head, from ? from + head : nullptr, lines);
        copy_bytes(to + head + lines, from ? from + head + lines : nullptr, bytes - head - lines, false);
        return;
    }
#endif
    (void)streams;
    if (from)
        __builtin_memcpy(to, from, static_cast<size_t>(bytes));
    else
        __builtin_memset(to, 0, static_cast<size_t>(bytes));
}

INLINE int64_t size_of(int32_t type) { return type == FP32 ? 4 : 2; }

FUNCTION void scale_by(float factor, const float *from, float *to, int64_t count) {
    EACH_ALONE
    for (int64_t i = 0; i < count; i++) to[i] = from[i] * factor;
}

// Elements [from, from + count) of a tensor to number `at` of out.
FUNCTION void join_elements(const CopyArguments &a, const void *tensor, int64_t from, int64_t at, int64_t count) {
    const int64_t size = size_of(a.out_type);
    if (a.type == a.out_type && a.scale == 1.0f && !a.adds) {
        copy_bytes(static_cast<uint8_t *>(a.out) + at * size, static_cast<const uint8_t *>(tensor) + from * size,
                   count * size, a.streams);
        return;
    }
    float room[COPY_TILE], room_of_out[COPY_TILE];
    for (int64_t done = 0; done < count; done += COPY_TILE) {
        const int64_t many = count - done < COPY_TILE ? count - done : COPY_TILE;
        const float *values = widened(a.type, tensor, from + done, room, many);
        if (a.scale != 1.0f) {
            scale_by(a.scale, values, room, many);
            values = room;
        }
        if (a.adds) {
            float *sum = a.out_type == FP32 ? static_cast<float *>(a.out) + at + done : room_of_out;
            const float *there = widened(a.out_type, a.out, at + done, room_of_out, many);
            finish<true, false>(values, there, 1.0f, sum, many);
            values = sum;
        }
        narrow(a.out_type, values, a.out, at + done, many);
    }
}

// Elements [begin, end) of out.
FUNCTION void flatten(const CopyArguments &a, int64_t begin, int64_t end) {
    const int64_t size = size_of(a.out_type);
    int64_t low = 0, high = a.count;  // the first tensor that ends behind `begin`
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (a.starts[middle] + a.lengths[middle] > begin)
            high = middle;
        else
            low = middle + 1;
    }
    for (int64_t at = begin; at < end; low++) {
        const int64_t start = low < a.count ? a.starts[low] : a.length, gap_end = start < end ? start : end;
        if (gap_end > at) {
            if (!a.adds)
                copy_bytes(static_cast<uint8_t *>(a.out) + at * size, nullptr, (gap_end - at) * size, a.streams);
            at = gap_end;
        }
        if (at >= end) break;
        const int64_t tensor_end = start + a.lengths[low], until = tensor_end < end ? tensor_end : end;
        if (until > at) {
            join_elements(a, reinterpret_cast<const void *>(a.addresses[low]), at - start, at, until - at);
            at = until;
        }
    }
    if (a.streams) end_stream();
}
