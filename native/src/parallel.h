// The one parallel loop. Results never depend on which worker takes which task, so the schedule may
// be dynamic and the answer is still the same for every run.
#pragma once

#include <stdint.h>

namespace anymamba {

// `body(context, task, worker)` for every task in [0, tasks); worker is in [0, threads).
using Body = void (*)(void *context, int64_t task, int64_t worker);

void run_parallel(int64_t tasks, int64_t threads, Body body, void *context);

const char *threading_name();

template <class Function>
void parallel_for(int64_t tasks, int64_t threads, const Function &function) {
    run_parallel(
        tasks, threads,
        [](void *context, int64_t task, int64_t worker) {
            (*static_cast<const Function *>(context))(task, worker);
        },
        const_cast<Function *>(&function));
}

}  // namespace anymamba
