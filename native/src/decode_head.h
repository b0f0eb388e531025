// One head of Mamba-3: a worker's memory for it, and the advance of its state.
#pragma once

#include "decode_rotation.h"

namespace anymamba::ANYMAMBA_VARIANT {

// Columns of the state that are taken at a time: two vectors.
constexpr int64_t kColumns = 2 * kWidth;

inline int64_t padded_state(const DecodeLayer &layer) {
    return ceil_div(layer.state, kColumns) * kColumns;
}

inline int64_t padded_turns(const DecodeLayer &layer) { return ceil_div(layer.turns, kWidth) * kWidth; }

// A worker's memory for one head.
struct HeadDesk {
    int64_t state, width;     // state: padded to whole kColumns
    int64_t key_count;        // the last token's keys and this one's
    float *base_b, *base_c;   // normed, before bias and rotation; (rank, state)
    float *keys, *amounts;    // (key_count, state) and what each adds to the state, (key_count, width)
    float *b, *c;             // this token's keys, at the end of `keys`, and queries; (rank, state)
    Turns turns;
    float *y, *gate;  // (rank, width)
    float *sum;       // (width)

    HeadDesk(Carver &carver, const DecodeLayer &layer)
        : state(padded_state(layer)), width(layer.headdim), key_count(2 * layer.rank) {
        const int64_t keys_of_token = layer.rank * state, values = layer.rank * width;
        base_b = carver.floats(keys_of_token);
        base_c = carver.floats(keys_of_token);
        keys = carver.floats(2 * keys_of_token);
        b = keys + keys_of_token;
        c = carver.floats(keys_of_token);
        turns.stride = padded_turns(layer);
        turns.rows = carver.floats(8 * turns.stride);
        amounts = carver.floats(2 * values);
        y = carver.floats(values);
        gate = carver.floats(values);
        sum = carver.floats(width);
    }
};

// H = alpha H + sum over all keys of amount key, for kRows rows from `p` on and kColumns columns
// from `place` on; `state` points to them, `stride` apart.
template <int kRows>
ANYMAMBA_INLINE void add_keys(float *state, int64_t stride, float alpha, const HeadDesk &desk,
                              int64_t p, int64_t place) {
    Vec low[kRows], high[kRows];
    for (int row = 0; row < kRows; ++row) {
        low[row] = load(state + row * stride) * alpha;
        high[row] = load(state + row * stride + kWidth) * alpha;
    }
    const float *key = desk.keys + place, *amount = desk.amounts + p;
    for (int64_t count = desk.key_count; count > 0; --count) {
        const Vec first = load(key), second = load(key + kWidth);
        for (int row = 0; row < kRows; ++row) {
            low[row] += first * amount[row];
            high[row] += second * amount[row];
        }
        key += desk.state;
        amount += desk.width;
    }
    for (int row = 0; row < kRows; ++row) {
        store(state + row * stride, low[row]);
        store(state + row * stride + kWidth, high[row]);
    }
}

// kRows rows of the state; what lies behind its last whole kColumns is taken to `rest`, filled up.
template <int kRows>
struct StateRows {
    float *state;
    int64_t size, whole;
    float rest[kRows][kColumns];

    StateRows(float *from, int64_t columns)
        : state(from), size(columns), whole(columns / kColumns * kColumns) {}

    void advance(float alpha, const HeadDesk &desk, int64_t p) {
        for (int64_t place = 0; place < whole; place += kColumns) {
            for (int row = 0; row < kRows; ++row) ask_behind<kColumns>(state + row * size + place);
            add_keys<kRows>(state + place, size, alpha, desk, p, place);
        }
        if (whole == size) return;
        const size_t bytes = (size_t)(size - whole) * sizeof(float);
        memset(rest, 0, sizeof(rest));
        for (int row = 0; row < kRows; ++row)
            memcpy(rest[row], state + row * size + whole, bytes);
        add_keys<kRows>(rest[0], kColumns, alpha, desk, p, whole);
        for (int row = 0; row < kRows; ++row)
            memcpy(state + row * size + whole, rest[row], bytes);
    }

    // y[row] = H[row] . query for kQueries queries.
    template <int kQueries>
    void read(const HeadDesk &desk, int64_t first_query, int64_t p) const {
        const float *query = desk.c + first_query * desk.state;
        Vec sum[kQueries][kRows] = {};
        for (int64_t place = 0; place < whole; place += kWidth)
            add_products<kQueries>(state + place, size, query + place, desk.state, sum);
        for (int64_t place = 0; place < kColumns && whole < size; place += kWidth)
            add_products<kQueries>(rest[0] + place, kColumns, query + whole + place, desk.state,
                                   sum);
        for (int q = 0; q < kQueries; ++q) {
            float *y = desk.y + (first_query + q) * desk.width + p;
            if constexpr (kRows == 4)
                sum_lanes_of_four(sum[q][0], sum[q][1], sum[q][2], sum[q][3], y);
            else
                for (int row = 0; row < kRows; ++row) y[row] = sum_lanes(sum[q][row]);
        }
    }

  private:
    template <int kQueries>
    static ANYMAMBA_INLINE void add_products(const float *rows, int64_t stride, const float *query,
                                             int64_t query_stride, Vec (&sum)[kQueries][kRows]) {
        for (int q = 0; q < kQueries; ++q) {
            const Vec asked = load(query + q * query_stride);
            for (int row = 0; row < kRows; ++row) sum[q][row] += load(rows + row * stride) * asked;
        }
    }
};

// All keys reach some rows of the state, then all queries read them: with several ranks neither
// the amounts nor the sums would stay in registers if both were done at once.
template <int kRows>
void advance_rows(float *state, int64_t size, float alpha, int64_t ranks, const HeadDesk &desk,
                  int64_t p) {
    StateRows<kRows> rows(state + p * size, size);
    rows.advance(alpha, desk, p);
    int64_t query = 0;
    // With 32 registers the sums of four queries stay in them.
    if constexpr (kWidth == 16)
        for (; query + 4 <= ranks; query += 4) rows.template read<4>(desk, query, p);
    for (; query + 2 <= ranks; query += 2) rows.template read<2>(desk, query, p);
    if (query < ranks) rows.template read<1>(desk, query, p);
}

inline void advance_head(float *state, int64_t size, float alpha, int64_t ranks,
                         const HeadDesk &desk) {
    constexpr int kRows = 4;
    int64_t p = 0;
    for (; p + kRows <= desk.width; p += kRows)
        advance_rows<kRows>(state, size, alpha, ranks, desk, p);
    for (; p < desk.width; ++p) advance_rows<1>(state, size, alpha, ranks, desk, p);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
