/*
 * The call that changes a thread's mode of captures: the driver's.
 */
#define EXPORTED __attribute__((visibility("default")))

static _Thread_local int t_mode = 0; /* global, as CUDA's threads begin */

EXPORTED int cuThreadExchangeStreamCaptureMode(int *mode);
int cuThreadExchangeStreamCaptureMode(int *mode) {
  const int before = t_mode;
  t_mode = *mode;
  *mode = before;
  return 0;
}

EXPORTED int stand_in_mode(void);
int stand_in_mode(void) {
  return t_mode;
}
