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
}
