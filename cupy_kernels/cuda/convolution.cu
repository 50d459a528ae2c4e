// Convolution and inner product as one matrix product whose operands are gathered on the way.
//
// Layout: activations NHWC (n, h, w, c), outputs (n, oh, ow, o), all float32; weights in Caffe's
// order (o, c / groups, kh, kw). An inner product over an image is the convolution whose kernel is
// that image; over plain rows, h = w = kh = kw = 1. Sizes are ints; all address arithmetic is 64 bit.
//
//                rows of the product      columns           summed over
//   forward      n*oh*ow pixels           o / groups        (i, j, c)
//   data         n*h*w pixels             c / groups        (i, j, o)
//   weight       o / groups               (i, j, c)         n*oh*ow pixels, in `splits` parts
//
// Launch: blocks of 128 threads, a tile of 64 x 64 each: grid (rows / 64, columns / 64, groups),
// for `weight` (.., .., groups * splits). The summed dimension passes through two tiles of shared
// memory, 16 at a time: while one is multiplied, the next is on its way to registers.
// Rounding: _fp32 rounds each product and each sum, in order. _tf32 and _bf16 round both operands
// (ties away from zero; to even) and accumulate in float32. Partial weight gradients are added by
// `sum_splits` in order, so every result is the same on every run.
#include "tensor_core.cuh"

enum { FP32, TF32, BF16 };

#define TILE 64
#define DEPTH 16
#define PITCH (TILE + 8)  // a fragment's reads hit 32 different banks
#define STAGE (DEPTH * PITCH)
#define TILES __shared__ __align__(16) u32 tiles[4 * STAGE]
#define NOWHERE (-(1 << 29))  // outside any image, also when two of them are added

struct Shape {
  int n, h, w, c, o, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow, groups;
  __device__ __forceinline__ int inputs() const { return c / groups; }
  __device__ __forceinline__ int outputs() const { return o / groups; }
  __device__ __forceinline__ int window() const { return kh * kw; }
};

#define SHAPE                                                                                  \
  int n, int h, int w, int c, int o, int kh, int kw, int sh, int sw, int ph, int pw, int dh, \
      int dw, int oh, int ow, int groups
#define SHAPE_VALUES {n, h, w, c, o, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow, groups}

// Where a pixel's window starts: an offset to its image and group, and a row and column.
struct Window {
  i64 base;
  int top, left;
};
// A place within a window.
struct Tap {
  int down, right, channel;
};

// k = (i, j, channel): channels run fastest, as in memory.
__device__ __forceinline__ Tap tap_of(const Shape& s, i64 k, int channels, int sign, bool inside) {
  int cell = (int)(k / channels), i = cell / s.kw, j = cell % s.kw;
  if (!inside) return {NOWHERE, 0, 0};
  return {sign * i * s.dh, sign * j * s.dw, (int)(k % channels)};
}
__device__ __forceinline__ Window window_of(const Shape& s, i64 pixel, int group, bool inside) {
  int q = (int)(pixel % s.ow), p = (int)(pixel / s.ow % s.oh);
  i64 image = pixel / s.ow / s.oh;
  if (!inside) return {0, NOWHERE, 0};
  return {image * s.h * s.w * s.c + group * s.inputs(), p * s.sh - s.ph, q * s.sw - s.pw};
}
__device__ __forceinline__ float input(const Shape& s, const float* x, Window at, Tap tap) {
  int row = at.top + tap.down, column = at.left + tap.right;
  if (row < 0 || row >= s.h || column < 0 || column >= s.w) return 0.0f;
  return x[at.base + ((i64)row * s.w + column) * s.c + tap.channel];
}

// An operand gives `load(row(r), tap(k))`, zero beyond its `rows` and beyond `end`. BY_ROW says
// that neighbouring rows are neighbours in memory, rather than neighbouring k.

// x by output pixel: forward's left side.
struct Inputs {
  static const bool BY_ROW = false;
  typedef Window Row;
  typedef Tap Place;
  Shape s;
  const float* x;
  int group;
  i64 rows, end;
  __device__ __forceinline__ Row row(i64 r) const { return window_of(s, r, group, r < rows); }
  __device__ __forceinline__ Place tap(i64 k) const { return tap_of(s, k, s.inputs(), 1, k < end); }
  __device__ __forceinline__ float load(Row r, Place p) const { return input(s, x, r, p); }
};

// x by place in the window: the right side of the weight's gradient.
struct InputsByTap {
  static const bool BY_ROW = true;
  typedef Tap Row;
  typedef Window Place;
  Shape s;
  const float* x;
  int group;
  i64 rows, end;
  __device__ __forceinline__ Row row(i64 r) const { return tap_of(s, r, s.inputs(), 1, r < rows); }
  __device__ __forceinline__ Place tap(i64 k) const { return window_of(s, k, group, k < end); }
  __device__ __forceinline__ float load(Row r, Place p) const { return input(s, x, p, r); }
};

// dy by input pixel: the left side of the data's gradient. A pixel belongs to an output where its
// distance from the tap is a multiple of the stride.
struct Gradients {
  static const bool BY_ROW = false;
  typedef Window Row;
  typedef Tap Place;
  Shape s;
  const float* dy;
  int group;
  i64 rows, end;
  __device__ __forceinline__ Row row(i64 r) const {
    if (r >= rows) return {0, NOWHERE, 0};
    int column = (int)(r % s.w), line = (int)(r / s.w % s.h);
    i64 image = r / s.w / s.h;
    return {image * s.oh * s.ow * s.o + group * s.outputs(), line + s.ph, column + s.pw};
  }
  __device__ __forceinline__ Place tap(i64 k) const {
    return tap_of(s, k, s.outputs(), -1, k < end);
  }
  __device__ __forceinline__ float load(Row r, Place at) const {
    int down = r.top + at.down, right = r.left + at.right;
    if (down < 0 || right < 0) return 0.0f;
    int p = down / s.sh, q = right / s.sw;
    if (p >= s.oh || q >= s.ow || p * s.sh != down || q * s.sw != right) return 0.0f;
    return dy[r.base + ((i64)p * s.ow + q) * s.o + at.channel];
  }
};

// The weights, k = (i, j, channel), by output channel (forward) or by input channel (data).
template <bool BY_OUTPUT>
struct Weights {
  static const bool BY_ROW = !BY_OUTPUT;
  typedef i64 Row;
  typedef i64 Place;
  Shape s;
  const float* weight;
  int group;
  i64 rows, end;
  __device__ __forceinline__ i64 filter() const { return (i64)s.inputs() * s.window(); }
  __device__ __forceinline__ Row row(i64 r) const {
    if (r >= rows) return -1;
    i64 first = (i64)group * s.outputs();
    return BY_OUTPUT ? (first + r) * filter() : first * filter() + r * s.window();
  }
  __device__ __forceinline__ Place tap(i64 k) const {
    int channels = BY_OUTPUT ? s.inputs() : s.outputs();
    return k < end ? k % channels * (BY_OUTPUT ? s.window() : filter()) + k / channels : -1;
  }
  __device__ __forceinline__ float load(Row r, Place p) const {
    return r < 0 || p < 0 ? 0.0f : weight[r + p];
  }
};

// dy by output channel, k a pixel: the left side of the weight's gradient.
struct GradientsByOutput {
  static const bool BY_ROW = true;
  typedef i64 Row;
  typedef i64 Place;
  Shape s;
  const float* dy;
  int group;
  i64 rows, end;
  __device__ __forceinline__ Row row(i64 r) const {
    return r < rows ? (i64)group * s.outputs() + r : -1;
  }
  __device__ __forceinline__ Place tap(i64 k) const { return k < end ? k * s.o : -1; }
  __device__ __forceinline__ float load(Row r, Place p) const {
    return r < 0 || p < 0 ? 0.0f : dy[r + p];
  }
};

// A thread's share of one operand's tile: four pairs of neighbouring k.
template <int MODE, class Operand>
struct Stage {
  static const int ROWS = Operand::BY_ROW ? 1 : 4;
  int first_row, first_pair;
  typename Operand::Row rows[ROWS];
  float values[8];

  __device__ __forceinline__ void start(const Operand& operand, i64 origin) {
    int t = threadIdx.x;
    first_row = Operand::BY_ROW ? t % TILE : t / 8;
    first_pair = Operand::BY_ROW ? t / TILE : t % 8;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) rows[i] = operand.row(origin + first_row + 16 * i);
  }
  __device__ __forceinline__ void fetch(const Operand& operand, i64 k) {
    if (Operand::BY_ROW) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        values[i] = operand.load(rows[0], operand.tap(k + 2 * (first_pair + i / 2 * 2) + i % 2));
      return;
    }
    typename Operand::Place even = operand.tap(k + 2 * first_pair);
    typename Operand::Place odd = operand.tap(k + 2 * first_pair + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = operand.load(rows[i % ROWS], even);
      values[2 * i + 1] = operand.load(rows[i % ROWS], odd);
    }
  }
  // To a tile of [k][row], or [pair of k][row] in bf16.
  __device__ __forceinline__ void store(u32* tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = first_row + (Operand::BY_ROW ? 0 : 16 * i);
      int pair = first_pair + (Operand::BY_ROW ? 2 * i : 0);
      float even = values[2 * i], odd = values[2 * i + 1];
      if (MODE == BF16) {
        tile[pair * PITCH + row] = to_bf16_pair(even, odd);
      } else {
        tile[2 * pair * PITCH + row] = MODE == TF32 ? to_tf32(even) : __float_as_uint(even);
        tile[(2 * pair + 1) * PITCH + row] = MODE == TF32 ? to_tf32(odd) : __float_as_uint(odd);
      }
    }
  }
};

// The 32 sums of one thread: 8 x 4 in fp32; else its lane's part of 2 x 4 fragments of 16 x 8, of
// the quarter that belongs to its warp.
template <int MODE>
struct Sums {
  float at[32];

  __device__ __forceinline__ int row(int i) const {
    int t = threadIdx.x, warp = t / WARP, lane = t % WARP;
    if (MODE == FP32) return t / 16 * 8 + i / 4;
    return warp / 2 * 32 + i / 16 * 16 + lane / 4 + i % 4 / 2 * 8;
  }
  __device__ __forceinline__ int column(int i) const {
    int t = threadIdx.x, warp = t / WARP, lane = t % WARP;
    if (MODE == FP32) return t % 16 * 4 + i % 4;
    return warp % 2 * 32 + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
  }
  __device__ __forceinline__ void add(const u32* left, const u32* right) {
    if (MODE == FP32) add_plain((const float*)left, (const float*)right);
    else add_fragments(left, right);
  }
  __device__ __forceinline__ void add_plain(const float* left, const float* right) {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      const float4* a = (const float4*)(left + k * PITCH + row(0));
      float4 low = a[0], high = a[1], b = *(const float4*)(right + k * PITCH + column(0));
      float rows[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float columns[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 32; ++i) at[i] = fmaf(rows[i / 4], columns[i % 4], at[i]);
    }
  }
  __device__ __forceinline__ void add_fragments(const u32* left, const u32* right) {
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    left += warp / 2 * 32 + g;
    right += warp % 2 * 32 + g;
#pragma unroll
    for (int k = t; k < (MODE == BF16 ? 8 : 16) + t; k += 8) {
      u32 a[2][4], b[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          a[i][j] = left[(k + j / 2 * 4) * PITCH + 16 * i + j % 2 * 8];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) b[i][j] = right[(k + 4 * j) * PITCH + 8 * i];
#pragma unroll
      for (int i = 0; i < 8; ++i) mma(*(float(*)[4])(at + 4 * i), a[i / 4], b[i % 4]);
    }
  }
  __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if (MODE == BF16) mma_bf16(d, a, b);
    else mma_tf32(d, a, b);
  }
};

// The tile of the product of `left` and `right` at (row, column), over k in [first, left.end).
template <int MODE, class Left, class Right>
__device__ __forceinline__ Sums<MODE> product(const Left& left, const Right& right, i64 row,
                                              i64 column, i64 first, u32* tiles) {
  Stage<MODE, Left> a;
  Stage<MODE, Right> b;
  Sums<MODE> sums = {};
  a.start(left, row);
  b.start(right, column);
  a.fetch(left, first);
  b.fetch(right, first);
  a.store(tiles);
  b.store(tiles + 2 * STAGE);
  __syncthreads();
  int turn = 0;
  for (i64 k = first; k < left.end; k += DEPTH) {
    bool more = k + DEPTH < left.end;
    if (more) {
      a.fetch(left, k + DEPTH);
      b.fetch(right, k + DEPTH);
    }
    sums.add(tiles + turn * STAGE, tiles + (2 + turn) * STAGE);
    turn ^= 1;
    if (more) {
      a.store(tiles + turn * STAGE);
      b.store(tiles + (2 + turn) * STAGE);
    }
    __syncthreads();
  }
  return sums;
}

template <int MODE>
__device__ __forceinline__ void forward(const float* x, const float* weight, const float* bias,
                                        float* y, const Shape& s, int relu, u32* tiles) {
  int group = blockIdx.z;
  i64 rows = (i64)s.n * s.oh * s.ow, depth = (i64)s.inputs() * s.window();
  i64 row = (i64)blockIdx.x * TILE, column = (i64)blockIdx.y * TILE;
  Inputs left = {s, x, group, rows, depth};
  Weights<true> right = {s, weight, group, s.outputs(), depth};
  Sums<MODE> sums = product<MODE>(left, right, row, column, 0, tiles);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    i64 m = row + sums.row(i), k = column + sums.column(i);
    if (m >= rows || k >= s.outputs()) continue;
    i64 channel = (i64)group * s.outputs() + k;
    float value = sums.at[i] + (bias ? bias[channel] : 0.0f);
    y[m * s.o + channel] = relu && value <= 0.0f ? 0.0f : value;
  }
}

template <int MODE>
__device__ __forceinline__ void data(const float* dy, const float* weight, const float* mask,
                                     float* dx, const Shape& s, u32* tiles) {
  int group = blockIdx.z;
  i64 rows = (i64)s.n * s.h * s.w, depth = (i64)s.outputs() * s.window();
  i64 row = (i64)blockIdx.x * TILE, column = (i64)blockIdx.y * TILE;
  Gradients left = {s, dy, group, rows, depth};
  Weights<false> right = {s, weight, group, s.inputs(), depth};
  Sums<MODE> sums = product<MODE>(left, right, row, column, 0, tiles);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    i64 m = row + sums.row(i), k = column + sums.column(i);
    if (m >= rows || k >= s.inputs()) continue;
    i64 place = m * s.c + (i64)group * s.inputs() + k;
    dx[place] = mask && !(mask[place] > 0.0f) ? 0.0f : sums.at[i];
  }
}

template <int MODE>
__device__ __forceinline__ void weights(const float* x, const float* dy, float* parts,
                                        const Shape& s, int splits, u32* tiles) {
  int group = blockIdx.z / splits, split = blockIdx.z % splits;
  i64 pixels = (i64)s.n * s.oh * s.ow, columns = (i64)s.inputs() * s.window();
  i64 each = (pixels + (i64)DEPTH * splits - 1) / ((i64)DEPTH * splits) * DEPTH;
  i64 first = split * each, end = smaller(pixels, first + each);
  i64 row = (i64)blockIdx.x * TILE, column = (i64)blockIdx.y * TILE;
  GradientsByOutput left = {s, dy, group, s.outputs(), end};
  InputsByTap right = {s, x, group, columns, end};
  Sums<MODE> sums = product<MODE>(left, right, row, column, first, tiles);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    i64 m = row + sums.row(i), k = column + sums.column(i);
    if (m >= s.outputs() || k >= columns) continue;
    i64 filter = (i64)split * s.o + group * s.outputs() + m;
    parts[filter * columns + k % s.inputs() * s.window() + k / s.inputs()] = sums.at[i];
  }
}

// y = x * W + bias (may be null), zero where that is negative if `relu`; NaN stays NaN.
extern "C" __global__ void __launch_bounds__(128)
    conv_forward_fp32(const float* x, const float* weight, const float* bias, float* y, SHAPE,
                      int relu) {
  TILES;
  forward<FP32>(x, weight, bias, y, SHAPE_VALUES, relu, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    conv_forward_tf32(const float* x, const float* weight, const float* bias, float* y, SHAPE,
                      int relu) {
  TILES;
  forward<TF32>(x, weight, bias, y, SHAPE_VALUES, relu, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    conv_forward_bf16(const float* x, const float* weight, const float* bias, float* y, SHAPE,
                      int relu) {
  TILES;
  forward<BF16>(x, weight, bias, y, SHAPE_VALUES, relu, tiles);
}

// dx, zero where `mask` (what the layer below gave out of its ReLU; may be null) is not positive.
extern "C" __global__ void __launch_bounds__(128)
    conv_data_fp32(const float* dy, const float* weight, const float* mask, float* dx, SHAPE) {
  TILES;
  data<FP32>(dy, weight, mask, dx, SHAPE_VALUES, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    conv_data_tf32(const float* dy, const float* weight, const float* mask, float* dx, SHAPE) {
  TILES;
  data<TF32>(dy, weight, mask, dx, SHAPE_VALUES, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    conv_data_bf16(const float* dy, const float* weight, const float* mask, float* dx, SHAPE) {
  TILES;
  data<BF16>(dy, weight, mask, dx, SHAPE_VALUES, tiles);
}

// parts[split] = that split's share of dW; with one split, `parts` may be dW itself.
extern "C" __global__ void __launch_bounds__(128)
    conv_weight_fp32(const float* x, const float* dy, float* parts, SHAPE, int splits) {
  TILES;
  weights<FP32>(x, dy, parts, SHAPE_VALUES, splits, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    conv_weight_tf32(const float* x, const float* dy, float* parts, SHAPE, int splits) {
  TILES;
  weights<TF32>(x, dy, parts, SHAPE_VALUES, splits, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    conv_weight_bf16(const float* x, const float* dy, float* parts, SHAPE, int splits) {
  TILES;
  weights<BF16>(x, dy, parts, SHAPE_VALUES, splits, tiles);
}

// y = the sum of `splits` arrays of n floats that lie one behind the other, in order.
extern "C" __global__ void __launch_bounds__(256)
    sum_splits(const float* parts, float* y, i64 n, i64 splits) {
  for (GRID_STRIDE(i, n)) {
    float sum = 0.0f;
    for (i64 k = 0; k < splits; ++k) sum += parts[k * n + i];
    y[i] = sum;
  }
}

// parts[split, column] = the sum of that split's rows of x (rows, columns): the bias's gradient,
// once `sum_splits` has been over it. Grid (columns / 256, splits).
extern "C" __global__ void __launch_bounds__(256)
    column_sums(const float* x, float* parts, i64 rows, i64 columns, i64 splits) {
  i64 column = first_index(), split = blockIdx.y, each = (rows + splits - 1) / splits;
  if (column >= columns || split >= splits) return;
  float sum = 0.0f;
  for (i64 row = split * each; row < smaller(rows, (split + 1) * each); ++row)
    sum += x[row * columns + column];
  parts[split * columns + column] = sum;
}
