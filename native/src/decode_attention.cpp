// One token of an attention layer: grouped heads, rotary positions, keys and values of any past
// (nn/attention.py has the modules' form).
//
// The softmax is taken block by block, from the first key to the last, so nothing is as long as the
// past; a new largest score scales down what was summed before it. The blocks are counted from the
// first key: the bits of a row depend on its own past alone.
#include "decode_rotation.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Keys that meet the queries of a group at once: they stay in the first caches meanwhile.
constexpr int64_t kKeys = 64;

// Sums that are under way at once.
constexpr int64_t kTogether = 4;

// What the queries of a group have for themselves, in rows of whole vectors.
struct GroupDesk {
    int64_t queries, stride;
    float *query, *context;  // (queries, stride); behind a head there are zeros
    float *scores;           // of the keys of a block
    float *largest, *sum;    // of the scores so far, and of their powers
    float *key;              // of the new token
    Turns turns;

    GroupDesk(Carver &carver, const DecodeLayer &layer)
        : queries(layer.heads / layer.groups),
          stride(ceil_div(layer.headdim, kWidth) * kWidth),
          query(carver.floats(queries * stride)),
          context(carver.floats(queries * stride)),
          scores(carver.floats(kKeys)),
          largest(carver.floats(queries)),
          sum(carver.floats(queries)),
          key(carver.floats(stride)) {
        turns.stride = ceil_div(layer.turns, kWidth) * kWidth;
        turns.rows = carver.floats(3 * turns.stride);
    }
};

// The sines and cosines of a position. The angle is rounded to float32 as the modules round it, but
// its turns are counted in double: after a million tokens they would not fit the fraction.
void angles_at(const DecodeLayer &layer, int64_t position, Turns turns) {
    constexpr double kTurn = 6.283185307179586, kRound = 6755399441055744.0;  // 1.5 * 2^52
    float *angle = turns.rows, *sine = angle + turns.stride, *cosine = sine + turns.stride;
    for (int64_t pair = 0; pair < layer.turns; ++pair) {
        const double whole = (double)((float)position * layer.a[pair]);
        const double count = (whole * (1.0 / kTurn) + kRound) - kRound;
        angle[pair] = (float)(whole - count * kTurn);
    }
    for (int64_t place = 0; place < layer.turns; place += kWidth) {
        Vec s, c;
        sine_cosine(load_most(angle + place, layer.turns - place), &s, &c);
        store(sine + place, s);
        store(cosine + place, c);
    }
}

// Asks for what is read after this, as much as is read now: keys and values take turns, and the
// hardware would begin anew with each of them. Null asks for nothing.
template <class T>
ANYMAMBA_INLINE void ask_soon(const T *soon, int64_t first, int64_t count) {
    if (soon == nullptr) return;
    for (int64_t place = 0; place < count; place += 64 / (int64_t)sizeof(T))
        __builtin_prefetch(soon + first + place, 0, 2);
}

// scores = q . k of a block of keys, which lie `width` apart; returns the largest.
template <class T>
float score_keys(const float *query, const T *keys, const T *soon, int64_t count, int64_t width,
                 float *scores) {
    int64_t key = 0;
    for (; key + kTogether <= count; key += kTogether) {
        ask_soon(soon, key * width, kTogether * width);
        const T *at = keys + key * width;
        Vec sum[kTogether] = {};
        for (int64_t place = 0; place < width; place += kWidth) {
            const Vec own = load(query + place);
            for (int64_t each = 0; each < kTogether; ++each)
                sum[each] += own * load_most(at + each * width + place, width - place);
        }
        sum_lanes_of_four(sum[0], sum[1], sum[2], sum[3], scores + key);
    }
    for (; key < count; ++key) {
        Vec sum = {};
        for (int64_t place = 0; place < width; place += kWidth)
            sum += load(query + place) * load_most(keys + key * width + place, width - place);
        scores[key] = sum_lanes(sum);
    }
    float largest = scores[0];
    for (key = 1; key < count; ++key)
        if (scores[key] > largest) largest = scores[key];
    return largest;
}

// context = scale context + the values of a block, each times its weight: kCount vectors of a head,
// whose sums do not wait for each other. A block is summed by itself: one sum over a long past would
// lose what each value adds.
template <int64_t kCount, class T>
ANYMAMBA_INLINE void add_some(const float *weights, const T *values, const T *soon, int64_t count,
                              int64_t width, int64_t first, float scale, float *context) {
    Vec sum[kCount] = {};
    for (int64_t key = 0; key < count; ++key) {
        ask_soon(soon, key * width + first, kCount * kWidth);
        for (int64_t each = 0; each < kCount; ++each) {
            const int64_t place = first + each * kWidth;
            sum[each] += weights[key] * load_most(values + key * width + place, width - place);
        }
    }
    for (int64_t each = 0; each < kCount; ++each) {
        float *own = context + first + each * kWidth;
        store(own, load(own) * scale + sum[each]);
    }
}

template <class T>
void add_values(const float *weights, const T *values, const T *soon, int64_t count, int64_t width,
                float scale, float *context) {
    int64_t place = 0;
    for (; place + kTogether * kWidth <= width; place += kTogether * kWidth)
        add_some<kTogether>(weights, values, soon, count, width, place, scale, context);
    for (; place < width; place += kWidth)
        add_some<1>(weights, values, soon, count, width, place, scale, context);
}

// Scores become powers relative to the largest; returns their sum.
float raise(float *scores, int64_t count, float largest) {
    float sum = 0.0f;
    for (int64_t key = 0; key < count; key += kWidth)
        store(scores + key, exp(load(scores + key) - largest));
    for (int64_t key = 0; key < count; ++key) sum += scores[key];
    return sum;
}

// The queries of a group meet all keys of their head, the new one among them.
template <class T>
void attend(GroupDesk &desk, const T *keys, const T *values, int64_t length, int64_t width) {
    for (int64_t start = 0; start < length; start += kKeys) {
        const int64_t count = smaller(kKeys, length - start), at = start * width;
        for (int64_t each = 0; each < desk.queries; ++each) {
            // The first query brings what the others find in the caches.
            const T *values_soon = each == 0 ? values + at : nullptr;
            const T *keys_soon = each == 0 ? keys + at + count * width : nullptr;
            const float own = score_keys(desk.query + each * desk.stride, keys + at, values_soon,
                                         count, width, desk.scores);
            float &largest = desk.largest[each];
            const float next = own > largest ? own : largest;
            const float scale = first_lane(exp(splat(largest - next)));
            desk.sum[each] = desk.sum[each] * scale + raise(desk.scores, count, next);
            add_values(desk.scores, values + at, keys_soon, count, width, scale,
                       desk.context + each * desk.stride);
            largest = next;
        }
    }
}

void attend(GroupDesk &desk, const anymamba_tensor &keys, const anymamba_tensor &values,
            int64_t row, int64_t group, int64_t length, int64_t width) {
    const int64_t key = row * keys.stride[0] + group * keys.stride[1];
    const int64_t value = row * values.stride[0] + group * values.stride[1];
    if (keys.dtype == ANYMAMBA_FLOAT32)
        attend(desk, static_cast<const float *>(keys.data) + key,
               static_cast<const float *>(values.data) + value, length, width);
    else if (keys.dtype == ANYMAMBA_BFLOAT16)
        attend(desk, static_cast<const BFloat16 *>(keys.data) + key,
               static_cast<const BFloat16 *>(values.data) + value, length, width);
    else
        attend(desk, static_cast<const Float16 *>(keys.data) + key,
               static_cast<const Float16 *>(values.data) + value, length, width);
}

// One head of keys and values of one row, and the queries that look into it.
void run_group(const Step &step, const DecodeLayer &layer, const anymamba_tensor *states,
               int64_t row, int64_t group) {
    Carver carver{step.desk.scratch};
    GroupDesk desk(carver, layer);
    const Board &board = step.board;
    const int64_t width = layer.headdim, rest = desk.stride - width;
    const anymamba_tensor &keys = states[0], &values = states[1], &lengths = states[2];
    const int64_t place = static_cast<const int64_t *>(lengths.data)[row * lengths.stride[0]];
    const float *projected = board.projected + row * board.projected_stride;
    const float *query = projected + group * desk.queries * width;
    const float *key = projected + (layer.heads + group) * width;
    angles_at(layer, place, desk.turns);
    for (int64_t each = 0; each < desk.queries; ++each) {
        float *own = desk.query + each * desk.stride;
        memcpy(own, query + each * width, (size_t)width * sizeof(float));
        memset(own + width, 0, (size_t)rest * sizeof(float));
        rotate_pairs(layer, desk.turns, layer.turns, own);
        // Finite, so that scores of minus infinity weigh nothing instead of becoming NaN.
        desk.largest[each] = -__FLT_MAX__;
        for (int64_t entry = 0; entry < width; ++entry) own[entry] *= (float)layer.score_scale;
    }
    memset(desk.context, 0, (size_t)(desk.queries * desk.stride) * sizeof(float));
    memset(desk.sum, 0, (size_t)desk.queries * sizeof(float));
    memcpy(desk.key, key, (size_t)width * sizeof(float));
    rotate_pairs(layer, desk.turns, layer.turns, desk.key);
    const auto at = [&](const anymamba_tensor &past) {
        return row * past.stride[0] + group * past.stride[1] + place * past.stride[2];
    };
    write_states(keys, at(keys), width, desk.key);
    write_states(values, at(values), width, key + layer.groups * width);
    attend(desk, keys, values, row, group, place + 1, width);
    float *mixed = board.mixed + row * board.mixed_stride + group * desk.queries * width;
    for (int64_t each = 0; each < desk.queries; ++each) {
        const float *from = desk.context + each * desk.stride;
        const float inverse = 1.0f / desk.sum[each];
        for (int64_t entry = 0; entry < width; ++entry)
            mixed[each * width + entry] = from[entry] * inverse;
    }
}

// The MLP beside the heads: value silu(gate). Rows are dealt out in turn.
void run_beside(const Step &step, const DecodeLayer &layer) {
    const int64_t heads = layer.heads * layer.headdim;
    for (int64_t row = step.worker; row < step.rows; row += step.team.size()) {
        const float *value = step.board.projected + row * step.board.projected_stride + heads +
                             2 * layer.groups * layer.headdim;
        gate_row(value + layer.mlp, value, layer.mlp,
                 step.board.mixed + row * step.board.mixed_stride + heads);
    }
}

}  // namespace

int64_t attention_scratch_bytes(const DecodeLayer &layer) {
    Carver measure{nullptr};
    GroupDesk(measure, layer);
    return measure.used;
}

void mix_attention(Step &step, const DecodeLayer &layer, const anymamba_tensor *states,
                   Soon after) {
    const Board &board = step.board;
    const int64_t channels = (layer.heads + 2 * layer.groups) * layer.headdim;
    if (layer.conv_width > 0)
        project_and_convolve(step, layer, {}, states[3], 0, channels);
    else
        multiply_and_meet(step, layer.in_proj, {}, board.projected, board.projected_stride);
    run_beside(step, layer);
    step.share_out(step.rows * layer.groups, 1, [&](Share own) {
        for (int64_t task = own.first; task < own.last; ++task)
            run_group(step, layer, states, task / layer.groups, task % layer.groups);
    });
    step.wait(step.first_of(layer.out_proj));
    step.present(board.mixed, board.mixed_stride);
    multiply_and_meet(step, layer.out_proj, after, board.branch, board.branch_stride);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
