// A cache block of a weight stored in groups, as the numbers that the product multiplies.
//
// A panel holds, one after the other, for every `super` input features: float16 scales of its PANEL columns, and of what
// is taken off if the weight has that; then for each group the columns' int8 factors of the scale, and uint8 factors of
// what is taken off; then the numbers, [super / 2][PANEL] pairs along in_features: of four bits in one byte, the first
// in the lower half, of eight bits in two bytes.
//
// scale * number is exact in float32 for every format that is stored so, and what is taken off is, too. So a weight is
// rounded once, the same on every machine, whether or not the machine rounds in between.
#pragma once

#include "linear_block.h"

#if defined(RAYDIX_FUSES)

namespace raydix {

constexpr int64_t super_bytes(const Groups& g) {
  const int64_t kinds = g.has_least ? 2 : 1;
  return PANEL * (2 * kinds + g.super / g.size * kinds + g.super / 2 * (g.bits / 4));
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef int8_t Signed16 __attribute__((vector_size(16)));
typedef uint16_t Words16 __attribute__((vector_size(32)));

#if defined(__AVX512F__)
template <class V>
INLINE i32x16 widen(V v) {
  return __builtin_convertvector(v, i32x16);
}
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
#endif

template <class V>
INLINE V read_vector(const char* at) {
  V v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

// Gives a visitor the weights of the cache block: for each group and each vector of sixteen columns `begin(n, pair)`, then
// `weights(pair, n, first, second)` of the group's pairs along in_features, then `end(n)`.
template <int BITS, class Visitor>
INLINE void each_group(const Block& b, int64_t vectors, Visitor& visitor) {
  const Groups& g = *b.groups;
  constexpr int64_t PAIR = PANEL * (BITS / 4);  // bytes from pair to pair
  const int64_t kinds = g.has_least ? 2 : 1, pairs = g.size / 2, factors = PANEL * kinds;
  for (int64_t pair = 0; pair < b.pairs; pair += g.super / 2) {
    const char* const scales = b.packed + pair / (g.super / 2) * super_bytes(g);
    const char* const of_groups = scales + 2 * factors;
    const char* const numbers = of_groups + g.super / g.size * factors;
    for (int64_t group = 0; group < g.super / g.size; ++group)
      for (int64_t n = 0; n < vectors; ++n) {
        const int64_t column = (b.vector + n) * LANES;
        const char* const factor = of_groups + group * factors + column;
        const f32x16 scale = load((const fp16*)scales + column) * to_floats(widen(read_vector<Signed16>(factor)));
        const f32x16 off = g.has_least ? load((const fp16*)scales + PANEL + column) *
                                             to_floats(widen(read_vector<Bytes16>(factor + PANEL)))
                                       : scale * g.zero;
        const char* at = numbers + group * pairs * PAIR + column * (BITS / 4);
        visitor.begin(n, pair + group * pairs);
        for (int64_t j = group * pairs; j < (group + 1) * pairs; ++j, at += PAIR) {
          constexpr int32_t LOWER = (1 << BITS) - 1;
          i32x16 both;
          if constexpr (BITS == 4) {
            both = widen(read_vector<Bytes16>(at));
          } else {
            both = widen(read_vector<Words16>(at));
          }
          visitor.weights(pair + j, n, fused(to_floats(both & LOWER), scale, -off),
                          fused(to_floats(both >> BITS), scale, -off));
        }
        visitor.end(n);
      }
  }
}

template <class Visitor>
INLINE void visit_groups(const Block& b, int64_t vectors, Visitor visitor) {
  if (b.groups->bits == 4) return each_group<4>(b, vectors, visitor);
  each_group<8>(b, vectors, visitor);
}

#if defined(__AVX512BF16__)

// Writes the cache block down in bfloat16.
struct WidenedPairs {
  uint32_t* to;

  INLINE void begin(int64_t, int64_t) {}
  INLINE void end(int64_t) {}
  INLINE void weights(int64_t pair, int64_t n, f32x16 first, f32x16 second) {
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
