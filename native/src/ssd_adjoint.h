// The adjoint of one chunk (README section 4): matrix products between panels, head by head.
//
// Every matrix has one of two layouts: rows, [position][column], where it stands on the left of a
// product along either axis; panels over its columns, where it stands on the right.
#pragma once

#include "ssd_shares.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

constexpr int64_t kLine = 16;  // numbers in a line of cache

struct AdjointBuffers {
    // Of a group. Panels over the state: [panel][position][kPanel].
    float *b, *c;
    float *b_turned;  // panels over positions: [panel][state][kPanel]
    // Of a head. Panels over sources, [panel][target][kPanel].
    float *factors;    // from source to target: decay times scale, or the target's own weight
    float *weights;    // the same times C B^T
    float *crossings;  // C B^T decayed, not weighed; then times the gradient of each weight
    // Rows, [position][width].
    float *grad_y, *grad_y_grown, *v_faded, *grad_v;
    // Panels over positions, [panel][width][kPanel].
    float *v_turned, *grad_v_turned;
    // [position][kWidth], unsummed: what a target reads of the earlier state, and what crosses a
    // step inside the chunk.
    float *read, *crossed;
    float *left;    // what a source sends to its scale from behind the chunk
    float *across;  // running sums of the crossings over targets
    float *grad_da, *grad_scale, *grad_own;
    Decay decay;

    AdjointBuffers(Carver &carver, const Sizes &sizes, const Plan &plan) {
        const int64_t positions = plan.padded, square = positions * positions;
        b = carver.floats(plan.rows_size(sizes));
        c = carver.floats(plan.rows_size(sizes));
        b_turned = carver.floats(plan.rows_size(sizes));
        factors = carver.floats(square);
        weights = carver.floats(square);
        crossings = carver.floats(square);
        const int64_t width = plan.width_stride(sizes);
        grad_y = carver.floats(positions * width);
        grad_y_grown = carver.floats(positions * width);
        v_faded = carver.floats(positions * width);
        grad_v = carver.floats(positions * width);
        v_turned = carver.floats(positions * width);
        grad_v_turned = carver.floats(positions * width);
        read = carver.floats(positions * kWidth);
        crossed = carver.floats(positions * kWidth);
        left = carver.floats(positions);
        across = carver.floats(positions);
        grad_da = carver.floats(positions);
        grad_scale = carver.floats(positions);
        grad_own = carver.floats(positions);
        decay.lay_out(carver, positions);
    }
};

struct Adjoint {
    const Sizes &sizes;
    const AdjointBuffers &buffers;
    Decay &decay;
    GroupSums sums;
    Chunk chunk;
    int64_t positions, padded, stride;  // stride: of rows over the width

    Adjoint(const Sizes &of, AdjointBuffers &in, const Plan &plan, const Chunk &at,
            const GroupSums &shared)
        : sizes(of),
          buffers(in),
          decay(in.decay),
          sums(shared),
          chunk(at),
          positions(at.steps * of.rank),
          padded(round_up(at.steps * of.rank, kPanel)),
          stride(plan.width_stride(of)) {}

    int64_t same_time(int64_t position) const { return position / sizes.rank * sizes.rank; }
    // Where a pair lies in panels over sources.
    int64_t pair_place(int64_t target, int64_t source) const {
        return (source / kPanel * padded + target) * kPanel + source % kPanel;
    }
    int64_t state_panels() const { return ceil_div(sizes.state, kPanel); }

    void take_group(const Rows &b, const Rows &c) const;
    void pair_up() const;
    void fade_values(const Rows &v, const StepTensors &steps, int64_t head) const;
    void step_state(const float *from, float *to, Ahead &ahead) const;
    void take_head(const Rows &v, const Rows &grad_y, const StepTensors &steps, int64_t head) const;
    void back_through_pairs(bool first) const;
    void back_to_values(const float *grad_state) const;
    float back_through_state(const float *state, float *grad_state, bool first, Ahead &ahead) const;
    void back_to_group() const;
    void back_to_decay(float kept) const;
    void back_to_weights() const;
    void write_values(const Rows &grad_v) const;
    void write_steps(const StepTensors &grads, int64_t head) const;
};

// Copies B and C, and turns B.
inline void Adjoint::take_group(const Rows &b, const Rows &c) const {
    copy_to_panels(b, positions, padded, sizes.state, buffers.b);
    copy_to_panels(c, positions, padded, sizes.state, buffers.c);
    const int64_t states = sizes.state_padded();
    for (int64_t row = 0; row < padded; row += kWidth) {
        float *turned = buffers.b_turned + row / kPanel * kPanel * states + row % kPanel;
        for (int64_t r = 0; r < states; r += kWidth)
            transpose_block(buffers.b + (r / kPanel * padded + row) * kPanel + r % kPanel, kPanel,
                            turned + r * kPanel, kPanel);
    }
}

// C B^T where a source is not later than its target.
inline void Adjoint::pair_up() const {
    const int64_t states = sizes.state_padded();
    for (int64_t source = 0; source < positions; source += kPanel) {
        float *pairs = sums.pairs + source * padded;
        for_tiles(same_time(source), positions, [&](auto rows, int64_t target) {
            auto tile = zero_tile<rows.value>();
            multiply_panels(tile, buffers.c + target * kPanel, padded,
                            buffers.b_turned + source * states, sizes.state);
            store_tile(pairs + target * kPanel, kPanel, tile);
        });
    }
}

// The values of one head as they are left at the chunk's end; all that the next state needs beside
// B.
inline void Adjoint::fade_values(const Rows &v, const StepTensors &steps, int64_t head) const {
    decay.fill(steps, chunk, sizes.rank, head, padded);
    for (int64_t position = 0; position < positions; ++position) {
        float *faded = buffers.v_faded + position * stride;
        visit_row(*v.tensor, v.at(position), sizes.width,
                  [&](int64_t column, Vec x) { store(faded + column, x * decay.deposit[position]); });
    }
}

// K3 and K4; the two states may be one.
inline void Adjoint::step_state(const float *from, float *to, Ahead &ahead) const {
    for (int64_t panel = 0; panel < state_panels(); ++panel) {
        const float *b = buffers.b + panel * padded * kPanel;
        const int64_t at = panel * sizes.width * kPanel;
        for_tiles(0, sizes.width, [&](auto rows, int64_t p) {
            auto tile = load_tile<rows.value>(from + at + p * kPanel, kPanel);
            scale_tile(tile, decay.keep);
            multiply<Left::kByColumn>(tile, buffers.v_faded + p, stride, b, positions);
            store_tile(to + at + p * kPanel, kPanel, tile);
            ahead.step(rows.value);
        });
    }
}

// Reads what belongs to one head, and weighs the pairs with its decay.
inline void Adjoint::take_head(const Rows &v, const Rows &grad_y, const StepTensors &steps,
                               int64_t head) const {
    decay.fill(steps, chunk, sizes.rank, head, padded);
    for (int64_t target = 0; target < positions; ++target) {
        // Panels of later sources only are never read at this target.
        const int64_t stop = round_up(same_time(target) + sizes.rank, kPanel);
        for_sources(decay, target, sizes.rank, stop,
                    [&](int64_t source, Vec fading, Vec factor, auto which) {
                        const int64_t at = pair_place(target, source);
                        const Vec pairs = load(sums.pairs + at);
                        store(buffers.factors + at, counted(which, factor));
                        store(buffers.weights + at, counted(which, pairs * factor));
                        store(buffers.crossings + at, counted(which, pairs * fading));
                    });
    }
    copy_rows(v, positions, padded, sizes.width, buffers.v_faded, stride);
    transpose_to_panels(buffers.v_faded, padded, stride, buffers.v_turned);
    for (int64_t position = 0; position < positions; ++position) {
        float *faded = buffers.v_faded + position * stride;
        float *plain = buffers.grad_y + position * stride;
        float *grown = buffers.grad_y_grown + position * stride;
        for (int64_t column = 0; column < stride; column += kWidth)
            store(faded + column, load(faded + column) * decay.deposit[position]);
        visit_row(*grad_y.tensor, grad_y.at(position), sizes.width, [&](int64_t column, Vec x) {
            store(plain + column, x);
            store(grown + column, x * decay.grow[position]);
        });
    }
}

// The gradient of every weight, sent on to C B^T, and to what the pair was weighed with.
inline void Adjoint::back_through_pairs(bool first) const {
    for (int64_t source = 0; source < positions; source += kPanel) {
        const float *values = buffers.v_turned + source * stride;
        const int64_t begin = same_time(source);
        float *grad_pairs = sums.grad_pairs + source;
        if (first) {
            for (int64_t target = 0; target < begin; ++target) {
                store(grad_pairs + target * padded, Vec{});
                store(grad_pairs + target * padded + kWidth, Vec{});
            }
        }
        for_tiles(begin, positions, [&](auto rows, int64_t target) {
            auto tile = zero_tile<rows.value>();
            multiply<Left::kByRow>(tile, buffers.grad_y + target * stride, stride, values,
                                   sizes.width);
            const int64_t at = pair_place(target, source);
#pragma GCC unroll 16
            for (int row = 0; row < rows.value; ++row) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const int64_t place = at + row * kPanel + half * kWidth;
                    const Vec grad = tile.at[row][half];
                    float *sum = grad_pairs + (target + row) * padded + half * kWidth;
                    float *crossing = buffers.crossings + place;
                    store(crossing, grad * load(crossing));
                    const Vec share = grad * load(buffers.factors + place);
                    store(sum, first ? share : load(sum) + share);
                }
            }
        });
    }
}

// The gradient of v, transposed: what the chunk's end and the later targets send to each source.
inline void Adjoint::back_to_values(const float *grad_state) const {
    for (int64_t source = 0; source < positions; source += kPanel) {
        const float *b_turned = buffers.b_turned + source * sizes.state_padded();
        const float *values = buffers.v_turned + source * stride;
        float *out = buffers.grad_v_turned + source * stride;
        const int64_t begin = same_time(source);
        const float *weights = buffers.weights + (source * padded + begin * kPanel);
        const float *grad_y = buffers.grad_y + begin * stride;
        const Vec fade[2] = {load(decay.fade + source), load(decay.fade + source + kWidth)};
        const Vec scale[2] = {load(decay.scale + source), load(decay.scale + source + kWidth)};
        Vec left[2] = {Vec{}, Vec{}};
        for_tiles(0, sizes.width, [&](auto rows, int64_t p) {
            auto tile = zero_tile<rows.value>();
            multiply_panels(tile, grad_state + p * kPanel, sizes.width, b_turned, sizes.state);
#pragma GCC unroll 16
            for (int row = 0; row < rows.value; ++row) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    tile.at[row][half] *= fade[half];
                    left[half] +=
                        tile.at[row][half] * load(values + (p + row) * kPanel + half * kWidth);
                    tile.at[row][half] *= scale[half];
                }
            }
            multiply<Left::kByColumn>(tile, grad_y + p, stride, weights, positions - begin);
            store_tile(out + p * kPanel, kPanel, tile);
        });
        store(buffers.left + source, left[0]);
        store(buffers.left + source + kWidth, left[1]);
    }
}

// What passes through the states before and after the chunk, a panel of the state axis at a time:
// first all of B, then all of C, because only one matrix of rows fits the first cache beside the
// panels. The gradient of the state is carried from behind the chunk to before it. Returns what the
// state that crosses the whole chunk sends to every decay.
inline float Adjoint::back_through_state(const float *state, float *grad_state, bool first,
                                         Ahead &ahead) const {
    Vec kept = Vec{};
    for (int64_t place = 0; place < positions * kWidth; place += kWidth)
        store(buffers.read + place, Vec{});
    // The state was written a segment ago and has left the second cache since.
    const int64_t share = ceil_div(sizes.width, positions) * kPanel;
    const float *fetched = state, *const end = state + state_panels() * sizes.width * kPanel;
    for (int64_t panel = 0; panel < state_panels(); ++panel) {
        const float *grad = grad_state + panel * sizes.width * kPanel;
        float *to_b = sums.grad_b + panel * sums.panel_stride;
        for_tiles(0, positions, [&](auto rows, int64_t position) {
            float *at = to_b + position * sums.stride;
            auto tile = first ? zero_tile<rows.value>() : load_tile<rows.value>(at, sums.stride);
            multiply<Left::kByRow>(tile, buffers.v_faded + position * stride, stride, grad,
                                   sizes.width);
            store_tile(at, sums.stride, tile);
            ahead.step(rows.value);
            const float *stop = fetched + rows.value * share;
            for (; fetched < stop && fetched < end; fetched += kLine)
                __builtin_prefetch(fetched, 0, 2);
        });
    }
    for (int64_t panel = 0; panel < state_panels(); ++panel) {
        const float *entry = state + panel * sizes.width * kPanel;
        float *grad = grad_state + panel * sizes.width * kPanel;
        const float *c = buffers.c + panel * padded * kPanel;
        float *to_c = sums.grad_c + panel * sums.panel_stride;
        for_tiles(0, positions, [&](auto rows, int64_t position) {
            auto tile = zero_tile<rows.value>();
            multiply<Left::kByRow>(tile, buffers.grad_y_grown + position * stride, stride, entry,
                                   sizes.width);
#pragma GCC unroll 16
            for (int row = 0; row < rows.value; ++row) {
                const float *own = c + (position + row) * kPanel;
                float *read = buffers.read + (position + row) * kWidth;
                store(read, load(read) + tile.at[row][0] * load(own) +
                                tile.at[row][1] * load(own + kWidth));
                if (first) continue;
                const float *sum = to_c + (position + row) * sums.stride;
                tile.at[row][0] += load(sum);
                tile.at[row][1] += load(sum + kWidth);
            }
            store_tile(to_c + position * sums.stride, sums.stride, tile);
            ahead.step(rows.value);
        });
        for_tiles(0, sizes.width, [&](auto rows, int64_t p) {
            auto tile = load_tile<rows.value>(grad + p * kPanel, kPanel);
#pragma GCC unroll 16
            for (int row = 0; row < rows.value; ++row)
                kept += tile.at[row][0] * load(entry + (p + row) * kPanel) +
                        tile.at[row][1] * load(entry + (p + row) * kPanel + kWidth);
            scale_tile(tile, decay.keep);
            multiply<Left::kByColumn>(tile, buffers.grad_y_grown + p, stride, c, positions);
            store_tile(grad + p * kPanel, kPanel, tile);
            ahead.step(rows.value);
        });
    }
    return sum_lanes(kept) * decay.keep;
}

// The gradient of C B^T, summed over heads, sent on to B and C.
inline void Adjoint::back_to_group() const {
    for (int64_t panel = 0; panel < state_panels(); ++panel) {
        const float *b = buffers.b + panel * padded * kPanel;
        const float *c = buffers.c + panel * padded * kPanel;
        float *to_b = sums.grad_b + panel * sums.panel_stride;
        float *to_c = sums.grad_c + panel * sums.panel_stride;
        for_tiles(0, positions, [&](auto rows, int64_t source) {
            float *at = to_b + source * sums.stride;
            auto tile = load_tile<rows.value>(at, sums.stride);
            const int64_t begin = same_time(source);
            multiply<Left::kByColumn>(tile, sums.grad_pairs + begin * padded + source, padded,
                                      c + begin * kPanel, positions - begin);
            store_tile(at, sums.stride, tile);
        });
        for_tiles(0, positions, [&](auto rows, int64_t target) {
            float *at = to_c + target * sums.stride;
            auto tile = load_tile<rows.value>(at, sums.stride);
            const int64_t end = same_time(target + rows.value - 1) + sizes.rank;
            multiply<Left::kByRow>(tile, sums.grad_pairs + target * padded, padded, b, end);
            store_tile(at, sums.stride, tile);
        });
    }
}

// README 4.2: a step fades whatever crosses it. Every term is a sum of its own, none cancels.
inline void Adjoint::back_to_decay(float kept) const {
    float *grad_da = buffers.grad_da, *across = buffers.across;
    for (int64_t source = 0; source < padded; source += kWidth) store(across + source, Vec{});
    IntVec lanes;
    for (int64_t lane = 0; lane < kWidth; ++lane) lanes[lane] = (int32_t)lane;
    for (int64_t step = chunk.steps - 1; step >= 0; --step) {
        const int64_t first = step * sizes.rank;
        Vec sum = Vec{};
        for (int64_t source = 0; source < first; source += kWidth) {
            const IntVec is_earlier = lanes + (int32_t)source < (int32_t)first;
            const float *column =
                buffers.crossings + source / kPanel * padded * kPanel + source % kPanel;
            Vec running = load(across + source);
            for (int64_t q = 0; q < sizes.rank; ++q)
                running += select(is_earlier, load(column + (first + q) * kPanel), Vec{});
            store(across + source, running);
            sum += select(is_earlier, running * load(decay.scale + source), Vec{});
        }
        store(buffers.crossed + step * kWidth, sum);
    }
    // Behind the last position and the last step the sums are of nothing, and nobody reads them.
    sum_all_lanes(buffers.read, positions, buffers.read);
    sum_all_lanes(buffers.crossed, chunk.steps, grad_da);
    float later = kept;
    for (int64_t step = chunk.steps - 1; step >= 0; --step) {
        for (int64_t f = step * sizes.rank; f < (step + 1) * sizes.rank; ++f)
            later += buffers.read[f];
        grad_da[step] += later;
    }
    float earlier = 0.0f;
    for (int64_t step = 0; step < chunk.steps; ++step) {
        grad_da[step] += earlier;
        for (int64_t f = step * sizes.rank; f < (step + 1) * sizes.rank; ++f)
            earlier += buffers.left[f] * decay.scale[f];
    }
}

// After `back_to_decay`, which leaves the crossings of each source summed over all later targets.
inline void Adjoint::back_to_weights() const {
    for (int64_t step = 0; step < chunk.steps; ++step) {
        const int64_t first = step * sizes.rank, last = first + sizes.rank;
        float to_scale = 0.0f, to_own = 0.0f;
        for (int64_t source = first; source < last; ++source) {
            to_scale += buffers.left[source] + buffers.across[source];
            for (int64_t target = first; target < last; ++target)
                to_own += buffers.crossings[pair_place(target, source)];
        }
        buffers.grad_scale[step] = to_scale;
        buffers.grad_own[step] = to_own;
    }
}

inline void Adjoint::write_values(const Rows &grad_v) const {
    for (int64_t row = 0; row < padded; row += kWidth) {
        const float *turned = buffers.grad_v_turned + row / kPanel * kPanel * stride + row % kPanel;
        for (int64_t p = 0; p < stride; p += kWidth)
            transpose_block(turned + p * kPanel, kPanel, buffers.grad_v + row * stride + p, stride);
    }
    for (int64_t position = 0; position < positions; ++position)
        finish_row(*grad_v.tensor, grad_v.at(position), sizes.width,
                   buffers.grad_v + position * stride);
}

inline void Adjoint::write_steps(const StepTensors &grads, int64_t head) const {
    const auto write = [&](const anymamba_tensor &to, const float *from) {
        const int64_t first = first_step(to, chunk, head);
        for (int64_t step = 0; step < chunk.steps; ++step)
            write_one(to, first + step * to.stride[1], from[step]);
    };
    write(grads.da, buffers.grad_da);
    write(grads.scale, buffers.grad_scale);
    write(grads.own, buffers.grad_own);
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
