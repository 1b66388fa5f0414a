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

// What is asked of one row.
template <class T>
struct Row {
  const T* x;
  int64_t size;
  Scale scale;
  double top_p, min_p, uniform;
  int64_t top_k;
};

// Masked tokens, of -inf, may be most of them: no bound lets them in.
template <class T>
constexpr T LOWEST = std::numeric_limits<T>::lowest();

// Finds the tokens that top_k keeps and weighs them; returns the last one's logit.
template <class T>
T find_top_k(const Row<T>& row, RowScratch<T>& scratch, Found<T>& found) {
  const T* of_block = scratch.highest.get();
  T* some = scratch.some.get();
  const T bound = reached_by(row.top_k, of_block, blocks_of(row.size), some);
  collect(row.x, row.size, of_block, std::max(bound, LOWEST<T>), found);
  std::copy(found.values, found.values + found.count, some);
  const T last = std::max(last_needed<T>(some, nullptr, found.count, double(row.top_k)), LOWEST<T>);
  collect(row.x, row.size, of_block, last, found);
  weigh(found.values, found.count, row.scale, scratch.weights.get());
  return last;
}

// Finds the tokens that top_p and min_p may keep and weighs them; returns the sum of all weights, if top_p needs it.
template <class T>
double find_heavy(const Row<T>& row, RowScratch<T>& scratch, Found<T>& found) {
  const double total = row.top_p < 1 ? sum_weights(row.x, row.size, row.scale, scratch.sums.get()) : 0;
  // All tokens of less weight than this are too few to reach from top_p to 1.
  const double least = (1 - row.top_p) * total / row.size;
  collect(row.x, row.size, scratch.highest.get(), logit_below<T>(std::max(least, row.min_p), row.scale), found);
  weigh(found.values, found.count, row.scale, scratch.weights.get());
  return total;
}

// Returns the last logit that top_p keeps of the tokens that were found.
template <class T>
T last_of_nucleus(const Row<T>& row, RowScratch<T>& scratch, const Found<T>& found, double total) {
  T* some = scratch.some.get();
  double *const weights = scratch.weights.get(), *const masses = scratch.masses.get();
  std::copy(found.values, found.values + found.count, some), std::copy(weights, weights + found.count, masses);
  return last_needed(some, masses, found.count, row.top_p * total);
}

template <class T>
int64_t draw_truncated(const Row<T>& row, RowScratch<T>& scratch) {
  Found<T> found{scratch.ids.get(), scratch.values.get(), 0};
  double* weights = scratch.weights.get();
  T threshold = LOWEST<T>;
  double total = 0, kept = 0;
  if (row.top_k > 0 && row.top_k < row.size) {
    threshold = find_top_k(row, scratch, found);
    for (int64_t i = 0; i < found.count; i++) total += weights[i];
  } else {
    total = find_heavy(row, scratch, found);
  }
  if (row.top_p < 1) threshold = std::max(threshold, last_of_nucleus(row, scratch, found, total));
  for (int64_t i = 0; i < found.count; i++) {
    if (!(found.values[i] >= threshold && weights[i] >= row.min_p)) weights[i] = 0;
    kept += weights[i];
  }
  const int64_t place = exceeding(target_of(row.uniform, kept), 0, weights, found.count);
  return found.count ? found.ids[place] : 0;
}

template <class T>
int64_t draw(const Row<T>& row, RowScratch<T>& scratch) {
  const bool whole = (row.top_k <= 0 || row.top_k >= row.size) && row.top_p >= 1 && row.min_p <= 0;
  return whole ? draw_from_all(row.x, row.size, row.scale, row.uniform, scratch.sums.get())
               : draw_truncated(row, scratch);
}

// Tells whether rows are worth a second thread: waking it takes microseconds, on a busy machine milliseconds.
inline bool worth_sharing(int64_t rows, int64_t size) { return rows > 1 && rows * size > 1 << 16; }

// A row's token depends on nothing but the row, so threads share rows as they come.
template <class T>
void draw(const Draw<T>& d, int threads) {
#pragma omp parallel num_threads(threads) if (worth_sharing(d.rows, d.size))
  {
    RowScratch<T> scratch(d.size);
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < d.rows; r++) {
      const T* x = d.logits + r * d.row;
      const Scale scale{double(highest(x, d.size, scratch.highest.get())), 1 / d.temperature[r]};
      d.out[r] = draw(Row<T>{x, d.size, scale, d.top_p[r], d.min_p[r], d.uniform[r], d.top_k[r]}, scratch);
    }
  }
}

}  // namespace
