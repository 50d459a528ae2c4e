// Inverted dropout without a stored mask: it is drawn again from a counter wherever it is needed.
//
// Layout: flat float32 arrays of n elements, n below 2^34; y may be x. Element i takes word i % 4 of
//   philox(counter = (i / 4, step's high half, step's low half, layer), key = seed)
// and is dropped where the word is below `limit` = ratio * 2^32, kept and scaled where not. `step`
// is in device memory, so that a captured graph draws a new mask in every step.
// Launch: one-dimensional, a grid-stride loop, four elements a thread and turn; 8 bytes an element.
// Rounding: one product.
#include "philox.cuh"

// Forward on x, backward on the gradient: the same mask.
extern "C" __global__ void __launch_bounds__(256)
    dropout_apply(const float* x, float* y, const u64* step, u64 seed, u32 layer, u32 limit,
                  float scale, i64 n) {
  u64 now = *step;
  for (GRID_STRIDE(group, (n + 3) / 4)) {
    Words words = draw(group, now, layer, seed);
    for (int k = 0; k < 4; ++k) {
      i64 i = 4 * group + k;
      if (i < n) y[i] = words.w[k] < limit ? 0.0f : scale * x[i];
    }
  }
}

// The words themselves: what dropout_apply compares, and what tests hold against the paper's.
extern "C" __global__ void __launch_bounds__(256)
    philox_words(u32* words, const u64* step, u64 seed, u32 layer, i64 n) {
  u64 now = *step;
  for (GRID_STRIDE(group, (n + 3) / 4)) {
    Words found = draw(group, now, layer, seed);
    for (int k = 0; k < 4; ++k)
      if (4 * group + k < n) words[4 * group + k] = found.w[k];
  }
}
