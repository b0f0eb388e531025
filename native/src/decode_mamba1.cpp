// One token of a Mamba-1 block (ops/selective_scan/README.md for the recurrence).
#include "decode_step.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// FalconMamba's norm without weights of dt, B and C.
void normalize_rates(const DecodeLayer &layer, float *rates) {
    if (layer.rates_eps < 0) return;
    const int64_t sizes[] = {layer.dt_rank, layer.state, layer.state};
    for (const int64_t size : sizes) {
        float square = 0.0f;
        for (int64_t place = 0; place < size; ++place) square += rates[place] * rates[place];
        const float inverse =
            1.0f / __builtin_sqrtf(square / (float)size + (float)layer.rates_eps);
        for (int64_t place = 0; place < size; ++place) rates[place] *= inverse;
        rates += size;
    }
}

// Rows of the batch that share a reading of the step-size projection: as many as leave their sums in
// registers.
constexpr int64_t kScanRows = kWidth == kDecodeGroup ? 8 : 4;

// A worker's memory for kScanRows rows of the batch, whose step sizes are made together, and for what
// one of them reads out of its states.
struct RowDesks {
    int64_t inner, rank_and_states;
    float *first, *y;

    RowDesks(Carver &carver, const DecodeLayer &layer)
        : inner(layer.inner), rank_and_states(layer.x_proj.rows),
          first(carver.floats(kScanRows * (inner + rank_and_states))), y(carver.floats(inner)) {}

    float *dt(int64_t row) const { return first + row * (inner + rank_and_states); }
    float *rates(int64_t row) const { return dt(row) + inner; }
};

// dt = softplus(dt_weight raw + bias) for a span of channels, which starts at a whole group, and
// kCount rows. In the weight channels are lanes, so that no sum crosses them.
template <int64_t kCount>
void step_sizes(const DecodeLayer &layer, const RowDesks &desks, Share own) {
    constexpr int64_t kParts = kDecodeGroup / kWidth;
    for (int64_t channel = own.first; channel < own.last; channel += kDecodeGroup) {
        const float *weight = layer.dt_weight + channel * layer.dt_rank;
        Vec sum[kCount][kParts] = {};
        for (int64_t rank = 0; rank < layer.dt_rank; ++rank, weight += kDecodeGroup)
            for (int64_t part = 0; part < kParts; ++part)
                for (int64_t row = 0; row < kCount; ++row)
                    sum[row][part] += load(weight + part * kWidth) * desks.rates(row)[rank];
        for (int64_t part = 0; part < kParts; ++part) {
            const int64_t at = channel + part * kWidth, count = smaller(own.last - at, kWidth);
            for (int64_t row = 0; row < kCount && count > 0; ++row) {
                const Vec raw = sum[row][part] + load_most(layer.dt_bias + at, count);
                store_most(desks.dt(row) + at, softplus(raw), count);
            }
        }
    }
}

// 2^(dt a), where a is A / ln 2 and never positive: below 2^-126 the state is forgotten.
ANYMAMBA_INLINE Vec decay_of(Vec exponent) { return exp2_held(at_least(splat(-126.0f), exponent)); }

// Channels whose sums over the state are taken together.
constexpr int kChannels = 4;

// One vector of the state of a channel; returns what it adds to y, lane by lane.
ANYMAMBA_INLINE Vec advance(float *state, Vec a, Vec b, Vec c, float dt, float input) {
    const Vec next = load(state) * decay_of(a * dt) + b * input;
    store(state, next);
    return next * c;
}

struct Channels {
    const float *a;  // (channels, size)
    float *state;    // (channels, stride)
    int64_t size, stride;
    const float *b, *c;
    const float *dt, *x;
    const float *soon;  // the states of the row that follows, or of this one
};

// y = H . c for kChannels channels from `first` on, after H = decay H + dt x b.
ANYMAMBA_INLINE void scan_four(const Channels &all, int64_t first, float *y) {
    const float *a = all.a + first * all.size;
    float *state = all.state + first * all.stride;
    const float *dt = all.dt + first, *x = all.x + first;
    const float *soon = all.soon + first * all.stride;
    Vec sum[kChannels] = {};
    int64_t place = 0;
    for (; place + kWidth <= all.size; place += kWidth) {
        const Vec b = load(all.b + place), c = load(all.c + place);
#pragma GCC unroll 4
        for (int at = 0; at < kChannels; ++at) {
            __builtin_prefetch(soon + at * all.stride + place, 0, 2);
            sum[at] += advance(state + at * all.stride + place, load(a + at * all.size + place), b,
                               c, dt[at], dt[at] * x[at]);
        }
    }
    sum_lanes_of_four(sum[0], sum[1], sum[2], sum[3], y);
}

// The same for one channel and any size of the state, from `place` on.
float scan_rest(const Channels &all, int64_t channel, int64_t place) {
    const float dt = all.dt[channel], input = dt * all.x[channel];
    float *state = all.state + channel * all.stride;
    float sum = 0.0f;
    for (; place < all.size; place += kWidth) {
        const int64_t rest = smaller(all.size - place, kWidth);
        float lanes[kWidth] = {};
        memcpy(lanes, state + place, (size_t)rest * sizeof(float));
        const Vec a = load_most(all.a + channel * all.size + place, rest);
        sum += sum_lanes(advance(lanes, a, load_most(all.b + place, rest),
                                 load_most(all.c + place, rest), dt, input));
        memcpy(state + place, lanes, (size_t)rest * sizeof(float));
    }
    return sum;
}

void scan_channels(const Channels &all, int64_t first, int64_t last, float *y) {
    const int64_t whole = all.size / kWidth * kWidth;
    int64_t channel = first;
    for (; channel + kChannels <= last; channel += kChannels) {
        scan_four(all, channel, y + channel);
        if (whole < all.size)
            for (int64_t at = channel; at < channel + kChannels; ++at)
                y[at] += scan_rest(all, at, whole);
    }
    for (; channel < last; ++channel) y[channel] = scan_rest(all, channel, 0);
}

// Where the states of some channels of a row lie.
Soon channels_of(const anymamba_tensor &scan, int64_t row, Share own) {
    const auto *states = static_cast<const float *>(scan.data);
    const int64_t from = row * scan.stride[0] + own.first * scan.stride[1];
    return {reinterpret_cast<const char *>(states + from),
            (own.last - own.first) * scan.stride[1] * (int64_t)sizeof(float)};
}

// What other workers read later is written once, line by line: in between, a line that they still hold
// would keep all states that are written behind it waiting.
void scan_row(const Step &step, const DecodeLayer &layer, const anymamba_tensor &scan, int64_t row,
              const float *dt, const float *rates, float *y, Share own) {
    const Board &board = step.board;
    const float *b = rates + layer.dt_rank, *c = b + layer.state;
    const float *x = board.projected + row * board.projected_stride, *z = x + layer.inner;
    float *states = static_cast<float *>(scan.data) + row * scan.stride[0];
    const float *soon = row + 1 < step.rows ? states + scan.stride[0] : states;
    scan_channels({layer.a, states, layer.state, scan.stride[1], b, c, dt, x, soon}, own.first,
                  own.last, y);
    for (int64_t channel = own.first; channel < own.last; ++channel)
        y[channel] += layer.skip[channel] * x[channel];
    gate_row(z + own.first, y + own.first, own.last - own.first,
             board.mixed + row * board.mixed_stride + own.first);
}

// The rows from `first` on, at most kCount of them; returns how many it took.
template <int64_t kCount>
int64_t scan_rows(const Step &step, const DecodeLayer &layer, const anymamba_tensor &scan,
                  int64_t first, Share own) {
    if constexpr (kCount > 1)
        if (step.rows - first < kCount)
            return scan_rows<kCount - 1>(step, layer, scan, first, own);
    const Board &board = step.board;
    Carver carver{step.desk.scratch};
    const RowDesks desks(carver, layer);
    for (int64_t row = 0; row < kCount; ++row) {
        memcpy(desks.rates(row), board.narrow + (first + row) * board.narrow_stride,
               (size_t)layer.x_proj.rows * sizeof(float));
        normalize_rates(layer, desks.rates(row));
    }
    step_sizes<kCount>(layer, desks, own);
    for (int64_t row = 0; row < kCount; ++row)
        scan_row(step, layer, scan, first + row, desks.dt(row), desks.rates(row), desks.y, own);
    return kCount;
}

}  // namespace

int64_t mamba1_scratch_bytes(const DecodeLayer &layer) {
    Carver measure{nullptr};
    RowDesks(measure, layer);
    return measure.used;
}

void mix_mamba1(Step &step, const DecodeLayer &layer, const anymamba_tensor *states, Soon after) {
    const Board &board = step.board;
    const Share groups =
        even_part(ceil_div(layer.inner, kDecodeGroup), step.worker, step.team.size());
    const Share own_channels{groups.first * kDecodeGroup,
                             smaller(layer.inner, groups.last * kDecodeGroup)};
    project_and_convolve(step, layer, step.first_of(layer.x_proj), states[0], 0, layer.inner);
    step.present(board.projected, board.projected_stride);
    multiply_and_meet(step, layer.x_proj, channels_of(states[1], 0, own_channels), board.narrow,
                      board.narrow_stride);
    step.share_out(layer.inner, kDecodeGroup, [&](Share own) {
        for (int64_t row = 0; row < step.rows;)
            row += scan_rows<kScanRows>(step, layer, states[1], row, own);
    });
    step.wait(step.first_of(layer.out_proj));
    step.present(board.mixed, board.mixed_stride);
    multiply_and_meet(step, layer.out_proj, after, board.branch, board.branch_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
