/*
 * CRC-32C (Castagnoli, polynomial 0x1EDC6F41, reflected): the checksum of what
 * is in files. RFC 3720, appendix B.4, has the vectors of the tests.
 */
#ifndef FSDP_BASE_CRC32C_H
#define FSDP_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The checksum of what gave `value` (0: nothing) followed by `data`. Uses the
 * processor's instruction where there is one. Cannot fail. */
uint32_t fsdp_crc32c(uint32_t value, const void *data, size_t nbytes);

/* The same from tables alone, for processors without the instruction. */
uint32_t fsdp_crc32c_by_table(uint32_t value, const void *data, size_t nbytes);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_CRC32C_H */
