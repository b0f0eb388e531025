// Root-mean-square norm of rows in groups, perhaps behind a residual sum (ops/norm/README.md).
#pragma once

#include "rows.h"

namespace anymamba::ANYMAMBA_VARIANT {

struct NormShape {
    int64_t rows, channels, group, groups, lanes;  // lanes: of a group in whole vectors
    float eps;

    explicit NormShape(const int64_t *sizes)
        : rows(sizes[0]),
          channels(sizes[1]),
          group(sizes[2]),
          groups(channels / group),
          lanes(ceil_div(group, kWidth) * kWidth),
          eps(real_of(sizes[3])) {}
};

// The weight as padded float32, [group][lane].
inline void fill_weight(const NormShape &shape, const anymamba_tensor &weight, float *to) {
    for (int64_t group = 0; group < shape.groups; ++group)
        for (int64_t lane = 0; lane < shape.lanes; ++lane, ++to)
            *to = lane < shape.group
                      ? read_one(weight, (group * shape.group + lane) * weight.stride[0])
                      : 0;
}

ANYMAMBA_INLINE float root_scale(Vec squares, const NormShape &shape) {
    return 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)shape.group + shape.eps);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
