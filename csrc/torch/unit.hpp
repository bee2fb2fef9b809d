// A unit on the torch side: its parameters' tensors and what they can be views
// of, and the engine that it belongs to.
//
// Note [Tensors of a unit]
// `tensor` is the user's parameter; it stays the same TensorImpl for the whole
// run. `sharded`, `unsharded` and `full` are views made once, over the shard,
// over a storage that is pointed at an arena block while the unit is
// unsharded, and over one for summoned parameters. Showing a view is
// tensor->shallow_copy_from(view): storage, sizes, strides and dtype change;
// autograd metadata, version counter and grad accumulator stay.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorOptions.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "layout/flat_layout.h"
#include "layout/param_table.h"
#include "runtime/engine.h"
#include "torch/bridge.h"
#include "torch/compat.hpp"
#include "torch/device/provider.hpp"
#include "torch/held_shard.hpp"

namespace fsdp_torch {

class Offload;
struct Unit;
struct InputCall;
struct ForwardCall;
struct Follower;

// One engine with its provider and its lock. Units share it.
struct Engine {
  explicit Engine(c10::Device device) : provider(device) {}
  ~Engine();
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;

  // Drops what a backward left that raised before its end. Holds the lock.
  void recover();
  // Tells the ranks that will wait for this one why they wait in vain; "" takes
  // it back. See Note [Post-mortem].
  void publish_abort_reason(const std::string &reason) noexcept;
  // The start of a span of the timeline: now, or 0 while none is recorded. With
  // the GIL or the lock.
  int64_t begin_span() const noexcept {
    const fsdp_timeline *recorded = fsdp_engine_timeline(core);
    return recorded == nullptr ? 0 : fsdp_timeline_now(recorded);
  }

  std::mutex mutex;
  // An EngineCall has the lock. Set with it.
  std::atomic<bool> in_call{false};
  // None yet, or a device without streams. With the lock; step_stream.cpp
  std::optional<c10::Stream> step_stream;
  Provider provider;
  fsdp_engine *core = nullptr;
  // Owned until the recording is taken; null: none was started. The core writes
  // into it until it is full. Set with the lock, freed with the GIL.
  fsdp_timeline *timeline = nullptr;
  std::vector<int64_t> mark_times;  // of the timeline that was taken last
  std::vector<Unit *> units;        // not owned; each removes itself
  // Of this iteration: the first call that has the input made by a node. See
  // Note [Leaving a unit in backward].
  std::unordered_map<const torch::autograd::Node *, std::weak_ptr<InputCall>>
      input_users;
  // Units whose reductions were issued and that are followed; see
  // Note [Following reductions].
  std::vector<std::weak_ptr<Unit>> reduced;
  bool has_faces = false;  // modules of some unit see other parameters
  // Their plain parameters are registered, from the first gradient of a
  // backward to its end.
  std::atomic<bool> shows_plain{false};
  bool shows_kept = false;  // of some unit, what it keeps is registered. GIL.
  std::string split_unit;   // Note [Split backward]; empty: none was missed
  std::atomic<bool> is_aborted{false};
  std::atomic<bool> has_abort_reason{false};
  std::shared_ptr<Offload> offload;  // null until a forward wants it
};

// engine_groups.cpp: all groups of the engine that have several ranks, each
// once.
std::vector<Group *> groups_of(const Engine &engine);
// The most that a rank hands to the others in one of the unit's collectives.
int64_t call_nbytes_of(const Unit &unit);

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;

// Memory of the core's that tensors show for a while.
//
// Note [Lent memory]
// The user may hold such a tensor for longer than the core has the memory.
// Parameters are empty then, and reading them is an error, as in FSDP1.
// Gradients must last: before their memory goes, whoever else shows it gets a
// copy, which the storage owns from then on.
// Torch may also move what a storage holds (share_memory_()): the core's memory
// is then brought up to date, and shown again.
struct Lent {
  StoragePtr storage;    // null until the memory is shown for the first time
  void *data = nullptr;  // null: it shows nothing
  int64_t nbytes = 0;
};

// A tensor that the unit has left to the user: Note [Gradients of the user].
class LeftTensor {
 public:
  void leave(at::Tensor &tensor);   // lets go of it; an undefined one: nothing
  void recall(at::Tensor &tensor);  // sets it again if it still exists

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> left_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

struct Segment {
  const fsdp_segment *layout = nullptr;  // borrowed
  at::ScalarType master = at::ScalarType::Undefined;
  at::ScalarType compute = at::ScalarType::Undefined;
  at::ScalarType reduce = at::ScalarType::Undefined;
  at::ScalarType grad = at::ScalarType::Undefined;  // of grad_shard
  at::ScalarType held = at::ScalarType::Undefined;  // of unsharded_grad
  int64_t spare_numel = 0;  // behind what is gathered; of columns
  bool wants_grad = false;  // some parameter requires grad now
  at::Tensor shard;         // [shard_numel], master
  at::Tensor grad_shard;  // likewise, grad; undefined until the first reduction
  at::Tensor earlier_grad;  // of earlier backwards, while followed
  // While grad_shard is the user's: the flat one, or the storage of others.
  LeftTensor left_grad;
  c10::weak_intrusive_ptr<c10::StorageImpl> left_storage{StoragePtr()};
  int64_t left_begin = 0;
  // See Note [Sharded gradients of a unit by rows].
  at::Tensor next_grad;
  at::Tensor idle_grad;
  at::Tensor flat_param;  // use_orig_params=False
  // The shard's own, if a lone rank has it in the dtype of computation.
  StoragePtr unsharded;
  StoragePtr part;                 // null: the unit keeps no parts
  StoragePtr full;                 // on the unit's device
  StoragePtr full_on_host;         // null until a summon needs it
  Lent unsharded_grad;             // of no_sync
  Lent partial_grad;               // of no_sync(sharded=True)
  StoragePtr no_grad;              // empty; of idle views, null until then
  StoragePtr full_grad;            // of a summon with gradients
  at::Tensor flat_unsharded_grad;  // use_orig_params=False
  at::Tensor flat_partial_grad;    // likewise
};

// The DTensor that the user holds in the place of a parameter, and its
// gradient: see Note [Parameters by rows].
struct ShardedParam {
  at::Tensor param;
  StoragePtr storage;     // of `param`, which holds nothing
  at::Tensor local;       // its local tensor, a view of the shard
  at::Tensor grad;        // undefined until the first reduction
  at::Tensor grad_local;  // its local tensor, a view of the sharded gradient
  LeftTensor left_grad;
  LeftTensor left_grad_local;
  at::Tensor user_grad;       // local tensor of a gradient that the user set
  int64_t taken_version = 0;  // of that gradient, when the unit took it
  // The Python objects of `grad` and `grad_local`, borrowed, and how many
  // references each has while it is shown nowhere.
  struct _object *grad_objects[2] = {nullptr, nullptr};
  int64_t grad_references[2] = {0, 0};
  size_t grad_uses[2] = {0, 0};  // those of C++, likewise
};

// A piece of a parameter where a gather left it, and in the parameter.
struct ColumnCopy {
  at::Tensor source;
  at::Tensor target;
};

struct Param {
  at::Tensor tensor;
  // A DTensor, which modules see in the place of `tensor`, and its local
  // tensor, which shows what `tensor` does; see Note [Parallel parameters].
  // Undefined: they see `tensor`.
  at::Tensor parallel;
  at::Tensor parallel_local;
  std::vector<int64_t> sizes;
  bool is_extended = false;    // by rows: see Note [Extended parameters]
  bool is_arriving = false;    // likewise: gathered, not shown since
  bool is_gathered = false;    // likewise: its owner holds what was gathered
  int64_t shard_dim = 0;       // by rows: the dimension that is cut
  ShardedParam sharded_param;  // by rows
  int64_t segment = 0;
  fsdp_range in_param = {0, 0};
  fsdp_range in_shard = {0, 0};
  at::Tensor sharded;
  at::Tensor unsharded;
  at::Tensor part;         // of the small group; undefined: none is kept
  at::Tensor part_source;  // the same elements of `unsharded`
  // By columns: copies after a gather of shards, and of parts.
  std::vector<ColumnCopy> columns;
  std::vector<ColumnCopy> part_columns;
  at::Tensor full;
  at::Tensor full_on_host;
  at::Tensor grad;  // view of the sharded gradient
  LeftTensor left_grad;
  at::Tensor idle_grad;         // that view while there is no gradient
  at::Tensor unsharded_grad;    // view of the unsharded one
  at::Tensor partial_grad;      // view of the partial one
  at::Tensor hidden_grad;       // the user's, during forward
  at::Tensor full_grad;         // view of the summoned one, while it is open
  int64_t marked_version = 0;   // unit_views.cpp
  int64_t entered_version = 0;  // likewise; when its last forward began
  int num_same_writes = 0;      // likewise: by forwards, of the values it had
  // Likewise: see Note [Saved parameters].
  std::optional<c10::VariableVersion> whole_version;
  int64_t sharded_version = 0;
  bool required_grad = false;  // when show_requires_grad() looked last
  uint64_t replaced_at = 0;    // of the unit's replacements
  NodePtr accumulator;
  uintptr_t hook = 0;
  int expected_in = -1;  // graph task whose gradient the engine waits for

  // What autograd accumulates the gradient of.
  at::Tensor &leaf() { return parallel.defined() ? parallel : tensor; }
  const at::Tensor &leaf() const {
    return parallel.defined() ? parallel : tensor;
  }
  int64_t numel() const { return unsharded.numel(); }
  int64_t local_numel() const { return in_param.end - in_param.begin; }
};

// Where the user sees gradients: on a parameter or on a flat parameter.
struct GradPlace {
  at::Tensor *holder;
  Segment *segment;
  Param *param;           // nullptr: the holder is the segment's flat parameter
  bool had_grad = false;  // when this backward took it
  bool was_cleared = false;  // by who follows the unit, in this backward
};

// What hooks hold: the unit may die before the graph does.
struct UnitHandle {
  Unit *unit = nullptr;
};

// The user's communication hook: hook(state, grad[, output]). Needs the GIL.
struct ReduceHook;

// custom.cpp: the user's own collectives, and what the next one is about: of
// each segment all ranks' elements and this rank's.
struct CustomCalls;
using CustomPieces = std::vector<std::pair<at::Tensor, at::Tensor>>;

struct Unit : std::enable_shared_from_this<Unit> {
  Unit() = default;
  ~Unit();
  Unit(const Unit &) = delete;
  Unit &operator=(const Unit &) = delete;

  std::string name;
  std::string why_no_access;  // to a view of whole parameters while sharded
  // Of whole parameters: see Note [Emptied storages] in storage_views.cpp.
  std::unordered_set<const c10::StorageImpl *> sized_storages;
  c10::Device device{c10::DeviceType::CPU};
  bool use_orig_params = true;
  bool hides_params = false;  // Note [Hidden parameters] in unit_views.cpp
  bool offloads = false;  // shards are in host memory, the device is elsewhere
  bool cast_forward_inputs = false;
  bool cast_root_forward_inputs = false;
  int32_t param_dtype_code = -1;  // -1: no cast
  Group shard_group;
  Group replica_group;
  Group part_group;
  bool is_by_rows = false;
  fsdp_torch_face face = {};     // by rows; all null: the owner is gone
  fsdp_torch_watch watch = {};   // likewise of any unit; all null: nothing
  bool grads_are_left = false;   // see Note [Gradients of the user]
  bool grads_are_new = false;    // by rows: to be shown at the end of backward
  bool has_left_params = false;  // only graphs of earlier forwards have it
  std::vector<int64_t> block_numels;  // likewise; per use, or empty
  fsdp_unit_options settings = {};    // without what points somewhere
  fsdp_param_table *table = nullptr;
  fsdp_flat_layout *layout = nullptr;
  std::vector<int64_t> param_of_use;
  std::vector<Segment> segments;
  std::vector<Param> params;
  std::shared_ptr<Region> region;  // of the shards; null: none
  // Of all gradient accumulators; none on the CPU, or if they differ. hooks.cpp
  std::optional<c10::Stream> accumulator_stream;
  std::vector<GradPlace> grad_places;  // unit_grads.cpp
  uint64_t marked_version = 0;         // unit_views.cpp
  bool guards_saved = false;  // some backward of it made a graph (create_graph)
  bool shard_was_written = false;  // likewise: no gather waits for it yet
  uint64_t num_replaced = 0;       // parameters for which the user put others
  // A forward whose backward is to come used a frozen parameter: of that use
  // autograd says nothing, also if another forward trains it.
  bool ran_frozen = false;
  fsdp_unit *core = nullptr;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<UnitHandle> handle;
  int graph_task = -1;  // in which the expected gradients were counted
  // hooks.cpp: the newest; and how many of them no backward has reached, in
  // this life of the engine. Note [What a backward needs] in unit_grads.cpp
  std::weak_ptr<ForwardCall> forward_call;
  std::shared_ptr<int64_t> num_awaited = std::make_shared<int64_t>(0);
  std::shared_ptr<ReduceHook> reduce_hook;  // null: none
  std::shared_ptr<CustomCalls> custom;      // likewise
  CustomPieces custom_pieces;
  std::shared_ptr<Follower> follower;   // likewise
  std::shared_ptr<fsdp_event> reduced;  // following.cpp; null until needed
  // Forward calls whose inputs are hooked; see Note [Leaving a unit in
  // backward].
  std::vector<std::weak_ptr<InputCall>> input_calls;
  bool ran_as_root = false;  // in its last forward; a recomputation follows it
  int64_t offload_min_nbytes = 0;  // of saved tensors; 0: they stay
  int64_t offload_keep_last = 1;
};

// storage_views.cpp: views over storages that come and go.
StoragePtr empty_storage(c10::Device device);
// A view that may lie over a storage that holds nothing yet.
at::Tensor make_view(const StoragePtr &storage, c10::DispatchKeySet keys,
                     at::ScalarType dtype, at::IntArrayRef sizes,
                     int64_t offset);
// Likewise, over the storage of another one and of its dtype.
at::Tensor make_strided_view(const at::Tensor &like, at::IntArrayRef sizes,
                             at::IntArrayRef strides, int64_t offset);
// Points the view, a tensor of ours, at another storage.
void show_at(const at::Tensor &view, const StoragePtr &storage, int64_t offset);
// Points the storage at memory that somebody else owns.
void attach(c10::StorageImpl &storage, void *data, int64_t nbytes);
// Keeps the sizes of the storages of whole parameters when they are emptied.
void note_sized_storages(Unit &unit);
// Before the first summon of hidden parameters: what refuses them afterwards.
void refuse_hidden_params(Unit &unit);
// Empties it; reading it is an error that names the unit.
void detach(const Unit &unit, c10::StorageImpl &storage);
// lent_memory.cpp: see Note [Lent memory].
void lend(Lent &lent, c10::Device device, void *data, int64_t nbytes);
// Brings what was moved back into the core's memory. On the current stream.
void bring_back(c10::StorageImpl &storage, void *data);
// Gives whoever else shows the memory a copy. `views`: all of ours over it,
// which are gone then. Cannot fail: without memory for a copy, reading is an
// error.
void disown(const Unit &unit, Lent &lent,
            const std::vector<at::Tensor *> &views) noexcept;
// The same, and the memory goes.
void end_loan(const Unit &unit, Lent &lent,
              const std::vector<at::Tensor *> &views) noexcept;
// The same for memory that was lent for a call. Our tensors over it are gone.
void end_loan(const Unit &unit, const StoragePtr &lent) noexcept;
// Whether it points at memory; its size does not tell.
inline bool has_memory(c10::StorageImpl &storage) {
  return storage._mutable_data_ptr_no_checks().get() != nullptr;
}
// nullptr: it has none.
inline const c10::StorageImpl *storage_of(const at::Tensor &tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
// Whether whole parameters are the shard itself.
inline bool is_resident(const Segment &segment) {
  return segment.unsharded.get() == storage_of(segment.shard);
}
inline StoragePtr storage_ptr_of(const at::Tensor &tensor) {
  return tensor.unsafeGetTensorImpl()
      ->unsafe_storage()
      .getWeakStorageImpl()
      .lock();
}
inline bool is_over(const at::Tensor &tensor, const c10::StorageImpl *storage) {
  return storage_of(tensor) == storage;
}
// The dispatch keys of a plain tensor on `device`.
c10::DispatchKeySet keys_of(c10::Device device);
// Options of the unit's shards and sharded gradients.
at::TensorOptions shard_options(const Unit &unit, at::ScalarType dtype);
// Raises: the user replaced `what` by `value`.
[[noreturn]] void refuse(const Unit &unit, const std::string &what,
                         const at::Tensor &value, const std::string &remedy);
Unit &unit_of(void *owner);

// grad_shards.cpp: leaves gradients to the user, and takes back what is there.
void leave_grads(Unit &unit);
void recall_grads(Unit &unit);
// Makes the segment's sharded gradient if there is none:
// zeros, unless the next work on it replaces all of them.
void ensure_grad_shard(Unit &unit, Segment &segment, bool is_replaced);
// Whether anybody has a tensor over its memory that is none of ours; of ours,
// ask their own counts.
bool is_grad_shard_held(const Unit &unit, const Segment &segment);
// Moves it to new memory, with its values: who holds the old one keeps it.
void renew_grad_shard(const Unit &unit, Segment &segment);
// Lets go of the unit's.
void drop_grad_shards(Unit &unit);

// unit_views.cpp: the functions of the port that show parameters.
void add_view_ops(fsdp_view_ops *ops);
// Makes the view tables. The shards exist.
void make_views(Unit &unit);
// Points every parameter at its sharded view.
void show_sharded(Unit &unit);
// A forward of the unit begins; and a parameter that the user wrote since,
// whose values are dropped when the unit is resharded (nullptr: none).
void mark_entry(Unit &unit);
const Param *find_written(Unit &unit);
// Forward sees whole parameters; a sharded gradient on them is of another
// shape, which torch.compile refuses. It stands aside from pre_forward to
// post_forward.
void hide_grads(Unit &unit);
void show_hidden_grads(Unit &unit);
// Makes the leaves of autograd require grad where the user has set it, on what
// the user sees: the sharded parameter or, where it is kept, the whole one.
void show_requires_grad(Unit &unit);
// The same, and tells the core which segments a backward will need. In a
// forward.
void follow_requires_grad(Unit &unit);
// Copies what sharded parameters have elsewhere, by `param.data = x`, into the
// shards; the next take_params tells the core.
void take_written_shards(Unit &unit);
// Makes `tensor` the unit's parameter in the place of the one before: its value
// goes into the shard, its memory away.
void replace_param(Unit &unit, size_t index, const at::Tensor &tensor);

// unit_grads.cpp: the functions of the port that show gradients.
void add_grad_ops(fsdp_view_ops *ops);
inline size_t index_of(const Unit &unit, const Segment &segment) {
  return static_cast<size_t>(&segment - unit.segments.data());
}
// Whether the core reduces gradients of the segment.
inline bool is_trainable(const Unit &unit, const Segment &segment) {
  return fsdp_unit_is_trainable(unit.core,
                                static_cast<int64_t>(index_of(unit, segment)));
}

// For what follows the unit's reductions: shows the sharded gradients, and
// takes them back. If all of them were cleared, their memory is freed.
void show_followed_grads(Unit &unit);
void take_followed_grads(Unit &unit);

// columns.cpp: see Note [Parameters by columns].
bool is_by_columns(const Unit &unit, const Param &param);
// Where the whole parameter lies in the segment's memory, in elements.
int64_t columns_offset(const Segment &segment);
// What makes the parameter of the pieces of so many ranks.
std::vector<ColumnCopy> column_copies(const Unit &unit, const Param &param,
                                      int64_t num_ranks);
// Makes the parameters that are cut so of what was gathered.
void show_columns(Unit &unit);
// A gradient of the parameter as its pieces lie in memory.
at::Tensor in_memory_order(const Unit &unit, const Param &param,
                           const at::Tensor &grad);
// The elements of a part of the parameter, padding included; see Note [Parts of
// a unit] in runtime/engine.h.
int64_t part_numel_of(const Unit &unit, const Param &param);
void make_part_views(Unit &unit);
// Points the views of parts at `data`; fills them from the whole parameters.
void attach_parts(Unit &unit, void *const *data);
void copy_parts(Unit &unit);

// rows.cpp: see Note [Parameters by rows].
// Sizes of this rank's rows.
std::vector<int64_t> local_sizes(const Unit &unit, const Param &param);
// Whether the sharded parameter has a gradient, which is in the shard then.
bool take_sharded_grad(Unit &unit, Param &param);
void free_sharded_grad(Unit &unit, Param &param);
// Whether it has one that somebody else holds, or that a parameter shows.
bool is_sharded_grad_held(const Param &param);
// Shows the reduced gradients of the unit; not with the engine's lock.
void show_sharded_grads(Unit &unit);
// Brings what the user wrote elsewhere into the shard. Whether there was any.
bool take_replaced_locals(Unit &unit);
// Throws the Python exception that is set, across threads of autograd.
[[noreturn]] void throw_python_error();
// The local part of a gradient of a parallel parameter, placed like that.
at::Tensor local_grad(Unit &unit, size_t index, const at::Tensor &grad);
// At the first gradient of a backward and at its end; neither with the engine's
// lock.
void open_rows(Engine &engine);
void close_rows(Engine &engine, bool has_failed = false);
// Before the first gradient of a backward: an error if the user has replaced a
// parameter that a forward left shown. Not with the engine's lock.
void check_left_shown(Engine &engine);
// Raises that error, FSDP1's: the graph has what was there before.
[[noreturn]] void refuse_change(const Unit &unit, const std::string &param);
// hooks.cpp. Takes gradients that were put on plain parameters; throws where
// that was not possible (Note [Split backward]).
void take_assigned_grads(Engine &engine);
// Registers in tensor parallel units what they keep for a backward, and plain
// parameters in those that keep nothing. GIL. 0, or -1 with an exception.
int show_kept_parallel(Engine &engine);
// Registers the sharded parameters of units that keep whole ones outside of a
// step, but for those that the user unsharded. GIL. 0, or -1 with an exception.
int hide_rows(Engine &engine);
// close_rows, if the engine is aborted: after a backward that raised.
void close_failed_rows(Engine &engine);
// engine_groups.cpp. Where a device thread of autograd ran a backward that
// raised, the caller gets the exception a moment before that thread drops the
// graph task, which is what tells the engine (Note [End of backward]). Without
// the GIL and the engine's lock.
void await_end_of_backward(Engine &engine);

// extension.cpp: see Note [Extended parameters].
void add_extension_ops(fsdp_view_ops *ops);
void show_extended(Unit &unit);

// offload.cpp: with the engine's lock, where a forward of the unit begins.
void enter_offload(Unit &unit);

// reduce_hook.cpp
void add_hook_ops(fsdp_view_ops *ops);

// custom.cpp
void add_custom_ops(fsdp_view_ops *ops);

// following.cpp
void add_following_ops(fsdp_view_ops *ops);
// Tells the core whether somebody follows the unit's reductions. Cheap.
void note_followers(Unit &unit);
// Runs what follows the reductions that were issued. Not with the engine's
// lock: it runs Python.
void follow_reductions(Engine &engine);

// backward_calls.cpp: see Note [Before a backward]. Not for those that end.
void note_engine(const std::shared_ptr<Engine> &engine);

// hooks.cpp
// Opens the backward of the graph task that runs, unless it is open. With the
// engine's lock.
void open_backward(const std::shared_ptr<Engine> &engine);
// Makes the grad accumulators of trainable parameters and hooks them; the
// parameters are unsharded, because an accumulator remembers sizes and dtype.
void hook_accumulators(Unit &unit);
void unhook_accumulator(Param &param);
void unhook_accumulators(Unit &unit);
// unit.cpp. Its parameters are others' from now on.
void leave_params(Unit &unit);
// input_hooks.cpp: see Note [Leaving a unit in backward].
// How many of the unit's forward calls will have their inputs' gradients
// computed in the running graph task.
int64_t count_input_calls(Unit &unit);
// Tells the unit that has the input made by `node` that its gradient has come,
// ahead of its own hook: a unit that made it must not start before.
void receive_input(Engine &engine, const torch::autograd::Node *node);
// Whether the running graph task computes what `node` receives.
bool will_receive(torch::autograd::Node *node);

}  // namespace fsdp_torch

struct fsdp_torch_unit {
  std::shared_ptr<fsdp_torch::Unit> self;
};

struct fsdp_torch_engine {
  std::shared_ptr<fsdp_torch::Engine> self;
};
