// Elementwise functions of the decoder, and float16 as it lies in memory.
#pragma once

#include "exp2.h"
#include "rows.h"
#include "softplus.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace anymamba::ANYMAMBA_VARIANT {

// sum_lanes of four vectors, bit for bit, for what one costs. By value: GCC 12 keeps arrays whose
// address is passed on in memory.
ANYMAMBA_INLINE void sum_lanes_of_four(Vec a, Vec b, Vec c, Vec d, float *to) {
#if defined(__AVX512F__)
    const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xEE);
    const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xEE);
    // Now a, b, c and d have a quarter each.
    const __m512 four = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xDD);
    const __m512 two = four + _mm512_permute_ps(four, 0x4E);
    const __m512 one = two + _mm512_permute_ps(two, 0xB1);
    const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(quarters, one)));
#elif defined(__AVX2__)
    const __m256 ab = _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
    const __m256 cd = _mm256_permute2f128_ps(c, d, 0x20) + _mm256_permute2f128_ps(c, d, 0x31);
    const __m256 two = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xEE);
    // Now a and c are in the even places of the lower half, b and d in those of the upper.
    const __m256 one = two + _mm256_movehdup_ps(two);
    const __m128 low = _mm256_castps256_ps128(one), high = _mm256_extractf128_ps(one, 1);
    _mm_storeu_ps(to, _mm_shuffle_ps(_mm_unpacklo_ps(low, high), _mm_unpackhi_ps(low, high), 0x44));
#else
    to[0] = sum_lanes(a);
    to[1] = sum_lanes(b);
    to[2] = sum_lanes(c);
    to[3] = sum_lanes(d);
#endif
}

// Sums of every four neighbouring lanes of four vectors, in order; (0 + 1) + (2 + 3) everywhere.
ANYMAMBA_INLINE void sum_fours(Vec a, Vec b, Vec c, Vec d, float *to) {
#if defined(__AVX512F__)
    const __m512 ab = _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xDD);
    const __m512 cd = _mm512_shuffle_ps(c, d, 0x88) + _mm512_shuffle_ps(c, d, 0xDD);
    const __m512 mixed = _mm512_shuffle_ps(ab, cd, 0x88) + _mm512_shuffle_ps(ab, cd, 0xDD);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(to, _mm512_permutexvar_ps(order, mixed));
#elif defined(__AVX2__)
    const __m256 mixed = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps(mixed, order));
#else
    const Vec all[4] = {a, b, c, d};
    float lanes[4 * kWidth];
    memcpy(lanes, all, sizeof(lanes));
    for (int64_t place = 0; place < kWidth; ++place) {
        const float *four = lanes + 4 * place;
        to[place] = (four[0] + four[1]) + (four[2] + four[3]);
    }
#endif
}

// 1 - 2 / (exp(2x) + 1), and the odd series where that would cancel.
ANYMAMBA_INLINE Vec tanh(Vec x) {
    const Vec square = x * x;
    Vec p = splat(62.0f / 2835.0f);
    p = p * square - 17.0f / 315.0f;
    p = p * square + 2.0f / 15.0f;
    p = p * square - 1.0f / 3.0f;
    const Vec near = x + x * (p * square);
    const Vec far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
    return select(square < splat(0.04f), near, far);
}

// Sine and cosine of an angle of a few turns at most: x = q pi/2 + f with |f| <= pi/4, then the
// Taylor polynomials (remainder 3e-9).
ANYMAMBA_INLINE void sine_cosine(Vec x, Vec *sine, Vec *cosine) {
    const Vec shifted = x * 0.636619772367581343f + kRounder;
    const Vec q = shifted - kRounder;
    Vec f = x - q * 1.5703125f;  // the leading bits of pi/2, exact times q
    f = f - q * 4.83826794897e-4f;
    const Vec square = f * f;
    Vec s = splat(2.7557319e-6f);
    s = s * square - 1.9841270e-4f;
    s = s * square + 8.3333333e-3f;
    s = s * square - 1.6666667e-1f;
    s = f + f * (s * square);
    Vec c = splat(2.4801587e-5f);
    c = c * square - 1.3888889e-3f;
    c = c * square + 4.1666667e-2f;
    c = c * square - 0.5f;
    c = 1.0f + c * square;
    const IntVec quadrant = (IntVec)shifted;
    const IntVec swaps = -(quadrant & 1);
    const IntVec sine_sign = (quadrant & 2) << 30, cosine_sign = ((quadrant + 1) & 2) << 30;
    *sine = (Vec)((IntVec)select(swaps, c, s) ^ sine_sign);
    *cosine = (Vec)((IntVec)select(swaps, s, c) ^ cosine_sign);
}

// x minus whole turns; 6.28125 has 8 significant bits, so its product with a count is exact.
ANYMAMBA_INLINE Vec without_turns(Vec x) {
    const Vec turns = (x * 0.159154943091895336f + kRounder) - kRounder;
    return x - turns * 6.28125f - turns * 1.93530717958647692e-3f;
}

struct Float16 {
    uint16_t bits;
};

// The exponent moves by 112, which also turns subnormal halves into normal floats; infinity and
// NaN have the largest exponent in both.
ANYMAMBA_INLINE Vec load(const Float16 *from) {
    HalfVec half;
    memcpy(&half, from, sizeof(half));
#if defined(__AVX512F__)
    return _mm512_cvtph_ps((__m256i)half);
#else
    const UintVec bits = __builtin_convertvector(half, UintVec);
    const Vec scaled = (Vec)((bits & 0x7FFFu) << 13) * 5.192296858534828e33f;  // 2^112
    const UintVec endless = (UintVec)((bits & 0x7C00u) == 0x7C00u) & 0x7F800000u;
    return (Vec)((UintVec)scaled | endless | ((bits & 0x8000u) << 16));
#endif
}

#if defined(__AVX512F__)
ANYMAMBA_INLINE Vec load_part(const Float16 *from, int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}
#endif

ANYMAMBA_INLINE float widen(Float16 value) {
    Float16 lanes[kWidth] = {};
    lanes[0] = value;
    return load(lanes)[0];
}

// Round to nearest, ties to even, by adding a float whose last bit weighs what the half's does.
ANYMAMBA_INLINE void narrow(Float16 *to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    uint32_t half;
    if (size > 0x7F800000u) {
        half = 0x7E00u;  // NaN
    } else if (size >= 0x477FF000u) {
        half = 0x7C00u;  // 65520 and more round to infinity
    } else if (size < 0x38800000u) {
        float small;
        memcpy(&small, &size, sizeof(small));
        small += 0.5f;  // its last bit weighs 2^-24, the smallest half
        memcpy(&half, &small, sizeof(half));
        half -= 0x3F000000u;
    } else {
        half = (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13;
    }
    to->bits = (uint16_t)(sign | half);
}

#if defined(__AVX512F__)
ANYMAMBA_INLINE void store(Float16 *to, Vec value) {
    const __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    memcpy(to, &half, sizeof(half));
}
#else
inline void store(Float16 *to, Vec value) {
    for (int64_t lane = 0; lane < kWidth; ++lane) narrow(to + lane, value[lane]);
}
#endif

// States of a call are float32, bfloat16 or float16; the calls say which.
inline float read_state(const anymamba_tensor &tensor, int64_t place) {
    if (tensor.dtype == ANYMAMBA_FLOAT16)
        return widen(static_cast<const Float16 *>(tensor.data)[place]);
    return read_one(tensor, place);
}

inline void write_state(const anymamba_tensor &tensor, int64_t place, float value) {
    if (tensor.dtype == ANYMAMBA_FLOAT16)
        narrow(static_cast<Float16 *>(tensor.data) + place, value);
    else
        write_one(tensor, place, value);
}

inline void read_states(const anymamba_tensor &tensor, int64_t from, int64_t count, float *to) {
    if (tensor.dtype == ANYMAMBA_FLOAT32) {
        memcpy(to, static_cast<const float *>(tensor.data) + from, (size_t)count * sizeof(float));
        return;
    }
    int64_t place = 0;
    if (tensor.dtype == ANYMAMBA_BFLOAT16)
        for (const auto *halves = static_cast<const BFloat16 *>(tensor.data) + from;
             place + kWidth <= count; place += kWidth)
            store(to + place, load(halves + place));
    for (; place < count; ++place) to[place] = read_state(tensor, from + place);
}

inline void write_states(const anymamba_tensor &tensor, int64_t to, int64_t count,
                         const float *from) {
    if (tensor.dtype == ANYMAMBA_FLOAT32) {
        memcpy(static_cast<float *>(tensor.data) + to, from, (size_t)count * sizeof(float));
        return;
    }
    int64_t place = 0;
    if (tensor.dtype == ANYMAMBA_BFLOAT16)
        for (auto *halves = static_cast<BFloat16 *>(tensor.data) + to; place + kWidth <= count;
             place += kWidth)
            store(halves + place, load(from + place));
    else
        for (auto *halves = static_cast<Float16 *>(tensor.data) + to; place + kWidth <= count;
             place += kWidth)
            store(halves + place, load(from + place));
    for (; place < count; ++place) write_state(tensor, to + place, from[place]);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
