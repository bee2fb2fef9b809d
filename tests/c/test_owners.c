/*
 * Tests of layout/owners.h: literal cases, every failure, and random cases
 * against the best deal, which a search through all of them finds.
 */
#include "check.h"
#include "every_allocation.h"
#include "layout/owners.h"

enum { MAX_PARAMS = 8, MAX_OWNERS = 3 };

/* No parameter is whole in a shard. */
static fsdp_owners owners_of(int64_t num_owners) {
  return (fsdp_owners){num_owners, num_owners, NULL};
}

static void check_deals(const fsdp_owned_param *params, int64_t num_params,
                        int64_t num_owners, int64_t round_nbytes,
                        const fsdp_deal *expected) {
  fsdp_deal deals[MAX_PARAMS];
  CHECK_OK(fsdp_deal_out(params, num_params, owners_of(num_owners),
                         round_nbytes, deals, NULL));
  for (int64_t i = 0; i < num_params; i++) {
    CHECK_I64(deals[i].owner, expected[i].owner);
    CHECK_I64(deals[i].round, expected[i].round);
  }
}

TEST(test_owners_of_the_picture) {
  const fsdp_owned_param params[] = {{4, 4}, {9, 9}, {5, 5}, {4, 4}, {4, 4}};
  const fsdp_deal in_tens[] = {{1, 0}, {0, 0}, {1, 0}, {0, 0}, {1, 0}};
  const fsdp_deal in_nines[] = {{1, 0}, {0, 0}, {1, 0}, {0, 1}, {1, 1}};
  check_deals(params, 5, 2, 10, in_tens);
  check_deals(params, 5, 2, 9, in_nines);
}

TEST(test_an_owner_can_have_nothing) {
  const fsdp_owned_param one[] = {{7, 7}};
  const fsdp_deal first[] = {{0, 0}};
  check_deals(one, 1, 3, 1, first);
  check_deals(NULL, 0, 3, 1, NULL);
}

TEST(test_equal_parameters_go_round) {
  const fsdp_owned_param params[] = {{1, 4}, {1, 4}, {1, 4}, {1, 4}, {1, 4}};
  const fsdp_deal expected[] = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}};
  check_deals(params, 5, 3, 4, expected);
}

/* Work is dealt out alike already: then bytes decide. */
TEST(test_bytes_count_where_work_does_not) {
  const fsdp_owned_param params[] = {{4, 1}, {4, 1}, {0, 6}, {0, 6}};
  const fsdp_deal expected[] = {{0, 0}, {1, 0}, {0, 0}, {1, 0}};
  check_deals(params, 4, 2, 100, expected);
  const fsdp_owned_param no_work[] = {{0, 3}, {0, 3}};
  const fsdp_deal apart[] = {{0, 0}, {1, 0}};
  check_deals(no_work, 2, 2, 100, apart);
}

static void check_whole_deals(int64_t num_owners, const fsdp_deal *expected) {
  const fsdp_owned_param params[] = {{6, 6}, {4, 4}, {3, 3},
                                     {3, 3}, {5, 5}, {2, 2}};
  const int64_t shards[] = {-1, 1, -1, -1, 1, -1};
  fsdp_deal deals[6];
  CHECK_OK(fsdp_deal_out(params, 6, (fsdp_owners){num_owners, 2, shards}, 3,
                         deals, NULL));
  for (int i = 0; i < 6; i++) {
    CHECK_I64(deals[i].owner, expected[i].owner);
    CHECK_I64(deals[i].round, expected[i].round);
  }
}

/* Shard 1 has two wholes; the others are dealt out around them. */
TEST(test_wholes_are_owned_where_they_lie) {
  const fsdp_deal here[] = {{0, 0}, {1, 0}, {0, 2}, {0, 3}, {1, 0}, {1, 0}};
  check_whole_deals(2, here);
  /* Two replicas have one each. They go to the other one, and take room. */
  const fsdp_deal there[] = {{0, 0}, {3, 0}, {2, 0}, {2, 1}, {1, 0}, {3, 1}};
  check_whole_deals(4, there);
}

TEST(test_deals_refuse_wrong_shards) {
  const fsdp_owned_param param = {1, 1};
  const int64_t shards[] = {2, -2};
  fsdp_deal deal;
  fsdp_error error;
  CHECK_FAILS(
      fsdp_deal_out(&param, 1, (fsdp_owners){4, 3, NULL}, 1, &deal, &error),
      FSDP_INVALID_ARGUMENT, error.message,
      "num_shards is 3, need a divisor of the 4 owners");
  CHECK_FAILS(
      fsdp_deal_out(&param, 1, (fsdp_owners){4, 2, shards}, 1, &deal, &error),
      FSDP_INVALID_ARGUMENT, error.message,
      "parameter 0 is whole in shard 2 of 2");
  CHECK_FAILS(fsdp_deal_out(&param, 1, (fsdp_owners){4, 2, shards + 1}, 1,
                            &deal, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "parameter 0 is whole in shard -2 of 2");
}

static void check_refused(const fsdp_owned_param *params, int64_t num_params,
                          int64_t num_owners, int64_t round_nbytes,
                          const char *message) {
  fsdp_deal deals[MAX_PARAMS];
  fsdp_error error;
  CHECK_FAILS(fsdp_deal_out(params, num_params, owners_of(num_owners),
                            round_nbytes, deals, &error),
              FSDP_INVALID_ARGUMENT, error.message, message);
}

TEST(test_deals_refuse_wrong_arguments) {
  const fsdp_owned_param no_cost[] = {{1, 1}, {-1, 1}};
  const fsdp_owned_param no_bytes[] = {{1, -1}};
  const fsdp_owned_param too_much[] = {{INT64_MAX, 1}, {1, 1}};
  check_refused(NULL, -1, 2, 1, "..num_params is -1, need >= 0");
  check_refused(NULL, 0, 0, 1, "..num_owners is 0, need >= 1");
  check_refused(NULL, 0, 2, 0, "..round_nbytes is 0, need >= 1");
  check_refused(no_cost, 2, 2, 1, "parameter 1 has cost -1, need >= 0");
  check_refused(no_bytes, 1, 2, 1, "parameter 0 has nbytes -1, need >= 0");
  check_refused(too_much, 2, 2, 1,
                "the cost of parameters 0 to 1 is more than "
                "9223372036854775807 in all");
}

static int64_t largest_load(const fsdp_owned_param *params, int64_t num_params,
                            const int64_t *owners) {
  int64_t loads[MAX_OWNERS] = {0};
  int64_t largest = 0;
  for (int64_t i = 0; i < num_params; i++) loads[owners[i]] += params[i].cost;
  for (int64_t i = 0; i < MAX_OWNERS; i++) {
    if (loads[i] > largest) largest = loads[i];
  }
  return largest;
}

/* The smallest largest load of all deals of params [param, num_params). */
static int64_t best_load(const fsdp_owned_param *params, int64_t num_params,
                         int64_t param, int64_t *owners) {
  if (param == num_params) return largest_load(params, num_params, owners);
  int64_t best = INT64_MAX;
  for (int64_t owner = 0; owner < MAX_OWNERS; owner++) {
    owners[param] = owner;
    const int64_t its = best_load(params, num_params, param + 1, owners);
    if (its < best) best = its;
  }
  return best;
}

/* The known bound of the longest first: 4/3 - 1/(3 m) of the best. */
TEST(test_deals_are_near_the_best_one) {
  uint64_t seed = 7;
  for (int round = 0; round < 40; round++) {
    fsdp_owned_param params[MAX_PARAMS];
    fsdp_deal deals[MAX_PARAMS];
    int64_t owners[MAX_PARAMS];
    for (int i = 0; i < MAX_PARAMS; i++) {
      seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
      const int64_t cost = (int64_t)(seed >> 33) % 30;
      params[i] = (fsdp_owned_param){cost, cost};
    }
    CHECK_OK(fsdp_deal_out(params, MAX_PARAMS, owners_of(MAX_OWNERS), 20, deals,
                           NULL));
    for (int i = 0; i < MAX_PARAMS; i++) owners[i] = deals[i].owner;
    const int64_t found = largest_load(params, MAX_PARAMS, owners);
    const int64_t best = best_load(params, MAX_PARAMS, 0, owners);
    CHECK(9 * found <= 11 * best);
  }
}

static fsdp_status deal(void *context, fsdp_error *error) {
  const fsdp_owned_param params[] = {{1, 1}, {2, 2}};
  (void)context;
  fsdp_deal deals[2];
  return fsdp_deal_out(params, 2, owners_of(2), 1, deals, error);
}

TEST(test_every_allocation_of_a_deal_can_fail) {
  CHECK_I64(every_allocation(deal, NULL), 3);
}
