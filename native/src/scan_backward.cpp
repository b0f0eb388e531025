#include "vector.h"

namespace anymamba::ANYMAMBA_VARIANT {

int64_t scan_backward(const anymamba_call &) { return -1; }

}  // namespace anymamba::ANYMAMBA_VARIANT
