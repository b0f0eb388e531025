// The adjoint's first pass, left to right: the state that enters each chunk, and the gradient of
// the gate, which needs the outputs before it.
#pragma once

#include "scan_adjoint.h"

namespace anymamba::ANYMAMBA_VARIANT {

// grad_z = grad_y (C h + skip u) silu'(z), for the outputs that lie where grad_input will.
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
            float *output = worker.grad_input + v * shape.token_stride();
            if (gated)
                advance_vector<true>(shape, stage, chunk.tokens(), v, output);
            else
                advance_vector<false>(shape, stage, chunk.tokens(), v, output);
        }
        if (gated) write_grad_z(problem, block, worker, chunk);
    }
}

}  // namespace anymamba::ANYMAMBA_VARIANT
