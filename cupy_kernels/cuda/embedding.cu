// Embedding: rows of a table by id, and their gradient as sums over sorted segments.
//
// Layout: table (rows, width) and y (count, width), float32; ids are 64 bit. The gradient wants the
// positions of a batch sorted by id, equal ids in batch order (a stable argsort, done outside):
// segment s is order[starts[s]] ... order[starts[s + 1] - 1], all of one id.
// Launch: one-dimensional, a grid-stride loop over single floats; neighbours share a row.
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

// sums[s] = the sum of dy[order[k]] over segment s: one row of gradient for each distinct id.
extern "C" __global__ void __launch_bounds__(256)
    segment_sums(const float* dy, const i64* order, const i64* starts, float* sums, i64 count,
                 i64 segments, i64 width) {
  for (GRID_STRIDE(i, segments * width)) {
    i64 segment = i / width, end = smaller(count, starts[segment + 1]);
    float sum = 0.0f;
    for (i64 k = starts[segment]; k < end; ++k) sum += dy[order[k] * width + i % width];
    sums[i] = sum;
  }
}
