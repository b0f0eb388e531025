// Integer matrices as they lie in memory: panels of sixteen rows, in a panel block after block, in
// a block four columns of all rows, then the next four. What is loaded together has a row in each
// lane, and memory is read in the order in which it lies.
//
// With rows in the lanes a block's sum is whole before it is scaled: one conversion and one product
// of scales serve all of them.
#pragma once

#include "decode_matrix.h"

namespace anymamba::ANYMAMBA_VARIANT {

constexpr int64_t kPanel = kDecodePanel;
// Bytes of four columns of a panel's rows, and of the scales of a block.
constexpr int64_t kFourColumns = 4 * kPanel, kScales = kPanel * (int64_t)sizeof(BFloat16);
// How far behind the block that several vectors meet its successors are asked for.
constexpr int64_t kBlocksReach = 4 << 10;

template <class T>
ANYMAMBA_INLINE T fetch(const void *from) {
    T value;
    memcpy(&value, from, sizeof(value));
    return value;
}

// Where the panels of a matrix lie whose blocks have kBytes of each row.
template <int64_t kBytes>
struct Panels {
    static constexpr int64_t kBlock = kPanel * kBytes;
    const uint8_t *data, *scales;
    int64_t blocks;

    explicit Panels(const DecodeMatrix &matrix)
        : data(static_cast<const uint8_t *>(matrix.data)),
          scales(static_cast<const uint8_t *>(matrix.scales)),
          blocks(ceil_div(matrix.columns, kDecodeBlock)) {}

    ANYMAMBA_INLINE const uint8_t *block(int64_t panel, int64_t place) const {
        return data + (panel * blocks + place) * kBlock;
    }
    ANYMAMBA_INLINE const uint8_t *scales_of(int64_t panel, int64_t place) const {
        return scales + (panel * blocks + place) * kScales;
    }
};

// The panels that hold some rows, perhaps with others at both ends.
ANYMAMBA_INLINE Share panels_of(Share rows) {
    if (rows.is_empty()) return {0, 0};
    return {rows.first / kPanel, ceil_div(rows.last, kPanel)};
}

// The panels of rows at several places, which are whole panels apart.
ANYMAMBA_INLINE Rows panels_of(Rows rows) {
    return {panels_of(rows.own), rows.places, rows.apart / kPanel};
}

// The places in a panel of those of its rows that are meant.
ANYMAMBA_INLINE Share places_of(Share rows, int64_t panel) {
    return {larger(0, rows.first - panel * kPanel), smaller(kPanel, rows.last - panel * kPanel)};
}

// Calls function(format) with the matrix' format, as a type.
template <class Int8, class Int4, class Function>
ANYMAMBA_INLINE void with_format(const DecodeMatrix &matrix, const Function &function) {
    if (matrix.format == DecodeFormat::kInt8)
        function(Int8());
    else
        function(Int4());
}

ANYMAMBA_INLINE void ask_for_block(const uint8_t *block, int64_t bytes) {
    for (int64_t place = 0; place < bytes; place += 64)
        __builtin_prefetch(block + kBlocksReach + place, 0, 2);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
