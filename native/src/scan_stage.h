// Bringing tensors into the layout of a block, and back; the run of one of its vectors over a chunk.
#pragma once

#include "scan_core.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Turns (channel, state) of a block into [vector][state][lane], scaled. Lanes past the last channel
// become 0, and stay 0 in all that is computed from them.
inline void load_states(const ScanShape &shape, const Block &block, const anymamba_tensor &tensor,
                        int64_t offset, int64_t channel_axis, float scale, float *to) {
    const int64_t lanes = block.vectors * kWidth;
    for (int64_t lane = 0; lane < lanes; ++lane) {
        float *out = to + lane / kWidth * shape.state_stride() + lane % kWidth;
        const int64_t from = offset + (block.channel + lane) * tensor.stride[channel_axis];
        for (int64_t state = 0; state < shape.states; ++state)
            out[state * kWidth] =
                lane < block.channels ? scale * read_one(tensor, from + state) : 0;
    }
}

inline void store_states(const ScanShape &shape, const Block &block, const float *from,
                         const anymamba_tensor &tensor, int64_t offset, int64_t channel_axis) {
    for (int64_t lane = 0; lane < block.channels; ++lane) {
        const float *in = from + lane / kWidth * shape.state_stride() + lane % kWidth;
        const int64_t to = offset + (block.channel + lane) * tensor.stride[channel_axis];
        for (int64_t state = 0; state < shape.states; ++state)
            write_one(tensor, to + state, in[state * kWidth]);
    }
}

// The states of sequences without tokens: what goes in comes out.
inline void copy_empty_sequences(const ScanShape &shape, const Block &block,
                                 const anymamba_tensor &borders, const anymamba_tensor &from,
                                 const anymamba_tensor &to) {
    if (borders.data == nullptr) return;
    for (int64_t sequence = 0; sequence < shape.sequences; ++sequence) {
        const Borders own = borders_of(shape, borders, sequence);
        if (own.start < own.stop) continue;
        for (int64_t channel = block.channel; channel < block.channel + block.channels; ++channel)
            for (int64_t state = 0; state < shape.states; ++state)
                write_one(
                    to, sequence * to.stride[0] + channel * to.stride[1] + state,
                    read_one(from, sequence * from.stride[0] + channel * from.stride[1] + state));
    }
}

// What every task needs at hand: the rates of its channels, and B and C of the chunk.
struct Stage {
    float *rate;    // [vector][state][lane] A log2(e)
    float *bound;   // [vector][lane] the largest |rate|
    float *skip;    // [vector][lane]
    float *state;   // [vector][state][lane]
    float *b, *c;   // [token][state], constant: [vector][state][lane]
    float *dt;      // [vector][token][lane]
    float *input;   // [vector][token][lane] dt u
    float *row[4];  // one token of the block each

    Stage(Carver &carver, const ScanShape &shape) {
        const int64_t vectors = shape.block_vectors;
        const auto coefficients = [&](bool is_constant) {
            return is_constant ? vectors * shape.state_stride()
                               : shape.chunk_len * shape.states + kWidth;
        };
        rate = carver.floats(vectors * shape.state_stride());
        bound = carver.floats(vectors * kWidth);
        skip = carver.floats(vectors * kWidth);
        state = carver.floats(vectors * shape.state_stride());
        b = carver.floats(coefficients(shape.constant_b));
        c = carver.floats(coefficients(shape.constant_c));
        dt = carver.floats(vectors * shape.token_stride());
        input = carver.floats(vectors * shape.token_stride());
        for (float *&scratch : row) scratch = carver.floats(vectors * kWidth);
    }

    // Once per block.
    void open(const ScanShape &shape, const Block &block, const ScanInputs &in) const {
        load_states(shape, block, in.a, 0, 0, kLog2e, rate);
        if (shape.constant_b) load_states(shape, block, in.b, 0, 0, 1.0f, b);
        if (shape.constant_c) load_states(shape, block, in.c, 0, 0, 1.0f, c);
        for (int64_t lane = 0; lane < block.vectors * kWidth; ++lane)
            skip[lane] = in.skip.data != nullptr && lane < block.channels
                             ? read_one(in.skip, (block.channel + lane) * in.skip.stride[0])
                             : 0;
        for (int64_t v = 0; v < block.vectors; ++v) {
            Vec most = {};
            for (int64_t state_place = 0; state_place < shape.states; ++state_place) {
                const Vec value = load(rate + v * shape.state_stride() + state_place * kWidth);
                const Vec size = select(value < Vec{}, -value, value);
                // A NaN becomes the bound for good, and makes every chunk a wild one.
                most = select((size > most) | (size != size), size, most);
            }
            store(bound + v * kWidth, most);
        }
    }

    void load_coefficients(const ScanShape &shape, const Block &block,
                           const anymamba_tensor &tensor, const Chunk &chunk, float *to) const {
        for (int64_t t = 0; t < chunk.tokens(); ++t) {
            const int64_t from =
                token_offset(tensor, block.row, chunk.start + t) + block.group * tensor.stride[2];
            float *out = to + t * shape.states;
            // The last vector may spill into the next token's row, which is written after it.
            const float *row_r = read_row(tensor, from, shape.states, out);
            if (row_r != out)
                for (int64_t state_place = 0; state_place < shape.states; state_place += kWidth)
                    store(out + state_place, load(row_r + state_place));
        }
    }

    // Once per chunk: dt, dt u, B and C.
    void enter(const ScanShape &shape, const Block &block, const ScanInputs &in,
               const Chunk &chunk) const {
        if (!shape.constant_b) load_coefficients(shape, block, in.b, chunk, b);
        if (!shape.constant_c) load_coefficients(shape, block, in.c, chunk, c);
        for (int64_t t = 0; t < chunk.tokens(); ++t) {
            const int64_t token = chunk.start + t;
            const float *u = read_row(in.u, token_offset(in.u, block.row, token) + block.channel,
                                      block.channels, row[0]);
            const float *step =
                read_row(in.dt, token_offset(in.dt, block.row, token) + block.channel,
                         block.channels, row[1]);
            for (int64_t v = 0; v < block.vectors; ++v) {
                const int64_t place = v * shape.token_stride() + t * kWidth;
                const Vec size = load(step + v * kWidth);
                store(dt + place, size);
                store(input + place, size * load(u + v * kWidth));
            }
        }
    }
};

// Calls `function(b, c)` with the coefficients of one vector, as the types that the loops are
// compiled for.
template <class Function>
ANYMAMBA_INLINE void with_coefficients(const ScanShape &shape, const Stage &stage, int64_t vector,
                                       const Function &function) {
    const Varying b{stage.b, shape.states}, c{stage.c, shape.states};
    const Constant fixed_b{stage.b + vector * shape.state_stride()};
    const Constant fixed_c{stage.c + vector * shape.state_stride()};
    if (shape.constant_b && shape.constant_c)
        function(fixed_b, fixed_c);
    else if (shape.constant_b)
        function(fixed_b, c);
    else if (shape.constant_c)
        function(b, fixed_c);
    else
        function(b, c);
}

// One vector over one chunk, all states. kOutputs: output[token][lane] is the sum over them.
template <bool kOutputs>
inline void advance_vector(const ScanShape &shape, const Stage &stage, int64_t tokens,
                           int64_t vector, float *output) {
    const int64_t at = vector * shape.token_stride(), states_at = vector * shape.state_stride();
    const bool tame = is_tame(tokens, stage.dt + at, load(stage.bound + vector * kWidth));
    if (kOutputs) memset(output, 0, (size_t)(tokens * kWidth) * sizeof(float));
    with_coefficients(shape, stage, vector, [&](auto b, auto c) {
        with_answer(tame, [&](auto answer) {
            for_states(shape.states, [&](auto together, int64_t r) {
                constexpr int kStates = decltype(together)::kCount;
                const int64_t place = states_at + r * kWidth;
                advance<kStates, kOutputs, decltype(answer)::kYes>(
                    tokens, stage.dt + at, stage.rate + place, stage.input + at, b.from(r),
                    c.from(r), stage.state + place, output);
            });
        });
    });
}

}  // namespace anymamba::ANYMAMBA_VARIANT
