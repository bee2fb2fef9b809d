// Exceptions to statuses and back; the only place that knows both.
#include "torch/guard.hpp"

#include <Python.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "torch/bridge.h"

namespace fsdp_torch {
namespace {

// The last exception of this thread that became a status, and the message by
// which its error record is recognised.
struct SavedException {
  std::exception_ptr exception;
  std::string message;
};
thread_local SavedException saved;

fsdp_status save(fsdp_error *error, fsdp_status status, const char *file,
                 int line, const char *message) noexcept {
  fsdp_error local = {};
  status = fsdp_error_set(&local, status, FSDP_REMEDY_NONE, file, line, "%s",
                          message);
  saved.exception = std::current_exception();
  saved.message = local.message;
  if (error != nullptr) *error = local;
  return status;
}

// The saved exception if it caused `error`; forgets it in any case.
std::exception_ptr take_saved(const fsdp_error &error) {
  std::exception_ptr exception;
  if (saved.exception && saved.message == error.message) {
    exception = saved.exception;
  }
  saved = SavedException();
  return exception;
}

}  // namespace

void hold_python_error() noexcept {
  try {
    throw;
  } catch (python_error &e) {
    e.persist();
  } catch (...) {
  }
}

fsdp_status status_from_exception(fsdp_error *error, const char *file,
                                  int line) noexcept {
  hold_python_error();
  try {
    throw;
  } catch (const std::bad_alloc &) {
    return save(error, FSDP_OUT_OF_MEMORY, file, line,
                "host allocation failed");
  } catch (const c10::OutOfMemoryError &e) {
    return save(error, FSDP_OUT_OF_MEMORY, file, line,
                e.what_without_backtrace());
  } catch (const c10::Error &e) {
    return save(error, FSDP_BACKEND, file, line, e.what_without_backtrace());
  } catch (const std::invalid_argument &e) {
    return save(error, FSDP_INVALID_ARGUMENT, file, line, e.what());
  } catch (const std::exception &e) {
    return save(error, FSDP_BACKEND, file, line, e.what());
  } catch (...) {
    return save(error, FSDP_INTERNAL, file, line, "unknown C++ exception");
  }
}

void throw_error(const fsdp_error &error) {
  const std::exception_ptr exception = take_saved(error);
  // A bad argument is a ValueError in Python, whatever it was in C++.
  if (error.status == FSDP_INVALID_ARGUMENT) {
    C10_THROW_ERROR(ValueError, text_of(error));
  }
  if (exception) std::rethrow_exception(exception);
  if (error.status == FSDP_OUT_OF_MEMORY) {
    C10_THROW_ERROR(OutOfMemoryError, text_of(error));
  }
  throw std::runtime_error(text_of(error));
}

}  // namespace fsdp_torch

extern "C" void fsdp_torch_set_python_error(const fsdp_error *error) {
  try {
    fsdp_torch::throw_error(*error);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}
