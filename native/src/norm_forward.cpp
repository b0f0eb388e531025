// The root-mean-square norm, perhaps behind a residual sum.
#include "norm.h"
#include "parallel.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Rows of a task: enough to pay for handing it out.
constexpr int64_t kNormRows = 16;

struct NormForward {
    const NormShape &shape;
    const anymamba_tensor &x, &residual, &y, &stream;
    const float *weight;

    // `scratch`: four groups of lanes.
    void run(int64_t row, int64_t group, float *scratch) const {
        const int64_t channel = group * shape.group, lanes = shape.lanes;
        const float *from = read_row(x, row * x.stride[0] + channel, shape.group, scratch);
        const float *sum = from;
        Vec squares = {};
        if (residual.data == nullptr) {
            for (int64_t lane = 0; lane < lanes; lane += kWidth)
                squares += load(from + lane) * load(from + lane);
        } else {
            const float *more = read_row(residual, row * residual.stride[0] + channel, shape.group,
                                         scratch + lanes);
            const int64_t place = row * stream.stride[0] + channel;
            float *total = open_row(stream, place, shape.group, scratch + 2 * lanes);
            for (int64_t lane = 0; lane < lanes; lane += kWidth) {
                const Vec value = load(from + lane) + load(more + lane);
                store(total + lane, value);
                squares += value * value;
            }
            finish_row(stream, place, shape.group, total);
            sum = total;
        }
        const float scale = root_scale(squares, shape);
        const int64_t place = row * y.stride[0] + channel;
        float *to = open_row(y, place, shape.group, scratch + 3 * lanes);
        for (int64_t lane = 0; lane < lanes; lane += kWidth)
            store(to + lane,
                  load(sum + lane) * scale * load(weight + group * shape.lanes + lane));
        finish_row(y, place, shape.group, to);
    }
};

}  // namespace

// Tensors: x, residual and weight; then y and the sum. Residual and sum are absent together.
// Sizes: NormShape.
int64_t norm_forward(const anymamba_call &call) {
    const NormShape shape(call.sizes);
    const anymamba_tensor *t = call.tensors;
    Carver carver{static_cast<char *>(call.workspace)};
    float *weight = carver.floats(shape.groups * shape.lanes);
    float *scratch = carver.floats(call.threads * 4 * shape.lanes);
    if (call.workspace == nullptr) return carver.used;
    fill_weight(shape, t[2], weight);

    const NormForward forward{shape, t[0], t[1], t[3], t[4], weight};
    parallel_for(ceil_div(shape.rows, kNormRows), call.threads, [&](int64_t task, int64_t thread) {
        const int64_t stop = smaller((task + 1) * kNormRows, shape.rows);
        for (int64_t row = task * kNormRows; row < stop; ++row)
            for (int64_t group = 0; group < shape.groups; ++group)
                forward.run(row, group, scratch + thread * 4 * shape.lanes);
    });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
