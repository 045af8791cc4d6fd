// The kernels for AVX-512 (F, DQ, VL, BW). Nothing but kernels, see isa_avx2.cpp.
#define TT_ISA avx512
#define TT_VECTOR_BYTES 64
#include "embedding_bag_kernels.h"

namespace torchrec_tt {
const Kernels<float> kAvx512Float = avx512::make_kernels<float>();
}  // namespace torchrec_tt
