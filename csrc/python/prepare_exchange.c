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

/* The moves of an exchange, and the items that they are. */
typedef struct move_list {
  PyObject *tuple; /* owned; what the moves borrow from */
  fsdp_exchange_item *items;
  fsdp_torch_move *moves;
} move_list;

/* Reads a tuple (source, dtype, position, held, needed, target, shape). 0, or
 * -1 with an exception. */
static int read_move(const module_state *state, PyObject *tuple,
                     Py_ssize_t index, fsdp_exchange_item *item,
                     fsdp_torch_move *move) {
  enum { SOURCE, DTYPE, POSITION, HELD, NEEDED, TARGET, SHAPE, NUM_FIELDS };
  fsdp_error error = {0};
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != NUM_FIELDS) {
    PyErr_Format(PyExc_TypeError,
                 "moves[%zd] must be a tuple (source, dtype, position, held, "
                 "needed, target, shape), got %R",
                 index, tuple);
    return -1;
  }
  move->source = PyTuple_GET_ITEM(tuple, SOURCE);
  move->target = PyTuple_GET_ITEM(tuple, TARGET);
  move->shape = PyTuple_GET_ITEM(tuple, SHAPE);
  if (fsdp_torch_read_dtype(PyTuple_GET_ITEM(tuple, DTYPE), &move->dtype,
                            &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    return -1;
  }
  item->itemsize = move->dtype.itemsize;
  item->param = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, POSITION));
  if (item->param == -1 && PyErr_Occurred()) return -1;
  item->held = read_placement(state, tuple, HELD);
  if (item->held == NULL) return -1;
  item->needed = read_placement(state, tuple, NEEDED);
  return item->needed == NULL ? -1 : 0;
}

static void release_moves(move_list *list) {
  PyMem_Free(list->items);
  PyMem_Free(list->moves);
  Py_XDECREF(list->tuple);
}

/* release_moves() the list in either case. 0, or -1 with an exception. */
static int read_moves(const module_state *state, PyObject *sequence,
                      move_list *list) {
  *list = (move_list){PySequence_Tuple(sequence), NULL, NULL};
  if (list->tuple == NULL) return -1;
  const Py_ssize_t num_moves = PyTuple_GET_SIZE(list->tuple);
  list->items = PyMem_New(fsdp_exchange_item, (size_t)num_moves + 1);
  list->moves = PyMem_New(fsdp_torch_move, (size_t)num_moves + 1);
  if (list->items == NULL || list->moves == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    return -1;
  }
  for (Py_ssize_t i = 0; i < num_moves; i++) {
    if (read_move(state, PyTuple_GET_ITEM(list->tuple, i), i, &list->items[i],
                  &list->moves[i]) < 0) {
      return -1;
    }
  }
  return 0;
}

/* What the exchange asks of the rank; NULL with an exception. */
static PyObject *prepare(const fsdp_exchange_spec *spec,
                         const fsdp_torch_move *moves, PyObject *device) {
  fsdp_error error = {0};
  fsdp_status status;
  fsdp_exchange *exchange = NULL;
  PyObject *prepared = NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_exchange_create(spec, &exchange, &error);
  Py_END_ALLOW_THREADS;
  if (status == FSDP_OK) {
    status =
        fsdp_torch_exchange_prepare(exchange, moves, device, &prepared, &error);
  }
  if (status != FSDP_OK) fsdp_torch_set_python_error(&error);
  fsdp_exchange_destroy(exchange);
  return prepared;
}

PyObject *fsdp_module_prepare_exchange(PyObject *module, PyObject *args,
                                       PyObject *kwargs) {
  static const char *const keywords[] = {"rank",   "world_size",    "moves",
                                         "device", "direct_nbytes", NULL};
  long long rank, world_size, direct_nbytes;
  PyObject *sequence, *device; /* borrowed */
  PyObject *prepared = NULL;
  move_list list;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLOO$L:prepare_exchange",
                                   FSDP_KEYWORDS(keywords), &rank, &world_size,
                                   &sequence, &device, &direct_nbytes)) {
    return NULL;
  }
  if (read_moves(PyModule_GetState(module), sequence, &list) == 0) {
    const fsdp_exchange_spec spec = {
        .items = list.items,
        .num_items = (int64_t)PyTuple_GET_SIZE(list.tuple),
        .rank = (int64_t)rank,
        .world_size = (int64_t)world_size,
        .direct_nbytes = (int64_t)direct_nbytes,
    };
    prepared = prepare(&spec, list.moves, device);
  }
  release_moves(&list);
  return prepared;
}

PyObject *fsdp_module_exchange_size(PyObject *module, PyObject *args,
                                    PyObject *kwargs) {
  static const char *const keywords[] = {"moves", "direct_nbytes", NULL};
  long long direct_nbytes;
  PyObject *sequence; /* borrowed */
  PyObject *result = NULL;
  move_list list;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$L:exchange_size",
                                   FSDP_KEYWORDS(keywords), &sequence,
                                   &direct_nbytes)) {
    return NULL;
  }
  if (read_moves(PyModule_GetState(module), sequence, &list) == 0) {
    long long nbytes = 0, packed_nbytes = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list.tuple); i++) {
      const fsdp_exchange_size size =
          fsdp_exchange_item_size(&list.items[i], direct_nbytes);
      nbytes += size.nbytes;
      packed_nbytes += size.packed_nbytes;
    }
    result = Py_BuildValue("LL", nbytes, packed_nbytes);
  }
  release_moves(&list);
  return result;
}
