// What a gradient becomes on a slow link, and the error that stays behind for the next push.
//
// With v = error + scale * g (scale 1 without a verdict; g counts as 0 where the step is left out):
// q stands for dq, and error becomes v - dq. That difference is exact in float32 wherever q is the
// nearest value it could be: for int8, 4 bits and the casts (fp16: up to 2^29). A sign's error is
// rounded once, and denormals are flushed. What is not finite must have been kept out by the guard
// (norm.cu).
//
// Layout: float32 arenas of n floats. A quantisation block is 256 floats, the arena's shard
// boundary, with one float32 scale; the last block may be shorter, and its q is padded with zeros'
// codes. int8: one signed byte each. 4 bits: q + 8, two to a byte, the low half first. Sign: one bit
// each, lowest first, set where v < 0; zeros in the arena's gaps come out as +scale, and whoever
// applies them skips the gaps.
// Launch: blocks of 256 threads. A warp takes a quantisation block, a lane 8 floats of it; casts and
// decoding take a grid-stride loop over elements.
// Rounding: v, scale, quotient and dq each once; the nearest integer, ties to even.
#include "arena.cuh"

#define BLOCK 256
#define EACH 8
#define WARPS_OVER(i, count)                                                            \
  i64 i = first_index() / WARP, i##_step = index_stride() / WARP; i < (count); i += i##_step

__device__ __forceinline__ float corrected(float g, float error, const Verdict* verdict) {
  if (!verdict) return g + error;
  return verdict->skip ? error : verdict->scale * g + error;
}

struct Values {
  float at[EACH];
};
__device__ __forceinline__ Values load(const float* g, const float* error, const Verdict* verdict,
                                       i64 first, i64 n) {
  Values v;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    v.at[i] = first + i < n ? corrected(g[first + i], error[first + i], verdict) : 0.0f;
  return v;
}

// Integers within [-LEVELS, LEVELS], handed to `store` 8 at a time.
template <int LEVELS, class Store>
__device__ __forceinline__ void quantise(const float* g, float* error, float* scales,
                                         const Verdict* verdict, i64 n, Store store) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    i64 first = block * BLOCK + lane * EACH;
    Values v = load(g, error, verdict, first, n);
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) most = fmaxf(most, fabsf(v.at[i]));
    float scale = warp_max(most) / (float)LEVELS;
    if (lane == 0) scales[block] = scale;
    int codes[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int q = scale > 0.0f ? __float2int_rn(v.at[i] / scale) : 0;
      codes[i] = q < -LEVELS ? -LEVELS : q > LEVELS ? LEVELS : q;
      if (first + i < n) error[first + i] = v.at[i] - (float)codes[i] * scale;
    }
    store(first, codes);
  }
}

struct StoreBytes {
  u8* q;
  __device__ __forceinline__ void operator()(i64 first, const int (&codes)[EACH]) const {
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < EACH; ++i) words[i / 4] |= (u32)(codes[i] & 255) << i % 4 * 8;
    *(uint2*)(q + first) = {words[0], words[1]};
  }
};
struct StoreHalves {
  u8* q;
  __device__ __forceinline__ void operator()(i64 first, const int (&codes)[EACH]) const {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) word |= (u32)(codes[i] + 8) << i * 4;
    *(u32*)(q + first / 2) = word;
  }
};

// scale = max |v| / 127.
extern "C" __global__ void __launch_bounds__(256)
    quantise_int8(const float* g, float* error, u8* q, float* scales, const Verdict* verdict,
                  i64 n) {
  StoreBytes store = {q};
  quantise<127>(g, error, scales, verdict, n, store);
}

// scale = max |v| / 7.
extern "C" __global__ void __launch_bounds__(256)
    quantise_int4(const float* g, float* error, u8* q, float* scales, const Verdict* verdict,
                  i64 n) {
  StoreHalves store = {q};
  quantise<7>(g, error, scales, verdict, n, store);
}

// scale = mean |v| over the block (Seide et al. 2014, with one scale for both signs).
extern "C" __global__ void __launch_bounds__(256)
    quantise_sign(const float* g, float* error, u8* q, float* scales, const Verdict* verdict,
                  i64 n) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    i64 first = block * BLOCK + lane * EACH;
    Values v = load(g, error, verdict, first, n);
    float sum = 0.0f;
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += fabsf(v.at[i]);
    float scale = warp_sum(sum) / (float)smaller(BLOCK, n - block * BLOCK);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      bool negative = v.at[i] < 0.0f;
      bits |= (u32)negative << i;
      if (first + i < n) error[first + i] = v.at[i] - (negative ? -scale : scale);
    }
    q[first / EACH] = (u8)bits;
    if (lane == 0) scales[block] = scale;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    dequantise_int8(const u8* q, const float* scales, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) {
    int code = q[i];
    y[i] = (float)(code < 128 ? code : code - 256) * scales[i / BLOCK];
  }
}
extern "C" __global__ void __launch_bounds__(256)
    dequantise_int4(const u8* q, const float* scales, float* y, i64 n) {
  for (GRID_STRIDE(i, n))
    y[i] = (float)((q[i / 2] >> i % 2 * 4 & 15) - 8) * scales[i / BLOCK];
}
extern "C" __global__ void __launch_bounds__(256)
    dequantise_sign(const u8* q, const float* scales, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) {
    float scale = scales[i / BLOCK];
    y[i] = q[i / 8] >> i % 8 & 1 ? -scale : scale;
  }
}

// The nearest bf16, ties to even, as bits; NaN stays one.
__device__ __forceinline__ u16 bf16_bits(float x) {
  u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
__device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

// The nearest fp16, ties to even. What is beyond the greatest one, 65504, becomes that and leaves
// the rest in the error; what is below the least normal one, 2^-14, becomes zero.
__device__ __forceinline__ u16 fp16_bits(float x) {
  u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (u16)(sign | 0x7e00u);
  if (bits >= 0x477fe000u) return (u16)(sign | 0x7bffu);
  if (bits < 0x38800000u) return (u16)sign;
  u32 half = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13;
  return (u16)(sign | half);
}
__device__ __forceinline__ float from_fp16(u16 half) {
  u32 sign = (u32)(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest > 0x7c00u) return not_a_number();
  return __uint_as_float(sign | (rest ? (rest << 13) + 0x38000000u : 0));
}

// `error` may be null: then what is lost is lost.
extern "C" __global__ void __launch_bounds__(256)
    cast_bf16(const float* g, float* error, u16* q, const Verdict* verdict, i64 n) {
  for (GRID_STRIDE(i, n)) {
    float v = corrected(g[i], error ? error[i] : 0.0f, verdict);
    q[i] = bf16_bits(v);
    if (error) error[i] = v - from_bf16(bf16_bits(v));
  }
}
extern "C" __global__ void __launch_bounds__(256)
    cast_fp16(const float* g, float* error, u16* q, const Verdict* verdict, i64 n) {
  for (GRID_STRIDE(i, n)) {
    float v = corrected(g[i], error ? error[i] : 0.0f, verdict);
    q[i] = fp16_bits(v);
    if (error) error[i] = v - from_fp16(fp16_bits(v));
  }
}
extern "C" __global__ void __launch_bounds__(256) uncast_bf16(const u16* q, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = from_bf16(q[i]);
}
extern "C" __global__ void __launch_bounds__(256) uncast_fp16(const u16* q, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = from_fp16(q[i]);
}

// Deep gradient compression (Lin et al. 2018) in three launches, in the order of the indices.
// v is the error feedback here: what is not sent stays in it, whole.

// u = mu * u + scale * g; v += u; counts[block] = how many |v| of that block are above tau.
extern "C" __global__ void __launch_bounds__(256)
    sparse_count(const float* g, float* u, float* v, u32* counts, const Verdict* verdict, float mu,
                 float tau, i64 n) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    i64 first = block * BLOCK + lane * EACH;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      i64 k = first + i;
      if (k >= n) continue;
      u[k] = corrected(g[k], mu * u[k], verdict);
      v[k] += u[k];
      found += fabsf(v[k]) > tau;
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2)
      found += __shfl_xor_sync(ALL_LANES, found, offset);
    if (lane == 0) counts[block] = found;
  }
}

// starts[i] = the sum of counts before i; starts[blocks] = all of them. One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    sparse_starts(const u32* counts, u32* starts, i64 blocks) {
  __shared__ u32 sums[256];
  int t = threadIdx.x;
  i64 each = (blocks + 255) / 256, first = t * each, end = smaller(blocks, first + each);
  u32 sum = 0;
  for (i64 i = first; i < end; ++i) sum += counts[i];
  sums[t] = sum;
  __syncthreads();
  for (int offset = 1; offset < 256; offset *= 2) {
    u32 before = t >= offset ? sums[t - offset] : 0;
    __syncthreads();
    sums[t] += before;
    __syncthreads();
  }
  u32 at = sums[t] - sum;
  for (i64 i = first; i < end; ++i) {
    starts[i] = at;
    at += counts[i];
  }
  if (t == 255) starts[blocks] = sums[255];
}

// Write out (index, value) where |v| > tau, and zero u and v there. What does not fit into
// `capacity` pairs stays where it is, for the next push.
extern "C" __global__ void __launch_bounds__(256)
    sparse_send(float* u, float* v, const u32* starts, u32* indices, float* values, float tau,
                i64 capacity, i64 n) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    i64 first = block * BLOCK + lane * EACH;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) found += first + i < n && fabsf(v[first + i]) > tau;
    u32 before = found;
    for (int offset = 1; offset < WARP; offset *= 2) {
      u32 lower = __shfl_up_sync(ALL_LANES, before, offset);
      if (lane >= offset) before += lower;
    }
    i64 at = (i64)starts[block] + before - found;
    for (i64 k = first; k < smaller(n, first + EACH); ++k) {
      if (!(fabsf(v[k]) > tau) || at >= capacity) continue;
      indices[at] = (u32)k;
      values[at++] = v[k];
      u[k] = v[k] = 0.0f;
    }
  }
}

// y[indices[i]] += values[i]; the indices differ from each other. Those beyond n are left out.
extern "C" __global__ void __launch_bounds__(256)
    sparse_add(const u32* indices, const float* values, float* y, i64 count, i64 n) {
  for (GRID_STRIDE(i, count))
    if (indices[i] < n) y[indices[i]] += values[i];
}
