// Which instruction sets there are, which run on this machine, and the exported functions.
// Compiled for the lowest instruction set: this code runs before anything is known of the machine.
#include "kernels.h"
#include "parallel.h"

namespace anymamba {

#define ANYMAMBA_TABLE(variant)        \
    namespace variant {                \
    extern const Kernels table;        \
    }
ANYMAMBA_TABLE(baseline)
#if defined(ANYMAMBA_X86)
ANYMAMBA_TABLE(avx2)
ANYMAMBA_TABLE(avx512)
ANYMAMBA_TABLE(avx512_vnni)
ANYMAMBA_TABLE(avx512_bf16)
#endif
#undef ANYMAMBA_TABLE

namespace {

struct Variant {
    const char *name;
    const Kernels *kernels;
    bool (*runs_here)();
};

bool always() { return true; }

#if defined(ANYMAMBA_X86)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

const Variant variants[] = {
#if defined(ANYMAMBA_ARM64)
    {"neon", &baseline::table, always},
#else
    {"baseline", &baseline::table, always},
#endif
#if defined(ANYMAMBA_X86)
    {"avx2", &avx2::table, has_avx2},
    {"avx512", &avx512::table, has_avx512},
    {"avx512_vnni", &avx512_vnni::table, has_avx512_vnni},
    {"avx512_bf16", &avx512_bf16::table, has_avx512_bf16},
#endif
};

constexpr int64_t variant_count = sizeof(variants) / sizeof(variants[0]);

bool exists(int64_t variant) { return variant >= 0 && variant < variant_count; }

}  // namespace
}  // namespace anymamba

extern "C" {

int64_t anymamba_abi(void) { return ANYMAMBA_ABI; }

const char *anymamba_variant_name(int64_t variant) {
    return anymamba::exists(variant) ? anymamba::variants[variant].name : nullptr;
}

int64_t anymamba_variant_runs_here(int64_t variant) {
    return anymamba::exists(variant) && anymamba::variants[variant].runs_here() ? 1 : 0;
}

const char *anymamba_threading(void) { return anymamba::threading_name(); }

#define ANYMAMBA_DEFINE(kernel)                                         \
    int64_t anymamba_##kernel(const struct anymamba_call *call) {       \
        return anymamba::variants[call->variant].kernels->kernel(*call); \
    }
ANYMAMBA_KERNELS(ANYMAMBA_DEFINE)
#undef ANYMAMBA_DEFINE

}  // extern "C"
