// Matrix times vectors in every stored format. A row of the matrix is taken in order, so memory is
// read as one stream; several rows and vectors at a time share what is loaded.
#include "decode_integers.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// A format says how stored weights become vectors, part by part of a step of kParts vectors, and
// how many rows meet four vectors at a time: as many as leave their sums in registers.
template <class T, int64_t kPartsOfStep, int kRowsTogether>
struct FormatOf {
    typedef T Stored;
    static constexpr int64_t kParts = kPartsOfStep;
    static constexpr int kRows = kRowsTogether;
};

struct WideFormat : FormatOf<float, 1, 3> {
    template <int64_t kPart>
    static ANYMAMBA_INLINE Vec open(const float *from) {
        return load(from);
    }
};

// Two halves make a word: a shift gives the even columns, a mask the odd ones. To take the columns
// in order would cost a shuffle for each vector.
struct BFloat16Format : FormatOf<BFloat16, 2, 2> {
    template <int64_t kPart>
    static ANYMAMBA_INLINE Vec open(const BFloat16 *from) {
        UintVec bits;
        memcpy(&bits, from, sizeof(bits));
        return kPart == 0 ? (Vec)(bits << 16) : (Vec)(bits & 0xFFFF0000u);
    }
};

struct Float16Format : FormatOf<Float16, 1, 2> {
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
    const float *data;
    int64_t stride;

    explicit Values(const Activations &x)
        : data(Format::kParts == 2 ? x.paired : x.values),
          stride(Format::kParts == 2 ? x.paired_stride : x.stride) {}
};

// What is left of a row after its last whole step. Pairs are padded with zeros to whole steps.
template <class Format>
float dot_of_rest(const typename Format::Stored *weight, const Values<Format> &x, int64_t vector,
                  int64_t column, int64_t columns) {
    constexpr int64_t kParts = Format::kParts, kStep = kParts * kWidth;
    typename Format::Stored rest[kStep] = {};
    memcpy(rest, weight + column, (size_t)(columns - column) * sizeof(rest[0]));
    float values[kStep] = {};
    const int64_t count = kParts == 2 ? kStep : columns - column;
    memcpy(values, x.data + vector * x.stride + column, (size_t)count * sizeof(float));
    Vec sum = Format::template open<0>(rest) * load(values);
    if constexpr (kParts == 2) sum += Format::template open<1>(rest) * load(values + kWidth);
    return sum_lanes(sum);
}

template <int kRows, int kVectors>
struct Sums {
    Vec at[kVectors * kRows];
};

// One part of a step. Loops over sums are flat and unrolled by name: GCC 12 would unroll them too
// late to keep the sums in registers.
template <class Format, int64_t kPart, int kRows, int kVectors>
ANYMAMBA_INLINE void add_part(const typename Format::Stored *weight, int64_t columns,
                              const float *values, int64_t stride, Sums<kRows, kVectors> *sums) {
    Vec opened[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
        opened[r] = Format::template open<kPart>(weight + r * columns);
#pragma GCC unroll 16
    for (int sum = 0; sum < kVectors * kRows; ++sum)
        sums->at[sum] += opened[sum % kRows] * load(values + sum / kRows * stride + kPart * kWidth);
}

// kRows rows times kVectors vectors. The order of each sum depends on neither.
template <class Format, int kRows, int kVectors>
ANYMAMBA_INLINE void dot(const typename Format::Stored *weight, int64_t columns,
                         const Values<Format> &x, int64_t vector, Ahead ahead,
                         float (*to)[kVectors]) {
    constexpr int64_t kParts = Format::kParts, kStep = kParts * kWidth;
    const float *values = x.data + vector * x.stride;
    Sums<kRows, kVectors> sums = {};
    int64_t column = 0;
    for (; column + kStep <= columns; column += kStep) {
        ahead.template take<kRows * kStep * (int64_t)sizeof(*weight)>();
        add_part<Format, 0>(weight + column, columns, values + column, x.stride, &sums);
        if constexpr (kParts == 2)
            add_part<Format, 1>(weight + column, columns, values + column, x.stride, &sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        if constexpr (kVectors == 4)
            sum_lanes_of_four(sums.at[r], sums.at[kRows + r], sums.at[2 * kRows + r],
                              sums.at[3 * kRows + r], to[r]);
        else
            for (int v = 0; v < kVectors; ++v) to[r][v] = sum_lanes(sums.at[v * kRows + r]);
    }
    if (column == columns) return;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
            to[r][v] += dot_of_rest<Format>(weight + r * columns, x, vector + v, column, columns);
}

// The vectors from `vector` on, at most kVectors of them; returns how many it took.
template <class Format, int kRows, int kVectors>
int64_t write_group(const DecodeMatrix &matrix, const Activations &x, int64_t row, int64_t vector,
                    Ahead ahead, float *out, int64_t out_stride) {
    if constexpr (kVectors > 1)
        if (x.rows - vector < kVectors)
            return write_group<Format, kRows, kVectors - 1>(matrix, x, row, vector, ahead, out,
                                                            out_stride);
    const auto *data = static_cast<const typename Format::Stored *>(matrix.data);
    float sums[kRows][kVectors];
    dot<Format, kRows, kVectors>(data + row * matrix.columns, matrix.columns, Values<Format>(x),
                                 vector, ahead, sums);
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            const float bias = matrix.bias == nullptr ? 0.0f : matrix.bias[row + r];
            out[(vector + v) * out_stride + row + r] = sums[r][v] + bias;
        }
    return kVectors;
}

// The rows from `first` to before `last` as far as groups of kRows go; returns where it ended.
template <class Format, int kRows, int kVectors>
int64_t write_groups(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
                     float *out, int64_t out_stride) {
    const auto *data = static_cast<const typename Format::Stored *>(matrix.data);
    const int64_t columns = matrix.columns, shares = ceil_div(x.rows, kVectors);
    const Lookahead lookahead(kRows * columns * (int64_t)sizeof(*data),
                              ceil_div(columns, Format::kParts * kWidth), shares);
    int64_t row = first;
    for (; row + kRows <= last; row += kRows) {
        int64_t vector = 0;
        for (int64_t share = 0; share < shares; ++share)
            vector += write_group<Format, kRows, kVectors>(
                matrix, x, row, vector, lookahead.behind(data + row * columns, share), out,
                out_stride);
    }
    return row;
}

template <class Format, int kRows, int kVectors>
void multiply_in(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
                 float *out, int64_t out_stride) {
    const int64_t row = write_groups<Format, kRows, kVectors>(matrix, x, first, last, out,
                                                              out_stride);
    if (row < last) write_groups<Format, 1, kVectors>(matrix, x, row, last, out, out_stride);
}

// One vector meets four rows at a time.
template <class Format>
void multiply_floats(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
                     float *out, int64_t out_stride) {
    if (x.rows == 1)
        multiply_in<Format, 4, 1>(matrix, x, first, last, out, out_stride);
    else
        multiply_in<Format, Format::kRows, 4>(matrix, x, first, last, out, out_stride);
}

// Even columns of a step, then its odd ones; zeros up to the next whole step.
void prepare_pairs(int64_t columns, Activations *x) {
    for (int64_t row = 0; row < x->rows; ++row) {
        const float *from = x->values + row * x->stride;
        float *to = x->paired + row * x->paired_stride;
        int64_t column = 0;
        for (; column + 2 * kWidth <= columns; column += 2 * kWidth)
            for (int64_t lane = 0; lane < kWidth; ++lane) {
                to[column + lane] = from[column + 2 * lane];
                to[column + kWidth + lane] = from[column + 2 * lane + 1];
            }
        if (column == columns) continue;
        for (int64_t place = 0; place < 2 * kWidth; ++place) {
            const int64_t at = column + place;
            to[column + place / 2 + place % 2 * kWidth] = at < columns ? from[at] : 0.0f;
        }
    }
}

}  // namespace

void prepare(const DecodeMatrix &matrix, Activations *x) {
    if (matrix.format == DecodeFormat::kBFloat16) prepare_pairs(matrix.columns, x);
    if (matrix.format == DecodeFormat::kInt8) prepare_integers<Int8Format>(matrix.columns, x);
    if (matrix.format == DecodeFormat::kInt4) prepare_integers<Int4Format>(matrix.columns, x);
}

void multiply(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
              float *out, int64_t out_stride) {
    switch (matrix.format) {
        case DecodeFormat::kFloat32:
            return multiply_floats<WideFormat>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kBFloat16:
            return multiply_floats<BFloat16Format>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kFloat16:
            return multiply_floats<Float16Format>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kInt8:
            return multiply_integers<Int8Format>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kInt4:
            return multiply_integers<Int4Format>(matrix, x, first, last, out, out_stride);
    }
}

int64_t row_bytes(const DecodeMatrix &matrix) {
    const int64_t blocks = ceil_div(matrix.columns, kDecodeBlock);
    switch (matrix.format) {
        case DecodeFormat::kFloat32:
            return matrix.columns * (int64_t)sizeof(float);
        case DecodeFormat::kBFloat16:
        case DecodeFormat::kFloat16:
            return matrix.columns * (int64_t)sizeof(BFloat16);
        case DecodeFormat::kInt8:
            return blocks * Int8Format::kBytes;
        case DecodeFormat::kInt4:
            return blocks * Int4Format::kBytes;
    }
    return 0;
}

void ask_for(const DecodeMatrix &matrix, int64_t first, int64_t last) {
    const auto *data = static_cast<const char *>(matrix.data);
    const int64_t bytes = row_bytes(matrix);
    for (int64_t place = first * bytes; place < last * bytes; place += 64)
        __builtin_prefetch(data + place, 0, 2);
}

void read_matrix_row(const DecodeMatrix &matrix, int64_t row, float *to) {
    const int64_t columns = matrix.columns, blocks = ceil_div(columns, kDecodeBlock);
    const auto *bytes = static_cast<const uint8_t *>(matrix.data);
    const auto *scales = static_cast<const BFloat16 *>(matrix.scales) + row * blocks;
    for (int64_t column = 0; column < columns; ++column) {
        const int64_t block = column / kDecodeBlock, place = column % kDecodeBlock;
        const int64_t index = row * columns + column;
        switch (matrix.format) {
            case DecodeFormat::kFloat32:
                to[column] = static_cast<const float *>(matrix.data)[index];
                break;
            case DecodeFormat::kBFloat16:
                to[column] = widen(static_cast<const BFloat16 *>(matrix.data)[index]);
                break;
            case DecodeFormat::kFloat16:
                to[column] = widen(static_cast<const Float16 *>(matrix.data)[index]);
                break;
            case DecodeFormat::kInt8:
                to[column] =
                    widen(scales[block]) *
                    (float)(int8_t)bytes[(row * blocks + block) * kDecodeBlock + place];
                break;
            case DecodeFormat::kInt4: {
                const uint8_t both = bytes[(row * blocks + block) * 16 + place % 16];
                const int32_t bits = place < 16 ? both & 15 : both >> 4;
                to[column] = widen(scales[block]) * (float)((bits ^ 8) - 8);
                break;
            }
        }
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
