/*
 * Tests of order/: what is prefetched from a record, and when nothing is.
 */
#include "base/alloc.h"
#include "check.h"
#include "every_allocation.h"
#include "order/order.h"

enum { ROOT, A, B, C };

static fsdp_order *create_order(void) {
  fsdp_order *order = NULL;
  CHECK_OK(fsdp_order_create(&order, NULL));
  return order;
}

static void enter(fsdp_order *order, int64_t unit) {
  CHECK_OK(fsdp_order_pre_forward(order, unit, NULL));
}

static void leave(fsdp_order *order, int64_t unit) {
  CHECK_OK(fsdp_order_post_forward(order, unit, NULL));
}

/* root(a b c), as in the header. */
static void run_forward(fsdp_order *order) {
  enter(order, ROOT);
  for (int64_t unit = A; unit <= C; unit++) {
    enter(order, unit);
    leave(order, unit);
  }
  leave(order, ROOT);
}

TEST(test_first_iteration_prefetches_nothing) {
  fsdp_order *order = create_order();
  fsdp_order_begin(order);
  CHECK_I64(fsdp_order_next_forward(order, 1), -1);
  enter(order, ROOT);
  enter(order, A);
  CHECK_I64(fsdp_order_next_forward(order, 1), -1);
  CHECK_I64(fsdp_order_next_forward(order, 2), -1);
  fsdp_order_destroy(order);
  fsdp_order_destroy(NULL);
}

TEST(test_next_forward_follows_the_previous_iteration) {
  fsdp_order *order = create_order();
  fsdp_order_begin(order);
  run_forward(order);
  fsdp_order_begin(order);
  CHECK_I64(fsdp_order_next_forward(order, 1), ROOT); /* none entered yet */
  enter(order, ROOT);
  CHECK_I64(fsdp_order_next_forward(order, 1), A);
  CHECK_I64(fsdp_order_next_forward(order, 2), B);
  CHECK_I64(fsdp_order_next_forward(order, 3), C);
  CHECK_I64(fsdp_order_next_forward(order, 4), -1);
  CHECK_I64(fsdp_order_next_forward(order, INT64_MAX), -1);
  enter(order, A);
  CHECK_I64(fsdp_order_next_forward(order, 1), B);
  enter(order, B);
  enter(order, C);
  CHECK_I64(fsdp_order_next_forward(order, 1), -1);
  enter(order, A); /* longer than the record */
  CHECK_I64(fsdp_order_next_forward(order, 1), -1);
  fsdp_order_destroy(order);
}

TEST(test_leaving_the_record_stops_prefetch_until_relearned) {
  fsdp_order *order = create_order();
  fsdp_order_begin(order);
  run_forward(order);
  fsdp_order_begin(order);
  enter(order, ROOT);
  enter(order, B); /* A was expected */
  CHECK_I64(fsdp_order_next_forward(order, 1), -1);
  enter(order, C);
  enter(order, C); /* stands where the record has C again: still off */
  CHECK_I64(fsdp_order_next_forward(order, 1), -1);
  fsdp_order_begin(order);
  enter(order, ROOT);
  CHECK_I64(fsdp_order_next_forward(order, 1), B);
  CHECK_I64(fsdp_order_next_forward(order, 2), C);
  fsdp_order_destroy(order);
}

TEST(test_backward_walks_post_forward_backwards) {
  fsdp_order *order = create_order();
  fsdp_order_begin(order);
  run_forward(order);
  CHECK_I64(fsdp_order_next_backward(order, 1), -1); /* not begun */
  fsdp_order_begin_backward(order);
  CHECK_I64(fsdp_order_next_backward(order, 1), ROOT);
  fsdp_order_pre_backward(order, ROOT);
  CHECK_I64(fsdp_order_next_backward(order, 1), C);
  CHECK_I64(fsdp_order_next_backward(order, 2), B);
  fsdp_order_pre_backward(order, C);
  CHECK_I64(fsdp_order_next_backward(order, 1), B);
  fsdp_order_pre_backward(order, ROOT); /* behind the cursor: left alone */
  fsdp_order_pre_backward(order, 77);   /* not in the record */
  CHECK_I64(fsdp_order_next_backward(order, 1), B);
  fsdp_order_pre_backward(order, A); /* B had no gradient */
  CHECK_I64(fsdp_order_next_backward(order, 1), -1);
  fsdp_order_begin_backward(order);
  fsdp_order_begin(order); /* closes the backward, too */
  CHECK_I64(fsdp_order_next_backward(order, 1), -1);
  fsdp_order_pre_backward(order, A); /* nothing recorded */
  CHECK_I64(fsdp_order_next_backward(order, 1), -1);
  fsdp_order_destroy(order);
}

/* A unit that ran twice (a b a) is met twice on the way back. */
TEST(test_backward_of_a_unit_that_ran_twice) {
  fsdp_order *order = create_order();
  fsdp_order_begin(order);
  const int64_t units[] = {A, B, A};
  for (int i = 0; i < 3; i++) {
    enter(order, units[i]);
    leave(order, units[i]);
  }
  fsdp_order_begin_backward(order);
  fsdp_order_pre_backward(order, A);
  CHECK_I64(fsdp_order_next_backward(order, 1), B);
  CHECK_I64(fsdp_order_next_backward(order, 2), A);
  fsdp_order_pre_backward(order, B);
  fsdp_order_pre_backward(order, A);
  CHECK_I64(fsdp_order_next_backward(order, 1), -1);
  fsdp_order_destroy(order);
}

TEST(test_fingerprint) {
  const uint64_t none = FSDP_ORDER_FINGERPRINT;
  /* Of the published test vectors of FNV-1a. */
  CHECK(fsdp_order_fold(none, "") == UINT64_C(0xcbf29ce484222325));
  CHECK(fsdp_order_fold(none, "a") == UINT64_C(0xaf63dc4c8601ec8c));
  CHECK(fsdp_order_fold(none, "foobar") == UINT64_C(0x85944171f73967e8));
  CHECK(fsdp_order_fold(fsdp_order_fold(none, "foo"), "bar") ==
        fsdp_order_fold(none, "foobar"));
  CHECK(fsdp_order_fold(none, "ab") != fsdp_order_fold(none, "ba"));
}

TEST(test_records_stop_allocating) {
  fsdp_order *order = create_order();
  for (int iteration = 0; iteration < 5; iteration++) {
    /* Two records take turns as pre-forward: both are full-grown after two
     * iterations. From then on an allocation would fail. */
    fsdp_alloc_fail_at(iteration < 2 ? -1 : 0);
    fsdp_order_begin(order);
    for (int64_t i = 0; i < 100; i++) {
      enter(order, i);
      leave(order, i);
    }
  }
  fsdp_alloc_fail_at(-1);
  fsdp_order_destroy(order);
}

static fsdp_status enter_and_leave(void *context, fsdp_error *error) {
  fsdp_order *order = NULL;
  fsdp_status status = fsdp_order_create(&order, error);
  (void)context;
  CHECK((order != NULL) == (status == FSDP_OK));
  if (status == FSDP_OK) {
    fsdp_order_begin(order);
    status = fsdp_order_pre_forward(order, A, error);
  }
  if (status == FSDP_OK) status = fsdp_order_post_forward(order, A, error);
  fsdp_order_destroy(order);
  return status;
}

TEST(test_every_allocation_can_fail) {
  CHECK_I64(every_allocation(enter_and_leave, NULL), 3); /* and two records */
}
