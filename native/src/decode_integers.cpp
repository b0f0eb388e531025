// Integer matrices times vectors: eight blocks of a panel are opened at a time, then meet all
// vectors, four by four.
#include "decode_integers.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

constexpr int64_t kGroups = kPanel / kLanes;
// Blocks that are opened together.
constexpr int64_t kSpan = 8;
// Vectors that share a load of a unit; with two groups of rows their sums fit into the registers.
constexpr int64_t kTogether = 4;

// Some blocks of a panel, opened.
template <class Format>
struct Opened {
    Shorts units[kSpan][Format::kUnits][kGroups];
    Floats scales[kSpan][kGroups];
};

ANYMAMBA_INLINE Floats open_scales(const uint8_t *scales, int64_t group) {
    const Eighths halves = fetch<Eighths>(scales + group * (int64_t)sizeof(Eighths));
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// acc += opened blocks times kVectors vectors. The order of a sum: blocks one after the other, each of
// them exact.
template <class Format, int64_t kVectors>
ANYMAMBA_INLINE void add_vectors(const Opened<Format> &opened, const Activations &x,
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
                    sum[v][g] += Format::product(opened.units[place][unit][g], word);
            }
        for (int64_t v = 0; v < kVectors; ++v)
            for (int64_t g = 0; g < kGroups; ++g) {
                const Ints total = Format::total(sum[v][g], x.offsets[at + v]);
                held[v][g] += __builtin_convertvector(total, Floats) *
                              (opened.scales[place][g] * x.scales[at + v]);
            }
    }
    for (int64_t v = 0; v < kVectors; ++v)
        for (int64_t g = 0; g < kGroups; ++g) acc[vector + v][g] = held[v][g];
}

// The vectors from `vector` on, at most kVectors of them; returns how many it took.
template <class Format, int64_t kVectors>
int64_t add_group(const Opened<Format> &opened, const Activations &x, int64_t vector,
                  int64_t block, int64_t count, Floats (*acc)[kGroups]) {
    if constexpr (kVectors > 1)
        if (x.rows - vector < kVectors)
            return add_group<Format, kVectors - 1>(opened, x, vector, block, count, acc);
    add_vectors<Format, kVectors>(opened, x, vector, block, count, acc);
    return kVectors;
}

// Those of a panel's sums that belong to `own`, with their bias.
ANYMAMBA_INLINE void write_sums(const DecodeMatrix &matrix, Share own, int64_t panel,
                                const Floats *sums, float *out) {
    float all[kPanel];
    memcpy(all, sums, sizeof(all));
    const Share places = places_of(own, panel);
    for (int64_t place = places.first; place < places.last; ++place) {
        const int64_t row = panel * kPanel + place;
        out[row] = matrix.bias == nullptr ? all[place] : all[place] + matrix.bias[row];
    }
}

// Several vectors: units are opened into memory, where all vectors meet them.
template <class Format>
void multiply_some(const DecodeMatrix &matrix, const Activations &x, Share own, float *out,
                   int64_t out_stride) {
    const Panels<Format::kBytes> panels(matrix);
    const Share all = panels_of(own);
    Floats acc[kDecodeMostRows][kGroups];
    Opened<Format> opened;
    for (int64_t panel = all.first; panel < all.last; ++panel) {
        for (int64_t v = 0; v < x.rows; ++v)
            for (int64_t g = 0; g < kGroups; ++g) acc[v][g] = Floats{};
        for (int64_t block = 0; block < panels.blocks; block += kSpan) {
            const int64_t span = smaller(kSpan, panels.blocks - block);
            for (int64_t place = 0; place < span; ++place) {
                const uint8_t *stored = panels.block(panel, block + place);
                ask_for_block(stored, panels.kBlock);
                for (int64_t g = 0; g < kGroups; ++g) {
                    opened.scales[place][g] =
                        open_scales(panels.scales_of(panel, block + place), g);
                    Shorts units[Format::kUnits];
                    Format::open(stored + g * (int64_t)sizeof(Words), units);
                    for (int64_t unit = 0; unit < Format::kUnits; ++unit)
                        opened.units[place][unit][g] = units[unit];
                }
            }
            for (int64_t vector = 0; vector < x.rows;)
                vector += add_group<Format, kTogether>(opened, x, vector, block, span, acc);
        }
        for (int64_t v = 0; v < x.rows; ++v)
            write_sums(matrix, own, panel, acc[v], out + v * out_stride);
    }
}

// One vector: units are used as they are opened.
template <class Format>
void multiply_one(const DecodeMatrix &matrix, const Activations &x, Rows rows, float *out) {
    const Panels<Format::kBytes> panels(matrix);
    read_in_streams<Format::kStreams>(panels_of(rows), [&](auto streams, int64_t first, int64_t apart) {
        constexpr int kRead = decltype(streams)::value;
        Floats sums[kRead][kGroups] = {};
        for (int64_t place = 0; place < panels.blocks; ++place)
            for (int stream = 0; stream < kRead; ++stream)
                for (int64_t g = 0; g < kGroups; ++g) {
                    const int64_t panel = first + stream * apart;
                    Shorts units[Format::kUnits];
                    Format::open(panels.block(panel, place) + g * (int64_t)sizeof(Words), units);
                    typename Format::Sum sum = Format::start(x.offsets[place]);
                    const int32_t *words = x.words + place * Format::kUnits;
#pragma GCC unroll 16
                    for (int64_t unit = 0; unit < Format::kUnits; ++unit)
                        sum += Format::product(units[unit], Ints{} + words[unit]);
                    const Ints total = Format::total(sum, x.offsets[place]);
                    const Floats scales = open_scales(panels.scales_of(panel, place), g);
                    sums[stream][g] +=
                        __builtin_convertvector(total, Floats) * (scales * x.scales[place]);
                }
        for (int stream = 0; stream < kRead; ++stream)
            write_sums(matrix, rows.at(stream), first + stream * apart, sums[stream], out);
    });
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
