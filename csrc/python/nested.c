/*
 * Nested values: mapping and visiting the tensors in containers.
 */
#include "python/nested.h"

#include <frameobject.h> /* PyFrame_Check, in Python 3.10 */

/* The place of PackedSequence.batch_sizes, which stays on the host as it is. */
enum { PACKED_BATCH_SIZES = 1 };

/* Frequent values that hold no tensor; saves them the slower checks. */
static bool is_atom(PyObject *object) {
  return object == Py_None || PyBool_Check(object) ||
         PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
         PyUnicode_CheckExact(object) || PyBytes_CheckExact(object) ||
         PyType_Check(object);
}

/* The attribute, or NULL; without an exception when it does not exist. */
static PyObject *get_optional_attr(PyObject *object, PyObject *name) {
  PyObject *value = PyObject_GetAttr(object, name);
  if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
  }
  return value;
}

/* Names of the object's dataclass fields as a new list, or NULL; without an
 * exception when it is not a dataclass. */
static PyObject *get_dataclass_names(const module_state *state,
                                     PyObject *object) {
  PyObject *fields =
      get_optional_attr((PyObject *)Py_TYPE(object), state->dataclass_fields);
  if (fields == NULL) return NULL;
  PyObject *names = PyMapping_Keys(fields);
  Py_DECREF(fields);
  return names;
}

/* Map ---------------------------------------------------------------------- */

typedef struct mapper {
  const module_state *state;
  fsdp_nested_map_fn map;
  void *context;
} mapper;

static PyObject *map_object(const mapper *self, PyObject *object);

/* A tuple of the type of `object` with the items of `items`. */
static PyObject *rebuild_tuple(const mapper *self, PyObject *object,
                               PyObject *items) {
  PyObject *type = (PyObject *)Py_TYPE(object); /* borrowed */
  PyObject *make = get_optional_attr(type, self->state->make);
  if (make == NULL) {
    return PyErr_Occurred() ? NULL : PyObject_CallOneArg(type, items);
  }
  PyObject *result = PyObject_CallOneArg(make, items);
  Py_DECREF(make);
  return result;
}

static PyObject *map_tuple(const mapper *self, PyObject *object) {
  const Py_ssize_t num_items = PyTuple_GET_SIZE(object);
  PyObject *items = NULL; /* the new items, once one has changed */
  Py_ssize_t skipped = -1;

  if (!PyTuple_CheckExact(object)) {
    const int is_packed =
        PyObject_IsInstance(object, self->state->packed_sequence);
    if (is_packed < 0) return NULL;
    if (is_packed) skipped = PACKED_BATCH_SIZES;
  }
  for (Py_ssize_t i = 0; i < num_items; i++) {
    PyObject *item = PyTuple_GET_ITEM(object, i); /* borrowed */
    PyObject *mapped = i == skipped ? Py_NewRef(item) : map_object(self, item);
    if (mapped == NULL) goto fail;
    if (items == NULL && mapped != item) {
      items = PyTuple_New(num_items);
      if (items == NULL) {
        Py_DECREF(mapped);
        goto fail;
      }
      for (Py_ssize_t j = 0; j < i; j++) {
        PyTuple_SET_ITEM(items, j, Py_NewRef(PyTuple_GET_ITEM(object, j)));
      }
    }
    if (items == NULL) {
      Py_DECREF(mapped);
    } else {
      PyTuple_SET_ITEM(items, i, mapped); /* steals */
    }
  }
  if (items == NULL) return Py_NewRef(object);
  if (PyTuple_CheckExact(object)) return items;
  PyObject *result = rebuild_tuple(self, object, items);
  Py_DECREF(items);
  return result;

fail:
  Py_XDECREF(items);
  return NULL;
}

static PyObject *copy_of(const mapper *self, PyObject *object) {
  return PyObject_CallOneArg(self->state->copy, object);
}

static PyObject *map_list(const mapper *self, PyObject *object) {
  PyObject *result = NULL; /* a copy, once an item has changed */

  /* The size is read again each time: `map` may run Python. */
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); i++) {
    PyObject *item = Py_NewRef(PyList_GET_ITEM(object, i));
    PyObject *mapped = map_object(self, item);
    int failed = mapped == NULL;
    if (!failed && mapped != item) {
      if (result == NULL) result = copy_of(self, object);
      failed = result == NULL || PySequence_SetItem(result, i, mapped) < 0;
    }
    Py_DECREF(item);
    Py_XDECREF(mapped);
    if (failed) {
      Py_XDECREF(result);
      return NULL;
    }
  }
  return result == NULL ? Py_NewRef(object) : result;
}

/* dict, its subclasses and other mutable mappings. */
static PyObject *map_mapping(const mapper *self, PyObject *object) {
  PyObject *result = NULL; /* a copy, once a value has changed */
  PyObject *items = PyMapping_Items(object);
  if (items == NULL) return NULL;

  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
    PyObject *pair = PyList_GET_ITEM(items, i); /* borrowed; list is ours */
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
      PyErr_Format(PyExc_TypeError, "items() of %.200s must yield pairs",
                   Py_TYPE(object)->tp_name);
      goto fail;
    }
    PyObject *value = PyTuple_GET_ITEM(pair, 1); /* borrowed */
    PyObject *mapped = map_object(self, value);
    if (mapped == NULL) goto fail;
    if (mapped != value) {
      if (result == NULL) {
        result = PyDict_CheckExact(object) ? PyDict_Copy(object)
                                           : copy_of(self, object);
      }
      if (result == NULL ||
          PyObject_SetItem(result, PyTuple_GET_ITEM(pair, 0), mapped) < 0) {
        Py_DECREF(mapped);
        goto fail;
      }
    }
    Py_DECREF(mapped);
  }
  Py_DECREF(items);
  return result == NULL ? Py_NewRef(object) : result;

fail:
  Py_DECREF(items);
  Py_XDECREF(result);
  return NULL;
}

/* set and frozenset. */
static PyObject *map_set(const mapper *self, PyObject *object) {
  PyObject *result = NULL;
  PyObject *items = PySequence_List(object);
  if (items == NULL) return NULL;
  PyObject *mapped = map_list(self, items);
  if (mapped == NULL) goto done;
  if (mapped == items) {
    result = Py_NewRef(object);
  } else {
    result = PyObject_CallOneArg((PyObject *)Py_TYPE(object), mapped);
  }
done:
  Py_XDECREF(mapped);
  Py_DECREF(items);
  return result;
}

/* Copies the object and sets the fields that changed, past any __setattr__ of
 * a frozen class; __init__ does not run again. */
static PyObject *map_dataclass(const mapper *self, PyObject *object,
                               PyObject *names) {
  PyObject *result = NULL; /* a copy, once a field has changed */

  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names); i++) {
    PyObject *name = PyList_GET_ITEM(names, i); /* borrowed; list is ours */
    PyObject *value = get_optional_attr(object, name);
    if (value == NULL) {
      if (PyErr_Occurred()) goto fail;
      continue; /* an InitVar, or not set yet */
    }
    PyObject *mapped = map_object(self, value);
    int failed = mapped == NULL;
    if (!failed && mapped != value) {
      if (result == NULL) result = copy_of(self, object);
      failed =
          result == NULL || PyObject_GenericSetAttr(result, name, mapped) < 0;
    }
    Py_DECREF(value);
    Py_XDECREF(mapped);
    if (failed) goto fail;
  }
  return result == NULL ? Py_NewRef(object) : result;

fail:
  Py_XDECREF(result);
  return NULL;
}

/* A dataclass, a mapping that is no dict, or something without tensors. */
static PyObject *map_other(const mapper *self, PyObject *object) {
  PyObject *names = get_dataclass_names(self->state, object);
  if (names != NULL) {
    PyObject *result = map_dataclass(self, object, names);
    Py_DECREF(names);
    return result;
  }
  if (PyErr_Occurred()) return NULL;
  const int is_mapping =
      PyObject_IsInstance(object, self->state->mutable_mapping);
  if (is_mapping < 0) return NULL;
  return is_mapping ? map_mapping(self, object) : Py_NewRef(object);
}

/* Containers are told by a flag of their type, so that check comes before the
 * one for tensors, which may have to ask a metaclass. */
static PyObject *map_object(const mapper *self, PyObject *object) {
  PyObject *(*map_container)(const mapper *, PyObject *) = map_other;

  if (PyTuple_Check(object)) {
    map_container = map_tuple;
  } else if (PyList_Check(object)) {
    map_container = map_list;
  } else if (PyDict_Check(object)) {
    map_container = map_mapping;
  } else if (PyAnySet_Check(object)) {
    map_container = map_set;
  } else if (is_atom(object)) {
    return Py_NewRef(object);
  } else if (fsdp_torch_is_tensor(object)) {
    return self->map(object, self->context);
  }
  if (Py_EnterRecursiveCall(" while converting the inputs of a forward")) {
    return NULL;
  }
  PyObject *result = map_container(self, object);
  Py_LeaveRecursiveCall();
  return result;
}

PyObject *fsdp_nested_map(const module_state *state, PyObject *object,
                          fsdp_nested_map_fn map, void *context) {
  const mapper self = {.state = state, .map = map, .context = context};
  return map_object(&self, object);
}

/* Visit -------------------------------------------------------------------- */

/* Note [Objects as outputs]
 * A forward may return an object that holds tensors: of the user's own class, a
 * deque, an iterator, a closure. They are looked for in what the object refers
 * to, as the garbage collector sees it (`tp_traverse`): attributes, slots,
 * items, the variables of a generator. No code of the object's class runs. Such
 * objects lead anywhere, so inside them everything is visited once and no more
 * than MAX_SEEN things are. Left out are modules (of Python and of torch),
 * frames and the globals of functions, which lead to all of the program, and
 * leaf tensors, such as parameters, whose gradients lead nowhere. */
enum { MAX_SEEN = 10000 };

typedef struct visitor {
  const module_state *state;
  fsdp_nested_visit_fn visit;
  void *context;
  int num_objects;  /* entered now; 0: only containers lead here */
  int num_extended; /* containers with attributes, entered now */
  PyObject *seen;   /* dict of address: object, kept alive; NULL: none yet */
  bool is_cut;      /* there was more than MAX_SEEN */
} visitor;

static int visit_object(visitor *self, PyObject *object);

static int visit_tuple(visitor *self, PyObject *object) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++) {
    if (visit_object(self, PyTuple_GET_ITEM(object, i)) < 0) return -1;
  }
  return 0;
}

static int visit_list(visitor *self, PyObject *object) {
  /* The size is read again each time: `visit` may run Python. */
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); i++) {
    PyObject *item = Py_NewRef(PyList_GET_ITEM(object, i));
    const int status = visit_object(self, item);
    Py_DECREF(item);
    if (status < 0) return -1;
  }
  return 0;
}

static int visit_set(visitor *self, PyObject *object) {
  PyObject *items = PySequence_List(object);
  if (items == NULL) return -1;
  const int status = visit_list(self, items);
  Py_DECREF(items);
  return status;
}

static int visit_mapping(visitor *self, PyObject *object) {
  PyObject *values = PyMapping_Values(object);
  if (values == NULL) return -1;
  const int status = visit_list(self, values);
  Py_DECREF(values);
  return status;
}

static int visit_dataclass(visitor *self, PyObject *object, PyObject *names) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names); i++) {
    PyObject *value = get_optional_attr(object, PyList_GET_ITEM(names, i));
    if (value == NULL) {
      if (PyErr_Occurred()) return -1;
      continue; /* an InitVar, or not set yet */
    }
    const int status = visit_object(self, value);
    Py_DECREF(value);
    if (status < 0) return -1;
  }
  return 0;
}

/* Whether `object` comes for the first time; -1 with an exception. */
static int is_new(visitor *self, PyObject *object) {
  if (self->seen == NULL) self->seen = PyDict_New();
  if (self->seen == NULL) return -1;
  PyObject *address = PyLong_FromVoidPtr(object);
  if (address == NULL) return -1;
  int result = PyDict_Contains(self->seen, address);
  if (result == 0) {
    if (PyDict_GET_SIZE(self->seen) < MAX_SEEN) {
      result = PyDict_SetItem(self->seen, address, object) < 0 ? -1 : 1;
    } else {
      self->is_cut = true;
    }
  } else if (result > 0) {
    result = 0;
  }
  Py_DECREF(address);
  return result;
}

static int append_referent(PyObject *referent, void *referents) {
  return PyList_Append(referents, referent);
}

/* What `object` refers to as a new list, or NULL with an exception. */
static PyObject *referents_of(PyObject *object) {
  PyObject *referents = PyList_New(0);
  if (referents == NULL || !PyObject_IS_GC(object) || PyFrame_Check(object) ||
      PyModule_Check(object)) {
    return referents;
  }
  int status = 0;
  if (PyFunction_Check(object)) {
    PyObject *held[] = {PyFunction_GetClosure(object), /* all borrowed */
                        PyFunction_GetDefaults(object),
                        PyFunction_GetKwDefaults(object)};
    for (size_t i = 0; status == 0 && i < sizeof held / sizeof *held; i++) {
      if (held[i] != NULL) status = PyList_Append(referents, held[i]);
    }
  } else if (Py_TYPE(object)->tp_traverse != NULL) {
    status = Py_TYPE(object)->tp_traverse(object, append_referent, referents);
  }
  if (status != 0) Py_CLEAR(referents);
  return referents;
}

/* Any object: see Note [Objects as outputs]. */
static int visit_referents(visitor *self, PyObject *object) {
  int status = PyObject_IsInstance(object, self->state->nn_module);
  if (status != 0) return status < 0 ? -1 : 0;
  if (self->num_objects == 0) { /* else visit_object has asked */
    status = is_new(self, object);
    if (status <= 0) return status;
  }
  PyObject *referents = referents_of(object);
  if (referents == NULL) return -1;
  self->num_objects++;
  status = visit_list(self, referents);
  self->num_objects--;
  Py_DECREF(referents);
  return status;
}

/* A dataclass, a mapping that is no dict, or any other object. */
static int visit_other(visitor *self, PyObject *object) {
  if (self->num_objects > 0) return visit_referents(self, object);
  PyObject *names = get_dataclass_names(self->state, object);
  if (names != NULL) {
    const int status = visit_dataclass(self, object, names);
    Py_DECREF(names);
    return status;
  }
  if (PyErr_Occurred()) return -1;
  const int is_mapping = PyObject_IsInstance(object, self->state->mapping);
  if (is_mapping < 0) return -1;
  return is_mapping ? visit_mapping(self, object)
                    : visit_referents(self, object);
}

static int visit_tensor(visitor *self, PyObject *tensor) {
  if (self->num_objects > 0 || self->num_extended > 0) {
    const int is_first = is_new(self, tensor);
    if (is_first <= 0) return is_first;
  }
  if (self->num_objects > 0) {
    PyObject *is_leaf = PyObject_GetAttrString(tensor, "is_leaf");
    if (is_leaf == NULL) return -1;
    Py_DECREF(is_leaf);
    if (is_leaf == Py_True) return 0; /* the singleton: only compared */
  }
  return self->visit(tensor, self->context);
}

/* The items of a container and, where its class is a subclass with a `__dict__`
 * (Hugging Face's ModelOutput), its attributes: often the same tensors. */
static int visit_extended(visitor *self, PyObject *object,
                          int (*visit_items)(visitor *, PyObject *)) {
  PyObject *attributes = PyObject_GenericGetDict(object, NULL);
  if (attributes == NULL) {
    PyErr_Clear(); /* it has none */
    return visit_items(self, object);
  }
  self->num_extended++;
  int status = visit_items(self, object);
  self->num_extended--;
  self->num_objects++;
  if (status == 0) status = visit_mapping(self, attributes);
  self->num_objects--;
  Py_DECREF(attributes);
  return status;
}

static int visit_object(visitor *self, PyObject *object) {
  int (*visit_container)(visitor *, PyObject *) = visit_other;
  bool is_extended = false;

  if (PyTuple_Check(object)) {
    visit_container = visit_tuple;
    is_extended = !PyTuple_CheckExact(object);
  } else if (PyList_Check(object)) {
    visit_container = visit_list;
    is_extended = !PyList_CheckExact(object);
  } else if (PyDict_Check(object)) {
    visit_container = visit_mapping;
    is_extended = !PyDict_CheckExact(object);
  } else if (PyAnySet_Check(object)) {
    visit_container = visit_set;
  } else if (is_atom(object)) {
    return 0;
  } else if (fsdp_torch_is_tensor(object)) {
    return visit_tensor(self, object);
  }
  if (self->num_objects > 0) {
    const int is_first = is_new(self, object);
    if (is_first <= 0) return is_first;
  }
  if (Py_EnterRecursiveCall(" while reading the outputs of a forward")) {
    return -1;
  }
  const int status = is_extended ? visit_extended(self, object, visit_container)
                                 : visit_container(self, object);
  Py_LeaveRecursiveCall();
  return status;
}

int fsdp_nested_visit(const module_state *state, PyObject *object,
                      fsdp_nested_visit_fn visit, void *context) {
  visitor self = {.state = state, .visit = visit, .context = context};
  const int status = visit_object(&self, object);
  Py_XDECREF(self.seen);
  return status < 0 ? -1 : self.is_cut;
}
