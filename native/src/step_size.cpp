// Step sizes, softplus(x + bias) in float32, and their gradient (ops/step_size/README.md).
#include "parallel.h"
#include "rows.h"
#include "softplus.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Rows of a task of the forward, and channels of one of the backward, which sums over all rows.
constexpr int64_t kStepRows = 16;
constexpr int64_t kStepChannels = 128;

struct StepSize {
    int64_t rows, channels;
    const anymamba_tensor &x, &grad, &to, &grad_bias;
    const float *bias;

    template <class T>
    void forward(int64_t row) const {
        const T *from = static_cast<const T *>(x.data) + row * x.stride[0];
        float *out = static_cast<float *>(to.data) + row * to.stride[0];
        for (int64_t place = 0; place < channels; place += kWidth) {
            const Vec value = load_most(from + place, channels - place) + load(bias + place);
            store_most(out + place, softplus(value), channels - place);
        }
    }

    // `sums`: of a block of channels, in whole vectors.
    template <class T>
    void backward(int64_t start, float *sums) const {
        const int64_t count = smaller(kStepChannels, channels - start);
        for (int64_t place = 0; place < kStepChannels; place += kWidth) store(sums + place, Vec{});
        for (int64_t row = 0; row < rows; ++row) {
            const T *from = static_cast<const T *>(x.data) + row * x.stride[0] + start;
            const float *above = static_cast<const float *>(grad.data) + row * grad.stride[0];
            T *out = static_cast<T *>(to.data) + row * to.stride[0] + start;
            for (int64_t place = 0; place < count; place += kWidth) {
                const int64_t left = count - place;
                const Vec value = load_most(from + place, left);
                const Vec arrived = load_most(above + start + place, left);
                const Vec result = arrived * sigmoid(value + load(bias + start + place));
                store(sums + place, load(sums + place) + result);
                store_most(out + place, result, left);
            }
        }
        for (int64_t place = 0; place < count; ++place)
            write_one(grad_bias, (start + place) * grad_bias.stride[0], sums[place]);
    }
};

// The bias as float32, in whole vectors.
void fill_bias(const anymamba_tensor &from, int64_t count, int64_t lanes, float *to) {
    for (int64_t lane = 0; lane < lanes; ++lane)
        to[lane] = lane < count ? read_one(from, lane * from.stride[0]) : 0;
}

}  // namespace

// Tensors: x, bias; the result, float32. Sizes: rows, channels.
int64_t step_size_forward(const anymamba_call &call) {
    const anymamba_tensor *t = call.tensors;
    const int64_t rows = call.sizes[0], channels = call.sizes[1];
    const int64_t lanes = ceil_div(channels, kWidth) * kWidth;
    Carver carver{static_cast<char *>(call.workspace)};
    float *bias = carver.floats(lanes);
    if (call.workspace == nullptr) return carver.used;
    fill_bias(t[1], channels, lanes, bias);
    const anymamba_tensor absent{};
    const StepSize step{rows, channels, t[0], absent, t[2], absent, bias};
    parallel_for(ceil_div(rows, kStepRows), call.threads, [&](int64_t task, int64_t) {
        const int64_t stop = smaller((task + 1) * kStepRows, rows);
        for (int64_t row = task * kStepRows; row < stop; ++row) {
            if (t[0].dtype == ANYMAMBA_FLOAT32)
                step.forward<float>(row);
            else
                step.forward<BFloat16>(row);
        }
    });
    return carver.used;
}

// Tensors: the gradient of the result, float32; x, bias; their gradients. Sizes: rows, channels.
int64_t step_size_backward(const anymamba_call &call) {
    const anymamba_tensor *t = call.tensors;
    const int64_t rows = call.sizes[0], channels = call.sizes[1];
    const int64_t blocks = ceil_div(channels, kStepChannels), lanes = blocks * kStepChannels;
    Carver carver{static_cast<char *>(call.workspace)};
    float *bias = carver.floats(lanes);
    float *sums = carver.floats(call.threads * kStepChannels);
    if (call.workspace == nullptr) return carver.used;
    fill_bias(t[2], channels, lanes, bias);
    const StepSize step{rows, channels, t[1], t[0], t[3], t[4], bias};
    parallel_for(blocks, call.threads, [&](int64_t block, int64_t thread) {
        float *own = sums + thread * kStepChannels;
        if (t[1].dtype == ANYMAMBA_FLOAT32)
            step.backward<float>(block * kStepChannels, own);
        else
            step.backward<BFloat16>(block * kStepChannels, own);
    });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
