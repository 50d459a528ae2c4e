// Mean-variance normalisation of the rows of a matrix, between the sums that reduction.cu computes.
//
// Layout: float32 matrices (rows, width), row-major; `mean`, `variance` and `inner` have a number for
// each row. y may be x, dx may be dy.
//   y = (x - mean) / (deviation + epsilon), with deviation = sqrt(variance)
//   dx = (dy - mean(dy)) / (deviation + epsilon) - y * mean(dy * y) / deviation
// Launch: one-dimensional, a grid-stride loop, one element a thread and turn.
// Rounding: each operation once.
#include "device.cuh"

// Without `mean`, nothing is subtracted; without `variance`, nothing divides.
extern "C" __global__ void mvn_forward(const float* x, const float* mean, const float* variance,
                                       float* y, float epsilon, i64 rows, i64 width) {
  for (GRID_STRIDE(i, rows * width)) {
    float v = mean ? x[i] - mean[i / width] : x[i];
    y[i] = variance ? v / (sqrtf(variance[i / width]) + epsilon) : v;
  }
}

// `mean` is that of dy, `inner` that of dy * y. A row without variance has y = 0.
extern "C" __global__ void mvn_backward(const float* dy, const float* y, const float* mean,
                                        const float* inner, const float* variance, float* dx,
                                        float epsilon, i64 rows, i64 width) {
  for (GRID_STRIDE(i, rows * width)) {
    i64 row = i / width;
    float deviation = sqrtf(variance[row]);
    float along = deviation > 0.0f ? y[i] * inner[row] / deviation : 0.0f;
    dx[i] = (dy[i] - mean[row]) / (deviation + epsilon) - along;
  }
}
