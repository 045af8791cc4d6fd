// The parts of CUB that we use, or, in tests, their stand-in.
#pragma once

#ifdef TT_CUDA_EMULATION
#include "cub_emulation.h"  // tests/csrc
#else
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#endif
