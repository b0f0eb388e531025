// The decoder: one token for every row through all layers, in one call.
#include "decode_step.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// From row to row of what meets a matrix. Two lines more than a round number: the same column of
// eight rows would lie in the same few places of the first cache.
int64_t padded(int64_t columns) {
    return ceil_div(columns, 8 * kDecodeBlock) * 8 * kDecodeBlock + kDecodeBlock;
}

// The widest of what the layers need.
struct Widths {
    int64_t projected = 1, mixed = 1, narrow = 1, hidden = 1, inputs, scratch = 1;
    int64_t logits;

    Widths(const DecodeProgram &program, const anymamba_tensor &to)
        : inputs(program.width), logits(to.dtype == ANYMAMBA_FLOAT32 ? 0 : program.head.rows) {
        for (int64_t place = 0; place < program.layers; ++place) {
            const DecodeLayer &layer = program.layer[place];
            projected = larger(projected, layer.in_proj.rows);
            mixed = larger(mixed, layer.out_proj.columns);
            narrow = larger(narrow, layer.x_proj.rows);
            hidden = larger(hidden, layer.fc1.rows);
            scratch = larger(scratch, scratch_bytes(layer));
        }
        inputs = larger(inputs, larger(mixed, hidden));
    }
};

Board take_board(Carver &carver, const Widths &widths, int64_t width, int64_t rows) {
    Board board;
    board.projected_stride = padded(widths.projected);
    board.mixed_stride = padded(widths.mixed);
    board.narrow_stride = padded(widths.narrow);
    board.hidden_stride = padded(widths.hidden);
    board.branch_stride = padded(width);
    board.logits_stride = padded(widths.logits);
    board.projected = carver.floats(rows * board.projected_stride);
    board.mixed = carver.floats(rows * board.mixed_stride);
    board.narrow = carver.floats(rows * board.narrow_stride);
    board.hidden = carver.floats(rows * board.hidden_stride);
    board.branch = carver.floats(rows * board.branch_stride);
    board.logits = widths.logits == 0 ? nullptr : carver.floats(rows * board.logits_stride);
    return board;
}

Desk take_desk(Carver &carver, const Widths &widths, int64_t width, int64_t rows) {
    Desk desk;
    const int64_t columns = padded(widths.inputs);
    desk.normed_stride = columns;
    desk.stream = carver.floats(rows * padded(width));
    desk.normed = carver.floats(rows * columns);
    desk.scratch = carver.take<char>(widths.scratch);
    desk.x.paired_stride = columns;
    desk.x.paired = carver.floats(rows * columns);
    desk.x.words = carver.take<int32_t>(rows * columns / 2);
    desk.x.scales = carver.floats(rows * columns / kDecodeBlock);
    desk.x.offsets = carver.take<int32_t>(rows * columns / kDecodeBlock);
    return desk;
}

// stream += branch; normed = norm(stream).
void enter_sublayer(Step &step, const DecodeNorm &norm, bool has_branch) {
    const int64_t width = step.program.width, stride = step.board.branch_stride;
    for (int64_t row = 0; row < step.rows; ++row) {
        float *stream = step.desk.stream + row * stride;
        if (has_branch) {
            const float *branch = step.board.branch + row * stride;
            ask_for_shared(branch, width);
            for (int64_t place = 0; place < width; ++place) stream[place] += branch[place];
        }
        normalize(norm, stream, width, step.desk.normed + row * step.desk.normed_stride);
    }
    step.present(step.desk.normed, step.desk.normed_stride);
}

// The first half of fc1 are values, the second half gates.
void run_mlp(Step &step, const DecodeLayer &layer, Soon after) {
    const Board &board = step.board;
    const int64_t half = layer.fc1.rows / 2;
    const Soon between = step.first_of(layer.fc2);
    step.share_rows(layer.fc1, half, between, [&](Rows values, Soon soon) {
        const Rows gates{{values.own.first + half, values.own.last + half},
                         values.places,
                         values.apart};
        multiply(layer.fc1, step.desk.x, values, memory_of(layer.fc1, gates), board.hidden,
                 board.hidden_stride);
        multiply(layer.fc1, step.desk.x, gates, soon, board.hidden, board.hidden_stride);
        for (int64_t place = 0; place < values.places; ++place)
            for (int64_t row = 0; row < step.rows; ++row) {
                const Share own = values.at(place);
                float *value = board.hidden + row * board.hidden_stride + own.first;
                gate_row(value + half, value, own.last - own.first, value);
            }
    });
    step.wait(between);
    step.present(board.hidden, board.hidden_stride);
    multiply_and_meet(step, layer.fc2, after, board.branch, board.branch_stride);
}

void run_layer(Step &step, int64_t place) {
    const DecodeLayer &layer = step.program.layer[place];
    const bool is_last = place + 1 == step.program.layers, has_mlp = layer.fc1.rows > 0;
    const Soon next =
        step.first_of(is_last ? step.program.head : step.program.layer[place + 1].in_proj);
    const Soon after = has_mlp ? step.first_of(layer.fc1, layer.fc1.rows / 2) : next;
    enter_sublayer(step, layer.norm, place > 0);
    if (layer.family == 0)
        mix_attention(step, layer, step.states(place), after);
    else if (layer.family == 1)
        mix_mamba1(step, layer, step.states(place), after);
    else if (layer.family == 2)
        mix_mamba2(step, layer, step.states(place), after);
    else
        mix_mamba3(step, layer, step.states(place), after);
    if (!has_mlp) return;
    enter_sublayer(step, layer.norm2, true);
    run_mlp(step, layer, next);
}

// Half types are rounded share by share, while the caches hold what was summed.
void write_logits(Step &step, const anymamba_tensor &logits) {
    const DecodeMatrix &head = step.program.head;
    const bool is_wide = logits.dtype == ANYMAMBA_FLOAT32;
    float *sums = is_wide ? static_cast<float *>(logits.data) : step.board.logits;
    const int64_t stride = is_wide ? logits.stride[0] : step.board.logits_stride;
    step.share_rows(head, head.rows, {}, [&](Rows rows, Soon soon) {
        multiply(head, step.desk.x, rows, soon, sums, stride);
        for (int64_t place = 0; place < rows.places && !is_wide; ++place) {
            const Share own = rows.at(place);
            for (int64_t row = 0; row < step.rows; ++row)
                write_states(logits, row * logits.stride[0] + own.first, own.last - own.first,
                             sums + row * stride + own.first);
        }
    });
    step.wait({});
}

// One token more for every row.
void count_on(const anymamba_tensor &counts, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row)
        static_cast<int64_t *>(counts.data)[row * counts.stride[0]] += 1;
}

void run_token(Step &step) {
    const DecodeProgram &program = step.program;
    const anymamba_tensor &ids = step.tensors[kDecodeIds];
    for (int64_t row = 0; row < step.rows; ++row)
        read_matrix_row(program.embedding, static_cast<const int64_t *>(ids.data)[row],
                        step.desk.stream + row * step.board.branch_stride);
    for (int64_t place = 0; place < program.layers; ++place) run_layer(step, place);
    const anymamba_tensor &logits = step.tensors[kDecodeLogits];
    if (logits.data != nullptr) {
        enter_sublayer(step, program.norm, true);
        write_logits(step, logits);
    }
    if (step.worker > 0) return;
    count_on(step.tensors[kDecodePositions], step.rows);
    for (int64_t place = 0; place < program.layers; ++place)
        if (program.layer[place].family == 0) count_on(step.states(place)[2], step.rows);
}

// The rows of a tensor from `first` on.
anymamba_tensor from_row(anymamba_tensor tensor, int64_t first) {
    if (tensor.data == nullptr) return tensor;
    int64_t bytes = 2;
    if (tensor.dtype == ANYMAMBA_FLOAT32) bytes = 4;
    if (tensor.dtype == ANYMAMBA_INT64) bytes = 8;
    tensor.data = static_cast<char *>(tensor.data) + first * tensor.stride[0] * bytes;
    return tensor;
}

}  // namespace

// Tensors and sizes: decode_program.h. Returns -1 for a program of another layout. More rows than
// share a reading of the weights run in equal groups, one after the other.
int64_t decode(const anymamba_call &call) {
    const int64_t all = call.sizes[0];
    const auto &program = *reinterpret_cast<const DecodeProgram *>(call.sizes[1]);
    if (program.layer_bytes != (int64_t)sizeof(DecodeLayer)) return -1;
    const int64_t most = ceil_div(all, ceil_div(all, kDecodeMostRows));
    const int64_t count = kDecodeStates + program.layers * kDecodeStatesPerLayer;
    const Widths widths(program, call.tensors[kDecodeLogits]);
    Carver carver{static_cast<char *>(call.workspace)};
    auto *tensors = carver.take<anymamba_tensor>(count);
    const Board board = take_board(carver, widths, program.width, most);
    Carver measure{nullptr};
    take_desk(measure, widths, program.width, most);
    char *desks = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;
    for (int64_t first = 0; first < all; first += most) {
        const int64_t rows = smaller(most, all - first);
        for (int64_t at = 0; at < count; ++at) tensors[at] = from_row(call.tensors[at], first);
        run_together(call.threads, [&](Team &team, int64_t worker) {
            Carver own{desks + worker * measure.used};
            Step step{program, tensors, rows, team, worker, board,
                      take_desk(own, widths, program.width, rows)};
            run_token(step);
        });
    }
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
