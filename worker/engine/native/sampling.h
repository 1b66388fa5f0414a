// Draws of tokens: temperature, top_k, top_p, min_p, then the inverse of the distribution function over the vocabulary.
#pragma once

#include <memory>

#include "weights.h"

namespace {

template <class T>
struct Draw {
  const T* logits;  // [rows, size]
  int64_t row, rows, size;
  const double *temperature, *top_p;  // [rows], as are the others
  const int64_t* top_k;
  const double *min_p, *uniform;
  int64_t* out;
};

// What a thread needs for a row.
template <class T>
struct RowScratch {
  std::unique_ptr<T[]> highest, values, some;  // of each block; of tokens that may be drawn, twice
  std::unique_ptr<double[]> sums, weights, masses;
  std::unique_ptr<int32_t[]> ids;

  explicit RowScratch(int64_t size)
      : highest(new T[blocks_of(size)]),
        values(new T[size + W<double>]),
        some(new T[size + W<double>]),
        sums(new double[blocks_of(size)]),
        weights(new double[size + W<double>]),
        masses(new double[size]),
        ids(new int32_t[size]) {}
};

// Where the uniform number falls. Rounding must not lift it to the total: no token lies there.
inline double target_of(double uniform, double total) { return std::min(uniform * total, std::nextafter(total, 0.0)); }

// The place of the weight at which sums, from `before` on, exceed the target; the last weight there is, if none does.
inline int64_t exceeding(double target, double before, const double* weights, int64_t count) {
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    if (!(weights[i] > 0)) continue;
    last = i, before += weights[i];
    if (before > target) break;
  }
  return last;
}

template <class T>
int64_t draw_from_all(const T* x, int64_t size, Scale s, double uniform, double* sums) {
  const double target = target_of(uniform, sum_weights(x, size, s, sums));
  const int64_t blocks = blocks_of(size);
  double before = 0;
  int64_t block = 0;
  while (block + 1 < blocks && before + sums[block] <= target) before += sums[block++];
  double weights[BLOCK + W<double>];
  const int64_t first = block * BLOCK, count = std::min(BLOCK, size - first);
  weigh(x + first, count, s, weights);
  return first + exceeding(target, before, weights, count);
}

// Returns a logit that every token with at least this weight reaches: lower by more than rounding could hide.
template <class T>
T logit_below(double weight, Scale s) {
  const double logit = s.high + std::log(weight) / s.inverse;
  return std::max(T(logit - 1e-5 * (1 + std::abs(logit))), std::numeric_limits<T>::lowest());
}

template <class T>
int64_t draw_truncated(const Draw<T>& d, int64_t r, const T* x, Scale s, RowScratch<T>& scratch) {
  // Masked tokens, of -inf, may be most of them: no bound lets them in.
  constexpr T lowest = std::numeric_limits<T>::lowest();
  const T* of_block = scratch.highest.get();
  T *const values = scratch.values.get(), *const some = scratch.some.get();
  double *const weights = scratch.weights.get(), *const masses = scratch.masses.get();
  Found<T> found{scratch.ids.get(), values, 0};
  T threshold = lowest;
  const bool by_k = d.top_k[r] > 0 && d.top_k[r] < d.size, by_p = d.top_p[r] < 1;
  double total = 0;
  if (by_k) {
    const T bound = std::max(reached_by(d.top_k[r], of_block, blocks_of(d.size), some), lowest);
    collect(x, d.size, of_block, bound, found);
    std::copy(values, values + found.count, some);
    threshold = std::max(last_needed<T>(some, nullptr, found.count, double(d.top_k[r])), lowest);
    collect(x, d.size, of_block, threshold, found);
    weigh(values, found.count, s, weights);
    for (int64_t i = 0; by_p && i < found.count; i++) total += weights[i];
  } else {
    // All tokens of less weight than this are too few to reach from top_p to 1.
    double least = 0;
    if (by_p) total = sum_weights(x, d.size, s, scratch.sums.get()), least = (1 - d.top_p[r]) * total / d.size;
    collect(x, d.size, of_block, logit_below<T>(std::max(least, d.min_p[r]), s), found);
    weigh(values, found.count, s, weights);
  }
  if (by_p) {
    std::copy(values, values + found.count, some), std::copy(weights, weights + found.count, masses);
    threshold = std::max(threshold, last_needed(some, masses, found.count, d.top_p[r] * total));
  }
  double kept = 0;
  for (int64_t i = 0; i < found.count; i++) {
    if (!(values[i] >= threshold && weights[i] >= d.min_p[r])) weights[i] = 0;
    kept += weights[i];
  }
  const int64_t place = exceeding(target_of(d.uniform[r], kept), 0, weights, found.count);
  return found.count ? found.ids[place] : 0;
}

// A row's token depends on nothing but the row, so threads share rows as they come.
template <class T>
void draw(const Draw<T>& d, int threads) {
#pragma omp parallel num_threads(threads) if (d.rows > 1)
  {
    RowScratch<T> scratch(d.size);
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < d.rows; r++) {
      const T* x = d.logits + r * d.row;
      const Scale s{double(highest(x, d.size, scratch.highest.get())), 1 / d.temperature[r]};
      const bool whole = (d.top_k[r] <= 0 || d.top_k[r] >= d.size) && d.top_p[r] >= 1 && d.min_p[r] <= 0;
      d.out[r] = whole ? draw_from_all(x, d.size, s, d.uniform[r], scratch.sums.get())
                       : draw_truncated(d, r, x, s, scratch);
    }
  }
}

}  // namespace
