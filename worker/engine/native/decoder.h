// A whole layer: norm, attention, norm and gated MLP, each added to the residual stream.
#pragma once

#include <utility>

#include "attention.h"
#include "product.h"

namespace {

template <class T>
struct Decoder {
  int64_t hidden, inner;
  T epsilon, mlp_epsilon;
  T* x;                   // [tokens, hidden]: changed in place
  T* scratch;             // as many as scratch_of says
  const int64_t* wanted;  // the tokens whose output is needed, or null: all
  int64_t wanted_count;
  Weight<T> qkv, output, gate_up, down;
  Layer<T> attention;  // q, k, v, out and softmax are laid out here
};

template <class T>
int64_t scratch_of(const Decoder<T>& d, int64_t tokens) {
  const Layer<T>& l = d.attention;
  const int64_t a_token =
      1 + (l.heads + l.groups) * l.key_size + l.groups * l.value_size + l.heads * (l.value_size + 2) + d.inner;
  return tokens * (a_token + d.hidden + l.heads * l.value_size);
}

// Copies rows `which` of a matrix to the front of another one, or back.
template <class T>
void gather(const T* from, const int64_t* which, int64_t count, int64_t size, T* to) {
  for (int64_t i = 0; i < count; i++) std::memcpy(to + i * size, from + which[i] * size, size * sizeof(T));
}
template <class T>
void scatter(const T* from, const int64_t* which, int64_t count, int64_t size, T* to) {
  for (int64_t i = 0; i < count; i++) std::memcpy(to + which[i] * size, from + i * size, size * sizeof(T));
}

template <class T>
void decoder(const Step& s, Decoder<T> d, int threads) {
  Layer<T>& l = d.attention;
  const int64_t tokens = s.tokens, attended = l.heads * l.value_size;
  T* free = d.scratch;
  const auto take = [&free](int64_t size) { return std::exchange(free, free + size); };
  T* scale = take(tokens);
  const int64_t projected = (l.heads + l.groups) * l.key_size + l.groups * l.value_size;
  l.q = take(tokens * projected), l.k = l.q + l.heads * l.key_size, l.v = l.k + l.groups * l.key_size;
  l.q_token = l.k_token = l.v_token = projected, l.q_head = l.k_head = l.key_size, l.v_head = l.value_size;
  l.out = take(tokens * attended), l.softmax = take(tokens * l.heads * 2);

  inverse_rms(d.x, d.hidden, tokens, d.hidden, d.epsilon, scale, threads);
  product(Product<T>{d.x, d.hidden, tokens, d.hidden, projected, scale, nullptr, l.q, projected, PLAIN, d.qkv}, threads);
  attention(s, l, threads);

  T *x = d.x, *out = l.out;
  int64_t rows = tokens;
  if (d.wanted) {
    rows = d.wanted_count;
    x = take(rows * d.hidden), out = take(rows * attended);
    gather(d.x, d.wanted, rows, d.hidden, x), gather(l.out, d.wanted, rows, attended, out);
  }
  product(Product<T>{out, attended, rows, attended, d.hidden, nullptr, x, x, d.hidden, ADD, d.output}, threads);
  inverse_rms(x, d.hidden, rows, d.hidden, d.mlp_epsilon, scale, threads);
  T* inner = take(rows * d.inner);
  product(Product<T>{x, d.hidden, rows, d.hidden, d.inner, scale, nullptr, inner, d.inner, SILU_GATE, d.gate_up},
          threads);
  product(Product<T>{inner, d.inner, rows, d.inner, d.hidden, nullptr, x, x, d.hidden, ADD, d.down}, threads);
  if (d.wanted) scatter(x, d.wanted, rows, d.hidden, d.x);
}

}  // namespace
