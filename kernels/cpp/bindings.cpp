// Python's entry to the kernels: plain vectorcall functions that unwrap tensors, check them, and pass pointers on.
//
// Wrong shapes raise ValueError, wrong types TypeError. The GIL is released only where the work is worth it: a decode
// step makes hundreds of calls of a few microseconds, and giving the GIL away in each would hand the step to whichever
// other thread wants to run.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "ops.h"

namespace {

using at::Tensor;
using raydix::DType;

struct WrongType : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void check_type(bool holds, const char* message) {
  if (!holds) throw WrongType(message);
}

const Tensor& tensor(PyObject* o) {
  check_type(THPVariable_Check(o), "expected a tensor");
  const Tensor& t = THPVariable_Unpack(o);
  check_type(t.device().is_cpu(), "expected a tensor on the CPU");
  return t;
}

const Tensor* maybe_tensor(PyObject* o) { return o == Py_None ? nullptr : &tensor(o); }

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::fp16;
    default: throw WrongType("expected float32, bfloat16 or float16");
  }
}

void same_type(const Tensor& a, const Tensor& b) {
  check_type(a.scalar_type() == b.scalar_type(), "expected tensors of one dtype");
}

// Contiguous data of a tensor of `count` elements.
template <class T>
const T* data(const Tensor& t, at::ScalarType type, int64_t count, const char* what) {
  check_type(t.scalar_type() == type, what);
  check(t.numel() == count && t.is_contiguous(), what);
  return static_cast<const T*>(t.data_ptr());
}

int64_t integer(PyObject* o) {
  const int64_t value = PyLong_AsLongLong(o);
  check_type(!(value == -1 && PyErr_Occurred()), "expected an integer");
  return value;
}

float number(PyObject* o) {
  const double value = PyFloat_AsDouble(o);
  check_type(!(value == -1 && PyErr_Occurred()), "expected a number");
  return float(value);
}

// Runs `work`, without the GIL if it is `long_work`.
template <class Work>
void release(bool long_work, Work work) {
  if (!long_work) return work();
  PyThreadState* state = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    PyEval_RestoreThread(state);
    throw;
  }
  PyEval_RestoreThread(state);
}

// Runs a kernel of `size` units of work: on this thread while that is little, on the whole team from `shared` on,
// and without the GIL when it is long.
template <class Kernel>
void run(int64_t size, int64_t shared, Kernel kernel) {
  const int threads = size < shared ? 1 : at::get_num_threads();
  release(size > 8 * shared, [&] { raydix::together(threads, kernel); });
}

PyObject* pair(const Tensor& a, const Tensor& b) {
  PyObject* result = PyTuple_New(2);
  PyTuple_SET_ITEM(result, 0, THPVariable_Wrap(a));
  PyTuple_SET_ITEM(result, 1, THPVariable_Wrap(b));
  return result;
}

// Whether keys and values [..., head_dim] are kept in 8 bits, see narrow.h, beside computation in the type of `other`.
bool is_narrow(const Tensor& cache, const Tensor& other) {
  if (cache.scalar_type() == at::kChar) return true;
  same_type(other, cache);
  return false;
}

// Elements of a row of the cache, of which `head_dim` are returned as the dimension of a head.
int64_t head_dim_of(int64_t row_size, bool is_narrow) {
  const int64_t dim = is_narrow ? row_size - raydix::FACTOR_BYTES : row_size;
  check(dim > 0 && dim % 16 == 0 && dim <= 1024, "head_dim must be a multiple of 16, and at most 1024");
  return dim;
}

// Takes what says where the sequences and their KV are; gives the number of query-key pairs, about.
int64_t set_sequences(raydix::Attention& a, const Tensor& tables, const Tensor& starts, const Tensor& lens,
                      int64_t num_tokens) {
  a.num_sequences = lens.numel();
  check(tables.dim() == 2 && tables.size(0) == a.num_sequences && tables.stride(1) == 1,
        "block_tables must be [num_sequences, max_blocks]");
  check_type(tables.scalar_type() == at::kInt, "block_tables must be int32");
  a.block_tables = static_cast<const int32_t*>(tables.data_ptr()), a.table_stride = tables.stride(0);
  a.query_start = data<int32_t>(starts, at::kInt, a.num_sequences + 1, "query_start must be int32 [num_sequences + 1]");
  a.context_lens = data<int32_t>(lens, at::kInt, a.num_sequences, "context_lens must be int32 [num_sequences]");
  check(a.query_start[0] == 0 && a.query_start[a.num_sequences] == num_tokens, "query_start must span the queries");
  const int64_t positions = tables.size(1) * a.block_size;
  int64_t total = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const int64_t chunk = a.query_start[s + 1] - a.query_start[s], length = a.context_lens[s];
    check(chunk >= 0 && length >= chunk && length <= positions,
          "a context must hold its queries and fit its block table");
    total += chunk * length;
  }
  return total;
}

// Every block that is read must be one of the cache's.
void check_tables(const raydix::Attention& a, int64_t num_blocks) {
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const int64_t length = a.context_lens[s], chunk = a.query_start[s + 1] - a.query_start[s];
    if (chunk == 0) continue;
    const int64_t first = a.sliding_window ? std::max<int64_t>(0, length - chunk - a.sliding_window + 1) : 0;
    for (int64_t b = first / a.block_size; b < (length + a.block_size - 1) / a.block_size; ++b) {
      const int64_t block = a.block_tables[s * a.table_stride + b];
      check(block >= 0 && block < num_blocks, "block_tables names a block outside the cache");
    }
  }
}

PyObject* paged_attention(PyObject* const* args) {
  const Tensor &q = tensor(args[0]), &k = tensor(args[1]), &v = tensor(args[2]);
  const Tensor &tables = tensor(args[3]), &starts = tensor(args[4]), &lens = tensor(args[5]);
  check(q.dim() == 3 && q.is_contiguous(), "query must be contiguous [num_tokens, num_heads, head_dim]");
  check(k.dim() == 4 && v.sizes() == k.sizes(), "caches must be [num_blocks, num_kv_heads, block_size, head_dim]");
  same_type(k, v);
  raydix::Attention a{};
  a.is_narrow = is_narrow(k, q), a.row_size = k.size(3);
  a.num_heads = q.size(1), a.head_dim = q.size(2), a.num_kv_heads = k.size(1), a.block_size = k.size(2);
  check(head_dim_of(a.row_size, a.is_narrow) == a.head_dim, "head_dim must be the caches'");
  check(a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  for (const Tensor* cache : {&k, &v})
    check(cache->stride(3) == 1 && cache->stride(2) == a.row_size && cache->stride(1) == a.block_size * a.row_size,
          "the last three dims of a cache must be contiguous");
  const int64_t total = set_sequences(a, tables, starts, lens, q.size(0));
  a.scale = number(args[6]);
  a.sliding_window = args[7] == Py_None ? 0 : integer(args[7]);
  a.soft_cap = args[8] == Py_None ? 0.0f : number(args[8]);
  check(args[7] == Py_None || a.sliding_window > 0, "sliding_window must be positive");
  check(args[8] == Py_None || a.soft_cap > 0, "soft_cap must be positive");
  if (args[11] != Py_None) a.sinks = data<float>(tensor(args[11]), at::kFloat, a.num_heads, "sinks must be [num_heads]");
  check_tables(a, k.size(0));
  Tensor out;
  if (args[10] == Py_None) {
    out = at::empty(q.sizes(), q.options());
  } else {
    out = tensor(args[10]);
    same_type(q, out);
    check(out.sizes() == q.sizes() && out.is_contiguous(), "out must be contiguous and like query");
  }
  Tensor lse;
  if (args[9] == Py_True) {
    lse = at::empty({q.size(0), a.num_heads}, q.options().dtype(at::kFloat));
    a.lse = lse.data_ptr<float>();
  }
  a.query = q.data_ptr(), a.out = out.data_ptr(), a.key_cache = k.data_ptr(), a.value_cache = v.data_ptr();
  a.key_stride = k.stride(0), a.value_stride = v.stride(0);
  const DType dtype = dtype_of(q);
  const int64_t work = total * a.num_heads * a.head_dim;
  const raydix::AttentionPlan plan(a, dtype, work < 400000 ? 1 : at::get_num_threads());
  run(work, 400000, [&](raydix::Crew& crew) { raydix::paged_attention(a, plan, dtype, crew); });
  return args[9] == Py_True ? pair(out, lse) : THPVariable_Wrap(out);
}

void set_positions(raydix::RotaryStore& a, const Tensor& positions, const Tensor& slots, int64_t num_slots,
                   int64_t max_position) {
  a.positions = data<int64_t>(positions, at::kLong, a.num_tokens, "positions must be int64 [num_tokens]");
  a.slot_mapping = data<int64_t>(slots, at::kLong, a.num_tokens, "slot_mapping must be int64 [num_tokens]");
  for (int64_t i = 0; i < a.num_tokens; ++i) {
    check(a.positions[i] >= 0 && a.positions[i] < max_position, "a position lies outside cos_sin");
    check(a.slot_mapping[i] < num_slots, "a slot lies outside the cache");
  }
}

PyObject* rotary_kv_store(PyObject* const* args) {
  const Tensor &qkv = tensor(args[0]), &k = tensor(args[3]), &v = tensor(args[4]), &cos_sin = tensor(args[2]);
  check(qkv.dim() == 2 && qkv.stride(1) == 1, "qkv must be [num_tokens, width] with contiguous rows");
  check(k.dim() == 4 && v.sizes() == k.sizes(), "caches must be [num_blocks, num_kv_heads, block_size, head_dim]");
  same_type(k, v);
  raydix::RotaryStore a{};
  a.is_narrow = is_narrow(k, qkv), a.row_size = k.size(3);
  a.num_tokens = qkv.size(0), a.num_heads = integer(args[6]), a.qkv_stride = qkv.stride(0);
  a.num_kv_heads = k.size(1), a.block_size = k.size(2), a.head_dim = head_dim_of(a.row_size, a.is_narrow);
  check(qkv.size(1) == (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, "qkv is not as wide as its heads");
  for (const Tensor* cache : {&k, &v})
    check(cache->stride(3) == 1 && cache->stride(2) == a.row_size && cache->stride(1) == a.block_size * a.row_size,
          "the last three dims of a cache must be contiguous");
  check(cos_sin.dim() == 2 && cos_sin.size(1) == a.head_dim, "cos_sin must be [max_position, head_dim]");
  a.cos_sin = data<float>(cos_sin, at::kFloat, cos_sin.numel(), "cos_sin must be contiguous float32");
  set_positions(a, tensor(args[1]), tensor(args[5]), k.size(0) * a.block_size, cos_sin.size(0));
  bool float_norms = false;
  const Tensor *q_norm = maybe_tensor(args[7]), *k_norm = maybe_tensor(args[8]);
  for (const Tensor* norm : {q_norm, k_norm}) {
    if (!norm) continue;
    float_norms = norm->scalar_type() == at::kFloat;
    check_type(float_norms || norm->scalar_type() == qkv.scalar_type(), "norms must be float32 or of qkv's dtype");
    check(norm->numel() == a.head_dim && norm->is_contiguous(), "norms must be [head_dim]");
  }
  if (q_norm && k_norm) same_type(*q_norm, *k_norm);
  a.q_norm = q_norm ? q_norm->data_ptr() : nullptr, a.k_norm = k_norm ? k_norm->data_ptr() : nullptr;
  a.eps = number(args[9]);
  const Tensor query = at::empty({a.num_tokens, a.num_heads, a.head_dim}, qkv.options());
  a.qkv = qkv.data_ptr(), a.query = query.data_ptr(), a.key_cache = k.data_ptr(), a.value_cache = v.data_ptr();
  a.key_stride = k.stride(0), a.value_stride = v.stride(0);
  const DType dtype = dtype_of(qkv);
  run(qkv.numel(), 32768, [&](raydix::Crew& crew) { raydix::rotary_kv_store(a, dtype, float_norms, crew); });
  return THPVariable_Wrap(query);
}

PyObject* rms_norm(PyObject* const* args) {
  const Tensor &x = tensor(args[0]), &weight = tensor(args[1]);
  const Tensor* residual = maybe_tensor(args[3]);
  check(x.dim() == 2 && x.stride(1) == 1, "x must be [num_tokens, hidden] with contiguous rows");
  const bool float_weight = weight.scalar_type() == at::kFloat;
  check_type(float_weight || weight.scalar_type() == x.scalar_type(), "weight must be float32 or of x's dtype");
  check(weight.numel() == x.size(1) && weight.is_contiguous(), "weight must be [hidden]");
  if (residual) {
    same_type(x, *residual);
    check(residual->sizes() == x.sizes() && residual->is_contiguous(), "residual must be contiguous and like x");
  }
  const Tensor out = at::empty(x.sizes(), x.options()), sum = residual ? at::empty(x.sizes(), x.options()) : Tensor();
  const float eps = number(args[2]);
  const DType dtype = dtype_of(x);
  run(x.numel(), 32768, [&](raydix::Crew& crew) {
    raydix::rms_norm(x.data_ptr(), residual ? residual->data_ptr() : nullptr, weight.data_ptr(), out.data_ptr(),
                     residual ? sum.data_ptr() : nullptr, x.size(0), x.size(1), x.stride(0), eps, dtype,
                     float_weight, crew);
  });
  return residual ? pair(out, sum) : THPVariable_Wrap(out);
}

PyObject* gated_rms_norm(PyObject* const* args) {
  const Tensor &x = tensor(args[0]), &gate = tensor(args[1]), &weight = tensor(args[2]);
  check(x.dim() == 2 && x.stride(1) == 1, "x must be [num_tokens, channels] with contiguous rows");
  same_type(x, gate);
  check(gate.sizes() == x.sizes() && gate.stride(1) == 1, "gate must be like x, with contiguous rows");
  raydix::GatedNorm a{};
  a.rows = x.size(0), a.width = x.size(1), a.groups = integer(args[4]);
  check(a.groups > 0 && a.width > 0 && a.width % a.groups == 0, "groups must divide the channels");
  a.x_stride = x.stride(0), a.gate_stride = gate.stride(0), a.eps = number(args[3]);
  a.weight = data<float>(weight, at::kFloat, a.width, "weight must be float32 [channels]");
  const Tensor out = at::empty(x.sizes(), x.options()), scratch = at::empty(x.sizes(), weight.options());
  a.x = x.data_ptr(), a.gate = gate.data_ptr(), a.out = out.data_ptr(), a.scratch = scratch.data_ptr<float>();
  const DType dtype = dtype_of(x);
  run(2 * x.numel(), 32768, [&](raydix::Crew& crew) { raydix::gated_rms_norm(a, dtype, crew); });
  return THPVariable_Wrap(out);
}

PyObject* layer_norm(PyObject* const* args) {
  const Tensor &x = tensor(args[0]), &weight = tensor(args[1]);
  const Tensor *bias = maybe_tensor(args[2]), *residual = maybe_tensor(args[4]);
  check(x.dim() == 2 && x.stride(1) == 1, "x must be [num_tokens, hidden] with contiguous rows");
  raydix::LayerNorm a{};
  a.x = x.data_ptr(), a.rows = x.size(0), a.width = x.size(1), a.stride = x.stride(0), a.eps = number(args[3]);
  check(weight.dim() > 0 && weight.size(-1) == a.width, "weight must be [hidden] or [groups, hidden]");
  a.weight = data<float>(weight, at::kFloat, weight.numel(), "weight must be contiguous float32");
  a.groups = weight.numel() / std::max<int64_t>(a.width, 1);
  check(a.groups > 0 || a.rows == 0 || a.width == 0, "weight must have a row");
  if (bias) a.bias = data<float>(*bias, at::kFloat, a.width, "bias must be float32 [hidden]");
  if (residual) {
    same_type(x, *residual);
    check(residual->sizes() == x.sizes() && residual->is_contiguous(), "residual must be contiguous and like x");
    a.residual = residual->data_ptr();
  }
  const Tensor out = at::empty(x.sizes(), x.options()), sum = residual ? at::empty(x.sizes(), x.options()) : Tensor();
  a.out = out.data_ptr(), a.sum = residual ? sum.data_ptr() : nullptr;
  const DType dtype = dtype_of(x);
  run(x.numel(), 32768, [&](raydix::Crew& crew) { raydix::layer_norm(a, dtype, crew); });
  return residual ? pair(out, sum) : THPVariable_Wrap(out);
}

raydix::Activation activation_of(PyObject* o) {
  const int64_t kind = integer(o);
  check(kind >= 0 && kind <= int64_t(raydix::Activation::relu2), "unknown activation");
  return raydix::Activation(kind);
}

PyObject* silu_and_mul(PyObject* const* args) {
  const Tensor& x = tensor(args[0]);
  check(x.dim() == 2 && x.stride(1) == 1 && x.size(1) % 2 == 0, "x must be [num_tokens, 2 * intermediate]");
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  const Tensor out = at::empty({rows, width}, x.options());
  const DType dtype = dtype_of(x);
  const raydix::Activation kind = activation_of(args[1]);
  run(x.numel(), 32768, [&](raydix::Crew& crew) {
    raydix::silu_and_mul(x.data_ptr(), out.data_ptr(), rows, width, x.stride(0), kind, dtype, crew);
  });
  return THPVariable_Wrap(out);
}

PyObject* activate(PyObject* const* args) {
  const Tensor& x = tensor(args[0]);
  check(x.dim() == 2 && x.stride(1) == 1, "x must be [num_tokens, width] with contiguous rows");
  const Tensor out = at::empty(x.sizes(), x.options());
  const DType dtype = dtype_of(x);
  const raydix::Activation kind = activation_of(args[1]);
  run(x.numel(), 32768, [&](raydix::Crew& crew) {
    raydix::activate(x.data_ptr(), out.data_ptr(), x.size(0), x.size(1), x.stride(0), kind, dtype, crew);
  });
  return THPVariable_Wrap(out);
}

// The states of a batch of `rows` rows: query_start, sources, write_rows and write_slots.
raydix::StateUse state_use(PyObject* const* args, int64_t rows, int64_t slots) {
  const Tensor &starts = tensor(args[0]), &sources = tensor(args[1]), &kept = tensor(args[2]), &to = tensor(args[3]);
  raydix::StateUse u{};
  u.num_sequences = sources.numel(), u.num_writes = kept.numel();
  u.query_start = data<int32_t>(starts, at::kInt, u.num_sequences + 1, "query_start must be int32 [num_sequences + 1]");
  u.sources = data<int64_t>(sources, at::kLong, u.num_sequences, "sources must be int64 [num_sequences]");
  u.write_rows = data<int64_t>(kept, at::kLong, u.num_writes, "write_rows must be int64 [num_writes]");
  u.write_slots = data<int64_t>(to, at::kLong, u.num_writes, "write_slots must be int64, one for each of write_rows");
  check(u.query_start[0] == 0 && u.query_start[u.num_sequences] == rows, "query_start must span the rows");
  for (int64_t s = 0; s < u.num_sequences; ++s) {
    check(u.query_start[s] <= u.query_start[s + 1], "query_start must not fall");
    check(u.sources[s] >= -1 && u.sources[s] < slots, "a source lies outside the states");
  }
  for (int64_t w = 0; w < u.num_writes; ++w) {
    check(u.write_rows[w] >= 0 && u.write_rows[w] < rows, "a row whose state is kept lies outside the batch");
    check(!w || u.write_rows[w - 1] < u.write_rows[w], "write_rows must rise");
    check(u.write_slots[w] >= 0 && u.write_slots[w] < slots, "a slot to be written lies outside the states");
    check(std::find(u.sources, u.sources + u.num_sequences, u.write_slots[w]) == u.sources + u.num_sequences,
          "a state that is read cannot be written");
    // Two threads would write it at once.
    check(std::find(u.write_slots, u.write_slots + w, u.write_slots[w]) == u.write_slots + w,
          "a slot cannot be written for two rows");
  }
  return u;
}

PyObject* short_conv(PyObject* const* args) {
  const Tensor &x = tensor(args[0]), &weight = tensor(args[1]), &tails = tensor(args[2]);
  check(x.dim() == 2 && x.stride(1) == 1, "x must be [num_tokens, channels] with contiguous rows");
  check(weight.dim() == 2 && weight.size(1) == x.size(1) && weight.size(0) > 1, "weight must be [2 or more, channels]");
  raydix::ShortConv a{};
  a.rows = x.size(0), a.channels = x.size(1), a.taps = weight.size(0), a.x_stride = x.stride(0);
  a.weight = data<float>(weight, at::kFloat, weight.numel(), "weight must be float32");
  const Tensor* bias = maybe_tensor(args[8]);
  a.bias = bias ? data<float>(*bias, at::kFloat, a.channels, "bias must be float32 [channels]") : nullptr;
  check_type(tails.scalar_type() == at::kFloat, "tails must be float32");
  check(tails.dim() == 3 && tails.size(1) == a.taps - 1 && tails.size(2) == a.channels && tails.stride(2) == 1 &&
            tails.stride(1) == a.channels,
        "tails must be [num_slots, taps - 1, channels] with contiguous slots");
  a.tails = tails.data_ptr<float>(), a.slot_stride = tails.stride(0);
  a.use = state_use(args + 3, a.rows, tails.size(0));
  a.silu = integer(args[7]);
  const Tensor out = at::empty(x.sizes(), x.options());
  const DType dtype = dtype_of(x);
  a.x = x.data_ptr(), a.out = out.data_ptr();
  run(x.numel() * a.taps, 32768, [&](raydix::Crew& crew) { raydix::short_conv(a, dtype, crew); });
  return THPVariable_Wrap(out);
}

PyObject* gated_delta(PyObject* const* args) {
  const Tensor &mixed = tensor(args[0]), &beta = tensor(args[1]), &step = tensor(args[2]), &states = tensor(args[5]);
  check_type(states.scalar_type() == at::kFloat, "states must be float32");
  check(states.dim() == 4, "states must be [num_slots, num_heads, key_dim, value_dim]");
  raydix::GatedDelta a{};
  a.num_heads = states.size(1), a.key_dim = states.size(2), a.value_dim = states.size(3);
  check(states.stride(3) == 1 && states.stride(2) == a.value_dim && states.stride(1) == a.key_dim * a.value_dim,
        "the slots of states must be contiguous");
  check(a.value_dim > 0 && a.value_dim % 16 == 0, "value_dim must be a multiple of 16");
  check(a.key_dim > 0 && a.key_dim <= 256, "key_dim must be at most 256");
  check(mixed.dim() == 2 && mixed.stride(1) == 1, "mixed must be [num_tokens, channels] with contiguous rows");
  a.rows = mixed.size(0);
  const int64_t keys = mixed.size(1) - a.num_heads * a.value_dim;
  a.num_key_heads = keys / (2 * a.key_dim);
  check(a.num_key_heads > 0 && keys == 2 * a.num_key_heads * a.key_dim && a.num_heads % a.num_key_heads == 0,
        "mixed must hold queries, keys and values of heads that share them evenly");
  for (const Tensor* each : {&beta, &step}) {
    same_type(mixed, *each);
    check(each->dim() == 2 && each->size(0) == a.rows && each->size(1) == a.num_heads && each->stride(1) == 1,
          "beta and step must be [num_tokens, num_heads] with contiguous rows");
  }
  a.decay_rate = data<float>(tensor(args[3]), at::kFloat, a.num_heads, "decay_rate must be float32 [num_heads]");
  a.step_bias = data<float>(tensor(args[4]), at::kFloat, a.num_heads, "step_bias must be float32 [num_heads]");
  a.mixed_stride = mixed.stride(0), a.beta_stride = beta.stride(0), a.step_stride = step.stride(0);
  a.states = states.data_ptr<float>(), a.slot_stride = states.stride(0);
  a.use = state_use(args + 6, a.rows, states.size(0));
  const Tensor out = at::empty({a.rows, a.num_heads * a.value_dim}, mixed.options());
  const Tensor scratch = at::empty({a.rows * (keys + 2 * a.num_heads)}, states.options());
  a.queries = scratch.data_ptr<float>(), a.keys = a.queries + a.rows * keys / 2;
  a.stays = a.queries + a.rows * keys, a.shares = a.stays + a.rows * a.num_heads;
  a.mixed = mixed.data_ptr(), a.beta = beta.data_ptr(), a.step = step.data_ptr(), a.out = out.data_ptr();
  const DType dtype = dtype_of(mixed);
  const int64_t work = a.rows * a.num_heads * a.key_dim * a.value_dim;
  run(work, 131072, [&](raydix::Crew& crew) { raydix::gated_delta(a, dtype, crew); });
  return THPVariable_Wrap(out);
}

PyObject* selective_scan(PyObject* const* args) {
  const Tensor &mixed = tensor(args[0]), &step = tensor(args[1]), &states = tensor(args[5]);
  check_type(states.scalar_type() == at::kFloat, "states must be float32");
  check(states.dim() == 4, "states must be [num_slots, num_heads, state_size, head_dim]");
  raydix::SelectiveScan a{};
  a.num_heads = states.size(1), a.state_size = states.size(2), a.head_dim = states.size(3);
  check(states.stride(3) == 1 && states.stride(2) == a.head_dim && states.stride(1) == a.state_size * a.head_dim,
        "the slots of states must be contiguous");
  check(a.head_dim > 0 && a.head_dim % 16 == 0, "head_dim must be a multiple of 16");
  check(a.state_size > 0 && a.state_size <= 256, "state_size must be at most 256");
  check(mixed.dim() == 2 && mixed.stride(1) == 1, "mixed must be [num_tokens, channels] with contiguous rows");
  a.rows = mixed.size(0);
  const int64_t keys = mixed.size(1) - a.num_heads * a.head_dim;
  a.num_groups = keys / (2 * a.state_size);
  check(a.num_groups > 0 && keys == 2 * a.num_groups * a.state_size && a.num_heads % a.num_groups == 0,
        "mixed must hold values of heads, and keys and queries of groups that they share evenly");
  same_type(mixed, step);
  check(step.dim() == 2 && step.size(0) == a.rows && step.size(1) == a.num_heads && step.stride(1) == 1,
        "step must be [num_tokens, num_heads] with contiguous rows");
  a.decay_rate = data<float>(tensor(args[2]), at::kFloat, a.num_heads, "decay_rate must be float32 [num_heads]");
  a.step_bias = data<float>(tensor(args[3]), at::kFloat, a.num_heads, "step_bias must be float32 [num_heads]");
  a.skip = data<float>(tensor(args[4]), at::kFloat, a.num_heads, "skip must be float32 [num_heads]");
  a.mixed_stride = mixed.stride(0), a.step_stride = step.stride(0);
  a.states = states.data_ptr<float>(), a.slot_stride = states.stride(0);
  a.use = state_use(args + 6, a.rows, states.size(0));
  a.least = number(args[10]), a.most = number(args[11]);
  const Tensor out = at::empty({a.rows, a.num_heads * a.head_dim}, mixed.options());
  const Tensor scratch = at::empty({a.rows * (keys + 2 * a.num_heads)}, states.options());
  a.keys = scratch.data_ptr<float>(), a.queries = a.keys + a.rows * keys / 2;
  a.stays = a.keys + a.rows * keys, a.shares = a.stays + a.rows * a.num_heads;
  a.mixed = mixed.data_ptr(), a.step = step.data_ptr(), a.out = out.data_ptr();
  const DType dtype = dtype_of(mixed);
  const int64_t work = a.rows * a.num_heads * a.state_size * a.head_dim;
  run(work, 131072, [&](raydix::Crew& crew) { raydix::selective_scan(a, dtype, crew); });
  return THPVariable_Wrap(out);
}

const float* maybe_floats(const Tensor* t, int64_t count, const char* what) {
  return t ? data<float>(*t, at::kFloat, count, what) : nullptr;
}

// A weight in panels of 64 columns: stored in groups if `groups` says how, int8 if it has scales, else bfloat16. Scales
// and bias are padded to whole panels. `groups` is None or (bits, size, super, zero, has_least, kind of scales, values of
// numbers or an empty tuple, whether numbers are in E4M3).
raydix::Weight weight_of(const Tensor& packed, const Tensor* scales, const Tensor* bias, int64_t in, int64_t out,
                         PyObject* groups) {
  const int64_t columns = (out + 63) / 64 * 64;
  raydix::Weight w{nullptr, maybe_floats(scales, columns, "the scales must be padded float32"),
                   maybe_floats(bias, columns, "the bias must be padded float32"), in, out, {}};
  int64_t bytes = columns * in * (scales ? 1 : 2);
  if (groups != Py_None) {
    auto item = [&](int at) { return PyTuple_GetItem(groups, at); };
    raydix::Groups& g = w.groups;
    g.bits = integer(item(0)), g.size = integer(item(1)), g.super = integer(item(2)), g.zero = float(number(item(3)));
    g.has_least = item(4) == Py_True;
    check((g.bits == 4 || g.bits == 8) && g.size > 0 && g.size % 2 == 0 && g.super > 0 && g.super % g.size == 0 &&
              256 % g.super == 0,
          "groups must be even parts of 256 input features, of four or eight bits");
    check(in % g.super == 0 && !scales, "a weight has whole groups, and no other scales");
    const int64_t kind = integer(item(5));
    check(kind >= 0 && kind <= int64_t(raydix::Scales::floats), "unknown kind of scales");
    g.scales = raydix::Scales(kind);
    // Without factors a scale is that of one group.
    check(g.scales == raydix::Scales::products || (g.size == g.super && !g.has_least && g.zero == 0),
          "scales without factors are of one group each, and nothing is taken off");
    PyObject* const values = item(6);
    const bool is_float8 = item(7) == Py_True;
    g.numbers = is_float8 ? raydix::Numbers::float8 : g.bits == 4 ? raydix::Numbers::whole4 : raydix::Numbers::whole8;
    if (const Py_ssize_t count = PyTuple_Size(values)) {
      check(count == 16 && g.bits == 4, "a table has the values of sixteen numbers");
      check(g.zero == 0 && !g.has_least, "nothing is taken off the values of a table");
      g.numbers = raydix::Numbers::table4;
      for (Py_ssize_t i = 0; i < count; ++i) {
        const int64_t value = integer(PyTuple_GetItem(values, i));
        check(value >= INT8_MIN && value <= INT8_MAX, "the values of numbers must fit into eight bits");
        g.values[i] = int8_t(value);
      }
    }
    check(is_float8 == (g.scales == raydix::Scales::floats) && (!is_float8 || g.bits == 8),
          "numbers in E4M3 have eight bits, and they alone scales in float32");
    bytes = columns * (in / g.super) * raydix::column_bytes(g);
  }
  const auto type = groups != Py_None ? at::kByte : scales ? at::kChar : at::kBFloat16;
  check(in % 2 == 0 && packed.numel() * int64_t(packed.element_size()) == bytes, "x is not as wide as the weight");
  w.packed = data<char>(packed, type, packed.numel(), "the weight must be packed bfloat16, int8 with scales, or groups");
  return w;
}

// x, weight in panels, padded float32 scales or None, padded float32 bias or None, out_features, groups or None.
PyObject* linear(PyObject* const* args) {
  const Tensor& x = tensor(args[0]);
  check_type(raydix::has_linear(), "this build has no bfloat16 product");
  check(x.dim() == 2 && x.stride(1) == 1, "x must be [num_tokens, in_features] with contiguous rows");
  check_type(x.scalar_type() == at::kBFloat16, "x must be bfloat16");
  const raydix::Weight w =
      weight_of(tensor(args[1]), maybe_tensor(args[2]), maybe_tensor(args[3]), x.size(1), integer(args[4]), args[5]);
  const Tensor out = at::empty({x.size(0), w.out_features}, x.options());
  const raydix::Linear a{&w, x.data_ptr(), out.data_ptr(), x.size(0), x.stride(0), nullptr};
  run(w.in_features * w.out_features * (a.rows + 8), 1 << 20, [&](raydix::Crew& crew) { raydix::linear(a, crew); });
  return THPVariable_Wrap(out);
}

PyObject* has_linear(PyObject* const*) { return PyBool_FromLong(raydix::has_linear()); }

// x, weight prepacked by oneDNN, bias or None, out_features: torch's operator without Python's way to it.
PyObject* onednn_linear(PyObject* const* args) {
  using Op = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, std::string_view,
                    c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Op>();
  static const c10::List<std::optional<at::Scalar>> scalars;
  const Tensor &x = tensor(args[0]), &weight = THPVariable_Unpack(args[1]);
  const int64_t out_features = integer(args[3]);
  check(x.dim() == 2, "x must be [num_tokens, in_features]");
  check_type(x.scalar_type() == at::kBFloat16, "x must be bfloat16, like the weight");
  if (x.size(0) == 0) return THPVariable_Wrap(at::empty({0, out_features}, x.options()));
  const std::optional<Tensor> bias = args[2] == Py_None ? std::optional<Tensor>() : tensor(args[2]);
  Tensor out;
  release(x.size(1) * out_features * (x.size(0) + 8) > (1 << 25),
      [&] { out = op.call(x, weight, bias, "none", scalars, ""); });
  return THPVariable_Wrap(out);
}

// Weights, kept alive for as long as Python keeps the capsule that holds their owner.
struct Weights {
  std::vector<Tensor> tensors;

  const float* floats(PyObject* o) {
    const Tensor* t = maybe_tensor(o);
    if (!t) return nullptr;
    tensors.push_back(*t);
    return data<float>(*t, at::kFloat, t->numel(), "norms and tables must be contiguous float32");
  }

  // (packed, scales, bias, in_features, out_features, groups)
  raydix::Weight weight(PyObject* o) {
    const Tensor* of[3];
    for (int i = 0; i < 3; ++i)
      if ((of[i] = maybe_tensor(PyTuple_GetItem(o, i)))) tensors.push_back(*of[i]);
    const int64_t in_features = integer(PyTuple_GetItem(o, 3)), out_features = integer(PyTuple_GetItem(o, 4));
    return weight_of(*of[0], of[1], of[2], in_features, out_features, PyTuple_GetItem(o, 5));
  }
};

struct Experts : Weights {
  raydix::Experts of;
  raydix::Activation activation;
};

// The memory of `raydix::experts` for up to `rows` rows of any of some layers.
class ExpertMemory {
 public:
  raydix::ExpertBuffers buffers{};

  ExpertMemory(const std::vector<const raydix::Experts*>& all, size_t layers, int64_t rows) {
    int64_t logits = 0, ranks = 0, hidden = 0, inner = 0;
    for (const raydix::Experts* e : all) {
      logits = std::max(logits, e->router.out_features), hidden = std::max(hidden, e->router.in_features);
      inner = std::max(inner, e->down[0].in_features), ranks = std::max(ranks, e->per_token);
    }
    const int64_t chosen = rows * ranks;
    buffers.logits = take(rows * logits, at::kFloat), buffers.gathered = take(chosen * hidden, at::kBFloat16);
    buffers.wide = take(chosen * 2 * inner, at::kBFloat16), buffers.activated = take(chosen * inner, at::kBFloat16);
    buffers.outputs = take(chosen * hidden, at::kBFloat16), buffers.ids = (int32_t*)take(chosen, at::kInt);
    buffers.shares = (float*)take(chosen, at::kFloat), buffers.places = (int64_t*)take(chosen, at::kLong);
    buffers.products.resize(layers);
  }

 private:
  std::vector<Tensor> tensors;

  void* take(int64_t count, at::ScalarType type) {
    tensors.push_back(at::empty({count}, at::TensorOptions().dtype(type)));
    return tensors.back().data_ptr();
  }
};

// The router's weight, or [experts, hidden] float32; lists of the experts' gate_up and down weights; correction or None;
// (experts of a token, normalised, sigmoid, groups, best groups, experts of a group's score, scale, offset of the sum),
// activation, whether experts have a gate, factors of shares or None.
PyObject* make_experts(PyObject* const* args) {
  check_type(raydix::has_linear(), "this build has no bfloat16 product");
  auto result = std::make_unique<Experts>();
  raydix::Experts& e = result->of;
  if (PyTuple_Check(args[0])) {
    e.router = result->weight(args[0]);
  } else {
    const Tensor& router = tensor(args[0]);
    check(router.dim() == 2, "a router in float32 must be [num_experts, hidden]");
    e.float_router = result->floats(args[0]), e.router.out_features = router.size(0), e.router.in_features = router.size(1);
  }
  const int64_t count = e.router.out_features;
  auto item = [&](int at) { return PyTuple_GetItem(args[4], at); };
  e.per_token = integer(item(0)), e.normalised = item(1) == Py_True, e.sigmoid = item(2) == Py_True;
  e.num_groups = integer(item(3)), e.top_groups = integer(item(4)), e.group_best = integer(item(5));
  e.scale = number(item(6)), e.sum_offset = number(item(7));
  e.correction = result->floats(args[3]);
  check(!e.correction || tensor(args[3]).numel() == count, "the correction must be [num_experts]");
  result->activation = activation_of(args[5]);
  e.has_gate = args[6] == Py_True;
  e.factors = result->floats(args[7]);
  check(!e.factors || tensor(args[7]).numel() == count, "the factors must be [num_experts]");
  check(PyList_GET_SIZE(args[1]) == count && PyList_GET_SIZE(args[2]) == count, "the router must know each expert");
  check(e.per_token > 0 && e.per_token <= count, "a token cannot have more experts than there are");
  check(e.num_groups > 0 && count % e.num_groups == 0 && e.top_groups > 0 && e.top_groups <= e.num_groups &&
            e.group_best > 0 && e.group_best <= count / e.num_groups,
        "experts must be whole groups");
  for (int64_t i = 0; i < count; ++i) {
    e.gate_up.push_back(result->weight(PyList_GET_ITEM(args[1], i)));
    e.down.push_back(result->weight(PyList_GET_ITEM(args[2], i)));
    const raydix::Weight &up = e.gate_up.back(), &down = e.down.back();
    check(up.in_features == e.router.in_features && down.out_features == e.router.in_features &&
              up.out_features == (e.has_gate ? 2 : 1) * down.in_features && down.in_features == e.down[0].in_features,
          "experts must be of one shape");
  }
  return PyCapsule_New(result.release(), "raydix.experts",
                       [](PyObject* capsule) { delete (Experts*)PyCapsule_GetPointer(capsule, "raydix.experts"); });
}

// Experts, x, the rows that the router reads or None.
PyObject* experts(PyObject* const* args) {
  auto* owner = (Experts*)PyCapsule_GetPointer(args[0], "raydix.experts");
  check_type(owner != nullptr, "expected experts");
  const raydix::Experts& e = owner->of;
  const Tensor& x = tensor(args[1]);
  check(x.dim() == 2 && x.is_contiguous() && x.size(1) == e.router.in_features, "x must be [num_tokens, hidden]");
  check_type(x.scalar_type() == at::kBFloat16, "x must be bfloat16");
  const Tensor* routed = maybe_tensor(args[2]);
  if (routed) {
    same_type(x, *routed);
    check(routed->sizes() == x.sizes() && routed->is_contiguous(), "routed rows must be contiguous and like x");
  }
  const Tensor out = at::empty(x.sizes(), x.options());
  const int64_t rows = x.size(0);
  if (rows == 0) return THPVariable_Wrap(out);
  const void* read = routed ? routed->data_ptr() : x.data_ptr();
  ExpertMemory memory({&e}, 1, rows);
  run(rows * e.per_token * x.size(1) * e.down[0].in_features, 1 << 20, [&](raydix::Crew& crew) {
    raydix::experts(e, x.data_ptr(), read, out.data_ptr(), rows, owner->activation, memory.buffers, 0, crew);
  });
  return THPVariable_Wrap(out);
}

struct Heads : Weights {
  std::vector<raydix::Weight> of;
};

// A list of weights of one shape, one for each head.
PyObject* make_heads(PyObject* const* args) {
  check_type(raydix::has_linear(), "this build has no bfloat16 product");
  auto result = std::make_unique<Heads>();
  check(PyList_GET_SIZE(args[0]) > 0, "there must be a head");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    result->of.push_back(result->weight(PyList_GET_ITEM(args[0], i)));
    const raydix::Weight &first = result->of[0], &last = result->of.back();
    check(last.in_features == first.in_features && last.out_features == first.out_features,
          "the weights of heads must be of one shape");
  }
  return PyCapsule_New(result.release(), "raydix.heads",
                       [](PyObject* capsule) { delete (Heads*)PyCapsule_GetPointer(capsule, "raydix.heads"); });
}

// Heads, x [num_tokens, num_heads, in_features]; gives [num_heads, num_tokens, out_features].
PyObject* linear_heads(PyObject* const* args) {
  auto* heads = (Heads*)PyCapsule_GetPointer(args[0], "raydix.heads");
  check_type(heads != nullptr, "expected heads");
  const Tensor& x = tensor(args[1]);
  const int64_t count = int64_t(heads->of.size());
  const raydix::Weight& first = heads->of[0];
  check(x.dim() == 3 && x.size(1) == count && x.size(2) == first.in_features && x.stride(2) == 1,
        "x must be [num_tokens, num_heads, in_features] with contiguous rows");
  check_type(x.scalar_type() == at::kBFloat16, "x must be bfloat16");
  const int64_t rows = x.size(0);
  const Tensor out = at::empty({count, rows, first.out_features}, x.options());
  if (rows == 0) return THPVariable_Wrap(out);
  const int64_t from = x.stride(1) * int64_t(x.element_size()), to = out.stride(0) * int64_t(out.element_size());
  std::vector<raydix::Linear> all;
  for (int64_t h = 0; h < count; ++h)
    all.push_back({&heads->of[size_t(h)], (const char*)x.data_ptr() + h * from, (char*)out.data_ptr() + h * to, rows,
                   x.stride(0), nullptr});
  run(count * first.in_features * first.out_features * (rows + 8), 1 << 20,
      [&](raydix::Crew& crew) { raydix::linears(all, crew); });
  return THPVariable_Wrap(out);
}

// A decoder's weights.
struct Decoder : Weights {
  std::vector<raydix::Layer> layers;
  const float* first_norm;
  int64_t num_heads, max_position = INT64_MAX;
  float eps, scale, soft_cap;
  raydix::Activation activation;
  std::vector<const raydix::Experts*> experts;
  std::vector<PyObject*> owners;  // of the experts

  ~Decoder() {
    for (PyObject* owner : owners) Py_DECREF(owner);
  }
};

// Layers of (4 weights (packed, scales, bias, in, out, groups), 6 norms, cos_sin, window, experts or None, sinks or None),
// first_norm, num_heads, eps, scale, soft_cap, activation. A layer with experts has None for its last two weights.
PyObject* decoder(PyObject* const* args) {
  check_type(raydix::has_linear(), "this build has no bfloat16 product");
  auto result = std::make_unique<Decoder>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    PyObject* from = PyList_GET_ITEM(args[0], i);
    auto item = [&](int at) { return PyTuple_GetItem(from, at); };
    raydix::Layer layer{};
    layer.qkv = result->weight(item(0)), layer.output = result->weight(item(1));
    if (item(12) == Py_None) {
      layer.gate_up = result->weight(item(2)), layer.down = result->weight(item(3));
    } else {
      auto* owner = (Experts*)PyCapsule_GetPointer(item(12), "raydix.experts");
      check_type(owner != nullptr, "expected experts");
      result->owners.push_back(Py_NewRef(item(12))), result->experts.push_back(layer.experts = &owner->of);
    }
    layer.mlp_norm = result->floats(item(4)), layer.next_norm = result->floats(item(5));
    layer.attention_post_norm = result->floats(item(6)), layer.mlp_post_norm = result->floats(item(7));
    layer.q_norm = result->floats(item(8)), layer.k_norm = result->floats(item(9));
    layer.cos_sin = result->floats(item(10)), layer.window = item(11) == Py_None ? 0 : integer(item(11));
    layer.sinks = result->floats(item(13));
    check(item(13) == Py_None || tensor(item(13)).numel() == integer(args[2]), "sinks must be [num_heads]");
    result->max_position = std::min(result->max_position, tensor(item(10)).size(0));
    result->layers.push_back(layer);
  }
  result->first_norm = result->floats(args[1]), result->num_heads = integer(args[2]);
  result->eps = number(args[3]), result->scale = number(args[4]);
  result->soft_cap = args[5] == Py_None ? 0.0f : number(args[5]), result->activation = activation_of(args[6]);
  return PyCapsule_New(result.release(), "raydix.decoder",
                       [](PyObject* capsule) { delete (Decoder*)PyCapsule_GetPointer(capsule, "raydix.decoder"); });
}

// decoder, embedded tokens, pool, positions, slot_mapping, block_tables, query_start, context_lens, out_rows.
PyObject* forward(PyObject* const* args) {
  auto* decoder = (Decoder*)PyCapsule_GetPointer(args[0], "raydix.decoder");
  check_type(decoder != nullptr, "expected a decoder");
  const Tensor &embedded = tensor(args[1]), &pool = tensor(args[2]), &rows = tensor(args[8]);
  check_type(embedded.scalar_type() == at::kBFloat16, "expected bfloat16");
  const bool narrow = is_narrow(pool, embedded);
  check(pool.dim() == 6 && pool.is_contiguous() && pool.size(1) == int64_t(decoder->layers.size()),
        "the pool must be [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]");
  check(embedded.dim() == 2 && embedded.is_contiguous() && embedded.size(1) == decoder->layers.at(0).qkv.in_features,
        "embedded must be [num_tokens, hidden]");
  const int64_t tokens = embedded.size(0), hidden = embedded.size(1), heads = decoder->num_heads;
  const int64_t kv_heads = pool.size(3), block_size = pool.size(4), dim = head_dim_of(pool.size(5), narrow);
  check(heads % kv_heads == 0, "unknown shape of heads");
  int64_t wide = 0;
  for (const raydix::Layer& layer : decoder->layers) {
    check(layer.qkv.out_features == (heads + 2 * kv_heads) * dim, "the pool is not as wide as the decoder's heads");
    wide = std::max({wide, layer.qkv.out_features, layer.gate_up.out_features});
    check(!layer.experts || layer.experts->router.in_features == hidden, "the experts must be as wide as the decoder");
  }
  raydix::Forward a{decoder->layers, decoder->first_norm};
  raydix::RotaryStore& r = a.rotary;
  r.is_narrow = a.attention.is_narrow = narrow, r.row_size = a.attention.row_size = pool.size(5);
  r.num_tokens = tokens, r.num_heads = heads, r.num_kv_heads = kv_heads, r.head_dim = dim, r.block_size = block_size;
  r.qkv_stride = (heads + 2 * kv_heads) * dim, r.key_stride = r.value_stride = pool.stride(0), r.eps = decoder->eps;
  set_positions(r, tensor(args[3]), tensor(args[4]), pool.size(0) * block_size, decoder->max_position);
  raydix::Attention& t = a.attention;
  t.num_heads = heads, t.num_kv_heads = kv_heads, t.head_dim = dim, t.block_size = block_size;
  t.key_stride = t.value_stride = pool.stride(0), t.scale = decoder->scale, t.soft_cap = decoder->soft_cap;
  set_sequences(t, tensor(args[5]), tensor(args[6]), tensor(args[7]), tokens);
  check_tables(t, pool.size(0));
  a.num_out = rows.numel(), a.out_rows = data<int64_t>(rows, at::kLong, a.num_out, "out_rows must be int64");
  check(a.num_out <= tokens, "out_rows are more than the batch has tokens");
  for (int64_t i = 0; i < a.num_out; ++i)
    check(a.out_rows[i] >= 0 && a.out_rows[i] < tokens, "out_rows names a token outside the batch");
  const int threads = at::get_num_threads();
  std::vector<int64_t> windows;
  for (raydix::Layer& layer : decoder->layers) {
    layer.plan = size_t(std::find(windows.begin(), windows.end(), layer.window) - windows.begin());
    if (layer.plan < windows.size()) continue;
    windows.push_back(t.sliding_window = layer.window);
    a.plans.push_back(std::make_unique<raydix::AttentionPlan>(t, DType::bf16, threads));
  }
  auto buffer = [&](int64_t width) { return at::empty({tokens, width}, embedded.options()); };
  const Tensor buffers[] = {embedded.clone(),     buffer(hidden),      buffer(hidden),      buffer(hidden), buffer(wide),
                            buffer(heads * dim), buffer(heads * dim), buffer(wide / 2 + 1)};
  void* at[8];
  for (int i = 0; i < 8; ++i) at[i] = buffers[i].data_ptr();
  a.buffers = {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
  ExpertMemory memory(decoder->experts, decoder->layers.size(), tokens);
  a.expert_buffers = &memory.buffers;
  const Tensor out = at::empty({a.num_out, hidden}, embedded.options());
  a.pool = pool.data_ptr(), a.out = out.data_ptr(), a.layer_stride = pool.stride(1) * int64_t(pool.element_size());
  a.hidden = hidden;
  a.eps = decoder->eps, a.activation = decoder->activation;
  release(true, [&] { raydix::together(threads, [&](raydix::Crew& crew) { raydix::forward(a, crew); }); });
  return THPVariable_Wrap(out);
}

// pool, block ids, buffer, whether to scatter.
PyObject* kv_copy(PyObject* const* args) {
  const Tensor &pool = tensor(args[0]), &ids = tensor(args[1]), &buffer = tensor(args[2]);
  check(pool.is_contiguous() && buffer.is_contiguous(), "pool and buffer must be contiguous");
  const int64_t count = ids.numel(), block_bytes = pool.stride(0) * int64_t(pool.element_size());
  const int64_t* wanted = data<int64_t>(ids, at::kLong, count, "block_ids must be int64");
  check_type(buffer.scalar_type() == at::kByte, "the buffer must be uint8");
  check(buffer.numel() == count * block_bytes, "the buffer must hold exactly the blocks");
  for (int64_t i = 0; i < count; ++i)
    if (wanted[i] < 0 || wanted[i] >= pool.size(0)) throw std::out_of_range("block_ids names a block outside the pool");
  char *blocks = static_cast<char*>(pool.data_ptr()), *packed = static_cast<char*>(buffer.data_ptr());
  run(count * block_bytes, 1 << 20, [&](raydix::Crew& crew) {
    raydix::kv_copy(blocks, packed, wanted, count, block_bytes, args[3] == Py_True, crew);
  });
  Py_RETURN_NONE;
}

// Offsets [batch + 1] of `entries` tokens, each inside the vocabulary.
const int64_t* entries_of(const Tensor& offsets, const Tensor& ids, const raydix::Sample& a) {
  const auto* bounds = data<int64_t>(offsets, at::kLong, a.batch + 1, "offsets must be int64 [batch + 1]");
  const auto* tokens = data<int64_t>(ids, at::kLong, ids.numel(), "token_ids must be int64");
  check(bounds[0] >= 0 && bounds[a.batch] <= ids.numel(), "offsets must lie within the entries");
  for (int64_t b = 0; b < a.batch; ++b) check(bounds[b] <= bounds[b + 1], "offsets must not decrease");
  for (int64_t i = 0; i < ids.numel(); ++i)
    check(tokens[i] >= 0 && tokens[i] < a.vocabulary, "a token id lies outside the vocabulary");
  return bounds;
}

// logits, temperature, top_k, top_p, min_p, seed, position, six of Penalties, three of LogitBias, two of TokenMask,
// num_logprobs or None, given or None.
PyObject* sample(PyObject* const* args) {
  const Tensor& logits = tensor(args[0]);
  check(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0, "logits must be [batch, vocabulary]");
  raydix::Sample a{};
  a.logits = logits.data_ptr(), a.batch = logits.size(0), a.vocabulary = logits.size(1), a.stride = logits.stride(0);
  auto floats = [&](int i, const char* what) { return data<float>(tensor(args[i]), at::kFloat, a.batch, what); };
  a.temperature = floats(1, "temperature must be float32 [batch]");
  a.top_k = data<int32_t>(tensor(args[2]), at::kInt, a.batch, "top_k must be int32 [batch]");
  a.top_p = floats(3, "top_p must be float32 [batch]");
  a.min_p = floats(4, "min_p must be float32 [batch]");
  a.seeds = data<int64_t>(tensor(args[5]), at::kLong, a.batch, "seed must be int64 [batch]");
  a.positions = data<int64_t>(tensor(args[6]), at::kLong, a.batch, "position must be int64 [batch]");
  if (args[7] != Py_None) {
    a.presence = floats(7, "presence must be float32 [batch]");
    a.frequency = floats(8, "frequency must be float32 [batch]");
    a.repetition = floats(9, "repetition must be float32 [batch]");
    const Tensor& ids = tensor(args[11]);
    a.penalty_offsets = entries_of(tensor(args[10]), ids, a), a.penalty_ids = ids.data_ptr<int64_t>();
    a.output_counts = data<int32_t>(tensor(args[12]), at::kInt, ids.numel(), "output_counts must be int32, per entry");
  }
  if (args[13] != Py_None) {
    const Tensor& ids = tensor(args[14]);
    a.bias_offsets = entries_of(tensor(args[13]), ids, a), a.bias_ids = ids.data_ptr<int64_t>();
    a.bias_values = data<float>(tensor(args[15]), at::kFloat, ids.numel(), "values must be float32, one per entry");
  }
  if (args[16] != Py_None) {
    const Tensor& bits = tensor(args[17]);
    a.mask_rows = data<int32_t>(tensor(args[16]), at::kInt, a.batch, "rows must be int32 [batch]");
    const int64_t words = (a.vocabulary + 31) / 32, masks = bits.dim() == 2 ? bits.size(0) : 0;
    a.mask_bits = data<int32_t>(bits, at::kInt, masks * words, "bits must be int32 [num_masks, words]");
    for (int64_t b = 0; b < a.batch; ++b) check(a.mask_rows[b] < masks, "rows names a mask that is not there");
  }
  const auto ints = logits.options().dtype(at::kLong), reals = logits.options().dtype(at::kFloat);
  const Tensor tokens = at::empty({a.batch}, ints);
  Tensor logprobs, top_ids, top_logprobs, ranks;
  if (args[18] != Py_None) {
    a.num_logprobs = data<int64_t>(tensor(args[18]), at::kLong, a.batch, "num_logprobs must be int64 [batch]");
    for (int64_t b = 0; b < a.batch; ++b) a.widest = std::max(a.widest, a.num_logprobs[b]);
    check(a.widest <= a.vocabulary, "num_logprobs exceeds the vocabulary");
    logprobs = at::zeros({a.batch}, reals), a.logprobs = logprobs.data_ptr<float>();
    top_ids = at::zeros({a.batch, a.widest}, ints), a.top_ids = top_ids.data_ptr<int64_t>();
    top_logprobs = at::zeros({a.batch, a.widest}, reals), a.top_logprobs = top_logprobs.data_ptr<float>();
  }
  if (args[19] != Py_None) {
    a.given = data<int64_t>(tensor(args[19]), at::kLong, a.batch, "given must be int64 [batch]");
    for (int64_t b = 0; b < a.batch; ++b)
      check(a.given[b] >= 0 && a.given[b] < a.vocabulary, "a given token id lies outside the vocabulary");
    ranks = at::empty({a.batch}, ints), a.ranks = ranks.data_ptr<int64_t>();
  }
  a.token_ids = tokens.data_ptr<int64_t>();
  const DType dtype = dtype_of(logits);
  run(logits.numel(), 65536, [&](raydix::Crew& crew) { raydix::sample(a, dtype, crew); });
  PyObject* result = PyTuple_New(5);
  int i = 0;
  for (const Tensor& t : {tokens, logprobs, top_ids, top_logprobs, ranks})
    PyTuple_SET_ITEM(result, i++, t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None));
  return result;
}

template <PyObject* (*FUNCTION)(PyObject* const*), Py_ssize_t COUNT>
PyObject* entry(PyObject*, PyObject* const* args, Py_ssize_t count) {
  try {
    check_type(count == COUNT, "wrong number of arguments");
    return FUNCTION(args);
  } catch (const WrongType& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  } catch (const std::out_of_range& e) {
    PyErr_SetString(PyExc_IndexError, e.what());
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

template <PyObject* (*FUNCTION)(PyObject* const*), Py_ssize_t COUNT>
PyMethodDef method(const char* name) {
  return {name, (PyCFunction)(void (*)(void))entry<FUNCTION, COUNT>, METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method<paged_attention, 12>("paged_attention"),
    method<rotary_kv_store, 10>("rotary_kv_store"),
    method<rms_norm, 4>("rms_norm"),
    method<gated_rms_norm, 5>("gated_rms_norm"),
    method<layer_norm, 5>("layer_norm"),
    method<silu_and_mul, 2>("silu_and_mul"),
    method<activate, 2>("activate"),
    method<short_conv, 9>("short_conv"),
    method<gated_delta, 10>("gated_delta"),
    method<selective_scan, 12>("selective_scan"),
    method<linear, 6>("linear"),
    method<has_linear, 0>("has_linear"),
    method<onednn_linear, 4>("onednn_linear"),
    method<make_experts, 8>("make_experts"),
    method<experts, 3>("experts"),
    method<make_heads, 1>("make_heads"),
    method<linear_heads, 2>("linear_heads"),
    method<decoder, 7>("decoder"),
    method<forward, 9>("forward"),
    method<kv_copy, 4>("kv_copy"),
    method<sample, 20>("sample"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "raydix_kernels", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_raydix_kernels() { return PyModule_Create(&module); }
