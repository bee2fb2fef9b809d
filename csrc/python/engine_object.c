/*
 * The Engine type: Python's view of the engine that runs the units of one
 * module tree.
 */
#include "python/module.h"

typedef struct engine_object {
  PyObject_HEAD
  fsdp_torch_engine *engine; /* NULL before creation and after tp_clear */
  PyObject *units;           /* tuple of Unit; they outlive `engine` */
} engine_object;

static PyObject *engine_new(PyTypeObject *type, PyObject *args,
                            PyObject *kwargs) {
  static const char *const keywords[] = {"units", NULL};
  PyObject *sequence; /* borrowed */
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Engine",
                                   FSDP_KEYWORDS(keywords), &sequence)) {
    return NULL;
  }
  const module_state *state = PyType_GetModuleState(type);
  if (state == NULL) return NULL;

  engine_object *self = NULL;
  fsdp_torch_unit **handles = NULL;
  PyObject *units = PySequence_Tuple(sequence);
  if (units == NULL) return NULL;
  const Py_ssize_t num_units = PyTuple_GET_SIZE(units);

  handles = PyMem_New(fsdp_torch_unit *, (size_t)num_units + 1);
  if (handles == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  for (Py_ssize_t i = 0; i < num_units; i++) {
    PyObject *unit = PyTuple_GET_ITEM(units, i); /* borrowed */
    if (!Py_IS_TYPE(unit, state->unit_type)) {
      PyErr_Format(PyExc_TypeError, "units[%zd] must be a Unit, got %.200s", i,
                   Py_TYPE(unit)->tp_name);
      goto done;
    }
    handles[i] = ((unit_object *)unit)->unit;
  }
  self = (engine_object *)type->tp_alloc(type, 0); /* both fields NULL */
  if (self == NULL) goto done;
  self->units = Py_NewRef(units);

  FSDP_LOCAL_ERROR(error);
  if (fsdp_torch_engine_create(handles, num_units, &self->engine, &error) !=
      FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    Py_CLEAR(self);
  }
done:
  PyMem_Free(handles);
  Py_DECREF(units);
  return (PyObject *)self;
}

static int engine_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((engine_object *)object)->units);
  return 0;
}

/* The engine goes before its units: it refers to them. */
static int engine_clear(PyObject *object) {
  engine_object *self = (engine_object *)object;
  fsdp_torch_engine *engine = self->engine;
  self->engine = NULL;
  fsdp_torch_engine_destroy(engine);
  Py_CLEAR(self->units);
  return 0;
}

static void engine_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  (void)engine_clear(object); /* always 0 */
  type->tp_free(object);
  Py_DECREF(type); /* instances of heap types own a reference to their type */
}

/* Borrowed, or NULL with an exception when the engine is gone. */
static fsdp_torch_engine *engine_of(PyObject *object) {
  fsdp_torch_engine *engine = ((engine_object *)object)->engine;
  if (engine == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "this engine was cleared");
  }
  return engine;
}

/* Properties --------------------------------------------------------------- */

static PyObject *engine_get_sync(PyObject *object, void *Py_UNUSED(closure)) {
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  return PyLong_FromLong(fsdp_engine_get_sync(fsdp_torch_engine_core(engine)));
}

static int engine_set_sync(PyObject *object, PyObject *value,
                           void *Py_UNUSED(closure)) {
  if (value == NULL) {
    PyErr_SetString(PyExc_AttributeError, "sync cannot be deleted");
    return -1;
  }
  const long sync = PyLong_AsLong(value);
  if (sync == -1 && PyErr_Occurred()) return -1;
  if (sync < FSDP_SYNC_NONE || sync > FSDP_SYNC_SHARD) {
    PyErr_Format(PyExc_ValueError,
                 "sync must be SYNC_NONE, SYNC_REDUCE or SYNC_SHARD, got %ld",
                 sync);
    return -1;
  }
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return -1;
  fsdp_engine_set_sync(fsdp_torch_engine_core(engine), (fsdp_sync)sync);
  return 0;
}

static PyObject *engine_get_in_forward(PyObject *object,
                                       void *Py_UNUSED(closure)) {
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  return PyBool_FromLong(
      fsdp_engine_in_forward(fsdp_torch_engine_core(engine)));
}

static PyObject *engine_get_in_backward(PyObject *object,
                                        void *Py_UNUSED(closure)) {
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  return PyBool_FromLong(
      fsdp_engine_in_backward(fsdp_torch_engine_core(engine)));
}

/* Methods ------------------------------------------------------------------ */

static PyObject *engine_check_order(PyObject *object, PyObject *value) {
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  const int is_on = PyObject_IsTrue(value);
  if (is_on < 0) return NULL;
  fsdp_engine_set_order_check(fsdp_torch_engine_core(engine), is_on != 0);
  Py_RETURN_NONE;
}

static PyObject *engine_wait_for_reduces(PyObject *object, PyObject *value) {
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  const int waits = PyObject_IsTrue(value);
  if (waits < 0) return NULL;
  fsdp_engine_set_waits_for_reduces(fsdp_torch_engine_core(engine), waits != 0);
  Py_RETURN_NONE;
}

static PyObject *engine_reset(PyObject *object, PyObject *Py_UNUSED(ignored)) {
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  fsdp_torch_engine_reset(engine);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyObject *engine_reduce_kept(PyObject *object,
                                    PyObject *Py_UNUSED(ignored)) {
  fsdp_torch_engine *engine = engine_of(object);
  FSDP_LOCAL_ERROR(error);
  fsdp_status status;
  if (engine == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_torch_engine_reduce_kept(engine, &error);
  Py_END_ALLOW_THREADS;
  return fsdp_none_or_error(status, &error);
}

static PyObject *engine_run_capture_stage(PyObject *object, PyObject *value) {
  const long stage = PyLong_AsLong(value);
  if (stage == -1 && PyErr_Occurred()) return NULL;
  if (stage < FSDP_TORCH_BEGIN_CAPTURE || stage > FSDP_TORCH_END_REPLAY) {
    return PyErr_Format(PyExc_ValueError,
                        "stage must be BEGIN_CAPTURE to END_REPLAY, "
                        "got %ld",
                        stage);
  }
  fsdp_torch_engine *engine = engine_of(object);
  FSDP_LOCAL_ERROR(error);
  fsdp_status status;
  if (engine == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_torch_engine_run_capture_stage(
      engine, (fsdp_torch_capture_stage)stage, &error);
  Py_END_ALLOW_THREADS;
  return fsdp_none_or_error(status, &error);
}

static PyObject *engine_memory_stats(PyObject *object,
                                     PyObject *Py_UNUSED(ignored)) {
  fsdp_torch_engine *engine = engine_of(object);
  fsdp_engine_stats stats;
  if (engine == NULL) return NULL;
  fsdp_engine_get_stats(fsdp_torch_engine_core(engine), &stats);
  fsdp_offload_stats offload;
  fsdp_torch_engine_offload_stats(engine, &offload);

  const struct {
    const char *name;
    int64_t value;
  } entries[] = {
      {"num_clients", stats.arena.num_clients},
      {"num_blocks", stats.arena.num_blocks},
      {"arena_nbytes", stats.arena.nbytes},
      {"held_nbytes", stats.arena.held_nbytes},
      {"peak_nbytes", stats.arena.peak_nbytes},
      {"num_allocs", stats.arena.num_allocs},
      {"num_frees", stats.arena.num_frees},
      {"num_units", stats.num_units},
      {"shard_nbytes", stats.shard_nbytes},
      {"grad_shard_nbytes", stats.grad_shard_nbytes},
      {"partial_grad_nbytes", stats.partial_grad_nbytes},
      {"scratch_nbytes", stats.scratch_nbytes},
      {"ring_nbytes", fsdp_torch_engine_ring_nbytes(engine)},
      {"offloaded_nbytes", offload.held_nbytes},
      {"peak_offloaded_nbytes", offload.peak_nbytes},
      {"pinned_nbytes", offload.host_nbytes},
      {"num_downloads", offload.num_downloads},
      {"num_uploads", offload.num_uploads},
      {"num_iterations", stats.num_iterations},
      {"num_all_gathers", stats.num_all_gathers},
      {"num_reduces", stats.num_reduces},
      {"num_prefetches", stats.num_prefetches},
  };
  PyObject *result = PyDict_New();
  if (result == NULL) return NULL;
  for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
    PyObject *value = PyLong_FromLongLong(entries[i].value);
    const int failed = value == NULL ||
                       PyDict_SetItemString(result, entries[i].name, value) < 0;
    Py_XDECREF(value);
    if (failed) {
      Py_DECREF(result);
      return NULL;
    }
  }
  return result;
}

static PyObject *engine_log(PyObject *object, PyObject *Py_UNUSED(ignored)) {
  enum { SEQUENCE_NBYTES = 24 }; /* digits of an int64, blanks, newline */
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  const fsdp_op_log *log = fsdp_engine_log(fsdp_torch_engine_core(engine));

  size_t text_nbytes = 1;
  for (int64_t i = 0; i < FSDP_OP_LOG_CAPACITY && i < log->num_recorded; i++) {
    const fsdp_op_log_entry *entry = &log->entries[i];
    text_nbytes += SEQUENCE_NBYTES + strlen(entry->operation);
    if (entry->unit != NULL) text_nbytes += strlen(entry->unit);
  }
  char *text = PyMem_Malloc(text_nbytes);
  if (text == NULL) return PyErr_NoMemory();
  const size_t num_chars =
      fsdp_op_log_format(log, FSDP_OP_LOG_CAPACITY, text, text_nbytes);
  PyObject *result =
      PyUnicode_DecodeUTF8(text, (Py_ssize_t)num_chars, "replace");
  PyMem_Free(text);
  return result;
}

static PyObject *engine_clip_grad_norm(PyObject *object, PyObject *args,
                                       PyObject *kwargs) {
  static const char *const keywords[] = {"extra_params", "max_norm",
                                         "norm_type", NULL};
  PyObject *extra_params; /* borrowed */
  double max_norm, norm_type;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Odd:clip_grad_norm",
                                   FSDP_KEYWORDS(keywords), &extra_params,
                                   &max_norm, &norm_type)) {
    return NULL;
  }
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  /* A tuple of our own: the GIL is released inside the call. */
  PyObject *params = PySequence_Tuple(extra_params);
  if (params == NULL) return NULL;

  FSDP_LOCAL_ERROR(error);
  PyObject *norm = NULL;
  if (fsdp_torch_engine_clip_grad_norm(engine, &PyTuple_GET_ITEM(params, 0),
                                       PyTuple_GET_SIZE(params), max_norm,
                                       norm_type, &norm, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
  }
  Py_DECREF(params);
  return norm;
}

static PyObject *engine_start_timeline(PyObject *object, PyObject *args) {
  long long capacity, num_steps;
  if (!PyArg_ParseTuple(args, "LL:start_timeline", &capacity, &num_steps)) {
    return NULL;
  }
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  FSDP_LOCAL_ERROR(error);
  fsdp_status status;
  Py_BEGIN_ALLOW_THREADS;
  status =
      fsdp_torch_engine_start_timeline(engine, capacity, num_steps, &error);
  Py_END_ALLOW_THREADS;
  return fsdp_none_or_error(status, &error);
}

static PyObject *engine_stop_timeline(PyObject *object,
                                      PyObject *Py_UNUSED(ignored)) {
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  fsdp_timeline *timeline;
  Py_BEGIN_ALLOW_THREADS;
  timeline = fsdp_torch_engine_stop_timeline(engine);
  Py_END_ALLOW_THREADS;
  if (timeline == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "this engine was not being recorded");
    return NULL;
  }
  const int64_t num_entries = fsdp_timeline_num_entries(timeline);
  const size_t entry_nbytes = sizeof(fsdp_timeline_entry);
  /* Cannot overflow: the ring is in memory. */
  PyObject *result = NULL;
  PyObject *entries = PyBytes_FromStringAndSize(
      NULL, (Py_ssize_t)((size_t)num_entries * entry_nbytes));
  if (entries != NULL) {
    char *target = PyBytes_AS_STRING(entries);
    for (int64_t i = 0; i < num_entries; i++, target += entry_nbytes) {
      memcpy(target, fsdp_timeline_get(timeline, i), entry_nbytes);
    }
    int64_t num_marks = 0;
    const int64_t *marks = fsdp_torch_engine_mark_times(engine, &num_marks);
    result = Py_BuildValue("(Ny#LLL)", entries,
                           num_marks == 0 ? "" : (const char *)marks,
                           num_marks * (Py_ssize_t)sizeof *marks,
                           (long long)fsdp_timeline_num_lost(timeline),
                           (long long)fsdp_timeline_num_steps(timeline),
                           (long long)fsdp_timeline_full_ns(timeline));
  }
  fsdp_timeline_destroy(timeline);
  return result;
}

static bool check_is_of_wholes(int kind) {
  if (fsdp_timeline_is_of_wholes(kind)) return true;
  PyErr_Format(PyExc_ValueError, "span %d is not one of whole parameters",
               kind);
  return false;
}

static PyObject *engine_begin_wholes(PyObject *object, PyObject *args) {
  int kind;
  int32_t mark = -1;
  if (!PyArg_ParseTuple(args, "i:begin_wholes", &kind)) return NULL;
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL || !check_is_of_wholes(kind)) return NULL;
  const int64_t begin_ns =
      fsdp_torch_engine_begin_wholes(engine, (fsdp_timeline_kind)kind, &mark);
  return Py_BuildValue("Li", (long long)begin_ns, (int)mark);
}

static PyObject *engine_end_wholes(PyObject *object, PyObject *args) {
  int kind, mark;
  long long begin_ns, nbytes;
  if (!PyArg_ParseTuple(args, "iLiL:end_wholes", &kind, &begin_ns, &mark,
                        &nbytes)) {
    return NULL;
  }
  fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL || !check_is_of_wholes(kind)) return NULL;
  fsdp_torch_engine_end_wholes(engine, (fsdp_timeline_kind)kind, begin_ns, mark,
                               nbytes);
  Py_RETURN_NONE;
}

static PyObject *engine_get_is_recording(PyObject *object,
                                         void *Py_UNUSED(closure)) {
  const fsdp_torch_engine *engine = engine_of(object);
  if (engine == NULL) return NULL;
  return PyBool_FromLong(fsdp_torch_engine_is_recording(engine));
}

/* The type ----------------------------------------------------------------- */

PyDoc_STRVAR(engine_doc,
             "Engine(units)\n--\n\n"
             "Runs the units of one module tree, given parents first.\n"
             "\n"
             "Units that belong to another engine move to this one.");
PyDoc_STRVAR(engine_reduce_kept_doc,
             "reduce_kept($self, /)\n--\n\n"
             "Reduce the gradients that backwards kept, and show them.");
PyDoc_STRVAR(engine_run_capture_stage_doc,
             "run_capture_stage($self, stage, /)\n--\n\n"
             "Run a stage of a captured step, in this order: BEGIN_CAPTURE;\n"
             "inside the capture FORK_LANES first and JOIN_LANES last;\n"
             "END_CAPTURE, also after a failure; BEGIN_REPLAY before each\n"
             "replay and END_REPLAY after it.");
PyDoc_STRVAR(engine_reset_doc,
             "reset($self, /)\n--\n\n"
             "Drop what an unfinished step left; all units are SHARDED after.");
PyDoc_STRVAR(engine_wait_for_reduces_doc,
             "wait_for_reduces($self, is_on, /)\n--\n\n"
             "Whether a backward ends with the compute stream waiting for its\n"
             "reductions (default), or leaves that to the next one.");
PyDoc_STRVAR(engine_check_order_doc,
             "check_order($self, is_on, /)\n--\n\n"
             "Whether to compare the ranks before every collective.");
PyDoc_STRVAR(engine_memory_stats_doc,
             "memory_stats($self, /)\n--\n\n"
             "Counts and bytes that the engine holds on this rank.");
PyDoc_STRVAR(engine_log_doc,
             "log($self, /)\n--\n\n"
             "The last operations, one 'sequence operation unit' per line.");
PyDoc_STRVAR(
    engine_clip_doc,
    "clip_grad_norm($self, /, extra_params, max_norm, norm_type)\n--\n\n"
    "Clip all gradients by their total norm and return it, 0-dim.\n"
    "\n"
    "Every rank must call it.");

PyDoc_STRVAR(engine_start_timeline_doc,
             "start_timeline($self, capacity, num_steps, /)\n--\n\n"
             "Record what the engine does from now on, for num_steps steps.");
PyDoc_STRVAR(
    engine_stop_timeline_doc,
    "stop_timeline($self, /)\n--\n\n"
    "End the recording: (entries, marks, num_lost, num_steps, full_ns).\n"
    "Entries are structs of TIMELINE_FORMAT in the order of their ends.");

PyDoc_STRVAR(engine_begin_wholes_doc,
             "begin_wholes($self, kind, /)\n--\n\n"
             "Begin a span of a round of whole parameters: (begin_ns, mark).");
PyDoc_STRVAR(engine_end_wholes_doc,
             "end_wholes($self, kind, begin_ns, mark, nbytes, /)\n--\n\n"
             "End such a span; nothing happens if nothing is recorded.");

static PyMethodDef engine_methods[] = {
    {"reset", engine_reset, METH_NOARGS, engine_reset_doc},
    {"reduce_kept", engine_reduce_kept, METH_NOARGS, engine_reduce_kept_doc},
    {"run_capture_stage", engine_run_capture_stage, METH_O,
     engine_run_capture_stage_doc},
    {"check_order", engine_check_order, METH_O, engine_check_order_doc},
    {"wait_for_reduces", engine_wait_for_reduces, METH_O,
     engine_wait_for_reduces_doc},
    {"memory_stats", engine_memory_stats, METH_NOARGS, engine_memory_stats_doc},
    {"log", engine_log, METH_NOARGS, engine_log_doc},
    {"start_timeline", engine_start_timeline, METH_VARARGS,
     engine_start_timeline_doc},
    {"stop_timeline", engine_stop_timeline, METH_NOARGS,
     engine_stop_timeline_doc},
    {"begin_wholes", engine_begin_wholes, METH_VARARGS,
     engine_begin_wholes_doc},
    {"end_wholes", engine_end_wholes, METH_VARARGS, engine_end_wholes_doc},
    {"clip_grad_norm", (PyCFunction)(void (*)(void))engine_clip_grad_norm,
     METH_VARARGS | METH_KEYWORDS, engine_clip_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_getset[] = {
    {"sync", engine_get_sync, engine_set_sync,
     "What backward does with gradients: SYNC_REDUCE (default), SYNC_NONE or\n"
     "SYNC_SHARD.",
     NULL},
    {"in_forward", engine_get_in_forward, NULL, "Whether a forward is running.",
     NULL},
    {"is_recording", engine_get_is_recording, NULL,
     "Whether a timeline is recorded now: started, not full, not stopped.",
     NULL},
    {"in_backward", engine_get_in_backward, NULL, "Whether a backward is open.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, FSDP_SLOT(engine_doc)},
    {Py_tp_new, FSDP_SLOT(engine_new)},
    {Py_tp_dealloc, FSDP_SLOT(engine_dealloc)},
    {Py_tp_traverse, FSDP_SLOT(engine_traverse)},
    {Py_tp_clear, FSDP_SLOT(engine_clear)},
    {Py_tp_methods, FSDP_SLOT(engine_methods)},
    {Py_tp_getset, FSDP_SLOT(engine_getset)},
    {0, NULL},
};

PyType_Spec fsdp_engine_object_spec = {
    .name = "fsdp_c._native.Engine",
    .basicsize = sizeof(engine_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};
