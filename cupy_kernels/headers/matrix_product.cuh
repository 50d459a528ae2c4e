// One tile of a matrix product, with operands gathered from global memory during it.
//
// A block of 256 threads computes SIDE x SIDE sums, SIDE being 128, 64 or 32. The summed dimension
// passes 32 at a time through a ring of stages in dynamic shared memory: asynchronous copies fill
// the stages ahead while the oldest one is multiplied, with one barrier a stage.
//   side 128   8 warps of 64 x 32           3 stages, 98 KB: two blocks a multiprocessor
//   side  64   4 warps of 32 x 32, twice    4 stages, 66 KB: for few or narrow columns
//   side  32   4 warps of 16 x 16, twice    4 stages, 33 KB: for products too small to fill a GPU
// "Twice": each half of the warps takes half of every stage's depth, and the halves are added once,
// in order, at the end: more warps at work on a product that has few tiles.
//
// An operand has the same order in a stage as in memory, so that copies are 16 bytes wide wherever
// four neighbours are (else 4): [row][k] if k runs fastest there, [k][row] if rows do. Chunks of four
// floats are permuted by exclusive or, so that neither a copy nor a fragment's read meets a bank
// twice. A lane of a fragment takes four neighbouring k (one 16-byte read) where the instruction
// means k = t, t + 4, ...: the order of the sum is free as long as both operands keep it.
#pragma once
#include "tensor_core.cuh"

enum { FP32, TF32, BF16 };

#define THREADS 256
#define DEPTH 32

// Division by a number that stays the same, of numbers below 2^31: a product and a shift
// (Granlund and Montgomery 1994, figure 4.1).
struct Divisor {
  int value, shift;
  u32 factor;
  __device__ __forceinline__ static Divisor of(int d) {
    int shift = 32 - __clz(d - 1);
    u64 rest = (1ull << shift) - (u64)d;
    return {d, shift, (u32)((rest << 32) / (u64)d + 1)};
  }
  __device__ __forceinline__ int quotient(int n) const {
    return (int)((__umulhi((u32)n, factor) + (u32)n) >> shift);
  }
  __device__ __forceinline__ int remainder(int n) const { return n - quotient(n) * value; }
};

// How the warps of a block share a tile.
template <int SIDE>
struct Tile {
  static const int ROW_WARPS = 2, COLUMN_WARPS = SIDE == 128 ? 4 : 2;
  static const int SLICES = 8 / ROW_WARPS / COLUMN_WARPS;
  static const int ROWS = SIDE / ROW_WARPS / 16, COLUMNS = SIDE / COLUMN_WARPS / 8;  // fragments
  static const int STAGES = SIDE == 128 ? 3 : 4;
  static const int WORDS = SIDE * DEPTH;  // of one operand's stage
  static const int PITCH = SIDE + 4;      // of the finished sums
};

// Where (row, k) of an operand is in its stage.
template <bool K_FASTEST, int SIDE>
__device__ __forceinline__ int stage_place(int row, int k) {
  int spread = (row & 1) << 2 | (row >> 1 & 3);
  if (K_FASTEST) return row * DEPTH + (((k >> 2) ^ spread) << 2) + (k & 3);
  return k * SIDE + (row ^ ((k >> 2 & 3) << 3));
}

// threadIdx.x, as if it might have changed: addresses made from it are computed in every stage and
// don't take the registers of the sums meanwhile.
__device__ __forceinline__ int this_thread_again() {
  int thread = threadIdx.x;
#ifndef EMULATED
  asm volatile("" : "+r"(thread));
#endif
  return thread;
}

// Start the copies of one stage. An operand says `fix(a)` for the coordinate that a thread keeps
// (k if K_FASTEST, else the row) and `find(fixed, b)`, an address or null for a zero, for the other.
template <int SIDE, int WIDTH, class Operand>
__device__ __forceinline__ void copy_stage(const Operand& operand, float* stage, int first_k) {
  const int ALONG = (Operand::K_FASTEST ? DEPTH : SIDE) / WIDTH, STEP = THREADS / ALONG;
  const int TURNS = (Operand::K_FASTEST ? SIDE : DEPTH) / STEP;
  int thread = this_thread_again(), along = thread % ALONG * WIDTH, across = thread / ALONG;
  auto fixed = operand.fix(Operand::K_FASTEST ? first_k + along : along);
#pragma unroll (WIDTH == 4 ? TURNS : 1)
  for (int i = 0; i < TURNS; ++i) {
    int other = across + i * STEP;
    const float* from = operand.find(fixed, Operand::K_FASTEST ? other : first_k + other);
    int place = Operand::K_FASTEST ? stage_place<true, SIDE>(other, along)
                                   : stage_place<false, SIDE>(along, other);
    const float* some = from ? from : operand.base;
    if (WIDTH == 4) copy_async16(stage + place, some, from ? 16 : 0);
    else copy_async4(stage + place, some, from ? 4 : 0);
  }
}
template <int SIDE, class Operand>
__device__ __forceinline__ void copy_operand(const Operand& operand, float* stage, int first_k) {
  if (operand.wide) copy_stage<SIDE, 4>(operand, stage, first_k);
  else copy_stage<SIDE, 1>(operand, stage, first_k);
}

// Four neighbouring k of a row.
template <bool K_FASTEST, int SIDE>
__device__ __forceinline__ float4 read_four(const float* stage, int row, int k) {
  if (K_FASTEST) return *(const float4*)(stage + stage_place<true, SIDE>(row, k));
  const float* from = stage + stage_place<false, SIDE>(row, k);
  return {from[0], from[SIDE], from[2 * SIDE], from[3 * SIDE]};
}

__device__ __forceinline__ void round_to_tf32(float4& v) {
  v = {__uint_as_float(to_tf32(v.x)), __uint_as_float(to_tf32(v.y)),
       __uint_as_float(to_tf32(v.z)), __uint_as_float(to_tf32(v.w))};
}

// A thread's sums by tensor cores: fragments of 16 x 8 of its warp's part of the tile.
template <int MODE, int SIDE>
struct Sums {
  typedef Tile<SIDE> T;
  float at[T::ROWS][T::COLUMNS][4];

  __device__ __forceinline__ static int slice() { return threadIdx.x / (THREADS / T::SLICES); }
  __device__ __forceinline__ static int first_row() {
    return threadIdx.x / WARP / T::COLUMN_WARPS % T::ROW_WARPS * (T::ROWS * 16);
  }
  __device__ __forceinline__ static int first_column() {
    return threadIdx.x / WARP % T::COLUMN_WARPS * (T::COLUMNS * 8);
  }
  template <bool LEFT_BY_K, bool RIGHT_BY_K>
  __device__ __forceinline__ void add(const float* left, const float* right) {
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll 1  // unrolled, the fragments of both steps would want registers at once
    for (int step = 0; step < DEPTH / 16 / T::SLICES; ++step) {
      int k = (slice() + step * T::SLICES) * 16 + 4 * t;
      float4 b[T::COLUMNS];
#pragma unroll
      for (int j = 0; j < T::COLUMNS; ++j) {
        b[j] = read_four<RIGHT_BY_K, SIDE>(right, first_column() + 8 * j + g, k);
        if (MODE == TF32) round_to_tf32(b[j]);
      }
#pragma unroll
      for (int i = 0; i < T::ROWS; ++i) {
        int row = first_row() + 16 * i + g;
        float4 top = read_four<LEFT_BY_K, SIDE>(left, row, k);
        float4 low = read_four<LEFT_BY_K, SIDE>(left, row + 8, k);
        if (MODE == TF32) round_to_tf32(top), round_to_tf32(low);
#pragma unroll
        for (int j = 0; j < T::COLUMNS; ++j) multiply(at[i][j], top, low, b[j]);
      }
    }
  }
  __device__ __forceinline__ static void multiply(float (&d)[4], float4 top, float4 low, float4 b) {
    if (MODE == BF16) {
      u32 left[4] = {to_bf16_pair(top.x, top.y), to_bf16_pair(low.x, low.y),
                     to_bf16_pair(top.z, top.w), to_bf16_pair(low.z, low.w)};
      u32 right[2] = {to_bf16_pair(b.x, b.y), to_bf16_pair(b.z, b.w)};
      mma_bf16(d, left, right);
      return;
    }
    u32 first[4] = {__float_as_uint(top.x), __float_as_uint(low.x), __float_as_uint(top.y), __float_as_uint(low.y)};
    u32 second[4] = {__float_as_uint(top.z), __float_as_uint(low.z), __float_as_uint(top.w), __float_as_uint(low.w)};
    u32 right[2] = {__float_as_uint(b.x), __float_as_uint(b.y)}, rest[2] = {__float_as_uint(b.z), __float_as_uint(b.w)};
    mma_tf32(d, first, right);
    mma_tf32(d, second, rest);
  }
  // The finished tile, [row][column], in shared memory: slice after slice.
  template <bool LEFT_BY_K, bool RIGHT_BY_K>
  __device__ __forceinline__ void gather(float* tile) const {
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int turn = 0; turn < T::SLICES; ++turn) {
      if (turn == slice()) {
#pragma unroll
        for (int i = 0; i < T::ROWS * T::COLUMNS * 2; ++i) {
          const float* part = at[i / 2 / T::COLUMNS][i / 2 % T::COLUMNS] + i % 2 * 2;
          int row = first_row() + i / 2 / T::COLUMNS * 16 + i % 2 * 8 + g;
          int column = first_column() + i / 2 % T::COLUMNS * 8 + 2 * t;
          float2* to = (float2*)(tile + row * T::PITCH + column);
          if (turn == 0) *to = {part[0], part[1]};
          else *to = {to->x + part[0], to->y + part[1]};
        }
      }
      __syncthreads();
    }
  }
};

// A thread's sums in plain float32: (SIDE / 16)^2 of them, k after k, by fused multiply-add.
template <int SIDE>
struct Sums<FP32, SIDE> {
  typedef Tile<SIDE> T;
  static const int EACH = SIDE / 16, VECTOR = EACH < 4 ? EACH : 4;
  float at[EACH][EACH];

  // Interleaved, so that 16 threads together read neighbours.
  template <bool BY_K>
  __device__ __forceinline__ static int place(int thread, int i) {
    return BY_K ? thread + 16 * i : VECTOR * thread + i % VECTOR + i / VECTOR * (16 * VECTOR);
  }
  template <bool BY_K>
  __device__ __forceinline__ static void read(const float* stage, int thread, int k,
                                              float (&v)[EACH][4]) {
    if (BY_K) {
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        float4 four = *(const float4*)(stage + stage_place<true, SIDE>(place<true>(thread, i), k));
        v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < EACH; i += VECTOR) {
        const float* from = stage + stage_place<false, SIDE>(place<false>(thread, i), k + j);
        if constexpr (VECTOR == 4) {
          float4 four = *(const float4*)from;
          v[i][j] = four.x, v[i + 1][j] = four.y, v[i + 2][j] = four.z, v[i + 3][j] = four.w;
        } else {
          float2 two = *(const float2*)from;
          v[i][j] = two.x, v[i + 1][j] = two.y;
        }
      }
  }
  template <bool LEFT_BY_K, bool RIGHT_BY_K>
  __device__ __forceinline__ void add(const float* left, const float* right) {
#pragma unroll 1
    for (int k = 0; k < DEPTH; k += 4) {
      float a[EACH][4], b[EACH][4];
      read<LEFT_BY_K>(left, threadIdx.x / 16, k, a);
      read<RIGHT_BY_K>(right, threadIdx.x % 16, k, b);
#pragma unroll
      for (int i = 0; i < EACH * EACH * 4; ++i) {
        int row = i / EACH % EACH, column = i % EACH, j = i / EACH / EACH;
        at[row][column] = fmaf(a[row][j], b[column][j], at[row][column]);
      }
    }
  }
  template <bool LEFT_BY_K, bool RIGHT_BY_K>
  __device__ __forceinline__ void gather(float* tile) const {
#pragma unroll
    for (int i = 0; i < EACH * EACH; ++i) {
      int row = place<LEFT_BY_K>(threadIdx.x / 16, i / EACH);
      tile[row * T::PITCH + place<RIGHT_BY_K>(threadIdx.x % 16, i % EACH)] = at[i / EACH][i % EACH];
    }
    __syncthreads();
  }
};

// Leaves the tile's sums over k in [first, end) in shared memory, [row][column]; a barrier is last.
template <int MODE, int SIDE, class Left, class Right>
__device__ __forceinline__ void multiply_tile(const Left& left, const Right& right, int first,
                                              int end, float* shared) {
  typedef Tile<SIDE> T;
  const bool LEFT = Left::K_FASTEST, RIGHT = Right::K_FASTEST;
  int steps = end > first ? (end - first + DEPTH - 1) / DEPTH : 0;
  Sums<MODE, SIDE> sums = {};
#pragma unroll 1
  for (int step = 1 - T::STAGES; step < steps; ++step) {
    if (step >= 0) {
      COPY_ASYNC_WAIT(T::STAGES - 2);
      __syncthreads();
    }
    int next = step + T::STAGES - 1;
    if (next < steps) {
      float* stage = shared + next % T::STAGES * 2 * T::WORDS;
      copy_operand<SIDE>(left, stage, first + next * DEPTH);
      copy_operand<SIDE>(right, stage + T::WORDS, first + next * DEPTH);
    }
    copy_async_commit();
    if (step < 0) continue;
    const float* stage = shared + step % T::STAGES * 2 * T::WORDS;
    sums.template add<LEFT, RIGHT>(stage, stage + T::WORDS);
  }
  COPY_ASYNC_WAIT(0);
  __syncthreads();
  sums.template gather<LEFT, RIGHT>(shared);
}

// What becomes of a tile: the sum, plus its column's bias, plus what `add` holds there; zero where
// that is negative if `relu`, and where `mask` is not positive. Null pointers are left out.
struct Result {
  float* to;
  const float *bias, *add, *mask;
  i64 rows, pitch;
  int columns;
  bool relu;
  int window;        // 1, or column (cell, channel) goes to (channel, cell)
  Divisor channels;

  __device__ __forceinline__ float finish(float sum, i64 place, int column) const {
    float value = bias ? sum + bias[column] : sum;
    if (add) value += add[place];
    if (relu && value <= 0.0f) value = 0.0f;
    return mask && !(mask[place] > 0.0f) ? 0.0f : value;
  }
  template <int SIDE>
  __device__ __forceinline__ void store(const float* tile, i64 first_row, int first_column) const {
    bool wide = window == 1 && columns % 4 == 0 && pitch % 4 == 0;
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < SIDE * SIDE; i += THREADS * 4) {
      i64 row = first_row + i / SIDE;
      int column = first_column + i % SIDE;
      if (row >= rows || column >= columns) continue;
      float4 four = *(const float4*)(tile + i / SIDE * Tile<SIDE>::PITCH + i % SIDE);
      i64 place = row * pitch + column;
      if (wide) {
        *(float4*)(to + place) = finish_four(four, place, column);
        continue;
      }
      float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        int at = column + k, cell = window == 1 ? 0 : channels.quotient(at);
        if (at >= columns) continue;
        i64 there = window == 1 ? at : (i64)(at - cell * channels.value) * window + cell;
        to[row * pitch + there] = finish(values[k], place + k, at);
      }
    }
  }
  __device__ __forceinline__ float4 finish_four(float4 v, i64 place, int column) const {
    if (bias) {
      v.x += bias[column], v.y += bias[column + 1];
      v.z += bias[column + 2], v.w += bias[column + 3];
    }
    if (add) {
      float4 a = *(const float4*)(add + place);
      v = {v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w};
    }
    if (relu)
      v = {v.x <= 0.0f ? 0.0f : v.x, v.y <= 0.0f ? 0.0f : v.y, v.z <= 0.0f ? 0.0f : v.z,
           v.w <= 0.0f ? 0.0f : v.w};
    if (mask) {
      float4 m = *(const float4*)(mask + place);
      v = {m.x > 0.0f ? v.x : 0.0f, m.y > 0.0f ? v.y : 0.0f, m.z > 0.0f ? v.z : 0.0f,
           m.w > 0.0f ? v.w : 0.0f};
    }
    return v;
  }
};

// The side of a product's tiles: the greatest that is no waste and still gives a GPU enough blocks.
// A rule of the sizes alone, so that results don't depend on the device; ops/convolution/spec.py has
// the same. `layers` are products of this size side by side.
#define ENOUGH_BLOCKS 96
__device__ __forceinline__ i64 tiles_of(i64 rows, i64 columns, int side) {
  return ((rows + side - 1) / side) * ((columns + side - 1) / side);
}
__device__ __forceinline__ int chosen_side(i64 rows, i64 columns, i64 layers) {
  i64 least = smaller(rows, columns);
  if (least > 64 && tiles_of(rows, columns, 128) * layers >= ENOUGH_BLOCKS) return 128;
  if (least > 32 && tiles_of(rows, columns, 64) * layers >= ENOUGH_BLOCKS) return 64;
  return 32;
}
