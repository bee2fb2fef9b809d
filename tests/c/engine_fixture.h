/*
 * Engine fixture: a small model of units over the recorder, driven the way the
 * bridge drives the engine, with an oracle for its numbers.
 *
 *   model_open(&options, "root 4; a 8");     units, and shards of so many
 *   PLAY("enter root; leave root; backward");
 *
 * The end of the test, or the next model, frees it and checks that nothing is
 * left.
 *
 * Unit 0 is the root, the others are its children. All ranks hold the same
 * data (as the recorder assumes): an unsharded parameter is this rank's shard
 * repeated, and the mean of a gradient over the ranks is the gradient.
 */
#ifndef FSDP_TESTS_ENGINE_FIXTURE_H
#define FSDP_TESTS_ENGINE_FIXTURE_H

#include <stdbool.h>
#include <stdint.h>

#include "check.h"
#include "layout/flat_layout.h"
#include "layout/param_table.h"
#include "recorder.h"
#include "runtime/engine.h"

enum {
  MODEL_MAX_UNITS = 8,
  MODEL_MAX_SEGMENTS = 4,
  MODEL_MAX_GRADS = 1024,
  MODEL_SCHEDULE_NBYTES = 1 << 16
};

/* When backward prefetches, seen from the gradients of the unit before. */
typedef enum model_prefetch {
  PREFETCH_BEFORE = 0,
  PREFETCH_AFTER,
  NO_PREFETCH
} model_prefetch;

/* For all units of a model. All zero it is FULL_SHARD over two ranks
 * in fp32. */
typedef struct model_options {
  int64_t world_size; /* 0: 2 */
  int64_t rank;
  int64_t num_replicas;     /* 0: 1 */
  fsdp_dtype param_dtype;   /* code 0: the master dtype */
  fsdp_dtype reduce_dtype;  /* code 0: param_dtype */
  fsdp_dtype held_dtype;    /* code 0: reduce_dtype */
  fsdp_dtype grad_dtype;    /* code 0: the master dtype */
  bool keeps_after_forward; /* as SHARD_GRAD_OP does */
  bool keeps_for_inference; /* as set_reshard_after_forward(False) does */
  bool shows_kept;          /* those are shown until backward */
  bool keeps_without_sync;  /* after a backward in no_sync */
  bool finds_unused;        /* parameters of which no rank has a gradient */
  model_prefetch backward_prefetch;
  bool forward_prefetch;
  double prescale; /* 0: 1 */
  bool wants_scratch;
  bool has_mean; /* the transport reduces to the mean */
  bool offloads;
  bool is_unaligned;       /* nothing in a segment is, as by rows */
  int64_t part_world_size; /* 0: units keep no parts; divides the segments */
} model_options;

/* A gradient that was handed over; the token of its fsdp_grad. */
typedef struct model_grad {
  void *data; /* freed at the release: a later read is seen by ASan */
  int64_t nbytes;
  int64_t num_releases;
} model_grad;

typedef struct model_unit {
  const char *name;
  fsdp_param_table *table;
  fsdp_flat_layout *layout;
  int64_t num_segments;
  void *shards[MODEL_MAX_SEGMENTS];
  void *grad_shards[MODEL_MAX_SEGMENTS];
  int64_t shard_nbytes[MODEL_MAX_SEGMENTS];
  int64_t grad_shard_nbytes[MODEL_MAX_SEGMENTS];
  int64_t full_nbytes[MODEL_MAX_SEGMENTS]; /* in master dtype */
  int64_t num_frees;                       /* of the sharded gradients */
  double *expected[MODEL_MAX_SEGMENTS];    /* sum of gradients, whole segment */
  fsdp_view view;                          /* what show_params said last */
  void *params[MODEL_MAX_SEGMENTS];
  bool has_grads;   /* show_grads was called since the last zero_grad */
  bool has_reduced; /* sharded ones were shown since then */
  fsdp_view grad_view;
  void *grads[MODEL_MAX_SEGMENTS];
  fsdp_unit *unit;
  int32_t reduce_itemsize[MODEL_MAX_SEGMENTS];
  int64_t rank;
  int64_t world_size;
  int64_t part_rank;
  int64_t part_nbytes[MODEL_MAX_SEGMENTS];
  bool offloads;
  bool is_apart;
} model_unit;

typedef struct model {
  model_options options;
  recorder *device;
  fsdp_device_ops ops; /* the recorder's */
  fsdp_view_ops views; /* likewise, with views and releases noted */
  fsdp_group shard_group;
  fsdp_group replica_group;
  fsdp_group part_group;
  fsdp_engine *engine;
  int64_t num_units;
  model_unit units[MODEL_MAX_UNITS];
  model_grad grads[MODEL_MAX_GRADS];
  int64_t num_grads;
  int64_t salt;    /* makes the gradients of each backward different */
  int64_t current; /* unit of the last call; -1: a call of the engine */
  char schedule[MODEL_SCHEDULE_NBYTES];
} model;

/* Options for one model: model_open(WITH(.rank = 1), "u 8"). */
#define WITH(...) (&(const model_options){__VA_ARGS__})

/* The model of the running test. */
extern model m;

/* Options of a summon as bits, to go through all of them. */
enum { FIRST_ONLY = 1, ON_HOST = 2, WITH_GRADS = 4, MODEL_NUM_SUMMONS = 8 };
fsdp_summon_options model_summon_options(int bits);

/* options NULL: all zero. */
void model_init(model *self, const model_options *options);

/* Plans unit number num_units. The specs need no keys. */
void model_plan(model *self, const char *name, const fsdp_param_spec *specs,
                int64_t num_specs);
/* One trainable fp32 parameter, `shard_numel` elements (of whole alignment
 * units) on each rank. */
void model_plan_simple(model *self, const char *name, int64_t shard_numel);

/* Four segments:
 *
 *   0  fp32, trainable  6 + gap 2 + 2  -> 8 a rank (of two)
 *   1  fp32, frozen     4              -> 4
 *   2  bf16, trainable  3              -> 8
 *   3  uint8, frozen    5              -> 16
 */
void model_plan_mixed(model *self, const char *name);

/* Plans units, parents first. Of each: its name, then the elements of one fp32
 * parameter on each rank, or of whole ones in parentheses, and "frozen" or
 * "apart" if it is, or "mixed" for the segments above:
 * "root 4; a 12 frozen; b mixed; c (5,7)". */
void model_plan_units(const char *units);
/* Plans these and starts. */
void model_open(const model_options *options, const char *units);

/* Makes the engine and the planned units. */
FSDP_NODISCARD fsdp_status model_build(model *self, fsdp_error *error);
/* The options of planned unit `index`; segments are written to `segments`. */
fsdp_unit_options model_unit_options(model *self, int64_t index,
                                     fsdp_segment_options *segments);
/* Builds, which must succeed, and clears the tape. */
void model_start(model *self);
/* Makes another one, which all units join; the old one may be gone. */
void model_join_new_engine(model *self);
/* Root and children a, b, c (as many as asked for), shards of 4, 8, 12 and 16
 * elements; started. */
void model_start_tree(model *self, const model_options *options,
                      int64_t num_children);
/* Frees everything; nothing may be alive then, each handed gradient must have
 * been released exactly once. A test whose loop tells of failures calls it. */
void model_fini(model *self);

/* One call of the engine each. Where parameters are shown by it, their values
 * are checked. */
FSDP_NODISCARD fsdp_status model_enter(model *self, int64_t unit,
                                       fsdp_error *error);
FSDP_NODISCARD fsdp_status model_leave(model *self, int64_t unit,
                                       bool expects_backward,
                                       fsdp_error *error);
FSDP_NODISCARD fsdp_status model_pre_backward(model *self, int64_t unit,
                                              fsdp_error *error);
/* Expects and hands over the gradients of all trainable parameters, last one
 * first, and, of a unit with frozen ones, then those of its inputs. */
FSDP_NODISCARD fsdp_status model_give_grads(model *self, int64_t unit,
                                            fsdp_error *error);
/* Hands over one gradient, as an expected one or not. */
FSDP_NODISCARD fsdp_status model_give_grad(model *self, int64_t unit,
                                           int64_t param, bool is_expected,
                                           fsdp_error *error);
FSDP_NODISCARD fsdp_status model_give_inputs(model *self, int64_t unit,
                                             fsdp_error *error);
FSDP_NODISCARD fsdp_status model_finish(model *self, fsdp_error *error);

/* Forward of the whole model. After a failure it leaves forward as the bridge
 * does. */
FSDP_NODISCARD fsdp_status model_forward(model *self, bool expects_backward,
                                         fsdp_error *error);
FSDP_NODISCARD fsdp_status model_backward(model *self, fsdp_error *error);
/* Both, which must succeed. */
void model_step(model *self);

/* Makes the calls of a script in turn, each of which must succeed:
 *
 *   enter a         pre-forward of unit a
 *   leave a         post-forward, and a backward will follow
 *   leave_eval a    post-forward, and none will
 *   abandon a       forward raised
 *   pre_backward a  backward reaches a
 *   grads a         model_give_grads()
 *   inputs a        model_give_inputs()
 *   expect a 2      that many gradients will come
 *   await a 2       likewise, and then the gradients of its inputs
 *   grad a 1        hands over that of parameter 1; "unexpected a 1" one that
 *                   was not announced
 *   pending a 1     so many are still expected
 *   open            a backward begins that reaches no unit yet
 *   leave_kept      this backward is asked for no gradient of a parameter
 *   finish          the end of backward
 *   forward, eval   forward of the whole model; no backward follows eval
 *   infer           likewise, and it records no graph
 *   expect_writes   lets the next forward gather anew
 *   backward, step  backward of the whole model; forward and backward
 *   summon a, dismiss a, drop a   drop: without a write-back
 *   summon a first_only+on_host+with_grads
 *   unshard a, wait_unshard a, reshard a      on demand
 *   freeze a 0, unfreeze a 0      segment 0 of unit a
 *   full a 1        whether unit a is unsharded in master dtype
 *   destroy a, reset, zero_grad, optimizer
 *   sync none, sync shard, sync reduce
 *   check_grads     model_check_grads()
 *   check_sharded   all units are SHARDED
 *   check_idle      nobody holds a block of the arena
 *   check_races     lanes waited for each other where they had to
 *   clear           clears the tape
 *   show_memory     the tape names memory from now on
 *   grads_live 1, params_changed 0, params_copied 1
 *                   what the recorder answers from now on
 *   state a SHARDED, view a full, grad_view a partial
 *                   what unit a must be and show
 *   has_grads a, no_grads a
 *   num_reduces 3   and the other counts of fsdp_engine_stats
 */
void model_play(const char *script, const char *file, int line);
#define PLAY(script) model_play((script), __FILE__, __LINE__)
/* The same up to the first call that fails. */
FSDP_NODISCARD fsdp_status model_try(const char *script, fsdp_error *error);

/* The tape and model_schedule() of the model; see CHECK_LINES. */
#define CHECK_TAPE(lines) CHECK_LINES(recorder_tape(m.device), lines)
#define CHECK_TAPE_HAS(lines) CHECK_HAS(recorder_tape(m.device), lines)
#define CHECK_TAPE_LACKS(lines) CHECK_LACKS(recorder_tape(m.device), lines)
#define CHECK_SCHEDULE(lines) CHECK_LINES(model_schedule(&m), lines)

/* What an optimizer does: the gradients are cleared; the shards change. */
void model_zero_grad(model *self);
void model_optimizer_step(model *self);

/* The sharded (or, held unsharded, the unsharded; or the partial) gradients
 * are the sum of what was handed over since the last zero_grad. */
void model_check_grads(model *self);

/* What is shown as unsharded or whole is the shard of this rank, once for each
 * rank. */
void model_check_params(model *self, int64_t unit);
/* The unit is UNSHARDED, too, and shown in the dtype that it should be. */
void model_check_unsharded(model *self, int64_t unit);

/* The test reads or writes a shard, or a sharded gradient: on the compute lane
 * or, offloaded, on the host. */
void model_touch_shard(model *self, const void *data, int64_t nbytes,
                       bool is_write);

void model_check_states(const model *self, fsdp_unit_state state);
/* The engine of a unit; NULL: in none. */
fsdp_engine *model_engine_of(const fsdp_unit *unit);
fsdp_unit_state model_state(const model *self, int64_t unit);
fsdp_engine_stats model_stats(const model *self);
int64_t model_blocks_besides_arena(const model *self);

/* The tape since the last clear in short: who gathers, reduces and shows what;
 * collectives name the unit whose shard has that many elements. */
const char *model_schedule(model *self);

#endif /* FSDP_TESTS_ENGINE_FIXTURE_H */
