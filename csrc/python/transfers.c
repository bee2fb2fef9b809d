/*
 * pass_messages() and copy_tensors(): what an exchange needs; broadcast().
 */
#include "python/convert.h"

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

PyObject *fsdp_module_copy_tensors(PyObject *Py_UNUSED(module),
                                   PyObject *copies) {
  FSDP_LOCAL_ERROR(error);
  return fsdp_none_or_error(fsdp_torch_copy_tensors(copies, &error), &error);
}

PyObject *fsdp_module_pass_messages(PyObject *Py_UNUSED(module), PyObject *args,
                                    PyObject *kwargs) {
  static const char *const keywords[] = {"group",    "label",  "outgoing",
                                         "incoming", "copies", NULL};
  fsdp_error error = {0};
  const char *label;
  PyObject *group, *outgoing_sequence, *incoming_sequence; /* borrowed */
  PyObject *copies = Py_None;                              /* borrowed */
  PyObject *outgoing = NULL, *incoming = NULL;             /* tuples */
  PyObject *result = NULL;
  fsdp_torch_message *messages = NULL;
  bool are_passed = false;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "OsOO|O:pass_messages", FSDP_KEYWORDS(keywords), &group,
          &label, &outgoing_sequence, &incoming_sequence, &copies)) {
    return NULL;
  }
  outgoing = PySequence_Tuple(outgoing_sequence);
  if (outgoing == NULL) goto done;
  incoming = PySequence_Tuple(incoming_sequence);
  if (incoming == NULL) goto done;
  const Py_ssize_t num_outgoing = PyTuple_GET_SIZE(outgoing);
  const Py_ssize_t num_messages = num_outgoing + PyTuple_GET_SIZE(incoming);
  messages = PyMem_Calloc((size_t)num_messages + 1, sizeof *messages);
  if (messages == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  if (read_messages(outgoing, true, messages) < 0) goto done;
  if (read_messages(incoming, false, messages + num_outgoing) < 0) goto done;
  const fsdp_torch_messages given = {
      .label = label,
      .messages = messages,
      .num_messages = (int64_t)num_messages,
      .copies = copies,
  };
  if (fsdp_torch_pass_messages(group, &given, &are_passed, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto done;
  }
  result = PyBool_FromLong(are_passed);
done:
  PyMem_Free(messages);
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
