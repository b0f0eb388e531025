// A meeting of threads that takes less than a microsecond: a token has a hundred of them.
#include "decode_team.h"

#include <atomic>

#if defined(ANYMAMBA_STD_THREADS)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

#if defined(_WIN32)
#include <thread>
#else
#include <sched.h>
#endif

namespace anymamba {
namespace {

struct Meeting {
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<int64_t> number{0};
};

// Spinning hands over in nanoseconds. Where more threads than cores run, spinning alone would burn
// whole time slices, so the core is offered to others after a few microseconds.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline void give_way() {
#if defined(_WIN32)
    std::this_thread::yield();
#else
    sched_yield();
#endif
}

}  // namespace

void Team::wait() {
    if (size_ == 1) return;
    Meeting &meeting = *static_cast<Meeting *>(meeting_);
    const int64_t number = meeting.number.load(std::memory_order_acquire);
    if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        meeting.arrived.store(0, std::memory_order_relaxed);
        meeting.number.store(number + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; meeting.number.load(std::memory_order_acquire) == number; ++spins) {
        relax();
        if (spins >= kSpins) give_way();
    }
}

#if defined(ANYMAMBA_STD_THREADS)

void run_team(int64_t threads, TeamBody body, void *context) {
    Meeting meeting;
    Team team;
    team.size_ = threads;
    team.meeting_ = &meeting;
    std::vector<std::thread> others;
    for (int64_t worker = 1; worker < threads; ++worker)
        others.emplace_back([&, worker] { body(context, team, worker); });
    body(context, team, 0);
    for (std::thread &other : others) other.join();
}

#else

void run_team(int64_t threads, TeamBody body, void *context) {
    Meeting meeting;
    Team team;
    // One thread must not enter the runtime at all: see parallel.cpp.
    if (threads <= 1) {
        body(context, team, 0);
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
#pragma omp single
        {
            team.size_ = omp_get_num_threads();
            team.meeting_ = &meeting;
        }
        body(context, team, omp_get_thread_num());
    }
}

#endif

}  // namespace anymamba
