// One token of a Mamba-3 block (ops/trapezoid/README.md and ops/rotation/README.md).
#include "decode_rotation.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

struct Coefficients {
    float dt, alpha, gamma, beta;
};

// A worker's memory for one head.
struct HeadDesk {
    int64_t state;               // padded to whole vectors
    float *base_b, *base_c;      // normed, before bias and rotation; (rank, state)
    float *b, *c, *old_key;      // (rank, state)
    Turns turns;
    float *own, *before, *y, *gate;  // (rank, headdim)
    float *sum;                      // (headdim)

    HeadDesk(const DecodeLayer &layer, float *at) {
        state = ceil_div(layer.state, kWidth) * kWidth;
        turns.stride = ceil_div(layer.turns, kWidth) * kWidth;
        float **keys[] = {&base_b, &base_c, &b, &c, &old_key};
        for (float **key : keys) {
            *key = at;
            at += layer.rank * state;
        }
        turns.rows = at;
        at += 8 * turns.stride;
        float **values[] = {&own, &before, &y, &gate};
        for (float **value : values) {
            *value = at;
            at += layer.rank * layer.headdim;
        }
        sum = at;
    }
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
    const float dt = clamp(first_of(softplus(splat(parts.dt[head] + layer.dt_bias[head]))),
                           layer.dt_low, layer.dt_high);
    const float raw = parts.a[head];
    float decay;
    if (layer.is_heavy_tail)
        decay = raw >= 0.0f ? 1.0f + raw : 1.0f / (1.0f - raw);
    else
        decay = first_of(softplus(splat(raw)));
    if (decay < (float)layer.a_floor) decay = (float)layer.a_floor;
    const float lam = first_of(sigmoid(splat(parts.lam[head])));
    const float alpha = first_of(exp(splat(-dt * decay)));
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
                rotate_pairs(layer, desk.turns, key);
                continue;
            }
            for (int64_t block = 0; block < layer.turns; ++block)
                quaternion_product(turned + 4 * block, 1, -1.0f, key + 4 * block, key + 4 * block);
        }
        const int64_t from =
            row * keys.stride[0] + rank * keys.stride[1] + head * keys.stride[2];
        read_states(keys, from, layer.state, desk.old_key + at);
        write_states(keys, from, layer.state, desk.b + at);
        for (int64_t place = layer.state; place < desk.state; ++place)
            desk.b[at + place] = desk.c[at + place] = desk.old_key[at + place] = 0.0f;
    }
}

// What each rank adds to the state, per unit of its key: from the last token and from this one.
void prepare_values(const DecodeLayer &layer, const anymamba_tensor &values, const Parts &parts,
                    int64_t row, int64_t head, const Coefficients &k, HeadDesk &desk) {
    const int64_t width = layer.headdim;
    const float *x = parts.x + head * width;
    const int64_t from = row * values.stride[0] + head * values.stride[1];
    for (int64_t p = 0; p < width; ++p) {
        const float old = read_state(values, from + p);
        write_state(values, from + p, x[p]);
        for (int64_t rank = 0; rank < layer.rank; ++rank) {
            const int64_t place = (head * layer.rank + rank) * width + p;
            const float spread = layer.mimo_x == nullptr ? 1.0f : layer.mimo_x[place];
            desk.before[rank * width + p] = k.beta * old * spread;
            desk.own[rank * width + p] = k.gamma * x[p] * spread;
        }
    }
}

// H[p] = alpha H[p] + sum over ranks of (before old_key + own b), y[rank][p] = H[p] . c[rank].
template <int kRank, int kRows>
ANYMAMBA_INLINE void advance(float *state, int64_t size, float alpha, const HeadDesk &desk,
                             int64_t width, int64_t p) {
    Vec sum[kRank][kRows] = {};
    for (int64_t place = 0; place < size; place += kWidth) {
        const int64_t count = smaller(size - place, kWidth);
        Vec next[kRows];
        for (int row = 0; row < kRows; ++row) {
            const float *from = state + row * size + place;
            next[row] = (count == kWidth ? load(from) : load_part(from, count)) * alpha;
        }
        for (int rank = 0; rank < kRank; ++rank) {
            const Vec old = load(desk.old_key + rank * desk.state + place);
            const Vec key = load(desk.b + rank * desk.state + place);
            for (int row = 0; row < kRows; ++row)
                next[row] += old * desk.before[rank * width + p + row] +
                             key * desk.own[rank * width + p + row];
        }
        for (int rank = 0; rank < kRank; ++rank) {
            const Vec query = load(desk.c + rank * desk.state + place);
            for (int row = 0; row < kRows; ++row) sum[rank][row] += next[row] * query;
        }
        for (int row = 0; row < kRows; ++row) {
            float *to = state + row * size + place;
            if (count == kWidth)
                store(to, next[row]);
            else
                store_part(to, next[row], count);
        }
    }
    for (int rank = 0; rank < kRank; ++rank) {
        float *y = desk.y + rank * width + p;
        if constexpr (kRows == 4)
            sum_lanes_of_four(sum[rank][0], sum[rank][1], sum[rank][2], sum[rank][3], y);
        else
            for (int row = 0; row < kRows; ++row) y[row] = sum_lanes(sum[rank][row]);
    }
}

// Any number of ranks: the sums over keys first, then one dot product per rank.
void advance_many(float *state, int64_t size, float alpha, int64_t ranks, const HeadDesk &desk,
                  int64_t width, int64_t p) {
    for (int64_t place = 0; place < size; ++place) {
        float next = state[place] * alpha;
        for (int64_t rank = 0; rank < ranks; ++rank)
            next += desk.old_key[rank * desk.state + place] * desk.before[rank * width + p] +
                    desk.b[rank * desk.state + place] * desk.own[rank * width + p];
        state[place] = next;
    }
    for (int64_t rank = 0; rank < ranks; ++rank) {
        float sum = 0.0f;
        for (int64_t place = 0; place < size; ++place)
            sum += state[place] * desk.c[rank * desk.state + place];
        desk.y[rank * width + p] = sum;
    }
}

template <int kRank>
void advance_head(float *state, int64_t size, float alpha, const HeadDesk &desk, int64_t width) {
    // As many as leave their sums in registers.
    constexpr int kRows = kRank == 1 ? 4 : 2;
    int64_t p = 0;
    for (; p + kRows <= width; p += kRows)
        advance<kRank, kRows>(state + p * size, size, alpha, desk, width, p);
    for (; p < width; ++p) advance<kRank, 1>(state + p * size, size, alpha, desk, width, p);
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

}  // namespace

void mix_mamba3(Step &step, const DecodeLayer &layer, const anymamba_tensor *states) {
    const Board &board = step.board;
    prepare(layer.in_proj, &step.desk.x);
    multiply_share(step, layer.in_proj, board.projected, board.projected_stride);
    step.team.wait();
    HeadDesk desk(layer, step.desk.scratch);
    const Share own = step.share(step.rows * layer.heads, 1);
    const anymamba_tensor &scan = states[0];
    int64_t known_row = -1, known_group = -1;
    for (int64_t task = own.first; task < own.last; ++task) {
        const int64_t row = task / layer.heads, head = task % layer.heads;
        const int64_t group = head / (layer.heads / layer.groups);
        const Parts parts(layer, board.projected + row * board.projected_stride);
        if (row != known_row || group != known_group) prepare_group(layer, parts, group, desk);
        known_row = row;
        known_group = group;
        const Coefficients k = coefficients_of(layer, parts, head);
        prepare_head(layer, states, parts, row, head, k.dt, desk);
        prepare_values(layer, states[2], parts, row, head, k, desk);
        float *state =
            static_cast<float *>(scan.data) + row * scan.stride[0] + head * scan.stride[1];
        const int64_t size = layer.state, width = layer.headdim;
        if (layer.rank == 1)
            advance_head<1>(state, size, k.alpha, desk, width);
        else if (layer.rank == 2)
            advance_head<2>(state, size, k.alpha, desk, width);
        else if (layer.rank == 4)
            advance_head<4>(state, size, k.alpha, desk, width);
        else
            for (int64_t p = 0; p < width; ++p)
                advance_many(state + p * size, size, k.alpha, layer.rank, desk, width, p);
        finish_head(layer, parts, head, desk,
                    board.mixed + row * board.mixed_stride + head * width);
    }
    step.team.wait();
    step.present(board.mixed, board.mixed_stride);
    prepare(layer.out_proj, &step.desk.x);
    multiply_share(step, layer.out_proj, board.branch, board.branch_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
