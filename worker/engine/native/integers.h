// Weights as products read them, and how panels of integers become floats.
#pragma once

#include "lanes.h"

namespace {

enum Kind { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

template <class T>
struct Weight {
  const void* data;  // panels [inputs, WIDTH], see `bits`; for SILU_GATE those of gate and up in turn
  const T* bias;     // [outputs] in the order of the panels, padded as they are, or null
  int64_t bits;      // 0: numbers T; 4, 8: integers of 8 or 4 inputs in a dword, the first one lowest
  // The rest is of integers. An integer q stands for (q - offset) * scale, or q * scale + offset if `minimum`.
  const void *scales, *offsets;  // panels [groups, WIDTH]
  int64_t kind;                  // of scales and offsets
  int64_t group, minimum;
  const int64_t* order;  // [inputs]: which input of x each one of the panels is, or null
  const T* factors;      // [inputs] of the panels: of what goes in, or null
};

// The numbers of W columns, whatever their kind. Those of 16 bits may be subnormal, but not infinite.
inline V<float> numbers(const void* from, int64_t at_number, int64_t kind) {
  if (kind == FLOAT32) return at(static_cast<const float*>(from) + at_number);
  typedef uint16_t Half __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
  const Half& halves = *reinterpret_cast<const Half*>(static_cast<const uint16_t*>(from) + at_number);
  const I<float> bits = __builtin_convertvector(halves, I<float>);
  if (kind == BFLOAT16) return V<float>(bits << 16);
  return V<float>((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;
}

// The integers number `i` of dwords.
template <int BITS>
inline V<float> integers(I<float> dwords, int i) {
#if defined(__AVX512F__)  // the permutation looks at no more than the lowest 4 bits
  if constexpr (BITS == 4) {
    const __m512 known = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return V<float>(_mm512_permutexvar_ps(__m512i(dwords >> 4 * i), known));
  }
#endif
  return __builtin_convertvector(dwords >> BITS * i & ((1 << BITS) - 1), V<float>);
}

// Writes `count` inputs of a panel from `from` on, which is a multiple of 8, as floats [count, WIDTH]; there is room up
// to the next multiple of 8. Asks for the same inputs of the panel `following`.
template <int BITS>
__attribute__((noinline)) void unpack(const Weight<float>& w, int64_t inputs, int64_t panel, int64_t following,
                                      int64_t from, int64_t count, float* out) {
  constexpr int64_t WIDE = WIDTH<float>, STEP = 32 / BITS, STEP_BYTES = WIDE * sizeof(int32_t);
  const int64_t groups = inputs / w.group, panel_bytes = (inputs + STEP - 1) / STEP * STEP_BYTES;
  const char* data = static_cast<const char*>(w.data) + panel * panel_bytes + from / STEP * STEP_BYTES;
  const int64_t ahead = (following - panel) * panel_bytes;
  for (int64_t k = from; k < from + count;) {
    const int64_t group = k / w.group, until = std::min(from + count, (group + 1) * w.group);
    V<float> scale[NV], offset[NV];
    for (int v = 0; v < NV; v++) {
      const int64_t column = (panel * groups + group) * WIDE + v * W<float>;
      scale[v] = numbers(w.scales, column, w.kind), offset[v] = numbers(w.offsets, column, w.kind);
      if (!w.minimum) offset[v] *= -scale[v];
    }
    for (; k < until; k += STEP, data += STEP_BYTES, out += STEP * WIDE) {
      for (int64_t i = 0; i < STEP_BYTES; i += 64) __builtin_prefetch(data + ahead + i, 0, 2);
      for (int v = 0; v < NV; v++) {
        const I<float> dwords = I<float>(at(reinterpret_cast<const float*>(data) + v * W<float>));
        for (int i = 0; i < STEP; i++)
          at(out + i * WIDE + v * W<float>) = integers<BITS>(dwords, i) * scale[v] + offset[v];
      }
    }
  }
}

}  // namespace
