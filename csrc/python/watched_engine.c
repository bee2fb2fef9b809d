/* Autograd's engine, with calls that the units' engines are told of. In C,
 * because no Python frame may run in a backward. */
#include "python/module.h"

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

static PyObject *run_backward(PyObject *self, PyTypeObject *type,
                              PyObject *const *args, Py_ssize_t num_args,
                              PyObject *names) {
  PyObject *raised = NULL, *value = NULL, *traceback = NULL;
  FSDP_LOCAL_ERROR(error);
  fsdp_status status = fsdp_torch_around_backward(true, &error);
  if (status != FSDP_OK) return fsdp_none_or_error(status, &error);
  PyObject *result = run_base(self, type, args, num_args, names);
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
