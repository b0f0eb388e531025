// Narrow heads that share no B and C with others: the recurrence itself, token by token
// (src/anymamba/ops/ssd/README.md, section 7).
//
// A chunk of l tokens spends l r multiplications per token on C B^T to spare some of the 3 p r of
// the state, and fills panels of two vectors with p numbers. With few numbers neither pays.
#pragma once

#include "ssd_states.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

// Up to these sizes the recurrence is faster, as measured on a Zen 4 with 16, 8 and 4 lanes.
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

// What a stretch of tokens has per token: three numbers and a value.
struct NarrowSteps {
    float *decay, *scale, *own;
    float *v;  // [token][width]

    NarrowSteps(Carver &carver, const NarrowShape &shape, int64_t tokens)
        : decay(carver.floats(round_up(tokens, kWidth))),
          scale(carver.floats(tokens)),
          own(carver.floats(tokens)),
          v(carver.floats(tokens * shape.width)) {}

    void fill(const StepTensors &steps, const anymamba_tensor &values, const Sizes &sizes,
              const NarrowShape &shape, const Chunk &chunk, int64_t head) const {
        const auto read = [&](const anymamba_tensor &from, float *to) {
            const int64_t first = first_step(from, chunk, head);
            for (int64_t token = 0; token < chunk.steps; ++token)
                to[token] = read_one(from, first + token * from.stride[1]);
        };
        read(steps.da, decay);
        read(steps.scale, scale);
        read(steps.own, own);
        for (int64_t token = 0; token < chunk.steps; token += kWidth)
            store(decay + token, exp(load_most(decay + token, chunk.steps - token)));
        copy_rows(Rows(values, chunk, 1, head), chunk.steps, chunk.steps, sizes.width, v,
                  shape.width);
    }
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
    ANYMAMBA_INLINE void ask(int64_t token) const {
        const int64_t size = tensor->dtype == ANYMAMBA_BFLOAT16 ? 2 : 4;
        const char *line = static_cast<const char *>(tensor->data) + at(token) * size;
        for (int64_t place = 0; place < columns * size; place += 64)
            __builtin_prefetch(line + place, 0, 2);
    }
};

// The state as rows over the state axis, [width][state]; padding is zero.
inline void load_rows(const HeadState &from, const Sizes &sizes, const NarrowShape &shape,
                      float *to) {
    for (int64_t p = 0; p < sizes.width; ++p, to += shape.state) {
        if (from.tensor.stride[3] == 1) {
            visit_row(from.tensor, from.at(p, 0), sizes.state,
                      [&](int64_t r, Vec x) { store(to + r, x); });
            continue;
        }
        for (int64_t r = 0; r < shape.state; ++r)
            to[r] = r < sizes.state ? read_one(from.tensor, from.at(p, r)) : 0.0f;
    }
}

inline void store_rows(const float *from, const Sizes &sizes, const NarrowShape &shape,
                       const HeadState &to) {
    for (int64_t p = 0; p < sizes.width; ++p)
        finish_row(to.tensor, to.at(p, 0), sizes.state, from + p * shape.state);
}

// Adds to a sum that lies in memory, or begins it.
ANYMAMBA_INLINE void add_to(float *sum, Vec more, bool begins) {
    store(sum, begins ? more : load(sum) + more);
}

// Sums over the lanes of `count` vectors that lie one after the other; what lies behind them, up to
// whole kWidth vectors, is read and written too.
inline void sum_all_lanes(const float *from, int64_t count, float *to) {
    for (int64_t first = 0; first < count; first += kWidth)
        store(to + first, sum_lanes_of_each(from + first * kWidth));
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
