// The table of one instruction set. A set that differs from another one in the decoder only names
// that one as its base (ANYMAMBA_BASE), and has its kernels otherwise.
#include "variant.h"

#if defined(ANYMAMBA_BASE)
namespace anymamba::ANYMAMBA_BASE {
#define ANYMAMBA_DECLARE(kernel) int64_t kernel(const anymamba_call &call);
ANYMAMBA_KERNELS(ANYMAMBA_DECLARE)
#undef ANYMAMBA_DECLARE
}  // namespace anymamba::ANYMAMBA_BASE
#endif

namespace anymamba::ANYMAMBA_VARIANT {

extern const Kernels table;

#if defined(ANYMAMBA_BASE)
constexpr Kernels with_own_decoder(Kernels base) {
    base.decode = decode;
    return base;
}

#define ANYMAMBA_ENTRY(kernel) ANYMAMBA_BASE::kernel,
const Kernels table = with_own_decoder({ANYMAMBA_KERNELS(ANYMAMBA_ENTRY)});
#undef ANYMAMBA_ENTRY
#else
const Kernels table = {
#define ANYMAMBA_ENTRY(kernel) kernel,
    ANYMAMBA_KERNELS(ANYMAMBA_ENTRY)
#undef ANYMAMBA_ENTRY
};
#endif

}  // namespace anymamba::ANYMAMBA_VARIANT
