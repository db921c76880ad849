// Checks of source/threads.h on its own: prints what is wrong, nothing where all is well.
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include <atomic>
#include <vector>

static std::atomic<int> threads_left;

static int limited_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return threads_left-- > 0 ? pthread_create(thread, attributes, run, argument) : EAGAIN;
}

#define pthread_create limited_create
#include "threads.h"

static void check(bool right, const char *what, int64_t units, int64_t granule, int threads) {
    if (!right) printf("%s: %lld units, granule %lld, %d threads\n", what, (long long)units, (long long)granule, threads);
}

// Every unit in one piece, which begins where it may.
static void check_cover(int64_t units, int64_t granule, int64_t least, int threads) {
    std::vector<std::atomic<int>> seen(static_cast<size_t>(units));
    std::atomic<int> misplaced{0};
    in_parallel(units, granule, least, threads, [&](int64_t begin, int64_t end) {
        if (begin % granule || begin >= end || end > units) misplaced++;
        for (int64_t i = begin; i < end; i++) seen[static_cast<size_t>(i)]++;
    });
    bool once = true;
    for (const std::atomic<int> &times : seen) once = once && times == 1;
    check(once, "a unit was not met once", units, granule, threads);
    check(!misplaced, "a piece begins or ends where it may not", units, granule, threads);
}

// One piece does not end before all others have: the one whose thread began with unit `first`.
static void check_help(int64_t units, int threads, int64_t first) {
    std::atomic<int64_t> done{0};
    std::atomic<bool> alone{true};
    in_parallel(units, 64, 4096, threads, [&](int64_t begin, int64_t end) {
        if (begin == first) {
            const int64_t others = units - (end - begin);
            for (int i = 0; i < 20000 && done < others; i++) usleep(1000);
            alone = done < others;
        }
        done += end - begin;
    });
    check(!alone, "a thread that waits kept its part", units, 64, threads);
}

int main() {
    for (int limit : {1000000, 1, 0})  // that many threads can be had
        for (int64_t units : {1, 63, 64, 4095, 8191, 8192, 100003})
            for (int64_t granule : {1, 64})
                for (int threads : {1, 2, 3, 7, 1000}) {
                    threads_left = limit;
                    check_cover(units, granule, granule == 1 ? 4 : 4096, threads);
                }
    threads_left = 1000000;
    check_help(100032, 2, 0);      // the caller waits
    check_help(100032, 2, 49984);  // the thread that it made waits: 781 granules in the second of two parts
    return 0;
}
