// Functions of one element: activations and their gradients, sums and products of blobs.
//
// Layout: flat float32 arrays of n elements, whatever their shape; y may be x, dx may be dy.
// Launch: one-dimensional, a grid-stride loop, one element a thread and turn; 8 bytes an element
// forward. No access is wider than a float, so an array may start at any element of an arena.
// Rounding: each operation once; transcendental functions as CUDA's (at most 2 ulp).
#include "device.cuh"

// y = x above 0, slope * x elsewhere (at NaN too).
extern "C" __global__ void relu(const float* x, float* y, float slope, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = x[i] > 0.0f ? x[i] : slope * x[i];
}

// dx = dy where x > 0, slope * dy elsewhere. x may be the output instead while slope >= 0.
extern "C" __global__ void relu_backward(const float* dy, const float* x, float* dx, float slope,
                                         i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = x[i] > 0.0f ? dy[i] : slope * dy[i];
}
