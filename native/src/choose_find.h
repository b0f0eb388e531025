// What choosing a token looks for: values in a range, the largest ones, the border of a sum.
#pragma once

#include "rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace anymamba::ANYMAMBA_VARIANT {

constexpr float kInfinite = __builtin_inff();
// Up to this many best ones are kept while the vocabulary passes by.
constexpr int64_t kFewBest = 256;
// Values that are looked at before it is asked whether one of them was meant.
constexpr int64_t kAtOnce = 4 * kWidth;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

inline bool has_any(IntVec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    int64_t parts[sizeof(IntVec) / sizeof(int64_t)], any = 0;
    memcpy(parts, &mask, sizeof(parts));
    for (const int64_t part : parts) any |= part;
    return any != 0;
#endif
}

// Calls function(place) for every value from `least` to `most`; function may raise `least`.
template <class Function>
void for_values(const float *values, int64_t count, const float &least, float most,
                const Function &function) {
    for (int64_t start = 0; start < count; start += kAtOnce) {
        const int64_t stop = smaller(start + kAtOnce, count);
        if (stop == start + kAtOnce) {
            IntVec is_meant = {};
            for (int64_t at = start; at < stop; at += kWidth) {
                const Vec value = load(values + at);
                is_meant |= (value >= splat(least)) & (value <= splat(most));
            }
            if (!has_any(is_meant)) continue;
        }
        for (int64_t at = start; at < stop; ++at)
            if (values[at] >= least && values[at] <= most) function(at);
    }
}

// Copies the values from `least` to `most` together, in their order; returns how many there are. Whole
// vectors are written: `to` has room for one more, and may be `values` itself.
inline int64_t collect(const float *values, int64_t count, float least, float most, float *to) {
    int64_t kept = 0, at = 0;
#if defined(__AVX512F__)
    const Vec low = splat(least), high = splat(most);
    for (; at + kWidth <= count; at += kWidth) {
        const __m512 value = load(values + at);
        const __mmask16 is_meant = _mm512_cmp_ps_mask(value, low, _CMP_GE_OQ) &
                                   _mm512_cmp_ps_mask(value, high, _CMP_LE_OQ);
        // In a register first: straight to memory it takes a hundred cycles on a Zen 4.
        store(to + kept, (Vec)_mm512_maskz_compress_ps(is_meant, value));
        kept += __builtin_popcount(is_meant);
    }
#endif
    for (; at < count; ++at)
        if (values[at] >= least && values[at] <= most) to[kept++] = values[at];
    return kept;
}

// The largest logit, or NaN if there is one.
inline float find_best(const float *logits, int64_t width) {
    Vec most = splat(-kInfinite);
    IntVec is_nan = {};
    int64_t at = 0;
    for (; at + kWidth <= width; at += kWidth) {
        const Vec value = load(logits + at);
        most = select(value > most, value, most);
        is_nan |= value != value;
    }
    float lanes[kWidth], best = -kInfinite;
    store(lanes, most);
    for (const float lane : lanes) best = lane > best ? lane : best;
    bool is_found = has_any(is_nan);
    for (; at < width; ++at) {
        best = logits[at] > best ? logits[at] : best;
        is_found |= logits[at] != logits[at];
    }
    return is_found ? __builtin_nanf("") : best;
}

inline int64_t first_place_of(float best, const float *logits, int64_t width) {
    int64_t place = width - 1;
    float border = best;
    for_values(logits, width, border, best, [&](int64_t at) {
        place = at;
        border = kInfinite;
    });
    return place;
}

// The k-th largest of the logits, for few: they are kept in a heap, the smallest on top.
inline float kth_of_few(const float *logits, int64_t width, int64_t k) {
    float heap[kFewBest];
    for (int64_t place = 0; place < k; ++place) heap[place] = -kInfinite;
    for_values(logits, width, heap[0], kInfinite, [&](int64_t at) {
        const float value = logits[at];
        int64_t place = 0;
        for (int64_t below = 1; below < k; below = 2 * place + 1) {
            if (below + 1 < k && heap[below + 1] < heap[below]) ++below;
            if (heap[below] >= value) break;
            heap[place] = heap[below];
            place = below;
        }
        heap[place] = value;
    });
    return heap[0];
}

// Between which places a border lies: `place` is enough, what is before `least` is not.
struct Border {
    uint32_t least, place;
    double before;  // measured before `least`
};

// Where to look first: a place that is probably enough, then one that is probably not. What lies
// outside is passed over.
struct Guesses {
    uint32_t deep, high;
};

// Closes in on the least place at which `measure`, which grows, is at least what is wanted, until
// `is_enough(found, before, place)` holds.
template <class Measure, class IsEnough>
Border find_border(double wanted, Border within, Guesses guesses, const Measure &measure,
                   const IsEnough &is_enough) {
    auto [least, most, before] = within;
    for (int64_t step = 0; least < most; ++step) {
        uint32_t middle = least + (most - least) / 2;
        const uint32_t guess = step == 0 ? guesses.deep : guesses.high;
        if (step < 2 && guess >= least && guess < most) middle = guess;
        const double found = measure(middle);
        if (found < wanted) {
            least = middle + 1;
            before = found;
        } else {
            most = middle;
            if (is_enough(found, before, middle)) break;
        }
    }
    return {least, most, before};
}

// The k-th largest of many. Floats are in the order of their bits where those of negative ones are
// turned around; counted from the largest downwards.
inline float kth_of_many(const float *logits, int64_t width, int64_t k) {
    const auto value_at = [](uint32_t place) {
        const uint32_t key = 0xFF800000u - place;  // infinity is first
        return float_of(key >= 0x80000000u ? key ^ 0x80000000u : ~key);
    };
    const auto count = [&](uint32_t place) {
        int64_t found = 0;
        const float border = value_at(place);
        for (int64_t at = 0; at < width; ++at) found += logits[at] >= border;
        return (double)found;
    };
    // From infinity down to minus infinity, whose key is 0x007FFFFF.
    const uint32_t most = 0xFF800000u - 0x007FFFFFu;
    return value_at(find_border((double)k, {0, most, 0}, {most, most}, count,
                                [k](double found, double, uint32_t) { return found == (double)k; })
                        .place);
}

// The k-th largest of the logits.
inline float find_kth(const float *logits, int64_t width, int64_t k) {
    return k <= kFewBest ? kth_of_few(logits, width, k) : kth_of_many(logits, width, k);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
