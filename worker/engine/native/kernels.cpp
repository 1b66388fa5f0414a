// Matrix products and attention of a decoder on a CPU, by torch's own OpenMP threads.
//
// Products: a weight [N, K] is packed once into panels of NV vectors of columns; a tile of ROWS x NV vectors is
// accumulated in registers over all of K (Goto & van de Geijn 2008). The sum of an output is taken in the same
// order whatever the batch is, so a row's result does not depend on its neighbours.
//
// Attention: queries lie along the lanes of vectors, keys and values are read where they are, scalar by scalar;
// softmax is online (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022). Runs of keys that many
// queries share are attended to once for all of them and merged by log-sum-exp.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 8, NV = 3;  // 24 sums, 3 of the panel, 1 broadcast: of 32 registers
#elif defined(__AVX2__)
constexpr int BYTES = 32, ROWS = 4, NV = 3;  // 12 + 3 + 1: of 16 registers
#else
constexpr int BYTES = 16, ROWS = 8, NV = 3;
#endif
constexpr int64_t K_BLOCK = 768;             // rows of a panel that stay in the level-1 and 2 caches
constexpr int64_t A_BYTES = 512 << 10;       // input rows that stay in the level-2 cache
constexpr int64_t KEY_BLOCK = 96;

template <class T> struct Lanes;
template <> struct Lanes<float> {
  typedef float V __attribute__((vector_size(BYTES), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(BYTES)));
  typedef int32_t Int;
};
template <> struct Lanes<double> {
  typedef double V __attribute__((vector_size(BYTES), aligned(8), may_alias));
  typedef int64_t I __attribute__((vector_size(BYTES)));
  typedef int64_t Int;
};
template <class T> using V = typename Lanes<T>::V;
template <class T> using I = typename Lanes<T>::I;
template <class T> constexpr int W = BYTES / sizeof(T);
template <class T> constexpr int WIDTH = NV * W<T>;  // columns of a panel, queries of a tile

template <class T> inline V<T> all(T x) { return x - V<T>{}; }
template <class T> inline V<T>& at(T* p) { return *reinterpret_cast<V<T>*>(p); }
template <class T> inline V<T> at(const T* p) { return *reinterpret_cast<const V<T>*>(p); }
template <class T> inline V<T> larger(V<T> a, V<T> b) { return a > b ? a : b; }
#if defined(__AVX512F__)  // one instruction, which compilers do not find
template <> inline V<float> larger<float>(V<float> a, V<float> b) { return _mm512_max_ps(a, b); }
#endif

// e^x, with x > 88 taken as 88 and 0 far below. Range reduction and polynomial of Cephes; within 2 ulp.
inline V<float> exponential(V<float> x) {
  const V<float> low = all<float>(-87.3f), high = all<float>(88.f);
#if defined(__AVX512F__)
  x = V<float>(_mm512_min_ps(high, x));
  const V<float> n = V<float>(_mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT));
#else
  const auto vanishes = x < low;
  x = vanishes ? low : x > high ? high : x;
  const V<float> shift = all<float>(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const V<float> n = (x * 1.44269504f + shift) - shift;
#endif
  const V<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r + 1.f;
  p = p * r + 1.f;
#if defined(__AVX512F__)
  return V<float>(_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, n));
#else
  const I<float> bits = (__builtin_convertvector(n, I<float>) + 127) << 23;
  V<float> power;
  std::memcpy(&power, &bits, sizeof power);
  return vanishes ? all<float>(0.f) : p * power;
#endif
}
inline V<double> exponential(V<double> x) {
  for (int i = 0; i < W<double>; i++) x[i] = std::exp(x[i]);
  return x;
}

// softcap * tanh(x / softcap), as 1 - 2 / (e^2x + 1).
template <class T> inline V<T> capped(V<T> x, T softcap) {
  return (T(1) - T(2) / (exponential(larger<T>(x * (2 / softcap), all<T>(-40))) + T(1))) * softcap;
}

// Combines the lanes of a vector by f, in halves.
template <class T, int N = W<T> / 2, class F> inline T reduced(V<T> x, F f) {
  if constexpr (N == 0) {
    return x[0];
  } else {
    constexpr auto order = [] {
      std::array<typename Lanes<T>::Int, W<T>> from{};
      for (int i = 0; i < W<T>; i++) from[i] = (i + N) % W<T>;
      return from;
    }();
    I<T> from;
    std::memcpy(&from, order.data(), sizeof from);
    return reduced<T, N / 2>(f(x, V<T>(__builtin_shuffle(x, from))), f);
  }
}
template <class T> inline T sum_of(V<T> x) { return reduced<T>(x, [](V<T> a, V<T> b) { return a + b; }); }
template <class T> inline T largest_of(V<T> x) { return reduced<T>(x, [](V<T> a, V<T> b) { return larger<T>(a, b); }); }

// Transposes W vectors of W lanes: swaps the off-diagonal quarters, then within quarters (Eklundh 1972).
template <class T, int N = W<T> / 2> inline void transpose(V<T> (&rows)[W<T>]) {
  if constexpr (N > 0) {
    using Order = std::array<typename Lanes<T>::Int, W<T>>;
    constexpr auto orders = [] {
      std::array<Order, 2> both{};
      for (int i = 0; i < W<T>; i++) both[0][i] = i & N ? W<T> + i - N : i, both[1][i] = i & N ? W<T> + i : i + N;
      return both;
    }();
    I<T> upper, lower;
    std::memcpy(&upper, orders[0].data(), sizeof upper), std::memcpy(&lower, orders[1].data(), sizeof lower);
    for (int i = 0; i < W<T>; i++)
      if (!(i & N)) {
        const V<T> a = rows[i], b = rows[i + N];
        rows[i] = __builtin_shuffle(a, b, upper), rows[i + N] = __builtin_shuffle(a, b, lower);
      }
    transpose<T, N / 2>(rows);
  }
}

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
template <int R = ROWS, class F> inline void with_rows(int64_t rows, F f) {
  if constexpr (R == 1) f(std::integral_constant<int, 1>());
  else if (rows == R) f(std::integral_constant<int, R>());
  else with_rows<R - 1>(rows, f);
}

enum Ending { PLAIN = 0, ADD = 1, SILU_GATE = 2 };

template <class T> struct Product {
  const T* x;         // [rows, inputs], `x_row` apart
  int64_t x_row, rows, inputs, outputs;
  const T* weight;    // panels [inputs, WIDTH]; SILU_GATE: of gate and up in turn
  const T* bias;      // [outputs] or null (for SILU_GATE in the order of the panels, padded)
  const T* scale;     // [rows]: factors of the sums, or null
  const T* summand;   // [rows, outputs] for ADD, `y_row` apart as y; may be y
  T* y;
  int64_t y_row;
  int64_t ending;
};

// Computes `rows` rows of one panel into sums [rows, WIDTH], scale and bias included.
template <class T>
void panel_sums(const Product<T>& p, int64_t first, int64_t rows, int64_t panel, int64_t following, T* sums) {
  const T* weight = p.weight + panel * p.inputs * WIDTH<T>;
  const int64_t blocks = (p.inputs + K_BLOCK - 1) / K_BLOCK, depth = (p.inputs + blocks - 1) / blocks;
  const int64_t tiles = (rows + ROWS - 1) / ROWS, pace = WIDTH<T> * sizeof(T) / tiles;
  const char* ahead = reinterpret_cast<const char*>(p.weight + following * p.inputs * WIDTH<T>);
  for (int64_t k = 0; k < p.inputs; k += depth) {
    const int64_t now = std::min(depth, p.inputs - k);
    for (int64_t r = 0; r < rows; r += ROWS, ahead += now * pace) {
      with_rows(std::min<int64_t>(ROWS, rows - r), [&](auto count) {
        constexpr int R = decltype(count)::value;
        const T* x = p.x + (first + r) * p.x_row + k;
        const T* columns = weight + k * WIDTH<T>;
        T* out = sums + r * WIDTH<T>;
        constexpr int LINES = (WIDTH<T> * sizeof(T) + 63) / 64;
        if (tiles == 1) tile<T, R, LINES>(x, p.x_row, 1, columns, now, out, k, ahead, pace);
        else if (tiles == 2) tile<T, R, (LINES + 1) / 2>(x, p.x_row, 1, columns, now, out, k, ahead, pace);
        else tile<T, R, 1>(x, p.x_row, 1, columns, now, out, k, ahead, pace);
      });
    }
  }
  if (!p.scale && !p.bias) return;
  T bias[WIDTH<T>] = {};
  if (p.bias)
    std::memcpy(bias, p.bias + panel * WIDTH<T>, sizeof(T) * (p.ending == SILU_GATE ? WIDTH<T> : std::min<int64_t>(WIDTH<T>, p.outputs - panel * WIDTH<T>)));
  for (int64_t r = 0; r < rows; r++) {
    const V<T> factor = all<T>(p.scale ? p.scale[first + r] : T(1));
    for (int v = 0; v < NV; v++) {
      V<T>& sum = at(sums + r * WIDTH<T> + v * W<T>);
      sum = sum * factor + at(bias + v * W<T>);
    }
  }
}

template <class T>
void unit(const Product<T>& p, int64_t first, int64_t rows, int64_t panel, int64_t following, T* sums, T* more) {
  const int64_t column = panel * WIDTH<T>, columns = std::min<int64_t>(WIDTH<T>, p.outputs - column);
  if (p.ending == SILU_GATE) {
    panel_sums(p, first, rows, 2 * panel, 2 * panel + 1, sums);
    panel_sums(p, first, rows, 2 * panel + 1, 2 * following, more);
    for (int64_t i = 0; i < rows * WIDTH<T>; i += W<T>) {
      const V<T> gate = at(sums + i);
      at(sums + i) = gate / (exponential(-gate) + T(1)) * at(more + i);
    }
  } else {
    panel_sums(p, first, rows, panel, following, sums);
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

template <class T> void product(const Product<T>& p, int threads) {
  const int64_t panels = (p.outputs + WIDTH<T> - 1) / WIDTH<T>;
  const int64_t fitting = A_BYTES / (std::min(p.inputs, K_BLOCK) * int64_t(sizeof(T))) / ROWS * ROWS;
  const int64_t block = std::max<int64_t>(ROWS, std::min<int64_t>(fitting, (p.rows + ROWS - 1) / ROWS * ROWS));
  const int64_t blocks = (p.rows + block - 1) / block;
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> sums(block * WIDTH<T> * (p.ending == SILU_GATE ? 2 : 1));
    const int64_t units = blocks * panels;
    for (int64_t u = next++, following; u < units; u = following) {
      following = next++;
      const int64_t first = u / panels * block;
      unit(p, first, std::min(block, p.rows - first), u % panels, std::min(following, units - 1) % panels,
           sums.data(), sums.data() + block * WIDTH<T>);
    }
  }
}

// ---- attention ----

struct Part {          // queries and a run of keys
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
  const Part* part;         // by level
  int64_t levels;
  const int64_t* level_end; // parts before the end of each level; within one, a token is in one part at most
  const int64_t* indices;   // packed tokens
  const int64_t* reach;     // how many keys, from the first on, lie at or before the query's position
  const Storage* storage;   // where the query's keys are; the last three have one entry a query
  int64_t writes;
  const Write* write;
  const int64_t* offsets;   // [layers, 2]: elements before a layer's keys and values, in a storage of one token
  int64_t tokens;
};

template <class T> struct Layer {
  int64_t layer, heads, groups, key_size, value_size;
  T *q, *k, *v;             // [tokens, heads or groups, size]
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  T* out;                   // [tokens, heads, value_size]
  T* softmax;               // [tokens, heads, 2]: highest score and sum of e^(score - highest) so far
  T scale, softcap;         // softcap 0: none
  int64_t window;           // 0: none
  const T* sinks;           // [heads] or null
  const T *cos, *sin;       // [tokens, key_size / 2] or null: q and k are to be rotated
  const T* head_norm;       // [heads + groups, key_size] or null
  T epsilon;
};

template <class T> void rotate_head(const Layer<T>& l, T* x, int64_t token, const T* weight) {
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

template <class T> void rotate_token(const Layer<T>& l, int64_t token) {
  for (int64_t h = 0; h < l.heads; h++)
    rotate_head(l, l.q + token * l.q_token + h * l.q_head, token, l.head_norm ? l.head_norm + h * l.key_size : nullptr);
  for (int64_t g = 0; g < l.groups; g++)
    rotate_head(l, l.k + token * l.k_token + g * l.k_head, token, l.head_norm ? l.head_norm + (l.heads + g) * l.key_size : nullptr);
}

template <class T> struct Run { const T *keys, *values; };

template <class T> Run<T> run_of(const Step& s, const Layer<T>& l, Storage in, int64_t group, int64_t first) {
  const int64_t* offsets = s.offsets + l.layer * 2;
  const int64_t at = group * in.tokens + first;
  const T* begin = reinterpret_cast<const T*>(in.address);
  return {begin + offsets[0] * in.tokens + at * l.key_size, begin + offsets[1] * in.tokens + at * l.value_size};
}

template <class T> void write_token(const Step& s, const Layer<T>& l, const Write& w) {
  for (int64_t g = 0; g < l.groups; g++) {
    const Run<T> to = run_of(s, l, w.to, g, w.at);
    std::memcpy(const_cast<T*>(to.keys), l.k + w.token * l.k_token + g * l.k_head, l.key_size * sizeof(T));
    std::memcpy(const_cast<T*>(to.values), l.v + w.token * l.v_token + g * l.v_head, l.value_size * sizeof(T));
  }
}

// Joins two softmaxes, one of them known by its highest score and its sum of e^(score - highest), the other (whose
// values have been weighted so far) as well. Leaves the joint one in `high` and `total`; `keep` and `take` are the
// factors of what the first had attended to and of the weighted values of the second.
template <class X, class Exp, class Max>
inline void join(X other_high, X other_total, X& high, X& total, X& keep, X& take, Exp exp, Max max) {
  const X most = max(high, other_high), ours = exp(high - most);
  const X theirs = exp(other_high - most) * other_total;
  total = total * ours + theirs, high = most;
  const X inverse = total > 0 ? 1 / total : X{};
  keep = theirs * inverse, take = ours * inverse;
}

// What the processor does not foresee: it stops at the end of a page.
template <class T> inline void fetch(const T* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + i, 0, 3);
}

// Up to WIDTH (token, head) pairs along the lanes, against one run of keys.
template <class T> struct Queries {
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
    for (int64_t i = 0; i < count * WIDTH<T>; i += W<T>) at(scores.data() + i) = capped<T>(at(scores.data() + i), softcap);
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
    for (int64_t i = 0; i < WIDTH<T>; i += W<T>)
      join(V<T>(at(high + i)), V<T>(at(sum + i)), at(highest + i), at(total + i), at(keep + i), at(take + i),
           [](V<T> x) { return exponential(x); }, [](V<T> a, V<T> b) { return larger<T>(a, b); });
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

// One query of H heads against keys of its own: these are read once, along the lanes.
template <class T> struct Alone {
  static constexpr int H = 4;       // heads at a time
  static constexpr int AHEAD = 8;  // keys
  T scores[H][KEY_BLOCK], high[H], total[H];
  std::vector<T> sums;  // [H, value_size]

  explicit Alone(const Layer<T>& l) : sums(H * l.value_size) {}

  template <int COUNT> void attend(const Layer<T>& l, int64_t token, int64_t head, Run<T> run, int64_t from, int64_t until) {
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
    T keep, take;
    join(l.sinks ? l.sinks[head] : std::numeric_limits<T>::lowest(), l.sinks ? T(1) : T(0), high[h], total[h], keep, take,
         [](T x) { return std::exp(x); }, [](T a, T b) { return std::max(a, b); });
    T* known = l.softmax + (token * l.heads + head) * 2;
    known[0] = high[h], known[1] = total[h];
    T* out = l.out + (token * l.heads + head) * l.value_size;
    for (int64_t d = 0; d < l.value_size; d++) out[d] = sums[h * l.value_size + d] * take;
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

  template <int COUNT> __attribute__((noinline)) void add(const T* values, int64_t size, int64_t count) {
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

// A unit of a part: one (query, group) where batched, else as many (query, head) pairs of a group as there are lanes.
template <class T> int64_t units_of(const Part& p, const Layer<T>& l) {
  if (p.batched) return p.queries * l.groups;
  return (p.queries * (l.heads / l.groups) + WIDTH<T> - 1) / WIDTH<T> * l.groups;
}

template <class T> void attend_alone(const Step& s, const Layer<T>& l, const Part& p, int64_t unit, Alone<T>& alone) {
  const int64_t group = unit % l.groups, query = unit / l.groups, shared = l.heads / l.groups;
  const int64_t token = s.indices[p.offset + query], reach = s.reach[p.offset + query];
  const Run<T> run = run_of(s, l, s.storage[p.offset + query], group, p.first);
  const int64_t from = l.window ? std::max<int64_t>(0, reach - l.window) : 0, until = std::min(p.length, reach);
  for (int64_t h = 0; h < shared; h += Alone<T>::H)
    with_rows<Alone<T>::H>(std::min<int64_t>(Alone<T>::H, shared - h), [&](auto count) {
      alone.template attend<decltype(count)::value>(l, token, group * shared + h, run, from, until);
    });
}

template <class T> void attend_together(const Step& s, const Layer<T>& l, const Part& p, int64_t unit, Queries<T>& queries, bool first) {
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

template <class T> void attention(const Step& s, const Layer<T>& l, int threads) {
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
        if (part.batched) attend_alone(s, l, part, unit, alone);
        else attend_together(s, l, part, unit, queries, level == 0);
      }
#pragma omp barrier
    }
  }
}

template <class T> void pack(const T* weight, int64_t row, int64_t outputs, int64_t inputs, T* panels, int64_t apart) {
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
template <class T> void inverse_rms(const T* x, int64_t row, int64_t rows, int64_t size, T epsilon, T* out, int threads) {
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

// ---- a whole layer: norm, attention, norm and gated MLP, each added to the residual stream ----

template <class T> struct Decoder {
  int64_t hidden, inner;
  const T *qkv, *qkv_bias, *output, *output_bias, *gate_up, *gate_up_bias, *down, *down_bias;
  T epsilon, mlp_epsilon;
  T* x;                   // [tokens, hidden]: changed in place
  T* scratch;             // as many as scratch_of says
  const int64_t* wanted;  // the tokens whose output is needed, or null: all
  int64_t wanted_count;
  Layer<T> attention;     // q, k, v, out and softmax are laid out here
};

template <class T> int64_t scratch_of(const Decoder<T>& d, int64_t tokens) {
  const Layer<T>& l = d.attention;
  const int64_t a_token = 1 + (l.heads + l.groups) * l.key_size + l.groups * l.value_size + l.heads * (l.value_size + 2) + d.inner;
  return tokens * (a_token + d.hidden + l.heads * l.value_size);
}

// Copies rows `which` of a matrix to the front of another one, or back.
template <class T> void gather(const T* from, const int64_t* which, int64_t count, int64_t size, T* to) {
  for (int64_t i = 0; i < count; i++) std::memcpy(to + i * size, from + which[i] * size, size * sizeof(T));
}
template <class T> void scatter(const T* from, const int64_t* which, int64_t count, int64_t size, T* to) {
  for (int64_t i = 0; i < count; i++) std::memcpy(to + which[i] * size, from + i * size, size * sizeof(T));
}

template <class T> void decoder(const Step& s, Decoder<T> d, int threads) {
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
  product(Product<T>{d.x, d.hidden, tokens, d.hidden, projected, d.qkv, d.qkv_bias, scale, nullptr, l.q, projected, PLAIN}, threads);
  attention(s, l, threads);

  T *x = d.x, *out = l.out;
  int64_t rows = tokens;
  if (d.wanted) {
    rows = d.wanted_count;
    x = take(rows * d.hidden), out = take(rows * attended);
    gather(d.x, d.wanted, rows, d.hidden, x), gather(l.out, d.wanted, rows, attended, out);
  }
  product(Product<T>{out, attended, rows, attended, d.hidden, d.output, d.output_bias, nullptr, x, x, d.hidden, ADD}, threads);
  inverse_rms(x, d.hidden, rows, d.hidden, d.mlp_epsilon, scale, threads);
  T* inner = take(rows * d.inner);
  product(Product<T>{x, d.hidden, rows, d.hidden, d.inner, d.gate_up, d.gate_up_bias, scale, nullptr, inner, d.inner, SILU_GATE}, threads);
  product(Product<T>{inner, d.inner, rows, d.inner, d.hidden, d.down, d.down_bias, nullptr, x, x, d.hidden, ADD}, threads);
  if (d.wanted) scatter(x, d.wanted, rows, d.hidden, d.x);
}

}  // namespace

#define FOR_TYPE(T, name)                                                                                     \
  int64_t width_##name() { return WIDTH<T>; }                                                                 \
  void product_##name(const Product<T>* p, int threads) { product(*p, threads); }                            \
  void attention_##name(const Step* s, const Layer<T>* l, int threads) { attention(*s, *l, threads); }       \
  int64_t scratch_##name(const Decoder<T>* d, int64_t tokens) { return scratch_of(*d, tokens); }             \
  void decoder_##name(const Step* s, const Decoder<T>* d, int threads) { decoder(*s, *d, threads); }         \
  void pack_##name(const T* weight, int64_t row, int64_t outputs, int64_t inputs, T* panels, int64_t apart) { \
    pack(weight, row, outputs, inputs, panels, apart);                                                        \
  }                                                                                                           \
  void inverse_rms_##name(const T* x, int64_t row, int64_t rows, int64_t size, T epsilon, T* out, int threads) { \
    inverse_rms(x, row, rows, size, epsilon, out, threads);                                                   \
  }

extern "C" {
FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
}
