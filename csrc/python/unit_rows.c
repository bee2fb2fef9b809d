/*
 * A unit by rows, see Note [Parameters by rows] in csrc/torch/rows.cpp: which
 * of a parameter's objects the modules have registered.
 */
#include "python/convert.h"
#include "python/nested.h"

/* A place: (dict, key, sharded, plain, part or None, module or None). */
enum {
  PLACE_DICT = 0,
  PLACE_KEY,
  PLACE_SHOWN, /* by fsdp_torch_shown */
  PLACE_MODULE = PLACE_SHOWN + FSDP_TORCH_SHOWN_PART + 1,
  PLACE_NUM_ITEMS
};

static PyObject *object_in_place(PyObject *place, fsdp_torch_shown kind) {
  return PyTuple_GET_ITEM(place, PLACE_SHOWN + (int)kind); /* borrowed */
}

/* Registers `shown` in the place. 0, or -1 with an exception. */
static int show_in_place(PyObject *place, PyObject *shown) {
  PyObject *module = PyTuple_GET_ITEM(place, PLACE_MODULE); /* borrowed */
  PyObject *key = PyTuple_GET_ITEM(place, PLACE_KEY);       /* likewise */
  if (module != Py_None) return PyObject_SetAttr(module, key, shown);
  return PyDict_SetItem(PyTuple_GET_ITEM(place, PLACE_DICT), key, shown);
}

/* Shows the kind `to` in all places that hold the kind `from`. num_others [out]
 * the places that hold neither. 0, or -1 with an exception. */
static int show_in_places(PyObject *places, fsdp_torch_shown from,
                          fsdp_torch_shown to, Py_ssize_t *num_others) {
  *num_others = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) {
    PyObject *place = PyTuple_GET_ITEM(places, i); /* borrowed */
    PyObject *now = PyDict_GetItemWithError(PyTuple_GET_ITEM(place, PLACE_DICT),
                                            PyTuple_GET_ITEM(place, PLACE_KEY));
    if (now == NULL && PyErr_Occurred()) return -1;
    if (now == object_in_place(place, to)) continue;
    if (now != object_in_place(place, from)) {
      ++*num_others;
      continue;
    }
    if (show_in_place(place, object_in_place(place, to)) < 0) return -1;
  }
  return 0;
}

static int show(unit_object *self, fsdp_torch_shown kind) {
  Py_ssize_t num_others;
  const fsdp_torch_shown from = self->shown;
  if (self->places == NULL) return 0;
  if (from == kind && kind != FSDP_TORCH_SHOWN_PLAIN) return 0;
  PyObject *places = Py_NewRef(self->places); /* on_replaced() may change it */
  int result = show_in_places(places, from, kind, &num_others);
  self->shown = kind; /* also in part: the way back is tried for all */
  if (result == 0 && kind == FSDP_TORCH_SHOWN_PLAIN && num_others > 0) {
    PyObject *called = PyObject_CallNoArgs(self->on_replaced);
    Py_XDECREF(called);
    if (called == NULL) result = -1;
    if (result == 0) {
      Py_SETREF(places, Py_NewRef(self->places));
      result =
          show_in_places(places, FSDP_TORCH_SHOWN_SHARDED, kind, &num_others);
    }
  }
  Py_DECREF(places);
  return result;
}

/* The bridge's calls ------------------------------------------------------- */

static int face_show(void *context, fsdp_torch_shown kind) {
  return show(context, kind);
}

static PyObject *face_make_grad(void *context, int64_t param, PyObject *local) {
  const unit_object *self = context;
  return PyObject_CallFunction(self->make_grad, "LO", (long long)param, local);
}

static PyObject *face_local_grad(void *context, int64_t param, PyObject *grad) {
  const unit_object *self = context;
  return PyObject_CallFunction(self->local_grad, "LO", (long long)param, grad);
}

static PyObject *face_extend(void *context, int64_t param,
                             fsdp_torch_extension stage) {
  const unit_object *self = context;
  return PyObject_CallFunction(self->extend, "Li", (long long)param,
                               (int)stage);
}

/* Forward ------------------------------------------------------------------ */

static int take_locals(unit_object *self) {
  if (self->places == NULL) return 0;
  return fsdp_torch_unit_take_locals(
      self->unit, state_of_object((PyObject *)self)->local_tensor);
}

int fsdp_unit_object_enter_forward(unit_object *self) {
  if (fsdp_torch_unit_hide_kept(self->unit) < 0) return -1;
  if (take_locals(self) < 0) return -1;
  if (show(self, FSDP_TORCH_SHOWN_PLAIN) < 0) {
    if (self->num_forwards == 0) {
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      if (show(self, FSDP_TORCH_SHOWN_SHARDED) < 0)
        PyErr_Clear(); /* the first error counts */
      PyErr_Restore(type, value, traceback);
    }
    return -1;
  }
  self->num_forwards++;
  return 0;
}

int fsdp_unit_object_leave_forward(unit_object *self) {
  PyObject *type, *value, *traceback;
  if (--self->num_forwards > 0 ||
      fsdp_torch_unit_is_shown_in_backward(self->unit)) {
    return 0;
  }
  PyErr_Fetch(&type, &value, &traceback);
  int result = show(self, fsdp_torch_unit_shown_after_forward(self->unit));
  if (result == 0) result = fsdp_torch_unit_hide_for_inference(self->unit);
  if (result < 0 && type != NULL) PyErr_Clear(); /* the first error counts */
  if (type == NULL) return result;
  PyErr_Restore(type, value, traceback);
  return 0;
}

/* Methods ------------------------------------------------------------------ */

static int check_places(PyObject *places) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) {
    PyObject *place = PyTuple_GET_ITEM(places, i); /* borrowed */
    if (PyTuple_Check(place) && PyTuple_GET_SIZE(place) == PLACE_NUM_ITEMS &&
        PyDict_Check(PyTuple_GET_ITEM(place, PLACE_DICT))) {
      continue;
    }
    PyErr_Format(PyExc_TypeError,
                 "places[%zd] must be a tuple (dict, key, sharded, plain, part "
                 "or None, module or None), got %R",
                 i, place);
    return -1;
  }
  return 0;
}

PyObject *fsdp_unit_object_bind_rows(PyObject *object, PyObject *args) {
  unit_object *self = (unit_object *)object;
  PyObject *sequence, *make_grad, *on_replaced; /* borrowed */
  PyObject *local_grad = Py_None;               /* likewise */
  PyObject *extend = Py_None;                   /* likewise */
  if (!PyArg_ParseTuple(args, "OOO|OO:bind_rows", &sequence, &make_grad,
                        &on_replaced, &local_grad, &extend)) {
    return NULL;
  }
  PyObject *places = PySequence_Tuple(sequence);
  if (places == NULL) return NULL;
  if (check_places(places) < 0) {
    Py_DECREF(places);
    return NULL;
  }
  Py_XSETREF(self->places, places);
  Py_XSETREF(self->make_grad, Py_NewRef(make_grad));
  Py_XSETREF(self->on_replaced, Py_NewRef(on_replaced));
  Py_XSETREF(self->local_grad, Py_NewRef(local_grad));
  Py_XSETREF(self->extend, Py_NewRef(extend));
  const fsdp_torch_face face = {.context = self,
                                .show = face_show,
                                .make_grad = face_make_grad,
                                .local_grad = face_local_grad,
                                .extend = face_extend};
  fsdp_torch_unit_set_face(self->unit, &face);
  Py_RETURN_NONE;
}

int fsdp_unit_object_visit_rows(unit_object *self, visitproc visit, void *arg) {
  Py_VISIT(self->places);
  Py_VISIT(self->make_grad);
  Py_VISIT(self->on_replaced);
  Py_VISIT(self->local_grad);
  Py_VISIT(self->extend);
  return 0;
}

void fsdp_unit_object_clear_rows(unit_object *self) {
  if (self->unit != NULL) fsdp_torch_unit_set_face(self->unit, NULL);
  Py_CLEAR(self->places);
  Py_CLEAR(self->make_grad);
  Py_CLEAR(self->on_replaced);
  Py_CLEAR(self->local_grad);
  Py_CLEAR(self->extend);
}

typedef fsdp_status (*bind_call)(fsdp_torch_unit *unit, int64_t index,
                                 PyObject *param, PyObject *local,
                                 fsdp_error *error);

static PyObject *bind_param(PyObject *object, PyObject *args, bind_call bind) {
  FSDP_LOCAL_ERROR(error);
  long long index;
  PyObject *param, *local; /* borrowed */
  if (!PyArg_ParseTuple(args, "LOO", &index, &param, &local)) return NULL;
  return fsdp_none_or_error(
      bind(((unit_object *)object)->unit, index, param, local, &error), &error);
}

PyObject *fsdp_unit_object_bind_sharded(PyObject *object, PyObject *args) {
  return bind_param(object, args, fsdp_torch_unit_bind_sharded);
}

PyObject *fsdp_unit_object_bind_parallel(PyObject *object, PyObject *args) {
  return bind_param(object, args, fsdp_torch_unit_bind_parallel);
}

typedef fsdp_status (*unit_call)(fsdp_torch_unit *unit, fsdp_error *error);

/* Makes a call that may block. 0, or -1 with an exception. */
static int call_unit(PyObject *object, unit_call call) {
  fsdp_torch_unit *unit = ((unit_object *)object)->unit;
  FSDP_LOCAL_ERROR(error);
  fsdp_status status;
  Py_BEGIN_ALLOW_THREADS;
  status = call(unit, &error);
  Py_END_ALLOW_THREADS;
  if (status == FSDP_OK) return 0;
  fsdp_torch_set_python_error(&error);
  return -1;
}

PyObject *fsdp_unit_object_unshard(PyObject *object,
                                   PyObject *Py_UNUSED(none)) {
  if (take_locals((unit_object *)object) < 0) return NULL;
  if (call_unit(object, fsdp_torch_unit_unshard) < 0) return NULL;
  Py_RETURN_NONE;
}

PyObject *fsdp_unit_object_wait_unshard(PyObject *object,
                                        PyObject *Py_UNUSED(none)) {
  if (call_unit(object, fsdp_torch_unit_wait_unshard) < 0 ||
      show((unit_object *)object, FSDP_TORCH_SHOWN_PLAIN) < 0) {
    return NULL;
  }
  Py_RETURN_NONE;
}

PyObject *fsdp_unit_object_reshard(PyObject *object,
                                   PyObject *Py_UNUSED(none)) {
  unit_object *self = (unit_object *)object;
  if (self->num_forwards == 0 &&
      !fsdp_torch_unit_is_shown_in_backward(self->unit) &&
      show(self, FSDP_TORCH_SHOWN_SHARDED) < 0) {
    return NULL;
  }
  if (call_unit(object, fsdp_torch_unit_reshard) < 0) return NULL;
  Py_RETURN_NONE;
}

PyObject *fsdp_unit_object_part_of(PyObject *object, PyObject *index) {
  const long long param = PyLong_AsLongLong(index);
  if (param == -1 && PyErr_Occurred()) return NULL;
  return fsdp_torch_unit_part_of(((unit_object *)object)->unit, param);
}

PyObject *fsdp_unit_object_set(PyObject *object, PyObject *args,
                               PyObject *kwargs) {
  static const char *const keywords[] = {"sync",
                                         "reshard_after_forward",
                                         "divisor",
                                         "unshard_in_backward",
                                         "keeps_part",
                                         "reshard_after_backward",
                                         "fills_unused",
                                         "keeps_for_inference",
                                         NULL};
  fsdp_unit_settings *settings = fsdp_unit_get_settings(
      fsdp_torch_unit_core(((unit_object *)object)->unit));
  int sync = -1, reshards = -1, unshards = -1, keeps_part = -1;
  int reshards_after_backward = -1, fills_unused = -1, for_inference = -1;
  double divisor = -1;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "|$iidiiiii:set", FSDP_KEYWORDS(keywords), &sync,
          &reshards, &divisor, &unshards, &keeps_part, &reshards_after_backward,
          &fills_unused, &for_inference)) {
    return NULL;
  }
  if (sync > FSDP_SYNC_SHARD) {
    return PyErr_Format(PyExc_ValueError,
                        "sync must be SYNC_NONE, SYNC_REDUCE or SYNC_SHARD, "
                        "got %d",
                        sync);
  }
  if (sync >= 0) settings->sync = (fsdp_sync)sync;
  if (reshards >= 0) settings->reshard_after_forward = reshards != 0;
  if (divisor >= 0) settings->divisor = divisor;
  if (reshards_after_backward >= 0) {
    settings->reshard_after_backward_without_sync =
        reshards_after_backward != 0;
  }
  if (fills_unused >= 0) settings->fills_unused = fills_unused != 0;
  if (for_inference >= 0) settings->keeps_for_inference = for_inference != 0;
  if (keeps_part >= 0) settings->keeps_part = keeps_part != 0;
  if (unshards >= 0) settings->unshards_in_backward = unshards != 0;
  Py_RETURN_NONE;
}

PyObject *fsdp_unit_object_set_prefetches(PyObject *object, PyObject *args) {
  fsdp_unit *unit = fsdp_torch_unit_core(((unit_object *)object)->unit);
  FSDP_LOCAL_ERROR(error);
  PyObject *sequence; /* borrowed */
  PyObject *result = NULL;
  fsdp_unit **units = NULL;
  int in_backward;
  if (!PyArg_ParseTuple(args, "pO:set_prefetches", &in_backward, &sequence)) {
    return NULL;
  }
  PyObject *items = PySequence_Fast(sequence, "units must be a sequence");
  if (items == NULL) return NULL;
  const Py_ssize_t num_units = PySequence_Fast_GET_SIZE(items);
  units = PyMem_New(fsdp_unit *, (size_t)num_units + 1);
  if (units == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  for (Py_ssize_t i = 0; i < num_units; i++) {
    PyObject *item = PySequence_Fast_GET_ITEM(items, i); /* borrowed */
    if (!Py_IS_TYPE(item, Py_TYPE(object))) {
      PyErr_Format(PyExc_TypeError, "units[%zd] must be a Unit, got %.200s", i,
                   Py_TYPE(item)->tp_name);
      goto done;
    }
    units[i] = fsdp_torch_unit_core(((unit_object *)item)->unit);
  }
  if (fsdp_unit_set_prefetches(
          unit, in_backward ? FSDP_PASS_BACKWARD : FSDP_PASS_FORWARD, units,
          (size_t)num_units, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto done;
  }
  result = Py_NewRef(Py_None);
done:
  PyMem_Free(units);
  Py_DECREF(items);
  return result;
}
