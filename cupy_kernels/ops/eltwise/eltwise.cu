// Sums, products, quotients and maxima of blobs, element by element.
//
// Layout: flat float32 arrays of n elements, whatever their shape; an output may be an input where
// the row says so. No access is wider than a float, so an array may start anywhere.
// Launch: one-dimensional, a grid-stride loop, one element a thread and turn.
// Rounding: each operation once.
#include "device.cuh"

// y = a * x + b * y, and just a * x where b is 0, whatever y holds: sums of blobs, one by one.
extern "C" __global__ void add_scaled(const float* x, float* y, float a, float b, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = b == 0.0f ? a * x[i] : a * x[i] + b * y[i];
}

// y = a * b: products of blobs, and their gradients.
extern "C" __global__ void multiply(const float* a, const float* b, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = a[i] * b[i];
}

// y = a / b, and 0 where b is 0.
extern "C" __global__ void quotient(const float* a, const float* b, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = b[i] == 0.0f ? 0.0f : a[i] / b[i];
}

// y = max(y, x); `from` becomes `number` where x is strictly greater: of equal blobs the first wins.
// NaN is greater than all numbers, or a maximum would hide it.
extern "C" __global__ void keep_larger(const float* x, float* y, u8* from, int number, i64 n) {
  for (GRID_STRIDE(i, n))
    if (x[i] > y[i] || (x[i] != x[i] && y[i] == y[i])) {
      y[i] = x[i];
      from[i] = (u8)number;
    }
}

// dx = dy where the maximum came from blob `number`, 0 elsewhere.
extern "C" __global__ void keep_larger_backward(const float* dy, const u8* from, float* dx,
                                                int number, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = from[i] == number ? dy[i] : 0.0f;
}
