// Threads that work through one token together. They share every stage and meet at its end; work is
// divided by output rows or heads, never inside a sum, so results do not depend on their number.
#pragma once

#include <stdint.h>

namespace anymamba {

class Team;

// `body(context, team, worker)` on each worker; worker is in [0, team.size()).
using TeamBody = void (*)(void *context, Team &team, int64_t worker);

class Team {
  public:
    int64_t size() const { return size_; }
    // Returns when every worker has called it.
    void wait();

  private:
    friend void run_team(int64_t threads, TeamBody body, void *context);
    int64_t size_ = 1;
    void *meeting_ = nullptr;
};

// The runtime may give fewer threads than asked for.
void run_team(int64_t threads, TeamBody body, void *context);

template <class Function>
void run_together(int64_t threads, const Function &function) {
    run_team(
        threads,
        [](void *context, Team &team, int64_t worker) {
            (*static_cast<const Function *>(context))(team, worker);
        },
        const_cast<Function *>(&function));
}

// The part of `count` things that one worker does, in whole units.
struct Share {
    int64_t first, last;

    Share(int64_t count, int64_t unit, int64_t worker, int64_t workers) {
        const int64_t units = (count + unit - 1) / unit;
        first = units * worker / workers * unit;
        last = units * (worker + 1) / workers * unit;
        if (last > count) last = count;
    }
};

}  // namespace anymamba
