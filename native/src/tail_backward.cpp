// The adjoint of the end of a block (ops/tail/README.md, section 4). Sum, gate and scale are
// recomputed. What the parameters receive is left span by span and added up in order, so that no bit
// depends on the number of threads.
#include "parallel.h"
#include "tail.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

constexpr int64_t kSpans = 32;
constexpr int64_t kSpanRows = 16;  // at least
constexpr int64_t kAddLanes = 512;

// Wanted, in the order of the inputs.
struct TailGradients {
    const anymamba_tensor &out;  // given
    const anymamba_tensor &y, &x, &z, &skip, &weight, &spread, &merge;

    TailGradients(const anymamba_tensor &given, const anymamba_tensor *t)
        : out(given), y(t[0]), x(t[1]), z(t[2]), skip(t[3]), weight(t[4]), spread(t[5]),
          merge(t[6]) {}
};

// The places of each parameter's sums within the part of a span; 0 floats for an absent one.
struct TailParts {
    int64_t skip, weight, spread, merge, size;

    TailParts(const TailShape &shape, const TailInputs &in)
        : skip(0),
          weight(skip + (in.skip.data == nullptr ? 0 : shape.size())),
          spread(weight + (in.weight.data == nullptr ? 0 : shape.size())),
          merge(spread + (in.spread.data == nullptr ? 0 : shape.ranks * shape.size())),
          size(merge + (in.merge.data == nullptr ? 0 : shape.ranks * shape.size())) {}
};

// Where the gradients of one group go: rows, and sums over rows.
struct TailTargets {
    float *y, *x, *z;
    float *skip, *weight, *spread, *merge;
};

struct TailWorker {
    TailScratch rows;
    float *grad_out, *grad_y, *grad_x, *grad_z;
    float *sum, *open;  // t, and the sigmoid of the gate

    TailWorker(Carver &carver, const TailShape &shape)
        : rows(carver, shape),
          grad_out(carver.floats(shape.lanes)),
          grad_y(carver.floats(shape.lanes)),
          grad_x(carver.floats(shape.lanes)),
          grad_z(carver.floats(shape.lanes)),
          sum(carver.floats(shape.lanes)),
          open(carver.floats(shape.lanes)) {}
};

ANYMAMBA_INLINE void add_to(float *total, Vec value) { store(total, load(total) + value); }

// One group of one rank. kAdd: grad_z already holds the share of other ranks.
template <bool kSkip, bool kRanked, Order kOrder, bool kAdd>
void pull_group(const TailShape &shape, const TailGroup &at, const TailWorker &worker,
                const float *grad_out, const TailTargets &to) {
    float scale = 1, mean = 0;
    if (kOrder != Order::kNone) {
        Vec squares = {}, products = {};
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            const Vec t = tail_sum<kSkip>(at, lane), q = gate_argument<kRanked>(at, lane);
            const Vec open = held_sigmoid(q), gated = t * (q * open);
            store(worker.sum + lane, t);
            store(worker.open + lane, open);
            const Vec normed = kOrder == Order::kBefore ? t : gated;
            squares += normed * normed;
            Vec pulled = load(grad_out + lane) * load(at.weight + lane) * gated;
            if (kRanked) pulled *= load(at.merge + lane);
            products += pulled;
        }
        scale = norm_scale(squares, shape);
        mean = sum_lanes(products) * scale * scale / (float)shape.group;
    }
    for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
        const bool kept = kOrder != Order::kNone;
        const Vec q = gate_argument<kRanked>(at, lane);
        const Vec t = kept ? load(worker.sum + lane) : tail_sum<kSkip>(at, lane);
        const Vec open = kept ? load(worker.open + lane) : held_sigmoid(q);
        const Vec gate = q * open, slope = open * (1.0f + q * (1.0f - open));
        Vec grad = load(grad_out + lane);
        if (kRanked) {
            Vec o = t * gate * scale;
            if (kOrder != Order::kNone) o *= load(at.weight + lane);
            add_to(to.merge + lane, grad * o);
            grad *= load(at.merge + lane);
        }
        Vec grad_t, grad_q;
        if (kOrder == Order::kNone) {
            grad_t = grad * gate;
            grad_q = grad * t * slope;
        } else if (kOrder == Order::kBefore) {
            const Vec unit = t * scale, weight = load(at.weight + lane);
            add_to(to.weight + lane, grad * gate * unit);
            grad_t = scale * (grad * gate * weight - t * mean);
            grad_q = grad * unit * weight * slope;
        } else {
            const Vec u = t * gate;
            add_to(to.weight + lane, grad * u * scale);
            const Vec grad_u = scale * (grad * load(at.weight + lane) - u * mean);
            grad_t = grad_u * gate;
            grad_q = grad_u * t * slope;
        }
        store(to.y + lane, grad_t);
        if (kSkip) {
            store(to.x + lane, grad_t * load(at.skip + lane));
            add_to(to.skip + lane, grad_t * load(at.x + lane));
        }
        if (kRanked) {
            add_to(to.spread + lane, grad_q * load(at.z + lane));
            grad_q *= load(at.spread + lane);
        }
        store(to.z + lane, kAdd ? load(to.z + lane) + grad_q : grad_q);
    }
}

struct TailBackward {
    const TailShape &shape;
    const TailInputs &in;
    const TailGradients &grad;
    const TailWeights &weights;
    const TailParts &parts;

    template <bool kSkip, bool kRanked, Order kOrder>
    void pull_row(const TailWorker &worker, int64_t row, float *part) const {
        for (int64_t group = 0; group < shape.groups; ++group) {
            const int64_t channel = group * shape.group;
            const int64_t z_place = row * grad.z.stride[0] + channel;
            float *grad_z = open_row(grad.z, z_place, shape.group, worker.grad_z);
            const float *grad_out = read_row(grad.out, row * grad.out.stride[0] + channel,
                                             shape.group, worker.grad_out);
            for (int64_t rank = 0; rank < (kRanked ? shape.ranks : 1); ++rank) {
                const int64_t place = group * shape.lanes, ranked = rank * shape.size() + place;
                const auto offset = [&](const anymamba_tensor &t) {
                    return row * t.stride[0] + rank * t.stride[1] + channel;
                };
                const TailGroup at = worker.rows.read(shape, in, weights, row, rank, group);
                TailTargets to{};
                to.y = open_row(grad.y, offset(grad.y), shape.group, worker.grad_y);
                if (kSkip) to.x = open_row(grad.x, offset(grad.x), shape.group, worker.grad_x);
                to.z = grad_z;
                to.skip = part + parts.skip + place;
                to.weight = part + parts.weight + place;
                to.spread = part + parts.spread + ranked;
                to.merge = part + parts.merge + ranked;
                if (rank == 0)
                    pull_group<kSkip, kRanked, kOrder, false>(shape, at, worker, grad_out, to);
                else
                    pull_group<kSkip, kRanked, kOrder, true>(shape, at, worker, grad_out, to);
                finish_row(grad.y, offset(grad.y), shape.group, to.y);
                if (kSkip) finish_row(grad.x, offset(grad.x), shape.group, to.x);
            }
            finish_row(grad.z, z_place, shape.group, grad_z);
        }
    }

    // Brings sums of [rank][group][lane] to a gradient of [rank][channel], contiguous.
    void write(const anymamba_tensor &to, const float *from, int64_t ranks) const {
        if (to.data == nullptr) return;
        for (int64_t place = 0; place < ranks * shape.groups; ++place)
            for (int64_t lane = 0; lane < shape.group; ++lane)
                write_one(to, place * shape.group + lane, from[place * shape.lanes + lane]);
    }
};

}  // namespace

// Tensors: the gradient of the output; TailInputs; then the gradients of each of them, absent where
// the input is. Sizes: TailShape.
int64_t tail_backward(const anymamba_call &call) {
    const TailShape shape(call.sizes);
    const TailInputs in(call.tensors + 1);
    const TailGradients grad(call.tensors[0], call.tensors + 1 + kTailInputs);
    const TailParts parts(shape, in);
    const int64_t span_rows = larger(kSpanRows, ceil_div(shape.rows, kSpans));
    const int64_t spans = ceil_div(shape.rows, span_rows);
    Carver carver{static_cast<char *>(call.workspace)};
    const TailWeights weights(carver, shape, in);
    float *sums = carver.floats(larger(spans, 1) * parts.size);
    Carver measure{nullptr};
    const TailWorker sample(measure, shape);
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;
    weights.fill(shape, in);

    const TailBackward backward{shape, in, grad, weights, parts};
    if (spans == 0) memset(sums, 0, (size_t)parts.size * sizeof(float));
    parallel_for(spans, call.threads, [&](int64_t span, int64_t thread) {
        Carver own{scratch + thread * measure.used};
        const TailWorker worker(own, shape);
        float *part = sums + span * parts.size;
        memset(part, 0, (size_t)parts.size * sizeof(float));
        const int64_t stop = smaller((span + 1) * span_rows, shape.rows);
        with_kinds(shape, in, [&](auto skip, auto ranked, auto order) {
            for (int64_t row = span * span_rows; row < stop; ++row)
                backward.pull_row<decltype(skip)::kOn, decltype(ranked)::kOn,
                                  decltype(order)::kOrder>(worker, row, part);
        });
    });
    parallel_for(ceil_div(parts.size, kAddLanes), call.threads, [&](int64_t task, int64_t) {
        const int64_t start = task * kAddLanes, stop = smaller(start + kAddLanes, parts.size);
        for (int64_t span = 1; span < spans; ++span)
            for (int64_t place = start; place < stop; ++place)
                sums[place] += sums[span * parts.size + place];
    });
    backward.write(grad.skip, sums + parts.skip, 1);
    backward.write(grad.weight, sums + parts.weight, 1);
    backward.write(grad.spread, sums + parts.spread, shape.ranks);
    backward.write(grad.merge, sums + parts.merge, shape.ranks);
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
