// Keys and queries of Mamba-3 (ops/keys/README.md): sizes, parameters, and rows taken apart into
// planes. A plane holds one component of every turning unit (pair or block of four), so that a
// rotation is the same few vector operations however the units lie in memory.
#pragma once

#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Tokens that one task walks through from a known rotation.
constexpr int64_t kKeyTile = 32;
constexpr int64_t kKeyKinds = 2;  // keys and queries, always in this order

enum KeyPairing : int64_t { kHalfSplit = 0, kInterleaved = 1, kBlocks = 2 };

ANYMAMBA_INLINE int64_t round_lanes(int64_t count) { return ceil_div(count, kWidth) * kWidth; }

struct KeyShape {
    int64_t batch, length, ranks, groups, heads, size, channels, turning, sequences, pairing;
    float eps[kKeyKinds], range;
    int64_t tiles, lanes;  // tiles of a row; channels of a head in whole vectors

    explicit KeyShape(const int64_t *sizes)
        : batch(sizes[0]),
          length(sizes[1]),
          ranks(sizes[2]),
          groups(sizes[3]),
          heads(sizes[4]),
          size(sizes[5]),
          channels(sizes[6]),
          turning(sizes[7]),
          sequences(sizes[8]),
          pairing(sizes[9]),
          eps{real_of(sizes[10]), real_of(sizes[11])},
          range(real_of(sizes[12])),
          tiles(ceil_div(length, kKeyTile)),
          lanes(round_lanes(channels)) {}

    int64_t group_of(int64_t head) const { return head / (heads / groups); }
    int64_t tile_stop(int64_t tile) const { return smaller((tile + 1) * kKeyTile, length); }
};

// The order of a call's input tensors; the backward has three gradients before them.
struct KeyInputs {
    const anymamba_tensor *raw;     // [kind] (b, s, m, g, r)
    const anymamba_tensor *weight;  // [kind] (g, r)
    const anymamba_tensor *bias;    // [kind] (h, m, r)
    const anymamba_tensor &turn, &dt, &initial, &borders;

    explicit KeyInputs(const anymamba_tensor *t)
        : raw(t), weight(t + 2), bias(t + 4), turn(t[6]), dt(t[7]), initial(t[8]), borders(t[9]) {}

    float dt_at(int64_t row, int64_t token, int64_t head) const {
        return static_cast<const float *>(
            dt.data)[row * dt.stride[0] + token * dt.stride[1] + head];
    }
};
constexpr int64_t kKeyInputs = 10;

// The sequence that owns a token. Without borders, sequence q is row q.
struct KeySequence {
    int64_t number, start, stop;
};

inline KeySequence key_sequence(const KeyShape &shape, const anymamba_tensor &borders,
                                int64_t number) {
    if (borders.data == nullptr) return {number, 0, shape.length};
    const int64_t *cu_seqlens = static_cast<const int64_t *>(borders.data);
    return {number, cu_seqlens[number * borders.stride[0]],
            cu_seqlens[(number + 1) * borders.stride[0]]};
}

inline KeySequence key_sequence_at(const KeyShape &shape, const anymamba_tensor &borders,
                                   int64_t row, int64_t token) {
    if (borders.data == nullptr) return {row, 0, shape.length};
    // The last sequence that starts at or before the token: empty ones before it start there too.
    int64_t low = 0, high = shape.sequences - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (key_sequence(shape, borders, middle).start <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return key_sequence(shape, borders, low);
}

// Entries 0, 2, 4, ... and 1, 3, 5, ... of two vectors end to end, and the way back.
#if defined(__AVX512F__)
ANYMAMBA_INLINE Vec evens(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
ANYMAMBA_INLINE Vec odds(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
ANYMAMBA_INLINE Vec zip_first(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
ANYMAMBA_INLINE Vec zip_last(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
}
#elif defined(__AVX2__)
ANYMAMBA_INLINE Vec evens(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
}
ANYMAMBA_INLINE Vec odds(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
ANYMAMBA_INLINE Vec zip_first(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
ANYMAMBA_INLINE Vec zip_last(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
ANYMAMBA_INLINE Vec evens(Vec a, Vec b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
ANYMAMBA_INLINE Vec odds(Vec a, Vec b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }
ANYMAMBA_INLINE Vec zip_first(Vec a, Vec b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
ANYMAMBA_INLINE Vec zip_last(Vec a, Vec b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif

}  // namespace anymamba::ANYMAMBA_VARIANT
