// Sums of columns: over all axes of a blob but its channels.
//
// Layout: float32 matrices of `rows` x `columns`, row-major; for a blob (n, h, w, c) the columns are
// its channels. No access is wider than a float.
// Launch: blocks of 32 columns x 8 rows; the grid's y cuts the rows into a number of chunks that
// depends on the sizes alone. A second, one-dimensional launch adds the chunks.
// Rounding: sums in a fixed order, two stages, in float32.
#include "device.cuh"

// partials[chunk][column] = the chunk's sum of a * b, or of a where b is null.
extern "C" __global__ void __launch_bounds__(256)
    column_partials(const float* a, const float* b, float* partials, i64 rows, int columns) {
  __shared__ float tile[8][33];
  int column = blockIdx.x * 32 + threadIdx.x;
  i64 chunks = gridDim.y, each = (rows + chunks - 1) / chunks;
  i64 low = blockIdx.y * each, high = smaller(low + each, rows);
  float sum = 0.0f;
  if (column < columns)
    for (i64 row = low + threadIdx.y; row < high; row += 8) {
      i64 i = row * columns + column;
      sum += b ? a[i] * b[i] : a[i];
    }
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns) return;
  for (int k = 1; k < 8; ++k) sum += tile[k][threadIdx.x];
  partials[(i64)blockIdx.y * columns + column] = sum;
}

// sums[column] = factor * the sum over the chunks, added to what is there if `add` is not 0.
extern "C" __global__ void __launch_bounds__(256)
    column_totals(const float* partials, float* sums, float factor, int add, int chunks,
                  int columns) {
  for (GRID_STRIDE(c, (i64)columns)) {
    float sum = 0.0f;
    for (int k = 0; k < chunks; ++k) sum += partials[(i64)k * columns + c];
    sums[c] = add ? sums[c] + factor * sum : factor * sum;
  }
}
