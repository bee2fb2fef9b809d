/*
 * The Layout type: where parameters lie in flat shards, of a unit or by
 * themselves; and the same for the Unit type.
 */
#include "python/convert.h"

typedef struct layout_object {
  PyObject_HEAD
  const fsdp_flat_layout *layout;
  fsdp_flat_layout *owned; /* `layout`, or NULL when it is the owner's */
  PyObject *owner;         /* the Unit that `layout` belongs to, or NULL */
} layout_object;

const fsdp_flat_layout *fsdp_layout_object_layout(PyObject *object) {
  return ((layout_object *)object)->layout;
}

PyObject *fsdp_layout_object_share(const module_state *state,
                                   const fsdp_flat_layout *layout,
                                   PyObject *owner) {
  PyTypeObject *type = state->layout_type; /* borrowed */
  layout_object *self = (layout_object *)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  self->layout = layout;
  self->owner = Py_NewRef(owner);
  return (PyObject *)self;
}

/* Construction ------------------------------------------------------------- */

/* One (numel, dtype, requires_grad). 0, or -1 with an exception. */
static int read_param(PyObject *item, Py_ssize_t index, fsdp_param_spec *spec) {
  fsdp_error error = {0};
  long long numel;
  PyObject *dtype; /* borrowed */
  int requires_grad;
  if (!PyTuple_Check(item)) {
    PyErr_Format(PyExc_TypeError,
                 "params[%zd] must be a tuple (numel, dtype, requires_grad), "
                 "got %R",
                 index, item);
    return -1;
  }
  if (!PyArg_ParseTuple(item, "LOp;params must be (numel, dtype, bool)", &numel,
                        &dtype, &requires_grad)) {
    return -1;
  }
  if (fsdp_torch_read_dtype(dtype, &spec->dtype, &error) != FSDP_OK) {
    PyErr_Format(PyExc_TypeError,
                 "params[%zd] has dtype %R, need a torch.dtype", index, dtype);
    return -1;
  }
  spec->key = (uint64_t)index; /* none is shared */
  spec->numel = numel;
  spec->requires_grad = requires_grad != 0;
  return 0;
}

/* A new array, released with PyMem_Free(); NULL with an exception. */
static fsdp_param_spec *read_params(PyObject *params, Py_ssize_t *num_params) {
  fsdp_param_spec *specs = NULL;
  PyObject *items = PySequence_Tuple(params);
  if (items == NULL) return NULL;
  const Py_ssize_t num = PyTuple_GET_SIZE(items);
  specs = PyMem_New(fsdp_param_spec, (size_t)num + 1);
  if (specs == NULL) (void)PyErr_NoMemory(); /* returns NULL */
  for (Py_ssize_t i = 0; specs != NULL && i < num; i++) {
    if (read_param(PyTuple_GET_ITEM(items, i), i, &specs[i]) < 0) {
      PyMem_Free(specs);
      specs = NULL;
    }
  }
  *num_params = num;
  Py_DECREF(items);
  return specs;
}

/* One number per parameter, or NULL with an exception. */
static int64_t *read_numels(PyObject *sequence, const char *name,
                            int64_t num_params) {
  Py_ssize_t num_numels = 0;
  int64_t *numels = fsdp_read_int64s(sequence, name, 1, &num_numels);
  if (numels == NULL || num_numels == num_params) return numels;
  PyErr_Format(PyExc_ValueError, "Layout() needs as many %s as params, got %zd",
               name, num_numels);
  PyMem_Free(numels);
  return NULL;
}

/* What says how a layout is made; None: not so. Borrowed. */
typedef struct layout_rules {
  PyObject *row_numels, *block_numels, *segments, *offsets, *shard_numels;
} layout_rules;

/* FSDP_INVALID_ARGUMENT  also: with an exception, `error` is not set. */
static fsdp_status make_placed(const fsdp_param_table *table,
                               const layout_rules *rules, int64_t world_size,
                               fsdp_flat_layout **layout, fsdp_error *error) {
  const int64_t num_params = fsdp_param_table_num_params(table);
  fsdp_status status = FSDP_INVALID_ARGUMENT;
  Py_ssize_t num_segments = 0;
  int64_t *offsets = NULL, *numels = NULL;
  int64_t *segments = read_numels(rules->segments, "segments", num_params);
  if (segments == NULL) goto done;
  offsets = read_numels(rules->offsets, "offsets", num_params);
  if (offsets == NULL) goto done;
  numels =
      fsdp_read_int64s(rules->shard_numels, "shard_numels", 1, &num_segments);
  if (numels == NULL) goto done;
  status =
      fsdp_flat_layout_create_placed(table, segments, offsets, numels,
                                     num_segments, world_size, layout, error);
done:
  PyMem_Free(numels);
  PyMem_Free(offsets);
  PyMem_Free(segments);
  return status;
}

/* -1 with an exception. */
static int make_layout(const fsdp_param_table *table, const layout_rules *rules,
                       int64_t world_size, fsdp_alignment alignment,
                       fsdp_flat_layout **layout) {
  const int64_t num_params = fsdp_param_table_num_params(table);
  fsdp_error error = {0};
  fsdp_status status;
  int64_t *numels = NULL;
  if (rules->row_numels != Py_None) {
    numels = read_numels(rules->row_numels, "row_numels", num_params);
    if (numels == NULL) return -1;
    status = fsdp_flat_layout_create_by_rows(table, numels, world_size, layout,
                                             &error);
  } else if (rules->block_numels != Py_None) {
    numels = read_numels(rules->block_numels, "block_numels", num_params);
    if (numels == NULL) return -1;
    status = fsdp_flat_layout_create_in_blocks(table, numels, world_size,
                                               alignment, layout, &error);
  } else if (rules->offsets != Py_None) {
    status = make_placed(table, rules, world_size, layout, &error);
  } else {
    status =
        fsdp_flat_layout_create(table, world_size, alignment, layout, &error);
  }
  PyMem_Free(numels);
  if (status == FSDP_OK) return 0;
  if (!PyErr_Occurred()) fsdp_torch_set_python_error(&error);
  return -1;
}

static PyObject *layout_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs) {
  static const char *const keywords[] = {
      "params",     "world_size",   "itemsize", "align_params", "align_shards",
      "row_numels", "block_numels", "segments", "offsets",      "shard_numels",
      NULL};
  PyObject *params; /* borrowed */
  layout_rules rules = {Py_None, Py_None, Py_None, Py_None, Py_None};
  long long world_size;
  int itemsize = FSDP_ALIGNMENT_NBYTES;
  int align_params = -1, align_shards = -1;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "OL|$ippOOOOO:Layout", FSDP_KEYWORDS(keywords), &params,
          &world_size, &itemsize, &align_params, &align_shards,
          &rules.row_numels, &rules.block_numels, &rules.segments,
          &rules.offsets, &rules.shard_numels)) {
    return NULL;
  }
  if (align_params < 0 || align_shards < 0) {
    PyErr_SetString(PyExc_TypeError,
                    "Layout() needs the keyword arguments align_params and "
                    "align_shards");
    return NULL;
  }

  fsdp_error error = {0};
  layout_object *self = NULL;
  fsdp_param_table *table = NULL;
  Py_ssize_t num_params = 0;
  fsdp_param_spec *specs = read_params(params, &num_params);
  if (specs == NULL) return NULL;
  self = (layout_object *)type->tp_alloc(type, 0); /* all fields NULL */
  if (self == NULL) goto done;
  const fsdp_alignment alignment = {
      .itemsize = itemsize,
      .params = align_params != 0,
      .shards = align_shards != 0,
  };
  if (fsdp_param_table_create(specs, num_params, &table, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    Py_CLEAR(self);
    goto done;
  }
  if (make_layout(table, &rules, world_size, alignment, &self->owned) < 0) {
    Py_CLEAR(self);
    goto done;
  }
  self->layout = self->owned;
done:
  fsdp_param_table_destroy(table);
  PyMem_Free(specs);
  return (PyObject *)self;
}

/* No tp_clear: a cycle goes through the owner, which has one. */
static int layout_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((layout_object *)object)->owner);
  return 0;
}

static void layout_dealloc(PyObject *object) {
  layout_object *self = (layout_object *)object;
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(object);
  self->layout = NULL;
  fsdp_flat_layout_destroy(self->owned);
  Py_CLEAR(self->owner);
  type->tp_free(self);
  Py_DECREF(type); /* instances of heap types own a reference to their type */
}

/* What Layout and Unit tell ------------------------------------------------ */

PyObject *fsdp_layout_intersect(const fsdp_flat_layout *layout, PyObject *args,
                                PyObject *kwargs) {
  static const char *const keywords[] = {"param", "rank", NULL};
  long long param, rank;
  fsdp_range in_param, in_shard;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LL:intersect",
                                   FSDP_KEYWORDS(keywords), &param, &rank)) {
    return NULL;
  }
  const long long num_params = fsdp_flat_layout_num_params(layout);
  const long long world_size = fsdp_flat_layout_world_size(layout);
  if (param < 0 || param >= num_params || rank < 0 || rank >= world_size) {
    return PyErr_Format(PyExc_IndexError,
                        "param %lld and rank %lld must be in [0, %lld) and "
                        "[0, %lld)",
                        param, rank, num_params, world_size);
  }
  fsdp_flat_layout_intersect(layout, rank, param, &in_param, &in_shard);
  return Py_BuildValue("LLLL", (long long)in_param.begin,
                       (long long)in_param.end, (long long)in_shard.begin,
                       (long long)in_shard.end);
}

/* One parameter of a layout. */
typedef struct layout_param {
  const fsdp_flat_layout *layout;
  int64_t param;
} layout_param;

static PyObject *part_item(const void *context, int64_t rank) {
  const layout_param *which = context;
  fsdp_range in_param, in_shard;
  fsdp_flat_layout_intersect(which->layout, rank, which->param, &in_param,
                             &in_shard);
  return Py_BuildValue("LL", (long long)in_param.begin,
                       (long long)in_param.end);
}

PyObject *fsdp_layout_parts(const fsdp_flat_layout *layout, PyObject *param) {
  const long long index = PyLong_AsLongLong(param);
  if (index == -1 && PyErr_Occurred()) return NULL;
  const long long num_params = fsdp_flat_layout_num_params(layout);
  if (index < 0 || index >= num_params) {
    return PyErr_Format(PyExc_IndexError, "param %lld must be in [0, %lld)",
                        index, num_params);
  }
  const layout_param which = {layout, index};
  return fsdp_list_of(fsdp_flat_layout_world_size(layout), &which, part_item);
}

static PyObject *slot_item(const void *layout, int64_t param) {
  const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, param);
  return Py_BuildValue("LLL", (long long)slot->segment, (long long)slot->offset,
                       (long long)slot->numel);
}

PyObject *fsdp_layout_slots(const fsdp_flat_layout *layout) {
  return fsdp_list_of(fsdp_flat_layout_num_params(layout), layout, slot_item);
}

static PyObject *segment_item(const void *layout, int64_t index) {
  const fsdp_segment *segment = fsdp_flat_layout_segment(layout, index);
  PyObject *dtype = fsdp_torch_dtype_object(segment->dtype);
  if (dtype == NULL) return NULL;
  return Py_BuildValue("NNLLLL", dtype, PyBool_FromLong(segment->requires_grad),
                       (long long)segment->num_params,
                       (long long)segment->unsharded_numel,
                       (long long)segment->shard_numel,
                       (long long)segment->padded_numel); /* N steals */
}

PyObject *fsdp_layout_segments(const fsdp_flat_layout *layout) {
  return fsdp_list_of(fsdp_flat_layout_num_segments(layout), layout,
                      segment_item);
}

/* The type ----------------------------------------------------------------- */

static PyObject *layout_intersect(PyObject *object, PyObject *args,
                                  PyObject *kwargs) {
  return fsdp_layout_intersect(fsdp_layout_object_layout(object), args, kwargs);
}

static PyObject *layout_parts(PyObject *object, PyObject *param) {
  return fsdp_layout_parts(fsdp_layout_object_layout(object), param);
}

static PyObject *layout_get_slots(PyObject *object, void *Py_UNUSED(closure)) {
  return fsdp_layout_slots(fsdp_layout_object_layout(object));
}

static PyObject *layout_get_segments(PyObject *object,
                                     void *Py_UNUSED(closure)) {
  return fsdp_layout_segments(fsdp_layout_object_layout(object));
}

static PyObject *layout_get_world_size(PyObject *object,
                                       void *Py_UNUSED(closure)) {
  return PyLong_FromLongLong(
      fsdp_flat_layout_world_size(fsdp_layout_object_layout(object)));
}

static PyObject *layout_get_alignment(PyObject *object,
                                      void *Py_UNUSED(closure)) {
  const fsdp_alignment alignment =
      fsdp_flat_layout_alignment(fsdp_layout_object_layout(object));
  return Py_BuildValue("iNN", (int)alignment.itemsize,
                       PyBool_FromLong(alignment.params),
                       PyBool_FromLong(alignment.shards)); /* N steals */
}

static PyObject *layout_get_is_placed(PyObject *object,
                                      void *Py_UNUSED(closure)) {
  return PyBool_FromLong(
      fsdp_flat_layout_is_placed(fsdp_layout_object_layout(object)));
}

PyDoc_STRVAR(
    layout_doc,
    "Layout(params, world_size, *, itemsize=16, align_params, align_shards,\n"
    "       row_numels=None, block_numels=None, segments=None,\n"
    "       offsets=None, shard_numels=None)\n"
    "--\n\n"
    "Where parameters, each (numel, dtype, requires_grad), lie in flat "
    "shards.\n"
    "\n"
    "Raises ValueError for negative numbers, OverflowError and RuntimeError\n"
    "for numbers beyond int64.");
PyDoc_STRVAR(layout_intersect_doc,
             "intersect($self, /, param, rank)\n--\n\n"
             "(begin, end) in the parameter and (begin, end) in the rank's\n"
             "shard, in elements; all 0 when the rank holds none of it.");
PyDoc_STRVAR(layout_parts_doc,
             "parts($self, param, /)\n--\n\n"
             "Per rank: (begin, end) of what it holds of the parameter, in\n"
             "elements; both 0 when that is nothing.");

static PyMethodDef layout_methods[] = {
    {"intersect", (PyCFunction)(void (*)(void))layout_intersect,
     METH_VARARGS | METH_KEYWORDS, layout_intersect_doc},
    {"parts", layout_parts, METH_O, layout_parts_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef layout_getset[] = {
    {"world_size", layout_get_world_size, NULL, "Number of shards.", NULL},
    {"alignment", layout_get_alignment, NULL,
     "(itemsize, align_params, align_shards) of the constructor.", NULL},
    {"is_placed", layout_get_is_placed, NULL,
     "Whether the slots do not follow from alignment or rows.", NULL},
    {"slots", layout_get_slots, NULL,
     "Per parameter: (segment, offset, numel), in elements.", NULL},
    {"segments", layout_get_segments, NULL,
     "Per segment: (dtype, requires_grad, num_params, unsharded_numel,\n"
     "shard_numel, padded_numel).",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot layout_slots[] = {
    {Py_tp_doc, FSDP_SLOT(layout_doc)},
    {Py_tp_new, FSDP_SLOT(layout_new)},
    {Py_tp_dealloc, FSDP_SLOT(layout_dealloc)},
    {Py_tp_traverse, FSDP_SLOT(layout_traverse)},
    {Py_tp_methods, FSDP_SLOT(layout_methods)},
    {Py_tp_getset, FSDP_SLOT(layout_getset)},
    {0, NULL},
};

PyType_Spec fsdp_layout_object_spec = {
    .name = "fsdp_c._native.Layout",
    .basicsize = sizeof(layout_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = layout_slots,
};
