// Many queries against one run of keys, which are read once for all of them.
//
// Queries lie along the lanes of vectors, keys and values are read where they are, scalar by scalar: neither is packed,
// and softmax needs no sum across lanes. Blocks of keys keep the scores in the cache (FlashAttention, Dao et al. 2022).
#pragma once

#include <vector>

#include "product.h"
#include "softmax.h"

namespace {

// Up to WIDTH (token, head) pairs along the lanes, against one run of keys.
template <class T>
struct Queries {
  std::vector<T> query, scores, sums;  // [key_size, WIDTH], [KEY_BLOCK, WIDTH], [value_size, WIDTH]
  T highest[WIDTH<T>], total[WIDTH<T>], from[WIDTH<T>], until[WIDTH<T>];
  int64_t token[WIDTH<T>], head[WIDTH<T>];
  int64_t used;

  explicit Queries(const Layer<T>& l)
      : query(l.key_size * WIDTH<T>), scores(KEY_BLOCK * WIDTH<T>), sums(l.value_size * WIDTH<T>) {}

  void load(const Layer<T>& l) {
    std::fill(sums.begin(), sums.end(), T(0));
    for (int64_t i = 0; i < WIDTH<T>; i++) {
      highest[i] = std::numeric_limits<T>::lowest(), total[i] = 0;
      if (i >= used) from[i] = until[i] = 0;
    }
    int64_t d = 0;
    for (; d + W<T> <= l.key_size; d += W<T>)
      for (int v = 0; v < NV; v++) {
        V<T> block[W<T>];
        for (int i = 0; i < W<T>; i++) block[i] = v * W<T> + i < used ? at(q(l, v * W<T> + i) + d) * l.scale : V<T>{};
        transpose<T>(block);
        for (int i = 0; i < W<T>; i++) at(query.data() + (d + i) * WIDTH<T> + v * W<T>) = block[i];
      }
    for (; d < l.key_size; d++)
      for (int64_t i = 0; i < WIDTH<T>; i++) query[d * WIDTH<T> + i] = i < used ? q(l, i)[d] * l.scale : T(0);
  }

  const T* q(const Layer<T>& l, int64_t i) const { return l.q + token[i] * l.q_token + head[i] * l.q_head; }

  void attend(const Layer<T>& l, Run<T> run, int64_t length) {
    int64_t begin = length, end = 0, all_from = 0, all_until = length;
    for (int64_t i = 0; i < used; i++) {
      begin = std::min<int64_t>(begin, from[i]), end = std::max<int64_t>(end, until[i]);
      all_from = std::max<int64_t>(all_from, from[i]), all_until = std::min<int64_t>(all_until, until[i]);
    }
    for (int64_t key = begin; key < end; key += KEY_BLOCK) {
      const int64_t keys = std::min(KEY_BLOCK, end - key);
      score(l, run.keys + key * l.key_size, run.values + key * l.value_size, keys);
      if (l.softcap != 0) cap(l.softcap, keys);
      if (key < all_from || key + keys > all_until) mask(key, keys);
      weigh(keys, l.value_size);
      add(l, run.values + key * l.value_size, keys);
    }
  }

  void score(const Layer<T>& l, const T* keys, const T* values, int64_t count) {
    for (int64_t j = 0; j < count; j += ROWS) {
      fetch(keys + (j + ROWS) * l.key_size, ROWS * l.key_size);
      fetch(values + j * l.value_size, ROWS * l.value_size);
      with_rows(std::min<int64_t>(ROWS, count - j), [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        tile<T, R>(keys + j * l.key_size, l.key_size, 1, query.data(), l.key_size, scores.data() + j * WIDTH<T>, false);
      });
    }
  }

  void cap(T softcap, int64_t count) {
    for (int64_t i = 0; i < count * WIDTH<T>; i += W<T>)
      at(scores.data() + i) = capped<T>(at(scores.data() + i), softcap);
  }

  void mask(int64_t key, int64_t count) {
    const V<T> hidden = all<T>(-std::numeric_limits<T>::infinity());
    for (int64_t j = 0; j < count; j++)
      for (int v = 0; v < NV; v++) {
        V<T>& x = at(scores.data() + j * WIDTH<T> + v * W<T>);
        const V<T> n = all<T>(T(key + j));
        x = (n >= at(from + v * W<T>)) & (n < at(until + v * W<T>)) ? x : hidden;
      }
  }

  void weigh(int64_t count, int64_t value_size) {
    V<T> now[NV], sum[NV] = {};
    for (int v = 0; v < NV; v++) now[v] = at(highest + v * W<T>);
    for (T* row = scores.data(); row < scores.data() + count * WIDTH<T>; row += WIDTH<T>)
      for (int v = 0; v < NV; v++) now[v] = larger<T>(now[v], at(row + v * W<T>));
    for (T* row = scores.data(); row < scores.data() + count * WIDTH<T>; row += WIDTH<T>)
      for (int v = 0; v < NV; v++) {
        V<T>& x = at(row + v * W<T>);
        x = exponential(x - now[v]);
        sum[v] += x;
      }
    for (int v = 0; v < NV; v++) {
      const V<T> factor = exponential(at(highest + v * W<T>) - now[v]);
      at(highest + v * W<T>) = now[v];
      at(total + v * W<T>) = at(total + v * W<T>) * factor + sum[v];
      for (int64_t d = 0; d < value_size; d++) at(sums.data() + d * WIDTH<T> + v * W<T>) *= factor;
    }
  }

  void add(const Layer<T>& l, const T* values, int64_t count) {
    for (int64_t d = 0; d < l.value_size; d += ROWS)
      with_rows(std::min<int64_t>(ROWS, l.value_size - d), [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        tile<T, R>(values + d, 1, l.value_size, scores.data(), count, sums.data() + d * WIDTH<T>, true);
      });
  }

  // Writes the attention: at level 0 it is all there is, with the sink; later it is joined with what is there.
  void store(const Layer<T>& l, bool first) {
    T high[WIDTH<T>], sum[WIDTH<T>], keep[WIDTH<T>], take[WIDTH<T>];
    for (int64_t i = 0; i < WIDTH<T>; i++) {
      const T* known = l.softmax + (token[i] * l.heads + head[i]) * 2;
      high[i] = i >= used ? T(0) : !first ? known[0] : l.sinks ? l.sinks[head[i]] : std::numeric_limits<T>::lowest();
      sum[i] = i >= used ? T(0) : !first ? known[1] : l.sinks ? T(1) : T(0);
    }
    for (int64_t i = 0; i < WIDTH<T>; i += W<T>) join(high + i, sum + i, highest + i, total + i, keep + i, take + i);
    for (int64_t i = 0; i < used; i++) {
      T* known = l.softmax + (token[i] * l.heads + head[i]) * 2;
      known[0] = highest[i], known[1] = total[i];
    }
    int64_t d = 0;
    for (; d + W<T> <= l.value_size; d += W<T>)
      for (int v = 0; v < NV && v * W<T> < used; v++) {
        V<T> block[W<T>];
        for (int i = 0; i < W<T>; i++) block[i] = at(sums.data() + (d + i) * WIDTH<T> + v * W<T>) * at(take + v * W<T>);
        transpose<T>(block);
        for (int64_t i = 0; i < std::min<int64_t>(W<T>, used - v * W<T>); i++) {
          V<T>& x = at(out(l, v * W<T> + i) + d);
          x = first ? block[i] : x * keep[v * W<T> + i] + block[i];
        }
      }
    for (; d < l.value_size; d++)
      for (int64_t i = 0; i < used; i++) {
        T& x = out(l, i)[d];
        x = (first ? T(0) : x * keep[i]) + sums[d * WIDTH<T> + i] * take[i];
      }
  }

  T* out(const Layer<T>& l, int64_t i) const { return l.out + (token[i] * l.heads + head[i]) * l.value_size; }
};

}  // namespace
