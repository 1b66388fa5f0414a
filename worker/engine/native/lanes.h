// Vectors as wide as the processor's, and what is done lane by lane.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 8, NV = 3;  // 24 sums, 3 of the panel, 1 broadcast: of 32 registers
#elif defined(__AVX2__)
constexpr int BYTES = 32, ROWS = 4, NV = 3;  // 12 + 3 + 1: of 16 registers
#else
constexpr int BYTES = 16, ROWS = 8, NV = 3;
#endif
constexpr int64_t K_BLOCK = 768;  // rows of a panel that stay in the level-1 and 2 caches
// Rows of a panel of integers that are floats at a time, multiples of 8: for few input rows as many as stay in the
// level-1 cache, for many more, since each block adds to the sums of all.
constexpr int64_t INTEGER_BLOCK = 128, LARGE_INTEGER_BLOCK = 256, MANY_ROWS = 32;
constexpr int64_t A_BYTES = 512 << 10;  // input rows that stay in the level-2 cache
constexpr int64_t KEY_BLOCK = 96;

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float V __attribute__((vector_size(BYTES), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(BYTES)));
  typedef int32_t Int;
};
template <>
struct Lanes<double> {
  typedef double V __attribute__((vector_size(BYTES), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(BYTES)));
  typedef int64_t Int;
};
template <class T>
using V = typename Lanes<T>::V;
template <class T>
using I = typename Lanes<T>::I;
template <class T>
constexpr int W = BYTES / sizeof(T);
template <class T>
constexpr int WIDTH = NV * W<T>;  // columns of a panel, queries of a tile

template <class T>
inline V<T> all(T x) {
  return x - V<T>{};
}
template <class T>
inline V<T>& at(T* p) {
  return *reinterpret_cast<V<T>*>(p);
}
template <class T>
inline V<T> at(const T* p) {
  return *reinterpret_cast<const V<T>*>(p);
}
template <class T>
inline V<T> larger(V<T> a, V<T> b) {
  return a > b ? a : b;
}
#if defined(__AVX512F__)  // one instruction, which compilers do not find
template <>
inline V<float> larger<float>(V<float> a, V<float> b) {
  return _mm512_max_ps(a, b);
}
#endif

// e^x, with x > 88 taken as 88 and 0 far below. Range reduction and polynomial of Cephes; within 2 ulp.
inline V<float> exponential(V<float> x) {
  const V<float> low = all<float>(-87.3f), high = all<float>(88.f);
#if defined(__AVX512F__)
  x = V<float>(_mm512_min_ps(high, x));
  const V<float> n = V<float>(_mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT));
#else
  const auto vanishes = x < low;
  x = vanishes ? low : x > high ? high : x;
  const V<float> shift = all<float>(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const V<float> n = (x * 1.44269504f + shift) - shift;
#endif
  const V<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r + 1.f;
  p = p * r + 1.f;
#if defined(__AVX512F__)
  return V<float>(_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, n));
#else
  const I<float> bits = (__builtin_convertvector(n, I<float>) + 127) << 23;
  V<float> power;
  std::memcpy(&power, &bits, sizeof power);
  return vanishes ? all<float>(0.f) : p * power;
#endif
}
inline V<double> exponential(V<double> x) {
  for (int i = 0; i < W<double>; i++) x[i] = std::exp(x[i]);
  return x;
}

// softcap * tanh(x / softcap), as 1 - 2 / (e^2x + 1).
template <class T>
inline V<T> capped(V<T> x, T softcap) {
  return (T(1) - T(2) / (exponential(larger<T>(x * (2 / softcap), all<T>(-40))) + T(1))) * softcap;
}

// Combines the lanes of a vector by f, in halves.
template <class T, int N = W<T> / 2, class F>
inline T reduced(V<T> x, F f) {
  if constexpr (N == 0) {
    return x[0];
  } else {
    constexpr auto order = [] {
      std::array<typename Lanes<T>::Int, W<T>> from{};
      for (int i = 0; i < W<T>; i++) from[i] = (i + N) % W<T>;
      return from;
    }();
    I<T> from;
    std::memcpy(&from, order.data(), sizeof from);
    return reduced<T, N / 2>(f(x, V<T>(__builtin_shuffle(x, from))), f);
  }
}
template <class T>
inline T sum_of(V<T> x) {
  return reduced<T>(x, [](V<T> a, V<T> b) { return a + b; });
}
template <class T>
inline T largest_of(V<T> x) {
  return reduced<T>(x, [](V<T> a, V<T> b) { return larger<T>(a, b); });
}

// Transposes W vectors of W lanes: swaps the off-diagonal quarters, then within quarters (Eklundh 1972).
template <class T, int N = W<T> / 2>
inline void transpose(V<T> (&rows)[W<T>]) {
  if constexpr (N > 0) {
    using Order = std::array<typename Lanes<T>::Int, W<T>>;
    constexpr auto orders = [] {
      std::array<Order, 2> both{};
      for (int i = 0; i < W<T>; i++) both[0][i] = i & N ? W<T> + i - N : i, both[1][i] = i & N ? W<T> + i : i + N;
      return both;
    }();
    I<T> upper, lower;
    std::memcpy(&upper, orders[0].data(), sizeof upper), std::memcpy(&lower, orders[1].data(), sizeof lower);
    for (int i = 0; i < W<T>; i++)
      if (!(i & N)) {
        const V<T> a = rows[i], b = rows[i + N];
        rows[i] = __builtin_shuffle(a, b, upper), rows[i + N] = __builtin_shuffle(a, b, lower);
      }
    transpose<T, N / 2>(rows);
  }
}

// Asks for memory ahead of its use, where the processor does not foresee it: its own prefetching stops at pages.
template <class T>
inline void fetch(const T* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + i, 0, 3);
}

}  // namespace
