// A mixture of experts: each row goes through the few MLPs that its router scores highest.
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

constexpr int64_t ROUTED = 4;       // experts whose logits are computed together: their sums stay in registers
constexpr int64_t ROUTED_ROWS = 32;  // rows that share the router's weights in the nearest cache

// Logits of rows [first, last) and experts [expert, expert + COUNT) in float32. The chain of one logit goes from the
// first dimension to the last, whatever the other rows.
template <int64_t COUNT>
void float_logits(const Experts& e, const bf16* x, int64_t first, int64_t last, int64_t expert, float* logits) {
  const int64_t hidden = e.router.in_features, whole = hidden / LANES * LANES;
  const float* weight = e.float_router + expert * hidden;
  for (int64_t row = first; row < last; ++row) {
    const bf16* from = x + row * hidden;
    f32x16 total[COUNT]{};
    for (int64_t i = 0; i < whole; i += LANES) {
      const f32x16 column = load(from + i);
      for (int64_t n = 0; n < COUNT; ++n) total[n] = fused(column, load(weight + n * hidden + i), total[n]);
    }
    if (whole < hidden) {
      const f32x16 column = load_part(from + whole, hidden - whole);
      for (int64_t n = 0; n < COUNT; ++n)
        total[n] = fused(column, load_part(weight + n * hidden + whole, hidden - whole), total[n]);
    }
    for (int64_t n = 0; n < COUNT; ++n) logits[row * e.router.out_features + expert + n] = reduce_add(total[n]);
  }
}

void all_float_logits(const Experts& e, const bf16* x, int64_t rows, float* logits, Crew& crew) {
  const int64_t count = e.router.out_features, parts = (count + ROUTED - 1) / ROUTED;
  const int64_t blocks = (rows + ROUTED_ROWS - 1) / ROUTED_ROWS;
  crew.share(blocks * parts, [&](int64_t piece) {
    const int64_t first = piece / parts * ROUTED_ROWS, last = std::min(rows, first + ROUTED_ROWS);
    int64_t expert = piece % parts * ROUTED;
    if (expert + ROUTED <= count) return float_logits<ROUTED>(e, x, first, last, expert, logits);
    for (; expert < count; ++expert) float_logits<1>(e, x, first, last, expert, logits);
  });
}

// The index of the largest of `count` numbers, of equals the first one; it is then taken out.
int64_t take_best(float* numbers, int64_t count) {
  const int64_t best = std::max_element(numbers, numbers + count) - numbers;
  numbers[best] = -std::numeric_limits<float>::infinity();
  return best;
}

// Leaves only the experts of the best groups to be chosen.
void choose_groups(const Experts& e, float* choice, int64_t count) {
  const int64_t size = count / e.num_groups;
  std::vector<float> groups(static_cast<size_t>(e.num_groups));
  for (int64_t g = 0; g < e.num_groups; ++g) {
    std::vector<float> group(choice + g * size, choice + (g + 1) * size);
    for (int64_t i = 0; i < e.group_best; ++i) {
      const float best = *std::max_element(group.begin(), group.end());
      groups[size_t(g)] += best;
      take_best(group.data(), size);
    }
  }
  std::vector<bool> chosen(groups.size());
  for (int64_t i = 0; i < e.top_groups; ++i) chosen[size_t(take_best(groups.data(), e.num_groups))] = true;
  for (int64_t i = 0; i < count; ++i)
    if (!chosen[size_t(i / size)]) choice[i] = -std::numeric_limits<float>::infinity();
}

// The experts of one row, best first, the lower index before its equal, and their shares, from float32 scores.
void route_row(const Experts& e, const float* logits, int32_t* ids, float* shares) {
  const int64_t count = e.router.out_features;
  std::vector<float> scores(logits, logits + count), choice(logits, logits + count);
  float total = e.sum_offset;
  if (e.sigmoid) {
    for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
  } else {
    const float largest = *std::max_element(logits, logits + count);
    float sum = 0.0f;
    for (float& score : scores) sum += score = std::exp(score - largest);
    // Normalised shares need no common divisor but their own, unless the correction is of whole scores.
    if (!e.normalised || e.correction)
      for (float& score : scores) score /= sum;
  }
  if (e.sigmoid || e.correction)
    for (int64_t i = 0; i < count; ++i) choice[size_t(i)] = scores[size_t(i)] + (e.correction ? e.correction[i] : 0.0f);
  if (e.num_groups > 1) choose_groups(e, choice.data(), count);
  for (int64_t rank = 0; rank < e.per_token; ++rank) {
    ids[rank] = int32_t(take_best(choice.data(), count));
    total += shares[rank] = scores[size_t(ids[rank])];
  }
  for (int64_t rank = 0; rank < e.per_token; ++rank) {
    shares[rank] = (e.normalised ? shares[rank] / total : shares[rank]) * e.scale;
    if (e.factors) shares[rank] *= e.factors[ids[rank]];
  }
}

// A row's logits, widened if they were rounded.
void route(const Experts& e, const void* logits, int64_t row, int32_t* ids, float* shares) {
  const int64_t count = e.router.out_features;
  if (e.float_router) return route_row(e, (const float*)logits + row * count, ids, shares);
  std::vector<float> wide(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = uint32_t(((const uint16_t*)logits)[row * count + i]) << 16;
    std::memcpy(&wide[size_t(i)], &bits, sizeof bits);
  }
  route_row(e, wide.data(), ids, shares);
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

void experts(const Experts& e, const void* x, const void* routed, void* out, int64_t rows, Activation activation,
             ExpertBuffers& b, size_t layer, Crew& crew) {
  const Weight& router = e.router;
  const int64_t hidden = router.in_features, ranks = e.per_token, inner = e.down[0].in_features;
  const bool one_row = rows == 1;  // every expert reads it where it is
  ExpertProducts& products = b.products[layer];
  if (e.float_router) {
    all_float_logits(e, (const bf16*)routed, rows, (float*)b.logits, crew);
  } else {
    linear({&router, routed, b.logits, rows, hidden, nullptr}, crew);
  }
  crew.share(rows, grain(router.out_features),
             [&](int64_t row) { route(e, b.logits, row, b.ids + row * ranks, b.shares + row * ranks); });
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
  if (e.has_gate) {
    silu_and_mul(b.wide, b.activated, rows * ranks, inner, 2 * inner, activation, DType::bf16, crew);
  } else {
    activate(b.wide, b.activated, rows * ranks, inner, inner, activation, DType::bf16, crew);
  }
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
