// Where the gradients of B and C are summed over heads. A task that has all heads of a group sums
// in memory of its worker. Where a group is split over tasks, each has a share of the sums, except
// the first task of a group, which sums in the gradients themselves where their layout allows it.
#pragma once

#include "ssd_plan.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

// What the heads of a group that one task walks have in common in one chunk.
struct GroupSums {
    float *pairs;       // C B^T, panels over sources: [panel][target][kPanel]
    float *grad_pairs;  // rows, [target][source], summed over the heads
    // The gradients of B and C, summed over the heads: panels over the state, or the tensors
    // themselves.
    float *grad_b, *grad_c;
    int64_t panel_stride, stride;  // between two panels, and between two positions of a panel
};

struct GroupGradients {
    const Sizes &sizes;
    const anymamba_tensor &b, &c;

    bool may_sum_in_place() const;
    GroupSums in_place(const GroupSums &sums, const Chunk &chunk, int64_t group) const;
    void write(const Chunk &chunk, int64_t group, const GroupSums &sums) const;
    void add_shares(const Chunk &chunk, int64_t group, const Plan &plan, const float *shares) const;

  private:
    template <class Sum>
    void fill(const anymamba_tensor &to, const Chunk &chunk, int64_t group, const Sum &sum) const;
};

// Rows of whole panels, evenly spaced, in the precision of the sums.
inline bool GroupGradients::may_sum_in_place() const {
    const auto is_plain = [&](const anymamba_tensor &grad) {
        return grad.dtype == ANYMAMBA_FLOAT32 &&
               (sizes.rank == 1 || grad.stride[1] == sizes.rank * grad.stride[2]);
    };
    return sizes.state % kPanel == 0 && is_plain(b) && is_plain(c) &&
           b.stride[1] == c.stride[1] && b.stride[2] == c.stride[2];
}

inline GroupSums GroupGradients::in_place(const GroupSums &sums, const Chunk &chunk,
                                          int64_t group) const {
    const auto first = [&](const anymamba_tensor &grad) {
        return static_cast<float *>(grad.data) + Rows(grad, chunk, sizes.rank, group).first;
    };
    return {sums.pairs, sums.grad_pairs, first(b), first(c), kPanel,
            b.stride[sizes.rank == 1 ? 1 : 2]};
}

// Writes every panel of every position: sum(its place in panels, its place in the tensor, out).
template <class Sum>
ANYMAMBA_INLINE void GroupGradients::fill(const anymamba_tensor &to, const Chunk &chunk,
                                          int64_t group, const Sum &sum) const {
    const Rows rows(to, chunk, sizes.rank, group);
    const int64_t positions = chunk.steps * sizes.rank, padded = round_up(positions, kPanel);
    for (int64_t position = 0; position < positions; ++position) {
        for (int64_t r = 0; r < sizes.state; r += kPanel) {
            Tile<1> tile = zero_tile<1>();
            sum(r * padded + position * kPanel, rows.at(position) + r, tile);
            write_columns(to, rows.at(position) + r, sizes.state - r, tile.at[0][0],
                          tile.at[0][1]);
        }
    }
}

ANYMAMBA_INLINE void add_panel(const float *from, Tile<1> &tile) {
    tile.at[0][0] += load(from);
    tile.at[0][1] += load(from + kWidth);
}

inline void GroupGradients::write(const Chunk &chunk, int64_t group, const GroupSums &sums) const {
    const auto copy = [&](const anymamba_tensor &to, const float *from) {
        fill(to, chunk, group,
             [&](int64_t place, int64_t, Tile<1> &tile) { add_panel(from + place, tile); });
    };
    copy(b, sums.grad_b);
    copy(c, sums.grad_c);
}

// Adds the shares of one chunk in the order of the heads, whoever computed them; `shares` is the
// first of them.
inline void GroupGradients::add_shares(const Chunk &chunk, int64_t group, const Plan &plan,
                                       const float *shares) const {
    const int64_t step = plan.length * 2 * plan.rows_size(sizes);
    const auto add = [&](const anymamba_tensor &to, const float *first) {
        fill(to, chunk, group, [&](int64_t place, int64_t target, Tile<1> &tile) {
            if (plan.in_place) add_panel(static_cast<const float *>(to.data) + target, tile);
            for (int64_t share = 0; share < plan.shares(); ++share)
                add_panel(first + share * step + place, tile);
        });
    };
    add(b, shares);
    add(c, shares + plan.rows_size(sizes));
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
