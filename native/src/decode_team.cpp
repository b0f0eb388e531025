// A meeting of threads that takes less than a microsecond: a token has a hundred of them.
#include "decode_team.h"

#include <atomic>

#if defined(ANYMAMBA_STD_THREADS)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(_WIN32)
#include <thread>
#else
#include <sched.h>
#endif

namespace anymamba {
namespace {

struct Meeting {
    alignas(64) std::atomic<int64_t> arrived{0};
    // Of the next meeting, and how many of those who wait for it sleep.
    alignas(64) std::atomic<uint32_t> number{0};
    std::atomic<uint32_t> sleepers{0};
    // Units of the current stage that are taken, besides the first shares.
    alignas(64) std::atomic<int64_t> taken{0};
};

// Spinning hands over in nanoseconds, but where another program has one of the cores, two workers
// share the other, and who spins keeps back whom it waits for.
constexpr int kSpins = 1500;

// Lines that are asked for at a time.
constexpr int64_t kLines = 4;
// Asked for at most: a small part of the second cache.
constexpr int64_t kMostSoon = 64 << 10;
// Who comes last need not wait, and asks for less.
constexpr int64_t kLastSoon = 16 << 10;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t units_of(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }
inline int64_t first_units(int64_t units, int64_t workers) { return 3 * units / (4 * workers); }

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits for another number. A worker that sleeps leaves its core to the others, and has it again as
// soon as it is woken; one that only offers its core, elsewhere, may be without it for a whole time
// slice, four milliseconds.
#if defined(__linux__)
void sleep_until_next(Meeting &meeting, uint32_t number) {
    meeting.sleepers.fetch_add(1);
    while (meeting.number.load() == number)
        syscall(SYS_futex, &meeting.number, FUTEX_WAIT_PRIVATE, number, nullptr);
    meeting.sleepers.fetch_sub(1);
}

// Whoever is not seen here has yet to look at the new number, which is why both sides are
// sequentially consistent.
void wake_sleepers(Meeting &meeting) {
    if (meeting.sleepers.load() > 0)
        syscall(SYS_futex, &meeting.number, FUTEX_WAKE_PRIVATE, INT32_MAX);
}
#else
void sleep_until_next(Meeting &meeting, uint32_t number) {
    while (meeting.number.load() == number)
#if defined(_WIN32)
        std::this_thread::yield();
#else
        sched_yield();
#endif
}

void wake_sleepers(Meeting &) {}
#endif

}  // namespace

void Team::wait(Soon soon) {
    if (size_ == 1) return;
    Meeting &meeting = *static_cast<Meeting *>(meeting_);
    const uint32_t number = meeting.number.load(std::memory_order_acquire);
    if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        meeting.arrived.store(0, std::memory_order_relaxed);
        meeting.taken.store(0, std::memory_order_relaxed);
        meeting.number.store(number + 1);
        wake_sleepers(meeting);
        const int64_t last = smaller(soon.bytes, kLastSoon / soon.places);
        for (int64_t asked = 0; asked < last; asked += 64) soon.ask(asked);
        return;
    }
    const int64_t most = smaller(soon.bytes, kMostSoon / soon.places);
    int64_t asked = 0;
    for (int spins = 0; meeting.number.load(std::memory_order_acquire) == number;) {
        if (asked < most) {
            for (int64_t lines = 0; lines < kLines; lines += soon.places, asked += 64)
                soon.ask(asked);
            continue;
        }
        relax();
        if (++spins == kSpins) return sleep_until_next(meeting, number);
    }
}

// Cores are never equally fast for long: another program, a shared memory, a stage that only one
// of them has had. So a quarter of the work is handed out in small and ever smaller shares to
// whoever comes; the rest, the first shares, keeps the streams of memory long.
Share Team::first(int64_t worker, int64_t count, int64_t unit) const {
    if (size_ == 1) return {0, count};
    const int64_t each = first_units(units_of(count, unit), size_);
    return {worker * each * unit, smaller(count, (worker + 1) * each * unit)};
}

Share Team::take(int64_t count, int64_t unit) {
    if (size_ == 1) return {0, 0};
    const int64_t units = units_of(count, unit), start = size_ * first_units(units, size_);
    const int64_t shared = units - start, least = units / 32 + 1;
    std::atomic<int64_t> &taken = static_cast<Meeting *>(meeting_)->taken;
    int64_t seen = taken.load(std::memory_order_relaxed), part;
    do {
        if (seen >= shared) return {0, 0};
        part = (shared - seen) / (2 * size_);
        if (part < least) part = smaller(least, shared - seen);
    } while (!taken.compare_exchange_weak(seen, seen + part, std::memory_order_relaxed));
    const int64_t begin = start + seen;
    return {begin * unit, smaller(count, (begin + part) * unit)};
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
