// Note [Saved tensors]
// Around the forward of the outermost unit that asked for it stand hooks for
// saved tensors. Torch calls their two functions with the GIL, for each tensor
// that autograd saves and reads; ours are C functions. What they keep is a
// SavedTensor: either the tensor, or its shape over a storage that the core
// brings to the host and back (Note [Groups of saved memory] in offload.h).
// Storages are what is copied, as it is they that hold memory: several saved
// tensors are often views of one.
//
// Not copied: parameters and what requires grad on its own; small storages;
// memory that no allocator gave, such as a unit's unsharded parameters; tensors
// of subclasses. Hooks of somebody else come first: where some stand already,
// we add none, and those inside (activation checkpointing) hide ours, so that
// only what checkpointing itself saves is copied. A forward in backward, which
// is a recomputation, saves nothing on the host.
//
// Torch does not look at version counters of tensors that hooks keep. We do, so
// that a saved tensor that was changed in place is an error, as without hooks.
#include "torch/offload.hpp"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "torch/bridge.h"
#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

// Throws what `status` says.
void check_offload(fsdp_status status, const fsdp_error &error) {
  if (status != FSDP_OK) throw_error(error);
}

bool is_plain(const at::Tensor &tensor) {
  return tensor.has_storage() && tensor.layout() == at::kStrided &&
         !tensor.is_quantized() && !tensor.is_nested() && !tensor.is_conj() &&
         !tensor.is_neg() &&
         (tensor.key_set() & at::kTensorSubclassLike).empty();
}

// Parameters, and views of them: they are alive anyway.
bool requires_grad_on_its_own(const at::Tensor &tensor) {
  if (tensor.is_leaf()) return tensor.requires_grad();
  if (!tensor.is_view()) return false;
  const at::TensorBase &base = tensor._base();
  return base.is_leaf() && base.requires_grad();
}

}  // namespace

struct OffloadCalls {
  static bool is_alone(void * /*context*/, void *token) {
    return static_cast<SavedStorage *>(token)->storage.use_count() == 1;
  }

  static void let_go(void *context, void *token) {
    auto &self = *static_cast<Offload *>(context);
    auto &saved = *static_cast<SavedStorage *>(token);
    self.known_.erase(saved.storage.get());
    self.freed_.push_back(std::move(saved.storage));
    saved.storage.reset();
  }

  static fsdp_status make(void *context, void *token, void **data,
                          fsdp_error *error) {
    GUARDED(error) {
      auto &self = *static_cast<Offload *>(context);
      auto &saved = *static_cast<SavedStorage *>(token);
      const c10::DeviceGuard guard(self.device_);
      saved.storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), saved.nbytes,
          c10::GetAllocator(self.device_.type()), /*resizable=*/true);
      self.known_.emplace(saved.storage.get(), &saved);
      saved.num_unread = saved.num_tensors;
      *data = saved.storage->mutable_data();
      return FSDP_OK;
    };
  }

  static void forget(void *context, void *token) {
    auto &self = *static_cast<Offload *>(context);
    auto *saved = static_cast<SavedStorage *>(token);
    if (saved->storage) let_go(context, token);
    self.forgotten_.emplace_back(saved);
  }
};

template <typename Body>
auto Offload::locked(Body &&body) {
  std::vector<StoragePtr> freed;
  std::vector<std::unique_ptr<SavedStorage>> forgotten;
  const std::lock_guard<std::mutex> lock(mutex_);
  struct Take {
    Offload &self;
    std::vector<StoragePtr> &freed;
    std::vector<std::unique_ptr<SavedStorage>> &forgotten;
    ~Take() {
      freed.swap(self.freed_);
      forgotten.swap(self.forgotten_);
    }
  } const take{*this, freed, forgotten};
  return body();
}

Offload::Offload(Provider &provider)
    : ops_(provider.ops()), device_(provider.device()) {
  const fsdp_offload_calls calls = {this, OffloadCalls::is_alone,
                                    OffloadCalls::let_go, OffloadCalls::make,
                                    OffloadCalls::forget};
  FSDP_LOCAL_ERROR(error);
  check_offload(fsdp_offload_create(&ops_, &calls, FSDP_OFFLOAD_CHUNK_NBYTES,
                                    &core_, &error),
                error);
}

Offload::~Offload() {
  fsdp_offload_destroy(core_);
}

void Offload::enter(const Unit &unit) {
  locked([&] {
    FSDP_LOCAL_ERROR(error);
    if (outermost_ == nullptr) {
      fsdp_offload_keep_last(core_, unit.offload_keep_last);
    }
    check_offload(fsdp_offload_enter(core_, &error), error);
  });
  if (outermost_ == nullptr) {
    min_nbytes_ = unit.offload_min_nbytes;
    outermost_ = &unit;
  }
}

void Offload::leave(const Unit &unit) noexcept {
  if (outermost_ != &unit) return;
  outermost_ = nullptr;
  // What fails stays on the device until the next forward.
  locked([&] { FSDP_IGNORE(fsdp_offload_leave(core_, nullptr)); });
}

void Offload::end_backward() noexcept {
  locked([&] { FSDP_IGNORE(fsdp_offload_end_backward(core_, nullptr)); });
}

SavedStorage *Offload::add(const at::Tensor &tensor) {
  if (!is_plain(tensor) || tensor.device() != device_ ||
      requires_grad_on_its_own(tensor)) {
    return nullptr;
  }
  c10::StorageImpl *impl =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto nbytes = static_cast<int64_t>(impl->nbytes());
  if (nbytes < min_nbytes_ || impl->allocator() == nullptr) return nullptr;
  return locked([&] {
    const auto found = known_.find(impl);
    if (found != known_.end()) {
      SavedStorage &saved = *found->second;
      fsdp_offload_add_again(core_, saved.item);
      saved.num_tensors++;
      saved.num_unread++;
      return &saved;
    }
    auto saved = std::make_unique<SavedStorage>();
    saved->storage = StoragePtr::reclaim_copy(impl);
    saved->nbytes = nbytes;
    saved->num_tensors = 1;
    FSDP_LOCAL_ERROR(error);
    check_offload(fsdp_offload_add(core_, saved.get(), impl->data(), nbytes,
                                   &saved->item, &error),
                  error);
    known_.emplace(impl, saved.get());
    return saved.release();  // the core forgets it
  });
}

StoragePtr Offload::read(SavedStorage &saved) {
  return locked([&] {
    FSDP_LOCAL_ERROR(error);
    check_offload(fsdp_offload_need(core_, saved.item, &error), error);
    StoragePtr storage = saved.storage;
    if (saved.num_unread > 0 && --saved.num_unread == 0) {
      fsdp_offload_spare(core_, saved.item);
    }
    return storage;
  });
}

void Offload::drop(SavedStorage &saved) noexcept {
  locked([&] {
    if (--saved.num_tensors == 0) fsdp_offload_drop(core_, saved.item);
  });
}

fsdp_offload_stats Offload::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  fsdp_offload_stats stats = {};
  fsdp_offload_get_stats(core_, &stats);
  return stats;
}

namespace {

constexpr const char *kCapsuleName = "fsdp_c.SavedTensor";

// What a graph keeps of one saved tensor.
class SavedTensor {
 public:
  SavedTensor(std::shared_ptr<Engine> engine, const at::Tensor &tensor)
      : engine_(std::move(engine)),
        version_(tensor.unsafeGetTensorImpl()->version_counter()),
        expected_(version_.current_version()),
        saved_(engine_->offload->add(tensor)) {
    if (saved_ == nullptr) {
      // By keeping its own output, the graph would keep itself alive.
      kept_ = tensor.is_leaf() ? tensor : tensor.detach();
      return;
    }
    sizes_ = tensor.sizes().vec();
    strides_ = tensor.strides().vec();
    offset_ = tensor.storage_offset();
    keys_ = tensor.key_set();
    dtype_ = tensor.dtype();
  }
  ~SavedTensor() {
    if (saved_ != nullptr) engine_->offload->drop(*saved_);
  }
  SavedTensor(const SavedTensor &) = delete;
  SavedTensor &operator=(const SavedTensor &) = delete;

  at::Tensor read() const {
    if (version_.current_version() != expected_) refuse_changed();
    if (saved_ == nullptr) return kept_;
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(engine_->offload->read(*saved_)), keys_, dtype_);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset_);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_);
    return tensor;
  }

 private:
  [[noreturn]] void refuse_changed() const {
    throw std::runtime_error(c10::str(
        "one of the variables needed for gradient computation has been "
        "modified by an inplace operation: a saved tensor of shape ",
        saved_ == nullptr ? kept_.sizes() : at::IntArrayRef(sizes_),
        " is at version ", version_.current_version(), "; expected version ",
        expected_,
        " instead. It was saved under fsdp_c.offload_activations(); use the "
        "operation that is not in-place"));
  }

  std::shared_ptr<Engine> engine_;
  c10::VariableVersion version_;
  uint32_t expected_;
  SavedStorage *saved_;  // null: kept
  at::Tensor kept_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  int64_t offset_ = 0;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
};

void destroy_capsule(PyObject *capsule) {
  delete static_cast<SavedTensor *>(
      PyCapsule_GetPointer(capsule, kCapsuleName));
}

constexpr const char *kEngineName = "fsdp_c.OffloadingEngine";

void destroy_engine_capsule(PyObject *capsule) {
  delete static_cast<std::shared_ptr<Engine> *>(
      PyCapsule_GetPointer(capsule, kEngineName));
}

// Whether hooks of ours may stand around a forward that begins now.
bool may_hook() {
  return at::SavedTensorDefaultHooks::is_enabled() &&
         at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

c10::SafePyObject safe(PyObject *object) {
  return {Py_NewRef(object), getPyInterpreter()};
}

}  // namespace

// With the engine's lock, where a unit's forward begins.
void enter_offload(Unit &unit) {
  Engine &engine = *unit.engine;
  const bool is_running = engine.offload && engine.offload->is_running();
  if (!is_running && (unit.offload_min_nbytes == 0 || unit.device.is_cpu() ||
                      !c10::GradMode::is_enabled() || !may_hook())) {
    return;
  }
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  if (!engine.offload) {
    engine.offload = std::make_shared<Offload>(engine.provider);
  }
  engine.offload->enter(unit);
}

}  // namespace fsdp_torch

extern "C" {

void fsdp_torch_unit_set_offload(fsdp_torch_unit *unit, int64_t min_nbytes,
                                 int64_t keep_last) noexcept {
  unit->self->offload_min_nbytes = min_nbytes;
  unit->self->offload_keep_last = keep_last;
}

bool fsdp_torch_unit_begins_offload(const fsdp_torch_unit *unit) noexcept {
  const fsdp_torch::Unit &self = *unit->self;
  return self.engine && self.engine->offload &&
         self.engine->offload->is_outermost(self);
}

PyObject *fsdp_torch_offload_context(const fsdp_torch_unit *unit) {
  HANDLE_TH_ERRORS
  auto engine =
      std::make_unique<std::shared_ptr<fsdp_torch::Engine>>(unit->self->engine);
  PyObject *capsule = PyCapsule_New(engine.get(), fsdp_torch::kEngineName,
                                    fsdp_torch::destroy_engine_capsule);
  if (capsule != nullptr) (void)engine.release();
  return capsule;
  END_HANDLE_TH_ERRORS
}

int fsdp_torch_push_saved_hooks(PyObject *pack, PyObject *unpack) {
  HANDLE_TH_ERRORS
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks(fsdp_torch::safe(pack),
                                          fsdp_torch::safe(unpack));
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

void fsdp_torch_pop_saved_hooks(void) noexcept {
  at::SavedTensorDefaultHooks::pop_hooks();
}

PyObject *fsdp_torch_offload_pack(PyObject *context, PyObject *tensor) {
  HANDLE_TH_ERRORS
  const auto *engine = static_cast<std::shared_ptr<fsdp_torch::Engine> *>(
      PyCapsule_GetPointer(context, fsdp_torch::kEngineName));
  if (engine == nullptr) return nullptr;
  auto saved = std::make_unique<fsdp_torch::SavedTensor>(
      *engine, THPVariable_Unpack(tensor));
  PyObject *capsule = PyCapsule_New(saved.get(), fsdp_torch::kCapsuleName,
                                    fsdp_torch::destroy_capsule);
  if (capsule != nullptr) (void)saved.release();
  return capsule;
  END_HANDLE_TH_ERRORS
}

PyObject *fsdp_torch_offload_unpack(PyObject *packed) {
  HANDLE_TH_ERRORS
  const auto *saved = static_cast<fsdp_torch::SavedTensor *>(
      PyCapsule_GetPointer(packed, fsdp_torch::kCapsuleName));
  if (saved == nullptr) return nullptr;
  at::Tensor tensor;
  {
    const pybind11::gil_scoped_release no_gil;
    tensor = saved->read();
  }
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

void fsdp_torch_engine_offload_stats(const fsdp_torch_engine *engine,
                                     fsdp_offload_stats *stats) noexcept {
  *stats = {};
  const fsdp_torch::Engine &self = *engine->self;
  if (self.offload) *stats = self.offload->stats();
}

}  // extern "C"
