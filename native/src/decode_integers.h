// Blocks of 8-bit and 4-bit weights times 16-bit activations.
#pragma once

#include "decode_matrix.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace anymamba::ANYMAMBA_VARIANT {

// Eight lanes on every instruction set: a block is two vectors of sixteen 16-bit integers.
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Scales __attribute__((vector_size(16)));
typedef uint32_t ScaleBits __attribute__((vector_size(32)));

template <class T>
ANYMAMBA_INLINE T fetch(const void *from) {
    T value;
    memcpy(&value, from, sizeof(value));
    return value;
}

// AVX2 by name where the compiler makes four instructions of one (GCC 12 widens vectors in halves).
ANYMAMBA_INLINE Shorts widen_bytes(Bytes bytes) {
#if defined(__AVX2__)
    return (Shorts)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
    return __builtin_convertvector(bytes, Shorts);
#endif
}

ANYMAMBA_INLINE Floats widen_scales(const BFloat16 *from) {
#if defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(fetch<__m128i>(from)), 16);
#else
    return (Floats)(__builtin_convertvector(fetch<Scales>(from), ScaleBits) << 16);
#endif
}

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

ANYMAMBA_INLINE float sum_of(Floats value) {
    float lanes[8];
    memcpy(lanes, &value, sizeof(lanes));
    for (int half = 4; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

struct Int8Blocks {
    static constexpr int64_t kBytes = 32;

    static ANYMAMBA_INLINE void open(const uint8_t *from, Shorts *low, Shorts *high) {
        *low = widen_bytes(fetch<Bytes>(from));
        *high = widen_bytes(fetch<Bytes>(from + 16));
    }
};

struct Int4Blocks {
    static constexpr int64_t kBytes = 16;

    // Shifts of signed integers spread the sign of either nibble.
    static ANYMAMBA_INLINE void open(const uint8_t *from, Shorts *low, Shorts *high) {
        const Shorts both = widen_bytes(fetch<Bytes>(from));
        *low = both << 12 >> 12;
        *high = both >> 4;
    }
};

// GCC 12 loses track of the table of factors when it unrolls, and warns of memory that is written.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

template <class Format>
struct IntegerRows {
    const uint8_t *data;
    const BFloat16 *scales;
    int64_t blocks;

    explicit IntegerRows(const DecodeMatrix &matrix)
        : data(static_cast<const uint8_t *>(matrix.data)),
          scales(static_cast<const BFloat16 *>(matrix.scales)),
          blocks(ceil_div(matrix.columns, kDecodeBlock)) {}

    int64_t row_bytes() const { return blocks * Format::kBytes; }

    template <int kRows, int kVectors>
    ANYMAMBA_INLINE void dot(int64_t row, const Activations &x, int64_t vector, Ahead ahead,
                             float (*sums)[kVectors]) const {
        Floats acc[kRows][kVectors];
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Floats{};
        int64_t block = 0;
        for (; block + 8 <= blocks; block += 8)
            add_blocks<kRows, kVectors>(row, x, vector, block, 8, ahead, acc);
        if (block < blocks)
            add_blocks<kRows, kVectors>(row, x, vector, block, blocks - block, ahead, acc);
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVectors; ++v) sums[r][v] = sum_of(acc[r][v]);
    }

    template <int kRows, int kVectors>
    ANYMAMBA_INLINE void add_blocks(int64_t row, const Activations &x, int64_t vector,
                                    int64_t block, int64_t count, Ahead &ahead,
                                    Floats (*acc)[kVectors]) const {
        // The scales of eight blocks at once: of the weights times of the activations.
        float factor[kRows][kVectors][8];
        const int64_t x_blocks = x.padded / kDecodeBlock;
        for (int r = 0; r < kRows; ++r) {
            const BFloat16 *from = scales + (row + r) * blocks + block;
            BFloat16 part[8] = {};
            if (count < 8) memcpy(part, from, (size_t)count * sizeof(BFloat16));
            const Floats weight_scale = widen_scales(count < 8 ? part : from);
            for (int v = 0; v < kVectors; ++v) {
                const Floats product =
                    weight_scale * fetch<Floats>(x.scales + (vector + v) * x_blocks + block);
                for (int lane = 0; lane < 8; ++lane) factor[r][v][lane] = product[lane];
            }
        }
        const int16_t *shorts = x.shorts + (block * x.rows + vector) * kDecodeBlock;
        for (int64_t place = 0; place < count; ++place, shorts += x.rows * kDecodeBlock) {
            ahead.template take<kRows * Format::kBytes>();
            for (int r = 0; r < kRows; ++r) {
                Shorts low, high;
                Format::open(data + ((row + r) * blocks + block + place) * Format::kBytes, &low,
                             &high);
                for (int v = 0; v < kVectors; ++v) {
                    const int16_t *own = shorts + v * kDecodeBlock;
                    const Ints sum = pair_products(low, fetch<Shorts>(own)) +
                                     pair_products(high, fetch<Shorts>(own + 16));
                    acc[r][v] += __builtin_convertvector(sum, Floats) * factor[r][v][place];
                }
            }
        }
    }
};

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

}  // namespace anymamba::ANYMAMBA_VARIANT
