// The adjoint of the causal convolution (ops/conv/README.md, section 4). The sums before the
// activation are recomputed. A span computes them for the k - 1 tokens after it too, so that no
// task waits for another; what the filters receive is left span by span and added up in order.
#include "conv.h"
#include "parallel.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

struct Gradients {
    const anymamba_tensor &y, &last;                    // given
    const anymamba_tensor &x, &window, &weight, &bias;  // wanted

    Gradients(const anymamba_tensor *given, const anymamba_tensor *wanted)
        : y(given[0]),
          last(given[1]),
          x(wanted[0]),
          window(wanted[1]),
          weight(wanted[2]),
          bias(wanted[3]) {}
};

struct Worker {
    Taps taps;
    float *grad_sum;    // [token % k][channel] gradient before the activation
    float *scratch[2];  // rows of grad_y and grad_x

    Worker(Carver &carver, const ConvShape &shape, const ConvInputs &in)
        : taps(carver, shape, in),
          grad_sum(carver.floats(shape.width * kConvChannels)),
          scratch{carver.floats(kConvChannels), carver.floats(kConvChannels)} {}

    float *slot(int64_t token) const { return grad_sum + token % taps.shape.width * kConvChannels; }
};

// The gradient before the activation, of the token whose rows are in hand. kAdd: and its share of
// `part`, [tap][channel] of the filters, then [channel] of the bias.
template <int kTaps, bool kAdd>
void grad_before(const Taps &taps, const float *grad_y, float *grad_sum, float *part) {
    const Filter<kTaps> filter(taps);
    const bool silu = taps.shape.silu;
    for (int64_t lane = 0; lane < filter.lanes; lane += kWidth) {
        Vec grad = load(grad_y + lane);
        if (silu) grad *= silu_slope(filter.sum(lane));
        store(grad_sum + lane, grad);
        if (!kAdd) continue;
        float *total = part + lane;
        for (int64_t tap = 0; tap < filter.width; ++tap, total += kConvChannels)
            store(total, load(total) + grad * filter.row(tap, lane));
        store(total, load(total) + grad);
    }
}

// Token t meets weight k-1-d in the sum of token t + d; sums from `stop` on do not exist.
template <int kTaps>
void grad_token(const Worker &worker, int64_t token, int64_t stop, float *to) {
    const Taps &taps = worker.taps;
    const int64_t width = taps.shape.width, lanes = taps.vectors * kWidth;
    if (kTaps != 0 && token + kTaps <= stop) {
        const float *weight = taps.weight + (kTaps - 1) * kConvChannels, *grad_sum[kTaps + 1];
        for (int later = 0; later < kTaps; ++later) grad_sum[later] = worker.slot(token + later);
        for (int64_t lane = 0; lane < lanes; lane += kWidth) {
            Vec sum = {};
            for (int later = 0; later < kTaps; ++later)
                sum += load(weight - later * kConvChannels + lane) * load(grad_sum[later] + lane);
            store(to + lane, sum);
        }
        return;
    }
    memset(to, 0, (size_t)lanes * sizeof(float));
    for (int64_t later = 0; later < width && token + later < stop; ++later) {
        const float *grad_sum = worker.slot(token + later);
        const float *weight = taps.weight + (width - 1 - later) * kConvChannels;
        for (int64_t lane = 0; lane < lanes; lane += kWidth)
            store(to + lane, load(to + lane) + load(weight + lane) * load(grad_sum + lane));
    }
}

// The window after a sequence copies its last tokens.
void add_copied(const Taps &taps, const anymamba_tensor &grad_last, int64_t number,
                const Sequence &own, int64_t token, float *to) {
    const int64_t column = taps.shape.width + token - own.stop;
    if (column < 0) return;
    const int64_t from = number * grad_last.stride[0] + taps.channel * grad_last.stride[1] + column;
    for (int64_t lane = 0; lane < taps.channels; ++lane)
        to[lane] += read_one(grad_last, from + lane * grad_last.stride[1]);
}

template <int kTaps>
void retreat_piece(Worker &worker, const Gradients &grad, int64_t number, int64_t first,
                   int64_t last, float *part) {
    Taps &taps = worker.taps;
    const int64_t width = taps.shape.width;
    const Sequence own = sequence_of(taps.shape, taps.in.borders, number);
    taps.enter(number, own, first);
    for (int64_t token = first; token < last + width - 1; ++token) {
        if (token < own.stop) {
            taps.push(own.row, token);
            const float *grad_y = read_row(grad.y, taps.offset(grad.y, own.row, token),
                                           taps.channels, worker.scratch[0]);
            if (token < last)
                grad_before<kTaps, true>(taps, grad_y, worker.slot(token), part);
            else
                grad_before<kTaps, false>(taps, grad_y, worker.slot(token), nullptr);
        }
        const int64_t ready = token - width + 1;
        if (ready < first) continue;
        const int64_t offset = taps.offset(grad.x, own.row, ready);
        float *to = open_row(grad.x, offset, taps.channels, worker.scratch[1]);
        grad_token<kTaps>(worker, ready, own.stop, to);
        add_copied(taps, grad.last, number, own, ready, to);
        finish_row(grad.x, offset, taps.channels, to);
    }
}

// Column c of the window is the token c - k: it meets the first k - 1 sums, and the window after
// a sequence shorter than k copies it.
void write_grad_window(Worker &worker, const Gradients &grad, int64_t number) {
    Taps &taps = worker.taps;
    const ConvShape &shape = taps.shape;
    const Sequence own = sequence_of(shape, taps.in.borders, number);
    const int64_t length = own.stop - own.start;
    const int64_t sums = smaller(length, shape.width - 1);
    taps.enter(number, own, own.start);
    for (int64_t t = 0; t < sums; ++t) {
        taps.push(own.row, own.start + t);
        const float *grad_y = read_row(grad.y, taps.offset(grad.y, own.row, own.start + t),
                                       taps.channels, worker.scratch[0]);
        grad_before<0, false>(taps, grad_y, worker.slot(t), nullptr);
    }
    for (int64_t lane = 0; lane < taps.channels; ++lane) {
        const int64_t channel = taps.channel + lane;
        for (int64_t column = 0; column < shape.width; ++column) {
            float sum = 0;
            for (int64_t t = 0; t < sums && t < column; ++t)
                sum += taps.weight[(column - 1 - t) * kConvChannels + lane] * worker.slot(t)[lane];
            if (column >= length)
                sum += read_one(grad.last, number * grad.last.stride[0] +
                                               channel * grad.last.stride[1] + column - length);
            write_one(grad.window,
                      number * grad.window.stride[0] + channel * grad.window.stride[1] + column,
                      sum);
        }
    }
}

// Adds up what the spans of all rows left for a block of channels.
void add_parts(const ConvShape &shape, const Gradients &grad, int64_t block, float *parts) {
    const int64_t size = (shape.width + 1) * kConvChannels;
    float *sum = parts + block * size;
    for (int64_t span = 1; span < shape.batch * shape.spans; ++span) {
        const float *more = parts + (span * shape.blocks + block) * size;
        for (int64_t k = 0; k < size; ++k) sum[k] += more[k];
    }
    const int64_t channel = block * kConvChannels;
    for (int64_t lane = 0; lane < shape.block_channels(channel); ++lane) {
        for (int64_t tap = 0; tap < shape.width; ++tap)
            write_one(grad.weight, (channel + lane) * grad.weight.stride[0] + tap,
                      sum[tap * kConvChannels + lane]);
        write_one(grad.bias, (channel + lane) * grad.bias.stride[0],
                  sum[shape.width * kConvChannels + lane]);
    }
}

}  // namespace

// Tensors: the gradients of y and of the last windows; ConvInputs; then the gradients of x, window,
// weight and bias. Sizes: ConvShape.
int64_t conv_backward(const anymamba_call &call) {
    const ConvShape shape(call.sizes);
    const ConvInputs in(call.tensors + 2);
    const Gradients grad(call.tensors, call.tensors + 2 + kConvInputs);
    const int64_t tasks = shape.batch * shape.spans * shape.blocks;
    const int64_t part_size = (shape.width + 1) * kConvChannels;
    Carver carver{static_cast<char *>(call.workspace)};
    float *parts = carver.floats(tasks * part_size);
    Carver measure{nullptr};
    const Worker sample(measure, shape, in);
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;

    parallel_for(tasks + shape.sequences * shape.blocks, call.threads,
                 [&](int64_t task, int64_t thread) {
                     Carver own{scratch + thread * measure.used};
                     Worker worker(own, shape, in);
                     worker.taps.open(task % shape.blocks);
                     if (task >= tasks) {
                         write_grad_window(worker, grad, (task - tasks) / shape.blocks);
                         return;
                     }
                     float *part = parts + task * part_size;
                     memset(part, 0, (size_t)part_size * sizeof(float));
                     const int64_t start = task / shape.blocks % shape.spans * kConvTokens;
                     for_pieces(shape, in.borders, task / shape.blocks / shape.spans, start,
                                smaller(start + kConvTokens, shape.length),
                                [&](int64_t number, int64_t first, int64_t last) {
                                    with_width(shape.width, [&](auto width) {
                                        retreat_piece<decltype(width)::kCount>(worker, grad, number,
                                                                               first, last, part);
                                    });
                                });
                 });
    parallel_for(shape.blocks, call.threads,
                 [&](int64_t block, int64_t) { add_parts(shape, grad, block, parts); });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
