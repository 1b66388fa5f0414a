// Weights e^((logit - highest) / temperature) in double, whatever the logits are.
#pragma once

#include "ranking.h"

namespace {

// e^x for x <= 0, and 0 below -708; within 1e-14. Taylor's polynomial after the usual range reduction.
inline V<double> power_of_e(V<double> x) {
  const V<double> low = all(-708.0), shift = all(0x1.8p52);  // adding it rounds, and leaves the integer in the low bits
  const auto vanishes = x < low;
  x = vanishes ? low : x;
  const V<double> shifted = x * 1.4426950408889634 + shift, n = shifted - shift;
  const V<double> r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  V<double> p = r * (1.0 / 39916800) + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  I<double> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  V<double> power;
  std::memcpy(&power, &bits, sizeof power);
  return vanishes ? V<double>{} : p * power;
}

inline V<double> doubles(const double* x) { return at(x); }
inline V<double> doubles(const float* x) {
  typedef float Half __attribute__((vector_size(BYTES / 2), aligned(4), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Half*>(x), V<double>);
}

struct Scale {
  double high, inverse;  // the highest logit, and 1 / temperature
};

// The weights of W<double> logits.
template <class T>
inline V<double> weights_at(const T* x, Scale s) {
  return power_of_e((doubles(x) - s.high) * s.inverse);
}
template <class T>
inline V<double> weights_at(const T* x, int64_t count, Scale s) {
  T some[W<double>];
  std::fill(std::copy(x, x + count, some), some + W<double>, -std::numeric_limits<T>::infinity());
  return weights_at(some, s);
}

// Writes the weights of `count` logits; there is room for W<double> more.
template <class T>
void weigh(const T* x, int64_t count, Scale s, double* weights) {
  int64_t i = 0;
  for (; i + W<double> <= count; i += W<double>) at(weights + i) = weights_at(x + i, s);
  if (i < count) at(weights + i) = weights_at(x + i, count - i, s);
}

// Writes the sum of each block's weights; returns the sum of all. What is added to what depends on the size alone.
template <class T>
double sum_weights(const T* x, int64_t size, Scale s, double* of_block) {
  double total = 0;
  for (int64_t i = 0; i < size; i += BLOCK) {
    const int64_t end = std::min(i + BLOCK, size);
    V<double> sum{};
    int64_t j = i;
    for (; j + W<double> <= end; j += W<double>) sum += weights_at(x + j, s);
    if (j < end) sum += weights_at(x + j, end - j, s);
    total += of_block[i / BLOCK] = sum_of<double>(sum);
  }
  return total;
}

}  // namespace
