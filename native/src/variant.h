// What a kernel source starts with. It is compiled once per instruction set, and everything in it
// lives in a namespace of that set's name, so that no two copies of a function ever share a symbol.
//
// Kernel sources use no inline function of the standard library: the linker would keep one copy of
// it for all instruction sets, and a machine without AVX-512 could meet the AVX-512 one.
#pragma once

#include "kernels.h"

#ifndef ANYMAMBA_VARIANT
#error "the build names the instruction set: -DANYMAMBA_VARIANT=avx2"
#endif

namespace anymamba::ANYMAMBA_VARIANT {

#define ANYMAMBA_DECLARE(kernel) int64_t kernel(const anymamba_call &call);
ANYMAMBA_KERNELS(ANYMAMBA_DECLARE)
#undef ANYMAMBA_DECLARE

}  // namespace anymamba::ANYMAMBA_VARIANT
