// Threads that work through one token together. They share every stage and meet at its end; work is
// divided by output rows or heads, never inside a sum, so results depend neither on their number nor
// on who did what.
#pragma once

#include <stdint.h>

namespace anymamba {

class Team;

// Their seats lie on the stack of who starts them; each looks at those of all others.
constexpr int64_t kMostWorkers = 64;

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

// Some pieces of the part of the work that is its owner's.
struct Claim {
    int64_t owner;
    Share pieces;

    bool is_empty() const { return pieces.is_empty(); }
};

class Team {
  public:
    int64_t size() const { return size_; }
    // Returns when every worker has called it.
    void wait(int64_t worker, Soon soon = {});
    // Begins a stage, of which `pieces` are this worker's own part.
    void begin(int64_t worker, int64_t pieces);
    // The next pieces of the worker's own part, ever fewer; then the last ones of somebody else's;
    // empty when none are left that their owner has begun with. Between two meetings every worker claims until then.
    Claim claim(int64_t worker);

  private:
    friend void run_team(int64_t threads, TeamBody body, void *context);
    int64_t size_ = 1;
    void *meeting_ = nullptr;
};

// At most kMostWorkers; the runtime may give fewer than asked for.
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
