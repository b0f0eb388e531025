// How the backward is cut: chunks, segments of chunks whose states are alive together, blocks of
// heads, and how much memory that takes.
#pragma once

#include "ssd.h"

namespace anymamba::ANYMAMBA_VARIANT::ssd {

// One chunk of a row, in the order of time.
struct Piece {
    int64_t start, steps;
    int64_t sequence;    // in a packed row; 0 otherwise
    bool opens, closes;  // whether its sequence begins or ends with it
};

// body(sequence, start, stop) for every sequence of a row.
template <class Body>
ANYMAMBA_INLINE void for_sequences(const Sizes &sizes, const anymamba_tensor &borders,
                                   const Body &body) {
    if (sizes.sequences == 0) {
        body(0, 0, sizes.length);
        return;
    }
    const int64_t *at = static_cast<const int64_t *>(borders.data);
    for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence)
        body(sequence, at[sequence], at[sequence + 1]);
}

inline int64_t count_pieces(const Sizes &sizes, const anymamba_tensor &borders, int64_t steps) {
    int64_t count = 0;
    for_sequences(sizes, borders, [&](int64_t, int64_t start, int64_t stop) {
        count += ceil_div(stop - start, steps);
    });
    return count;
}

inline void cut_pieces(const Sizes &sizes, const anymamba_tensor &borders, int64_t steps,
                       Piece *pieces) {
    for_sequences(sizes, borders, [&](int64_t sequence, int64_t start, int64_t stop) {
        for (int64_t at = start; at < stop; at += steps)
            *pieces++ = {at, smaller(steps, stop - at), sequence, at == start, at + steps >= stop};
    });
}

// A head by itself has the least work with short chunks. Heads that share a group share most of the
// work inside a chunk, and long chunks have fewer states.
constexpr int64_t kAlone = kPanel > 32 ? kPanel : 32;
constexpr int64_t kTogether = 64;
constexpr int64_t kBackwardSharing = 6;
constexpr int64_t kBackwardTasksPerThread = 2;
// What a block of heads costs beside its products, measured and told in multiplications: per number
// of B, its copies and the sums of gradients that have left the second cache; per position, the
// pages that its rows lie in.
constexpr int64_t kGroupPrice = 110;
constexpr int64_t kPagePrice = 24000;

struct Plan {
    int64_t steps, padded;     // of a chunk: steps, and positions as whole panels
    int64_t pieces;            // chunks of a row
    int64_t segments, length;  // segments of a row, and chunks of a segment
    // Whether a group is split over tasks, whose shares of the gradients of B and C are then added;
    // if not, a task has whole groups.
    bool splits;
    // Whether the first task of a split group sums in the gradients themselves, not in a share.
    bool in_place;
    int64_t parts;    // tasks per group when split, else tasks per row
    int64_t sharing;  // heads that a task walks at once
    int64_t tasks, workers;
    int64_t state_size;  // numbers of one head's state, in panels over the state axis

    Plan(const Sizes &sizes, const anymamba_tensor &borders, bool may_sum_in_place,
         int64_t threads);

    int64_t width_stride(const Sizes &sizes) const { return round_up(sizes.width, kWidth); }
    int64_t rows_size(const Sizes &sizes) const { return padded * sizes.state_padded(); }
    int64_t kept_states(const Sizes &sizes) const {
        return sizes.rows * sizes.heads * (segments - 1) * state_size;
    }
    // Chunks whose C B^T a worker keeps: a split group meets each of them once per block of heads.
    int64_t kept_pairs() const { return splits ? length : 1; }
    // Shares of one split group.
    int64_t shares() const { return splits ? parts - (in_place ? 1 : 0) : 0; }
    int64_t share_size(const Sizes &sizes) const {
        return sizes.rows * sizes.groups * shares() * length * 2 * rows_size(sizes);
    }

  private:
    void cut_heads(const Sizes &sizes, int64_t threads, int64_t wanted, int64_t most);
    int64_t numbers(const Sizes &sizes) const {
        const int64_t states = sharing * length * state_size;
        return workers * (states + 2 * kept_pairs() * padded * padded) + kept_states(sizes) +
               share_size(sizes);
    }
    int64_t repeated(const Sizes &sizes) const;
};

inline void Plan::cut_heads(const Sizes &sizes, int64_t threads, int64_t wanted, int64_t most) {
    const int64_t group = sizes.heads / sizes.groups;
    splits = group > most;
    if (splits) {
        parts = smaller(group, ceil_div(wanted, larger(1, sizes.rows * sizes.groups)));
        const int64_t heads = ceil_div(group, parts);
        sharing = ceil_div(heads, ceil_div(heads, most));
        tasks = sizes.rows * sizes.groups * parts;
    } else {
        sharing = most / group * group;
        parts = ceil_div(sizes.heads, sharing);
        tasks = sizes.rows * parts;
    }
    workers = smaller(threads, tasks);
}

// What the cut repeats, per head and chunk, in multiplications: the first pass over the states, for
// all but the last segment; C B^T and what passes back through it, once per group of a task; what a
// block costs, once for the heads that are walked at once.
inline int64_t Plan::repeated(const Sizes &sizes) const {
    const int64_t group = sizes.heads / sizes.groups;
    const int64_t first_pass = state_size * (segments - 1) / segments;
    const int64_t paired = splits ? ceil_div(group, parts) : group;
    return padded * (first_pass + 3 * padded * sizes.state / (2 * paired) +
                     kGroupPrice * sizes.state / smaller(sharing, group) + kPagePrice / sharing);
}

// Of the plans that fit three sevenths of the inputs, the one that repeats the least; among equals,
// the first has the most tasks, which balances threads. If nothing fits, the least memory.
inline Plan::Plan(const Sizes &sizes, const anymamba_tensor &borders, bool may_sum_in_place,
                  int64_t threads)
    : in_place(may_sum_in_place) {
    const int64_t group = sizes.heads / sizes.groups;
    steps = larger(1, (group == 1 ? kAlone : kTogether) / sizes.rank);
    padded = round_up(smaller(steps, sizes.length) * sizes.rank, kPanel);
    pieces = count_pieces(sizes, borders, steps);
    state_size = sizes.width * sizes.state_padded();
    const int64_t tokens = sizes.rows * sizes.length * sizes.rank;
    const int64_t inputs = tokens * (sizes.heads * sizes.width + 2 * sizes.groups * sizes.state);
    const auto choose = [&](int64_t count, int64_t wanted, int64_t heads) {
        length = larger(1, ceil_div(pieces, count));
        segments = larger(1, ceil_div(pieces, length));
        cut_heads(sizes, threads, wanted, heads);
    };
    bool fits = false;
    int64_t least = -1, best_count = 1, best_wanted = threads, best_heads = 1;
    for (int64_t wanted = kBackwardTasksPerThread * threads; wanted >= threads; wanted -= threads) {
        const int64_t share = larger(1, sizes.rows * sizes.heads / wanted);
        const int64_t most = smaller(kBackwardSharing, share);
        for (int64_t count = 1; count <= pieces; count += ceil_div(count, 4)) {
            for (int64_t heads = most; heads >= 1; --heads) {
                choose(count, wanted, heads);
                const int64_t size = numbers(sizes);
                const bool fits_now = 7 * size <= 3 * inputs;
                if (fits && !fits_now) continue;
                const int64_t price = fits_now ? repeated(sizes) : size;
                if (fits == fits_now && least >= 0 && price >= least) continue;
                fits = fits_now;
                least = price;
                best_count = count;
                best_wanted = wanted;
                best_heads = heads;
            }
        }
    }
    choose(best_count, best_wanted, best_heads);
}

}  // namespace anymamba::ANYMAMBA_VARIANT::ssd
