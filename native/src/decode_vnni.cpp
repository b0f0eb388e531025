// Integer matrices times vectors where the CPU adds four products of bytes to a lane in one
// instruction (VPDPBUSD). A block of a panel is opened into registers, where all vectors meet it.
//
// Activations are bytes with a scale for every block, for both formats.
#include <immintrin.h>

#include "decode_panels.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Words of four activations, and vectors of four columns of sixteen rows, that make a block.
constexpr int64_t kUnits = 8;
constexpr float kLargest = 127.0f;
constexpr int kStreams = streams_of(1);

// A format says how a block becomes units, whose bytes are the weights plus kShift: VPDPBUSD takes
// bytes without a sign on one side.
struct Int8Format {
    static constexpr int64_t kBytes = 32;
    static constexpr int32_t kShift = 128;

    static ANYMAMBA_INLINE void open(const uint8_t *block, __m512i *units) {
        const __m512i shift = _mm512_set1_epi8((char)kShift);
#pragma GCC unroll 8
        for (int64_t unit = 0; unit < kUnits; ++unit)
            units[unit] = _mm512_xor_si512(fetch<__m512i>(block + unit * kFourColumns), shift);
    }
};

struct Int4Format {
    static constexpr int64_t kBytes = 16;
    static constexpr int32_t kShift = 8;

    static ANYMAMBA_INLINE void open(const uint8_t *block, __m512i *units) {
        const __m512i shift = _mm512_set1_epi8(kShift), nibble = _mm512_set1_epi8(15);
        constexpr int kXorThenAnd = 0x28;  // (a ^ b) & c
#pragma GCC unroll 4
        for (int64_t unit = 0; unit < kUnits / 2; ++unit) {
            const __m512i both = fetch<__m512i>(block + unit * kFourColumns);
            const __m512i high = _mm512_srli_epi32(both, 4);
            units[unit] = _mm512_ternarylogic_epi32(both, shift, nibble, kXorThenAnd);
            units[unit + 4] = _mm512_ternarylogic_epi32(high, shift, nibble, kXorThenAnd);
        }
    }
};

// The sum of a block of sixteen rows times the words of one vector.
ANYMAMBA_INLINE __m512 block_sum(const __m512i *units, const int32_t *words, int32_t offset) {
    __m512i sum = _mm512_set1_epi32(offset);
#pragma GCC unroll 8
    for (int64_t unit = 0; unit < kUnits; ++unit)
        sum = _mm512_dpbusd_epi32(sum, units[unit], _mm512_set1_epi32(words[unit]));
    return _mm512_cvtepi32_ps(sum);
}

ANYMAMBA_INLINE __m512 open_scales(const uint8_t *scales) {
    const __m512i halves = _mm512_cvtepu16_epi32(fetch<__m256i>(scales));
    return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}

// Those of a panel's sums that belong to `own`, with their bias.
ANYMAMBA_INLINE void write_sums(const DecodeMatrix &matrix, Share own, int64_t panel, __m512 sums,
                                float *out) {
    const Share places = places_of(own, panel);
    const auto meant = (__mmask16)((1u << places.last) - (1u << places.first));
    if (matrix.bias != nullptr)
        sums += _mm512_maskz_loadu_ps(meant, matrix.bias + panel * kPanel);
    _mm512_mask_storeu_ps(out + panel * kPanel, meant, sums);
}

// The order of a sum, for one vector and for several: blocks one after the other, each of them
// exact.
template <class Format>
void multiply_one(const DecodeMatrix &matrix, const Activations &x, Share own, float *out) {
    const Panels<Format::kBytes> panels(matrix);
    read_in_streams<kStreams>(panels_of(own), [&](auto streams, int64_t first, int64_t apart) {
        constexpr int kTogether = decltype(streams)::value;
        __m512 sums[kTogether] = {};
        for (int64_t place = 0; place < panels.blocks; ++place)
#pragma GCC unroll 4
            for (int stream = 0; stream < kTogether; ++stream) {
                const int64_t panel = first + stream * apart;
                __m512i units[kUnits];
                Format::open(panels.block(panel, place), units);
                const __m512 sum = block_sum(units, x.words + place * kUnits, x.offsets[place]);
                const __m512 scales = open_scales(panels.scales_of(panel, place));
                sums[stream] = sums[stream] + sum * (scales * x.scales[place]);
            }
        for (int stream = 0; stream < kTogether; ++stream)
            write_sums(matrix, own, first + stream * apart, sums[stream], out);
    });
}

template <class Format>
void multiply_some(const DecodeMatrix &matrix, const Activations &x, Share own, float *out,
                   int64_t out_stride) {
    const Panels<Format::kBytes> panels(matrix);
    const Share all = panels_of(own);
    __m512 sums[kDecodeMostRows];
    for (int64_t panel = all.first; panel < all.last; ++panel) {
        for (int64_t v = 0; v < x.rows; ++v) sums[v] = __m512{};
        for (int64_t place = 0; place < panels.blocks; ++place) {
            const uint8_t *block = panels.block(panel, place);
            ask_for_block(block, panels.kBlock);
            __m512i units[kUnits];
            Format::open(block, units);
            const __m512 scales = open_scales(panels.scales_of(panel, place));
            const int64_t at = place * x.rows;
            for (int64_t v = 0; v < x.rows; ++v) {
                const __m512 sum =
                    block_sum(units, x.words + (at + v) * kUnits, x.offsets[at + v]);
                sums[v] = sums[v] + sum * (scales * x.scales[at + v]);
            }
        }
        for (int64_t v = 0; v < x.rows; ++v)
            write_sums(matrix, own, panel, sums[v], out + v * out_stride);
    }
}

template <class Format>
void multiply_in(const DecodeMatrix &matrix, const Activations &x, Share own, float *out,
                 int64_t out_stride) {
    if (x.rows == 1)
        multiply_one<Format>(matrix, x, own, out);
    else
        multiply_some<Format>(matrix, x, own, out, out_stride);
}

// One block of activations as bytes; returns their sum. A block with NaN or infinity has the scale
// NaN, which makes every product NaN.
ANYMAMBA_INLINE int32_t prepare_block(__m512 first, __m512 second, int32_t *words, float *scale) {
    // As bits, the sizes of floats are in order: infinity above all numbers, and NaN above it.
    const __m512i size = _mm512_set1_epi32(0x7FFFFFFF);
    const int32_t bits = _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(first), size),
                         _mm512_and_si512(_mm512_castps_si512(second), size)));
    float largest;
    memcpy(&largest, &bits, sizeof(largest));
    const bool is_finite = bits < 0x7F800000;
    *scale = is_finite ? largest / kLargest : __builtin_nanf("");
    // Below this, the inverse would be infinite; the block is zero to rounding.
    const float inverse = is_finite && largest >= 1e-30f ? kLargest / largest : 0.0f;
    // Of NaN and infinity no integers are made: their sum has to fit.
    const __mmask16 all = is_finite ? 0xFFFF : 0;
    const __m512i low = _mm512_maskz_cvtps_epi32(all, first * inverse);
    const __m512i high = _mm512_maskz_cvtps_epi32(all, second * inverse);
    const __m128i bytes[2] = {_mm512_cvtepi32_epi8(low), _mm512_cvtepi32_epi8(high)};
    memcpy(words, bytes, sizeof(bytes));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
}

int32_t shift_of(DecodeFormat format) {
    return format == DecodeFormat::kInt8 ? Int8Format::kShift : Int4Format::kShift;
}

}  // namespace

void prepare_integers(const DecodeMatrix &matrix, Activations *x) {
    const int64_t whole = matrix.columns / kDecodeBlock;
    const int64_t rest = matrix.columns % kDecodeBlock, shift = shift_of(matrix.format);
    for (int64_t block = 0; block < whole + (rest > 0); ++block)
        for (int64_t row = 0; row < x->rows; ++row) {
            const float *from = x->values + row * x->stride + block * kDecodeBlock;
            float part[kDecodeBlock] = {};
            if (block == whole) {
                memcpy(part, from, (size_t)rest * sizeof(float));
                from = part;
            }
            const int64_t at = block * x->rows + row;
            const int32_t sum = prepare_block(load(from), load(from + kWidth),
                                              x->words + at * kUnits, x->scales + at);
            x->offsets[at] = -(int32_t)shift * sum;
        }
}

void multiply_integers(const DecodeMatrix &matrix, const Activations &x, Share own, float *out,
                       int64_t out_stride) {
    if (matrix.format == DecodeFormat::kInt8)
        multiply_in<Int8Format>(matrix, x, own, out, out_stride);
    else
        multiply_in<Int4Format>(matrix, x, own, out, out_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
