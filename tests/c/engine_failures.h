/*
 * Engine failures: every call of the port, and every allocation, of some work
 * fails once. The unit whose call failed is SHARDED or FAILED then, a reset
 * brings all of them back, and the next steps are right.
 */
#ifndef FSDP_TESTS_ENGINE_FAILURES_H
#define FSDP_TESTS_ENGINE_FAILURES_H

#include "engine_fixture.h"

/* What is to meet the failures; it stops at the first one. */
typedef fsdp_status (*failures_work)(fsdp_error *error);
/* Called after the model has started. */
typedef void (*failures_prepare)(void);

/* Units root, mixed, frozen and c. */
void failures_plan(const model_options *options);

/* A micro-batch without sync and one with it. */
#define TRAIN "sync none; step; sync reduce; step"
/* The same as a work. */
FSDP_NODISCARD fsdp_status failures_train(fsdp_error *error);

/* What must hold after any failure inside a step. */
void failures_check(fsdp_status status);
/* Resets, and does two steps. */
void failures_check_recovers(void);

/* Work number `num_before` meets every failure once. prepare may be NULL. */
void failures_every_call(const model_options *options, failures_prepare prepare,
                         failures_work work, int num_before);
/* The same for the first work, when nothing is known and blocks are allocated,
 * and for the third: prefetches, recorded orders, a plan. */
void failures_every_call_of_steps(const model_options *options,
                                  failures_prepare prepare, failures_work work);
/* Making the model and two works. */
void failures_every_allocation(const model_options *options,
                               failures_prepare prepare, failures_work work);

#endif /* FSDP_TESTS_ENGINE_FAILURES_H */
