// The common header of all kernel sources; NVRTC, nvcc and g++ with the emulator's shim accept it.
//
// No host header is included here or in any source: NVRTC has none. Sizes and indices are 64 bits
// wide, loops are grid-stride loops, and since a grid of 0 is launched as a grid of 1, every loop
// checks its bound. Compilers may not contract a * b + c: sources that want one rounding write
// fmaf, all others get two, on the GPU and in the emulator alike.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define LARGEST_FLOAT 3.402823466e38f
#define SMALLEST_FLOAT 1.175494351e-38f  // the smallest normal one
#define WARP 32
#define ALL_LANES 0xffffffffu

// Shared memory with the size that the launch gives; 16-byte aligned. The emulator has its own.
#ifndef EMULATED
#define DYNAMIC_SHARED(type, name)                                   \
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[]; \
  type* name = (type*)dynamic_shared_bytes
#endif

// Infinity and NaN as bits: the macros of <math.h> don't exist under NVRTC.
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ i64 first_index() {
  return (i64)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ i64 index_stride() { return (i64)gridDim.x * blockDim.x; }

// for (GRID_STRIDE(i, n)): every i in [0, n) belongs to one thread of a one-dimensional grid.
#define GRID_STRIDE(i, n) i64 i = first_index(), i##_step = index_stride(); i < (n); i += i##_step

// For blocks of (32, 8), a warp for each row: this thread's first row, and the rows of all blocks.
__device__ __forceinline__ i64 warp_row() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }
__device__ __forceinline__ i64 warp_rows() { return (i64)gridDim.x * blockDim.y; }

__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 larger(i64 a, i64 b) { return a > b ? a : b; }
__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// Sums in a fixed order, the same on every run: a tree over the warp, then over the warps.
__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = WARP / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int offset = WARP / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// The sum over a block of whole warps, given to every thread. `scratch` is __shared__ float[WARP];
// the call ends with a barrier, so the next one may use it again.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  value = warp_sum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_sum(lane < warps ? scratch[lane] : 0.0f);
  __syncthreads();
  return value;
}
__device__ __forceinline__ float block_max(float value, float* scratch) {
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  value = warp_max(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_max(lane < warps ? scratch[lane] : -infinity());
  __syncthreads();
  return value;
}
