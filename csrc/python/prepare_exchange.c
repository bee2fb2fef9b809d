/*
 * prepare_exchange() and exchange_size(): an exchange of placements, planned
 * for one rank and measured. See state/exchange.h.
 */
#include "python/convert.h"
#include "state/exchange.h"

/* The placement in a tuple, or NULL with an exception. Borrowed. */
static const fsdp_placement *read_placement(const module_state *state,
                                            PyObject *tuple, Py_ssize_t index) {
  PyObject *object = PyTuple_GET_ITEM(tuple, index); /* borrowed */
  if (Py_IS_TYPE(object, state->placement_type)) {
    return fsdp_placement_object_placement(object);
  }
  PyErr_Format(PyExc_TypeError, "expected a Placement, got %R", object);
  return NULL;
}

/* Reads a tuple (itemsize, param, held, needed). 0, or -1 with an exception. */
static int read_item(const module_state *state, PyObject *tuple,
                     Py_ssize_t index, fsdp_exchange_item *item) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4) {
    PyErr_Format(PyExc_TypeError,
                 "items[%zd] must be a tuple (itemsize, param, held, needed), "
                 "got %R",
                 index, tuple);
    return -1;
  }
  item->itemsize = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, 0));
  if (item->itemsize == -1 && PyErr_Occurred()) return -1;
  item->param = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, 1));
  if (item->param == -1 && PyErr_Occurred()) return -1;
  item->held = read_placement(state, tuple, 2);
  if (item->held == NULL) return -1;
  item->needed = read_placement(state, tuple, 3);
  return item->needed == NULL ? -1 : 0;
}

/* A new array of the items of a tuple; NULL with an exception. */
static fsdp_exchange_item *read_items(const module_state *state,
                                      PyObject *tuple) {
  const Py_ssize_t num_items = PyTuple_GET_SIZE(tuple);
  fsdp_exchange_item *items =
      PyMem_New(fsdp_exchange_item, (size_t)num_items + 1);
  if (items == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    return NULL;
  }
  for (Py_ssize_t i = 0; i < num_items; i++) {
    if (read_item(state, PyTuple_GET_ITEM(tuple, i), i, &items[i]) < 0) {
      PyMem_Free(items);
      return NULL;
    }
  }
  return items;
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

PyObject *fsdp_module_prepare_exchange(PyObject *module, PyObject *args,
                                       PyObject *kwargs) {
  static const char *const keywords[] = {
      "rank",    "world_size",    "items", "sources",
      "targets", "direct_nbytes", NULL};
  long long rank, world_size, direct_nbytes;
  PyObject *item_sequence, *source_sequence, *target_sequence;   /* borrowed */
  PyObject *item_tuple = NULL, *sources = NULL, *targets = NULL; /* tuples */
  PyObject *prepared = NULL;
  fsdp_exchange_item *items = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLOOO$L:prepare_exchange",
                                   FSDP_KEYWORDS(keywords), &rank, &world_size,
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
  items = read_items(PyModule_GetState(module), item_tuple);
  if (items == NULL) goto done;
  const fsdp_exchange_spec spec = {
      .items = items,
      .num_items = (int64_t)PyTuple_GET_SIZE(item_tuple),
      .rank = (int64_t)rank,
      .world_size = (int64_t)world_size,
      .direct_nbytes = (int64_t)direct_nbytes,
  };
  prepared = prepare(&spec, sources, targets);
done:
  PyMem_Free(items);
  Py_XDECREF(item_tuple);
  Py_XDECREF(sources);
  Py_XDECREF(targets);
  return prepared;
}

PyObject *fsdp_module_exchange_size(PyObject *module, PyObject *args,
                                    PyObject *kwargs) {
  static const char *const keywords[] = {"items", "direct_nbytes", NULL};
  long long direct_nbytes;
  PyObject *sequence; /* borrowed */
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$L:exchange_size",
                                   FSDP_KEYWORDS(keywords), &sequence,
                                   &direct_nbytes)) {
    return NULL;
  }
  PyObject *tuple = PySequence_Tuple(sequence);
  if (tuple == NULL) return NULL;
  fsdp_exchange_item *items = read_items(PyModule_GetState(module), tuple);
  if (items == NULL) {
    Py_DECREF(tuple);
    return NULL;
  }
  long long nbytes = 0, packed_nbytes = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    const fsdp_exchange_size size =
        fsdp_exchange_item_size(&items[i], direct_nbytes);
    nbytes += size.nbytes;
    packed_nbytes += size.packed_nbytes;
  }
  PyMem_Free(items);
  Py_DECREF(tuple);
  return Py_BuildValue("LL", nbytes, packed_nbytes);
}
