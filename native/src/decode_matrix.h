// Matrix times a few vectors, where the matrix is read once and nothing else counts.
#pragma once

#include "decode_math.h"
#include "decode_program.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Vectors that meet a matrix, and the form in which its format wants them (`prepare`).
struct Activations {
    int64_t rows;
    const float *values;  // (rows, stride)
    int64_t stride;
    float *paired;     // bfloat16: (rows, paired_stride), even and odd columns apart
    int64_t paired_stride;
    int32_t *words;    // integers: (blocks, rows, units), what meets a block of weights together
    float *scales;     // of those integers: (blocks, rows)
    int32_t *offsets;  // (blocks, rows)
};

// Memory that will be read soon. Rows are short and several are read at once, which the hardware
// does not take for a stream: unasked, bfloat16 came at 16 GB/s where float32 came at 25.
struct Ahead {
    const char *at;
    int64_t pace;

    // Asks for the part of a step that reads kBytes. Without a branch: GCC 12 would split the loop.
    template <int64_t kBytes>
    ANYMAMBA_INLINE void take() {
        for (int64_t place = 0; place < kBytes; place += 64) __builtin_prefetch(at + place);
        at += pace;
    }
};

// How far behind what is read memory is asked for; 16 KiB were no better.
constexpr int64_t kAheadBytes = 4096;

// Asks for a line of a state that is read and written later, as far behind this one.
ANYMAMBA_INLINE void ask_behind(const float *state) {
    __builtin_prefetch(reinterpret_cast<const char *>(state) + kAheadBytes, 1);
}

// That far in whole groups of rows, so that no line is asked for twice. A group of `bytes` is read
// in `steps`, once for each of the `shares` of the vectors. Made once per matrix, because of its
// divisions.
struct Lookahead {
    int64_t distance, part, pace;

    Lookahead(int64_t bytes, int64_t steps, int64_t shares)
        : distance(ceil_div(kAheadBytes, bytes) * bytes),
          part(bytes / shares),
          pace(bytes / (steps * shares)) {}

    ANYMAMBA_INLINE Ahead behind(const void *data, int64_t share) const {
        return {static_cast<const char *>(data) + distance + share * part, pace};
    }
};

// Fills the form of `values` that the matrix wants.
void prepare(const DecodeMatrix &matrix, Activations *x);

// out[b][row] = bias[row] + W[row] . x[b] for the rows from `first` to before `last`. The order of
// each sum is fixed, whatever the number of vectors.
void multiply(const DecodeMatrix &matrix, const Activations &x, int64_t first, int64_t last,
              float *out, int64_t out_stride);

// Both for one of the integer formats (decode_integers.h).
template <class Format>
void prepare_integers(int64_t columns, Activations *x);
template <class Format>
void multiply_integers(const DecodeMatrix &matrix, const Activations &x, int64_t first,
                       int64_t last, float *out, int64_t out_stride);

// The bytes of a row of the matrix, without its scales.
int64_t row_bytes(const DecodeMatrix &matrix);

// Brings rows nearer, to the second cache.
void ask_for(const DecodeMatrix &matrix, int64_t first, int64_t last);

// One row of a matrix as float32.
void read_matrix_row(const DecodeMatrix &matrix, int64_t row, float *to);

}  // namespace anymamba::ANYMAMBA_VARIANT
