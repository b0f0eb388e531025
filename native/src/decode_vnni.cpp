// Integer matrices times vectors where the CPU adds four products of bytes to a lane in one
// instruction (VPDPBUSD). A block of a panel is opened into registers, where all vectors meet it.
//
// Activations are bytes with a scale for every stretch of blocks: one block beside int8, whose
// rounding is of the same size, four beside int4, where it is lost in that of the weights. A scale
// for every block is one multiplication more beside the eight of the bytes.
#include <immintrin.h>

#include "decode_panels.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Words of four activations, and vectors of four columns of sixteen rows, that make a block.
constexpr int64_t kUnits = 8;
constexpr float kLargest = 127.0f;

// A format says how what is loaded, four columns of a panel or eight, becomes units, each four
// columns, kLoads apart. Their bytes are the weights plus kShift: VPDPBUSD takes bytes without a sign
// on one side.
struct Int8Format {
    static constexpr int64_t kBytes = 32, kStretch = 1, kLoads = 8;
    static constexpr int kStreams = streams_of(DecodeFormat::kInt8);
    static constexpr int32_t kShift = 128;

    static ANYMAMBA_INLINE void open(__m512i stored, __m512i *units) {
        units[0] = _mm512_xor_si512(stored, _mm512_set1_epi8((char)kShift));
    }
};

struct Int4Format {
    static constexpr int64_t kBytes = 16, kStretch = 4, kLoads = 4;
    static constexpr int kStreams = streams_of(DecodeFormat::kInt4);
    static constexpr int32_t kShift = 8;

    static ANYMAMBA_INLINE void open(__m512i stored, __m512i *units) {
        const __m512i shift = _mm512_set1_epi8(kShift), nibble = _mm512_set1_epi8(15);
        constexpr int kXorThenAnd = 0x28;  // (a ^ b) & c
        const __m512i high = _mm512_srli_epi32(stored, 4);
        units[0] = _mm512_ternarylogic_epi32(stored, shift, nibble, kXorThenAnd);
        units[1] = _mm512_ternarylogic_epi32(high, shift, nibble, kXorThenAnd);
    }
};

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

// parts[v] = or += the sums of a block, times its scales, for kCount vectors from `first` on. A unit
// meets all vectors before the next one is opened: products that follow each other then wait for
// none of their neighbours, and more of them are under way than the core could look ahead for.
template <class Format, int64_t kCount, bool kAdds>
ANYMAMBA_INLINE void add_block(const Panels<Format::kBytes> &panels, const Activations &x,
                               int64_t panel, int64_t place, int64_t first, __m512 *parts) {
    constexpr int64_t kLoads = Format::kLoads;
    const uint8_t *block = panels.block(panel, place);
    const __m512 scales = open_scales(panels.scales_of(panel, place));
    const int64_t at = place * x.rows + first;
    const int32_t *words = x.words + at * kUnits;
    __m512i sums[kCount];
#pragma GCC unroll 8
    for (int64_t v = 0; v < kCount; ++v) sums[v] = _mm512_set1_epi32(x.offsets[at + v]);
#pragma GCC unroll 8
    for (int64_t load = 0; load < kLoads; ++load) {
        __m512i units[kUnits / kLoads];
        Format::open(fetch<__m512i>(block + load * kFourColumns), units);
#pragma GCC unroll 2
        for (int64_t part = 0; part < kUnits / kLoads; ++part)
#pragma GCC unroll 8
            for (int64_t v = 0; v < kCount; ++v)
                sums[v] = _mm512_dpbusd_epi32(
                    sums[v], units[part],
                    _mm512_set1_epi32(words[v * kUnits + part * kLoads + load]));
    }
#pragma GCC unroll 8
    for (int64_t v = 0; v < kCount; ++v) {
        const __m512 sum = _mm512_cvtepi32_ps(sums[v]);
        parts[v] = kAdds ? parts[v] + sum * scales : sum * scales;
    }
}

// The blocks of a stretch; only the last one of a row may have fewer than the others.
template <class Format>
ANYMAMBA_INLINE Share blocks_of(int64_t stretch, int64_t blocks) {
    const int64_t first = stretch * Format::kStretch;
    if (Format::kStretch == 1) return {first, first + 1};
    return {first, first + smaller(Format::kStretch, blocks - first)};
}

// sums[s] += what a stretch adds to kTogether panels, `apart` from each other, for one vector. The
// panels take turns block by block: memory comes soonest so.
template <class Format, int kTogether>
ANYMAMBA_INLINE void add_stretches(const Panels<Format::kBytes> &panels, const Activations &x,
                                   int64_t panel, int64_t apart, int64_t stretch, __m512 *sums) {
    const Share own = blocks_of<Format>(stretch, panels.blocks);
    __m512 parts[kTogether];
#pragma GCC unroll 4
    for (int stream = 0; stream < kTogether; ++stream)
        add_block<Format, 1, false>(panels, x, panel + stream * apart, own.first, 0,
                                    parts + stream);
    for (int64_t place = own.first + 1; place < own.last; ++place)
#pragma GCC unroll 4
        for (int stream = 0; stream < kTogether; ++stream)
            add_block<Format, 1, true>(panels, x, panel + stream * apart, place, 0,
                                       parts + stream);
#pragma GCC unroll 4
    for (int stream = 0; stream < kTogether; ++stream)
        sums[stream] = sums[stream] + parts[stream] * x.scales[stretch];
}

// The order of a sum, for one vector and for several: stretches one after the other, and in a
// stretch the blocks, each of them exact.
template <class Format>
void multiply_one(const DecodeMatrix &matrix, const Activations &x, Rows rows, float *out) {
    const Panels<Format::kBytes> panels(matrix);
    const int64_t stretches = ceil_div(panels.blocks, Format::kStretch);
    read_in_streams<Format::kStreams>(panels_of(rows), [&](auto streams, int64_t first, int64_t apart) {
        constexpr int kTogether = decltype(streams)::value;
        __m512 sums[kTogether] = {};
        for (int64_t stretch = 0; stretch < stretches; ++stretch)
            add_stretches<Format, kTogether>(panels, x, first, apart, stretch, sums);
        for (int stream = 0; stream < kTogether; ++stream)
            write_sums(matrix, rows.at(stream), first + stream * apart, sums[stream], out);
    });
}

// sums[v] += what a stretch adds for kCount vectors from `first` on; the first of all vectors ask
// for what comes behind it.
template <class Format, int64_t kCount>
ANYMAMBA_INLINE void add_stretch(const Panels<Format::kBytes> &panels, const Activations &x,
                                 int64_t panel, int64_t stretch, int64_t first, __m512 *sums) {
    const Share own = blocks_of<Format>(stretch, panels.blocks);
    const int64_t at = stretch * x.rows + first;
    __m512 parts[kCount];
    if (first == 0) ask_for_block(panels.block(panel, own.first), panels.kBlock);
    add_block<Format, kCount, false>(panels, x, panel, own.first, first, parts);
    for (int64_t place = own.first + 1; place < own.last; ++place) {
        if (first == 0) ask_for_block(panels.block(panel, place), panels.kBlock);
        add_block<Format, kCount, true>(panels, x, panel, place, first, parts);
    }
#pragma GCC unroll 8
    for (int64_t v = 0; v < kCount; ++v) sums[v] = sums[v] + parts[v] * x.scales[at + v];
}

// Vectors whose sums stay in registers.
constexpr int64_t kVectors = 8;

// A panel times the vectors from `first` on, kCount at a time.
template <class Format, int64_t kCount>
ANYMAMBA_INLINE void multiply_panel(const DecodeMatrix &matrix,
                                    const Panels<Format::kBytes> &panels, const Activations &x,
                                    Share own, int64_t panel, int64_t first, float *out,
                                    int64_t out_stride) {
    const int64_t stretches = ceil_div(panels.blocks, Format::kStretch);
    for (; first + kCount <= x.rows; first += kCount) {
        __m512 sums[kCount] = {};
        for (int64_t stretch = 0; stretch < stretches; ++stretch)
            add_stretch<Format, kCount>(panels, x, panel, stretch, first, sums);
#pragma GCC unroll 8
        for (int64_t v = 0; v < kCount; ++v)
            write_sums(matrix, own, panel, sums[v], out + (first + v) * out_stride);
    }
    if constexpr (kCount > 1)
        multiply_panel<Format, kCount / 2>(matrix, panels, x, own, panel, first, out, out_stride);
}

template <class Format>
void multiply_some(const DecodeMatrix &matrix, const Activations &x, Share own, float *out,
                   int64_t out_stride) {
    const Panels<Format::kBytes> panels(matrix);
    const Share all = panels_of(own);
    for (int64_t panel = all.first; panel < all.last; ++panel)
        multiply_panel<Format, kVectors>(matrix, panels, x, own, panel, 0, out, out_stride);
}

// The largest of all lanes, in each of them.
ANYMAMBA_INLINE __m512i spread_largest(__m512i value) {
    value = _mm512_max_epi32(value, _mm512_shuffle_i32x4(value, value, 0x4E));
    value = _mm512_max_epi32(value, _mm512_shuffle_i32x4(value, value, 0xB1));
    value = _mm512_max_epi32(value, _mm512_shuffle_epi32(value, _MM_PERM_BADC));
    return _mm512_max_epi32(value, _mm512_shuffle_epi32(value, _MM_PERM_CDAB));
}

// The scale of a stretch of activations, and what its entries are multiplied with to become bytes.
struct Rounding {
    float scale;
    Vec inverse;
    __mmask16 kept;  // no lanes of a stretch that becomes zeros
};

// A stretch with NaN or infinity has the scale NaN, which makes every product NaN; its bytes are
// zeros, because their sum has to fit. So are those of a stretch below 1e-30, long before its inverse,
// which is then not used, becomes infinite.
template <int64_t kColumns>
ANYMAMBA_INLINE Rounding rounding_of(const float *values) {
    // As bits, the sizes of floats are in order: infinity above all numbers, and NaN above it.
    const __m512i size = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int64_t place = 0; place < kColumns; place += kWidth)
        most = _mm512_max_epi32(most, _mm512_and_si512(fetch<__m512i>(values + place), size));
    const __m128i bits = _mm512_castsi512_si128(spread_largest(most));
    const __m128 largest = _mm_castsi128_ps(bits);
    const bool is_finite = _mm_cvtsi128_si32(bits) < 0x7F800000;
    const bool is_kept = is_finite && _mm_cvtss_f32(largest) >= 1e-30f;
    const __m128 inverse = _mm_div_ss(_mm_set_ss(kLargest), largest);
    return {is_finite ? _mm_cvtss_f32(largest) / kLargest : __builtin_nanf(""),
            (Vec)_mm512_broadcastss_ps(inverse), (__mmask16)(is_kept ? 0xFFFF : 0)};
}

// One block as bytes; returns their sum.
ANYMAMBA_INLINE int32_t prepare_block(const float *values, const Rounding &rounding,
                                      int32_t *words) {
    __m128i halves[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
        halves[half] = _mm512_cvtepi32_epi8(
            _mm512_maskz_cvtps_epi32(rounding.kept, load(values + half * kWidth) * rounding.inverse));
    const __m256i bytes = _mm256_set_m128i(halves[1], halves[0]);
    memcpy(words, &bytes, sizeof(bytes));
    const __m256i fours =
        _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    __m128i sum =
        _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}

template <class Format>
void prepare_in(int64_t columns, Activations *x) {
    constexpr int64_t kColumns = Format::kStretch * kDecodeBlock;
    for (int64_t stretch = 0; stretch < ceil_div(columns, kColumns); ++stretch)
        for (int64_t row = 0; row < x->rows; ++row) {
            const float *from = x->values + row * x->stride + stretch * kColumns;
            const int64_t left = columns - stretch * kColumns;
            float part[kColumns];
            if (left < kColumns) {
                memset(part, 0, sizeof(part));
                memcpy(part, from, (size_t)left * sizeof(float));
                from = part;
            }
            const Rounding rounding = rounding_of<kColumns>(from);
            x->scales[stretch * x->rows + row] = rounding.scale;
            const Share own = blocks_of<Format>(stretch, ceil_div(columns, kDecodeBlock));
            for (int64_t place = own.first; place < own.last; ++place, from += kDecodeBlock) {
                const int64_t at = place * x->rows + row;
                x->offsets[at] =
                    -Format::kShift * prepare_block(from, rounding, x->words + at * kUnits);
            }
        }
}

}  // namespace

void prepare_integers(const DecodeMatrix &matrix, Activations *x) {
    with_format<Int8Format, Int4Format>(matrix, [&](auto format) {
        prepare_in<decltype(format)>(matrix.columns, x);
    });
}

void multiply_integers(const DecodeMatrix &matrix, const Activations &x, Rows rows, float *out,
                       int64_t out_stride) {
    with_format<Int8Format, Int4Format>(matrix, [&](auto format) {
        if (x.rows == 1)
            multiply_one<decltype(format)>(matrix, x, rows, out);
        else
            multiply_some<decltype(format)>(matrix, x, rows.own, out, out_stride);
    });
}

}  // namespace anymamba::ANYMAMBA_VARIANT
