// 2^x where the exponent is known to be moderate, and SiLU from it: half the work of a full `exp`.
#pragma once

#include "vector.h"

namespace anymamba::ANYMAMBA_VARIANT {

// 2^f for |f| <= 1/2 to 1 ulp: a minimax polynomial that is exact at 0, so that slow decays do not
// drift (remainder 2e-8 with rounded coefficients).
ANYMAMBA_INLINE Vec exp2_fraction(Vec f) {
    Vec p = splat(1.53533719e-4f);
    p = p * f + 1.33988805e-3f;
    p = p * f + 9.61843737e-3f;
    p = p * f + 5.55033246e-2f;
    p = p * f + 2.40226479e-1f;
    p = p * f + 6.93147203e-1f;
    return p * f + 1.0f;
}

// 1.5 * 2^23: adding it rounds to the nearest integer, which then stands in the low bits.
constexpr float kRounder = 12582912.0f;

// 2^(n + f), where `shifted` is n + kRounder and |n| <= 126: n is added to the exponent's bits.
ANYMAMBA_INLINE Vec exp2_scaled(Vec f, Vec shifted) {
    return (Vec)((IntVec)exp2_fraction(f) + ((IntVec)shifted << 23));
}

// 1 / (1 + exp(-x)): 1 above x = 87, exactly 0 below -87 (the true value is under 1e-37).
// A NaN need not come out as one, but all that is computed from it here multiplies by x again.
ANYMAMBA_INLINE Vec held_sigmoid(Vec x) {
    const Vec low = splat(-126.0f), high = splat(126.0f), zero = {};
    Vec y = x * -1.44269504088896341f;
    const IntVec closed = y > high;
    y = at_most(high, at_least(low, y));
    const Vec shifted = y + kRounder;
    const Vec open = 1.0f / (1.0f + exp2_scaled(y - (shifted - kRounder), shifted));
    return select(closed, zero, open);
}

ANYMAMBA_INLINE Vec silu(Vec x) { return x * held_sigmoid(x); }

ANYMAMBA_INLINE Vec silu_slope(Vec x) {
    const Vec open = held_sigmoid(x);
    return open * (1.0f + x * (1.0f - open));
}

}  // namespace anymamba::ANYMAMBA_VARIANT
