// Work shared by threads that live for one call: none waits between calls, so a fork finds nothing to break, and each
// has the floating-point environment of its caller. Knows nothing of what is computed.
#pragma once
#include <pthread.h>
#include <stdint.h>

static constexpr int MOST_THREADS = 128;

template <class Work> struct Share {
    const Work *work;
    int64_t begin, end;
    static void *run(void *share) {
        const Share *own = static_cast<const Share *>(share);
        (*own->work)(own->begin, own->end);
        return nullptr;
    }
};

// work(begin, end) covers [0, units), in at most `threads` parts that begin at multiples of `granule` and have at least
// `least` units each. Where no thread can be had, the caller does that part, too.
template <class Work>
static void in_parallel(int64_t units, int64_t granule, int64_t least, int threads, const Work &work) {
    int64_t parts = units / least;
    parts = parts < threads ? parts : threads;
    parts = parts < MOST_THREADS ? parts : MOST_THREADS;
    if (parts < 2) {
        work(0, units);
        return;
    }
    Share<Work> shares[MOST_THREADS];
    pthread_t others[MOST_THREADS];
    bool started[MOST_THREADS];
    for (int64_t part = 0; part < parts; part++) {
        const int64_t begin = units / granule * part / parts * granule;
        const int64_t end = part + 1 < parts ? units / granule * (part + 1) / parts * granule : units;
        shares[part] = {&work, begin, end};
    }
    for (int64_t part = 1; part < parts; part++)
        started[part] = pthread_create(&others[part], nullptr, Share<Work>::run, &shares[part]) == 0;
    Share<Work>::run(&shares[0]);
    for (int64_t part = 1; part < parts; part++) {
        if (started[part])
            pthread_join(others[part], nullptr);
        else
            Share<Work>::run(&shares[part]);
    }
}
