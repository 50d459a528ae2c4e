// The gradient's L2 norm, and the verdict that follows from it: clip, unscale, or skip the step.
//
// Layout: a float32 arena of n floats, 16-byte aligned. Sums run in a fixed order, in two stages:
// `square_sums` gives one partial a block, in a number that depends on n alone; `check_norm` adds them up in
// double precision. A NaN or an infinity makes the sum not finite and is never lost on the way,
// as it would be in a maximum; squares of finite values beyond about 1e19 overflow to infinity.
// Launch: `square_sums` a grid-stride loop over quadruples in blocks of 256; `check_norm` one block.
#include "arena.cuh"

// 4 bytes an element.
extern "C" __global__ void __launch_bounds__(256)
    square_sums(const float* x, float* partials, i64 n) {
  __shared__ float scratch[WARP];
  float sum = 0.0f;
  for (GRID_STRIDE(i, n / 4)) {
    float4 v = ((const float4*)x)[i];
    sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
  }
  i64 last = n / 4 * 4 + first_index();
  if (last < n) sum += x[last] * x[last];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// norm = unscale * sqrt(sum of partials); scale = unscale, times clip / norm where norm > clip > 0.
// Caffe clips before it divides by iter_size: let unscale hold that division only if clip is 0.
extern "C" __global__ void __launch_bounds__(256)
    check_norm(const float* partials, const Hyper* hyper, Verdict* verdict, i64 count) {
  __shared__ double sums[256];
  int t = threadIdx.x;
  double sum = 0.0;
  for (i64 i = t; i < count; i += 256) sum += (double)partials[i];
  sums[t] = sum;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (t < half) sums[t] += sums[t + half];
    __syncthreads();
  }
  if (t > 0 || blockIdx.x > 0) return;
  float norm = hyper->unscale * (float)sqrt(sums[0]);
  bool skip = !is_finite(norm);
  float clip = hyper->clip, scale = hyper->unscale;
  if (clip > 0.0f && norm > clip) scale = scale * (clip / norm);
  verdict->norm = norm;
  verdict->scale = skip ? 0.0f : scale;
  verdict->skip = skip;
  verdict->skips += skip;
}

// y = scale * x, or zeros if the step is skipped: for a gradient that is pushed uncompressed.
extern "C" __global__ void __launch_bounds__(256)
    apply_verdict(const float* x, float* y, const Verdict* verdict, i64 n) {
  float scale = verdict->scale;
  bool skip = verdict->skip;
  for (GRID_STRIDE(i, n)) y[i] = skip ? 0.0f : scale * x[i];
}
