// The largest numbers of a row, found without sorting it.
#pragma once

#include <functional>

#include "lanes.h"

namespace {

constexpr int64_t BLOCK = 64;  // numbers of a row whose largest is known: most blocks need no second look

inline int64_t blocks_of(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

// Writes the largest number of each block; returns the largest of all.
template <class T>
T highest(const T* x, int64_t size, T* of_block) {
  T most = -std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < size; i += BLOCK) {
    T& here = of_block[i / BLOCK];
    if (i + BLOCK <= size) {
      V<T> lanes = at(x + i);
      for (int64_t j = W<T>; j < BLOCK; j += W<T>) lanes = larger<T>(lanes, at(x + i + j));
      here = largest_of<T>(lanes);
    } else {
      here = *std::max_element(x + i, x + size);
    }
    most = std::max(most, here);
  }
  return most;
}

// Numbers of a row with their places in it, in its order.
template <class T>
struct Found {
  int32_t* ids;
  T* values;
  int64_t count;
};

// Finds the numbers that reach a bound.
template <class T>
void collect(const T* x, int64_t size, const T* of_block, T bound, Found<T>& found) {
  int64_t count = 0;
  for (int64_t i = 0; i < size; i += BLOCK) {
    if (!(of_block[i / BLOCK] >= bound)) continue;
    for (int64_t j = i; j < std::min(i + BLOCK, size); j++) {
      found.ids[count] = int32_t(j), found.values[count] = x[j];
      count += x[j] >= bound;
    }
  }
  found.count = count;
}

// A number that at least so many of the row reach, not much below the last of them.
template <class T>
T reached_by(int64_t count, const T* of_block, int64_t blocks, T* scratch) {
  if (count > blocks) return -std::numeric_limits<T>::infinity();
  std::copy(of_block, of_block + blocks, scratch);
  std::nth_element(scratch, scratch + count - 1, scratch + blocks, std::greater<T>());
  return scratch[count - 1];
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// An integer that is larger for a larger number.
template <class T>
inline auto key_of(T x) {
  const auto bits = bits_of(x + T(0));  // -0 is 0
  using Key = std::remove_const_t<decltype(bits)>;
  constexpr Key SIGN = Key(1) << (8 * sizeof(Key) - 1);
  return bits & SIGN ? Key(~bits) : Key(bits | SIGN);
}

// Returns the smallest of the values for which the masses of all larger ones sum to less than `needed`; without masses
// each counts 1. Radix selection: sums by leading bits, then goes on with the values in the bin that decides, which are
// moved to the front. Values are never sorted.
template <class T>
T last_needed(T* values, double* masses, int64_t count, double needed) {
  constexpr int DIGIT = 11, BINS = 1 << DIGIT, BITS = 8 * sizeof(T);
  double sums[BINS], larger_ones = 0;
  for (int shift = BITS - DIGIT; count > 1 && shift > -DIGIT; shift -= DIGIT) {
    const auto bin_of = [right = std::max(shift, 0)](T x) { return int(key_of(x) >> right & (BINS - 1)); };
    std::fill(sums, sums + BINS, 0.0);
    for (int64_t i = 0; i < count; i++) sums[bin_of(values[i])] += masses ? masses[i] : 1.0;
    int bin = -1;
    double before = 0;  // sums may round to less than `needed`: then the lowest bin with any mass decides
    for (int b = BINS - 1; b >= 0 && larger_ones < needed; b--)
      if (sums[b] > 0) bin = b, before = larger_ones, larger_ones += sums[b];
    larger_ones = before;
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++)
      if (bin_of(values[i]) == bin) {
        values[left] = values[i];
        if (masses) masses[left] = masses[i];
        left++;
      }
    count = left;
  }
  return count > 0 ? values[0] : -std::numeric_limits<T>::infinity();
}

}  // namespace
