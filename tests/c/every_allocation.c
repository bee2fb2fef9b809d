/* See every_allocation.h. */
#include "every_allocation.h"

#include "base/alloc.h"
#include "check.h"

int64_t every_allocation(every_allocation_work work, void *context) {
  const int64_t live = fsdp_alloc_live();
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    fsdp_alloc_fail_at(i);
    const fsdp_status status = work(context, &error);
    fsdp_alloc_fail_at(-1);
    CHECK_I64(fsdp_alloc_live(), live);
    if (status == FSDP_OK) return i;
    CHECK_I64(status, FSDP_OUT_OF_MEMORY);
    CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
  }
}
