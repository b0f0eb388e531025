// Keys and queries of Mamba-3: norm, bias and rotation in one pass over each token.
#include "keys_angle.h"
#include "keys_quaternion.h"
#include "keys_walk.h"
#include "parallel.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

template <class Turn>
struct Worker {
    KeyWalk<Turn> walk;
    KeyNorms norms;
    float *out;  // [row]

    Worker(Carver &carver, const KeyInputs &in, const KeyParameters &parameters)
        : walk(carver, parameters.shape, in),
          norms(carver, in, parameters),
          out(carver.floats(parameters.planes.padded)) {}
};

template <class Turn>
void write_token(const Worker<Turn> &worker, int64_t row, int64_t token,
                 const anymamba_tensor *outputs) {
    const KeyShape &shape = worker.walk.shape;
    const KeyParameters &parameters = worker.norms.parameters;
    const Planes &planes = parameters.planes;
    for (int64_t kind = 0; kind < kKeyKinds; ++kind) {
        const anymamba_tensor &to = outputs[kind];
        for (int64_t rank = 0; rank < shape.ranks; ++rank)
            for (int64_t head = 0; head < shape.heads; ++head) {
                const int64_t place = worker.norms.row_of(kind, rank, shape.group_of(head));
                const float *normed = worker.norms.normed + place * planes.padded;
                const float *bias = parameters.biases + parameters.bias_at(kind, rank, head);
                Turn::apply(planes, worker.walk.turns + head * worker.walk.turn_floats(), normed,
                            bias, worker.out);
                for (int64_t lane = planes.turning_lanes(); lane < planes.lanes(); lane += kWidth)
                    store(worker.out + lane, load(normed + lane) + load(bias + lane));
                write_planes(planes, worker.out, to,
                             row * to.stride[0] + token * to.stride[1] + rank * to.stride[2] +
                                 head * to.stride[3]);
            }
    }
}

template <class Turn>
int64_t forward(const anymamba_call &call) {
    const KeyShape shape(call.sizes);
    const Planes planes(shape);
    const KeyInputs in(call.tensors);
    const anymamba_tensor *outputs = call.tensors + kKeyInputs, *final = outputs + kKeyKinds;
    Carver carver{static_cast<char *>(call.workspace)};
    const KeyParameters parameters(carver, shape, planes);
    const KeyMarks<Turn> marks(carver, shape);
    const int64_t sum_floats = (Turn::kSums + Turn::kStates) * shape.lanes;
    Carver measure{nullptr};
    const Worker<Turn> sample(measure, in, parameters);
    measure.floats(sum_floats);
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;

    parameters.read(in);
    parallel_for(shape.batch * shape.heads, call.threads, [&](int64_t task, int64_t thread) {
        Carver own{scratch + thread * measure.used};
        const Turn turn(own, shape, in);
        mark_rotations(turn, task / shape.heads, task % shape.heads, own.floats(sum_floats), marks,
                       final);
    });
    parallel_for(shape.batch * shape.tiles, call.threads, [&](int64_t task, int64_t thread) {
        const int64_t row = task / shape.tiles, tile = task % shape.tiles;
        Carver own{scratch + thread * measure.used};
        Worker<Turn> worker(own, in, parameters);
        worker.walk.enter(row, tile, marks);
        for (int64_t token = tile * kKeyTile; token < shape.tile_stop(tile); ++token) {
            worker.walk.step(row, token, marks);
            worker.norms.compute(row, token);
            write_token(worker, row, token, outputs);
        }
    });
    return carver.used;
}

}  // namespace

// Tensors: KeyInputs; then keys and queries (b, s, m, h, r) and the last rotations.
// Sizes: KeyShape.
int64_t keys_forward(const anymamba_call &call) {
    return KeyShape(call.sizes).pairing == kBlocks ? forward<QuaternionTurn>(call)
                                                   : forward<AngleTurn>(call);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
