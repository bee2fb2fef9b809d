// The c10d backends of the device: collectives in stream order, over gloo.
//
// A group has a stream of its own, as NCCL's has. A collective is a task of it,
// which waits for the stream that was current and runs gloo's collective over
// the same memory; Work::wait makes the current stream wait. That is "simccl".
// "simgloo" stands for gloo on a GPU: its backend has gloo's name, and the host
// waits in Work::wait, too.
#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "sim.hpp"
#include "sim_module.hpp"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
template <typename T>
using Ptr = c10::intrusive_ptr<T>;

Tensors aliases(const Tensors &tensors) {
  Tensors out;
  out.reserve(tensors.size());
  for (const at::Tensor &each : tensors) {
    out.push_back(is_ours(each) ? host_alias(each) : each);
  }
  return out;
}

TensorLists aliases(const TensorLists &lists) {
  TensorLists out;
  out.reserve(lists.size());
  for (const Tensors &each : lists) out.push_back(aliases(each));
  return out;
}

void append(Tensors &all, const Tensors &tensors) {
  all.insert(all.end(), tensors.begin(), tensors.end());
}

void append(Tensors &all, const TensorLists &lists) {
  for (const Tensors &each : lists) append(all, each);
}

class StreamWork final : public c10d::Work {
 public:
  StreamWork(sim_stream *stream, c10::Stream c10_stream, uint64_t ticket,
             bool blocks_host, Tensors kept, Tensors outputs)
      : stream_(stream),
        ticket_(ticket),
        blocks_host_(blocks_host),
        kept_(std::move(kept)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{device()})) {
    const c10::StreamGuard guard(c10_stream);
    future_->markCompleted(c10::IValue(std::move(outputs)));
  }
  bool isCompleted() override { return sim_stream_is_done(stream_, ticket_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    if (blocks_host_) sim_stream_synchronize(stream_, ticket_);
    sim_stream_wait(current_stream(), stream_, ticket_);
    kept_.clear();  // from here on the current stream keeps the order
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  sim_stream *stream_;
  uint64_t ticket_;
  bool blocks_host_;
  Tensors kept_;  // the tensors, until somebody waits
  Ptr<c10::ivalue::Future> future_;
};

class StreamBackend final : public c10d::Backend {
 public:
  StreamBackend(Ptr<c10d::Backend> gloo, bool is_like_gloo)
      : Backend(gloo->getRank(), gloo->getSize()),
        is_like_gloo_(is_like_gloo),
        gloo_(std::move(gloo)),
        c10_stream_(new_stream()),
        stream_(stream_of(c10_stream_.id())) {}

  // Tasks of the stream use the gloo group until they are done.
  ~StreamBackend() override {
    sim_stream_synchronize(stream_, sim_stream_last(stream_));
  }

  const std::string getBackendName() const override {
    return is_like_gloo_ ? "gloo" : "simccl";
  }
  // With the group's time limit, as NCCL's have it.
  Ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }

  // Between the two, calls are one task that starts all of them, then waits:
  // two ranks that send first would wait for each other otherwise.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    Tensors none;
    return enqueue_all(std::exchange(coalesced_, {}), none, none);
  }

  WorkPtr broadcast(Tensors &tensors,
                    const c10d::BroadcastOptions &options) override {
    return later(tensors, tensors, [=](c10d::Backend &gloo, Tensors &t) {
      return gloo.broadcast(t, options);
    });
  }
  WorkPtr allreduce(Tensors &tensors,
                    const c10d::AllreduceOptions &options) override {
    return later(tensors, tensors, [=](c10d::Backend &gloo, Tensors &t) {
      return gloo.allreduce(t, options);
    });
  }
  WorkPtr allreduce_coalesced(
      Tensors &tensors,
      const c10d::AllreduceCoalescedOptions &options) override {
    return later(tensors, tensors, [=](c10d::Backend &gloo, Tensors &t) {
      return gloo.allreduce_coalesced(t, options);
    });
  }
  WorkPtr reduce(Tensors &tensors,
                 const c10d::ReduceOptions &options) override {
    return later(tensors, tensors, [=](c10d::Backend &gloo, Tensors &t) {
      return gloo.reduce(t, options);
    });
  }
  WorkPtr allgather(TensorLists &outputs, Tensors &inputs,
                    const c10d::AllgatherOptions &options) override {
    return later(outputs, inputs,
                 [=](c10d::Backend &gloo, TensorLists &to, Tensors &from) {
                   return gloo.allgather(to, from, options);
                 });
  }
  WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                          const c10d::AllgatherOptions &options) override {
    return later(Tensors{output}, Tensors{input},
                 [=](c10d::Backend &gloo, Tensors &to, Tensors &from) {
                   return gloo._allgather_base(to[0], from[0], options);
                 });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors &outputs, Tensors &inputs,
      const c10d::AllgatherOptions &options) override {
    return later(
        outputs, inputs, [=](c10d::Backend &gloo, Tensors &to, Tensors &from) {
          return gloo.allgather_into_tensor_coalesced(to, from, options);
        });
  }
  WorkPtr gather(TensorLists &outputs, Tensors &inputs,
                 const c10d::GatherOptions &options) override {
    return later(outputs, inputs,
                 [=](c10d::Backend &gloo, TensorLists &to, Tensors &from) {
                   return gloo.gather(to, from, options);
                 });
  }
  WorkPtr scatter(Tensors &outputs, TensorLists &inputs,
                  const c10d::ScatterOptions &options) override {
    return later(outputs, inputs,
                 [=](c10d::Backend &gloo, Tensors &to, TensorLists &from) {
                   return gloo.scatter(to, from, options);
                 });
  }
  WorkPtr reduce_scatter(Tensors &outputs, TensorLists &inputs,
                         const c10d::ReduceScatterOptions &options) override {
    return later(outputs, inputs,
                 [=](c10d::Backend &gloo, Tensors &to, TensorLists &from) {
                   return gloo.reduce_scatter(to, from, options);
                 });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor &output, at::Tensor &input,
      const c10d::ReduceScatterOptions &options) override {
    return later(Tensors{output}, Tensors{input},
                 [=](c10d::Backend &gloo, Tensors &to, Tensors &from) {
                   return gloo._reduce_scatter_base(to[0], from[0], options);
                 });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors &outputs, Tensors &inputs,
      const c10d::ReduceScatterOptions &options) override {
    return later(
        outputs, inputs, [=](c10d::Backend &gloo, Tensors &to, Tensors &from) {
          return gloo.reduce_scatter_tensor_coalesced(to, from, options);
        });
  }
  WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input,
                        std::vector<int64_t> &output_splits,
                        std::vector<int64_t> &input_splits,
                        const c10d::AllToAllOptions &options) override {
    return later(Tensors{output}, Tensors{input},
                 [=](c10d::Backend &gloo, Tensors &to, Tensors &from) {
                   auto mine = output_splits;
                   auto theirs = input_splits;
                   return gloo.alltoall_base(to[0], from[0], mine, theirs,
                                             options);
                 });
  }
  WorkPtr alltoall(Tensors &outputs, Tensors &inputs,
                   const c10d::AllToAllOptions &options) override {
    return later(outputs, inputs,
                 [=](c10d::Backend &gloo, Tensors &to, Tensors &from) {
                   return gloo.alltoall(to, from, options);
                 });
  }
  WorkPtr send(Tensors &tensors, int rank, int tag) override {
    return later(tensors, tensors, [=](c10d::Backend &gloo, Tensors &t) {
      return gloo.send(t, rank, tag);
    });
  }
  WorkPtr recv(Tensors &tensors, int rank, int tag) override {
    return later(tensors, tensors, [=](c10d::Backend &gloo, Tensors &t) {
      return gloo.recv(t, rank, tag);
    });
  }
  // The host waits.
  WorkPtr barrier(const c10d::BarrierOptions &options) override {
    Tensors none;
    WorkPtr work = later(none, none, [=](c10d::Backend &gloo, Tensors &) {
      return gloo.barrier(options);
    });
    sim::synchronize(stream_);
    return work;
  }

 private:
  template <typename Outputs, typename Run>
  WorkPtr later(const Outputs &outputs, const Outputs &, Run run)
    requires(std::is_invocable_v<Run, c10d::Backend &, Outputs &>)
  {
    return start(outputs, Tensors{},
                 [run, to = aliases(outputs)](c10d::Backend &gloo) mutable {
                   return run(gloo, to);
                 });
  }

  template <typename Outputs, typename Inputs, typename Run>
  WorkPtr later(const Outputs &outputs, const Inputs &inputs, Run run)
    requires(std::is_invocable_v<Run, c10d::Backend &, Outputs &, Inputs &>)
  {
    return start(
        outputs, inputs,
        [run, to = aliases(outputs), from = aliases(inputs)](
            c10d::Backend &gloo) mutable { return run(gloo, to, from); });
  }

  template <typename Outputs, typename Inputs, typename Run>
  WorkPtr start(const Outputs &outputs, const Inputs &inputs, Run run) {
    Tensors results;
    append(results, outputs);
    Tensors kept = results;
    append(kept, inputs);
    if (is_coalescing_) {
      coalesced_.emplace_back(std::move(run));
      append(coalesced_tensors_, kept);
      return c10::make_intrusive<StreamWork>(stream_, c10_stream_, 0,
                                             is_like_gloo_, Tensors{},
                                             std::move(results));
    }
    std::vector<Call> calls;
    calls.emplace_back(std::move(run));
    return enqueue_all(std::move(calls), std::move(kept), std::move(results));
  }

  using Call = std::function<WorkPtr(c10d::Backend &)>;

  WorkPtr enqueue_all(std::vector<Call> calls, Tensors kept, Tensors results) {
    append(kept, std::exchange(coalesced_tensors_, {}));
    sim_stream *current = current_stream();
    sim_stream_wait(stream_, current, sim_stream_last(current));
    const uint64_t ticket =
        enqueue(stream_, [gloo = gloo_.get(), calls = std::move(calls)] {
          std::vector<WorkPtr> started;
          for (const Call &call : calls) started.push_back(call(*gloo));
          for (const WorkPtr &work : started) {
            if (work) work->wait();
          }
        });
    return c10::make_intrusive<StreamWork>(stream_, c10_stream_, ticket,
                                           is_like_gloo_, std::move(kept),
                                           std::move(results));
  }

  bool is_like_gloo_;
  Ptr<c10d::Backend> gloo_;
  c10::Stream c10_stream_;
  sim_stream *stream_;
  bool is_coalescing_ = false;
  std::vector<Call> coalesced_;
  Tensors coalesced_tensors_;
};

}  // namespace

Ptr<c10d::Backend> make_backend(Ptr<c10d::Backend> gloo, bool is_like_gloo) {
  return c10::make_intrusive<StreamBackend>(std::move(gloo), is_like_gloo);
}

}  // namespace sim
