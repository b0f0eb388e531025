// The SSD core of narrow heads, forward. Tensors and sizes are those of ssd_forward.cpp.
#include "ssd_narrow.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace ssd {
namespace {

struct NarrowForward {
    Sizes sizes;
    NarrowShape shape;
    const anymamba_tensor &v, &b, &c, &initial, &borders, &y, &final_state;
    StepTensors steps;

    explicit NarrowForward(const anymamba_call &call)
        : sizes(call.sizes),
          shape(sizes),
          v(call.tensors[0]),
          b(call.tensors[2]),
          c(call.tensors[3]),
          initial(call.tensors[4]),
          borders(call.tensors[7]),
          y(call.tensors[8]),
          final_state(call.tensors[9]),
          steps{call.tensors[1], call.tensors[5], call.tensors[6]} {}

    // Sums of a token that are taken over lanes: the state times C for each row, and B times C.
    int64_t sums() const { return sizes.width + 1; }
};

struct Buffers {
    float *state;   // [width][state]
    float *b, *c;   // a row each, where the tensor's own cannot be read in whole vectors
    float *sums;    // [token][sum] vectors
    float *totals;  // [token][sum]
    float *row;     // of y
    NarrowSteps tokens;

    Buffers(Carver &carver, const NarrowForward &of)
        : state(carver.floats(of.shape.head)),
          b(carver.floats(of.shape.state)),
          c(carver.floats(of.shape.state)),
          sums(carver.floats(kTokensTogether * of.sums() * kWidth)),
          totals(carver.floats(kTokensTogether * of.sums())),
          row(carver.floats(of.shape.width)),
          tokens(carver, of.shape, kTokensTogether) {}
};

// One token of some vectors of the state axis. `sums` receives what they add to the state before
// the token times C, for each row, and to B times C.
template <int kVectors>
ANYMAMBA_INLINE void advance(const NarrowForward &of, const NarrowSteps &tokens, int64_t token,
                             const float *b, const float *c, bool is_first, float *state,
                             float *sums) {
    const float *v = tokens.v + token * of.shape.width;
    const float decay = tokens.decay[token], rest = tokens.rest[token];
    const float scale = tokens.scale[token];
    Vec own_b[kVectors], own_c[kVectors], pair = {};
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
        own_b[k] = load(b + k * kWidth);
        own_c[k] = load(c + k * kWidth);
        pair += own_b[k] * own_c[k];
    }
    for (int64_t p = 0; p < of.sizes.width; ++p, state += of.shape.state, sums += kWidth) {
        const Vec value = splat(scale * v[p]);
        Vec sum = {};
#pragma GCC unroll 4
        for (int k = 0; k < kVectors; ++k) {
            const Vec before = load(state + k * kWidth);
            sum += before * own_c[k];
            store(state + k * kWidth, before * decay + (before * rest + value * own_b[k]));
        }
        collect(sums, sum, is_first);
    }
    collect(sums, pair, is_first);
}

// A few tokens, from the state before them to the one behind them.
void walk(const NarrowForward &of, const NarrowTask &task, const Chunk &chunk,
          const Buffers &buffers) {
    const Sizes &sizes = of.sizes;
    const NarrowSteps &tokens = buffers.tokens;
    tokens.fill(of.steps, of.v, sizes, of.shape, chunk, task.head);
    const StateRows b(of.b, chunk, task.head, sizes.state), c(of.c, chunk, task.head, sizes.state);
    const int64_t last = task.stop - 1 - chunk.start;
    for (int64_t token = 0; token < chunk.steps; ++token) {
        b.ask(smaller(token + kTokensAhead, last));
        c.ask(smaller(token + kTokensAhead, last));
        const float *b_row = b.read(token, buffers.b), *c_row = c.read(token, buffers.c);
        for_vectors(of.shape.state, [&](auto vectors, int64_t first) {
            advance<vectors.value>(of, tokens, token, b_row + first, c_row + first, first == 0,
                                   buffers.state + first,
                                   buffers.sums + token * of.sums() * kWidth);
        });
    }
    sum_all_lanes(buffers.sums, chunk.steps * of.sums(), buffers.totals);
    const Rows y(of.y, chunk, 1, task.head);
    for (int64_t token = 0; token < chunk.steps; ++token) {
        const float *read = buffers.totals + token * of.sums();
        const float *v = tokens.v + token * of.shape.width;
        const float own = tokens.own[token] * read[sizes.width];
        for (int64_t p = 0; p < sizes.width; ++p)
            buffers.row[p] = tokens.decay[token] * read[p] + own * v[p];
        finish_row(of.y, y.at(token), sizes.width, buffers.row);
    }
}

void run(const NarrowForward &of, const NarrowTask &task, const Buffers &buffers) {
    load_rows(HeadState(of.initial, task.sequence, task.head), of.sizes, of.shape, buffers.state);
    for (int64_t start = task.start; start < task.stop; start += kTokensTogether)
        walk(of, task, {task.row, start, smaller(kTokensTogether, task.stop - start)}, buffers);
    store_rows(buffers.state, of.sizes, of.shape,
               HeadState(of.final_state, task.sequence, task.head));
}

}  // namespace

int64_t narrow_forward(const anymamba_call &call) {
    return run_narrow<Buffers>(call, NarrowForward(call), run);
}

}  // namespace ssd
}  // namespace anymamba::ANYMAMBA_VARIANT
