// Where the rows of a matrix lie in each format.
#include "decode_matrix.h"

namespace anymamba::ANYMAMBA_VARIANT {

int64_t row_bytes(const DecodeMatrix &matrix) {
    const int64_t blocks = ceil_div(matrix.columns, kDecodeBlock);
    switch (matrix.format) {
        case DecodeFormat::kFloat32:
            return matrix.columns * (int64_t)sizeof(float);
        case DecodeFormat::kBFloat16:
        case DecodeFormat::kFloat16:
            return matrix.columns * (int64_t)sizeof(BFloat16);
        case DecodeFormat::kInt8:
            return blocks * kDecodeBlock;
        case DecodeFormat::kInt4:
            return blocks * kDecodeBlock / 2;
    }
    return 0;
}

Soon memory_of(const DecodeMatrix &matrix, Rows rows) {
    const int64_t bytes = row_bytes(matrix);
    const char *at = static_cast<const char *>(matrix.data) + rows.own.first * bytes;
    return {at, (rows.own.last - rows.own.first) * bytes, rows.places, rows.apart * bytes};
}

void read_matrix_row(const DecodeMatrix &matrix, int64_t row, float *to) {
    const int64_t columns = matrix.columns, blocks = ceil_div(columns, kDecodeBlock);
    const int64_t panel = row / kDecodePanel, lane = row % kDecodePanel;
    const auto scale_of = [&](int64_t block) {
        const auto *scales = static_cast<const BFloat16 *>(matrix.scales);
        return widen(scales[(panel * blocks + block) * kDecodePanel + lane]);
    };
    // A byte of the row, of the `bytes` that it has in a block.
    const auto byte_of = [&](int64_t bytes, int64_t block, int64_t place) {
        const auto *first = static_cast<const uint8_t *>(matrix.data) +
                            (panel * blocks + block) * kDecodePanel * bytes;
        return first[(place / 4 * kDecodePanel + lane) * 4 + place % 4];
    };
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
                to[column] = scale_of(block) * (float)(int8_t)byte_of(32, block, place);
                break;
            case DecodeFormat::kInt4: {
                const uint8_t both = byte_of(16, block, place % 16);
                const int32_t bits = place < 16 ? both & 15 : both >> 4;
                to[column] = scale_of(block) * (float)((bits ^ 8) - 8);
                break;
            }
        }
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
