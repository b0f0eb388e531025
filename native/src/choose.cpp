// Choosing tokens from logits (ops/choose/README.md). Nothing is sorted: the border of top-p is
// found by halving the floats that it may be, and the draw walks along the vocabulary.
#include "choose_find.h"
#include "parallel.h"

namespace anymamba::ANYMAMBA_VARIANT {
namespace {

// Tokens whose weights are added in float32 before the sum goes on in double.
constexpr int64_t kRun = 1024;
// The border of top-p is found roughly among all tokens, then among a kPart-th of them, and so on, at
// last among few.
constexpr int64_t kPart = 5, kSome = 256;

struct Options {
    bool is_greedy;
    int64_t top_k;
    float temperature;
    double top_p;
    float min_p;
};

// What choosing from a row of some width writes down.
struct ChoosingDesk {
    float *weights;  // exp((logit - best) / temperature), in whole vectors
    float *logits;   // that top-k has left
    int32_t *ids;    // their ids
    float *near;     // weights at the border of top-p, in whole vectors and one more
    double *sums;    // of the weights of runs

    ChoosingDesk(Carver &carver, int64_t width)
        : weights(carver.floats(width + kWidth)),
          logits(carver.floats(width)),
          ids(carver.take<int32_t>(width)),
          near(carver.floats(width + 2 * kWidth)),
          sums(carver.take<double>(ceil_div(width, kRun))) {}
};

// The tokens that may be drawn, in the order of their ids.
struct Tokens {
    const float *logits;
    int64_t count;
    const int32_t *ids;  // null where places are ids
};

// Keeps the k likeliest tokens and those that equal the last of them.
Tokens keep_top_k(const float *logits, int64_t width, int64_t k, const ChoosingDesk &desk) {
    const float border = find_kth(logits, width, k);
    int64_t kept = 0;
    for_values(logits, width, border, kInfinite, [&](int64_t at) {
        desk.logits[kept] = logits[at];
        desk.ids[kept++] = (int32_t)at;
    });
    return {desk.logits, kept, desk.ids};
}

void weigh(const Tokens &tokens, float best, float temperature, float *weights) {
    const float inverse = 1.0f / temperature;
    for (int64_t at = 0; at < tokens.count; at += kWidth) {
        const int64_t left = tokens.count - at;
        const Vec logits = left >= kWidth ? load(tokens.logits + at)
                                          : load_part(tokens.logits + at, left);
        store(weights + at, exp((logits - best) * inverse));
    }
    // What fills the last vector was no token.
    for (int64_t at = tokens.count; at % kWidth != 0; ++at) weights[at] = 0.0f;
}

// The weights of a run that are at least `border`, lane by lane, in four sums that do not wait for
// each other.
float mass_of_run(const float *weights, int64_t run, int64_t count, float border) {
    Vec sums[4] = {};
    const int64_t stop = smaller((run + 1) * kRun, ceil_div(count, kWidth) * kWidth);
    int64_t at = run * kRun;
    for (; at + 4 * kWidth <= stop; at += 4 * kWidth)
#pragma GCC unroll 4
        for (int64_t part = 0; part < 4; ++part) {
            const Vec weight = load(weights + at + part * kWidth);
            sums[part] += select(weight >= splat(border), weight, Vec{});
        }
    for (; at < stop; at += kWidth)
        sums[0] += select(load(weights + at) >= splat(border), load(weights + at), Vec{});
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

double mass_of(const float *weights, int64_t count, float border) {
    double mass = 0;
    for (int64_t run = 0; run * kRun < count; ++run)
        mass += (double)mass_of_run(weights, run, count, border);
    return mass;
}

// The least weight of the likeliest tokens that have the share p of all mass. Of equal ones at the
// border the first stay, and the weight of the others is taken away.
float keep_top_p(int64_t count, double p, const ChoosingDesk &desk) {
    constexpr uint32_t kOne = 0x3F800000;  // bits of the largest weight
    const double all = mass_of(desk.weights, count, 0.0f), wanted = p * all;
    // Of a flat vocabulary the border is somewhat below the mean.
    const auto mean = (float)(all / (double)count);
    const Guesses guesses{kOne - bits_of(0.25f * mean), kOne - bits_of(mean)};
    const auto weight_at = [](uint32_t place) { return float_of(kOne - place); };
    const float *weights = desk.weights;
    int64_t among = count;
    double above = 0;  // the mass of those that are not among the weights any more
    Border border{0, kOne, 0};
    const int64_t stages[] = {count / kPart, count / (kPart * kPart), kSome, 0};
    for (const int64_t most : stages) {
        border = find_border(
            wanted - above, {border.least, border.place, 0}, guesses,
            [&](uint32_t place) { return mass_of(weights, among, weight_at(place)); },
            // At most so many are left, of which none weighs less than one at this place.
            [&](double found, double before, uint32_t place) {
                return found - before < (double)most * (double)weight_at(place);
            });
        above += border.before;
        if (most == 0) break;
        among = collect(weights, among, weight_at(border.place), weight_at(border.least), desk.near);
        weights = desk.near;
        for (int64_t at = among; at % kWidth != 0; ++at) desk.near[at] = 0.0f;
    }
    const float last = weight_at(border.place);
    int64_t equal = 0;
    for (int64_t at = 0; at < among; ++at) equal += weights[at] == last;
    if (equal <= 1) return last;
    bool is_first = true;  // it crosses p, or reaches it, whatever rounding says
    for_values(desk.weights, count, last, last, [&](int64_t at) {
        if (!is_first && above >= wanted) desk.weights[at] = 0.0f;
        above += (double)last;
        is_first = false;
    });
    return last;
}

// The place of the first token with which the mass exceeds the share `number` of all that weigh
// `border` or more.
int64_t draw(int64_t count, float border, double number, const ChoosingDesk &desk) {
    double all = 0, reached = 0;
    const int64_t runs = ceil_div(count, kRun);
    for (int64_t run = 0; run < runs; ++run)
        all += desk.sums[run] = (double)mass_of_run(desk.weights, run, count, border);
    const double goal = number * all;
    int64_t last = 0;
    for (int64_t run = 0; run < runs; ++run) {
        if (desk.sums[run] == 0.0) continue;
        reached += desk.sums[run];
        last = run;
        if (reached > goal) break;
    }
    // One by one the weights of a run may be a rounding error less than at once: then its last
    // token is meant.
    double inside = reached - desk.sums[last];
    int64_t found = 0;
    for (int64_t at = last * kRun; at < smaller((last + 1) * kRun, count); ++at) {
        if (desk.weights[at] == 0.0f || desk.weights[at] < border) continue;
        found = at;
        inside += (double)desk.weights[at];
        if (inside > goal) break;
    }
    return found;
}

int64_t choose_row(const float *logits, int64_t width, const Options &options, double number,
                   const ChoosingDesk &desk, float *best) {
    *best = find_best(logits, width);
    const bool is_finite = *best - *best == 0.0f;
    if (!is_finite) return 0;
    if (options.is_greedy) return first_place_of(*best, logits, width);
    Tokens tokens{logits, width, nullptr};
    if (options.top_k > 0 && options.top_k < width)
        tokens = keep_top_k(logits, width, options.top_k, desk);
    weigh(tokens, *best, options.temperature, desk.weights);
    float border = options.min_p;
    if (options.top_p < 1) {
        const float nucleus = keep_top_p(tokens.count, options.top_p, desk);
        border = nucleus > border ? nucleus : border;
    }
    const int64_t place = draw(tokens.count, border, number, desk);
    return tokens.ids == nullptr ? place : tokens.ids[place];
}

}  // namespace

// Tensors: logits, float32, rows contiguous; ids, int64, and the largest logit of each row.
// Sizes: rows, width, is_greedy, top_k; as bits of doubles temperature, top_p, min_p, and a number
// for each row.
int64_t choose(const anymamba_call &call) {
    const anymamba_tensor *t = call.tensors;
    const int64_t *sizes = call.sizes, rows = sizes[0], width = sizes[1];
    const Options options{sizes[2] != 0, sizes[3], real_of(sizes[4]), wide_real_of(sizes[5]),
                          real_of(sizes[6])};
    Carver measure{nullptr};
    ChoosingDesk(measure, width);
    // The likeliest is found without writing anything down.
    const int64_t each = options.is_greedy ? 0 : measure.used;
    const int64_t wanted = larger(1, each * call.threads);
    if (call.workspace == nullptr) return wanted;
    parallel_for(rows, call.threads, [&](int64_t row, int64_t worker) {
        Carver carver{static_cast<char *>(call.workspace) + worker * each};
        const float *logits = static_cast<const float *>(t[0].data) + row * t[0].stride[0];
        static_cast<int64_t *>(t[1].data)[row] =
            choose_row(logits, width, options, wide_real_of(sizes[7 + row]),
                       ChoosingDesk(carver, width), static_cast<float *>(t[2].data) + row);
    });
    return wanted;
}

}  // namespace anymamba::ANYMAMBA_VARIANT
