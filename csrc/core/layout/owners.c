/*
 * Owners: the greedy rule of the longest first.
 */
#include "layout/owners.h"

#include <inttypes.h>
#include <stdbool.h>
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

/* The shard that has the whole, or -1. */
static int64_t shard_of(const fsdp_owners *owners, int64_t param) {
  return owners->shards == NULL ? -1 : owners->shards[param];
}

static fsdp_status check_arguments(const fsdp_owned_param *params,
                                   int64_t num_params,
                                   const fsdp_owners *owners,
                                   int64_t round_nbytes,
                                   fsdp_owned_param *total, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (num_params < 0 || owners->num_owners < 1 || round_nbytes < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "num_params is %" PRId64
                     ", need >= 0; num_owners is %" PRId64
                     ", need >= 1; round_nbytes is %" PRId64 ", need >= 1",
                     num_params, owners->num_owners, round_nbytes);
  }
  if (owners->num_shards < 1 || owners->num_owners % owners->num_shards != 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "num_shards is %" PRId64 ", need a divisor of the %" PRId64
                     " owners",
                     owners->num_shards, owners->num_owners);
  }
  for (int64_t i = 0; i < num_params; i++) {
    const int64_t shard = shard_of(owners, i);
    if (shard < -1 || shard >= owners->num_shards) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "parameter %" PRId64 " is whole in shard %" PRId64
                       " of %" PRId64,
                       i, shard, owners->num_shards);
    }
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

/* Of those in `shard`; -1: of all. */
static int64_t choose_owner(const fsdp_owned_param *loads,
                            const fsdp_owners *owners, int64_t shard,
                            const fsdp_owned_param *param,
                            const fsdp_owned_param *total) {
  const int64_t step = shard < 0 ? 1 : owners->num_shards;
  int64_t best = shard < 0 ? 0 : shard;
  double smallest = share_with(&loads[best], param, total);
  for (int64_t owner = best + step; owner < owners->num_owners; owner += step) {
    const double its = share_with(&loads[owner], param, total);
    if (its < smallest) {
      best = owner;
      smallest = its;
    }
  }
  return best;
}

/* Chooses the owners of params that are whole in a shard, or of the others. */
static void deal_out_some(const fsdp_owned_param *params, int64_t num_params,
                          const entry *order, const fsdp_owners *owners,
                          const fsdp_owned_param *total, bool are_whole,
                          fsdp_owned_param *loads, fsdp_deal *deals) {
  for (int64_t i = 0; i < num_params; i++) {
    const int64_t index = order[i].param;
    const int64_t shard = shard_of(owners, index);
    if ((shard >= 0) != are_whole) continue;
    const fsdp_owned_param *param = &params[index];
    const int64_t owner = choose_owner(loads, owners, shard, param, total);
    deals[index].owner = owner;
    loads[owner].cost += param->cost;
    loads[owner].nbytes += param->nbytes;
  }
}

/* Of all params; `filled`: one zero for each owner. */
static void choose_rounds(const fsdp_owned_param *params, int64_t num_params,
                          const entry *order, const fsdp_owners *owners,
                          int64_t round_nbytes, int64_t *filled,
                          fsdp_deal *deals) {
  const bool has_replicas = owners->num_shards < owners->num_owners;
  for (int64_t i = 0; i < num_params; i++) {
    const int64_t index = order[i].param;
    fsdp_deal *deal = &deals[index];
    deal->round = filled[deal->owner] / round_nbytes;
    if (shard_of(owners, index) >= 0 && !has_replicas) continue;
    filled[deal->owner] += params[index].nbytes;
  }
}

fsdp_status fsdp_deal_out(const fsdp_owned_param *params, int64_t num_params,
                          fsdp_owners owners, int64_t round_nbytes,
                          fsdp_deal *deals, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_owned_param total = {0, 0};
  fsdp_owned_param *loads = NULL;
  int64_t *filled = NULL;
  entry *order = NULL;

  FSDP_TRY(check_arguments(params, num_params, &owners, round_nbytes, &total,
                           error));
  loads = fsdp_calloc((size_t)owners.num_owners, sizeof *loads);
  filled = fsdp_calloc((size_t)owners.num_owners, sizeof *filled);
  order = fsdp_calloc((size_t)num_params, sizeof *order);
  if (loads == NULL || filled == NULL || order == NULL) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "out of host memory for %" PRId64
                       " parameters of %" PRId64 " owners",
                       num_params, owners.num_owners);
    goto done;
  }
  for (int64_t i = 0; i < num_params; i++) {
    order[i] = (entry){params[i].cost, i};
  }
  if (num_params > 0) {
    qsort(order, (size_t)num_params, sizeof *order, costliest_first);
  }
  deal_out_some(params, num_params, order, &owners, &total, true, loads, deals);
  deal_out_some(params, num_params, order, &owners, &total, false, loads,
                deals);
  choose_rounds(params, num_params, order, &owners, round_nbytes, filled,
                deals);

done:
  fsdp_free(order);
  fsdp_free(filled);
  fsdp_free(loads);
  return status;
}
