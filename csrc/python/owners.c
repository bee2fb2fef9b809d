/*
 * deal_out(): the owners of whole parameters; see layout/owners.h.
 */
#include "layout/owners.h"

#include "python/convert.h"

/* A new array, or NULL with an exception. */
static fsdp_owned_param *read_params(PyObject *cost_sequence,
                                     PyObject *nbytes_sequence,
                                     Py_ssize_t *num_params) {
  Py_ssize_t num_nbytes = 0;
  int64_t *nbytes = NULL;
  fsdp_owned_param *params = NULL;
  int64_t *costs = fsdp_read_int64s(cost_sequence, "costs", 1, num_params);
  if (costs == NULL) return NULL;
  nbytes = fsdp_read_int64s(nbytes_sequence, "nbytes", 1, &num_nbytes);
  if (nbytes == NULL) goto done;
  if (num_nbytes != *num_params) {
    PyErr_Format(PyExc_ValueError, "%zd costs, but %zd nbytes", *num_params,
                 num_nbytes);
    goto done;
  }
  params = PyMem_New(fsdp_owned_param, (size_t)*num_params + 1);
  if (params == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  for (Py_ssize_t i = 0; i < *num_params; i++) {
    params[i] = (fsdp_owned_param){costs[i], nbytes[i]};
  }
done:
  PyMem_Free(nbytes);
  PyMem_Free(costs);
  return params;
}

static PyObject *list_of_deals(const fsdp_deal *deals, Py_ssize_t num_params) {
  PyObject *list = PyList_New(num_params);
  if (list == NULL) return NULL;
  for (Py_ssize_t i = 0; i < num_params; i++) {
    PyObject *deal = Py_BuildValue("(LL)", (long long)deals[i].owner,
                                   (long long)deals[i].round);
    if (deal == NULL) {
      Py_DECREF(list);
      return NULL;
    }
    PyList_SET_ITEM(list, i, deal);
  }
  return list;
}

/* A new array, or NULL with an exception. */
static int64_t *read_shards(PyObject *sequence, Py_ssize_t num_params) {
  Py_ssize_t num_shards = 0;
  int64_t *shards = fsdp_read_int64s(sequence, "shards", 1, &num_shards);
  if (shards == NULL || num_shards == num_params) return shards;
  PyErr_Format(PyExc_ValueError, "%zd costs, but %zd shards", num_params,
               num_shards);
  PyMem_Free(shards);
  return NULL;
}

PyObject *fsdp_module_deal_out(PyObject *Py_UNUSED(module), PyObject *args,
                               PyObject *kwargs) {
  static const char *const keywords[] = {
      "costs",        "nbytes", "num_owners", "num_shards",
      "round_nbytes", "shards", NULL};
  fsdp_error error = {0};
  PyObject *costs, *nbytes, *shards; /* borrowed */
  PyObject *result = NULL;
  fsdp_deal *deals = NULL;
  int64_t *shards_of_wholes = NULL;
  Py_ssize_t num_params = 0;
  long long num_owners, num_shards, round_nbytes;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "OO$LLLO:deal_out", FSDP_KEYWORDS(keywords), &costs,
          &nbytes, &num_owners, &num_shards, &round_nbytes, &shards)) {
    return NULL;
  }
  fsdp_owned_param *params = read_params(costs, nbytes, &num_params);
  if (params == NULL) return NULL;
  shards_of_wholes = read_shards(shards, num_params);
  if (shards_of_wholes == NULL) goto done;
  deals = PyMem_New(fsdp_deal, (size_t)num_params + 1);
  if (deals == NULL) {
    (void)PyErr_NoMemory(); /* returns NULL */
    goto done;
  }
  const fsdp_owners owners = {num_owners, num_shards, shards_of_wholes};
  if (fsdp_deal_out(params, num_params, owners, round_nbytes, deals, &error) !=
      FSDP_OK) {
    fsdp_torch_set_python_error(&error);
    goto done;
  }
  result = list_of_deals(deals, num_params);
done:
  PyMem_Free(deals);
  PyMem_Free(shards_of_wholes);
  PyMem_Free(params);
  return result;
}
