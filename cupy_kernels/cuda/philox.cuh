// Philox4x32-10 (Salmon et al. 2011): four random words from a counter of four and a key of two.
// dropout.py computes the same words on the CPU.
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
