// What forward and backward of the SSD core share: sizes, and the decay of a chunk. The mathematics
// is src/anymamba/ops/ssd/README.md.
#pragma once

#include "ssd_rows.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

struct Sizes {
    int64_t rows, length, rank, heads, width, groups, state;
    int64_t sequences;  // how many are packed into the one row; 0 when rows are not packed
    bool strict;

    explicit Sizes(const int64_t *sizes)
        : rows(sizes[0]),
          length(sizes[1]),
          rank(sizes[2]),
          heads(sizes[3]),
          width(sizes[4]),
          groups(sizes[5]),
          state(sizes[6]),
          sequences(sizes[7]),
          strict(sizes[8] != 0) {}

    int64_t group_of(int64_t head) const { return head / (heads / groups); }
    int64_t width_panels() const { return ceil_div(width, kPanel); }
    int64_t state_padded() const { return round_up(state, kPanel); }
};

// The decay of one head in one chunk, as numbers per position (README section 5). cum is kept in
// two parts, multiples of 1/64 and rests, so that the difference of two neighbours stays exact
// behind a stretch of strong decay.
struct Decay {
    float *whole, *rest;
    float *grow;  // exp(cum)
    float *fade;  // exp(end - cum)
    float keep;   // exp(end)

    void lay_out(Carver &carver, int64_t padded) {
        whole = carver.floats(padded);
        rest = carver.floats(padded);
        grow = carver.floats(padded);
        fade = carver.floats(padded);
    }

    void fill(const anymamba_tensor &da, const Chunk &chunk, int64_t rank, int64_t head,
              int64_t padded);
};

// Below this exponent exp is exactly zero, subnormal numbers included.
constexpr float kVanishing = -120.0f;
constexpr float kUnits = 64.0f;
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

inline void Decay::fill(const anymamba_tensor &da, const Chunk &chunk, int64_t rank, int64_t head,
                        int64_t padded) {
    const int64_t first =
        chunk.row * da.stride[0] + chunk.start * da.stride[1] + head * da.stride[2];
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
    for (int64_t place = 0; place < padded; place += kWidth) {
        const Vec w = load(whole + place), r = load(rest + place);
        store(grow + place, exp(w + r));
        store(fade + place, exp((whole_sum - w) + (rest_sum - r)));
    }
    keep = grow[padded - 1];
}

// How the sources [0, padded) reach one target: use(first source, factors, which count). The factor
// is the decay of an earlier source, 1 at the same time unless strict; no other source counts.
template <class Use>
ANYMAMBA_INLINE void for_sources(const Decay &decay, int64_t target, int64_t rank, int64_t padded,
                                 bool strict, const Use &use) {
    const int64_t same_time = target / rank * rank;
    const int32_t earlier = (int32_t)same_time,
                  counted = (int32_t)(same_time + (strict ? 0 : rank));
    IntVec lanes;
    for (int64_t lane = 0; lane < kWidth; ++lane) lanes[lane] = (int32_t)lane;
    for (int64_t source = 0; source < padded; source += kWidth) {
        const IntVec place = lanes + (int32_t)source;
        Vec factor = splat(1.0f);
        if (source < same_time) {
            const Vec whole = decay.whole[target] - load(decay.whole + source);
            const Vec fading = exp(whole + decay.rest[target] - load(decay.rest + source));
            factor = select(place < earlier, fading, factor);
        }
        use(source, factor, place < counted);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
