// The recurrence of one vector of channels over one chunk, forwards and backwards, for a few states
// at a time (ops/selective_scan/README.md, sections 3 and 4).
#pragma once

#include "exp2.h"
#include "scan.h"

namespace anymamba::ANYMAMBA_VARIANT {

// B or C, one number per token and state, for all lanes.
struct Varying {
    static constexpr bool kConstant = false;
    const float *value;  // [token][state]
    int64_t stride;

    ANYMAMBA_INLINE Varying from(int64_t state) const { return {value + state, stride}; }
    ANYMAMBA_INLINE Vec at(int64_t token, int64_t state) const {
        return splat(value[token * stride + state]);
    }
};

// B or C, one number per channel and state, for all tokens.
struct Constant {
    static constexpr bool kConstant = true;
    const float *value;  // [state][lane]

    ANYMAMBA_INLINE Constant from(int64_t state) const { return {value + state * kWidth}; }
    ANYMAMBA_INLINE Vec at(int64_t, int64_t state) const { return load(value + state * kWidth); }
};

// 2^(dt rate) where |dt rate| <= 126.
ANYMAMBA_INLINE Vec tame_decay(Vec dt, Vec rate) {
    const Vec shifted = dt * rate + kStepRounder;
    return exp2_of((IntVec)shifted, dt * rate - (shifted - kStepRounder));
}

// The same for any argument: 0, infinity and NaN where they belong, subnormal results reached.
// Moderate exponents go through the same operations as above, so that a channel never feels its
// neighbours in the vector. (The product must only be added to: else it is rounded once more.)
ANYMAMBA_INLINE Vec wild_decay(Vec dt, Vec rate) {
    const Vec low = splat(-151.0f), high = splat(129.0f), half = splat(0.5f);
    const Vec shifted = dt * rate + kStepRounder;
    const Vec n = shifted - kStepRounder;
    Vec f = dt * rate - n;
    // Exponents too large to have a fraction, or infinite, get any.
    f = select(f >= -half, f, -half);
    f = select(f <= half, f, half);
    const Vec held = at_most(high, at_least(low, n));
    const IntVec steps = (IntVec)(held + kStepRounder) - (IntVec)splat(kStepRounder);
    const IntVec whole = steps >> kStepBits, part = whole >> 1;
    const Vec first = (Vec)((part + 127) << 23), second = (Vec)((whole - part + 127) << 23);
    return select(n == n, exp2_of(steps - (whole << kStepBits), f) * first * second, n);
}

// Whether every exponent of a chunk is one that `tame_decay` can take; `bound` is the largest rate.
ANYMAMBA_INLINE bool is_tame(int64_t tokens, const float *dt, Vec bound) {
    IntVec wild = {};
    for (int64_t t = 0; t < tokens; ++t) {
        const Vec exponent = load(dt + t * kWidth) * bound;
        // Written so that NaN counts as wild.
        wild |= ~((exponent <= splat(126.0f)) & (exponent >= splat(-126.0f)));
    }
    int32_t lanes[kWidth], any = 0;
    memcpy(lanes, &wild, sizeof(lanes));
    for (int64_t lane = 0; lane < kWidth; ++lane) any |= lanes[lane];
    return any == 0;
}

template <bool kIs>
struct Answer {
    static constexpr bool kYes = kIs;
};

// Calls `function` with the answer as a type that loops are compiled for.
template <class Function>
ANYMAMBA_INLINE void with_answer(bool yes, const Function &function) {
    if (yes)
        function(Answer<true>{});
    else
        function(Answer<false>{});
}

// exp(dt A): the short way where `is_tame` has said that it will do.
template <bool kTame>
ANYMAMBA_INLINE Vec decay_of(Vec dt, Vec rate) {
    return kTame ? tame_decay(dt, rate) : wild_decay(dt, rate);
}

// h[t] = decay[t] h[t-1] + input[t] B[t] from `state`, which is left at the chunk's end. The decays
// never leave the registers. kOutputs: output[t] += sum over the states of C[t] h[t].
template <int kStates, bool kOutputs, bool kTame, class B, class C>
ANYMAMBA_INLINE void advance(int64_t tokens, const float *dt, const float *rate, const float *input,
                             B b, C c, float *state, float *output) {
    Vec h[kStates], rates[kStates];
    for (int j = 0; j < kStates; ++j) {
        h[j] = load(state + j * kWidth);
        rates[j] = load(rate + j * kWidth);
    }
    for (int64_t t = 0; t < tokens; ++t) {
        const Vec step = load(dt + t * kWidth), in = load(input + t * kWidth);
        Vec out = kOutputs ? load(output + t * kWidth) : Vec{};
        for (int j = 0; j < kStates; ++j) {
            h[j] = decay_of<kTame>(step, rates[j]) * h[j] + in * b.at(t, j);
            if (kOutputs) out += c.at(t, j) * h[j];
        }
        if (kOutputs) store(output + t * kWidth, out);
    }
    for (int j = 0; j < kStates; ++j) store(state + j * kWidth, h[j]);
}

// The same for an adjoint, which needs all of it again: decay[token][state][lane], and kept, the
// states before each token and behind the last.
template <int kStates, bool kTame, class B>
ANYMAMBA_INLINE void advance_and_keep(int64_t tokens, const float *dt, const float *rate,
                                      const float *input, B b, const float *state, float *decay,
                                      float *kept) {
    Vec h[kStates], rates[kStates];
    for (int j = 0; j < kStates; ++j) {
        h[j] = load(state + j * kWidth);
        rates[j] = load(rate + j * kWidth);
    }
    for (int64_t t = 0; t < tokens; ++t) {
        const Vec step = load(dt + t * kWidth), in = load(input + t * kWidth);
        for (int j = 0; j < kStates; ++j) {
            const int64_t place = (t * kStates + j) * kWidth;
            const Vec fading = decay_of<kTame>(step, rates[j]);
            store(decay + place, fading);
            store(kept + place, h[j]);
            h[j] = fading * h[j] + in * b.at(t, j);
        }
    }
    for (int j = 0; j < kStates; ++j) store(kept + (tokens * kStates + j) * kWidth, h[j]);
}

// What the adjoint of one vector and a few states reads and adds to.
struct Adjoint {
    const float *dt, *input, *grad_y;   // [token][lane]
    const float *decay, *kept;          // [token][state][lane]
    const float *rate;                  // [state][lane]
    float *carry;                       // decay[t] q[t]: of the chunk after, then of this one
    float *grad_rate;                   // [state][lane] gradient of A
    float *grad_b, *grad_c;             // [token][state][lane], constant: [state][lane]
    float *grad_input, *grad_exponent;  // [token][lane]
};

// Calls `function(Count<n>, first)` for all states, kTogether at a time and the rest one by one.
template <int kStates>
struct Count {
    static constexpr int kCount = kStates;
};

template <class Function>
ANYMAMBA_INLINE void for_states(int64_t states, const Function &function) {
    int64_t r = 0;
    for (; r + kTogether <= states; r += kTogether) function(Count<kTogether>{}, r);
    for (; r < states; ++r) function(Count<1>{}, r);
}

ANYMAMBA_INLINE void add_to(float *sum, Vec term) { store(sum, load(sum) + term); }

// q[t] = C[t] grad_y[t] + decay[t+1] q[t+1], right to left, and everything that follows from q.
template <int kStates, class B, class C>
ANYMAMBA_INLINE void retreat(int64_t tokens, const Adjoint &x, B b, C c) {
    Vec carry[kStates], rate[kStates], grad_rate[kStates], after[kStates];
    for (int j = 0; j < kStates; ++j) {
        carry[j] = load(x.carry + j * kWidth);
        rate[j] = load(x.rate + j * kWidth);
        grad_rate[j] = load(x.grad_rate + j * kWidth);
        after[j] = load(x.kept + (tokens * kStates + j) * kWidth);
    }
    for (int64_t t = tokens - 1; t >= 0; --t) {
        const Vec grad_y = load(x.grad_y + t * kWidth), in = load(x.input + t * kWidth);
        const Vec dt = load(x.dt + t * kWidth);
        Vec grad_in = load(x.grad_input + t * kWidth);
        Vec grad_exponent = load(x.grad_exponent + t * kWidth);
        for (int j = 0; j < kStates; ++j) {
            const int64_t place = (t * kStates + j) * kWidth;
            const Vec q = c.at(t, j) * grad_y + carry[j];
            const Vec before = load(x.kept + place);
            add_to(x.grad_c + (C::kConstant ? j * kWidth : place), grad_y * after[j]);
            add_to(x.grad_b + (B::kConstant ? j * kWidth : place), in * q);
            grad_in += q * b.at(t, j);
            carry[j] = load(x.decay + place) * q;
            const Vec p = carry[j] * before;
            grad_exponent += rate[j] * p;
            grad_rate[j] += dt * p;
            after[j] = before;
        }
        store(x.grad_input + t * kWidth, grad_in);
        store(x.grad_exponent + t * kWidth, grad_exponent);
    }
    for (int j = 0; j < kStates; ++j) {
        store(x.carry + j * kWidth, carry[j]);
        store(x.grad_rate + j * kWidth, grad_rate[j]);
    }
}

typedef float Quad __attribute__((vector_size(16)));

template <int kA, int kB, int kC, int kD>
ANYMAMBA_INLINE Quad pick(Quad left, Quad right) {
#if defined(__clang__)
    return __builtin_shufflevector(left, right, kA, kB, kC, kD);
#else
    typedef int32_t Places __attribute__((vector_size(16)));
    return __builtin_shuffle(left, right, Places{kA, kB, kC, kD});
#endif
}

// The sums over the lanes of four vectors that lie one after the other.
ANYMAMBA_INLINE void sum_lanes_of_four(const float *vectors, float *sums) {
    Quad quad[4];
    for (int j = 0; j < 4; ++j) {
        Quad parts[kWidth / 4];
        memcpy(parts, vectors + j * kWidth, sizeof(parts));
        for (int64_t half = kWidth / 8; half > 0; half /= 2)
            for (int64_t k = 0; k < half; ++k) parts[k] += parts[k + half];
        quad[j] = parts[0];
    }
    const Quad low = pick<0, 4, 1, 5>(quad[0], quad[1]) + pick<2, 6, 3, 7>(quad[0], quad[1]);
    const Quad high = pick<0, 4, 1, 5>(quad[2], quad[3]) + pick<2, 6, 3, 7>(quad[2], quad[3]);
    const Quad all = pick<0, 1, 4, 5>(low, high) + pick<2, 3, 6, 7>(low, high);
    memcpy(sums, &all, sizeof(all));
}

}  // namespace anymamba::ANYMAMBA_VARIANT
