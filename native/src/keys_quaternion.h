// Quaternion rotation: blocks of four turned by a running product of unit quaternions
// (ops/keys/README.md, sections 2 to 5). Planes are w, x, y, z.
#pragma once

#include "keys_angle.h"

namespace anymamba::ANYMAMBA_VARIANT {

struct Quaternion {
    Vec w, x, y, z;
};

ANYMAMBA_INLINE Quaternion operator*(const Quaternion &a, const Quaternion &b) {
    return {a.w * b.w - a.x * b.x - a.y * b.y - a.z * b.z,
            a.w * b.x + a.x * b.w + a.y * b.z - a.z * b.y,
            a.w * b.y - a.x * b.z + a.y * b.w + a.z * b.x,
            a.w * b.z + a.x * b.y - a.y * b.x + a.z * b.w};
}

ANYMAMBA_INLINE Quaternion conjugate(const Quaternion &q) { return {q.w, -q.x, -q.y, -q.z}; }

ANYMAMBA_INLINE Quaternion load_quaternion(const float *from, int64_t plane) {
    return {load(from), load(from + plane), load(from + 2 * plane), load(from + 3 * plane)};
}

ANYMAMBA_INLINE void store_quaternion(float *to, int64_t plane, const Quaternion &q) {
    store(to, q.w);
    store(to + plane, q.x);
    store(to + 2 * plane, q.y);
    store(to + 3 * plane, q.z);
}

ANYMAMBA_INLINE void add_quaternion(float *to, int64_t plane, const Quaternion &q) {
    const Quaternion old = load_quaternion(to, plane);
    store_quaternion(to, plane, {old.w + q.w, old.x + q.x, old.y + q.y, old.z + q.z});
}

// The smallest number that is safe under a root or a division (`div_eps` of float32).
constexpr float kLeast = 8.158466616e-8f;

ANYMAMBA_INLINE Vec square_root(Vec x) {
    float lanes[kWidth];
    store(lanes, x);
    for (int64_t lane = 0; lane < kWidth; ++lane) lanes[lane] = __builtin_sqrtf(lanes[lane]);
    return load(lanes);
}

ANYMAMBA_INLINE Vec magnitude(Vec x) { return (Vec)((IntVec)x & 0x7FFFFFFF); }

ANYMAMBA_INLINE Vec length_of(const Quaternion &q) {
    return square_root(
        at_least(splat(kLeast), q.w * q.w + q.x * q.x + q.y * q.y + q.z * q.z));
}

ANYMAMBA_INLINE Quaternion scaled(const Quaternion &q, Vec by) {
    return {q.w * by, q.x * by, q.y * by, q.z * by};
}

ANYMAMBA_INLINE Quaternion unit_of(const Quaternion &q) { return scaled(q, 1.0f / length_of(q)); }

// tanh of a number that is not negative: a Pade quotient where (e^2x - 1) / (e^2x + 1) would
// cancel, and 1 where float32 cannot tell the difference.
ANYMAMBA_INLINE Vec tanh_of_length(Vec x) {
    const Vec most = splat(16.0f), q = x * x;
    const Vec power = exp(2.0f * at_most(most, x));
    const IntVec is_large = x > splat(0.75f);
    const Vec above = select(is_large, power - 1.0f, x * (945.0f + q * (105.0f + q)));
    const Vec below = select(is_large, power + 1.0f, 945.0f + q * (420.0f + q * 15.0f));
    return above / below;
}

// What one token adds: q = (cos half, axis * sin half / length), half = pace * tanh(length).
struct Increment {
    Vec axis[3], length, bound, sine, cosine;

    ANYMAMBA_INLINE Increment(const float *vector, int64_t plane, Vec pace) {
        Vec largest = {};
        for (int part = 0; part < 3; ++part) {
            axis[part] = load(vector + part * plane);
            const Vec size = magnitude(axis[part]);
            largest = select(size > largest, size, largest);
        }
        // Divided by the largest entry, so that no square overflows.
        largest = largest + kLeast;
        const Vec inverse = 1.0f / largest;
        Vec sum = {};
        for (int part = 0; part < 3; ++part)
            sum += (axis[part] * inverse) * (axis[part] * inverse);
        length = square_root(at_least(splat(kLeast), sum)) * largest;
        bound = tanh_of_length(length);
        sine_cosine(wrap_angle(pace * bound), sine, cosine);
    }

    ANYMAMBA_INLINE Quaternion quaternion() const {
        const Vec by = sine / length;
        return {cosine, axis[0] * by, axis[1] * by, axis[2] * by};
    }
};

// Per head: state, sum and turn are the unit quaternions; a slope is a vector of three, the
// gradient seen from the rotation itself.
struct QuaternionTurn {
    static constexpr int64_t kStates = 4, kSums = 4, kTurns = 4, kPulls = 4, kSlopes = 3;
    static constexpr bool kMarksTokens = true;

    const KeyShape &shape;
    const KeyInputs &in;
    float *vectors;  // [3][lanes] of a token and head
    float *scratch;  // [4][lanes]

    QuaternionTurn(Carver &carver, const KeyShape &key_shape, const KeyInputs &inputs)
        : shape(key_shape),
          in(inputs),
          vectors(carver.floats(3 * shape.lanes)),
          scratch(carver.floats(4 * shape.lanes)) {
        if (vectors != nullptr) memset(vectors, 0, (size_t)(3 * shape.lanes) * sizeof(float));
    }


    int64_t raw_at(const anymamba_tensor &raw, int64_t row, int64_t token, int64_t head) const {
        return row * raw.stride[0] + token * raw.stride[1] + head * raw.stride[2];
    }

    void read_vectors(int64_t row, int64_t token, int64_t head) const {
        const int64_t offset = raw_at(in.turn, row, token, head);
        if (in.turn.dtype == ANYMAMBA_FLOAT32)
            split_triples(static_cast<const float *>(in.turn.data) + offset, shape.channels,
                          shape.lanes, vectors);
        else
            split_triples(static_cast<const BFloat16 *>(in.turn.data) + offset, shape.channels,
                          shape.lanes, vectors);
    }

    // Half the largest angle of this token: dt range pi / 2.
    float pace(int64_t row, int64_t token, int64_t head) const {
        return in.dt_at(row, token, head) * (shape.range * (0.25f * kTurn));
    }

    void read_quaternions(const anymamba_tensor &tensor, int64_t number, int64_t head,
                          float *to) const {
        const int64_t offset = number * tensor.stride[0] + head * tensor.stride[1];
        split_blocks(static_cast<const float *>(tensor.data) + offset, shape.channels, shape.lanes,
                     to);
    }

    void open(int64_t number, int64_t head, float *state) const {
        read_quaternions(in.initial, number, head, state);
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth)
            store_quaternion(state + lane, shape.lanes,
                             unit_of(load_quaternion(state + lane, shape.lanes)));
    }

    void advance(int64_t row, int64_t token, int64_t head, float *state) const {
        read_vectors(row, token, head);
        const Vec half = splat(pace(row, token, head));
        for (int64_t lane = 0; lane < shape.lanes; lane += kWidth) {
            const Quaternion q = Increment(vectors + lane, shape.lanes, half).quaternion();
            store_quaternion(state + lane, shape.lanes,
                             unit_of(q * load_quaternion(state + lane, shape.lanes)));
        }
    }

    void open_sum(int64_t number, int64_t head, float *sum) const { open(number, head, sum); }
    void add_to_sum(int64_t row, int64_t token, int64_t head, float *sum) const {
        advance(row, token, head, sum);
    }
    void settle_sum(float *) const {}
    void state_of_sum(const float *sum, float *state) const {
        memcpy(state, sum, (size_t)(4 * shape.lanes) * sizeof(float));
    }
    void write_final(const float *state, const anymamba_tensor &final, int64_t offset) const {
        join_blocks(state, shape.channels, shape.lanes,
                    static_cast<float *>(final.data) + offset);
    }
    void turn_of(const float *state, float *turn) const {
        memcpy(turn, state, (size_t)(4 * shape.lanes) * sizeof(float));
    }

    // to = conj(turn) (x) (normed + bias), the turning part of a row.
    static ANYMAMBA_INLINE void apply(const Planes &planes, const float *turn, const float *normed,
                                      const float *bias, float *to) {
        for (int64_t lane = 0; lane < planes.plane; lane += kWidth)
            store_quaternion(to + lane, planes.plane,
                             conjugate(load_quaternion(turn + lane, planes.plane)) *
                                 value_at(planes, normed, bias, lane));
    }

    static ANYMAMBA_INLINE Quaternion value_at(const Planes &planes, const float *normed,
                                               const float *bias, int64_t lane) {
        const Quaternion a = load_quaternion(normed + lane, planes.plane);
        const Quaternion b = load_quaternion(bias + lane, planes.plane);
        return {a.w + b.w, a.x + b.x, a.y + b.y, a.z + b.z};
    }

    static ANYMAMBA_INLINE void pull(const Planes &planes, const float *turn, const float *normed,
                                     const float *bias, const float *grad, float *grad_bias,
                                     float *grad_normed, float *pulled) {
        for (int64_t lane = 0; lane < planes.plane; lane += kWidth) {
            const Quaternion own = load_quaternion(grad + lane, planes.plane);
            const Quaternion back = load_quaternion(turn + lane, planes.plane) * own;
            add_quaternion(grad_bias + lane, planes.plane, back);
            add_quaternion(grad_normed + lane, planes.plane, back);
            add_quaternion(pulled + lane, planes.plane,
                           value_at(planes, normed, bias, lane) * conjugate(own));
        }
    }

    // The vector part of conj(turn) (x) gradient: the scalar part is along the quaternion itself,
    // and its unit length takes that away.
    void slope_of(const float *state, const float *pulled, const anymamba_tensor *final,
                  int64_t offset, float *slope) const {
        const int64_t plane = shape.lanes;
        if (final != nullptr)
            split_blocks(static_cast<const float *>(final->data) + offset, shape.channels, plane,
                         scratch);
        for (int64_t lane = 0; lane < plane; lane += kWidth) {
            Quaternion grad = load_quaternion(pulled + lane, plane);
            if (final != nullptr) {
                const Quaternion more = load_quaternion(scratch + lane, plane);
                grad = {grad.w + more.w, grad.x + more.x, grad.y + more.y, grad.z + more.z};
            }
            const Quaternion seen = conjugate(load_quaternion(state + lane, plane)) * grad;
            store(slope + lane, seen.x);
            store(slope + plane + lane, seen.y);
            store(slope + 2 * plane + lane, seen.z);
        }
    }

    void begin_tile() const {}
    void end_tile(int64_t, int64_t, int64_t, const anymamba_tensor &) const {}

    // Gradients of a token's vectors and step size, from the sum of all slopes from it on.
    void give(int64_t row, int64_t token, int64_t head, const float *before, const float *sum,
              const anymamba_tensor &grad_raw, const anymamba_tensor &grad_dt) const {
        const int64_t plane = shape.lanes;
        const Vec zero = {};
        const float half_turn = shape.range * (0.25f * kTurn);
        read_vectors(row, token, head);
        const Vec half = splat(pace(row, token, head));
        Vec total = {};
        for (int64_t lane = 0; lane < plane; lane += kWidth) {
            const Increment step(vectors + lane, plane, half);
            const Quaternion base = load_quaternion(before + lane, plane);
            const Quaternion slope = {zero, load(sum + lane), load(sum + plane + lane),
                                      load(sum + 2 * plane + lane)};
            const Quaternion grad = step.quaternion() * (base * slope * conjugate(base));
            const Vec inverse = 1.0f / step.length;
            const Vec along =
                (step.axis[0] * grad.x + step.axis[1] * grad.y + step.axis[2] * grad.z) * inverse;
            const Vec grad_half = step.cosine * along - step.sine * grad.w;
            const Vec by = step.sine * inverse;
            const Vec grad_length =
                grad_half * half * (1.0f - step.bound * step.bound) - by * along;
            const Vec outward = grad_length * inverse;
            store(scratch + lane, grad.x * by + step.axis[0] * outward);
            store(scratch + plane + lane, grad.y * by + step.axis[1] * outward);
            store(scratch + 2 * plane + lane, grad.z * by + step.axis[2] * outward);
            total += grad_half * step.bound;
        }
        const int64_t offset = raw_at(grad_raw, row, token, head);
        if (grad_raw.dtype == ANYMAMBA_FLOAT32)
            join_triples(scratch, shape.channels, plane,
                         static_cast<float *>(grad_raw.data) + offset);
        else
            join_triples(scratch, shape.channels, plane,
                         static_cast<BFloat16 *>(grad_raw.data) + offset);
        write_one(grad_dt, row * grad_dt.stride[0] + token * grad_dt.stride[1] + head,
                  sum_lanes(total) * half_turn);
    }

    void give_initial(int64_t number, int64_t head, const float *sum,
                      const anymamba_tensor &grad_initial) const {
        const int64_t plane = shape.lanes;
        const Vec zero = {};
        read_quaternions(in.initial, number, head, scratch);
        for (int64_t lane = 0; lane < plane; lane += kWidth) {
            const Quaternion start = load_quaternion(scratch + lane, plane);
            const Vec inverse = 1.0f / length_of(start);
            const Quaternion slope = {zero, load(sum + lane), load(sum + plane + lane),
                                      load(sum + 2 * plane + lane)};
            store_quaternion(scratch + lane, plane,
                             scaled(start, inverse) * scaled(slope, inverse));
        }
        join_blocks(scratch, shape.channels, plane,
                    static_cast<float *>(grad_initial.data) + number * grad_initial.stride[0] +
                        head * grad_initial.stride[1]);
    }

    // A sequence without tokens ends where it starts, scaled to unit length.
    void give_empty(const anymamba_tensor &grad_final, const anymamba_tensor &grad_initial,
                    float *work) const {
        float *state = work, *none = state + 4 * shape.lanes, *slope = none + 4 * shape.lanes;
        memset(none, 0, (size_t)(4 * shape.lanes) * sizeof(float));
        for (int64_t number = 0; number < shape.sequences; ++number) {
            const KeySequence own = key_sequence(shape, in.borders, number);
            if (own.start < own.stop) continue;
            for (int64_t head = 0; head < shape.heads; ++head) {
                open(number, head, state);
                slope_of(state, none, &grad_final,
                         number * grad_final.stride[0] + head * grad_final.stride[1], slope);
                give_initial(number, head, slope, grad_initial);
            }
        }
    }
};

}  // namespace anymamba::ANYMAMBA_VARIANT
