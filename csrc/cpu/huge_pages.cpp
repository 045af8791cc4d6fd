// Memory that is read at random is better held in few large pages: a new page costs a walk of tables.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <vector>

#include "../checks.h"
#include "../stable.h"

namespace torchrec_tt {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{1} << 21;

// Asks the system to hold what lies in whole huge pages in such; it may decline. Values stay.
void advise_huge_pages(const std::vector<Tensor>& tensors) {
#if defined(__linux__)
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, from Linux 6.1 on: pages in use too
  for (const Tensor& tensor : tensors) {
    TT_CHECK(tensor.is_contiguous(), "tensors must be contiguous");
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    const uintptr_t end = begin + tensor.numel() * tensor.element_size();
    const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t last = end / kHugePage * kHugePage;
    if (first >= last) continue;
    void* pages = reinterpret_cast<void*>(first);
    if (madvise(pages, last - first, MADV_HUGEPAGE) == 0) madvise(pages, last - first, kCollapse);
  }
#endif
}

}  // namespace
}  // namespace torchrec_tt

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CPU, m) {
  m.impl("advise_huge_pages", TORCH_BOX(&torchrec_tt::advise_huge_pages));
}
