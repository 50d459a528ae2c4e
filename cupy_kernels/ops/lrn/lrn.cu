// Local response normalisation, across channels and within a channel.
//
// Layout: float32 blobs, channels last. With s the scale,
//   across: s[c] = k + alpha / size * sum of x^2 over `size` channels around c
//   within: s[p, q] = 1 + alpha / size^2 * sum of x^2 over size x size places around (p, q)
//   y = x * s^-beta
//   dx = dy * s^-beta - 2 * alpha * beta / size (or size^2) * x * sum of dy * y / s over the window
// `size` is odd; elements outside the blob count as zero. `share` is alpha / size (or size^2).
// Launch across: where channels are a multiple of 4 and the window is 3 or 5, a grid-stride loop over
// quadruples of channels: a thread reads its own and both neighbours, 16 bytes each, the latter
// from the cache, where other threads load them; no barrier, and one division by the channels for four
// elements. Otherwise a tile of whole pixels in dynamic shared memory. Scales are computed again in
// the backward pass: 8 bytes an element forward, 12 backward. Blobs are 16-byte aligned.
// Within: a grid-stride loop, an element a thread and turn; the forward pass stores s.
// Rounding: a window is summed separately for each element, since a running sum cancels.
#include "device.cuh"

__device__ __forceinline__ float raised(float s, float beta) {
  if (beta == 0.75f) {
    float r = rsqrtf(s);
    return r * sqrtf(r);
  }
  return exp2f(-beta * log2f(s));
}

// The sum of values (or their squares) over the channels within `half` of c, in rising order.
template <bool SQUARES>
__device__ __forceinline__ float window_sum(const float* pixel, int c, int half, int channels) {
  int low = c > half ? c - half : 0, high = c + half < channels ? c + half : channels - 1;
  float sum = 0.0f;
  for (int j = low; j <= high; ++j) sum += SQUARES ? pixel[j] * pixel[j] : pixel[j];
  return sum;
}

// Twelve channels around quadruple `i`, of which there are `each` to a pixel; zero beyond the pixel.
struct Around {
  float at[12];
};
__device__ __forceinline__ Around around(const float* x, i64 i, int place, int each) {
  float4 none = {}, four[3];
  four[1] = ((const float4*)x)[i];
  four[0] = place > 0 ? ((const float4*)x)[i - 1] : none;
  four[2] = place < each - 1 ? ((const float4*)x)[i + 1] : none;
  Around found;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    found.at[4 * k] = four[k].x, found.at[4 * k + 1] = four[k].y;
    found.at[4 * k + 2] = four[k].z, found.at[4 * k + 3] = four[k].w;
  }
  return found;
}
__device__ __forceinline__ int place_in_pixel(i64 i, int each) {
  return i <= 0xffffffffll ? (int)((u32)i % (u32)each) : (int)(i % each);
}

template <int HALF>
__device__ __forceinline__ float scale_at(const Around& x, int c, float share, float k) {
  float sum = 0.0f;
#pragma unroll
  for (int j = c - HALF; j <= c + HALF; ++j)
    if (j >= 0 && j < 12) sum += x.at[j] * x.at[j];
  return k + share * sum;
}

template <int HALF>
__device__ __forceinline__ void across_forward(const float* x, float* y, i64 pixels, int channels,
                                               float share, float beta, float k) {
  int each = channels / 4;
  for (GRID_STRIDE(i, pixels * each)) {
    Around v = around(x, i, place_in_pixel(i, each), each);
    float out[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      out[c] = v.at[4 + c] * raised(scale_at<HALF>(v, 4 + c, share, k), beta);
    ((float4*)y)[i] = {out[0], out[1], out[2], out[3]};
  }
}

// Twelve channels of x are enough for the ratios within HALF <= 2 of the middle four.
template <int HALF>
__device__ __forceinline__ void across_backward(const float* dy, const float* x, float* dx,
                                                i64 pixels, int channels, float share, float beta,
                                                float k) {
  int each = channels / 4;
  for (GRID_STRIDE(i, pixels * each)) {
    int place = place_in_pixel(i, each);
    Around v = around(x, i, place, each), d = around(dy, i, place, each);
    float direct[12], ratio[12], out[4];
#pragma unroll
    for (int c = 4 - HALF; c < 8 + HALF; ++c) {
      float s = scale_at<HALF>(v, c, share, k);
      direct[c] = d.at[c] * raised(s, beta);
      ratio[c] = v.at[c] == 0.0f ? 0.0f : direct[c] * v.at[c] / s;  // s may be 0 there
    }
#pragma unroll
    for (int c = 4; c < 8; ++c) {
      float sum = 0.0f;
#pragma unroll
      for (int j = c - HALF; j <= c + HALF; ++j) sum += ratio[j];
      out[c - 4] = direct[c] - 2.0f * share * beta * v.at[c] * sum;
    }
    ((float4*)dx)[i] = {out[0], out[1], out[2], out[3]};
  }
}

// Pixels of a tile; ops/lrn/spec.py sizes the shared memory by the same rule.
__device__ __forceinline__ int tile_pixels(int channels) {
  return channels < 2048 ? 2048 / channels : 1;
}

extern "C" __global__ void __launch_bounds__(256)
    lrn_across_forward(const float* x, float* y, i64 pixels, int channels, int size, float share,
                       float beta, float k) {
  DYNAMIC_SHARED(float, tile);
  int each = tile_pixels(channels), half = size / 2;
  if (channels % 4 == 0 && size == 5)
    return across_forward<2>(x, y, pixels, channels, share, beta, k);
  if (channels % 4 == 0 && size == 3)
    return across_forward<1>(x, y, pixels, channels, share, beta, k);
  for (i64 first = (i64)blockIdx.x * each; first < pixels; first += (i64)gridDim.x * each) {
    int count = (int)smaller(each, pixels - first) * channels;
    const float* from = x + first * channels;
    for (int t = threadIdx.x; t < count; t += blockDim.x) tile[t] = from[t];
    __syncthreads();
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
      int c = t % channels;
      float s = k + share * window_sum<true>(tile + (t - c), c, half, channels);
      y[first * channels + t] = tile[t] * raised(s, beta);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(256)
    lrn_across_backward(const float* dy, const float* x, float* dx, i64 pixels, int channels,
                        int size, float share, float beta, float k) {
  DYNAMIC_SHARED(float, tile);
  int each = tile_pixels(channels), half = size / 2;
  if (channels % 4 == 0 && size == 5)
    return across_backward<2>(dy, x, dx, pixels, channels, share, beta, k);
  if (channels % 4 == 0 && size == 3)
    return across_backward<1>(dy, x, dx, pixels, channels, share, beta, k);
  float* direct = tile + each * channels;  // dy * s^-beta
  float* ratio = direct + each * channels;  // dy * y / s
  for (i64 first = (i64)blockIdx.x * each; first < pixels; first += (i64)gridDim.x * each) {
    int count = (int)smaller(each, pixels - first) * channels;
    i64 base = first * channels;
    for (int t = threadIdx.x; t < count; t += blockDim.x) tile[t] = x[base + t];
    __syncthreads();
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
      int c = t % channels;
      float s = k + share * window_sum<true>(tile + (t - c), c, half, channels);
      direct[t] = dy[base + t] * raised(s, beta);
      ratio[t] = direct[t] * tile[t] / s;
    }
    __syncthreads();
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
      int c = t % channels;
      float sum = window_sum<false>(ratio + (t - c), c, half, channels);
      dx[base + t] = direct[t] - 2.0f * share * beta * tile[t] * sum;
    }
    __syncthreads();
  }
}

// Where an element of a blob (n, h, w, c) stands, and the part of its window inside the image.
struct Place {
  i64 image;
  int c, top, bottom, left, right;
};
__device__ __forceinline__ Place place(i64 i, int h, int w, int channels, int half) {
  int c = (int)(i % channels);
  i64 pixel = i / channels;
  int q = (int)(pixel % w), p = (int)(pixel / w % h);
  return {pixel / w / h * h * w * channels,    c,
          p > half ? p - half : 0,             p + half < h ? p + half : h - 1,
          q > half ? q - half : 0,             q + half < w ? q + half : w - 1};
}

extern "C" __global__ void __launch_bounds__(256)
    lrn_within_forward(const float* x, float* scale, float* y, i64 n, int h, int w, int channels,
                       int size, float share, float beta) {
  for (GRID_STRIDE(i, n * h * w * channels)) {
    Place at = place(i, h, w, channels, size / 2);
    float sum = 0.0f;
    for (int p = at.top; p <= at.bottom; ++p)
      for (int q = at.left; q <= at.right; ++q) {
        float v = x[at.image + ((i64)p * w + q) * channels + at.c];
        sum += v * v;
      }
    float s = 1.0f + share * sum;
    scale[i] = s;
    y[i] = x[i] * raised(s, beta);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    lrn_within_backward(const float* dy, const float* x, const float* scale, float* dx, i64 n,
                        int h, int w, int channels, int size, float share, float beta) {
  for (GRID_STRIDE(i, n * h * w * channels)) {
    Place at = place(i, h, w, channels, size / 2);
    float sum = 0.0f;
    for (int p = at.top; p <= at.bottom; ++p)
      for (int q = at.left; q <= at.right; ++q) {
        i64 j = at.image + ((i64)p * w + q) * channels + at.c;
        sum += dy[j] * x[j] * raised(scale[j], beta) / scale[j];
      }
    dx[i] = dy[i] * raised(scale[i], beta) - 2.0f * share * beta * x[i] * sum;
  }
}
