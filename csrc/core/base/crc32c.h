/*
 * CRC-32C (Castagnoli, polynomial 0x1EDC6F41, reflected): the checksum of
 * checkpoint files. The tests use the vectors of RFC 3720, appendix B.4.
 */
#ifndef FSDP_BASE_CRC32C_H
#define FSDP_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Continues the checksum `value` (0: no data yet) with `data`. Uses the
 * processor's instruction if it has one. Cannot fail. */
uint32_t fsdp_crc32c(uint32_t value, const void *data, size_t nbytes);

/* The same from tables alone, for processors without the instruction. */
uint32_t fsdp_crc32c_by_table(uint32_t value, const void *data, size_t nbytes);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_CRC32C_H */
