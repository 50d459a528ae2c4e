// Max, average and stochastic pooling with Caffe's rules for the border (see __init__.py).
//
// Layout: float32 blobs, channels last: x (n, h, w, c), y (n, oh, ow, c). Where c is a multiple of
// 4, four channels are moved at once: blobs are 16-byte aligned. `where` holds a maximum's place in
// its window, in reading order; of equal values the first wins, and NaN beats all. A window past the
// image, which Caffe's sizes allow where there is no padding, holds nothing: -infinity.
// A window's place fits a byte up to 256 cells; `wide` kernels use 16 bits.
// Launch: one-dimensional in rows of the output (backward: of the input), a block a row and turn;
// a row's ow * c values are below 2^31.
// Rounding: a maximum is exact; an average sums in reading order and multiplies by 1 / cells once.
// Backward gathers: each input sums over the windows that hold it, in order, without atomics.
#include "philox.cuh"

struct Pooling {
  int h, w, c, oh, ow, kh, kw, sh, sw, ph, pw;
};

// V channels of one place.
template <int V>
struct Values {
  float v[V];
};
template <int V>
__device__ __forceinline__ Values<V> load(const float* from) {
  Values<V> out;
  if constexpr (V == 4) {
    float4 four = *(const float4*)from;
    out.v[0] = four.x, out.v[1] = four.y, out.v[2] = four.z, out.v[3] = four.w;
  } else {
    out.v[0] = *from;
  }
  return out;
}
template <int V>
__device__ __forceinline__ void store(float* to, const Values<V>& from) {
  if constexpr (V == 4) *(float4*)to = make_float4(from.v[0], from.v[1], from.v[2], from.v[3]);
  else *to = from.v[0];
}

// The part of window `p` within the image, along one axis.
__device__ __forceinline__ int window_start(int p, int stride, int pad) {
  int start = p * stride - pad;
  return start > 0 ? start : 0;
}
__device__ __forceinline__ int window_stop(int p, int stride, int pad, int kernel, int size) {
  int stop = p * stride - pad + kernel;
  return stop < size ? stop : size;
}

// 1 / cells of a window: cells in the padding count, those past it do not.
__device__ __forceinline__ float share(const Pooling& s, int p, int q) {
  int top = p * s.sh - s.ph, left = q * s.sw - s.pw;
  int bottom = top + s.kh < s.h + s.ph ? top + s.kh : s.h + s.ph;
  int right = left + s.kw < s.w + s.pw ? left + s.kw : s.w + s.pw;
  return 1.0f / (float)((bottom - top) * (right - left));
}

// The first and one past the last window that holds position `a` of the image, along one axis.
__device__ __forceinline__ int first_window(int a, int stride, int pad, int kernel) {
  int from = a + pad - kernel + 1;
  return from > 0 ? (from + stride - 1) / stride : 0;
}
__device__ __forceinline__ int last_window(int a, int stride, int pad, int count) {
  int stop = (a + pad) / stride + 1;
  return stop < count ? stop : count;
}

// The offsets of V neighbouring channels, four bytes at once where V is 4.
template <class Offset, int V>
__device__ __forceinline__ void store_places(Offset* to, const int (&place)[V]) {
  if constexpr (V == 4)
    *(uchar4*)to = {(u8)place[0], (u8)place[1], (u8)place[2], (u8)place[3]};
  else *to = (Offset)place[0];
}
template <class Offset, int V>
__device__ __forceinline__ void load_places(const Offset* from, int (&place)[V]) {
  if constexpr (V == 4) {
    uchar4 four = *(const uchar4*)from;
    place[0] = four.x, place[1] = four.y, place[2] = four.z, place[3] = four.w;
  } else {
    place[0] = *from;
  }
}

template <class Offset, int V>
__device__ __forceinline__ void max_forward(const float* x, float* y, Offset* where,
                                            const Pooling& s, i64 rows) {
  int groups = s.c / V;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    int p = (int)(row % s.oh);
    const float* image = x + row / s.oh * s.h * s.w * s.c;
    int top = window_start(p, s.sh, s.ph), bottom = window_stop(p, s.sh, s.ph, s.kh, s.h);
    for (int t = threadIdx.x; t < s.ow * groups; t += blockDim.x) {
      int q = t / groups, channel = t % groups * V;
      int left = window_start(q, s.sw, s.pw), right = window_stop(q, s.sw, s.pw, s.kw, s.w);
      Values<V> best;
      int place[V];
      for (int k = 0; k < V; ++k) {
        best.v[k] = -infinity();
        place[k] = (top - p * s.sh + s.ph) * s.kw + left - q * s.sw + s.pw;
      }
      for (int a = top; a < bottom; ++a)
        for (int b = left; b < right; ++b) {
          Values<V> here = load<V>(image + ((i64)a * s.w + b) * s.c + channel);
          int cell = (a - p * s.sh + s.ph) * s.kw + b - q * s.sw + s.pw;
          for (int k = 0; k < V; ++k)
            if (here.v[k] > best.v[k] || here.v[k] != here.v[k]) best.v[k] = here.v[k], place[k] = cell;
        }
      i64 at = (row * s.ow + q) * s.c + channel;
      store<V>(y + at, best);
      store_places<Offset, V>(where + at, place);
    }
  }
}

template <class Offset, int V>
__device__ __forceinline__ void max_backward(const float* dy, const Offset* where, float* dx,
                                             const Pooling& s, i64 rows) {
  int groups = s.c / V;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    int a = (int)(row % s.h);
    i64 image = row / s.h * s.oh * s.ow * s.c;
    int top = first_window(a, s.sh, s.ph, s.kh), bottom = last_window(a, s.sh, s.ph, s.oh);
    for (int t = threadIdx.x; t < s.w * groups; t += blockDim.x) {
      int b = t / groups, channel = t % groups * V;
      int left = first_window(b, s.sw, s.pw, s.kw), right = last_window(b, s.sw, s.pw, s.ow);
      Values<V> sum = {};
      for (int p = top; p < bottom; ++p)
        for (int q = left; q < right; ++q) {
          i64 at = image + ((i64)p * s.ow + q) * s.c + channel;
          int cell = (a - p * s.sh + s.ph) * s.kw + b - q * s.sw + s.pw;
          Values<V> given = load<V>(dy + at);
          int place[V];
          load_places<Offset, V>(where + at, place);
          for (int k = 0; k < V; ++k)
            if (place[k] == cell) sum.v[k] += given.v[k];
        }
      store<V>(dx + (row * s.w + b) * s.c + channel, sum);
    }
  }
}

template <int V>
__device__ __forceinline__ void average_forward(const float* x, float* y, const Pooling& s,
                                                i64 rows) {
  int groups = s.c / V;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    int p = (int)(row % s.oh);
    const float* image = x + row / s.oh * s.h * s.w * s.c;
    int top = window_start(p, s.sh, s.ph), bottom = window_stop(p, s.sh, s.ph, s.kh, s.h);
    for (int t = threadIdx.x; t < s.ow * groups; t += blockDim.x) {
      int q = t / groups, channel = t % groups * V;
      int left = window_start(q, s.sw, s.pw), right = window_stop(q, s.sw, s.pw, s.kw, s.w);
      Values<V> sum = {};
      for (int a = top; a < bottom; ++a)
        for (int b = left; b < right; ++b) {
          Values<V> here = load<V>(image + ((i64)a * s.w + b) * s.c + channel);
          for (int k = 0; k < V; ++k) sum.v[k] += here.v[k];
        }
      float part = share(s, p, q);
      for (int k = 0; k < V; ++k) sum.v[k] *= part;
      store<V>(y + (row * s.ow + q) * s.c + channel, sum);
    }
  }
}

template <int V>
__device__ __forceinline__ void average_backward(const float* dy, float* dx, const Pooling& s,
                                                 i64 rows) {
  int groups = s.c / V;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    int a = (int)(row % s.h);
    i64 image = row / s.h * s.oh * s.ow * s.c;
    int top = first_window(a, s.sh, s.ph, s.kh), bottom = last_window(a, s.sh, s.ph, s.oh);
    for (int t = threadIdx.x; t < s.w * groups; t += blockDim.x) {
      int b = t / groups, channel = t % groups * V;
      int left = first_window(b, s.sw, s.pw, s.kw), right = last_window(b, s.sw, s.pw, s.ow);
      Values<V> sum = {};
      for (int p = top; p < bottom; ++p)
        for (int q = left; q < right; ++q) {
          Values<V> given = load<V>(dy + image + ((i64)p * s.ow + q) * s.c + channel);
          float part = share(s, p, q);
          for (int k = 0; k < V; ++k) sum.v[k] += given.v[k] * part;
        }
      store<V>(dx + (row * s.w + b) * s.c + channel, sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
    max_pool_forward(const float* x, float* y, u8* where, i64 n, int h, int w, int c, int oh,
                     int ow, int kh, int kw, int sh, int sw, int ph, int pw) {
  Pooling s = {h, w, c, oh, ow, kh, kw, sh, sw, ph, pw};
  if (c % 4 == 0) max_forward<u8, 4>(x, y, where, s, n * oh);
  else max_forward<u8, 1>(x, y, where, s, n * oh);
}

extern "C" __global__ void __launch_bounds__(128)
    max_pool_forward_wide(const float* x, float* y, u16* where, i64 n, int h, int w, int c, int oh,
                          int ow, int kh, int kw, int sh, int sw, int ph, int pw) {
  Pooling s = {h, w, c, oh, ow, kh, kw, sh, sw, ph, pw};
  max_forward<u16, 1>(x, y, where, s, n * oh);
}

extern "C" __global__ void __launch_bounds__(128, 8)
    max_pool_backward(const float* dy, const u8* where, float* dx, i64 n, int h, int w, int c,
                      int oh, int ow, int kh, int kw, int sh, int sw, int ph, int pw) {
  Pooling s = {h, w, c, oh, ow, kh, kw, sh, sw, ph, pw};
  if (c % 4 == 0) max_backward<u8, 4>(dy, where, dx, s, n * h);
  else max_backward<u8, 1>(dy, where, dx, s, n * h);
}

extern "C" __global__ void __launch_bounds__(128)
    max_pool_backward_wide(const float* dy, const u16* where, float* dx, i64 n, int h, int w, int c,
                           int oh, int ow, int kh, int kw, int sh, int sw, int ph, int pw) {
  Pooling s = {h, w, c, oh, ow, kh, kw, sh, sw, ph, pw};
  max_backward<u16, 1>(dy, where, dx, s, n * h);
}

extern "C" __global__ void __launch_bounds__(128)
    average_pool_forward(const float* x, float* y, i64 n, int h, int w, int c, int oh, int ow,
                         int kh, int kw, int sh, int sw, int ph, int pw) {
  Pooling s = {h, w, c, oh, ow, kh, kw, sh, sw, ph, pw};
  if (c % 4 == 0) average_forward<4>(x, y, s, n * oh);
  else average_forward<1>(x, y, s, n * oh);
}

extern "C" __global__ void __launch_bounds__(128)
    average_pool_backward(const float* dy, float* dx, i64 n, int h, int w, int c, int oh, int ow,
                          int kh, int kw, int sh, int sw, int ph, int pw) {
  Pooling s = {h, w, c, oh, ow, kh, kw, sh, sw, ph, pw};
  if (c % 4 == 0) average_backward<4>(dy, dx, s, n * h);
  else average_backward<1>(dy, dx, s, n * h);
}

// One element of each window (Zeiler and Fergus 2013), drawn with a probability proportional to its
// value, and its place in `where`, for max_pool_backward_wide. There is no padding, and no value is
// negative. The host draws the same element: sums run in reading order, in float32, and the product
// of the window's word and sum is in double.
extern "C" __global__ void __launch_bounds__(128)
    stochastic_pool_forward(const float* x, float* y, u16* where, const u64* step, u64 seed,
                            u32 layer, i64 n, int h, int w, int c, int oh, int ow, int kh, int kw,
                            int sh, int sw, int ph, int pw) {
  u64 now = *step;
  for (i64 row = blockIdx.x; row < n * oh; row += gridDim.x) {
    int top = (int)(row % oh) * sh, bottom = window_stop((int)(row % oh), sh, ph, kh, h);
    const float* image = x + row / oh * h * w * c;
    for (int t = threadIdx.x; t < ow * c; t += blockDim.x) {
      int q = t / c, left = q * sw, right = window_stop(q, sw, pw, kw, w);
      const float* channel = image + t % c;
      float total = 0.0f, reached = 0.0f, value = 0.0f;
      for (int a = top; a < bottom; ++a)
        for (int b = left; b < right; ++b) total += channel[((i64)a * w + b) * c];
      i64 at = row * ow * c + t;
      double limit = drawn(at, now, layer, seed) / 4294967296.0 * total;
      int place = 0;  // a window of zeros gives its first element
      bool found = false;
      for (int a = top; a < bottom && !found; ++a)
        for (int b = left; b < right && !found; ++b) {
          reached += channel[((i64)a * w + b) * c];
          found = reached > limit;
          if (found) value = channel[((i64)a * w + b) * c], place = (a - top) * kw + b - left;
        }
      y[at] = value;
      where[at] = (u16)place;
    }
  }
}
