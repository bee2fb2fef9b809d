/*
 * The bridge's face: what the CPython module may ask of libtorch, in pure C.
 *
 * Only csrc/torch includes torch headers. Functions take Python objects as
 * `struct _object *` (CPython's PyObject) where the caller has tensors, dtypes
 * or process groups. Unless a comment says "GIL", a function must be called
 * with the GIL *released* ("may block") or does not care.
 *
 * A C++ exception becomes a status here. Its std::exception_ptr is saved for
 * the calling thread, and fsdp_torch_set_python_error() turns it back into the
 * Python exception that torch would raise.
 */
#ifndef FSDP_TORCH_BRIDGE_H
#define FSDP_TORCH_BRIDGE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "offload/offload.h"
#include "runtime/engine.h"
#include "state/exchange.h"

#ifdef __cplusplus
#define FSDP_NOEXCEPT noexcept
extern "C" {
#else
#define FSDP_NOEXCEPT
#endif

struct _object; /* PyObject */

typedef struct fsdp_torch_unit fsdp_torch_unit;
typedef struct fsdp_torch_engine fsdp_torch_engine;

/* Objects (GIL) ---------------------------------------------------------- */

/* Whether `object` is a torch.Tensor (or a subclass). Cannot fail. GIL. */
bool fsdp_torch_is_tensor(struct _object *object);
/* Of a torch.Tensor. Cannot fail. GIL. */
int64_t fsdp_torch_num_dims(struct _object *tensor) FSDP_NOEXCEPT;
/* Counts a write into a torch.Tensor, as an operator in place does: autograd
 * then refuses what it has saved of it. Cannot fail. GIL. */
void fsdp_torch_count_write(struct _object *tensor) FSDP_NOEXCEPT;

/* dtype [out] what a torch.dtype is to the core. FSDP_INVALID_ARGUMENT:
 * `object` is none. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_read_dtype(struct _object *object,
                                                 fsdp_dtype *dtype,
                                                 fsdp_error *error);

/* New reference to the torch.dtype of `dtype`, or NULL with a Python exception.
 * GIL. */
struct _object *fsdp_torch_dtype_object(fsdp_dtype dtype);

/*
 * The memory of a contiguous tensor on the CPU. data [out] borrowed from the
 * tensor; NULL when it is empty. GIL.
 *
 * FSDP_INVALID_ARGUMENT  it is elsewhere, not contiguous, or has no memory of
 *                        its own (a tensor subclass, a unit's freed block).
 */
FSDP_NODISCARD fsdp_status fsdp_torch_host_bytes(struct _object *tensor,
                                                 const void **data,
                                                 int64_t *nbytes,
                                                 fsdp_error *error);

/* Sets the Python exception for a failed call on this thread: the saved C++
 * exception when there is one that caused `error`, else an exception by code
 * (INVALID_ARGUMENT: ValueError, OUT_OF_MEMORY: torch.OutOfMemoryError,
 * others: RuntimeError). GIL. */
void fsdp_torch_set_python_error(const fsdp_error *error);

/* New reference to a str, or NULL with a Python exception: `cause`, by which
 * `operation` of a ProcessGroup failed, and what its ranks were doing. Breaks
 * the group, see Note [Post-mortem]. GIL. */
struct _object *fsdp_torch_describe_failure(struct _object *process_group,
                                            const char *cause,
                                            const char *operation);

/* Version of the torch that the bridge was compiled against, "2.13.0".
 * Borrowed, static. */
const char *fsdp_torch_version(void);

/* Units -------------------------------------------------------------------- */

typedef struct fsdp_torch_unit_options {
  const char *name;
  struct _object *const *uses; /* parameters, one per use in module order;
                                  borrowed; may be empty */
  int64_t num_uses;
  struct _object *shard_group;   /* ProcessGroup, or NULL: this rank alone */
  struct _object *replica_group; /* likewise */
  struct _object *part_group;    /* NULL: the unit keeps no parts */
  const int64_t *extended;       /* per use, of a unit by rows: not 0: its owner
                                    extends the parameter */
  struct _object *device;        /* torch.device of compute and shards */
  struct _object *param_dtype;   /* torch.dtype, or NULL: master dtype */
  struct _object *reduce_dtype;  /* likewise: param_dtype, then master */
  bool use_orig_params;
  bool reshard_after_forward;
  bool shows_kept; /* what is kept for backward stays shown after forward */
  bool reshard_after_backward_without_sync;
  fsdp_prefetch backward_prefetch;
  bool forward_prefetch;
  bool cast_forward_inputs;
  bool cast_root_forward_inputs;
  bool keep_low_precision_grads; /* sharded gradients in param_dtype */
  bool offloads;                 /* shards and gradients in host memory */
  const int64_t
      *shard_dims; /* per use: the dimension that is cut by rows; NULL:
                      flat. By rows, `uses` only say shapes and dtypes:
                      values come by fsdp_torch_unit_bind_sharded. */
  const int64_t *block_numels; /* per use of a flat unit: elements that are kept
                                  together, see layout/flat_layout.h; NULL:
                                  none are */
  const fsdp_flat_layout *like; /* of a flat unit: the layout of the one before,
                                   over the same parameters, which is kept; one
                                   that splits what it has in a segment is not.
                                   NULL: there was none */
  bool is_apart; /* of a unit by rows: from the one before it in its engine, see
                    runtime/apart.c */
} fsdp_torch_unit_options;

/*
 * Flattens the parameters: computes the layout, copies this rank's part of
 * every parameter into a shard on `device`, points the parameters (the same
 * tensor objects) at the shard and frees their old memory. Parameters that are
 * the same object are shared. unit [out] new reference. GIL.
 *
 * FSDP_INVALID_ARGUMENT  a parameter is not a tensor, not a leaf, on the meta
 *                        device, sparse, or of an integer dtype with
 *                        requires_grad; the message names it by index.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status
fsdp_torch_unit_create(const fsdp_torch_unit_options *options,
                       fsdp_torch_unit **unit, fsdp_error *error);

/*
 * A unit like `source`, with a copy of its shards and no gradients: `uses` are
 * other parameter objects, of any values, shared in the same way; they become
 * views of the copy. unit [out] new reference. GIL.
 */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_clone(const fsdp_torch_unit *source,
                                                 struct _object *const *uses,
                                                 int64_t num_uses,
                                                 fsdp_torch_unit **unit,
                                                 fsdp_error *error);

/*
 * Makes `tensor` the unit's parameter `index` in the place of the one before.
 * Its values, this rank's part or all of them, are copied into the shard; it
 * becomes a view of it. Between steps only. GIL.
 *
 * FSDP_INVALID_ARGUMENT  another dtype or number of elements.
 */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_replace_param(fsdp_torch_unit *unit,
                                                         int64_t index,
                                                         struct _object *tensor,
                                                         fsdp_error *error);

/* Lets function(kind, pieces, group, rank, scale) make the unit's calls of
 * `kinds`, some of fsdp_custom; `pieces` are pairs of 1-D tensors, see
 * custom_add in port/views.h. Between steps. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_set_custom(fsdp_torch_unit *unit,
                                                      struct _object *function,
                                                      unsigned kinds,
                                                      fsdp_error *error);

/* Lets hook(state, grad) or, where the unit is sharded, hook(state, grad,
 * output) stand for the unit's reductions: `grad` is a segment's unsharded
 * gradient, `output` (1-D, shard_numel) receives this rank's piece. GIL. */
FSDP_NODISCARD fsdp_status
fsdp_torch_unit_set_reduce_hook(fsdp_torch_unit *unit, struct _object *state,
                                struct _object *hook, fsdp_error *error);

/* Lets function() run whenever a reduction of the unit is through, with the
 * sharded gradients on the parameters; those that it clears are let go. None:
 * nothing runs. See Note [Following reductions]. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_follow_reductions(
    fsdp_torch_unit *unit, struct _object *function, fsdp_error *error);

/* Before its parameters get another unit, or memory of their own: a graph may
 * keep this one, and its end no longer changes them. A backward through that
 * graph fails. Between steps, without gradients. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_leave_params(fsdp_torch_unit *unit,
                                                        fsdp_error *error);

/* Removes the unit from its engine and its hooks from autograd. The parameters
 * stay views of the shard. Accepts NULL. GIL. Cannot fail. */
void fsdp_torch_unit_destroy(fsdp_torch_unit *unit);

/* Borrowed. */
fsdp_unit *fsdp_torch_unit_core(const fsdp_torch_unit *unit);
const fsdp_flat_layout *fsdp_torch_unit_layout(const fsdp_torch_unit *unit);

/* New reference to the shard of `segment` as a 1-D torch.Tensor, or NULL with
 * a Python exception. GIL. */
struct _object *fsdp_torch_unit_shard(const fsdp_torch_unit *unit,
                                      int64_t segment);

/* With use_orig_params=False: `flat_params[i]` (a tensor over segment i's
 * shard) carries the segment's sharded gradient as its .grad. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_bind_flat_params(
    fsdp_torch_unit *unit, struct _object *const *flat_params,
    int64_t num_flat_params, fsdp_error *error);

/* Finds the first parameter of a unit that its module no longer has in place:
 * the attribute's name, valid while the GIL is held, or NULL. With the GIL. */
typedef struct fsdp_torch_watch {
  void *context;
  const char *(*find_replaced)(void *context);
} fsdp_torch_watch;

/* Lets a backward call `watch` once, if a forward left the parameters shown.
 * NULL: it calls nothing. GIL. */
void fsdp_torch_unit_set_watch(fsdp_torch_unit *unit,
                               const fsdp_torch_watch *watch) FSDP_NOEXCEPT;

/* fsdp_engine_show_kept() of the unit's engine; tensor parallel units register
 * DTensors over what they show. GIL, released meanwhile. 0, or -1 with an
 * exception. */
int fsdp_torch_unit_show_kept(fsdp_torch_unit *unit, bool shows) FSDP_NOEXCEPT;

/* Rows: see Note [Parameters by rows] in rows.cpp -------------------------- */

/* Which of a parameter's objects its modules have registered. */
typedef enum fsdp_torch_shown {
  FSDP_TORCH_SHOWN_SHARDED = 0,
  FSDP_TORCH_SHOWN_PLAIN,
  FSDP_TORCH_SHOWN_PART /* of the small group, between forward and backward */
} fsdp_torch_shown;

typedef enum fsdp_torch_extension {
  FSDP_TORCH_EXTENSION_GATHER = 0, /* a list of (output, input) */
  FSDP_TORCH_EXTENSION_SHOW,       /* the parameter */
  FSDP_TORCH_EXTENSION_FREE        /* None */
} fsdp_torch_extension;

/* What the owner of a unit by rows does for it. All with the GIL; on failure a
 * Python exception is set. */
typedef struct fsdp_torch_face {
  void *context;
  /* Registers one kind of parameters. 0, or -1. */
  int (*show)(void *context, fsdp_torch_shown kind);
  /* A new tuple: a gradient for the sharded parameter `param`, and its local
   * tensor, an alias of `local`. NULL on failure. */
  struct _object *(*make_grad)(void *context, int64_t param,
                               struct _object *local);
  /* A new reference to the local tensor of `grad`, a gradient of the parallel
   * parameter `param`, placed like that. May communicate. NULL on failure. */
  struct _object *(*local_grad)(void *context, int64_t param,
                                struct _object *grad);
  /* Of an extended parameter, see Note [Extended parameters]. A new object, or
   * NULL. */
  struct _object *(*extend)(void *context, int64_t param,
                            fsdp_torch_extension stage);
} fsdp_torch_face;

/* NULL: the owner is gone. GIL. */
void fsdp_torch_unit_set_face(fsdp_torch_unit *unit,
                              const fsdp_torch_face *face) FSDP_NOEXCEPT;

/* Lets `param` be the user's sharded parameter `index`, of which `local` is the
 * local tensor: a view of the shard from now on, which takes its values over.
 * Between steps only. GIL.
 *
 * FSDP_INVALID_ARGUMENT  another dtype or number of elements.
 */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_bind_sharded(fsdp_torch_unit *unit,
                                                        int64_t index,
                                                        struct _object *param,
                                                        struct _object *local,
                                                        fsdp_error *error);

/* Looks for local tensors that the user has put into sharded parameters: each
 * becomes a view of the shard, which takes its values. `name` is that of the
 * attribute. Before a forward or an unshard. GIL. 0, or -1 with an exception.
 */
int fsdp_torch_unit_take_locals(fsdp_torch_unit *unit,
                                struct _object *name) FSDP_NOEXCEPT;

/* Lets modules see `param`, a DTensor, instead of the plain parameter `index`:
 * `local`, its local tensor, shows what that does from now on. Before the
 * first use; see Note [Parallel parameters] in rows.cpp. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_bind_parallel(fsdp_torch_unit *unit,
                                                         int64_t index,
                                                         struct _object *param,
                                                         struct _object *local,
                                                         fsdp_error *error);

/* Whether a backward has the plain parameters registered until its end. GIL. */
bool fsdp_torch_unit_is_shown_in_backward(const fsdp_torch_unit *unit)
    FSDP_NOEXCEPT;

/* A new reference to the local tensor of the part of parameter `index`, which
 * has memory while the unit keeps its part; NULL with an exception. GIL. */
struct _object *fsdp_torch_unit_part_of(fsdp_torch_unit *unit, int64_t index);
/* What the modules have registered until backward: the part or the parameters
 * that the unit keeps, which the engine remembers then. GIL. */
fsdp_torch_shown fsdp_torch_unit_shown_after_forward(fsdp_torch_unit *unit)
    FSDP_NOEXCEPT;
/* After the outermost forward: registers the sharded parameters in units that
 * keep whole ones for the next forward without gradients, which they showed
 * until now. GIL. 0, or -1 with an exception. */
int fsdp_torch_unit_hide_for_inference(fsdp_torch_unit *unit) FSDP_NOEXCEPT;
/* Before a new iteration drops what units keep, or what a backward that raised
 * left: registers the sharded parameters again, but for units that the user
 * unsharded. Cheap if nothing is kept. GIL, released while it waits for that
 * backward. 0, or -1 with an exception. */
int fsdp_torch_unit_hide_kept(fsdp_torch_unit *unit) FSDP_NOEXCEPT;

/* fsdp_unit_unshard and its kin. may block */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_unshard(fsdp_torch_unit *unit,
                                                   fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_torch_unit_wait_unshard(fsdp_torch_unit *unit,
                                                        fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_torch_unit_reshard(fsdp_torch_unit *unit,
                                                   fsdp_error *error);

/* Forward ------------------------------------------------------------------ */

/* What a forward call has to do to its inputs. */
typedef struct fsdp_torch_cast {
  bool is_needed;     /* false: leave the inputs as they are */
  int32_t dtype_code; /* torch ScalarType for floating tensors; -1: keep */
} fsdp_torch_cast;

/* Decides it, before pre_forward: the root's inputs follow
 * cast_root_forward_inputs, another unit's cast_forward_inputs; tensors on
 * another device than the unit's are moved by the root, and by units that cast.
 */
void fsdp_torch_unit_input_cast(const fsdp_torch_unit *unit,
                                fsdp_torch_cast *cast) FSDP_NOEXCEPT;

/* `tensor` as the cast wants it: a new reference to itself when it fits, else
 * to a converted tensor (autograd records the conversion). NULL with a Python
 * exception on failure. GIL. */
struct _object *fsdp_torch_unit_cast_input(const fsdp_torch_unit *unit,
                                           const fsdp_torch_cast *cast,
                                           struct _object *tensor);

/* The inputs of one forward call, whose gradients tell when backward has left
 * the unit: see Note [Leaving a unit in backward]. */
typedef struct fsdp_torch_inputs fsdp_torch_inputs;

/* Whether a forward now needs that: autograd records. */
bool fsdp_torch_wants_inputs(void) FSDP_NOEXCEPT;
/* inputs [out] new reference; the hooks share its content. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_inputs_create(fsdp_torch_unit *unit,
                                                    fsdp_torch_inputs **inputs,
                                                    fsdp_error *error);
/* Hooks one input tensor, if it requires grad. A new reference to what the unit
 * gets for it: itself or an alias. NULL with a Python exception. GIL. */
struct _object *fsdp_torch_inputs_hook(fsdp_torch_inputs *inputs,
                                       struct _object *tensor);
/* Accepts NULL. Cannot fail. GIL. */
void fsdp_torch_inputs_destroy(fsdp_torch_inputs *inputs);

/* may block */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_pre_forward(fsdp_torch_unit *unit,
                                                       fsdp_error *error);
/* Whether `tensor` is a parameter of the unit itself. Cannot fail. GIL. */
bool fsdp_torch_unit_has_param(const fsdp_torch_unit *unit,
                               struct _object *tensor) FSDP_NOEXCEPT;
/* A new reference to a parameter that the user wrote during the unit's forward,
 * which runs, into memory that goes when the unit is resharded; None without.
 * NULL with a Python exception. GIL. */
struct _object *fsdp_torch_unit_written_param(const fsdp_torch_unit *unit);
/* A new reference to a copy of a tensor, in its graph. NULL with a Python
 * exception. GIL. */
struct _object *fsdp_torch_copy_tensor(struct _object *tensor);
/* Hooks one output tensor so that its gradient starts the unit's backward.
 * is_hooked [out] whether it requires grad. GIL. */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_hook_output(fsdp_torch_unit *unit,
                                                       struct _object *tensor,
                                                       bool *is_hooked,
                                                       fsdp_error *error);

/* Whether `tensor._backward_hooks` is set. Needs the GIL; cannot fail. */
bool fsdp_torch_has_listed_hooks(struct _object *tensor) FSDP_NOEXCEPT;

/* Lets `tensor._backward_hooks` show `hooks`, which autograd does not run.
 * `tensor` has none. Needs the GIL; cannot fail. */
void fsdp_torch_list_hooks(struct _object *tensor,
                           struct _object *hooks) FSDP_NOEXCEPT;

/* Makes autograd run `hooks`, listed before, as Tensor.register_hook() does. 0,
 * or -1 with a Python exception. */
int fsdp_torch_run_listed_hooks(struct _object *tensor, struct _object *hooks);
/* may block */
FSDP_NODISCARD fsdp_status fsdp_torch_unit_post_forward(fsdp_torch_unit *unit,
                                                        bool expects_backward,
                                                        fsdp_error *error);
/* Whether the forward that runs is activation checkpointing's, in backward. */
bool fsdp_torch_unit_recomputes(const fsdp_torch_unit *unit) FSDP_NOEXCEPT;
/* Forward ended by an exception, `reason`, which the other ranks are told. */
void fsdp_torch_unit_abandon_forward(fsdp_torch_unit *unit,
                                     const char *reason) FSDP_NOEXCEPT;

/* Whole parameters --------------------------------------------------------- */

/* may block */
FSDP_NODISCARD fsdp_status
fsdp_torch_unit_summon(fsdp_torch_unit *unit,
                       const fsdp_summon_options *options, fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_torch_unit_dismiss(fsdp_torch_unit *unit,
                                                   bool writeback,
                                                   fsdp_error *error);

/* Engine ------------------------------------------------------------------- */

/* An engine for `units`, parents first, all on one device. Units that belong
 * to another engine move. engine [out] new reference. GIL. */
FSDP_NODISCARD fsdp_status
fsdp_torch_engine_create(fsdp_torch_unit *const *units, int64_t num_units,
                         fsdp_torch_engine **engine, fsdp_error *error);

/*
 * Timeline of an engine: see fsdp_engine_set_timeline. Start and stop may
 * block.
 *
 * FSDP_INVALID_ARGUMENT  capacity or num_steps < 1.
 * FSDP_INVALID_STATE     in the middle of a step, or recorded already.
 */
FSDP_NODISCARD fsdp_status
fsdp_torch_engine_start_timeline(fsdp_torch_engine *engine, int64_t capacity,
                                 int64_t num_steps, fsdp_error *error);
/* Ends the recording: a new reference to what was recorded, to be destroyed
 * with the GIL, or NULL if none was started. */
fsdp_timeline *fsdp_torch_engine_stop_timeline(fsdp_torch_engine *engine)
    FSDP_NOEXCEPT;
/* When the marks of that timeline happened, in ns of its clock; -1: not known.
 * None on a host device. Borrowed until the next stop. GIL. */
const int64_t *fsdp_torch_engine_mark_times(const fsdp_torch_engine *engine,
                                            int64_t *num_marks) FSDP_NOEXCEPT;
/* Whether something is recorded now: started, not full and not stopped. */
bool fsdp_torch_engine_is_recording(const fsdp_torch_engine *engine)
    FSDP_NOEXCEPT;
/* As fsdp_engine_begin_wholes() and fsdp_engine_end_wholes(); nothing happens
 * if another thread is inside the engine. GIL. */
int64_t fsdp_torch_engine_begin_wholes(fsdp_torch_engine *engine,
                                       fsdp_timeline_kind kind,
                                       int32_t *mark) FSDP_NOEXCEPT;
void fsdp_torch_engine_end_wholes(fsdp_torch_engine *engine,
                                  fsdp_timeline_kind kind, int64_t begin_ns,
                                  int32_t mark, int64_t nbytes) FSDP_NOEXCEPT;
/* The start of a span: now, or 0 while nothing is recorded. GIL. */
int64_t fsdp_torch_unit_begin_span(const fsdp_torch_unit *unit) FSDP_NOEXCEPT;
/* Adds the span if begin_ns is not 0 and no other thread is inside the engine.
 * GIL. */
void fsdp_torch_unit_end_span(const fsdp_torch_unit *unit,
                              fsdp_timeline_kind kind,
                              int64_t begin_ns) FSDP_NOEXCEPT;

/* Accepts NULL. The units must be destroyed or moved first, or outlive it
 * unused. GIL. Cannot fail. */
void fsdp_torch_engine_destroy(fsdp_torch_engine *engine);

/* Bytes that the transports of the engine's groups have reserved. */
int64_t fsdp_torch_engine_ring_nbytes(fsdp_torch_engine *engine) FSDP_NOEXCEPT;
/* Borrowed. */
fsdp_engine *fsdp_torch_engine_core(fsdp_torch_engine *engine);

/* fsdp_engine_reduce_kept; the user then sees the gradients. GIL not held. may
 * block */
FSDP_NODISCARD fsdp_status
fsdp_torch_engine_reduce_kept(fsdp_torch_engine *engine, fsdp_error *error);

/* The functions of a captured step in runtime/engine.h, of the same names, and
 * one of the bridge's. */
typedef enum fsdp_torch_capture_stage {
  FSDP_TORCH_BEGIN_CAPTURE,
  FSDP_TORCH_FORK_LANES,
  FSDP_TORCH_JOIN_LANES,
  FSDP_TORCH_END_CAPTURE,
  FSDP_TORCH_BEGIN_REPLAY,
  FSDP_TORCH_END_REPLAY /* it was launched: its collectives have a time limit */
} fsdp_torch_capture_stage;

/* Runs one of them. After those that bring the units to rest, the sharded
 * parameters are registered. GIL not held. may block */
FSDP_NODISCARD fsdp_status fsdp_torch_engine_run_capture_stage(
    fsdp_torch_engine *engine, fsdp_torch_capture_stage stage,
    fsdp_error *error);

/* What all engines do before (`begins`) and after a call of autograd's engine,
 * but for those that another thread is in. GIL; given up only while another
 * thread holds an engine's lock. may block */
FSDP_NODISCARD fsdp_status fsdp_torch_around_backward(bool begins,
                                                      fsdp_error *error);

/* fsdp_engine_expect_writes() of all engines, but for those that another thread
 * is in. GIL, as there. */
FSDP_NODISCARD fsdp_status fsdp_torch_expect_writes(fsdp_error *error);
/* What autograd knows a parameter of `fully_shard` as, if the object is one,
 * else the object. GIL. A new reference, or NULL with an exception. */
struct _object *fsdp_torch_leaf_of(struct _object *object);

/* Drops what an unfinished step left (see fsdp_engine_reset), and registers the
 * sharded parameters. GIL not held. may block */
void fsdp_torch_engine_reset(fsdp_torch_engine *engine) FSDP_NOEXCEPT;

/*
 * Norm of all gradients of the engine's units and of `extra_params` (counted
 * once, locally), as one scalar tensor; scales the gradients in place when it
 * exceeds max_norm. norm_type is > 0, infinity included. Every rank must call.
 * norm [out] new reference to a 0-dim tensor. GIL (released inside).
 */
FSDP_NODISCARD fsdp_status fsdp_torch_engine_clip_grad_norm(
    fsdp_torch_engine *engine, struct _object *const *extra_params,
    int64_t num_extra_params, double max_norm, double norm_type,
    struct _object **norm, fsdp_error *error);

/* Saved tensors in host memory (GIL) --------------------------------------- */

/* Of forwards that begin from now on: what they save for backward waits in host
 * memory, storages of at least min_nbytes; 0: it stays. keep_last >= 1. Nothing
 * happens on a host device. */
void fsdp_torch_unit_set_offload(fsdp_torch_unit *unit, int64_t min_nbytes,
                                 int64_t keep_last) FSDP_NOEXCEPT;

/* Whether hooks are to stand around the forward of the unit, which has begun:
 * push and pop them. */
bool fsdp_torch_unit_begins_offload(const fsdp_torch_unit *unit) FSDP_NOEXCEPT;

/* What the pack hook needs to know: a new reference, or NULL with
 * an exception. */
struct _object *fsdp_torch_offload_context(const fsdp_torch_unit *unit);

/* Makes two functions torch's hooks for saved tensors, of this thread. 0, or -1
 * with an exception. */
int fsdp_torch_push_saved_hooks(struct _object *pack, struct _object *unpack);
void fsdp_torch_pop_saved_hooks(void) FSDP_NOEXCEPT;

/* The hooks. New references, or NULL with an exception. Unpacking releases the
 * GIL meanwhile. */
struct _object *fsdp_torch_offload_pack(struct _object *context,
                                        struct _object *tensor);
struct _object *fsdp_torch_offload_unpack(struct _object *packed);

/* Zeros where nothing was offloaded. */
void fsdp_torch_engine_offload_stats(const fsdp_torch_engine *engine,
                                     fsdp_offload_stats *stats) FSDP_NOEXCEPT;

/* Moving state between ranks ----------------------------------------------- */

/*
 * What carries a process group's collectives on a device: a new tuple of its
 * name ("shm", "hierarchical", "nccl" or "c10d") and, for c10d, of why. Waits
 * while a group of this process is meeting. GIL (released inside). NULL with an
 * exception.
 */
struct _object *fsdp_torch_transport(struct _object *group,
                                     struct _object *device);

/*
 * What of fsdp_c's own transports and kernels this machine can use: a new dict
 * of text. Tries them: takes shared memory and gives it back, opens libnccl and
 * the CUDA kernels for good. GIL (released inside); NULL with an exception.
 */
struct _object *fsdp_torch_parts(void);

/* An item of an exchange, as one rank sees it. Borrowed. */
typedef struct fsdp_torch_move {
  struct _object *source; /* what it holds, a tensor; None for nothing */
  struct _object *target; /* where what it needs goes; None: into new memory */
  struct _object *shape;  /* of new memory that holds as many elements, a tuple;
                             otherwise, and for None, it is 1-D */
  fsdp_dtype dtype;
} fsdp_torch_move;

/*
 * What an exchange needs done: a new tuple of the results (a list), the
 * outgoing messages (packed) and the incoming ones, lists of (peer, bytes),
 * this rank's own copies, and those to be made once the messages are there,
 * both for fsdp_torch_copy_tensors(). There is a move for each item of the
 * exchange. A source is brought to `device`, a torch.device. On the CPU a
 * result is the target, if there is one; new ones lie over large pages where
 * the kernel gives them. Elsewhere all results are new, and targets stay as
 * they are. GIL (released inside).
 *
 * FSDP_INVALID_ARGUMENT  a tensor has another size than the exchange says, or a
 *                        target is not contiguous or not on the CPU.
 */
FSDP_NODISCARD fsdp_status fsdp_torch_exchange_prepare(
    const fsdp_exchange *exchange, const fsdp_torch_move *moves,
    struct _object *device, struct _object **prepared, fsdp_error *error);

/* A contiguous tensor in host memory that goes to `peer` or comes from it. */
typedef struct fsdp_torch_message {
  int64_t peer; /* rank of the group */
  struct _object *tensor;
  bool is_outgoing;
} fsdp_torch_message;

typedef struct fsdp_torch_messages {
  const char *label; /* for errors; the same on both ranks of a message */
  const fsdp_torch_message *messages;
  int64_t num_messages;
  struct _object *copies; /* this rank's own, made meanwhile; None: none */
} fsdp_torch_messages;

/*
 * Passes messages between ranks of a process group, if its transport can: every
 * rank must call, the messages between two ranks are in the same order on both.
 * are_passed [out] false: nothing was done. GIL (released inside); may block.
 */
FSDP_NODISCARD fsdp_status fsdp_torch_pass_messages(
    struct _object *group, const fsdp_torch_messages *messages,
    bool *are_passed, fsdp_error *error);

/*
 * Brings what rank 0 of a process group has in a contiguous tensor to all of
 * them, if the group has a transport of our own on the tensor's device that
 * works in the order of streams: every rank must call. Runs on the current
 * stream. was_sent [out] false: nothing was done. `label` is for errors. GIL
 * (released inside); waits for the ranks at the group's first time.
 */
FSDP_NODISCARD fsdp_status fsdp_torch_broadcast(struct _object *group,
                                                struct _object *tensor,
                                                const char *label,
                                                bool *was_sent,
                                                fsdp_error *error);

/*
 * Makes the copies of fsdp_torch_exchange_prepare(). GIL (released inside).
 */
FSDP_NODISCARD fsdp_status fsdp_torch_copy_tensors(struct _object *copies,
                                                   fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_TORCH_BRIDGE_H */
