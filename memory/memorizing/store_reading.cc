#include "memory/memorizing/store_reading.h"

#include <algorithm>
#include <cmath>

#include "core/flash/rows.h"

namespace tfb::memorizing {
namespace {

double DotOf(const float* a, const float* b, int64_t channels) {
  double sum = 0;
  for (int64_t c = 0; c < channels; ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}

// Divides a row by its norm, which it returns.
double MakeUnit(float* row, int64_t channels) {
  const double length = std::max(std::sqrt(DotOf(row, row, channels)), kLeastNorm);
  for (int64_t c = 0; c < channels; ++c) row[c] = static_cast<float>(row[c] / length);
  return length;
}

void LoadRowOf(const ConstTensorView& view, int64_t b, int64_t h, int64_t t, float* to) {
  LoadRow(view, view.Offset(b, h, t), view.stride(3), view.dim(3), to);
}

// Takes the gradient of a unit vector to that of the vector, whose length was `length`:
// visit(c, derivative).
template <class Visit>
void ThroughUnit(const float* unit, const double* of_unit, double length, int64_t channels,
                 const Visit& visit) {
  double along = 0;
  for (int64_t c = 0; c < channels; ++c) along += unit[c] * of_unit[c];
  for (int64_t c = 0; c < channels; ++c) visit(c, (of_unit[c] - unit[c] * along) / length);
}

}  // namespace

StoreReading::Kept StoreReading::LayOutKept(Workspace& workspace) const {
  const Shape rows = {problem_.batch, problem_.kv_heads, problem_.query_tokens, problem_.head_dim};
  const Shape read = {problem_.batch, problem_.query_heads, problem_.query_tokens, shape_.k};
  Kept kept;
  kept.retrieved = TensorView(workspace.Take<int64_t>(NumElements(read)), DType::kI64, read);
  kept.keys = TensorView(workspace.Take<float>(NumElements(rows)), DType::kF32, rows);
  kept.values = TensorView(workspace.Take<float>(NumElements(rows)), DType::kF32, rows);
  return kept;
}

size_t StoreReading::kept_bytes() const {
  return Workspace::Measure([this](Workspace& workspace) { LayOutKept(workspace); });
}

void StoreReading::Keep(const Kept& kept, int64_t begin, const ConstTensorView& k,
                        const ConstTensorView& v, ThreadPool* pool) const {
  const int64_t heads = problem_.kv_heads, tokens = k.dim(2);
  pool->ParallelFor(problem_.batch * heads, [&](int64_t row, int) {
    for (int64_t t = 0; t < tokens; ++t) {
      float* key = kept.keys.MutableAt<float>(row / heads, row % heads, begin + t);
      LoadRowOf(k, row / heads, row % heads, t, key);
      MakeUnit(key, problem_.head_dim);
      LoadRowOf(v, row / heads, row % heads, t,
                kept.values.MutableAt<float>(row / heads, row % heads, begin + t));
    }
  });
}

StoreReading::Memory StoreReading::LayOut(int threads, Workspace& workspace) const {
  const int64_t channels = problem_.head_dim, k = shape_.k;
  Memory memory;
  memory.scratch = workspace.Take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    Scratch scratch;
    scratch.unit_query = workspace.Take<float>(channels);
    scratch.unit_null = workspace.Take<float>(channels);
    scratch.key = workspace.Take<float>(channels);
    scratch.value = workspace.Take<float>(channels);
    scratch.weights = workspace.Take<double>(k + 1);
    scratch.of_memory = workspace.Take<double>(channels);
    scratch.of_unit = workspace.Take<double>(channels);
    scratch.y = workspace.Take<float>(channels);
    scratch.local = workspace.Take<float>(channels);
    if (memory.scratch != nullptr) memory.scratch[t] = scratch;
  }
  memory.sums = workspace.Take<OwnSums>(problem_.batch * problem_.query_heads);
  return memory;
}

size_t StoreReading::workspace_bytes(int threads) const {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(threads, workspace); });
}

StoreReading::Sums StoreReading::LayOutSums(Workspace& workspace) const {
  const int64_t of_null = shape_.has_null ? problem_.kv_heads * problem_.head_dim : 0;
  Sums sums;
  sums.gate = workspace.Take<double>(problem_.query_heads);
  sums.scale = workspace.Take<double>(problem_.query_heads);
  sums.null_key = workspace.Take<double>(of_null);
  sums.null_value = workspace.Take<double>(of_null);
  return sums;
}

const float* StoreReading::KeyOf(const Segment& segment, int64_t b, int64_t kv_head, int64_t token,
                                 float* memory) const {
  if (token >= given_store_) return segment.kept.keys.At<float>(b, kv_head, token - given_store_);
  const ConstTensorView& given = segment.given_keys;  // the newest of them
  LoadRowOf(given, b, kv_head, token - given_store_ + given.dim(2), memory);
  MakeUnit(memory, problem_.head_dim);
  return memory;
}

const float* StoreReading::ValueOf(const Segment& segment, int64_t b, int64_t kv_head,
                                   int64_t token, float* memory) const {
  if (token >= given_store_) return segment.kept.values.At<float>(b, kv_head, token - given_store_);
  const ConstTensorView& given = segment.given_values;
  LoadRowOf(given, b, kv_head, token - given_store_ + given.dim(2), memory);
  return memory;
}

StoreReading::Read StoreReading::ReadAgain(const Segment& segment, int64_t b, int64_t h, int64_t t,
                                           const Scratch& scratch) const {
  const int64_t channels = problem_.head_dim, kv_head = h / problem_.group();
  const int64_t* tokens = segment.kept.retrieved.At<int64_t>(b, h, segment.begin + t);
  Read read = {};
  LoadRowOf(segment.q, b, h, t, scratch.unit_query);
  read.query_length = MakeUnit(scratch.unit_query, channels);
  read.scale = std::abs(segment.parameters.scale.Get(segment.parameters.scale.Offset(h)));
  double* weights = scratch.weights;
  while (read.count < shape_.k && tokens[read.count] >= 0) {
    const float* key = KeyOf(segment, b, kv_head, tokens[read.count], scratch.key);
    weights[read.count++] = read.scale * DotOf(scratch.unit_query, key, channels);
  }
  int64_t scores = read.count;
  const ConstTensorView& null_value = segment.parameters.null_value;
  if (shape_.has_null) {
    const ConstTensorView& key = segment.parameters.null_key;
    LoadRow(key, key.Offset(kv_head), key.stride(1), channels, scratch.unit_null);
    read.null_length = MakeUnit(scratch.unit_null, channels);
    weights[scores++] = read.scale * DotOf(scratch.unit_query, scratch.unit_null, channels);
  }
  if (scores == 0) return read;
  const double largest = *std::max_element(weights, weights + scores);
  double sum = 0;
  for (int64_t n = 0; n < scores; ++n) sum += weights[n] = std::exp(weights[n] - largest);
  std::fill_n(scratch.of_memory, channels, 0.0);
  for (int64_t n = 0; n < scores; ++n) {
    const float* value = scratch.value;
    if (n < read.count) {
      value = ValueOf(segment, b, kv_head, tokens[n], scratch.value);
    } else {
      LoadRow(null_value, null_value.Offset(kv_head), null_value.stride(1), channels,
              scratch.value);
    }
    weights[n] /= sum;
    for (int64_t c = 0; c < channels; ++c) scratch.of_memory[c] += weights[n] * value[c];
  }
  read.log_sum_exp = largest + std::log(sum);
  const ConstTensorView& gate = segment.parameters.gate;
  const double logit = shape_.joins ? read.log_sum_exp - *segment.log_sum_exp.At<float>(b, h, t)
                                    : gate.Get(gate.Offset(h));
  read.gate = 1 / (1 + std::exp(-logit));
  return read;
}

void StoreReading::Mix(const Segment& segment, const TensorView& y,
                       const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(execution.pool->threads(), workspace);
  const int64_t heads = problem_.query_heads, tokens = y.dim(2);
  execution.pool->ParallelFor(problem_.batch * heads, [&](int64_t row, int worker) {
    const Scratch& scratch = memory.scratch[worker];
    for (int64_t t = 0; t < tokens; ++t) {
      const Read read = ReadAgain(segment, row / heads, row % heads, t, scratch);
      LoadRowOf(segment.local, row / heads, row % heads, t, scratch.y);
      for (int64_t c = 0; read.any() && c < problem_.head_dim; ++c) {
        scratch.y[c] =
            static_cast<float>(read.gate * scratch.of_memory[c] + (1 - read.gate) * scratch.y[c]);
      }
      StoreRow(scratch.y, problem_.head_dim, y, y.Offset(row / heads, row % heads, t), y.stride(3));
    }
  });
}

void StoreReading::Backward(const Segment& segment, const Gradients& gradients,
                            const Execution& execution) const {
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(execution.pool->threads(), workspace);
  const int64_t heads = problem_.query_heads, tokens = gradients.dy.dim(2);
  execution.pool->ParallelFor(problem_.batch * heads, [&](int64_t row, int worker) {
    memory.sums[row] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      QueryBackward(segment, gradients, row / heads, row % heads, t, memory.scratch[worker],
                    &memory.sums[row]);
    }
  });
  for (int64_t row = 0; row < problem_.batch * heads; ++row) {
    const int64_t h = row % heads, of_null = h / problem_.group() * problem_.head_dim;
    gradients.sums.gate[h] += memory.sums[row].gate;
    gradients.sums.scale[h] += memory.sums[row].scale;
    for (int64_t c = 0; shape_.has_null && c < problem_.head_dim; ++c) {
      gradients.sums.null_key[of_null + c] += memory.sums[row].null_key[c];
      gradients.sums.null_value[of_null + c] += memory.sums[row].null_value[c];
    }
  }
}

void StoreReading::QueryBackward(const Segment& segment, const Gradients& gradients, int64_t b,
                                 int64_t h, int64_t t, const Scratch& scratch,
                                 OwnSums* sums) const {
  const int64_t channels = problem_.head_dim, kv_head = h / problem_.group();
  const Read read = ReadAgain(segment, b, h, t, scratch);
  float* dy = scratch.y;
  LoadRowOf(gradients.dy, b, h, t, dy);
  LoadRowOf(segment.local, b, h, t, scratch.local);
  double of_gate = 0, of_memory = 0;  // dt and do . o
  for (int64_t c = 0; read.any() && c < channels; ++c) {
    of_gate += dy[c] * (scratch.of_memory[c] - scratch.local[c]);
    of_memory += read.gate * dy[c] * scratch.of_memory[c];
  }
  of_gate *= read.gate * (1 - read.gate);
  if (!shape_.joins) sums->gate += of_gate;
  const double of_sum = shape_.joins ? of_gate : 0;  // dl
  if (!gradients.dlog_sum_exp.empty()) {
    *gradients.dlog_sum_exp.MutableAt<float>(b, h, t) = static_cast<float>(-of_sum);
  }
  std::fill_n(scratch.of_unit, channels, 0.0);
  double of_scale = 0;
  const auto add_key = [&](const float* key, double weight, double product) {
    const double of_score = weight * (read.gate * product - of_memory + of_sum);
    of_scale += of_score * DotOf(scratch.unit_query, key, channels);
    for (int64_t c = 0; c < channels; ++c) scratch.of_unit[c] += read.scale * of_score * key[c];
    return of_score;
  };
  const int64_t* tokens = segment.kept.retrieved.At<int64_t>(b, h, segment.begin + t);
  for (int64_t n = 0; n < read.count; ++n) {
    const float* value = ValueOf(segment, b, kv_head, tokens[n], scratch.value);
    add_key(KeyOf(segment, b, kv_head, tokens[n], scratch.key), scratch.weights[n],
            DotOf(dy, value, channels));
  }
  if (read.null_length > 0) {
    const ConstTensorView& value = segment.parameters.null_value;
    LoadRow(value, value.Offset(kv_head), value.stride(1), channels, scratch.value);
    const double weight = scratch.weights[read.count];
    const double of_score = add_key(scratch.unit_null, weight, DotOf(dy, scratch.value, channels));
    double of_unit_null[kMaxHeadDim];
    for (int64_t c = 0; c < channels; ++c) {
      of_unit_null[c] = read.scale * of_score * scratch.unit_query[c];
      sums->null_value[c] += weight * read.gate * dy[c];
    }
    ThroughUnit(scratch.unit_null, of_unit_null, read.null_length, channels,
                [&](int64_t c, double derivative) { sums->null_key[c] += derivative; });
  }
  const double scale = segment.parameters.scale.Get(segment.parameters.scale.Offset(h));
  sums->scale += scale < 0 ? -of_scale : of_scale;
  ThroughUnit(
      scratch.unit_query, scratch.of_unit, read.query_length, channels,
      [&](int64_t c, double derivative) { scratch.local[c] = static_cast<float>(derivative); });
  StoreRow(scratch.local, channels, gradients.dq, gradients.dq.Offset(b, h, t),
           gradients.dq.stride(3));
  for (int64_t c = 0; read.any() && c < channels; ++c) {
    dy[c] = static_cast<float>((1 - read.gate) * dy[c]);
  }
  StoreRow(dy, channels, gradients.dlocal, gradients.dlocal.Offset(b, h, t),
           gradients.dlocal.stride(3));
}

}  // namespace tfb::memorizing
