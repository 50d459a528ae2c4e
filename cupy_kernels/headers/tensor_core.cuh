// Matrix multiply-accumulate of one warp, and copies that run behind the arithmetic.
//
// The functions are PTX on the GPU (sm_80 and newer) and plain C in the emulator, where a copy
// lands only when it is waited for: a kernel that forgets to wait reads poison.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k8" and
// "mma.m16n8k16"):
//   A (16 rows, row-major)     tf32: (g, t) (g+8, t) (g, t+4) (g+8, t+4)
//                              bf16, two to a register: (g, 2t..) (g+8, 2t..) (g, 2t+8..) (g+8, 2t+8..)
//   B (8 columns, by column)   tf32: (t, g) (t+4, g);  bf16: (2t.., g) (2t+8.., g)
//   C and D (16 x 8, fp32)     (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
#pragma once
#include "device.cuh"

#ifdef EMULATED

#define to_tf32 emulated_to_tf32
#define to_bf16_pair emulated_to_bf16_pair
#define mma_tf32(d, a, b) emulated_mma_tf32(d, a, b, __LINE__)
#define mma_bf16(d, a, b) emulated_mma_bf16(d, a, b, __LINE__)
#define copy_async16(to, from, bytes) emulated_copy_async(to, from, 16, bytes)
#define copy_async4(to, from, bytes) emulated_copy_async(to, from, 4, bytes)
#define copy_async_commit emulated_copy_async_commit
#define COPY_ASYNC_WAIT(groups) emulated_copy_async_wait(groups)

#else

// The nearest tf32 (10 mantissa bits), ties away from zero, as the bits of a float.
__device__ __forceinline__ u32 to_tf32(float x) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Two bf16, `low` in the low half, each the nearest, ties to even.
__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// d += a b for fragments of 16 x 8 and 8 x 8 tf32 values. All 32 lanes call it together.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b for fragments of 16 x 16 and 16 x 8 bf16 values. All 32 lanes call it together.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Start a copy of 16 (or 4) bytes from global to shared memory, both aligned to that size. Only
// the first `bytes` are read; the rest is filled with zeros.
__device__ __forceinline__ void copy_async16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   (u32)__cvta_generic_to_shared(to)),
               "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async4(void* to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                   (u32)__cvta_generic_to_shared(to)),
               "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Wait until all but the newest `groups` committed groups of this thread have landed; others see
// them after the next barrier.
#define COPY_ASYNC_WAIT(groups) asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory")

#endif
