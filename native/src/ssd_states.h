// States between tensors, (sequence, head, width, state), and the panels that the kernels keep:
// over the width for the forward, over the state for the backward. Padding of panels is zero.
#pragma once

#include "ssd.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

// The state of one head in a tensor. Any strides: an initial state may be one expanded number.
struct HeadState {
    const anymamba_tensor &tensor;
    int64_t first;

    HeadState(const anymamba_tensor &of, int64_t sequence, int64_t head)
        : tensor(of), first(sequence * of.stride[0] + head * of.stride[1]) {}

    int64_t at(int64_t p, int64_t r) const {
        return first + p * tensor.stride[2] + r * tensor.stride[3];
    }
    bool is_plain() const { return tensor.dtype == ANYMAMBA_FLOAT32 && tensor.stride[3] == 1; }
    float *plain(int64_t p, int64_t r) const {
        return static_cast<float *>(tensor.data) + at(p, r);
    }
};

// A block of kWidth x kWidth: how much of it the tensor has, and where it lies in the panels.
struct Corner {
    int64_t p, r, columns, rows, place;

    bool is_whole() const { return columns == kWidth && rows == kWidth; }
};

// body(corner) for the panels [first, first + panels) over the width, each [state][kPanel].
template <class Body>
ANYMAMBA_INLINE void for_corners(const Sizes &sizes, int64_t first, int64_t panels,
                                 const Body &body) {
    for (int64_t column = 0; column < panels * kPanel; column += kWidth) {
        const int64_t panel = column / kPanel * sizes.state * kPanel + column % kPanel;
        const int64_t p = first * kPanel + column;
        const int64_t columns = larger(0, smaller(kWidth, sizes.width - p));
        for (int64_t r = 0; r < sizes.state; r += kWidth)
            body(Corner{p, r, columns, smaller(kWidth, sizes.state - r), panel + r * kPanel});
    }
}

inline void load_by_width(const HeadState &from, const Sizes &sizes, int64_t first, int64_t panels,
                          float *to) {
    for_corners(sizes, first, panels, [&](const Corner &at) {
        if (at.is_whole() && from.is_plain()) {
            transpose_block(from.plain(at.p, at.r), from.tensor.stride[2], to + at.place, kPanel);
            return;
        }
        for (int64_t row = 0; row < at.rows; ++row)
            for (int64_t column = 0; column < kWidth; ++column)
                to[at.place + row * kPanel + column] =
                    column < at.columns ? read_one(from.tensor, from.at(at.p + column, at.r + row))
                                        : 0.0f;
    });
}

inline void store_by_width(const float *from, const Sizes &sizes, int64_t first, int64_t panels,
                           const HeadState &to) {
    for_corners(sizes, first, panels, [&](const Corner &at) {
        if (at.is_whole() && to.is_plain()) {
            transpose_block(from + at.place, kPanel, to.plain(at.p, at.r), to.tensor.stride[2]);
            return;
        }
        for (int64_t column = 0; column < at.columns; ++column)
            for (int64_t row = 0; row < at.rows; ++row)
                write_one(to.tensor, to.at(at.p + column, at.r + row),
                          from[at.place + row * kPanel + column]);
    });
}

// use(column, vector) for the state of one number of the width; what lies past its end is zero.
template <class Use>
ANYMAMBA_INLINE void visit_state(const HeadState &from, const Sizes &sizes, int64_t p,
                                 const Use &use) {
    if (from.tensor.stride[3] == 1) {
        visit_row(from.tensor, from.at(p, 0), sizes.state, use);
        return;
    }
    for (int64_t r = 0; r < sizes.state; r += kWidth) {
        float lanes[kWidth] = {};
        for (int64_t lane = 0; lane < smaller(kWidth, sizes.state - r); ++lane)
            lanes[lane] = read_one(from.tensor, from.at(p, r + lane));
        use(r, load(lanes));
    }
}

// Panels over the state, each [width][kPanel].
inline void load_by_state(const HeadState &from, const Sizes &sizes, float *to) {
    for (int64_t p = 0; p < sizes.width; ++p) {
        const auto put = [&](int64_t r, Vec x) {
            store(to + (r / kPanel * sizes.width + p) * kPanel + r % kPanel, x);
        };
        visit_state(from, sizes, p, put);
        for (int64_t r = round_up(sizes.state, kWidth); r < sizes.state_padded(); r += kWidth)
            put(r, Vec{});
    }
}

inline void store_by_state(const float *from, const Sizes &sizes, const HeadState &to) {
    for (int64_t p = 0; p < sizes.width; ++p) {
        for (int64_t r = 0; r < sizes.state; r += kPanel) {
            const float *part = from + (r / kPanel * sizes.width + p) * kPanel;
            write_columns(to.tensor, to.at(p, r), sizes.state - r, load(part), load(part + kWidth));
        }
    }
}

// A sequence without tokens hands its state, or the gradient of its state, through.
inline void copy_state(const HeadState &from, const Sizes &sizes, const HeadState &to) {
    for (int64_t p = 0; p < sizes.width; ++p)
        for (int64_t r = 0; r < sizes.state; ++r)
            write_one(to.tensor, to.at(p, r), read_one(from.tensor, from.at(p, r)));
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
