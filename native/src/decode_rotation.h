// Rotation of keys and queries, one token of one head (ops/rotation/README.md).
#pragma once

#include "decode_step.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Rows of as many numbers as a head has angles (three rows) or quaternions (eight), in whole vectors.
struct Turns {
    float *rows;
    int64_t stride;
};

// The angles of a head after this token; their sines and cosines in rows 1 and 2 of the turns.
inline void turn_angles(const DecodeLayer &layer, const float *raw, float dt, float *angles,
                        Turns turns) {
    float *sine = turns.rows + turns.stride, *cosine = sine + turns.stride;
    for (int64_t place = 0; place < layer.turns; place += kWidth) {
        const int64_t count = smaller(layer.turns - place, kWidth);
        const Vec more = dt * (tanh(load_most(raw + place, count)) * (float)layer.turn_scale);
        const Vec angle = without_turns(load_most(angles + place, count) + more);
        store_most(angles + place, angle, count);
        Vec s, c;
        sine_cosine(angle, &s, &c);
        store(sine + place, s);
        store(cosine + place, c);
    }
}

// (u, w) = (u cos - w sin, u sin + w cos) for pairs that lie kStep apart.
template <int64_t kStep>
ANYMAMBA_INLINE void rotate_all(const float *__restrict sine, const float *__restrict cosine,
                                int64_t count, float *__restrict u, float *__restrict w) {
    for (int64_t pair = 0; pair < count; ++pair) {
        const float left = u[pair * kStep], right = w[pair * kStep];
        u[pair * kStep] = left * cosine[pair] - right * sine[pair];
        w[pair * kStep] = left * sine[pair] + right * cosine[pair];
    }
}

// `half` lies between the two of a pair, if they are not neighbours.
inline void rotate_pairs(const DecodeLayer &layer, Turns turns, int64_t half, float *key) {
    const float *sine = turns.rows + turns.stride, *cosine = sine + turns.stride;
    if (layer.rotation == DecodeRotation::kHalfSplit)
        rotate_all<1>(sine, cosine, layer.turns, key, key + half);
    else
        rotate_all<2>(sine, cosine, layer.turns, key, key + 1);
}

ANYMAMBA_INLINE Vec root(Vec value) {
    Vec result;
    for (int64_t lane = 0; lane < kWidth; ++lane) result[lane] = __builtin_sqrtf(value[lane]);
    return result;
}

// What the token adds to a quaternion: rows 0 to 3 of the turns, from the vectors in rows 4 to 6.
inline void quaternion_increments(const DecodeLayer &layer, float dt, Turns turns) {
    const int64_t stride = turns.stride;
    const Vec floor = splat((float)layer.turn_floor);
    const float half_turn = dt * (float)(layer.turn_scale / 2);
    for (int64_t place = 0; place < layer.turns; place += kWidth) {
        float *at = turns.rows + place;
        const Vec v[3] = {load(at + 4 * stride), load(at + 5 * stride), load(at + 6 * stride)};
        Vec largest = {};
        for (const Vec &part : v) largest = at_least(at_least(-part, part), largest);
        largest += (float)layer.turn_floor;  // the length is measured where no square overflows
        Vec square = {};
        for (const Vec &part : v) square += (part / largest) * (part / largest);
        const Vec length = root(at_least(floor, square)) * largest;
        Vec sine, cosine;
        sine_cosine(half_turn * tanh(length), &sine, &cosine);
        store(at, cosine);
        for (int64_t part = 0; part < 3; ++part)
            store(at + (1 + part) * stride, v[part] * (sine / length));
    }
}

// a b, where the parts of a lie `stride` apart; with a negative sign the conjugate of a times b.
ANYMAMBA_INLINE void quaternion_product(const float *a, int64_t stride, float sign, const float *b,
                                        float *to) {
    const float w = a[0];
    const float x = sign * a[stride], y = sign * a[2 * stride], z = sign * a[3 * stride];
    const float product[4] = {
        w * b[0] - x * b[1] - y * b[2] - z * b[3], w * b[1] + x * b[0] + y * b[3] - z * b[2],
        w * b[2] - x * b[3] + y * b[0] + z * b[1], w * b[3] + x * b[2] - y * b[1] + z * b[0]};
    memcpy(to, product, sizeof(product));
}

inline void turn_quaternions(const DecodeLayer &layer, const float *raw, float dt,
                             float *quaternions, Turns turns) {
    const int64_t stride = turns.stride;
    for (int64_t place = 0; place < stride; ++place)
        for (int64_t part = 0; part < 3; ++part)
            turns.rows[(4 + part) * stride + place] =
                place < layer.turns ? raw[3 * place + part] : 0.0f;
    quaternion_increments(layer, dt, turns);
    for (int64_t place = 0; place < layer.turns; ++place) {
        float *q = quaternions + 4 * place;
        quaternion_product(turns.rows + place, stride, 1.0f, q, q);
        float square = q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3];
        if (square < (float)layer.turn_floor) square = (float)layer.turn_floor;
        const float inverse = 1.0f / __builtin_sqrtf(square);
        for (int64_t part = 0; part < 4; ++part) q[part] *= inverse;
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
