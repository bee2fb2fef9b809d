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
 * Importing fsdp_c sets that variable unless it is set (fsdp_c/__init__.py),
 * because these versions have no other switch: ncclConfig_t of NCCL 2.28 has no
 * field for it (2.32 has one). Ordering the launches with events instead would
 * run the collectives one after the other. NCCL reads the variable once, at the
 * first launch of the process, which may be torch's. NCCL then requires that no
 * two threads launch at once; a mutex of the process ensures that.
 */
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

static void watch_forks(void) {
  (void)pthread_atfork(NULL, NULL, renew_lock);
}

static bool is_ordered(const fsdp_nccl_transport *transport) {
  return transport->version >= FIRST_ORDERED_VERSION;
}

void fsdp_nccl_priv_begin_launch(const fsdp_nccl_transport *transport) {
  if (!is_ordered(transport)) return;
  (void)pthread_once(&g_once, watch_forks);
  (void)pthread_mutex_lock(&g_launch_lock);
}

void fsdp_nccl_priv_end_launch(const fsdp_nccl_transport *transport) {
  if (is_ordered(transport)) (void)pthread_mutex_unlock(&g_launch_lock);
}
