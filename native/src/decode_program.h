// A language model as the decoder reads it: sizes, options, and addresses of weights. Python fills
// these structs (src/anymamba/ops/decode/program.py, field by field); the kernel only reads them.
//
// Matrices lie as the model stores them, floating-point ones row after row; small parameters are
// float32.
#pragma once

#include <stdint.h>

namespace anymamba {

enum class DecodeFormat : int64_t { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };
enum class DecodeNormKind : int64_t { kNone, kRms, kLayer };
enum class DecodeRotation : int64_t { kInterleaved, kHalfSplit, kQuaternion };

// Rows that share one reading of the weights, at most.
constexpr int64_t kDecodeMostRows = 64;

// Columns per scale of the integer formats, and rows that lie together. Matrices are padded with
// zeros to whole blocks and panels.
constexpr int64_t kDecodeBlock = 32, kDecodePanel = 16;

// Channels that lie together in the weight of Mamba-1's step sizes.
constexpr int64_t kDecodeGroup = 16;

// y = W x + bias. Integers lie in panels of 16 rows, (panels, blocks, fours, 16 rows, 4 bytes): of a
// block of 32 columns the first four columns of all rows, then the next four. A byte is a column
// (int8), or its low nibble is one of columns 0 to 15 and its high one that of 16 to 31, each a
// signed number (int4). The scales are bfloat16, (panels, blocks, 16 rows).
struct DecodeMatrix {
    const void *data;
    const void *scales;
    const float *bias;
    DecodeFormat format;
    int64_t rows;
    int64_t columns;
};

struct DecodeNorm {
    const float *weight;
    const float *bias;
    double eps;
    DecodeNormKind kind;
};

struct DecodeLayer {
    int64_t family;  // 1, 2 or 3; 0 is attention
    int64_t inner, heads, headdim, state, groups, rank;
    DecodeNorm norm, norm2;
    DecodeMatrix in_proj, out_proj, fc1, fc2;  // without an MLP, fc1 and fc2 have no rows
    const float *conv_weight;                  // (channels, width), the newest token's weight last
    const float *conv_bias;
    int64_t conv_width;
    const float *a;        // Mamba-1: A / ln 2, (inner, state); Mamba-2: A, (heads); attention:
                           // angles of a position, (turns)
    const float *skip;     // Mamba-1: (inner); Mamba-3: (heads); Mamba-2: either
    const float *dt_bias;  // Mamba-1: (inner), else (heads)
    // Mamba-1
    DecodeMatrix x_proj;
    const float *dt_weight;  // (groups of 16 channels, dt_rank, 16)
    int64_t dt_rank;
    double rates_eps;  // of the norm of dt, B and C; negative without one
    // Mamba-2 and attention
    int64_t mlp;  // width of the part that goes around the scan or the heads
    int64_t has_skip_per_channel;
    // Mamba-2 and Mamba-3: the norm with a gate
    DecodeNorm gate_norm;
    int64_t gate_group;
    int64_t norm_before_gate;
    double dt_low, dt_high;
    // Mamba-3; mimo_* are null with one rank
    const float *b_norm, *c_norm;
    const float *b_bias, *c_bias;             // (heads, rank, state)
    const float *mimo_x, *mimo_z, *mimo_o;    // (heads, rank, headdim)
    double b_eps, c_eps, a_floor;
    int64_t is_heavy_tail;
    DecodeRotation rotation;
    int64_t turns;      // angles or quaternions of a head
    int64_t is_turned;  // else they are kept and turn nothing
    double turn_scale;  // the largest angle per unit of dt
    double turn_floor;  // the smallest square of a length
    // Attention, whose groups are heads of keys and values
    double score_scale;
};

struct DecodeProgram {
    int64_t layer_bytes;  // sizeof(DecodeLayer) as Python counts it
    int64_t layers;
    int64_t width;  // of the residual stream
    const DecodeLayer *layer;
    DecodeMatrix embedding;
    DecodeNorm norm;
    DecodeMatrix head;
};

// Tensors of a call: ids, positions and logits of the rows, then four states per layer. Without
// logits the head is not computed; those of half types are rounded once, from float32.
// Mamba-1 and Mamba-2: convolution, scan. Mamba-3: scan, key, value, rotation. Attention:
// keys, values, lengths, convolution; there is room for one more key.
// Sizes: rows, and the address of the program.
constexpr int64_t kDecodeIds = 0, kDecodePositions = 1, kDecodeLogits = 2, kDecodeStates = 3;
constexpr int64_t kDecodeStatesPerLayer = 4;

}  // namespace anymamba
