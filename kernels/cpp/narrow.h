// Keys and values of 8 bits: a head's row of a token as whole numbers from -127 to 127, and behind them the float32 by
// which they are multiplied. Each row has its own, so that a row's bytes depend on nothing but the row: not on what else
// its block holds, nor on what was written there before.
#pragma once

#include "ops.h"
#include "vec.h"

namespace raydix {

constexpr float MOST = 127.0f;
constexpr float LEAST = 1e-30f;  // rows whose largest number is smaller are zeros

// `from` [head_dim], a multiple of 16. NaN counts for nothing in the largest number, and is stored as some number.
inline void narrow_row(const float* from, int8_t* to, int64_t head_dim) {
  f32x16 most{};
  for (int64_t i = 0; i < head_dim; i += LANES) {
    const f32x16 v = load(from + i);
    most = maximum(maximum(v, -v), most);
  }
  const float largest = reduce_max(most);
  const bool counts = largest >= LEAST && largest < INFINITE;
  const float to_numbers = counts ? MOST / largest : 0.0f, factor = counts ? largest / MOST : 0.0f;
  for (int64_t i = 0; i < head_dim; i += LANES) {
    const i32x16 numbers = to_integers(round_even(load(from + i) * to_numbers));
    for (int lane = 0; lane < LANES; ++lane) to[i + lane] = int8_t(numbers[lane]);
  }
  std::memcpy(to + head_dim, &factor, sizeof factor);
}

template <class T>
INLINE void widen_row(const int8_t* from, T* to, int64_t head_dim) {
  float factor;
  std::memcpy(&factor, from + head_dim, sizeof factor);
  for (int64_t i = 0; i < head_dim; i += LANES) store(to + i, load(from + i) * factor);
}

}  // namespace raydix
