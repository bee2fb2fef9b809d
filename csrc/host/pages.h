/*
 * Host memory for large buffers: blocks, which come and go, and slabs.
 *
 * Note [Fresh memory]
 * The kernel fills memory that a process uses for the first time, a page at a
 * time: a fault per 4 KiB takes longer than writing it. malloc gives large
 * memory back to the kernel when it is freed, so a buffer that comes and goes
 * in every step would fault in every step. Such buffers are therefore mapped
 * for themselves, over large pages where they cover one, the rest in one call.
 * No memory is added: their ends lie on small pages. Smaller ones are malloc's.
 *
 * Note [Kept pages]
 * What comes and goes in every step would still be filled in every step. When
 * such memory is freed, its pages are kept for the next buffer of their size.
 * The kernel may take them at any time (MADV_FREE): they are free memory that
 * this process can have back for nothing. Until then they count in its resident
 * set. If no pages of the wanted size are kept, the oldest ones are unmapped,
 * so sizes that are not used any more go away.
 */
#ifndef FSDP_HOST_PAGES_H
#define FSDP_HOST_PAGES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Memory of `nbytes` (>= 1), whatever it contains, aligned to at least 64
 * bytes; release with fsdp_host_pages_free(). NULL: out of memory. */
void *fsdp_host_pages_alloc(int64_t nbytes);

/* memory: of fsdp_host_pages_alloc(nbytes). Cannot fail. */
void fsdp_host_pages_free(void *memory, int64_t nbytes);

/* The same, but the pages may be kept for an allocation of the same size. */
void fsdp_host_pages_keep(void *memory, int64_t nbytes);

/* Bytes that are kept now; negative: another thread keeps or takes some. */
int64_t fsdp_host_pages_kept_nbytes(void);

/* Whole pages of address space for `nbytes` (>= 1), which have no memory until
 * they are used; then zeros. Release with fsdp_host_space_free(). NULL: out of
 * memory. */
void *fsdp_host_space_alloc(int64_t nbytes);

/* space: of fsdp_host_space_alloc(nbytes). Cannot fail. */
void fsdp_host_space_free(void *space, int64_t nbytes);

/* Gives memory now to the pages of bytes [begin, end), up to which the pages
 * before have it. Returns up to where they have it now. */
int64_t fsdp_host_space_populate(void *space, int64_t begin, int64_t end,
                                 int64_t before);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_HOST_PAGES_H */
