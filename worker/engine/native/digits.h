// Products with integers by the processor's sums of products of bytes (VNNI), about as exact as those of floats.
//
// What goes in becomes fixed point of 24 bits, with a step of its own for each chunk of inputs of a row: three signed
// bytes, the digits. Their products with a weight's integers are summed without rounding, four in a lane at once, so
// that three digits take less time than one float; scale, offset and step come in once for a chunk. Rounding to the
// step loses about as much as sums of float32 do, as measured by the largest input of a chunk: beside one that is ten
// thousand times as large, the others are less exact than in float32. A row's result does not depend on its neighbours.
#pragma once

#include <memory>

#include "integers.h"

namespace {

#if defined(__AVX512VNNI__)
constexpr bool HAS_DIGITS = true;
constexpr int DIGIT_ROWS = 3;  // 27 sums, 3 of the panel, 1 broadcast: of 32 registers
inline I<float> dot(I<float> sums, I<float> integers, I<float> digits) {
  return I<float>(_mm512_dpbusd_epi32(__m512i(sums), __m512i(integers), __m512i(digits)));
}
inline I<float> nearest(V<float> x) { return I<float>(_mm512_cvtps_epi32(x)); }
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr bool HAS_DIGITS = true;
constexpr int DIGIT_ROWS = 1;  // 9 + 3 + 1: of 16 registers
inline I<float> dot(I<float> sums, I<float> integers, I<float> digits) {
  return I<float>(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(integers), __m256i(digits)));
}
inline I<float> nearest(V<float> x) { return I<float>(_mm256_cvtps_epi32(x)); }
#else
constexpr bool HAS_DIGITS = false;  // no such instruction: integers become floats
constexpr int DIGIT_ROWS = 1;
inline I<float> dot(I<float> sums, I<float>, I<float>) { return sums; }
inline I<float> nearest(V<float> x) { return __builtin_convertvector(x, I<float>); }
#endif

constexpr int64_t CHUNK = 128;      // most inputs of one step: no sum of digits exceeds 32 bits
constexpr float LARGEST = 8355710;  // 1 more, by rounding, has the digits 127, 127, 127

// Rows of what goes in as digits, for a weight whose groups are cut in chunks.
class Digits {
 public:
  struct Step {
    float size, sum;  // of one unit, and the sum of a chunk's units
  };
  int64_t inputs, group, chunks;  // chunks in a row
  int64_t plane, row;             // bytes from one digit of an input to the next one, and from row to row

  Digits(const Weight<float>& w, int64_t inputs, int64_t rows)
      : inputs(inputs),
        group(w.group),
        chunks(inputs / w.group * ((w.group + CHUNK - 1) / CHUNK)),
        plane((inputs / W<float> + 2) * W<float>),
        row(3 * plane),
        digits(new int8_t[rows * row]),
        steps(new Step[rows * chunks]) {}

  const int8_t* at_input(int64_t r, int64_t input) const { return digits.get() + r * row + input; }
  const Step& step(int64_t r, int64_t chunk) const { return steps[r * chunks + chunk]; }

  // Calls f(number of the chunk, first input, count) for each chunk.
  template <class F>
  void each_chunk(F f) const {
    int64_t chunk = 0;
    for (int64_t from = 0; from < inputs; from += group)
      for (int64_t k = 0; k < group; k += CHUNK) f(chunk++, from + k, std::min(CHUNK, group - k));
  }

  // Takes a row of x; `evens_first`: of eight inputs the even ones go first, as 4 bits are unpacked.
  void set(int64_t r, const float* x, bool evens_first) {
    each_chunk([&](int64_t chunk, int64_t from, int64_t count) {
      I<float> most{};  // as integers, the sizes of floats are in order, infinity and what is no number last
      each_vector(x + from, count, [&](int64_t, V<float> some) {
        const I<float> size = I<float>(some) & 0x7fffffff;
        most = size > most ? size : most;
      });
      const int32_t bits = folded(most, [](I<float> a, I<float> b) { return a > b ? a : b; });
      float highest;
      std::memcpy(&highest, &bits, sizeof highest);
      const bool counts = highest > 0x1p-100f;  // less would overflow, and is nothing
      const float units = counts ? LARGEST / highest : 0.f;
      I<float> sum{};
      each_vector(x + from, count, [&](int64_t i, V<float> some) {
        const I<float> number = nearest(some * units);
        sum += number;
        write(number, evens_first, digits.get() + r * row + from + i);
      });
      const int32_t total = folded(sum, [](I<float> a, I<float> b) { return a + b; });
      // What is not finite makes all that comes of it no number.
      steps[r * chunks + chunk] = {highest * (1 / LARGEST) + (highest - highest), float(total)};
    });
  }

 private:
  std::unique_ptr<int8_t[]> digits;  // [rows, 3, plane], the lowest digit first
  std::unique_ptr<Step[]> steps;     // [rows, chunks]

  template <class F>
  static void each_vector(const float* x, int64_t count, F f) {
    int64_t i = 0;
    for (; i + W<float> <= count; i += W<float>) f(i, at(x + i));
    if (i == count) return;
    float some[W<float>] = {};
    std::copy(x + i, x + count, some);
    f(i, at(some));
  }

  // Combines the lanes of a vector of integers by f.
  template <class F>
  static int32_t folded(I<float> x, F f) {
    const float bits =
        reduced<float>(V<float>(x), [&](V<float> a, V<float> b) { return V<float>(f(I<float>(a), I<float>(b))); });
    int32_t result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }

  // Writes W numbers to the three planes; what lies behind them may be overwritten too.
  void write(I<float> number, bool evens_first, int8_t* out) const {
    typedef int8_t Bytes __attribute__((vector_size(W<float>), aligned(1), may_alias));
    if (evens_first) {
      constexpr auto order = [] {
        std::array<int32_t, W<float>> from{};
        for (int i = 0; i < W<float>; i++) from[i] = i / 8 * 8 + (i % 4) * 2 + i % 8 / 4;
        return from;
      }();
      I<float> from;
      std::memcpy(&from, order.data(), sizeof from);
      number = __builtin_shuffle(number, from);
    }
    // With 128 added to each digit none is negative, nor carries; to turn its highest bit over subtracts them again.
    number = (number + 0x808080) ^ 0x808080;
    for (int d = 0; d < 3; d++)
      *reinterpret_cast<Bytes*>(out + d * plane) = __builtin_convertvector(number >> 8 * d, Bytes);
  }
};

// One chunk of a panel: integers of four inputs in a dword, [count / 4, WIDTH], and what they are multiplied by.
struct Chunk {
  alignas(64) int32_t integers[(CHUNK + 8) / 4 * WIDTH<float>];
  V<float> scale[NV], offset[NV];  // an integer q stands for q * scale + offset
  int64_t steps;
};

// Unpacks `count` inputs from `from` on. Asks for the same inputs of the panel `following`.
template <int BITS>
__attribute__((noinline)) void unpack(const Weight<float>& w, int64_t inputs, int64_t panel, int64_t following,
                                      int64_t from, int64_t count, Chunk& out) {
  constexpr int64_t WIDE = WIDTH<float>, STEP = 32 / BITS, STEP_BYTES = WIDE * sizeof(int32_t);
  const int64_t panel_bytes = (inputs + STEP - 1) / STEP * STEP_BYTES;
  const char* data = static_cast<const char*>(w.data) + panel * panel_bytes + from / STEP * STEP_BYTES;
  const int64_t ahead = (following - panel) * panel_bytes, dwords = (count + STEP - 1) / STEP;
  int32_t* to = out.integers;
  for (int64_t i = 0; i < dwords; i++, data += STEP_BYTES) {
    for (int64_t j = 0; j < STEP_BYTES; j += 64) __builtin_prefetch(data + ahead + j, 0, 2);
    for (int part = 0; part < 8 / BITS; part++, to += WIDE)
      for (int v = 0; v < NV; v++) {
        const I<float> four = I<float>(at(reinterpret_cast<const float*>(data) + v * W<float>));
        at(reinterpret_cast<float*>(to) + v * W<float>) = V<float>(BITS == 8 ? four : four >> 4 * part & 0x0f0f0f0f);
      }
  }
  out.steps = (to - out.integers) / WIDE;
  for (int v = 0; v < NV; v++) {
    const int64_t column = (panel * (inputs / w.group) + from / w.group) * WIDE + v * W<float>;
    out.scale[v] = numbers(w.scales, column, w.kind), out.offset[v] = numbers(w.offsets, column, w.kind);
    if (!w.minimum) out.offset[v] *= -out.scale[v];
  }
}

// Adds to sums [R, WIDTH] what R rows make of a chunk, or sets them. Not inlined, as tile().
template <int R>
__attribute__((noinline)) void add_chunk(const Digits& x, int64_t first, int64_t number, int64_t from, const Chunk& c,
                                         float* sums) {
  I<float> dots[R][3][NV] = {};
  const int8_t* digits = x.at_input(first, from);
  const int32_t* integers = c.integers;
  const int64_t row = x.row, plane = x.plane;
  for (int64_t i = 0; i < c.steps; i++, digits += 4, integers += WIDTH<float>) {
    I<float> panel[NV];
    for (int v = 0; v < NV; v++) panel[v] = I<float>(at(reinterpret_cast<const float*>(integers) + v * W<float>));
    for (int r = 0; r < R; r++)
      for (int d = 0; d < 3; d++) {
        int32_t four;
        std::memcpy(&four, digits + r * row + d * plane, sizeof four);
        const I<float> same = four - I<float>{};
        for (int v = 0; v < NV; v++) dots[r][d][v] = dot(dots[r][d][v], panel[v], same);
      }
  }
  for (int r = 0; r < R; r++) {
    const Digits::Step& step = x.step(first + r, number);
    for (int v = 0; v < NV; v++) {
      const V<float> low = __builtin_convertvector((dots[r][1][v] << 8) + dots[r][0][v], V<float>);
      const V<float> units = __builtin_convertvector(dots[r][2][v], V<float>) * 65536.f + low;
      V<float>& sum = at(sums + r * WIDTH<float> + v * W<float>);
      const V<float> now = (units * c.scale[v] + c.offset[v] * step.sum) * step.size;
      sum = number ? sum + now : now;
    }
  }
}

}  // namespace
