#include "vector.h"

namespace anymamba::ANYMAMBA_VARIANT {

int64_t ssd_backward(const anymamba_call &) { return -1; }

}  // namespace anymamba::ANYMAMBA_VARIANT
