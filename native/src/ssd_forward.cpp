// The SSD core, forward: chunk by chunk, with the state of a few heads in cache.
//
// tensors: v, da, b, c, initial, scale, own, cu_seqlens or nothing, y, final
// sizes:   rows, length, rank, heads, width, groups, state, packed sequences or 0
#include "parallel.h"
#include "ssd_narrow.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace ssd {
namespace {

// Positions of a chunk. The work inside a chunk grows with it, the traffic of the state shrinks.
constexpr int64_t kPositions = kPanel > 16 ? kPanel : 16;
// Heads that share a task: heads of one group share C B^T and the copies of B and C, all of them
// share the pages of memory that a row lies in. The limit on what they bring, states and the rows of
// this chunk and the next, is measured with a second cache of 512 KB.
constexpr int64_t kSharing = 12;
constexpr int64_t kSharedNumbers = 160 * 1024;
// What is shared costs about as much as three quarters of a head.
constexpr int64_t kHeadPrice = 4, kTaskPrice = 3;

struct Tensors {
    const anymamba_tensor &v, &b, &c, &initial, &borders, &y, &final_state;
    StepTensors steps;

    explicit Tensors(const anymamba_tensor *t)
        : v(t[0]),
          b(t[2]),
          c(t[3]),
          initial(t[4]),
          borders(t[7]),
          y(t[8]),
          final_state(t[9]),
          steps{t[1], t[5], t[6]} {}
};

// How the call is cut into tasks: sequence x block of heads x block of panels. No number
// depends on the cut, because heads and columns of the width never meet.
struct Cut {
    int64_t steps, padded;  // of a chunk: steps, and positions as whole panels
    int64_t sequences, heads, panels;
    int64_t head_blocks, panel_blocks;

    Cut(const Sizes &sizes, int64_t threads) {
        steps = larger(1, kPositions / sizes.rank);
        padded = round_up(smaller(steps, sizes.length) * sizes.rank, kPanel);
        sequences = sizes.sequences > 0 ? sizes.sequences : sizes.rows;
        panels = sizes.width_panels();
        heads = cheapest_heads(sizes, threads);
        while (panels > 1 && tasks(sizes) < threads) --panels;
        head_blocks = ceil_div(sizes.heads, heads);
        panel_blocks = ceil_div(sizes.width_panels(), panels);
    }

    int64_t tasks(const Sizes &sizes) const {
        return sequences * ceil_div(sizes.heads, heads) * ceil_div(sizes.width_panels(), panels);
    }

  private:
    // The heads of a task with which the busiest thread has the least to do.
    int64_t cheapest_heads(const Sizes &sizes, int64_t threads) {
        const int64_t rows = sizes.width + sizes.state * sizes.groups / sizes.heads;
        const int64_t numbers = sizes.width * sizes.state_padded() + 4 * padded * rows;
        const int64_t most =
            smaller(sizes.heads, larger(1, smaller(kSharing, kSharedNumbers / numbers)));
        int64_t best = 1, least = -1;
        for (heads = most; heads >= 1; --heads) {
            const int64_t rounds = ceil_div(tasks(sizes), threads);
            const int64_t price = rounds * (kHeadPrice * heads + kTaskPrice);
            if (least >= 0 && price >= least) continue;
            least = price;
            best = heads;
        }
        return best;
    }
};

struct Buffers {
    float *states;       // per head, panels over the width: [panel][state][kPanel]
    float *b, *c;        // [position][state]
    float *b_turned;     // panels over positions: [panel][state][kPanel]
    float *pairs;        // C B^T: [position][position]
    float *weights;      // the same, decayed and weighed
    float *v, *v_faded;  // panels over the width: [panel][position][kPanel]
    Decay decay;

    Buffers(Carver &carver, const Sizes &sizes, const Cut &cut) {
        const int64_t stride = sizes.state_padded();
        states = carver.floats(cut.heads * cut.panels * sizes.state * kPanel);
        b = carver.floats(cut.padded * stride);
        c = carver.floats(cut.padded * stride);
        b_turned = carver.floats(cut.padded * stride);
        pairs = carver.floats(cut.padded * cut.padded);
        weights = carver.floats(cut.padded * cut.padded);
        v = carver.floats(cut.panels * cut.padded * kPanel);
        v_faded = carver.floats(cut.panels * cut.padded * kPanel);
        decay.lay_out(carver, cut.padded);
    }
};

struct Task {
    int64_t sequence, row, start, stop;
    int64_t first_head, heads, first_panel, panels;
};

struct Forward {
    Sizes sizes;
    Tensors tensors;
    Cut cut;

    explicit Forward(const anymamba_call &call)
        : sizes(call.sizes), tensors(call.tensors), cut(sizes, call.threads) {}

    Task task_of(int64_t index) const;
    void run(const Task &task, Buffers &buffers) const;
    Ahead look_ahead(const Task &task, int64_t start) const;
    void share_group(int64_t group, const Chunk &chunk, const Buffers &buffers) const;
    void weigh(const Task &task, const Chunk &chunk, int64_t head, Buffers &buffers) const;
    void advance(const Task &task, const Chunk &chunk, int64_t place, const Buffers &buffers,
                 Ahead &ahead) const;
};

Task Forward::task_of(int64_t index) const {
    Task task;
    task.first_panel = index % cut.panel_blocks * cut.panels;
    task.panels = smaller(cut.panels, sizes.width_panels() - task.first_panel);
    index /= cut.panel_blocks;
    task.first_head = index % cut.head_blocks * cut.heads;
    task.heads = smaller(cut.heads, sizes.heads - task.first_head);
    task.sequence = index / cut.head_blocks;
    if (sizes.sequences > 0) {
        const int64_t *borders = static_cast<const int64_t *>(tensors.borders.data);
        task.row = 0;
        task.start = borders[task.sequence];
        task.stop = borders[task.sequence + 1];
    } else {
        task.row = task.sequence;
        task.start = 0;
        task.stop = sizes.length;
    }
    return task;
}

// What all heads of the group use: B, C, and C B^T where a source is not later than its target.
void Forward::share_group(int64_t group, const Chunk &chunk, const Buffers &buffers) const {
    const int64_t positions = chunk.steps * sizes.rank, stride = sizes.state_padded();
    const int64_t padded = round_up(positions, kPanel);
    copy_rows(Rows(tensors.b, chunk, sizes.rank, group), positions, padded, sizes.state, buffers.b,
              stride);
    copy_rows(Rows(tensors.c, chunk, sizes.rank, group), positions, positions, sizes.state,
              buffers.c, stride);
    transpose_to_panels(buffers.b, padded, stride, buffers.b_turned);
    for (int64_t source = 0; source < positions; source += kPanel) {
        const float *panel = buffers.b_turned + source * stride;
        const int64_t first = source / sizes.rank * sizes.rank;
        for_tiles(first, positions, [&](auto rows, int64_t target) {
            auto tile = zero_tile<rows.value>();
            multiply<Left::kByRow>(tile, buffers.c + target * stride, stride, panel, sizes.state);
            store_tile(buffers.pairs + target * cut.padded + source, cut.padded, tile);
        });
    }
}

// What one head brings: its decay, C B^T weighed by it, and its values as they are and as they are
// left in the state at the chunk's end.
void Forward::weigh(const Task &task, const Chunk &chunk, int64_t head, Buffers &buffers) const {
    const int64_t positions = chunk.steps * sizes.rank, padded = round_up(positions, kPanel);
    const Decay &decay = buffers.decay;
    buffers.decay.fill(tensors.steps, chunk, sizes.rank, head, padded);
    for (int64_t target = 0; target < positions; ++target) {
        const float *pairs = buffers.pairs + target * cut.padded;
        float *weights = buffers.weights + target * cut.padded;
        for_sources(decay, target, sizes.rank, padded,
                    [&](int64_t source, Vec, Vec factor, auto which) {
                        store(weights + source, counted(which, load(pairs + source) * factor));
                    });
    }
    const Rows rows(tensors.v, chunk, sizes.rank, head);
    const int64_t first = task.first_panel * kPanel, all = task.panels * kPanel;
    const int64_t columns = smaller(all, sizes.width - first);
    for (int64_t position = 0; position < positions; ++position) {
        const auto put = [&](int64_t column, Vec x) {
            const int64_t at = (column / kPanel * cut.padded + position) * kPanel + column % kPanel;
            store(buffers.v + at, x);
            store(buffers.v_faded + at, x * decay.deposit[position]);
        };
        visit_row(*rows.tensor, rows.at(position) + first, columns, put);
        for (int64_t column = round_up(columns, kWidth); column < all; column += kWidth)
            put(column, Vec{});
    }
}

// K5 and K4 for one head: the outputs of the chunk, then the state behind it, panel by panel of the
// width, so that a panel of the state is in the first cache for both.
void Forward::advance(const Task &task, const Chunk &chunk, int64_t place, const Buffers &buffers,
                      Ahead &ahead) const {
    const int64_t positions = chunk.steps * sizes.rank, stride = sizes.state_padded();
    const Rows y_rows(tensors.y, chunk, sizes.rank, task.first_head + place);
    for (int64_t panel = 0; panel < task.panels; ++panel) {
        float *state = buffers.states + (place * cut.panels + panel) * sizes.state * kPanel;
        const float *v = buffers.v + panel * cut.padded * kPanel;
        const float *v_faded = buffers.v_faded + panel * cut.padded * kPanel;
        const int64_t column = (task.first_panel + panel) * kPanel;
        for_tiles(0, positions, [&](auto rows, int64_t target) {
            auto tile = zero_tile<rows.value>();
            multiply<Left::kByRow>(tile, buffers.c + target * stride, stride, state, sizes.state);
            scale_rows(tile, buffers.decay.grow + target);
            const int64_t sources = ((target + rows.value - 1) / sizes.rank + 1) * sizes.rank;
            const float *weights = buffers.weights + target * cut.padded;
            multiply<Left::kByRow>(tile, weights, cut.padded, v, sources);
#pragma GCC unroll 16
            for (int row = 0; row < rows.value; ++row)
                write_columns(tensors.y, y_rows.at(target + row) + column, sizes.width - column,
                              tile.at[row][0], tile.at[row][1]);
        });
        for_tiles(0, sizes.state, [&](auto rows, int64_t r) {
            auto tile = load_tile<rows.value>(state + r * kPanel, kPanel);
            scale_tile(tile, buffers.decay.keep);
            multiply<Left::kByColumn>(tile, buffers.b + r, stride, v_faded, positions);
            store_tile(state + r * kPanel, kPanel, tile);
            ahead.step(rows.value);
        });
    }
}

Ahead Forward::look_ahead(const Task &task, int64_t start) const {
    const int64_t steps = larger(0, smaller(cut.steps, task.stop - start));
    const Chunk next{task.row, start, steps};
    Ahead ahead(steps * sizes.rank, task.heads * task.panels * sizes.state);
    const int64_t first = sizes.group_of(task.first_head);
    const int64_t groups = sizes.group_of(task.first_head + task.heads - 1) - first + 1;
    ahead.add(Rows(tensors.b, next, sizes.rank, first), groups, sizes.state);
    ahead.add(Rows(tensors.c, next, sizes.rank, first), groups, sizes.state);
    ahead.add(Rows(tensors.v, next, sizes.rank, task.first_head), task.heads, sizes.width);
    ahead.add(Rows(tensors.y, next, sizes.rank, task.first_head), task.heads, sizes.width);
    return ahead;
}

void Forward::run(const Task &task, Buffers &buffers) const {
    const auto state_of = [&](int64_t place) {
        return buffers.states + place * cut.panels * sizes.state * kPanel;
    };
    for (int64_t place = 0; place < task.heads; ++place) {
        const HeadState from(tensors.initial, task.sequence, task.first_head + place);
        load_by_width(from, sizes, task.first_panel, task.panels, state_of(place));
    }
    for (int64_t start = task.start; start < task.stop; start += cut.steps) {
        const Chunk chunk{task.row, start, smaller(cut.steps, task.stop - start)};
        Ahead ahead = look_ahead(task, start + cut.steps);
        for (int64_t place = 0; place < task.heads; ++place) {
            const int64_t head = task.first_head + place, group = sizes.group_of(head);
            if (place == 0 || group != sizes.group_of(head - 1)) share_group(group, chunk, buffers);
            weigh(task, chunk, head, buffers);
            advance(task, chunk, place, buffers, ahead);
        }
    }
    for (int64_t place = 0; place < task.heads; ++place) {
        const HeadState to(tensors.final_state, task.sequence, task.first_head + place);
        store_by_width(state_of(place), sizes, task.first_panel, task.panels, to);
    }
}

}  // namespace
}  // namespace ssd

int64_t ssd_forward(const anymamba_call &call) {
    if (ssd::is_narrow(ssd::Sizes(call.sizes))) return ssd::narrow_forward(call);
    const ssd::Forward forward(call);
    const int64_t tasks = forward.cut.tasks(forward.sizes);
    Carver size{nullptr};
    ssd::Buffers(size, forward.sizes, forward.cut);
    const int64_t per_worker = size.used;
    const int64_t wanted = per_worker * smaller(call.threads, tasks);
    if (call.workspace == nullptr) return wanted;
    parallel_for(tasks, call.threads, [&](int64_t task, int64_t worker) {
        Carver carver{static_cast<char *>(call.workspace) + worker * per_worker};
        ssd::Buffers buffers(carver, forward.sizes, forward.cut);
        forward.run(forward.task_of(task), buffers);
    });
    return wanted;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
