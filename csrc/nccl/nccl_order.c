/*
 * The order of launches on several communicators of one device.
 *
 * Note [Launch order]
 * All-gathers, reduce-scatters and the all-reduces over replicas overlap, on
 * communicators of their own. A NCCL kernel waits on the device for its peers.
 * If one rank starts an all-gather first and another rank a reduce-scatter, and
 * the device has no room for both (few free SMs, or one hardware queue with
 * CUDA_DEVICE_MAX_CONNECTIONS=1), each waits for the other. With
 * NCCL_LAUNCH_ORDER_IMPLICIT=1, NCCL 2.26 and newer start kernels in the order
 * of the host's launches, which is the same on all ranks.
 *
 * The process sets that variable because these versions have no other switch:
 * ncclConfig_t of NCCL 2.28 has no field for it (2.32 has one). Ordering the
 * launches with events instead would run the collectives one after the other.
 * NCCL reads nccl.conf when the first communicator is made, and the variable at
 * the first launch. So it is set in between, unless the environment or the file
 * has a value. NCCL then requires that no two threads launch at once; a mutex
 * of the process ensures that.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <stdlib.h>

#include "nccl/nccl_priv.h"

enum { FIRST_ORDERED_VERSION = 22600 };

static pthread_mutex_t g_launch_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

/* A fork can come during another thread's launch. The child must not launch on
 * its parent's communicators, but may join groups of its own. */
static void renew_lock(void) {
  const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  g_launch_lock = fresh;
}

static void ask_for_order(void) {
  (void)setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1",
               0); /* if it fails, there is no order */
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
