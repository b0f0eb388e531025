// Rows of a tensor as padded float32, and memory carved out of a workspace: what the kernels that
// walk along channels share.
#pragma once

#include "vector.h"

namespace anymamba::ANYMAMBA_VARIANT {

ANYMAMBA_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ANYMAMBA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ANYMAMBA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// A real number crosses the interface in the bits of a double.
ANYMAMBA_INLINE double wide_real_of(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
ANYMAMBA_INLINE float real_of(int64_t bits) { return (float)wide_real_of(bits); }

// Hands out aligned pieces of a workspace. Without a workspace it only counts, so that one layout
// function both measures and places.
struct Carver {
    char *base;
    int64_t used = 0;

    template <class T>
    T *take(int64_t count) {
        char *piece = base == nullptr ? nullptr : base + used;
        used += ceil_div(count * (int64_t)sizeof(T), 64) * 64;
        return reinterpret_cast<T *>(piece);
    }
    float *floats(int64_t count) { return take<float>(count); }
};

template <class T>
ANYMAMBA_INLINE void widen_row(const T *from, int64_t count, float *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) store(to + place, load(from + place));
    if (place < count) store(to + place, load_part(from + place, count - place));
}

template <class T>
ANYMAMBA_INLINE void narrow_row(const float *from, int64_t count, T *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) store(to + place, load(from + place));
    if (place < count) store_part(to + place, load(from + place), count - place);
}

// `count` elements from `offset` on as float32, readable in whole vectors (zeros past the end):
// the tensor's own memory where that is possible, else a copy in `scratch`.
inline const float *read_row(const anymamba_tensor &tensor, int64_t offset, int64_t count,
                             float *scratch) {
    if (tensor.dtype == ANYMAMBA_FLOAT32) {
        const float *from = static_cast<const float *>(tensor.data) + offset;
        if (count % kWidth == 0) return from;
        widen_row(from, count, scratch);
    } else {
        widen_row(static_cast<const BFloat16 *>(tensor.data) + offset, count, scratch);
    }
    return scratch;
}

// Where to compute a row that belongs at `offset`, in whole vectors; `finish_row` brings it there.
inline float *open_row(const anymamba_tensor &tensor, int64_t offset, int64_t count,
                       float *scratch) {
    const bool in_place = tensor.dtype == ANYMAMBA_FLOAT32 && count % kWidth == 0;
    return in_place ? static_cast<float *>(tensor.data) + offset : scratch;
}

inline void finish_row(const anymamba_tensor &tensor, int64_t offset, int64_t count,
                       const float *row) {
    if (tensor.dtype == ANYMAMBA_FLOAT32) {
        float *to = static_cast<float *>(tensor.data) + offset;
        if (to != row) narrow_row(row, count, to);
    } else {
        narrow_row(row, count, static_cast<BFloat16 *>(tensor.data) + offset);
    }
}

inline float read_one(const anymamba_tensor &tensor, int64_t offset) {
    return tensor.dtype == ANYMAMBA_FLOAT32
               ? static_cast<const float *>(tensor.data)[offset]
               : widen(static_cast<const BFloat16 *>(tensor.data)[offset]);
}

inline void write_one(const anymamba_tensor &tensor, int64_t offset, float value) {
    if (tensor.dtype == ANYMAMBA_FLOAT32)
        static_cast<float *>(tensor.data)[offset] = value;
    else
        narrow(static_cast<BFloat16 *>(tensor.data) + offset, value);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
