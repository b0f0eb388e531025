// The SSD core, backward: the chunks of a row from right to left, from the inputs alone.
//
// tensors: grad_y, grad_final, v, da, b, c, initial, scale, own, cu_seqlens or nothing,
//          grad_v, grad_da, grad_b, grad_c, grad_initial, grad_scale, grad_own
// sizes:   as in ssd_forward.cpp
#include "parallel.h"
#include "ssd_adjoint.h"
#include "ssd_narrow.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace ssd {
namespace {

struct Tensors {
    const anymamba_tensor &grad_y, &grad_final, &v, &b, &c, &initial, &borders;
    const anymamba_tensor &grad_v, &grad_b, &grad_c, &grad_initial;
    StepTensors steps, grad_steps;

    explicit Tensors(const anymamba_tensor *t)
        : grad_y(t[0]),
          grad_final(t[1]),
          v(t[2]),
          b(t[4]),
          c(t[5]),
          initial(t[6]),
          borders(t[9]),
          grad_v(t[10]),
          grad_b(t[12]),
          grad_c(t[13]),
          grad_initial(t[14]),
          steps{t[3], t[7], t[8]},
          grad_steps{t[11], t[15], t[16]} {}
};

// The memory that all workers see.
struct Shared {
    Piece *pieces;
    float *kept;    // states at the borders of segments: [segment][row][head]
    float *shares;  // of split groups: [group][part][chunk of the segment][b, c][state][position]
    char *workers;

    Shared(Carver &carver, const Sizes &sizes, const Plan &plan) {
        pieces = carver.take<Piece>(plan.pieces);
        kept = carver.floats(plan.kept_states(sizes));
        shares = carver.floats(plan.share_size(sizes));
        workers = carver.take<char>(0);
    }
};

// The memory of one worker.
struct Own {
    float *states;       // [chunk of the segment][head of the block]
    float *grad_states;  // [head of the block]
    float *pairs, *grad_pairs;  // [kept chunk]
    float *grad_b, *grad_c;     // of groups that are not split
    AdjointBuffers adjoint;

    Own(Carver &carver, const Sizes &sizes, const Plan &plan)
        : states(carver.floats(plan.length * plan.sharing * plan.state_size)),
          grad_states(carver.floats(plan.sharing * plan.state_size)),
          pairs(carver.floats(plan.kept_pairs() * plan.padded * plan.padded)),
          grad_pairs(carver.floats(plan.kept_pairs() * plan.padded * plan.padded)),
          grad_b(carver.floats(plan.splits ? 0 : plan.rows_size(sizes))),
          grad_c(carver.floats(plan.splits ? 0 : plan.rows_size(sizes))),
          adjoint(carver, sizes, plan) {}
};

struct Task {
    int64_t row, first_head, heads;
    int64_t part;  // of a split group
};

// Heads that are walked together.
struct Block {
    int64_t row, first_head, heads;
};

struct Backward {
    Sizes sizes;
    Tensors tensors;
    GroupGradients group_gradients;
    Plan plan;

    explicit Backward(const anymamba_call &call)
        : sizes(call.sizes),
          tensors(call.tensors),
          group_gradients{sizes, tensors.grad_b, tensors.grad_c},
          plan(sizes, tensors.borders, group_gradients.may_sum_in_place(), call.threads) {}

    Task task_of(int64_t index) const;
    void run(const anymamba_call &call, const Shared &shared, int64_t per_worker) const;
    void keep_states(const Task &task, const Shared &shared, Own &own) const;
    void walk(const Task &task, int64_t segment, const Shared &shared, Own &own) const;
    void walk_block(const Task &task, const Block &block, int64_t segment, const Shared &shared,
                    Own &own) const;
    void refill(const Block &block, const Piece *pieces, int64_t count, const float *entry,
                Own &own) const;
    void back_through_chunk(const Task &task, const Block &block, const Piece *piece,
                            const Piece *next, const float *states, const GroupSums &sums,
                            Own &own) const;
    void advance(const Block &block, const Piece *piece, const Piece *next, const float *from,
                 float *to, Own &own) const;
    Ahead look_ahead(const Block &block, int64_t place, const Piece &piece, const Piece *next,
                     int64_t work, bool walks) const;
    GroupSums sums_of(const Task &task, const Piece *pieces, int64_t chunk, const Shared &shared,
                      const Own &own) const;
    float *share_of(const Shared &shared, int64_t owner, int64_t share, int64_t chunk) const {
        const int64_t place = (owner * plan.shares() + share) * plan.length + chunk;
        return shared.shares + place * 2 * plan.rows_size(sizes);
    }
    void add_shares(int64_t segment, const Shared &shared, int64_t threads) const;
    void pass_empty_sequences() const;

    Chunk chunk_of(int64_t row, const Piece &piece) const {
        return Chunk{row, piece.start, piece.steps};
    }
    int64_t sequence_of(int64_t row, const Piece &piece) const {
        return sizes.sequences > 0 ? piece.sequence : row;
    }
    float *kept_state(const Shared &shared, int64_t segment, int64_t row, int64_t head) const {
        const int64_t place = ((segment - 1) * sizes.rows + row) * sizes.heads + head;
        return shared.kept + place * plan.state_size;
    }
    // States, or gradients of states, of all heads of a block.
    void load_states(const anymamba_tensor &from, const Block &block, const Piece &piece,
                     float *to) const;
    void store_states(const float *from, const Block &block, const Piece &piece,
                      const anymamba_tensor &to) const;
};

Task Backward::task_of(int64_t index) const {
    if (!plan.splits) {
        const int64_t first = index % plan.parts * plan.sharing;
        return {index / plan.parts, first, smaller(plan.sharing, sizes.heads - first), 0};
    }
    const int64_t group_heads = sizes.heads / sizes.groups;
    const int64_t part = index % plan.parts, group = index / plan.parts % sizes.groups;
    const int64_t first = part * group_heads / plan.parts;
    const int64_t last = (part + 1) * group_heads / plan.parts;
    const int64_t row = index / plan.parts / sizes.groups;
    return {row, group * group_heads + first, last - first, part};
}

// body(block) for the blocks of a task, which are of nearly equal size.
template <class Body>
void for_task_blocks(const Task &task, int64_t sharing, const Body &body) {
    const int64_t blocks = ceil_div(task.heads, sharing);
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * task.heads / blocks, last = (block + 1) * task.heads / blocks;
        body(Block{task.row, task.first_head + first, last - first});
    }
}

void Backward::load_states(const anymamba_tensor &from, const Block &block, const Piece &piece,
                           float *to) const {
    const int64_t sequence = sequence_of(block.row, piece);
    for (int64_t place = 0; place < block.heads; ++place)
        load_by_state(HeadState(from, sequence, block.first_head + place), sizes,
                      to + place * plan.state_size);
}

void Backward::store_states(const float *from, const Block &block, const Piece &piece,
                            const anymamba_tensor &to) const {
    const int64_t sequence = sequence_of(block.row, piece);
    for (int64_t place = 0; place < block.heads; ++place)
        store_by_state(from + place * plan.state_size, sizes,
                       HeadState(to, sequence, block.first_head + place));
}

// The rows that the next head reads, and writes if it is walked back: of the same chunk, or of the
// next one for the last head of a block. Further ahead they would have left the second cache again
// before they are used. `work` is that of one head.
Ahead Backward::look_ahead(const Block &block, int64_t place, const Piece &piece, const Piece *next,
                           int64_t work, bool walks) const {
    const bool stays = place + 1 < block.heads;
    if (!stays && next == nullptr) return Ahead(0, work);
    const Chunk chunk = chunk_of(block.row, stays ? piece : *next);
    const int64_t head = block.first_head + (stays ? place + 1 : 0), group = sizes.group_of(head);
    const bool enters = !stays || group != sizes.group_of(head - 1);
    Ahead ahead(chunk.steps * sizes.rank, work);
    const auto add_group = [&](const anymamba_tensor &of) {
        if (enters) ahead.add(Rows(of, chunk, sizes.rank, group), 1, sizes.state);
    };
    const auto add_head = [&](const anymamba_tensor &of) {
        ahead.add(Rows(of, chunk, sizes.rank, head), 1, sizes.width);
    };
    // One line has these of a whole block of heads.
    const auto add_steps = [&](const StepTensors &of) {
        const anymamba_tensor *const all[] = {&of.da, &of.scale, &of.own};
        for (const anymamba_tensor *each : all)
            if (!stays && sizes.rank == 1 && each->stride[1] != 0)
                ahead.add(step_rows(*each, chunk, head), 1, block.heads);
    };
    add_group(tensors.b);
    add_head(tensors.v);
    add_steps(tensors.steps);
    if (!walks) return ahead;
    add_steps(tensors.grad_steps);
    add_group(tensors.c);
    add_head(tensors.grad_y);
    add_head(tensors.grad_v);
    if (plan.splits) return ahead;
    add_group(tensors.grad_b);
    add_group(tensors.grad_c);
    return ahead;
}

// K3 and K4: the states of a block's heads behind a chunk, from those before it.
void Backward::advance(const Block &block, const Piece *piece, const Piece *next, const float *from,
                       float *to, Own &own) const {
    const Chunk chunk = chunk_of(block.row, *piece);
    const int64_t work = sizes.state_padded() / kPanel * sizes.width;
    const Adjoint adjoint(sizes, own.adjoint, plan, chunk, GroupSums{});
    for (int64_t place = 0; place < block.heads; ++place) {
        const int64_t head = block.first_head + place, group = sizes.group_of(head);
        if (place == 0 || group != sizes.group_of(head - 1))
            copy_to_panels(Rows(tensors.b, chunk, sizes.rank, group), adjoint.positions,
                           adjoint.padded, sizes.state, own.adjoint.b);
        adjoint.fade_values(Rows(tensors.v, chunk, sizes.rank, head), tensors.steps, head);
        Ahead ahead = look_ahead(block, place, *piece, next, work, false);
        adjoint.step_state(from + place * plan.state_size, to + place * plan.state_size, ahead);
    }
}

// The states before each of `count` chunks, into own.states; `entry` is the state before the first
// one, of neighbouring heads, where no sequence opens there.
void Backward::refill(const Block &block, const Piece *pieces, int64_t count, const float *entry,
                      Own &own) const {
    const int64_t size = block.heads * plan.state_size;
    for (int64_t chunk = 0; chunk < count; ++chunk) {
        float *states = own.states + chunk * size;
        const Piece &piece = pieces[chunk];
        if (piece.opens) {
            load_states(tensors.initial, block, piece, states);
        } else if (chunk == 0) {
            memcpy(states, entry, (size_t)size * sizeof(float));
        }
        if (chunk + 1 < count && !piece.closes)
            advance(block, &piece, chunk + 2 < count ? &piece + 1 : nullptr, states, states + size,
                    own);
    }
}

// The first pass: the states at the borders of the segments.
void Backward::keep_states(const Task &task, const Shared &shared, Own &own) const {
    for_task_blocks(task, plan.sharing, [&](const Block &block) {
        const int64_t size = block.heads * plan.state_size;
        const int64_t stop = (plan.segments - 1) * plan.length;
        float *states = own.states;
        for (int64_t chunk = 0; chunk < stop; ++chunk) {
            const Piece &piece = shared.pieces[chunk];
            if (piece.opens) load_states(tensors.initial, block, piece, states);
            if (!piece.closes)
                advance(block, &piece, chunk + 1 < stop ? &piece + 1 : nullptr, states, states,
                        own);
            if ((chunk + 1) % plan.length == 0)
                memcpy(kept_state(shared, (chunk + 1) / plan.length, block.row, block.first_head),
                       states, (size_t)size * sizeof(float));
        }
    });
}

// Where the sums over the heads of a task are kept for one chunk of the segment at `pieces`.
GroupSums Backward::sums_of(const Task &task, const Piece *pieces, int64_t chunk,
                            const Shared &shared, const Own &own) const {
    const int64_t square = (plan.splits ? chunk : 0) * plan.padded * plan.padded;
    const int64_t padded = round_up(pieces[chunk].steps * sizes.rank, kPanel);
    GroupSums sums{own.pairs + square, own.grad_pairs + square, own.grad_b, own.grad_c,
                   padded * kPanel,    kPanel};
    if (!plan.splits) return sums;
    const int64_t group = sizes.group_of(task.first_head);
    if (plan.in_place && task.part == 0)
        return group_gradients.in_place(sums, chunk_of(task.row, pieces[chunk]), group);
    const int64_t share = task.part - (plan.in_place ? 1 : 0);
    sums.grad_b = share_of(shared, task.row * sizes.groups + group, share, chunk);
    sums.grad_c = sums.grad_b + plan.rows_size(sizes);
    return sums;
}

void Backward::back_through_chunk(const Task &task, const Block &block, const Piece *piece,
                                  const Piece *next, const float *states, const GroupSums &sums,
                                  Own &own) const {
    const Chunk chunk = chunk_of(block.row, *piece);
    const Adjoint adjoint(sizes, own.adjoint, plan, chunk, sums);
    const int64_t work = sizes.state_padded() / kPanel * (2 * adjoint.positions + sizes.width);
    for (int64_t place = 0; place < block.heads; ++place) {
        const int64_t head = block.first_head + place, group = sizes.group_of(head);
        const bool enters = place == 0 || sizes.group_of(head - 1) != group;
        // The first and the last head of the group in this task, whose heads are many blocks if
        // the group is split.
        const bool opens = enters && (!plan.splits || head == task.first_head);
        const bool closes = head + 1 == task.first_head + task.heads ||
                            sizes.group_of(head + 1) != group;
        const auto rows = [&](const anymamba_tensor &of, int64_t part) {
            return Rows(of, chunk, sizes.rank, part);
        };
        if (enters) adjoint.take_group(rows(tensors.b, group), rows(tensors.c, group));
        if (opens) adjoint.pair_up();
        float *grad_state = own.grad_states + place * plan.state_size;
        adjoint.take_head(rows(tensors.v, head), rows(tensors.grad_y, head), tensors.steps, head);
        adjoint.back_through_pairs(opens);
        adjoint.back_to_values(grad_state);
        Ahead ahead = look_ahead(block, place, *piece, next, work, true);
        const float kept = adjoint.back_through_state(states + place * plan.state_size, grad_state,
                                                      opens, ahead);
        adjoint.back_to_decay(kept);
        adjoint.back_to_weights();
        adjoint.write_values(rows(tensors.grad_v, head));
        adjoint.write_steps(tensors.grad_steps, head);
        if (!closes) continue;
        adjoint.back_to_group();
        if (!plan.splits) group_gradients.write(chunk, group, sums);
    }
}

void Backward::walk_block(const Task &task, const Block &block, int64_t segment,
                          const Shared &shared, Own &own) const {
    const Piece *pieces = shared.pieces + segment * plan.length;
    const int64_t count = smaller(plan.length, plan.pieces - segment * plan.length);
    const int64_t size = block.heads * plan.state_size;
    const bool is_last = segment + 1 == plan.segments;
    const float *entry =
        segment == 0 ? nullptr : kept_state(shared, segment, block.row, block.first_head);
    refill(block, pieces, count, entry, own);
    // The gradient carried from the segment on the right lies where that one's state was kept.
    if (!is_last)
        memcpy(own.grad_states, kept_state(shared, segment + 1, block.row, block.first_head),
               (size_t)size * sizeof(float));
    for (int64_t chunk = count - 1; chunk >= 0; --chunk) {
        const Piece &piece = pieces[chunk];
        if (piece.closes) load_states(tensors.grad_final, block, piece, own.grad_states);
        back_through_chunk(task, block, &piece, chunk > 0 ? &piece - 1 : nullptr,
                           own.states + chunk * size, sums_of(task, pieces, chunk, shared, own),
                           own);
        if (piece.opens) store_states(own.grad_states, block, piece, tensors.grad_initial);
    }
    if (segment > 0)
        memcpy(kept_state(shared, segment, block.row, block.first_head), own.grad_states,
               (size_t)size * sizeof(float));
}

void Backward::walk(const Task &task, int64_t segment, const Shared &shared, Own &own) const {
    for_task_blocks(task, plan.sharing,
                    [&](const Block &block) { walk_block(task, block, segment, shared, own); });
}

void Backward::add_shares(int64_t segment, const Shared &shared, int64_t threads) const {
    const int64_t start = segment * plan.length;
    const int64_t count = smaller(plan.length, plan.pieces - start);
    parallel_for(sizes.rows * sizes.groups * count, threads, [&](int64_t index, int64_t) {
        const int64_t chunk = index % count, owner = index / count;
        const Chunk at = chunk_of(owner / sizes.groups, shared.pieces[start + chunk]);
        group_gradients.add_shares(at, owner % sizes.groups, plan,
                                   share_of(shared, owner, 0, chunk));
    });
}

void Backward::pass_empty_sequences() const {
    for_sequences(sizes, tensors.borders, [&](int64_t first, int64_t start, int64_t stop) {
        if (start < stop) return;
        const int64_t last = sizes.sequences > 0 ? first : sizes.rows - 1;
        for (int64_t sequence = first; sequence <= last; ++sequence)
            for (int64_t head = 0; head < sizes.heads; ++head)
                copy_state(HeadState(tensors.grad_final, sequence, head), sizes,
                           HeadState(tensors.grad_initial, sequence, head));
    });
}

void Backward::run(const anymamba_call &call, const Shared &shared, int64_t per_worker) const {
    const auto own_of = [&](int64_t worker) {
        Carver carver{shared.workers + worker * per_worker};
        return Own(carver, sizes, plan);
    };
    cut_pieces(sizes, tensors.borders, plan.steps, shared.pieces);
    pass_empty_sequences();
    if (!plan.splits) {
        parallel_for(plan.tasks, call.threads, [&](int64_t index, int64_t worker) {
            Own own = own_of(worker);
            const Task task = task_of(index);
            keep_states(task, shared, own);
            for (int64_t segment = plan.segments - 1; segment >= 0; --segment)
                walk(task, segment, shared, own);
        });
        return;
    }
    if (plan.segments > 1)
        parallel_for(plan.tasks, call.threads, [&](int64_t index, int64_t worker) {
            Own own = own_of(worker);
            keep_states(task_of(index), shared, own);
        });
    for (int64_t segment = plan.segments - 1; segment >= 0; --segment) {
        parallel_for(plan.tasks, call.threads, [&](int64_t index, int64_t worker) {
            Own own = own_of(worker);
            walk(task_of(index), segment, shared, own);
        });
        if (plan.shares() > 0) add_shares(segment, shared, call.threads);
    }
}

}  // namespace
}  // namespace ssd

int64_t ssd_backward(const anymamba_call &call) {
    if (ssd::is_narrow(ssd::Sizes(call.sizes))) return ssd::narrow_backward(call);
    const ssd::Backward backward(call);
    Carver own{nullptr};
    ssd::Own(own, backward.sizes, backward.plan);
    Carver carver{static_cast<char *>(call.workspace)};
    const ssd::Shared shared(carver, backward.sizes, backward.plan);
    const int64_t wanted = carver.used + backward.plan.workers * own.used;
    if (call.workspace != nullptr) backward.run(call, shared, own.used);
    return wanted;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
