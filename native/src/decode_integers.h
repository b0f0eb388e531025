// Blocks of 8-bit and 4-bit weights of half a panel, eight rows at a time, a row in each lane, and
// the integers that activations become to meet them.
#pragma once

#include "decode_panels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace anymamba::ANYMAMBA_VARIANT {

// Eight lanes of 32 bits on every instruction set.
constexpr int64_t kLanes = 8;
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));
typedef uint16_t Eighths __attribute__((vector_size(16)));

// Sums of the products of neighbouring pairs: one instruction on x86.
ANYMAMBA_INLINE Ints pair_products(Shorts a, Shorts b) {
#if defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    __m128i left[2], right[2];
    memcpy(left, &a, sizeof(left));
    memcpy(right, &b, sizeof(right));
    for (int half = 0; half < 2; ++half) left[half] = _mm_madd_epi16(left[half], right[half]);
    return fetch<Ints>(left);
#else
    const Ints x = (Ints)a, y = (Ints)b;
    return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// The same of bytes, unsigned ones times signed ones; the sums must fit.
ANYMAMBA_INLINE Shorts byte_products(Shorts a, Shorts b) {
#if defined(__AVX2__)
    return (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
    return (a & 255) * (b << 8 >> 8) + (Shorts)((Halves)a >> 8) * (b >> 8);
#endif
}

ANYMAMBA_INLINE int32_t sum_of(const int32_t *block) {
    int32_t sum = 0;
    for (int64_t place = 0; place < kDecodeBlock; ++place) sum += block[place];
    return sum;
}

// A format says how a block becomes units, each of which meets one word of every vector:
//   sum of a block = total(start(offset) + product(unit 0, word 0) + ..., offset).
// Weights are shifted to be never negative, which needs no instruction to spread their signs, and
// the offset takes the shift times the sum of the activations back.

// Words are pairs of 16-bit activations. Of four neighbouring columns the even ones make a unit and
// the odd ones the next, because a mask and a shift then suffice to widen them.
struct Int8Format {
    static constexpr int64_t kBytes = 32, kUnits = 16;
    static constexpr int kStreams = streams_of(DecodeFormat::kInt8);
    static constexpr float kLargest = 32767.0f;
    typedef Ints Sum;

    static ANYMAMBA_INLINE void open(const uint8_t *block, Shorts *units) {
        for (int64_t four = 0; four < 8; ++four) {
            const Words stored = fetch<Words>(block + four * kFourColumns);
            const Halves pairs = (Halves)(stored ^ 0x80808080u);
            units[2 * four] = (Shorts)(pairs & 0x00FF);
            units[2 * four + 1] = (Shorts)(pairs >> 8);
        }
    }
    static ANYMAMBA_INLINE Ints product(Shorts unit, Ints word) {
        return pair_products(unit, (Shorts)word);
    }
    static ANYMAMBA_INLINE Ints start(int32_t offset) { return Ints{} - offset; }
    static ANYMAMBA_INLINE Ints total(Ints sum, int32_t) { return sum; }

    // 15 bits lose 2e-5 of a block's largest entry, far less than the weights lost.
    static ANYMAMBA_INLINE int32_t pack(const int32_t *values, int32_t *words) {
        // Two columns and the two that follow them make two words, so 64 bits at a time.
#if defined(__AVX2__)
        for (int64_t half = 0; half < 2; ++half) {
            const __m256i a = fetch<__m256i>(values + 16 * half);
            const __m256i b = fetch<__m256i>(values + 16 * half + 8);
            const __m256i first = _mm256_unpacklo_epi64(a, b), next = _mm256_unpackhi_epi64(a, b);
            const __m256i packed = _mm256_blend_epi16(first, _mm256_slli_epi32(next, 16), 0xAA);
            const __m256i in_order = _mm256_permute4x64_epi64(packed, 0xD8);
            memcpy(words + 8 * half, &in_order, sizeof(in_order));
        }
#else
        constexpr uint64_t kLow = 0x0000FFFF0000FFFFu;
        uint64_t pairs[kDecodeBlock / 2], packed[kUnits / 2];
        memcpy(pairs, values, sizeof(pairs));
        for (int64_t four = 0; four < kUnits / 2; ++four)
            packed[four] = (pairs[2 * four] & kLow) | (pairs[2 * four + 1] & kLow) << 16;
        memcpy(words, packed, sizeof(packed));
#endif
        return 128 * sum_of(values);
    }
};

// Words are four 8-bit activations. Eight products of pairs fit into 16 bits, as weights are at
// most 15: 8 * 2 * 15 * 127 = 30480.
struct Int4Format {
    static constexpr int64_t kBytes = 16, kUnits = 8;
    static constexpr int kStreams = streams_of(DecodeFormat::kInt4);
    static constexpr float kLargest = 127.0f;
    typedef Shorts Sum;

    static ANYMAMBA_INLINE void open(const uint8_t *block, Shorts *units) {
        for (int64_t four = 0; four < 4; ++four) {
            const Words both = fetch<Words>(block + four * kFourColumns) ^ 0x88888888u;
            units[four] = (Shorts)(both & 0x0F0F0F0Fu);
            units[four + 4] = (Shorts)(both >> 4 & 0x0F0F0F0Fu);
        }
    }
    static ANYMAMBA_INLINE Shorts product(Shorts unit, Ints word) {
        return byte_products(unit, (Shorts)word);
    }
    static ANYMAMBA_INLINE Shorts start(int32_t) { return Shorts{}; }
    static ANYMAMBA_INLINE Ints total(Shorts sum, int32_t offset) {
        const Shorts ones = Shorts{} + 1;
        return pair_products(sum, ones) - offset;
    }

    // 7 bits lose half a hundredth of a block's largest entry, a tenth of what the weights lost.
    static ANYMAMBA_INLINE int32_t pack(const int32_t *values, int32_t *words) {
        int8_t bytes[kDecodeBlock];
        for (int64_t place = 0; place < kDecodeBlock; ++place) bytes[place] = (int8_t)values[place];
        memcpy(words, bytes, sizeof(bytes));
        return 8 * sum_of(values);
    }
};

}  // namespace anymamba::ANYMAMBA_VARIANT
