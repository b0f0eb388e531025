// 2^x where the exponent is known to be moderate, and SiLU from it: half the work of a full `exp`.
#pragma once

#include "vector.h"

namespace anymamba::ANYMAMBA_VARIANT {

// 1.5 * 2^23: adding it rounds to the nearest integer, which then stands in the low bits.
constexpr float kRounder = 12582912.0f;

// x is rounded to steps of 2^-kStepBits, and what is left of it, f, meets a polynomial. Where a vector
// holds sixteen numbers that any lane can choose from, steps are sixteenths, and f is so small that two
// multiplications less will do.
#if defined(__AVX512F__)
constexpr int kStepBits = 4;
#else
constexpr int kStepBits = 0;
#endif
// Adding it rounds to the nearest step, whose number then stands in the low bits.
constexpr float kStepRounder = kRounder / (1 << kStepBits);

// 2^(steps 2^-kStepBits + f) to 1 ulp, where the exponent is within 126 of zero and f is what rounding
// to a step left. Exactly 1 at 0, so that slow decays do not drift. Of `steps` the upper bits may be
// anything, as those of a float to which kStepRounder was added are.
#if defined(__AVX512F__)
ANYMAMBA_INLINE Vec exp2_of(IntVec steps, Vec f) {
    // The bits of 2^(j / 16), less j sixteenths of an exponent: those the shifted steps bring along.
    const __m512i roots = _mm512_setr_epi32(
        0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7,
        0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf,
        0x3f7ac0c7, 0x3f7d257d);
    const auto root = (IntVec)_mm512_maskz_permutexvar_epi32(0xFFFF, (__m512i)steps, roots);
    const Vec power = (Vec)(root + (steps << (23 - kStepBits)));
    // (2^f - 1) / f by its Taylor polynomial (remainder 9e-9 of 2^f).
    Vec p = splat(5.55041087e-2f);
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    return f * p * power + power;
}
#else
ANYMAMBA_INLINE Vec exp2_of(IntVec steps, Vec f) {
    // A minimax polynomial (remainder 2e-8 with rounded coefficients).
    Vec p = splat(1.53533719e-4f);
    p = p * f + 1.33988805e-3f;
    p = p * f + 9.61843737e-3f;
    p = p * f + 5.55033246e-2f;
    p = p * f + 2.40226479e-1f;
    p = p * f + 6.93147203e-1f;
    p = p * f + 1.0f;
    return (Vec)((IntVec)p + (steps << 23));
}
#endif

// 2^x for |x| <= 126.
ANYMAMBA_INLINE Vec exp2_held(Vec x) {
    const Vec shifted = x + kStepRounder;
    return exp2_of((IntVec)shifted, x - (shifted - kStepRounder));
}

// 1 / (1 + exp(-x)): 1 above x = 87, exactly 0 below -87 (the true value is under 1e-37).
// A NaN need not come out as one, but all that is computed from it here multiplies by x again.
ANYMAMBA_INLINE Vec held_sigmoid(Vec x) {
    const Vec low = splat(-126.0f), high = splat(126.0f), zero = {};
    Vec y = x * -1.44269504088896341f;
    const IntVec closed = y > high;
    y = at_most(high, at_least(low, y));
    const Vec open = 1.0f / (1.0f + exp2_held(y));
    return select(closed, zero, open);
}

ANYMAMBA_INLINE Vec silu(Vec x) { return x * held_sigmoid(x); }

ANYMAMBA_INLINE Vec silu_slope(Vec x) {
    const Vec open = held_sigmoid(x);
    return open * (1.0f + x * (1.0f - open));
}

}  // namespace anymamba::ANYMAMBA_VARIANT
