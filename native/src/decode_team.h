// Threads that work through one token together. They share every stage and meet at its end; work is
// divided by output rows or heads, never inside a sum, so results depend neither on their number nor
// on who did what.
#pragma once

#include <stdint.h>

namespace anymamba {

class Team;

// Some of the pieces of a stage's work: those from `first` to before `last`.
struct Share {
    int64_t first, last;

    bool is_empty() const { return first >= last; }
};

// `body(context, team, worker)` on each worker; worker is in [0, team.size()).
using TeamBody = void (*)(void *context, Team &team, int64_t worker);

// Memory that a worker reads after a meeting, at several places at once. It is asked for while the
// worker waits, which costs nothing: the worker has to read it anyway, and nobody waits for this
// worker any more.
struct Soon {
    const char *at = nullptr;
    int64_t bytes = 0;              // of each place
    int64_t places = 1, apart = 0;  // `apart` bytes from each other

    // Asks for one line of each place, into the second cache.
    void ask(int64_t offset) const {
        for (int64_t place = 0; place < places; ++place)
            __builtin_prefetch(at + place * apart + offset, 0, 2);
    }
};

class Team {
  public:
    int64_t size() const { return size_; }
    // Returns when every worker has called it.
    void wait(Soon soon = {});
    // Of `count` pieces of work, in whole units, those that are a worker's own. It may be empty.
    Share first(int64_t worker, int64_t count, int64_t unit) const;
    // Some of the others; empty when none are left. Between two meetings all workers share the same
    // work, each of them until nothing is left.
    Share take(int64_t count, int64_t unit);

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

}  // namespace anymamba
