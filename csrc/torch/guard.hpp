// The two directions of an error at the border between C and C++: an exception
// becomes a status, and a status that must cross autograd becomes an exception
// again, of its original type where there was one.
#pragma once

#include <string>
#include <utility>

#include "base/status.h"

namespace fsdp_torch {

// Fills `error` from the exception that is being handled and saves the
// exception for this thread. Call it in a catch block.
fsdp_status status_from_exception(fsdp_error *error, const char *file,
                                  int line) noexcept;

// If the exception that is being handled is Python's: takes it from the
// interpreter, where other calls would clear it before autograd throws again.
// Call it in a catch block.
void hold_python_error() noexcept;

// The message with its remedy in the user's terms; see remedies.cpp.
std::string text_of(const fsdp_error &error);

// Throws the saved exception if it caused `error`, else one by its code.
[[noreturn]] void throw_error(const fsdp_error &error);

// Carries the place of a guarded body; see GUARDED.
struct Guard {
  fsdp_error *error;
  const char *file;
  int line;

  template <typename Body>
  fsdp_status operator+(Body &&body) const noexcept {
    try {
      return std::forward<Body>(body)();
    } catch (...) {
      return status_from_exception(error, file, line);
    }
  }
};

}  // namespace fsdp_torch

// Opens the whole body of a function that can fail:
//   GUARDED(error) { ...; return FSDP_OK; };
// The body returns a status and may throw.
#define GUARDED(error) \
  return fsdp_torch::Guard{(error), __FILE__, __LINE__} + [&]()->fsdp_status
