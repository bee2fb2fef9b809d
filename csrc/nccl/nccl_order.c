/*
 * The order of launches on several communicators of one device.
 *
 * Note [Launch order]
 * The gathers, the reductions and the all-reduces over replicas run beside each
 * other on communicators of their own. A NCCL kernel waits on the device for
 * its peers. If one rank starts a gather first and another one a reduction, and
 * the device has no room for both - few free SMs, or one hardware queue with
 * CUDA_DEVICE_MAX_CONNECTIONS=1 - each waits for the other. NCCL 2.26 and newer
 * start kernels in the order of the host's launches when
 * NCCL_LAUNCH_ORDER_IMPLICIT is 1; that order is the program's and the same on
 * all ranks. NCCL reads the variable at its first launch, and its files of
 * configuration (nccl.conf) when the first communicator is made. So it is set
 * in between, if neither the environment nor a file has a value. NCCL requires
 * that no two threads launch at once then: a mutex of the process sees to it.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <stdlib.h>

#include "nccl/nccl_priv.h"

enum { FIRST_ORDERED_VERSION = 22600 };

static pthread_mutex_t g_launch_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

/* A fork can happen in the middle of another thread's launch. The child makes
 * no launches on what it inherited, but may join groups of its own. */
static void renew_lock(void) {
  const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  g_launch_lock = fresh;
}

static void ask_for_order(void) {
  (void)setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0); /* else unordered */
  (void)pthread_atfork(NULL, NULL, renew_lock);
}

static bool is_ordered(const fsdp_nccl_transport *transport) {
  return transport->version >= FIRST_ORDERED_VERSION;
}

void fsdp_nccl_priv_order_launches(const fsdp_nccl_transport *transport) {
  if (is_ordered(transport)) (void)pthread_once(&g_once, ask_for_order);
}

void fsdp_nccl_priv_begin_launch(const fsdp_nccl_transport *transport) {
  if (is_ordered(transport)) (void)pthread_mutex_lock(&g_launch_lock);
}

void fsdp_nccl_priv_end_launch(const fsdp_nccl_transport *transport) {
  if (is_ordered(transport)) (void)pthread_mutex_unlock(&g_launch_lock);
}
