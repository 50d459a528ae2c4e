// CUDA C as g++ sees it: the words of the language, on top of the fibers of fibers.cc.
//
// This text stands before a kernel source, in one translation unit. A __shared__ variable becomes a
// static in a section of its own, which the runtime poisons before every block: the section
// attribute is ignored in templates, so __shared__ belongs in a plain function. Everything that one
// thread may wait for (barriers, warp collectives) is a call into the runtime, which switches to
// another thread. What is not declared here is not available to kernels.
#pragma once
#define EMULATED 1

#define __global__ __attribute__((used, noinline))
#define __device__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("emulated_shared")))
#define DYNAMIC_SHARED(type, name) type* name = (type*)emulated_dynamic_shared()

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

extern "C" {
extern uint3 emulated_thread;  // of the running thread
extern uint3 emulated_block;
extern dim3 emulated_block_dim, emulated_grid_dim;
void emulated_barrier(int line, int vote, int* result);
typedef void (*EmulatedExchange)(void** lanes);  // 32 pointers, null for lanes that take no part
void emulated_collective(unsigned mask, EmulatedExchange exchange, void* mine, int line);
void* emulated_dynamic_shared();
void emulated_copy_async(void* to, const void* from, int width, int bytes);
void emulated_copy_async_commit();
void emulated_copy_async_wait(int groups);
void emulated_fence();
[[noreturn]] void emulated_fail(const char* what);
void emulated_atomic(void* address, unsigned bytes);
}

#define threadIdx emulated_thread
#define blockIdx emulated_block
#define blockDim emulated_block_dim
#define gridDim emulated_grid_dim
#define warpSize 32

// Barriers and votes.
inline int emulated_vote(int line, int predicate, int kind) {
  int counts[2];  // how many said yes, how many there are
  emulated_barrier(line, predicate != 0, counts);
  return kind == 0 ? counts[0] : kind == 1 ? counts[0] == counts[1] : counts[0] > 0;
}
#define __syncthreads() emulated_barrier(__LINE__, 0, 0)
#define __syncthreads_count(p) emulated_vote(__LINE__, p, 0)
#define __syncthreads_and(p) emulated_vote(__LINE__, p, 1)
#define __syncthreads_or(p) emulated_vote(__LINE__, p, 2)
#define __threadfence() emulated_fence()
#define __threadfence_block() ((void)0)

// Vector types, aligned as on the GPU.
#define EMULATED_VECTOR(type, name)                                                            \
  struct __attribute__((aligned(2 * sizeof(type)))) name##2 { type x, y; };                    \
  struct __attribute__((aligned(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)))) name##4 {     \
    type x, y, z, w;                                                                           \
  };                                                                                           \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                             \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTOR(float, float)
EMULATED_VECTOR(int, int)
EMULATED_VECTOR(unsigned, uint)
EMULATED_VECTOR(unsigned char, uchar)
EMULATED_VECTOR(unsigned short, ushort)
EMULATED_VECTOR(long long, longlong)

// Bits.
template <class To, class From>
inline To emulated_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  return __builtin_bit_cast(To, value);
}
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)(((unsigned long long)a * b) >> 32);
}

// Arithmetic. Denormals are flushed by the processor, as -ftz=true does it on the GPU.
#define EMULATED_UNARY(name) \
  inline float name##f(float x) { return __builtin_##name##f(x); }
EMULATED_UNARY(exp) EMULATED_UNARY(log) EMULATED_UNARY(log1p) EMULATED_UNARY(expm1)
EMULATED_UNARY(exp2) EMULATED_UNARY(log2) EMULATED_UNARY(sqrt) EMULATED_UNARY(fabs)
EMULATED_UNARY(floor) EMULATED_UNARY(ceil) EMULATED_UNARY(rint) EMULATED_UNARY(trunc)
EMULATED_UNARY(tanh) EMULATED_UNARY(sin) EMULATED_UNARY(cos)
inline float powf(float x, float y) { return __builtin_powf(x, y); }
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fminf(float x, float y) { return __builtin_fminf(x, y); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float __expf(float x) { return __builtin_expf(x); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
inline int abs(int x) { return x < 0 ? -x : x; }

// Conversions saturate on the GPU, and NaN becomes 0; in C++ both are undefined.
inline int emulated_to_int(float x) {
  if (!(x == x)) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x <= -2147483648.0f ? -2147483647 - 1 : (int)x;
}
inline unsigned emulated_to_uint(float x) {
  if (!(x > 0.0f)) return 0;
  return x >= 4294967296.0f ? 4294967295u : (unsigned)x;
}
inline int __float2int_rn(float x) { return emulated_to_int(__builtin_rintf(x)); }
inline int __float2int_rz(float x) { return emulated_to_int(x); }
inline int __float2int_rd(float x) { return emulated_to_int(__builtin_floorf(x)); }
inline unsigned __float2uint_rn(float x) { return emulated_to_uint(__builtin_rintf(x)); }
inline unsigned __float2uint_rz(float x) { return emulated_to_uint(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }

// Warp shuffles: each lane gives its value and names the lane that it reads.
template <class T>
struct EmulatedShuffle {
  T value;
  int source;
  T result;
  static void exchange(void** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      if (!lanes[lane]) continue;
      auto* mine = (EmulatedShuffle*)lanes[lane];
      auto* heard = (EmulatedShuffle*)lanes[mine->source & 31];
      if (heard) mine->result = heard->value;
      else __builtin_memset(&mine->result, 0xff, sizeof(T));  // undefined on the GPU: poison
    }
  }
};
inline int emulated_lane() {
  return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31);
}
template <class T>
inline T emulated_shuffle(unsigned mask, T value, int source, int line) {
  EmulatedShuffle<T> mine{value, source, value};
  emulated_collective(mask, &EmulatedShuffle<T>::exchange, &mine, line);
  return mine.result;
}
inline int emulated_down(int delta, int width = 32) {
  int lane = emulated_lane();
  return (lane & (width - 1)) + delta < width ? lane + delta : lane;
}
inline int emulated_up(int delta, int width = 32) {
  int lane = emulated_lane();
  return (lane & (width - 1)) >= delta ? lane - delta : lane;
}
inline int emulated_exchange(int bits, int width = 32) {
  int lane = emulated_lane(), other = lane ^ bits;
  return other / width <= lane / width ? other : lane;
}
inline int emulated_from(int source, int width = 32) {
  int lane = emulated_lane();
  return (lane & ~(width - 1)) | (source & (width - 1));
}
#define __shfl_sync(mask, value, source, ...) \
  emulated_shuffle(mask, value, emulated_from(source __VA_OPT__(, ) __VA_ARGS__), __LINE__)
#define __shfl_xor_sync(mask, value, bits, ...) \
  emulated_shuffle(mask, value, emulated_exchange(bits __VA_OPT__(, ) __VA_ARGS__), __LINE__)
#define __shfl_down_sync(mask, value, delta, ...) \
  emulated_shuffle(mask, value, emulated_down(delta __VA_OPT__(, ) __VA_ARGS__), __LINE__)
#define __shfl_up_sync(mask, value, delta, ...) \
  emulated_shuffle(mask, value, emulated_up(delta __VA_OPT__(, ) __VA_ARGS__), __LINE__)

struct EmulatedBallot {
  int predicate;
  unsigned votes, present;
  static void exchange(void** lanes) {
    unsigned votes = 0, present = 0;
    for (int lane = 0; lane < 32; ++lane)
      if (lanes[lane]) {
        present |= 1u << lane;
        if (((EmulatedBallot*)lanes[lane])->predicate) votes |= 1u << lane;
      }
    for (int lane = 0; lane < 32; ++lane)
      if (lanes[lane]) {
        ((EmulatedBallot*)lanes[lane])->votes = votes;
        ((EmulatedBallot*)lanes[lane])->present = present;
      }
  }
};
inline EmulatedBallot emulated_ballot(unsigned mask, int predicate, int line) {
  EmulatedBallot mine{predicate, 0, 0};
  emulated_collective(mask, &EmulatedBallot::exchange, &mine, line);
  return mine;
}
#define __ballot_sync(mask, p) emulated_ballot(mask, p, __LINE__).votes
#define __any_sync(mask, p) (emulated_ballot(mask, p, __LINE__).votes != 0)
inline int emulated_all(EmulatedBallot b) { return b.votes == b.present; }
#define __all_sync(mask, p) emulated_all(emulated_ballot(mask, p, __LINE__))
inline void emulated_syncwarp(int line, unsigned mask = 0xffffffffu) {
  emulated_ballot(mask, 0, line);
}
#define __syncwarp(...) emulated_syncwarp(__LINE__ __VA_OPT__(, ) __VA_ARGS__)

// Integer atomics. There are none on floats: sums run in a fixed order here.
#define EMULATED_UNSEEN __attribute__((no_sanitize("thread", "signed-integer-overflow")))
#define EMULATED_ATOMIC(name, type, expression)            \
  EMULATED_UNSEEN inline type name(type* address, type value) {            \
    emulated_atomic(address, sizeof(type));                \
    type old = *address;                                   \
    *address = (type)(expression);                         \
    return old;                                            \
  }
#define EMULATED_ATOMICS(type)                                         \
  EMULATED_ATOMIC(atomicAdd, type, (unsigned long long)old + value)    \
  EMULATED_ATOMIC(atomicMax, type, old > value ? old : value)          \
  EMULATED_ATOMIC(atomicMin, type, old < value ? old : value)          \
  EMULATED_ATOMIC(atomicExch, type, value)                             \
  EMULATED_ATOMIC(atomicOr, type, old | value)                         \
  EMULATED_ATOMIC(atomicAnd, type, old & value)                        \
  EMULATED_UNSEEN inline type atomicCAS(type* address, type expected, type value) {    \
    emulated_atomic(address, sizeof(type));                            \
    type old = *address;                                               \
    if (old == expected) *address = value;                             \
    return old;                                                        \
  }
EMULATED_ATOMICS(int)
EMULATED_ATOMICS(unsigned)
EMULATED_ATOMICS(unsigned long long)

// Tensor cores. A tf32 operand's low 13 bits are not looked at; products are exact and their sum
// is rounded once before it joins the accumulator, which is at least as good as the hardware.
inline unsigned emulated_to_tf32(float x) {
  unsigned bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  return (bits + 0x1000u) & ~0x1fffu;
}
inline unsigned emulated_bf16(float x) {
  unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}
inline unsigned emulated_to_bf16_pair(float low, float high) {
  return emulated_bf16(low) | emulated_bf16(high) << 16;
}
struct EmulatedMma {
  float* d;
  const unsigned *a, *b;
  template <int K>
  static double left(void** lanes, int row, int k) {
    // Which lane holds A[row][k], and in which register.
    if (K == 8) {
      auto* lane = (EmulatedMma*)lanes[(row & 7) * 4 + (k & 3)];
      return __uint_as_float(lane->a[(row >> 3) + 2 * (k >> 2)] & ~0x1fffu);
    }
    auto* lane = (EmulatedMma*)lanes[(row & 7) * 4 + ((k & 7) >> 1)];
    unsigned pair = lane->a[(row >> 3) + 2 * (k >> 3)];
    return __uint_as_float((k & 1 ? pair >> 16 : pair) << 16);
  }
  template <int K>
  static double right(void** lanes, int k, int column) {
    if (K == 8)
      return __uint_as_float(((EmulatedMma*)lanes[column * 4 + (k & 3)])->b[k >> 2] & ~0x1fffu);
    unsigned pair = ((EmulatedMma*)lanes[column * 4 + ((k & 7) >> 1)])->b[k >> 3];
    return __uint_as_float((k & 1 ? pair >> 16 : pair) << 16);
  }
  template <int K>
  static void exchange(void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      if (!lanes[lane]) emulated_fail("mma without all 32 lanes");
    double a[16][K], b[K][8];
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < K; ++k) a[row][k] = left<K>(lanes, row, k);
    for (int k = 0; k < K; ++k)
      for (int column = 0; column < 8; ++column) b[k][column] = right<K>(lanes, k, column);
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 8; ++column) {
        double sum = 0;
        for (int k = 0; k < K; ++k) sum += a[row][k] * b[k][column];
        auto* lane = (EmulatedMma*)lanes[(row & 7) * 4 + column / 2];
        float& d = lane->d[(row >> 3) * 2 + column % 2];
        d = (float)(d + sum);
      }
  }
};
inline void emulated_mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                              int line) {
  EmulatedMma mine{d, a, b};
  emulated_collective(0xffffffffu, &EmulatedMma::exchange<8>, &mine, line);
}
inline void emulated_mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                              int line) {
  EmulatedMma mine{d, a, b};
  emulated_collective(0xffffffffu, &EmulatedMma::exchange<16>, &mine, line);
}

// The door the loader uses: call a kernel with the arguments' addresses, and say its types.
template <class T>
constexpr char emulated_code() {
  if constexpr (__is_class(T)) return 's';
  else if constexpr (T(0.5) != T(0)) return 'f';
  else return T(-1) < T(0) ? 'i' : 'u';
}
template <class T>
struct EmulatedParameter {
  static void write(char*& out) {
    *out++ = emulated_code<T>();
    size(out);
  }
  static void size(char*& out) {
    int bytes = sizeof(T);
    if (bytes > 9) *out++ = (char)('0' + bytes / 10);
    *out++ = (char)('0' + bytes % 10);
  }
};
template <class T>
struct EmulatedParameter<T*> {
  static void write(char*& out) {
    *out++ = '*';
    EmulatedParameter<T>::write(out);
  }
};
template <class T>
struct EmulatedParameter<const T*> {
  static void write(char*& out) {
    *out++ = '?';  // a pointer that is only read through
    EmulatedParameter<T>::write(out);
  }
};
template <class... A>
inline void emulated_describe(void (*)(A...), char* out) {
  ((EmulatedParameter<A>::write(out), *out++ = ' '), ...);
  *out = 0;
}
template <unsigned... I>
struct EmulatedIndices {};
template <class... A, unsigned... I>
EMULATED_UNSEEN inline void emulated_call(void (*kernel)(A...), void** arguments, EmulatedIndices<I...>) {
  kernel(*(A*)arguments[I]...);
}
template <class... A>
inline void emulated_call(void (*kernel)(A...), void** arguments) {
  emulated_call(kernel, arguments, EmulatedIndices<__integer_pack(sizeof...(A))...>());
}
#define EMULATED_KERNEL(name)                                                          \
  extern "C" void emulated_call_##name(void** arguments) { emulated_call(&name, arguments); } \
  extern "C" void emulated_describe_##name(char* out) { emulated_describe(&name, out); }
extern "C" __attribute__((weak, visibility("hidden"))) char __start_emulated_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_emulated_shared[];
extern "C" void emulated_shared_range(char** range) {
  range[0] = __start_emulated_shared;
  range[1] = __stop_emulated_shared;
}
extern "C" char __attribute__((visibility("hidden"))) __ehdr_start[];
extern "C" unsigned long long emulated_base() { return (unsigned long long)__ehdr_start; }
