// One query against keys of its own, as in decode: these are read once, along the lanes, by all heads of a group.
#pragma once

#include <vector>

#include "product.h"
#include "softmax.h"

namespace {

// One query of H heads against keys of its own: these are read once, along the lanes.
template <class T>
struct Alone {
  static constexpr int H = 4;      // heads at a time
  static constexpr int AHEAD = 8;  // keys
  T scores[H][KEY_BLOCK], high[H], total[H];
  std::vector<T> sums;  // [H, value_size]

  explicit Alone(const Layer<T>& l) : sums(H * l.value_size) {}

  template <int COUNT>
  void attend(const Layer<T>& l, int64_t token, int64_t head, Run<T> run, int64_t from, int64_t until) {
    const T* q = l.q + token * l.q_token + head * l.q_head;
    std::fill(sums.begin(), sums.end(), T(0));
    for (int h = 0; h < COUNT; h++) high[h] = std::numeric_limits<T>::lowest(), total[h] = 0;
    for (int64_t key = from; key < until; key += KEY_BLOCK) {
      const int64_t keys = std::min(KEY_BLOCK, until - key);
      score<COUNT>(l, q, run.keys + key * l.key_size, run.values + key * l.value_size, keys);
      for (int h = 0; h < COUNT; h++) weigh(l, h, keys);
      add<COUNT>(run.values + key * l.value_size, l.value_size, keys);
    }
    for (int h = 0; h < COUNT; h++) store(l, h, token, head + h);
  }

  // Its own keys are level 0: nothing is there before, but a sink.
  void store(const Layer<T>& l, int h, int64_t token, int64_t head) {
    T other_high[W<T>] = {l.sinks ? l.sinks[head] : std::numeric_limits<T>::lowest()};
    T other_total[W<T>] = {l.sinks ? T(1) : T(0)}, joint_high[W<T>] = {high[h]}, joint_total[W<T>] = {total[h]};
    T keep[W<T>], take[W<T>];
    join(other_high, other_total, joint_high, joint_total, keep, take);
    T* known = l.softmax + (token * l.heads + head) * 2;
    known[0] = joint_high[0], known[1] = joint_total[0];
    T* out = l.out + (token * l.heads + head) * l.value_size;
    for (int64_t d = 0; d < l.value_size; d++) out[d] = sums[h * l.value_size + d] * take[0];
  }

  template <int COUNT>
  __attribute__((noinline)) void score(const Layer<T>& l, const T* q, const T* keys, const T* values, int64_t count) {
    const int64_t size = l.key_size, q_head = l.q_head;
    for (int64_t j = 0; j < count; j++, keys += size) {
      fetch(keys + AHEAD * size, size);
      fetch(values + j * l.value_size, l.value_size);
      V<T> products[COUNT] = {};
      int64_t d = 0;
      for (; d + W<T> <= size; d += W<T>) {
        const V<T> k = at(keys + d);
        for (int h = 0; h < COUNT; h++) products[h] += k * at(q + h * q_head + d);
      }
      for (int h = 0; h < COUNT; h++) {
        T sum = sum_of<T>(products[h]);
        for (int64_t e = d; e < size; e++) sum += keys[e] * q[h * q_head + e];
        scores[h][j] = sum;
      }
    }
  }

  void weigh(const Layer<T>& l, int h, int64_t count) {
    for (int64_t j = 0; j < KEY_BLOCK; j += W<T>) {
      V<T>& x = at(scores[h] + j);
      x *= l.scale;
      if (l.softcap != 0) x = capped<T>(x, l.softcap);
    }
    for (int64_t j = count; j < KEY_BLOCK; j++) scores[h][j] = -std::numeric_limits<T>::infinity();
    V<T> most = all<T>(high[h]);
    for (int64_t j = 0; j < KEY_BLOCK; j += W<T>) most = larger<T>(most, at(scores[h] + j));
    const T now = largest_of<T>(most);
    V<T> sum{};
    for (int64_t j = 0; j < KEY_BLOCK; j += W<T>) {
      V<T>& x = at(scores[h] + j);
      x = exponential(x - now);
      sum += x;
    }
    const T factor = std::exp(high[h] - now);
    total[h] = total[h] * factor + sum_of<T>(sum);
    if (factor != 1)
      for (int64_t d = 0; d < l.value_size; d++) sums[h * l.value_size + d] *= factor;
    high[h] = now;
  }

  template <int COUNT>
  __attribute__((noinline)) void add(const T* values, int64_t size, int64_t count) {
    constexpr int WIDE = 4;  // vectors of sums a head
    int64_t d = 0;
    for (; d + WIDE * W<T> <= size; d += WIDE * W<T>) {
      V<T> out[COUNT][WIDE];
      for (int h = 0; h < COUNT; h++)
        for (int v = 0; v < WIDE; v++) out[h][v] = at(sums.data() + h * size + d + v * W<T>);
      for (int64_t j = 0; j < count; j++)
        for (int v = 0; v < WIDE; v++) {
          const V<T> value = at(values + j * size + d + v * W<T>);
          for (int h = 0; h < COUNT; h++) out[h][v] += scores[h][j] * value;
        }
      for (int h = 0; h < COUNT; h++)
        for (int v = 0; v < WIDE; v++) at(sums.data() + h * size + d + v * W<T>) = out[h][v];
    }
    for (; d < size; d++)
      for (int h = 0; h < COUNT; h++)
        for (int64_t j = 0; j < count; j++) sums[h * size + d] += scores[h][j] * values[j * size + d];
  }
};

}  // namespace
