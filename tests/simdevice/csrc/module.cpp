// The Python module _sim_native.
#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include "sim.hpp"
#include "sim_module.hpp"

namespace {

py::dict memory_stats() {
  const sim_memory_stats stats = sim_memory_get_stats();
  py::dict out;
  out["num_allocs"] = stats.num_allocs;
  out["num_cached"] = stats.num_cached;
  out["live_blocks"] = stats.live_blocks;
  out["live_nbytes"] = stats.live_nbytes;
  out["peak_nbytes"] = stats.peak_nbytes;
  out["held_nbytes"] = stats.held_nbytes;
  return out;
}

void synchronize() {
  sim_synchronize();
  sim::throw_failure();
}

// A graph with the methods of torch.cuda.CUDAGraph.
class Graph {
 public:
  Graph() = default;
  ~Graph() { reset(); }
  Graph(const Graph &) = delete;
  Graph &operator=(const Graph &) = delete;

  void capture_begin(const std::string & /*capture_error_mode*/) {
    TORCH_CHECK(sim::current_stream() != sim::stream_of(0),
                "sim: the default stream cannot be captured");
    reset();
    graph_ = sim_graph_begin(sim::current_stream());
    TORCH_CHECK(graph_ != nullptr, "sim: another graph is being captured");
  }
  void capture_end() {
    char reason[256];
    TORCH_CHECK(graph_ != nullptr, "sim: nothing is captured");
    if (sim_graph_end(graph_, reason, sizeof reason)) return;
    reset();
    TORCH_CHECK(false, "sim: the capture failed: ", reason);
  }
  void replay() {
    TORCH_CHECK(graph_ != nullptr, "sim: nothing was captured");
    sim_graph_replay(graph_, sim::current_stream());
  }
  void reset() {
    sim_graph_destroy(graph_);
    graph_ = nullptr;
  }

 private:
  sim_graph *graph_ = nullptr;
};

}  // namespace

PYBIND11_MODULE(_sim_native, m) {
  using without_gil = py::call_guard<py::gil_scoped_release>;
  m.def("synchronize", synchronize, without_gil());
  m.def("set_schedule", sim_set_schedule, without_gil());
  m.def("empty_cache", sim_memory_empty_cache, without_gil());
  m.def("set_memory_limit", sim_memory_set_limit);
  m.def("reset_peak", sim_memory_reset_peak);
  m.def("memory_stats", memory_stats);
  m.def("make_backend", sim::make_backend, without_gil());
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", &Graph::capture_begin, without_gil(),
           py::arg("capture_error_mode") = "global")
      .def("capture_end", &Graph::capture_end, without_gil())
      .def("replay", &Graph::replay, without_gil())
      .def("reset", &Graph::reset, without_gil());
}
