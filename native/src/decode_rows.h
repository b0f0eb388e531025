// Rows of an integer matrix as they lie in memory, one after the other.
#pragma once

#include "decode_matrix.h"

namespace anymamba::ANYMAMBA_VARIANT {

template <class T>
ANYMAMBA_INLINE T fetch(const void *from) {
    T value;
    memcpy(&value, from, sizeof(value));
    return value;
}

// Up to as many rows as there are lanes. The lanes of missing ones repeat the last.
template <bool kWhole>
struct StoredRows {
    const uint8_t *first;
    int64_t bytes;  // from row to row
    int64_t count;

    ANYMAMBA_INLINE const uint8_t *row(int64_t lane) const {
        return first + (kWhole ? lane : smaller(lane, count - 1)) * bytes;
    }
};

}  // namespace anymamba::ANYMAMBA_VARIANT
