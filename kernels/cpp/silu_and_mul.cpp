// The gated activation of rows [gate | up]: act(gate) * up, where act is SiLU, GELU, its tanh form, or the square
// of what is positive; or the clamped SwiGLU, gate * sigmoid(1.702 * gate) * (up + 1), with gate at most 7 and up from -7 to 7; or sigmoid(gate) * up.
// Without a gate: act(x).
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

INLINE f32x16 sigmoid_times(f32x16 x, f32x16 at) { return x / (1.0f + exp(-select(at < -88.0f, splat(-88.0f), at))); }

// The error function, absolute error about 2e-7: formula 7.1.26 of Abramowitz and Stegun.
INLINE f32x16 erf(f32x16 x) {
  const f32x16 magnitude = select(x < 0.0f, -x, x);
  const f32x16 t = 1.0f / (1.0f + 0.3275911f * magnitude);
  f32x16 p = splat(1.061405429f);
  p = fused(p, t, splat(-1.453152027f));
  p = fused(p, t, splat(1.421413741f));
  p = fused(p, t, splat(-0.284496736f));
  p = fused(p, t, splat(0.254829592f));
  const f32x16 found = 1.0f - p * t * exp(-magnitude * magnitude);
  return select(x < 0.0f, -found, found);
}

template <Activation KIND>
INLINE f32x16 gated(f32x16 gate, f32x16 up) {
  if (KIND == Activation::silu) return sigmoid_times(gate, gate) * up;
  if (KIND == Activation::sigmoid) return sigmoid_times(splat(1.0f), gate) * up;
  if (KIND == Activation::relu2) return maximum(gate, splat(0.0f)) * maximum(gate, splat(0.0f)) * up;
  if (KIND == Activation::gelu) return 0.5f * gate * (1.0f + erf(0.70710678f * gate)) * up;
  if (KIND == Activation::clamped_swiglu) {
    gate = select(gate > 7.0f, splat(7.0f), gate);
    up = select(up > 7.0f, splat(7.0f), select(up < -7.0f, splat(-7.0f), up));
    return sigmoid_times(gate, gate * 1.702f) * (up + 1.0f);
  }
  const f32x16 inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanh(inner)) * up;
}

// `up` null: there is none.
template <class T, Activation KIND>
INLINE void one_row(const T* gate, const T* up, T* to, int64_t width) {
  const int64_t whole = width / LANES * LANES, rest = width - whole;
  for (int64_t i = 0; i < whole; i += LANES)
    store(to + i, gated<KIND>(load(gate + i), up ? load(up + i) : splat(1.0f)));
  if (!rest) return;
  const f32x16 other = up ? load_part(up + whole, rest) : splat(1.0f);
  store_part(to + whole, gated<KIND>(load_part(gate + whole, rest), other), rest);
}

template <class T, Activation KIND>
void rows_of(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, bool has_gate, Crew& crew) {
  crew.share(rows, grain(width), [&](int64_t row) {
    const T* gate = (const T*)x + row * stride;
    one_row<T, KIND>(gate, has_gate ? gate + width : nullptr, (T*)out + row * width, width);
  });
}

template <class T>
void of_type(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation kind, bool has_gate,
             Crew& crew) {
  auto run = [&](auto kernel) { kernel(x, out, rows, width, stride, has_gate, crew); };
  switch (kind) {
    case Activation::silu: return run(rows_of<T, Activation::silu>);
    case Activation::gelu_tanh: return run(rows_of<T, Activation::gelu_tanh>);
    case Activation::gelu: return run(rows_of<T, Activation::gelu>);
    case Activation::relu2: return run(rows_of<T, Activation::relu2>);
    case Activation::sigmoid: return run(rows_of<T, Activation::sigmoid>);
    case Activation::clamped_swiglu: return run(rows_of<T, Activation::clamped_swiglu>);
  }
}

void of_rows(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation activation,
             bool has_gate, DType dtype, Crew& crew) {
  auto run = [&](auto kernel) { kernel(x, out, rows, width, stride, activation, has_gate, crew); };
  if (dtype == DType::f32) return run(of_type<float>);
  return dtype == DType::bf16 ? run(of_type<bf16>) : run(of_type<fp16>);
}

}  // namespace

void silu_and_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation activation,
                  DType dtype, Crew& crew) {
  of_rows(x, out, rows, width, stride, activation, true, dtype, crew);
}

void activate(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation activation,
              DType dtype, Crew& crew) {
  of_rows(x, out, rows, width, stride, activation, false, dtype, crew);
}

}  // namespace raydix
