// What one step attends to, as packed by native/attention.py, and what one layer brings.
#pragma once

#include <cstdint>

namespace {

struct Part {               // queries and a run of keys
  int64_t queries, offset;  // its queries are indices[offset ...]
  int64_t batched;          // each query has keys of its own; else all have those of the first
  int64_t first, length;
};

struct Storage {
  int64_t address, tokens;  // of each layer keys [groups, tokens, key_size], then values
};

struct Write {
  int64_t token;
  Storage to;
  int64_t at;
};

struct Step {
  int64_t parts;
  const Part* part;  // by level
  int64_t levels;
  const int64_t* level_end;  // parts before the end of each level; within one, a token is in one part at most
  const int64_t* indices;    // packed tokens
  const int64_t* reach;      // how many keys, from the first on, lie at or before the query's position
  const Storage* storage;    // where the query's keys are; the last three have one entry a query
  int64_t writes;
  const Write* write;
  const int64_t* offsets;  // [layers, 2]: elements before a layer's keys and values, in a storage of one token
  int64_t tokens;
};

template <class T>
struct Layer {
  int64_t layer, heads, groups, key_size, value_size;
  T *q, *k, *v;  // [tokens, heads or groups, size]
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  T* out;              // [tokens, heads, value_size]
  T* softmax;          // [tokens, heads, 2]: highest score and sum of e^(score - highest) so far
  T scale, softcap;    // softcap 0: none
  int64_t window;      // 0: none
  const T* sinks;      // [heads] or null
  const T *cos, *sin;  // [tokens, key_size / 2] or null: q and k are to be rotated
  const T* head_norm;  // [heads + groups, key_size] or null
  T epsilon;
};

template <class T>
struct Run {
  const T *keys, *values;
};

template <class T>
Run<T> run_of(const Step& s, const Layer<T>& l, Storage in, int64_t group, int64_t first) {
  const int64_t* offsets = s.offsets + l.layer * 2;
  const int64_t at = group * in.tokens + first;
  const T* begin = reinterpret_cast<const T*>(in.address);
  return {begin + offsets[0] * in.tokens + at * l.key_size, begin + offsets[1] * in.tokens + at * l.value_size};
}

}  // namespace
