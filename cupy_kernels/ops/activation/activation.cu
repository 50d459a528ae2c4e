// Functions of one element: activations and their gradients.
//
// Layout: flat float32 arrays of n elements, whatever their shape; where a parameter belongs to a
// channel, the channels are the last axis: element i has channel i % channels. y may be x, dx may be dy.
// No access is wider than a float, so an array may start anywhere.
// Launch: one-dimensional, a grid-stride loop, one element a thread and turn.
// Rounding: each operation once; transcendental functions as CUDA's (at most 2 ulp).
// The gradients at a kink are Caffe's. A backward kernel takes the output where that is enough.
#include "activation.cuh"

// y = x above 0, slope * x elsewhere.
extern "C" __global__ void relu_forward(const float* x, float* y, float slope, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = x[i] > 0.0f ? x[i] : slope * x[i];
}

// x may be the output instead, while slope >= 0.
extern "C" __global__ void relu_backward(const float* dy, const float* x, float* dx, float slope,
                                         i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = x[i] > 0.0f ? dy[i] : slope * dy[i];
}

// y = x above 0, slope[channel] * x elsewhere; channels = 1 for one slope.
extern "C" __global__ void prelu_forward(const float* x, const float* slope, float* y, int channels,
                                         i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = x[i] > 0.0f ? x[i] : slope[i % channels] * x[i];
}

extern "C" __global__ void prelu_backward(const float* dy, const float* x, const float* slope,
                                          float* dx, int channels, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = x[i] > 0.0f ? dy[i] : slope[i % channels] * dy[i];
}

// Each element's share of the slope's gradient; column_partials and column_totals add them up.
extern "C" __global__ void prelu_slope_terms(const float* dy, const float* x, float* terms, i64 n) {
  for (GRID_STRIDE(i, n)) terms[i] = x[i] > 0.0f ? 0.0f : dy[i] * x[i];
}

extern "C" __global__ void sigmoid_forward(const float* x, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = logistic(x[i]);
}

extern "C" __global__ void sigmoid_backward(const float* dy, const float* y, float* dx, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = dy[i] * y[i] * (1.0f - y[i]);
}

extern "C" __global__ void tanh_forward(const float* x, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = tanhf(x[i]);
}

extern "C" __global__ void tanh_backward(const float* dy, const float* y, float* dx, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = dy[i] * (1.0f - y[i] * y[i]);
}

// y = x above 0, alpha * (e^x - 1) elsewhere.
extern "C" __global__ void elu_forward(const float* x, float* y, float alpha, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = x[i] > 0.0f ? x[i] : alpha * expm1f(x[i]);
}

// From the output: alpha * e^x = y + alpha. Wants alpha >= 0.
extern "C" __global__ void elu_backward(const float* dy, const float* y, float* dx, float alpha,
                                        i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = y[i] > 0.0f ? dy[i] : dy[i] * (y[i] + alpha);
}

// y = x * sigmoid(beta * x).
extern "C" __global__ void swish_forward(const float* x, float* y, float beta, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = x[i] * logistic(beta * x[i]);
}

extern "C" __global__ void swish_backward(const float* dy, const float* x, float* dx, float beta,
                                          i64 n) {
  for (GRID_STRIDE(i, n)) {
    float s = logistic(beta * x[i]), z = beta * x[i] * s;
    dx[i] = dy[i] * (z + s * (1.0f - z));
  }
}

// y = log(1 + e^x), the binomial normal log likelihood.
extern "C" __global__ void bnll_forward(const float* x, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = (x[i] > 0.0f ? x[i] : 0.0f) + log1pf(expf(-fabsf(x[i])));
}

extern "C" __global__ void bnll_backward(const float* dy, const float* x, float* dx, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = dy[i] * logistic(x[i]);
}

__device__ __forceinline__ float raised(float base, float power) {
  if (power == 1.0f) return base;
  if (power == 2.0f) return base * base;
  if (power == 0.0f) return 1.0f;
  return powf(base, power);
}

// y = (shift + scale * x)^power.
extern "C" __global__ void power_forward(const float* x, float* y, float power, float scale,
                                         float shift, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = raised(shift + scale * x[i], power);
}

extern "C" __global__ void power_backward(const float* dy, const float* x, float* dx, float power,
                                          float scale, float shift, i64 n) {
  float factor = power * scale;
  for (GRID_STRIDE(i, n))
    dx[i] = factor == 0.0f ? 0.0f : dy[i] * (factor * raised(shift + scale * x[i], power - 1.0f));
}

// y = e^(inner * x + outer): base^(shift + scale * x) with inner = scale ln base and so on.
extern "C" __global__ void exp_forward(const float* x, float* y, float inner, float outer, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = expf(inner * x[i] + outer);
}

extern "C" __global__ void exp_backward(const float* dy, const float* y, float* dx, float inner,
                                        i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = dy[i] * (inner * y[i]);
}

// y = factor * ln(shift + scale * x), factor = 1 / ln base.
extern "C" __global__ void log_forward(const float* x, float* y, float scale, float shift,
                                       float factor, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = factor * logf(shift + scale * x[i]);
}

extern "C" __global__ void log_backward(const float* dy, const float* x, float* dx, float scale,
                                        float shift, float factor, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = dy[i] * (factor * scale) / (shift + scale * x[i]);
}

extern "C" __global__ void abs_forward(const float* x, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = fabsf(x[i]);
}

extern "C" __global__ void abs_backward(const float* dy, const float* x, float* dx, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = x[i] > 0.0f ? dy[i] : x[i] < 0.0f ? -dy[i] : 0.0f;
}

// y = x held within [low, high]; NaN stays NaN.
extern "C" __global__ void clip_forward(const float* x, float* y, float low, float high, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = x[i] < low ? low : x[i] > high ? high : x[i];
}

extern "C" __global__ void clip_backward(const float* dy, const float* x, float* dx, float low,
                                         float high, i64 n) {
  for (GRID_STRIDE(i, n)) dx[i] = x[i] >= low && x[i] <= high ? dy[i] : 0.0f;
}

// y = 1 above the limit, 0 elsewhere; it has no gradient.
extern "C" __global__ void threshold_forward(const float* x, float* y, float limit, i64 n) {
  for (GRID_STRIDE(i, n)) y[i] = x[i] > limit ? 1.0f : 0.0f;
}
