// What Python asks about a process group.
#include <Python.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>

#include "torch/bridge.h"
#include "torch/groups/transports.hpp"

extern "C" PyObject *fsdp_torch_transport(PyObject *group, PyObject *device) {
  HANDLE_TH_ERRORS
  if (!THPDevice_Check(device)) {
    throw std::invalid_argument("expected a torch.device");
  }
  const c10::Device where = reinterpret_cast<THPDevice *>(device)->device;
  fsdp_torch::Group found = fsdp_torch::group_from(group, where);
  {
    // A group may be meeting, over a store that is written in Python.
    const pybind11::gil_scoped_release no_gil;
    fsdp_torch::look_up(found, where.type());
  }
  const char *name =
      found.transport != nullptr ? found.transport->ops->name : "c10d";
  return Py_BuildValue("ss", name, found.why_c10d.c_str());
  END_HANDLE_TH_ERRORS
}

extern "C" PyObject *fsdp_torch_describe_failure(PyObject *process_group,
                                                 const char *cause,
                                                 const char *operation) {
  HANDLE_TH_ERRORS
  fsdp_torch::Group group = fsdp_torch::group_from(process_group, c10::kCPU);
  std::string report = cause;
  if (group.post_mortem) {
    const pybind11::gil_scoped_release no_gil;
    fsdp_torch::look_up(group, c10::kCPU);
    fsdp_torch::break_group(group,
                            c10::str(operation, " failed (", cause, ")"));
    report = group.post_mortem->describe(cause, operation, nullptr);
  }
  return PyUnicode_DecodeUTF8(
      report.data(), static_cast<Py_ssize_t>(report.size()), "replace");
  END_HANDLE_TH_ERRORS
}
