// bfloat16 matrix product, out = x weight^T + bias, on matrix tiles (AMX), vdpbf16ps, or multiply-adds in float32.
//
// The weight is packed in panels of PANEL output columns, [panel][in_features / 2][PANEL] of pairs along in_features.
// Each output element is one chain of multiply-adds over in_features from first to last, whatever the number of rows,
// the shape of the block it is in, or the thread: a long in_features is cut into blocks that stay in the cache, and the
// chain goes on from the sums kept so far. So rows do not depend on each other, for every shape. Tiles, vdpbf16ps and
// float32 round differently; one build uses one of them for every shape.
//
// An int8 weight has the same layout, at half the bytes, and a scale for each column. Eight bits fit into bfloat16's
// significand, so it is widened without rounding, multiplied like any other, and the scale enters at the end of the
// chain. The first rows widen a cache block and keep it for the others.
//
// A weight of few bits is stored in groups (linear_groups.h). Each cache block of it is widened once for all rows: to
// bfloat16 where the machine multiplies that, else to float32, and there for one or two rows in the registers alone.
#include <algorithm>
#include <vector>

#include "linear_groups.h"
#include "ops.h"
#include "vec.h"

#if defined(__AMX_BF16__)
#include "linear_tiles.h"
#elif defined(__AVX512BF16__)
#include "linear_vectors.h"
#elif defined(RAYDIX_FUSES)
#include "linear_floats.h"
#endif

namespace raydix {

#if defined(RAYDIX_FUSES)

namespace {

constexpr int64_t FIRST_LINES = 32;  // of the next panel, where it is not asked for as a whole

struct Piece {
  int64_t row, column, width;
};

Source source_of(const Weight& w) { return w.groups.bits ? Source::groups : w.scales ? Source::int8 : Source::bf16; }

// Bytes of so many pairs along in_features in one panel.
int64_t bytes_of(const Weight& w, int64_t pairs) {
  if (w.groups.bits) return 2 * pairs / w.groups.super * super_bytes(w.groups);
  return pairs * PANEL * pair_bytes(source_of(w));
}

// Where a column's panel begins, or where panels are pairs of columns side by side, the column itself.
const char* panel_of(const Weight& w, int64_t column) {
  const char* const panel = (const char*)w.packed + column / PANEL * bytes_of(w, w.in_features / 2);
  return w.groups.bits ? panel : panel + column % PANEL * pair_bytes(source_of(w));
}

// Rows [row, row + rows) and `vectors` vectors of columns from `column` on, all within one panel.
void task(const Linear& a, int64_t row, int64_t rows, int64_t column, int64_t vectors, const char* next) {
  alignas(64) static thread_local float sums[TASK_ROWS * PANEL];
  alignas(64) static thread_local uint32_t widened[WIDENED];
  const Weight& w = *a.weight;
  const Source source = source_of(w);
  const int64_t pairs = w.in_features / 2;
  Block b{};
  b.sums = sums, b.widened = widened, b.x_stride = a.x_stride;
  b.groups = w.groups.bits ? &w.groups : nullptr, b.vector = column % PANEL / LANES;
  b.out_stride = w.out_features, b.columns = w.out_features - column;
  b.out = (bf16*)a.out + row * w.out_features + column;
  b.scales = w.scales ? w.scales + column : nullptr;
  b.bias = w.bias ? w.bias + column : nullptr;
  for (int64_t done = 0; done < pairs; done += b.pairs) {
    b.pairs = std::min(DEPTH, pairs - done);
    b.first = done == 0, b.last = done + b.pairs == pairs;
    b.x = (const bf16*)a.x + row * a.x_stride + 2 * done;
    b.packed = panel_of(w, column) + bytes_of(w, done);
    const char* ahead = b.last ? next : b.packed + bytes_of(w, b.pairs);
    if (rows > ROWS && source != Source::groups) {
      b.ahead = ahead;
    } else if (ahead) {
      // One register block reads as fast as memory gives; only the way from one panel to the next is shortened.
      for (int64_t line = 0; line < FIRST_LINES; ++line) __builtin_prefetch(ahead + line * 64);
    }
    all_rows(b, rows, vectors, source);
  }
  end_rows();
}

// How one product is cut.
struct Pieces {
  int64_t panels, height, blocks, halved, whole;

  // For `threads` threads that share this product alone, or several of them.
  Pieces(const Linear& a, int threads) : panels((a.weight->out_features + PANEL - 1) / PANEL), height(TASK_ROWS) {
    while (height > FEW_ROWS && (a.rows + height - 1) / height * panels < 8 * threads) height /= 2;
    blocks = (a.rows + height - 1) / height;
    // The last panels are taken in halves, so that threads finish together.
    halved = blocks == 1 ? std::min<int64_t>(panels, threads) : 0;
    whole = blocks * panels - halved;
  }

  int64_t count() const { return whole + 2 * halved; }

  Piece at(int64_t i) const {
    const int64_t panel = i < whole ? (PANELS_FIRST ? i / blocks : i % panels) : whole + (i - whole) / 2;
    const int64_t half = i < whole ? 0 : (i - whole) % 2 * (PANEL / 2), width = i < whole ? PANEL : PANEL / 2;
    return Piece{i < whole ? (PANELS_FIRST ? i % blocks : i / panels) * height : 0, panel * PANEL + half, width};
  }
};

void compute(const Linear& a, const Pieces& pieces, int64_t i, int threads) {
  const Piece p = pieces.at(i);
  const int64_t vectors = (std::min(p.width, a.weight->out_features - p.column) + LANES - 1) / LANES;
  if (vectors <= 0) return;
  const bool more = i + threads < pieces.count();  // most likely the next one of this thread
  const int64_t column = more ? pieces.at(i + threads).column : 0;
  const void* next = more ? panel_of(*a.weight, column) : a.after;
  task(a, p.row, std::min(pieces.height, a.rows - p.row), p.column, vectors, (const char*)next);
}

}  // namespace

bool has_linear() { return true; }

void linear(const Linear& a, Crew& crew) {
  if (a.rows == 0) return;
  const Pieces pieces(a, crew.threads);
  crew.share(pieces.count(), [&](int64_t i) { compute(a, pieces, i, crew.threads); });
}

void linears(const std::vector<Linear>& all, Crew& crew) {
  std::vector<Pieces> pieces;
  std::vector<int64_t> ends;  // number of pieces of each product and those before it
  for (const Linear& a : all) {
    pieces.emplace_back(a, crew.threads);
    ends.push_back((ends.empty() ? 0 : ends.back()) + pieces.back().count());
  }
  if (ends.empty()) return;
  crew.share(ends.back(), [&](int64_t i) {
    const size_t product = size_t(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
    compute(all[product], pieces[product], i - (product ? ends[product - 1] : 0), crew.threads);
  });
}

#else

bool has_linear() { return false; }
void linear(const Linear&, Crew&) {}
void linears(const std::vector<Linear>&, Crew&) {}

#endif

}  // namespace raydix
