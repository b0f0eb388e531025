// The selective scan cut into tasks (blocks of channels) and chunks (spans of time).
//
// Lanes of a vector are channels of one group; a part is a few such vectors, and a block a few parts.
// Inside a block everything is stored vector by vector: tokens as [vector][token][lane], states,
// rates and their gradients as [vector][state][lane].
#pragma once

#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Tokens lie in pages of their own, and every block looks up all of them: the wider a block, the
// better (2 blocks take 20% less than 16 for 1536 channels, forward and backward; with 64 states, whose
// chunks are longer, the forward takes 16% less). With 16 states a block of this width has 400 KB at
// hand in the forward.
constexpr int64_t kBlockVectors = 768 / kWidth;
// Tasks per thread from which on it does not matter that some thread has one more.
constexpr int64_t kEnoughTasks = 4;
// Sums over channels are taken part by part, whoever takes them: no bit depends on the threads. Parts
// are 128 channels wide, or less where there would be too few to share out.
constexpr int64_t kPartVectors = 128 / kWidth;
constexpr int64_t kEnoughParts = 16;
// States of one vector that are advanced together: enough independent work to hide latencies,
// few enough to stay in registers.
constexpr int64_t kTogether = 4;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// A stretch of tokens of one sequence.
struct Chunk {
    int64_t start, stop, sequence;
    bool first, last;  // of its sequence

    int64_t tokens() const { return stop - start; }
};

struct ScanShape {
    int64_t batch, length, channels, states, groups, sequences;
    bool constant_b, constant_c;
    int64_t chunk_len;
    int64_t width;          // channels of a group
    int64_t group_vectors;  // vectors of a group
    int64_t part_vectors;   // vectors of a part
    int64_t group_parts;    // parts of a group
    int64_t block_parts;    // parts of a block
    int64_t block_vectors;  // vectors of a block
    int64_t group_blocks;   // blocks of a group

    ScanShape(const int64_t *sizes, int64_t threads)
        : batch(sizes[0]),
          length(sizes[1]),
          channels(sizes[2]),
          states(sizes[3]),
          groups(sizes[4]),
          sequences(sizes[5]),
          constant_b(sizes[6] != 0),
          constant_c(sizes[7] != 0) {
        // The states that enter the chunks are kept in the backward: the more states, the longer.
        chunk_len = states <= 16 ? 32 : states <= 32 ? 64 : 128;
        width = channels / groups;
        group_vectors = ceil_div(width, kWidth);
        const int64_t rows = batch * groups;
        part_vectors = smaller(larger(rows * group_vectors / kEnoughParts, 1), kPartVectors);
        group_parts = ceil_div(group_vectors, part_vectors);
        block_parts = evenest_parts(rows, threads);
        block_vectors = block_parts * part_vectors;
        group_blocks = ceil_div(group_parts, block_parts);
    }

    // Parts of a block: the most, or where threads have few tasks each, the most of those numbers with
    // which the busiest thread has the least to do.
    int64_t evenest_parts(int64_t rows, int64_t threads) const {
        const int64_t most = smaller(group_parts, kBlockVectors / part_vectors);
        const auto tasks_with = [&](int64_t parts) { return rows * ceil_div(group_parts, parts); };
        if (tasks_with(most) >= kEnoughTasks * threads) return most;
        const auto busiest_with = [&](int64_t parts) {
            return ceil_div(tasks_with(parts), threads) * parts;
        };
        int64_t best = most;
        for (int64_t parts = most - 1; parts >= 1; --parts)
            if (busiest_with(parts) < busiest_with(best)) best = parts;
        return best;
    }

    int64_t tasks() const { return batch * groups * group_blocks; }
    int64_t parts() const { return batch * groups * group_parts; }
    int64_t row_vectors() const { return groups * group_vectors; }
    int64_t most_chunks() const { return length / chunk_len + sequences; }
    // Rows of tokens are spread by one more cache line, so that they do not fall into one set.
    int64_t token_stride() const { return chunk_len * kWidth + 16; }
    int64_t state_stride() const { return states * kWidth; }
};

// The channels that one task works on.
struct Block {
    int64_t row, group, place;  // place: of the block in its group
    int64_t channel, channels;
    int64_t vector, vectors;  // the first one, counted over the row
    int64_t part;             // the first one, counted over all rows

    Block(const ScanShape &shape, int64_t task) {
        place = task % shape.group_blocks;
        group = task / shape.group_blocks % shape.groups;
        row = task / shape.group_blocks / shape.groups;
        const int64_t skipped = place * shape.block_vectors;
        vectors = smaller(shape.block_vectors, shape.group_vectors - skipped);
        vector = group * shape.group_vectors + skipped;
        part = (row * shape.groups + group) * shape.group_parts + place * shape.block_parts;
        channel = group * shape.width + skipped * kWidth;
        channels = smaller(vectors * kWidth, shape.width - skipped * kWidth);
    }
};

// The order of a call's input tensors; the backward has two gradients before them.
struct ScanInputs {
    const anymamba_tensor &u, &dt, &a, &b, &c, &initial, &skip, &z, &borders;

    explicit ScanInputs(const anymamba_tensor *t)
        : u(t[0]),
          dt(t[1]),
          a(t[2]),
          b(t[3]),
          c(t[4]),
          initial(t[5]),
          skip(t[6]),
          z(t[7]),
          borders(t[8]) {}
};
constexpr int64_t kScanInputs = 9;

ANYMAMBA_INLINE int64_t token_offset(const anymamba_tensor &tensor, int64_t row, int64_t token) {
    return row * tensor.stride[0] + token * tensor.stride[1];
}

struct Borders {
    int64_t start, stop;
};

ANYMAMBA_INLINE Borders borders_of(const ScanShape &shape, const anymamba_tensor &borders,
                                   int64_t sequence) {
    if (borders.data == nullptr) return {0, shape.length};
    const int64_t *cu_seqlens = static_cast<const int64_t *>(borders.data);
    return {cu_seqlens[sequence * borders.stride[0]],
            cu_seqlens[(sequence + 1) * borders.stride[0]]};
}

// Cuts every sequence into chunks; returns how many. Without borders each row is one sequence,
// and all rows share the list.
inline int64_t list_chunks(const ScanShape &shape, const anymamba_tensor &borders, Chunk *chunks) {
    const int64_t sequences = borders.data == nullptr ? 1 : shape.sequences;
    int64_t count = 0;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        const Borders own = borders_of(shape, borders, sequence);
        for (int64_t start = own.start; start < own.stop; start += shape.chunk_len) {
            const int64_t stop = smaller(start + shape.chunk_len, own.stop);
            chunks[count++] = {start, stop, sequence, start == own.start, stop == own.stop};
        }
    }
    return count;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
