/* Autograd's engine, with calls that the units' engines are told of. In C,
 * because no Python frame may run in a backward. */
#include "python/module.h"

/* Where torch passes them: run_backward(tensors, gradients, keep_graph,
 * create_graph, inputs, allow_unreachable=, accumulate_grad=). */
enum { INPUTS = 4, MAX_ARGS = 8 };

/* New reference: with the leaves of sharded parameters, which are not in the
 * graph themselves. */
static PyObject *leaves_of(PyObject *inputs) {
  const Py_ssize_t num_inputs = PyTuple_GET_SIZE(inputs);
  PyObject *leaves = PyTuple_New(num_inputs);
  for (Py_ssize_t i = 0; leaves != NULL && i < num_inputs; i++) {
    PyObject *leaf = fsdp_torch_leaf_of(PyTuple_GET_ITEM(inputs, i));
    if (leaf == NULL) {
      Py_CLEAR(leaves);
    } else {
      PyTuple_SET_ITEM(leaves, i, leaf);
    }
  }
  return leaves;
}

/* Like `super().run_backward(...)`. */
static PyObject *run_base(PyObject *self, PyTypeObject *type,
                          PyObject *const *args, Py_ssize_t num_args,
                          PyObject *names) {
  PyObject *base = PyObject_CallFunctionObjArgs((PyObject *)&PySuper_Type,
                                                (PyObject *)type, self, NULL);
  if (base == NULL) return NULL;
  PyObject *run = PyObject_GetAttrString(base, "run_backward");
  Py_DECREF(base);
  if (run == NULL) return NULL;
  PyObject *result = PyObject_Vectorcall(run, args, (size_t)num_args, names);
  Py_DECREF(run);
  return result;
}

/* Whether it is Tensor.backward(): gradients of leaves that
 * torch.autograd.grad() returned would be this rank's alone, without a word. */
static bool accumulates(PyObject *const *named, PyObject *names) {
  const Py_ssize_t num_names = names == NULL ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < num_names; i++) {
    PyObject *name = PyTuple_GET_ITEM(names, i);
    if (PyUnicode_CompareWithASCIIString(name, "accumulate_grad") == 0) {
      return named[i] == Py_True;
    }
  }
  return false;
}

static PyObject *run_on_leaves(PyObject *self, PyTypeObject *type,
                               PyObject *const *args, Py_ssize_t num_args,
                               PyObject *names) {
  PyObject *own[MAX_ARGS];
  const Py_ssize_t num_all =
      num_args + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
  if (num_args <= INPUTS || num_all > MAX_ARGS ||
      !PyTuple_Check(args[INPUTS]) || PyTuple_GET_SIZE(args[INPUTS]) == 0 ||
      !accumulates(args + num_args, names)) {
    return run_base(self, type, args, num_args, names);
  }
  for (Py_ssize_t i = 0; i < num_all; i++) own[i] = args[i];
  own[INPUTS] = leaves_of(args[INPUTS]);
  if (own[INPUTS] == NULL) return NULL;
  PyObject *result = run_base(self, type, own, num_args, names);
  Py_DECREF(own[INPUTS]);
  return result;
}

static PyObject *run_backward(PyObject *self, PyTypeObject *type,
                              PyObject *const *args, Py_ssize_t num_args,
                              PyObject *names) {
  PyObject *raised = NULL, *value = NULL, *traceback = NULL;
  FSDP_LOCAL_ERROR(error);
  fsdp_status status = fsdp_torch_around_backward(true, &error);
  if (status != FSDP_OK) return fsdp_none_or_error(status, &error);
  PyObject *result = run_on_leaves(self, type, args, num_args, names);
  PyErr_Fetch(&raised, &value, &traceback);
  status = fsdp_torch_around_backward(false, &error);
  if (raised != NULL || status == FSDP_OK) {
    PyErr_Restore(raised, value, traceback);
    return result;
  }
  Py_XDECREF(result);
  return fsdp_none_or_error(status, &error);
}

PyObject *fsdp_module_watched_engine(PyObject *module, PyObject *engine) {
  static PyMethodDef methods[] = {
      {"run_backward", (PyCFunction)(void (*)(void))run_backward,
       METH_METHOD | METH_FASTCALL | METH_KEYWORDS, NULL},
      {NULL, NULL, 0, NULL},
  };
  static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, NULL}};
  static PyType_Spec spec = {.name = "fsdp_c._native.WatchedEngine",
                             .flags = Py_TPFLAGS_DEFAULT,
                             .slots = slots};
  PyObject *type =
      PyType_FromModuleAndSpec(module, &spec, (PyObject *)Py_TYPE(engine));
  if (type == NULL) return NULL;
  PyObject *watched = PyObject_CallNoArgs(type);
  Py_DECREF(type);
  return watched;
}
