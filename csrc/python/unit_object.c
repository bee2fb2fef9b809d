/*
 * The Unit type: Python's view of one unit, and the forward call.
 *
 * The tensors belong to the bridge. A unit holds the Python objects that it
 * watches and, by rows, places and callables.
 */
#include "python/convert.h"
#include "python/nested.h"

/* Construction ------------------------------------------------------------- */

static struct _object *none_to_null(PyObject *object) {
  return object == Py_None ? NULL : object;
}

/* One integer per use: NULL for None, a new array otherwise. 0, or -1 with an
 * exception. */
static int read_of_uses(PyObject *sequence, const char *name,
                        Py_ssize_t num_uses, int64_t **values) {
  Py_ssize_t num = 0;
  if (sequence == Py_None) return 0;
  *values = fsdp_read_int64s(sequence, name, 1, &num);
  if (*values == NULL) return -1;
  if (num == num_uses) return 0;
  PyErr_Format(PyExc_ValueError, "%zd params and %zd %s", num_uses, num, name);
  return -1;
}

static PyObject *unit_new(PyTypeObject *type, PyObject *args,
                          PyObject *kwargs) {
  static const char *const keywords[] = {"name",
                                         "params",
                                         "device",
                                         "shard_group",
                                         "replica_group",
                                         "param_dtype",
                                         "reduce_dtype",
                                         "use_orig_params",
                                         "reshard_after_forward",
                                         "shows_kept",
                                         "reshard_after_backward_without_sync",
                                         "backward_prefetch",
                                         "forward_prefetch",
                                         "cast_forward_inputs",
                                         "cast_root_forward_inputs",
                                         "keep_low_precision_grads",
                                         "offloads",
                                         "shard_dims",
                                         "part_group",
                                         "extended",
                                         "block_numels",
                                         "like",
                                         "is_apart",
                                         NULL};
  const char *name;
  /* All borrowed. */
  PyObject *params, *device, *shard_group = Py_None, *replica_group = Py_None;
  PyObject *param_dtype = Py_None, *reduce_dtype = Py_None;
  PyObject *shard_dims = Py_None, *part_group = Py_None, *extended = Py_None;
  PyObject *block_numels = Py_None, *like = Py_None;
  int use_orig_params = 1, reshard_after_forward = 1, shows_kept = 1;
  int reshard_after_backward_without_sync = 1;
  int backward_prefetch = FSDP_PREFETCH_PRE, forward_prefetch = 0;
  int cast_forward_inputs = 0, cast_root_forward_inputs = 0;
  int keep_low_precision_grads = 0, offloads = 0, is_apart = 0;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "sOO|$OOOOppppipppppOOOOOp:Unit",
          FSDP_KEYWORDS(keywords), &name, &params, &device, &shard_group,
          &replica_group, &param_dtype, &reduce_dtype, &use_orig_params,
          &reshard_after_forward, &shows_kept,
          &reshard_after_backward_without_sync, &backward_prefetch,
          &forward_prefetch, &cast_forward_inputs, &cast_root_forward_inputs,
          &keep_low_precision_grads, &offloads, &shard_dims, &part_group,
          &extended, &block_numels, &like, &is_apart)) {
    return NULL;
  }
  const module_state *state = PyType_GetModuleState(type);
  if (like != Py_None && !Py_IS_TYPE(like, state->layout_type)) {
    PyErr_Format(PyExc_TypeError, "like must be a Layout or None, got %R",
                 like);
    return NULL;
  }
  if (backward_prefetch < FSDP_PREFETCH_NONE ||
      backward_prefetch > FSDP_PREFETCH_POST) {
    PyErr_Format(PyExc_ValueError,
                 "backward_prefetch must be PREFETCH_NONE, PREFETCH_PRE or "
                 "PREFETCH_POST, got %d",
                 backward_prefetch);
    return NULL;
  }

  unit_object *self = NULL;
  int64_t *dims = NULL;
  int64_t *is_extended = NULL;
  int64_t *blocks = NULL;
  PyObject *uses = PySequence_Fast(params, "params must be a sequence");
  if (uses == NULL) return NULL;
  const Py_ssize_t num_uses = PySequence_Fast_GET_SIZE(uses);
  if (read_of_uses(shard_dims, "shard_dims", num_uses, &dims) < 0 ||
      read_of_uses(block_numels, "block_numels", num_uses, &blocks) < 0) {
    goto done;
  }
  if (dims != NULL &&
      read_of_uses(extended, "extended", num_uses, &is_extended) < 0) {
    goto done;
  }
  self = (unit_object *)type->tp_alloc(type, 0); /* unit == NULL */
  if (self == NULL) goto done;

  const fsdp_torch_unit_options options = {
      .name = name,
      .uses = PySequence_Fast_ITEMS(uses),
      .num_uses = num_uses,
      .shard_group = none_to_null(shard_group),
      .replica_group = none_to_null(replica_group),
      .part_group = none_to_null(part_group),
      .extended = is_extended,
      .device = device,
      .param_dtype = none_to_null(param_dtype),
      .reduce_dtype = none_to_null(reduce_dtype),
      .use_orig_params = use_orig_params != 0,
      .reshard_after_forward = reshard_after_forward != 0,
      .shows_kept = shows_kept != 0,
      .reshard_after_backward_without_sync =
          reshard_after_backward_without_sync != 0,
      .backward_prefetch = (fsdp_prefetch)backward_prefetch,
      .forward_prefetch = forward_prefetch != 0,
      .cast_forward_inputs = cast_forward_inputs != 0,
      .cast_root_forward_inputs = cast_root_forward_inputs != 0,
      .keep_low_precision_grads = keep_low_precision_grads != 0,
      .offloads = offloads != 0,
      .shard_dims = dims,
      .block_numels = blocks,
      .like = like == Py_None ? NULL : fsdp_layout_object_layout(like),
      .is_apart = is_apart != 0,
  };
  FSDP_LOCAL_ERROR(error);
  if (fsdp_torch_unit_create(&options, &self->unit, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    Py_CLEAR(self);
  }
done:
  PyMem_Free(blocks);
  PyMem_Free(is_extended);
  PyMem_Free(dims);
  Py_DECREF(uses);
  return (PyObject *)self;
}

static int unit_traverse(PyObject *object, visitproc visit, void *arg) {
  unit_object *self = (unit_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->watched);
  Py_VISIT(self->on_change);
  Py_VISIT(self->on_forward);
  Py_VISIT(self->on_failure);
  Py_VISIT(self->on_write);
  return fsdp_unit_object_visit_rows(self, visit, arg);
}

static int unit_clear(PyObject *object) {
  unit_object *self = (unit_object *)object;
  if (self->unit != NULL) fsdp_torch_unit_set_watch(self->unit, NULL);
  Py_CLEAR(self->watched);
  Py_CLEAR(self->on_change);
  Py_CLEAR(self->on_forward);
  Py_CLEAR(self->on_failure);
  Py_CLEAR(self->on_write);
  fsdp_unit_object_clear_rows(self);
  return 0;
}

static void unit_dealloc(PyObject *object) {
  unit_object *self = (unit_object *)object;
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(object);
  (void)unit_clear(object); /* always 0 */
  fsdp_torch_unit_destroy(self->unit);
  self->unit = NULL;
  type->tp_free(self);
  Py_DECREF(type); /* instances of heap types own a reference to their type */
}

static fsdp_torch_unit *unit_of(PyObject *object) {
  return ((unit_object *)object)->unit;
}

static PyObject *unit_repr(PyObject *object) {
  const fsdp_unit *core = fsdp_torch_unit_core(unit_of(object));
  return PyUnicode_FromFormat("<fsdp_c unit '%s' %s>", fsdp_unit_name(core),
                              fsdp_unit_state_name(fsdp_unit_get_state(core)));
}

/* Whole parameters --------------------------------------------------------- */

static PyObject *unit_summon(PyObject *object, PyObject *args,
                             PyObject *kwargs) {
  static const char *const keywords[] = {"on_first_rank_only", "on_host",
                                         "with_grads", NULL};
  fsdp_torch_unit *unit = unit_of(object);
  FSDP_LOCAL_ERROR(error);
  fsdp_status status;
  int on_first_rank_only = 0, on_host = 0, with_grads = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$ppp:summon",
                                   FSDP_KEYWORDS(keywords), &on_first_rank_only,
                                   &on_host, &with_grads)) {
    return NULL;
  }
  const fsdp_summon_options options = {
      .on_first_rank_only = on_first_rank_only != 0,
      .on_host = on_host != 0,
      .with_grads = with_grads != 0,
  };
  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_torch_unit_summon(unit, &options, &error);
  Py_END_ALLOW_THREADS;
  return fsdp_none_or_error(status, &error);
}

static PyObject *unit_dismiss(PyObject *object, PyObject *args,
                              PyObject *kwargs) {
  static const char *const keywords[] = {"writeback", NULL};
  fsdp_torch_unit *unit = unit_of(object);
  FSDP_LOCAL_ERROR(error);
  fsdp_status status;
  int writeback;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "p:dismiss",
                                   FSDP_KEYWORDS(keywords), &writeback)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_torch_unit_dismiss(unit, writeback != 0, &error);
  Py_END_ALLOW_THREADS;
  return fsdp_none_or_error(status, &error);
}

static PyObject *unit_bind_flat_params(PyObject *object, PyObject *params) {
  FSDP_LOCAL_ERROR(error);
  PyObject *items = PySequence_Fast(params, "flat_params must be a sequence");
  if (items == NULL) return NULL;
  const fsdp_status status = fsdp_torch_unit_bind_flat_params(
      unit_of(object), PySequence_Fast_ITEMS(items),
      PySequence_Fast_GET_SIZE(items), &error);
  Py_DECREF(items);
  return fsdp_none_or_error(status, &error);
}

/* Changes ------------------------------------------------------------------ */

static PyObject *unit_show_kept(PyObject *object, PyObject *shows) {
  const int is_true = PyObject_IsTrue(shows);
  if (is_true < 0 || fsdp_torch_unit_show_kept(unit_of(object), is_true) < 0) {
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *unit_replace_param(PyObject *object, PyObject *args) {
  fsdp_torch_unit *unit = unit_of(object);
  FSDP_LOCAL_ERROR(error);
  long long index;
  PyObject *tensor; /* borrowed */
  if (!PyArg_ParseTuple(args, "LO:replace_param", &index, &tensor)) return NULL;
  const long long num_params =
      fsdp_flat_layout_num_params(fsdp_torch_unit_layout(unit));
  if (index < 0 || index >= num_params) {
    return PyErr_Format(PyExc_IndexError, "param %lld must be in [0, %lld)",
                        index, num_params);
  }
  return fsdp_none_or_error(
      fsdp_torch_unit_replace_param(unit, index, tensor, &error), &error);
}

static PyObject *unit_leave_params(PyObject *object,
                                   PyObject *Py_UNUSED(unused)) {
  FSDP_LOCAL_ERROR(error);
  return fsdp_none_or_error(
      fsdp_torch_unit_leave_params(unit_of(object), &error), &error);
}

static PyObject *unit_set_reduce_hook(PyObject *object, PyObject *args) {
  FSDP_LOCAL_ERROR(error);
  PyObject *state, *hook; /* borrowed */
  if (!PyArg_ParseTuple(args, "OO:set_reduce_hook", &state, &hook)) return NULL;
  return fsdp_none_or_error(
      fsdp_torch_unit_set_reduce_hook(unit_of(object), state, hook, &error),
      &error);
}

static PyObject *unit_set_custom(PyObject *object, PyObject *args) {
  FSDP_LOCAL_ERROR(error);
  PyObject *function; /* borrowed */
  unsigned kinds;
  if (!PyArg_ParseTuple(args, "OI:set_custom", &function, &kinds)) return NULL;
  return fsdp_none_or_error(
      fsdp_torch_unit_set_custom(unit_of(object), function, kinds, &error),
      &error);
}

static PyObject *unit_follow_reductions(PyObject *object, PyObject *function) {
  FSDP_LOCAL_ERROR(error);
  return fsdp_none_or_error(
      fsdp_torch_unit_follow_reductions(unit_of(object), function, &error),
      &error);
}

static PyObject *unit_clone(PyObject *object, PyObject *params) {
  PyTypeObject *type = Py_TYPE(object);
  FSDP_LOCAL_ERROR(error);
  unit_object *self = NULL;
  PyObject *uses = PySequence_Fast(params, "params must be a sequence");
  if (uses == NULL) return NULL;
  self = (unit_object *)type->tp_alloc(type, 0); /* all fields NULL */
  if (self != NULL &&
      fsdp_torch_unit_clone(unit_of(object), PySequence_Fast_ITEMS(uses),
                            PySequence_Fast_GET_SIZE(uses), &self->unit,
                            &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    Py_CLEAR(self);
  }
  Py_DECREF(uses);
  return (PyObject *)self;
}

/* Layout ------------------------------------------------------------------- */

static PyObject *unit_intersect(PyObject *object, PyObject *args,
                                PyObject *kwargs) {
  return fsdp_layout_intersect(fsdp_torch_unit_layout(unit_of(object)), args,
                               kwargs);
}

static PyObject *unit_parts(PyObject *object, PyObject *param) {
  return fsdp_layout_parts(fsdp_torch_unit_layout(unit_of(object)), param);
}

static PyObject *unit_get_layout(PyObject *object, void *Py_UNUSED(closure)) {
  return fsdp_layout_object_share(
      state_of_object(object), fsdp_torch_unit_layout(unit_of(object)), object);
}

static PyObject *unit_get_slots(PyObject *object, void *Py_UNUSED(closure)) {
  return fsdp_layout_slots(fsdp_torch_unit_layout(unit_of(object)));
}

static PyObject *unit_get_segments(PyObject *object, void *Py_UNUSED(closure)) {
  return fsdp_layout_segments(fsdp_torch_unit_layout(unit_of(object)));
}

static PyObject *unit_get_name(PyObject *object, void *Py_UNUSED(closure)) {
  return PyUnicode_FromString(
      fsdp_unit_name(fsdp_torch_unit_core(unit_of(object))));
}

static PyObject *unit_get_state(PyObject *object, void *Py_UNUSED(closure)) {
  return PyUnicode_FromString(fsdp_unit_state_name(
      fsdp_unit_get_state(fsdp_torch_unit_core(unit_of(object)))));
}

static PyObject *unit_get_full_precision(PyObject *object,
                                         void *Py_UNUSED(closure)) {
  return PyBool_FromLong(
      fsdp_unit_get_settings(fsdp_torch_unit_core(unit_of(object)))
          ->wants_full);
}

static int unit_set_full_precision(PyObject *object, PyObject *value,
                                   void *Py_UNUSED(closure)) {
  if (value == NULL) {
    PyErr_SetString(PyExc_AttributeError, "full_precision cannot be deleted");
    return -1;
  }
  const int is_full = PyObject_IsTrue(value);
  if (is_full < 0) return -1;
  fsdp_unit_get_settings(fsdp_torch_unit_core(unit_of(object)))->wants_full =
      is_full != 0;
  return 0;
}

static PyObject *unit_get_is_summoned(PyObject *object,
                                      void *Py_UNUSED(closure)) {
  return PyBool_FromLong(
      fsdp_unit_is_summoned(fsdp_torch_unit_core(unit_of(object))));
}

static PyObject *unit_get_is_requested(PyObject *object,
                                       void *Py_UNUSED(closure)) {
  return PyBool_FromLong(
      fsdp_unit_is_requested(fsdp_torch_unit_core(unit_of(object))));
}

static PyObject *unit_get_holds_grads(PyObject *object,
                                      void *Py_UNUSED(closure)) {
  return PyBool_FromLong(
      fsdp_unit_holds_grads(fsdp_torch_unit_core(unit_of(object))));
}

static PyObject *shard_item(const void *unit, int64_t segment) {
  return fsdp_torch_unit_shard(unit, segment);
}

static PyObject *unit_get_shards(PyObject *object, void *Py_UNUSED(closure)) {
  const fsdp_torch_unit *unit = unit_of(object);
  return fsdp_list_of(
      fsdp_flat_layout_num_segments(fsdp_torch_unit_layout(unit)), unit,
      shard_item);
}

/* The type ----------------------------------------------------------------- */

PyDoc_STRVAR(
    unit_doc,
    "Unit(name, params, device, *, shard_group=None, replica_group=None,\n"
    "     param_dtype=None, reduce_dtype=None, use_orig_params=True,\n"
    "     reshard_after_forward=True, shows_kept=True,\n"
    "     reshard_after_backward_without_sync=True, backward_prefetch=1,\n"
    "     forward_prefetch=False, cast_forward_inputs=False,\n"
    "     cast_root_forward_inputs=False, keep_low_precision_grads=False,\n"
    "     offloads=False, shard_dims=None, part_group=None, extended=None,\n"
    "     block_numels=None, like=None, is_apart=False)\n"
    "--\n\n"
    "One unit: the parameters of one wrapped module, flattened and sharded.\n"
    "\n"
    "Creation copies this rank's part of every parameter into a shard on\n"
    "`device` and points the parameters, the same objects, at it.");
PyDoc_STRVAR(unit_forward_doc,
             "forward($self, module, args, kwargs, /)\n--\n\n"
             "Run module(*args, **kwargs) with whole parameters.");
PyDoc_STRVAR(unit_summon_doc,
             "summon($self, /, *, on_first_rank_only=False, on_host=False,\n"
             "       with_grads=False)\n--\n\n"
             "Show whole parameters in their own dtype, between steps.");
PyDoc_STRVAR(unit_watch_doc,
             "watch($self, items, on_change, /)\n--\n\n"
             "Let forward call on_change() first if, of an item (dict, key,\n"
             "value), dict[key] is another object now.");
PyDoc_STRVAR(unit_note_doc,
             "note_forwards($self, function, /)\n--\n\n"
             "Let forward call function() first; None: nothing.");
PyDoc_STRVAR(unit_note_failures_doc,
             "note_failures($self, function, /)\n--\n\n"
             "Let a forward that fails, no recomputation, call\n"
             "function(exception).");
PyDoc_STRVAR(
    unit_note_writes_doc,
    "note_writes($self, function, /)\n--\n\n"
    "Let the first forward during which a parameter is written, to no\n"
    "effect, call function(parameter) before its unit is resharded.");
PyDoc_STRVAR(
    unit_show_doc,
    "show_kept($self, shows, /)\n--\n\n"
    "Let all units of the engine show what they keep for backward, or\n"
    "their shards. Nothing happens inside forward or backward.");
PyDoc_STRVAR(unit_replace_doc,
             "replace_param($self, param, tensor, /)\n--\n\n"
             "Make `tensor` the unit's parameter number `param`.");
PyDoc_STRVAR(
    unit_leave_params_doc,
    "leave_params($self, /)\n--\n\n"
    "Leave the parameters to others, while a graph may keep the unit.");
PyDoc_STRVAR(unit_hook_doc,
             "set_reduce_hook($self, state, hook, /)\n--\n\n"
             "Let hook(state, grad[, output]) reduce the gradients.");
PyDoc_STRVAR(
    unit_custom_doc,
    "set_custom($self, function, kinds, /)\n--\n\n"
    "Let function(kind, pieces, group, rank, scale) make the calls of\n"
    "`kinds`, a sum of CUSTOM_*.");
PyDoc_STRVAR(unit_follow_doc,
             "follow_reductions($self, function, /)\n--\n\n"
             "Let function() run whenever the sharded gradients are complete,\n"
             "in backward; None: nothing.");
PyDoc_STRVAR(
    unit_offload_doc,
    "offload_activations($self, min_nbytes, keep_last, /)\n--\n\n"
    "What a forward saves in storages of at least min_nbytes waits in\n"
    "host memory, but that of the last units; 0: it stays.");
PyDoc_STRVAR(unit_clone_doc,
             "clone($self, params, /)\n--\n\n"
             "Return a unit with a copy of the shards, shown by `params`.");
PyDoc_STRVAR(unit_dismiss_doc,
             "dismiss($self, /, writeback)\n--\n\n"
             "End a summon; with writeback, keep what was written.");
PyDoc_STRVAR(unit_bind_doc,
             "bind_flat_params($self, flat_params, /)\n--\n\n"
             "Let flat_params[i] carry segment i's sharded gradient.");
PyDoc_STRVAR(unit_intersect_doc,
             "intersect($self, /, param, rank)\n--\n\n"
             "(begin, end) in the parameter and (begin, end) in the rank's\n"
             "shard, in elements; all 0 when the rank holds none of it.");
PyDoc_STRVAR(unit_parts_doc,
             "parts($self, param, /)\n--\n\n"
             "Per rank: (begin, end) of what it holds of the parameter, in\n"
             "elements; both 0 when that is nothing.");

PyDoc_STRVAR(
    unit_rows_doc,
    "bind_rows($self, places, make_grad, on_replaced, local_grad=None,\n"
    "extend=None, /)\n"
    "--\n\n"
    "Register plain parameters in forward and backward, sharded ones\n"
    "else, or the part that is kept between, in all places: (dict, key,\n"
    "sharded, plain, part or None, module or None), by setattr() where\n"
    "there is a module. make_grad(param, local)\n"
    "returns a DTensor over `local` and its local tensor.\n"
    "on_replaced() runs before a forward where a place holds neither.\n"
    "local_grad(param, grad) returns the local tensor of a gradient of a\n"
    "parallel parameter, placed like the parameter. extend(param, stage)\n"
    "gathers, shows and frees an extended one.");
PyDoc_STRVAR(unit_part_of_doc,
             "part_of($self, param, /)\n--\n\n"
             "The local tensor of a parameter's part, empty while none is\n"
             "kept.");
PyDoc_STRVAR(unit_sharded_doc,
             "bind_sharded($self, param, dtensor, local, /)\n--\n\n"
             "Let `dtensor` be the sharded parameter number `param`; `local`,\n"
             "its local tensor, becomes a view of the shard.");
PyDoc_STRVAR(unit_parallel_doc,
             "bind_parallel($self, param, dtensor, local, /)\n--\n\n"
             "Let modules see `dtensor` instead of parameter number `param`;\n"
             "`local`, its local tensor, shows what that parameter does.");
PyDoc_STRVAR(unit_unshard_doc,
             "unshard($self, /)\n--\n\n"
             "Issue the all-gather, at the user's request.");
PyDoc_STRVAR(unit_wait_doc,
             "wait_unshard($self, /)\n--\n\n"
             "Wait for it and register plain parameters.");
PyDoc_STRVAR(unit_reshard_doc,
             "reshard($self, /)\n--\n\n"
             "Give unsharded parameters up.");
PyDoc_STRVAR(unit_set_doc,
             "set($self, /, *, sync=-1, reshard_after_forward=-1,\n"
             "    divisor=-1.0, unshard_in_backward=-1, keeps_part=-1,\n"
             "    reshard_after_backward=-1, fills_unused=-1,\n"
             "    keeps_for_inference=-1)\n"
             "--\n\n"
             "Change what is given. divisor 0: the number of ranks.");

PyDoc_STRVAR(unit_prefetches_doc,
             "set_prefetches($self, in_backward, units, /)\n--\n\n"
             "Say which units are gathered right after this one; none: those\n"
             "that the recorded order says.");

static PyMethodDef unit_methods[] = {
    {"forward", (PyCFunction)(void (*)(void))fsdp_unit_object_forward,
     METH_FASTCALL, unit_forward_doc},
    {"summon", (PyCFunction)(void (*)(void))unit_summon,
     METH_VARARGS | METH_KEYWORDS, unit_summon_doc},
    {"watch", fsdp_unit_object_watch, METH_VARARGS, unit_watch_doc},
    {"note_forwards", fsdp_unit_object_note_forwards, METH_O, unit_note_doc},
    {"note_failures", fsdp_unit_object_note_failures, METH_O,
     unit_note_failures_doc},
    {"note_writes", fsdp_unit_object_note_writes, METH_O, unit_note_writes_doc},
    {"show_kept", unit_show_kept, METH_O, unit_show_doc},
    {"replace_param", unit_replace_param, METH_VARARGS, unit_replace_doc},
    {"leave_params", unit_leave_params, METH_NOARGS, unit_leave_params_doc},
    {"set_reduce_hook", unit_set_reduce_hook, METH_VARARGS, unit_hook_doc},
    {"set_custom", unit_set_custom, METH_VARARGS, unit_custom_doc},
    {"follow_reductions", unit_follow_reductions, METH_O, unit_follow_doc},
    {"offload_activations", fsdp_unit_object_offload, METH_VARARGS,
     unit_offload_doc},
    {"clone", unit_clone, METH_O, unit_clone_doc},
    {"dismiss", (PyCFunction)(void (*)(void))unit_dismiss,
     METH_VARARGS | METH_KEYWORDS, unit_dismiss_doc},
    {"bind_rows", fsdp_unit_object_bind_rows, METH_VARARGS, unit_rows_doc},
    {"part_of", fsdp_unit_object_part_of, METH_O, unit_part_of_doc},
    {"bind_sharded", fsdp_unit_object_bind_sharded, METH_VARARGS,
     unit_sharded_doc},
    {"bind_parallel", fsdp_unit_object_bind_parallel, METH_VARARGS,
     unit_parallel_doc},
    {"unshard", fsdp_unit_object_unshard, METH_NOARGS, unit_unshard_doc},
    {"wait_unshard", fsdp_unit_object_wait_unshard, METH_NOARGS, unit_wait_doc},
    {"reshard", fsdp_unit_object_reshard, METH_NOARGS, unit_reshard_doc},
    {"set", (PyCFunction)(void (*)(void))fsdp_unit_object_set,
     METH_VARARGS | METH_KEYWORDS, unit_set_doc},
    {"set_prefetches", fsdp_unit_object_set_prefetches, METH_VARARGS,
     unit_prefetches_doc},
    {"bind_flat_params", unit_bind_flat_params, METH_O, unit_bind_doc},
    {"intersect", (PyCFunction)(void (*)(void))unit_intersect,
     METH_VARARGS | METH_KEYWORDS, unit_intersect_doc},
    {"parts", unit_parts, METH_O, unit_parts_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef unit_getset[] = {
    {"name", unit_get_name, NULL, "Name for messages.", NULL},
    {"state", unit_get_state, NULL, "Lifecycle state, as 'SHARDED'.", NULL},
    {"full_precision", unit_get_full_precision, unit_set_full_precision,
     "Whether the next forward runs in the parameters' own dtype.", NULL},
    {"is_summoned", unit_get_is_summoned, NULL,
     "Whether whole parameters are shown between steps.", NULL},
    {"is_requested", unit_get_is_requested, NULL,
     "Whether unshard() of the user holds, whether or not it has ended.", NULL},
    {"holds_grads", unit_get_holds_grads, NULL,
     "Whether gradients of a no_sync backward wait to be reduced.", NULL},
    {"layout", unit_get_layout, NULL,
     "Where the parameters lie in the shards, as a Layout.", NULL},
    {"slots", unit_get_slots, NULL,
     "Per parameter: (segment, offset, numel), in elements.", NULL},
    {"segments", unit_get_segments, NULL,
     "Per segment: (dtype, requires_grad, num_params, unsharded_numel,\n"
     "shard_numel, padded_numel).",
     NULL},
    {"shards", unit_get_shards, NULL, "Per segment: this rank's shard, 1-D.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot unit_slots[] = {
    {Py_tp_doc, FSDP_SLOT(unit_doc)},
    {Py_tp_new, FSDP_SLOT(unit_new)},
    {Py_tp_dealloc, FSDP_SLOT(unit_dealloc)},
    {Py_tp_traverse, FSDP_SLOT(unit_traverse)},
    {Py_tp_clear, FSDP_SLOT(unit_clear)},
    {Py_tp_repr, FSDP_SLOT(unit_repr)},
    {Py_tp_methods, FSDP_SLOT(unit_methods)},
    {Py_tp_getset, FSDP_SLOT(unit_getset)},
    {0, NULL},
};

PyType_Spec fsdp_unit_object_spec = {
    .name = "fsdp_c._native.Unit",
    .basicsize = sizeof(unit_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = unit_slots,
};
