// The kernels for AVX2 and FMA. Nothing but kernels: an inline function of the standard library
// compiled here could be chosen by the linker for processors without AVX2.
#define TT_ISA avx2
#define TT_VECTOR_BYTES 32
#include "embedding_bag_kernels.h"

namespace torchrec_tt {
const Kernels<float> kAvx2Float = avx2::make_kernels<float>();
}  // namespace torchrec_tt
