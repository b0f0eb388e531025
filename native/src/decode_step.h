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
    float *logits;  // before they are rounded to a half type
    int64_t projected_stride, mixed_stride, narrow_stride, hidden_stride, branch_stride;
    int64_t logits_stride;
};

// What one worker has for itself.
struct Desk {
    float *stream;  // the residual stream, (rows, branch_stride)
    float *normed;  // (rows, normed_stride)
    int64_t normed_stride;
    char *scratch;  // see scratch_bytes
    Activations x;
};

// Rows of a matrix that are claimed together, at least: a panel of integers. Several vectors of
// floating-point formats meet groups of two or three rows, and want no row left over.
constexpr int64_t kStrip = 16, kStripOfGroups = 48;
static_assert(kStrip % kDecodePanel == 0 && kStrip % kDecodeGroup == 0, "strips are whole panels");

// A worker's part of the rows of a matrix.
struct Part {
    Rows rows;      // in whole strips, which others may claim
    Share rest;     // what does not divide into as many places
    int64_t strip;  // rows that are claimed together, at each place

    int64_t pieces() const { return ceil_div(rows.own.last - rows.own.first, strip); }
    Rows at(Share pieces) const {
        const int64_t start = rows.own.first;
        return {{start + pieces.first * strip, smaller(rows.own.last, start + pieces.last * strip)},
                rows.places, rows.apart};
    }
    Rows behind(Rows claimed) const {
        return {{claimed.own.last, rows.own.last}, rows.places, rows.apart};
    }
};

// What each worker has of `units` of work.
ANYMAMBA_INLINE Share even_part(int64_t units, int64_t worker, int64_t workers) {
    return {units * worker / workers, units * (worker + 1) / workers};
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
    // Calls function(share) for every share of `count` pieces, in whole units, that this worker has
    // or takes.
    template <class Function>
    ANYMAMBA_INLINE void share_out(int64_t count, int64_t unit, const Function &function) {
        const int64_t units = ceil_div(count, unit);
        const Share own = even_part(units, worker, team.size());
        team.begin(worker, own.last - own.first);
        for (Claim claim = team.claim(worker); !claim.is_empty(); claim = team.claim(worker)) {
            const int64_t start = even_part(units, claim.owner, team.size()).first;
            function(Share{(start + claim.pieces.first) * unit,
                           smaller(count, (start + claim.pieces.last) * unit)});
        }
    }
    // Calls function(rows, soon) for all of the first `count` rows of a matrix that this worker has
    // or takes, after preparing for it what is presented. `soon` is what this worker reads behind
    // them; `after` what it reads after the stage. So memory goes on through meetings.
    template <class Function>
    ANYMAMBA_INLINE void share_rows(const DecodeMatrix &matrix, int64_t count, Soon after,
                                    const Function &function) {
        prepare(matrix, &desk.x);
        const Part own = part_of(matrix, count, worker);
        team.begin(worker, own.pieces());
        if (!own.rest.is_empty()) function(Rows{own.rest}, memory_of(matrix, own.rows));
        for (Claim claim = team.claim(worker); !claim.is_empty(); claim = team.claim(worker)) {
            const bool is_own = claim.owner == worker;
            const Part part = is_own ? own : part_of(matrix, count, claim.owner);
            const Rows claimed = part.at(claim.pieces), behind = part.behind(claimed);
            const bool is_last = !is_own || behind.own.is_empty();
            const Soon soon = is_last ? after : memory_of(matrix, behind);
            // What several vectors of floats ask for begins behind this; the others ask for nothing
            // beyond what they read.
            const bool asks_itself = rows > 1 && matrix.scales == nullptr;
            if (is_last)
                ask_for(soon, kReach - (asks_itself ? memory_of(matrix, claimed).bytes : 0));
            function(claimed, soon);
        }
    }
    // What a worker has of the first `count` rows of a matrix.
    Part part_of(const DecodeMatrix &matrix, int64_t count, int64_t of) const {
        const bool is_grouped = rows > 1 && matrix.scales == nullptr;
        const bool is_large = count >= 4 * kStripOfGroups * team.size();
        const int64_t strip = is_grouped && is_large ? kStripOfGroups : kStrip;
        const Share strips = even_part(ceil_div(count, strip), of, team.size());
        const Share own{strips.first * strip, smaller(count, strips.last * strip)};
        // Few strips stay at one place, where others may claim each of them.
        const int64_t streams = rows > 1 ? 1 : streams_of(matrix.format);
        const int64_t places = strips.last - strips.first < 2 * streams ? 1 : streams;
        if (places == 1) return {{own}, {0, 0}, strip};
        const int64_t apart = (own.last - own.first) / strip / places * strip;
        return {{{own.first, own.first + apart}, places, apart},
                {own.first + places * apart, own.last},
                strip};
    }
    // What this worker reads first of the first `count` rows of a matrix.
    Soon first_of(const DecodeMatrix &next, int64_t count) const {
        const Part own = part_of(next, count, worker);
        return memory_of(next, own.rest.is_empty() ? own.rows : Rows{own.rest});
    }
    Soon first_of(const DecodeMatrix &next) const { return first_of(next, next.rows); }
    // The same of the heads of all rows, whose states are in `scan`.
    Soon first_of(const anymamba_tensor &scan, int64_t heads) const {
        const Share own = even_part(rows * heads, worker, team.size());
        const int64_t row = own.first / heads, head = own.first % heads;
        const int64_t from = row * scan.stride[0] + head * scan.stride[1];
        const int64_t together = smaller(heads - head, own.last - own.first) * scan.stride[1];
        const auto *states = static_cast<const float *>(scan.data);
        return {reinterpret_cast<const char *>(states + from), together * (int64_t)sizeof(float)};
    }
    void wait(Soon soon) { team.wait(worker, soon); }
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
