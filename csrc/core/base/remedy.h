/*
 * Remedies: what a caller can do about a failure, in the core's terms.
 *
 * The core's messages name the fault, and no function of the user's API: two
 * APIs stand on it. The bridge turns a remedy into a sentence in the user's
 * terms and adds it to the message (torch/remedies.cpp).
 */
#ifndef FSDP_BASE_REMEDY_H
#define FSDP_BASE_REMEDY_H

typedef enum fsdp_remedy {
  FSDP_REMEDY_NONE = 0,
  FSDP_REMEDY_RESET,          /* reset the engine */
  FSDP_REMEDY_DISMISS,        /* dismiss the summoned parameters */
  FSDP_REMEDY_END_STEP,       /* end the step, whatever it is in */
  FSDP_REMEDY_RESHARD,        /* reshard what was unsharded on demand */
  FSDP_REMEDY_SYNC,           /* let backward reduce again */
  FSDP_REMEDY_SYNC_ALIKE,     /* let backward reduce on all ranks or on none */
  FSDP_REMEDY_REDUCE,         /* reduce the accumulated gradients */
  FSDP_REMEDY_TRAIN_SOONER,   /* make it trainable before its forward */
  FSDP_REMEDY_TRAIN_LATER,    /* make it trainable after the accumulation */
  FSDP_REMEDY_NO_OFFLOAD,     /* keep the shards on the device */
  FSDP_REMEDY_NO_CAPTURE,     /* run the steps without a graph */
  FSDP_REMEDY_NO_ORDER_CHECK, /* do not compare the order of the ranks */
  FSDP_REMEDY_NO_RECORDING,   /* end the timeline */
  FSDP_REMEDY_TRANSPORT,      /* find out what carries the collectives */
  FSDP_REMEDY_NO_READING,     /* copy through memory that the ranks share */
  FSDP_NUM_REMEDIES
} fsdp_remedy;

#endif /* FSDP_BASE_REMEDY_H */
