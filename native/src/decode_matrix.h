// Matrix times a few vectors, where the matrix is read once and nothing else counts.
#pragma once

#include <type_traits>

#include "decode_math.h"
#include "decode_program.h"
#include "decode_team.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Vectors that meet a matrix, and the form in which its format wants them (`prepare`).
struct Activations {
    int64_t rows;
    const float *values;  // (rows, stride)
    int64_t stride;
    float *paired;     // bfloat16: (rows, paired_stride), even and odd columns apart, or rounded
    int64_t paired_stride;
    int32_t *words;    // integers: (blocks, rows, units), what meets a block of weights together
    float *scales;     // of those integers: (blocks, rows)
    int32_t *offsets;  // (blocks, rows)
};

// How far behind what is read memory is asked for. It comes to the second cache: the first one has
// too few places for lines under way, so products waited for memory and memory for products. Eight
// rows of bfloat16 came at 21 GB/s from there and 33 GB/s from here, on two cores that can 35.
// From 16 to 64 KB it makes a difference of 5%.
constexpr int64_t kReach = 24 << 10;

// Memory that will be read soon. Rows are short and several are read at once, which the hardware
// does not take for a stream.
struct Ahead {
    const char *at;
    int64_t pace;

    // Asks for the part of a step that reads kBytes. Without a branch: GCC 12 would split the loop.
    template <int64_t kBytes>
    ANYMAMBA_INLINE void take() {
        for (int64_t place = 0; place < kBytes; place += 64)
            __builtin_prefetch(at + place, 0, 2);
        at += pace;
    }
};

// Rows of a matrix: `own`, and as many at other places, `apart` rows from each other. One place, or as
// many as one vector reads from (streams_of).
struct Rows {
    Share own;
    int64_t places = 1, apart = 0;

    Share at(int64_t place) const {
        return {own.first + place * apart, own.last + place * apart};
    }
};

// One vector waits for memory alone, and the hardware brings it soonest where it is read in a few
// long streams: at once from kStreams places. Calls function(streams, piece, apart) with the number of
// streams as a type; what lies at one place is divided.
template <int kStreams, class Function>
ANYMAMBA_INLINE void read_in_streams(Rows rows, const Function &function) {
    if (rows.places < kStreams) {
        rows.apart = (rows.own.last - rows.own.first) / kStreams;
        const Share rest{rows.own.first + kStreams * rows.apart, rows.own.last};
        rows.own.last = rows.own.first + rows.apart;
        if constexpr (kStreams > 1) read_in_streams<kStreams / 2>(Rows{rest}, function);
    }
    for (int64_t piece = rows.own.first; piece < rows.own.last; ++piece)
        function(std::integral_constant<int, kStreams>(), piece, rows.apart);
}

// Places from which one vector reads at once. In trials on a core that can read 37 GB/s, a token of
// mamba-130m and mamba2-130m came with 1, 2, 3 and 4 of them at 76 and 79, 91 and 92, 89 and 92, 82
// and 82% of that in float32. Tokens of bfloat16 take 1% less with 2 than with 4 on two cores that
// share 36 GB/s and 2% less where each has a path to memory of its own; int4 reaches 66% with 2 and
// 78% with 4. int8 on two cores that share took with 2 instead of 4 the same time, 6 and 3% less (siso,
// mamba-130m, mamba2-130m).
constexpr int kMostStreams = 4;
constexpr int streams_of(DecodeFormat format) {
    return format == DecodeFormat::kInt4 ? kMostStreams : 2;
}

// Asks for up to `bytes` of what will be read, at once.
ANYMAMBA_INLINE void ask_for(Soon soon, int64_t bytes) {
    const int64_t most = smaller(bytes / soon.places, soon.bytes);
    for (int64_t asked = 0; asked < most; asked += 64) soon.ask(asked);
}

// Asks, to the first cache and all at once, for what has just been shared: lines that another worker
// wrote come one by one otherwise, and take 0.2 microseconds each where no cache is shared.
ANYMAMBA_INLINE void ask_for_shared(const float *values, int64_t count) {
    for (int64_t place = 0; place < count; place += 64 / (int64_t)sizeof(float))
        __builtin_prefetch(values + place, 0, 3);
}

// Asks for as much of a state as a step takes, which is read and written later, behind this one.
template <int64_t kNumbers>
ANYMAMBA_INLINE void ask_behind(const float *state) {
    const char *later = reinterpret_cast<const char *>(state) + kReach / 2;
    for (int64_t place = 0; place < kNumbers * (int64_t)sizeof(float); place += 64)
        __builtin_prefetch(later + place, 0, 2);
}

// What a group of rows asks for, of the rows before `end` and behind them of what is read next. A
// group of `bytes` is read in `steps`, once for each of the `shares` of the vectors. Made once per
// matrix, because of its divisions.
struct Lookahead {
    const char *end;
    Soon next;
    int64_t part, pace;

    Lookahead(const void *behind_last, Soon then, int64_t bytes, int64_t steps, int64_t shares)
        : end(static_cast<const char *>(behind_last)),
          next(then),
          part(bytes / shares),
          pace(bytes / (steps * shares)) {}

    ANYMAMBA_INLINE Ahead behind(const void *group, int64_t share) const {
        const char *own = static_cast<const char *>(group) + share * part;
        const char *at = own + kReach;
        if (at < end) return {at, pace};
        // Nothing to ask for: the group itself, which is here.
        return {at - end < next.bytes ? next.at + (at - end) : own, pace};
    }
};

// Fills the form of `values` that the matrix wants.
void prepare(const DecodeMatrix &matrix, Activations *x);

// out[b][row] = bias[row] + W[row] . x[b] for the rows of a share. The order of each sum is fixed,
// whatever the number of vectors, of which only one may meet rows at several places. Towards the end
// it asks for `next`.
void multiply(const DecodeMatrix &matrix, const Activations &x, Rows rows, Soon next, float *out,
              int64_t out_stride);

// Both for integer formats: decode_vnni.cpp where the CPU sums products of bytes in 32 bits, else
// decode_integers.cpp.
void prepare_integers(const DecodeMatrix &matrix, Activations *x);
void multiply_integers(const DecodeMatrix &matrix, const Activations &x, Rows rows, float *out,
                       int64_t out_stride);

// The bytes of a row of the matrix, without its scales; a panel has as many as its rows.
int64_t row_bytes(const DecodeMatrix &matrix);

// Where rows of the matrix lie.
Soon memory_of(const DecodeMatrix &matrix, Rows rows);

// One row of a matrix as float32.
void read_matrix_row(const DecodeMatrix &matrix, int64_t row, float *to);

}  // namespace anymamba::ANYMAMBA_VARIANT
