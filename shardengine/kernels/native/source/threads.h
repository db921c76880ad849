// Work shared by threads that live for one call: none waits between calls, so a fork finds nothing to break, and each
// has the floating-point environment of its caller. Knows nothing of what is computed.
//
// A thread begins with a part of its own, which lies together in memory, so that it meets the pages that it met before;
// when that is done it helps with the parts of the others. A thread that starts late, on a core that is busy or whose
// memory is slower keeps nobody waiting for more than the last piece.
#pragma once
#include <pthread.h>
#include <stdint.h>

static constexpr int MOST_THREADS = 128;
static constexpr int64_t PIECES = 4;  // a piece is this part of what is left

struct Part {
    int64_t next, end;  // next: where nobody has begun, changed by all threads
};

template <class Work> struct Share {
    const Work *work;
    Part *parts;
    int64_t count, own, granule, smallest;

    // Takes a piece of the part, if any is left.
    bool take(Part &part, int64_t &begin, int64_t &end) const {
        begin = __atomic_load_n(&part.next, __ATOMIC_RELAXED);
        do {
            const int64_t left = part.end - begin, some = left / PIECES / granule * granule;
            const int64_t size = some < smallest ? smallest : some;
            end = size < left ? begin + size : part.end;
            if (left <= 0) return false;
        } while (!__atomic_compare_exchange_n(&part.next, &begin, end, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return true;
    }

    static void *run(void *share) {
        const Share &own = *static_cast<const Share *>(share);
        int64_t begin, end;
        for (int64_t turn = 0; turn < own.count; turn++)
            while (own.take(own.parts[(own.own + turn) % own.count], begin, end)) (*own.work)(begin, end);
        return nullptr;
    }
};

// work(begin, end) is called for pieces that cover [0, units) and begin at multiples of `granule`, by at most `threads`
// threads that have at least `least` units each. Where no thread can be had, the others do its part.
template <class Work>
static void in_parallel(int64_t units, int64_t granule, int64_t least, int threads, const Work &work) {
    int64_t count = units / least;
    count = count < threads ? count : threads;
    count = count < MOST_THREADS ? count : MOST_THREADS;
    if (count < 2) {
        work(0, units);
        return;
    }
    Part parts[MOST_THREADS];
    Share<Work> shares[MOST_THREADS];
    pthread_t others[MOST_THREADS];
    bool started[MOST_THREADS];
    const int64_t quarter = least / 4 / granule * granule, smallest = quarter < granule ? granule : quarter;
    for (int64_t i = 0; i < count; i++) {
        parts[i].next = units / granule * i / count * granule;
        parts[i].end = i + 1 < count ? units / granule * (i + 1) / count * granule : units;
        shares[i] = {&work, parts, count, i, granule, smallest};
    }
    for (int64_t i = 1; i < count; i++)
        started[i] = pthread_create(&others[i], nullptr, Share<Work>::run, &shares[i]) == 0;
    Share<Work>::run(&shares[0]);
    for (int64_t i = 1; i < count; i++)
        if (started[i]) pthread_join(others[i], nullptr);
}
