/*
 * The Placement type: see state/placement.h.
 */
#include "python/convert.h"

typedef struct placement_object {
  PyObject_HEAD
  fsdp_placement *placement; /* NULL only until creation has succeeded */
} placement_object;

const fsdp_placement *fsdp_placement_object_placement(PyObject *object) {
  return ((placement_object *)object)->placement;
}

/* Construction ------------------------------------------------------------- */

/* A new object that takes `placement`, or NULL with an exception when it was
 * not made. */
static PyObject *take_placement(PyTypeObject *type, fsdp_placement *placement,
                                fsdp_status status, const fsdp_error *error) {
  if (status != FSDP_OK) {
    fsdp_torch_set_python_error(error);
    return NULL;
  }
  placement_object *self = (placement_object *)type->tp_alloc(type, 0);
  if (self == NULL) {
    fsdp_placement_destroy(placement);
    return NULL;
  }
  self->placement = placement;
  return (PyObject *)self;
}

/* All of `num_ranks`, or the one that `rank` names. 0, or -1 with an
 * exception. */
static int read_ranks(PyObject *rank, int64_t num_ranks, fsdp_range *ranks) {
  *ranks = (fsdp_range){0, num_ranks};
  if (rank == Py_None) return 0;
  const long long index = PyLong_AsLongLong(rank);
  if (index == -1 && PyErr_Occurred()) return -1;
  if (index < 0 || index >= num_ranks) {
    PyErr_Format(PyExc_ValueError, "rank %lld must be in [0, %lld)", index,
                 (long long)num_ranks);
    return -1;
  }
  *ranks = (fsdp_range){index, index + 1};
  return 0;
}

static PyObject *placement_flat(PyObject *type, PyObject *args,
                                PyObject *kwargs) {
  static const char *const keywords[] = {"layout", "segment", "rank", NULL};
  const module_state *state = PyType_GetModuleState((PyTypeObject *)type);
  fsdp_error error = {0};
  fsdp_placement *placement = NULL;
  PyObject *object, *rank = Py_None; /* borrowed */
  long long segment;
  fsdp_range ranks;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!L|$O:flat",
                                   FSDP_KEYWORDS(keywords), state->layout_type,
                                   &object, &segment, &rank)) {
    return NULL;
  }
  const fsdp_flat_layout *layout = fsdp_layout_object_layout(object);
  if (read_ranks(rank, fsdp_flat_layout_world_size(layout), &ranks) < 0) {
    return NULL;
  }
  const fsdp_status status =
      fsdp_placement_create_flat(layout, segment, ranks, &placement, &error);
  return take_placement((PyTypeObject *)type, placement, status, &error);
}

static PyObject *placement_flat_range(PyObject *type, PyObject *args,
                                      PyObject *kwargs) {
  static const char *const keywords[] = {"layout", "segment", "ranges", NULL};
  enum { NUM_VALUES = 3 };
  const module_state *state = PyType_GetModuleState((PyTypeObject *)type);
  fsdp_error error = {0};
  fsdp_placement *placement = NULL;
  PyObject *object, *sequence; /* borrowed */
  long long segment;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!LO:flat_range",
                                   FSDP_KEYWORDS(keywords), state->layout_type,
                                   &object, &segment, &sequence)) {
    return NULL;
  }
  fsdp_param_range *ranges = NULL;
  Py_ssize_t num_ranges = 0;
  int64_t *values =
      fsdp_read_int64s(sequence, "ranges", NUM_VALUES, &num_ranges);
  if (values == NULL) return NULL;
  ranges = PyMem_New(fsdp_param_range, (size_t)num_ranges + 1);
  if (ranges == NULL) {
    PyMem_Free(values);
    return PyErr_NoMemory();
  }
  for (Py_ssize_t i = 0; i < num_ranges; i++) {
    const int64_t *row = values + i * NUM_VALUES;
    ranges[i] = (fsdp_param_range){row[0], {row[1], row[2]}};
  }
  const fsdp_status status = fsdp_placement_create_flat_range(
      fsdp_layout_object_layout(object), segment, ranges, num_ranges,
      &placement, &error);
  PyMem_Free(ranges);
  PyMem_Free(values);
  return take_placement((PyTypeObject *)type, placement, status, &error);
}

static PyObject *placement_on_ranks(PyObject *type, PyObject *args,
                                    PyObject *kwargs) {
  static const char *const keywords[] = {"numels", "begin", "end", NULL};
  fsdp_error error = {0};
  fsdp_placement *placement = NULL;
  PyObject *sequence; /* borrowed */
  long long begin, end;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLL:on_ranks",
                                   FSDP_KEYWORDS(keywords), &sequence, &begin,
                                   &end)) {
    return NULL;
  }
  Py_ssize_t num_params = 0;
  int64_t *numels = fsdp_read_int64s(sequence, "numels", 1, &num_params);
  if (numels == NULL) return NULL;
  const fsdp_status status = fsdp_placement_create_on_ranks(
      numels, num_params, (fsdp_range){begin, end}, &placement, &error);
  PyMem_Free(numels);
  return take_placement((PyTypeObject *)type, placement, status, &error);
}

/* The rows of a tensor of shape `shape`. 0, or -1 with an exception. */
static int read_shape(PyObject *shape, Py_ssize_t index,
                      fsdp_param_rows *rows) {
  Py_ssize_t num_dims = 0;
  int64_t *dims = fsdp_read_int64s(shape, "shape", 1, &num_dims);
  if (dims == NULL) return -1;
  int status = 0;
  bool fits = true;
  *rows = (fsdp_param_rows){num_dims > 0 ? dims[0] : 1, 1};
  for (Py_ssize_t i = 0; i < num_dims; i++) {
    if (dims[i] < 0) status = -1;
    if (i > 0 && !fsdp_mul_i64(rows->row_numel, dims[i], &rows->row_numel)) {
      fits = false;
    }
  }
  PyMem_Free(dims);
  if (status < 0 || !fits) {
    PyErr_Format(status < 0 ? PyExc_ValueError : PyExc_OverflowError,
                 "shapes[%zd] is %R, need dimensions >= 0 whose product fits "
                 "in int64",
                 index, shape);
    return -1;
  }
  return 0;
}

static PyObject *placement_rows(PyObject *type, PyObject *args,
                                PyObject *kwargs) {
  static const char *const keywords[] = {"shapes", "num_ranks", "rank", NULL};
  fsdp_error error = {0};
  fsdp_placement *placement = NULL;
  PyObject *sequence, *rank = Py_None; /* borrowed */
  long long num_ranks;
  fsdp_range ranks;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OL|$O:rows",
                                   FSDP_KEYWORDS(keywords), &sequence,
                                   &num_ranks, &rank)) {
    return NULL;
  }
  if (read_ranks(rank, num_ranks, &ranks) < 0) return NULL;
  PyObject *result = NULL;
  fsdp_param_rows *params = NULL;
  PyObject *shapes = PySequence_Tuple(sequence);
  if (shapes == NULL) return NULL;
  const Py_ssize_t num_params = PyTuple_GET_SIZE(shapes);
  params = PyMem_New(fsdp_param_rows, (size_t)num_params + 1);
  if (params == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  for (Py_ssize_t i = 0; i < num_params; i++) {
    if (read_shape(PyTuple_GET_ITEM(shapes, i), i, &params[i]) < 0) goto done;
  }
  const fsdp_status status = fsdp_placement_create_rows(
      params, num_params, num_ranks, ranks, &placement, &error);
  result = take_placement((PyTypeObject *)type, placement, status, &error);
done:
  PyMem_Free(params);
  Py_DECREF(shapes);
  return result;
}

static void placement_dealloc(PyObject *object) {
  placement_object *self = (placement_object *)object;
  PyTypeObject *type = Py_TYPE(self);
  fsdp_placement_destroy(self->placement);
  type->tp_free(self);
  Py_DECREF(type); /* instances of heap types own a reference to their type */
}

/* What it tells ------------------------------------------------------------ */

static PyObject *piece_item(const void *placement, int64_t index) {
  const fsdp_piece *piece = &fsdp_placement_pieces(placement)[index];
  return Py_BuildValue("LLLLL", (long long)piece->param,
                       (long long)piece->in_param.begin,
                       (long long)piece->in_param.end, (long long)piece->buffer,
                       (long long)piece->offset);
}

static PyObject *placement_get_pieces(PyObject *object,
                                      void *Py_UNUSED(closure)) {
  const fsdp_placement *placement = fsdp_placement_object_placement(object);
  return fsdp_list_of(fsdp_placement_num_pieces(placement), placement,
                      piece_item);
}

static PyObject *placement_numel(PyObject *object, PyObject *args) {
  long long param, buffer;
  if (!PyArg_ParseTuple(args, "LL:numel", &param, &buffer)) return NULL;
  int64_t num_pieces = 0;
  const fsdp_piece *pieces = fsdp_placement_pieces_of(
      fsdp_placement_object_placement(object), param, &num_pieces);
  long long numel = 0;
  for (int64_t i = 0; i < num_pieces; i++) {
    if (pieces[i].buffer != buffer) continue;
    numel += pieces[i].in_param.end - pieces[i].in_param.begin;
  }
  return PyLong_FromLongLong(numel);
}

static PyObject *buffer_item(const void *pieces, int64_t index) {
  return PyLong_FromLongLong(((const fsdp_piece *)pieces)[index].buffer);
}

static PyObject *placement_buffers(PyObject *object, PyObject *param) {
  const long long index = PyLong_AsLongLong(param);
  if (index == -1 && PyErr_Occurred()) return NULL;
  int64_t num_pieces = 0;
  const fsdp_piece *pieces = fsdp_placement_pieces_of(
      fsdp_placement_object_placement(object), index, &num_pieces);
  return fsdp_list_of(num_pieces, pieces, buffer_item);
}

static Py_ssize_t placement_length(PyObject *object) {
  return (Py_ssize_t)fsdp_placement_num_pieces(
      fsdp_placement_object_placement(object));
}

/* The type ----------------------------------------------------------------- */

PyDoc_STRVAR(
    placement_doc,
    "Where elements of parameters lie: pieces (param, begin, end, buffer,\n"
    "offset) say that elements [begin, end) of the flattened parameter are in\n"
    "the buffer from element `offset` on. len() is the number of pieces.");
PyDoc_STRVAR(
    placement_flat_doc,
    "flat($type, /, layout, segment, *, rank=None)\n--\n\n"
    "A segment's shards: buffer = rank; of one rank when it is given.");
PyDoc_STRVAR(
    placement_flat_range_doc,
    "flat_range($type, /, layout, segment, ranges)\n--\n\n"
    "Of a segment's shards, what holds `ranges`: (param, begin, end).\n"
    "Costs as much as it returns, whatever the number of ranks.");
PyDoc_STRVAR(placement_on_ranks_doc,
             "on_ranks($type, /, numels, begin, end)\n--\n\n"
             "Whole parameters on each rank in [begin, end): buffer = rank.");
PyDoc_STRVAR(placement_buffers_doc,
             "buffers($self, param, /)\n--\n\n"
             "The buffers of a parameter's pieces.");
PyDoc_STRVAR(placement_numel_doc,
             "numel($self, param, buffer, /)\n--\n\n"
             "Elements of a parameter in a buffer.");
PyDoc_STRVAR(
    placement_rows_doc,
    "rows($type, /, shapes, num_ranks, *, rank=None)\n--\n\n"
    "Cut along dimension 0 as torch.chunk does: buffer = rank, a rank's parts\n"
    "one behind the other; of one rank when it is given. Scalars: rank 0.");

#define CLASS_METHOD(name)                               \
  {#name, (PyCFunction)(void (*)(void))placement_##name, \
   METH_VARARGS | METH_KEYWORDS | METH_CLASS, placement_##name##_doc}
static PyMethodDef placement_methods[] = {
    CLASS_METHOD(flat),
    CLASS_METHOD(flat_range),
    CLASS_METHOD(on_ranks),
    CLASS_METHOD(rows),
    {"buffers", placement_buffers, METH_O, placement_buffers_doc},
    {"numel", placement_numel, METH_VARARGS, placement_numel_doc},
    {NULL, NULL, 0, NULL},
};
#undef CLASS_METHOD

static PyGetSetDef placement_getset[] = {
    {"pieces", placement_get_pieces, NULL,
     "(param, begin, end, buffer, offset) each, by (param, begin).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot placement_slots[] = {
    {Py_tp_doc, FSDP_SLOT(placement_doc)},
    {Py_tp_dealloc, FSDP_SLOT(placement_dealloc)},
    {Py_tp_methods, FSDP_SLOT(placement_methods)},
    {Py_tp_getset, FSDP_SLOT(placement_getset)},
    {Py_sq_length, FSDP_SLOT(placement_length)},
    {0, NULL},
};

/* No Py_TPFLAGS_HAVE_GC: the object owns no PyObject other than its type. */
PyType_Spec fsdp_placement_object_spec = {
    .name = "fsdp_c._native.Placement",
    .basicsize = sizeof(placement_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = placement_slots,
};
