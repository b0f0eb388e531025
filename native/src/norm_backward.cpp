// The adjoint of the norm and of the residual sum before it (ops/norm/README.md, section 4). What
// the weight receives is left span by span and added up in order, so that no bit depends on the
// number of threads.
#include "norm.h"
#include "parallel.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

constexpr int64_t kSpans = 32;
constexpr int64_t kSpanRows = 16;  // at least
constexpr int64_t kScratchRows = 6;

struct NormBackward {
    const NormShape &shape;
    const anymamba_tensor &grad_y, &grad_stream, &x, &residual, &grad_x, &grad_residual;
    const float *weight;

    const float *read(const anymamba_tensor &t, int64_t row, int64_t channel,
                      float *scratch) const {
        return read_row(t, row * t.stride[0] + channel, shape.group, scratch);
    }

    // The sum that was normalised; `sum` is where it may be put.
    const float *total(int64_t row, int64_t channel, float *scratch, float *sum) const {
        const float *from = read(x, row, channel, scratch);
        if (residual.data == nullptr) return from;
        const float *more = read(residual, row, channel, sum);
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth)
            store(sum + lane, load(from + lane) + load(more + lane));
        return sum;
    }

    // `part`: what the group's weights receive.
    void run(int64_t row, int64_t group, float *scratch, float *part) const {
        const int64_t channel = group * shape.group, lanes = shape.lanes;
        const float *own = weight + group * lanes;
        const float *t = total(row, channel, scratch, scratch + lanes);
        const float *grad = read(grad_y, row, channel, scratch + 2 * lanes);
        Vec squares = {}, products = {};
        for (int64_t lane = 0; lane < lanes; lane += kWidth) {
            const Vec value = load(t + lane);
            squares += value * value;
            products += load(grad + lane) * load(own + lane) * value;
        }
        const float scale = root_scale(squares, shape);
        const float mean = sum_lanes(products) * scale * scale / (float)shape.group;
        const float *passed = grad_stream.data == nullptr
                                  ? nullptr
                                  : read(grad_stream, row, channel, scratch + 3 * lanes);
        const int64_t place = row * grad_x.stride[0] + channel;
        float *to = open_row(grad_x, place, shape.group, scratch + 4 * lanes);
        for (int64_t lane = 0; lane < lanes; lane += kWidth) {
            const Vec value = load(t + lane), head = load(grad + lane);
            store(part + lane, load(part + lane) + head * value * scale);
            Vec result = scale * (head * load(own + lane) - value * mean);
            if (passed != nullptr) result += load(passed + lane);
            store(to + lane, result);
        }
        finish_row(grad_x, place, shape.group, to);
        if (grad_residual.data != nullptr)
            finish_row(grad_residual, row * grad_residual.stride[0] + channel, shape.group, to);
    }
};

}  // namespace

// Tensors: the gradients of y and of the sum; x, residual, weight; then the gradients of those
// three. Gradient of the sum, residual and its gradient may be absent: then x is the sum itself.
// Sizes: NormShape.
int64_t norm_backward(const anymamba_call &call) {
    const NormShape shape(call.sizes);
    const anymamba_tensor *t = call.tensors, &grad_weight = t[7];
    const int64_t size = shape.groups * shape.lanes;
    const int64_t span_rows = larger(kSpanRows, ceil_div(shape.rows, kSpans));
    const int64_t spans = ceil_div(shape.rows, span_rows);
    Carver carver{static_cast<char *>(call.workspace)};
    float *weight = carver.floats(size);
    float *sums = carver.floats(larger(spans, 1) * size);
    float *scratch = carver.floats(call.threads * kScratchRows * shape.lanes);
    if (call.workspace == nullptr) return carver.used;
    fill_weight(shape, t[4], weight);

    const NormBackward backward{shape, t[0], t[1], t[2], t[3], t[5], t[6], weight};
    memset(sums, 0, (size_t)(larger(spans, 1) * size) * sizeof(float));
    parallel_for(spans, call.threads, [&](int64_t span, int64_t thread) {
        const int64_t stop = smaller((span + 1) * span_rows, shape.rows);
        for (int64_t row = span * span_rows; row < stop; ++row)
            for (int64_t group = 0; group < shape.groups; ++group)
                backward.run(row, group, scratch + thread * kScratchRows * shape.lanes,
                             sums + span * size + group * shape.lanes);
    });
    for (int64_t span = 1; span < spans; ++span)
        for (int64_t place = 0; place < size; ++place) sums[place] += sums[span * size + place];
    for (int64_t group = 0; group < shape.groups; ++group)
        for (int64_t lane = 0; lane < shape.group; ++lane)
            write_one(grad_weight, (group * shape.group + lane) * grad_weight.stride[0],
                      sums[group * shape.lanes + lane]);
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
