/*
 * plan_step() and choose_alignment(): what a training step needs, without
 * tensors and process groups.
 */
#include "layout/alignment.h"
#include "plan/step_plan.h"
#include "python/convert.h"

/* choose_alignment --------------------------------------------------------- */

PyObject *fsdp_module_choose_alignment(PyObject *Py_UNUSED(module),
                                       PyObject *args, PyObject *kwargs) {
  static const char *const keywords[] = {"param_itemsize", "use_orig_params",
                                         "is_cpu", "unit_nbytes", NULL};
  int param_itemsize, use_orig_params, is_cpu;
  long long unit_nbytes;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ippL:choose_alignment",
                                   FSDP_KEYWORDS(keywords), &param_itemsize,
                                   &use_orig_params, &is_cpu, &unit_nbytes)) {
    return NULL;
  }
  const fsdp_alignment alignment = fsdp_alignment_choose(
      param_itemsize, use_orig_params != 0, is_cpu != 0, unit_nbytes);
  return Py_BuildValue("iNN", (int)alignment.itemsize,
                       PyBool_FromLong(alignment.params),
                       PyBool_FromLong(alignment.shards)); /* N steals */
}

/* Reading ------------------------------------------------------------------ */

/* What plan_step was given, in C. Names and layouts are borrowed from tuples
 * that it owns. */
typedef struct plan_input {
  PyObject *unit_items;
  fsdp_step_unit *units;
  fsdp_segment_options **segments; /* per unit */
  fsdp_step_event *forward;
  fsdp_step_event *backward;
  Py_ssize_t num_units;
  Py_ssize_t num_forward;
  Py_ssize_t num_backward;
} plan_input;

static void free_input(plan_input *input) {
  for (Py_ssize_t i = 0; input->segments != NULL && i < input->num_units; i++) {
    PyMem_Free(input->segments[i]);
  }
  PyMem_Free(input->segments);
  PyMem_Free(input->units);
  PyMem_Free(input->forward);
  PyMem_Free(input->backward);
  Py_XDECREF(input->unit_items);
}

/* One dtype of a unit. 0, or -1 with an exception. */
static int read_dtype(PyObject *object, fsdp_dtype *dtype) {
  fsdp_error error = {0};
  if (fsdp_torch_read_dtype(object, dtype, &error) == FSDP_OK) return 0;
  PyErr_Format(PyExc_TypeError,
               "a segment's dtypes must be torch.dtypes, "
               "got %R",
               object);
  return -1;
}

/* The (param, reduce, held, grad) dtypes of a unit's segments: a new array,
 * released with PyMem_Free(), or NULL with an exception. */
static fsdp_segment_options *read_segments(PyObject *dtypes,
                                           int64_t num_segments) {
  fsdp_segment_options *segments = NULL;
  PyObject *items = PySequence_Tuple(dtypes);
  if (items == NULL) return NULL;
  if (PyTuple_GET_SIZE(items) != (Py_ssize_t)num_segments) {
    PyErr_Format(PyExc_ValueError,
                 "a layout of %lld segments needs as many (param, reduce, "
                 "held, grad) dtypes, got %zd",
                 (long long)num_segments, PyTuple_GET_SIZE(items));
    goto done;
  }
  segments = PyMem_Calloc((size_t)num_segments + 1, sizeof *segments);
  if (segments == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  for (int64_t i = 0; i < num_segments; i++) {
    PyObject *item = PyTuple_GET_ITEM(items, (Py_ssize_t)i); /* borrowed */
    PyObject *param, *reduce, *held, *grad;                  /* borrowed */
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "OOOO", &param, &reduce, &held, &grad) ||
        read_dtype(param, &segments[i].param_dtype) < 0 ||
        read_dtype(reduce, &segments[i].reduce_dtype) < 0 ||
        read_dtype(held, &segments[i].held_dtype) < 0 ||
        read_dtype(grad, &segments[i].grad_dtype) < 0) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError,
                        "dtypes must be tuples (param, reduce, held, grad)");
      }
      PyMem_Free(segments);
      segments = NULL;
      goto done;
    }
  }
done:
  Py_DECREF(items);
  return segments;
}

/* 0, or -1 with an exception. */
static int read_unit(const module_state *state, PyObject *item,
                     fsdp_step_unit *unit, fsdp_segment_options **segments) {
  PyObject *layout, *dtypes; /* borrowed */
  long long num_replicas;
  int reshards, reshards_after_backward, finds_unused, is_apart;
  int backward_prefetch, forward_prefetch, offloads;
  if (!PyTuple_Check(item)) {
    PyErr_Format(PyExc_TypeError, "units must be tuples, got %R", item);
    return -1;
  }
  if (!PyArg_ParseTuple(item, "sO!OLppppipp;a unit of plan_step", &unit->name,
                        state->layout_type, &layout, &dtypes, &num_replicas,
                        &reshards, &reshards_after_backward, &finds_unused,
                        &is_apart, &backward_prefetch, &forward_prefetch,
                        &offloads)) {
    return -1;
  }
  if (num_replicas < 1 || backward_prefetch < FSDP_PREFETCH_NONE ||
      backward_prefetch > FSDP_PREFETCH_POST) {
    PyErr_Format(PyExc_ValueError,
                 "unit '%s': %lld replicas and prefetch %d, need at least 1 "
                 "and one of the PREFETCH constants",
                 unit->name, num_replicas, backward_prefetch);
    return -1;
  }
  unit->layout = fsdp_layout_object_layout(layout);
  unit->num_replicas = num_replicas;
  unit->reshards = reshards != 0;
  unit->reshards_after_backward = reshards_after_backward != 0;
  unit->finds_unused = finds_unused != 0;
  unit->is_apart = is_apart != 0;
  unit->backward_prefetch = (fsdp_prefetch)backward_prefetch;
  unit->forward_prefetch = forward_prefetch != 0;
  unit->offloads = offloads != 0;
  *segments =
      read_segments(dtypes, fsdp_flat_layout_num_segments(unit->layout));
  unit->segments = *segments;
  return *segments == NULL ? -1 : 0;
}

/* 0, or -1 with an exception. */
static int read_event(PyObject *item, fsdp_step_event *event) {
  int kind, requires_grad = 0;
  long long unit, param, nbytes, peak_nbytes;
  long long offload_nbytes = 0, saved_by = 0;
  if (!PyTuple_Check(item)) {
    PyErr_Format(PyExc_TypeError, "events must be tuples, got %R", item);
    return -1;
  }
  if (!PyArg_ParseTuple(item, "iLLLLd|LLp;an event of plan_step", &kind, &unit,
                        &param, &nbytes, &peak_nbytes, &event->seconds,
                        &offload_nbytes, &saved_by, &requires_grad)) {
    return -1;
  }
  if (kind < FSDP_STEP_ENTER || kind > FSDP_STEP_LEAVE) {
    PyErr_Format(PyExc_ValueError, "no such kind of event: %d", kind);
    return -1;
  }
  event->kind = (fsdp_step_event_kind)kind;
  event->unit = unit;
  event->param = param;
  event->nbytes = nbytes;
  event->peak_nbytes = peak_nbytes;
  event->offload_nbytes = offload_nbytes;
  event->saved_by = saved_by;
  event->requires_grad = requires_grad != 0;
  return 0;
}

/* A new array of events, released with PyMem_Free(), and their number; or NULL
 * with an exception. */
static fsdp_step_event *read_events(PyObject *events, Py_ssize_t *num_events) {
  fsdp_step_event *result = NULL;
  PyObject *items = PySequence_Tuple(events);
  if (items == NULL) return NULL;
  *num_events = PyTuple_GET_SIZE(items);
  result = PyMem_Calloc((size_t)*num_events + 1, sizeof *result);
  if (result == NULL) (void)PyErr_NoMemory(); /* returns NULL */
  for (Py_ssize_t i = 0; result != NULL && i < *num_events; i++) {
    if (read_event(PyTuple_GET_ITEM(items, i), &result[i]) < 0) {
      PyMem_Free(result);
      result = NULL;
    }
  }
  Py_DECREF(items);
  return result;
}

/* Fills `input`; 0, or -1 with an exception. */
static int read_input(PyObject *module, PyObject *units, PyObject *forward,
                      PyObject *backward, plan_input *input) {
  const module_state *state = PyModule_GetState(module);
  input->unit_items = PySequence_Tuple(units);
  if (input->unit_items == NULL) return -1;
  input->num_units = PyTuple_GET_SIZE(input->unit_items);
  const size_t num_units = (size_t)input->num_units;
  input->units = PyMem_Calloc(num_units + 1, sizeof *input->units);
  input->segments = PyMem_Calloc(num_units + 1, sizeof *input->segments);
  if (input->units == NULL || input->segments == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    return -1;
  }
  for (Py_ssize_t i = 0; i < input->num_units; i++) {
    if (read_unit(state, PyTuple_GET_ITEM(input->unit_items, i),
                  &input->units[i], &input->segments[i]) < 0) {
      return -1;
    }
  }
  input->forward = read_events(forward, &input->num_forward);
  if (input->forward == NULL) return -1;
  input->backward = read_events(backward, &input->num_backward);
  return input->backward == NULL ? -1 : 0;
}

/* Telling ------------------------------------------------------------------ */

/* Adds `value`, which it takes (NULL: an exception is set). 0, or -1. */
static int add_item(PyObject *dict, const char *name, PyObject *value) {
  const int failed =
      value == NULL || PyDict_SetItemString(dict, name, value) < 0;
  Py_XDECREF(value);
  return failed ? -1 : 0;
}

static int add_int(PyObject *dict, const char *name, int64_t value) {
  return add_item(dict, name, PyLong_FromLongLong(value));
}

static int add_float(PyObject *dict, const char *name, double value) {
  return add_item(dict, name, PyFloat_FromDouble(value));
}

/* What is held at the busiest moment, by purpose. */
static PyObject *peak_dict(const fsdp_step_plan_report *report) {
  return Py_BuildValue(
      "{sLsLsLsLsLsL}", "nbytes", (long long)report->peak_nbytes, "blocks",
      (long long)report->at_peak[FSDP_COUNTED_BLOCKS], "grad_shards",
      (long long)report->at_peak[FSDP_COUNTED_GRAD_SHARDS], "pending_grads",
      (long long)report->at_peak[FSDP_COUNTED_PENDING_GRADS], "activations",
      (long long)report->at_peak[FSDP_COUNTED_ACTIVATIONS], "host",
      (long long)report->at_peak[FSDP_COUNTED_HOST]);
}

static PyObject *collective_dict(const fsdp_collective_count *count) {
  return Py_BuildValue(
      "{sLsLsLsLsd}", "num_launches", (long long)count->num_launches,
      "num_calls", (long long)count->num_calls, "payload_nbytes",
      (long long)count->payload_nbytes, "wire_nbytes",
      (long long)count->wire_nbytes, "seconds", count->seconds);
}

static int add_counts(PyObject *dict, const fsdp_step_plan_report *report) {
  const fsdp_engine_stats *stats = &report->stats;
  const struct {
    const char *name;
    int64_t value;
  } counts[] = {
      {"num_units", stats->num_units},
      {"shard_nbytes", stats->shard_nbytes},
      {"grad_shard_nbytes", stats->grad_shard_nbytes},
      {"partial_grad_nbytes", stats->partial_grad_nbytes},
      {"first_steps_peak_nbytes", stats->arena.peak_nbytes},
      {"scratch_nbytes", stats->scratch_nbytes},
      {"num_step_allocs", report->num_step_allocs},
      {"offloaded_nbytes", report->offload.peak_nbytes},
      {"pinned_nbytes", report->offload.host_nbytes},
  };
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    if (add_int(dict, counts[i].name, counts[i].value) < 0) return -1;
  }
  return 0;
}

static PyObject *float_item(const void *seconds, int64_t index) {
  return PyFloat_FromDouble(((const double *)seconds)[index]);
}

/* A new dict, or NULL with an exception. */
static PyObject *report_dict(const fsdp_step_plan_report *report,
                             const double *unit_seconds, int64_t num_units) {
  const fsdp_collective_count *counts = report->collectives;
  PyObject *dict = PyDict_New();
  if (dict == NULL) return NULL;
  if (add_counts(dict, report) < 0 ||
      add_item(dict, "peak", peak_dict(report)) < 0 ||
      add_item(dict, "all_gather",
               collective_dict(&counts[FSDP_COLLECTIVE_ALL_GATHER])) < 0 ||
      add_item(dict, "reduce_scatter",
               collective_dict(&counts[FSDP_COLLECTIVE_REDUCE_SCATTER])) < 0 ||
      add_item(dict, "all_reduce",
               collective_dict(&counts[FSDP_COLLECTIVE_ALL_REDUCE])) < 0 ||
      add_float(dict, "step_seconds", report->step_seconds) < 0 ||
      add_float(dict, "compute_seconds", report->compute_seconds) < 0 ||
      add_float(dict, "exposed_seconds", report->stall_seconds) < 0 ||
      add_item(dict, "unit_exposed_seconds",
               fsdp_list_of(num_units, unit_seconds, float_item)) < 0) {
    Py_CLEAR(dict);
  }
  return dict;
}

/* plan_step ---------------------------------------------------------------- */

PyObject *fsdp_module_plan_step(PyObject *module, PyObject *args,
                                PyObject *kwargs) {
  static const char *const keywords[] = {
      "units",        "forward",     "backward",     "shard_link",
      "replica_link", "num_batches", "accumulation", "wants_scratch",
      "is_host",      "hosts",       "offload",      NULL};
  PyObject *units, *forward, *backward; /* borrowed */
  fsdp_step_plan_options options = {.num_batches = 1};
  long long num_batches = 1;
  long long num_local = 0;
  int accumulation = FSDP_SYNC_REDUCE, wants_scratch = 0;
  int is_host = 0;
  long long offload_keep_last = 0;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "OOO(dd)(dd)|$Lipp(Ldd)(Ld):plan_step",
          FSDP_KEYWORDS(keywords), &units, &forward, &backward,
          &options.shard_link.bytes_per_second,
          &options.shard_link.latency_seconds,
          &options.replica_link.bytes_per_second,
          &options.replica_link.latency_seconds, &num_batches, &accumulation,
          &wants_scratch, &is_host, &num_local,
          &options.host_link.bytes_per_second,
          &options.host_link.latency_seconds, &offload_keep_last,
          &options.copy_bytes_per_second)) {
    return NULL;
  }
  if (accumulation < FSDP_SYNC_NONE || accumulation > FSDP_SYNC_SHARD) {
    return PyErr_Format(PyExc_ValueError,
                        "accumulation is %d, need one of the SYNC constants",
                        accumulation);
  }

  fsdp_error error = {0};
  fsdp_step_plan_report report;
  plan_input input = {0};
  double *unit_seconds = NULL;
  PyObject *result = NULL;
  if (read_input(module, units, forward, backward, &input) < 0) goto done;
  unit_seconds =
      PyMem_Calloc((size_t)input.num_units + 1, sizeof *unit_seconds);
  if (unit_seconds == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  options.units = input.units;
  options.num_units = input.num_units;
  options.forward = input.forward;
  options.num_forward = input.num_forward;
  options.backward = input.backward;
  options.num_backward = input.num_backward;
  options.num_batches = num_batches;
  options.accumulation = (fsdp_sync)accumulation;
  options.wants_scratch = wants_scratch != 0;
  options.is_host = is_host != 0;
  options.num_local = num_local;
  options.offload_keep_last = offload_keep_last;
  if (fsdp_step_plan_run(&options, &report, unit_seconds, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto done;
  }
  result = report_dict(&report, unit_seconds, input.num_units);
done:
  PyMem_Free(unit_seconds);
  free_input(&input);
  return result;
}
