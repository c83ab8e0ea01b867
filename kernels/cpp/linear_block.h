// One cache block of the matrix product: a panel of columns, some rows, a part of in_features.
#pragma once

#include <algorithm>

#include "ops.h"
#include "vec.h"

#if defined(RAYDIX_FUSES)

namespace raydix {

constexpr int64_t PANEL = 64;   // columns

// The weight's type, and for int8 whether `widened` shall have it as bfloat16. `floats` is `widened` in float32.
enum class Source { bf16, int8, int8_kept, groups, floats };

struct Block {
  const bf16* x;         // of the first row and the first pair of this cache block
  const char* packed;
  const Groups* groups;  // null: not stored in groups
  int64_t vector;        // of the panel's vectors of columns, the first of this block
  uint32_t* widened;     // [pairs][PANEL] pairs of bfloat16, or [pairs][2][PANEL] floats
  float* sums;           // [rows][PANEL], carried between cache blocks
  bf16* out;
  const float* scales;   // null: none
  const float* bias;     // null: none
  int64_t x_stride, out_stride, pairs, columns;  // columns that exist from here on
  bool first, last;      // cache block along in_features
  const char* ahead;     // weights for which memory is asked on the way; null: none
  int64_t lines;         // of `ahead` for each pair
};

// Bytes of a pair along in_features in one column, of weights not stored in groups.
constexpr int64_t pair_bytes(Source source) {
  return source == Source::floats ? 8 : source == Source::bf16 ? 4 : 2;
}

#if defined(__AVX512BF16__)

// Sixteen pairs of the weight.
template <Source SOURCE>
INLINE __m512i load_pairs(const char* packed) {
  if (SOURCE == Source::bf16) return _mm512_loadu_si512(packed);
  const __m128i* at = (const __m128i*)packed;
  const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
  const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

#endif

// The end of the chain: scale, bias, and rounding of up to sixteen columns.
INLINE void finish(const Block& b, f32x16 v, int64_t row, int64_t column) {
  if (b.scales) v *= load(b.scales + column);
  if (b.bias) v += load(b.bias + column);
  const int64_t left = b.columns - column;
  bf16* to = b.out + row * b.out_stride + column;
  if (left >= LANES) {
    store(to, v);
  } else if (left > 0) {
    store_part(to, v, left);
  }
}

}  // namespace raydix

#endif
