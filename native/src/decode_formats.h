// Floating-point formats of weights, and the vectors that meet them.
#pragma once

#include "decode_matrix.h"

namespace anymamba::ANYMAMBA_VARIANT {

#if defined(__AVX512F__)
constexpr int kTogether = 8;
#else
constexpr int kTogether = 4;
#endif

// A format says how stored weights become vectors, part by part of a step of kStep columns, what
// they meet, and how many rows meet kTogether vectors at a time: as many as leave their sums in
// registers.
template <class T, DecodeFormat kOf, int64_t kPartsOfStep, int kRowsTogether>
struct FormatOf {
    typedef T Stored;
    typedef float Value;
    static constexpr int64_t kParts = kPartsOfStep, kStep = kParts * kWidth;
    static constexpr int kRows = kTogether == 8 ? 3 : kRowsTogether;
    static constexpr int kStreams = streams_of(kOf);
    // Whether `prepare` made the values, with zeros up to whole steps.
    static constexpr bool kPrepares = false;

    static ANYMAMBA_INLINE Vec fetch(const float *values) { return load(values); }
    static ANYMAMBA_INLINE Vec add(Vec sum, Vec weight, Vec values) {
        return sum + weight * values;
    }
};

struct WideFormat : FormatOf<float, DecodeFormat::kFloat32, 1, 3> {
    template <int64_t kPart>
    static ANYMAMBA_INLINE Vec open(const float *from) {
        return load(from);
    }
};

#if defined(__AVX512BF16__)
// Pairs of columns meet in one instruction, which wants the vectors in bfloat16 too: they lose what
// they lose before every product of a bfloat16 module.
struct BFloat16Format : FormatOf<BFloat16, DecodeFormat::kBFloat16, 1, 3> {
    typedef BFloat16 Value;
    static constexpr int64_t kStep = 2 * kWidth;
    static constexpr bool kPrepares = true;

    static ANYMAMBA_INLINE __m512bh fetch(const BFloat16 *from) {
        __m512bh pairs;
        memcpy(&pairs, from, sizeof(pairs));
        return pairs;
    }
    template <int64_t kPart>
    static ANYMAMBA_INLINE __m512bh open(const BFloat16 *from) {
        return fetch(from);
    }
    static ANYMAMBA_INLINE Vec add(Vec sum, __m512bh weight, __m512bh values) {
        return _mm512_dpbf16_ps(sum, weight, values);
    }
};
#else
// Two halves make a word: a shift gives the even columns, a mask the odd ones. To take the columns
// in order would cost a shuffle for each vector.
struct BFloat16Format : FormatOf<BFloat16, DecodeFormat::kBFloat16, 2, 2> {
    static constexpr bool kPrepares = true;

    template <int64_t kPart>
    static ANYMAMBA_INLINE Vec open(const BFloat16 *from) {
        UintVec bits;
        memcpy(&bits, from, sizeof(bits));
        return kPart == 0 ? (Vec)(bits << 16) : (Vec)(bits & 0xFFFF0000u);
    }
};
#endif

struct Float16Format : FormatOf<Float16, DecodeFormat::kFloat16, 1, 2> {
    template <int64_t kPart>
    static ANYMAMBA_INLINE Vec open(const Float16 *from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        // By name, because GCC 12 widens the vector in halves. As `load`: sign and exponent in
        // their places, the exponent moved by 112, no end of the numbers.
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
        const IntVec bits = (IntVec)_mm256_slli_epi32(_mm256_cvtepi16_epi32(half), 13);
        const Vec scaled = (Vec)(bits & (int32_t)0x8FFFE000) * 5.192296858534828e33f;
        const IntVec is_end = (bits & 0x0F800000) == 0x0F800000;
        return (Vec)((IntVec)scaled | (is_end & 0x7F800000));
#else
        return load(from);
#endif
    }
};

// The vectors as a format meets them.
template <class Format>
struct Values {
    typedef typename Format::Value Value;
    const Value *data;
    int64_t stride;

    explicit Values(const Activations &x)
        : data(reinterpret_cast<const Value *>(Format::kPrepares ? x.paired : x.values)),
          stride(Format::kPrepares ? x.paired_stride : x.stride) {}
};

// What is left of a row after its last whole step.
template <class Format>
float dot_of_rest(const typename Format::Stored *weight, const Values<Format> &x, int64_t vector,
                  int64_t column, int64_t columns) {
    constexpr int64_t kStep = Format::kStep;
    typename Format::Stored rest[kStep] = {};
    memcpy(rest, weight + column, (size_t)(columns - column) * sizeof(rest[0]));
    typename Format::Value values[kStep] = {};
    const int64_t count = Format::kPrepares ? kStep : columns - column;
    memcpy(values, x.data + vector * x.stride + column, (size_t)count * sizeof(values[0]));
    Vec sum = Format::add(Vec{}, Format::template open<0>(rest), Format::fetch(values));
    if constexpr (Format::kParts == 2)
        sum = Format::add(sum, Format::template open<1>(rest), Format::fetch(values + kWidth));
    return sum_lanes(sum);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
