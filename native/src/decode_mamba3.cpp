// One token of a Mamba-3 block (ops/trapezoid/README.md and ops/rotation/README.md).
#include "decode_head.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

struct Coefficients {
    float dt, alpha, gamma, beta;
};

// Where the parts of the projection begin, in a row of board.projected.
struct Parts {
    const float *z, *x, *b, *c, *dt, *a, *lam, *turn;

    Parts(const DecodeLayer &layer, const float *row) {
        const int64_t keys = layer.rank * layer.groups * layer.state;
        z = row;
        x = z + layer.inner;
        b = x + layer.inner;
        c = b + keys;
        dt = c + keys;
        a = dt + layer.heads;
        lam = a + layer.heads;
        turn = lam + layer.heads;
    }
};

Coefficients coefficients_of(const DecodeLayer &layer, const Parts &parts, int64_t head) {
    const float dt = clamp(first_lane(softplus(splat(parts.dt[head] + layer.dt_bias[head]))),
                           layer.dt_low, layer.dt_high);
    const float raw = parts.a[head];
    float decay;
    if (layer.is_heavy_tail)
        decay = raw >= 0.0f ? 1.0f + raw : 1.0f / (1.0f - raw);
    else
        decay = first_lane(softplus(splat(raw)));
    if (decay < (float)layer.a_floor) decay = (float)layer.a_floor;
    const float lam = first_lane(sigmoid(splat(parts.lam[head])));
    const float alpha = first_lane(exp(splat(-dt * decay)));
    return {dt, alpha, lam * dt, (1.0f - lam) * dt * alpha};
}

// Keys and queries of a group, normed: the same for all of its heads.
void prepare_group(const DecodeLayer &layer, const Parts &parts, int64_t group, HeadDesk &desk) {
    const DecodeNorm b_norm{layer.b_norm, nullptr, layer.b_eps, DecodeNormKind::kRms};
    const DecodeNorm c_norm{layer.c_norm, nullptr, layer.c_eps, DecodeNormKind::kRms};
    for (int64_t rank = 0; rank < layer.rank; ++rank) {
        const int64_t from = (rank * layer.groups + group) * layer.state;
        normalize(b_norm, parts.b + from, layer.state, desk.base_b + rank * desk.state);
        normalize(c_norm, parts.c + from, layer.state, desk.base_c + rank * desk.state);
    }
}

// Bias and rotation; the new key is also the state that the next token needs.
void prepare_head(const DecodeLayer &layer, const anymamba_tensor *states, const Parts &parts,
                  int64_t row, int64_t head, float dt, HeadDesk &desk) {
    const bool is_quaternion = layer.rotation == DecodeRotation::kQuaternion;
    const anymamba_tensor &rotation = states[3], &keys = states[1];
    float *turned = static_cast<float *>(rotation.data) + row * rotation.stride[0] +
                    head * rotation.stride[1];
    if (is_quaternion)
        turn_quaternions(layer, parts.turn + head * 3 * layer.turns, dt, turned, desk.turns);
    else
        turn_angles(layer, parts.turn, dt, turned, desk.turns);
    for (int64_t rank = 0; rank < layer.rank; ++rank) {
        const int64_t bias = (head * layer.rank + rank) * layer.state, at = rank * desk.state;
        for (int64_t place = 0; place < layer.state; ++place) {
            desk.b[at + place] = desk.base_b[at + place] + layer.b_bias[bias + place];
            desk.c[at + place] = desk.base_c[at + place] + layer.c_bias[bias + place];
        }
        float *both[] = {desk.b + at, desk.c + at};
        for (float *key : both) {
            if (!layer.is_turned) continue;
            if (!is_quaternion) {
                rotate_pairs(layer, desk.turns, layer.state / 2, key);
                continue;
            }
            for (int64_t block = 0; block < layer.turns; ++block)
                quaternion_product(turned + 4 * block, 1, -1.0f, key + 4 * block, key + 4 * block);
        }
        const int64_t from =
            row * keys.stride[0] + rank * keys.stride[1] + head * keys.stride[2];
        read_states(keys, from, layer.state, desk.keys + at);
        write_states(keys, from, layer.state, desk.b + at);
        for (int64_t place = layer.state; place < desk.state; ++place)
            desk.b[at + place] = desk.c[at + place] = desk.keys[at + place] = 0.0f;
    }
}

// What each key adds to the state: those of the last token, then those of this one.
void prepare_values(const DecodeLayer &layer, const anymamba_tensor &values, const Parts &parts,
                    int64_t row, int64_t head, const Coefficients &k, HeadDesk &desk) {
    const int64_t width = layer.headdim;
    const float *x = parts.x + head * width;
    const int64_t from = row * values.stride[0] + head * values.stride[1];
    float *before = desk.amounts, *own = before + layer.rank * width, *old = desk.sum;
    read_states(values, from, width, old);
    write_states(values, from, width, x);
    if (layer.mimo_x == nullptr) {
        for (int64_t p = 0; p < width; ++p) before[p] = k.beta * old[p];
        for (int64_t p = 0; p < width; ++p) own[p] = k.gamma * x[p];
        return;
    }
    const float *spread = layer.mimo_x + head * layer.rank * width;
    for (int64_t rank = 0; rank < layer.rank; ++rank) {
        for (int64_t p = 0; p < width; ++p) before[p] = k.beta * old[p] * spread[p];
        for (int64_t p = 0; p < width; ++p) own[p] = k.gamma * x[p] * spread[p];
        before += width;
        own += width;
        spread += width;
    }
}

// Skip, gate or norm, and merge the ranks.
void finish_head(const DecodeLayer &layer, const Parts &parts, int64_t head, HeadDesk &desk,
                 float *to) {
    const int64_t width = layer.headdim;
    const float *x = parts.x + head * width, *z = parts.z + head * width;
    for (int64_t p = 0; p < width; ++p) desk.sum[p] = 0.0f;
    for (int64_t rank = 0; rank < layer.rank; ++rank) {
        const int64_t place = (head * layer.rank + rank) * width;
        float *y = desk.y + rank * width, *gate = desk.gate + rank * width;
        for (int64_t p = 0; p < width; ++p) {
            const float spread = layer.mimo_x == nullptr ? 1.0f : layer.mimo_x[place + p];
            y[p] += layer.skip[head] * (x[p] * spread);
            gate[p] = z[p] * (layer.mimo_z == nullptr ? 1.0f : layer.mimo_z[place + p]);
        }
        if (layer.gate_norm.kind != DecodeNormKind::kNone) {
            DecodeNorm norm = layer.gate_norm;
            norm.weight += head * width;
            normalize(norm, y, width, y);
        }
        gate_row(gate, y, width, y);
        for (int64_t p = 0; p < width; ++p)
            desk.sum[p] += y[p] * (layer.mimo_o == nullptr ? 1.0f : layer.mimo_o[place + p]);
    }
    memcpy(to, desk.sum, (size_t)width * sizeof(float));
}

void ask_for_states(const anymamba_tensor &tensor, int64_t from, int64_t count) {
    const int64_t bytes = tensor.dtype == ANYMAMBA_FLOAT32 ? 4 : 2;
    ask_for({static_cast<const char *>(tensor.data) + from * bytes, count * bytes}, count * bytes);
}

// The heads that one worker advances. Those of a group come after one another and share its keys.
struct Heads {
    const Step &step;
    const DecodeLayer &layer;
    const anymamba_tensor *states;
    Carver carver;
    HeadDesk desk;
    int64_t known_row = -1, known_group = -1;

    Heads(const Step &of, const DecodeLayer &in, const anymamba_tensor *at)
        : step(of), layer(in), states(at), carver{of.desk.scratch}, desk(carver, in) {}

    // The small states of a head, which lie apart and would be waited for one by one.
    void ask_for_head(int64_t row, int64_t head) const {
        const anymamba_tensor &keys = states[1], &values = states[2], &rotation = states[3];
        for (int64_t rank = 0; rank < layer.rank; ++rank)
            ask_for_states(keys, row * keys.stride[0] + rank * keys.stride[1] +
                                     head * keys.stride[2], layer.state);
        ask_for_states(values, row * values.stride[0] + head * values.stride[1], layer.headdim);
        ask_for_states(rotation, row * rotation.stride[0] + head * rotation.stride[1],
                       rotation.stride[1]);
    }

    void run(int64_t row, int64_t head) {
        const bool is_last = head + 1 == layer.heads;
        if (!is_last || row + 1 < step.rows)
            ask_for_head(is_last ? row + 1 : row, is_last ? 0 : head + 1);
        const Board &board = step.board;
        const int64_t group = head / (layer.heads / layer.groups);
        const Parts parts(layer, board.projected + row * board.projected_stride);
        if (row != known_row || group != known_group) prepare_group(layer, parts, group, desk);
        known_row = row;
        known_group = group;
        const Coefficients k = coefficients_of(layer, parts, head);
        prepare_head(layer, states, parts, row, head, k.dt, desk);
        prepare_values(layer, states[2], parts, row, head, k, desk);
        const anymamba_tensor &scan = states[0];
        float *state =
            static_cast<float *>(scan.data) + row * scan.stride[0] + head * scan.stride[1];
        advance_head(state, layer.state, k.alpha, layer.rank, desk);
        finish_head(layer, parts, head, desk,
                    board.mixed + row * board.mixed_stride + head * layer.headdim);
    }
};

}  // namespace

int64_t mamba3_scratch_bytes(const DecodeLayer &layer) {
    Carver measure{nullptr};
    HeadDesk(measure, layer);
    return measure.used;
}

void mix_mamba3(Step &step, const DecodeLayer &layer, const anymamba_tensor *states, Soon after) {
    const Board &board = step.board;
    multiply_and_meet(step, layer.in_proj, step.first_of(states[0], layer.heads), board.projected,
                      board.projected_stride);
    Heads heads(step, layer, states);
    step.share_out(step.rows * layer.heads, 1, [&](Share own) {
        for (int64_t task = own.first; task < own.last; ++task)
            heads.run(task / layer.heads, task % layer.heads);
    });
    step.wait(step.first_of(layer.out_proj));
    step.present(board.mixed, board.mixed_stride);
    multiply_and_meet(step, layer.out_proj, after, board.branch, board.branch_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
