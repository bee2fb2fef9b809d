/*
 * Lists and tuples, to and from C.
 */
#include "python/convert.h"

PyObject *fsdp_list_of(int64_t num_items, const void *context,
                       fsdp_item_fn item) {
  PyObject *list = PyList_New((Py_ssize_t)num_items);
  if (list == NULL) return NULL;
  for (int64_t i = 0; i < num_items; i++) {
    PyObject *value = item(context, i);
    if (value == NULL) {
      Py_DECREF(list);
      return NULL;
    }
    PyList_SET_ITEM(list, (Py_ssize_t)i, value); /* steals */
  }
  return list;
}

/* The integer in `*value`; 0, or -1 with an exception. */
static int read_int64(PyObject *object, int64_t *value) {
  *value = PyLong_AsLongLong(object);
  return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* One item of fsdp_read_int64s. 0, or -1 with an exception. */
static int read_item(PyObject *item, const char *name, Py_ssize_t index,
                     Py_ssize_t num_values, int64_t *values) {
  if (num_values == 1) return read_int64(item, values);
  /* A tuple of its own: converting an integer may run Python. */
  PyObject *tuple = PySequence_Check(item) ? PySequence_Tuple(item) : NULL;
  if (tuple == NULL && PyErr_Occurred()) return -1;
  if (tuple == NULL || PyTuple_GET_SIZE(tuple) != num_values) {
    PyErr_Format(PyExc_TypeError, "%s[%zd] must be %zd integers, got %R", name,
                 index, num_values, item);
    Py_XDECREF(tuple);
    return -1;
  }
  int status = 0;
  for (Py_ssize_t i = 0; i < num_values && status == 0; i++) {
    status = read_int64(PyTuple_GET_ITEM(tuple, i), &values[i]);
  }
  Py_DECREF(tuple);
  return status;
}

int64_t *fsdp_read_int64s(PyObject *sequence, const char *name,
                          Py_ssize_t num_values, Py_ssize_t *num_items) {
  int64_t *values = NULL;
  PyObject *items = PySequence_Tuple(sequence); /* cannot change under us */
  if (items == NULL) return NULL;
  const Py_ssize_t num = PyTuple_GET_SIZE(items);
  /* Cannot overflow: num objects are in memory, num_values is small. */
  values = PyMem_New(int64_t, (size_t)(num * num_values) + 1);
  if (values == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  for (Py_ssize_t i = 0; i < num; i++) {
    if (read_item(PyTuple_GET_ITEM(items, i), name, i, num_values,
                  values + i * num_values) < 0) {
      PyMem_Free(values);
      values = NULL;
      goto done;
    }
  }
  *num_items = num;
done:
  Py_DECREF(items);
  return values;
}
