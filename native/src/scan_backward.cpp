// The adjoint of the selective scan (ops/selective_scan/README.md, section 4).
//
//   1. left to right: the state that enters each chunk, and the gradient of the gate
//   2. right to left, a span of chunks at a time: rebuild a chunk, run q through it, and leave what
//      B and C receive from each part of the channels; then add the parts up
//   3. add up what A, the skip and constant coefficients receive from each row
//
// Sums over channels run over the vectors of a part, then over its lanes, then over the parts;
// none of these depends on the number of threads.
#include "parallel.h"
#include "scan_entry.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

void clear_sums(const ScanAdjoint &problem, const Block &block) {
    const ScanShape &shape = problem.shape;
    const int64_t at = problem.lanes_before(block), lanes = block.vectors * kWidth;
    const auto clear = [](float *from, int64_t count) {
        memset(from, 0, (size_t)count * sizeof(float));
    };
    clear(problem.shared.grad_skip + at, lanes);
    clear(problem.shared.grad_rate + at * shape.states, lanes * shape.states);
    if (shape.constant_b) clear(problem.shared.fixed_b + at * shape.states, lanes * shape.states);
    if (shape.constant_c) clear(problem.shared.fixed_c + at * shape.states, lanes * shape.states);
}

// The gradient before the gate, and the skip's share of it.
void enter_gradients(const ScanAdjoint &problem, const Block &block, const ScanWorker &worker,
                     const Chunk &chunk) {
    const Stage &stage = worker.stage;
    float *grad_skip = problem.shared.grad_skip + problem.lanes_before(block);
    const bool gated = problem.in.z.data != nullptr;
    for (int64_t t = 0; t < chunk.tokens(); ++t) {
        const int64_t token = chunk.start + t;
        const float *u = problem.row(problem.in.u, block, token, stage.row[0]);
        const float *grad_y = problem.row(problem.grad.y, block, token, stage.row[1]);
        const float *z = gated ? problem.row(problem.in.z, block, token, stage.row[2]) : nullptr;
        for (int64_t v = 0; v < block.vectors; ++v) {
            Vec value = load(grad_y + v * kWidth);
            if (gated) value *= silu(load(z + v * kWidth));
            store(worker.grad_y + v * problem.shape.token_stride() + t * kWidth, value);
            add_to(grad_skip + v * kWidth, value * load(u + v * kWidth));
        }
    }
}

// One vector and a few states over one chunk: rebuilt left to right, then q right to left.
template <int kStates>
void retreat_vector(const ScanAdjoint &problem, const Block &block, const ScanWorker &worker,
                    int64_t tokens, const float *entry, int64_t vector, int64_t r, bool tame) {
    const ScanShape &shape = problem.shape;
    const Stage &stage = worker.stage;
    const int64_t at = vector * shape.token_stride();
    const int64_t states_at = vector * shape.state_stride() + r * kWidth;
    const int64_t shared_at = problem.lanes_before(block) * shape.states + states_at;
    const float *rate = stage.rate + states_at;
    const Adjoint adjoint = {stage.dt + at,
                             stage.input + at,
                             worker.grad_y + at,
                             worker.decay,
                             worker.kept,
                             rate,
                             problem.shared.carry + shared_at,
                             problem.shared.grad_rate + shared_at,
                             shape.constant_b ? problem.shared.fixed_b + shared_at : worker.sum_b,
                             shape.constant_c ? problem.shared.fixed_c + shared_at : worker.sum_c,
                             worker.grad_input + at,
                             worker.grad_exponent + at};
    with_coefficients(shape, stage, vector, [&](auto b, auto c) {
        with_answer(tame, [&](auto answer) {
            advance_and_keep<kStates, decltype(answer)::kYes>(
                tokens, stage.dt + at, rate, stage.input + at, b.from(r), entry + states_at,
                worker.decay, worker.kept);
        });
        retreat<kStates>(tokens, adjoint, b.from(r), c.from(r));
    });
}

// Sums over the lanes, from [token][kStates][lane] to [token][state].
template <int kStates>
void write_part(const ScanShape &shape, int64_t tokens, const float *sum, float *part) {
    for (int64_t t = 0; t < tokens; ++t) {
        const float *from = sum + t * kStates * kWidth;
        if constexpr (kStates == 4)
            sum_lanes_of_four(from, part + t * shape.states);
        else
            for (int j = 0; j < kStates; ++j)
                part[t * shape.states + j] = sum_lanes(load(from + j * kWidth));
    }
}

// grad_u = dt grad_input + skip grad_y and grad_dt = u grad_input + A grad_exponent.
void write_token_gradients(const ScanAdjoint &problem, const Block &block, const ScanWorker &worker,
                           const Chunk &chunk) {
    const Stage &stage = worker.stage;
    const anymamba_tensor &grad_u = problem.grad.u, &grad_dt = problem.grad.dt;
    const bool skips = problem.in.skip.data != nullptr;
    for (int64_t t = 0; t < chunk.tokens(); ++t) {
        const int64_t token = chunk.start + t;
        const float *u = problem.row(problem.in.u, block, token, stage.row[0]);
        const int64_t u_at = token_offset(grad_u, block.row, token) + block.channel;
        const int64_t dt_at = token_offset(grad_dt, block.row, token) + block.channel;
        float *u_row = open_row(grad_u, u_at, block.channels, stage.row[1]);
        float *dt_row = open_row(grad_dt, dt_at, block.channels, stage.row[2]);
        for (int64_t v = 0; v < block.vectors; ++v) {
            const int64_t place = v * problem.shape.token_stride() + t * kWidth;
            const Vec grad_in = load(worker.grad_input + place);
            Vec grad = load(stage.dt + place) * grad_in;
            if (skips) grad += load(stage.skip + v * kWidth) * load(worker.grad_y + place);
            store(u_row + v * kWidth, grad);
            // The exponent is dt A log2(e): its factor A came without ln 2.
            store(dt_row + v * kWidth,
                  load(u + v * kWidth) * grad_in + load(worker.grad_exponent + place) * kLn2);
        }
        finish_row(grad_u, u_at, block.channels, u_row);
        finish_row(grad_dt, dt_at, block.channels, dt_row);
    }
}

void retreat_chunk(const ScanAdjoint &problem, const Block &block, const ScanWorker &worker,
                   int64_t place, int64_t begin) {
    const ScanShape &shape = problem.shape;
    const Stage &stage = worker.stage;
    const Chunk &chunk = problem.shared.chunks[place];
    const int64_t tokens = chunk.tokens();
    const float *entry = problem.entry(block, place);
    stage.enter(shape, block, problem.in, chunk);
    enter_gradients(problem, block, worker, chunk);
    bool tame[kBlockVectors];
    for (int64_t v = 0; v < block.vectors; ++v) {
        const int64_t at = v * shape.token_stride();
        tame[v] = is_tame(tokens, stage.dt + at, load(stage.bound + v * kWidth));
        memset(worker.grad_input + at, 0, (size_t)(tokens * kWidth) * sizeof(float));
        memset(worker.grad_exponent + at, 0, (size_t)(tokens * kWidth) * sizeof(float));
    }
    for (int64_t first = 0; first < block.vectors; first += shape.part_vectors) {
        const int64_t stop = smaller(first + shape.part_vectors, block.vectors);
        const int64_t part =
            problem.part_at(block.part + first / shape.part_vectors, place, begin);
        for_states(shape.states, [&](auto together, int64_t r) {
            constexpr int kStates = decltype(together)::kCount;
            const int64_t sums = tokens * kStates * kWidth;
            memset(worker.sum_b, 0, (size_t)sums * sizeof(float));
            memset(worker.sum_c, 0, (size_t)sums * sizeof(float));
            for (int64_t v = first; v < stop; ++v)
                retreat_vector<kStates>(problem, block, worker, tokens, entry, v, r, tame[v]);
            const auto write = [&](const float *sum, float *parts) {
                write_part<kStates>(shape, tokens, sum, parts + part + r);
            };
            if (!shape.constant_b) write(worker.sum_b, problem.shared.part_b);
            if (!shape.constant_c) write(worker.sum_c, problem.shared.part_c);
        });
    }
    write_token_gradients(problem, block, worker, chunk);
}

void retreat_span(const ScanAdjoint &problem, const Block &block, const ScanWorker &worker,
                  int64_t begin, int64_t end) {
    const ScanShape &shape = problem.shape;
    float *carry = problem.shared.carry + problem.lanes_before(block) * shape.states;
    worker.stage.open(shape, block, problem.in);
    for (int64_t place = end - 1; place >= begin; --place) {
        const Chunk &chunk = problem.shared.chunks[place];
        const int64_t row = block.row + chunk.sequence;
        if (chunk.last)
            load_states(shape, block, problem.grad.final, row * problem.grad.final.stride[0], 1,
                        1.0f, carry);
        retreat_chunk(problem, block, worker, place, begin);
        if (chunk.first)
            store_states(shape, block, carry, problem.grad.initial,
                         row * problem.grad.initial.stride[0], 1);
    }
}

// Adds the parts of each group up, for one chunk of one row.
void add_parts(const ScanAdjoint &problem, int64_t row, int64_t place, int64_t begin, float *parts,
               const anymamba_tensor &grad) {
    const ScanShape &shape = problem.shape;
    const Chunk &chunk = problem.shared.chunks[place];
    const int64_t numbers = chunk.tokens() * shape.states;
    for (int64_t group = 0; group < shape.groups; ++group) {
        const int64_t first = (row * shape.groups + group) * shape.group_parts;
        float *sum = parts + problem.part_at(first, place, begin);
        for (int64_t part = 1; part < shape.group_parts; ++part) {
            const float *more = parts + problem.part_at(first + part, place, begin);
            for (int64_t k = 0; k < numbers; ++k) sum[k] += more[k];
        }
        for (int64_t t = 0; t < chunk.tokens(); ++t) {
            const int64_t offset =
                token_offset(grad, row, chunk.start + t) + group * grad.stride[2];
            for (int64_t r = 0; r < shape.states; ++r)
                write_one(grad, offset + r, sum[t * shape.states + r]);
        }
    }
}

void add_rows(const ScanAdjoint &problem, const Block &block) {
    const ScanShape &shape = problem.shape;
    const ScanShared &shared = problem.shared;
    const int64_t at = problem.lanes_before(block), lanes = block.vectors * kWidth;
    const int64_t row_lanes = shape.row_vectors() * kWidth;
    const auto total = [&](float *sums, int64_t states) {
        float *sum = sums + at * states;
        for (int64_t row = 1; row < shape.batch; ++row)
            for (int64_t k = 0; k < lanes * states; ++k)
                sum[k] += sum[row * row_lanes * states + k];
        return sum;
    };
    store_states(shape, block, total(shared.grad_rate, shape.states), problem.grad.a, 0, 0);
    if (shape.constant_b)
        store_states(shape, block, total(shared.fixed_b, shape.states), problem.grad.b, 0, 0);
    if (shape.constant_c)
        store_states(shape, block, total(shared.fixed_c, shape.states), problem.grad.c, 0, 0);
    const float *skip = total(shared.grad_skip, 1);
    if (problem.grad.skip.data == nullptr) return;
    for (int64_t lane = 0; lane < block.channels; ++lane)
        write_one(problem.grad.skip, (block.channel + lane) * problem.grad.skip.stride[0],
                  skip[lane]);
}

}  // namespace

// Tensors: the gradients of y and of the final states; ScanInputs; then the gradients of u, dt, a,
// b, c, initial, skip and z. Sizes: ScanShape.
int64_t scan_backward(const anymamba_call &call) {
    const ScanShape shape(call.sizes, call.threads);
    const ScanInputs in(call.tensors + 2);
    const ScanGradients grad(call.tensors, call.tensors + 2 + kScanInputs);
    Carver carver{static_cast<char *>(call.workspace)};
    const ScanShared shared(carver, shape);
    Carver measure{nullptr};
    const ScanWorker sample(measure, shape);
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;

    const ScanAdjoint problem{shape, in, grad, shared,
                              list_chunks(shape, in.borders, shared.chunks)};
    const auto for_blocks = [&](const auto &work) {
        parallel_for(shape.tasks(), call.threads, [&](int64_t task, int64_t thread) {
            Carver own{scratch + thread * measure.used};
            work(Block(shape, task), ScanWorker(own, shape));
        });
    };
    for_blocks([&](const Block &block, const ScanWorker &worker) {
        clear_sums(problem, block);
        copy_empty_sequences(shape, block, in.borders, grad.final, grad.initial);
        find_entries(problem, block, worker);
    });
    for (int64_t end = problem.count; end > 0; end -= kSpanChunks) {
        const int64_t begin = larger(end - kSpanChunks, 0);
        for_blocks([&](const Block &block, const ScanWorker &worker) {
            retreat_span(problem, block, worker, begin, end);
        });
        parallel_for(shape.batch * (end - begin), call.threads, [&](int64_t task, int64_t) {
            const int64_t row = task / (end - begin), place = begin + task % (end - begin);
            if (!shape.constant_b) add_parts(problem, row, place, begin, shared.part_b, grad.b);
            if (!shape.constant_c) add_parts(problem, row, place, begin, shared.part_c, grad.c);
        });
    }
    parallel_for(shape.groups * shape.group_blocks, call.threads,
                 [&](int64_t task, int64_t) { add_rows(problem, Block(shape, task)); });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
