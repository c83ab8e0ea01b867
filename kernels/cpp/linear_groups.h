// A cache block of a weight stored in groups, as the numbers that the product multiplies.
//
// A panel holds, one after the other, for every `super` input features: float16 scales of its PANEL columns, and of what
// is taken off if the weight has that; then for each group the columns' int8 factors of the scale, and uint8 factors of
// what is taken off; then the numbers, [super / 2][PANEL] pairs along in_features: of four bits in one byte, the first
// in the lower half, of eight bits in two bytes. Scales that are exponents take a byte in the place of a float16, and
// those in float32 four; neither has factors.
//
// scale * number is exact in float32 for whole numbers and tables, and what is taken off is, too; the product of an E4M3
// and a float32 is rounded there. So a weight is rounded once, the same on every machine, whether or not the machine
// rounds in between.
#pragma once

#include "linear_block.h"

#if defined(RAYDIX_FUSES)

namespace raydix {

constexpr int64_t GROUPS_AHEAD = 4096;  // bytes from the numbers being read to those that memory is asked for

constexpr int64_t super_bytes(const Groups& g) { return PANEL * column_bytes(g); }

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef int8_t Signed16 __attribute__((vector_size(16)));
typedef uint16_t Words16 __attribute__((vector_size(32)));

// `widen`: whole numbers. `widen_halves`: float16. `look_up`: for each number below 16 the value that it stands for.
#if defined(__AVX2__)
INLINE Signed16 look_up(const Groups& g, Bytes16 numbers) {
  return (Signed16)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)g.values), (__m128i)numbers);
}
#else
INLINE Signed16 look_up(const Groups& g, Bytes16 numbers) {
  return (Signed16)vqtbl1q_s8(vld1q_s8(g.values), (uint8x16_t)numbers);
}
#endif

#if defined(__AVX512F__)
template <class V>
INLINE i32x16 widen(V v) {
  return __builtin_convertvector(v, i32x16);
}
INLINE f32x16 widen_halves(Words16 v) { return (f32x16)_mm512_cvtph_ps((__m256i)v); }
#elif defined(__AVX2__)
INLINE i32x16 widen(Bytes16 v) {
  return {(i32x8)_mm256_cvtepu8_epi32((__m128i)v), (i32x8)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)v, 8))};
}
INLINE i32x16 widen(Signed16 v) {
  return {(i32x8)_mm256_cvtepi8_epi32((__m128i)v), (i32x8)_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)v, 8))};
}
INLINE i32x16 widen(Words16 v) {
  return {(i32x8)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)v)),
          (i32x8)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)v, 1))};
}
INLINE f32x16 widen_halves(Words16 v) {
  return {(f32x8)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)v)),
          (f32x8)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)v, 1))};
}
#else
INLINE Pair<i32x4> widen(int16x8_t v) { return {(i32x4)vmovl_s16(vget_low_s16(v)), (i32x4)vmovl_high_s16(v)}; }
INLINE Pair<i32x4> widen(uint16x8_t v) { return {(i32x4)vmovl_u16(vget_low_u16(v)), (i32x4)vmovl_high_u16(v)}; }
INLINE i32x16 widen(Bytes16 v) {
  const uint8x16_t bytes = (uint8x16_t)v;
  return {widen(vmovl_u8(vget_low_u8(bytes))), widen(vmovl_high_u8(bytes))};
}
INLINE i32x16 widen(Signed16 v) {
  const int8x16_t bytes = (int8x16_t)v;
  return {widen(vmovl_s8(vget_low_s8(bytes))), widen(vmovl_high_s8(bytes))};
}
INLINE i32x16 widen(Words16 v) {
  uint16x8_t halves[2];
  std::memcpy(halves, &v, sizeof v);
  return {widen(halves[0]), widen(halves[1])};
}
INLINE f32x16 widen_halves(Words16 v) {
  float16x8_t halves[2];
  std::memcpy(halves, &v, sizeof v);
  return {widen_fp16(halves[0]), widen_fp16(halves[1])};
}
#endif

template <class V>
INLINE V read_vector(const char* at) {
  V v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

// 2 ^ (exponent - 128), of which the lowest two are subnormal: the product of two halves of the way is exact.
INLINE f32x16 power(i32x16 exponent) {
  const i32x16 lower = exponent >> 1, upper = exponent - lower;
  return bit_cast<f32x16>((lower + 63) << 23) * bit_cast<f32x16>((upper + 63) << 23);
}

// What the numbers of sixteen columns are multiplied by. Numbers in E4M3 come as float16, which have another bias.
INLINE f32x16 scale_of(const Groups& g, const char* scales, const char* factors, int64_t column) {
  if (g.scales == Scales::exponents) return power(widen(read_vector<Bytes16>(scales + column)));
  if (g.scales == Scales::floats) return load((const float*)scales + column) * 256.0f;
  return load((const fp16*)scales + column) * to_floats(widen(read_vector<Signed16>(factors + column)));
}

struct NumberPair {
  f32x16 first, second;
};

// The numbers of the first and the second feature of the pairs of sixteen columns.
template <Numbers NUMBERS>
INLINE NumberPair numbers_at(const Groups& g, const char* at) {
  if constexpr (NUMBERS == Numbers::table4) {
    const Bytes16 both = read_vector<Bytes16>(at);
    return {to_floats(widen(look_up(g, both & 15))), to_floats(widen(look_up(g, both >> 4)))};
  } else if constexpr (NUMBERS == Numbers::float8) {
    // The fields of an E4M3 are the upper ones of a float16, whose exponent has a bit more, below the sign.
    const Words16 both = read_vector<Words16>(at);
    return {widen_halves((both & 0x7f) << 7 | (both & 0x80) << 8), widen_halves((both & 0x7f00) >> 1 | (both & 0x8000))};
  } else if constexpr (NUMBERS == Numbers::whole4) {
    const i32x16 both = widen(read_vector<Bytes16>(at));
    return {to_floats(both & 15), to_floats(both >> 4)};
  } else {
    const i32x16 both = widen(read_vector<Words16>(at));
    return {to_floats(both & 255), to_floats(both >> 8)};
  }
}

// Gives a visitor the weights of one group in Visitor::COLUMNS, or in one, vectors of sixteen columns from `n` on:
// `begin(k, n, pair)` of each vector k, then `weights(k, n, pair, first, second)` of the group's pairs along in_features,
// then `end(k, n)`.
template <Numbers NUMBERS, int COUNT, class Visitor>
INLINE void visit_group(const Block& b, Visitor& visitor, const char* scales, const char* factors, const char* numbers,
                        int64_t n, int64_t pair) {
  const Groups& g = *b.groups;
  constexpr int64_t BYTES = NUMBERS == Numbers::whole4 || NUMBERS == Numbers::table4 ? 1 : 2;  // of a pair in one column
  constexpr bool WHOLE = NUMBERS == Numbers::whole4 || NUMBERS == Numbers::whole8;  // from which something is taken off
  f32x16 scale[COUNT], off[COUNT];
  for (int k = 0; k < COUNT; ++k) {
    const int64_t column = (b.vector + n + k) * LANES;
    scale[k] = scale_of(g, scales, factors, column);
    if constexpr (WHOLE)
      off[k] = g.has_least ? load((const fp16*)scales + PANEL + column) *
                                 to_floats(widen(read_vector<Bytes16>(factors + PANEL + column)))
                           : scale[k] * g.zero;
    visitor.begin(k, n, pair);
  }
  const char* at = numbers + (b.vector + n) * LANES * BYTES;
  for (int64_t j = 0; j < g.size / 2; ++j, at += PANEL * BYTES) {
    // The first columns to be visited ask for the lines of all.
    if (b.vector + n == 0)
      for (int64_t line = 0; line < BYTES; ++line) __builtin_prefetch(at + GROUPS_AHEAD + line * 64);
    for (int k = 0; k < COUNT; ++k) {
      const NumberPair of = numbers_at<NUMBERS>(g, at + k * LANES * BYTES);
      if constexpr (WHOLE) {
        visitor.weights(k, n, pair + j, fused(of.first, scale[k], -off[k]), fused(of.second, scale[k], -off[k]));
      } else {
        visitor.weights(k, n, pair + j, of.first * scale[k], of.second * scale[k]);
      }
    }
  }
  for (int k = 0; k < COUNT; ++k) visitor.end(k, n);
}

// Gives a visitor the weights of the cache block, group after group.
template <Numbers NUMBERS, class Visitor>
INLINE void each_group(const Block& b, int64_t vectors, Visitor& visitor) {
  const Groups& g = *b.groups;
  const int64_t groups = g.super / g.size, pairs = g.size / 2, bytes = super_bytes(g);
  const int64_t factor_stride = PANEL * factor_bytes(g), number_stride = PANEL * pairs * (g.bits / 4);
  const char* scales = b.packed;
  for (int64_t pair = 0; pair < b.pairs; scales += bytes) {
    const char* factors = scales + PANEL * scale_bytes(g);
    const char* numbers = factors + groups * factor_stride;
    for (int64_t group = 0; group < groups; ++group, pair += pairs) {
      int64_t n = 0;
      for (; n + Visitor::COLUMNS <= vectors; n += Visitor::COLUMNS)
        visit_group<NUMBERS, Visitor::COLUMNS>(b, visitor, scales, factors, numbers, n, pair);
      if constexpr (Visitor::COLUMNS > 1)
        for (; n < vectors; ++n) visit_group<NUMBERS, 1>(b, visitor, scales, factors, numbers, n, pair);
      factors += factor_stride, numbers += number_stride;
    }
  }
}

template <class Visitor>
INLINE void visit_groups(const Block& b, int64_t vectors, Visitor visitor) {
  switch (b.groups->numbers) {
    case Numbers::whole4: return each_group<Numbers::whole4>(b, vectors, visitor);
    case Numbers::whole8: return each_group<Numbers::whole8>(b, vectors, visitor);
    case Numbers::table4: return each_group<Numbers::table4>(b, vectors, visitor);
    case Numbers::float8: return each_group<Numbers::float8>(b, vectors, visitor);
  }
}

#if defined(__AVX512BF16__)

// Writes the cache block down in bfloat16.
struct WidenedPairs {
  static constexpr int COLUMNS = 1;
  uint32_t* to;

  INLINE void begin(int, int64_t, int64_t) {}
  INLINE void end(int, int64_t) {}
  INLINE void weights(int, int64_t n, int64_t pair, f32x16 first, f32x16 second) {
    // Rounded to even by hand, since the instruction would take subnormal numbers for zeros.
    const u32x16 low = bit_cast<u32x16>(first), high = bit_cast<u32x16>(second);
    const u32x16 rounded_low = (low + 0x7fffu + ((low >> 16) & 1u)) >> 16;
    const u32x16 rounded_high = (high + 0x7fffu + ((high >> 16) & 1u)) & 0xffff0000u;
    const u32x16 both = rounded_low | rounded_high;
    std::memcpy(to + pair * PANEL + n * LANES, &both, sizeof both);
  }
};

// The cache block in bfloat16, as `b.widened`; `b` then has it as its weights.
INLINE void widen_groups(Block& b, int64_t vectors) {
  visit_groups(b, vectors, WidenedPairs{b.widened});
  b.packed = (const char*)b.widened;
}

#endif

}  // namespace raydix

#endif
