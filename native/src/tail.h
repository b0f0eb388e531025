// The end of a block, one row (token) and one group of channels at a time (ops/tail/README.md):
//
//     t = y + skip x;   gate = silu(spread z);   o = t gate | norm(t) gate | norm(t gate)
//     out = sum over ranks of merge o
//
// Skip, ranks and norm are optional, so the gated norm and the gated product of an MLP are the same
// loops. Groups are read as padded rows: lanes past the end hold zeros and add nothing to any sum.
#pragma once

#include "exp2.h"
#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT {

enum class Order : int64_t { kNone = 0, kBefore = 1, kAfter = 2 };  // of the norm and the gate

// The order of a call's input tensors; the backward has the gradient of the output before them.
// Rows are [s][m][v] for y and x, [s][v] for z; absent: x and skip together, weight without a norm,
// spread and merge together.
struct TailInputs {
    const anymamba_tensor &y, &x, &z, &skip, &weight, &spread, &merge;

    explicit TailInputs(const anymamba_tensor *t)
        : y(t[0]), x(t[1]), z(t[2]), skip(t[3]), weight(t[4]), spread(t[5]), merge(t[6]) {}
};
constexpr int64_t kTailInputs = 7;

struct TailShape {
    int64_t rows, ranks, channels, group, groups, lanes;  // lanes: of a group in whole vectors
    Order order;
    float eps;

    explicit TailShape(const int64_t *sizes)
        : rows(sizes[0]),
          ranks(sizes[1]),
          channels(sizes[2]),
          group(sizes[3]),
          groups(channels / group),
          lanes(ceil_div(group, kWidth) * kWidth),
          order(static_cast<Order>(sizes[4])),
          eps(real_of(sizes[5])) {}

    int64_t size() const { return groups * lanes; }  // of one padded row of parameters
};

// The parameters as padded float32 rows, [rank][group][lane]; rows of an absent one are null.
struct TailWeights {
    float *skip, *weight, *spread, *merge;

    TailWeights(Carver &carver, const TailShape &shape, const TailInputs &in)
        : skip(row_of(carver, shape, in.skip, 1)),
          weight(row_of(carver, shape, in.weight, 1)),
          spread(row_of(carver, shape, in.spread, shape.ranks)),
          merge(row_of(carver, shape, in.merge, shape.ranks)) {}

    void fill(const TailShape &shape, const TailInputs &in) const {
        copy(shape, in.skip, skip, 1, 0, in.skip.stride[0]);
        copy(shape, in.weight, weight, 1, 0, in.weight.stride[0]);
        copy(shape, in.spread, spread, shape.ranks, in.spread.stride[0], in.spread.stride[1]);
        copy(shape, in.merge, merge, shape.ranks, in.merge.stride[0], in.merge.stride[1]);
    }

   private:
    static float *row_of(Carver &carver, const TailShape &shape, const anymamba_tensor &tensor,
                         int64_t ranks) {
        return tensor.data == nullptr ? nullptr : carver.floats(ranks * shape.size());
    }
    static void copy(const TailShape &shape, const anymamba_tensor &tensor, float *to,
                     int64_t ranks, int64_t rank_stride, int64_t stride) {
        if (tensor.data == nullptr) return;
        for (int64_t rank = 0; rank < ranks; ++rank)
            for (int64_t group = 0; group < shape.groups; ++group)
                for (int64_t lane = 0; lane < shape.lanes; ++lane, ++to)
                    *to = lane < shape.group
                              ? read_one(tensor, rank * rank_stride +
                                                     (group * shape.group + lane) * stride)
                              : 0;
    }
};

// One group of one token and rank: where it is read, and the parameters that belong to it.
struct TailGroup {
    const float *y, *x, *z, *skip, *weight, *spread, *merge;
};

// Rows of a thread that cannot be read in place.
struct TailScratch {
    float *y, *x, *z;

    TailScratch(Carver &carver, const TailShape &shape)
        : y(carver.floats(shape.lanes)),
          x(carver.floats(shape.lanes)),
          z(carver.floats(shape.lanes)) {}

    TailGroup read(const TailShape &shape, const TailInputs &in, const TailWeights &weights,
                   int64_t row, int64_t rank, int64_t group) const {
        const int64_t channel = group * shape.group, place = group * shape.lanes;
        const int64_t ranked = rank * shape.size() + place;
        const auto at = [](const float *base, int64_t offset) {
            return base == nullptr ? nullptr : base + offset;
        };
        const auto own = [&](const anymamba_tensor &t, float *scratch) {
            const int64_t offset = row * t.stride[0] + rank * t.stride[1] + channel;
            return read_row(t, offset, shape.group, scratch);
        };
        return {own(in.y, y),
                in.x.data == nullptr ? nullptr : own(in.x, x),
                read_row(in.z, row * in.z.stride[0] + channel, shape.group, z),
                at(weights.skip, place),
                at(weights.weight, place),
                at(weights.spread, ranked),
                at(weights.merge, ranked)};
    }
};

ANYMAMBA_INLINE float norm_scale(Vec squares, const TailShape &shape) {
    return 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)shape.group + shape.eps);
}

// The sum before the gate, and the gate's argument, of one vector of a group.
template <bool kSkip>
ANYMAMBA_INLINE Vec tail_sum(const TailGroup &at, int64_t lane) {
    const Vec y = load(at.y + lane);
    return kSkip ? y + load(at.skip + lane) * load(at.x + lane) : y;
}

template <bool kRanked>
ANYMAMBA_INLINE Vec gate_argument(const TailGroup &at, int64_t lane) {
    const Vec z = load(at.z + lane);
    return kRanked ? z * load(at.spread + lane) : z;
}

template <bool kValue>
struct Flag {
    static constexpr bool kOn = kValue;
};

template <Order kValue>
struct Ordered {
    static constexpr Order kOrder = kValue;
};

// Calls `function(Flag, Flag, Ordered)`: with a skip, with ranks, in which order.
template <class Function>
void with_kinds(const TailShape &shape, const TailInputs &in, const Function &function) {
    const auto with_order = [&](auto skip, auto ranked) {
        if (shape.order == Order::kNone)
            function(skip, ranked, Ordered<Order::kNone>{});
        else if (shape.order == Order::kBefore)
            function(skip, ranked, Ordered<Order::kBefore>{});
        else
            function(skip, ranked, Ordered<Order::kAfter>{});
    };
    // Ranks come with a skip.
    if (in.skip.data == nullptr)
        with_order(Flag<false>{}, Flag<false>{});
    else if (in.spread.data == nullptr)
        with_order(Flag<true>{}, Flag<false>{});
    else
        with_order(Flag<true>{}, Flag<true>{});
}

}  // namespace anymamba::ANYMAMBA_VARIANT
