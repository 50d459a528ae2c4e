// Philox4x32-10 (Salmon et al. 2011): four random words from a counter of four and a key of two.
// ops/dropout/cpu.py computes the same words on the CPU.
#pragma once
#include "device.cuh"

struct Words {
  u32 w[4];
};

__device__ __forceinline__ Words philox(Words counter, u32 key0, u32 key1) {
  for (int round = 0; round < 10; ++round) {
    u64 a = (u64)0xD2511F53u * counter.w[0], b = (u64)0xCD9E8D57u * counter.w[2];
    counter = {(u32)(b >> 32) ^ counter.w[1] ^ key0, (u32)b,
               (u32)(a >> 32) ^ counter.w[3] ^ key1, (u32)a};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Four words for elements 4 * group to 4 * group + 3 of one layer in one step.
__device__ __forceinline__ Words draw(i64 group, u64 step, u32 layer, u64 seed) {
  Words counter = {(u32)group, (u32)(step >> 32), (u32)step, layer};
  return philox(counter, (u32)seed, (u32)(seed >> 32));
}

// The word of one element.
__device__ __forceinline__ u32 drawn(i64 element, u64 step, u32 layer, u64 seed) {
  Words words = draw(element / 4, step, layer, seed);
  int k = (int)(element % 4);  // not an index, which would move the words out of their registers
  return k == 0 ? words.w[0] : k == 1 ? words.w[1] : k == 2 ? words.w[2] : words.w[3];
}
