// Matrix times vectors in every stored format. A row of the matrix is taken in order, so memory is
// read as one stream; several rows and vectors at a time share what is loaded.
#include "decode_integers.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

constexpr int64_t kAheadBytes = 4096;

template <class T>
ANYMAMBA_INLINE Vec load_weights(const T *from) {
    return load(from);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// By name, because GCC 12 widens the vector in halves.
ANYMAMBA_INLINE Vec load_weights(const BFloat16 *from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
}

// As `load`: sign and exponent in their places, the exponent moved by 112, no end of the numbers.
ANYMAMBA_INLINE Vec load_weights(const Float16 *from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    const IntVec bits = (IntVec)_mm256_slli_epi32(_mm256_cvtepi16_epi32(half), 13);
    const Vec scaled = (Vec)(bits & (int32_t)0x8FFFE000) * 5.192296858534828e33f;
    const IntVec is_end = (bits & 0x0F800000) == 0x0F800000;
    return (Vec)((IntVec)scaled | (is_end & 0x7F800000));
}
#endif

template <class T>
struct FloatRows {
    const T *data;
    int64_t columns;

    explicit FloatRows(const DecodeMatrix &matrix)
        : data(static_cast<const T *>(matrix.data)), columns(matrix.columns) {}

    int64_t row_bytes() const { return columns * (int64_t)sizeof(T); }

    template <int kRows, int kVectors>
    ANYMAMBA_INLINE void dot(int64_t row, const Activations &x, int64_t vector, Ahead ahead,
                             float (*sums)[kVectors]) const {
        const T *weight = data + row * columns;
        const float *values = x.values + vector * x.stride;
        Vec acc[kRows][kVectors];
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Vec{};
        int64_t column = 0;
        for (; column + kWidth <= columns; column += kWidth) {
            ahead.template take<kRows * kWidth * (int64_t)sizeof(T)>();
            Vec value[kVectors];
            for (int v = 0; v < kVectors; ++v) value[v] = load(values + v * x.stride + column);
            for (int r = 0; r < kRows; ++r) {
                const Vec w = load_weights(weight + r * columns + column);
                for (int v = 0; v < kVectors; ++v) acc[r][v] += w * value[v];
            }
        }
        if (column < columns)
            for (int r = 0; r < kRows; ++r) {
                const int64_t rest = columns - column;
                const Vec w = load_part(weight + r * columns + column, rest);
                for (int v = 0; v < kVectors; ++v)
                    acc[r][v] += w * load_part(values + v * x.stride + column, rest);
            }
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVectors; ++v) sums[r][v] = sum_lanes(acc[r][v]);
    }
};

template <int kRows, int kVectors, class Rows>
void write_sums(const Rows &rows, const DecodeMatrix &matrix, const Activations &x, int64_t row,
                int64_t vector, Ahead ahead, float *out, int64_t out_stride) {
    float sums[kRows][kVectors];
    rows.template dot<kRows, kVectors>(row, x, vector, ahead, sums);
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            const float bias = matrix.bias == nullptr ? 0.0f : matrix.bias[row + r];
            out[(vector + v) * out_stride + row + r] = sums[r][v] + bias;
        }
}

// The vectors from `vector` on, at most kVectors of them; returns how many it took.
template <int kRows, int kVectors, class Rows>
int64_t write_group(const Rows &rows, const DecodeMatrix &matrix, const Activations &x, int64_t row,
                    int64_t vector, Ahead ahead, float *out, int64_t out_stride) {
    if constexpr (kVectors > 1)
        if (x.rows - vector < kVectors)
            return write_group<kRows, kVectors - 1>(rows, matrix, x, row, vector, ahead, out,
                                                    out_stride);
    write_sums<kRows, kVectors>(rows, matrix, x, row, vector, ahead, out, out_stride);
    return kVectors;
}

template <int kRows, int kVectors, class Rows>
void write_rows(const Rows &rows, const DecodeMatrix &matrix, const Activations &x, int64_t row,
                float *out, int64_t out_stride) {
    const int64_t groups = ceil_div(x.rows, kVectors), bytes = kRows * rows.row_bytes();
    // As far ahead as memory is away, in whole groups, so that no line is asked for twice.
    const char *next = reinterpret_cast<const char *>(rows.data) + row * rows.row_bytes() +
                       ceil_div(kAheadBytes, bytes) * bytes;
    int64_t vector = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const Ahead ahead{next + bytes * group / groups, next + bytes * (group + 1) / groups};
        vector += write_group<kRows, kVectors>(rows, matrix, x, row, vector, ahead, out,
                                               out_stride);
    }
}

template <int kRows, int kVectors, class Rows>
void multiply_in(const Rows &rows, const DecodeMatrix &matrix, const Activations &x,
                 int64_t first, int64_t last, float *out, int64_t out_stride) {
    int64_t row = first;
    for (; row + kRows <= last; row += kRows)
        write_rows<kRows, kVectors>(rows, matrix, x, row, out, out_stride);
    for (; row < last; ++row) write_rows<1, kVectors>(rows, matrix, x, row, out, out_stride);
}

// One vector: four rows at a time. Several: as many sums as the registers hold, and more vectors
// than rows, because a weight may have to be widened before it is used.
template <class Rows>
void multiply_rows(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
                   float *out, int64_t out_stride) {
    const Rows rows(matrix);
    if (x.rows == 1)
        multiply_in<4, 1>(rows, matrix, x, first, last, out, out_stride);
    else
        multiply_in<2, 4>(rows, matrix, x, first, last, out, out_stride);
}

// One block of activations as integers. A block with NaN or infinity makes every product NaN.
void prepare_block(const float *from, int64_t count, int16_t *shorts, float *scale) {
    float values[kDecodeBlock] = {};
    memcpy(values, from, (size_t)count * sizeof(float));
    // As bits, the sizes of floats are in order: infinity above all numbers, and NaN above it.
    IntVec above = {};
    for (int64_t place = 0; place < kDecodeBlock; place += kWidth) {
        const IntVec size = (IntVec)load(values + place) & 0x7FFFFFFF;
        const IntVec is_larger = size > above;
        above = (is_larger & size) | (~is_larger & above);
    }
    int32_t bits = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) bits = above[lane] > bits ? above[lane] : bits;
    float largest;
    memcpy(&largest, &bits, sizeof(largest));
    const bool is_finite = bits < 0x7F800000;
    *scale = is_finite ? largest / 32767.0f : __builtin_nanf("");
    // Below this, the inverse would be infinite; the block is zero to rounding.
    if (!is_finite || largest < 1e-30f) {
        memset(shorts, 0, kDecodeBlock * sizeof(int16_t));
        return;
    }
    const float inverse = 32767.0f / largest;
    int32_t rounded[kDecodeBlock];
    for (int64_t place = 0; place < kDecodeBlock; place += kWidth) {
        const IntVec whole = (IntVec)(load(values + place) * inverse + kRounder) - 0x4B400000;
        memcpy(rounded + place, &whole, sizeof(whole));
    }
    for (int64_t place = 0; place < kDecodeBlock; ++place) shorts[place] = (int16_t)rounded[place];
}

}  // namespace

bool is_integer(DecodeFormat format) {
    return format == DecodeFormat::kInt8 || format == DecodeFormat::kInt4;
}

void prepare(const DecodeMatrix &matrix, Activations *x) {
    if (!is_integer(matrix.format)) return;
    const int64_t blocks = ceil_div(matrix.columns, kDecodeBlock);
    const int64_t x_blocks = x->padded / kDecodeBlock;
    for (int64_t row = 0; row < x->rows; ++row) {
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t start = block * kDecodeBlock;
            prepare_block(x->values + row * x->stride + start,
                          smaller(matrix.columns - start, kDecodeBlock),
                          x->shorts + (block * x->rows + row) * kDecodeBlock,
                          x->scales + row * x_blocks + block);
        }
        // Scales are read eight at a time; those past the last block meet no product.
        for (int64_t block = blocks; block < smaller(ceil_div(blocks, 8) * 8, x_blocks); ++block)
            x->scales[row * x_blocks + block] = 0.0f;
    }
}

void multiply(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
              float *out, int64_t out_stride) {
    switch (matrix.format) {
        case DecodeFormat::kFloat32:
            return multiply_rows<FloatRows<float>>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kBFloat16:
            return multiply_rows<FloatRows<BFloat16>>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kFloat16:
            return multiply_rows<FloatRows<Float16>>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kInt8:
            return multiply_rows<IntegerRows<Int8Blocks>>(matrix, x, first, last, out, out_stride);
        case DecodeFormat::kInt4:
            return multiply_rows<IntegerRows<Int4Blocks>>(matrix, x, first, last, out, out_stride);
    }
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
