// Narrow heads that share no B and C with others: the recurrence itself, token by token
// (src/anymamba/ops/ssd/README.md, section 7).
//
// A chunk of l tokens spends l r multiplications per token on C B^T to spare some of the 3 p r of
// the state, and fills panels of two vectors with p numbers. With few numbers neither pays.
#pragma once

#include "parallel.h"
#include "ssd_states.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

// Measured on a Zen 4 with 16, 8 and 4 lanes: up to these sizes the forward is faster and the backward
// not slower than chunks.
constexpr int64_t kNarrow = kWidth > 8 ? kWidth : 8;
constexpr int64_t kNarrowState = 1024;

ANYMAMBA_INLINE bool is_narrow(const Sizes &sizes) {
    return sizes.rank == 1 && sizes.groups == sizes.heads && sizes.width <= kNarrow &&
           sizes.width * sizes.state <= kNarrowState;
}

// The kernels for such heads; tensors and sizes are those of the entries that call them.
int64_t narrow_forward(const anymamba_call &call);
int64_t narrow_backward(const anymamba_call &call);

// Tokens whose sums over lanes are taken together.
constexpr int64_t kTokensTogether = 16;
// How many tokens ahead rows are asked for: those of one head lie a whole token apart, where the
// machine does not look by itself.
constexpr int64_t kTokensAhead = 6;
// Vectors of the state axis that are walked through together: as many as registers hold beside
// what is summed along the width.
constexpr int kVectorsTogether = 4;

// body(Count<N>{}, first number) for all vectors of a row, up to kVectorsTogether at a time.
template <class Body>
ANYMAMBA_INLINE void for_vectors(int64_t numbers, const Body &body) {
    for (int64_t first = 0; first < numbers; first += kVectorsTogether * kWidth)
        run_tile<kVectorsTogether>(smaller(kVectorsTogether, (numbers - first) / kWidth), first,
                                   body);
}

// One head of one sequence.
struct NarrowTask {
    int64_t sequence, head, row, start, stop;

    NarrowTask(const Sizes &sizes, const anymamba_tensor &borders, int64_t index)
        : sequence(index / sizes.heads),
          head(index % sizes.heads),
          row(sequence),
          start(0),
          stop(sizes.length) {
        if (sizes.sequences == 0) return;
        const int64_t *at = static_cast<const int64_t *>(borders.data);
        row = 0;
        start = at[sequence];
        stop = at[sequence + 1];
    }
};

inline int64_t narrow_tasks(const Sizes &sizes) {
    return (sizes.sequences > 0 ? sizes.sequences : sizes.rows) * sizes.heads;
}

// The lengths of rows as they are kept: whole vectors.
struct NarrowShape {
    int64_t width, state;  // numbers of a row of v, and of one of B, C or the state
    int64_t head;          // numbers of a head's state

    explicit NarrowShape(const Sizes &sizes)
        : width(round_up(sizes.width, kWidth)),
          state(round_up(sizes.state, kWidth)),
          head(sizes.width * state) {}
};

// What a stretch of tokens has per token: its decay, two weights and a value.
//
// A decay is rounded, and one that is the same for thousands of tokens would be wrong by as much in
// all of them. A weak one is therefore kept in two parts, decay + rest, which a state meets both.
struct NarrowSteps {
    float *decay, *rest, *scale, *own;
    float *v;  // [token][width]

    NarrowSteps(Carver &carver, const NarrowShape &shape, int64_t tokens)
        : decay(carver.floats(round_up(tokens, kWidth))),
          rest(carver.floats(round_up(tokens, kWidth))),
          scale(carver.floats(round_up(tokens, kWidth))),
          own(carver.floats(round_up(tokens, kWidth))),
          v(carver.floats(tokens * shape.width)) {}

    void fill(const StepTensors &steps, const anymamba_tensor &values, const Sizes &sizes,
              const NarrowShape &shape, const Chunk &chunk, int64_t head) const {
        const int64_t padded = round_up(chunk.steps, kWidth);
        fill_weights(steps.da, chunk, 1, head, padded, decay);
        fill_weights(steps.scale, chunk, 1, head, padded, scale);
        fill_weights(steps.own, chunk, 1, head, padded, own);
        for (int64_t token = 0; token < padded; token += kWidth) {
            const Vec da = load(decay + token), less = expm1_fraction(da), weak = 1.0f + less;
            const IntVec is_weak = (da > splat(-kWeak)) & (da < splat(kWeak));
            store(decay + token, select(is_weak, weak, exp(da)));
            store(rest + token, select(is_weak, less - (weak - 1.0f), Vec{}));
        }
        copy_rows(Rows(values, chunk, 1, head), chunk.steps, chunk.steps, sizes.width, v,
                  shape.width);
    }

  private:
    // Stronger ones forget a state before their errors add up.
    static constexpr float kWeak = 0.34f;
};

// The rows of B or C, or of their gradients, of one head in consecutive tokens.
struct StateRows : Rows {
    int64_t columns;

    StateRows(const anymamba_tensor &of, const Chunk &chunk, int64_t head, int64_t state)
        : Rows(of, chunk, 1, head), columns(state) {}

    ANYMAMBA_INLINE const float *read(int64_t token, float *scratch) const {
        return read_row(*tensor, at(token), columns, scratch);
    }
    ANYMAMBA_INLINE float *open(int64_t token, float *scratch) const {
        return open_row(*tensor, at(token), columns, scratch);
    }
    ANYMAMBA_INLINE void finish(int64_t token, const float *row) const {
        finish_row(*tensor, at(token), columns, row);
    }
    ANYMAMBA_INLINE void ask(int64_t token) const { ask_for_row(*tensor, at(token), columns); }
};

// The state as rows over the state axis, [width][state]; padding is zero.
inline void load_rows(const HeadState &from, const Sizes &sizes, const NarrowShape &shape,
                      float *to) {
    for (int64_t p = 0; p < sizes.width; ++p, to += shape.state)
        visit_state(from, sizes, p, [&](int64_t r, Vec x) { store(to + r, x); });
}

inline void store_rows(const float *from, const Sizes &sizes, const NarrowShape &shape,
                       const HeadState &to) {
    for (int64_t p = 0; p < sizes.width; ++p)
        finish_row(to.tensor, to.at(p, 0), sizes.state, from + p * shape.state);
}

// Adds to a sum that lies in memory, or begins it.
ANYMAMBA_INLINE void collect(float *sum, Vec more, bool begins) {
    store(sum, begins ? more : load(sum) + more);
}

// run(task, buffers) for every head of every sequence; returns the workspace that it wants.
template <class Buffers, class Work, class Run>
int64_t run_narrow(const anymamba_call &call, const Work &of, const Run &run) {
    const int64_t tasks = narrow_tasks(of.sizes);
    Carver measure{nullptr};
    Buffers(measure, of);
    const int64_t wanted = measure.used * smaller(call.threads, tasks);
    if (call.workspace == nullptr) return wanted;
    parallel_for(tasks, call.threads, [&](int64_t index, int64_t worker) {
        Carver carver{static_cast<char *>(call.workspace) + worker * measure.used};
        run(of, NarrowTask(of.sizes, of.borders, index), Buffers(carver, of));
    });
    return wanted;
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
