// Products with weights that are packed once, by register tiles (Goto & van de Geijn 2008).
//
// A weight [outputs, inputs] becomes panels of WIDTH columns; ROWS rows of the input against a panel are summed in
// registers over K_BLOCK inputs at a time. The sum of an output is taken in the same order whatever the batch is, so
// that a row's result does not depend on its neighbours. While one panel is used the next comes from memory. Integers
// become floats a block at a time, in the level-1 cache, and from there on it is the same product; or rows become
// integers too (digits.h).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "digits.h"

namespace {

// out[r][c] (+)= sum over k < depth of a[r * row + k * step] * b[k][c], for R rows and WIDTH columns; `out` rows are
// WIDTH apart. Meanwhile PREFETCH lines a turn are fetched from `ahead` on, `pace` bytes a turn. Not inlined: among
// other code compilers spill the sums.
template <class T, int R, int PREFETCH = 0>
__attribute__((noinline)) void tile(const T* a, int64_t row, int64_t step, const T* b, int64_t depth, T* out, bool more,
                                    const char* ahead = nullptr, int64_t pace = 0) {
  V<T> sums[R][NV] = {};
  if (more)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < NV; v++) sums[r][v] = at(out + r * WIDTH<T> + v * W<T>);
  for (int64_t k = 0; k < depth; k++, b += WIDTH<T>, a += step) {
    for (int i = 0; i < PREFETCH; i++) __builtin_prefetch(ahead + i * 64, 0, 2);
    if (PREFETCH) ahead += pace;
    V<T> columns[NV];
    for (int v = 0; v < NV; v++) columns[v] = at(b + v * W<T>);
    for (int r = 0; r < R; r++) {
      const V<T> x = all<T>(a[r * row]);
      for (int v = 0; v < NV; v++) sums[r][v] += x * columns[v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) at(out + r * WIDTH<T> + v * W<T>) = sums[r][v];
}

// Calls f with the number of rows of a tile, 1 to ROWS, as a constant.
template <int R = ROWS, class F>
inline void with_rows(int64_t rows, F f) {
  if constexpr (R == 1)
    f(std::integral_constant<int, 1>());
  else if (rows == R)
    f(std::integral_constant<int, R>());
  else
    with_rows<R - 1>(rows, f);
}

enum Ending { PLAIN = 0, ADD = 1, SILU_GATE = 2 };

template <class T>
struct Product {
  const T* x;  // [rows, inputs], `x_row` apart
  int64_t x_row, rows, inputs, outputs;
  const T* scale;    // [rows]: factors of the sums, or null
  const T* summand;  // [rows, outputs] for ADD, `y_row` apart as y; may be y
  T* y;
  int64_t y_row;
  int64_t ending;
  Weight<T> weight;
};

// Sums up `rows` rows of one panel of numbers [rows, WIDTH].
template <class T>
void add_numbers(const Product<T>& p, int64_t first, int64_t rows, int64_t panel, int64_t following, T* sums) {
  const T *numbers = static_cast<const T*>(p.weight.data), *weight = numbers + panel * p.inputs * WIDTH<T>;
  const int64_t blocks = (p.inputs + K_BLOCK - 1) / K_BLOCK, depth = (p.inputs + blocks - 1) / blocks;
  const int64_t tiles = (rows + ROWS - 1) / ROWS, pace = WIDTH<T> * sizeof(T) / tiles;
  const char* ahead = reinterpret_cast<const char*>(numbers + following * p.inputs * WIDTH<T>);
  for (int64_t k = 0; k < p.inputs; k += depth) {
    const int64_t now = std::min(depth, p.inputs - k);
    for (int64_t r = 0; r < rows; r += ROWS, ahead += now * pace) {
      with_rows(std::min<int64_t>(ROWS, rows - r), [&](auto count) {
        constexpr int R = decltype(count)::value;
        const T* x = p.x + (first + r) * p.x_row + k;
        const T* columns = weight + k * WIDTH<T>;
        T* out = sums + r * WIDTH<T>;
        constexpr int LINES = (WIDTH<T> * sizeof(T) + 63) / 64;
        if (tiles == 1)
          tile<T, R, LINES>(x, p.x_row, 1, columns, now, out, k, ahead, pace);
        else if (tiles == 2)
          tile<T, R, (LINES + 1) / 2>(x, p.x_row, 1, columns, now, out, k, ahead, pace);
        else
          tile<T, R, 1>(x, p.x_row, 1, columns, now, out, k, ahead, pace);
      });
    }
  }
}

// The same of a panel of integers.
inline void add_integers(const Product<float>& p, int64_t first, int64_t rows, int64_t panel, int64_t following,
                         float* sums) {
  alignas(64) float columns[LARGE_INTEGER_BLOCK * WIDTH<float>];
  const int64_t most = rows < MANY_ROWS ? INTEGER_BLOCK : LARGE_INTEGER_BLOCK;
  const int64_t blocks = (p.inputs + most - 1) / most, depth = ((p.inputs + blocks - 1) / blocks + 7) / 8 * 8;
  for (int64_t k = 0; k < p.inputs; k += depth) {
    const int64_t now = std::min(depth, p.inputs - k);
    if (p.weight.bits == 4)
      unpack<4>(p.weight, p.inputs, panel, following, k, now, columns);
    else
      unpack<8>(p.weight, p.inputs, panel, following, k, now, columns);
    for (int64_t r = 0; r < rows; r += ROWS)
      with_rows(std::min<int64_t>(ROWS, rows - r), [&](auto count) {
        constexpr int R = decltype(count)::value;
        const float* x = p.x + (first + r) * p.x_row + k;
        tile<float, R>(x, p.x_row, 1, columns, now, sums + r * WIDTH<float>, k);
      });
  }
}

// The same of a panel of integers and rows of digits.
inline void add_digits(const Product<float>& p, const Digits& x, int64_t first, int64_t rows, int64_t panel,
                       int64_t following, float* sums) {
  Chunk chunk;
  x.each_chunk([&](int64_t number, int64_t from, int64_t count) {
    if (p.weight.bits == 4)
      unpack<4>(p.weight, p.inputs, panel, following, from, count, chunk);
    else
      unpack<8>(p.weight, p.inputs, panel, following, from, count, chunk);
    for (int64_t r = 0; r < rows; r += DIGIT_ROWS)
      with_rows<DIGIT_ROWS>(std::min<int64_t>(DIGIT_ROWS, rows - r), [&](auto rows_now) {
        add_chunk<decltype(rows_now)::value>(x, first + r, number, from, chunk, sums + r * WIDTH<float>);
      });
  });
}

// Computes `rows` rows of one panel into sums [rows, WIDTH], scale and bias included. `x`: p's rows as digits, or null.
template <class T>
void panel_sums(const Product<T>& p, const Digits* x, int64_t first, int64_t rows, int64_t panel, int64_t following,
                T* sums) {
  if constexpr (std::is_same_v<T, float>) {
    if (x)
      add_digits(p, *x, first, rows, panel, following, sums);
    else if (p.weight.bits)
      add_integers(p, first, rows, panel, following, sums);
    else
      add_numbers(p, first, rows, panel, following, sums);
  } else {
    add_numbers(p, first, rows, panel, following, sums);
  }
  if (!p.scale && !p.weight.bias) return;
  T bias[WIDTH<T>] = {};
  if (p.weight.bias) std::memcpy(bias, p.weight.bias + panel * WIDTH<T>, sizeof bias);
  for (int64_t r = 0; r < rows; r++) {
    const V<T> factor = all<T>(p.scale ? p.scale[first + r] : T(1));
    for (int v = 0; v < NV; v++) {
      V<T>& sum = at(sums + r * WIDTH<T> + v * W<T>);
      sum = sum * factor + at(bias + v * W<T>);
    }
  }
}

template <class T>
void unit(const Product<T>& p, const Digits* x, int64_t first, int64_t rows, int64_t panel, int64_t following, T* sums,
          T* more) {
  const int64_t column = panel * WIDTH<T>, columns = std::min<int64_t>(WIDTH<T>, p.outputs - column);
  if (p.ending == SILU_GATE) {
    panel_sums(p, x, first, rows, 2 * panel, 2 * panel + 1, sums);
    panel_sums(p, x, first, rows, 2 * panel + 1, 2 * following, more);
    for (int64_t i = 0; i < rows * WIDTH<T>; i += W<T>) {
      const V<T> gate = at(sums + i);
      at(sums + i) = gate / (exponential(-gate) + T(1)) * at(more + i);
    }
  } else {
    panel_sums(p, x, first, rows, panel, following, sums);
  }
  for (int64_t r = 0; r < rows; r++) {
    const T* from = sums + r * WIDTH<T>;
    T* to = p.y + (first + r) * p.y_row + column;
    if (p.ending == ADD) {
      const T* summand = p.summand + (first + r) * p.y_row + column;
      for (int64_t c = 0; c < columns; c++) to[c] = from[c] + summand[c];
    } else {
      std::memcpy(to, from, columns * sizeof(T));
    }
  }
}

// Writes a row of x as the panels of a weight take it.
template <class T>
void arrange(const Weight<T>& w, const T* x, int64_t inputs, T* out) {
  if (w.order)
    for (int64_t i = 0; i < inputs; i++) out[i] = x[w.order[i]];
  else
    std::memcpy(out, x, inputs * sizeof(T));
  if (w.factors)
    for (int64_t i = 0; i < inputs; i++) out[i] *= w.factors[i];
}

// Makes rows of x what a weight of integers takes: in its order, times its factors, and digits if there is a place.
inline void prepare(const Product<float>& p, int64_t r, float* arranged, Digits* digits) {
  const float* x = p.x + r * p.x_row;
  if (arranged) arrange(p.weight, x, p.inputs, arranged), x = arranged;
  if (digits) digits->set(r, x, p.weight.bits == 4);
}

template <class T>
void product(Product<T> p, int threads) {
  const int64_t panels = (p.outputs + WIDTH<T> - 1) / WIDTH<T>;
  const int64_t fitting = A_BYTES / (std::min(p.inputs, K_BLOCK) * int64_t(sizeof(T))) / ROWS * ROWS;
  const int64_t block = std::max<int64_t>(ROWS, std::min<int64_t>(fitting, (p.rows + ROWS - 1) / ROWS * ROWS));
  const int64_t blocks = (p.rows + block - 1) / block;
  const Product<T> given = p;
  std::unique_ptr<T[]> arranged(p.weight.order || p.weight.factors ? new T[p.rows * p.inputs] : nullptr);
  if (arranged) p.x = arranged.get(), p.x_row = p.inputs;
  std::unique_ptr<Digits> digits;
  if constexpr (HAS_DIGITS && std::is_same_v<T, float>)
    if (p.weight.bits) digits = std::make_unique<Digits>(p.weight, p.inputs, p.rows);
  if constexpr (std::is_same_v<T, float>)
    if (arranged || digits) {
#pragma omp parallel for num_threads(threads) schedule(static) if (p.rows * p.inputs > 4096)
      for (int64_t r = 0; r < p.rows; r++)
        prepare(given, r, arranged ? arranged.get() + r * p.inputs : nullptr, digits.get());
    }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> sums(block * WIDTH<T> * (p.ending == SILU_GATE ? 2 : 1));
    const int64_t units = blocks * panels;
    for (int64_t u = next++, following; u < units; u = following) {
      following = next++;
      const int64_t first = u / panels * block;
      unit(p, digits.get(), first, std::min(block, p.rows - first), u % panels, std::min(following, units - 1) % panels,
           sums.data(), sums.data() + block * WIDTH<T>);
    }
  }
}

template <class T>
void pack(const T* weight, int64_t row, int64_t outputs, int64_t inputs, T* panels, int64_t apart) {
  const int64_t count = (outputs + WIDTH<T> - 1) / WIDTH<T>;
#pragma omp parallel for
  for (int64_t panel = 0; panel < count; panel++)
    for (int64_t k = 0; k < inputs; k++)
      for (int64_t c = 0; c < WIDTH<T>; c++) {
        const int64_t column = panel * WIDTH<T> + c;
        panels[panel * apart + k * WIDTH<T> + c] = column < outputs ? weight[column * row + k] : T(0);
      }
}

// 1 / sqrt(mean of squares + epsilon) of each row (RMSNorm, Zhang & Sennrich 2019).
template <class T>
void inverse_rms(const T* x, int64_t row, int64_t rows, int64_t size, T epsilon, T* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 4096)
  for (int64_t r = 0; r < rows; r++) {
    V<T> sums{};
    const T* from = x + r * row;
    int64_t i = 0;
    for (; i + W<T> <= size; i += W<T>) sums += at(from + i) * at(from + i);
    T sum = 0;
    for (int j = 0; j < W<T>; j++) sum += sums[j];
    for (; i < size; i++) sum += from[i] * from[i];
    out[r] = T(1) / std::sqrt(sum / size + epsilon);
  }
}

}  // namespace
