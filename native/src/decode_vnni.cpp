// Integer matrices times vectors where the CPU adds four products of bytes to a lane in one
// instruction (VPDPBUSD). Sixteen rows at a time, a row in each lane: a block is opened into
// registers, where all vectors meet it, and its sum is whole before it is scaled.
//
// Activations are bytes with a scale for every block, for both formats.
#include <immintrin.h>

#include "decode_rows.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

constexpr int64_t kLanes = 16;
// Words of four activations, and vectors of four columns of sixteen rows, that make a block.
constexpr int64_t kUnits = 8;
// Blocks whose scales are read together: sixteen bytes of bfloat16.
constexpr int64_t kSpan = 8;
constexpr float kLargest = 127.0f;

template <bool kWhole>
struct SixteenRows : StoredRows<kWhole> {
    using StoredRows<kWhole>::row;

    // Sixteen bytes at `offset` of the rows lane, lane + 4, lane + 8 and lane + 12.
    ANYMAMBA_INLINE __m512i quarters(int64_t lane, int64_t offset) const {
        __m512i four = _mm512_castsi128_si512(fetch<__m128i>(row(lane) + offset));
        four = _mm512_inserti32x4(four, fetch<__m128i>(row(lane + 4) + offset), 1);
        four = _mm512_inserti32x4(four, fetch<__m128i>(row(lane + 8) + offset), 2);
        return _mm512_inserti32x4(four, fetch<__m128i>(row(lane + 12) + offset), 3);
    }

    // Thirty-two bytes at `offset` of the rows lane and lane + 4.
    ANYMAMBA_INLINE __m512i halves(int64_t lane, int64_t offset) const {
        const __m512i low = _mm512_castsi256_si512(fetch<__m256i>(row(lane) + offset));
        return _mm512_inserti64x4(low, fetch<__m256i>(row(lane + 4) + offset), 1);
    }
};

// Four vectors with a row in each quarter or half: the words of four rows come to lie together.
ANYMAMBA_INLINE void turn_quarters(__m512i a, __m512i b, __m512i c, __m512i d, __m512i *to) {
    const __m512i low_ab = _mm512_unpacklo_epi32(a, b), high_ab = _mm512_unpackhi_epi32(a, b);
    const __m512i low_cd = _mm512_unpacklo_epi32(c, d), high_cd = _mm512_unpackhi_epi32(c, d);
    to[0] = _mm512_unpacklo_epi64(low_ab, low_cd);
    to[1] = _mm512_unpackhi_epi64(low_ab, low_cd);
    to[2] = _mm512_unpacklo_epi64(high_ab, high_cd);
    to[3] = _mm512_unpackhi_epi64(high_ab, high_cd);
}

// Sixteen bytes of every row as four vectors: four bytes of a row in its lane.
template <class Rows>
ANYMAMBA_INLINE void turn_sixteen(const Rows &rows, int64_t offset, __m512i *to) {
    turn_quarters(rows.quarters(0, offset), rows.quarters(1, offset), rows.quarters(2, offset),
                  rows.quarters(3, offset), to);
}

// A format says how a block becomes units, whose bytes are the weights plus kShift: VPDPBUSD takes
// bytes without a sign on one side.
struct Int8Format {
    static constexpr int64_t kBytes = 32;
    static constexpr int32_t kShift = 128;

    template <class Rows>
    static ANYMAMBA_INLINE void open(const Rows &rows, int64_t block, __m512i *units) {
        const int64_t at = block * kBytes;
        __m512i first[4], second[4];  // rows 0 to 7 and 8 to 15
        turn_quarters(rows.halves(0, at), rows.halves(1, at), rows.halves(2, at),
                      rows.halves(3, at), first);
        turn_quarters(rows.halves(8, at), rows.halves(9, at), rows.halves(10, at),
                      rows.halves(11, at), second);
        const __m512i shift = _mm512_set1_epi8((char)kShift);
        for (int64_t unit = 0; unit < 4; ++unit) {
            const __m512i low = _mm512_shuffle_i32x4(first[unit], second[unit], 0x88);
            const __m512i high = _mm512_shuffle_i32x4(first[unit], second[unit], 0xDD);
            units[unit] = _mm512_xor_si512(low, shift);
            units[unit + 4] = _mm512_xor_si512(high, shift);
        }
    }
};

struct Int4Format {
    static constexpr int64_t kBytes = 16;
    static constexpr int32_t kShift = 8;

    template <class Rows>
    static ANYMAMBA_INLINE void open(const Rows &rows, int64_t block, __m512i *units) {
        __m512i turned[4];
        turn_sixteen(rows, block * kBytes, turned);
        const __m512i shift = _mm512_set1_epi8(kShift), nibble = _mm512_set1_epi8(15);
        constexpr int kXorThenAnd = 0x28;  // (a ^ b) & c
        for (int64_t unit = 0; unit < 4; ++unit) {
            const __m512i both = turned[unit], high = _mm512_srli_epi32(both, 4);
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

// The scales of eight blocks, or of the last few, from lanes of pairs.
template <bool kWhole>
ANYMAMBA_INLINE void open_scales(const SixteenRows<kWhole> &scales, int64_t block, int64_t count,
                                 __m512 *to) {
    __m512i pairs[kSpan / 2];
    if (count == kSpan) {
        turn_sixteen(scales, block * (int64_t)sizeof(BFloat16), pairs);
    } else {
        // What follows the last scale may not be ours to read.
        uint8_t part[kLanes][16] = {};
        for (int64_t lane = 0; lane < kLanes; ++lane)
            memcpy(part[lane], scales.row(lane) + block * sizeof(BFloat16),
                   (size_t)count * sizeof(BFloat16));
        turn_sixteen(SixteenRows<true>{{part[0], 16, kLanes}}, 0, pairs);
    }
    const __m512i odd = _mm512_set1_epi32((int32_t)0xFFFF0000);
    for (int64_t pair = 0; pair < kSpan / 2; ++pair) {
        to[2 * pair] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[pair], 16));
        to[2 * pair + 1] = _mm512_castsi512_ps(_mm512_and_si512(pairs[pair], odd));
    }
}

// Some rows of a matrix: the first sixteen of them are meant, the others come behind them.
struct Strip {
    const uint8_t *data, *scales;
    int64_t blocks, bytes, scale_bytes, count, rest;

    template <class Format>
    static Strip of(const DecodeMatrix &matrix, Share own) {
        Strip strip;
        strip.blocks = ceil_div(matrix.columns, kDecodeBlock);
        strip.bytes = strip.blocks * Format::kBytes;
        strip.scale_bytes = strip.blocks * (int64_t)sizeof(BFloat16);
        strip.data = static_cast<const uint8_t *>(matrix.data) + own.first * strip.bytes;
        strip.scales = static_cast<const uint8_t *>(matrix.scales) + own.first * strip.scale_bytes;
        strip.rest = own.last - own.first;
        strip.count = smaller(kLanes, strip.rest);
        return strip;
    }
    Ahead<false> ahead(Soon next) const {
        const char *end = reinterpret_cast<const char *>(data + rest * bytes);
        return Lookahead<false>(end, next, kLanes * bytes, blocks, 1).behind(data, 0);
    }
    // The scales of rows that are as far behind as the weights that are asked for.
    void ask_for_scales() const {
        const int64_t skip = smaller(kReach / bytes, rest) * scale_bytes;
        const int64_t last = smaller(skip + kLanes * scale_bytes, rest * scale_bytes);
        for (int64_t place = skip; place < last; place += 64)
            __builtin_prefetch(scales + place, 0, 2);
    }
};

// acc[v] += W x[v] for up to sixteen rows; kOne says that there is one vector, whose sum stays in a
// register. The order of a sum: blocks one after the other, each of them exact.
template <class Format, bool kWhole, bool kOne>
ANYMAMBA_INLINE void add_blocks(const Strip &strip, const Activations &x, Soon next, __m512 *acc) {
    const SixteenRows<kWhole> weights{{strip.data, strip.bytes, strip.count}};
    const SixteenRows<kWhole> scales{{strip.scales, strip.scale_bytes, strip.count}};
    const int64_t vectors = kOne ? 1 : x.rows, blocks = strip.blocks;
    Ahead<false> ahead = strip.ahead(next);
    strip.ask_for_scales();
    for (int64_t start = 0; start < blocks; start += kSpan) {
        const int64_t span = smaller(kSpan, blocks - start);
        __m512 opened[kSpan];
        open_scales(scales, start, span, opened);
        for (int64_t place = 0; place < span; ++place) {
            ahead.template take<kLanes * Format::kBytes>();
            const int64_t at = (start + place) * vectors;
            __m512i units[kUnits];
            Format::open(weights, start + place, units);
            for (int64_t v = 0; v < vectors; ++v) {
                const __m512 sum =
                    block_sum(units, x.words + (at + v) * kUnits, x.offsets[at + v]);
                acc[v] = acc[v] + sum * (opened[place] * x.scales[at + v]);
            }
        }
    }
}

template <class Format, bool kWhole>
void write_rows(const DecodeMatrix &matrix, const Activations &x, Share rest, Soon next, float *out,
                int64_t out_stride) {
    const Strip strip = Strip::of<Format>(matrix, rest);
    __m512 acc[kDecodeMostRows];
    for (int64_t v = 0; v < x.rows; ++v) acc[v] = __m512{};
    if (x.rows == 1)
        add_blocks<Format, kWhole, true>(strip, x, next, acc);
    else
        add_blocks<Format, kWhole, false>(strip, x, next, acc);
    const int64_t row = rest.first, count = strip.count;
    const Vec bias = matrix.bias == nullptr ? Vec{} : load_most(matrix.bias + row, count);
    for (int64_t v = 0; v < x.rows; ++v)
        store_most(out + v * out_stride + row, acc[v] + bias, count);
}

template <class Format>
void multiply_in(const DecodeMatrix &matrix, const Activations &x, Share own, Soon next, float *out,
                 int64_t out_stride) {
    Share rest = own;
    for (; rest.first + kLanes <= rest.last; rest.first += kLanes)
        write_rows<Format, true>(matrix, x, rest, next, out, out_stride);
    if (!rest.is_empty()) write_rows<Format, false>(matrix, x, rest, next, out, out_stride);
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

void multiply_integers(const DecodeMatrix &matrix, const Activations &x, Share own, Soon next,
                       float *out, int64_t out_stride) {
    if (matrix.format == DecodeFormat::kInt8)
        multiply_in<Int8Format>(matrix, x, own, next, out, out_stride);
    else
        multiply_in<Int4Format>(matrix, x, own, next, out, out_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
