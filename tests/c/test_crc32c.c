/*
 * Tests of base/crc32c: the vectors of RFC 3720, B.4, and random data of every
 * kind of length and alignment, by instruction and by table, against the
 * definition bit by bit.
 */
#include "base/crc32c.h"
#include "check.h"

typedef uint32_t (*crc32c_fn)(uint32_t value, const void *data, size_t nbytes);

static const crc32c_fn functions[] = {fsdp_crc32c, fsdp_crc32c_by_table};
enum { NUM_FUNCTIONS = 2 };

/* Long enough for both lengths of the three streams, twice. */
enum { NBYTES = 6 * 32768 + 6 * 1024 + 100 };
static unsigned char memory[NBYTES];

static void fill_memory(uint64_t seed) {
  for (int i = 0; i < NBYTES; i++) {
    memory[i] = (unsigned char)check_random(&seed, 256);
  }
}

static uint32_t by_bits(uint32_t value, const unsigned char *bytes,
                        size_t nbytes) {
  uint32_t crc = ~value;
  for (size_t i = 0; i < nbytes; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? UINT32_C(0x82F63B78) : 0);
    }
  }
  return ~crc;
}

TEST(test_vectors) {
  unsigned char bytes[32];
  for (int i = 0; i < NUM_FUNCTIONS; i++) {
    const crc32c_fn crc32c = functions[i];
    memset(bytes, 0, sizeof bytes);
    CHECK_I64(crc32c(0, bytes, sizeof bytes), 0x8A9136AA);
    memset(bytes, 255, sizeof bytes);
    CHECK_I64(crc32c(0, bytes, sizeof bytes), 0x62A8AB43);
    for (int j = 0; j < 32; j++) bytes[j] = (unsigned char)j;
    CHECK_I64(crc32c(0, bytes, sizeof bytes), 0x46DD794E);
    for (int j = 0; j < 32; j++) bytes[j] = (unsigned char)(31 - j);
    CHECK_I64(crc32c(0, bytes, sizeof bytes), 0x113FDB5C);
    CHECK_I64(crc32c(0, "123456789", 9), 0xE3069283);
    CHECK_I64(crc32c(0, NULL, 0), 0);
    CHECK_I64(crc32c(77, NULL, 0), 77);
  }
}

TEST(test_every_length_and_alignment) {
  fill_memory(99);
  for (int i = 0; i < NUM_FUNCTIONS; i++) {
    for (size_t nbytes = 0; nbytes < 70; nbytes++) {
      for (size_t begin = 0; begin < 9; begin++) {
        CHECK_I64(functions[i](5, memory + begin, nbytes),
                  by_bits(5, memory + begin, nbytes));
      }
    }
  }
}

TEST(test_long_data_and_what_it_is_cut_into) {
  uint64_t seed = 31337;
  fill_memory(7);
  const size_t edges[] = {3 * 1024 - 1,  3 * 1024,      3 * 1024 + 9,
                          3 * 32768 - 1, 3 * 32768 + 1, NBYTES};
  for (int i = 0; i < NUM_FUNCTIONS; i++) {
    for (size_t j = 0; j < sizeof edges / sizeof edges[0]; j++) {
      CHECK_I64(functions[i](0, memory, edges[j]),
                by_bits(0, memory, edges[j]));
    }
    for (int round = 0; round < 20; round++) {
      const size_t cut = (size_t)check_random(&seed, NBYTES + 1);
      const uint32_t begin = functions[i](3, memory, cut);
      CHECK_I64(functions[i](begin, memory + cut, NBYTES - cut),
                functions[1 - i](3, memory, NBYTES));
    }
  }
}
