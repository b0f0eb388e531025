// What both directions share: the walk through the rotations of a row, parameters as planes, and
// the norm of a token's rows.
#pragma once

#include "keys_planes.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Rotations that one walk in order leaves behind, so that later tasks need not wait for each other:
// [row][mark][head][state]. A mark is a tile (the rotation before it) or, where a step is dear, a
// token (the rotation after it).
template <class Turn>
struct KeyMarks {
    const KeyShape &shape;
    float *marks;

    KeyMarks(Carver &carver, const KeyShape &key_shape)
        : shape(key_shape),
          marks(carver.floats(shape.batch * per_row() * shape.heads * state_floats())) {}

    int64_t per_row() const { return Turn::kMarksTokens ? shape.length : shape.tiles; }
    int64_t state_floats() const { return Turn::kStates * shape.lanes; }
    float *at(int64_t row, int64_t mark, int64_t head) const {
        return marks + ((row * per_row() + mark) * shape.heads + head) * state_floats();
    }
};

// Walks one head through a row; writes the rotation after each sequence when `final` is given.
template <class Turn>
void mark_rotations(const Turn &turn, int64_t row, int64_t head, float *sum,
                    const KeyMarks<Turn> &marks, const anymamba_tensor *final) {
    const KeyShape &shape = turn.shape;
    float *state = sum + Turn::kSums * shape.lanes;
    const bool packed = turn.in.borders.data != nullptr;
    const int64_t last = packed ? shape.sequences : row + 1;
    for (int64_t number = packed ? 0 : row; number < last; ++number) {
        const KeySequence own = key_sequence(shape, turn.in.borders, number);
        turn.open_sum(number, head, sum);
        for (int64_t token = own.start; token < own.stop; ++token) {
            if (!Turn::kMarksTokens && token % kKeyTile == 0) {
                turn.settle_sum(sum);
                turn.state_of_sum(sum, marks.at(row, token / kKeyTile, head));
            }
            turn.add_to_sum(row, token, head, sum);
            if (Turn::kMarksTokens) turn.state_of_sum(sum, marks.at(row, token, head));
        }
        if (final == nullptr) continue;
        turn.settle_sum(sum);
        turn.state_of_sum(sum, state);
        turn.write_final(state, *final, number * final->stride[0] + head * final->stride[1]);
    }
}

// The rotations of all heads, token by token through a tile.
template <class Turn>
struct KeyWalk {
    const KeyShape &shape;
    const KeyInputs &in;
    Turn turn;
    float *state;  // [head][state]
    float *turns;  // [head][turn]
    KeySequence sequence{};

    KeyWalk(Carver &carver, const KeyShape &key_shape, const KeyInputs &inputs)
        : shape(key_shape),
          in(inputs),
          turn(carver, key_shape, inputs),
          state(carver.floats(shape.heads * state_floats())),
          turns(carver.floats(shape.heads * turn_floats())) {}

    int64_t state_floats() const { return Turn::kStates * shape.lanes; }
    int64_t turn_floats() const { return Turn::kTurns * shape.lanes; }

    void enter(int64_t row, int64_t tile, const KeyMarks<Turn> &marks) {
        sequence = key_sequence_at(shape, in.borders, row, tile * kKeyTile);
        if (!Turn::kMarksTokens) take(marks.at(row, tile, 0));
    }

    void step(int64_t row, int64_t token, const KeyMarks<Turn> &marks) {
        if (token >= sequence.stop) sequence = key_sequence_at(shape, in.borders, row, token);
        if (Turn::kMarksTokens) take(marks.at(row, token, 0));
        for (int64_t head = 0; head < shape.heads; ++head) {
            float *own = state + head * state_floats();
            if (!Turn::kMarksTokens) {
                if (token == sequence.start) turn.open(sequence.number, head, own);
                turn.advance(row, token, head, own);
            }
            turn.turn_of(own, turns + head * turn_floats());
        }
    }

   private:
    void take(const float *from) {
        memcpy(state, from, (size_t)(shape.heads * state_floats()) * sizeof(float));
    }
};

// Weights and biases as planes, read once per call.
struct KeyParameters {
    const KeyShape &shape;
    const Planes &planes;
    float *weights;  // [kind][group][row]
    float *biases;   // [kind][rank][head][row]

    KeyParameters(Carver &carver, const KeyShape &key_shape, const Planes &key_planes)
        : shape(key_shape),
          planes(key_planes),
          weights(carver.floats(weight_floats())),
          biases(carver.floats(bias_floats())) {}

    int64_t weight_floats() const { return kKeyKinds * shape.groups * planes.padded; }
    int64_t bias_floats() const { return kKeyKinds * shape.ranks * shape.heads * planes.padded; }

    int64_t weight_at(int64_t kind, int64_t group) const {
        return (kind * shape.groups + group) * planes.padded;
    }
    int64_t bias_at(int64_t kind, int64_t rank, int64_t head) const {
        return ((kind * shape.ranks + rank) * shape.heads + head) * planes.padded;
    }

    void read(const KeyInputs &in) const {
        for (int64_t kind = 0; kind < kKeyKinds; ++kind) {
            const anymamba_tensor &weight = in.weight[kind], &bias = in.bias[kind];
            for (int64_t group = 0; group < shape.groups; ++group)
                read_planes(planes, weight, group * weight.stride[0],
                            weights + weight_at(kind, group));
            for (int64_t rank = 0; rank < shape.ranks; ++rank)
                for (int64_t head = 0; head < shape.heads; ++head)
                    read_planes(planes, bias, head * bias.stride[0] + rank * bias.stride[1],
                                biases + bias_at(kind, rank, head));
        }
    }
};

ANYMAMBA_INLINE float root_scale(const float *x, int64_t lanes, int64_t size, float eps) {
    Vec sum = {};
    for (int64_t lane = 0; lane < lanes; lane += kWidth) sum += load(x + lane) * load(x + lane);
    return 1.0f / __builtin_sqrtf(sum_lanes(sum) / (float)size + eps);
}

// The rows of one token, divided by their root mean square (`units`), and weighed (`normed`).
struct KeyNorms {
    const KeyShape &shape;
    const KeyInputs &in;
    const KeyParameters &parameters;
    float *units;   // [kind][rank][group][row]
    float *normed;  // [kind][rank][group][row]
    float *scales;  // [kind][rank][group]

    KeyNorms(Carver &carver, const KeyInputs &inputs, const KeyParameters &key_parameters)
        : shape(key_parameters.shape),
          in(inputs),
          parameters(key_parameters),
          units(carver.floats(rows() * key_parameters.planes.padded)),
          normed(carver.floats(rows() * key_parameters.planes.padded)),
          scales(carver.floats(rows())) {}

    int64_t rows() const { return kKeyKinds * shape.ranks * shape.groups; }
    int64_t row_of(int64_t kind, int64_t rank, int64_t group) const {
        return (kind * shape.ranks + rank) * shape.groups + group;
    }

    void compute(int64_t row, int64_t token) const {
        const Planes &planes = parameters.planes;
        for (int64_t kind = 0; kind < kKeyKinds; ++kind)
            for (int64_t rank = 0; rank < shape.ranks; ++rank)
                for (int64_t group = 0; group < shape.groups; ++group) {
                    const anymamba_tensor &raw = in.raw[kind];
                    const int64_t place = row_of(kind, rank, group);
                    float *unit = units + place * planes.padded;
                    read_planes(planes, raw,
                                row * raw.stride[0] + token * raw.stride[1] +
                                    rank * raw.stride[2] + group * raw.stride[3],
                                unit);
                    scales[place] = root_scale(unit, planes.lanes(), shape.size, shape.eps[kind]);
                    const float *weight = parameters.weights + parameters.weight_at(kind, group);
                    float *to = normed + place * planes.padded;
                    const Vec scale = splat(scales[place]);
                    for (int64_t lane = 0; lane < planes.lanes(); lane += kWidth) {
                        const Vec x = load(unit + lane) * scale;
                        store(unit + lane, x);
                        store(to + lane, x * load(weight + lane));
                    }
                }
    }
};

}  // namespace anymamba::ANYMAMBA_VARIANT
