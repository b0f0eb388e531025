// What the mixers of all families do: norms, projections, the convolution of one token.
#include "decode_step.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

ANYMAMBA_INLINE float sum_of_squares(const float *from, int64_t count, float mean) {
    Vec sum = {};
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) {
        const Vec value = load(from + place) - mean;
        sum += value * value;
    }
    float total = sum_lanes(sum);
    for (; place < count; ++place) total += (from[place] - mean) * (from[place] - mean);
    return total;
}

float mean_of(const float *from, int64_t count) {
    Vec sum = {};
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) sum += load(from + place);
    float total = sum_lanes(sum);
    for (; place < count; ++place) total += from[place];
    return total / (float)count;
}

typedef float Taps4 __attribute__((vector_size(16)));

// The usual case, four float32 taps: the window is one small vector.
ANYMAMBA_INLINE float shift_in_four(float *window, const float *weight, float newest) {
    Taps4 taps, factors;
    memcpy(&taps, window, sizeof(taps));
    memcpy(&factors, weight, sizeof(factors));
    const Taps4 shifted = {taps[1], taps[2], taps[3], newest};
    memcpy(window, &shifted, sizeof(shifted));
    const Taps4 product = shifted * factors;
    return (product[0] + product[1]) + (product[2] + product[3]);
}

ANYMAMBA_INLINE float shift_in(const anymamba_tensor &window, int64_t start, int64_t width,
                               const float *weight, float newest) {
    float sum = 0.0f;
    for (int64_t tap = 0; tap < width; ++tap) {
        const bool is_newest = tap == width - 1;
        write_state(window, start + tap, is_newest ? newest : read_state(window, start + tap + 1));
        // Read back: a window of halves holds the rounded token.
        sum += weight[tap] * read_state(window, start + tap);
    }
    return sum;
}

void convolve(const DecodeLayer &layer, const anymamba_tensor &window, int64_t row, int64_t first,
              int64_t last, float *channels) {
    const int64_t width = layer.conv_width;
    const bool is_usual = width == 4 && window.dtype == ANYMAMBA_FLOAT32;
    for (int64_t channel = first; channel < last; ++channel) {
        const int64_t start = row * window.stride[0] + channel * window.stride[1];
        const float *weight = layer.conv_weight + channel * width;
        const float sum =
            is_usual ? shift_in_four(static_cast<float *>(window.data) + start, weight,
                                     channels[channel])
                     : shift_in(window, start, width, weight, channels[channel]);
        channels[channel] = sum + (layer.conv_bias == nullptr ? 0.0f : layer.conv_bias[channel]);
    }
    int64_t channel = first;
    for (; channel + kWidth <= last; channel += kWidth)
        store(channels + channel, silu(load(channels + channel)));
    if (channel < last)
        store_part(channels + channel, silu(load_part(channels + channel, last - channel)),
                   last - channel);
}

}  // namespace

void normalize(const DecodeNorm &norm, const float *from, int64_t count, float *to) {
    const bool is_layer = norm.kind == DecodeNormKind::kLayer;
    const float mean = is_layer ? mean_of(from, count) : 0.0f;
    const float square = sum_of_squares(from, count, mean) / (float)count;
    const float inverse = 1.0f / __builtin_sqrtf(square + (float)norm.eps);
    for (int64_t place = 0; place < count; ++place) {
        const float scaled = (from[place] - mean) * inverse * norm.weight[place];
        to[place] = norm.bias == nullptr ? scaled : scaled + norm.bias[place];
    }
}

void multiply_share(Step &step, const DecodeMatrix &matrix, float *out, int64_t out_stride) {
    const Share own = step.share(matrix.rows, kShareUnit);
    multiply(matrix, step.desk.x, own.first, own.last, out, out_stride);
}

void project_and_convolve(Step &step, const DecodeLayer &layer, const anymamba_tensor &window,
                          int64_t first_channel, int64_t channels) {
    const Share own = step.share(layer.in_proj.rows, kShareUnit);
    const Board &board = step.board;
    prepare(layer.in_proj, &step.desk.x);
    multiply(layer.in_proj, step.desk.x, own.first, own.last, board.projected,
             board.projected_stride);
    const int64_t first = larger(own.first - first_channel, 0);
    const int64_t last = smaller(own.last - first_channel, channels);
    for (int64_t row = 0; row < step.rows; ++row)
        convolve(layer, window, row, first, last,
                 board.projected + row * board.projected_stride + first_channel);
}

int64_t scratch_floats(const DecodeLayer &layer) {
    const int64_t state = ceil_div(layer.state, kWidth) * kWidth;
    const int64_t turns = ceil_div(layer.turns, kWidth) * kWidth;
    if (layer.family == 1) return layer.inner + layer.x_proj.rows;
    if (layer.family == 2) return layer.headdim;
    // Keys and queries before and after the head's part, old keys; turns; coefficients and outputs.
    return layer.rank * (5 * state + 4 * layer.headdim) + 8 * turns + 2 * layer.headdim;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
