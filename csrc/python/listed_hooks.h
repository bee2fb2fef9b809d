/*
 * The dict behind `output._backward_hooks`, which lists a native hook.
 */
#ifndef FSDP_PYTHON_LISTED_HOOKS_H
#define FSDP_PYTHON_LISTED_HOOKS_H

#include "python/module.h"

/* Makes what the dicts need. 0, or -1 with an exception. */
int fsdp_listed_hooks_init(PyObject *module, module_state *state);

/* Gives a tensor that has been hooked natively its dict, unless it has one. 0,
 * or -1 with an exception. */
int fsdp_listed_hooks_add(const module_state *state, PyObject *tensor);

#endif /* FSDP_PYTHON_LISTED_HOOKS_H */
