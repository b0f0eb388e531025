// The adjoint's first pass, left to right: the state that enters each chunk, and the gradient of
// the gate, which needs the outputs before it.
#pragma once

#include "scan_adjoint.h"

namespace anymamba::ANYMAMBA_VARIANT {

template <bool kOutputs>
inline void advance_vector(const ScanShape &shape, const ScanWorker &worker, int64_t tokens,
                           int64_t vector) {
    const Stage &stage = worker.stage;
    const int64_t at = vector * shape.token_stride(), states_at = vector * shape.state_stride();
    const bool tame = is_tame(tokens, stage.dt + at, load(stage.bound + vector * kWidth));
    float *output = worker.grad_input + at;
    if (kOutputs) memset(output, 0, (size_t)(tokens * kWidth) * sizeof(float));
    with_coefficients(shape, stage, vector, [&](auto b, auto c) {
        const auto run = [&](auto together, int64_t r) {
            constexpr int kStates = decltype(together)::kCount;
            const int64_t place = states_at + r * kWidth;
            fill_decays<kStates>(tame, tokens, stage.dt + at, stage.rate + place, stage.decay);
            advance<kStates, kOutputs, false>(tokens, stage.decay, stage.input + at, b.from(r),
                                              c.from(r), stage.state + place, output, nullptr);
        };
        for_states(shape.states, run);
    });
}

// grad_z = grad_y (C h + skip u) silu'(z), for the outputs that `advance_vector` left.
inline void write_grad_z(const ScanAdjoint &problem, const Block &block, const ScanWorker &worker,
                         const Chunk &chunk) {
    const anymamba_tensor &grad_z = problem.grad.z;
    const Stage &stage = worker.stage;
    const bool skips = problem.in.skip.data != nullptr;
    for (int64_t t = 0; t < chunk.tokens(); ++t) {
        const int64_t token = chunk.start + t;
        const float *u = problem.row(problem.in.u, block, token, stage.row[0]);
        const float *z = problem.row(problem.in.z, block, token, stage.row[1]);
        const float *grad_y = problem.row(problem.grad.y, block, token, stage.row[2]);
        const int64_t offset = token_offset(grad_z, block.row, token) + block.channel;
        float *row = open_row(grad_z, offset, block.channels, stage.row[3]);
        for (int64_t v = 0; v < block.vectors; ++v) {
            const int64_t place = v * problem.shape.token_stride() + t * kWidth;
            Vec out = load(worker.grad_input + place);
            if (skips) out += load(stage.skip + v * kWidth) * load(u + v * kWidth);
            store(row + v * kWidth,
                  load(grad_y + v * kWidth) * out * silu_slope(load(z + v * kWidth)));
        }
        finish_row(grad_z, offset, block.channels, row);
    }
}

inline void find_entries(const ScanAdjoint &problem, const Block &block, const ScanWorker &worker) {
    const ScanShape &shape = problem.shape;
    const Stage &stage = worker.stage;
    const bool gated = problem.in.z.data != nullptr;
    const int64_t bytes = block.vectors * shape.state_stride() * (int64_t)sizeof(float);
    stage.open(shape, block, problem.in);
    for (int64_t place = 0; place < problem.count; ++place) {
        const Chunk &chunk = problem.shared.chunks[place];
        if (chunk.first)
            load_states(shape, block, problem.in.initial,
                        (block.row + chunk.sequence) * problem.in.initial.stride[0], 1, 1.0f,
                        stage.state);
        memcpy(problem.entry(block, place), stage.state, (size_t)bytes);
        if (chunk.last && !gated) continue;
        stage.enter(shape, block, problem.in, chunk);
        for (int64_t v = 0; v < block.vectors; ++v) {
            if (gated)
                advance_vector<true>(shape, worker, chunk.tokens(), v);
            else
                advance_vector<false>(shape, worker, chunk.tokens(), v);
        }
        if (gated) write_grad_z(problem, block, worker, chunk);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
