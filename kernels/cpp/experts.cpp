// A mixture of experts: each row goes through the few gated MLPs that its router scores highest.
//
// Rows are grouped by expert, so each expert's weights are read once, and only those of experts that a row has chosen.
// All experts' products are one phase. The product gives a row the same bits in any group, and a row's contributions
// are added in the order of their rank in float32, so the result does not depend on the other rows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

// The experts of one row, best first, the lower index before its equal, and their shares, from float32 softmax.
void route_row(const Experts& e, const bf16* logits, int32_t* ids, float* shares) {
  const int64_t count = e.router.out_features;
  auto logit = [&](int64_t i) {
    uint32_t bits = uint32_t(((const uint16_t*)logits)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (int64_t rank = 0; rank < e.per_token; ++rank) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (std::find(ids, ids + rank, int32_t(i)) != ids + rank) continue;
      if (best < 0 || logit(i) > logit(best)) best = i;
    }
    ids[rank] = int32_t(best);
  }
  // What all experts have together: of those that were chosen, or of every one.
  const float largest = logit(ids[0]);
  float total = 0.0f;
  for (int64_t rank = 0; rank < e.per_token; ++rank) total += shares[rank] = std::exp(logit(ids[rank]) - largest);
  if (!e.normalised) {
    total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += std::exp(logit(i) - largest);
  }
  for (int64_t rank = 0; rank < e.per_token; ++rank) shares[rank] /= total;
}

// Gives each chosen (row, rank) a place, those of one expert side by side, and makes the products of experts that have
// any.
void group(const Experts& e, int64_t rows, bool one_row, const ExpertBuffers& b, ExpertProducts& products) {
  const int64_t count = e.router.out_features, chosen = rows * e.per_token;
  std::vector<int64_t> start(size_t(count) + 1);
  for (int64_t i = 0; i < chosen; ++i) ++start[size_t(b.ids[i]) + 1];
  for (int64_t i = 0; i < count; ++i) start[size_t(i) + 1] += start[size_t(i)];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = start[size_t(i)], size = start[size_t(i) + 1] - at;
    if (size == 0) continue;
    const Weight &up = e.gate_up[size_t(i)], &down = e.down[size_t(i)];
    const bf16* x = (const bf16*)b.gathered + (one_row ? 0 : at * up.in_features);
    products.first.push_back({&up, x, (bf16*)b.wide + at * up.out_features, size, up.in_features, nullptr});
    products.second.push_back({&down, (const bf16*)b.activated + at * down.in_features,
                               (bf16*)b.outputs + at * down.out_features, size, down.in_features, nullptr});
  }
  for (int64_t i = 0; i < chosen; ++i) b.places[i] = start[size_t(b.ids[i])]++;
}

}  // namespace

void experts(const Experts& e, const void* x, void* out, int64_t rows, Activation activation, ExpertBuffers& b,
             size_t layer, Crew& crew) {
  const Weight& router = e.router;
  const int64_t hidden = router.in_features, ranks = e.per_token, inner = e.down[0].in_features;
  const bool one_row = rows == 1;  // every expert reads it where it is
  ExpertProducts& products = b.products[layer];
  linear({&router, x, b.logits, rows, hidden, nullptr}, crew);
  crew.share(rows, grain(router.out_features), [&](int64_t row) {
    route_row(e, (const bf16*)b.logits + row * router.out_features, b.ids + row * ranks, b.shares + row * ranks);
  });
  crew.share(1, [&](int64_t) {
    if (one_row) std::memcpy(b.gathered, x, size_t(hidden) * sizeof(bf16));
    group(e, rows, one_row, b, products);
  });
  if (!one_row) {
    crew.share(rows * ranks, grain(hidden), [&](int64_t i) {
      std::memcpy((bf16*)b.gathered + b.places[i] * hidden, (const bf16*)x + i / ranks * hidden,
                  size_t(hidden) * sizeof(bf16));
    });
  }
  linears(products.first, crew);
  silu_and_mul(b.wide, b.activated, rows * ranks, inner, 2 * inner, activation, DType::bf16, crew);
  linears(products.second, crew);
  crew.share(rows, grain(hidden * ranks), [&](int64_t row) {
    const bf16* outputs = (const bf16*)b.outputs;
    const int64_t* places = b.places + row * ranks;
    const float* shares = b.shares + row * ranks;
    bf16* to = (bf16*)out + row * hidden;
    for (int64_t i = 0; i < hidden; i += LANES) {
      const int64_t width = std::min<int64_t>(LANES, hidden - i);
      f32x16 total = splat(0.0f);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const bf16* from = outputs + places[rank] * hidden + i;
        total += shares[rank] * (width == LANES ? load(from) : load_part(from, width));
      }
      width == LANES ? store(to + i, total) : store_part(to + i, total, width);
    }
  });
}

}  // namespace raydix
