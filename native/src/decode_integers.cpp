// Integer matrices times vectors: sixteen rows and eight blocks are opened at a time, then meet all
// vectors, four by four.
#include "decode_integers.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Blocks whose scales are read together: sixteen bytes of bfloat16.
constexpr int64_t kSpan = 8;
// Vectors that share a load of a unit; with two groups of rows their sums fit into the registers.
constexpr int64_t kTogether = 4;

// Some blocks of kGroups times eight rows, opened.
template <class Format, int64_t kGroups>
struct Panel {
    Shorts units[kSpan][Format::kUnits][kGroups];
    Floats scales[kSpan][kGroups];
};

// acc += this panel times kVectors vectors. The order of a sum: blocks one after the other, each of
// them exact.
template <class Format, int64_t kGroups, int64_t kVectors>
ANYMAMBA_INLINE void add_vectors(const Panel<Format, kGroups> &panel, const Activations &x,
                                 int64_t vector, int64_t block, int64_t count,
                                 Floats (*acc)[kGroups]) {
    Floats held[kVectors][kGroups];
    for (int64_t v = 0; v < kVectors; ++v)
        for (int64_t g = 0; g < kGroups; ++g) held[v][g] = acc[vector + v][g];
    for (int64_t place = 0; place < count; ++place) {
        const int64_t at = (block + place) * x.rows + vector;
        const int32_t *words = x.words + at * Format::kUnits;
        typename Format::Sum sum[kVectors][kGroups];
        for (int64_t v = 0; v < kVectors; ++v)
            for (int64_t g = 0; g < kGroups; ++g) sum[v][g] = Format::start(x.offsets[at + v]);
#pragma GCC unroll 2
        for (int64_t unit = 0; unit < Format::kUnits; ++unit)
            for (int64_t v = 0; v < kVectors; ++v) {
                const Ints word = Ints{} + words[v * Format::kUnits + unit];
                for (int64_t g = 0; g < kGroups; ++g)
                    sum[v][g] += Format::product(panel.units[place][unit][g], word);
            }
        for (int64_t v = 0; v < kVectors; ++v)
            for (int64_t g = 0; g < kGroups; ++g) {
                const Ints total = Format::total(sum[v][g], x.offsets[at + v]);
                held[v][g] += __builtin_convertvector(total, Floats) *
                              (panel.scales[place][g] * x.scales[at + v]);
            }
    }
    for (int64_t v = 0; v < kVectors; ++v)
        for (int64_t g = 0; g < kGroups; ++g) acc[vector + v][g] = held[v][g];
}

// The vectors from `vector` on, at most kVectors of them; returns how many it took.
template <class Format, int64_t kGroups, int64_t kVectors>
int64_t add_group(const Panel<Format, kGroups> &panel, const Activations &x, int64_t vector,
                  int64_t block, int64_t count, Floats (*acc)[kGroups]) {
    if constexpr (kVectors > 1)
        if (x.rows - vector < kVectors)
            return add_group<Format, kGroups, kVectors - 1>(panel, x, vector, block, count, acc);
    add_vectors<Format, kGroups, kVectors>(panel, x, vector, block, count, acc);
    return kVectors;
}

// The scales of eight blocks, or of the last few, from lanes of pairs.
template <class Rows>
ANYMAMBA_INLINE void open_scales(const Rows &scales, int64_t block, int64_t count, Floats *to) {
    Words pairs[kSpan / 2];
    if (count == kSpan) {
        scales.turn(block * (int64_t)sizeof(BFloat16), pairs);
    } else {
        // What follows the last scale may not be ours to read.
        uint8_t part[kLanes][16] = {};
        for (int64_t lane = 0; lane < kLanes; ++lane)
            memcpy(part[lane], scales.row(lane) + block * sizeof(BFloat16),
                   (size_t)count * sizeof(BFloat16));
        EightRows<true>{{part[0], 16, kLanes}}.turn(0, pairs);
    }
    for (int64_t pair = 0; pair < kSpan / 2; ++pair) {
        to[2 * pair] = (Floats)(pairs[pair] << 16);
        to[2 * pair + 1] = (Floats)(pairs[pair] & 0xFFFF0000u);
    }
}

// kGroups times eight rows of a matrix; without kWhole only the first `count` of them.
template <class Format, int64_t kGroups, bool kWhole>
struct Strip {
    const uint8_t *data, *scales, *end;  // end: of the rows that are read together with these
    int64_t blocks, count;
    Soon next;  // what is read behind them

    // The first of the rows in `rest`.
    Strip(const DecodeMatrix &matrix, Share rest, Soon then)
        : blocks(ceil_div(matrix.columns, kDecodeBlock)),
          count(smaller(kGroups * kLanes, rest.last - rest.first)),
          next(then) {
        data = static_cast<const uint8_t *>(matrix.data) + rest.first * row_bytes();
        end = data + (rest.last - rest.first) * row_bytes();
        scales = static_cast<const uint8_t *>(matrix.scales) + rest.first * scale_bytes();
    }
    int64_t row_bytes() const { return blocks * Format::kBytes; }
    int64_t scale_bytes() const { return blocks * (int64_t)sizeof(BFloat16); }
    Ahead<false> ahead() const {
        const int64_t bytes = kGroups * kLanes * row_bytes();
        return Lookahead<false>(end, next, bytes, kGroups * blocks, 1).behind(data, 0);
    }

    ANYMAMBA_INLINE EightRows<kWhole> weights_of(int64_t group) const {
        const int64_t skip = group * kLanes;
        return {{data + skip * row_bytes(), row_bytes(), count - skip}};
    }
    ANYMAMBA_INLINE EightRows<kWhole> scales_of(int64_t group) const {
        const int64_t skip = group * kLanes;
        return {{scales + skip * scale_bytes(), scale_bytes(), count - skip}};
    }
};

// Several vectors: units are opened into memory, where all vectors meet them.
template <class Format, int64_t kGroups, bool kWhole>
ANYMAMBA_INLINE void add_all(const Strip<Format, kGroups, kWhole> &strip, const Activations &x,
                             Floats (*acc)[kGroups]) {
    Panel<Format, kGroups> panel;
    Ahead<false> ahead = strip.ahead();
    for (int64_t block = 0; block < strip.blocks; block += kSpan) {
        const int64_t span = smaller(kSpan, strip.blocks - block);
        for (int64_t g = 0; g < kGroups; ++g) {
            Floats scales[kSpan];
            open_scales(strip.scales_of(g), block, span, scales);
            for (int64_t place = 0; place < kSpan; ++place)
                panel.scales[place][g] = scales[place];
            for (int64_t place = 0; place < span; ++place) {
                ahead.template take<kLanes * Format::kBytes>();
                Shorts units[Format::kUnits];
                Format::open(strip.weights_of(g), block + place, units);
                for (int64_t unit = 0; unit < Format::kUnits; ++unit)
                    panel.units[place][unit][g] = units[unit];
            }
        }
        for (int64_t vector = 0; vector < x.rows;)
            vector += add_group<Format, kGroups, kTogether>(panel, x, vector, block, span, acc);
    }
}

// One vector: units are used as they are opened.
template <class Format, int64_t kGroups, bool kWhole>
ANYMAMBA_INLINE void add_one(const Strip<Format, kGroups, kWhole> &strip, const Activations &x,
                             Floats (*acc)[kGroups]) {
    Ahead<false> ahead = strip.ahead();
    for (int64_t block = 0; block < strip.blocks; block += kSpan) {
        const int64_t span = smaller(kSpan, strip.blocks - block);
        for (int64_t g = 0; g < kGroups; ++g) {
            Floats scales[kSpan], held = acc[0][g];
            open_scales(strip.scales_of(g), block, span, scales);
            for (int64_t place = 0; place < span; ++place) {
                ahead.template take<kLanes * Format::kBytes>();
                const int64_t at = block + place;
                const int32_t *words = x.words + at * Format::kUnits;
                Shorts units[Format::kUnits];
                Format::open(strip.weights_of(g), at, units);
                auto sum = Format::start(x.offsets[at]);
#pragma GCC unroll 16
                for (int64_t unit = 0; unit < Format::kUnits; ++unit)
                    sum += Format::product(units[unit], Ints{} + words[unit]);
                const Ints total = Format::total(sum, x.offsets[at]);
                held += __builtin_convertvector(total, Floats) * (scales[place] * x.scales[at]);
            }
            acc[0][g] = held;
        }
    }
}

template <class Format, int64_t kGroups, bool kWhole>
void write_rows(const DecodeMatrix &matrix, const Activations &x, Share rest, Soon next, float *out,
                int64_t out_stride) {
    const Strip<Format, kGroups, kWhole> strip(matrix, rest, next);
    const int64_t row = rest.first;
    Floats acc[kDecodeMostRows][kGroups];
    for (int64_t v = 0; v < x.rows; ++v)
        for (int64_t g = 0; g < kGroups; ++g) acc[v][g] = Floats{};
    if (x.rows == 1)
        add_one(strip, x, acc);
    else
        add_all(strip, x, acc);
    for (int64_t v = 0; v < x.rows; ++v)
        for (int64_t g = 0; g < kGroups; ++g) {
            const int64_t skip = g * kLanes, lanes = smaller(kLanes, strip.count - skip);
            float sums[kLanes];
            memcpy(sums, &acc[v][g], sizeof(sums));
            float *to = out + v * out_stride + row + skip;
            for (int64_t lane = 0; lane < lanes; ++lane)
                to[lane] = matrix.bias == nullptr ? sums[lane]
                                                  : sums[lane] + matrix.bias[row + skip + lane];
        }
}

// One block of activations as integers. A block with NaN or infinity makes every product NaN.
template <class Format>
ANYMAMBA_INLINE void prepare_block(const float *values, int32_t *words, float *scale,
                                   int32_t *offset) {
    // As bits, the sizes of floats are in order: infinity above all numbers, and NaN above it.
    int32_t bits = 0;
    for (int64_t place = 0; place < kDecodeBlock; ++place) {
        int32_t size;
        memcpy(&size, values + place, sizeof(size));
        size &= 0x7FFFFFFF;
        bits = size > bits ? size : bits;
    }
    float largest;
    memcpy(&largest, &bits, sizeof(largest));
    const bool is_finite = bits < 0x7F800000;
    *scale = is_finite ? largest / Format::kLargest : __builtin_nanf("");
    // Below this, the inverse would be infinite; the block is zero to rounding.
    const float inverse = is_finite && largest >= 1e-30f ? Format::kLargest / largest : 0.0f;
    int32_t rounded[kDecodeBlock];
    for (int64_t place = 0; place < kDecodeBlock; place += kWidth) {
        const Vec value = is_finite ? load(values + place) : Vec{};
        const IntVec whole = (IntVec)(value * inverse + kRounder) - 0x4B400000;
        memcpy(rounded + place, &whole, sizeof(whole));
    }
    *offset = Format::pack(rounded, words);
}

template <class Format>
void prepare_in(int64_t columns, Activations *x) {
    const int64_t whole = columns / kDecodeBlock, blocks = ceil_div(columns, kDecodeBlock);
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t row = 0; row < x->rows; ++row) {
            const float *from = x->values + row * x->stride + block * kDecodeBlock;
            const int64_t at = block * x->rows + row;
            int32_t *words = x->words + at * Format::kUnits;
            if (block < whole) {
                prepare_block<Format>(from, words, x->scales + at, x->offsets + at);
            } else {
                float part[kDecodeBlock] = {};
                memcpy(part, from, (size_t)(columns % kDecodeBlock) * sizeof(float));
                prepare_block<Format>(part, words, x->scales + at, x->offsets + at);
            }
        }
}

template <class Format>
void multiply_in(const DecodeMatrix &matrix, const Activations &x, Share own, Soon next, float *out,
                 int64_t out_stride) {
    Share rest = own;
    for (; rest.first + 2 * kLanes <= rest.last; rest.first += 2 * kLanes)
        write_rows<Format, 2, true>(matrix, x, rest, next, out, out_stride);
    if (rest.first + kLanes <= rest.last) {
        write_rows<Format, 1, true>(matrix, x, rest, next, out, out_stride);
        rest.first += kLanes;
    }
    if (!rest.is_empty()) write_rows<Format, 1, false>(matrix, x, rest, next, out, out_stride);
}

}  // namespace

void prepare_integers(const DecodeMatrix &matrix, Activations *x) {
    if (matrix.format == DecodeFormat::kInt8)
        prepare_in<Int8Format>(matrix.columns, x);
    else
        prepare_in<Int4Format>(matrix.columns, x);
}

void multiply_integers(const DecodeMatrix &matrix, const Activations &x, Share own, Soon next,
                       float *out, int64_t out_stride) {
    if (matrix.format == DecodeFormat::kInt8)
        multiply_in<Int8Format>(matrix, x, own, next, out, out_stride);
    else
        multiply_in<Int4Format>(matrix, x, own, next, out, out_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
