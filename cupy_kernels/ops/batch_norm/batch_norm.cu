// Batch normalisation of channels, with Caffe's running statistics.
//
// Layout: float32 matrices (rows, channels): a blob (n, h, w, c) has n*h*w rows. `scale` and `shift`
// of a Scale layer behind it may be fused in; both may be null.
//   y = (x - mean) * deviate, times scale, plus shift;  deviate = 1 / sqrt(variance + epsilon)
//   dx = scale * deviate * (dy - sum(dy) / rows - xhat * sum(dy * xhat) / rows)
// Forward reads x twice and writes y: 12 bytes an element; backward 20.
// Launch: sums in blocks of 32 channels x 8 rows, the grid's y cutting the rows into chunks (as in
// channels.cu); partials are [2][chunk][channel]. The rest are grid-stride loops.
// Rounding: sums run over differences from the first row, which keeps them from cancelling where
// the mean is large; float32 within a chunk, double over the chunks, in a fixed order.
#include "device.cuh"

// What the two sums of a chunk add up for one row.
struct Moments {
  const float* x;
  __device__ __forceinline__ void add(float* sums, i64 i, int c) const {
    float d = x[i] - x[c];
    sums[0] += d;
    sums[1] += d * d;
  }
};
struct Gradients {
  const float *dy, *x, *mean, *deviate;
  __device__ __forceinline__ void add(float* sums, i64 i, int c) const {
    sums[0] += dy[i];
    sums[1] += dy[i] * ((x[i] - mean[c]) * deviate[c]);
  }
};

template <class Terms>
__device__ __forceinline__ void sum_chunk(const Terms& terms, float (*tile)[8][33], float* partials,
                                          i64 rows, int channels) {
  int c = blockIdx.x * 32 + threadIdx.x, y = threadIdx.y;
  i64 chunks = gridDim.y, each = (rows + chunks - 1) / chunks;
  i64 low = blockIdx.y * each, high = smaller(low + each, rows);
  float sums[2] = {0.0f, 0.0f};
  if (c < channels)
    for (i64 row = low + y; row < high; row += 8) terms.add(sums, row * channels + c, c);
  for (int k = 0; k < 2; ++k) tile[k][y][threadIdx.x] = sums[k];
  __syncthreads();
  if (y > 1 || c >= channels) return;
  float sum = 0.0f;
  for (int k = 0; k < 8; ++k) sum += tile[y][k][threadIdx.x];
  partials[(y * chunks + blockIdx.y) * channels + c] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
    batch_norm_moments(const float* x, float* partials, i64 rows, int channels) {
  __shared__ float tile[2][8][33];
  sum_chunk(Moments{x}, tile, partials, rows, channels);
}

// mean and deviate from the partials. The running blobs, if given, take
//   factor <- fraction * factor + 1, mean likewise, variance with rows / (rows - 1) of this one.
extern "C" __global__ void __launch_bounds__(256)
    batch_norm_statistics(const float* x, const float* partials, float* mean, float* deviate,
                          float* running_mean, float* running_variance, float* running_factor,
                          float fraction, float epsilon, i64 rows, int chunks, int channels) {
  for (GRID_STRIDE(c, (i64)channels)) {
    double sum = 0.0, squares = 0.0;
    for (int k = 0; k < chunks; ++k) {
      sum += (double)partials[(i64)k * channels + c];
      squares += (double)partials[(i64)(chunks + k) * channels + c];
    }
    double shifted = sum / (double)rows, variance = squares / (double)rows - shifted * shifted;
    if (variance < 0.0) variance = 0.0;
    mean[c] = (float)((double)x[c] + shifted);
    deviate[c] = 1.0f / sqrtf((float)variance + epsilon);
    if (!running_mean) continue;
    double unbiased = rows > 1 ? (double)rows / (double)(rows - 1) : 1.0;
    running_mean[c] = fraction * running_mean[c] + mean[c];
    running_variance[c] = fraction * running_variance[c] + (float)(unbiased * variance);
    if (c == 0) *running_factor = fraction * *running_factor + 1.0f;
  }
}

// mean and deviate from the running blobs, for test. A factor of 0 stands for no statistics yet.
extern "C" __global__ void __launch_bounds__(256)
    batch_norm_running(const float* running_mean, const float* running_variance,
                       const float* running_factor, float* mean, float* deviate, float epsilon,
                       int channels) {
  float factor = *running_factor == 0.0f ? 0.0f : 1.0f / *running_factor;
  for (GRID_STRIDE(c, (i64)channels)) {
    mean[c] = factor * running_mean[c];
    deviate[c] = 1.0f / sqrtf(factor * running_variance[c] + epsilon);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    batch_norm_forward(const float* x, const float* mean, const float* deviate, const float* scale,
                       const float* shift, float* y, i64 rows, int channels) {
  for (GRID_STRIDE(i, rows * channels)) {
    int c = (int)(i % channels);
    float v = (x[i] - mean[c]) * deviate[c];
    if (scale) v *= scale[c];
    y[i] = shift ? v + shift[c] : v;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    batch_norm_gradients(const float* dy, const float* x, const float* mean, const float* deviate,
                         float* partials, i64 rows, int channels) {
  __shared__ float tile[2][8][33];
  sum_chunk(Gradients{dy, x, mean, deviate}, tile, partials, rows, channels);
}

// `shift_sum` and `scale_sum` are the sums of dy and dy * xhat: the gradients of shift and scale.
extern "C" __global__ void __launch_bounds__(256)
    batch_norm_backward(const float* dy, const float* x, const float* mean, const float* deviate,
                        const float* scale, const float* shift_sum, const float* scale_sum,
                        float* dx, i64 rows, int channels) {
  float share = 1.0f / (float)rows;
  for (GRID_STRIDE(i, rows * channels)) {
    int c = (int)(i % channels);
    float xhat = (x[i] - mean[c]) * deviate[c];
    float v = dy[i] - share * shift_sum[c] - xhat * (share * scale_sum[c]);
    dx[i] = (scale ? scale[c] : 1.0f) * deviate[c] * v;
  }
}
