// A cache block on vdpbf16ps: register blocks of up to six rows by a panel.
#pragma once

#include "linear_groups.h"

namespace raydix {

namespace {

constexpr int64_t ROWS = 6;          // by PANEL columns fill the registers
constexpr int64_t TASK_ROWS = 96;    // at most, share a panel while it is in the cache
constexpr int64_t FEW_ROWS = 24;     // up to here every thread reads its own columns of the weight once
constexpr int64_t DEPTH = 512;        // pairs along in_features in one cache block
constexpr int64_t WIDENED = DEPTH * PANEL;
constexpr bool PANELS_FIRST = false;  // the weight is read again for each block of rows
constexpr int64_t AHEAD = 4096;      // bytes from the int8 weights being widened to those that memory is asked for

template <int M, int N, int LINES, Source SOURCE>
INLINE void register_block(const Block& b) {
  __m512 total[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n)
      total[m][n] = b.first ? _mm512_setzero_ps() : _mm512_loadu_ps(b.sums + m * PANEL + n * LANES);
  for (int64_t j = 0; j < b.pairs; ++j) {
    __m512bh w[N];
    for (int n = 0; n < N; ++n) {
      const __m512i pairs = load_pairs<SOURCE>(b.packed + (j * PANEL + n * LANES) * pair_bytes(SOURCE));
      if (SOURCE == Source::int8_kept) _mm512_store_si512(b.widened + j * PANEL + n * LANES, pairs);
      w[n] = (__m512bh)pairs;
    }
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(b.ahead + (j * LINES + line) * 64);
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, b.x + m * b.x_stride + 2 * j, sizeof pair);
      for (int n = 0; n < N; ++n)
        total[m][n] = _mm512_dpbf16_ps(total[m][n], (__m512bh)_mm512_set1_epi32(pair), w[n]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      if (!b.last) {
        _mm512_storeu_ps(b.sums + m * PANEL + n * LANES, total[m][n]);
        continue;
      }
      finish(b, (f32x16)total[m][n], m, n * LANES);
    }
}

template <int M, Source SOURCE>
void some_rows(Block b, int64_t vectors) {
  if (vectors == PANEL / LANES) {
    constexpr int64_t N = PANEL / LANES;
    if (!b.ahead) return register_block<M, N, 0, SOURCE>(b);
    return b.lines == 1 ? register_block<M, N, 1, SOURCE>(b) : register_block<M, N, 2, SOURCE>(b);
  }
  for (int64_t n = 0; n < vectors; ++n) {
    register_block<M, 1, 0, SOURCE>(b);
    b.packed += LANES * pair_bytes(SOURCE), b.widened += LANES, b.sums += LANES, b.out += LANES, b.columns -= LANES;
    if (b.scales) b.scales += LANES;
    if (b.bias) b.bias += LANES;
  }
}

template <Source SOURCE>
void few_rows(const Block& b, int64_t rows, int64_t vectors) {
  switch (rows) {
    case 1: return some_rows<1, SOURCE>(b, vectors);
    case 2: return some_rows<2, SOURCE>(b, vectors);
    case 3: return some_rows<3, SOURCE>(b, vectors);
    case 4: return some_rows<4, SOURCE>(b, vectors);
    case 5: return some_rows<5, SOURCE>(b, vectors);
    case 6: return some_rows<6, SOURCE>(b, vectors);
  }
}

void all_rows(Block b, int64_t rows, int64_t vectors, Source source) {
  if (source == Source::groups) widen_groups(b, vectors), source = Source::bf16;
  if (rows <= ROWS && source == Source::int8) {
    // Widening takes so long that the processor does not look far enough ahead by itself.
    b.ahead = b.packed + AHEAD, b.lines = 2;
    return few_rows<Source::int8>(b, rows, vectors);
  }
  // What the next call reads is asked for during the first register blocks of this one.
  const char* const ahead_end = b.ahead + b.pairs * PANEL * pair_bytes(source);
  b.lines = rows > 3 * ROWS || source == Source::int8 ? 1 : 2;
  for (; rows >= ROWS; rows -= ROWS) {
    if (source == Source::int8) {
      some_rows<ROWS, Source::int8_kept>(b, vectors);
      source = Source::bf16, b.packed = (const char*)b.widened;
    } else {
      some_rows<ROWS, Source::bf16>(b, vectors);
    }
    b.x += ROWS * b.x_stride, b.out += ROWS * b.out_stride, b.sums += ROWS * PANEL;
    if (b.ahead) b.ahead += b.pairs * b.lines * 64;
    if (b.ahead >= ahead_end) b.ahead = nullptr;
  }
  few_rows<Source::bf16>(b, rows, vectors);
}

void end_rows() {}

}  // namespace

}  // namespace raydix
