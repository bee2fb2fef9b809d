/*
 * What `output._backward_hooks` shows. The hook that starts a unit's backward
 * is native and takes no GIL, so torch does not know a Python object for it.
 * For those who look, the output gets a dict with one entry that stands for
 * it. Tensor.register_hook() finds the dict and adds the user's hook to it;
 * only then does the dict become one that autograd runs, in the interpreter.
 */
#include "python/listed_hooks.h"

/* --- The entry ----------------------------------------------------------- */

/* Called with the gradient once the user has hooks of their own. */
static PyObject *call(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args),
                      PyObject *Py_UNUSED(kwargs)) {
  Py_RETURN_NONE;
}

static PyObject *is_unserializable(PyObject *Py_UNUSED(self),
                                   void *Py_UNUSED(closure)) {
  Py_RETURN_TRUE;
}

static PyGetSetDef entry_getset[] = {
    {"__torch_unserializable__", is_unserializable, NULL,
     "Saving the tensor gives no warning.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(entry_doc,
             "Stands for the native hook that starts a unit's backward.");

static PyType_Slot entry_slots[] = {
    {Py_tp_call, FSDP_SLOT(call)},
    {Py_tp_getset, entry_getset},
    {Py_tp_doc, FSDP_SLOT(entry_doc)},
    {0, NULL},
};

static PyType_Spec entry_spec = {
    .name = "fsdp_c._native._PreBackward",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = entry_slots,
};

/* --- The dict ------------------------------------------------------------ */

static const char tensor_name[] = "_tensor"; /* weak, until autograd knows */

/* Lets autograd run the hooks in `self`. 0, or -1 with an exception. */
static int connect(PyObject *self) {
  PyObject *reference = PyObject_GetAttrString(self, tensor_name);
  if (reference == NULL) return -1;
  PyObject *tensor = reference == Py_None ? Py_NewRef(Py_None)
                                          : PyObject_CallNoArgs(reference);
  Py_DECREF(reference);
  if (tensor == NULL) return -1;
  int result = PyObject_SetAttrString(self, tensor_name, Py_None);
  if (result == 0 && tensor != Py_None) {
    result = fsdp_torch_run_listed_hooks(tensor, self);
  }
  Py_DECREF(tensor);
  return result;
}

static int assign(PyObject *self, PyObject *key, PyObject *value) {
  if (value == NULL) return PyODict_DelItem(self, key);
  if (PyODict_SetItem(self, key, value) < 0) return -1;
  return connect(self);
}

PyDoc_STRVAR(dict_doc,
             "The hooks of an output, by id; the first one is native.");

static PyType_Slot dict_slots[] = {
    {Py_mp_ass_subscript, FSDP_SLOT(assign)},
    {Py_tp_doc, FSDP_SLOT(dict_doc)},
    {0, NULL},
};

static PyType_Spec dict_spec = {
    .name = "fsdp_c._native._OutputHooks",
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = dict_slots,
};

int fsdp_listed_hooks_init(PyObject *module, module_state *state) {
  PyObject *type = PyType_FromModuleAndSpec(module, &entry_spec, NULL);
  if (type == NULL) return -1;
  state->pre_backward = PyObject_New(PyObject, (PyTypeObject *)type);
  Py_DECREF(type);
  if (state->pre_backward == NULL) return -1;
  state->first_hook_id = PyLong_FromLong(-1); /* torch's begin at 0 */
  if (state->first_hook_id == NULL) return -1;
  state->tensor_name = PyUnicode_InternFromString(tensor_name);
  if (state->tensor_name == NULL) return -1;
  state->output_hooks =
      PyType_FromSpecWithBases(&dict_spec, (PyObject *)&PyODict_Type);
  return state->output_hooks == NULL ? -1 : 0;
}

int fsdp_listed_hooks_add(const module_state *state, PyObject *tensor) {
  if (fsdp_torch_has_listed_hooks(tensor)) return 0;
  int result = -1;
  PyObject *reference = PyWeakref_NewRef(tensor, NULL);
  PyObject *hooks = PyObject_CallNoArgs(state->output_hooks);
  if (reference == NULL || hooks == NULL) goto done;
  if (PyODict_SetItem(hooks, state->first_hook_id, state->pre_backward) < 0 ||
      PyObject_SetAttr(hooks, state->tensor_name, reference) < 0) {
    goto done;
  }
  fsdp_torch_list_hooks(tensor, hooks);
  result = 0;
done:
  Py_XDECREF(hooks);
  Py_XDECREF(reference);
  return result;
}
