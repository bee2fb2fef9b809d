/*
 * Hooks for saved tensors around a unit's forward, and Python's switch for
 * them. Torch calls the two functions for each tensor that is saved and read.
 */
#include "python/module.h"

static PyObject *pack(PyObject *context, PyObject *tensor) {
  return fsdp_torch_offload_pack(context, tensor);
}

static PyObject *unpack(PyObject *Py_UNUSED(none), PyObject *packed) {
  return fsdp_torch_offload_unpack(packed);
}

static PyMethodDef pack_def = {"pack", pack, METH_O, NULL};
static PyMethodDef unpack_def = {"unpack", unpack, METH_O, NULL};

int fsdp_saved_hooks_push(const fsdp_torch_unit *unit) {
  PyObject *pack_hook = NULL;
  PyObject *unpack_hook = NULL;
  int result = -1;

  if (!fsdp_torch_unit_begins_offload(unit)) return 0;
  PyObject *context = fsdp_torch_offload_context(unit);
  if (context == NULL) return -1;
  pack_hook = PyCFunction_New(&pack_def, context);
  if (pack_hook == NULL) goto done;
  unpack_hook = PyCFunction_New(&unpack_def, NULL);
  if (unpack_hook == NULL) goto done;
  if (fsdp_torch_push_saved_hooks(pack_hook, unpack_hook) == 0) result = 1;
done:
  Py_XDECREF(unpack_hook);
  Py_XDECREF(pack_hook);
  Py_DECREF(context);
  return result;
}

PyObject *fsdp_unit_object_offload(PyObject *object, PyObject *args) {
  long long min_nbytes, keep_last;
  if (!PyArg_ParseTuple(args, "LL:offload_activations", &min_nbytes,
                        &keep_last)) {
    return NULL;
  }
  if (min_nbytes < 0 || keep_last < 1) {
    return PyErr_Format(PyExc_ValueError,
                        "min_nbytes must be at least 0 and keep_last at least "
                        "1, got %lld and %lld",
                        min_nbytes, keep_last);
  }
  fsdp_torch_unit_set_offload(((unit_object *)object)->unit, min_nbytes,
                              keep_last);
  Py_RETURN_NONE;
}
