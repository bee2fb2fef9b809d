/* Elements of the recorder's memory as doubles, whatever their dtype. */
#ifndef FSDP_TESTS_ELEMENTS_H
#define FSDP_TESTS_ELEMENTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/types.h"

double elements_read(const void *data, fsdp_dtype dtype, int64_t i);

void elements_write(void *data, fsdp_dtype dtype, int64_t i, double number);

void elements_combine(void *destination, fsdp_dtype destination_dtype,
                      const void *source, fsdp_dtype source_dtype,
                      int64_t numel, double scale, bool add);

#endif /* FSDP_TESTS_ELEMENTS_H */
