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
    char *scratch;  // see scratch_bytes
    Activations x;
};

// Rows that are read together, at most.
constexpr int64_t kStrip = 16;

// The rows of as many strips as one vector reads at once.
constexpr int64_t kStrips = kMostStreams * kStrip;

// Rows of a matrix of which shares consist: large where every worker still has many of them.
ANYMAMBA_INLINE int64_t unit_of(int64_t rows, int64_t workers) {
    return rows < 12 * kStrip * workers ? kStrip : kStrips;
}

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
    // Calls function(share) for every share of `count` pieces that this worker has or takes.
    template <class Function>
    ANYMAMBA_INLINE void share_out(int64_t count, int64_t unit, const Function &function) {
        Share own = team.first(worker, count, unit);
        if (own.is_empty()) own = team.take(count, unit);
        for (; !own.is_empty(); own = team.take(count, unit)) function(own);
    }
    // Calls function(share, soon) for every share of the first `count` rows of a matrix, for which
    // what is presented is prepared. `soon` is what this worker reads behind the share; `after`
    // what it reads after the stage. So memory goes on at the end of a share and through meetings.
    template <class Function>
    ANYMAMBA_INLINE void share_rows(const DecodeMatrix &matrix, int64_t count, Soon after,
                                    const Function &function) {
        prepare(matrix, &desk.x);
        const int64_t unit = unit_of(count, team.size());
        Share own = team.first(worker, count, unit);
        if (own.is_empty()) own = team.take(count, unit);
        while (!own.is_empty()) {
            const Share body = body_of(matrix, own), rest{body.last, own.last};
            if (!body.is_empty()) function(body, rows_of(matrix, rest, rows));
            const Share next = team.take(count, unit);
            const Soon soon = next.is_empty() ? after : first_rows_of(matrix, next);
            // What several vectors of floats ask for begins behind this; the others ask for nothing
            // beyond a share.
            const bool asks_itself = rows > 1 && matrix.scales == nullptr;
            ask_for(soon, kReach - (asks_itself ? (own.last - body.last) * row_bytes(matrix) : 0));
            function(rest, soon);
            own = next;
        }
    }
    // A share without its last rows, during which the next share is taken.
    Share body_of(const DecodeMatrix &matrix, Share own) const {
        const int64_t together = rows == 1 ? kStrips : kStrip;
        const int64_t reach = ceil_div(ceil_div(kReach, row_bytes(matrix)), together) * together;
        return {own.first, larger(own.first, (own.last - reach) / kStrip * kStrip)};
    }
    // What is read first of a share.
    Soon first_rows_of(const DecodeMatrix &matrix, Share own) const {
        const Share body = body_of(matrix, own);
        return rows_of(matrix, body.is_empty() ? own : body, rows);
    }
    // What this worker reads first of the first `count` rows of a matrix.
    Soon first_of(const DecodeMatrix &next, int64_t count) const {
        return first_rows_of(next, team.first(worker, count, unit_of(count, team.size())));
    }
    Soon first_of(const DecodeMatrix &next) const { return first_of(next, next.rows); }
    // The same of the heads of all rows, whose states are in `scan`.
    Soon first_of(const anymamba_tensor &scan, int64_t heads) const {
        const Share own = team.first(worker, rows * heads, 1);
        const int64_t row = own.first / heads, head = own.first % heads;
        const int64_t from = row * scan.stride[0] + head * scan.stride[1];
        const int64_t together = smaller(heads - head, own.last - own.first) * scan.stride[1];
        const auto *states = static_cast<const float *>(scan.data);
        return {reinterpret_cast<const char *>(states + from), together * (int64_t)sizeof(float)};
    }
    // Shows `values` to the matrices that follow.
    void present(const float *values, int64_t stride) {
        desk.x.rows = rows;
        desk.x.values = values;
        desk.x.stride = stride;
    }
};

// Of Desk::scratch, what a layer needs.
int64_t scratch_bytes(const DecodeLayer &layer);
int64_t attention_scratch_bytes(const DecodeLayer &layer);
int64_t mamba1_scratch_bytes(const DecodeLayer &layer);
int64_t mamba2_scratch_bytes(const DecodeLayer &layer);
int64_t mamba3_scratch_bytes(const DecodeLayer &layer);

void normalize(const DecodeNorm &norm, const float *from, int64_t count, float *to);

// The mixers, from desk.normed to board.branch. `after` is what the worker reads then.
void mix_attention(Step &step, const DecodeLayer &layer, const anymamba_tensor *states, Soon after);
void mix_mamba1(Step &step, const DecodeLayer &layer, const anymamba_tensor *states, Soon after);
void mix_mamba2(Step &step, const DecodeLayer &layer, const anymamba_tensor *states, Soon after);
void mix_mamba3(Step &step, const DecodeLayer &layer, const anymamba_tensor *states, Soon after);

// The worker's share of `matrix` times what is presented, and the meeting after it. `after` is what
// the worker reads then.
void multiply_and_meet(Step &step, const DecodeMatrix &matrix, Soon after, float *out,
                       int64_t out_stride);

// The same of the in-projection, with the convolution of those of its rows that are channels:
// `first_channel` is the row of the first one.
void project_and_convolve(Step &step, const DecodeLayer &layer, Soon after,
                          const anymamba_tensor &window, int64_t first_channel, int64_t channels);

ANYMAMBA_INLINE float first_lane(Vec value) { return value[0]; }

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
        store_most(to + place, silu(load_most(gate + place, rest)) * load_most(from + place, rest),
                   rest);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
