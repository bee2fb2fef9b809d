/*
 * Check: see check.h.
 */
#include "check.h"

int64_t check_num_failures = 0;
