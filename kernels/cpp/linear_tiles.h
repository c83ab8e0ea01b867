// A cache block on matrix tiles (AMX): C tiles of 16 rows by 16 columns, chains along in_features by 16 pairs.
//
// Tiles 0 to 3 hold sums, the others rows and weights. Up to 16 rows take one row of tiles by a panel, because reading
// the weight is what takes the time; more take 2 x 2 tiles, which read each tile of rows and weights for two products.
#pragma once

#include <immintrin.h>

#include "linear_groups.h"

namespace raydix {

namespace {

constexpr int64_t ROWS = 16;        // of a tile
constexpr int64_t TASK_ROWS = 128;  // at most, share a panel while it is in the cache
constexpr int64_t FEW_ROWS = 32;    // up to here every thread reads its own columns of the weight once
constexpr int64_t DEPTH = 512;      // pairs along in_features in one cache block
constexpr int64_t WIDENED = DEPTH * PANEL;
constexpr bool PANELS_FIRST = true;  // rows are read again for each panel, from the cache; the weight once
constexpr int64_t STEP = 16;        // pairs of a tile
constexpr int64_t AHEAD = 4096;     // bytes from the weights being read to those that memory is asked for
constexpr int64_t WEIGHTS_STRIDE = PANEL * 4;
constexpr int64_t SUMS_STRIDE = PANEL * 4;

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The compiler does not know that tile instructions read memory: what was written there must be in place before.
INLINE void written(const void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }

thread_local int64_t shaped = -1;  // the shapes that this thread's tiles have; -1: none

// Shapes of the tiles for `upper` rows in the first tile of rows and `lower` in the second; 0: there is no second.
// Tiles: 0 and 1 (2 and 3) sums of the first (second) rows, 4 (5) the rows, 6 and 7 weights. Without second rows 0 to 3
// are sums of the first, and 5 to 7 weights.
void shape_tiles(int64_t upper, int64_t lower) {
  if (shaped == upper * 32 + lower) return;
  shaped = upper * 32 + lower;
  Shapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = 64, shapes.rows[tile] = 16;
  for (int tile : {0, 1, 4}) shapes.rows[tile] = uint8_t(upper);
  for (int tile : {2, 3}) shapes.rows[tile] = uint8_t(lower ? lower : upper);
  if (lower) shapes.rows[5] = uint8_t(lower);
  written(&shapes);
  _tile_loadconfig(&shapes);
}

// The operands of sixteen pairs. The last step of a chain may have fewer: then they are copies padded with zeros.
struct Operands {
  const void* rows;
  int64_t rows_stride;  // bytes
  const uint32_t* weights;
};

struct alignas(64) Scratch {
  uint32_t rows[2 * ROWS][STEP];
  uint32_t weights[STEP][PANEL];
};

template <Source SOURCE>
INLINE Operands operands(const Block& b, int64_t pair, int64_t rows, int64_t vectors, Scratch& scratch) {
  const char* packed = b.packed + pair * PANEL * pair_bytes(SOURCE);
  const int64_t count = std::min(STEP, b.pairs - pair);
  Operands result{b.x + 2 * pair, b.x_stride * 2, (const uint32_t*)packed};
  if (SOURCE == Source::int8) {
    for (int64_t j = 0; j < count; ++j)
      for (int64_t n = 0; n < vectors; ++n)
        _mm512_store_si512(scratch.weights[j] + n * LANES, load_pairs<SOURCE>(packed + (j * PANEL + n * LANES) * 2));
    result.weights = scratch.weights[0];
    written(&scratch);
  }
  if (count == STEP) return result;
  for (int64_t m = 0; m < rows; ++m) {
    std::memset(scratch.rows[m], 0, sizeof scratch.rows[m]);
    std::memcpy(scratch.rows[m], b.x + m * b.x_stride + 2 * pair, size_t(count) * 4);
  }
  for (int64_t j = 0; j < STEP; ++j) {
    if (j >= count) {
      std::memset(scratch.weights[j], 0, size_t(vectors) * 64);
    } else if (SOURCE != Source::int8) {
      std::memcpy(scratch.weights[j], (const uint32_t*)packed + j * PANEL, size_t(vectors) * 64);
    }
  }
  written(&scratch);
  return {scratch.rows[0], STEP * 4, scratch.weights[0]};
}

// The sums of `rows` rows and `vectors` vectors of columns are in b.sums: the end of the chain.
INLINE void finish_rows(const Block& b, int64_t rows, int64_t vectors) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < vectors; ++n) finish(b, load(b.sums + m * PANEL + n * LANES), m, n * LANES);
}

#define EACH_SUM(DO)          \
  DO(0);                      \
  if constexpr (N > 1) DO(1); \
  if constexpr (N > 2) DO(2); \
  if constexpr (N > 3) DO(3);

// Up to sixteen rows by N tiles of columns.
template <int N, Source SOURCE>
void one_row_of_tiles(const Block& b, int64_t rows) {
  Scratch scratch;
  shape_tiles(rows, 0);
#define ZERO(n) _tile_zero(n)
#define LOAD(n) _tile_loadd(n, b.sums + n * LANES, SUMS_STRIDE)
#define STORE(n) _tile_stored(n, b.sums + n * LANES, SUMS_STRIDE)
  if (b.first) {
    EACH_SUM(ZERO)
  } else {
    EACH_SUM(LOAD)
  }
  for (int64_t pair = 0; pair < b.pairs; pair += STEP) {
    const Operands at = operands<SOURCE>(b, pair, rows, N, scratch);
    if (N == PANEL / LANES) {
      const char* ahead = b.packed + pair * PANEL * pair_bytes(SOURCE) + AHEAD;
      for (int64_t line = 0; line < STEP * PANEL * pair_bytes(SOURCE); line += 64) __builtin_prefetch(ahead + line);
    }
    _tile_loadd(4, at.rows, at.rows_stride);
    _tile_loadd(5, at.weights, WEIGHTS_STRIDE);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(6, at.weights + LANES, WEIGHTS_STRIDE);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, at.weights + 2 * LANES, WEIGHTS_STRIDE);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, at.weights + 3 * LANES, WEIGHTS_STRIDE);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  EACH_SUM(STORE)
#undef ZERO
#undef LOAD
#undef STORE
  if (b.last) finish_rows(b, rows, N);
}

#undef EACH_SUM

// Seventeen to 32 rows by one or two tiles of columns.
template <int N>
void two_rows_of_tiles(const Block& b, int64_t rows) {
  Scratch scratch;
  shape_tiles(ROWS, rows - ROWS);
  float* const lower = b.sums + ROWS * PANEL;
  if (b.first) {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (N > 1) {
      _tile_zero(1);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, b.sums, SUMS_STRIDE);
    _tile_loadd(2, lower, SUMS_STRIDE);
    if constexpr (N > 1) {
      _tile_loadd(1, b.sums + LANES, SUMS_STRIDE);
      _tile_loadd(3, lower + LANES, SUMS_STRIDE);
    }
  }
  for (int64_t pair = 0; pair < b.pairs; pair += STEP) {
    const Operands at = operands<Source::bf16>(b, pair, rows, N, scratch);
    _tile_loadd(4, at.rows, at.rows_stride);
    _tile_loadd(6, at.weights, WEIGHTS_STRIDE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, (const char*)at.rows + ROWS * at.rows_stride, at.rows_stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (N > 1) {
      _tile_loadd(7, at.weights + LANES, WEIGHTS_STRIDE);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, b.sums, SUMS_STRIDE);
  _tile_stored(2, lower, SUMS_STRIDE);
  if constexpr (N > 1) {
    _tile_stored(1, b.sums + LANES, SUMS_STRIDE);
    _tile_stored(3, lower + LANES, SUMS_STRIDE);
  }
  if (b.last) finish_rows(b, rows, N);
}

INLINE Block columns_from(Block b, int64_t vectors) {
  b.packed += vectors * LANES * 4, b.sums += vectors * LANES, b.out += vectors * LANES, b.columns -= vectors * LANES;
  if (b.scales) b.scales += vectors * LANES;
  if (b.bias) b.bias += vectors * LANES;
  return b;
}

template <Source SOURCE>
void few_rows(const Block& b, int64_t rows, int64_t vectors) {
  switch (vectors) {
    case 1: return one_row_of_tiles<1, SOURCE>(b, rows);
    case 2: return one_row_of_tiles<2, SOURCE>(b, rows);
    case 3: return one_row_of_tiles<3, SOURCE>(b, rows);
    case 4: return one_row_of_tiles<4, SOURCE>(b, rows);
  }
}

void some_rows(const Block& b, int64_t rows, int64_t vectors) {
  for (int64_t n = 0; n < vectors; n += 2) {
    const Block part = columns_from(b, n);
    vectors - n == 1 ? two_rows_of_tiles<1>(part, rows) : two_rows_of_tiles<2>(part, rows);
  }
}

// Widens the cache block, for more rows than one tile has.
void widen(Block& b, int64_t vectors) {
  for (int64_t j = 0; j < b.pairs; ++j)
    for (int64_t n = 0; n < vectors; ++n) {
      const int64_t at = j * PANEL + n * LANES;
      _mm512_store_si512(b.widened + at, load_pairs<Source::int8>(b.packed + at * pair_bytes(Source::int8)));
    }
  written(b.widened);
  b.packed = (const char*)b.widened;
}

// Gives the tiles back: others on this thread, oneDNN's products, shape them for themselves.
void end_rows() {
  _tile_release();
  shaped = -1;
}

void all_rows(Block b, int64_t rows, int64_t vectors, Source source) {
  if (source == Source::groups) {
    widen_groups(b, vectors);
    written(b.widened);
    source = Source::bf16;
  }
  if (source == Source::int8) {
    if (rows <= ROWS) return few_rows<Source::int8>(b, rows, vectors);
    widen(b, vectors);
  }
  while (rows > 0) {
    const int64_t taken = std::min(rows, 2 * ROWS);
    taken > ROWS ? some_rows(b, taken, vectors) : few_rows<Source::bf16>(b, taken, vectors);
    rows -= taken, b.x += taken * b.x_stride, b.out += taken * b.out_stride, b.sums += taken * PANEL;
  }
}

}  // namespace

}  // namespace raydix
