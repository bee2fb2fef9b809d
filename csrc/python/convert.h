/*
 * Lists and tuples, to and from C.
 */
#ifndef FSDP_PYTHON_CONVERT_H
#define FSDP_PYTHON_CONVERT_H

#include "python/module.h"

/* Returns a new reference to the item number `index`, or NULL with an
 * exception. */
typedef PyObject *(*fsdp_item_fn)(const void *context, int64_t index);

/* A new list of items 0 .. num_items - 1, or NULL with an exception. */
PyObject *fsdp_list_of(int64_t num_items, const void *context,
                       fsdp_item_fn item);

/*
 * The integers of a sequence of tuples (or other sequences) of `num_values`
 * each, or of a sequence of integers when num_values is 1: a new array,
 * released with PyMem_Free(), of num_items * num_values integers. `name` is for
 * messages. NULL with an exception.
 */
int64_t *fsdp_read_int64s(PyObject *sequence, const char *name,
                          Py_ssize_t num_values, Py_ssize_t *num_items);

#endif /* FSDP_PYTHON_CONVERT_H */
