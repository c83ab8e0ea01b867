// The noise of tokens, in the bits that kernels/sample/reference.py specifies: words of Philox-4x32-10, exponential
// arrival times of them, and noise, the negated logarithm of an arrival time.
#pragma once

#include "vec.h"

namespace raydix {

// Tokens of a group: token 256 * (g / 16) + 16 * m + g % 16 is member m of group g.
constexpr int64_t GROUP = 16;
constexpr int64_t SPAN = GROUP * LANES;      // consecutive tokens that sixteen consecutive groups share
constexpr int64_t BATCH = 4 * LANES;         // groups whose words are made together
constexpr uint32_t FIRSTS = 0, MEMBERS = 1;  // streams of words

// The halves of the 64-bit products of unsigned numbers.
struct Product {
  u32x16 high, low;
};

INLINE Product multiply(u32x16 x, uint32_t by) {
  Product result;
#if defined(__AVX512F__)
  const __m512i a = (__m512i)x, m = _mm512_set1_epi32(int(by));
  const __m512i even = _mm512_mul_epu32(a, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
  const __m512i highs = _mm512_setr_epi32(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  const __m512i lows = _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
  result.high = (u32x16)_mm512_permutex2var_epi32(even, highs, odd);
  result.low = (u32x16)_mm512_permutex2var_epi32(even, lows, odd);
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi32(int(by));
  auto half = [m](u32x8 v, u32x8& high, u32x8& low) {
    const __m256i a = (__m256i)v, even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
    high = (u32x8)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = (u32x8)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  };
  half(x.low, result.high.low, result.low.low), half(x.high, result.high.high, result.low.high);
#elif defined(RAYDIX_NEON)
  auto of_words = [by](auto choose) {
    return [by, choose](u32x4 v) {
      const uint32x4_t even = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(v), by));
      return choose(even, vreinterpretq_u32_u64(vmull_high_n_u32(v, by)));
    };
  };
  result.high = by_fours<u32x4>(of_words([](uint32x4_t a, uint32x4_t b) { return vuzp2q_u32(a, b); }), x);
  result.low = by_fours<u32x4>(of_words([](uint32x4_t a, uint32x4_t b) { return vuzp1q_u32(a, b); }), x);
#else
  for (int i = 0; i < LANES; ++i) {
    const uint64_t product = uint64_t(x[i]) * by;
    result.high[i] = uint32_t(product >> 32), result.low[i] = uint32_t(product);
  }
#endif
  return result;
}

// Sixteen blocks of Philox, one per lane.
struct Words {
  u32x16 of[4];
};

// ln(2^exponent * (1 + f)), for f from sqrt(1/2) - 1 to sqrt(2) - 1, by the series of 2 artanh(f / (2 + f)).
inline float logarithm(float f, int32_t exponent) {
  const float s = f / (2.0f + f), q = s * s;
  float series = 0.11111111f * q + 0.14285715f;
  series = series * q + 0.2f;
  series = series * q + 0.33333334f;
  series = series * q + 1.0f;
  return float(exponent) * 0.6931472f + (s + s) * series;
}

// ln(x) of a positive normal number.
inline float logarithm(float x) {
  const int32_t bits = bit_cast<int32_t>(x), exponent = (bits - 0x3f3504f3) >> 23;
  return logarithm(bit_cast<float>(bits - (exponent << 23)) - 1.0f, exponent);
}

// -ln(1 - v), where v = (number + 1/2) * unit is in (0, 1).
inline float exponential(uint32_t number, float unit) {
  const float v = (float(number) + 0.5f) * unit, rest = 1.0f - v;
  return v < 0.25f ? -logarithm(-v, 0) : -logarithm(rest < 0x1p-25f ? 0x1p-25f : rest);
}

// The noise of all tokens at one position of one seed.
class Noise {
 public:
  // A group's earliest arrival: the member that it is of, and when it is.
  struct First {
    int64_t member;
    float time;
  };

  Noise(int64_t seed, int64_t position) : position(uint32_t(position)) {
    for (uint32_t i = 0; i < ROUNDS; ++i) {
      keys[i][0] = uint32_t(uint64_t(seed)) + i * 0x9e3779b9u;
      keys[i][1] = uint32_t(uint64_t(seed) >> 32) + i * 0xbb67ae85u;
    }
  }

  // The blocks from `block` on.
  INLINE Words words(int64_t block, uint32_t stream) const {
    const u32x16 zero{};
    u32x16 c0 = lane_numbers<u32x16>() + uint32_t(block), c1 = zero + position, c2 = zero + stream, c3 = zero;
    for (int i = 0; i < ROUNDS; ++i) {
      const Product a = multiply(c0, 0xd2511f53u), b = multiply(c2, 0xcd9e8d57u);
      c0 = b.high ^ c1 ^ keys[i][0], c1 = b.low;
      c2 = a.high ^ c3 ^ keys[i][1], c3 = a.low;
    }
    return {c0, c1, c2, c3};
  }

  // Not less than the noise of any member of groups [first, first + BATCH), where `first` is a multiple of BATCH, and
  // at most 0.07 more than a large noise: -ln(1 - v) is at least v, and the exponent plus the mantissa's fraction at
  // most the binary logarithm.
  INLINE void bounds(int64_t first, f32x16 out[4]) const {
    constexpr float LN_2 = 0.6931472f;
    const Words made = words(first / 4, FIRSTS);
    for (int i = 0; i < 4; ++i) {
      const f32x16 places = to_floats(bit_cast<i32x16>(made.of[i] >> 4)) + 0.5f;
      const f32x16 bits = to_floats(bit_cast<i32x16>(places));
      out[i] = fused(bits, splat(-LN_2 * 0x1p-23f), splat(LN_2 * (127 + 32) + 1e-3f));
    }
  }

  First first(int64_t group) const {
    const uint32_t word = words(group / BATCH * LANES, FIRSTS).of[group / LANES % 4][group % LANES];
    return {int64_t(word % GROUP), exponential(word / GROUP, 0x1p-28f) * (1.0f / GROUP)};
  }

 private:
  static constexpr int ROUNDS = 10;
  uint32_t keys[ROUNDS][2], position;
};

}  // namespace raydix
