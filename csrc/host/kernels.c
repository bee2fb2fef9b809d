/*
 * Pack over host memory: casts, scales and adds.
 */
#include "host/kernels.h"

#include <string.h>

#include "host/convert_priv.h"
#include "host/lanes_priv.h"

/* Two arrays of the same number of elements, each of a floating dtype. */
typedef struct stretch {
  char *to;
  const char *from;
  fsdp_host_float to_index;
  fsdp_host_float from_index;
  int64_t numel;
} stretch;

/* Takes up to FSDP_HOST_BLOCK_NUMEL elements off the front of `rest`. */
static stretch take_block(stretch *rest) {
  stretch block = *rest;
  block.numel = fsdp_host_priv_block(rest->numel);
  rest->to += block.numel * fsdp_host_priv_itemsize(rest->to_index);
  rest->from += block.numel * fsdp_host_priv_itemsize(rest->from_index);
  rest->numel -= block.numel;
  return block;
}

/* to = scale * from. Pairs without a loop go block by block, so that the second
 * step reads the first one's result from the cache. */
static void scale_all(const fsdp_host_lanes *lanes, stretch all, double scale) {
  fsdp_host_scale_loop *loop = lanes->scale[all.to_index][all.from_index];
  if (loop != NULL) {
    loop(all.to, all.from, all.numel, scale);
    return;
  }
  loop = lanes->scale[all.to_index][all.to_index];
  while (all.numel > 0) {
    const stretch block = take_block(&all);
    fsdp_host_priv_convert(lanes, block.to, block.to_index, block.from,
                           block.from_index, block.numel);
    loop(block.to, block.to, block.numel, scale);
  }
}

/* What both are computed in: fp64 if either is fp64, else fp32. */
static fsdp_host_float wide_of(const stretch *all) {
  return all->to_index == FSDP_HOST_F64 || all->from_index == FSDP_HOST_F64
             ? FSDP_HOST_F64
             : FSDP_HOST_F32;
}

/* The same, but the product is converted. There is a difference where the
 * destination is narrower. */
static void scale_first(const fsdp_host_lanes *lanes, stretch all,
                        double scale) {
  double product[FSDP_HOST_BLOCK_NUMEL]; /* or as many of fp32 */
  const fsdp_host_float wide = wide_of(&all);
  while (all.numel > 0) {
    const stretch block = take_block(&all);
    fsdp_host_priv_convert(lanes, product, wide, block.from, block.from_index,
                           block.numel);
    lanes->scale[wide][wide](product, product, block.numel, scale);
    fsdp_host_priv_convert(lanes, block.to, block.to_index, product, wide,
                           block.numel);
  }
}

/* to += scale * from. */
static void add_all(const fsdp_host_lanes *lanes, stretch all, double scale) {
  double sum[FSDP_HOST_BLOCK_NUMEL]; /* or as many of fp32 */
  double term[FSDP_HOST_BLOCK_NUMEL];
  const fsdp_host_float wide = wide_of(&all);
  fsdp_host_scale_loop *loop = lanes->add[all.to_index][all.from_index];
  if (loop != NULL) {
    loop(all.to, all.from, all.numel, scale);
    return;
  }
  loop = lanes->add[wide][wide];
  while (all.numel > 0) {
    const stretch block = take_block(&all);
    fsdp_host_priv_convert(lanes, sum, wide, block.to, block.to_index,
                           block.numel);
    fsdp_host_priv_convert(lanes, term, wide, block.from, block.from_index,
                           block.numel);
    loop(sum, term, block.numel, scale);
    fsdp_host_priv_convert(lanes, block.to, block.to_index, sum, wide,
                           block.numel);
  }
}

/* The element that is moved everywhere is made by a conversion. */
static void write_ones(const fsdp_host_lanes *lanes, stretch all) {
  const float one = 1;
  const int64_t itemsize = fsdp_host_priv_itemsize(all.to_index);
  fsdp_host_priv_convert(lanes, all.to, all.to_index, &one, FSDP_HOST_F32, 1);
  for (int64_t i = 1; i < all.numel; i++) {
    memcpy(all.to + i * itemsize, all.to, (size_t)itemsize);
  }
}

static void apply_item(const fsdp_host_lanes *lanes, const fsdp_pack_item *item,
                       double scale) {
  stretch all = {.to = item->to, .from = item->from, .numel = item->numel};
  const size_t nbytes = (size_t)(item->numel * item->to_dtype.itemsize);
  const bool is_copy = !item->add && scale == 1.0;
  if (nbytes == 0) return;
  if (item->from == NULL && item->is_one &&
      fsdp_host_priv_float_of(item->to_dtype, &all.to_index)) {
    write_ones(lanes, all);
  } else if (item->from == NULL) {
    memset(all.to, 0, nbytes);
  } else if (is_copy && fsdp_dtype_equal(item->to_dtype, item->from_dtype)) {
    if (all.to != all.from) memcpy(all.to, all.from, nbytes);
  } else if (fsdp_host_priv_float_of(item->to_dtype, &all.to_index) &&
             fsdp_host_priv_float_of(item->from_dtype, &all.from_index)) {
    if (is_copy) {
      fsdp_host_priv_convert(lanes, all.to, all.to_index, all.from,
                             all.from_index, all.numel);
    } else if (item->add) {
      add_all(lanes, all, scale);
    } else if (item->scales_first && wide_of(&all) != all.to_index) {
      scale_first(lanes, all, scale);
    } else {
      scale_all(lanes, all, scale);
    }
  }
}

/* Whether apply_item supports this item. */
static fsdp_status check_item(const fsdp_pack_item *item, double scale,
                              fsdp_error *error) {
  const fsdp_dtype to = item->to_dtype;
  const fsdp_dtype from = item->from_dtype;
  fsdp_host_float index;
  const bool is_floating =
      fsdp_host_priv_float_of(to, &index) &&
      (item->from == NULL || fsdp_host_priv_float_of(from, &index));
  const bool is_copy = !item->add && scale == 1.0 && fsdp_dtype_equal(to, from);
  if (item->numel < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "pack: numel %lld, it must be >= 0",
                     (long long)item->numel);
  }
  if (item->to == NULL && item->numel > 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "pack: the destination of %lld elements is NULL",
                     (long long)item->numel);
  }
  if ((item->from != NULL && !is_floating && !is_copy) ||
      (item->from == NULL && item->is_one && !is_floating)) {
    return FSDP_FAIL(
        error, FSDP_INVALID_ARGUMENT,
        "pack: no host kernel from dtype %d to dtype %d (scale %g%s)"
        ", use fp16, bf16, fp32 or fp64, or torch's own",
        (int)(item->from == NULL ? to : from).code, (int)to.code, scale,
        item->add ? ", adding" : "");
  }
  return FSDP_OK;
}

fsdp_status fsdp_host_pack(const fsdp_pack_item *items, int64_t num_items,
                           double scale, fsdp_error *error) {
  const fsdp_host_lanes *lanes = fsdp_host_priv_lanes();
  for (int64_t i = 0; i < num_items; i++) {
    const fsdp_status status = check_item(&items[i], scale, error);
    if (status != FSDP_OK) return status;
  }
  for (int64_t i = 0; i < num_items; i++) {
    apply_item(lanes, &items[i], scale);
  }
  return FSDP_OK;
}
