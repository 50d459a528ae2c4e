// Activations that several sources use.
#pragma once
#include "device.cuh"

// 1 / (1 + e^-x), without the exponential of a large positive number.
__device__ __forceinline__ float logistic(float x) {
  float e = expf(-fabsf(x)), s = 1.0f / (1.0f + e);
  return x >= 0.0f ? s : e * s;
}
