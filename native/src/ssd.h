// What forward and backward of the SSD core share: sizes, chunks, the decay of a chunk, and moving
// rows between tensors and panels. The mathematics is src/anymamba/ops/ssd/README.md.
//
// Inside a chunk, time and rank are one axis of positions: f = step * rank + q.
#pragma once

#include "gemm.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

ANYMAMBA_INLINE int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }
ANYMAMBA_INLINE int64_t at_least(int64_t x, int64_t limit) { return x > limit ? x : limit; }
ANYMAMBA_INLINE int64_t parts_of(int64_t x, int64_t size) { return (x + size - 1) / size; }
ANYMAMBA_INLINE int64_t round_up(int64_t x, int64_t size) { return parts_of(x, size) * size; }

struct Sizes {
    int64_t rows, length, rank, heads, width, groups, state;
    int64_t sequences;  // how many are packed into the one row; 0 when rows are not packed
    bool strict;

    explicit Sizes(const int64_t *sizes)
        : rows(sizes[0]),
          length(sizes[1]),
          rank(sizes[2]),
          heads(sizes[3]),
          width(sizes[4]),
          groups(sizes[5]),
          state(sizes[6]),
          sequences(sizes[7]),
          strict(sizes[8] != 0) {}

    int64_t group_of(int64_t head) const { return head / (heads / groups); }
    int64_t width_panels() const { return parts_of(width, kPanel); }
    int64_t state_padded() const { return round_up(state, kPanel); }
};

// Hands out the workspace front to back. Without memory it only counts, so that the size that is
// asked for and the layout that is used come from the same lines.
class Arena {
  public:
    explicit Arena(void *memory) : base_(static_cast<char *>(memory)) {}

    template <class T = float>
    T *take(int64_t count) {
        char *place = base_ == nullptr ? nullptr : base_ + used_;
        used_ += round_up(count * (int64_t)sizeof(T), 64);
        return reinterpret_cast<T *>(place);
    }

    int64_t used() const { return used_; }

  private:
    char *base_;
    int64_t used_ = 0;
};

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

// Asks for the rows of the next chunk while this one is computed: they lie in pages of their own,
// where the machine's own prefetching does not follow.
class Ahead {
  public:
    // `work` is the number of steps over which the requests are spread.
    Ahead(int64_t positions, int64_t work) : positions_(positions), work_(work) {}

    // Rows of `heads` neighbouring heads or groups, the first of which is given.
    void add(const Rows &rows, int64_t heads, int64_t columns) {
        const int64_t size = rows.tensor->dtype == ANYMAMBA_BFLOAT16 ? 2 : 4;
        streams_[count_++] = {rows, heads, columns * size, size};
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
        int64_t heads, bytes, element;
    };

    void fetch() {
        if (stream_ == count_) return;
        const Stream &stream = streams_[stream_];
        const int64_t place = stream.rows.at(position_) + head_ * stream.rows.tensor->stride[3];
        const char *line = static_cast<const char *>(stream.rows.tensor->data) +
                           place * stream.element;
        for (int64_t at = 0; at < stream.bytes; at += 64) __builtin_prefetch(line + at, 0, 2);
        if (++head_ < stream.heads) return;
        head_ = 0;
        if (++position_ < positions_) return;
        position_ = 0;
        ++stream_;
    }

    static constexpr int64_t kStreams = 8;
    Stream streams_[kStreams];
    int64_t positions_, work_;
    int64_t count_ = 0, requests_ = 0, due_ = 0;
    int64_t stream_ = 0, position_ = 0, head_ = 0;
};

ANYMAMBA_INLINE float read(const anymamba_tensor &from, int64_t place) {
    return from.dtype == ANYMAMBA_BFLOAT16 ? widen(static_cast<const BFloat16 *>(from.data)[place])
                                           : static_cast<const float *>(from.data)[place];
}

ANYMAMBA_INLINE void write(const anymamba_tensor &to, int64_t place, float value) {
    if (to.dtype == ANYMAMBA_BFLOAT16)
        narrow(static_cast<BFloat16 *>(to.data) + place, value);
    else
        narrow(static_cast<float *>(to.data) + place, value);
}

// use(column, vector) for all columns of one row; what lies past the last column reads as zero.
template <class T, class Use>
ANYMAMBA_INLINE void read_row(const T *from, int64_t columns, const Use &use) {
    int64_t column = 0;
    for (; column + kWidth <= columns; column += kWidth) use(column, load(from + column));
    if (column < columns) use(column, load_part(from + column, columns - column));
}

template <class Use>
ANYMAMBA_INLINE void read_row(const anymamba_tensor &from, int64_t place, int64_t columns,
                              const Use &use) {
    if (from.dtype == ANYMAMBA_BFLOAT16)
        read_row(static_cast<const BFloat16 *>(from.data) + place, columns, use);
    else
        read_row(static_cast<const float *>(from.data) + place, columns, use);
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

template <class T>
ANYMAMBA_INLINE void write_row(T *to, int64_t columns, const float *from) {
    int64_t column = 0;
    for (; column + kWidth <= columns; column += kWidth) store(to + column, load(from + column));
    for (; column < columns; ++column) narrow(to + column, from[column]);
}

ANYMAMBA_INLINE void write_row(const anymamba_tensor &to, int64_t place, int64_t columns,
                               const float *from) {
    if (to.dtype == ANYMAMBA_BFLOAT16)
        write_row(static_cast<BFloat16 *>(to.data) + place, columns, from);
    else
        write_row(static_cast<float *>(to.data) + place, columns, from);
}

// Copies positions [0, filled) as rows of `stride` numbers, and zeros up to row `rows`.
inline void copy_rows(const Rows &from, int64_t filled, int64_t rows, int64_t columns, float *to,
                      int64_t stride) {
    const int64_t whole = round_up(columns, kWidth);
    for (int64_t row = 0; row < filled; ++row) {
        float *line = to + row * stride;
        read_row(*from.tensor, from.at(row), columns,
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
            read_row(*from.tensor, from.at(row), columns, put);
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

// The decay of one head in one chunk, as numbers per position (README section 5). cum is kept in
// two parts, multiples of 1/64 and rests, so that the difference of two neighbours stays exact
// behind a stretch of strong decay.
struct Decay {
    float *whole, *rest;
    float *grow;  // exp(cum)
    float *fade;  // exp(end - cum)
    float keep;   // exp(end)

    void lay_out(Arena &arena, int64_t padded) {
        whole = arena.take(padded);
        rest = arena.take(padded);
        grow = arena.take(padded);
        fade = arena.take(padded);
    }

    void fill(const anymamba_tensor &da, const Chunk &chunk, int64_t rank, int64_t head,
              int64_t padded);
};

// Below this exponent exp is exactly zero, subnormal numbers included.
constexpr float kVanishing = -120.0f;
constexpr float kUnits = 64.0f;
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

inline void Decay::fill(const anymamba_tensor &da, const Chunk &chunk, int64_t rank, int64_t head,
                        int64_t padded) {
    const int64_t first = chunk.row * da.stride[0] + chunk.start * da.stride[1] +
                          head * da.stride[2];
    float whole_sum = 0.0f, rest_sum = 0.0f;
    int64_t position = 0;
    for (int64_t step = 0; step < chunk.steps; ++step) {
        float x = read(da, first + step * da.stride[1]);
        x = x < kVanishing ? kVanishing : x;
        const float units = (x * kUnits + kRoundToInteger) - kRoundToInteger;
        whole_sum += units / kUnits;
        rest_sum += x - units / kUnits;
        for (int64_t q = 0; q < rank; ++q, ++position) {
            whole[position] = whole_sum;
            rest[position] = rest_sum;
        }
    }
    // The padding carries the decay of the last step, so that no exponent there is positive.
    for (; position < padded; ++position) {
        whole[position] = whole_sum;
        rest[position] = rest_sum;
    }
    for (int64_t place = 0; place < padded; place += kWidth) {
        const Vec w = load(whole + place), r = load(rest + place);
        store(grow + place, exp(w + r));
        store(fade + place, exp((whole_sum - w) + (rest_sum - r)));
    }
    keep = grow[padded - 1];
}

// How the sources [0, padded) reach one target: use(first source, factors, which count). The factor
// is the decay of an earlier source, 1 at the same time unless strict; no other source counts.
template <class Use>
ANYMAMBA_INLINE void for_sources(const Decay &decay, int64_t target, int64_t rank, int64_t padded,
                                 bool strict, const Use &use) {
    const int64_t same_time = target / rank * rank;
    const int32_t earlier = (int32_t)same_time, counted = (int32_t)(same_time + (strict ? 0 : rank));
    IntVec lanes;
    for (int64_t lane = 0; lane < kWidth; ++lane) lanes[lane] = (int32_t)lane;
    for (int64_t source = 0; source < padded; source += kWidth) {
        const IntVec place = lanes + (int32_t)source;
        Vec factor = splat(1.0f);
        if (source < same_time) {
            const Vec whole = decay.whole[target] - load(decay.whole + source);
            const Vec fading = exp(whole + decay.rest[target] - load(decay.rest + source));
            factor = select(place < earlier, fading, factor);
        }
        use(source, factor, place < counted);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
