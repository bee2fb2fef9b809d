/*
 * Engine fixture: scripts of calls; see PLAY in engine_fixture.h.
 */
#include <stdlib.h>

#include "engine_fixture.h"

model m;

/* The unit of that name; aborts if there is none. */
static int64_t unit_of(const char *name) {
  for (int64_t i = 0; i < m.num_units; i++) {
    if (strcmp(m.units[i].name, name) == 0) return i;
  }
  fprintf(stderr, "PLAY: no unit is called '%s'\n", name);
  abort();
}

static bool is(const char *word, const char *other) {
  return strcmp(word, other) == 0;
}

/* A fact about a unit; false: `word` is none. */
static bool check_fact(const char *word, const model_unit *unit,
                       const char *expected) {
  static const char *const views[] = {"sharded",      "unsharded", "full",
                                      "full_on_host", "part",      "partial"};
  if (is(word, "state")) {
    const fsdp_unit_state state = fsdp_unit_get_state(unit->unit);
    CHECK_TEXT(fsdp_unit_state_name(state), expected);
  } else if (is(word, "view")) {
    CHECK_TEXT(views[unit->view], expected);
  } else if (is(word, "grad_view")) {
    CHECK_TEXT(views[unit->grad_view], expected);
  } else if (is(word, "pending")) {
    CHECK_I64(fsdp_unit_pending_grads(unit->unit), strtoll(expected, NULL, 10));
  } else if (is(word, "has_grads")) {
    CHECK(unit->has_grads);
  } else if (is(word, "no_grads")) {
    CHECK(!unit->has_grads);
  } else {
    return false;
  }
  return true;
}

/* A count of the engine; false: `word` is none. */
static bool check_count(const char *word, const char *expected) {
  const fsdp_engine_stats stats = model_stats(&m);
  const struct {
    const char *word;
    int64_t count;
  } counts[] = {{"num_units", stats.num_units},
                {"num_iterations", stats.num_iterations},
                {"num_all_gathers", stats.num_all_gathers},
                {"num_reduces", stats.num_reduces},
                {"num_prefetches", stats.num_prefetches}};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    if (!is(word, counts[i].word)) continue;
    CHECK_I64(counts[i].count, strtoll(expected, NULL, 10));
    return true;
  }
  return false;
}

static fsdp_status call_unit(const char *word, int64_t i, const char *expected,
                             fsdp_error *error) {
  const int64_t number = strtoll(expected, NULL, 10);
  fsdp_unit *unit = m.units[i].unit;
  if (is(word, "enter")) return model_enter(&m, i, error);
  if (is(word, "leave")) return model_leave(&m, i, true, error);
  if (is(word, "leave_eval")) return model_leave(&m, i, false, error);
  if (is(word, "pre_backward")) return model_pre_backward(&m, i, error);
  if (is(word, "grads")) return model_give_grads(&m, i, error);
  if (is(word, "grad")) return model_give_grad(&m, i, number, true, error);
  if (is(word, "unexpected"))
    return model_give_grad(&m, i, number, false, error);
  if (is(word, "inputs")) return model_give_inputs(&m, i, error);
  if (is(word, "summon")) {
    const fsdp_summon_options how = {
        .on_first_rank_only = strstr(expected, "first_only") != NULL,
        .on_host = strstr(expected, "on_host") != NULL,
        .with_grads = strstr(expected, "with_grads") != NULL};
    return fsdp_unit_summon(unit, &how, error);
  }
  if (is(word, "dismiss")) return fsdp_unit_dismiss(unit, true, error);
  if (is(word, "drop")) return fsdp_unit_dismiss(unit, false, error);
  if (is(word, "unshard")) return fsdp_unit_unshard(unit, error);
  if (is(word, "reshard")) return fsdp_unit_reshard(unit, error);
  if (is(word, "wait_unshard")) return fsdp_unit_wait_unshard(unit, error);
  if (is(word, "freeze") || is(word, "unfreeze")) {
    return fsdp_unit_set_trainable(unit, number, is(word, "unfreeze"), error);
  }
  if (is(word, "expect")) {
    fsdp_unit_expect_grads(unit, number, 0);
  } else if (is(word, "await")) {
    fsdp_unit_expect_grads(unit, number, 1);
  } else if (is(word, "full")) {
    fsdp_unit_get_settings(unit)->wants_full = number != 0;
  } else if (is(word, "abandon")) {
    fsdp_unit_abandon_forward(unit, false);
  } else if (is(word, "destroy")) {
    fsdp_unit_destroy(unit);
    m.units[i].unit = NULL;
  } else {
    fprintf(stderr, "PLAY: no call is called '%s'\n", word);
    abort();
  }
  return FSDP_OK;
}

static fsdp_sync sync_of(const char *name) {
  return is(name, "none")    ? FSDP_SYNC_NONE
         : is(name, "shard") ? FSDP_SYNC_SHARD
                             : FSDP_SYNC_REDUCE;
}

static fsdp_status call(const char *word, const char *name,
                        const char *expected, fsdp_error *error) {
  if (is(word, "forward")) return model_forward(&m, true, error);
  if (is(word, "eval")) return model_forward(&m, false, error);
  if (is(word, "infer")) {
    fsdp_engine_set_records_graph(m.engine, false);
    const fsdp_status status = model_forward(&m, false, error);
    fsdp_engine_set_records_graph(m.engine, true);
    return status;
  }
  if (is(word, "expect_writes")) {
    return fsdp_engine_expect_writes(m.engine, error);
  }
  if (is(word, "backward")) return model_backward(&m, error);
  if (is(word, "step")) {
    const fsdp_status status = model_forward(&m, true, error);
    return status == FSDP_OK ? model_backward(&m, error) : status;
  }
  if (is(word, "finish")) return model_finish(&m, error);
  if (is(word, "reset")) {
    fsdp_engine_reset(m.engine);
  } else if (is(word, "sync")) {
    fsdp_engine_set_sync(m.engine, sync_of(name));
  } else if (is(word, "open")) {
    fsdp_engine_open_backward(m.engine);
  } else if (is(word, "leave_kept")) {
    fsdp_engine_leave_kept(m.engine);
  } else if (is(word, "zero_grad")) {
    model_zero_grad(&m);
  } else if (is(word, "optimizer")) {
    model_optimizer_step(&m);
  } else if (is(word, "check_grads")) {
    model_check_grads(&m);
  } else if (is(word, "check_sharded")) {
    model_check_states(&m, FSDP_UNIT_SHARDED);
  } else if (is(word, "check_idle")) {
    CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  } else if (is(word, "check_races")) {
    CHECK_TEXT(recorder_race(m.device), "");
  } else if (is(word, "clear")) {
    recorder_clear(m.device);
  } else if (is(word, "show_memory")) {
    recorder_show_memory(m.device, true);
  } else if (is(word, "grads_live")) {
    recorder_set_grads_live(m.device, is(name, "1"));
  } else if (is(word, "params_copied")) {
    recorder_set_params_copied(m.device, is(name, "1"));
  } else if (is(word, "params_changed")) {
    recorder_set_params_changed(m.device, is(name, "1"));
  } else if (strncmp(word, "num_", 4) != 0 || !check_count(word, name)) {
    const int64_t i = unit_of(name);
    if (!check_fact(word, &m.units[i], expected)) {
      return call_unit(word, i, expected, error);
    }
  }
  return FSDP_OK;
}

static int64_t read_specs(const char *size, bool is_trainable,
                          fsdp_param_spec *specs) {
  char *at = NULL;
  int64_t num_specs = 0;
  specs[0] = (fsdp_param_spec){0, strtoll(size, &at, 10) * m.options.world_size,
                               RECORDER_F32, is_trainable};
  if (*at != '(') return 1;
  for (at++; *at != ')'; at += *at == ',') {
    specs[num_specs] = specs[0];
    specs[num_specs++].numel = strtoll(at, &at, 10);
  }
  return num_specs;
}

void model_open(const model_options *options, const char *units) {
  model_init(&m, options);
  model_plan_units(units);
  model_start(&m);
}

void model_plan_units(const char *units) {
  for (const char *at = units; *at != '\0';) {
    static char names[MODEL_MAX_UNITS][32];
    char *name = names[m.num_units % MODEL_MAX_UNITS];
    char size[16] = "";
    char kind[8] = "";
    (void)sscanf(at, "%31[^; ] %15[^; ] %7[^;]", name, size, kind);
    if (is(size, "mixed")) {
      model_plan_mixed(&m, name);
    } else {
      fsdp_param_spec specs[4];
      model_plan(&m, name, specs, read_specs(size, !is(kind, "frozen"), specs));
      m.units[m.num_units - 1].is_apart = is(kind, "apart");
    }
    at += strcspn(at, ";");
    at += strspn(at, "; ");
  }
}

/* Makes the call at `*script`, and goes on to the next one. */
static fsdp_status call_next(const char **script, char *word,
                             fsdp_error *error) {
  char name[224] = "";
  char expected[48] = "";
  (void)sscanf(*script, "%31[^; ] %223[^; ] %47[^;]", word, name, expected);
  *script += strcspn(*script, ";");
  *script += strspn(*script, "; ");
  return call(word, name, expected, error);
}

fsdp_status model_try(const char *script, fsdp_error *error) {
  char word[32];
  fsdp_status status = FSDP_OK;
  while (*script != '\0' && status == FSDP_OK) {
    status = call_next(&script, word, error);
  }
  return status;
}

void model_play(const char *script, const char *file, int line) {
  while (*script != '\0') {
    const char *at = script;
    const int64_t num_failures = check_num_failures;
    char word[32];
    fsdp_error error = {0};
    const fsdp_status status = call_next(&script, word, &error);
    check_that(status == FSDP_OK, word, file, line);
    if (is(word, "finish")) CHECK(!fsdp_engine_in_backward(m.engine));
    if (check_num_failures > num_failures) {
      printf("%s:%d: '%.*s' %s\n", file, line, (int)strcspn(at, ";"), at,
             error.message);
    }
  }
}
