/* Every allocation of some work fails once. */
#ifndef FSDP_TESTS_EVERY_ALLOCATION_H
#define FSDP_TESTS_EVERY_ALLOCATION_H

#include <stdint.h>

#include "base/status.h"

/* Frees what it made, also when it fails. */
typedef fsdp_status (*every_allocation_work)(void *context, fsdp_error *error);

/* Does the work again and again, until none of its allocations failed. Each
 * failure must be FSDP_OUT_OF_MEMORY and leave nothing alive. Returns how many
 * allocations the work has. */
int64_t every_allocation(every_allocation_work work, void *context);

#endif /* FSDP_TESTS_EVERY_ALLOCATION_H */
