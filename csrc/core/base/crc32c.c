/*
 * CRC-32C: by the processor's instruction in three streams, or by table.
 *
 * Note [Three streams]
 * The instruction takes 8 bytes per cycle and has a latency of 3 cycles, so one
 * chain runs at a third of the speed. Data is therefore cut into three streams
 * with a register each. To join two registers, the first is multiplied by
 * x^(8N), modulo the polynomial, where N is the number of bytes of the second,
 * and xored with the second, which started from 0.
 */
#include "base/crc32c.h"

#include <stdbool.h>
#include <string.h>

/* Reflected: bit 31 is x^0. */
#define POLYNOMIAL UINT32_C(0x82F63B78)

/* Tables ------------------------------------------------------------------- */

/* A table is linear: entry i is the xor of the entries of i's bits. */
#define BIT(i, bit, entry) (((i) >> (bit) & 1) != 0 ? UINT32_C(entry) : 0)
#define ENTRY(i, a, b, c, d, e, f, g, h)                                      \
  (BIT(i, 0, a) ^ BIT(i, 1, b) ^ BIT(i, 2, c) ^ BIT(i, 3, d) ^ BIT(i, 4, e) ^ \
   BIT(i, 5, f) ^ BIT(i, 6, g) ^ BIT(i, 7, h))
#define ENTRIES_4(i, ...)                             \
  ENTRY(i, __VA_ARGS__), ENTRY((i) + 1, __VA_ARGS__), \
      ENTRY((i) + 2, __VA_ARGS__), ENTRY((i) + 3, __VA_ARGS__)
#define ENTRIES_16(i, ...)                                    \
  ENTRIES_4(i, __VA_ARGS__), ENTRIES_4((i) + 4, __VA_ARGS__), \
      ENTRIES_4((i) + 8, __VA_ARGS__), ENTRIES_4((i) + 12, __VA_ARGS__)
#define ENTRIES_64(i, ...)                                       \
  ENTRIES_16(i, __VA_ARGS__), ENTRIES_16((i) + 16, __VA_ARGS__), \
      ENTRIES_16((i) + 32, __VA_ARGS__), ENTRIES_16((i) + 48, __VA_ARGS__)
#define TABLE(...)                                          \
  {ENTRIES_64(0, __VA_ARGS__), ENTRIES_64(64, __VA_ARGS__), \
   ENTRIES_64(128, __VA_ARGS__), ENTRIES_64(192, __VA_ARGS__)}

/* tables[k][i]: the register i after k + 1 bytes of zeros. */
static const uint32_t tables[8][256] = {
    TABLE(0xF26B8303, 0xE13B70F7, 0xC79A971F, 0x8AD958CF, 0x105EC76F,
          0x20BD8EDE, 0x417B1DBC, 0x82F63B78),
    TABLE(0x13A29877, 0x274530EE, 0x4E8A61DC, 0x9D14C3B8, 0x3FC5F181,
          0x7F8BE302, 0xFF17C604, 0xFBC3FAF9),
    TABLE(0xA541927E, 0x4F6F520D, 0x9EDEA41A, 0x38513EC5, 0x70A27D8A,
          0xE144FB14, 0xC76580D9, 0x8B277743),
    TABLE(0xDD45AAB8, 0xBF672381, 0x7B2231F3, 0xF64463E6, 0xE964B13D,
          0xD725148B, 0xABA65FE7, 0x52A0C93F),
    TABLE(0x38116FAC, 0x7022DF58, 0xE045BEB0, 0xC5670B91, 0x8F2261D3,
          0x1BA8B557, 0x37516AAE, 0x6EA2D55C),
    TABLE(0xEF306B19, 0xDB8CA0C3, 0xB2F53777, 0x6006181F, 0xC00C303E,
          0x85F4168D, 0x0E045BEB, 0x1C08B7D6),
    TABLE(0x68032CC8, 0xD0065990, 0xA5E0C5D1, 0x4E2DFD53, 0x9C5BFAA6,
          0x3D5B83BD, 0x7AB7077A, 0xF56E0EF4),
    TABLE(0x493C7D27, 0x9278FA4E, 0x211D826D, 0x423B04DA, 0x847609B4,
          0x0D006599, 0x1A00CB32, 0x34019664),
};

#undef BIT
#undef ENTRY
#undef ENTRIES_4
#undef ENTRIES_16
#undef ENTRIES_64
#undef TABLE

uint32_t fsdp_crc32c_by_table(uint32_t value, const void *data, size_t nbytes) {
  const unsigned char *bytes = data;
  uint32_t crc = ~value;
  for (; nbytes >= 8; nbytes -= 8, bytes += 8) {
    const uint32_t low =
        crc ^ ((uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 |
               (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24);
    crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^
          tables[5][low >> 16 & 255] ^ tables[4][low >> 24] ^
          tables[3][bytes[4]] ^ tables[2][bytes[5]] ^ tables[1][bytes[6]] ^
          tables[0][bytes[7]];
  }
  for (; nbytes > 0; nbytes--, bytes++) {
    crc = crc >> 8 ^ tables[0][(crc ^ *bytes) & 255];
  }
  return ~crc;
}

/* Instruction -------------------------------------------------------------- */

#if defined(__x86_64__)

#define HAS_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define ADD_8(crc, word) ((uint32_t)__builtin_ia32_crc32di((crc), (word)))
#define ADD_1(crc, byte) (__builtin_ia32_crc32qi((crc), (byte)))

static bool has_instruction(void) {
  return __builtin_cpu_supports("sse4.2") != 0;
}

#elif defined(__aarch64__) && defined(__linux__) && \
    __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#define HAS_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("+crc")))
#if defined(__clang__)
#define ADD_8(crc, word) (__builtin_arm_crc32cd((crc), (word)))
#define ADD_1(crc, byte) (__builtin_arm_crc32cb((crc), (byte)))
#else
#define ADD_8(crc, word) (__builtin_aarch64_crc32cx((crc), (word)))
#define ADD_1(crc, byte) (__builtin_aarch64_crc32cb((crc), (byte)))
#endif

/* Of libc, but of none of C11's headers. */
unsigned long getauxval(unsigned long type);

static bool has_instruction(void) {
  enum { HARDWARE_CAPABILITIES = 16, CRC32 = 1 << 7 };
  return (getauxval(HARDWARE_CAPABILITIES) & CRC32) != 0;
}

#endif

#ifdef HAS_INSTRUCTION

/* Bytes of one stream, and x^(8 * bytes) modulo the polynomial. */
typedef struct stretch {
  size_t nbytes;
  uint32_t shift;
} stretch;

/* a * b modulo the polynomial. */
static uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a >> 31) != 0) product ^= b;
    b = (b & 1) != 0 ? b >> 1 ^ POLYNOMIAL : b >> 1;
  }
  return product;
}

static inline uint64_t load_8(const unsigned char *bytes) {
  uint64_t word;
  memcpy(&word, bytes, sizeof word);
  return word;
}

/* The register `crc` after 3 * length.nbytes bytes. See Note
 * [Three streams]. */
WITH_INSTRUCTION
static uint32_t add_stretch(uint32_t crc, const unsigned char *bytes,
                            stretch length) {
  uint32_t second = 0;
  uint32_t third = 0;
  for (size_t i = 0; i < length.nbytes; i += 8) {
    crc = ADD_8(crc, load_8(bytes + i));
    second = ADD_8(second, load_8(bytes + length.nbytes + i));
    third = ADD_8(third, load_8(bytes + 2 * length.nbytes + i));
  }
  second ^= multiply(length.shift, crc);
  return third ^ multiply(length.shift, second);
}

WITH_INSTRUCTION
static uint32_t add_by_instruction(uint32_t value, const unsigned char *bytes,
                                   size_t nbytes) {
  static const stretch lengths[] = {{32768, 0xE2EA32DC}, {1024, 0xE4172B16}};
  uint32_t crc = ~value;
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    const size_t step = 3 * lengths[i].nbytes;
    for (; nbytes >= step; nbytes -= step, bytes += step) {
      crc = add_stretch(crc, bytes, lengths[i]);
    }
  }
  for (; nbytes >= 8; nbytes -= 8, bytes += 8) crc = ADD_8(crc, load_8(bytes));
  for (; nbytes > 0; nbytes--, bytes++) crc = ADD_1(crc, *bytes);
  return ~crc;
}

#undef WITH_INSTRUCTION
#undef ADD_8
#undef ADD_1

#endif /* HAS_INSTRUCTION */

uint32_t fsdp_crc32c(uint32_t value, const void *data, size_t nbytes) {
#ifdef HAS_INSTRUCTION
  if (has_instruction()) return add_by_instruction(value, data, nbytes);
#endif
  return fsdp_crc32c_by_table(value, data, nbytes);
}

#undef HAS_INSTRUCTION
#undef POLYNOMIAL
