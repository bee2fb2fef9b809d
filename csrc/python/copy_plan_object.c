/*
 * The CopyPlan type: see state/copy_plan.h.
 */
#include "python/convert.h"

typedef struct copy_plan_object {
  PyObject_HEAD
  fsdp_copy_plan *plan; /* NULL only until creation has succeeded */
} copy_plan_object;

static const fsdp_copy_plan *plan_of(PyObject *object) {
  return ((copy_plan_object *)object)->plan;
}

static PyObject *copy_plan_new(PyTypeObject *type, PyObject *args,
                               PyObject *kwargs) {
  static const char *const keywords[] = {"source", "target", NULL};
  const module_state *state = PyType_GetModuleState(type);
  PyObject *source, *target; /* borrowed; the arguments keep them */
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "O!O!:CopyPlan", FSDP_KEYWORDS(keywords),
          state->placement_type, &source, state->placement_type, &target)) {
    return NULL;
  }
  const fsdp_placement *from = fsdp_placement_object_placement(source);
  const fsdp_placement *to = fsdp_placement_object_placement(target);
  fsdp_error error = {0};
  fsdp_status status;
  copy_plan_object *self = (copy_plan_object *)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  status = fsdp_copy_plan_create(from, to, &self->plan, &error);
  Py_END_ALLOW_THREADS;
  if (status != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    Py_CLEAR(self);
  }
  return (PyObject *)self;
}

static void copy_plan_dealloc(PyObject *object) {
  copy_plan_object *self = (copy_plan_object *)object;
  PyTypeObject *type = Py_TYPE(self);
  fsdp_copy_plan_destroy(self->plan);
  type->tp_free(self);
  Py_DECREF(type); /* instances of heap types own a reference to their type */
}

/* Run ---------------------------------------------------------------------- */

static PyObject *copy_plan_run(PyObject *object, PyObject *args,
                               PyObject *kwargs) {
  static const char *const keywords[] = {"sources", "targets", NULL};
  fsdp_error error = {0};
  PyObject *source_sequence, *target_sequence; /* borrowed */
  PyObject *sources = NULL, *targets = NULL;   /* tuples */
  PyObject *result = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:run",
                                   FSDP_KEYWORDS(keywords), &source_sequence,
                                   &target_sequence)) {
    return NULL;
  }
  sources = PySequence_Tuple(source_sequence);
  if (sources == NULL) goto done;
  targets = PySequence_Tuple(target_sequence);
  if (targets == NULL) goto done;
  if (fsdp_torch_copy_plan_run(plan_of(object), fsdp_buffers_of(sources),
                               fsdp_buffers_of(targets), &error) != FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto done;
  }
  result = Py_NewRef(Py_None);
done:
  Py_XDECREF(sources);
  Py_XDECREF(targets);
  return result;
}

/* What it tells ------------------------------------------------------------ */

static PyObject *copy_item(const void *plan, int64_t index) {
  const fsdp_copy *copy = &fsdp_copy_plan_copies(plan)[index];
  return Py_BuildValue("LLLLL", (long long)copy->source_buffer,
                       (long long)copy->source_offset,
                       (long long)copy->target_buffer,
                       (long long)copy->target_offset, (long long)copy->numel);
}

static PyObject *missing_item(const void *plan, int64_t index) {
  const fsdp_param_range *range = &fsdp_copy_plan_missing(plan)[index];
  return Py_BuildValue("LLL", (long long)range->param,
                       (long long)range->in_param.begin,
                       (long long)range->in_param.end);
}

static PyObject *copy_plan_get_copies(PyObject *object,
                                      void *Py_UNUSED(closure)) {
  const fsdp_copy_plan *plan = plan_of(object);
  return fsdp_list_of(fsdp_copy_plan_num_copies(plan), plan, copy_item);
}

static PyObject *copy_plan_get_missing(PyObject *object,
                                       void *Py_UNUSED(closure)) {
  const fsdp_copy_plan *plan = plan_of(object);
  return fsdp_list_of(fsdp_copy_plan_num_missing(plan), plan, missing_item);
}

static PyObject *copy_plan_get_numel(PyObject *object,
                                     void *Py_UNUSED(closure)) {
  return PyLong_FromLongLong(fsdp_copy_plan_numel(plan_of(object)));
}

/* The type ----------------------------------------------------------------- */

PyDoc_STRVAR(copy_plan_doc,
             "CopyPlan(source, target)\n--\n\n"
             "The copies that fill the target placement from the source.\n"
             "\n"
             "Raises ValueError when two elements go to one place.");
PyDoc_STRVAR(
    copy_plan_run_doc,
    "run($self, /, sources, targets)\n--\n\n"
    "Make the copies between contiguous tensors of one dtype, numbered as the\n"
    "buffers of the placements; None for a buffer that is not here: its "
    "copies\n"
    "are left out. Raises ValueError before anything is written.");

static PyMethodDef copy_plan_methods[] = {
    {"run", (PyCFunction)(void (*)(void))copy_plan_run,
     METH_VARARGS | METH_KEYWORDS, copy_plan_run_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef copy_plan_getset[] = {
    {"copies", copy_plan_get_copies, NULL,
     "(source_buffer, source_offset, target_buffer, target_offset, numel)\n"
     "each, by target.",
     NULL},
    {"missing", copy_plan_get_missing, NULL,
     "(param, begin, end) of the target that the source does not hold.", NULL},
    {"numel", copy_plan_get_numel, NULL, "Elements of all copies.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot copy_plan_slots[] = {
    {Py_tp_doc, FSDP_SLOT(copy_plan_doc)},
    {Py_tp_new, FSDP_SLOT(copy_plan_new)},
    {Py_tp_dealloc, FSDP_SLOT(copy_plan_dealloc)},
    {Py_tp_methods, FSDP_SLOT(copy_plan_methods)},
    {Py_tp_getset, FSDP_SLOT(copy_plan_getset)},
    {0, NULL},
};

/* No Py_TPFLAGS_HAVE_GC: the object owns no PyObject other than its type. */
PyType_Spec fsdp_copy_plan_object_spec = {
    .name = "fsdp_c._native.CopyPlan",
    .basicsize = sizeof(copy_plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = copy_plan_slots,
};
