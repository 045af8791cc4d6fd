// Errors that name the argument, the rule and the value. std::invalid_argument is a ValueError in Python.
#pragma once

#include <sstream>
#include <stdexcept>

namespace torchrec_tt {

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  (message << ... << args);
  throw std::invalid_argument(message.str());
}

}  // namespace torchrec_tt

#define TT_CHECK(condition, ...)             \
  do {                                       \
    if (!(condition)) [[unlikely]]           \
      ::torchrec_tt::fail(__VA_ARGS__);      \
  } while (false)
