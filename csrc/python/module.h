/*
 * What the files of the CPython module share: the module state, the object
 * structs and the type specs.
 */
#ifndef FSDP_PYTHON_MODULE_H
#define FSDP_PYTHON_MODULE_H

/* Python.h comes before every system header, so the .c files of this room
 * include this header and no system header of their own. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "torch/bridge.h"

/* Slots of a type spec hold functions as `void *`; ISO C has no direct
 * conversion. */
#define FSDP_SLOT(function) ((void *)(uintptr_t)(function))

/* CPython up to 3.12 takes the keyword list as `char **` but never writes. */
#define FSDP_KEYWORDS(list) ((char **)(uintptr_t)(list))

/* One per module object. All references are owned. */
typedef struct module_state {
  PyTypeObject *unit_type;
  PyTypeObject *engine_type;
  PyObject *packed_sequence;  /* torch.nn.utils.rnn.PackedSequence */
  PyObject *mapping;          /* collections.abc.Mapping */
  PyObject *mutable_mapping;  /* collections.abc.MutableMapping */
  PyObject *copy;             /* copy.copy */
  PyObject *make;             /* "_make" */
  PyObject *dataclass_fields; /* "__dataclass_fields__" */
  PyObject *output_hooks;     /* listed_hooks.c: the type of the dicts, */
  PyObject *pre_backward;     /* their first value */
  PyObject *first_hook_id;    /* and its key */
} module_state;

/* `unit` is NULL only until creation has succeeded. */
typedef struct unit_object {
  PyObject_HEAD
  fsdp_torch_unit *unit;
  PyObject *watched;   /* tuple of (dict, key, value), or NULL: see watch() */
  PyObject *on_change; /* callable; NULL exactly when `watched` is */
} unit_object;

/* unit_forward.c: Unit.forward(module, args, kwargs). */
PyObject *fsdp_unit_object_forward(PyObject *object, PyObject *const *args,
                                   Py_ssize_t num_args);

extern PyType_Spec fsdp_unit_object_spec;
extern PyType_Spec fsdp_engine_object_spec;

/* The module state behind an object of one of our types, which cannot be
 * subclassed. Borrowed. */
static inline module_state *state_of_object(PyObject *object) {
  return (module_state *)PyType_GetModuleState(Py_TYPE(object));
}

#endif /* FSDP_PYTHON_MODULE_H */
