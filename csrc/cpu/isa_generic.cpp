// The kernels for any processor: 16-byte compiler vectors (SSE2, NEON); float64 runs here only.
#define TT_ISA generic
#define TT_VECTOR_BYTES 16
#include "embedding_bag_kernels.h"

namespace torchrec_tt {
const Kernels<float> kGenericFloat = generic::make_kernels<float>();
const Kernels<double> kGenericDouble = generic::make_kernels<double>();
}  // namespace torchrec_tt
