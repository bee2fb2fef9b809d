/*
 * NCCL transport: a thread of the program captures a CUDA graph, while the
 * watchdog asks for events. libcuda is a stand-in that lies beside this program
 * (nccl/capture_library.c).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/alloc.h"
#include "nccl_fixture.h"

enum { RELAXED = 2 };

static const char CAPTURING[] =
    "CUDA error: operation not permitted when stream is capturing";
static const char CAPTURED[] =
    "CUDA error: operation not permitted on an event last recorded in a "
    "capturing stream";

static int (*g_mode_of_thread)(void);
static fsdp_nccl_events g_fake;
static _Atomic int64_t g_num_asked;
static _Atomic int64_t g_num_spoiled; /* captures */

static void load_stand_in(void) {
  char path[512];
  const ssize_t length = readlink("/proc/self/exe", path, 400);
  if (!CHECK(length > 0)) exit(1);
  path[length] = 0;
  (void)snprintf(strrchr(path, '/'), 100, "/libcapture.so");
  void *handle = dlopen(path, RTLD_NOW);
  void *address = handle == NULL ? NULL : dlsym(handle, "stand_in_mode");
  if (!CHECK(address != NULL)) exit(1);
  memcpy(&g_mode_of_thread, &address, sizeof address);
}

static void *relax_and_tell(void *argument) {
  int *mode = argument;
  const bool is_relaxed = fsdp_nccl_relax_capture();
  const bool is_again = fsdp_nccl_relax_capture();
  *mode = is_relaxed && is_again ? g_mode_of_thread() : -1;
  return NULL;
}

/* Of the thread alone. */
TEST(test_relaxed_thread) {
  pthread_t thread;
  int mode = -1;
  CHECK(!fsdp_nccl_relax_capture()); /* no CUDA is loaded */
  load_stand_in();
  CHECK(pthread_create(&thread, NULL, relax_and_tell, &mode) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK_I64(mode, RELAXED);
  CHECK_I64(g_mode_of_thread(), 0);
}

static void enter_thread(void *context) {
  (void)context;
  (void)fsdp_nccl_relax_capture();
}

/* As cudaEventQuery while another thread captures in the global mode. */
static fsdp_status query(void *context, void *event, bool *is_done,
                         fsdp_error *error) {
  atomic_fetch_add(&g_num_asked, 1);
  if (g_mode_of_thread() != RELAXED) {
    atomic_fetch_add(&g_num_spoiled, 1);
    return FSDP_FAIL(error, FSDP_BACKEND, "%s", CAPTURING);
  }
  return g_fake.query(context, event, is_done, error);
}

static void wait_for_questions(int64_t num) {
  const int64_t before = atomic_load(&g_num_asked);
  for (int i = 0; i < 10000 && atomic_load(&g_num_asked) < before + num; i++) {
    check_sleep_ms(1);
  }
  CHECK(atomic_load(&g_num_asked) >= before + num);
}

TEST(test_watchdog_beside_a_capture) {
  fsdp_nccl_options options = nccl_fixture_options();
  g_fake = nccl_fake_events();
  fsdp_nccl_events events = g_fake;
  events.enter_thread = enter_thread;
  events.query = query;
  options.events = &events;
  options.poll_ms = 1;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", NULL));
  wait_for_questions(5);
  CHECK_I64(atomic_load(&g_num_spoiled), 0);
  CHECK_OK(transport->ops->check(transport, NULL));
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, false);
  nccl_fixture_leave(transport);
}

static fsdp_status refuse_record(void *context, void *event, void *stream,
                                 fsdp_error *error) {
  (void)context, (void)event, (void)stream;
  return FSDP_FAIL(error, FSDP_BACKEND, "an event was recorded");
}

/* Behind a captured call there is no event that the watchdog would ask for: the
 * question would spoil the capture. Nor does it count as outstanding. */
TEST(test_captured_calls_have_no_events) {
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_nccl_events events = nccl_fake_events();
  fsdp_error error = {0};
  events.record = refuse_record;
  options.events = &events;
  options.timeout_ms = 30;
  options.poll_ms = 1;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, "unit 'a'");
  call.is_captured = true;
  for (int i = 0; i < 3; i++) {
    CHECK_OK(transport->ops->all_gather(transport, &call, nccl_fixture_memory,
                                        nccl_fixture_memory, 8, NCCL_F32, NULL,
                                        &error));
  }
  check_sleep_ms(100);
  CHECK_OK(transport->ops->check(transport, &error));
  /* A call that is not captured has one again. */
  call.is_captured = false;
  CHECK_FAILS(transport->ops->all_gather(transport, &call, nccl_fixture_memory,
                                         nccl_fixture_memory, 8, NCCL_F32, NULL,
                                         &error),
              FSDP_BACKEND, error.message, "..an event was recorded");
  nccl_fixture_leave(transport);
}

/* Whatever a question about a capture ends with, training goes on. */
TEST(test_errors_about_captures) {
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_error error = {0};
  options.poll_ms = 1;
  options.timeout_ms = 0;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  nccl_fake_event_set_error(CAPTURING);
  for (int i = 0; i < 10; i++) {
    CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
    check_sleep_ms(2);
  }
  CHECK_OK(transport->ops->check(transport, &error));
  nccl_fake_event_set_error(NULL);
  nccl_fixture_leave(transport);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 0); /* all was seen to be done */

  /* An event inside a graph is never done: it does not count as a hang. */
  options.timeout_ms = 30;
  transport = nccl_fixture_join(&options, 0, 2);
  nccl_fake_event_set_error(CAPTURED);
  nccl_fake_hold_watchdog(true);
  CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
  nccl_fake_hold_watchdog(false);
  check_sleep_ms(100);
  nccl_fake_hold_watchdog(true);
  CHECK_OK(nccl_fixture_gather(transport, "unit 'b'", &error));
  CHECK_OK(transport->ops->check(transport, &error));
  nccl_fake_hold_watchdog(false);
  nccl_fixture_leave(transport);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 0);

  /* Other errors end it. */
  options.timeout_ms = 0;
  transport = nccl_fixture_join(&options, 0, 1);
  CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
  nccl_fake_event_set_error("CUDA error: an illegal memory access");
  CHECK(nccl_fixture_gather(transport, "unit 'b'", &error) == FSDP_OK ||
        error.status == FSDP_BACKEND);
  CHECK(nccl_fixture_wait_for_failure(transport, &error) == FSDP_BACKEND);
  nccl_fixture_leave(transport);
}
