// The end of a block: skip, gate, norm, ranks (tail.h).
#include "parallel.h"
#include "tail.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Rows of a task: enough to pay for handing it out.
constexpr int64_t kTailRows = 16;

// Writes the group of one rank to `to`, or adds it (kAdd).
template <bool kSkip, bool kRanked, Order kOrder, bool kAdd>
void finish_group(const TailShape &shape, const TailGroup &at, float *gated, float *to) {
    float scale = 1;
    if (kOrder != Order::kNone) {
        Vec squares = {};
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            Vec value = tail_sum<kSkip>(at, lane);
            if (kOrder == Order::kAfter) {
                value *= silu(gate_argument<kRanked>(at, lane));
                store(gated + lane, value);
            }
            squares += value * value;
        }
        scale = norm_scale(squares, shape);
    }
    for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
        Vec value = kOrder == Order::kAfter
                        ? load(gated + lane)
                        : tail_sum<kSkip>(at, lane) * silu(gate_argument<kRanked>(at, lane));
        if (kOrder != Order::kNone) value *= load(at.weight + lane) * scale;
        if (kRanked) value *= load(at.merge + lane);
        store(to + lane, kAdd ? load(to + lane) + value : value);
    }
}

}  // namespace

// Tensors: TailInputs, then the output [s][v]. Sizes: TailShape.
int64_t tail_forward(const anymamba_call &call) {
    const TailShape shape(call.sizes);
    const TailInputs in(call.tensors);
    const anymamba_tensor &out = call.tensors[kTailInputs];
    Carver carver{static_cast<char *>(call.workspace)};
    const TailWeights weights(carver, shape, in);
    Carver measure{nullptr};
    const TailScratch sample(measure, shape);
    measure.floats(2 * shape.lanes);
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;
    weights.fill(shape, in);

    const auto run_row = [&](int64_t row, int64_t thread) {
        Carver own{scratch + thread * measure.used};
        const TailScratch rows(own, shape);
        float *gated = own.floats(2 * shape.lanes), *sum = gated + shape.lanes;
        for (int64_t group = 0; group < shape.groups; ++group) {
            const int64_t offset = row * out.stride[0] + group * shape.group;
            float *to = open_row(out, offset, shape.group, sum);
            with_kinds(shape, in, [&](auto skip, auto ranked, auto order) {
                constexpr bool kSkip = decltype(skip)::kOn, kRanked = decltype(ranked)::kOn;
                constexpr Order kOrder = decltype(order)::kOrder;
                const TailGroup first = rows.read(shape, in, weights, row, 0, group);
                finish_group<kSkip, kRanked, kOrder, false>(shape, first, gated, to);
                for (int64_t rank = 1; kRanked && rank < shape.ranks; ++rank) {
                    const TailGroup next = rows.read(shape, in, weights, row, rank, group);
                    finish_group<kSkip, kRanked, kOrder, true>(shape, next, gated, to);
                }
            });
            finish_row(out, offset, shape.group, to);
        }
    };
    parallel_for(ceil_div(shape.rows, kTailRows), call.threads, [&](int64_t task, int64_t thread) {
        const int64_t stop = smaller((task + 1) * kTailRows, shape.rows);
        for (int64_t row = task * kTailRows; row < stop; ++row) run_row(row, thread);
    });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
