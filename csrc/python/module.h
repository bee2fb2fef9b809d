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

#include "base/arith.h"
#include "base/crc32c.h"
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
  PyTypeObject *layout_type;
  PyTypeObject *placement_type;
  PyObject *packed_sequence;  /* torch.nn.utils.rnn.PackedSequence */
  PyObject *mapping;          /* collections.abc.Mapping */
  PyObject *mutable_mapping;  /* collections.abc.MutableMapping */
  PyObject *nn_module;        /* torch.nn.Module */
  PyObject *tensor;           /* torch.Tensor */
  PyObject *dtensor;          /* torch.distributed.tensor.DTensor */
  PyObject *copy;             /* copy.copy */
  PyObject *make;             /* "_make" */
  PyObject *dataclass_fields; /* "__dataclass_fields__" */
  PyObject *local_tensor;     /* "_local_tensor", of a DTensor */
  PyObject *spec;             /* "_spec", likewise */
  PyObject *grad;             /* "grad" */
  PyObject *detach;           /* "detach" */
  PyObject *output_hooks;     /* listed_hooks.c: the type of the dicts, */
  PyObject *pre_backward;     /* their first value */
  PyObject *first_hook_id;    /* and its key */
  PyObject *tensor_name;      /* of the attribute of an output_hooks */
} module_state;

/* `unit` is NULL only until creation has succeeded. */
typedef struct unit_object {
  PyObject_HEAD
  fsdp_torch_unit *unit;
  PyObject *watched;    /* tuple of (dict, key, value), or NULL: see watch() */
  PyObject *on_change;  /* callable; NULL exactly when `watched` is */
  PyObject *on_forward; /* callable, or NULL: see note_forwards() */
  PyObject *on_failure; /* callable, or NULL: see note_failures() */
  PyObject *on_write;   /* callable, or NULL: see note_writes() */
  /* unit_rows.c, of a unit by rows: see bind_rows(). */
  PyObject *places;       /* tuple of Place; NULL: not by rows, or cleared */
  PyObject *make_grad;    /* callable */
  PyObject *on_replaced;  /* callable */
  PyObject *local_grad;   /* callable; None: no parameter is parallel */
  PyObject *extend;       /* callable; None: no parameter is extended */
  fsdp_torch_shown shown; /* by the places; SHARDED at first */
  int num_forwards;       /* inside its forward: a module may run itself */
} unit_object;

/* unit_rows.c */
PyObject *fsdp_unit_object_bind_rows(PyObject *object, PyObject *args);
PyObject *fsdp_unit_object_bind_sharded(PyObject *object, PyObject *args);
PyObject *fsdp_unit_object_part_of(PyObject *object, PyObject *index);
PyObject *fsdp_unit_object_bind_parallel(PyObject *object, PyObject *args);
PyObject *fsdp_unit_object_unshard(PyObject *object, PyObject *none);
PyObject *fsdp_unit_object_wait_unshard(PyObject *object, PyObject *none);
PyObject *fsdp_unit_object_reshard(PyObject *object, PyObject *none);
PyObject *fsdp_unit_object_set(PyObject *object, PyObject *args,
                               PyObject *kwargs);
PyObject *fsdp_unit_object_set_prefetches(PyObject *object, PyObject *args);
int fsdp_unit_object_visit_rows(unit_object *self, visitproc visit, void *arg);
void fsdp_unit_object_clear_rows(unit_object *self);
/* Registers plain parameters for a forward: 0, or -1 with an exception. */
int fsdp_unit_object_enter_forward(unit_object *self);
/* Ends that; keeps an exception that is set. 0, or -1 with an exception. */
int fsdp_unit_object_leave_forward(unit_object *self);

/* unit_forward.c: Unit.watch(items, on_change), Unit.note_forwards(function),
 * note_failures(function), note_writes(function) and
 * Unit.forward(module, args, kwargs). */
PyObject *fsdp_unit_object_note_forwards(PyObject *object, PyObject *function);
PyObject *fsdp_unit_object_note_failures(PyObject *object, PyObject *function);
PyObject *fsdp_unit_object_note_writes(PyObject *object, PyObject *function);
PyObject *fsdp_unit_object_watch(PyObject *object, PyObject *args);
PyObject *fsdp_unit_object_forward(PyObject *object, PyObject *const *args,
                                   Py_ssize_t num_args);

/* unit_offload.c */
/* Unit.offload_activations(min_nbytes, keep_last). */
PyObject *fsdp_unit_object_offload(PyObject *object, PyObject *args);
/* Pushes hooks for saved tensors if the forward of the unit, which has begun,
 * needs them. Whether it did; -1 with an exception. */
int fsdp_saved_hooks_push(const fsdp_torch_unit *unit);

/* layout_object.c. */
/* A Layout over what belongs to `owner`, which it keeps: a new reference. */
PyObject *fsdp_layout_object_share(const module_state *state,
                                   const fsdp_flat_layout *layout,
                                   PyObject *owner);
/* Borrowed. */
const fsdp_flat_layout *fsdp_layout_object_layout(PyObject *object);
/* Of a Layout and of a Unit; each a new reference. */
PyObject *fsdp_layout_intersect(const fsdp_flat_layout *layout, PyObject *args,
                                PyObject *kwargs);
PyObject *fsdp_layout_parts(const fsdp_flat_layout *layout, PyObject *param);
PyObject *fsdp_layout_slots(const fsdp_flat_layout *layout);
PyObject *fsdp_layout_segments(const fsdp_flat_layout *layout);

/* placement_object.c. Borrowed. */
const fsdp_placement *fsdp_placement_object_placement(PyObject *object);

/* checksum.c: crc32c(data, value=0). */
PyObject *fsdp_module_crc32c(PyObject *module, PyObject *args,
                             PyObject *kwargs);

/* prepare_exchange.c: prepare_exchange(rank, world_size, moves, device,
 * direct_nbytes). */
PyObject *fsdp_module_prepare_exchange(PyObject *module, PyObject *args,
                                       PyObject *kwargs);
/* exchange_size(moves, direct_nbytes). */
PyObject *fsdp_module_exchange_size(PyObject *module, PyObject *args,
                                    PyObject *kwargs);
/* deal_out(costs, nbytes, *, num_owners, num_shards, round_nbytes, shards). */
PyObject *fsdp_module_deal_out(PyObject *module, PyObject *args,
                               PyObject *kwargs);
/* transfers.c: copy_tensors(copies). */
PyObject *fsdp_module_copy_tensors(PyObject *module, PyObject *copies);
/* broadcast(group, tensor, label). */
PyObject *fsdp_module_broadcast(PyObject *module, PyObject *args);
/* pass_messages(group, label, outgoing, incoming, copies). */
PyObject *fsdp_module_pass_messages(PyObject *module, PyObject *args,
                                    PyObject *kwargs);

/* lent_shards.c: lend_shards(groups, states, params, lent_states,
 * make_state). */
PyObject *fsdp_module_lend_shards(PyObject *module, PyObject *args);

/* watched_engine.c: watched_engine(engine). */
PyObject *fsdp_module_watched_engine(PyObject *module, PyObject *engine);

/* plan.c: plan_step(units, events, shard_link, replica_link, ...). */
PyObject *fsdp_module_plan_step(PyObject *module, PyObject *args,
                                PyObject *kwargs);
/* choose_alignment(param_itemsize, use_orig_params, is_cpu, unit_nbytes). */
PyObject *fsdp_module_choose_alignment(PyObject *module, PyObject *args,
                                       PyObject *kwargs);

extern PyType_Spec fsdp_unit_object_spec;
extern PyType_Spec fsdp_engine_object_spec;
extern PyType_Spec fsdp_layout_object_spec;
extern PyType_Spec fsdp_placement_object_spec;

/* The module state behind an object of one of our types, which cannot be
 * subclassed. Borrowed. */
static inline module_state *state_of_object(PyObject *object) {
  return (module_state *)PyType_GetModuleState(Py_TYPE(object));
}

/* None, or NULL with the exception of a call that failed. */
static inline PyObject *fsdp_none_or_error(fsdp_status status,
                                           const fsdp_error *error) {
  if (status == FSDP_OK) Py_RETURN_NONE;
  fsdp_torch_set_python_error(error);
  return NULL;
}

#endif /* FSDP_PYTHON_MODULE_H */
