/*
 * Host allocation for the C rooms. A test can make the n-th allocation fail.
 * Counters are process-wide; use one thread only while a test injects failures.
 */
#ifndef FSDP_BASE_ALLOC_H
#define FSDP_BASE_ALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Zeroed memory for `num` elements of `nbytes` each, or NULL. A request for 0
 * bytes returns memory too, so NULL always means failure. */
void *fsdp_calloc(size_t num, size_t nbytes);

/* Grows `*items` (`*capacity` elements of `item_nbytes`) to at least `num`
 * elements. New ones are zeroed. Returns false, with nothing changed, when out
 * of memory. */
bool fsdp_grow(void **items, size_t *capacity, size_t num, size_t item_nbytes);

/* Copy of a string, or NULL when out of memory. */
char *fsdp_strdup(const char *text);

/* Accepts NULL. */
void fsdp_free(void *memory);

/* Test seam: allocation number `index` from now (0 = the next) fails, and only
 * that one; -1 turns injection off. */
void fsdp_alloc_fail_at(int64_t index);

/* Blocks allocated here and not yet freed. */
int64_t fsdp_alloc_live(void);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_ALLOC_H */
