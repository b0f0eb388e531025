// The SSD core of narrow heads, backward: the states of a stretch of tokens once more, then its
// tokens from right to left. Tensors and sizes are those of ssd_backward.cpp.
//
// The formulas are those of src/anymamba/ops/ssd/README.md, section 4.3.
#include "ssd_narrow.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace ssd {
namespace {

// States of a stretch, in numbers: they lie in the second cache. Shorter stretches compute more
// states twice, which cost more than the first cache saved.
constexpr int64_t kStretchNumbers = 64 * 1024;
constexpr int64_t kLongestStretch = 128;

struct NarrowBackward {
    Sizes sizes;
    NarrowShape shape;
    const anymamba_tensor &grad_y, &grad_final, &v, &b, &c, &initial, &borders;
    const anymamba_tensor &grad_v, &grad_b, &grad_c, &grad_initial;
    StepTensors steps, grad_steps;
    int64_t stretch;  // tokens whose states are alive together

    explicit NarrowBackward(const anymamba_call &call)
        : sizes(call.sizes),
          shape(sizes),
          grad_y(call.tensors[0]),
          grad_final(call.tensors[1]),
          v(call.tensors[2]),
          b(call.tensors[4]),
          c(call.tensors[5]),
          initial(call.tensors[6]),
          borders(call.tensors[9]),
          grad_v(call.tensors[10]),
          grad_b(call.tensors[12]),
          grad_c(call.tensors[13]),
          grad_initial(call.tensors[14]),
          steps{call.tensors[3], call.tensors[7], call.tensors[8]},
          grad_steps{call.tensors[11], call.tensors[15], call.tensors[16]},
          stretch(smaller(larger(1, sizes.length),
                          smaller(kLongestStretch, kStretchNumbers / larger(1, shape.head)))) {}

    // Sums of a token that are taken over lanes: dS' b for each row, <S, T>, and b . c.
    int64_t sums() const { return sizes.width + 2; }
    int64_t stretches() const { return larger(1, ceil_div(sizes.length, stretch)); }
};

struct Buffers {
    float *entries;              // the state before each stretch
    float *states;               // before each token of a stretch, [token][width][state]
    float *grad;                 // of the state
    float *b, *c, *to_b, *to_c;  // a row each, where the tensor's own does not serve
    float *sums, *totals;        // [token][sum] of a few tokens, vectors and numbers
    float *grad_y;               // [token][width] of a stretch
    float *inner;                // grad_y . v of each token of a stretch
    float *row;                  // of grad_v
    NarrowSteps tokens;

    Buffers(Carver &carver, const NarrowBackward &of)
        : entries(carver.floats(of.stretches() * of.shape.head)),
          states(carver.floats(of.stretch * of.shape.head)),
          grad(carver.floats(of.shape.head)),
          b(carver.floats(of.shape.state)),
          c(carver.floats(of.shape.state)),
          to_b(carver.floats(of.shape.state)),
          to_c(carver.floats(of.shape.state)),
          sums(carver.floats(kTokensTogether * of.sums() * kWidth)),
          totals(carver.floats(kTokensTogether * of.sums())),
          grad_y(carver.floats(of.stretch * of.shape.width)),
          inner(carver.floats(of.stretch)),
          row(carver.floats(of.shape.width)),
          tokens(carver, of.shape, of.stretch) {}
};

// The state behind a token from the one before it; the two may be one.
ANYMAMBA_INLINE void advance(const NarrowBackward &of, const NarrowSteps &tokens, int64_t token,
                             const float *b, const float *from, float *to) {
    const float *v = tokens.v + token * of.shape.width;
    const float decay = tokens.decay[token], rest = tokens.rest[token];
    const float scale = tokens.scale[token];
    for_vectors(of.shape.state, [&](auto vectors, int64_t first) {
        constexpr int kVectors = vectors.value;
        Vec own[kVectors];
#pragma GCC unroll 4
        for (int k = 0; k < kVectors; ++k) own[k] = load(b + first + k * kWidth);
        for (int64_t p = 0; p < of.sizes.width; ++p) {
            const Vec value = splat(scale * v[p]);
            const int64_t at = p * of.shape.state + first;
#pragma GCC unroll 4
            for (int k = 0; k < kVectors; ++k) {
                const Vec before = load(from + at + k * kWidth);
                store(to + at + k * kWidth, before * decay + (before * rest + value * own[k]));
            }
        }
    });
}

// From the state before a stretch to the one behind it, which takes the place of `state`; with
// `states` to the one before the last token, and all of them are kept there.
void refill(const NarrowBackward &of, int64_t head, const Chunk &stretch, float *state,
            float *states, const Buffers &buffers) {
    const StateRows b(of.b, stretch, head, of.sizes.state);
    const int64_t last = stretch.steps - 1, step = states == nullptr ? 0 : of.shape.head;
    if (states != nullptr) memcpy(states, state, (size_t)of.shape.head * sizeof(float));
    float *from = states == nullptr ? state : states;
    for (int64_t token = 0; token < (states == nullptr ? stretch.steps : last); ++token) {
        b.ask(smaller(token + kTokensAhead, last));
        advance(of, buffers.tokens, token, b.read(token, buffers.b), from, from + step);
        from += step;
    }
}

// One token of some vectors of the state axis. `sums` receives what they add to dS' b, for each row,
// to <S, T> and to b . c.
template <int kVectors>
ANYMAMBA_INLINE void step_back(const NarrowBackward &of, const Buffers &buffers, int64_t token,
                               const float *b, const float *c, const float *state, float *grad,
                               bool is_first, float *sums, float *to_b, float *to_c) {
    const NarrowSteps &tokens = buffers.tokens;
    const float *v = tokens.v + token * of.shape.width;
    const float *grad_y = buffers.grad_y + token * of.shape.width;
    const float decay = tokens.decay[token], rest = tokens.rest[token];
    const float scale = tokens.scale[token];
    const float own = tokens.own[token] * buffers.inner[token];
    Vec own_b[kVectors], own_c[kVectors], sum_b[kVectors], sum_c[kVectors];
    Vec crossing = {}, pair = {};
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
        own_b[k] = load(b + k * kWidth);
        own_c[k] = load(c + k * kWidth);
        pair += own_b[k] * own_c[k];
        sum_b[k] = own * own_c[k];
        sum_c[k] = own * own_b[k];
    }
    for (int64_t p = 0; p < of.sizes.width; ++p, sums += kWidth) {
        const Vec value = splat(scale * v[p]), asked = splat(grad_y[p]);
        const Vec faded = splat(decay * grad_y[p]);
        Vec sum = {};
#pragma GCC unroll 4
        for (int k = 0; k < kVectors; ++k) {
            const Vec behind = load(grad + k * kWidth), before = load(state + k * kWidth);
            sum += behind * own_b[k];
            sum_b[k] += behind * value;
            sum_c[k] += before * faded;
            const Vec through = behind + asked * own_c[k];
            crossing += before * through;
            store(grad + k * kWidth, through * decay + through * rest);
        }
        collect(sums, sum, is_first);
        state += of.shape.state;
        grad += of.shape.state;
    }
    collect(sums, crossing, is_first);
    collect(sums + kWidth, pair, is_first);
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
        store(to_b + k * kWidth, sum_b[k]);
        store(to_c + k * kWidth, sum_c[k]);
    }
}

// What `count` tokens from `first` on give to values, decays and weights, from their sums.
void write_tokens(const NarrowBackward &of, int64_t head, const Chunk &stretch, int64_t first,
                  int64_t count, const Buffers &buffers) {
    const NarrowSteps &tokens = buffers.tokens;
    const int64_t width = of.sizes.width;
    sum_all_lanes(buffers.sums, count * of.sums(), buffers.totals);
    const Rows grad_v(of.grad_v, stretch, 1, head);
    for (int64_t token = first; token < first + count; ++token) {
        const auto write = [&](const anymamba_tensor &to, float value) {
            write_one(to, first_step(to, stretch, head) + token * to.stride[1], value);
        };
        const float *read = buffers.totals + (token - first) * of.sums();
        const float *v = tokens.v + token * of.shape.width;
        const float *grad_y = buffers.grad_y + token * of.shape.width;
        const float pair = read[width + 1], own = tokens.own[token] * pair;
        float to_scale = 0.0f;
        for (int64_t p = 0; p < width; ++p) {
            to_scale += v[p] * read[p];
            buffers.row[p] = tokens.scale[token] * read[p] + own * grad_y[p];
        }
        finish_row(of.grad_v, grad_v.at(token), width, buffers.row);
        write(of.grad_steps.da, tokens.decay[token] * read[width]);
        write(of.grad_steps.scale, to_scale);
        write(of.grad_steps.own, pair * buffers.inner[token]);
    }
}

// What the outputs of a stretch receive, and its product with the values.
void take_outputs(const NarrowBackward &of, int64_t head, const Chunk &stretch,
                  const Buffers &buffers) {
    const int64_t width = of.shape.width;
    copy_rows(Rows(of.grad_y, stretch, 1, head), stretch.steps, stretch.steps, of.sizes.width,
              buffers.grad_y, width);
    for (int64_t token = 0; token < stretch.steps; ++token) {
        Vec sum = {};
        for (int64_t p = token * width; p < (token + 1) * width; p += kWidth)
            sum += load(buffers.grad_y + p) * load(buffers.tokens.v + p);
        buffers.inner[token] = sum_lanes(sum);
    }
}

// Back through a stretch, whose states are there.
void walk_back(const NarrowBackward &of, int64_t head, const Chunk &stretch,
               const Buffers &buffers) {
    const int64_t size = of.sizes.state;
    const StateRows b(of.b, stretch, head, size), c(of.c, stretch, head, size);
    const StateRows grad_b(of.grad_b, stretch, head, size), grad_c(of.grad_c, stretch, head, size);
    take_outputs(of, head, stretch, buffers);
    for (int64_t token = stretch.steps - 1; token >= 0; --token) {
        const StateRows *const all[] = {&b, &c, &grad_b, &grad_c};
        for (const StateRows *rows : all) rows->ask(larger(token - kTokensAhead, 0));
        const float *b_row = b.read(token, buffers.b), *c_row = c.read(token, buffers.c);
        float *to_b = grad_b.open(token, buffers.to_b), *to_c = grad_c.open(token, buffers.to_c);
        const int64_t place = token % kTokensTogether;
        for_vectors(of.shape.state, [&](auto vectors, int64_t first) {
            step_back<vectors.value>(of, buffers, token, b_row + first, c_row + first,
                                     buffers.states + token * of.shape.head + first,
                                     buffers.grad + first, first == 0,
                                     buffers.sums + place * of.sums() * kWidth, to_b + first,
                                     to_c + first);
        });
        grad_b.finish(token, to_b);
        grad_c.finish(token, to_c);
        if (place == 0)
            write_tokens(of, head, stretch, token,
                         smaller(kTokensTogether, stretch.steps - token), buffers);
    }
}

void run(const NarrowBackward &of, const NarrowTask &task, const Buffers &buffers) {
    const int64_t stretches = ceil_div(task.stop - task.start, of.stretch);
    const auto take = [&](int64_t number) {
        const int64_t start = task.start + number * of.stretch;
        const Chunk stretch{task.row, start, smaller(of.stretch, task.stop - start)};
        buffers.tokens.fill(of.steps, of.v, of.sizes, of.shape, stretch, task.head);
        return stretch;
    };
    load_rows(HeadState(of.initial, task.sequence, task.head), of.sizes, of.shape,
              buffers.entries);
    for (int64_t number = 0; number + 1 < stretches; ++number) {
        float *entry = buffers.entries + number * of.shape.head, *next = entry + of.shape.head;
        memcpy(next, entry, (size_t)of.shape.head * sizeof(float));
        refill(of, task.head, take(number), next, nullptr, buffers);
    }
    load_rows(HeadState(of.grad_final, task.sequence, task.head), of.sizes, of.shape,
              buffers.grad);
    for (int64_t number = stretches - 1; number >= 0; --number) {
        const Chunk stretch = take(number);
        refill(of, task.head, stretch, buffers.entries + number * of.shape.head, buffers.states,
               buffers);
        walk_back(of, task.head, stretch, buffers);
    }
    store_rows(buffers.grad, of.sizes, of.shape,
               HeadState(of.grad_initial, task.sequence, task.head));
}

}  // namespace

int64_t narrow_backward(const anymamba_call &call) {
    return run_narrow<Buffers>(call, NarrowBackward(call), run);
}

}  // namespace ssd
}  // namespace anymamba::ANYMAMBA_VARIANT
