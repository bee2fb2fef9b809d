// The Python module of the operators.
#include <torch/extension.h>

#include "fake.hpp"

PYBIND11_MODULE(_fakecuda_operators, module) {
  module.def("install", [] {
    const int count = fakecuda::install_operators();
    fakecuda::install_copies();
    fakecuda::install_fused();
    return count;
  });
  module.def("poison_blocks", &fakecuda::poison_blocks);
}
