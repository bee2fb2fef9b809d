/*
 * The forward call of a unit: looks for replaced parameters, casts and hooks
 * the inputs, runs the module between pre_forward and post_forward, hooks the
 * outputs.
 */
#include <stdio.h>

#include "python/listed_hooks.h"
#include "python/nested.h"

typedef struct cast_context {
  const fsdp_torch_unit *unit;
  fsdp_torch_cast cast;
} cast_context;

static PyObject *cast_tensor(PyObject *tensor, void *context) {
  const cast_context *self = context;
  return fsdp_torch_unit_cast_input(self->unit, &self->cast, tensor);
}

typedef struct hook_context {
  const module_state *state;
  fsdp_torch_unit *unit;
  bool expects_backward; /* some output requires grad */
  bool has_params;       /* some output is a parameter of the unit */
} hook_context;

static int hook_tensor(PyObject *tensor, void *context) {
  hook_context *self = context;
  FSDP_LOCAL_ERROR(error);
  bool is_hooked = false;
  if (fsdp_torch_unit_has_param(self->unit, tensor)) {
    self->has_params = true; /* a copy of it is hooked */
    return 0;
  }
  if (fsdp_torch_unit_hook_output(self->unit, tensor, &is_hooked, &error) !=
      FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    return -1;
  }
  if (!is_hooked) return 0;
  self->expects_backward = true;
  return fsdp_listed_hooks_add(self->state, tensor);
}

/* A parameter that is an output would show the shard after forward. */
static PyObject *copy_param(PyObject *tensor, void *context) {
  const hook_context *self = context;
  if (!fsdp_torch_unit_has_param(self->unit, tensor)) return Py_NewRef(tensor);
  PyObject *copy = fsdp_torch_copy_tensor(tensor);
  if (copy != NULL && hook_tensor(copy, context) < 0) Py_CLEAR(copy);
  return copy;
}

/* Writes "ValueError: message" on one line, cut where it is too long. */
static void format_exception(PyObject *type, PyObject *value, char *text,
                             size_t nbytes) {
  PyObject *message = value != NULL ? PyObject_Str(value) : NULL;
  const char *utf8 = message != NULL ? PyUnicode_AsUTF8(message) : NULL;
  if (utf8 == NULL) PyErr_Clear(); /* of an unusual exception */
  (void)snprintf(text, nbytes, "%s%s%.*s",
                 ((PyTypeObject *)type)->tp_name, /* exceptions are classes */
                 utf8 != NULL && utf8[0] != '\0' ? ": " : "", 200,
                 utf8 != NULL ? utf8 : "");
  Py_XDECREF(message);
  for (char *c = text; *c != '\0'; c++) {
    if ((unsigned char)*c < ' ') *c = ' ';
    if ((unsigned char)*c > '~') *c = '?'; /* the cut may split a character */
  }
}

/* torch.utils.checkpoint ends recomputations by an exception, which is no
 * failure. What the function raises itself is dropped: the first one counts. */
static void tell_of_failure(const unit_object *self, PyObject *value,
                            PyObject *traceback) {
  if (self->on_failure == NULL || value == NULL) return;
  if (fsdp_torch_unit_recomputes(self->unit)) return;
  if (traceback != NULL) (void)PyException_SetTraceback(value, traceback);
  PyObject *result = PyObject_CallOneArg(self->on_failure, value);
  if (result == NULL) PyErr_Clear();
  Py_XDECREF(result);
}

/* Leaves forward after a failure; keeps the Python exception that is set. */
static void abandon(const unit_object *self) {
  PyObject *type, *value, *traceback;
  char reason[320];
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  format_exception(type, value, reason, sizeof reason);
  tell_of_failure(self, value, traceback); /* while units are as they were */
  Py_BEGIN_ALLOW_THREADS;
  fsdp_torch_unit_abandon_forward(self->unit, reason);
  Py_END_ALLOW_THREADS;
  PyErr_Restore(type, value, traceback);
}

/* The first watched item whose value is another object now, or whose look-up
 * failed; -1: none. */
static Py_ssize_t find_replaced(const unit_object *self) {
  if (self->watched == NULL) return -1;
  const Py_ssize_t num_items = PyTuple_GET_SIZE(self->watched);
  for (Py_ssize_t i = 0; i < num_items; i++) {
    PyObject *item = PyTuple_GET_ITEM(self->watched, i); /* borrowed */
    PyObject *value = PyDict_GetItemWithError(PyTuple_GET_ITEM(item, 0),
                                              PyTuple_GET_ITEM(item, 1));
    if (value != PyTuple_GET_ITEM(item, 2)) return i;
  }
  return -1;
}

/* Calls on_change if the value of a watched key is another object now. 0, or
 * -1 with an exception. */
static int check_watched(const unit_object *self) {
  if (find_replaced(self) < 0) return 0;
  if (PyErr_Occurred()) return -1;
  PyObject *result = PyObject_CallNoArgs(self->on_change);
  Py_XDECREF(result);
  return result == NULL ? -1 : 0;
}

/* fsdp_torch_watch; on_change would take the new parameter over. */
static const char *find_replaced_name(void *context) {
  const unit_object *self = context;
  const Py_ssize_t index = find_replaced(self);
  const char *name = NULL;
  if (index >= 0) {
    name = PyUnicode_AsUTF8(
        PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->watched, index), 1));
    if (name == NULL) name = "?"; /* a key that is no str */
  }
  PyErr_Clear();
  return name;
}

PyObject *fsdp_unit_object_watch(PyObject *object, PyObject *args) {
  unit_object *self = (unit_object *)object;
  PyObject *sequence, *on_change; /* borrowed */
  if (!PyArg_ParseTuple(args, "OO:watch", &sequence, &on_change)) return NULL;
  if (!PyCallable_Check(on_change)) {
    return PyErr_Format(PyExc_TypeError, "on_change must be callable, got %R",
                        on_change);
  }
  PyObject *items = PySequence_Tuple(sequence);
  if (items == NULL) return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
    PyObject *item = PyTuple_GET_ITEM(items, i); /* borrowed */
    if (PyTuple_CheckExact(item) && PyTuple_GET_SIZE(item) == 3 &&
        PyDict_Check(PyTuple_GET_ITEM(item, 0))) {
      continue;
    }
    PyErr_Format(PyExc_TypeError,
                 "items[%zd] must be a tuple (dict, key, value), got %R", i,
                 item);
    Py_DECREF(items);
    return NULL;
  }
  Py_XSETREF(self->watched, items);
  Py_XSETREF(self->on_change, Py_NewRef(on_change));
  const fsdp_torch_watch watch = {.context = self,
                                  .find_replaced = find_replaced_name};
  fsdp_torch_unit_set_watch(self->unit, &watch);
  Py_RETURN_NONE;
}

PyObject *fsdp_unit_object_note_forwards(PyObject *object, PyObject *function) {
  unit_object *self = (unit_object *)object;
  if (function == Py_None) {
    Py_CLEAR(self->on_forward);
  } else {
    Py_XSETREF(self->on_forward, Py_NewRef(function));
  }
  Py_RETURN_NONE;
}

PyObject *fsdp_unit_object_note_failures(PyObject *object, PyObject *function) {
  unit_object *self = (unit_object *)object;
  Py_XSETREF(self->on_failure, Py_NewRef(function));
  Py_RETURN_NONE;
}

PyObject *fsdp_unit_object_note_writes(PyObject *object, PyObject *function) {
  unit_object *self = (unit_object *)object;
  Py_XSETREF(self->on_write, Py_NewRef(function));
  Py_RETURN_NONE;
}

/* 0, or -1 with an exception. */
static int tell_of_write(unit_object *self) {
  if (self->on_write == NULL) return 0;
  PyObject *param = fsdp_torch_unit_written_param(self->unit);
  if (param == NULL) return -1;
  if (param == Py_None) {
    Py_DECREF(param);
    return 0;
  }
  PyObject *on_write = self->on_write;
  self->on_write = NULL; /* once */
  PyObject *result = PyObject_CallOneArg(on_write, param);
  Py_DECREF(on_write);
  Py_DECREF(param);
  Py_XDECREF(result);
  return result == NULL ? -1 : 0;
}

/* 0, or -1 with an exception. */
static int tell_of_forward(const unit_object *self) {
  if (self->on_forward == NULL) return 0;
  PyObject *result = PyObject_CallNoArgs(self->on_forward);
  Py_XDECREF(result);
  return result == NULL ? -1 : 0;
}

static PyObject *hook_input(PyObject *tensor, void *context) {
  return fsdp_torch_inputs_hook(context, tensor);
}

/* Hooks the inputs: see Note [Leaving a unit in backward]. Replaces both by new
 * references to what the module gets. 0, or -1 with an exception. */
static int hook_inputs(const module_state *state, fsdp_torch_unit *unit,
                       PyObject **args, PyObject **kwargs) {
  fsdp_torch_inputs *inputs = NULL;
  FSDP_LOCAL_ERROR(error);
  PyObject *own_args = NULL;
  PyObject *own_kwargs = NULL;

  if (!fsdp_torch_wants_inputs()) {
    Py_INCREF(*args);
    Py_INCREF(*kwargs);
    return 0;
  }
  if (fsdp_torch_inputs_create(unit, &inputs, &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    return -1;
  }
  own_args = fsdp_nested_map(state, *args, hook_input, inputs);
  if (own_args != NULL) {
    own_kwargs = fsdp_nested_map(state, *kwargs, hook_input, inputs);
  }
  fsdp_torch_inputs_destroy(inputs);
  if (own_kwargs == NULL) {
    Py_XDECREF(own_args);
    return -1;
  }
  *args = own_args;
  *kwargs = own_kwargs;
  return 0;
}

/* Whether autograd records; -1 with an exception. */
static int is_grad_enabled(void) {
  PyObject *torch = PyImport_ImportModule("torch");
  if (torch == NULL) return -1;
  PyObject *enabled = PyObject_CallMethod(torch, "is_grad_enabled", NULL);
  Py_DECREF(torch);
  if (enabled == NULL) return -1;
  const int result = PyObject_IsTrue(enabled);
  Py_DECREF(enabled);
  return result;
}

/* Hooks the tensors in `output`. 0, or -1 with an exception. */
static int hook_outputs(hook_context *hook, PyObject *output) {
  const int is_cut = fsdp_nested_visit(hook->state, output, hook_tensor, hook);
  if (is_cut <= 0 || hook->expects_backward) return is_cut < 0 ? -1 : 0;
  const int needs_backward = is_grad_enabled();
  if (needs_backward <= 0) return needs_backward;
  PyErr_Format(PyExc_TypeError,
               "FSDP unit '%s': no tensor that requires grad was found in the "
               "output of its forward, a %.200s that holds too many objects to "
               "search: return the tensors in a tuple, dict or dataclass",
               fsdp_unit_name(fsdp_torch_unit_core(hook->unit)),
               Py_TYPE(output)->tp_name);
  return -1;
}

/* Runs `module` between pre_forward and post_forward. begin_ns: of the span
 * before it. */
static PyObject *run_module(unit_object *self, PyObject *module, PyObject *args,
                            PyObject *kwargs, int64_t begin_ns) {
  const module_state *state = state_of_object((PyObject *)self);
  fsdp_torch_unit *unit = self->unit;
  FSDP_LOCAL_ERROR(error);
  fsdp_status status;
  PyObject *output;

  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_torch_unit_pre_forward(unit, &error);
  Py_END_ALLOW_THREADS;
  if (status != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    return NULL;
  }

  fsdp_torch_unit_end_span(unit, FSDP_TIMELINE_PRE_FORWARD, begin_ns);

  const int is_saving = fsdp_saved_hooks_push(unit);
  output = is_saving < 0
               ? NULL
               : PyObject_Call(module, args,
                               PyDict_GET_SIZE(kwargs) == 0 ? NULL : kwargs);
  if (is_saving > 0) fsdp_torch_pop_saved_hooks();
  begin_ns = fsdp_torch_unit_begin_span(unit);
  if (output == NULL) goto fail;

  hook_context hook = {.state = state, .unit = unit};
  if (hook_outputs(&hook, output) < 0) goto fail;
  if (hook.has_params) {
    PyObject *copied = fsdp_nested_map(state, output, copy_param, &hook);
    if (copied == NULL) goto fail;
    Py_SETREF(output, copied);
  }

  if (tell_of_write(self) < 0) goto fail;

  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_torch_unit_post_forward(unit, hook.expects_backward, &error);
  Py_END_ALLOW_THREADS;
  if (status != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto fail;
  }
  fsdp_torch_unit_end_span(unit, FSDP_TIMELINE_POST_FORWARD, begin_ns);
  return output;

fail:
  fsdp_torch_unit_end_span(unit, FSDP_TIMELINE_POST_FORWARD, begin_ns);
  abandon(self);
  Py_XDECREF(output);
  return NULL;
}

static PyObject *run_forward(unit_object *self, PyObject *module,
                             PyObject *args, PyObject *kwargs,
                             int64_t begin_ns) {
  const module_state *state = state_of_object((PyObject *)self);
  if (hook_inputs(state, self->unit, &args, &kwargs) < 0) return NULL;
  PyObject *output = run_module(self, module, args, kwargs, begin_ns);
  Py_DECREF(args);
  Py_DECREF(kwargs);
  return output;
}

/* Casts the inputs and runs. */
static PyObject *cast_and_run(PyObject *object, PyObject *const *args) {
  unit_object *self = (unit_object *)object;
  fsdp_torch_unit *unit = self->unit;
  const module_state *state = state_of_object(object);

  const int64_t begin_ns = fsdp_torch_unit_begin_span(unit);
  if (check_watched(self) < 0) return NULL;
  cast_context context = {.unit = unit};
  fsdp_torch_unit_input_cast(unit, &context.cast);
  if (!context.cast.is_needed) {
    return run_forward(self, args[0], args[1], args[2], begin_ns);
  }

  PyObject *output = NULL;
  PyObject *inputs = NULL;
  PyObject *keywords = NULL;
  inputs = fsdp_nested_map(state, args[1], cast_tensor, &context);
  if (inputs == NULL) goto done;
  keywords = fsdp_nested_map(state, args[2], cast_tensor, &context);
  if (keywords == NULL) goto done;
  output = run_forward(self, args[0], inputs, keywords, begin_ns);
done:
  Py_XDECREF(inputs);
  Py_XDECREF(keywords);
  return output;
}

PyObject *fsdp_unit_object_forward(PyObject *object, PyObject *const *args,
                                   Py_ssize_t num_args) {
  unit_object *self = (unit_object *)object;

  if (num_args != 3) {
    return PyErr_Format(PyExc_TypeError,
                        "forward() takes module, args and kwargs, got %zd "
                        "arguments",
                        num_args);
  }
  if (!PyTuple_Check(args[1]) || !PyDict_Check(args[2])) {
    return PyErr_Format(PyExc_TypeError,
                        "forward() needs args as a tuple and kwargs as a "
                        "dict, got %.100s and %.100s",
                        Py_TYPE(args[1])->tp_name, Py_TYPE(args[2])->tp_name);
  }

  if (tell_of_forward(self) < 0) return NULL;
  if (self->places == NULL) return cast_and_run(object, args);
  if (fsdp_unit_object_enter_forward(self) < 0) return NULL;
  PyObject *output = cast_and_run(object, args);
  if (fsdp_unit_object_leave_forward(self) < 0) Py_CLEAR(output);
  return output;
}
