// Complex rotation: pairs turned by an angle, which every token moves on by dt times a rate
// (ops/keys/README.md, sections 2 to 5).
#pragma once

#include "keys_planes.h"

namespace anymamba::ANYMAMBA_VARIANT {

constexpr float kTurn = 6.28318530717958648f;
constexpr float kTurnHigh = 6.28125f;  // 8 bits: exact times a count of turns
constexpr float kTurnLow = 1.93530717958647692e-3f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer

// Angles summed over time are whole units of 2^-14 and a rest below half a unit: sums of integers
// under 2^24 are exact, and a turn is a whole number of units but for a small rest.
constexpr float kUnits = 16384.0f;
constexpr float kTurnUnits = 102944.0f;
constexpr float kTurnRest = -1.78178204137680e-5f;

ANYMAMBA_INLINE Vec nearest(Vec x) { return (x + kRound) - kRound; }

// The product as it is rounded to float32: the compiler must not fold it into a later sum, because
// single steps in plain torch add the rounded one.
ANYMAMBA_INLINE Vec rounded(Vec product) {
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#else
    asm("" : "+m"(product));
#endif
    return product;
}

// Whole turns taken off. An angle past 2^22 turns has no digit left that says where it points, and
// becomes 0; infinity becomes NaN.
ANYMAMBA_INLINE Vec wrap_angle(Vec angle) {
    const Vec turns = nearest(angle * (1.0f / kTurn));
    const Vec inside = angle - turns * kTurnHigh - turns * kTurnLow;
    const Vec most = splat(2.6e7f);
    return select((angle < most) & (angle > -most), inside, angle - angle);
}

// sin and cos of an angle in [-pi, pi] or near it, to 1e-7: quarter turns off in three parts, then
// the Taylor series, whose next terms are below 3e-9 for |r| <= pi/4.
ANYMAMBA_INLINE void sine_cosine(Vec angle, Vec &sine, Vec &cosine) {
    const Vec shifted = angle * 0.636619772367581343f + kRound;
    const Vec quarters = shifted - kRound;
    Vec r = angle - quarters * 1.5703125f;
    r = r - quarters * 4.837512969970703e-4f;
    r = r - quarters * 7.549789948768648e-8f;
    const Vec q = r * r;
    Vec s = splat(2.75573192e-6f);
    s = s * q - 1.98412698e-4f;
    s = s * q + 8.33333333e-3f;
    s = s * q - 1.66666667e-1f;
    s = s * q * r + r;
    Vec c = splat(-2.75573192e-7f);
    c = c * q + 2.48015873e-5f;
    c = c * q - 1.38888889e-3f;
    c = c * q + 4.16666667e-2f;
    c = c * q - 0.5f;
    c = c * q + 1.0f;
    const IntVec quadrant = (IntVec)shifted;  // the low bits count quarters
    const IntVec swapped = -(quadrant & 1);
    sine = (Vec)((IntVec)select(swapped, c, s) ^ ((quadrant & 2) << 30));
    cosine = (Vec)((IntVec)select(swapped, s, c) ^ (((quadrant + 1) & 2) << 30));
}

// How angles move, turn a row, and take their gradients. Per head: a state is the angles; a sum is
// units and rests; a turn is cosines and sines; a slope is the gradient of the angles.
struct AngleTurn {
    static constexpr int64_t kStates = 1, kSums = 2, kTurns = 2, kPulls = 1, kSlopes = 1;
    static constexpr bool kMarksTokens = false;

    const KeyShape &shape;
    const KeyInputs &in;
    float *scratch;  // [lanes] a row of rates that cannot be read in place
    float *work;     // [tile][group][lanes] gradient of the rates

    AngleTurn(Carver &carver, const KeyShape &key_shape, const KeyInputs &inputs)
        : shape(key_shape),
          in(inputs),
          scratch(carver.floats(shape.lanes)),
          work(carver.floats(kKeyTile * shape.groups * shape.lanes)) {}

    const float *rates(int64_t row, int64_t token, int64_t head) const {
        const anymamba_tensor &rate = in.turn;
        return read_row(rate,
                        row * rate.stride[0] + token * rate.stride[1] +
                            shape.group_of(head) * rate.stride[2],
                        shape.channels, scratch);
    }

    // The angles before the first token of a sequence.
    void open(int64_t number, int64_t head, float *state) const {
        const anymamba_tensor &initial = in.initial;
        const float *from =
            read_row(initial, number * initial.stride[0] + head * initial.stride[1],
                     shape.channels, state);
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth)
            store(state + lane, wrap_angle(load(from + lane)));
    }

    void advance(int64_t row, int64_t token, int64_t head, float *state) const {
        const float *rate = rates(row, token, head);
        const Vec dt = splat(in.dt_at(row, token, head));
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth)
            store(state + lane, wrap_angle(load(state + lane) + rounded(dt * load(rate + lane))));
    }

    void open_sum(int64_t number, int64_t head, float *sum) const {
        open(number, head, sum);
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            const Vec angle = load(sum + lane), whole = nearest(angle * kUnits);
            store(sum + lane, whole);
            store(sum + shape.lanes + lane, angle - whole * (1.0f / kUnits));
        }
    }

    void add_to_sum(int64_t row, int64_t token, int64_t head, float *sum) const {
        const float *rate = rates(row, token, head);
        const Vec dt = splat(in.dt_at(row, token, head));
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            const Vec angle = rounded(dt * load(rate + lane)), whole = nearest(angle * kUnits);
            float *unit = sum + lane, *rest = unit + shape.lanes;
            store(unit, load(unit) + whole);
            store(rest, load(rest) + (angle - whole * (1.0f / kUnits)));
        }
    }

    // Between tiles: units that the rests have grown to, and whole turns, change sides.
    void settle_sum(float *sum) const {
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            Vec units = load(sum + lane), rest = load(sum + shape.lanes + lane);
            const Vec grown = nearest(rest * kUnits);
            const Vec turns = nearest((units + grown) * (1.0f / kTurnUnits));
            units = units + grown - turns * kTurnUnits;
            rest = rest - grown * (1.0f / kUnits) - turns * kTurnRest;
            store(sum + lane, units);
            store(sum + shape.lanes + lane, rest);
        }
    }

    void state_of_sum(const float *sum, float *state) const {
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth)
            store(state + lane, wrap_angle(load(sum + lane) * (1.0f / kUnits) +
                                           load(sum + shape.lanes + lane)));
    }

    void write_final(const float *state, const anymamba_tensor &final, int64_t offset) const {
        finish_row(final, offset, shape.channels, state);
    }

    void turn_of(const float *state, float *turn) const {
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            Vec sine, cosine;
            sine_cosine(load(state + lane), sine, cosine);
            store(turn + lane, cosine);
            store(turn + shape.lanes + lane, sine);
        }
    }

    // to = turned(normed + bias), the turning part of a row.
    static ANYMAMBA_INLINE void apply(const Planes &planes, const float *turn, const float *normed,
                                      const float *bias, float *to) {
        const int64_t plane = planes.plane;
        for (int64_t lane = 0; lane < plane; lane += kWidth) {
            const Vec c = load(turn + lane), s = load(turn + plane + lane);
            const Vec u = load(normed + lane) + load(bias + lane);
            const Vec w = load(normed + plane + lane) + load(bias + plane + lane);
            store(to + lane, u * c - w * s);
            store(to + plane + lane, u * s + w * c);
        }
    }

    // The adjoint of `apply`: adds to the gradients of bias, norm and angle.
    static ANYMAMBA_INLINE void pull(const Planes &planes, const float *turn, const float *normed,
                                     const float *bias, const float *grad, float *grad_bias,
                                     float *grad_normed, float *slope) {
        const int64_t plane = planes.plane;
        for (int64_t lane = 0; lane < plane; lane += kWidth) {
            const int64_t other = plane + lane;
            const Vec c = load(turn + lane), s = load(turn + other);
            const Vec u = load(normed + lane) + load(bias + lane);
            const Vec w = load(normed + other) + load(bias + other);
            const Vec grad_u = load(grad + lane) * c + load(grad + other) * s;
            const Vec grad_w = load(grad + other) * c - load(grad + lane) * s;
            store(grad_bias + lane, load(grad_bias + lane) + grad_u);
            store(grad_bias + other, load(grad_bias + other) + grad_w);
            store(grad_normed + lane, load(grad_normed + lane) + grad_u);
            store(grad_normed + other, load(grad_normed + other) + grad_w);
            store(slope + lane, load(slope + lane) + (u * grad_w - w * grad_u));
        }
    }

    // What a token's angles received (`pulled`), and the last angle too when `final` is given.
    void slope_of(const float *, const float *pulled, const anymamba_tensor *final, int64_t offset,
                  float *slope) const {
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth)
            store(slope + lane, load(pulled + lane));
        if (final == nullptr) return;
        for (int64_t lane = 0; lane < shape.channels; ++lane)
            slope[lane] += read_one(*final, offset + lane);
    }

    // Gradients of the inputs of a token's step, from the sum of all slopes from it on.
    void begin_tile() const {
        memset(work, 0, (size_t)(kKeyTile * shape.groups * shape.lanes) * sizeof(float));
    }

    // The step is linear in dt and rate: the rotation before the token does not matter.
    void give(int64_t row, int64_t token, int64_t head, const float *, const float *sum,
              const anymamba_tensor &, const anymamba_tensor &grad_dt) const {
        const float *rate = rates(row, token, head);
        float *grad_rate =
            work + (token % kKeyTile * shape.groups + shape.group_of(head)) * shape.lanes;
        const Vec dt = splat(in.dt_at(row, token, head));
        Vec total = {};
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            total += load(rate + lane) * load(sum + lane);
            store(grad_rate + lane, load(grad_rate + lane) + dt * load(sum + lane));
        }
        write_one(grad_dt, row * grad_dt.stride[0] + token * grad_dt.stride[1] + head,
                  sum_lanes(total));
    }

    void give_initial(int64_t number, int64_t head, const float *sum,
                      const anymamba_tensor &grad_initial) const {
        finish_row(grad_initial, number * grad_initial.stride[0] + head * grad_initial.stride[1],
                   shape.channels, sum);
    }

    // A sequence without tokens ends where it starts.
    void give_empty(const anymamba_tensor &grad_final, const anymamba_tensor &grad_initial,
                    float *) const {
        for (int64_t number = 0; number < shape.sequences; ++number) {
            const KeySequence own = key_sequence(shape, in.borders, number);
            if (own.start < own.stop) continue;
            for (int64_t head = 0; head < shape.heads; ++head) {
                const float *from = read_row(
                    grad_final, number * grad_final.stride[0] + head * grad_final.stride[1],
                    shape.channels, scratch);
                give_initial(number, head, from, grad_initial);
            }
        }
    }

    void end_tile(int64_t row, int64_t start, int64_t stop,
                  const anymamba_tensor &grad_rate) const {
        for (int64_t token = start; token < stop; ++token)
            for (int64_t group = 0; group < shape.groups; ++group)
                finish_row(grad_rate,
                           row * grad_rate.stride[0] + token * grad_rate.stride[1] +
                               group * grad_rate.stride[2],
                           shape.channels,
                           work + (token % kKeyTile * shape.groups + group) * shape.lanes);
    }
};

}  // namespace anymamba::ANYMAMBA_VARIANT
