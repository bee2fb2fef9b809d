/*
 * prepare_messages(): an exchange's ranges, from Python, and what they ask of
 * one rank. See state/exchange.h.
 */
#include "python/convert.h"
#include "state/exchange.h"

/* The items of an exchange, and the ranges that they point to. */
typedef struct exchange_items {
  fsdp_exchange_item *items;
  fsdp_range **ranges; /* owned; two per item, NULL where they are shared */
  Py_ssize_t num_items;
  Py_ssize_t world_size; /* -1 before the first */
} exchange_items;

static void release_items(exchange_items *self) {
  if (self->ranges != NULL) {
    for (Py_ssize_t i = 0; i < 2 * self->num_items; i++) {
      PyMem_Free(self->ranges[i]);
    }
  }
  PyMem_Free(self->ranges);
  PyMem_Free(self->items);
}

/* New ranges, one for each rank; NULL with an exception. */
static fsdp_range *read_ranges(exchange_items *self, PyObject *sequence,
                               Py_ssize_t index, const char *name) {
  Py_ssize_t num_ranks = 0;
  int64_t *bounds = fsdp_read_int64s(sequence, name, 2, &num_ranks);
  if (bounds == NULL) return NULL;
  if (self->world_size >= 0 && num_ranks != self->world_size) {
    PyErr_Format(PyExc_ValueError,
                 "items[%zd] is %s by %zd ranks, items[0] is held by %zd",
                 index, name, num_ranks, self->world_size);
    PyMem_Free(bounds);
    return NULL;
  }
  self->world_size = num_ranks;
  fsdp_range *ranges = PyMem_New(fsdp_range, (size_t)num_ranks + 1);
  if (ranges == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
  } else {
    for (Py_ssize_t i = 0; i < num_ranks; i++) {
      ranges[i] = (fsdp_range){bounds[2 * i], bounds[2 * i + 1]};
    }
  }
  PyMem_Free(bounds);
  return ranges;
}

/* Reads items[index], a tuple (itemsize, held, needed). The states of one
 * parameter lie alike: ranges that are the item's before are not read again.
 * 0, or -1 with an exception. */
static int read_item(exchange_items *self, PyObject *const *tuples,
                     Py_ssize_t index) {
  PyObject *tuple = tuples[index];
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 3) {
    PyErr_Format(PyExc_TypeError,
                 "items[%zd] must be a tuple (itemsize, held, needed), got %R",
                 index, tuple);
    return -1;
  }
  const long long itemsize = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, 0));
  if (itemsize == -1 && PyErr_Occurred()) return -1;
  const fsdp_range *sides[2];
  for (Py_ssize_t side = 0; side < 2; side++) {
    PyObject *given = PyTuple_GET_ITEM(tuple, side + 1); /* borrowed */
    if (index > 0 && given == PyTuple_GET_ITEM(tuples[index - 1], side + 1)) {
      const fsdp_exchange_item *last = &self->items[index - 1];
      sides[side] = side == 0 ? last->held : last->needed;
      continue;
    }
    fsdp_range *ranges =
        read_ranges(self, given, index, side == 0 ? "held" : "needed");
    if (ranges == NULL) return -1;
    self->ranges[2 * index + side] = ranges;
    sides[side] = ranges;
  }
  self->items[index] =
      (fsdp_exchange_item){(int64_t)itemsize, sides[0], sides[1]};
  return 0;
}

/* Reads all items of a tuple. 0, or -1 with an exception. */
static int read_items(exchange_items *self, PyObject *tuple) {
  const Py_ssize_t num_items = PyTuple_GET_SIZE(tuple);
  self->items = PyMem_Calloc((size_t)num_items + 1, sizeof *self->items);
  self->ranges = PyMem_Calloc(2 * (size_t)num_items + 1, sizeof *self->ranges);
  self->num_items = num_items;
  self->world_size = -1;
  if (self->items == NULL || self->ranges == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    return -1;
  }
  for (Py_ssize_t i = 0; i < num_items; i++) {
    if (read_item(self, PySequence_Fast_ITEMS(tuple), i) < 0) return -1;
  }
  return 0;
}

/* What the exchange asks of the rank; NULL with an exception. */
static PyObject *prepare(const fsdp_exchange_spec *spec, PyObject *sources,
                         PyObject *targets) {
  fsdp_error error = {0};
  fsdp_status status;
  fsdp_exchange *exchange = NULL;
  PyObject *prepared = NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_exchange_create(spec, &exchange, &error);
  Py_END_ALLOW_THREADS;
  if (status == FSDP_OK) {
    status = fsdp_torch_exchange_prepare(exchange, fsdp_buffers_of(sources),
                                         fsdp_buffers_of(targets), &prepared,
                                         &error);
  }
  if (status != FSDP_OK) fsdp_torch_set_python_error(&error);
  fsdp_exchange_destroy(exchange);
  return prepared;
}

PyObject *fsdp_module_prepare_messages(PyObject *Py_UNUSED(module),
                                       PyObject *args, PyObject *kwargs) {
  static const char *const keywords[] = {"rank",    "items",         "sources",
                                         "targets", "direct_nbytes", NULL};
  long long rank, direct_nbytes;
  PyObject *item_sequence, *source_sequence, *target_sequence;   /* borrowed */
  PyObject *item_tuple = NULL, *sources = NULL, *targets = NULL; /* tuples */
  PyObject *prepared = NULL;
  exchange_items items = {0};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LOOO$L:prepare_messages",
                                   FSDP_KEYWORDS(keywords), &rank,
                                   &item_sequence, &source_sequence,
                                   &target_sequence, &direct_nbytes)) {
    return NULL;
  }
  item_tuple = PySequence_Tuple(item_sequence);
  if (item_tuple == NULL) goto done;
  sources = PySequence_Tuple(source_sequence);
  if (sources == NULL) goto done;
  targets = PySequence_Tuple(target_sequence);
  if (targets == NULL) goto done;
  if (read_items(&items, item_tuple) < 0) goto done;
  const fsdp_exchange_spec spec = {
      .items = items.items,
      .num_items = (int64_t)items.num_items,
      .rank = (int64_t)rank,
      .world_size =
          items.num_items == 0 ? (int64_t)rank + 1 : (int64_t)items.world_size,
      .direct_nbytes = (int64_t)direct_nbytes,
  };
  prepared = prepare(&spec, sources, targets);
done:
  release_items(&items);
  Py_XDECREF(item_tuple);
  Py_XDECREF(sources);
  Py_XDECREF(targets);
  return prepared;
}
