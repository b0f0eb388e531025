// A meeting of threads that takes two of them less than a microsecond: a token has a hundred.
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

// What one worker tells the others, on lines of its own: what somebody waits for must not lie where
// somebody else writes. Between cores that share no cache a line takes 0.2 microseconds.
struct Seat {
    // The number of the last meeting that it has come to.
    alignas(64) std::atomic<uint32_t> arrived{0};
    // The pieces of its part that nobody has claimed: the first in the upper half, the end in the
    // lower.
    alignas(64) std::atomic<uint64_t> part{0};
};

struct Meeting {
    Seat seats[kMostWorkers];
    alignas(64) std::atomic<uint32_t> sleepers{0};
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
inline uint64_t packed(int64_t first, int64_t last) {
    return (uint64_t)first << 32 | (uint64_t)last;
}
inline Share unpacked(uint64_t part) {
    return {(int64_t)(part >> 32), (int64_t)(part & 0xFFFFFFFFu)};
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether a worker has come to the meeting of this number. It may have come to the next one as well.
inline bool is_there(const Seat &seat, uint32_t number) {
    return (int32_t)(seat.arrived.load(std::memory_order_acquire) - number) >= 0;
}

// Waits for somebody to arrive. A worker that sleeps leaves its core to the others, and has it again
// as soon as it is woken; one that only offers its core, elsewhere, may be without it for a whole time
// slice, four milliseconds.
#if defined(__linux__)
void sleep_until(Meeting &meeting, Seat &seat, uint32_t number) {
    meeting.sleepers.fetch_add(1);
    for (uint32_t seen; (int32_t)((seen = seat.arrived.load()) - number) < 0;)
        syscall(SYS_futex, &seat.arrived, FUTEX_WAIT_PRIVATE, seen, nullptr);
    meeting.sleepers.fetch_sub(1);
}

// Whoever is not seen here has yet to look at the new number, which is why both sides are
// sequentially consistent.
void wake_sleepers(Meeting &meeting, Seat &own) {
    if (meeting.sleepers.load() > 0)
        syscall(SYS_futex, &own.arrived, FUTEX_WAKE_PRIVATE, INT32_MAX);
}
#else
void sleep_until(Meeting &, Seat &seat, uint32_t number) {
    while (!is_there(seat, number))
#if defined(_WIN32)
        std::this_thread::yield();
#else
        sched_yield();
#endif
}

void wake_sleepers(Meeting &, Seat &) {}
#endif

}  // namespace

void Team::wait(int64_t worker, Soon soon) {
    if (size_ == 1) return;
    Meeting &meeting = *static_cast<Meeting *>(meeting_);
    Seat &own = meeting.seats[worker];
    const uint32_t number = own.arrived.load(std::memory_order_relaxed) + 1;
    own.arrived.store(number);
    wake_sleepers(meeting, own);
    int64_t asked = 0, most = smaller(soon.bytes, kLastSoon / soon.places);
    for (int64_t other = 0; other < size_; ++other) {
        Seat &seat = meeting.seats[other];
        for (int spins = 0; !is_there(seat, number);) {
            most = smaller(soon.bytes, kMostSoon / soon.places);
            if (asked < most) {
                for (int64_t lines = 0; lines < kLines; lines += soon.places, asked += 64)
                    soon.ask(asked);
                continue;
            }
            relax();
            if (++spins == kSpins) sleep_until(meeting, seat, number);
        }
    }
    for (; asked < most && asked < kLastSoon / soon.places; asked += 64) soon.ask(asked);
}

// Every worker has a part, whose memory it reads in long streams. Cores are never equally fast for
// long: another program, a shared memory, a stage that only one of them has had. So a worker claims
// half of what is left of its part, then half of the rest, and who has nothing left takes half of what
// another has not claimed yet, from the end.
void Team::begin(int64_t worker, int64_t pieces) {
    static_cast<Meeting *>(meeting_)->seats[worker].part.store(packed(0, pieces),
                                                               std::memory_order_relaxed);
}

Claim Team::claim(int64_t worker) {
    Seat *seats = static_cast<Meeting *>(meeting_)->seats;
    std::atomic<uint64_t> &own = seats[worker].part;
    uint64_t seen = own.load(std::memory_order_relaxed);
    while (!unpacked(seen).is_empty()) {
        const Share left = unpacked(seen);
        const int64_t part = size_ == 1 ? left.last : left.first + (left.last - left.first + 1) / 2;
        if (own.compare_exchange_weak(seen, packed(part, left.last), std::memory_order_relaxed))
            return {worker, {left.first, part}};
    }
    // A part that was not begun yet looks like one that is done: its owner has it for itself.
    for (int64_t next = 1; next < size_; ++next) {
        const int64_t owner = (worker + next) % size_;
        seen = seats[owner].part.load(std::memory_order_relaxed);
        while (!unpacked(seen).is_empty()) {
            const Share left = unpacked(seen);
            const int64_t from = left.last - (left.last - left.first + 1) / 2;
            if (seats[owner].part.compare_exchange_weak(seen, packed(left.first, from),
                                                        std::memory_order_relaxed))
                return {owner, {from, left.last}};
        }
    }
    return {worker, {0, 0}};
}

#if defined(ANYMAMBA_STD_THREADS)

void run_team(int64_t threads, TeamBody body, void *context) {
    Meeting meeting;
    Team team;
    team.size_ = smaller(threads, kMostWorkers);
    team.meeting_ = &meeting;
    std::vector<std::thread> others;
    for (int64_t worker = 1; worker < team.size_; ++worker)
        others.emplace_back([&, worker] { body(context, team, worker); });
    body(context, team, 0);
    for (std::thread &other : others) other.join();
}

#else

void run_team(int64_t threads, TeamBody body, void *context) {
    Meeting meeting;
    Team team;
    team.meeting_ = &meeting;
    // One thread must not enter the runtime at all: see parallel.cpp.
    if (threads <= 1) {
        body(context, team, 0);
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(smaller(threads, kMostWorkers)))
    {
#pragma omp single
        team.size_ = omp_get_num_threads();
        body(context, team, omp_get_thread_num());
    }
}

#endif

}  // namespace anymamba
