// The gated activation of rows [gate | up]: act(gate) * up, where act is SiLU or the tanh form of GELU; or the clamped
// SwiGLU, gate * sigmoid(1.702 * gate) * (up + 1), with gate at most 7 and up from -7 to 7; or sigmoid(gate) * up.
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

INLINE f32x16 sigmoid_times(f32x16 x, f32x16 at) { return x / (1.0f + exp(-select(at < -88.0f, splat(-88.0f), at))); }

template <Activation KIND>
INLINE f32x16 gated(f32x16 gate, f32x16 up) {
  if (KIND == Activation::silu) return sigmoid_times(gate, gate) * up;
  if (KIND == Activation::sigmoid) return sigmoid_times(splat(1.0f), gate) * up;
  if (KIND == Activation::clamped_swiglu) {
    gate = select(gate > 7.0f, splat(7.0f), gate);
    up = select(up > 7.0f, splat(7.0f), select(up < -7.0f, splat(-7.0f), up));
    return sigmoid_times(gate, gate * 1.702f) * (up + 1.0f);
  }
  const f32x16 inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanh(inner)) * up;
}

template <class T, Activation KIND>
void rows_of(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Crew& crew) {
  const int64_t whole = width / LANES * LANES, rest = width - whole;
  crew.share(rows, grain(width), [&](int64_t row) {
    const T *gate = (const T*)x + row * stride, *up = gate + width;
    T* to = (T*)out + row * width;
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, gated<KIND>(load(gate + i), load(up + i)));
    if (rest) {
      store_part(to + whole, gated<KIND>(load_part(gate + whole, rest), load_part(up + whole, rest)), rest);
    }
  });
}

template <class T>
void of_type(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation kind, Crew& crew) {
  switch (kind) {
    case Activation::silu: return rows_of<T, Activation::silu>(x, out, rows, width, stride, crew);
    case Activation::gelu_tanh: return rows_of<T, Activation::gelu_tanh>(x, out, rows, width, stride, crew);
    case Activation::sigmoid: return rows_of<T, Activation::sigmoid>(x, out, rows, width, stride, crew);
    case Activation::clamped_swiglu: return rows_of<T, Activation::clamped_swiglu>(x, out, rows, width, stride, crew);
  }
}

}  // namespace

void silu_and_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation activation,
                  DType dtype, Crew& crew) {
  auto run = [&](auto kernel) { kernel(x, out, rows, width, stride, activation, crew); };
  if (dtype == DType::f32) return run(of_type<float>);
  return dtype == DType::bf16 ? run(of_type<bf16>) : run(of_type<fp16>);
}

}  // namespace raydix
