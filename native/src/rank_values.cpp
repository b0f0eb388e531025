// The values of several ranks, x times the weights of each, and their gradient (ops/ranks/README.md).
#include "parallel.h"
#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Rows of a task of the forward, and channels of one of the backward, which sums over all rows.
constexpr int64_t kValueRows = 8;
constexpr int64_t kValueChannels = 128;

struct RankValues {
    int64_t rows, ranks, channels, lanes;  // lanes: channels in whole vectors, or blocks
    const anymamba_tensor &x, &wide;       // [s][v]; [s][m][v]: the values or their gradient
    const float *weight;                   // [m][lane]

    template <class T>
    void forward(int64_t row) const {
        const T *from = static_cast<const T *>(x.data) + row * x.stride[0];
        T *to = static_cast<T *>(wide.data) + row * wide.stride[0];
        for (int64_t rank = 0; rank < ranks; ++rank)
            for (int64_t place = 0; place < channels; place += kWidth) {
                const Vec value = load_most(from + place, channels - place);
                store_most(to + rank * wide.stride[1] + place,
                           value * load(weight + rank * lanes + place), channels - place);
            }
    }

    // `sums`: of the ranks of a block of channels.
    template <class T>
    void backward(int64_t start, const anymamba_tensor &grad_x, const anymamba_tensor &grad_weight,
                  float *sums) const {
        const int64_t count = smaller(kValueChannels, channels - start);
        for (int64_t place = 0; place < ranks * kValueChannels; place += kWidth)
            store(sums + place, Vec{});
        for (int64_t row = 0; row < rows; ++row) {
            const T *from = static_cast<const T *>(x.data) + row * x.stride[0] + start;
            const T *above = static_cast<const T *>(wide.data) + row * wide.stride[0] + start;
            T *to = static_cast<T *>(grad_x.data) + row * grad_x.stride[0] + start;
            for (int64_t place = 0; place < count; place += kWidth) {
                const int64_t left = count - place;
                const Vec value = load_most(from + place, left);
                Vec total = {};
                for (int64_t rank = 0; rank < ranks; ++rank) {
                    const Vec arrived = load_most(above + rank * wide.stride[1] + place, left);
                    float *sum = sums + rank * kValueChannels + place;
                    total += arrived * load(weight + rank * lanes + start + place);
                    store(sum, load(sum) + arrived * value);
                }
                store_most(to + place, total, left);
            }
        }
        for (int64_t rank = 0; rank < ranks; ++rank)
            for (int64_t place = 0; place < count; ++place)
                write_one(grad_weight,
                          rank * grad_weight.stride[0] + (start + place) * grad_weight.stride[1],
                          sums[rank * kValueChannels + place]);
    }
};

void fill_weights(const anymamba_tensor &from, int64_t ranks, int64_t channels, int64_t lanes,
                  float *to) {
    for (int64_t rank = 0; rank < ranks; ++rank)
        for (int64_t lane = 0; lane < lanes; ++lane, ++to)
            *to = lane < channels
                      ? read_one(from, rank * from.stride[0] + lane * from.stride[1])
                      : 0;
}

}  // namespace

// Tensors: x, weight; the values. Sizes: rows, ranks, channels. x and the values have one dtype.
int64_t values_forward(const anymamba_call &call) {
    const anymamba_tensor *t = call.tensors;
    const int64_t rows = call.sizes[0], ranks = call.sizes[1], channels = call.sizes[2];
    const int64_t lanes = ceil_div(channels, kWidth) * kWidth;
    Carver carver{static_cast<char *>(call.workspace)};
    float *weight = carver.floats(ranks * lanes);
    if (call.workspace == nullptr) return carver.used;
    fill_weights(t[1], ranks, channels, lanes, weight);
    const RankValues values{rows, ranks, channels, lanes, t[0], t[2], weight};
    parallel_for(ceil_div(rows, kValueRows), call.threads, [&](int64_t task, int64_t) {
        const int64_t stop = smaller((task + 1) * kValueRows, rows);
        for (int64_t row = task * kValueRows; row < stop; ++row) {
            if (t[0].dtype == ANYMAMBA_FLOAT32)
                values.forward<float>(row);
            else
                values.forward<BFloat16>(row);
        }
    });
    return carver.used;
}

// Tensors: the gradient of the values; x, weight; their gradients. Sizes: rows, ranks, channels.
int64_t values_backward(const anymamba_call &call) {
    const anymamba_tensor *t = call.tensors;
    const int64_t rows = call.sizes[0], ranks = call.sizes[1], channels = call.sizes[2];
    const int64_t blocks = ceil_div(channels, kValueChannels), lanes = blocks * kValueChannels;
    Carver carver{static_cast<char *>(call.workspace)};
    float *weight = carver.floats(ranks * lanes);
    float *sums = carver.floats(call.threads * ranks * kValueChannels);
    if (call.workspace == nullptr) return carver.used;
    fill_weights(t[2], ranks, channels, lanes, weight);
    const RankValues values{rows, ranks, channels, lanes, t[1], t[0], weight};
    parallel_for(blocks, call.threads, [&](int64_t block, int64_t thread) {
        float *own = sums + thread * ranks * kValueChannels;
        if (t[1].dtype == ANYMAMBA_FLOAT32)
            values.backward<float>(block * kValueChannels, t[3], t[4], own);
        else
            values.backward<BFloat16>(block * kValueChannels, t[3], t[4], own);
    });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
