/*
 * Owners: the greedy rule of the longest first.
 */
#include "layout/owners.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/alloc.h"

/* A parameter, to sort. */
typedef struct entry {
  int64_t cost;
  int64_t param;
} entry;

static int costliest_first(const void *a, const void *b) {
  const entry *first = a, *second = b;
  if (first->cost != second->cost) return first->cost > second->cost ? -1 : 1;
  return first->param < second->param ? -1 : 1; /* qsort is not stable */
}

static fsdp_status check_value(int64_t value, const char *name, int64_t param,
                               int64_t *total, fsdp_error *error) {
  if (value < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "parameter %" PRId64 " has %s %" PRId64 ", need >= 0",
                     param, name, value);
  }
  if (value > INT64_MAX - *total) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "the %s of parameters 0 to %" PRId64
                     " is more than %" PRId64 " in all",
                     name, param, INT64_MAX);
  }
  *total += value;
  return FSDP_OK;
}

static fsdp_status check_arguments(const fsdp_owned_param *params,
                                   int64_t num_params, int64_t num_owners,
                                   int64_t round_nbytes,
                                   fsdp_owned_param *total, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (num_params < 0 || num_owners < 1 || round_nbytes < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "num_params is %" PRId64
                     ", need >= 0; num_owners is %" PRId64
                     ", need >= 1; round_nbytes is %" PRId64 ", need >= 1",
                     num_params, num_owners, round_nbytes);
  }
  for (int64_t i = 0; i < num_params; i++) {
    FSDP_TRY(check_value(params[i].cost, "cost", i, &total->cost, error));
    FSDP_TRY(check_value(params[i].nbytes, "nbytes", i, &total->nbytes, error));
  }
done:
  return status;
}

/* `load` of `total`, in [0, 1]; of nothing it is 0. */
static double share(int64_t load, int64_t total) {
  return total == 0 ? 0 : (double)load / (double)total;
}

/* What an owner's larger share would be with `param`, too. */
static double share_with(const fsdp_owned_param *load,
                         const fsdp_owned_param *param,
                         const fsdp_owned_param *total) {
  const double work = share(load->cost + param->cost, total->cost);
  const double bytes = share(load->nbytes + param->nbytes, total->nbytes);
  return work > bytes ? work : bytes;
}

static int64_t choose_owner(const fsdp_owned_param *loads, int64_t num_owners,
                            const fsdp_owned_param *param,
                            const fsdp_owned_param *total) {
  int64_t best = 0;
  double smallest = share_with(&loads[0], param, total);
  for (int64_t owner = 1; owner < num_owners; owner++) {
    const double its = share_with(&loads[owner], param, total);
    if (its < smallest) {
      best = owner;
      smallest = its;
    }
  }
  return best;
}

fsdp_status fsdp_deal_out(const fsdp_owned_param *params, int64_t num_params,
                          int64_t num_owners, int64_t round_nbytes,
                          fsdp_deal *deals, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_owned_param total = {0, 0};
  fsdp_owned_param *loads = NULL;
  entry *order = NULL;

  FSDP_TRY(check_arguments(params, num_params, num_owners, round_nbytes, &total,
                           error));
  loads = fsdp_calloc((size_t)num_owners, sizeof *loads);
  order = fsdp_calloc((size_t)num_params, sizeof *order);
  if (loads == NULL || order == NULL) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "out of host memory for %" PRId64
                       " parameters of %" PRId64 " owners",
                       num_params, num_owners);
    goto done;
  }
  for (int64_t i = 0; i < num_params; i++) {
    order[i] = (entry){params[i].cost, i};
  }
  if (num_params > 0) {
    qsort(order, (size_t)num_params, sizeof *order, costliest_first);
  }
  for (int64_t i = 0; i < num_params; i++) {
    const fsdp_owned_param *param = &params[order[i].param];
    const int64_t owner = choose_owner(loads, num_owners, param, &total);
    deals[order[i].param] =
        (fsdp_deal){owner, loads[owner].nbytes / round_nbytes};
    loads[owner].cost += param->cost;
    loads[owner].nbytes += param->nbytes;
  }

done:
  fsdp_free(order);
  fsdp_free(loads);
  return status;
}
