/*
 * empty_tensors(), pass_messages() and copy_tensors(): what an exchange needs;
 * broadcast().
 */
#include "python/convert.h"

PyObject *fsdp_module_empty_tensors(PyObject *Py_UNUSED(module), PyObject *args,
                                    PyObject *kwargs) {
  static const char *const keywords[] = {"numels", "dtypes", NULL};
  fsdp_error error = {0};
  PyObject *numel_sequence, *dtype_sequence; /* borrowed */
  PyObject *dtypes = NULL;                   /* tuple */
  PyObject *result = NULL;
  int64_t *numels = NULL;
  Py_ssize_t num_tensors = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:empty_tensors",
                                   FSDP_KEYWORDS(keywords), &numel_sequence,
                                   &dtype_sequence)) {
    return NULL;
  }
  numels = fsdp_read_int64s(numel_sequence, "numels", 1, &num_tensors);
  if (numels == NULL) return NULL;
  dtypes = PySequence_Tuple(dtype_sequence);
  if (dtypes == NULL) goto done;
  if (PyTuple_GET_SIZE(dtypes) != num_tensors) {
    PyErr_Format(PyExc_ValueError, "%zd numels, but %zd dtypes", num_tensors,
                 PyTuple_GET_SIZE(dtypes));
    goto done;
  }
  if (fsdp_torch_empty_tensors(numels, &PyTuple_GET_ITEM(dtypes, 0),
                               (int64_t)num_tensors, &result,
                               &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
  }
done:
  PyMem_Free(numels);
  Py_XDECREF(dtypes);
  return result;
}

/* Fills messages[0 ...] from a tuple of (peer, tensor). */
static int read_messages(PyObject *sequence, bool is_outgoing,
                         fsdp_torch_message *messages) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); i++) {
    PyObject *item = PyTuple_GET_ITEM(sequence, i); /* borrowed */
    long long peer = 0;
    if (!PyTuple_Check(item)) {
      PyErr_SetString(PyExc_TypeError, "a message is a tuple (peer, tensor)");
      return -1;
    }
    if (!PyArg_ParseTuple(item, "LO", &peer, &messages[i].tensor)) return -1;
    messages[i].peer = (int64_t)peer;
    messages[i].is_outgoing = is_outgoing;
  }
  return 0;
}

/* Fills copies[0 ...] from a tuple of (source, target). */
static int read_copies(PyObject *sequence, fsdp_torch_copy *copies) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); i++) {
    PyObject *item = PyTuple_GET_ITEM(sequence, i); /* borrowed */
    if (!PyTuple_Check(item)) {
      PyErr_SetString(PyExc_TypeError, "a copy is a tuple (source, target)");
      return -1;
    }
    if (!PyArg_ParseTuple(item, "OO", &copies[i].source, &copies[i].target)) {
      return -1;
    }
  }
  return 0;
}

/* A new array of a tuple's copies; NULL with an exception. */
static fsdp_torch_copy *new_copies(PyObject *sequence) {
  fsdp_torch_copy *copies =
      PyMem_New(fsdp_torch_copy, (size_t)PyTuple_GET_SIZE(sequence) + 1);
  if (copies == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
  } else if (read_copies(sequence, copies) < 0) {
    PyMem_Free(copies);
    copies = NULL;
  }
  return copies;
}

PyObject *fsdp_module_copy_tensors(PyObject *Py_UNUSED(module),
                                   PyObject *sequence) {
  fsdp_error error = {0};
  PyObject *result = NULL;
  fsdp_torch_copy *copies = NULL;
  PyObject *pairs = PySequence_Tuple(sequence);
  if (pairs == NULL) return NULL;
  copies = new_copies(pairs);
  if (copies == NULL) goto done;
  if (fsdp_torch_copy_tensors(copies, (int64_t)PyTuple_GET_SIZE(pairs),
                              &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto done;
  }
  result = Py_NewRef(Py_None);
done:
  PyMem_Free(copies);
  Py_DECREF(pairs);
  return result;
}

PyObject *fsdp_module_pass_messages(PyObject *Py_UNUSED(module), PyObject *args,
                                    PyObject *kwargs) {
  static const char *const keywords[] = {"group",    "label",  "outgoing",
                                         "incoming", "copies", NULL};
  fsdp_error error = {0};
  const char *label;
  PyObject *group, *outgoing_sequence, *incoming_sequence;  /* borrowed */
  PyObject *copy_sequence = NULL;                           /* borrowed */
  PyObject *outgoing = NULL, *incoming = NULL, *own = NULL; /* tuples */
  fsdp_torch_copy *copies = NULL;
  PyObject *result = NULL;
  fsdp_torch_message *messages = NULL;
  bool are_passed = false;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "OsOO|O:pass_messages", FSDP_KEYWORDS(keywords), &group,
          &label, &outgoing_sequence, &incoming_sequence, &copy_sequence)) {
    return NULL;
  }
  outgoing = PySequence_Tuple(outgoing_sequence);
  if (outgoing == NULL) goto done;
  incoming = PySequence_Tuple(incoming_sequence);
  if (incoming == NULL) goto done;
  own =
      copy_sequence == NULL ? PyTuple_New(0) : PySequence_Tuple(copy_sequence);
  if (own == NULL) goto done;
  const Py_ssize_t num_outgoing = PyTuple_GET_SIZE(outgoing);
  const Py_ssize_t num_messages = num_outgoing + PyTuple_GET_SIZE(incoming);
  messages = PyMem_Calloc((size_t)num_messages + 1, sizeof *messages);
  if (messages == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  if (read_messages(outgoing, true, messages) < 0) goto done;
  if (read_messages(incoming, false, messages + num_outgoing) < 0) goto done;
  copies = new_copies(own);
  if (copies == NULL) goto done;
  const fsdp_torch_messages given = {
      .label = label,
      .messages = messages,
      .num_messages = (int64_t)num_messages,
      .copies = copies,
      .num_copies = (int64_t)PyTuple_GET_SIZE(own),
  };
  if (fsdp_torch_pass_messages(group, &given, &are_passed, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto done;
  }
  result = PyBool_FromLong(are_passed);
done:
  PyMem_Free(messages);
  PyMem_Free(copies);
  Py_XDECREF(own);
  Py_XDECREF(outgoing);
  Py_XDECREF(incoming);
  return result;
}

PyObject *fsdp_module_broadcast(PyObject *Py_UNUSED(module), PyObject *args) {
  fsdp_error error = {0};
  PyObject *group, *tensor; /* borrowed */
  const char *label;
  bool was_sent = false;
  if (!PyArg_ParseTuple(args, "OOs:broadcast", &group, &tensor, &label)) {
    return NULL;
  }
  if (fsdp_torch_broadcast(group, tensor, label, &was_sent, &error) !=
      FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    return NULL;
  }
  return PyBool_FromLong(was_sent);
}
