/*
 * Nested values: finds the tensors in the arguments and results of a forward.
 *
 * Containers are tuple (named tuples, struct sequences and PackedSequence
 * included), list, dict, set, frozenset, their subclasses, mappings and
 * dataclasses. The kinds are those of
 * torch.distributed.utils._apply_to_tensors (torch 2.13), plus frozenset and
 * mappings that are not dicts. Any other object is left alone in arguments, and
 * searched in results: see Note [Objects as outputs].
 */
#ifndef FSDP_PYTHON_NESTED_H
#define FSDP_PYTHON_NESTED_H

#include "python/module.h"

/* Returns a new reference to what `tensor` becomes (itself when it stays), or
 * NULL with an exception. */
typedef PyObject *(*fsdp_nested_map_fn)(PyObject *tensor, void *context);

/* Returns 0, or -1 with an exception. */
typedef int (*fsdp_nested_visit_fn)(PyObject *tensor, void *context);

/*
 * `object` with every tensor replaced by `map(tensor)`: a new reference to
 * `object` itself when no tensor changed. A container that changes is replaced
 * by a copy of its own kind; the caller's containers are never written to.
 * NULL with an exception; RecursionError for a value that contains itself.
 */
PyObject *fsdp_nested_map(const module_state *state, PyObject *object,
                          fsdp_nested_map_fn map, void *context);

/*
 * Calls `visit` for every tensor in `object`. 0; 1 where an object in it holds
 * more than is looked at; or -1 with an exception.
 */
int fsdp_nested_visit(const module_state *state, PyObject *object,
                      fsdp_nested_visit_fn visit, void *context);

#endif /* FSDP_PYTHON_NESTED_H */
