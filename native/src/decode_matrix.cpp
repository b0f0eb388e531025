// Matrix times vectors in the floating-point formats; several rows and vectors at a time share what is
// loaded.
#include "decode_formats.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

template <int kRows, int kVectors>
struct Sums {
    Vec at[kVectors * kRows];
};

// Keeps a value that several rows meet in a register: as an operand in memory it would be loaded
// by each of them, and a 512-bit load takes as long as a 512-bit product.
template <class T>
ANYMAMBA_INLINE void hold([[maybe_unused]] T &value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#endif
}

// One part of a step. Loops over sums are flat and unrolled by name: GCC 12 would unroll them too
// late to keep the sums in registers.
template <class Format, int64_t kPart, int kRows, int kVectors>
ANYMAMBA_INLINE void add_part(const typename Format::Stored *weight, int64_t columns,
                              const typename Format::Value *values, int64_t stride,
                              Sums<kRows, kVectors> *sums) {
    decltype(Format::template open<kPart>(weight)) opened[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
        opened[r] = Format::template open<kPart>(weight + r * columns);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
        auto met = Format::fetch(values + v * stride + kPart * kWidth);
        hold(met);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            Vec &sum = sums->at[v * kRows + r];
            sum = Format::add(sum, opened[r], met);
        }
    }
}

// The sums of kRows rows and kVectors vectors over their lanes, four at a time.
template <int kRows, int kVectors>
ANYMAMBA_INLINE void close_sums(const Sums<kRows, kVectors> &sums, float *to) {
    constexpr int kCount = kRows * kVectors;
#pragma GCC unroll 8
    for (int first = 0; first + 4 <= kCount; first += 4)
        sum_lanes_of_four(sums.at[first], sums.at[first + 1], sums.at[first + 2],
                          sums.at[first + 3], to + first);
    for (int sum = kCount / 4 * 4; sum < kCount; ++sum) to[sum] = sum_lanes(sums.at[sum]);
}

// kRows rows times kVectors vectors, to[vector * kRows + row]. The order of each sum depends on
// neither.
template <class Format, int kRows, int kVectors>
ANYMAMBA_INLINE void dot(const typename Format::Stored *weight, int64_t columns,
                         const Values<Format> &x, int64_t vector, Ahead ahead, float *to) {
    constexpr int64_t kStep = Format::kStep;
    const typename Format::Value *values = x.data + vector * x.stride;
    Sums<kRows, kVectors> sums = {};
    int64_t column = 0;
    for (; column + kStep <= columns; column += kStep) {
        ahead.template take<kRows * kStep * (int64_t)sizeof(*weight)>();
        add_part<Format, 0>(weight + column, columns, values + column, x.stride, &sums);
        if constexpr (Format::kParts == 2)
            add_part<Format, 1>(weight + column, columns, values + column, x.stride, &sums);
    }
    close_sums(sums, to);
    if (column == columns) return;
    for (int v = 0; v < kVectors; ++v)
        for (int r = 0; r < kRows; ++r)
            to[v * kRows + r] +=
                dot_of_rest<Format>(weight + r * columns, x, vector + v, column, columns);
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
    float sums[kVectors * kRows];
    dot<Format, kRows, kVectors>(data + row * matrix.columns, matrix.columns, Values<Format>(x),
                                 vector, ahead, sums);
    for (int v = 0; v < kVectors; ++v)
        for (int r = 0; r < kRows; ++r) {
            const float bias = matrix.bias == nullptr ? 0.0f : matrix.bias[row + r];
            out[(vector + v) * out_stride + row + r] = sums[v * kRows + r] + bias;
        }
    return kVectors;
}

// The rows of a share as far as groups of kRows go; returns where it ended.
template <class Format, int kRows, int kVectors>
int64_t write_groups(const DecodeMatrix &matrix, const Activations &x, Share own, Soon next,
                     float *out, int64_t out_stride) {
    const auto *data = static_cast<const typename Format::Stored *>(matrix.data);
    const int64_t columns = matrix.columns, shares = ceil_div(x.rows, kVectors);
    const Lookahead lookahead(
        data + own.last * columns, next, kRows * columns * (int64_t)sizeof(*data),
        ceil_div(columns, Format::kStep), shares);
    int64_t row = own.first;
    for (; row + kRows <= own.last; row += kRows) {
        int64_t vector = 0;
        for (int64_t share = 0; share < shares; ++share)
            vector += write_group<Format, kRows, kVectors>(
                matrix, x, row, vector, lookahead.behind(data + row * columns, share), out,
                out_stride);
    }
    return row;
}

template <class Format, int kRows, int kVectors>
void multiply_in(const DecodeMatrix &matrix, const Activations &x, Share own, Soon next, float *out,
                 int64_t out_stride) {
    const int64_t row =
        write_groups<Format, kRows, kVectors>(matrix, x, own, next, out, out_stride);
    if (row < own.last)
        write_groups<Format, 1, kVectors>(matrix, x, {row, own.last}, next, out, out_stride);
}

// One vector.
template <class Format>
void multiply_one(const DecodeMatrix &matrix, const Activations &x, Rows rows, float *out) {
    constexpr int64_t kStep = Format::kStep;
    const auto *data = static_cast<const typename Format::Stored *>(matrix.data);
    const Values<Format> values(x);
    const int64_t columns = matrix.columns, whole = columns / kStep * kStep;
    read_in_streams<Format::kStreams>(rows, [&](auto streams, int64_t first, int64_t apart) {
        constexpr int kStreams = decltype(streams)::value;
        const auto *weight = data + first * columns;
        Sums<kStreams, 1> sums = {};
        for (int64_t column = 0; column < whole; column += kStep) {
            add_part<Format, 0>(weight + column, apart * columns, values.data + column, 0, &sums);
            if constexpr (Format::kParts == 2)
                add_part<Format, 1>(weight + column, apart * columns, values.data + column, 0,
                                    &sums);
        }
        float totals[kStreams];
        close_sums(sums, totals);
        for (int stream = 0; stream < kStreams; ++stream) {
            const int64_t row = first + stream * apart;
            if (whole < columns)
                totals[stream] +=
                    dot_of_rest<Format>(data + row * columns, values, 0, whole, columns);
            out[row] = totals[stream] + (matrix.bias == nullptr ? 0.0f : matrix.bias[row]);
        }
    });
}

template <class Format>
void multiply_floats(const DecodeMatrix &matrix, const Activations &x, Rows rows, Soon next,
                     float *out, int64_t out_stride) {
    if (x.rows == 1)
        multiply_one<Format>(matrix, x, rows, out);
    else
        multiply_in<Format, Format::kRows, kTogether>(matrix, x, rows.own, next, out, out_stride);
}

#if defined(__AVX512BF16__)
// Rounded; zeros up to the next whole step.
void prepare_halves(int64_t columns, Activations *x) {
    for (int64_t row = 0; row < x->rows; ++row) {
        const float *from = x->values + row * x->stride;
        auto *to = reinterpret_cast<BFloat16 *>(x->paired) + row * x->paired_stride;
        int64_t column = 0;
        for (; column + kWidth <= columns; column += kWidth)
            store(to + column, load(from + column));
        for (; column < ceil_div(columns, BFloat16Format::kStep) * BFloat16Format::kStep;
             column += kWidth)
            store(to + column, load_part(from + column, larger(0, columns - column)));
    }
}
#else
// Even columns of a step, then its odd ones; zeros up to the next whole step.
void prepare_halves(int64_t columns, Activations *x) {
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
#endif

}  // namespace

void prepare(const DecodeMatrix &matrix, Activations *x) {
    if (x->rows == 1) ask_for_shared(x->values, matrix.columns);
    if (matrix.format == DecodeFormat::kBFloat16) prepare_halves(matrix.columns, x);
    if (matrix.format == DecodeFormat::kInt8 || matrix.format == DecodeFormat::kInt4)
        prepare_integers(matrix, x);
}

void multiply(const DecodeMatrix &matrix, const Activations &x, Rows rows, Soon next, float *out,
              int64_t out_stride) {
    switch (matrix.format) {
        case DecodeFormat::kFloat32:
            return multiply_floats<WideFormat>(matrix, x, rows, next, out, out_stride);
        case DecodeFormat::kBFloat16:
            return multiply_floats<BFloat16Format>(matrix, x, rows, next, out, out_stride);
        case DecodeFormat::kFloat16:
            return multiply_floats<Float16Format>(matrix, x, rows, next, out, out_stride);
        case DecodeFormat::kInt8:
        case DecodeFormat::kInt4:
            return multiply_integers(matrix, x, rows, out, out_stride);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
