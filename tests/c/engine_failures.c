/*
 * Engine failures: see engine_failures.h.
 */
#include "engine_failures.h"

#include "base/alloc.h"

void failures_plan(const model_options *options) {
  model_init(&m, options);
  model_plan_units("root 8; mixed mixed; frozen (24) frozen; c 16");
}

fsdp_status failures_train(fsdp_error *error) {
  return model_try(TRAIN, error);
}

void failures_check(fsdp_status status) {
  const bool in_backward = fsdp_engine_in_backward(m.engine);
  CHECK(!fsdp_engine_in_forward(m.engine));
  for (int64_t i = 0; i < m.num_units; i++) {
    fsdp_error again = {0};
    const fsdp_unit_state state = model_state(&m, i);
    /* Never between. In a backward that raised this holds for the unit whose
     * call failed, or, if the engine's own did, for all; the others wait for
     * the reset. Outside of one it holds for all, but for those that are kept
     * on purpose: hidden, or, inside forward, not yet. */
    const bool is_kept =
        !in_backward && m.options.keeps_after_forward &&
        (fsdp_unit_state_is_hidden(state) || state == FSDP_UNIT_UNSHARDED);
    const bool is_parted =
        m.options.part_world_size > 0 && state == FSDP_UNIT_PARTED;
    if (!in_backward || i == m.current || m.current == -1) {
      CHECK(is_kept || is_parted || state == FSDP_UNIT_SHARDED ||
            state == FSDP_UNIT_FAILED);
    }
    if (state != FSDP_UNIT_FAILED) continue;
    /* It keeps the first error, and says so at every call. */
    CHECK_I64(fsdp_unit_pre_forward(m.units[i].unit, false, &again), status);
    CHECK(strstr(again.message, "failed earlier (injected at ") != NULL);
    CHECK_I64(again.remedy, FSDP_REMEDY_RESET);
    CHECK_I64(fsdp_unit_pre_backward(m.units[i].unit, NULL), status);
    CHECK_I64(fsdp_unit_summon(m.units[i].unit, NULL, NULL),
              in_backward ? FSDP_INVALID_STATE : status);
    CHECK(fsdp_engine_add_unit(m.engine, m.units[i].unit, NULL) != FSDP_OK);
  }
  for (int64_t i = 0; i < m.num_grads; i++) {
    CHECK(m.grads[i].num_releases <= 1);
  }
}

void failures_check_recovers(void) {
  fsdp_engine_reset(m.engine);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK(!fsdp_engine_in_backward(m.engine));
  CHECK(!fsdp_engine_in_forward(m.engine));
  for (int64_t i = 0; i < m.num_units; i++) {
    CHECK_I64(m.units[i].view, FSDP_VIEW_SHARDED);
    CHECK_I64(fsdp_unit_pending_grads(m.units[i].unit), 0);
  }
  for (int64_t i = 0; i < m.num_grads; i++) {
    CHECK_I64(m.grads[i].num_releases, 1);
  }
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  for (int i = 0; i < 2; i++) {
    model_zero_grad(&m);
    model_optimizer_step(&m);
    model_step(&m);
    model_check_grads(&m);
    model_check_states(&m, FSDP_UNIT_SHARDED);
    CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  }
}

void failures_every_call(const model_options *options, failures_prepare prepare,
                         failures_work work, int num_before) {
  for (int64_t i = 0;; i++) {
    const int64_t num_failures = check_num_failures;
    fsdp_error error = {0};
    failures_plan(options);
    model_start(&m);
    if (prepare != NULL) prepare();
    for (int step = 0; step < num_before; step++) {
      CHECK_OK(work(NULL));
      model_zero_grad(&m);
    }
    const int64_t num_calls_before = recorder_num_calls(m.device);
    recorder_clear(m.device);
    recorder_fail_at(m.device, i);
    const fsdp_status status = work(&error);
    recorder_fail_at(m.device, -1);
    const int64_t num_calls = recorder_num_calls(m.device) - num_calls_before;
    const bool has_failed = num_calls > i; /* else each call has failed once */
    CHECK(has_failed || status == FSDP_OK);
    if (status == FSDP_OK) { /* or a second try had the memory */
      model_check_grads(&m);
    } else {
      CHECK(status == FSDP_OUT_OF_MEMORY || status == FSDP_BACKEND);
      CHECK_I64(error.status, status);
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
      failures_check(status);
    }
    failures_check_recovers();
    model_fini(&m);
    if (check_num_failures > num_failures) {
      printf("  call %" PRId64 " of step %d: %s\n", i, num_before,
             error.message);
    }
    if (!has_failed) return;
  }
}

void failures_every_call_of_steps(const model_options *options,
                                  failures_prepare prepare,
                                  failures_work work) {
  failures_every_call(options, prepare, work, 0);
  failures_every_call(options, prepare, work, 2);
}

void failures_every_allocation(const model_options *options,
                               failures_prepare prepare, failures_work work) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    const int64_t num_failures = check_num_failures;
    failures_plan(options);
    fsdp_alloc_fail_at(i);
    fsdp_status status = model_build(&m, &error);
    const bool is_built = status == FSDP_OK;
    if (is_built && prepare != NULL) prepare();
    for (int step = 0; step < 2 && status == FSDP_OK; step++) {
      status = work(&error);
    }
    fsdp_alloc_fail_at(-1);
    if (status != FSDP_OK) {
      CHECK_I64(status, FSDP_OUT_OF_MEMORY);
      CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
    }
    if (is_built) {
      CHECK(!fsdp_engine_in_forward(m.engine));
      failures_check_recovers();
    } else {
      const int64_t last = m.num_units - 1;
      CHECK(m.units[last].unit == NULL ||
            model_engine_of(m.units[last].unit) == NULL);
    }
    model_fini(&m);
    if (check_num_failures > num_failures) {
      printf("  allocation %" PRId64 ": %s\n", i, error.message);
    }
    if (status == FSDP_OK) break;
  }
}
