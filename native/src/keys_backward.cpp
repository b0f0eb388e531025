// The adjoint of keys and queries (ops/keys/README.md, section 4), from the inputs alone.
//
// A first pass over tokens pulls the gradients of keys and queries through rotation, bias and norm,
// and leaves the slope of each token's rotation. A rotation acts on all later tokens, so slopes are
// then summed from the end: between tiles by one row per tile, inside tiles in a second pass.
#include "keys_angle.h"
#include "keys_quaternion.h"
#include "keys_walk.h"
#include "parallel.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Parameters receive a sum over all tokens. It is taken in so many parts, whatever the threads.
constexpr int64_t kMostParts = 32;

struct Gradients {
    const anymamba_tensor *out, &final;                  // given: [kind] keys and queries; rotation
    const anymamba_tensor *raw, *weight, *bias;          // wanted: [kind] each
    const anymamba_tensor &turn, &dt, &initial;

    Gradients(const anymamba_tensor *given, const anymamba_tensor *wanted)
        : out(given),
          final(given[kKeyKinds]),
          raw(wanted),
          weight(wanted + 2),
          bias(wanted + 4),
          turn(wanted[6]),
          dt(wanted[7]),
          initial(wanted[8]) {}
};

// Slopes of rotations as they lie in the workspace.
template <class Turn>
struct Slopes {
    const KeyShape &shape;
    float *of_tokens;  // [row][token][head][slope]
    float *heading;    // [row][tile][head][slope] summed over the sequence that opens the tile
    float *carried;    // [row][tile][head][slope] of all tokens after the tile, same sequence

    Slopes(Carver &carver, const KeyShape &key_shape)
        : shape(key_shape),
          of_tokens(carver.floats(shape.batch * shape.length * token_floats())),
          heading(carver.floats(shape.batch * shape.tiles * token_floats())),
          carried(carver.floats(shape.batch * shape.tiles * token_floats())) {}

    int64_t head_floats() const { return Turn::kSlopes * shape.lanes; }
    int64_t token_floats() const { return shape.heads * head_floats(); }
    float *of_token(int64_t row, int64_t token) const {
        return of_tokens + (row * shape.length + token) * token_floats();
    }
    float *of_tile(float *which, int64_t row, int64_t tile) const {
        return which + (row * shape.tiles + tile) * token_floats();
    }
};

template <class Turn>
struct Worker {
    KeyWalk<Turn> walk;
    KeyNorms norms;
    float *grad;         // [row] of keys or queries
    float *grad_normed;  // [group][row]
    float *pulled;       // [head][pull]

    Worker(Carver &carver, const KeyInputs &in, const KeyParameters &parameters)
        : walk(carver, parameters.shape, in),
          norms(carver, in, parameters),
          grad(carver.floats(parameters.planes.padded)),
          grad_normed(carver.floats(walk.shape.groups * parameters.planes.padded)),
          pulled(carver.floats(walk.shape.heads * pull_floats())) {}

    int64_t pull_floats() const { return Turn::kPulls * walk.shape.lanes; }
};

// y = unit * weight with unit = x * scale: adds to the weight's gradient, turns that of y into
// that of x.
void pull_norm(const float *unit, const float *weight, float scale, const Planes &planes,
               float *grad, float *grad_weight) {
    Vec sum = {};
    for (int64_t lane = 0; lane < planes.lanes(); lane += kWidth) {
        const Vec product = load(grad + lane) * load(unit + lane);
        store(grad_weight + lane, load(grad_weight + lane) + product);
        sum += product * load(weight + lane);
    }
    const Vec mean = splat(sum_lanes(sum) / (float)planes.size), factor = splat(scale);
    for (int64_t lane = 0; lane < planes.lanes(); lane += kWidth)
        store(grad + lane,
              (load(grad + lane) * load(weight + lane) - load(unit + lane) * mean) * factor);
}

// The rows of one rank of keys or queries. `part` is laid out as the parameters are.
template <class Turn>
void pull_rank(const Worker<Turn> &worker, const Gradients &grad, int64_t kind, int64_t rank,
               int64_t row, int64_t token, const KeyParameters &part) {
    const KeyShape &shape = worker.walk.shape;
    const KeyParameters &parameters = worker.norms.parameters;
    const Planes &planes = parameters.planes;
    const anymamba_tensor &out = grad.out[kind], &raw = grad.raw[kind];
    memset(worker.grad_normed, 0, (size_t)(shape.groups * planes.padded) * sizeof(float));
    for (int64_t head = 0; head < shape.heads; ++head) {
        const int64_t group = shape.group_of(head), bias_at = parameters.bias_at(kind, rank, head);
        const float *normed =
            worker.norms.normed + worker.norms.row_of(kind, rank, group) * planes.padded;
        float *grad_normed = worker.grad_normed + group * planes.padded;
        float *grad_bias = part.biases + bias_at;
        read_planes(planes, out,
                    row * out.stride[0] + token * out.stride[1] + rank * out.stride[2] +
                        head * out.stride[3],
                    worker.grad);
        Turn::pull(planes, worker.walk.turns + head * worker.walk.turn_floats(), normed,
                   parameters.biases + bias_at, worker.grad, grad_bias, grad_normed,
                   worker.pulled + head * worker.pull_floats());
        for (int64_t lane = planes.turning_lanes(); lane < planes.lanes(); lane += kWidth) {
            const Vec value = load(worker.grad + lane);
            store(grad_bias + lane, load(grad_bias + lane) + value);
            store(grad_normed + lane, load(grad_normed + lane) + value);
        }
    }
    for (int64_t group = 0; group < shape.groups; ++group) {
        const int64_t place = worker.norms.row_of(kind, rank, group);
        const int64_t weight_at = parameters.weight_at(kind, group);
        float *grad_x = worker.grad_normed + group * planes.padded;
        pull_norm(worker.norms.units + place * planes.padded, parameters.weights + weight_at,
                  worker.norms.scales[place], planes, grad_x, part.weights + weight_at);
        write_planes(planes, grad_x, raw,
                     row * raw.stride[0] + token * raw.stride[1] + rank * raw.stride[2] +
                         group * raw.stride[3]);
    }
}

template <class Turn>
void pull_tile(Worker<Turn> &worker, const Gradients &grad, int64_t row, int64_t tile,
               const KeyMarks<Turn> &marks, const Slopes<Turn> &slopes, const KeyParameters &part) {
    const KeyShape &shape = worker.walk.shape;
    worker.walk.enter(row, tile, marks);
    const int64_t heading_stop = worker.walk.sequence.stop;
    float *heading = slopes.of_tile(slopes.heading, row, tile);
    memset(heading, 0, (size_t)slopes.token_floats() * sizeof(float));
    for (int64_t token = tile * kKeyTile; token < shape.tile_stop(tile); ++token) {
        worker.walk.step(row, token, marks);
        worker.norms.compute(row, token);
        memset(worker.pulled, 0, (size_t)(shape.heads * worker.pull_floats()) * sizeof(float));
        for (int64_t kind = 0; kind < kKeyKinds; ++kind)
            for (int64_t rank = 0; rank < shape.ranks; ++rank)
                pull_rank(worker, grad, kind, rank, row, token, part);

        const KeySequence &own = worker.walk.sequence;
        const bool is_last = token + 1 == own.stop;
        float *to = slopes.of_token(row, token);
        for (int64_t head = 0; head < shape.heads; ++head)
            worker.walk.turn.slope_of(
                worker.walk.state + head * worker.walk.state_floats(),
                worker.pulled + head * worker.pull_floats(), is_last ? &grad.final : nullptr,
                own.number * grad.final.stride[0] + head * grad.final.stride[1],
                to + head * slopes.head_floats());
        if (token >= heading_stop) continue;
        for (int64_t lane = 0; lane < slopes.token_floats(); lane += kWidth)
            store(heading + lane, load(heading + lane) + load(to + lane));
    }
}

// From the last tile to the first: what the tokens after a tile give its last sequence.
template <class Turn>
void carry_back(const Slopes<Turn> &slopes, const anymamba_tensor &borders, int64_t row,
                int64_t head) {
    const KeyShape &shape = slopes.shape;
    const int64_t count = slopes.head_floats();
    for (int64_t tile = shape.tiles - 1; tile >= 0; --tile) {
        float *carried = slopes.of_tile(slopes.carried, row, tile) + head * count;
        const int64_t stop = shape.tile_stop(tile);
        memset(carried, 0, (size_t)count * sizeof(float));
        if (key_sequence_at(shape, borders, row, stop - 1).stop <= stop) continue;
        const float *heading = slopes.of_tile(slopes.heading, row, tile + 1) + head * count;
        const float *later = slopes.of_tile(slopes.carried, row, tile + 1) + head * count;
        const bool goes_on =
            key_sequence_at(shape, borders, row, stop).stop > shape.tile_stop(tile + 1);
        for (int64_t lane = 0; lane < count; lane += kWidth)
            store(carried + lane,
                  goes_on ? load(heading + lane) + load(later + lane) : load(heading + lane));
    }
}

// Sums the slopes of a tile from its end; what a token's rotation received goes to its inputs. All
// heads of a token lie side by side, so they are taken together.
template <class Turn>
void settle_tile(Turn &turn, const Gradients &grad, int64_t row, int64_t tile,
                 const KeyMarks<Turn> &marks, const Slopes<Turn> &slopes, float *first,
                 float *sums) {
    const KeyShape &shape = turn.shape;
    const int64_t start = tile * kKeyTile, stop = shape.tile_stop(tile);
    const size_t bytes = (size_t)slopes.token_floats() * sizeof(float);
    turn.begin_tile();
    memcpy(sums, slopes.of_tile(slopes.carried, row, tile), bytes);
    KeySequence own = key_sequence_at(shape, turn.in.borders, row, stop - 1);
    for (int64_t token = stop - 1; token >= start; --token) {
        if (token < own.start) own = key_sequence_at(shape, turn.in.borders, row, token);
        if (token + 1 == own.stop) memset(sums, 0, bytes);
        const float *more = slopes.of_token(row, token);
        for (int64_t lane = 0; lane < slopes.token_floats(); lane += kWidth)
            store(sums + lane, load(sums + lane) + load(more + lane));
        for (int64_t head = 0; head < shape.heads; ++head) {
            const float *sum = sums + head * slopes.head_floats(), *before = nullptr;
            if (Turn::kMarksTokens && token == own.start) {
                turn.open(own.number, head, first);
                before = first;
            } else if (Turn::kMarksTokens) {
                before = marks.at(row, token - 1, head);
            }
            turn.give(row, token, head, before, sum, grad.turn, grad.dt);
            if (token == own.start) turn.give_initial(own.number, head, sum, grad.initial);
        }
    }
    turn.end_tile(row, start, stop, grad.turn);
}

// Adds up the parts in order, and brings the sum to where it belongs.
void write_parameters(const KeyParameters &parameters, const Gradients &grad, float *parts,
                      int64_t count, int64_t part_floats) {
    const KeyShape &shape = parameters.shape;
    const Planes &planes = parameters.planes;
    for (int64_t part = 1; part < count; ++part)
        for (int64_t lane = 0; lane < part_floats; lane += kWidth)
            store(parts + lane, load(parts + lane) + load(parts + part * part_floats + lane));
    Carver carver{reinterpret_cast<char *>(parts)};
    const KeyParameters sum(carver, shape, planes);
    for (int64_t kind = 0; kind < kKeyKinds; ++kind) {
        const anymamba_tensor &weight = grad.weight[kind], &bias = grad.bias[kind];
        for (int64_t group = 0; group < shape.groups; ++group)
            write_planes(planes, sum.weights + sum.weight_at(kind, group), weight,
                         group * weight.stride[0]);
        for (int64_t rank = 0; rank < shape.ranks; ++rank)
            for (int64_t head = 0; head < shape.heads; ++head)
                write_planes(planes, sum.biases + sum.bias_at(kind, rank, head), bias,
                             head * bias.stride[0] + rank * bias.stride[1]);
    }
}

template <class Turn>
int64_t backward(const anymamba_call &call) {
    const KeyShape shape(call.sizes);
    const Planes planes(shape);
    const KeyInputs in(call.tensors + kKeyKinds + 1);
    const Gradients grad(call.tensors, call.tensors + kKeyKinds + 1 + kKeyInputs);
    // One part even of no tokens: the parameters then receive its zeros.
    const int64_t tiles = shape.batch * shape.tiles;
    const int64_t parts = larger(1, smaller(tiles, kMostParts));
    Carver carver{static_cast<char *>(call.workspace)};
    const KeyParameters parameters(carver, shape, planes);
    Carver measure{nullptr};
    const KeyParameters sample_part(measure, shape, planes);
    const int64_t part_floats = measure.used / (int64_t)sizeof(float);
    float *sums = carver.floats(parts * part_floats);
    const KeyMarks<Turn> marks(carver, shape);
    const Slopes<Turn> slopes(carver, shape);
    // A walk needs a sum and a state, an empty sequence two states and a slope.
    const int64_t row_floats = 3 * larger(Turn::kSums, Turn::kStates) * shape.lanes;
    measure.used = 0;
    const Worker<Turn> sample(measure, in, parameters);
    measure.floats(row_floats);
    measure.floats(slopes.token_floats());
    char *scratch = carver.take<char>(measure.used * call.threads);
    if (call.workspace == nullptr) return carver.used;

    parameters.read(in);
    parallel_for(shape.batch * shape.heads, call.threads, [&](int64_t task, int64_t thread) {
        Carver own{scratch + thread * measure.used};
        const Turn turn(own, shape, in);
        mark_rotations(turn, task / shape.heads, task % shape.heads, own.floats(row_floats), marks,
                       nullptr);
    });
    parallel_for(parts, call.threads, [&](int64_t part, int64_t thread) {
        Carver own{scratch + thread * measure.used};
        Worker<Turn> worker(own, in, parameters);
        float *sum = sums + part * part_floats;
        memset(sum, 0, (size_t)part_floats * sizeof(float));
        Carver place{reinterpret_cast<char *>(sum)};
        const KeyParameters received(place, shape, planes);
        for (int64_t tile = part * tiles / parts; tile < (part + 1) * tiles / parts; ++tile)
            pull_tile(worker, grad, tile / shape.tiles, tile % shape.tiles, marks, slopes,
                      received);
    });
    parallel_for(shape.batch * shape.heads, call.threads, [&](int64_t task, int64_t) {
        carry_back(slopes, in.borders, task / shape.heads, task % shape.heads);
    });
    parallel_for(tiles + 1, call.threads, [&](int64_t task, int64_t thread) {
        Carver own{scratch + thread * measure.used};
        Turn turn(own, shape, in);
        float *spare = own.floats(row_floats), *row_sums = own.floats(slopes.token_floats());
        if (task == tiles) {
            write_parameters(parameters, grad, sums, parts, part_floats);
            turn.give_empty(grad.final, grad.initial, spare);
            return;
        }
        settle_tile(turn, grad, task / shape.tiles, task % shape.tiles, marks, slopes, spare,
                    row_sums);
    });
    return carver.used;
}

}  // namespace

// Tensors: the gradients of keys, queries and last rotations; KeyInputs; then the gradients of all
// inputs but the borders, in their order. Sizes: KeyShape.
int64_t keys_backward(const anymamba_call &call) {
    return KeyShape(call.sizes).pairing == kBlocks ? backward<QuaternionTurn>(call)
                                                   : backward<AngleTurn>(call);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
