/*
 * nccl.h includes CUDA's header of this name and uses nothing of it in C.
 */
#ifndef FSDP_TESTS_ABI_CUDA_FP16_H
#define FSDP_TESTS_ABI_CUDA_FP16_H
#endif /* FSDP_TESTS_ABI_CUDA_FP16_H */
