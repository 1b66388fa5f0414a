// Softmaxes over runs of keys, joined without a logarithm (Milakov & Gimelshein 2018).
#pragma once

#include "lanes.h"
#include "step.h"

namespace {

// Joins two softmaxes in W lanes, one of them known by its highest score and its sum of e^(score - highest), the other
// (whose values have been weighted so far) as well. Leaves the joint one in `high` and `total`; `keep` and `take` are
// the factors of what the first had attended to and of the weighted values of the second.
template <class T>
inline void join(const T* other_high, const T* other_total, T* high, T* total, T* keep, T* take) {
  const V<T> most = larger<T>(at(high), at(other_high)), ours = exponential(at(high) - most);
  const V<T> theirs = exponential(at(other_high) - most) * at(other_total);
  const V<T> sum = at(total) * ours + theirs;
  const V<T> inverse = sum > T(0) ? T(1) / sum : V<T>{};
  at(high) = most, at(total) = sum, at(keep) = theirs * inverse, at(take) = ours * inverse;
}

}  // namespace
