// The attention of a layer: rotation, writes, then the parts of a step level by level.
#pragma once

#include <atomic>
#include <vector>

#include "alone.h"
#include "step.h"
#include "together.h"

namespace {

template <class T>
void rotate_head(const Layer<T>& l, T* x, int64_t token, const T* weight) {
  const int64_t half = l.key_size / 2;
  if (weight) {
    T sum = 0;
    for (int64_t i = 0; i < l.key_size; i++) sum += x[i] * x[i];
    const T factor = T(1) / std::sqrt(sum / l.key_size + l.epsilon);
    for (int64_t i = 0; i < l.key_size; i++) x[i] *= factor * weight[i];
  }
  const T *cos = l.cos + token * half, *sin = l.sin + token * half;
  for (int64_t i = 0; i < half; i++) {
    const T a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

template <class T>
void rotate_token(const Layer<T>& l, int64_t token) {
  for (int64_t h = 0; h < l.heads; h++)
    rotate_head(l, l.q + token * l.q_token + h * l.q_head, token, l.head_norm ? l.head_norm + h * l.key_size : nullptr);
  for (int64_t g = 0; g < l.groups; g++)
    rotate_head(l, l.k + token * l.k_token + g * l.k_head, token,
                l.head_norm ? l.head_norm + (l.heads + g) * l.key_size : nullptr);
}

template <class T>
void write_token(const Step& s, const Layer<T>& l, const Write& w) {
  for (int64_t g = 0; g < l.groups; g++) {
    const Run<T> to = run_of(s, l, w.to, g, w.at);
    std::memcpy(const_cast<T*>(to.keys), l.k + w.token * l.k_token + g * l.k_head, l.key_size * sizeof(T));
    std::memcpy(const_cast<T*>(to.values), l.v + w.token * l.v_token + g * l.v_head, l.value_size * sizeof(T));
  }
}

// A unit of a part: one (query, group) where batched, else as many (query, head) pairs of a group as there are lanes.
template <class T>
int64_t units_of(const Part& p, const Layer<T>& l) {
  if (p.batched) return p.queries * l.groups;
  return (p.queries * (l.heads / l.groups) + WIDTH<T> - 1) / WIDTH<T> * l.groups;
}

template <class T>
void attend_alone(const Step& s, const Layer<T>& l, const Part& p, int64_t unit, Alone<T>& alone) {
  const int64_t group = unit % l.groups, query = unit / l.groups, shared = l.heads / l.groups;
  const int64_t token = s.indices[p.offset + query], reach = s.reach[p.offset + query];
  const Run<T> run = run_of(s, l, s.storage[p.offset + query], group, p.first);
  const int64_t from = l.window ? std::max<int64_t>(0, reach - l.window) : 0, until = std::min(p.length, reach);
  for (int64_t h = 0; h < shared; h += Alone<T>::H)
    with_rows<Alone<T>::H>(std::min<int64_t>(Alone<T>::H, shared - h), [&](auto count) {
      alone.template attend<decltype(count)::value>(l, token, group * shared + h, run, from, until);
    });
}

template <class T>
void attend_together(const Step& s, const Layer<T>& l, const Part& p, int64_t unit, Queries<T>& queries, bool first) {
  const int64_t group = unit % l.groups, begin = unit / l.groups * WIDTH<T>, shared = l.heads / l.groups;
  queries.used = std::min<int64_t>(WIDTH<T>, p.queries * shared - begin);
  for (int64_t i = 0; i < queries.used; i++) {
    const int64_t query = p.offset + (begin + i) / shared, reach = s.reach[query];
    queries.token[i] = s.indices[query];
    queries.head[i] = group * shared + (begin + i) % shared;
    queries.until[i] = T(std::min(p.length, reach));
    queries.from[i] = T(l.window ? std::max<int64_t>(0, reach - l.window) : 0);
  }
  queries.load(l);
  queries.attend(l, run_of(s, l, s.storage[p.offset], group, p.first), p.length);
  queries.store(l, first);
}

template <class T>
void attention(const Step& s, const Layer<T>& l, int threads) {
  std::vector<int64_t> ends(s.parts);
  std::vector<std::atomic<int64_t>> next(s.levels);
  for (auto& n : next) n = 0;
  for (int64_t level = 0, p = 0; level < s.levels; level++)
    for (int64_t sum = 0; p < s.level_end[level]; p++) ends[p] = sum += units_of(s.part[p], l);
#pragma omp parallel num_threads(threads)
  {
    if (l.cos) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < s.tokens; t++) rotate_token(l, t);
    }
#pragma omp for schedule(static)
    for (int64_t w = 0; w < s.writes; w++) write_token(s, l, s.write[w]);
    Queries<T> queries(l);
    Alone<T> alone(l);
    for (int64_t level = 0, begin = 0; level < s.levels; begin = s.level_end[level++]) {
      const int64_t end = s.level_end[level], units = end > begin ? ends[end - 1] : 0;
      int64_t p = begin;
      for (int64_t u; (u = next[level].fetch_add(1, std::memory_order_relaxed)) < units;) {
        while (u >= ends[p]) p++;
        const Part& part = s.part[p];
        const int64_t unit = u - (p > begin ? ends[p - 1] : 0);
        if (part.batched)
          attend_alone(s, l, part, unit, alone);
        else
          attend_together(s, l, part, unit, queries, level == 0);
      }
#pragma omp barrier
    }
  }
}

}  // namespace
