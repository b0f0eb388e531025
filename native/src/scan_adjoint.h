// What the adjoint of the selective scan works on: its tensors, what outlives a task, and what a
// thread holds.
#pragma once

#include "scan_stage.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Chunks between two sums over parts: long enough to make the barrier cheap, short enough that
// what waits for the sum is small beside the inputs.
constexpr int64_t kSpanChunks = 8;

struct ScanGradients {
    const anymamba_tensor &y, &final;                                // given
    const anymamba_tensor &u, &dt, &a, &b, &c, &initial, &skip, &z;  // wanted

    ScanGradients(const anymamba_tensor *given, const anymamba_tensor *wanted)
        : y(given[0]),
          final(given[1]),
          u(wanted[0]),
          dt(wanted[1]),
          a(wanted[2]),
          b(wanted[3]),
          c(wanted[4]),
          initial(wanted[5]),
          skip(wanted[6]),
          z(wanted[7]) {}
};

// What outlives a task: each block of each row owns its place.
struct ScanShared {
    Chunk *chunks;
    float *entry;              // [row][chunk][vector][state][lane]
    float *carry, *grad_rate;  // [row][vector][state][lane]
    float *fixed_b, *fixed_c;  // the same, for constant coefficients
    float *grad_skip;          // [row][vector][lane]
    float *part_b, *part_c;    // [part][chunk of the span][token][state]

    ScanShared(Carver &carver, const ScanShape &shape) {
        const int64_t lanes = shape.batch * shape.row_vectors() * kWidth;
        const int64_t part = shape.parts() * kSpanChunks * shape.chunk_len * shape.states;
        chunks = carver.take<Chunk>(shape.most_chunks());
        entry = carver.floats(shape.most_chunks() * lanes * shape.states);
        carry = carver.floats(lanes * shape.states);
        grad_rate = carver.floats(lanes * shape.states);
        fixed_b = carver.floats(shape.constant_b ? lanes * shape.states : 0);
        fixed_c = carver.floats(shape.constant_c ? lanes * shape.states : 0);
        grad_skip = carver.floats(lanes);
        part_b = carver.floats(shape.constant_b ? 0 : part);
        part_c = carver.floats(shape.constant_c ? 0 : part);
    }
};

struct ScanWorker {
    Stage stage;
    float *grad_y;                      // [vector][token][lane] before the gate
    float *grad_input, *grad_exponent;  // [vector][token][lane]
    float *decay, *kept;                // [token][kTogether][lane]
    float *sum_b, *sum_c;               // [token][kTogether][lane], over the vectors of a part

    ScanWorker(Carver &carver, const ScanShape &shape) : stage(carver, shape) {
        const int64_t tokens = shape.block_vectors * shape.token_stride();
        const int64_t together = shape.chunk_len * kTogether * kWidth;
        grad_y = carver.floats(tokens);
        grad_input = carver.floats(tokens);
        grad_exponent = carver.floats(tokens);
        decay = carver.floats(together);
        kept = carver.floats(together + kTogether * kWidth);
        sum_b = carver.floats(together);
        sum_c = carver.floats(together);
    }
};

struct ScanAdjoint {
    const ScanShape &shape;
    const ScanInputs &in;
    const ScanGradients &grad;
    const ScanShared &shared;
    int64_t count;  // of chunks

    int64_t lanes_before(const Block &block) const {
        return (block.row * shape.row_vectors() + block.vector) * kWidth;
    }
    float *entry(const Block &block, int64_t place) const {
        const int64_t vector = (block.row * count + place) * shape.row_vectors() + block.vector;
        return shared.entry + vector * shape.state_stride();
    }
    // Of part_b and part_c, for one part and one chunk of the span that begins with chunk `begin`.
    int64_t part_at(int64_t part, int64_t place, int64_t begin) const {
        return (part * kSpanChunks + place - begin) * shape.chunk_len * shape.states;
    }
    const float *row(const anymamba_tensor &tensor, const Block &block, int64_t token,
                     float *scratch) const {
        return read_row(tensor, token_offset(tensor, block.row, token) + block.channel,
                        block.channels, scratch);
    }
};

}  // namespace anymamba::ANYMAMBA_VARIANT
