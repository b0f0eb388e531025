// The parallel loop on OpenMP (torch's own runtime, so that no two pools spin against each other) or
// on std::thread, where the compiler has no OpenMP and for the thread sanitizer, which cannot see
// through OpenMP's barriers.
#include "parallel.h"

#if defined(ANYMAMBA_STD_THREADS)

#include <atomic>
#include <thread>
#include <vector>

namespace anymamba {

const char *threading_name() { return "threads"; }

void run_parallel(int64_t tasks, int64_t threads, Body body, void *context) {
    const int64_t team = threads < tasks ? threads : tasks;
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t worker) {
        for (int64_t task = next++; task < tasks; task = next++) body(context, task, worker);
    };
    std::vector<std::thread> others;
    for (int64_t worker = 1; worker < team; ++worker) others.emplace_back(work, worker);
    work(0);
    for (std::thread &other : others) other.join();
}

}  // namespace anymamba

#else

#include <omp.h>

namespace anymamba {

const char *threading_name() { return "openmp"; }

void run_parallel(int64_t tasks, int64_t threads, Body body, void *context) {
    const int64_t team = threads < tasks ? threads : tasks;
    // One thread must not enter the runtime at all: in a forked child its pool is gone, and a
    // parallel region would wait for it for ever.
    if (team <= 1) {
        for (int64_t task = 0; task < tasks; ++task) body(context, task, 0);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(team))
    for (int64_t task = 0; task < tasks; ++task) body(context, task, omp_get_thread_num());
}

}  // namespace anymamba

#endif
