// Sixteen lanes as pairs, and pairs of pairs, of the machine's own registers. The compiler keeps vectors wider than these
// in memory and converts them lane by lane; what is as wide as a register stays in one.
#pragma once

#include <type_traits>

#include "vec.h"

namespace raydix {

template <class V>
struct Pair {
  static constexpr int64_t HALF = sizeof(V) / sizeof(float);  // lanes
  V low, high;

  auto operator[](int64_t lane) const { return lane < HALF ? low[lane] : high[lane - HALF]; }
};

template <class V>
using Lane = std::type_identity_t<std::remove_cvref_t<decltype(V{}[0])>>;

template <class V>
INLINE Pair<V> pair(V low, V high) {
  return {low, high};
}

#define OPERATOR(OP)                                                                                                   \
  template <class V>                                                                                                   \
  INLINE auto operator OP(Pair<V> a, Pair<V> b) {                                                                      \
    return pair(a.low OP b.low, a.high OP b.high);                                                                     \
  }                                                                                                                    \
  template <class V>                                                                                                   \
  INLINE auto operator OP(Pair<V> a, Lane<V> b) {                                                                      \
    return pair(a.low OP b, a.high OP b);                                                                              \
  }                                                                                                                    \
  template <class V>                                                                                                   \
  INLINE auto operator OP(Lane<V> a, Pair<V> b) {                                                                      \
    return pair(a OP b.low, a OP b.high);                                                                              \
  }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^) OPERATOR(<<) OPERATOR(>>)
OPERATOR(<) OPERATOR(>) OPERATOR(>=) OPERATOR(==)
#undef OPERATOR

template <class V>
INLINE Pair<V> operator-(Pair<V> a) {
  return {-a.low, -a.high};
}

template <class V>
INLINE Pair<V>& operator+=(Pair<V>& a, Pair<V> b) {
  return a = a + b;
}

template <class V>
INLINE Pair<V>& operator*=(Pair<V>& a, Pair<V> b) {
  return a = a * b;
}

template <class V>
INLINE Pair<V>& operator|=(Pair<V>& a, Pair<V> b) {
  return a = a | b;
}

template <class To, class V>
INLINE To bit_cast(Pair<V> from) {
  using Half = decltype(To::low);
  return {bit_cast<Half>(from.low), bit_cast<Half>(from.high)};
}

}  // namespace raydix
