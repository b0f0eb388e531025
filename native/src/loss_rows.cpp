// Cross-entropy of rows of logits and its gradient, one row at a time (ops/loss/README.md). A row of
// a usual vocabulary stays in the second cache, so main memory is read once and written once.
#include "parallel.h"
#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Vectors whose sum is kept apart, so that a long row is not added up one by one.
constexpr int64_t kSumVectors = 32;

template <class T>
Vec read(const T *row, int64_t place, int64_t count, float missing) {
    if (place + kWidth <= count) return load(row + place);
    float lanes[kWidth];
    for (int64_t lane = 0; lane < kWidth; ++lane)
        lanes[lane] = place + lane < count ? widen(row[place + lane]) : missing;
    return load(lanes);
}

template <class T>
float largest(const T *row, int64_t count) {
    Vec most = splat(-__builtin_inff());
    for (int64_t place = 0; place < count; place += kWidth) {
        const Vec value = read(row, place, count, -__builtin_inff());
        most = select(value > most, value, most);
    }
    float lanes[kWidth], result = -__builtin_inff();
    store(lanes, most);
    for (const float lane : lanes) result = lane > result ? lane : result;
    return result;
}

template <class T>
float sum_of_exp(const T *row, int64_t count, float top) {
    Vec total = {};
    for (int64_t start = 0; start < count; start += kSumVectors * kWidth) {
        const int64_t stop = smaller(start + kSumVectors * kWidth, count);
        Vec sum = {};
        int64_t place = start;
        for (; place + kWidth <= stop; place += kWidth) sum += exp(load(row + place) - top);
        if (place < stop) {
            // A lane that is not there must stay 0 even beside a top of -infinity.
            float lanes[kWidth];
            store(lanes, exp(read(row, place, stop, 0.0f) - top));
            for (int64_t lane = stop - place; lane < kWidth; ++lane) lanes[lane] = 0;
            sum += load(lanes);
        }
        total += sum;
    }
    return sum_lanes(total);
}

// Where a row's logits lie: the largest, and the logarithm of the sum of exp beyond it. Apart, so
// that large logits do not swallow the digits of small differences.
struct Level {
    float top, log_sum;
};

// grad = (exp(x - top - log_sum) - [x is the target]) * scale; `to` may be the row itself.
template <class T>
void write_gradient(const T *row, int64_t count, int64_t target, Level level, float scale, T *to) {
    // Before the row is overwritten.
    const float at_target =
        __builtin_expm1f(widen(row[target]) - level.top - level.log_sum) * scale;
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth)
        store(to + place, exp(load(row + place) - level.top - level.log_sum) * scale);
    if (place < count) {
        const Vec value = load_part(row + place, count - place);
        store_part(to + place, exp(value - level.top - level.log_sum) * scale, count - place);
    }
    narrow(to + target, at_target);
}

struct LossRows {
    int64_t rows, count;
    const anymamba_tensor &logits, &targets, &scales, &losses, &grads;

    template <class T>
    void run(int64_t row) const {
        const T *from = static_cast<const T *>(logits.data) + row * logits.stride[0];
        T *to = static_cast<T *>(grads.data);
        if (to != nullptr) to += row * grads.stride[0];
        const int64_t target =
            static_cast<const int64_t *>(targets.data)[row * targets.stride[0]];
        if (target < 0) {
            if (losses.data != nullptr) write_one(losses, row * losses.stride[0], 0);
            if (to != nullptr) memset(to, 0, (size_t)count * sizeof(T));
            return;
        }
        const float top = largest(from, count);
        const Level level{top, __builtin_logf(sum_of_exp(from, count, top))};
        if (losses.data != nullptr)
            write_one(losses, row * losses.stride[0], level.log_sum - (widen(from[target]) - top));
        if (to == nullptr) return;
        const float scale = scales.data == nullptr ? 1 : read_one(scales, row * scales.stride[0]);
        write_gradient(from, count, target, level, scale, to);
    }
};

}  // namespace

// Tensors: logits, targets (negative: does not count), the gradient of each row's loss (absent: 1);
// then the losses and the gradient of the logits, each absent if not wanted; the latter may be the
// logits themselves. Sizes: rows, vocabulary.
int64_t loss_rows(const anymamba_call &call) {
    if (call.workspace == nullptr) return 0;
    const anymamba_tensor *t = call.tensors;
    const LossRows loss{call.sizes[0], call.sizes[1], t[0], t[1], t[2], t[3], t[4]};
    parallel_for(loss.rows, call.threads, [&](int64_t row, int64_t) {
        if (loss.logits.dtype == ANYMAMBA_FLOAT32)
            loss.run<float>(row);
        else
            loss.run<BFloat16>(row);
    });
    return 0;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
