// The gated activation: out = act(gate) * up for rows [gate | up]; act is SiLU or the tanh form of GELU.
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

template <bool SILU>
INLINE f32x16 activate(f32x16 x) {
  if (SILU) {
    return x / (1.0f + exp(-select(x < -88.0f, splat(-88.0f), x)));
  }
  const f32x16 inner = 0.79788456f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh(inner));
}

template <class T, bool SILU>
void rows_of(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Crew& crew) {
  const int64_t whole = width / LANES * LANES, rest = width - whole;
  crew.share(rows, grain(width), [&](int64_t row) {
    const T *gate = (const T*)x + row * stride, *up = gate + width;
    T* to = (T*)out + row * width;
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, activate<SILU>(load(gate + i)) * load(up + i));
    if (rest) {
      const f32x16 v = activate<SILU>(load_part(gate + whole, rest)) * load_part(up + whole, rest);
      store_part(to + whole, v, rest);
    }
  });
}

}  // namespace

void silu_and_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, bool silu, DType dtype,
                  Crew& crew) {
  auto run = [&](auto kernel) { kernel(x, out, rows, width, stride, crew); };
  if (dtype == DType::f32) return silu ? run(rows_of<float, true>) : run(rows_of<float, false>);
  if (dtype == DType::bf16) return silu ? run(rows_of<bf16, true>) : run(rows_of<bf16, false>);
  return silu ? run(rows_of<fp16, true>) : run(rows_of<fp16, false>);
}

}  // namespace raydix
