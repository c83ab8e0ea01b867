// Sixteen lanes as two registers of AVX2, for vec.h.
#pragma once

#include "vec_pair.h"

namespace raydix {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

using f32x16 = Pair<f32x8>;
using i32x16 = Pair<i32x8>;
using u32x16 = Pair<u32x8>;

INLINE f32x16 splat(float x) { return {x - f32x8{}, x - f32x8{}}; }

// 0 to 15.
template <class V>
INLINE V lane_numbers() {
  using Half = decltype(V::low);
  return {Half{0, 1, 2, 3, 4, 5, 6, 7}, Half{8, 9, 10, 11, 12, 13, 14, 15}};
}

// Lanes of `a` where the comparison held, of `b` elsewhere.
INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) {
  return {(f32x8)_mm256_blendv_ps((__m256)b.low, (__m256)a.low, (__m256)mask.low),
          (f32x8)_mm256_blendv_ps((__m256)b.high, (__m256)a.high, (__m256)mask.high)};
}

INLINE f32x16 to_floats(i32x16 v) {
  return {__builtin_convertvector(v.low, f32x8), __builtin_convertvector(v.high, f32x8)};
}

INLINE i32x16 to_integers(f32x16 v) {
  return {__builtin_convertvector(v.low, i32x8), __builtin_convertvector(v.high, i32x8)};
}

INLINE f32x16 load(const float* p) { return {(f32x8)_mm256_loadu_ps(p), (f32x8)_mm256_loadu_ps(p + 8)}; }

INLINE f32x16 load(const bf16* p) {
  const __m128i* at = (const __m128i*)p;
  return {(f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16),
          (f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1)), 16)};
}

INLINE f32x16 load(const fp16* p) {
  const __m128i* at = (const __m128i*)p;
  return {(f32x8)_mm256_cvtph_ps(_mm_loadu_si128(at)), (f32x8)_mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}

INLINE f32x16 load(const int8_t* p) {
  return {(f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}

INLINE void store(float* p, f32x16 v) { _mm256_storeu_ps(p, (__m256)v.low), _mm256_storeu_ps(p + 8, (__m256)v.high); }

INLINE void store(bf16* p, f32x16 v) {
  const u32x16 bits = bit_cast<u32x16>(v);
  const u32x16 even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  const i32x16 rounded = bit_cast<i32x16>(select(v == v, bit_cast<f32x16>(even), bit_cast<f32x16>(quiet)));
  // The instruction packs halves of its operands alternately: quarters 0, 2, 1, 3.
  const __m256i packed = _mm256_packus_epi32((__m256i)rounded.low, (__m256i)rounded.high);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

INLINE void store(fp16* p, f32x16 v) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v.low, NEAREST));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph((__m256)v.high, NEAREST));
}

// a * b + c, rounded once.
INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  return {(f32x8)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
          (f32x8)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
}

// `a` where greater, else `b`: NaN in `a` loses.
INLINE f32x16 maximum(f32x16 a, f32x16 b) {
  return {(f32x8)_mm256_max_ps((__m256)a.low, (__m256)b.low), (f32x8)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
}

INLINE float reduce_add(f32x16 v) {
  const __m256 eight = (__m256)(v.low + v.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float reduce_max(f32x16 v) {
  const __m256 eight = _mm256_max_ps((__m256)v.low, (__m256)v.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Whether a comparison held in any lane.
INLINE bool any(i32x16 mask) { return _mm256_movemask_ps((__m256)(mask.low | mask.high)) != 0; }

// Eight rows of eight, LANES floats from row to row, to columns.
INLINE void transpose_quarter(const float* from, float* to) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * LANES);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(to + j * LANES, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * LANES, _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
  }
}

// Rows of sixteen to columns.
INLINE void transpose(const float (*from)[LANES], float* to) {
  for (int i = 0; i < LANES; i += 8)
    for (int j = 0; j < LANES; j += 8) transpose_quarter(from[i] + j, to + j * LANES + i);
}

}  // namespace raydix
