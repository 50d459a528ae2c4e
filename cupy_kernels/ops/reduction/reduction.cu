// Reductions along the rows of a matrix: sums of terms, and the largest values with their places.
//
// Layout: float32 matrices (rows, width), row-major; a whole blob is one row. No access is wider than
// a float.
// Launch: blocks of (32, 8), one warp for each row, or for each chunk of a row in row_sums. A long
// sum takes several launches: each replaces 1,024 numbers by one, until one is left.
// Rounding: a lane adds its own elements in turn, then a tree over the warp, in float32. The order
// follows from the sizes alone.
#include "device.cuh"

#define CHUNK 1024  // elements of one sum; ops/reduction/spec.py has it as well

enum { VALUES, MAGNITUDES, SQUARES };

__device__ __forceinline__ float term_of(float x, int term) {
  return term == VALUES ? x : term == MAGNITUDES ? fabsf(x) : x * x;
}

// sums[row][chunk] = factor * the sum of a chunk's terms: of a, |a| or a^2, or a * b if b is given.
// A number in device memory, `scale`, is another factor if it is given.
extern "C" __global__ void __launch_bounds__(256)
    row_sums(const float* a, const float* b, const float* scale, float* sums, int term,
             float factor, i64 rows, i64 width) {
  float times = scale ? factor * *scale : factor;
  i64 chunks = larger(1, (width + CHUNK - 1) / CHUNK);
  for (i64 task = warp_row(); task < rows * chunks; task += warp_rows()) {
    i64 start = task / chunks * width, low = task % chunks * CHUNK;
    i64 high = smaller(low + CHUNK, width);
    float sum = 0.0f;
    for (i64 j = low + threadIdx.x; j < high; j += WARP)
      sum += b ? a[start + j] * b[start + j] : term_of(a[start + j], term);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) sums[task] = times * sum;
  }
}

// dx = factor * dy[row] * the derivative of the term: 1, the sign of x, or 2 x.
extern "C" __global__ void row_sums_backward(const float* dy, const float* x, float* dx, int term,
                                             float factor, i64 rows, i64 width) {
  for (GRID_STRIDE(i, rows * width)) {
    float v = x[i], sign = v > 0.0f ? 1.0f : v < 0.0f ? -1.0f : 0.0f;
    dx[i] = factor * dy[i / width] * (term == VALUES ? 1.0f : term == MAGNITUDES ? sign : 2.0f * v);
  }
}

// A value and its place. `first` is the order of a falling sort: NaN is below all numbers, and of
// equal values the last place is first.
struct Entry {
  float value;
  int place;
};
__device__ __forceinline__ bool first(Entry a, Entry b) {
  bool nan = a.value != a.value, other = b.value != b.value;
  if (nan != other) return other;
  if (!nan && a.value != b.value) return a.value > b.value;
  return a.place > b.place;
}

// The `count` first of each row, in order, with their places as floats.
extern "C" __global__ void __launch_bounds__(256)
    row_largest(const float* x, float* places, float* values, i64 rows, int width, int count) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    Entry last = {infinity(), width};
    for (int k = 0; k < count; ++k) {
      Entry best = {not_a_number(), -1};
      for (int j = threadIdx.x; j < width; j += WARP) {
        Entry here = {x[row * width + j], j};
        if (first(last, here) && first(here, best)) best = here;
      }
      for (int offset = WARP / 2; offset > 0; offset /= 2) {
        Entry other = {__shfl_xor_sync(ALL_LANES, best.value, offset),
                       __shfl_xor_sync(ALL_LANES, best.place, offset)};
        if (first(other, best)) best = other;
      }
      if (threadIdx.x == 0) {
        places[row * count + k] = (float)best.place;
        values[row * count + k] = best.value;
      }
      last = best;
    }
  }
}
