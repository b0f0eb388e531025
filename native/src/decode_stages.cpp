// What the mixers of all families do: norms, projections, the convolution of one token.
#include "decode_step.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

constexpr int64_t kTaps = 4;

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

// kWidth channels of four taps: their windows times their weights.
template <class T>
ANYMAMBA_INLINE void sum_taps(const T *window, const float *weight, float *sums) {
    Vec products[kTaps];
    for (int64_t part = 0; part < kTaps; ++part)
        products[part] = load(window + part * kWidth) * load(weight + part * kWidth);
    sum_fours(products[0], products[1], products[2], products[3], sums);
}

#if defined(__AVX512F__)
// The windows of sixteen channels of four taps move on in registers; returns how many channels
// were taken. What is loaded soon after several small stores waits for all of them.
int64_t shift_in_whole(float *window, const float *weight, int64_t channels, float *values) {
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3);
    constexpr __mmask16 kNewest = 0x8888;
    int64_t channel = 0;
    for (; channel + kWidth <= channels; channel += kWidth) {
        const Vec newest = load(values + channel);
        Vec products[kTaps];
#pragma GCC unroll 4
        for (int part = 0; part < kTaps; ++part) {
            const int64_t at = kTaps * channel + part * kWidth;
            const __m512 moved = _mm512_permute_ps(load(window + at), 0x39);
            const __m512i own = _mm512_add_epi32(first, _mm512_set1_epi32(4 * part));
            const Vec next = _mm512_mask_permutexvar_ps(moved, kNewest, own, newest);
            store(window + at, next);
            products[part] = next * load(weight + at);
        }
        sum_fours(products[0], products[1], products[2], products[3], values + channel);
    }
    return channel;
}
#else
int64_t shift_in_whole(float *, const float *, int64_t, float *) { return 0; }
#endif
template <class T>
int64_t shift_in_whole(T *, const float *, int64_t, float *) {
    return 0;
}

// The usual case, four taps. The windows lie side by side, so all of them move by one place at
// once; what thereby comes in from a neighbour is overwritten by the newest token.
template <class T>
void shift_in_four(T *window, const float *weight, int64_t channels, float *values) {
    const int64_t done = shift_in_whole(window, weight, channels, values);
    if (done == channels) return;
    window += kTaps * done;
    weight += kTaps * done;
    channels -= done;
    values += done;
    memmove(window, window + 1, (size_t)(kTaps * channels - 1) * sizeof(T));
    for (int64_t channel = 0; channel < channels; ++channel)
        narrow(window + kTaps * channel + kTaps - 1, values[channel]);
    int64_t channel = 0;
    for (; channel + kWidth <= channels; channel += kWidth)
        sum_taps(window + kTaps * channel, weight + kTaps * channel, values + channel);
    if (channel == channels) return;
    const size_t rest = (size_t)(channels - channel);
    T last_window[kTaps * kWidth] = {};
    float last_weight[kTaps * kWidth] = {}, sums[kWidth];
    memcpy(last_window, window + kTaps * channel, rest * kTaps * sizeof(T));
    memcpy(last_weight, weight + kTaps * channel, rest * kTaps * sizeof(float));
    sum_taps(last_window, last_weight, sums);
    memcpy(values + channel, sums, rest * sizeof(float));
}

void shift_in_four(const anymamba_tensor &window, int64_t start, const float *weight,
                   int64_t channels, float *values) {
    if (window.dtype == ANYMAMBA_FLOAT32)
        shift_in_four(static_cast<float *>(window.data) + start, weight, channels, values);
    else if (window.dtype == ANYMAMBA_BFLOAT16)
        shift_in_four(static_cast<BFloat16 *>(window.data) + start, weight, channels, values);
    else
        shift_in_four(static_cast<Float16 *>(window.data) + start, weight, channels, values);
}

// Any number of taps, one channel.
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

void convolve(const DecodeLayer &layer, const anymamba_tensor &window, int64_t row, Share own,
              float *channels) {
    if (own.is_empty()) return;
    const int64_t first = own.first, last = own.last;
    const int64_t width = layer.conv_width, start = row * window.stride[0];
    const bool is_attention = layer.family == 0;  // which does not activate
    if (width == kTaps && window.stride[1] == kTaps)
        shift_in_four(window, start + first * kTaps, layer.conv_weight + first * kTaps,
                      last - first, channels + first);
    else
        for (int64_t channel = first; channel < last; ++channel)
            channels[channel] = shift_in(window, start + channel * window.stride[1], width,
                                         layer.conv_weight + channel * width, channels[channel]);
    for (int64_t channel = first; channel < last; channel += kWidth) {
        const int64_t count = smaller(last - channel, kWidth);
        Vec sum = load_most(channels + channel, count);
        if (layer.conv_bias != nullptr) sum += load_most(layer.conv_bias + channel, count);
        store_most(channels + channel, is_attention ? sum : silu(sum), count);
    }
}

// The windows of some channels of a row.
void ask_for_window(const anymamba_tensor &window, int64_t row, Share own) {
    const int64_t bytes = window.dtype == ANYMAMBA_FLOAT32 ? 4 : 2;
    const int64_t from = row * window.stride[0] + own.first * window.stride[1];
    ask_for({static_cast<const char *>(window.data) + from * bytes,
             (own.last - own.first) * window.stride[1] * bytes},
            kReach);
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

void multiply_and_meet(Step &step, const DecodeMatrix &matrix, Soon after, float *out,
                       int64_t out_stride) {
    step.share_rows(matrix, matrix.rows, after, [&](Rows rows, Soon soon) {
        multiply(matrix, step.desk.x, rows, soon, out, out_stride);
    });
    step.wait(after);
}

void project_and_convolve(Step &step, const DecodeLayer &layer, Soon after,
                          const anymamba_tensor &window, int64_t first_channel, int64_t channels) {
    const Board &board = step.board;
    const auto channels_of = [&](Share rows) {
        return Share{larger(rows.first - first_channel, 0),
                     smaller(rows.last - first_channel, channels)};
    };
    step.share_rows(layer.in_proj, layer.in_proj.rows, after, [&](Rows rows, Soon soon) {
        for (int64_t place = 0; place < rows.places; ++place)
            for (int64_t row = 0; row < step.rows; ++row)
                ask_for_window(window, row, channels_of(rows.at(place)));
        multiply(layer.in_proj, step.desk.x, rows, soon, board.projected, board.projected_stride);
        for (int64_t place = 0; place < rows.places; ++place)
            for (int64_t row = 0; row < step.rows; ++row)
                convolve(layer, window, row, channels_of(rows.at(place)),
                         board.projected + row * board.projected_stride + first_channel);
    });
    step.wait(after);
}

int64_t scratch_bytes(const DecodeLayer &layer) {
    if (layer.family == 0) return attention_scratch_bytes(layer);
    if (layer.family == 1) return mamba1_scratch_bytes(layer);
    if (layer.family == 2) return mamba2_scratch_bytes(layer);
    return mamba3_scratch_bytes(layer);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
