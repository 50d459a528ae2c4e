// Convolution and inner product as one matrix product, with operands gathered during it.
//
// Layout: activations NHWC (n, h, w, c), outputs (n, oh, ow, o), all float32, 16-byte aligned. Weights
// in Caffe's order (o, c / groups, kh, kw), or `packed` by pack_weights as (o, kh, kw, c / groups):
// then, or where kh = kw = 1, they are read 16 bytes at a time, if the channels of a group are a
// multiple of 4, as activations are; else 4 bytes. An inner product over an image is the convolution
// whose kernel is that image; over plain rows, h = w = kh = kw = 1. Sizes are ints, an image and the
// number of pixels stay below 2^31; addresses have 64 bits.
//
//                rows of the product      columns           summed over
//   forward      n*oh*ow pixels           o / groups        (i, j, c)
//   data         n*h*w pixels             c / groups        (i, j, o)
//   weight       o / groups               (i, j, c)         n*oh*ow pixels, in `splits` parts
//
// Launch: matrix_product.cuh's tiles: 256 threads, grid (row tiles * column tiles, 1, groups), for
// `weight` groups * splits; neighbouring blocks share their rows, so that these come from the cache.
// `side` is 0 for the tile that the sizes choose. Nothing in the loop divides: an index is taken
// apart by a product with a number that the block computes once, and a row's window is looked up.
// Rounding: _fp32 adds products by fmaf, in order. _tf32 and _bf16 round both operands (ties away
// from zero; to even) and accumulate in float32. Partial weight gradients are added by `sum_splits`
// in order, so every result is the same on every run.
// Cost: a stage of the 128 tile is 2^20 operations for 768 reads of shared memory of 128 bytes: with
// mma.sync of tf32, which takes about as long, the two share the bill. By its machine code, 32 of
// these instructions come with about 10 reads, 100 to round 48 operands and 75 moves: the issue slots
// are the next limit, and rounding activations where they are made would take most of it away. Data's gradient of a strided
// convolution multiplies the zeros between: 4 times the work at stride 2.
#include "matrix_product.cuh"

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

// Where a pixel's window starts: its image's offset, and a row and column. One outside the product
// is so far above that no tap reaches the image.
struct __align__(16) Window {
  i64 image;
  int top, left;
};
#define NOWHERE (-(1 << 30))
// A place within a window, and its channel.
struct Tap {
  int down, right, channel;
};
// What a block keeps in shared memory before its stages: windows by row, and numbers to divide by,
// which would take registers from the sums.
#define MOST_SIDE 128
#define INDEX_WORDS (MOST_SIDE * 4 + 32)

// k = (i, j, channel), taken apart.
struct Taps {
  Divisor channels, kw;
  int dh, dw;
  __device__ __forceinline__ static Taps of(const Shape& s, int channels, int sign) {
    return {Divisor::of(channels), Divisor::of(s.kw), sign * s.dh, sign * s.dw};
  }
  __device__ __forceinline__ Tap tap(int k) const {
    int cell = channels.quotient(k), i = kw.quotient(cell);
    return {i * dh, (cell - i * kw.value) * dw, k - cell * channels.value};
  }
};

// Output pixels' windows in x.
struct Pixels {
  Divisor ow, oh;
  __device__ __forceinline__ static Pixels of(const Shape& s) {
    return {Divisor::of(s.ow), Divisor::of(s.oh)};
  }
  __device__ __forceinline__ Window window(const Shape& s, int pixel) const {
    int line = ow.quotient(pixel), q = pixel - line * ow.value;
    int image = oh.quotient(line), p = line - image * oh.value;
    return {(i64)image * s.h * s.w * s.c, p * s.sh - s.ph, q * s.sw - s.pw};
  }
};

struct Index {
  Window windows[MOST_SIDE];
  Taps taps;
  Pixels pixels;
  Divisor channels, sh, sw;
  bool strided;
};
static_assert(sizeof(Index) <= INDEX_WORDS * 4, "the stages start behind the index");

// The windows in x of `rows` output pixels from `first` on, and what k = (i, j, channel) needs.
__device__ __forceinline__ void index_inputs(Index* index, const Shape& s, i64 first, int rows) {
  int t = threadIdx.x;
  if (t == 0) {
    index->taps = Taps::of(s, s.inputs(), 1);
    index->channels = index->taps.channels;
    index->pixels = Pixels::of(s);
  }
  if (t >= rows) return;
  i64 pixel = first + t, line = pixel / s.ow, image = line / s.oh;
  Window inside = {image * s.h * s.w * s.c, (int)(line - image * s.oh) * s.sh - s.ph,
                   (int)(pixel - line * s.ow) * s.sw - s.pw};
  index->windows[t] = image < s.n ? inside : Window{0, NOWHERE, 0};
}
// The same in dy, of input pixels: the window is that of the outputs which read it.
__device__ __forceinline__ void index_gradients(Index* index, const Shape& s, i64 first, int rows) {
  int t = threadIdx.x;
  if (t == 0) {
    index->taps = Taps::of(s, s.outputs(), -1);
    index->channels = index->taps.channels;
    index->sh = Divisor::of(s.sh);
    index->sw = Divisor::of(s.sw);
    index->strided = s.sh * s.sw > 1;
  }
  if (t >= rows) return;
  i64 pixel = first + t, line = pixel / s.w, image = line / s.h;
  Window inside = {image * s.oh * s.ow * s.o, (int)(line - image * s.h) + s.ph,
                   (int)(pixel - line * s.w) + s.pw};
  index->windows[t] = image < s.n ? inside : Window{0, NOWHERE, 0};
}

// The operands, with what copy_stage calls.

// Forward's left side: x by output pixel. Their windows are in shared memory.
struct Inputs {
  static const bool K_FASTEST = true;
  const float* base;
  bool wide;
  const Index* index;
  int h, w, c, end;
  struct Fixed {
    Tap tap;
    bool inside;
  };
  __device__ __forceinline__ Fixed fix(int k) const { return {index->taps.tap(k), k < end}; }
  __device__ __forceinline__ const float* find(const Fixed& at, int r) const {
    Window from = index->windows[r];
    int row = from.top + at.tap.down, column = from.left + at.tap.right;
    if (!at.inside || (u32)row >= (u32)h || (u32)column >= (u32)w) return 0;
    return base + from.image + ((i64)(row * w + column) * c + at.tap.channel);
  }
};

// Data's left side: dy by input pixel. A pixel belongs to an output where its distance from the tap
// is a multiple of the stride.
struct Gradients {
  static const bool K_FASTEST = true;
  const float* base;
  bool wide;
  const Index* index;
  int oh, ow, o, end;
  typedef Inputs::Fixed Fixed;
  __device__ __forceinline__ Fixed fix(int k) const { return {index->taps.tap(k), k < end}; }
  __device__ __forceinline__ const float* find(const Fixed& at, int r) const {
    Window from = index->windows[r];
    int down = from.top + at.tap.down, right = from.left + at.tap.right;
    if (!at.inside || down < 0 || right < 0) return 0;
    if (index->strided) {
      int p = index->sh.quotient(down), q = index->sw.quotient(right);
      if (p * index->sh.value != down || q * index->sw.value != right) return 0;
      down = p, right = q;
    }
    if (down >= oh || right >= ow) return 0;
    return base + from.image + ((i64)(down * ow + right) * o + at.tap.channel);
  }
};

// Forward's right side: a filter a row.
struct Filters {
  static const bool K_FASTEST = true;
  const float* base;
  bool wide, in_order;
  const Index* index;
  int window, rows, depth;
  __device__ __forceinline__ int fix(int k) const {
    if (k >= depth) return -1;
    if (in_order) return k;
    int cell = index->channels.quotient(k);
    return (k - cell * index->channels.value) * window + cell;
  }
  __device__ __forceinline__ const float* find(int place, int r) const {
    return place < 0 || r >= rows ? 0 : base + ((i64)r * depth + place);
  }
};

// Data's right side: an input channel a row, k = (i, j, output channel).
struct FiltersByInput {
  static const bool K_FASTEST = false;
  const float* base;
  bool wide;
  const Index* index;
  int row_step, cell_step, filter, rows, end;
  __device__ __forceinline__ int fix(int r) const { return r < rows ? r * row_step : -1; }
  __device__ __forceinline__ const float* find(int place, int k) const {
    if (place < 0 || k >= end) return 0;
    int cell = index->channels.quotient(k), output = k - cell * index->channels.value;
    return base + ((i64)output * filter + (cell * cell_step + place));
  }
};

// The weight's left side: dy by output channel, k a pixel.
struct GradientsByOutput {
  static const bool K_FASTEST = false;
  const float* base;
  bool wide;
  int o, rows, end;
  __device__ __forceinline__ int fix(int r) const { return r < rows ? r : -1; }
  __device__ __forceinline__ const float* find(int r, int pixel) const {
    return r < 0 || pixel >= end ? 0 : base + ((i64)pixel * o + r);
  }
};

// The weight's right side: x by place in the window, k a pixel.
struct InputsByTap {
  static const bool K_FASTEST = false;
  const float* base;
  bool wide;
  const Index* index;
  Shape s;
  int first, rows, end;
  typedef Inputs::Fixed Fixed;
  __device__ __forceinline__ Fixed fix(int r) const {
    return {index->taps.tap(first + r), r < rows};
  }
  __device__ __forceinline__ const float* find(const Fixed& at, int pixel) const {
    if (!at.inside || pixel >= end) return 0;
    Window from = index->pixels.window(s, pixel);
    int row = from.top + at.tap.down, column = from.left + at.tap.right;
    if ((u32)row >= (u32)s.h || (u32)column >= (u32)s.w) return 0;
    return base + from.image + ((i64)(row * s.w + column) * s.c + at.tap.channel);
  }
};

// A block's place in the grid.
struct Corner {
  i64 row;
  int column;
};
template <int SIDE>
__device__ __forceinline__ Corner corner(int columns) {
  int across = (columns + SIDE - 1) / SIDE;
  return {(i64)(blockIdx.x / across) * SIDE, (int)(blockIdx.x % across) * SIDE};
}

struct Forward {
  const float *x, *weight, *bias, *residual;
  float* y;
  Shape s;
  bool relu, packed;

  template <int MODE, int SIDE>
  __device__ __forceinline__ void run(float* shared) const {
    int group = blockIdx.z, inputs = s.inputs(), outputs = s.outputs(), window = s.window();
    int depth = inputs * window;
    Corner at = corner<SIDE>(outputs);
    Index* index = (Index*)shared;
    index_inputs(index, s, at.row, SIDE);
    __syncthreads();
    bool in_order = packed || window == 1, wide = inputs % 4 == 0;
    const float* filters = weight + ((i64)group * outputs + at.column) * depth;
    Inputs left = {x + group * inputs, wide, index, s.h, s.w, s.c, depth};
    Filters right = {filters, wide && in_order, in_order, index, window, outputs - at.column, depth};
    multiply_tile<MODE, SIDE>(left, right, 0, depth, shared + INDEX_WORDS);
    const float* biases = bias ? bias + group * outputs : 0;
    const float* added = residual ? residual + group * outputs : 0;
    Result to = {y + group * outputs,     biases, added, 0,    (i64)s.n * s.oh * s.ow, s.o,
                 outputs,                 relu,   1,     {}};
    to.store<SIDE>(shared + INDEX_WORDS, at.row, at.column);
  }
  __device__ __forceinline__ int side() const {
    return chosen_side((i64)s.n * s.oh * s.ow, s.outputs(), s.groups);
  }
};

struct Data {
  const float *dy, *weight, *mask;
  float* dx;
  Shape s;
  bool packed;

  template <int MODE, int SIDE>
  __device__ __forceinline__ void run(float* shared) const {
    int group = blockIdx.z, inputs = s.inputs(), outputs = s.outputs(), window = s.window();
    int depth = outputs * window;
    Corner at = corner<SIDE>(inputs);
    Index* index = (Index*)shared;
    index_gradients(index, s, at.row, SIDE);
    __syncthreads();
    bool in_order = packed || window == 1;
    Gradients left = {dy + group * outputs, outputs % 4 == 0, index, s.oh, s.ow, s.o, depth};
    int filter = inputs * window, row_step = in_order ? 1 : window, rest = inputs - at.column;
    const float* filters = weight + ((i64)group * outputs * filter + (i64)at.column * row_step);
    FiltersByInput right = {filters, in_order && inputs % 4 == 0, index, row_step,
                            in_order ? inputs : 1, filter, rest, depth};
    multiply_tile<MODE, SIDE>(left, right, 0, depth, shared + INDEX_WORDS);
    const float* masks = mask ? mask + group * inputs : 0;
    Result to = {dx + group * inputs, 0, 0, masks, (i64)s.n * s.h * s.w, s.c, inputs, false, 1, {}};
    to.store<SIDE>(shared + INDEX_WORDS, at.row, at.column);
  }
  __device__ __forceinline__ int side() const {
    return chosen_side((i64)s.n * s.h * s.w, s.inputs(), s.groups);
  }
};

struct Weight {
  const float *x, *dy;
  float* parts;
  Shape s;
  int splits;
  bool packed;

  template <int MODE, int SIDE>
  __device__ __forceinline__ void run(float* shared) const {
    int group = blockIdx.z / splits, split = blockIdx.z % splits;
    int inputs = s.inputs(), outputs = s.outputs(), window = s.window();
    int pixels = s.n * s.oh * s.ow, columns = inputs * window;
    i64 each = ((i64)pixels + (i64)DEPTH * splits - 1) / ((i64)DEPTH * splits) * DEPTH;
    int first = (int)smaller(pixels, split * each), end = (int)smaller(pixels, first + each);
    Corner at = corner<SIDE>(columns);
    int row = (int)at.row;
    Index* index = (Index*)shared;
    index_inputs(index, s, 0, 0);
    __syncthreads();
    GradientsByOutput left = {dy + group * outputs + row, outputs % 4 == 0, s.o, outputs - row, end};
    InputsByTap right = {x + group * inputs, inputs % 4 == 0,     index, s,
                         at.column,          columns - at.column, end};
    multiply_tile<MODE, SIDE>(left, right, first, end, shared + INDEX_WORDS);
    float* part = parts + ((i64)split * s.o + group * outputs) * columns;
    Result to = {part,    0,     0, 0, outputs, columns, columns, false, packed ? 1 : window,
                 index->channels};
    to.store<SIDE>(shared + INDEX_WORDS, at.row, at.column);
  }
  __device__ __forceinline__ int side() const {
    return chosen_side(s.outputs(), (i64)s.inputs() * s.window(), (i64)s.groups * splits);
  }
};

template <int MODE, class Product>
__device__ __forceinline__ void run(const Product& product, int side, float* shared) {
  if (side == 0) side = product.side();
  if (side == 128) product.template run<MODE, 128>(shared);
  else if (side == 64) product.template run<MODE, 64>(shared);
  else product.template run<MODE, 32>(shared);
}

// y = x * W + bias + residual (both may be null), zero where that is negative if `relu`; NaN stays.
extern "C" __global__ void __launch_bounds__(256)
    conv_forward_fp32(const float* x, const float* weight, const float* bias, float* y, SHAPE,
                      int relu, const float* residual, int packed, int side) {
  DYNAMIC_SHARED(float, shared);
  Forward all = {x, weight, bias, residual, y, SHAPE_VALUES, relu != 0, packed != 0};
  run<FP32>(all, side, shared);
}
extern "C" __global__ void __launch_bounds__(256, 2)
    conv_forward_tf32(const float* x, const float* weight, const float* bias, float* y, SHAPE,
                      int relu, const float* residual, int packed, int side) {
  DYNAMIC_SHARED(float, shared);
  Forward all = {x, weight, bias, residual, y, SHAPE_VALUES, relu != 0, packed != 0};
  run<TF32>(all, side, shared);
}
extern "C" __global__ void __launch_bounds__(256, 2)
    conv_forward_bf16(const float* x, const float* weight, const float* bias, float* y, SHAPE,
                      int relu, const float* residual, int packed, int side) {
  DYNAMIC_SHARED(float, shared);
  Forward all = {x, weight, bias, residual, y, SHAPE_VALUES, relu != 0, packed != 0};
  run<BF16>(all, side, shared);
}

// dx, zero where `mask` (what the layer below gave out of its ReLU; may be null) is not positive.
extern "C" __global__ void __launch_bounds__(256)
    conv_backward_data_fp32(const float* dy, const float* weight, const float* mask, float* dx, SHAPE,
                   int packed, int side) {
  DYNAMIC_SHARED(float, shared);
  Data all = {dy, weight, mask, dx, SHAPE_VALUES, packed != 0};
  run<FP32>(all, side, shared);
}
extern "C" __global__ void __launch_bounds__(256, 2)
    conv_backward_data_tf32(const float* dy, const float* weight, const float* mask, float* dx, SHAPE,
                   int packed, int side) {
  DYNAMIC_SHARED(float, shared);
  Data all = {dy, weight, mask, dx, SHAPE_VALUES, packed != 0};
  run<TF32>(all, side, shared);
}
extern "C" __global__ void __launch_bounds__(256, 2)
    conv_backward_data_bf16(const float* dy, const float* weight, const float* mask, float* dx, SHAPE,
                   int packed, int side) {
  DYNAMIC_SHARED(float, shared);
  Data all = {dy, weight, mask, dx, SHAPE_VALUES, packed != 0};
  run<BF16>(all, side, shared);
}

// parts[split] = that split's share of dW, in the order that `packed` says. With one split in
// Caffe's order, `parts` may be dW itself: the tensor's slice of the gradient's arena.
extern "C" __global__ void __launch_bounds__(256)
    conv_backward_weight_fp32(const float* x, const float* dy, float* parts, SHAPE, int splits, int packed,
                     int side) {
  DYNAMIC_SHARED(float, shared);
  Weight all = {x, dy, parts, SHAPE_VALUES, splits, packed != 0};
  run<FP32>(all, side, shared);
}
extern "C" __global__ void __launch_bounds__(256, 2)
    conv_backward_weight_tf32(const float* x, const float* dy, float* parts, SHAPE, int splits, int packed,
                     int side) {
  DYNAMIC_SHARED(float, shared);
  Weight all = {x, dy, parts, SHAPE_VALUES, splits, packed != 0};
  run<TF32>(all, side, shared);
}
extern "C" __global__ void __launch_bounds__(256, 2)
    conv_backward_weight_bf16(const float* x, const float* dy, float* parts, SHAPE, int splits, int packed,
                     int side) {
  DYNAMIC_SHARED(float, shared);
  Weight all = {x, dy, parts, SHAPE_VALUES, splits, packed != 0};
  run<BF16>(all, side, shared);
}

// packed (o, window, channels) = weight (o, channels, window), n = o * channels * window: once a step.
extern "C" __global__ void __launch_bounds__(256)
    pack_weights(const float* weight, float* packed, i64 n, int channels, int window) {
  for (GRID_STRIDE(i, n)) {
    i64 cell = i / channels, filter = cell / window;
    i64 place = (i - cell * channels) * window + (cell - filter * window);
    packed[i] = weight[filter * channels * window + place];
  }
}

// y = the sum of `splits` arrays of n floats one after the other, in order. If they are
// packed, (o, window, channels), y is in Caffe's order: the tensor's slice of the gradient's arena.
extern "C" __global__ void __launch_bounds__(256)
    sum_splits(const float* parts, float* y, i64 n, i64 splits, int channels, int window) {
  for (GRID_STRIDE(i, n)) {
    i64 from = i;
    if (window > 1) {
      i64 row = i / window, filter = row / channels;
      from = (filter * window + (i - row * window)) * channels + (row - filter * channels);
    }
    float sum = 0.0f;
#pragma unroll 4
    for (i64 k = 0; k < splits; ++k) sum += parts[k * n + from];
    y[i] = sum;
  }
}
