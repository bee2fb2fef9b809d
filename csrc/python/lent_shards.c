/*
 * lend_shards(): what an optimizer of DTensors steps in their place. A step
 * reads each parameter, its gradient and its state once, and torch computes
 * each operation on DTensors in Python.
 */
#include "python/module.h"

typedef struct loan {
  const module_state *names;
  PyObject *states;      /* the optimizer's: a dict by parameter */
  PyObject *params;      /* out, dict: the parameters by shard */
  PyObject *lent_states; /* out, dict by shard */
  PyObject *make_state;  /* callable: a dict that stands for a state */
} loan;

/* What a loan has found: errors, and what only torch can step. */
enum { LENT = 1, NOT_LENT = 0, FAILED = -1 };

static int are_equal(PyObject *object, PyObject *other, const char *name) {
  int result = FAILED;
  PyObject *value = PyObject_GetAttrString(object, name);
  if (value == NULL) return FAILED;
  PyObject *other_value = PyObject_GetAttrString(other, name);
  if (other_value != NULL) {
    result = PyObject_RichCompareBool(value, other_value, Py_EQ);
  }
  Py_XDECREF(other_value);
  Py_DECREF(value);
  return result;
}

/* Whether a DTensor is cut as `param` is. */
static int lies_as(const loan *self, PyObject *param, PyObject *dtensor) {
  int result = FAILED;
  PyObject *spec = PyObject_GetAttr(param, self->names->spec);
  if (spec == NULL) return FAILED;
  PyObject *other = PyObject_GetAttr(dtensor, self->names->spec);
  if (other != NULL) {
    result = other == spec ? LENT : are_equal(spec, other, "placements");
    if (result == LENT) result = are_equal(spec, other, "mesh");
  }
  Py_XDECREF(other);
  Py_DECREF(spec);
  return result;
}

/* local [out]: a new reference if LENT. Only plain tensors are lent. */
static int local_of(const loan *self, PyObject *dtensor, PyObject **local) {
  *local = PyObject_GetAttr(dtensor, self->names->local_tensor);
  if (*local == NULL) return FAILED;
  if ((PyObject *)Py_TYPE(*local) == self->names->tensor) return LENT;
  Py_CLEAR(*local);
  return NOT_LENT;
}

/* The local tensor of a DTensor that is cut as `param`. */
static int part_of(const loan *self, PyObject *param, PyObject *dtensor,
                   PyObject **local) {
  *local = NULL;
  if ((PyObject *)Py_TYPE(dtensor) != self->names->dtensor) return NOT_LENT;
  const int result = lies_as(self, param, dtensor);
  return result == LENT ? local_of(self, dtensor, local) : result;
}

/* Numbers of steps and the like are no parts of the parameter. */
static int lend_value(const loan *self, PyObject *param, PyObject *value,
                      PyObject **lent) {
  if ((PyObject *)Py_TYPE(value) == self->names->dtensor) {
    return part_of(self, param, value, lent);
  }
  if (fsdp_torch_is_tensor(value) && fsdp_torch_num_dims(value) > 0)
    return NOT_LENT;
  *lent = Py_NewRef(value);
  return LENT;
}

static int fill_state(const loan *self, PyObject *param, PyObject *state,
                      PyObject *lent_state) {
  PyObject *name, *value; /* borrowed */
  Py_ssize_t place = 0;
  int result = LENT;
  PyObject *values = PyDict_Copy(state); /* nobody changes this one */
  if (values == NULL) return FAILED;
  while (result == LENT && PyDict_Next(values, &place, &name, &value)) {
    PyObject *lent = NULL;
    result = lend_value(self, param, value, &lent);
    if (result == LENT && PyDict_SetItem(lent_state, name, lent) < 0) {
      result = FAILED;
    }
    Py_XDECREF(lent);
  }
  Py_DECREF(values);
  return result;
}

static int lend_state(const loan *self, PyObject *param, PyObject *shard) {
  PyObject *state = PyDict_GetItemWithError(self->states, param); /* borrowed */
  if (state == NULL) return PyErr_Occurred() ? FAILED : LENT;
  if (!PyDict_Check(state)) return NOT_LENT;
  if (PyDict_GET_SIZE(state) == 0) return LENT;
  PyObject *lent_state =
      PyObject_CallFunctionObjArgs(self->make_state, param, state, NULL);
  if (lent_state == NULL) return FAILED;

  int result = fill_state(self, param, state, lent_state);
  if (result == LENT &&
      PyDict_SetItem(self->lent_states, shard, lent_state) < 0) {
    result = FAILED;
  }
  Py_DECREF(lent_state);
  return result;
}

/* Appends this rank's part of `param`, with its gradient, to `lent`. */
static int lend_dtensor(const loan *self, PyObject *param, PyObject *grad,
                        PyObject *lent) {
  PyObject *local = NULL;
  PyObject *shard = NULL;
  PyObject *local_grad = NULL;

  int result = local_of(self, param, &local);
  if (result != LENT) return result;
  /* A state without dimensions is taken for a number. */
  result = fsdp_torch_num_dims(local) == 0
               ? NOT_LENT
               : part_of(self, param, grad, &local_grad);
  if (result != LENT) goto done;
  result = FAILED;
  /* An alias: a gradient of the part itself would be seen by others. */
  shard = PyObject_CallMethodNoArgs(local, self->names->detach);
  if (shard == NULL) goto done;
  if (PyObject_SetAttr(shard, self->names->grad, local_grad) < 0) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) goto done;
    PyErr_Clear(); /* of another dtype, say */
    result = NOT_LENT;
    goto done;
  }
  if (PyDict_SetItem(self->params, shard, param) < 0 ||
      PyList_Append(lent, shard) < 0) {
    goto done;
  }
  fsdp_torch_count_write(param); /* the shard counts for itself */
  result = lend_state(self, param, shard);
done:
  Py_XDECREF(shard);
  Py_XDECREF(local_grad);
  Py_DECREF(local);
  return result;
}

static int lend_params(const loan *self, PyObject *params, PyObject *lent) {
  int result = LENT;
  for (Py_ssize_t i = 0; result == LENT && i < PyList_GET_SIZE(params); i++) {
    PyObject *param = Py_NewRef(PyList_GET_ITEM(params, i));
    if ((PyObject *)Py_TYPE(param) != self->names->dtensor) {
      if (PyList_Append(lent, param) < 0) result = FAILED;
    } else {
      PyObject *grad = PyObject_GetAttr(param, self->names->grad);
      if (grad == NULL) {
        result = FAILED;
      } else if (grad != Py_None) { /* others are not stepped */
        result = lend_dtensor(self, param, grad, lent);
      }
      Py_XDECREF(grad);
    }
    Py_DECREF(param);
  }
  return result;
}

/* Appends a copy of a group, with shards as its parameters, to `groups`. */
static int lend_group(const loan *self, PyObject *group, PyObject *groups) {
  int result = FAILED;
  PyObject *copy = NULL;
  PyObject *lent = NULL;
  if (!PyDict_Check(group)) return NOT_LENT;
  PyObject *params = PyDict_GetItemString(group, "params"); /* borrowed */
  if (params == NULL || !PyList_Check(params)) return NOT_LENT;

  copy = PyDict_Copy(group);
  lent = PyList_New(0);
  if (copy != NULL && lent != NULL) {
    result = lend_params(self, params, lent);
  }
  if (result == LENT && (PyDict_SetItemString(copy, "params", lent) < 0 ||
                         PyList_Append(groups, copy) < 0)) {
    result = FAILED;
  }
  Py_XDECREF(lent);
  Py_XDECREF(copy);
  return result;
}

PyObject *fsdp_module_lend_shards(PyObject *module, PyObject *args) {
  PyObject *groups; /* borrowed, as all of `self` */
  loan self = {.names = PyModule_GetState(module)};
  if (!PyArg_ParseTuple(args, "O!O!O!O!O:lend_shards", &PyList_Type, &groups,
                        &PyDict_Type, &self.states, &PyDict_Type, &self.params,
                        &PyDict_Type, &self.lent_states, &self.make_state)) {
    return NULL;
  }
  PyObject *result = PyList_New(0);
  if (result == NULL) return NULL;
  int found = LENT;
  for (Py_ssize_t i = 0; found == LENT && i < PyList_GET_SIZE(groups); i++) {
    PyObject *group = Py_NewRef(PyList_GET_ITEM(groups, i));
    found = lend_group(&self, group, result);
    Py_DECREF(group);
  }
  if (found == LENT) return result;
  Py_DECREF(result);
  if (found == FAILED) return NULL;
  Py_RETURN_NONE;
}
