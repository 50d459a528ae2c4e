// Embedding: rows of a table by id, and their gradient as sums over segments of equal ids.
//
// Layout: table (rows, width) and y (count, width), float32; ids are 64 bit. The gradient needs the
// positions of a batch sorted by id, equal ids in batch order: the positions with id r are
// order[starts[r]] ... order[starts[r + 1] - 1]. stable_order finds each position's rank by comparing
// it with all others, which needs no second buffer and no passes, and is fast for the ids of a batch:
// 10,000 are 10^8 comparisons.
// Launch: one-dimensional, a grid-stride loop, over single floats where rows are moved; neighbours
// share a row.
// Rounding: a sum runs in batch order, one rounding each: no atomics, the same bits on every run.
#include "device.cuh"

// y[i] = table[ids[i]]; zeros where the id is not a row of the table.
extern "C" __global__ void __launch_bounds__(256)
    embedding_gather(const float* table, const i64* ids, float* y, i64 rows, i64 count,
                     i64 width) {
  for (GRID_STRIDE(i, count * width)) {
    i64 id = ids[i / width];
    y[i] = id >= 0 && id < rows ? table[id * width + i % width] : 0.0f;
  }
}

// order[k] = the position of the k-th smallest id.
extern "C" __global__ void __launch_bounds__(256)
    stable_order(const i64* ids, i64* order, i64 count) {
  for (GRID_STRIDE(i, count)) {
    i64 id = ids[i], rank = 0;
    for (i64 j = 0; j < count; ++j) rank += ids[j] < id || (ids[j] == id && j < i);
    order[rank] = i;
  }
}

// starts[r] = how many ids are below r, for r in [0, rows]. Ids that are no row are in no segment.
extern "C" __global__ void __launch_bounds__(256)
    segment_starts(const i64* ids, const i64* order, i64* starts, i64 count, i64 rows) {
  for (GRID_STRIDE(r, rows + 1)) {
    i64 low = 0, high = count;
    while (low < high) {
      i64 middle = (low + high) / 2;
      if (ids[order[middle]] < r) low = middle + 1;
      else high = middle;
    }
    starts[r] = low;
  }
}

// sums[r] = the sum of dy[order[k]] over segment r: a row of gradient for each row of the table.
extern "C" __global__ void __launch_bounds__(256)
    segment_sums(const float* dy, const i64* order, const i64* starts, float* sums, i64 count,
                 i64 rows, i64 width) {
  for (GRID_STRIDE(i, rows * width)) {
    i64 row = i / width, end = smaller(count, starts[row + 1]);
    float sum = 0.0f;
    for (i64 k = starts[row]; k < end; ++k) sum += dy[order[k] * width + i % width];
    sums[i] = sum;
  }
}
