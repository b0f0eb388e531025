/* The C interface of the kernels: the only thing that crosses from Python into this folder.
 *
 * Every kernel has one signature. A call names the instruction set to run on, its tensors, its
 * sizes, a workspace and a number of threads. A kernel never allocates: asked with a null workspace
 * it returns how many bytes it wants and does nothing else.
 */
#ifndef ANYMAMBA_H
#define ANYMAMBA_H

#include <stdint.h>

#if defined(_WIN32)
#define ANYMAMBA_EXPORT __declspec(dllexport)
#else
#define ANYMAMBA_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or the order of a kernel's tensors or sizes changes. */
#define ANYMAMBA_ABI 7

enum anymamba_dtype {
    ANYMAMBA_FLOAT32 = 0,
    ANYMAMBA_BFLOAT16 = 1,
    ANYMAMBA_INT64 = 2,
    ANYMAMBA_FLOAT16 = 3 /* states and logits of the decoder only */
};

/* A view: strides are counted in elements, and unused ones are 0. An absent tensor has no data. */
struct anymamba_tensor {
    void *data;
    int64_t dtype;
    int64_t stride[6];
};

struct anymamba_call {
    const struct anymamba_tensor *tensors; /* inputs, then outputs, in the kernel's own order */
    const int64_t *sizes;                  /* axes and flags, in the kernel's own order */
    void *workspace;                       /* aligned to 64 bytes; null asks for its size */
    int64_t threads;                       /* at least 1 */
    int64_t variant;                       /* index of an instruction set that this machine has */
};

ANYMAMBA_EXPORT int64_t anymamba_abi(void);

/* Instruction sets, slowest first. The name is null past the last one. */
ANYMAMBA_EXPORT const char *anymamba_variant_name(int64_t variant);
ANYMAMBA_EXPORT int64_t anymamba_variant_runs_here(int64_t variant);

/* How the library runs a parallel loop: "openmp", "threads" or "serial". */
ANYMAMBA_EXPORT const char *anymamba_threading(void);

/* Each returns the bytes of workspace that it wants. */
#define ANYMAMBA_KERNELS(X) \
    X(ssd_forward)          \
    X(ssd_backward)         \
    X(scan_forward)         \
    X(scan_backward)        \
    X(conv_forward)         \
    X(conv_backward)        \
    X(norm_forward)         \
    X(norm_backward)        \
    X(tail_forward)         \
    X(tail_backward)        \
    X(loss_rows)            \
    X(step_size_forward)    \
    X(step_size_backward)   \
    X(values_forward)       \
    X(values_backward)      \
    X(decode)               \
    X(choose)               \
    X(keys_forward)         \
    X(keys_backward)

#define ANYMAMBA_DECLARE(kernel) \
    ANYMAMBA_EXPORT int64_t anymamba_##kernel(const struct anymamba_call *call);
ANYMAMBA_KERNELS(ANYMAMBA_DECLARE)
#undef ANYMAMBA_DECLARE

#ifdef __cplusplus
}
#endif
#endif
