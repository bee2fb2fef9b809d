/* Autograd's engine, with calls that the units' engines are told of. In C,
 * because no Python frame may run in a backward. */
#include "python/module.h"

/* Where torch passes them: run_backward(tensors, gradients, keep_graph,
 * create_graph, inputs, allow_unreachable, accumulate_grad), by name or not. */
enum { INPUTS = 4, ALLOW_UNREACHABLE, ACCUMULATE_GRAD, MAX_ARGS = 8 };

/* New reference: a tuple of the leaves that stand in the graph for inputs that
 * are sharded parameters. */
static PyObject *leaves_of(PyObject *inputs) {
  PyObject *leaves = PyList_New(0);
  for (Py_ssize_t i = 0; leaves != NULL && i < PyTuple_GET_SIZE(inputs); i++) {
    PyObject *input = PyTuple_GET_ITEM(inputs, i); /* borrowed */
    PyObject *leaf = fsdp_torch_leaf_of(input);
    if (leaf == NULL || (leaf != input && PyList_Append(leaves, leaf) < 0)) {
      Py_CLEAR(leaves);
    }
    Py_XDECREF(leaf);
  }
  if (leaves != NULL) Py_SETREF(leaves, PyList_AsTuple(leaves));
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

/* Where the argument is, or -1. */
static Py_ssize_t find_arg(Py_ssize_t position, const char *name,
                           Py_ssize_t num_args, PyObject *names) {
  if (position < num_args) return position;
  for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
    PyObject *each = PyTuple_GET_ITEM(names, i); /* borrowed */
    if (PyUnicode_CompareWithASCIIString(each, name) == 0) return num_args + i;
  }
  return -1;
}

/* Takes what torch.autograd.grad() got for the inputs and then for their
 * leaves; of the inputs alone. Gradients of leaves are this rank's: an error,
 * where torch knows the input as unused. */
static PyObject *without_leaves(PyObject *result, Py_ssize_t num_inputs,
                                bool is_unused_allowed) {
  bool is_refused = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result); i++) {
    const bool is_none = PyTuple_GET_ITEM(result, i) == Py_None;
    is_refused |= i < num_inputs ? is_none && !is_unused_allowed : !is_none;
  }
  PyObject *grads = NULL;
  if (is_refused) {
    PyErr_SetString(
        PyExc_RuntimeError,
        "torch.autograd.grad() of parameters that fully_shard sharded, or of "
        "unused tensors beside them: only backward() reduces gradients. Call "
        "loss.backward(inputs=[...]) and read .grad of the parameters");
  } else {
    grads = PyTuple_GetSlice(result, 0, num_inputs);
  }
  Py_DECREF(result);
  return grads;
}

/* With the leaves of sharded parameters as further inputs. */
static PyObject *run_with_leaves(PyObject *self, PyTypeObject *type,
                                 PyObject *const *args, Py_ssize_t num_args,
                                 PyObject *names) {
  PyObject *own[MAX_ARGS], *leaves = NULL, *result = NULL;
  const Py_ssize_t num_all =
      num_args + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
  const Py_ssize_t allow =
      find_arg(ALLOW_UNREACHABLE, "allow_unreachable", num_args, names);
  const Py_ssize_t accumulate =
      find_arg(ACCUMULATE_GRAD, "accumulate_grad", num_args, names);
  if (num_args <= INPUTS || num_all > MAX_ARGS || allow < 0 || accumulate < 0 ||
      !PyTuple_Check(args[INPUTS])) {
    return run_base(self, type, args, num_args, names);
  }
  PyObject *inputs = args[INPUTS]; /* borrowed */
  leaves = leaves_of(inputs);
  if (leaves == NULL) return NULL;
  if (PyTuple_GET_SIZE(leaves) == 0) {
    result = run_base(self, type, args, num_args, names);
    goto done;
  }
  for (Py_ssize_t i = 0; i < num_all; i++) own[i] = args[i];
  own[allow] = Py_True;
  own[INPUTS] = PySequence_Concat(inputs, leaves);
  if (own[INPUTS] == NULL) goto done;
  result = run_base(self, type, own, num_args, names);
  Py_DECREF(own[INPUTS]);
  if (result != NULL && args[accumulate] != Py_True) {
    result = without_leaves(result, PyTuple_GET_SIZE(inputs),
                            args[allow] == Py_True);
  }
done:
  Py_DECREF(leaves);
  return result;
}

static PyObject *run_backward(PyObject *self, PyTypeObject *type,
                              PyObject *const *args, Py_ssize_t num_args,
                              PyObject *names) {
  PyObject *raised = NULL, *value = NULL, *traceback = NULL;
  FSDP_LOCAL_ERROR(error);
  fsdp_status status = fsdp_torch_around_backward(true, &error);
  if (status != FSDP_OK) return fsdp_none_or_error(status, &error);
  PyObject *result = run_with_leaves(self, type, args, num_args, names);
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
