/*
 * Recorder: a device in host memory that writes one line per operation to a
 * tape, runs each operation at once, and fails on request.
 *
 *   alloc 64                      free 64
 *   host_alloc 64                 host_free 64
 *   event e1                      destroy e1
 *   record e1 compute             wait unshard e1
 *   synchronize e1
 *   copy_to_device upload 16   copy_to_host download 16   (16: bytes)
 *   pack compute x0.5 5 f32->bf16, 3 bf16->bf16 add, zero 4 bf16, one 4 bf16
 *   accumulate reduce x0.25 4 bf16->f32
 *   group_begin unshard g0        group_end unshard g0
 *   all_gather unshard g0 4 f32   (4: shard_numel)
 *   reduce_scatter reduce g0 4 f32 [scratch]
 *   all_reduce replicate g1 4 f32
 *   broadcast unshard g0 8 f32 from 0
 *   reduce_hook unit0 reduce 0    all_gather_bytes g0 8       (8: bytes)
 *   show unit0 unsharded          show_grads unit0 sharded
 *   take_params unit0 sharded     take_grads unit0 [unsharded]
 *   take_full_grads unit0 full
 *   mark_params unit0             params_changed unit0
 *   grads_live unit0              grads_free unit0
 *   grad_shard unit0 1            release t1
 *
 * Names are given in order of first sight: e1, e2, ... (events), t1, t2, ...
 * (tokens), unit0, ... (owners), g0, ... (transports), b1, ... (blocks), h1,
 * ... (blocks in host memory). Collectives compute as if every rank held the
 * same data. Memory is touched for real, so ASan sees every read and write out
 * of bounds. Nothing runs later than it is enqueued, but the recorder knows
 * what might: recorder_race().
 */
#ifndef FSDP_TESTS_RECORDER_H
#define FSDP_TESTS_RECORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtypes.h"
#include "base/types.h"
#include "port/device.h"
#include "port/views.h"

/* Dtypes that the recorder can compute in. */
#define RECORDER_F32 ((fsdp_dtype){.code = FSDP_DTYPE_FLOAT32, .itemsize = 4})
#define RECORDER_BF16 ((fsdp_dtype){.code = FSDP_DTYPE_BFLOAT16, .itemsize = 2})
#define RECORDER_F64 ((fsdp_dtype){.code = FSDP_DTYPE_FLOAT64, .itemsize = 8})
#define RECORDER_U8 ((fsdp_dtype){.code = FSDP_DTYPE_UINT8, .itemsize = 1})

typedef struct recorder recorder;

/* What rank `rank` sends in an all_gather_bytes in which this rank sends
 * `mine`. */
typedef void (*recorder_answer)(void *context, int64_t rank, const void *mine,
                                int64_t nbytes, void *theirs);

/* New; exits the process when memory is out (it does not use fsdp_calloc). */
recorder *recorder_create(void);

/* Frees the blocks and events that are still alive, too. */
void recorder_destroy(recorder *self);

/* Borrowed. */
const fsdp_device_ops *recorder_ops(recorder *self);
const fsdp_view_ops *recorder_views(recorder *self);

/* A group with a transport of its own, which lives as long as the recorder. */
fsdp_group recorder_group(recorder *self, int64_t rank, int64_t world_size,
                          bool wants_scratch);

/* The group's transport also has reduce_scatter_mean. */
void recorder_reduce_to_mean(const fsdp_group *group);

/* The lines since the start or the last clear, each ended by a newline.
 * Borrowed until the next operation. */
const char *recorder_tape(const recorder *self);
void recorder_clear(recorder *self);

/* Whether lines also name memory, as in `alloc 64 b1` and `all_gather unshard
 * g0 4 f32 b1 <- b1+16` (bytes from the start of the block); off at first. */
void recorder_show_memory(recorder *self, bool is_shown);

/* Lets lines name the test's own memory and owners. The
 * name is copied. */
void recorder_name_memory(recorder *self, const void *data, int64_t nbytes,
                          const char *name);
/* The same for memory on the host: only the copies may touch it. */
void recorder_name_host_memory(recorder *self, const void *data, int64_t nbytes,
                               const char *name);
/* It goes: its address may come again, of another kind. */
void recorder_unname_memory(recorder *self, const void *data);
void recorder_name_owner(recorder *self, const void *owner, const char *name);

/* Operation number `index` from now (0 = the next) of those that can fail
 * fails, and only that one; -1 turns it off. It does nothing, leaves no line,
 * and reports OUT_OF_MEMORY (alloc) or BACKEND with "injected at <line>". */
void recorder_fail_at(recorder *self, int64_t index);
/* Blocks on the device may take up to `nbytes` together; 0: as they like. */
void recorder_limit_memory(recorder *self, int64_t nbytes);

/* Whether it is a device without streams; not at first. */
void recorder_set_host(recorder *self, bool is_host);

/* Operations so far, of those that can fail, failed ones too. */
int64_t recorder_num_calls(const recorder *self);

/* What is alive now. */
int64_t recorder_live_blocks(const recorder *self);
int64_t recorder_live_nbytes(const recorder *self);
int64_t recorder_live_events(const recorder *self);

/* What take_grads, take_full_grads and grads_live answer from now on; false at
 * first. */
void recorder_set_grads_live(recorder *self, bool any_live);

/* What take_params answers from now on; false at first. The test touches what
 * the copy would. */
void recorder_set_params_copied(recorder *self, bool any_copied);

/* What params_changed answers from now on; false at first. */
void recorder_set_params_changed(recorder *self, bool changed);

/* The memory that grad_shard answers with; borrowed. Without it the recorder
 * answers with 4096 bytes of its own. Either is zeroed on COMPUTE (by the host
 * if it is there) at the first call, and at the first one after grads_free,
 * unless take_grads found gradients before. */
void recorder_set_grad_shard(recorder *self, void *owner, int64_t segment,
                             void *data, int64_t nbytes);

/* What another rank broadcasts: `first`, `first` + 1, ...; 0 at first. */
void recorder_set_broadcast(recorder *self, double first);

/* How other ranks answer in all_gather_bytes; without it they send the same. */
void recorder_set_answer(recorder *self, recorder_answer answer, void *context);
/* They send this byte. */
void recorder_set_answer_byte(recorder *self, bool byte);

/* The first time that two lanes touched the same memory, one of them writing,
 * and nothing said in which order; "" if there was none, or if a record of an
 * event, or a wait, was made to fail. */
const char *recorder_race(const recorder *self);
/* A test that provoked one goes on. */
void recorder_clear_race(recorder *self);

/* Work of the test itself: on a lane, or (RECORDER_HOST) done by the host. */
#define RECORDER_HOST_LANE ((int)FSDP_NUM_LANES)
void recorder_touch(recorder *self, int lane, const void *data, int64_t nbytes,
                    bool is_write);
/* The user sees gradients in it: freeing it before keep_grads ends the test. */
void recorder_lend(recorder *self, const void *owner, fsdp_view view,
                   const void *data);
/* Memory that the test frees after the work now on `lane`. */
void recorder_forget(recorder *self, const void *data, int64_t nbytes,
                     int lane);

#endif /* FSDP_TESTS_RECORDER_H */
