// The one product behind the SSD kernels: out[i][j] += a(i, k) * b[k][j], a tile of rows by a panel
// of columns at a time, with the tile in registers.
//
// A panel is two vectors of columns; a matrix that stands on the right lies in memory panel after
// panel, each [k][kPanel], so that a tile reads it front to back. The left matrix is read number by
// number, along its rows or along its columns.
#pragma once

#include "vector.h"

namespace anymamba::ANYMAMBA_VARIANT {

constexpr int64_t kPanel = 2 * kWidth;

// As many rows as registers hold, beside two vectors of the panel and one number of the left.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

template <int Rows>
struct Tile {
    Vec at[Rows][2];
};

template <int N>
struct Count {
    static constexpr int value = N;
};

enum class Left { kByRow, kByColumn };  // a(i, k) is a[i * stride + k], or a[k * stride + i]

template <Left order, int Rows>
ANYMAMBA_INLINE void multiply(Tile<Rows> &tile, const float *a, int64_t stride, const float *panel,
                              int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
        const Vec first = load(panel), second = load(panel + kWidth);
#pragma GCC unroll 16
        for (int row = 0; row < Rows; ++row) {
            const float left = order == Left::kByRow ? a[row * stride] : a[row];
            tile.at[row][0] += left * first;
            tile.at[row][1] += left * second;
        }
        panel += kPanel;
        a += order == Left::kByRow ? 1 : stride;
    }
}

// The same with a left matrix that lies in panels of `height` rows, read along its rows.
template <int Rows>
ANYMAMBA_INLINE void multiply_panels(Tile<Rows> &tile, const float *a, int64_t height,
                                     const float *panel, int64_t count) {
    for (int64_t k = 0; k < count; k += kPanel) {
        const int64_t part = count - k < kPanel ? count - k : kPanel;
        multiply<Left::kByRow>(tile, a, kPanel, panel, part);
        a += height * kPanel;
        panel += kPanel * kPanel;
    }
}

template <int Rows>
ANYMAMBA_INLINE Tile<Rows> zero_tile() {
    return Tile<Rows>{};
}

template <int Rows>
ANYMAMBA_INLINE Tile<Rows> load_tile(const float *from, int64_t stride) {
    Tile<Rows> tile;
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
        tile.at[row][0] = load(from + row * stride);
        tile.at[row][1] = load(from + row * stride + kWidth);
    }
    return tile;
}

template <int Rows>
ANYMAMBA_INLINE void store_tile(float *to, int64_t stride, const Tile<Rows> &tile) {
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
        store(to + row * stride, tile.at[row][0]);
        store(to + row * stride + kWidth, tile.at[row][1]);
    }
}

template <int Rows>
ANYMAMBA_INLINE void scale_tile(Tile<Rows> &tile, float factor) {
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
        tile.at[row][0] *= factor;
        tile.at[row][1] *= factor;
    }
}

template <int Rows>
ANYMAMBA_INLINE void scale_rows(Tile<Rows> &tile, const float *factors) {
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
        tile.at[row][0] *= factors[row];
        tile.at[row][1] *= factors[row];
    }
}

template <int Rows, class Body>
ANYMAMBA_INLINE void run_tile(int64_t rows, int64_t first, const Body &body) {
    if (rows == Rows) {
        body(Count<Rows>{}, first);
    } else if constexpr (Rows > 1) {
        run_tile<Rows - 1>(rows, first, body);
    }
}

// body(Count<Rows>{}, first row) for rows [start, stop) in tiles. The rows are shared out evenly: a
// short last tile would leave the multipliers waiting for each other.
template <class Body>
ANYMAMBA_INLINE void for_tiles(int64_t start, int64_t stop, const Body &body) {
    const int64_t rows = stop - start;
    if (rows <= 0) return;
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    const int64_t each = rows / tiles, longer = rows % tiles;
    int64_t first = start;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t height = each + (tile < longer ? 1 : 0);
        run_tile<kTileRows>(height, first, body);
        first += height;
    }
}

// One stage of a transposition: rows `distance` apart exchange their blocks of `distance` lanes.
template <int64_t distance, int... lane>
struct Exchange {
    static ANYMAMBA_INLINE Vec upper(Vec x, Vec y) {
        return __builtin_shufflevector(x, y,
                                       (lane & distance ? lane - distance + kWidth : lane)...);
    }
    static ANYMAMBA_INLINE Vec lower(Vec x, Vec y) {
        return __builtin_shufflevector(x, y,
                                       (lane & distance ? lane + kWidth : lane + distance)...);
    }
};

template <int64_t distance, class Lanes>
struct ExchangeOf;

template <int64_t distance, int... lane>
struct ExchangeOf<distance, Lanes<lane...>> : Exchange<distance, lane...> {};

template <int64_t distance>
ANYMAMBA_INLINE void exchange(Vec (&rows)[kWidth]) {
    using Stage = ExchangeOf<distance, AllLanes>;
#pragma GCC unroll 16
    for (int64_t row = 0; row < kWidth; ++row) {
        if (row & distance) continue;
        const Vec x = rows[row], y = rows[row + distance];
        rows[row] = Stage::upper(x, y);
        rows[row + distance] = Stage::lower(x, y);
    }
    if constexpr (distance > 1) exchange<distance / 2>(rows);
}

// A square block of kWidth rows.
ANYMAMBA_INLINE void transpose_block(const float *from, int64_t from_stride, float *to,
                                     int64_t to_stride) {
    Vec rows[kWidth];
#pragma GCC unroll 16
    for (int64_t row = 0; row < kWidth; ++row) rows[row] = load(from + row * from_stride);
    exchange<kWidth / 2>(rows);
#pragma GCC unroll 16
    for (int64_t row = 0; row < kWidth; ++row) store(to + row * to_stride, rows[row]);
}

// Adds two rows in one vector: lanes whose number lacks `distance` have a sum of the first row,
// the others one of the second.
template <int64_t distance>
ANYMAMBA_INLINE void merge_lanes(Vec (&rows)[kWidth]) {
    using Stage = ExchangeOf<distance, AllLanes>;
#pragma GCC unroll 8
    for (int64_t row = 0; row < distance; ++row)
        rows[row] = Stage::upper(rows[row], rows[row + distance]) +
                    Stage::lower(rows[row], rows[row + distance]);
    if constexpr (distance > 1) merge_lanes<distance / 2>(rows);
}

// The sums over lanes of kWidth vectors that lie one after the other, as one vector.
ANYMAMBA_INLINE Vec sum_lanes_of_each(const float *from) {
    Vec rows[kWidth];
#pragma GCC unroll 16
    for (int64_t row = 0; row < kWidth; ++row) rows[row] = load(from + row * kWidth);
    merge_lanes<kWidth / 2>(rows);
    return rows[0];
}

// The same of `count` vectors; what lies behind them, up to whole kWidth vectors, is read and written
// too.
inline void sum_all_lanes(const float *from, int64_t count, float *to) {
    for (int64_t first = 0; first < count; first += kWidth)
        store(to + first, sum_lanes_of_each(from + first * kWidth));
}

}  // namespace anymamba::ANYMAMBA_VARIANT
