// Log probabilities of a chosen token and of the most probable ones.
#pragma once

#include "sampling.h"

namespace {

template <class T>
struct Logprobs {
  const T* logits;  // [rows, size]
  int64_t row, rows, size, most;
  const int64_t* chosen;
  double* of_chosen;  // [rows]
  int64_t* top;       // [rows, most]: higher ones first, and the lower id of equals
  double* of_top;
};

template <class T>
void logprobs(const Logprobs<T>& l, int64_t r, RowScratch<T>& scratch) {
  const T* x = l.logits + r * l.row;
  T* of_block = scratch.highest.get();
  const double high = highest(x, l.size, of_block);
  const double log_total = std::log(sum_weights(x, l.size, Scale{high, 1.0}, scratch.sums.get()));
  l.of_chosen[r] = x[l.chosen[r]] - high - log_total;
  if (!l.most) return;
  T* some = scratch.some.get();
  Found<T> found{scratch.ids.get(), scratch.values.get(), 0};
  collect(x, l.size, of_block, reached_by(l.most, of_block, blocks_of(l.size), some), found);
  std::copy(found.values, found.values + found.count, some);
  collect(x, l.size, of_block, last_needed<T>(some, nullptr, found.count, double(l.most)), found);
  const auto sooner = [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  // Where there are NaN, fewer are found than there are tokens; what is left out then is token 0 with a NaN.
  const int64_t some_found = std::min(l.most, found.count);
  std::partial_sort(found.ids, found.ids + some_found, found.ids + found.count, sooner);
  for (int64_t i = some_found; i < l.most; i++) {
    l.top[r * l.most + i] = 0;
    l.of_top[r * l.most + i] = std::numeric_limits<double>::quiet_NaN();
  }
  for (int64_t i = 0; i < some_found; i++) {
    l.top[r * l.most + i] = found.ids[i];
    l.of_top[r * l.most + i] = x[found.ids[i]] - high - log_total;
  }
}

template <class T>
void logprobs(const Logprobs<T>& l, int threads) {
#pragma omp parallel num_threads(threads) if (worth_sharing(l.rows, l.size))
  {
    RowScratch<T> scratch(l.size);
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < l.rows; r++) logprobs(l, r, scratch);
  }
}

}  // namespace
