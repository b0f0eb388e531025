// One token of a model: what the workers share, what each of them has for itself.
//
// Stages that divide work are separated by meetings. What costs little, the norms, every worker
// computes for itself: that is cheaper than a meeting, and the result is the same.
#pragma once

#include "decode_matrix.h"
#include "decode_team.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Shared results of a stage, (rows, stride) each.
struct Board {
    float *projected, *mixed, *narrow, *hidden, *branch;
    int64_t projected_stride, mixed_stride, narrow_stride, hidden_stride, branch_stride;
};

// What one worker has for itself.
struct Desk {
    float *stream;  // the residual stream, (rows, branch_stride)
    float *normed;  // (rows, normed_stride)
    int64_t normed_stride;
    float *scratch;  // see scratch_floats
    Activations x;
};

struct Step {
    const DecodeProgram &program;
    const anymamba_tensor *tensors;
    int64_t rows;
    Team &team;
    int64_t worker;
    Board board;
    Desk desk;

    const anymamba_tensor *states(int64_t layer) const {
        return tensors + kDecodeStates + layer * kDecodeStatesPerLayer;
    }
    Share share(int64_t count, int64_t unit) const {
        return Share(count, unit, worker, team.size());
    }
    // Shows `values` to the matrices that follow.
    void present(const float *values, int64_t stride) {
        desk.x.rows = rows;
        desk.x.values = values;
        desk.x.stride = stride;
    }
};

// A worker multiplies this many rows at a time, so that a share never splits a group.
constexpr int64_t kShareUnit = 8;

int64_t scratch_floats(const DecodeLayer &layer);

void normalize(const DecodeNorm &norm, const float *from, int64_t count, float *to);

// The mixers, from desk.normed to board.branch; they end before the last meeting.
void mix_mamba1(Step &step, const DecodeLayer &layer, const anymamba_tensor *states);
void mix_mamba2(Step &step, const DecodeLayer &layer, const anymamba_tensor *states);
void mix_mamba3(Step &step, const DecodeLayer &layer, const anymamba_tensor *states);

// The worker's share of `matrix` times what is presented.
void multiply_share(Step &step, const DecodeMatrix &matrix, float *out, int64_t out_stride);

// The worker's share of the in-projection, and the convolution of those of its rows that are
// channels: `first_channel` is the row of the first one.
void project_and_convolve(Step &step, const DecodeLayer &layer, const anymamba_tensor &window,
                          int64_t first_channel, int64_t channels);

ANYMAMBA_INLINE float first_of(Vec value) { return value[0]; }

ANYMAMBA_INLINE float clamp(float value, double low, double high) {
    if (value < (float)low) return (float)low;
    return value > (float)high ? (float)high : value;
}

// to = silu(gate) * from.
ANYMAMBA_INLINE void gate_row(const float *gate, const float *from, int64_t count, float *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth)
        store(to + place, silu(load(gate + place)) * load(from + place));
    if (place < count) {
        const int64_t rest = count - place;
        store_part(to + place, silu(load_part(gate + place, rest)) * load_part(from + place, rest),
                   rest);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
