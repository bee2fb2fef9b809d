/*
 * Parameter table: a hash table of the keys finds the uses that share one
 * parameter, in linear time.
 */
#include "layout/param_table.h"

#include <assert.h>
#include <inttypes.h>

#include "base/alloc.h"

struct fsdp_param_table {
  int64_t num_uses;
  int64_t num_params;
  fsdp_param_spec *specs; /* per param */
  int64_t *first_use;     /* per param */
  int64_t *param_of_use;  /* per use */
};

/* Open addressing: a bucket holds a param + 1, or 0. */
typedef struct key_index {
  int64_t *buckets;
  size_t num_buckets; /* a power of two, more than half of it empty */
} key_index;

/* The bucket that holds `key`, or the empty one where it belongs. */
static int64_t *find_bucket(const key_index *index,
                            const fsdp_param_spec *specs, uint64_t key) {
  const size_t mask = index->num_buckets - 1;
  /* Keys are often addresses: spread their middle bits (Fibonacci hashing). */
  size_t i = (size_t)((key * UINT64_C(0x9E3779B97F4A7C15)) >> 20) & mask;
  while (index->buckets[i] != 0 && specs[index->buckets[i] - 1].key != key) {
    i = (i + 1) & mask;
  }
  return &index->buckets[i];
}

static fsdp_status check_spec(const fsdp_param_spec *spec, int64_t use,
                              fsdp_error *error) {
  if (spec->numel < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "parameter use %" PRId64 " has numel %" PRId64
                     ", need >= 0",
                     use, spec->numel);
  }
  if (spec->dtype.itemsize < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "parameter use %" PRId64 " has itemsize %" PRId32
                     ", need >= 1",
                     use, spec->dtype.itemsize);
  }
  return FSDP_OK;
}

static bool specs_agree(const fsdp_param_spec *a, const fsdp_param_spec *b) {
  return a->numel == b->numel && fsdp_dtype_equal(a->dtype, b->dtype) &&
         a->dtype.itemsize == b->dtype.itemsize &&
         a->requires_grad == b->requires_grad;
}

/* Fills the table, whose arrays have room for one param per use. */
static fsdp_status add_uses(fsdp_param_table *self, const fsdp_param_spec *uses,
                            const key_index *index, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int64_t use = 0; use < self->num_uses; use++) {
    FSDP_TRY(check_spec(&uses[use], use, error));
    int64_t *bucket = find_bucket(index, self->specs, uses[use].key);
    if (*bucket == 0) {
      self->specs[self->num_params] = uses[use];
      self->first_use[self->num_params] = use;
      *bucket = ++self->num_params;
    }
    const int64_t param = *bucket - 1;
    if (!specs_agree(&self->specs[param], &uses[use])) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "parameter uses %" PRId64 " and %" PRId64
                       " share key %" PRIu64
                       " but disagree in numel, dtype or in whether they train",
                       self->first_use[param], use, uses[use].key);
    }
    self->param_of_use[use] = param;
  }
done:
  return status;
}

fsdp_status fsdp_param_table_create(const fsdp_param_spec *uses,
                                    int64_t num_uses, fsdp_param_table **table,
                                    fsdp_error *error) {
  fsdp_param_table *self = NULL;
  key_index index = {NULL, 1};
  fsdp_status status = FSDP_OK;

  if (num_uses < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "num_uses is %" PRId64 ", need >= 0", num_uses);
  }

  self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) goto no_memory;
  self->num_uses = num_uses;
  self->specs = fsdp_calloc((size_t)num_uses, sizeof *self->specs);
  if (self->specs == NULL) goto no_memory;
  self->first_use = fsdp_calloc((size_t)num_uses, sizeof *self->first_use);
  if (self->first_use == NULL) goto no_memory;
  self->param_of_use =
      fsdp_calloc((size_t)num_uses, sizeof *self->param_of_use);
  if (self->param_of_use == NULL) goto no_memory;
  /* Cannot wrap: num_uses specs of more than 8 bytes each fit in memory. */
  while (index.num_buckets <= 2 * (size_t)num_uses) index.num_buckets *= 2;
  index.buckets = fsdp_calloc(index.num_buckets, sizeof *index.buckets);
  if (index.buckets == NULL) goto no_memory;

  FSDP_TRY(add_uses(self, uses, &index, error));

  *table = self;
  self = NULL;
  goto done;

no_memory:
  status = FSDP_FAIL(
      error, FSDP_OUT_OF_MEMORY,
      "out of host memory for a parameter table of %" PRId64 " uses", num_uses);
done:
  fsdp_free(index.buckets);
  fsdp_param_table_destroy(self);
  return status;
}

void fsdp_param_table_destroy(fsdp_param_table *table) {
  if (table == NULL) return;
  fsdp_free(table->param_of_use);
  fsdp_free(table->first_use);
  fsdp_free(table->specs);
  fsdp_free(table);
}

int64_t fsdp_param_table_num_params(const fsdp_param_table *table) {
  return table->num_params;
}

int64_t fsdp_param_table_param_of_use(const fsdp_param_table *table,
                                      int64_t use) {
  assert(use >= 0 && use < table->num_uses);
  return table->param_of_use[use];
}

int64_t fsdp_param_table_first_use(const fsdp_param_table *table,
                                   int64_t param) {
  assert(param >= 0 && param < table->num_params);
  return table->first_use[param];
}

const fsdp_param_spec *fsdp_param_table_spec(const fsdp_param_table *table,
                                             int64_t param) {
  assert(param >= 0 && param < table->num_params);
  return &table->specs[param];
}
