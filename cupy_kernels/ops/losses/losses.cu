// Losses other than that of softmax, each with its gradient in the same launch.
//
// Layout: float32 matrices (rows, k), row-major; labels are 64-bit integers. A row whose label is
// outside [0, k) has NaN for its loss and its gradient. `losses` are sums without a divisor, one for
// each row (sigmoid_loss: for each element); gradients are multiplied by `factor`, or by `scale` in
// device memory, since the divisor may be the number of terms that count.
// Launch: sigmoid_loss one-dimensional, a grid-stride loop; the others blocks of (32, 8), one warp
// for each row.
// Rounding: a lane adds its own elements in turn, then a tree over the warp, in float32.
#include "device.cuh"

#define LEAST_PROBABILITY 1e-20f  // of the loss of logarithms, as in Caffe

enum { HINGE, SQUARED_HINGE, LOGARITHM };

// The loss of one score and its derivative.
struct Scored {
  float loss, slope;
};
__device__ __forceinline__ Scored scored(float x, bool own, int rule) {
  if (rule == LOGARITHM) {
    float p = x > LEAST_PROBABILITY || x != x ? x : LEAST_PROBABILITY;
    return own ? Scored{-logf(p), -1.0f / p} : Scored{0.0f, 0.0f};
  }
  float sign = own ? -1.0f : 1.0f, margin = 1.0f + sign * x;
  if (margin <= 0.0f) return {0.0f, 0.0f};
  return rule == HINGE ? Scored{margin, sign} : Scored{margin * margin, 2.0f * sign * margin};
}

// Hinge losses max(0, 1 + x) and their squares, the true class's x negated; or -log(x) of the true
// class's probability.
extern "C" __global__ void __launch_bounds__(256)
    class_loss(const float* x, const i64* labels, float* losses, float* dx, int rule, float factor,
               i64 rows, int k) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    i64 label = labels[row];
    bool known = label >= 0 && label < k;
    float sum = 0.0f;
    for (int j = threadIdx.x; j < k; j += WARP) {
      Scored here = scored(x[row * k + j], j == label, rule);
      sum += here.loss;
      dx[row * k + j] = known ? factor * here.slope : not_a_number();
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) losses[row] = known ? sum : not_a_number();
  }
}

// loss = -sum gain[j] log(max(p[j], smallest float)), with the label's row of `matrix` (k, k) as gain
// and p a softmax; dx by the softmax's input = p * sum(gain) - gain. Neither for the label `ignored`.
extern "C" __global__ void __launch_bounds__(256)
    infogain_loss(const float* p, const i64* labels, const float* matrix, const float* scale,
                  float* losses, float* dx, i64 ignored, i64 rows, int k) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    i64 label = labels[row];
    bool counts = label != ignored, known = label >= 0 && label < k;
    const float* gain = matrix + (known ? label : 0) * k;
    float whole = 0.0f, sum = 0.0f;
    for (int j = threadIdx.x; j < k; j += WARP) {
      float own = p[row * k + j];
      whole += gain[j];
      sum -= gain[j] * logf(own > SMALLEST_FLOAT || own != own ? own : SMALLEST_FLOAT);
    }
    whole = warp_sum(whole), sum = warp_sum(sum);
    for (int j = threadIdx.x; j < k; j += WARP) {
      float slope = *scale * (p[row * k + j] * whole - gain[j]);
      dx[row * k + j] = !counts ? 0.0f : known ? slope : not_a_number();
    }
    if (threadIdx.x == 0) losses[row] = !counts ? 0.0f : known ? sum : not_a_number();
  }
}

// The cross-entropy of sigmoid(x) and a target: log(1 + e^x) - x * target, and (sigmoid(x) - target)
// by x; 0 for a target equal to `ignored`. An `ignored` of NaN equals no target.
extern "C" __global__ void sigmoid_loss(const float* x, const float* targets, const float* scale,
                                        float* losses, float* dx, float ignored, i64 n) {
  for (GRID_STRIDE(i, n)) {
    float v = x[i], target = targets[i], e = expf(-fabsf(v)), s = 1.0f / (1.0f + e);
    bool counts = target != ignored;
    // The larger one of x and 0 is subtracted before the sum, so that nothing cancels.
    float loss = v * ((v > 0.0f ? 1.0f : 0.0f) - target) + log1pf(e);
    losses[i] = counts ? loss : 0.0f;
    dx[i] = counts ? *scale * ((v >= 0.0f ? s : e * s) - target) : 0.0f;
  }
}

// d is the distance of two rows. loss = d^2 for a similar pair (`similar` not 0). For others it is
// max(margin - d, 0)^2, or max(margin - d^2, 0) with `legacy`. da is half the derivative by a.
extern "C" __global__ void __launch_bounds__(256)
    contrastive_loss(const float* a, const float* b, const float* similar, float* losses, float* da,
                     float margin, int legacy, float factor, i64 rows, i64 width) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    float square = 0.0f;
    for (i64 j = threadIdx.x; j < width; j += WARP) {
      float apart = a[row * width + j] - b[row * width + j];
      square += apart * apart;
    }
    square = warp_sum(square);
    float distance = sqrtf(square), loss = square, slope = 1.0f;
    if (similar[row] == 0.0f) {
      float lack = margin - (legacy ? square : distance);
      lack = lack < 0.0f ? 0.0f : lack;
      loss = legacy ? lack : lack * lack;
      slope = !legacy ? -lack / (distance + 1e-4f) : lack > 0.0f ? -1.0f : 0.0f;
    }
    for (i64 j = threadIdx.x; j < width; j += WARP) {
      float apart = a[row * width + j] - b[row * width + j];
      da[row * width + j] = factor * slope * apart;
    }
    if (threadIdx.x == 0) losses[row] = loss;
  }
}
