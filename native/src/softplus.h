// log(1 + exp(x)), the function of step sizes.
#pragma once

#include "vector.h"

namespace anymamba::ANYMAMBA_VARIANT {

// log(1 + u) for 0 <= u <= 1 to about one unit in the last place:
// 2 atanh(s) with s = u / (2 + u) <= 1/3, by its odd series (remainder 1e-9 relative).
ANYMAMBA_INLINE Vec log_one_plus(Vec u) {
    const Vec s = u / (2.0f + u), square = s * s;
    Vec p = splat(1.0f / 17.0f);
    p = p * square + 1.0f / 15.0f;
    p = p * square + 1.0f / 13.0f;
    p = p * square + 1.0f / 11.0f;
    p = p * square + 1.0f / 9.0f;
    p = p * square + 1.0f / 7.0f;
    p = p * square + 1.0f / 5.0f;
    p = p * square + 1.0f / 3.0f;
    return 2.0f * s + 2.0f * s * (p * square);
}

ANYMAMBA_INLINE Vec softplus(Vec x) {
    const Vec zero = {};
    // A NaN is on neither side of zero and passes through the second summand.
    return select(x > zero, x, zero) + log_one_plus(exp(select(x > zero, -x, x)));
}

}  // namespace anymamba::ANYMAMBA_VARIANT
