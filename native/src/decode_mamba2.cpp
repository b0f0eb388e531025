// One token of a Mamba-2 block (ops/ssd/README.md for the recurrence).
#include "decode_step.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Rows of the state that share a load of b and c.
constexpr int64_t kRows = 4;

// H[p] = alpha H[p] + input[p] b and y[p] = H[p] . c, for kCount rows.
template <int64_t kCount>
ANYMAMBA_INLINE void advance(float *state, int64_t size, float alpha, const float *input,
                             const float *b, const float *c, float *y) {
    Vec sum[kCount] = {};
    int64_t place = 0;
    for (; place + kWidth <= size; place += kWidth) {
        const Vec key = load(b + place), query = load(c + place);
        for (int64_t p = 0; p < kCount; ++p) {
            ask_behind<kWidth>(state + p * size + place);
            const Vec next = load(state + p * size + place) * alpha + key * input[p];
            store(state + p * size + place, next);
            sum[p] += next * query;
        }
    }
    if (place < size) {
        const int64_t rest = size - place;
        const Vec key = load_most(b + place, rest), query = load_most(c + place, rest);
        for (int64_t p = 0; p < kCount; ++p) {
            const Vec next = load_most(state + p * size + place, rest) * alpha + key * input[p];
            store_most(state + p * size + place, next, rest);
            sum[p] += next * query;
        }
    }
    if constexpr (kCount == 4)
        sum_lanes_of_four(sum[0], sum[1], sum[2], sum[3], y);
    else
        for (int64_t p = 0; p < kCount; ++p) y[p] = sum_lanes(sum[p]);
}

void run_head(Step &step, const DecodeLayer &layer, const anymamba_tensor &scan, int64_t row,
              int64_t head) {
    const Board &board = step.board;
    const int64_t size = layer.state, width = layer.headdim, ssm = layer.heads * width;
    const float *z = board.projected + row * board.projected_stride + 2 * layer.mlp;
    const float *x = z + ssm + head * width;
    const float *b = z + 2 * ssm + head / (layer.heads / layer.groups) * size;
    const float *c = b + layer.groups * size;
    const float raw = z[2 * ssm + 2 * layer.groups * size + head];
    const float dt = clamp(first_lane(softplus(splat(raw + layer.dt_bias[head]))), layer.dt_low,
                           layer.dt_high);
    const float alpha = first_lane(exp(splat(dt * layer.a[head])));
    float *input = reinterpret_cast<float *>(step.desk.scratch);
    for (int64_t p = 0; p < width; ++p) input[p] = dt * x[p];
    float *state = static_cast<float *>(scan.data) + row * scan.stride[0] + head * scan.stride[1];
    float *y = input + width;
    int64_t p = 0;
    for (; p + kRows <= width; p += kRows)
        advance<kRows>(state + p * size, size, alpha, input + p, b, c, y + p);
    for (; p < width; ++p) advance<1>(state + p * size, size, alpha, input + p, b, c, y + p);
    for (p = 0; p < width; ++p)
        y[p] += layer.skip[layer.has_skip_per_channel ? head * width + p : head] * x[p];
    const bool gates_now = layer.gate_norm.kind == DecodeNormKind::kNone || !layer.norm_before_gate;
    // Written once, line by line: other workers may still hold what they read here before.
    float *to = board.mixed + row * board.mixed_stride + layer.mlp + head * width;
    if (gates_now)
        gate_row(z + head * width, y, width, to);
    else
        memcpy(to, y, (size_t)width * sizeof(float));
}

// The norm of the gated scan, for this worker: desk.normed.
void normalize_mixed(Step &step, const DecodeLayer &layer) {
    const Board &board = step.board;
    const int64_t ssm = layer.heads * layer.headdim;
    for (int64_t row = 0; row < step.rows; ++row) {
        const float *from = board.mixed + row * board.mixed_stride;
        const float *z = board.projected + row * board.projected_stride + 2 * layer.mlp;
        float *to = step.desk.normed + row * step.desk.normed_stride;
        memcpy(to, from, (size_t)layer.mlp * sizeof(float));
        from += layer.mlp;
        to += layer.mlp;
        for (int64_t start = 0; start < ssm; start += layer.gate_group) {
            DecodeNorm norm = layer.gate_norm;
            norm.weight += start;
            normalize(norm, from + start, layer.gate_group, to + start);
        }
        if (layer.norm_before_gate) gate_row(z, to, ssm, to);
    }
}

// The part that goes around the scan: silu(z0) x0. Rows are dealt out in turn.
void run_around(Step &step, const DecodeLayer &layer) {
    for (int64_t row = step.worker; row < step.rows; row += step.team.size()) {
        const float *z0 = step.board.projected + row * step.board.projected_stride;
        gate_row(z0, z0 + layer.mlp, layer.mlp, step.board.mixed + row * step.board.mixed_stride);
    }
}

}  // namespace

int64_t mamba2_scratch_bytes(const DecodeLayer &layer) {
    return 2 * layer.headdim * (int64_t)sizeof(float);
}

void mix_mamba2(Step &step, const DecodeLayer &layer, const anymamba_tensor *states, Soon after) {
    const Board &board = step.board;
    const int64_t ssm = layer.heads * layer.headdim;
    project_and_convolve(step, layer, step.first_of(states[1], layer.heads), states[0],
                         2 * layer.mlp + ssm, ssm + 2 * layer.groups * layer.state);
    run_around(step, layer);
    step.share_out(step.rows * layer.heads, 1, [&](Share own) {
        for (int64_t task = own.first; task < own.last; ++task)
            run_head(step, layer, states[1], task / layer.heads, task % layer.heads);
    });
    step.wait(step.first_of(layer.out_proj));
    if (layer.gate_norm.kind == DecodeNormKind::kNone) {
        step.present(board.mixed, board.mixed_stride);
    } else {
        normalize_mixed(step, layer);
        step.present(step.desk.normed, step.desk.normed_stride);
    }
    multiply_and_meet(step, layer.out_proj, after, board.branch, board.branch_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
