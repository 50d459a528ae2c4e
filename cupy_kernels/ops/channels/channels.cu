// Scale and bias channel by channel, and copies of some columns of a matrix into another, which
// concatenate and slice channels.
//
// Layout: float32 matrices of `rows` x `columns`, row-major; for a blob (n, h, w, c) the columns are
// its channels. No access is wider than a float.
// Launch: one-dimensional.
// Rounding: each operation once.
#include "device.cuh"

// y = x * scale[column] + bias[column]; bias may be null, scale may be null.
extern "C" __global__ void scale_forward(const float* x, const float* scale, const float* bias,
                                         float* y, i64 rows, int columns) {
  for (GRID_STRIDE(i, rows * columns)) {
    int c = (int)(i % columns);
    float v = scale ? x[i] * scale[c] : x[i];
    y[i] = bias ? v + bias[c] : v;
  }
}

// dx = dy * scale[column].
extern "C" __global__ void scale_backward(const float* dy, const float* scale, float* dx, i64 rows,
                                          int columns) {
  for (GRID_STRIDE(i, rows * columns)) dx[i] = dy[i] * scale[i % columns];
}

// y[row][y_first + k] = x[row][x_first + k] for k < width.
extern "C" __global__ void copy_columns(const float* x, float* y, i64 rows, int width,
                                        int x_columns, int x_first, int y_columns, int y_first) {
  for (GRID_STRIDE(i, rows * width)) {
    i64 row = i / width, k = i % width;
    y[row * y_columns + y_first + k] = x[row * x_columns + x_first + k];
  }
}
