/*
 * Parameter table: a unit's original parameters; a shared one counts once.
 *
 *   uses    fc1.weight  fc1.bias  head.weight (= fc1.weight)
 *   key     17          23        17
 *   param   0           1         0
 *
 * A *use* is one place in the module tree that holds a parameter; a *param* is
 * the parameter itself. Immutable once created.
 */
#ifndef FSDP_LAYOUT_PARAM_TABLE_H
#define FSDP_LAYOUT_PARAM_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_param_spec {
  uint64_t key;  /* identity: equal keys are one shared parameter */
  int64_t numel; /* >= 0; 1 for a scalar */
  fsdp_dtype dtype;
  bool requires_grad;
} fsdp_param_spec;

typedef struct fsdp_param_table fsdp_param_table;

/*
 * uses   `num_uses` specs, in the order of the module tree. Copied.
 * table  [out] new reference; release with fsdp_param_table_destroy().
 *
 * FSDP_INVALID_ARGUMENT  num_uses < 0, a negative numel, an itemsize < 1, or
 *                        two uses of one key that disagree.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_param_table_create(const fsdp_param_spec *uses,
                                                   int64_t num_uses,
                                                   fsdp_param_table **table,
                                                   fsdp_error *error);

/* Accepts NULL. Cannot fail. */
void fsdp_param_table_destroy(fsdp_param_table *table);

int64_t fsdp_param_table_num_params(const fsdp_param_table *table);

/* The param behind use `use`, which is in [0, num_uses). */
int64_t fsdp_param_table_param_of_use(const fsdp_param_table *table,
                                      int64_t use);

/* The first use of param `param`, which is in [0, num_params). */
int64_t fsdp_param_table_first_use(const fsdp_param_table *table,
                                   int64_t param);

/* Borrowed; `param` is in [0, num_params). */
const fsdp_param_spec *fsdp_param_table_spec(const fsdp_param_table *table,
                                             int64_t param);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_LAYOUT_PARAM_TABLE_H */
