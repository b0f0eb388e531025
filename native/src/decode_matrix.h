// Matrix times a few vectors, where the matrix is read once and nothing else counts.
#pragma once

#include "decode_math.h"
#include "decode_program.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Vectors that meet a matrix: float32, and for integer matrices also as 16-bit integers with one
// scale per block. 15 bits lose 2e-5 of a block's largest entry, far less than the weights lost.
struct Activations {
    int64_t rows;
    const float *values;  // (rows, stride)
    int64_t stride;
    int16_t *shorts;  // (blocks, rows, 32): what meets one block of weights lies together
    float *scales;    // (rows, blocks rounded up to 8)
    int64_t padded;   // capacity in columns, a multiple of 8 blocks
};

// Memory that will be read soon. Rows are short and several are read at once, which the hardware
// does not take for a stream: unasked, bfloat16 came at 16 GB/s where float32 came at 25.
struct Ahead {
    const char *at, *end;

    // Asks for as many bytes as the caller reads meanwhile.
    template <int64_t kBytes>
    ANYMAMBA_INLINE void take() {
        if (at >= end) return;
        constexpr int64_t kLines = (kBytes + 63) / 64;
        for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(at + 64 * line);
        at += 64 * kLines;
    }
};

bool is_integer(DecodeFormat format);

// Fills the integer form of `values`, if the format needs it.
void prepare(const DecodeMatrix &matrix, Activations *x);

// out[b][row] = bias[row] + W[row] . x[b] for the rows from `first` to before `last`. The order of
// each sum is fixed, whatever the number of vectors.
void multiply(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
              float *out, int64_t out_stride);

// One row of a matrix as float32.
void read_matrix_row(const DecodeMatrix &matrix, int64_t row, float *to);

}  // namespace anymamba::ANYMAMBA_VARIANT
