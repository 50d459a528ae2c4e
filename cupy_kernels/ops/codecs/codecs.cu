// Codecs that compress a gradient, and the error that remains for the next push.
//
// With v = error + scale * g (scale 1 without a verdict; g counts as 0 if the step is skipped):
// q decodes to dq, and error becomes v - dq. That difference is exact in float32 wherever q is the
// nearest value it could be: for int8, 4 bits and the casts (fp16: up to 2^29). A sign's error is
// rounded once, and denormals are flushed. The guard (gradient_guard.cu) must have refused values that are
// not finite.
//
// Layout: float32 arenas of n floats. A quantisation block is 256 floats, the arena's shard
// boundary, with one float32 scale; the last block may be shorter, and its q is padded with zeros'
// codes. int8: one signed byte each. 4 bits: q + 8, two to a byte, the low half first. Sign: one bit
// each, lowest first, set where v < 0; zeros in the arena's gaps come out as +scale, so code that
// applies them must skip the gaps.
// Arrays of floats are 16-byte aligned.
// Launch: blocks of 256 threads. A warp takes a quantisation block, in two halves of 128 floats: a
// lane 4 of each, so that every access of a warp is one run of whole sectors. Casts and decoding take
// a grid-stride loop over quadruples. One pass: each array is read and written once.
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

// A lane's share of a block: value i is float `spot(lane, i)` of it.
struct Values {
  float at[EACH];
};
__device__ __forceinline__ i64 spot(i64 block, int lane, int i) {
  return block * BLOCK + i / 4 * (BLOCK / 2) + lane * 4 + i % 4;
}
__device__ __forceinline__ Values load(const float* from, i64 block, int lane, i64 n) {
  Values v;
#pragma unroll
  for (int i = 0; i < EACH; i += 4) {
    i64 k = spot(block, lane, i);
    float4 four = {};
    if (k + 4 <= n) {
      four = *(const float4*)(from + k);
    } else {
      if (k < n) four.x = from[k];
      if (k + 1 < n) four.y = from[k + 1];
      if (k + 2 < n) four.z = from[k + 2];
    }
    v.at[i] = four.x, v.at[i + 1] = four.y, v.at[i + 2] = four.z, v.at[i + 3] = four.w;
  }
  return v;
}
__device__ __forceinline__ void keep(float* to, const Values& v, i64 block, int lane, i64 n) {
#pragma unroll
  for (int i = 0; i < EACH; i += 4) {
    i64 k = spot(block, lane, i);
    if (k + 4 <= n) {
      *(float4*)(to + k) = {v.at[i], v.at[i + 1], v.at[i + 2], v.at[i + 3]};
    } else {
      if (k < n) to[k] = v.at[i];
      if (k + 1 < n) to[k + 1] = v.at[i + 1];
      if (k + 2 < n) to[k + 2] = v.at[i + 2];
    }
  }
}
__device__ __forceinline__ Values load_corrected(const float* g, const float* error,
                                                 const Verdict* verdict, i64 block, int lane,
                                                 i64 n) {
  Values v = load(g, block, lane, n), carried = load(error, block, lane, n);
#pragma unroll
  for (int i = 0; i < EACH; ++i) v.at[i] = corrected(v.at[i], carried.at[i], verdict);
  return v;
}

// Integers within [-LEVELS, LEVELS], handed to `store` four at a time.
template <int LEVELS, class Store>
__device__ __forceinline__ void quantise(const float* g, float* error, float* scales,
                                         const Verdict* verdict, i64 n, Store store) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    Values v = load_corrected(g, error, verdict, block, lane, n);
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
      v.at[i] -= (float)codes[i] * scale;
    }
    keep(error, v, block, lane, n);
    store(spot(block, lane, 0), codes);
    store(spot(block, lane, 4), codes + 4);
  }
}

struct StoreBytes {
  u8* q;
  __device__ __forceinline__ void operator()(i64 first, const int* codes) const {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= (u32)(codes[i] & 255) << i * 8;
    *(u32*)(q + first) = word;
  }
};
struct StoreHalves {
  u8* q;
  __device__ __forceinline__ void operator()(i64 first, const int* codes) const {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= (u32)(codes[i] + 8) << i * 4;
    *(u16*)(q + first / 2) = (u16)word;
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

// The sum of |v| over a block in the order that cpu_numpy.py and cpu.py have: 8
// neighbours one by one, then a tree over the 32 sums. An odd lane continues where the one below it
// ended; its two sums are those of neighbours l / 2 and 16 + l / 2.
__device__ __forceinline__ float sum_of_magnitudes(const Values& v) {
  int lane = threadIdx.x % WARP;
  float halves[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* at = v.at + 4 * half;
    float first = ((fabsf(at[0]) + fabsf(at[1])) + fabsf(at[2])) + fabsf(at[3]);
    float before = __shfl_up_sync(ALL_LANES, first, 1);
    halves[half] =
        (((before + fabsf(at[0])) + fabsf(at[1])) + fabsf(at[2])) + fabsf(at[3]);
  }
  float sum = halves[0] + halves[1];
  for (int offset = WARP / 2; offset > 1; offset /= 2)
    sum += __shfl_xor_sync(ALL_LANES, sum, offset);
  return __shfl_sync(ALL_LANES, sum, lane | 1);
}

// scale = mean |v| over the block (Seide et al. 2014, with one scale for both signs).
extern "C" __global__ void __launch_bounds__(256)
    quantise_sign(const float* g, float* error, u8* q, float* scales, const Verdict* verdict,
                  i64 n) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    Values v = load_corrected(g, error, verdict, block, lane, n);
    float scale = sum_of_magnitudes(v) / (float)smaller(BLOCK, n - block * BLOCK);
    u32 low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      u32 negative = v.at[i] < 0.0f;
      if (i < 4) low |= negative << i;
      else high |= negative << (i - 4);
      v.at[i] -= negative ? -scale : scale;
    }
    keep(error, v, block, lane, n);
    // Two lanes have a byte of each half between them: the even one writes the first half's.
    bool odd = lane % 2;
    u32 other = __shfl_xor_sync(ALL_LANES, odd ? low : high, 1);
    u32 bits = odd ? other | high << 4 : low | other << 4;
    q[block * (BLOCK / 8) + (odd ? BLOCK / 16 : 0) + lane / 2] = (u8)bits;
    if (lane == 0) scales[block] = scale;
  }
}

// Four decoded values at a time to y, or onto what is there: the pull's, and a shard's, one pass.
template <bool ADD, class Code>
__device__ __forceinline__ void decode(const Code& code, float* y, i64 n) {
  for (GRID_STRIDE(i, n / 4)) {
    float4 v = code.four(4 * i);
    if (ADD) {
      float4 old = ((const float4*)y)[i];
      v = {old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w};
    }
    ((float4*)y)[i] = v;
  }
  i64 last = n / 4 * 4 + first_index();
  if (last >= n) return;
  float v = code.one(last);
  y[last] = ADD ? y[last] + v : v;
}

struct Bytes {
  const u8* q;
  const float* scales;
  __device__ __forceinline__ static float value(u32 code, float scale) {
    return (float)(i8)(u8)code * scale;
  }
  __device__ __forceinline__ float one(i64 i) const { return value(q[i], scales[i / BLOCK]); }
  __device__ __forceinline__ float4 four(i64 i) const {
    u32 word = *(const u32*)(q + i);
    float scale = scales[i / BLOCK];
    return {value(word, scale), value(word >> 8, scale), value(word >> 16, scale),
            value(word >> 24, scale)};
  }
};
struct Nibbles {
  const u8* q;
  const float* scales;
  __device__ __forceinline__ static float value(u32 code, float scale) {
    return (float)((int)(code & 15) - 8) * scale;
  }
  __device__ __forceinline__ float one(i64 i) const {
    return value(q[i / 2] >> i % 2 * 4, scales[i / BLOCK]);
  }
  __device__ __forceinline__ float4 four(i64 i) const {
    u32 word = *(const u16*)(q + i / 2);
    float scale = scales[i / BLOCK];
    return {value(word, scale), value(word >> 4, scale), value(word >> 8, scale),
            value(word >> 12, scale)};
  }
};
struct Signs {
  const u8* q;
  const float* scales;
  __device__ __forceinline__ static float value(u32 code, float scale) {
    return code & 1 ? -scale : scale;
  }
  __device__ __forceinline__ float one(i64 i) const {
    return value(q[i / 8] >> i % 8, scales[i / BLOCK]);
  }
  __device__ __forceinline__ float4 four(i64 i) const {
    u32 bits = q[i / 8] >> i % 8;
    float scale = scales[i / BLOCK];
    return {value(bits, scale), value(bits >> 1, scale), value(bits >> 2, scale),
            value(bits >> 3, scale)};
  }
};

// y = q * scale.
extern "C" __global__ void __launch_bounds__(256)
    dequantise_int8(const u8* q, const float* scales, float* y, i64 n) {
  decode<false>(Bytes{q, scales}, y, n);
}
extern "C" __global__ void __launch_bounds__(256)
    dequantise_int4(const u8* q, const float* scales, float* y, i64 n) {
  decode<false>(Nibbles{q, scales}, y, n);
}
extern "C" __global__ void __launch_bounds__(256)
    dequantise_sign(const u8* q, const float* scales, float* y, i64 n) {
  decode<false>(Signs{q, scales}, y, n);
}

// y += q * scale: dequantise and apply.
extern "C" __global__ void __launch_bounds__(256)
    apply_int8(const u8* q, const float* scales, float* y, i64 n) {
  decode<true>(Bytes{q, scales}, y, n);
}
extern "C" __global__ void __launch_bounds__(256)
    apply_int4(const u8* q, const float* scales, float* y, i64 n) {
  decode<true>(Nibbles{q, scales}, y, n);
}
extern "C" __global__ void __launch_bounds__(256)
    apply_sign(const u8* q, const float* scales, float* y, i64 n) {
  decode<true>(Signs{q, scales}, y, n);
}

// The nearest bf16, ties to even, as bits; NaN stays one. What is beyond the greatest one, about
// 3.39e38, becomes that, or the error would be infinite.
__device__ __forceinline__ u16 bf16_bits(float x) {
  u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  if ((bits & 0x7fffffffu) >= 0x7f7f8000u) return (u16)(bits >> 16 & 0x8000u | 0x7f7fu);
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

struct Bf16 {
  const u16* q;
  __device__ __forceinline__ static u16 bits(float x) { return bf16_bits(x); }
  __device__ __forceinline__ static float value(u16 code) { return from_bf16(code); }
  __device__ __forceinline__ float one(i64 i) const { return value(q[i]); }
  __device__ __forceinline__ float4 four(i64 i) const {
    ushort4 v = *(const ushort4*)(q + i);
    return {value(v.x), value(v.y), value(v.z), value(v.w)};
  }
};
struct Fp16 {
  const u16* q;
  __device__ __forceinline__ static u16 bits(float x) { return fp16_bits(x); }
  __device__ __forceinline__ static float value(u16 code) { return from_fp16(code); }
  __device__ __forceinline__ float one(i64 i) const { return value(q[i]); }
  __device__ __forceinline__ float4 four(i64 i) const {
    ushort4 v = *(const ushort4*)(q + i);
    return {value(v.x), value(v.y), value(v.z), value(v.w)};
  }
};

template <class Code>
__device__ __forceinline__ void cast(const float* g, float* error, u16* q, const Verdict* verdict,
                                     i64 n) {
  for (GRID_STRIDE(i, n / 4)) {
    float4 v = ((const float4*)g)[i], e = {};
    if (error) e = ((const float4*)error)[i];
    v = {corrected(v.x, e.x, verdict), corrected(v.y, e.y, verdict), corrected(v.z, e.z, verdict),
         corrected(v.w, e.w, verdict)};
    ushort4 code = {Code::bits(v.x), Code::bits(v.y), Code::bits(v.z), Code::bits(v.w)};
    ((ushort4*)q)[i] = code;
    if (error)
      ((float4*)error)[i] = {v.x - Code::value(code.x), v.y - Code::value(code.y),
                             v.z - Code::value(code.z), v.w - Code::value(code.w)};
  }
  i64 last = n / 4 * 4 + first_index();
  if (last >= n) return;
  float v = corrected(g[last], error ? error[last] : 0.0f, verdict);
  q[last] = Code::bits(v);
  if (error) error[last] = v - Code::value(q[last]);
}

// `error` may be null: then what is lost is lost.
extern "C" __global__ void __launch_bounds__(256)
    cast_bf16(const float* g, float* error, u16* q, const Verdict* verdict, i64 n) {
  cast<Bf16>(g, error, q, verdict, n);
}
extern "C" __global__ void __launch_bounds__(256)
    cast_fp16(const float* g, float* error, u16* q, const Verdict* verdict, i64 n) {
  cast<Fp16>(g, error, q, verdict, n);
}
extern "C" __global__ void __launch_bounds__(256) uncast_bf16(const u16* q, float* y, i64 n) {
  decode<false>(Bf16{q}, y, n);
}
extern "C" __global__ void __launch_bounds__(256) uncast_fp16(const u16* q, float* y, i64 n) {
  decode<false>(Fp16{q}, y, n);
}
extern "C" __global__ void __launch_bounds__(256) apply_bf16(const u16* q, float* y, i64 n) {
  decode<true>(Bf16{q}, y, n);
}
extern "C" __global__ void __launch_bounds__(256) apply_fp16(const u16* q, float* y, i64 n) {
  decode<true>(Fp16{q}, y, n);
}

// Deep gradient compression (Lin et al. 2018) in three launches, in the order of the indices.
// v is the error feedback here: what is not sent stays in it, whole.

// u = mu * u + scale * g; v += u; counts[block] = how many |v| of that block are above tau.
extern "C" __global__ void __launch_bounds__(256)
    sparse_count(const float* g, float* u, float* v, u32* counts, const Verdict* verdict, float mu,
                 float tau, i64 n) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    Values given = load(g, block, lane, n), moved = load(u, block, lane, n);
    Values sums = load(v, block, lane, n);
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      moved.at[i] = corrected(given.at[i], mu * moved.at[i], verdict);
      sums.at[i] += moved.at[i];
      found += spot(block, lane, i) < n && fabsf(sums.at[i]) > tau;
    }
    keep(u, moved, block, lane, n);
    keep(v, sums, block, lane, n);
    for (int offset = WARP / 2; offset > 0; offset /= 2)
      found += __shfl_xor_sync(ALL_LANES, found, offset);
    if (lane == 0) counts[block] = found;
  }
}

// starts[i] = the sum of counts before i; starts[blocks] = all of them. A block of 1024 threads gives
// 1024 of them, after it has added up, for itself, all that come before: with a count for 256 floats
// that is little, and it needs no second launch.
extern "C" __global__ void __launch_bounds__(1024)
    sparse_starts(const u32* counts, u32* starts, i64 blocks) {
  __shared__ u32 warps[2][WARP];
  int t = threadIdx.x, lane = t % WARP, warp = t / WARP;
  i64 first = (i64)blockIdx.x * 1024;
  u32 before = 0, mine = first + t < blocks ? counts[first + t] : 0, up_to = mine;
#pragma unroll 8
  for (i64 i = t; i < first; i += 1024) before += counts[i];
  for (int offset = WARP / 2; offset > 0; offset /= 2)
    before += __shfl_xor_sync(ALL_LANES, before, offset);
  for (int offset = 1; offset < WARP; offset *= 2) {
    u32 lower = __shfl_up_sync(ALL_LANES, up_to, offset);
    if (lane >= offset) up_to += lower;
  }
  if (lane == WARP - 1) warps[0][warp] = before, warps[1][warp] = up_to;
  __syncthreads();
  u32 at = up_to - mine;
  for (int k = 0; k < WARP; ++k) at += warps[0][k] + (k < warp ? warps[1][k] : 0);
  if (first + t < blocks) starts[first + t] = at;
  if (first + t == (blocks > 0 ? blocks - 1 : 0)) starts[blocks] = at + mine;
}

// Write out (index, value) where |v| > tau, and zero u and v there. What does not fit into
// `capacity` pairs stays where it is, for the next push.
extern "C" __global__ void __launch_bounds__(256)
    sparse_send(float* u, float* v, const u32* starts, u32* indices, float* values, float tau,
                i64 capacity, i64 n) {
  int lane = threadIdx.x % WARP;
  for (WARPS_OVER(block, (n + BLOCK - 1) / BLOCK)) {
    Values sums = load(v, block, lane, n);
    u32 above[2] = {0, 0};  // of the first half, and of the second, whose indices come later
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      above[i / 4] += spot(block, lane, i) < n && fabsf(sums.at[i]) > tau;
    u32 found = above[0] | above[1] << 16, before = found;
    for (int offset = 1; offset < WARP; offset *= 2) {
      u32 lower = __shfl_up_sync(ALL_LANES, before, offset);
      if (lane >= offset) before += lower;
    }
    u32 all = __shfl_sync(ALL_LANES, before, WARP - 1) & 0xffffu;
    before -= found;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      i64 at = (i64)starts[block] + (half ? all + (before >> 16) : before & 0xffffu);
      if (!above[half]) continue;
#pragma unroll
      for (int i = 4 * half; i < 4 * half + 4; ++i) {
        i64 k = spot(block, lane, i);
        if (k >= n || !(fabsf(sums.at[i]) > tau) || at >= capacity) continue;
        indices[at] = (u32)k;
        values[at++] = sums.at[i];
        u[k] = v[k] = 0.0f;
      }
    }
  }
}

// y[indices[i]] += values[i]; the indices differ from each other. Those beyond n are left out.
extern "C" __global__ void __launch_bounds__(256)
    sparse_add(const u32* indices, const float* values, float* y, i64 count, i64 n) {
  for (GRID_STRIDE(i, count))
    if (indices[i] < n) y[indices[i]] += values[i];
}
