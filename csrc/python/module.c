/*
 * The CPython module `fsdp_c._native`: initialisation and build_info().
 */
#include "python/module.h"

#include "plan/step_plan.h"
#include "python/listed_hooks.h"

#ifndef FSDP_C_VERSION
#define FSDP_C_VERSION "unknown"
#endif
#ifndef FSDP_C_TORCH_VERSION
#define FSDP_C_TORCH_VERSION "unknown"
#endif

#if defined(FSDP_C_CUDA) && FSDP_C_CUDA
#define FSDP_C_CUDA_TEXT "yes"
#else
#define FSDP_C_CUDA_TEXT "no"
#endif

#if defined(__clang__)
#define FSDP_C_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define FSDP_C_COMPILER "gcc " __VERSION__
#else
#define FSDP_C_COMPILER "unknown"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define FSDP_C_SANITIZER "address"
#else
#define FSDP_C_SANITIZER "none"
#endif

#ifdef NDEBUG
#define FSDP_C_ASSERTS "no"
#else
#define FSDP_C_ASSERTS "yes"
#endif

PyMODINIT_FUNC PyInit__native(void);

static PyObject *build_info(PyObject *Py_UNUSED(module),
                            PyObject *Py_UNUSED(ignored)) {
  return Py_BuildValue("{ssssssssssssssss}", "version", FSDP_C_VERSION,
                       "torch_built", FSDP_C_TORCH_VERSION, "torch_loaded",
                       fsdp_torch_version(), "python_built", PY_VERSION,
                       "compiler", FSDP_C_COMPILER, "cuda", FSDP_C_CUDA_TEXT,
                       "asserts", FSDP_C_ASSERTS, "sanitizer",
                       FSDP_C_SANITIZER);
}

PyDoc_STRVAR(build_info_doc,
             "build_info()\n--\n\n"
             "What was built and what is loaded, by name.");

PyDoc_STRVAR(
    crc32c_doc,
    "crc32c(data, value=0)\n--\n\n"
    "CRC-32C of the bytes of a contiguous CPU tensor or a buffer, behind\n"
    "what gave `value`. Other threads run meanwhile.");

PyDoc_STRVAR(
    choose_alignment_doc,
    "choose_alignment($module, /, param_itemsize, use_orig_params, is_cpu,\n"
    "                 unit_nbytes)\n"
    "--\n\n"
    "The (itemsize, align_params, align_shards) of a unit that computes in a\n"
    "dtype of param_itemsize bytes (0: in the parameters' own) and has\n"
    "parameters of unit_nbytes.");

PyDoc_STRVAR(
    plan_step_doc,
    "plan_step($module, /, units, forward, backward, shard_link,\n"
    "          replica_link, *,\n"
    "          num_batches=1, accumulation=SYNC_REDUCE, wants_scratch=False,\n"
    "          is_host=False, hosts=(0, 1.0, 0.0), offload=(0, 0.0))\n"
    "--\n\n"
    "What a rank needs for a training step, by name: the engine runs over a\n"
    "port that only counts. See fsdp_c/tools/plan and\n"
    "csrc/core/plan/step_plan.h.\n"
    "\n"
    "units: (name, layout, [(param, reduce, grad dtype)], num_replicas,\n"
    "reshards, backward_prefetch, forward_prefetch, offloads), root first.\n"
    "forward, backward: events (kind, unit, param, nbytes, peak_nbytes,\n"
    "seconds[, nbytes that may be offloaded, the forward event that saved\n"
    "them, requires_grad]), kind one of the PLAN constants. links: (bytes per\n"
    "second, latency in seconds); hosts: (ranks of a host or 0, and the same\n"
    "of a host's link); offload: (keep_last or 0, bytes per second).");

PyDoc_STRVAR(
    prepare_exchange_doc,
    "prepare_exchange($module, /, rank, world_size, moves, device, *,\n"
    "                 direct_nbytes)\n--\n\n"
    "(results, outgoing, incoming, copies, unpacking) of one rank: messages\n"
    "are (peer, bytes). moves: (source, dtype, position, held, needed, "
    "target,\n"
    "shape), held and needed placements over ranks. See\n"
    "csrc/core/state/exchange.h.");

PyDoc_STRVAR(exchange_size_doc,
             "exchange_size($module, /, moves, *, direct_nbytes)\n--\n\n"
             "(nbytes, packed_nbytes) of an exchange, the same on all ranks.");

PyDoc_STRVAR(
    pass_messages_doc,
    "pass_messages($module, /, group, label, outgoing, incoming, copies=None)\n"
    "--\n\n"
    "Pass contiguous CPU tensors, (peer, tensor) each, between ranks of a\n"
    "process group through shared memory. All ranks must call it. `copies`\n"
    "of an exchange are made meanwhile. `label` is for errors. False if that\n"
    "is not possible: then nothing was done.");

PyDoc_STRVAR(deal_out_doc,
             "deal_out($module, /, costs, nbytes, *, num_owners, num_shards,\n"
             "         round_nbytes, shards)\n--\n\n"
             "(owner, round) of each whole parameter. See layout/owners.h.");

PyDoc_STRVAR(
    broadcast_doc,
    "broadcast($module, group, tensor, label, /)\n--\n\n"
    "Overwrite a contiguous tensor on a device with that of rank 0 of a\n"
    "process group, through NCCL, on the current stream. All ranks must call\n"
    "it. `label` is for errors. False if that is not possible: then nothing\n"
    "was done.");

PyDoc_STRVAR(copy_tensors_doc,
             "copy_tensors($module, copies, /)\n--\n\n"
             "Make the copies of an exchange.");

PyDoc_STRVAR(
    transport_doc,
    "transport($module, group, device, /)\n--\n\n"
    "What carries a process group's collectives: (name, why). The name is\n"
    "'shm', 'nccl' or 'c10d'; the reason for c10d, empty otherwise.");

static PyObject *transport(PyObject *Py_UNUSED(module), PyObject *args) {
  PyObject *group, *device; /* borrowed */
  if (!PyArg_ParseTuple(args, "OO:transport", &group, &device)) return NULL;
  return fsdp_torch_transport(group, device);
}

PyDoc_STRVAR(
    parts_doc,
    "parts($module, /)\n--\n\n"
    "What of fsdp_c's own transports and kernels can be used here, by\n"
    "name; tries them. 'why_no_x' is empty for what can.");

static PyObject *parts(PyObject *Py_UNUSED(module),
                       PyObject *Py_UNUSED(ignored)) {
  return fsdp_torch_parts();
}

PyDoc_STRVAR(
    describe_failure_doc,
    "describe_failure($module, process_group, cause, operation, /)\n--\n\n"
    "What to tell of a collective that failed; asks the other ranks.");

static PyObject *describe_failure(PyObject *Py_UNUSED(module), PyObject *args) {
  PyObject *process_group; /* borrowed */
  const char *cause, *operation;
  if (!PyArg_ParseTuple(args, "Oss:describe_failure", &process_group, &cause,
                        &operation)) {
    return NULL;
  }
  return fsdp_torch_describe_failure(process_group, cause, operation);
}

PyDoc_STRVAR(expect_writes_doc,
             "expect_writes($module, /)\n--\n\n"
             "Let all engines gather anew in their next forward: somebody is\n"
             "about to write parameters.");

static PyObject *expect_writes(PyObject *Py_UNUSED(module),
                               PyObject *Py_UNUSED(ignored)) {
  FSDP_LOCAL_ERROR(error);
  const fsdp_status status = fsdp_torch_expect_writes(&error);
  return fsdp_none_or_error(status, &error);
}

PyDoc_STRVAR(
    lend_shards_doc,
    "lend_shards($module, groups, states, params, lent_states, make_state, /)\n"
    "--\n\n"
    "What an optimizer of DTensors steps in their place: groups of the shards\n"
    "that have gradients. None: one of them is a tensor subclass, or a\n"
    "gradient or state is placed otherwise than its parameter.\n\n"
    "Fills params, the parameters by shard, and lent_states, the states by\n"
    "shard: what make_state(param, state) returns.");

PyDoc_STRVAR(
    watched_engine_doc,
    "watched_engine($module, engine, /)\n--\n\n"
    "Autograd's engine, whose calls all engines of units are told of.");

static PyMethodDef module_methods[] = {
    {"watched_engine", fsdp_module_watched_engine, METH_O, watched_engine_doc},
    {"lend_shards", fsdp_module_lend_shards, METH_VARARGS, lend_shards_doc},
    {"expect_writes", expect_writes, METH_NOARGS, expect_writes_doc},
    {"describe_failure", describe_failure, METH_VARARGS, describe_failure_doc},
    {"build_info", build_info, METH_NOARGS, build_info_doc},
    {"crc32c", (PyCFunction)(void (*)(void))fsdp_module_crc32c,
     METH_VARARGS | METH_KEYWORDS, crc32c_doc},
    {"choose_alignment",
     (PyCFunction)(void (*)(void))fsdp_module_choose_alignment,
     METH_VARARGS | METH_KEYWORDS, choose_alignment_doc},
    {"plan_step", (PyCFunction)(void (*)(void))fsdp_module_plan_step,
     METH_VARARGS | METH_KEYWORDS, plan_step_doc},
    {"parts", parts, METH_NOARGS, parts_doc},
    {"transport", transport, METH_VARARGS, transport_doc},
    {"prepare_exchange",
     (PyCFunction)(void (*)(void))fsdp_module_prepare_exchange,
     METH_VARARGS | METH_KEYWORDS, prepare_exchange_doc},
    {"exchange_size", (PyCFunction)(void (*)(void))fsdp_module_exchange_size,
     METH_VARARGS | METH_KEYWORDS, exchange_size_doc},
    {"deal_out", (PyCFunction)(void (*)(void))fsdp_module_deal_out,
     METH_VARARGS | METH_KEYWORDS, deal_out_doc},
    {"broadcast", fsdp_module_broadcast, METH_VARARGS, broadcast_doc},
    {"copy_tensors", fsdp_module_copy_tensors, METH_O, copy_tensors_doc},
    {"pass_messages", (PyCFunction)(void (*)(void))fsdp_module_pass_messages,
     METH_VARARGS | METH_KEYWORDS, pass_messages_doc},
    {NULL, NULL, 0, NULL},
};

/* New reference to `name` of the Python module `module_name`, or NULL. */
static PyObject *import_name(const char *module_name, const char *name) {
  PyObject *module = PyImport_ImportModule(module_name);
  if (module == NULL) return NULL;
  PyObject *value = PyObject_GetAttrString(module, name);
  Py_DECREF(module);
  return value;
}

static int add_constants(PyObject *module) {
  const struct {
    const char *name;
    long value;
  } constants[] = {
      {"PREFETCH_NONE", FSDP_PREFETCH_NONE},
      {"PREFETCH_PRE", FSDP_PREFETCH_PRE},
      {"PREFETCH_POST", FSDP_PREFETCH_POST},
      {"PLAN_ENTER", FSDP_STEP_ENTER},
      {"PLAN_USE", FSDP_STEP_USE},
      {"PLAN_WORK", FSDP_STEP_WORK},
      {"PLAN_LEAVE", FSDP_STEP_LEAVE},
      {"SYNC_NONE", FSDP_SYNC_NONE},
      {"SYNC_REDUCE", FSDP_SYNC_REDUCE},
      {"SYNC_SHARD", FSDP_SYNC_SHARD},
      {"BEGIN_CAPTURE", FSDP_TORCH_BEGIN_CAPTURE},
      {"FORK_LANES", FSDP_TORCH_FORK_LANES},
      {"JOIN_LANES", FSDP_TORCH_JOIN_LANES},
      {"END_CAPTURE", FSDP_TORCH_END_CAPTURE},
      {"BEGIN_REPLAY", FSDP_TORCH_BEGIN_REPLAY},
      {"END_REPLAY", FSDP_TORCH_END_REPLAY},
      {"CUSTOM_ALL_GATHER", FSDP_CUSTOM_ALL_GATHER},
      {"CUSTOM_REDUCE_SCATTER", FSDP_CUSTOM_REDUCE_SCATTER},
      {"CUSTOM_REDUCED", FSDP_CUSTOM_REDUCED},
      {"TIMELINE_IS_AHEAD", FSDP_TIMELINE_IS_AHEAD},
      {"TIMELINE_IS_KEPT", FSDP_TIMELINE_IS_KEPT},
      {"TIMELINE_IS_UNUSED", FSDP_TIMELINE_IS_UNUSED},
      {"TIMELINE_WAS_DONE", FSDP_TIMELINE_WAS_DONE},
  };
  for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
    if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) <
        0) {
      return -1;
    }
  }
  return 0;
}

/* What the entries of a timeline are: their layout for struct.unpack, and the
 * names of their kinds. */
static int add_timeline_constants(PyObject *module) {
  PyObject *names = PyTuple_New(FSDP_NUM_TIMELINE_KINDS);
  if (names == NULL) return -1;
  for (int i = 0; i < FSDP_NUM_TIMELINE_KINDS; i++) {
    PyObject *name = PyUnicode_FromString(fsdp_timeline_kind_name(i));
    if (name == NULL) {
      Py_DECREF(names);
      return -1;
    }
    PyTuple_SET_ITEM(names, i, name);
  }
  const int failed = PyModule_AddObjectRef(module, "TIMELINE_KINDS", names);
  Py_DECREF(names);
  if (failed < 0) return -1;
  return PyModule_AddStringConstant(module, "TIMELINE_FORMAT", "=qqqqiiiBB2x");
}

_Static_assert(sizeof(fsdp_timeline_entry) == 48, "as in TIMELINE_FORMAT");

static int module_exec(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  const struct {
    PyTypeObject **type;
    PyType_Spec *spec;
  } types[] = {
      {&state->unit_type, &fsdp_unit_object_spec},
      {&state->engine_type, &fsdp_engine_object_spec},
      {&state->layout_type, &fsdp_layout_object_spec},
      {&state->placement_type, &fsdp_placement_object_spec},
  };

  if (add_constants(module) < 0) return -1;
  if (add_timeline_constants(module) < 0) return -1;
  const struct {
    PyObject **value;
    const char *module_name;
    const char *name;
  } imports[] = {
      {&state->packed_sequence, "torch.nn.utils.rnn", "PackedSequence"},
      {&state->mapping, "collections.abc", "Mapping"},
      {&state->mutable_mapping, "collections.abc", "MutableMapping"},
      {&state->nn_module, "torch.nn", "Module"},
      {&state->tensor, "torch", "Tensor"},
      {&state->dtensor, "torch.distributed.tensor", "DTensor"},
      {&state->copy, "copy", "copy"},
  };
  for (size_t i = 0; i < sizeof imports / sizeof imports[0]; i++) {
    *imports[i].value = import_name(imports[i].module_name, imports[i].name);
    if (*imports[i].value == NULL) return -1;
  }
  const struct {
    PyObject **value;
    const char *text;
  } names[] = {
      {&state->make, "_make"},
      {&state->dataclass_fields, "__dataclass_fields__"},
      {&state->local_tensor, "_local_tensor"},
      {&state->spec, "_spec"},
      {&state->grad, "grad"},
      {&state->detach, "detach"},
  };
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    *names[i].value = PyUnicode_InternFromString(names[i].text);
    if (*names[i].value == NULL) return -1;
  }

  if (fsdp_listed_hooks_init(module, state) < 0) return -1;
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
    *types[i].type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, types[i].spec, NULL);
    if (*types[i].type == NULL) return -1;
    if (PyModule_AddType(module, *types[i].type) < 0) return -1;
  }
  return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  module_state *state = PyModule_GetState(module);
  if (state == NULL) return 0;
  Py_VISIT(state->unit_type);
  Py_VISIT(state->engine_type);
  Py_VISIT(state->layout_type);
  Py_VISIT(state->placement_type);
  Py_VISIT(state->packed_sequence);
  Py_VISIT(state->mapping);
  Py_VISIT(state->mutable_mapping);
  Py_VISIT(state->nn_module);
  Py_VISIT(state->tensor);
  Py_VISIT(state->dtensor);
  Py_VISIT(state->copy);
  Py_VISIT(state->output_hooks);
  return 0;
}

static int module_clear(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  if (state == NULL) return 0;
  Py_CLEAR(state->unit_type);
  Py_CLEAR(state->engine_type);
  Py_CLEAR(state->layout_type);
  Py_CLEAR(state->placement_type);
  Py_CLEAR(state->packed_sequence);
  Py_CLEAR(state->mapping);
  Py_CLEAR(state->mutable_mapping);
  Py_CLEAR(state->nn_module);
  Py_CLEAR(state->tensor);
  Py_CLEAR(state->dtensor);
  Py_CLEAR(state->copy);
  Py_CLEAR(state->make);
  Py_CLEAR(state->dataclass_fields);
  Py_CLEAR(state->local_tensor);
  Py_CLEAR(state->spec);
  Py_CLEAR(state->grad);
  Py_CLEAR(state->detach);
  Py_CLEAR(state->output_hooks);
  Py_CLEAR(state->pre_backward);
  Py_CLEAR(state->first_hook_id);
  Py_CLEAR(state->tensor_name);
  return 0;
}

static void module_free(void *module) {
  (void)module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, FSDP_SLOT(module_exec)},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

PyDoc_STRVAR(
    module_doc,
    "The CPython module: units, engines, placements. Conversion only.");

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,         .m_name = "fsdp_c._native",
    .m_doc = module_doc,           .m_size = sizeof(module_state),
    .m_methods = module_methods,   .m_slots = module_slots,
    .m_traverse = module_traverse, .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void) {
  return PyModuleDef_Init(&module_def);
}
