// The selective scan, left to right: a task takes a block of channels through the whole row.
#include "parallel.h"
#include "scan_stage.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

struct Worker {
    Stage stage;
    float *output;  // [vector][token][lane]

    Worker(Carver &carver, const ScanShape &shape)
        : stage(carver, shape), output(carver.floats(shape.block_vectors * shape.token_stride())) {}
};

// y = (output + skip u) silu(z), token by token.
void write_outputs(const ScanShape &shape, const Block &block, const ScanInputs &in,
                   const Worker &worker, const Chunk &chunk, const anymamba_tensor &y) {
    const Stage &stage = worker.stage;
    for (int64_t t = 0; t < chunk.tokens(); ++t) {
        const int64_t token = chunk.start + t;
        const auto read = [&](const anymamba_tensor &tensor, float *scratch) {
            return read_row(tensor, token_offset(tensor, block.row, token) + block.channel,
                            block.channels, scratch);
        };
        const float *u = in.skip.data == nullptr ? nullptr : read(in.u, stage.row[0]);
        const float *z = in.z.data == nullptr ? nullptr : read(in.z, stage.row[1]);
        const int64_t offset = token_offset(y, block.row, token) + block.channel;
        float *row = open_row(y, offset, block.channels, stage.row[2]);
        for (int64_t v = 0; v < block.vectors; ++v) {
            Vec out = load(worker.output + v * shape.token_stride() + t * kWidth);
            if (u != nullptr) out += load(stage.skip + v * kWidth) * load(u + v * kWidth);
            if (z != nullptr) out *= silu(load(z + v * kWidth));
            store(row + v * kWidth, out);
        }
        finish_row(y, offset, block.channels, row);
    }
}

}  // namespace

// Tensors: ScanInputs, then y and the final states. Sizes: ScanShape.
int64_t scan_forward(const anymamba_call &call) {
    const ScanShape shape(call.sizes, call.threads);
    const ScanInputs in(call.tensors);
    const anymamba_tensor &y = call.tensors[kScanInputs], &final = call.tensors[kScanInputs + 1];
    Carver carver{static_cast<char *>(call.workspace)};
    Chunk *chunks = carver.take<Chunk>(shape.most_chunks());
    Carver measure{nullptr};
    Worker sample(measure, shape);
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;

    const int64_t count = list_chunks(shape, in.borders, chunks);
    parallel_for(shape.tasks(), call.threads, [&](int64_t task, int64_t thread) {
        const Block block(shape, task);
        Carver own{scratch + thread * measure.used};
        const Worker worker(own, shape);
        const Stage &stage = worker.stage;
        stage.open(shape, block, in);
        copy_empty_sequences(shape, block, in.borders, in.initial, final);
        for (int64_t place = 0; place < count; ++place) {
            const Chunk &chunk = chunks[place];
            const int64_t row = block.row + chunk.sequence;
            if (chunk.first)
                load_states(shape, block, in.initial, row * in.initial.stride[0], 1, 1.0f,
                            stage.state);
            stage.enter(shape, block, in, chunk);
            for (int64_t v = 0; v < block.vectors; ++v)
                advance_vector<true>(shape, stage, chunk.tokens(), v,
                                     worker.output + v * shape.token_stride());
            write_outputs(shape, block, in, worker, chunk, y);
            if (chunk.last)
                store_states(shape, block, stage.state, final, row * final.stride[0], 1);
        }
    });
    return carver.used;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
