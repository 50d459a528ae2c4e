// Update rules fused over a flat parameter arena: every array is read and written once.
//
// Layout: float32 arenas of n floats, 16-byte aligned; `out` may be `w`. Tensors start on multiples
// of 64 floats, so each chunk of 64 belongs to one group: `groups[chunk]` is the index of its
// multipliers; without `groups` all are in group 0. Padding is zero and stays zero.
// Changing numbers (rate, decay, ...) come from `hyper`, and the norm guard's result from
// `verdict` (may be null), both in device memory: a captured graph freezes arguments, not memory.
// Launch: one-dimensional, a grid-stride loop over quadruples; the last n % 4 floats one by one.
// Rounding: each operation once, in the order of cpu.py: the same bits as on the CPU.
#include "arena.cuh"

struct Place {
  float rate, decay, scale;
  bool l1;
};

__device__ __forceinline__ float decayed(float g, float w, const Place& at) {
  g *= at.scale;
  if (at.decay == 0.0f) return g;
  if (!at.l1) return g + at.decay * w;
  float sign = w > 0.0f ? 1.0f : w < 0.0f ? -1.0f : w;
  return g + at.decay * sign;
}

// The rules. Each maps a weight, a gradient and up to two slots to the new weight and slots.

struct Sgd {
  static __device__ __forceinline__ float step(float w, float g, float&, float&, float rate,
                                               const Hyper&) {
    return w - rate * g;
  }
};

struct Momentum {
  static __device__ __forceinline__ float step(float w, float g, float& h, float&, float rate,
                                               const Hyper& p) {
    h = p.keep * h + rate * g;
    return w - h;
  }
};

struct Nesterov {
  static __device__ __forceinline__ float step(float w, float g, float& h, float&, float rate,
                                               const Hyper& p) {
    float old = h;
    h = p.keep * old + rate * g;
    return w - (p.take * h - p.keep * old);
  }
};

struct Adagrad {
  static __device__ __forceinline__ float step(float w, float g, float& h, float&, float rate,
                                               const Hyper& p) {
    h = h + g * g;
    return w - rate * (g / (sqrtf(h) + p.delta));
  }
};

struct RmsProp {
  static __device__ __forceinline__ float step(float w, float g, float& h, float&, float rate,
                                               const Hyper& p) {
    h = p.keep * h + p.take * (g * g);
    return w - rate * (g / (sqrtf(h) + p.delta));
  }
};

struct AdaDelta {
  static __device__ __forceinline__ float step(float w, float g, float& h, float& d, float rate,
                                               const Hyper& p) {
    h = p.keep * h + p.take * (g * g);
    float step = g * sqrtf((d + p.delta) / (h + p.delta));
    d = p.keep * d + p.take * (step * step);
    return w - rate * step;
  }
};

struct Adam {
  static __device__ __forceinline__ float step(float w, float g, float& m, float& v, float rate,
                                               const Hyper& p) {
    m = p.keep * m + p.take * g;
    v = p.keep2 * v + p.take2 * (g * g);
    return w - rate * (m / (sqrtf(v) + p.delta));
  }
};

// Its `strength` is the weight decay, divided by the bias correction that the rate contains.
struct AdamW {
  static __device__ __forceinline__ float step(float w, float g, float& m, float& v, float rate,
                                               const Hyper& p) {
    m = p.keep * m + p.take * g;
    v = p.keep2 * v + p.take2 * (g * g);
    return w - rate * (m / (sqrtf(v) + p.delta) + p.strength * w);
  }
};

// Liu et al. 2024, algorithm 3: `take` is 1/n, and `strength` is 1 at every n-th update, else 0.
struct DelayedNesterov {
  static __device__ __forceinline__ float step(float w, float g, float& m, float& s, float rate,
                                               const Hyper& p) {
    s = s + g;
    if (p.strength == 0.0f) return w - rate * (p.take * g);
    m = p.keep * m + p.take * s;
    s = s - s;
    return w - rate * (p.take * g + p.keep * m);
  }
};

// Momentum look-ahead (MCDC at ICLR 2025): `take` is 1 - momentum.
struct Mla {
  static __device__ __forceinline__ float step(float w, float g, float& m, float&, float rate,
                                               const Hyper& p) {
    float ahead = p.keep * m;
    m = ahead + p.take * g;
    return w - rate * (ahead + g);
  }
};

// HeLoCo (Al Asif et al. 2026): `keep2` and `take2` correct the gradient of one tensor, and `take`
// is 1 - momentum.
struct HeLoCo {
  static __device__ __forceinline__ float step(float w, float g, float& m, float&, float rate,
                                               const Hyper& p) {
    g = p.keep2 * g + p.take2 * m;
    m = p.keep * m + p.take * g;
    return w - rate * (g + p.keep * m);
  }
};

// Delay compensation (Zheng et al. 2017): `old` is the weight that the gradient was computed at.
struct DcAsgd {
  static __device__ __forceinline__ float step(float w, float g, float& old, float&, float rate,
                                               const Hyper& p) {
    g = g + p.strength * (g * g) * (w - old);
    return old = w - rate * g;
  }
};

struct DcAsgdAdaptive {
  static __device__ __forceinline__ float step(float w, float g, float& old, float& ms, float rate,
                                               const Hyper& p) {
    ms = p.keep * ms + p.take * (g * g);
    g = g + p.strength / sqrtf(ms + p.delta) * (g * g) * (w - old);
    return old = w - rate * g;
  }
};

// Arguments that all rules share.
struct Arena {
  const float *w, *g;
  float *s, *t, *out;  // two slots, null where the rule has fewer
  const u16* groups;
  const Multipliers* multipliers;
  const Hyper* hyper;
  const Verdict* verdict;
  i64 n;
};

__device__ __forceinline__ Place place(const Arena& a, const Hyper& p, i64 i) {
  Multipliers m = a.multipliers[a.groups ? a.groups[i / 64] : 0];
  return {p.rate * m.rate, p.decay * m.decay, a.verdict ? a.verdict->scale : 1.0f, p.l1 != 0};
}

template <class Rule, int SLOTS>
__device__ __forceinline__ void update(Arena a) {
  if (a.verdict && a.verdict->skip) {
    if (a.out != a.w)
      for (GRID_STRIDE(i, a.n)) a.out[i] = a.w[i];
    return;
  }
  Hyper p = *a.hyper;
  float none = 0.0f;
  float4 s = {}, t = {};
  for (GRID_STRIDE(i, a.n / 4)) {
    Place at = place(a, p, 4 * i);
    float4 w = ((const float4*)a.w)[i], g = ((const float4*)a.g)[i];
    if (SLOTS > 0) s = ((const float4*)a.s)[i];
    if (SLOTS > 1) t = ((const float4*)a.t)[i];
    w.x = Rule::step(w.x, decayed(g.x, w.x, at), s.x, t.x, at.rate, p);
    w.y = Rule::step(w.y, decayed(g.y, w.y, at), s.y, t.y, at.rate, p);
    w.z = Rule::step(w.z, decayed(g.z, w.z, at), s.z, t.z, at.rate, p);
    w.w = Rule::step(w.w, decayed(g.w, w.w, at), s.w, t.w, at.rate, p);
    ((float4*)a.out)[i] = w;
    if (SLOTS > 0) ((float4*)a.s)[i] = s;
    if (SLOTS > 1) ((float4*)a.t)[i] = t;
  }
  i64 last = a.n / 4 * 4 + first_index();
  if (last >= a.n) return;
  Place at = place(a, p, last);
  float& first = SLOTS > 0 ? a.s[last] : none;
  float& second = SLOTS > 1 ? a.t[last] : none;
  float w = a.w[last];
  a.out[last] = Rule::step(w, decayed(a.g[last], w, at), first, second, at.rate, p);
}

extern "C" __global__ void __launch_bounds__(256)
    update_sgd(const float* w, const float* g, float* out, const u16* groups,
               const Multipliers* multipliers, const Hyper* hyper, const Verdict* verdict, i64 n) {
  update<Sgd, 0>({w, g, 0, 0, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_momentum(const float* w, const float* g, float* history, float* out, const u16* groups,
                    const Multipliers* multipliers, const Hyper* hyper, const Verdict* verdict,
                    i64 n) {
  update<Momentum, 1>({w, g, history, 0, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_nesterov(const float* w, const float* g, float* history, float* out, const u16* groups,
                    const Multipliers* multipliers, const Hyper* hyper, const Verdict* verdict,
                    i64 n) {
  update<Nesterov, 1>({w, g, history, 0, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_adagrad(const float* w, const float* g, float* square_sum, float* out, const u16* groups,
                   const Multipliers* multipliers, const Hyper* hyper, const Verdict* verdict,
                   i64 n) {
  update<Adagrad, 1>({w, g, square_sum, 0, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_rmsprop(const float* w, const float* g, float* square_mean, float* out,
                   const u16* groups, const Multipliers* multipliers, const Hyper* hyper,
                   const Verdict* verdict, i64 n) {
  update<RmsProp, 1>({w, g, square_mean, 0, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_adadelta(const float* w, const float* g, float* square_mean, float* step_mean,
                    float* out, const u16* groups, const Multipliers* multipliers,
                    const Hyper* hyper, const Verdict* verdict, i64 n) {
  update<AdaDelta, 2>({w, g, square_mean, step_mean, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_adam(const float* w, const float* g, float* mean, float* square_mean, float* out,
                const u16* groups, const Multipliers* multipliers, const Hyper* hyper,
                const Verdict* verdict, i64 n) {
  update<Adam, 2>({w, g, mean, square_mean, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_adamw(const float* w, const float* g, float* mean, float* square_mean, float* out,
                 const u16* groups, const Multipliers* multipliers, const Hyper* hyper,
                 const Verdict* verdict, i64 n) {
  update<AdamW, 2>({w, g, mean, square_mean, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_delayed_nesterov(const float* w, const float* g, float* momentum, float* sum, float* out,
                            const u16* groups, const Multipliers* multipliers, const Hyper* hyper,
                            const Verdict* verdict, i64 n) {
  update<DelayedNesterov, 2>({w, g, momentum, sum, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_mla(const float* w, const float* g, float* momentum, float* out, const u16* groups,
               const Multipliers* multipliers, const Hyper* hyper, const Verdict* verdict, i64 n) {
  update<Mla, 1>({w, g, momentum, 0, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_heloco(const float* w, const float* g, float* momentum, float* out, const u16* groups,
                  const Multipliers* multipliers, const Hyper* hyper, const Verdict* verdict,
                  i64 n) {
  update<HeLoCo, 1>({w, g, momentum, 0, out, groups, multipliers, hyper, verdict, n});
}

// `backup` becomes the new weights: the worker that pushed pulls them next.
extern "C" __global__ void __launch_bounds__(256)
    update_dc_asgd(const float* w, const float* g, float* backup, float* out, const u16* groups,
                   const Multipliers* multipliers, const Hyper* hyper, const Verdict* verdict,
                   i64 n) {
  update<DcAsgd, 1>({w, g, backup, 0, out, groups, multipliers, hyper, verdict, n});
}

extern "C" __global__ void __launch_bounds__(256)
    update_dc_asgd_adaptive(const float* w, const float* g, float* backup, float* square_mean,
                            float* out, const u16* groups, const Multipliers* multipliers,
                            const Hyper* hyper, const Verdict* verdict, i64 n) {
  update<DcAsgdAdaptive, 2>({w, g, backup, square_mean, out, groups, multipliers, hyper, verdict, n});
}

// Elastic averaging (Zhang et al. 2015): x and the centre are drawn together by the same amount.
extern "C" __global__ void __launch_bounds__(256)
    elastic_average(float* x, float* center, const Hyper* hyper, i64 n) {
  float alpha = hyper->strength;
  for (GRID_STRIDE(i, n / 4)) {
    float4 a = ((const float4*)x)[i], b = ((const float4*)center)[i];
    float4 d = {alpha * (a.x - b.x), alpha * (a.y - b.y), alpha * (a.z - b.z), alpha * (a.w - b.w)};
    ((float4*)x)[i] = {a.x - d.x, a.y - d.y, a.z - d.z, a.w - d.w};
    ((float4*)center)[i] = {b.x + d.x, b.y + d.y, b.z + d.z, b.w + d.w};
  }
  i64 last = n / 4 * 4 + first_index();
  if (last >= n) return;
  float d = alpha * (x[last] - center[last]);
  x[last] -= d;
  center[last] += d;
}

// x /= by: the mean of gradients that were added up.
extern "C" __global__ void divide(float* x, float by, i64 n) {
  for (GRID_STRIDE(i, n)) x[i] = x[i] / by;
}
