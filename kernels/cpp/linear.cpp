// bfloat16 matrix product, out = x weight^T + bias, on vdpbf16ps.
//
// The weight is packed in panels of PANEL output columns, [panel][in_features / 2][PANEL] of pairs along in_features.
// Each output element is one chain of multiply-adds over in_features from first to last, whatever the number of rows,
// the shape of the register block it is in, or the thread: a long in_features is cut into blocks that stay in the
// cache, and the chain goes on from the sums kept so far. So rows do not depend on each other, for every shape.
//
// An int8 weight has the same layout, at half the bytes, and a scale for each column. Eight bits fit into bfloat16's
// significand, so it is widened without rounding, multiplied like any other, and the scale enters at the end of the
// chain. The first rows widen a cache block in registers and keep it for the others.
#include <algorithm>
#include <vector>

#include "ops.h"
#include "vec.h"

namespace raydix {

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t PANEL = 64;      // columns
constexpr int64_t ROWS = 6;        // by PANEL columns fill the registers
constexpr int64_t TASK_ROWS = 96;  // at most, share a panel while it is in the cache
constexpr int64_t FEW_ROWS = 24;   // up to here every thread reads its own columns of the weight once
constexpr int64_t FIRST_LINES = 32;  // of the next panel, where it is not asked for as a whole
constexpr int64_t DEPTH = 512;     // pairs along in_features in one cache block
constexpr int64_t AHEAD = 4096;    // bytes from the int8 weights being widened to those that memory is asked for

enum class Source { bf16, int8, int8_kept };  // the weight's type, and whether `widened` shall have it as bfloat16

struct Block {
  const bf16* x;         // of the first row and the first pair of this cache block
  const char* packed;
  uint32_t* widened;     // [pairs][PANEL]
  float* sums;           // [rows][PANEL], carried between cache blocks
  bf16* out;
  const float* scales;   // null: none
  const float* bias;     // null: none
  int64_t x_stride, out_stride, pairs, columns;  // columns that exist from here on
  bool first, last;      // cache block along in_features
  const char* ahead;     // weights for which memory is asked on the way; null: none
  int64_t lines;         // of `ahead` for each pair
};

struct Piece {
  int64_t row, column, width;
};

Source source_of(const Linear& a) { return a.scales ? Source::int8 : Source::bf16; }
constexpr int64_t pair_bytes(Source source) { return source == Source::bf16 ? 4 : 2; }

// Sixteen pairs of the weight.
template <Source SOURCE>
INLINE __m512i load_pairs(const char* packed) {
  if (SOURCE == Source::bf16) return _mm512_loadu_si512(packed);
  const __m128i* at = (const __m128i*)packed;
  const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
  const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

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
      f32x16 v = (f32x16)total[m][n];
      if (b.scales) v *= load(b.scales + n * LANES);
      if (b.bias) v += load(b.bias + n * LANES);
      const int64_t left = b.columns - n * LANES;
      bf16* to = b.out + m * b.out_stride + n * LANES;
      if (left >= LANES) {
        store(to, v);
      } else if (left > 0) {
        store_part(to, v, left);
      }
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

const char* panel_of(const Linear& a, int64_t column) {
  const int64_t first = column / PANEL * (a.in_features / 2) * PANEL + column % PANEL;
  return (const char*)a.packed + first * pair_bytes(source_of(a));
}

// Rows [row, row + rows) and `vectors` vectors of columns from `column` on, all within one panel.
void task(const Linear& a, int64_t row, int64_t rows, int64_t column, int64_t vectors, const char* next) {
  alignas(64) static thread_local float sums[TASK_ROWS * PANEL];
  alignas(64) static thread_local uint32_t widened[DEPTH * PANEL];
  const Source source = source_of(a);
  const int64_t pairs = a.in_features / 2;
  Block b{};
  b.sums = sums, b.widened = widened, b.x_stride = a.x_stride;
  b.out_stride = a.out_features, b.columns = a.out_features - column;
  b.out = (bf16*)a.out + row * a.out_features + column;
  b.scales = a.scales ? a.scales + column : nullptr;
  b.bias = a.bias ? a.bias + column : nullptr;
  for (int64_t done = 0; done < pairs; done += b.pairs) {
    b.pairs = std::min(DEPTH, pairs - done);
    b.first = done == 0, b.last = done + b.pairs == pairs;
    b.x = (const bf16*)a.x + row * a.x_stride + 2 * done;
    b.packed = panel_of(a, column) + done * PANEL * pair_bytes(source);
    const char* ahead = b.last ? next : b.packed + b.pairs * PANEL * pair_bytes(source);
    if (rows > ROWS) {
      b.ahead = ahead;
    } else if (ahead) {
      // One register block reads as fast as memory gives; only the way from one panel to the next is shortened.
      for (int64_t line = 0; line < FIRST_LINES; ++line) __builtin_prefetch(ahead + line * 64);
    }
    all_rows(b, rows, vectors, source);
  }
}

}  // namespace

bool has_linear() { return true; }

void linear(const Linear& a, Crew& crew) {
  const int64_t panels = (a.out_features + PANEL - 1) / PANEL;
  int64_t height = TASK_ROWS;
  while (height > FEW_ROWS && (a.rows + height - 1) / height * panels < 8 * crew.threads) height /= 2;
  const int64_t blocks = (a.rows + height - 1) / height;
  if (blocks == 0) return;
  // The last panels are taken in halves, so that threads finish together.
  const int64_t halved = blocks == 1 ? std::min<int64_t>(panels, crew.threads) : 0, whole = blocks * panels - halved;
  auto piece = [&](int64_t i) {
    const int64_t panel = i < whole ? i % panels : whole + (i - whole) / 2;
    const int64_t half = i < whole ? 0 : (i - whole) % 2 * (PANEL / 2), width = i < whole ? PANEL : PANEL / 2;
    return Piece{i < whole ? i / panels * height : 0, panel * PANEL + half, width};
  };
  const int64_t count = whole + 2 * halved;
  crew.share(count, [&](int64_t i) {
    const Piece p = piece(i);
    const int64_t vectors = (std::min(p.width, a.out_features - p.column) + LANES - 1) / LANES;
    if (vectors <= 0) return;
    const bool more = i + crew.threads < count;  // most likely the next one of this thread
    const int64_t column = more ? piece(i + crew.threads).column : 0;
    const void* next = more ? panel_of(a, column) : a.after;
    task(a, p.row, std::min(height, a.rows - p.row), p.column, vectors, (const char*)next);
  });
}

#else

bool has_linear() { return false; }
void linear(const Linear&, Crew&) {}

#endif

}  // namespace raydix
