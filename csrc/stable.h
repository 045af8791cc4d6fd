// PyTorch's stable ABI, from torch 2.11 on: one binary serves every later version.
#pragma once

#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

// The operators' namespace; tests build the CUDA operators for the CPU under another one.
#ifndef TT_OPERATORS
#define TT_OPERATORS torchrec_tt
#endif

namespace torchrec_tt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

}  // namespace torchrec_tt
