// Operations that go from position to position: a short convolution, the gated delta rule, and Mamba-2's selective scan.
// Each takes the state of a sequence from a slot and leaves states in other slots, so nothing that a batch reads is
// changed by it.
//
// A row's bits depend on the sequence up to it alone: every sum has one order, a state is float32 and goes from row to
// row, and pieces of work are channels and columns that never meet.
#include <algorithm>
#include <cmath>

#include "noise.h"
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

// The sequence that a row belongs to.
int64_t sequence_of(const StateUse& u, int64_t row) {
  return std::upper_bound(u.query_start, u.query_start + u.num_sequences + 1, int32_t(row)) - u.query_start - 1;
}

INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-select(x < -88.0f, splat(-88.0f), x))); }

// `at`: row of the batch, or before the sequence's first row `first` one of the inputs kept in `tail` (null: zeros).
template <class T>
INLINE f32x16 input(const ShortConv& a, const float* tail, int64_t first, int64_t at, int64_t channel, int64_t count) {
  if (at >= first) {
    const T* x = (const T*)a.x + at * a.x_stride + channel;
    return count == LANES ? load(x) : load_part(x, count);
  }
  if (!tail) return f32x16{};
  const float* kept = tail + (a.taps - 1 + at - first) * a.channels + channel;
  return count == LANES ? load(kept) : load_part(kept, count);
}

template <class T>
void convolve(const ShortConv& a, Crew& crew) {
  const int64_t before = a.taps - 1;
  auto tail_of = [&](int64_t sequence) {
    const int64_t source = a.use.sources[sequence];
    return source < 0 ? nullptr : a.tails + source * a.slot_stride;
  };
  crew.share(a.rows, grain(a.channels * a.taps), [&](int64_t row) {
    const int64_t sequence = sequence_of(a.use, row), first = a.use.query_start[sequence];
    const float* tail = tail_of(sequence);
    int64_t c = 0;
    // Most rows have all their inputs in the batch, and need not ask for each where it is.
    if (row - before >= first) {
      const T* x = (const T*)a.x + (row - before) * a.x_stride;
      for (; c + LANES <= a.channels; c += LANES) {
        f32x16 sum = a.bias ? load(a.bias + c) : f32x16{};
        for (int64_t k = 0; k < a.taps; ++k)
          sum = fused(load(a.weight + k * a.channels + c), load(x + k * a.x_stride + c), sum);
        store((T*)a.out + row * a.channels + c, a.silu ? sum * sigmoid(sum) : sum);
      }
    }
    for (; c < a.channels; c += LANES) {
      const int64_t count = std::min<int64_t>(LANES, a.channels - c);
      f32x16 sum = a.bias ? load_part(a.bias + c, count) : f32x16{};
      for (int64_t k = 0; k < a.taps; ++k) {
        const float* weight = a.weight + k * a.channels + c;
        const f32x16 w = count == LANES ? load(weight) : load_part(weight, count);
        sum = fused(w, input<T>(a, tail, first, row - before + k, c, count), sum);
      }
      if (a.silu) sum = sum * sigmoid(sum);
      T* to = (T*)a.out + row * a.channels + c;
      count == LANES ? store(to, sum) : store_part(to, sum, count);
    }
  });
  crew.share(a.use.num_writes, [&](int64_t write) {
    const int64_t row = a.use.write_rows[write], sequence = sequence_of(a.use, row);
    const int64_t first = a.use.query_start[sequence];
    float* to = a.tails + a.use.write_slots[write] * a.slot_stride;
    for (int64_t k = 0; k < before; ++k)
      for (int64_t c = 0; c < a.channels; c += LANES) {
        const int64_t count = std::min<int64_t>(LANES, a.channels - c);
        const f32x16 v = input<T>(a, tail_of(sequence), first, row - before + 1 + k, c, count);
        count == LANES ? store(to + k * a.channels + c, v) : store_part(to + k * a.channels + c, v, count);
      }
  });
}

// log(1 + x) for x in [0, 1], also where 1 + x is 1.
float log_one_plus(float x) {
  const float sum = 1.0f + x;
  return sum == 1.0f ? x : logarithm(sum) * (x / (sum - 1.0f));
}

// log(1 + exp(x)), of the first `count` lanes.
f32x16 softplus(f32x16 x, int64_t count) {
  alignas(64) float logs[LANES];
  store(logs, exp(-select(x < 0.0f, -x, x)));
  for (int64_t i = 0; i < count; ++i) logs[i] = log_one_plus(logs[i]);
  return select(x > 0.0f, x, f32x16{}) + load(logs);
}

// One key or query divided by its length, and multiplied by `scale`.
template <class T>
void unit(const T* x, float* out, int64_t size, float scale) {
  f32x16 squares{};
  const int64_t whole = size / LANES * LANES, rest = size - whole;
  for (int64_t i = 0; i < whole; i += LANES) squares = fused(load(x + i), load(x + i), squares);
  if (rest) squares = fused(load_part(x + whole, rest), load_part(x + whole, rest), squares);
  const float factor = scale / std::sqrt(reduce_add(squares) + 1e-6f);
  for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(x + i) * factor);
  if (rest) store_part(out + whole, load_part(x + whole, rest) * factor, rest);
}

// What a row's recurrence takes: unit queries and keys, how much of the memory stays, and how much of a change counts.
template <class T>
void prepare_row(const GatedDelta& a, int64_t row) {
  const T* mixed = (const T*)a.mixed + row * a.mixed_stride;
  const int64_t keys = a.num_key_heads * a.key_dim;
  const float scale = 1.0f / std::sqrt(float(a.key_dim));
  for (int64_t head = 0; head < a.num_key_heads; ++head) {
    const int64_t at = head * a.key_dim;
    unit(mixed + at, a.queries + row * keys + at, a.key_dim, scale);
    unit(mixed + keys + at, a.keys + row * keys + at, a.key_dim, 1.0f);
  }
  const T *beta = (const T*)a.beta + row * a.beta_stride, *step = (const T*)a.step + row * a.step_stride;
  for (int64_t head = 0; head < a.num_heads; head += LANES) {
    const int64_t count = std::min<int64_t>(LANES, a.num_heads - head), at = row * a.num_heads + head;
    store_part(a.shares + at, sigmoid(load_part(beta + head, count)), count);
    const f32x16 x = load_part(step + head, count) + load_part(a.step_bias + head, count);
    store_part(a.stays + at, exp(-load_part(a.decay_rate + head, count) * softplus(x, count)), count);
  }
}

constexpr int64_t MOST_KEYS = 256;

// Some columns of a head's memory, WIDTH of `stride`, from where they lie side by side with others; null: zeros.
template <int WIDTH>
void take(const float* from, float* memory, int64_t rows, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    for (int j = 0; j < WIDTH; j += LANES) store(memory + i * WIDTH + j, from ? load(from + i * stride + j) : f32x16{});
}

// And back.
template <int WIDTH>
void leave(const float* memory, float* to, int64_t rows, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    for (int j = 0; j < WIDTH; j += LANES) store(to + i * stride + j, load(memory + i * WIDTH + j));
}

// One sequence's rows through COLUMNS * LANES columns of one head's memory, which no other column meets.
template <class T, int COLUMNS>
void columns_of(const GatedDelta& a, int64_t sequence, int64_t head, int64_t column) {
  constexpr int WIDTH = COLUMNS * LANES;
  alignas(64) float memory[MOST_KEYS * WIDTH];
  const int64_t size = a.key_dim * a.value_dim, keys = a.num_key_heads * a.key_dim;
  const int64_t source = a.use.sources[sequence], key_head = head / (a.num_heads / a.num_key_heads);
  const float* from = source < 0 ? nullptr : a.states + source * a.slot_stride + head * size + column;
  take<WIDTH>(from, memory, a.key_dim, a.value_dim);

  const int64_t first = a.use.query_start[sequence], end = a.use.query_start[sequence + 1];
  const int64_t* writes_end = a.use.write_rows + a.use.num_writes;
  const int64_t* write = std::lower_bound(a.use.write_rows, writes_end, first);
  for (int64_t row = first; row < end; ++row) {
    const float *q = a.queries + row * keys + key_head * a.key_dim, *k = a.keys + row * keys + key_head * a.key_dim;
    const float stays = a.stays[row * a.num_heads + head], share = a.shares[row * a.num_heads + head];
    const T* value = (const T*)a.mixed + row * a.mixed_stride + 2 * keys + head * a.value_dim + column;
    f32x16 known[COLUMNS] = {}, change[COLUMNS], result[COLUMNS] = {};
    // What is known fades as the memory does: the sum is multiplied once, so that each number is written once a row.
    for (int64_t i = 0; i < a.key_dim; ++i)
      for (int j = 0; j < COLUMNS; ++j)
        known[j] = fused(load(memory + i * WIDTH + j * LANES), splat(k[i]), known[j]);
    for (int j = 0; j < COLUMNS; ++j) change[j] = (load(value + j * LANES) - known[j] * stays) * share;
    for (int64_t i = 0; i < a.key_dim; ++i)
      for (int j = 0; j < COLUMNS; ++j) {
        const f32x16 s = fused(splat(k[i]), change[j], load(memory + i * WIDTH + j * LANES) * stays);
        store(memory + i * WIDTH + j * LANES, s);
        result[j] = fused(s, splat(q[i]), result[j]);
      }
    T* out = (T*)a.out + row * a.num_heads * a.value_dim + head * a.value_dim + column;
    for (int j = 0; j < COLUMNS; ++j) store(out + j * LANES, result[j]);

    if (write < writes_end && *write == row) {
      float* to = a.states + a.use.write_slots[write++ - a.use.write_rows] * a.slot_stride + head * size + column;
      leave<WIDTH>(memory, to, a.key_dim, a.value_dim);
    }
  }
}

template <class T>
void all_rows(const GatedDelta& a, Crew& crew) {
  crew.share(a.rows, grain(2 * a.num_key_heads * a.key_dim), [&](int64_t row) { prepare_row<T>(a, row); });
  const int64_t columns = a.value_dim % (2 * LANES) == 0 ? 2 : 1;
  const int64_t width = columns * LANES, pieces = a.value_dim / width;
  crew.share(a.use.num_sequences * a.num_heads * pieces, [&](int64_t piece) {
    const int64_t column = piece % pieces * width, head = piece / pieces % a.num_heads;
    const int64_t sequence = piece / pieces / a.num_heads;
    columns == 2 ? columns_of<T, 2>(a, sequence, head, column) : columns_of<T, 1>(a, sequence, head, column);
  });
}

// What a row's scan takes: keys and queries in float32, each head's step, and how much of its memory stays.
template <class T>
void prepare_row(const SelectiveScan& a, int64_t row) {
  const int64_t size = a.num_groups * a.state_size, whole = size / LANES * LANES, rest = size - whole;
  const T* mixed = (const T*)a.mixed + row * a.mixed_stride + a.num_heads * a.head_dim;
  for (float* to : {a.keys + row * size, a.queries + row * size}) {
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, load(mixed + i));
    if (rest) store_part(to + whole, load_part(mixed + whole, rest), rest);
    mixed += size;
  }
  const T* step = (const T*)a.step + row * a.step_stride;
  for (int64_t head = 0; head < a.num_heads; head += LANES) {
    const int64_t count = std::min<int64_t>(LANES, a.num_heads - head), at = row * a.num_heads + head;
    f32x16 length = softplus(load_part(step + head, count) + load_part(a.step_bias + head, count), count);
    length = select(length < a.least, splat(a.least), length);
    length = select(length > a.most, splat(a.most), length);
    store_part(a.shares + at, length, count);
    store_part(a.stays + at, exp(-load_part(a.decay_rate + head, count) * length), count);
  }
}

// One sequence's rows through COLUMNS * LANES columns of one head's memory, which no other column meets.
template <class T, int COLUMNS>
void scan_columns(const SelectiveScan& a, int64_t sequence, int64_t head, int64_t column) {
  constexpr int WIDTH = COLUMNS * LANES;
  alignas(64) float memory[MOST_KEYS * WIDTH];
  const int64_t size = a.state_size * a.head_dim, keys = a.num_groups * a.state_size;
  const int64_t source = a.use.sources[sequence], group = head / (a.num_heads / a.num_groups) * a.state_size;
  const int64_t place = head * size + column;
  take<WIDTH>(source < 0 ? nullptr : a.states + source * a.slot_stride + place, memory, a.state_size, a.head_dim);

  const int64_t first = a.use.query_start[sequence], end = a.use.query_start[sequence + 1];
  const int64_t* writes_end = a.use.write_rows + a.use.num_writes;
  const int64_t* write = std::lower_bound(a.use.write_rows, writes_end, first);
  for (int64_t row = first; row < end; ++row) {
    const float *k = a.keys + row * keys + group, *q = a.queries + row * keys + group;
    const float stays = a.stays[row * a.num_heads + head], share = a.shares[row * a.num_heads + head];
    const T* value = (const T*)a.mixed + row * a.mixed_stride + head * a.head_dim + column;
    f32x16 change[COLUMNS], result[COLUMNS] = {};
    for (int j = 0; j < COLUMNS; ++j) change[j] = load(value + j * LANES) * share;
    for (int64_t i = 0; i < a.state_size; ++i)
      for (int j = 0; j < COLUMNS; ++j) {
        const f32x16 s = fused(splat(k[i]), change[j], load(memory + i * WIDTH + j * LANES) * stays);
        store(memory + i * WIDTH + j * LANES, s);
        result[j] = fused(s, splat(q[i]), result[j]);
      }
    T* out = (T*)a.out + row * a.num_heads * a.head_dim + head * a.head_dim + column;
    for (int j = 0; j < COLUMNS; ++j)
      store(out + j * LANES, fused(load(value + j * LANES), splat(a.skip[head]), result[j]));

    if (write < writes_end && *write == row) {
      float* to = a.states + a.use.write_slots[write++ - a.use.write_rows] * a.slot_stride + place;
      leave<WIDTH>(memory, to, a.state_size, a.head_dim);
    }
  }
}

template <class T>
void scan_rows(const SelectiveScan& a, Crew& crew) {
  crew.share(a.rows, grain(2 * a.num_groups * a.state_size), [&](int64_t row) { prepare_row<T>(a, row); });
  const int64_t columns = a.head_dim % (2 * LANES) == 0 ? 2 : 1;
  const int64_t width = columns * LANES, pieces = a.head_dim / width;
  crew.share(a.use.num_sequences * a.num_heads * pieces, [&](int64_t piece) {
    const int64_t column = piece % pieces * width, head = piece / pieces % a.num_heads;
    const int64_t sequence = piece / pieces / a.num_heads;
    columns == 2 ? scan_columns<T, 2>(a, sequence, head, column) : scan_columns<T, 1>(a, sequence, head, column);
  });
}

}  // namespace

void short_conv(const ShortConv& a, DType dtype, Crew& crew) {
  if (dtype == DType::f32) return convolve<float>(a, crew);
  return dtype == DType::bf16 ? convolve<bf16>(a, crew) : convolve<fp16>(a, crew);
}

void gated_delta(const GatedDelta& a, DType dtype, Crew& crew) {
  if (dtype == DType::f32) return all_rows<float>(a, crew);
  return dtype == DType::bf16 ? all_rows<bf16>(a, crew) : all_rows<fp16>(a, crew);
}

void selective_scan(const SelectiveScan& a, DType dtype, Crew& crew) {
  if (dtype == DType::f32) return scan_rows<float>(a, crew);
  return dtype == DType::bf16 ? scan_rows<bf16>(a, crew) : scan_rows<fp16>(a, crew);
}

}  // namespace raydix
