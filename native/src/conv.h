// The causal convolution cut into tasks: a span of tokens and a block of channels each
// (ops/conv/README.md). Rows are read as they lie in memory, each token once per task; the k rows
// that an output needs stay in the first cache.
#pragma once

#include "exp2.h"
#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT {

constexpr int64_t kConvChannels = 256;
constexpr int64_t kConvTokens = 256;

// The order of a call's input tensors; the backward has two gradients before them.
struct ConvInputs {
    const anymamba_tensor &x, &window, &weight, &bias, &borders;

    explicit ConvInputs(const anymamba_tensor *t)
        : x(t[0]), window(t[1]), weight(t[2]), bias(t[3]), borders(t[4]) {}
};
constexpr int64_t kConvInputs = 5;

struct ConvShape {
    int64_t batch, length, channels, width, sequences;
    bool silu;
    int64_t spans, blocks;  // of a row

    explicit ConvShape(const int64_t *sizes)
        : batch(sizes[0]),
          length(sizes[1]),
          channels(sizes[2]),
          width(sizes[3]),
          sequences(sizes[4]),
          silu(sizes[5] != 0),
          spans(ceil_div(length, kConvTokens)),
          blocks(ceil_div(channels, kConvChannels)) {}

    int64_t block_channels(int64_t channel) const {
        return smaller(kConvChannels, channels - channel);
    }
};

struct Sequence {
    int64_t row, start, stop;  // of its tokens
};

// Without borders, sequence q is row q.
ANYMAMBA_INLINE Sequence sequence_of(const ConvShape &shape, const anymamba_tensor &borders,
                                     int64_t sequence) {
    if (borders.data == nullptr) return {sequence, 0, shape.length};
    const int64_t *cu_seqlens = static_cast<const int64_t *>(borders.data);
    return {0, cu_seqlens[sequence * borders.stride[0]],
            cu_seqlens[(sequence + 1) * borders.stride[0]]};
}

// Calls `function(sequence, first, last)` for every stretch of tokens that the span
// [start, stop) of a row shares with a sequence.
template <class Function>
ANYMAMBA_INLINE void for_pieces(const ConvShape &shape, const anymamba_tensor &borders, int64_t row,
                                int64_t start, int64_t stop, const Function &function) {
    if (borders.data == nullptr) {
        function(row, start, stop);
        return;
    }
    // The last sequence that starts at or before `start` owns that token, or is empty.
    int64_t low = 0, high = shape.sequences - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (sequence_of(shape, borders, middle).start <= start)
            low = middle;
        else
            high = middle - 1;
    }
    for (int64_t sequence = low; sequence < shape.sequences; ++sequence) {
        const Sequence own = sequence_of(shape, borders, sequence);
        if (own.start >= stop) return;
        const int64_t first = larger(start, own.start), last = smaller(stop, own.stop);
        if (first < last) function(sequence, first, last);
    }
}

// The filters of a block of channels, and the k newest rows behind the token in hand.
struct Taps {
    const ConvShape &shape;
    const ConvInputs &in;
    int64_t channel, channels, vectors;
    float *weight;       // [tap][channel], oldest token first
    float *bias;         // [channel]
    float *scratch;      // [tap][channel] rows that cannot be read in place
    const float **rows;  // [tap] oldest first
    int64_t newest = 0;

    Taps(Carver &carver, const ConvShape &conv_shape, const ConvInputs &inputs)
        : shape(conv_shape),
          in(inputs),
          channel(0),
          channels(0),
          vectors(0),
          weight(carver.floats(shape.width * kConvChannels)),
          bias(carver.floats(kConvChannels)),
          scratch(carver.floats(shape.width * kConvChannels)),
          rows(carver.take<const float *>(shape.width)) {}

    // Once per block: the filters as one row per tap.
    void open(int64_t block) {
        channel = block * kConvChannels;
        channels = shape.block_channels(channel);
        vectors = ceil_div(channels, kWidth);
        for (int64_t lane = 0; lane < vectors * kWidth; ++lane) {
            const bool real = lane < channels;
            const int64_t from = (channel + lane) * in.weight.stride[0];
            bias[lane] = real ? read_one(in.bias, (channel + lane) * in.bias.stride[0]) : 0;
            for (int64_t tap = 0; tap < shape.width; ++tap)
                weight[tap * kConvChannels + lane] = real ? read_one(in.weight, from + tap) : 0;
        }
    }

    int64_t offset(const anymamba_tensor &tensor, int64_t row, int64_t token) const {
        return row * tensor.stride[0] + token * tensor.stride[1] + channel;
    }

    // Before the token `first` of a sequence: the k - 1 rows that precede it.
    void enter(int64_t number, const Sequence &sequence, int64_t first) {
        for (int64_t token = first - shape.width + 1; token < first; ++token) {
            if (token >= sequence.start) {
                push(sequence.row, token);
                continue;
            }
            float *row = next_slot();
            const int64_t column = shape.width + token - sequence.start;
            for (int64_t lane = 0; lane < vectors * kWidth; ++lane)
                row[lane] =
                    lane < channels
                        ? read_one(in.window, number * in.window.stride[0] +
                                                  (channel + lane) * in.window.stride[1] + column)
                        : 0;
            slide(row);
        }
    }

    void push(int64_t row, int64_t token) {
        slide(read_row(in.x, offset(in.x, row, token), channels, next_slot()));
    }

   private:
    float *next_slot() {
        newest = newest + 1 == shape.width ? 0 : newest + 1;
        return scratch + newest * kConvChannels;
    }
    void slide(const float *row) {
        for (int64_t tap = 0; tap + 1 < shape.width; ++tap) rows[tap] = rows[tap + 1];
        rows[shape.width - 1] = row;
    }
};

// The filter at one token: bias + sum over the taps of weight times row. The pointers are copied
// here, where no store can be thought to change them. kTaps = 0: as many as the shape says.
template <int kTaps>
struct Filter {
    const float *weight, *bias;
    const float *const *counted;
    int64_t width, lanes;
    const float *known[kTaps == 0 ? 1 : kTaps];

    explicit Filter(const Taps &taps)
        : weight(taps.weight),
          bias(taps.bias),
          counted(taps.rows),
          width(kTaps == 0 ? taps.shape.width : kTaps),
          lanes(taps.vectors * kWidth) {
        for (int tap = 0; tap < kTaps; ++tap) known[tap] = taps.rows[tap];
    }

    ANYMAMBA_INLINE Vec row(int64_t tap, int64_t lane) const {
        return load((kTaps == 0 ? counted[tap] : known[tap]) + lane);
    }
    ANYMAMBA_INLINE Vec sum(int64_t lane) const {
        Vec total = load(bias + lane);
        for (int64_t tap = 0; tap < (kTaps == 0 ? width : kTaps); ++tap)
            total += load(weight + tap * kConvChannels + lane) * row(tap, lane);
        return total;
    }
};

template <int kTaps>
struct Width {
    static constexpr int kCount = kTaps;
};

// Calls `function(Width<k>)`: the usual widths are compiled, the others counted at run time.
template <class Function>
ANYMAMBA_INLINE void with_width(int64_t width, const Function &function) {
    switch (width) {
        case 2:
            return function(Width<2>{});
        case 3:
            return function(Width<3>{});
        case 4:
            return function(Width<4>{});
        case 5:
            return function(Width<5>{});
        case 6:
            return function(Width<6>{});
        case 7:
            return function(Width<7>{});
        case 8:
            return function(Width<8>{});
        default:
            return function(Width<0>{});
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
