// Blobs transposed between channels-first and channels-last, and images scaled as they are read.
//
// Layout: x (n, rows, columns) of float32 or bytes, y (n, columns, rows) of float32. An image (n, c,
// h, w) has c rows and h * w columns, and comes out channels-last; one that is channels-last has
// h * w rows and c columns, and comes out channels-first.
//   y[b, j, i] = (x[b, i, j] - mean[i]) * scale;  mean may be null
// Launch: blocks of 32 x 8, a tile of 32 x 32 each, grid (columns / 32, rows / 32, n): read along
// columns, written along rows, both in runs of 32.
// Rounding: each operation once; with no mean and a scale of 1 a copy is exact.
#include "device.cuh"

template <class Pixel>
__device__ __forceinline__ void transpose(const Pixel* x, float* y, const float* mean, float scale,
                                     i64 n, i64 rows, i64 columns, float (*tile)[33]) {
  i64 row = (i64)blockIdx.y * 32, column = (i64)blockIdx.x * 32;
  for (i64 b = blockIdx.z; b < n; b += gridDim.z) {
    i64 base = b * rows * columns, j = column + threadIdx.x, k = row + threadIdx.x;
    for (int t = threadIdx.y; t < 32; t += 8)
      if (row + t < rows && j < columns) {
        float v = (float)x[base + (row + t) * columns + j];
        tile[t][threadIdx.x] = (mean ? v - mean[row + t] : v) * scale;
      }
    __syncthreads();
    for (int t = threadIdx.y; t < 32; t += 8)
      if (column + t < columns && k < rows)
        y[base + (column + t) * rows + k] = tile[threadIdx.x][t];
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(256)
    transpose_floats(const float* x, float* y, const float* mean, float scale, i64 n, i64 rows,
                i64 columns) {
  __shared__ float tile[32][33];
  transpose(x, y, mean, scale, n, rows, columns, tile);
}

extern "C" __global__ void __launch_bounds__(256)
    transpose_bytes(const u8* x, float* y, const float* mean, float scale, i64 n, i64 rows,
               i64 columns) {
  __shared__ float tile[32][33];
  transpose(x, y, mean, scale, n, rows, columns, tile);
}
