/*
 * Tests of runtime/: units apart from their module's (Note [Units apart] in
 * runtime/apart.c).
 */
#include "engine_fixture.h"
#include "runtime/engine_priv.h"

#define FORWARD                                                               \
  "enter root; enter embed; enter head; enter a; leave a; enter b; leave b; " \
  "leave head; leave embed; leave root"
#define ENTER_BACKWARD \
  "pre_backward root; pre_backward embed; pre_backward head"
#define BACKWARD_OF_LAYERS "pre_backward b; grads b; pre_backward a; grads a"

enum { ROOT, EMBED, HEAD };

/* A module with three parameters, of which two are apart, and two inside. */
static void start(const model_options *options) {
  model_options all = *options;
  all.finds_unused = true;
  all.keeps_after_forward = true;
  all.param_dtype = RECORDER_BF16;
  all.reduce_dtype = RECORDER_F32;
  model_open(&all, "root 8; embed 64 apart; head 64 apart; a 16; b 16");
}

static bool is_unused(int64_t unit) {
  return fsdp_unit_is_unused(m.units[unit].unit, 0);
}

static int64_t held_nbytes(void) {
  return model_stats(&m).arena.held_nbytes;
}

/* The head's parameters go when its gradient is there, which waits in its own
 * dtype; at the end one block serves it and the embedding's. */
TEST(test_memory) {
  start(WITH(.rank = 1));
  for (int i = 0; i < 4; i++) {
    PLAY("zero_grad; " FORWARD);
    PLAY(ENTER_BACKWARD);
    PLAY("await root 1; await embed 1; await head 1");
    const int64_t before = held_nbytes();
    PLAY("grad head 0; state head SHARDED");
    CHECK_I64(before - held_nbytes(), 2 * 64 * 2);
    PLAY(BACKWARD_OF_LAYERS);
    PLAY("grad embed 0; grad root 0; clear; finish; check_grads");
    CHECK_TAPE_HAS("reduce_scatter reduce g0 64 f32;");
    CHECK_TAPE_HAS("wait compute e12; free 520; alloc 520;"); /* the block */
    PLAY("check_sharded; check_idle");
    CHECK_I64(model_stats(&m).num_reduces, 5 * (i + 1));
  }
  /* Parameters of all, and the two in bf16 and one block in fp32. */
  CHECK(model_stats(&m).arena.peak_nbytes < 2 * 2 * 64 * 4);
}

/* If one of them is reduced all are, at the end. */
TEST(test_without_gradients) {
  for (int i = 0; i < 4; i++) {
    start(WITH(.rank = i % 2, .num_replicas = 1 + i / 2));
    PLAY(FORWARD);
    PLAY(ENTER_BACKWARD);
    PLAY("await root 0; await embed 0; await head 1; grad head 0");
    PLAY(BACKWARD_OF_LAYERS);
    PLAY("num_reduces 2; finish; num_reduces 5");
    CHECK(is_unused(ROOT) && is_unused(EMBED) && !is_unused(HEAD));

    PLAY("zero_grad; " FORWARD);
    PLAY(ENTER_BACKWARD);
    PLAY("await root 1; await embed 0; await head 0; grad root 0");
    PLAY(BACKWARD_OF_LAYERS);
    PLAY("finish; num_reduces 10");
    CHECK(!is_unused(ROOT) && is_unused(EMBED) && is_unused(HEAD));

    PLAY("zero_grad; " FORWARD); /* none is */
    PLAY(ENTER_BACKWARD);
    PLAY("await root 0; await embed 0; await head 0");
    PLAY(BACKWARD_OF_LAYERS);
    PLAY("finish; num_reduces 12");
  }
}

/* The same where the inputs of the module have gradients. */
TEST(test_where_backward_leaves_the_module) {
  static const char *const announced[] = {
      "await root 1; await embed 1; await head 0; grad embed 0; grad root 0",
      "await root 0; await embed 0; await head 1; grad head 0"};
  for (int i = 0; i < 2; i++) {
    start(WITH(.rank = i));
    for (int step = 1; step < 4; step++) {
      PLAY("zero_grad; enter a; enter root; enter embed; enter head; enter b");
      PLAY("leave b; leave head; leave embed; leave root; leave a");
      PLAY("pre_backward a; pre_backward root; pre_backward embed");
      PLAY("pre_backward head");
      model_play(announced[i], __FILE__, __LINE__);
      PLAY("pre_backward b; grads b");
      const int64_t before = model_stats(&m).num_reduces;
      PLAY("inputs head");
      CHECK_I64(model_stats(&m).num_reduces - before, 1);
      PLAY("inputs embed");
      CHECK_I64(model_stats(&m).num_reduces - before, 2);
      PLAY("inputs root");
      CHECK_I64(model_stats(&m).num_reduces - before, 3);
      PLAY("grads a; finish");
      CHECK_I64(model_stats(&m).num_reduces, 5 * step);
      CHECK(is_unused(ROOT) == (i == 1) && is_unused(EMBED) == (i == 1));
      CHECK(is_unused(HEAD) == (i == 0));
    }
  }
}

/* Accumulation, and one that does not reduce while the others do. */
TEST(test_accumulation) {
  start(WITH(.rank = 0));
  PLAY("sync none");
  for (int i = 0; i < 2; i++) {
    PLAY(FORWARD);
    PLAY(ENTER_BACKWARD);
    PLAY("await root 1; await embed 1; await head 1; grad head 0");
    PLAY(BACKWARD_OF_LAYERS);
    PLAY("grad embed 0; grad root 0; finish; num_reduces 0");
  }
  PLAY("sync reduce; " FORWARD);
  PLAY(ENTER_BACKWARD);
  PLAY("await root 1; await embed 1; await head 0");
  PLAY(BACKWARD_OF_LAYERS);
  PLAY("grad embed 0; grad root 0; finish; num_reduces 5; check_grads");

  fsdp_unit_get_settings(m.units[HEAD].unit)->sync = FSDP_SYNC_NONE;
  PLAY("zero_grad; step; num_reduces 9");
  fsdp_unit_get_settings(m.units[HEAD].unit)->sync = FSDP_SYNC_REDUCE;
  PLAY("step; num_reduces 14; check_grads");
}

/* An autograd call may reach weights of the outermost module first. */
TEST(test_around_a_call_of_autograd) {
  FSDP_LOCAL_ERROR(error);
  start(WITH(.rank = 0));
  PLAY(FORWARD);
  PLAY("state root HIDDEN; state head HIDDEN; view head sharded");
  CHECK(fsdp_engine_keeps_hidden(m.engine));
  CHECK_OK(fsdp_engine_show_hidden(m.engine, true, &error));
  PLAY("view root unsharded; view head unsharded; view embed unsharded");
  CHECK_OK(fsdp_engine_show_hidden(m.engine, false, &error));
  PLAY("view root sharded; view head sharded; view embed sharded");
  PLAY("pre_backward root; pre_backward embed; pre_backward head");
  PLAY("grads head; pre_backward b; grads b; pre_backward a; grads a");
  PLAY("grads embed; grads root; finish; check_grads");
}

/* The main unit goes first: the others are none's. */
TEST(test_units_that_leave) {
  start(WITH(.rank = 0));
  PLAY("step; check_grads; destroy root");
  CHECK(m.units[HEAD].unit->main == m.units[HEAD].unit);
  PLAY("destroy head; destroy embed");
}
