// The causal convolution and its activation.
#include "conv.h"
#include "parallel.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

template <int kTaps, bool kSilu>
void convolve_token(const Taps &taps, float *to) {
    const Filter<kTaps> filter(taps);
    for (int64_t lane = 0; lane < filter.lanes; lane += kWidth) {
        const Vec sum = filter.sum(lane);
        store(to + lane, kSilu ? silu(sum) : sum);
    }
}

void convolve_span(Taps &taps, int64_t row, int64_t start, int64_t stop, float *scratch,
                   const anymamba_tensor &y) {
    const ConvShape &shape = taps.shape;
    for_pieces(shape, taps.in.borders, row, start, stop,
               [&](int64_t number, int64_t first, int64_t last) {
                   taps.enter(number, sequence_of(shape, taps.in.borders, number), first);
                   with_width(shape.width, [&](auto width) {
                       constexpr int kTaps = decltype(width)::kCount;
                       for (int64_t token = first; token < last; ++token) {
                           taps.push(row, token);
                           const int64_t to = taps.offset(y, row, token);
                           float *out = open_row(y, to, taps.channels, scratch);
                           if (shape.silu)
                               convolve_token<kTaps, true>(taps, out);
                           else
                               convolve_token<kTaps, false>(taps, out);
                           finish_row(y, to, taps.channels, out);
                       }
                   });
               });
}

// The last k columns of [window | x], which are the window itself when there are no tokens.
void write_window(const ConvShape &shape, const ConvInputs &in, int64_t number, int64_t block,
                  const anymamba_tensor &last) {
    const Sequence own = sequence_of(shape, in.borders, number);
    const int64_t start = block * kConvChannels, stop = start + shape.block_channels(start);
    for (int64_t channel = start; channel < stop; ++channel)
        for (int64_t column = 0; column < shape.width; ++column) {
            const int64_t token = own.stop - shape.width + column;
            const float value =
                token >= own.start
                    ? read_one(in.x, own.row * in.x.stride[0] + token * in.x.stride[1] + channel)
                    : read_one(in.window, number * in.window.stride[0] +
                                              channel * in.window.stride[1] + shape.width + token -
                                              own.start);
            write_one(last, number * last.stride[0] + channel * last.stride[1] + column, value);
        }
}

}  // namespace

// Tensors: ConvInputs, then y and the last windows. Sizes: ConvShape.
int64_t conv_forward(const anymamba_call &call) {
    const ConvShape shape(call.sizes);
    const ConvInputs in(call.tensors);
    const anymamba_tensor &y = call.tensors[kConvInputs], &last = call.tensors[kConvInputs + 1];
    Carver carver{static_cast<char *>(call.workspace)};
    Carver measure{nullptr};
    const Taps sample(measure, shape, in);
    measure.floats(kConvChannels);
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;

    const int64_t tasks = shape.batch * shape.spans * shape.blocks;
    parallel_for(
        tasks + shape.sequences * shape.blocks, call.threads, [&](int64_t task, int64_t thread) {
            const int64_t block = task % shape.blocks;
            if (task >= tasks) {
                write_window(shape, in, (task - tasks) / shape.blocks, block, last);
                return;
            }
            Carver own{scratch + thread * measure.used};
            Taps taps(own, shape, in);
            taps.open(block);
            const int64_t start = task / shape.blocks % shape.spans * kConvTokens;
            convolve_span(taps, task / shape.blocks / shape.spans, start,
                          smaller(start + kConvTokens, shape.length), own.floats(kConvChannels), y);
        });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
