// A cache block on multiply-adds in float32, for CPUs without bfloat16 instructions: AVX2, NEON, and AVX-512
// without BF16.
//
// A vector of pairs gives the weights of two input features: the first by a shift, the second by a mask, both without
// rounding. The rows are widened to float32 once for each cache block. An element's chain takes the first feature of a
// pair, then the second, in every register block alike.
#pragma once

#include "linear_groups.h"

namespace raydix {

namespace {

constexpr int64_t ROWS = 6;           // of a register block, at most
constexpr int64_t TASK_ROWS = 96;     // at most, share a panel while it is in the cache
constexpr int64_t FEW_ROWS = 24;      // up to here every thread reads its own columns of the weight once
constexpr bool PANELS_FIRST = false;  // the weight is read again for each block of rows
constexpr int64_t DEPTH = 128;        // pairs along in_features in one cache block; sixteen columns fit into L1
constexpr int64_t WIDENED = 2 * DEPTH * PANEL;  // words: a float for each weight

// A register of the machine.
#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;  // columns
#elif defined(__AVX2__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif
typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Words __attribute__((vector_size(WIDTH * 4)));  // pairs of bfloat16, the first in the lower half
typedef int8_t Bytes __attribute__((vector_size(WIDTH * 2)));   // pairs of int8
typedef int16_t Halves __attribute__((vector_size(WIDTH * 4)));

constexpr int64_t REGISTERS = LANES / WIDTH;  // for sixteen columns
constexpr int64_t X_STRIDE = 2 * DEPTH;       // floats from row to row of the widened rows

template <class T>
INLINE T read(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// a * b + c, rounded once.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(RAYDIX_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  // Written out, because the compiler copies factors and sums from register to register until a sum is left without one,
  // and a sum that goes through memory at every step takes twice the time.
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
#endif
}

// The vectors of sixteen columns by which a register block of `rows` rows keeps both multipliers busy, and whose sums
// still fit into the registers.
constexpr int64_t vectors_for(int64_t rows) {
  if (REGISTERS == 1 || rows == 1) return PANEL / LANES;
  return rows <= 3 ? 2 : 1;
}

// Bytes from a column to the next one.
constexpr int64_t column_bytes(Source source) { return source == Source::floats ? 4 : pair_bytes(source); }

// The weights of the first and the second feature of the pairs of WIDTH columns.
template <Source SOURCE>
INLINE Floats first_weights(const char* packed) {
  if constexpr (SOURCE == Source::floats) return read<Floats>(packed);
  if constexpr (SOURCE == Source::bf16) return (Floats)(read<Words>(packed) << 16);
  const Words pairs = (Words)__builtin_convertvector(read<Bytes>(packed), Halves);
  return __builtin_convertvector(pairs << 16 >> 16, Floats);
}

template <Source SOURCE>
INLINE Floats second_weights(const char* packed) {
  if constexpr (SOURCE == Source::floats) return read<Floats>(packed + PANEL * sizeof(float));
  if constexpr (SOURCE == Source::bf16) return (Floats)(read<Words>(packed) & int32_t(0xffff0000));
  const Words pairs = (Words)__builtin_convertvector(read<Bytes>(packed), Halves);
  return __builtin_convertvector(pairs >> 16, Floats);
}

// M rows by N * 16 columns; `x` are the widened rows.
template <int M, int N, Source SOURCE>
INLINE void register_block(const Block& b, const float* x) {
  constexpr int COUNT = N * REGISTERS;
  Floats total[M][COUNT];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < COUNT; ++n)
      total[m][n] = b.first ? Floats{} : read<Floats>(b.sums + m * PANEL + n * WIDTH);
  const char *packed = b.packed, *again = b.packed;
  // The weights are read once for the first features and again for the second ones: kept in between, they would drive
  // sums out of the registers. The compiler must not know that both pointers are equal.
  __asm__("" : "+r"(again));
  for (int64_t j = 0; j < b.pairs; ++j) {
    Floats w[COUNT];
    for (int n = 0; n < COUNT; ++n) w[n] = first_weights<SOURCE>(packed + n * WIDTH * column_bytes(SOURCE));
    for (int m = 0; m < M; ++m) {
      const Floats value = x[m * X_STRIDE] - Floats{};
      for (int n = 0; n < COUNT; ++n) total[m][n] = multiply_add(value, w[n], total[m][n]);
    }
    for (int n = 0; n < COUNT; ++n) w[n] = second_weights<SOURCE>(again + n * WIDTH * column_bytes(SOURCE));
    for (int m = 0; m < M; ++m) {
      const Floats value = x[m * X_STRIDE + 1] - Floats{};
      for (int n = 0; n < COUNT; ++n) total[m][n] = multiply_add(value, w[n], total[m][n]);
    }
    packed += PANEL * pair_bytes(SOURCE), again += PANEL * pair_bytes(SOURCE), x += 2;
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < COUNT; ++n) std::memcpy(b.sums + m * PANEL + n * WIDTH, &total[m][n], sizeof(Floats));
  if (!b.last) return;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) finish(b, load(b.sums + m * PANEL + n * LANES), m, n * LANES);
}

INLINE Block columns_from(Block b, int64_t vectors, Source source) {
  b.packed += vectors * LANES * column_bytes(source), b.sums += vectors * LANES, b.out += vectors * LANES;
  b.columns -= vectors * LANES;
  if (b.scales) b.scales += vectors * LANES;
  if (b.bias) b.bias += vectors * LANES;
  return b;
}

// M rows by all columns of the cache block.
template <int M, Source SOURCE>
void some_rows(const Block& b, const float* x, int64_t vectors) {
  constexpr int64_t N = vectors_for(M);
  int64_t n = 0;
  for (; n + N <= vectors; n += N) register_block<M, N, SOURCE>(columns_from(b, n, SOURCE), x);
  if constexpr (N > 1)
    for (; n < vectors; ++n) register_block<M, 1, SOURCE>(columns_from(b, n, SOURCE), x);
}

template <Source SOURCE>
void few_rows(const Block& b, const float* x, int64_t rows, int64_t vectors) {
  switch (rows) {
    case 1: return some_rows<1, SOURCE>(b, x, vectors);
    case 2: return some_rows<2, SOURCE>(b, x, vectors);
    case 3: return some_rows<3, SOURCE>(b, x, vectors);
    case 4: return some_rows<4, SOURCE>(b, x, vectors);
    case 5: return some_rows<5, SOURCE>(b, x, vectors);
    case 6: return some_rows<6, SOURCE>(b, x, vectors);
  }
}

// The cache block of an int8 weight as bfloat16, which its integers are without rounding.
void widen_weights(Block& b, int64_t vectors) {
  typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
  for (int64_t j = 0; j < b.pairs; ++j)
    for (int64_t n = 0; n < vectors * REGISTERS; ++n) {
      const int64_t at = j * PANEL + n * WIDTH;
      const char* packed = b.packed + at * pair_bytes(Source::int8);
      const Bits pairs = (Bits)first_weights<Source::int8>(packed) >> 16 | (Bits)second_weights<Source::int8>(packed);
      std::memcpy(b.widened + at, &pairs, sizeof pairs);
    }
  b.packed = (const char*)b.widened;
}

// Writes a cache block that is stored in groups down in float32.
struct WidenedFloats {
  static constexpr int COLUMNS = 1;
  float* to;

  INLINE void begin(int, int64_t, int64_t) {}
  INLINE void end(int, int64_t) {}
  INLINE void weights(int, int64_t n, int64_t pair, f32x16 first, f32x16 second) {
    store(to + 2 * pair * PANEL + n * LANES, first);
    store(to + (2 * pair + 1) * PANEL + n * LANES, second);
  }
};

// Multiplies M rows by a cache block that is stored in groups, without writing it down: of few rows that would take
// longer than the products. The sums of the columns that are not at hand wait in memory; chains are as ever.
template <int M>
struct GroupedRows {
  // A step of a chain waits for the one before it, so several chains go on side by side: as many as have their sums,
  // scales and what is taken off in registers.
  static constexpr int COLUMNS = (REGISTERS == 1 ? 4 : 2) / M;
  const Block& b;
  const float* x;
  f32x16 total[M][COLUMNS];

  INLINE void begin(int k, int64_t n, int64_t pair) {
    for (int m = 0; m < M; ++m)
      total[m][k] = b.first && pair == 0 ? splat(0.0f) : load(b.sums + m * PANEL + (n + k) * LANES);
  }
  INLINE void weights(int k, int64_t, int64_t pair, f32x16 first, f32x16 second) {
    for (int m = 0; m < M; ++m) {
      total[m][k] = fused(splat(x[m * X_STRIDE + 2 * pair]), first, total[m][k]);
      total[m][k] = fused(splat(x[m * X_STRIDE + 2 * pair + 1]), second, total[m][k]);
    }
  }
  INLINE void end(int k, int64_t n) {
    for (int m = 0; m < M; ++m) store(b.sums + m * PANEL + (n + k) * LANES, total[m][k]);
  }
};

template <int M>
void grouped_rows(const Block& b, const float* x, int64_t vectors) {
  visit_groups(b, vectors, GroupedRows<M>{b, x, {}});
  if (!b.last) return;
  for (int m = 0; m < M; ++m)
    for (int64_t n = 0; n < vectors; ++n) finish(b, load(b.sums + m * PANEL + n * LANES), m, n * LANES);
}

// The cache block of a weight stored in groups in float32. All columns at once: a line of memory has numbers of 64.
void widen_groups(Block& b, int64_t vectors) {
  visit_groups(b, vectors, WidenedFloats{(float*)b.widened});
  b.packed = (const char*)b.widened;
}

void widen_rows(const Block& b, int64_t rows, float* x) {
  const int64_t features = 2 * b.pairs, whole = features / LANES * LANES;
  for (int64_t m = 0; m < rows; ++m) {
    const bf16* from = b.x + m * b.x_stride;
    float* to = x + m * X_STRIDE;
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, load(from + i));
    for (int64_t i = whole; i < features; ++i) to[i] = to_float(from[i]);
  }
}

// Register blocks of nearly the same height, for low ones leave the multipliers waiting.
template <Source SOURCE>
void many_rows(const Block& b, const float* x, int64_t rows, int64_t vectors) {
  const int64_t parts = (rows + ROWS - 1) / ROWS;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t row = rows * part / parts, end = rows * (part + 1) / parts;
    Block some = b;
    some.out += row * b.out_stride, some.sums += row * PANEL;
    few_rows<SOURCE>(some, x + row * X_STRIDE, end - row, vectors);
  }
}

void all_rows(Block b, int64_t rows, int64_t vectors, Source source) {
  alignas(64) static thread_local float x[TASK_ROWS * X_STRIDE];
  widen_rows(b, rows, x);
  if (source == Source::groups) {
    if (rows == 1) return grouped_rows<1>(b, x, vectors);
    if (rows == 2) return grouped_rows<2>(b, x, vectors);
    widen_groups(b, vectors);
    return many_rows<Source::floats>(b, x, rows, vectors);
  }
  if (source == Source::int8 && rows <= ROWS) return few_rows<Source::int8>(b, x, rows, vectors);
  if (source == Source::int8) widen_weights(b, vectors);
  many_rows<Source::bf16>(b, x, rows, vectors);
}

void end_rows() {}

}  // namespace

}  // namespace raydix
