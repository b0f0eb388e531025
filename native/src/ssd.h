// What forward and backward of the SSD core share: sizes, and the decay and weights of a chunk. The
// mathematics is src/anymamba/ops/ssd/README.md.
#pragma once

#include "ssd_rows.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

struct Sizes {
    int64_t rows, length, rank, heads, width, groups, state;
    int64_t sequences;  // how many are packed into the one row; 0 when rows are not packed

    explicit Sizes(const int64_t *sizes)
        : rows(sizes[0]),
          length(sizes[1]),
          rank(sizes[2]),
          heads(sizes[3]),
          width(sizes[4]),
          groups(sizes[5]),
          state(sizes[6]),
          sequences(sizes[7]) {}

    int64_t group_of(int64_t head) const { return head / (heads / groups); }
    int64_t width_panels() const { return ceil_div(width, kPanel); }
    int64_t state_padded() const { return round_up(state, kPanel); }
};

// What a step has beside its rows, one number per head: its log-decay, its weight in the state and
// its weight in its own output. Any strides: a weight may be one expanded number.
struct StepTensors {
    const anymamba_tensor &da, &scale, &own;
};

ANYMAMBA_INLINE int64_t first_step(const anymamba_tensor &of, const Chunk &chunk, int64_t head) {
    return chunk.row * of.stride[0] + chunk.start * of.stride[1] + head * of.stride[2];
}

ANYMAMBA_INLINE Rows step_rows(const anymamba_tensor &of, const Chunk &chunk, int64_t head) {
    Rows rows;
    rows.tensor = &of;
    rows.first = first_step(of, chunk, head);
    return rows;
}

// The decay and the weights of one head in one chunk, as numbers per position (README section 5).
// cum is kept in two parts, multiples of 1/64 and rests, so that the difference of two neighbours
// stays exact behind a stretch of strong decay.
struct Decay {
    float *whole, *rest;
    float *grow;     // exp(cum)
    float *fade;     // exp(end - cum)
    float *scale;    // weight in the state and in later outputs
    float *own;      // weight in the output of the same time
    float *deposit;  // fade * scale: what of a value is in the state at the chunk's end
    float keep;      // exp(end)

    void lay_out(Carver &carver, int64_t padded) {
        float **const all[] = {&whole, &rest, &grow, &fade, &scale, &own, &deposit};
        for (float **numbers : all) *numbers = carver.floats(padded);
    }

    void fill(const StepTensors &steps, const Chunk &chunk, int64_t rank, int64_t head,
              int64_t padded);
};

// Below this exponent exp is exactly zero, subnormal numbers included.
constexpr float kVanishing = -120.0f;
constexpr float kUnits = 64.0f;
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

// Repeats the number of each step for every rank, and writes zeros up to `padded`.
inline void fill_weights(const anymamba_tensor &from, const Chunk &chunk, int64_t rank,
                         int64_t head, int64_t padded, float *to) {
    const int64_t first = first_step(from, chunk, head);
    int64_t position = 0;
    for (int64_t step = 0; step < chunk.steps; ++step) {
        const float weight = read_one(from, first + step * from.stride[1]);
        for (int64_t q = 0; q < rank; ++q) to[position++] = weight;
    }
    while (position < padded) to[position++] = 0.0f;
}

inline void Decay::fill(const StepTensors &steps, const Chunk &chunk, int64_t rank, int64_t head,
                        int64_t padded) {
    const anymamba_tensor &da = steps.da;
    const int64_t first = first_step(da, chunk, head);
    float whole_sum = 0.0f, rest_sum = 0.0f;
    int64_t position = 0;
    for (int64_t step = 0; step < chunk.steps; ++step) {
        float x = read_one(da, first + step * da.stride[1]);
        x = x < kVanishing ? kVanishing : x;
        const float units = (x * kUnits + kRoundToInteger) - kRoundToInteger;
        whole_sum += units / kUnits;
        rest_sum += x - units / kUnits;
        for (int64_t q = 0; q < rank; ++q, ++position) {
            whole[position] = whole_sum;
            rest[position] = rest_sum;
        }
    }
    // The padding carries the decay of the last step, so that no exponent there is positive.
    for (; position < padded; ++position) {
        whole[position] = whole_sum;
        rest[position] = rest_sum;
    }
    fill_weights(steps.scale, chunk, rank, head, padded, scale);
    fill_weights(steps.own, chunk, rank, head, padded, own);
    for (int64_t place = 0; place < padded; place += kWidth) {
        const Vec w = load(whole + place), r = load(rest + place);
        const Vec fading = exp((whole_sum - w) + (rest_sum - r));
        store(grow + place, exp(w + r));
        store(fade + place, fading);
        store(deposit + place, fading * load(scale + place));
    }
    keep = grow[padded - 1];
}

// Which lanes of a vector of sources count: all of them, or those of a mask.
struct AllCount {};
ANYMAMBA_INLINE Vec counted(AllCount, Vec x) { return x; }
ANYMAMBA_INLINE Vec counted(IntVec mask, Vec x) { return select(mask, x, Vec{}); }

// How the sources [0, stop) reach one target: use(first source, decays, factors, which count).
// From an earlier source the factor is decay times scale; at the same time the decay is 1 and the
// factor is the target's own weight; no other source counts.
template <class Use>
ANYMAMBA_INLINE void for_sources(const Decay &decay, int64_t target, int64_t rank, int64_t stop,
                                 const Use &use) {
    const int64_t same_time = target / rank * rank;
    const auto between = [&](int64_t source) {
        const Vec whole = decay.whole[target] - load(decay.whole + source);
        return exp(whole + decay.rest[target] - load(decay.rest + source));
    };
    int64_t source = 0;
    for (; source + kWidth <= same_time; source += kWidth) {
        const Vec fading = between(source);
        use(source, fading, fading * load(decay.scale + source), AllCount{});
    }
    const int32_t earlier = (int32_t)same_time, later = (int32_t)(same_time + rank);
    IntVec lanes;
    for (int64_t lane = 0; lane < kWidth; ++lane) lanes[lane] = (int32_t)lane;
    for (; source < stop; source += kWidth) {
        const IntVec place = lanes + (int32_t)source;
        Vec fading = splat(1.0f), factor = splat(decay.own[target]);
        if (source < same_time) {
            const Vec fades = between(source);
            fading = select(place < earlier, fades, fading);
            factor = select(place < earlier, fades * load(decay.scale + source), factor);
        }
        use(source, fading, factor, place < later);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
