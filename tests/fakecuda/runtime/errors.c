/* Codes and texts of errors, and what makes every call fail. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

_Thread_local bool fake_is_in_callback;

static _Thread_local cudaError_t last_error;
/* Why the last call was refused; told with the code that it returned. */
static _Thread_local cudaError_t refused_code;
static _Thread_local char refused_why[512];

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static cudaError_t failure;
static char failure_message[1024];
static bool is_used;     /* by a call that CUDA would start its context for */
static bool is_bad_fork; /* of a process that had used it */

cudaError_t fake_result(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

cudaError_t fake_refuse(const char *call, cudaError_t code, const char *why,
                        ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, why);
  vsnprintf(text, sizeof text, why, arguments);
  va_end(arguments);
  refused_code = code;
  snprintf(refused_why, sizeof refused_why, "%s: %s", call, text);
  fprintf(stderr, "fake CUDA: %s\n", refused_why);
  return fake_result(code);
}

void fakecuda_fail(int code, const char *message) {
  pthread_mutex_lock(&mutex);
  if (failure == cudaSuccess) {
    failure = (cudaError_t)code;
    snprintf(failure_message, sizeof failure_message, "%s", message);
    fprintf(stderr, "fake CUDA: a task failed: %s\n", message);
  }
  pthread_mutex_unlock(&mutex);
}

void fakecuda_forget_failure(void) {
  pthread_mutex_lock(&mutex);
  failure = cudaSuccess;
  failure_message[0] = '\0';
  pthread_mutex_unlock(&mutex);
  last_error = cudaSuccess;
}

static void note_fork(void) {
  is_bad_fork = is_used;
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(NULL, NULL, note_fork);
}

cudaError_t fake_enter(const char *call) {
  if (is_bad_fork) {
    return fake_refuse(call, cudaErrorInitializationError,
                       "this process is a fork of one that used CUDA");
  }
  if (fake_is_in_callback) {
    return fake_refuse(call, cudaErrorNotPermitted,
                       "a callback of a stream must not call CUDA");
  }
  is_used = true;
  pthread_mutex_lock(&mutex);
  const cudaError_t code = failure;
  pthread_mutex_unlock(&mutex);
  return fake_result(code);
}

cudaError_t cudaGetLastError(void) {
  pthread_mutex_lock(&mutex);
  const cudaError_t code = failure != cudaSuccess ? failure : last_error;
  pthread_mutex_unlock(&mutex);
  last_error = cudaSuccess;
  return code;
}

cudaError_t cudaPeekAtLastError(void) {
  return last_error;
}

/* The real runtime is loaded behind this one: texts need no device. */
static const char *real_text(const char *function, cudaError_t code) {
  typedef const char *(*text_of)(cudaError_t);
  text_of ask = NULL;
  *(void **)&ask = dlsym(RTLD_NEXT, function);
  return ask == NULL ? "unknown error" : ask(code);
}

const char *cudaGetErrorName(cudaError_t code) {
  return real_text(__func__, code);
}

const char *cudaGetErrorString(cudaError_t code) {
  static _Thread_local char text[2048];
  const char *told = real_text(__func__, code);
  pthread_mutex_lock(&mutex);
  const bool is_failure = code != cudaSuccess && code == failure;
  if (is_failure) {
    snprintf(text, sizeof text, "%s (fake CUDA: %s)", told, failure_message);
  }
  pthread_mutex_unlock(&mutex);
  if (is_failure) return text;
  if (code == cudaSuccess || code != refused_code) return told;
  snprintf(text, sizeof text, "%s (fake CUDA: %s)", told, refused_why);
  return text;
}
