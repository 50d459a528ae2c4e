"""Kernels written in a few lines to try a part of CUDA's language."""

HEADERS = '#include "device.cuh"\n#include "tensor_core.cuh"\n'


def source_of(kind: str, body: str) -> str:
    parameters = f"{kind}* out, const float* a, const float* b"
    return f'extern "C" __global__ void probe({parameters}) {{\n{body}\n}}\n'


MMA = """
  int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  float d[4] = {0, 0, 0, 0};
  {fragments}
  out[g * 8 + 2 * t] = d[0]; out[g * 8 + 2 * t + 1] = d[1];
  out[(g + 8) * 8 + 2 * t] = d[2]; out[(g + 8) * 8 + 2 * t + 1] = d[3];"""


TF32 = """
  u32 fa[4] = {to_tf32(a[g * 8 + t]), to_tf32(a[(g + 8) * 8 + t]),
               to_tf32(a[g * 8 + t + 4]), to_tf32(a[(g + 8) * 8 + t + 4])};
  u32 fb[2] = {to_tf32(b[t * 8 + g]), to_tf32(b[(t + 4) * 8 + g])};
  mma_tf32(d, fa, fb);"""


BF16 = """
  u32 fa[4], fb[2];
  for (int k = 0; k < 4; ++k) {
    const float* pair = &a[(g + 8 * (k % 2)) * 16 + 2 * t + 8 * (k / 2)];
    fa[k] = to_bf16_pair(pair[0], pair[1]);
  }
  for (int k = 0; k < 2; ++k)
    fb[k] = to_bf16_pair(b[(2 * t + 8 * k) * 8 + g], b[(2 * t + 8 * k + 1) * 8 + g]);
  mma_bf16(d, fa, fb);"""
