// Softmax over the rows of a matrix, and the cross-entropy loss with its gradient in one launch.
//
// Layout: float32 matrices (rows, k), row-major; labels are 64-bit integers. A row with the label
// `ignored` (to ignore none: -2^63) has no loss and no gradient; a row with a label outside
// [0, k) has NaN for both.
//   p = exp(x - max x) / sum exp(x - max x);  loss = -log(max(p[label], smallest float))
//   dx = (p - onehot(label)) * scale
// `scale`, loss_weight / divisor, is in device memory, since the divisor may be the number of rows
// that count. 8 bytes an element: x is read from memory once; no probability is ever stored.
// Launch: narrow kernels give a row to a warp, 8 rows to a block of (32, 8). The wide one, for k from
// about 1,000, gives a row to a block of 512 threads and keeps its first 40,000 floats in dynamic
// shared memory: whole rows of all blocks would not stay in the cache until they are read again,
// but the rest that a block does not keep does. Matrices are 16-byte aligned there; with k a multiple
// of 4, a thread has 64 bytes on their way at once.
// Rounding: sums in a fixed order, in float32: a lane's own elements in turn, then a tree.
#include "device.cuh"

#define MOST_KEPT 40000  // floats: 160 KB, which an sm_80 has too; softmax/spec.py sizes it so

// A maximum so far and the sum of exponentials relative to it.
struct Online {
  float largest, sum;
};

__device__ __forceinline__ void take(Online& o, float x) {
  if (x > o.largest) {
    o.sum = o.sum * expf(o.largest - x) + 1.0f;
    o.largest = x;
  } else if (x != -infinity()) {
    o.sum += expf(x - o.largest);  // NaN, too, ends up in the sum
  }
}

__device__ __forceinline__ Online merged(Online a, Online b) {
  if (a.largest < b.largest) {
    Online kept = a;
    a = b, b = kept;
  }
  if (b.largest != -infinity()) a.sum += b.sum * expf(b.largest - a.largest);
  else a.sum += b.sum;
  return a;
}

__device__ __forceinline__ Online warp_merged(Online o) {
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    Online other = {__shfl_xor_sync(ALL_LANES, o.largest, offset),
                    __shfl_xor_sync(ALL_LANES, o.sum, offset)};
    o = merged(o, other);
  }
  return o;
}

__device__ __forceinline__ float loss_of(float x, Online o) {
  float p = expf(x - o.largest) / o.sum;
  return -logf(p > SMALLEST_FLOAT || p != p ? p : SMALLEST_FLOAT);
}

// The gradient of one row, by `threads` threads of which this is number `t`.
__device__ __forceinline__ void row_gradient(const float* x, float* dx, Online o, i64 label,
                                             bool counts, float scale, int k, int t, int threads) {
  bool bad = label < 0 || label >= k;
  for (int j = t; j < k; j += threads) {
    float p = expf(x[j] - o.largest) / o.sum - (j == label ? 1.0f : 0.0f);
    dx[j] = !counts ? 0.0f : bad ? not_a_number() : p * scale;
  }
}

__device__ __forceinline__ void take_four(Online& o, float4 v) {
  float most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));  // NaN is left out here, and is in the sum
  if (most > o.largest) {
    o.sum *= expf(o.largest - most);
    o.largest = most;
  }
  float base = o.largest == -infinity() ? 0.0f : o.largest;
  o.sum += (expf(v.x - base) + expf(v.y - base)) + (expf(v.z - base) + expf(v.w - base));
}

// A row that a block shares, the first floats of it in shared memory once `scan` has been over it.
struct SharedRow {
  const float* x;
  float* kept;
  int k, first;  // `first` elements are kept

  __device__ __forceinline__ Online scan() const {
    Online o = {-infinity(), 0.0f};
    int step = blockDim.x;
    if (k % 4) {
      for (int j = threadIdx.x; j < k; j += step) {
        float v = x[j];
        if (j < first) kept[j] = v;
        take(o, v);
      }
      return o;
    }
    const float4* from = (const float4*)x;
    for (int j = threadIdx.x; j < k / 4; j += 4 * step) {
      float4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (j + i * step < k / 4) v[i] = from[j + i * step];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int at = j + i * step;
        if (at >= k / 4) continue;
        if (4 * at < first) ((float4*)kept)[at] = v[i];
        take_four(o, v[i]);
      }
    }
    return o;
  }
  // Each thread reads what it kept itself.
  __device__ __forceinline__ void gradient(float* dx, Online o, i64 label, bool counts,
                                           float scale) const {
    bool bad = counts && (label < 0 || label >= k);
    float share = 1.0f / o.sum, factor = bad ? not_a_number() : scale;
    int step = blockDim.x;
    if (k % 4) {
      for (int j = threadIdx.x; j < k; j += step) {
        float p = expf((j < first ? kept[j] : x[j]) - o.largest) * share;
        dx[j] = counts ? (j == label ? p - 1.0f : p) * factor : 0.0f;
      }
      return;
    }
#pragma unroll 4
    for (int j = threadIdx.x; j < k / 4; j += step) {
      float4 v = 4 * j < first ? ((const float4*)kept)[j] : ((const float4*)x)[j];
      v = {expf(v.x - o.largest) * share, expf(v.y - o.largest) * share,
           expf(v.z - o.largest) * share, expf(v.w - o.largest) * share};
      int own = label / 4 == j && label >= 0 ? (int)(label % 4) : -1;
      if (own == 0) v.x -= 1.0f;
      if (own == 1) v.y -= 1.0f;
      if (own == 2) v.z -= 1.0f;
      if (own == 3) v.w -= 1.0f;
      if (counts) v = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
      else v = {};
      ((float4*)dx)[j] = v;
    }
  }
};

__device__ __forceinline__ Online scan(const float* x, int k, int t, int threads) {
  Online o = {-infinity(), 0.0f};
  for (int j = t; j < k; j += threads) take(o, x[j]);
  return o;
}

extern "C" __global__ void __launch_bounds__(256)
    softmax_forward(const float* x, float* p, i64 rows, int k) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    const float* from = x + row * k;
    Online o = warp_merged(scan(from, k, threadIdx.x, WARP));
    for (int j = threadIdx.x; j < k; j += WARP) p[row * k + j] = expf(from[j] - o.largest) / o.sum;
  }
}

// dx = p * (dy - sum(dy * p)).
extern "C" __global__ void __launch_bounds__(256)
    softmax_backward(const float* dy, const float* p, float* dx, i64 rows, int k) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    float inner = 0.0f;
    for (int j = threadIdx.x; j < k; j += WARP) inner += dy[row * k + j] * p[row * k + j];
    inner = warp_sum(inner);
    for (int j = threadIdx.x; j < k; j += WARP)
      dx[row * k + j] = p[row * k + j] * (dy[row * k + j] - inner);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    softmax_loss(const float* x, const i64* labels, const float* scale, float* losses, float* dx,
                 i64 ignored, i64 rows, int k) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    i64 label = labels[row];
    bool counts = label != ignored;
    Online o = warp_merged(scan(x + row * k, k, threadIdx.x, WARP));
    if (threadIdx.x == 0) {
      bool bad = label < 0 || label >= k;
      losses[row] = !counts ? 0.0f : bad ? not_a_number() : loss_of(x[row * k + label], o);
    }
    row_gradient(x + row * k, dx + row * k, o, label, counts, *scale, k, threadIdx.x, WARP);
  }
}

extern "C" __global__ void __launch_bounds__(512, 2)
    softmax_loss_wide(const float* x, const i64* labels, const float* scale, float* losses,
                      float* dx, i64 ignored, i64 rows, int k) {
  __shared__ float largest[WARP], sums[WARP];
  DYNAMIC_SHARED(float, kept);
  int t = threadIdx.x, lane = t % WARP, warp = t / WARP, warps = blockDim.x / WARP;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    i64 label = labels[row];
    bool counts = label != ignored;
    SharedRow shared = {x + row * k, kept, k, k < MOST_KEPT ? k : MOST_KEPT};
    Online o = warp_merged(shared.scan());
    if (lane == 0) largest[warp] = o.largest, sums[warp] = o.sum;
    __syncthreads();
    o = {lane < warps ? largest[lane] : -infinity(), lane < warps ? sums[lane] : 0.0f};
    o = warp_merged(o);
    if (t == 0) {
      bool bad = label < 0 || label >= k;
      losses[row] = !counts ? 0.0f : bad ? not_a_number() : loss_of(x[row * k + label], o);
    }
    shared.gradient(dx + row * k, o, label, counts, *scale);
    __syncthreads();
  }
}

// scale = 1 / divisor: the number of rows that count, and at least 1.
extern "C" __global__ void __launch_bounds__(256)
    loss_scale(const i64* labels, float* scale, i64 ignored, i64 rows) {
  __shared__ u32 counts[256];
  int t = threadIdx.x;
  u32 count = 0;
  for (i64 row = t; row < rows; row += blockDim.x) count += labels[row] != ignored;
  counts[t] = count;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (t < half) counts[t] += counts[t + half];
    __syncthreads();
  }
  if (t == 0 && blockIdx.x == 0) *scale = 1.0f / (float)(counts[0] > 0 ? counts[0] : 1);
}

// hit = 1 where fewer than `top_k` other classes score at least the true one; 2 where ignored. A NaN
// counts as better than the true class, and a true class of NaN as no hit at all.
extern "C" __global__ void __launch_bounds__(256)
    top_k_hits(const float* scores, const i64* labels, u8* hits, i64 ignored, i64 rows, int k,
               int top_k) {
  for (i64 row = warp_row(); row < rows; row += warp_rows()) {
    i64 label = labels[row];
    bool known = label >= 0 && label < k;
    float own = known ? scores[row * k + label] : infinity();
    int better = 0;
    for (int j = threadIdx.x; j < k; j += WARP) better += j != label && !(scores[row * k + j] < own);
    for (int offset = WARP / 2; offset > 0; offset /= 2)
      better += __shfl_xor_sync(ALL_LANES, better, offset);
    if (threadIdx.x == 0) hits[row] = label == ignored ? 2 : own == own && known && better < top_k;
  }
}

// Labels that came as floats; what is not whole becomes a number that is no class.
extern "C" __global__ void labels_from_floats(const float* x, i64* labels, i64 n) {
  for (GRID_STRIDE(i, n)) {
    bool whole = x[i] == truncf(x[i]) && fabsf(x[i]) < 9.0e18f;
    labels[i] = whole ? (i64)x[i] : -((i64)1 << 62);
  }
}

// How many of `hits` are 1 and how many count at all, over those rows that `mine` is true for:
// one block, summed by halves.
template <class Rows>
__device__ __forceinline__ float share_of(const u8* hits, const Rows& mine, i64 rows,
                                          u32 (*sums)[256]) {
  int t = threadIdx.x;
  u32 good = 0, all = 0;
  for (i64 row = t; row < rows; row += blockDim.x)
    if (mine(row)) good += hits[row] == 1, all += hits[row] != 2;
  sums[0][t] = good, sums[1][t] = all;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (t < half) sums[0][t] += sums[0][t + half], sums[1][t] += sums[1][t + half];
    __syncthreads();
  }
  float share = (float)sums[0][0] / (float)(sums[1][0] > 0 ? sums[1][0] : 1);
  __syncthreads();
  return share;
}

struct EveryRow {
  __device__ __forceinline__ bool operator()(i64) const { return true; }
};
struct RowsOf {
  const i64* labels;
  i64 label;
  __device__ __forceinline__ bool operator()(i64 row) const { return labels[row] == label; }
};

// share = hits over the rows that count: the accuracy of a batch.
extern "C" __global__ void __launch_bounds__(256)
    hit_share(const u8* hits, float* share, i64 rows) {
  __shared__ u32 sums[2][256];
  float found = share_of(hits, EveryRow{}, rows, sums);
  if (first_index() == 0) *share = found;
}

// The same by true class, a block a class.
extern "C" __global__ void __launch_bounds__(256)
    class_shares(const u8* hits, const i64* labels, float* shares, i64 rows, int k) {
  __shared__ u32 sums[2][256];
  for (int label = blockIdx.x; label < k; label += gridDim.x) {
    float found = share_of(hits, RowsOf{labels, label}, rows, sums);
    if (threadIdx.x == 0) shares[label] = found;
  }
}
