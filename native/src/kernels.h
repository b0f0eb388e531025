// One table of kernels per instruction set; `dispatch.cpp` picks a table, nothing else does.
#pragma once

#include "../anymamba.h"

namespace anymamba {

using Kernel = int64_t (*)(const anymamba_call &);

struct Kernels {
#define ANYMAMBA_MEMBER(kernel) Kernel kernel;
    ANYMAMBA_KERNELS(ANYMAMBA_MEMBER)
#undef ANYMAMBA_MEMBER
};

}  // namespace anymamba
