// Copies from the host as arguments of a kernel.
#include <cstring>

#include "launchers.h"

namespace torchrec_tt::cuda {
namespace {

constexpr int kThreads = 256;

template <int kBytes>
struct Piece {
  uint32_t words[kBytes / 4];
};

// A thread per 4 bytes of a piece, 256 at a time.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    write_piece(const __grid_constant__ Piece<kBytes> piece, int num_words, uint32_t* to) {
  for (int i = threadIdx.x; i < num_words; i += kThreads) to[i] = piece.words[i];
}

template <int kBytes>
void launch_piece(const char* from, int64_t bytes, char* to, cudaStream_t stream) {
  Piece<kBytes> piece;
  std::memcpy(piece.words, from, bytes);
  TT_LAUNCH((write_piece<kBytes>), 1, kThreads, 0, stream, piece, static_cast<int>(bytes / 4),
            reinterpret_cast<uint32_t*>(to));
}

}  // namespace

void launch_upload(const void* from, int64_t bytes, void* to, cudaStream_t stream) {
  constexpr int kSmall = 4000, kLarge = 32000;  // arguments of every launch are copied whole
  for (int64_t at = 0; at < bytes; at += kLarge) {
    const int64_t rest = bytes - at;
    const auto launch = rest <= kSmall ? launch_piece<kSmall> : launch_piece<kLarge>;
    launch(static_cast<const char*>(from) + at, rest < kLarge ? rest : kLarge,
           static_cast<char*>(to) + at, stream);
  }
}

}  // namespace torchrec_tt::cuda
