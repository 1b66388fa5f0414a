// Products and attention of a decoder, and draws of tokens, on a CPU, by torch's own OpenMP threads: what Python calls.

#include "decoder.h"
#include "logprobs.h"

#define FOR_TYPE(T, name)                                                                                        \
  int64_t width_##name() { return WIDTH<T>; }                                                                    \
  void product_##name(const Product<T>* p, int threads) { product(*p, threads); }                                \
  void attention_##name(const Step* s, const Layer<T>* l, int threads) { attention(*s, *l, threads); }           \
  int64_t scratch_##name(const Decoder<T>* d, int64_t tokens) { return scratch_of(*d, tokens); }                 \
  void decoder_##name(const Step* s, const Decoder<T>* d, int threads) { decoder(*s, *d, threads); }             \
  void draw_##name(const Draw<T>* d, int threads) { draw(*d, threads); }                                         \
  void logprobs_##name(const Logprobs<T>* l, int threads) { logprobs(*l, threads); }                             \
  void pack_##name(const T* weight, int64_t row, int64_t outputs, int64_t inputs, T* panels, int64_t apart) {    \
    pack(weight, row, outputs, inputs, panels, apart);                                                           \
  }                                                                                                              \
  void inverse_rms_##name(const T* x, int64_t row, int64_t rows, int64_t size, T epsilon, T* out, int threads) { \
    inverse_rms(x, row, rows, size, epsilon, out, threads);                                                      \
  }

extern "C" {
FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
}
