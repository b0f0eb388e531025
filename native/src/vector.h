// Vectors of float32 by the compiler's vector extension: the same source serves every instruction
// set, and the width follows from the one that the file is compiled for.
//
// Values: float32 in registers, always. Storage: float32 or bfloat16.
#pragma once

#include <stdint.h>
#include <string.h>

#include "variant.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ANYMAMBA_INLINE inline __attribute__((always_inline))

namespace anymamba::ANYMAMBA_VARIANT {

#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
#elif defined(__AVX2__)
constexpr int64_t kWidth = 8;
#else
constexpr int64_t kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

// The numbers of all lanes, for shuffles that are written once for every width.
template <int... lane>
struct Lanes {};

#if defined(__AVX512F__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using AllLanes = Lanes<0, 1, 2, 3>;
#endif

// bfloat16 as it lies in memory: the upper half of a float32.
struct BFloat16 {
    uint16_t bits;
};

ANYMAMBA_INLINE Vec splat(float value) { return value - Vec{}; }

ANYMAMBA_INLINE Vec load(const float *from) {
    Vec value;
    memcpy(&value, from, sizeof(value));
    return value;
}

ANYMAMBA_INLINE void store(float *to, Vec value) { memcpy(to, &value, sizeof(value)); }

// By name where GCC 12 makes five instructions of the two: it widens each half of a vector apart.
#if defined(__AVX512F__)
ANYMAMBA_INLINE Vec opened(__m256i half) {
    // With a mask of all lanes: the plain one reads an undefined vector, and GCC 12 warns of it.
    return (Vec)((UintVec)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, half) << 16);
}

ANYMAMBA_INLINE Vec load(const BFloat16 *from) {
    __m256i half;
    memcpy(&half, from, sizeof(half));
    return opened(half);
}
#else
ANYMAMBA_INLINE Vec load(const BFloat16 *from) {
    HalfVec half;
    memcpy(&half, from, sizeof(half));
    const UintVec bits = __builtin_convertvector(half, UintVec) << 16;
    return (Vec)bits;
}
#endif

// Round to nearest, ties to even; a NaN keeps its sign and becomes quiet, never an infinity.
#if defined(__AVX512BF16__)
ANYMAMBA_INLINE void store(BFloat16 *to, Vec value) {
    const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &half, sizeof(half));
}
#else
ANYMAMBA_INLINE void store(BFloat16 *to, Vec value) {
    const UintVec bits = (UintVec)value;
    const UintVec rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const UintVec quiet = (bits >> 16) | 0x40u;
    const IntVec is_nan = value != value;
    const UintVec chosen = ((UintVec)is_nan & quiet) | (~(UintVec)is_nan & rounded);
    const HalfVec half = __builtin_convertvector(chosen, HalfVec);
    memcpy(to, &half, sizeof(half));
}
#endif

ANYMAMBA_INLINE float widen(float value) { return value; }

ANYMAMBA_INLINE float widen(BFloat16 value) {
    const uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

ANYMAMBA_INLINE void narrow(float *to, float value) { *to = value; }

ANYMAMBA_INLINE void narrow(BFloat16 *to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const bool is_nan = value != value;
    to->bits = is_nan ? (uint16_t)((bits >> 16) | 0x40u)
                      : (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

ANYMAMBA_INLINE Vec select(IntVec mask, Vec yes, Vec no) {
    return mask ? yes : no;
}

// x, or the limit where x is beyond it; NaN stays. By name, because GCC makes a comparison and a
// blend of the selection, and with a mask of all lanes, because GCC 12 warns of its own header
// without one.
// Of two operands of which one is NaN, both instructions return the second.
#if defined(__AVX512F__)
ANYMAMBA_INLINE Vec at_least(Vec low, Vec x) {
    return (Vec)_mm512_maskz_max_ps(0xFFFF, (__m512)low, (__m512)x);
}
ANYMAMBA_INLINE Vec at_most(Vec high, Vec x) {
    return (Vec)_mm512_maskz_min_ps(0xFFFF, (__m512)high, (__m512)x);
}
#else
ANYMAMBA_INLINE Vec at_least(Vec low, Vec x) { return select(x < low, low, x); }
ANYMAMBA_INLINE Vec at_most(Vec high, Vec x) { return select(x > high, high, x); }
#endif

// The parts of a row past its last whole vector: missing lanes are read as zero, never written.
#if defined(__AVX512F__)
ANYMAMBA_INLINE __mmask16 first_lanes(int64_t count) { return (__mmask16)((1u << count) - 1u); }

ANYMAMBA_INLINE Vec load_part(const float *from, int64_t count) {
    return (Vec)_mm512_maskz_loadu_ps(first_lanes(count), from);
}

ANYMAMBA_INLINE Vec load_part(const BFloat16 *from, int64_t count) {
    return opened(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}

ANYMAMBA_INLINE void store_part(float *to, Vec value, int64_t count) {
    _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)value);
}

ANYMAMBA_INLINE void store_part(BFloat16 *to, Vec value, int64_t count) {
    BFloat16 lanes[kWidth];
    store(lanes, value);
    __m256i half;
    memcpy(&half, lanes, sizeof(half));
    _mm256_mask_storeu_epi16(to, first_lanes(count), half);
}
#else
template <class T>
ANYMAMBA_INLINE Vec load_part(const T *from, int64_t count) {
    T lanes[kWidth] = {};
    memcpy(lanes, from, (size_t)count * sizeof(T));
    return load(lanes);
}

template <class T>
ANYMAMBA_INLINE void store_part(T *to, Vec value, int64_t count) {
    T lanes[kWidth];
    store(lanes, value);
    memcpy(to, lanes, (size_t)count * sizeof(T));
}
#endif

// A vector of which only the first `count` lanes may exist: whole ones mostly, which cost no copy.
#if defined(__AVX512F__)
ANYMAMBA_INLINE int64_t lanes_of(int64_t count) { return count < kWidth ? count : kWidth; }

template <class T>
ANYMAMBA_INLINE Vec load_most(const T *from, int64_t count) {
    return load_part(from, lanes_of(count));
}

template <class T>
ANYMAMBA_INLINE void store_most(T *to, Vec value, int64_t count) {
    store_part(to, value, lanes_of(count));
}
#else
template <class T>
ANYMAMBA_INLINE Vec load_most(const T *from, int64_t count) {
    return count >= kWidth ? load(from) : load_part(from, count);
}

template <class T>
ANYMAMBA_INLINE void store_most(T *to, Vec value, int64_t count) {
    if (count >= kWidth)
        store(to, value);
    else
        store_part(to, value, count);
}
#endif

ANYMAMBA_INLINE float sum_lanes(Vec value) {
    float lanes[kWidth];
    store(lanes, value);
    // A fixed tree, so that the sum is the same whatever the surrounding code looks like.
    for (int64_t half = kWidth / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// exp(f) - 1 for |f| <= ln2 / 2 by the Taylor polynomial of degree 7 (remainder 2e-9 of exp(f)).
ANYMAMBA_INLINE Vec expm1_fraction(Vec f) {
    Vec p = splat(1.9841270e-4f);
    p = p * f + 1.3888889e-3f;
    p = p * f + 8.3333333e-3f;
    p = p * f + 4.1666667e-2f;
    p = p * f + 1.6666667e-1f;
    p = p * f + 0.5f;
    return p * f * f + f;
}

ANYMAMBA_INLINE Vec exp_fraction(Vec f) { return expm1_fraction(f) + 1.0f; }

// x - n ln2, with the leading bits of ln2 apart: exact times n.
ANYMAMBA_INLINE Vec without_powers(Vec x, Vec n) {
    const Vec f = x - n * 0.693145751953125f;
    return f - n * 1.42860682030941723e-6f;
}

// exp to about one unit in the last place over the whole range: 0 below -104, infinity above 88.73,
// NaN stays NaN. x = n ln2 + f, and 2^n is multiplied so that subnormal results are reached, not
// flushed.
#if defined(__AVX512F__)
ANYMAMBA_INLINE Vec exp(Vec x) {
    constexpr __mmask16 all = 0xFFFF;  // see at_least
    const Vec y = at_most(splat(89.0f), at_least(splat(-104.0f), x));
    const Vec n = (Vec)_mm512_maskz_roundscale_ps(all, (__m512)(y * 1.44269504088896341f),
                                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec p = exp_fraction(without_powers(y, n));
    return (Vec)_mm512_maskz_scalef_ps(all, (__m512)p, (__m512)n);
}
#else
ANYMAMBA_INLINE Vec exp(Vec x) {
    const Vec y = at_most(splat(89.0f), at_least(splat(-104.0f), x));
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const Vec shifted = y * 1.44269504088896341f + magic;
    const Vec p = exp_fraction(without_powers(y, shifted - magic));
    const IntVec whole = (IntVec)shifted - (IntVec)magic;
    const IntVec half = whole >> 1;
    const Vec first = (Vec)((half + 127) << 23);
    const Vec second = (Vec)((whole - half + 127) << 23);
    return select(x == x, p * first * second, x);
}
#endif

ANYMAMBA_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace anymamba::ANYMAMBA_VARIANT
