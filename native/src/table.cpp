// The table of one instruction set.
#include "variant.h"

namespace anymamba::ANYMAMBA_VARIANT {

extern const Kernels table;

const Kernels table = {
#define ANYMAMBA_ENTRY(kernel) kernel,
    ANYMAMBA_KERNELS(ANYMAMBA_ENTRY)
#undef ANYMAMBA_ENTRY
};

}  // namespace anymamba::ANYMAMBA_VARIANT
