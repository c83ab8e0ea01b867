// Sixteen-lane vectors: one source for AVX-512, AVX2, NEON and plain machines. They are the compiler's own vectors, except
// that AVX2 and NEON have them as pairs of registers (vec_pair.h). Only what differs is written again, as functions of
// one name. AVX2 and NEON add in the same order and round alike, so that they compute the same bits.
//
// Every reduction here has one fixed order, and nothing depends on how many rows are processed together: that is what
// makes each row of every kernel reproducible bit for bit.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(RAYDIX_NEON)  // set by the build: every ARM compiler has NEON, also for the plain kernels
#include <arm_neon.h>
#endif

// The machine multiplies and adds with one rounding.
#if defined(__FMA__) || defined(RAYDIX_NEON)
#define RAYDIX_FUSES
#endif

#define INLINE inline __attribute__((always_inline))
#define NO_INLINE __attribute__((noinline))

namespace raydix {

constexpr int LANES = 16;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

INLINE float to_float(fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  const float magnitude = bit_cast<float>(rest << 13) * 0x1p112f;
  return bit_cast<float>(bit_cast<uint32_t>(magnitude) | sign);
}

INLINE void from_float(float* p, float x) { *p = x; }
INLINE void from_float(bf16* p, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  p->bits = x == x ? uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : uint16_t((bits >> 16) | 0x40u);
}

INLINE void from_float(fp16* p, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (rest < 0x38800000u) {
    // Adding 0.5 leaves the subnormal half in the low bits, rounded to nearest even.
    half = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
  } else {
    half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  }
  p->bits = uint16_t(sign | half);
}

#if defined(__AVX2__) && !defined(__AVX512F__)

}  // namespace raydix

#include "vec_avx2.h"

namespace raydix {

#elif defined(RAYDIX_NEON)

}  // namespace raydix

#include "vec_neon.h"

namespace raydix {

#else

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

INLINE f32x16 splat(float x) { return x - f32x16{}; }

// 0 to 15.
template <class V>
INLINE V lane_numbers() {
  return V{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// Lanes of `a` where the comparison held, of `b` elsewhere.
INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return mask ? a : b; }

INLINE f32x16 to_floats(i32x16 v) { return __builtin_convertvector(v, f32x16); }
INLINE i32x16 to_integers(f32x16 v) { return __builtin_convertvector(v, i32x16); }

INLINE f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

INLINE f32x16 load(const bf16* p) {
  u16x16 v;
  std::memcpy(&v, p, sizeof v);
  return bit_cast<f32x16>(__builtin_convertvector(v, u32x16) << 16);
}

INLINE f32x16 load(const int8_t* p) {
  typedef int8_t i8x16 __attribute__((vector_size(16)));
  i8x16 v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, f32x16);
}

INLINE void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

INLINE void store(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &rounded, sizeof rounded);
#else
  const u32x16 bits = bit_cast<u32x16>(v);
  const u32x16 even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32x16 quiet = (bits >> 16) | 0x40u;
  const u16x16 rounded = __builtin_convertvector(v == v ? even : quiet, u16x16);
  std::memcpy(p, &rounded, sizeof rounded);
#endif
}

INLINE f32x16 load(const fp16* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  f32x16 v;
  for (int i = 0; i < LANES; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

INLINE void store(fp16* p, f32x16 v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < LANES; ++i) from_float(p + i, v[i]);
#endif
}

// a * b + c, rounded once where the machine can. The build forbids the compiler to fuse on its own, so that the same
// expression gives the same bits wherever it is inlined.
INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// `a` where greater, else `b`: NaN in `a` loses.
INLINE f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

INLINE float reduce_add(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
#endif
}

INLINE float reduce_max(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// Whether a comparison held in any lane.
INLINE bool any(i32x16 mask) { return reduce_max(bit_cast<f32x16>(mask & 0x3f800000)) > 0.0f; }

// Rows of sixteen to columns.
INLINE void transpose(const float (*from)[LANES], float* to) {
  for (int j = 0; j < LANES; ++j)
    for (int i = 0; i < LANES; ++i) to[j * LANES + i] = from[i][j];
}

#endif

// The first `count` lanes, the others zero.
template <class T>
INLINE f32x16 load_part(const T* p, int64_t count) {
  alignas(64) T padded[LANES] = {};
  std::memcpy(padded, p, size_t(count) * sizeof(T));
  return load(padded);
}

template <class T>
INLINE void store_part(T* p, f32x16 v, int64_t count) {
  alignas(64) T padded[LANES];
  store(padded, v);
  std::memcpy(p, padded, size_t(count) * sizeof(T));
}

// x rounded to the nearest integer, for |x| < 2^22.
INLINE f32x16 round_even(f32x16 x) { return (x + 12582912.0f) - 12582912.0f; }

// 2^n for integral n in [-127, 127]; -127 gives 0.
INLINE f32x16 power_of_two(f32x16 n) {
  return bit_cast<f32x16>((to_integers(n) + 127) << 23);
}

// 2^x for x <= 127 (0 below -126.5, NaN stays NaN), relative error about 2e-7; exactly 1 at 0.
INLINE f32x16 exp2(f32x16 x) {
  x = select(x < -127.0f, splat(-127.0f), x);
  const f32x16 n = round_even(x), r = x - n;
  f32x16 p = splat(1.5403530e-4f);
  p = fused(p, r, splat(1.3333558e-3f));
  p = fused(p, r, splat(9.6181291e-3f));
  p = fused(p, r, splat(5.5504109e-2f));
  p = fused(p, r, splat(2.4022651e-1f));
  p = fused(p, r, splat(6.9314718e-1f));
  p = fused(p, r, splat(1.0f));
  return p * power_of_two(n);
}

// e^x for x <= 88 (0 below -87.6, NaN stays NaN), relative error about 2e-7; exactly 1 at 0.
INLINE f32x16 exp(f32x16 x) {
  x = select(x < -88.02969f, splat(-88.02969f), x);
  const f32x16 n = round_even(x * 1.44269504f);
  f32x16 r = fused(n, splat(-0.693359375f), x);
  r = fused(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.3888889e-3f);
  p = fused(p, r, splat(8.3333333e-3f));
  p = fused(p, r, splat(4.1666667e-2f));
  p = fused(p, r, splat(1.6666667e-1f));
  p = fused(p, r, splat(0.5f));
  p = fused(p, r, splat(1.0f));
  p = fused(p, r, splat(1.0f));
  return p * power_of_two(n);
}

// tanh, absolute error about 2e-7.
INLINE f32x16 tanh(f32x16 x) {
  const f32x16 magnitude = select(x < 0.0f, -x, x);
  const f32x16 decay = exp(magnitude * -2.0f);
  const f32x16 t = (1.0f - decay) / (1.0f + decay);
  return select(x < 0.0f, -t, t);
}

}  // namespace raydix
