// Sixteen lanes as four registers of NEON, for vec.h.
#pragma once

#include "vec_pair.h"

namespace raydix {

// The compiler's own, which arm_neon.h's types convert to: a comparison gives these.
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

using f32x8 = Pair<f32x4>;
using f32x16 = Pair<f32x8>;
using i32x16 = Pair<Pair<i32x4>>;
using u32x16 = Pair<Pair<u32x4>>;

// What `act` makes of each four lanes.
template <class Four, class Act, class... V>
INLINE Pair<Pair<Four>> by_fours(Act act, V... v) {
  return {{(Four)act(v.low.low...), (Four)act(v.low.high...)}, {(Four)act(v.high.low...), (Four)act(v.high.high...)}};
}

INLINE f32x16 splat(float x) {
  const f32x4 four = vdupq_n_f32(x);
  return {{four, four}, {four, four}};
}

// 0 to 15.
template <class V>
INLINE V lane_numbers() {
  using Half = decltype(V::low);
  using Four = decltype(Half::low);
  return {{Four{0, 1, 2, 3}, Four{4, 5, 6, 7}}, {Four{8, 9, 10, 11}, Four{12, 13, 14, 15}}};
}

// Lanes of `a` where the comparison held, of `b` elsewhere.
INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) {
  return by_fours<f32x4>([](i32x4 mask, f32x4 a, f32x4 b) { return vbslq_f32((uint32x4_t)mask, a, b); }, mask, a, b);
}

INLINE f32x16 to_floats(i32x16 v) {
  return by_fours<f32x4>([](i32x4 v) { return vcvtq_f32_s32(v); }, v);
}

INLINE i32x16 to_integers(f32x16 v) {
  return by_fours<i32x4>([](f32x4 v) { return vcvtq_s32_f32(v); }, v);
}

INLINE f32x16 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4)}, {vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}

INLINE f32x8 widen_bf16(uint16x8_t v) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(v, 16))};
}

INLINE f32x16 load(const bf16* p) {
  const uint16_t* at = (const uint16_t*)p;
  return {widen_bf16(vld1q_u16(at)), widen_bf16(vld1q_u16(at + 8))};
}

INLINE f32x8 widen_fp16(float16x8_t v) { return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)}; }

INLINE f32x16 load(const fp16* p) {
  const float16_t* at = (const float16_t*)p;
  return {widen_fp16(vld1q_f16(at)), widen_fp16(vld1q_f16(at + 8))};
}

INLINE f32x8 widen_int16(int16x8_t v) {
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(v))), vcvtq_f32_s32(vmovl_high_s16(v))};
}

INLINE f32x16 load(const int8_t* p) {
  const int8x16_t v = vld1q_s8(p);
  return {widen_int16(vmovl_s8(vget_low_s8(v))), widen_int16(vmovl_high_s8(v))};
}

INLINE void store(float* p, f32x16 v) {
  vst1q_f32(p, v.low.low), vst1q_f32(p + 4, v.low.high), vst1q_f32(p + 8, v.high.low), vst1q_f32(p + 12, v.high.high);
}

INLINE void store(bf16* p, f32x16 v) {
  const u32x16 bits = bit_cast<u32x16>(v);
  const u32x16 even = bits + 0x7fffu + ((bits >> 16) & 1u), quiet = bits | 0x400000u;
  const u32x16 rounded = bit_cast<u32x16>(select(bit_cast<i32x16>(v == v), bit_cast<f32x16>(even), bit_cast<f32x16>(quiet)));
  vst1q_u16((uint16_t*)p, vshrn_high_n_u32(vshrn_n_u32(rounded.low.low, 16), rounded.low.high, 16));
  vst1q_u16((uint16_t*)p + 8, vshrn_high_n_u32(vshrn_n_u32(rounded.high.low, 16), rounded.high.high, 16));
}

INLINE void store(fp16* p, f32x16 v) {
  vst1q_f16((float16_t*)p, vcvt_high_f16_f32(vcvt_f16_f32(v.low.low), v.low.high));
  vst1q_f16((float16_t*)p + 8, vcvt_high_f16_f32(vcvt_f16_f32(v.high.low), v.high.high));
}

// a * b + c, rounded once.
INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  return by_fours<f32x4>([](f32x4 a, f32x4 b, f32x4 c) { return vfmaq_f32(c, a, b); }, a, b, c);
}

INLINE f32x4 maximum(f32x4 a, f32x4 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

// `a` where greater, else `b`: NaN in `a` loses.
INLINE f32x16 maximum(f32x16 a, f32x16 b) {
  return by_fours<f32x4>([](f32x4 a, f32x4 b) { return maximum(a, b); }, a, b);
}

INLINE float reduce_add(f32x16 v) {
  const f32x8 eight = v.low + v.high;
  const f32x4 four = eight.low + eight.high;
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE float reduce_max(f32x16 v) {
  const f32x4 four = maximum(maximum(v.low.low, v.high.low), maximum(v.low.high, v.high.high));
  const float even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

// Whether a comparison held in any lane.
INLINE bool any(i32x16 mask) {
  const Pair<i32x4> eight = mask.low | mask.high;
  return vmaxvq_u32((uint32x4_t)(eight.low | eight.high)) != 0;
}

// Four rows of four, LANES floats from row to row, to columns.
INLINE void transpose_fours(const float* from, float* to) {
  const float32x4_t a = vld1q_f32(from), b = vld1q_f32(from + LANES);
  const float32x4_t c = vld1q_f32(from + 2 * LANES), d = vld1q_f32(from + 3 * LANES);
  const float64x2_t ab_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  const float64x2_t cd_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
  vst1q_f32(to, vreinterpretq_f32_f64(vzip1q_f64(ab_even, cd_even)));
  vst1q_f32(to + LANES, vreinterpretq_f32_f64(vzip1q_f64(ab_odd, cd_odd)));
  vst1q_f32(to + 2 * LANES, vreinterpretq_f32_f64(vzip2q_f64(ab_even, cd_even)));
  vst1q_f32(to + 3 * LANES, vreinterpretq_f32_f64(vzip2q_f64(ab_odd, cd_odd)));
}

// Rows of sixteen to columns.
INLINE void transpose(const float (*from)[LANES], float* to) {
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < LANES; j += 4) transpose_fours(from[i] + j, to + j * LANES + i);
}

}  // namespace raydix
