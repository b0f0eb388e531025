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

// Rows of a matrix of which shares consist: large where every worker still has many of them.
ANYMAMBA_INLINE int64_t unit_of(int64_t rows, int64_t workers) {
    return rows < 12 * kStrip * workers ? kStrip : 3 * kStrip;
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
    // The same for the first `count` rows of a matrix, for which what is presented is prepared.
    // Before the end of a share the next one is taken and its beginning asked for, so that memory
    // goes on.
    template <class Function>
    ANYMAMBA_INLINE void share_rows(const DecodeMatrix &matrix, int64_t count,
                                    const Function &function) {
        prepare(matrix, &desk.x);
        const int64_t unit = unit_of(count, team.size());
        Share own = team.first(worker, count, unit);
        if (own.is_empty()) own = team.take(count, unit);
        while (!own.is_empty()) {
            const int64_t body = larger(own.first, own.last - kStrip);
            if (body > own.first) function({own.first, body});
            const Share next = team.take(count, unit);
            ask_for(matrix, next.first, smaller(next.last, next.first + kStrip));
            function({body, own.last});
            own = next;
        }
    }
    // Meets the others before the first `count` rows of `next` are shared out.
    void meet_before(const DecodeMatrix &next, int64_t count) {
        const Share own = team.first(worker, count, unit_of(count, team.size()));
        const int64_t bytes = row_bytes(next);
        team.wait({static_cast<const char *>(next.data) + own.first * bytes,
                   (own.last - own.first) * bytes});
    }
    void meet_before(const DecodeMatrix &next) { meet_before(next, next.rows); }
    // Meets the others before the heads of all rows are shared out, whose states are in `scan`.
    void meet_before(const anymamba_tensor &scan, int64_t heads) {
        const Share own = team.first(worker, rows * heads, 1);
        const int64_t row = own.first / heads, head = own.first % heads;
        const int64_t from = row * scan.stride[0] + head * scan.stride[1];
        const int64_t together = smaller(heads - head, own.last - own.first) * scan.stride[1];
        const auto *states = static_cast<const float *>(scan.data);
        team.wait({reinterpret_cast<const char *>(states + from),
                   together * (int64_t)sizeof(float)});
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
int64_t mamba1_scratch_bytes(const DecodeLayer &layer);
int64_t mamba2_scratch_bytes(const DecodeLayer &layer);
int64_t mamba3_scratch_bytes(const DecodeLayer &layer);

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
