// Rows of a chunk, between tensors and panels.
//
// Inside a chunk, time and rank are one axis of positions: f = step * rank + q.
#pragma once

#include "gemm.h"
#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

ANYMAMBA_INLINE int64_t round_up(int64_t x, int64_t size) { return ceil_div(x, size) * size; }

// Consecutive steps of one row.
struct Chunk {
    int64_t row, start, steps;
};

// Where the numbers of one group or head lie: position f of a chunk is `at(f)`.
struct Rows {
    const anymamba_tensor *tensor = nullptr;
    int64_t first = 0, rank = 1;

    Rows() = default;

    Rows(const anymamba_tensor &of, const Chunk &chunk, int64_t rank_, int64_t head)
        : tensor(&of),
          first(chunk.row * of.stride[0] + chunk.start * of.stride[1] + head * of.stride[3]),
          rank(rank_) {}

    int64_t at(int64_t position) const {
        if (rank == 1) return first + position * tensor->stride[1];
        return first + position / rank * tensor->stride[1] + position % rank * tensor->stride[2];
    }
};

// Asks for the lines of a row of `columns` numbers at `place`.
ANYMAMBA_INLINE void ask_for_row(const anymamba_tensor &of, int64_t place, int64_t columns) {
    const int64_t size = of.dtype == ANYMAMBA_BFLOAT16 ? 2 : 4;
    const char *line = static_cast<const char *>(of.data) + place * size;
    for (int64_t at = 0; at < columns * size; at += 64) __builtin_prefetch(line + at, 0, 2);
}

// Asks for the rows of the next chunk while this one is computed: they lie in pages of their own,
// where the machine's own prefetching does not follow.
class Ahead {
  public:
    // `work` is the number of steps over which the requests are spread.
    Ahead(int64_t positions, int64_t work) : positions_(positions), work_(work) {}

    // Rows of `heads` neighbouring heads or groups, the first of which is given.
    void add(const Rows &rows, int64_t heads, int64_t columns) {
        streams_[count_++] = {rows, heads, columns};
        requests_ += heads * positions_;
    }

    ANYMAMBA_INLINE void step(int64_t work) {
        due_ += work * requests_;
        while (due_ >= work_) {
            due_ -= work_;
            fetch();
        }
    }

  private:
    struct Stream {
        Rows rows;
        int64_t heads, columns;
    };

    void fetch() {
        if (stream_ == count_) return;
        const Stream &stream = streams_[stream_];
        const anymamba_tensor &of = *stream.rows.tensor;
        ask_for_row(of, stream.rows.at(position_) + head_ * of.stride[3], stream.columns);
        if (++head_ < stream.heads) return;
        head_ = 0;
        if (++position_ < positions_) return;
        position_ = 0;
        ++stream_;
    }

    static constexpr int64_t kStreams = 16;
    Stream streams_[kStreams];
    int64_t positions_, work_;
    int64_t count_ = 0, requests_ = 0, due_ = 0;
    int64_t stream_ = 0, position_ = 0, head_ = 0;
};

// use(column, vector) for all columns of one row; what lies past the last column reads as zero.
template <class T, class Use>
ANYMAMBA_INLINE void visit_row(const T *from, int64_t columns, const Use &use) {
    int64_t column = 0;
    for (; column + kWidth <= columns; column += kWidth) use(column, load(from + column));
    if (column < columns) use(column, load_part(from + column, columns - column));
}

template <class Use>
ANYMAMBA_INLINE void visit_row(const anymamba_tensor &from, int64_t place, int64_t columns,
                               const Use &use) {
    if (from.dtype == ANYMAMBA_BFLOAT16)
        visit_row(static_cast<const BFloat16 *>(from.data) + place, columns, use);
    else
        visit_row(static_cast<const float *>(from.data) + place, columns, use);
}

template <class T>
ANYMAMBA_INLINE void write_columns(T *to, int64_t columns, Vec first, Vec second) {
    if (columns >= kPanel) {
        store(to, first);
        store(to + kWidth, second);
    } else if (columns > kWidth) {
        store(to, first);
        store_part(to + kWidth, second, columns - kWidth);
    } else {
        store_part(to, first, columns);
    }
}

// Writes one row of a panel, as far as the tensor has columns.
ANYMAMBA_INLINE void write_columns(const anymamba_tensor &to, int64_t place, int64_t columns,
                                   Vec first, Vec second) {
    if (to.dtype == ANYMAMBA_BFLOAT16)
        write_columns(static_cast<BFloat16 *>(to.data) + place, columns, first, second);
    else
        write_columns(static_cast<float *>(to.data) + place, columns, first, second);
}

// Copies positions [0, filled) as rows of `stride` numbers, and zeros up to row `rows`.
inline void copy_rows(const Rows &from, int64_t filled, int64_t rows, int64_t columns, float *to,
                      int64_t stride) {
    const int64_t whole = round_up(columns, kWidth);
    for (int64_t row = 0; row < filled; ++row) {
        float *line = to + row * stride;
        visit_row(*from.tensor, from.at(row), columns,
                  [&](int64_t column, Vec x) { store(line + column, x); });
        for (int64_t column = whole; column < stride; column += kWidth) store(line + column, Vec{});
    }
    for (int64_t place = filled * stride; place < rows * stride; place += kWidth)
        store(to + place, Vec{});
}

// The same as panels over the columns, each [rows][kPanel].
inline void copy_to_panels(const Rows &from, int64_t filled, int64_t rows, int64_t columns,
                           float *to) {
    const int64_t padded = round_up(columns, kPanel);
    for (int64_t row = 0; row < rows; ++row) {
        const auto put = [&](int64_t column, Vec x) {
            store(to + (column / kPanel * rows + row) * kPanel + column % kPanel, x);
        };
        int64_t written = 0;
        if (row < filled) {
            visit_row(*from.tensor, from.at(row), columns, put);
            written = round_up(columns, kWidth);
        }
        for (int64_t column = written; column < padded; column += kWidth) put(column, Vec{});
    }
}

// The transposed of [rows][stride] as panels over the rows; both sizes are whole panels.
inline void transpose_to_panels(const float *from, int64_t rows, int64_t stride, float *to) {
    for (int64_t row = 0; row < rows; row += kWidth) {
        float *panel = to + row / kPanel * kPanel * stride + row % kPanel;
        for (int64_t column = 0; column < stride; column += kWidth)
            transpose_block(from + row * stride + column, stride, panel + column * kPanel, kPanel);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
