// Tests engine flash's backward pass against central differences of the formula in float64, term by
// term: see core/flash/flash.h.
#include "core/flash/flash_backward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/mirror.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/work_testing.h"
#include "core/flash/flash_backward_cuda.h"
#include "core/flash/flash_engine.h"
#include "core/flash/rows.h"
#include "core/random.h"
#include "core/schedule/band_schedule.h"
#include "core/tested_devices.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using Numbers = std::map<std::string, std::vector<double>>;

// A call with any of the terms.
struct Setting {
  std::string name;
  Problem problem = Problem::SelfAttention(1, 2, 130, 16, false);
  std::vector<std::string> terms = {};  // of: u, w, r, l, c, factor, bias, span
  std::function<bool(int64_t i, int64_t j)> sees = [](int64_t, int64_t) { return true; };
  // Replaces `sees` where heads have patterns of their own.
  std::function<bool(int64_t h, int64_t i, int64_t j)> head_sees = nullptr;
  int64_t hidden_key = -1;                // is padding
  std::vector<int64_t> overwritten = {};  // rows that another call writes, on CUDA
  std::vector<int32_t> query_order = {};  // tokens by place; -1 for none
  bool out_by_row = false;                // rows of g and of q's gradient are places
  std::vector<int32_t> key_order = {};
  DType dtype = DType::kF32;
  bool has_f32_gradient = false;    // of the output, where the other tensors have 16 bits
  int64_t farthest = 50;            // offset of the farthest relative keys
  int64_t clip = int64_t{1} << 20;  // those beyond this distance are the one at this distance
  int64_t query_position = 0;
  bool has_token_rule = false;          // TokenRuleShows and TokenTerm
  std::set<std::string> left_out = {};  // gradients that the call does not ask for
  int64_t overwritten_batch = -1;       // the batch row of `overwritten`; -1 for all
  // Replaces `overwritten` and its batch row.
  std::function<bool(int64_t b, int64_t row)> is_overwritten = nullptr;
  // On CUDA: the calls ask for the rows that are not overwritten (FlashCall::asked), and what a query
  // sees is this band.
  std::optional<Band> asked_band = std::nullopt;

  bool Has(const std::string& term) const {
    return std::find(terms.begin(), terms.end(), term) != terms.end();
  }
  bool Sees(int64_t h, int64_t i, int64_t j) const {
    return head_sees != nullptr ? head_sees(h, i, j) : sees(i, j);
  }
  int64_t queries() const {
    return query_order.empty() ? problem.query_tokens : static_cast<int64_t>(query_order.size());
  }
  int64_t keys() const {
    return key_order.empty() ? problem.kv_tokens : static_cast<int64_t>(key_order.size());
  }
  int64_t QueryToken(int64_t place) const {
    return query_order.empty() ? place : query_order[place];
  }
  bool IsOverwritten(int64_t b, int64_t row) const {
    if (is_overwritten != nullptr) return is_overwritten(b, row);
    return (overwritten_batch < 0 || b == overwritten_batch) &&
           std::find(overwritten.begin(), overwritten.end(), row) != overwritten.end();
  }
  int64_t KeyToken(int64_t place) const { return key_order.empty() ? place : key_order[place]; }
  // Returns the number of an offset's relative key.
  int64_t KeyOf(int64_t offset) const {
    const int64_t last = std::min(clip, farthest);
    return std::min(std::max(offset, -last), last) + farthest;
  }
};

constexpr double kRamp = 40;

int Id(int64_t token) { return static_cast<int>(token % 3 == 0); }

// The token rule: three slots with codes, of which slot 1 hides pairs, and a bias of a token's own pair.
constexpr int64_t kSlots = 3;
constexpr float kSelfBias = 0.75f;
constexpr int64_t kFirstKeyCodes = 2;  // the head whose codes the keys of head 0 have
int32_t Code(int64_t slot, int64_t head, int64_t token) {
  return static_cast<int32_t>((token * (slot + 3) + head) % 7);
}
bool SlotShows(int64_t slot, int64_t h, int64_t kv_head, int64_t i, int64_t j) {
  const int32_t difference = Code(slot, h, i) - Code(slot, kFirstKeyCodes + kv_head, j);
  return difference == 0 || difference == 1;
}
double TokenTerm(int64_t h, int64_t kv_head, int64_t i, int64_t j) {
  int count = 0;
  for (int64_t slot = 0; slot < kSlots; ++slot) count += SlotShows(slot, h, kv_head, i, j) ? 1 : 0;
  return (i == j ? kSelfBias : 0) - std::log(std::max(count, 1));
}

std::vector<double> Draw(const std::string& name, int64_t count, double deviation) {
  std::vector<double> numbers;
  const RandomStream stream(7, name);
  for (int64_t n = 0; n < count; ++n) {
    numbers.push_back(static_cast<float>(deviation * stream.Normal(n)));
  }
  return numbers;
}

// Returns all numbers that the loss depends on.
Numbers DrawNumbers(const Setting& s) {
  const Problem& p = s.problem;
  const int64_t offsets = p.query_tokens + p.kv_tokens + 200;
  Numbers n;
  n["q"] = Draw("q", p.batch * p.query_heads * p.query_tokens * p.head_dim, 1);
  n["k"] = Draw("k", p.batch * p.kv_heads * p.kv_tokens * p.head_dim, 1);
  n["v"] = Draw("v", p.batch * p.kv_heads * p.kv_tokens * p.value_dim, 1);
  if (s.Has("u")) n["u"] = Draw("u", p.query_heads * p.head_dim, 1);
  if (s.Has("w")) n["w"] = Draw("w", p.query_heads * p.head_dim, 1);
  if (s.Has("r")) n["r"] = Draw("r", p.query_heads * (2 * s.farthest + 1) * p.head_dim, 1);
  if (s.Has("l")) n["l"] = Draw("l", p.query_heads * 2 * p.head_dim, 1);
  if (s.Has("c")) n["c"] = Draw("c", p.query_heads * 2, 1);
  if (s.Has("bias")) n["bias"] = Draw("bias", p.query_heads * offsets, 1);
  if (s.Has("factor")) n["factor"] = Draw("factor", p.query_heads * offsets, 1);
  if (s.Has("span")) {
    n["span"] = Draw("span", p.batch * p.query_heads * s.queries(), 10);
    for (double& z : n["span"]) z += 45;
  }
  return n;
}

// Computes <g, y> + <e, l> by the formula.
double Loss(const Setting& s, const Numbers& x, const std::vector<double>& g,
            const std::vector<double>& e) {
  const Problem& p = s.problem;
  const int64_t offsets = p.query_tokens + p.kv_tokens + 200, D = p.head_dim;
  const double scale = 1 / std::sqrt(static_cast<double>(D));
  // Returns the numbers of a name; null where the setting has no such term.
  const auto numbers = [&](const char* name) {
    const auto found = x.find(name);
    return found == x.end() ? nullptr : found->second.data();
  };
  const double *const q = numbers("q"), *const k = numbers("k"), *const v = numbers("v");
  const double *const content = numbers("u"), *const position = numbers("w");
  const double *const relative = numbers("r"), *const labels = numbers("l");
  const double *const label_biases = numbers("c"), *const spans = numbers("span");
  const double *const factors = numbers("factor"), *const biases = numbers("bias");
  double loss = 0;
  for (int64_t bh = 0; bh < p.batch * p.query_heads; ++bh) {
    const int64_t h = bh % p.query_heads, kv = bh / p.group();
    for (int64_t i = 0; i < s.queries(); ++i) {
      const int64_t a = s.QueryToken(i), row = s.out_by_row ? i : a;
      if (a < 0 || s.IsOverwritten(bh / p.query_heads, row)) continue;
      double sum = 0, max = -std::numeric_limits<double>::infinity();
      std::vector<double> scores, ramps;
      std::vector<int64_t> tokens;
      for (int64_t j = 0; j < s.keys(); ++j) {
        const int64_t b = s.KeyToken(j);
        if (!s.Sees(h, i, j) || b == s.hidden_key) continue;
        if (s.has_token_rule && !SlotShows(1, h, kv % p.kv_heads, a, b)) continue;
        double ramp = 1;
        if (spans != nullptr) {
          const double z = spans[bh * s.queries() + i];
          const double distance = static_cast<double>(i + p.causal_offset() - j);
          ramp = std::min(1.0, std::max(0.0, (kRamp + z - distance) / kRamp));
          if (ramp == 0) continue;
        }
        double score = 0;
        for (int64_t c = 0; c < D; ++c) {
          const double query = q[(bh * p.query_tokens + a) * D + c];
          score += (query + (content == nullptr ? 0 : content[h * D + c])) *
                   k[(kv * p.kv_tokens + b) * D + c];
          const double positioned = query + (position == nullptr ? 0 : position[h * D + c]);
          const int64_t offset = j - i - s.query_position;
          if (relative != nullptr && std::abs(offset) <= s.farthest) {
            score += positioned * relative[(h * (2 * s.farthest + 1) + s.KeyOf(offset)) * D + c];
          }
          if (labels != nullptr) score += positioned * labels[(h * 2 + (Id(a) == Id(b))) * D + c];
        }
        if (label_biases != nullptr) score += label_biases[h * 2 + (Id(a) == Id(b))];
        score *= scale;
        const int64_t offset = h * offsets + j - i + p.query_tokens;
        if (factors != nullptr) score = std::max(score, 0.0) * factors[offset];
        if (biases != nullptr) score += biases[offset];
        if (s.has_token_rule) score += TokenTerm(h, kv % p.kv_heads, a, b);
        scores.push_back(score);
        ramps.push_back(ramp);
        tokens.push_back(b);
        max = std::max(max, score);
      }
      if (scores.empty()) continue;
      for (size_t n = 0; n < scores.size(); ++n) sum += ramps[n] * std::exp(scores[n] - max);
      loss += e[bh * p.query_tokens + row] * (max + std::log(sum));
      for (size_t n = 0; n < scores.size(); ++n) {
        const double weight = ramps[n] * std::exp(scores[n] - max) / sum;
        for (int64_t c = 0; c < p.value_dim; ++c) {
          loss += weight * g[(bh * p.query_tokens + row) * p.value_dim + c] *
                  v[(kv * p.kv_tokens + tokens[n]) * p.value_dim + c];
        }
      }
    }
  }
  return loss;
}

class FromFunction : public Pattern {
 public:
  explicit FromFunction(const Setting& setting) : setting_(setting) {}
  int64_t heads() const override {
    return setting_.head_sees != nullptr ? setting_.problem.query_heads : 1;
  }
  int64_t AddKeys(int64_t h, int64_t i, KeyList* keys) const override {
    for (int64_t j = 0; j < setting_.keys(); ++j) {
      if (setting_.Sees(h, i, j)) keys->Add(j, j + 1);
    }
    return i + 1;
  }

 private:
  const Setting& setting_;
};

Tensor TensorFrom(const std::vector<double>& numbers, const Shape& shape, DType dtype) {
  Tensor tensor(dtype, shape);
  for (size_t n = 0; n < numbers.size(); ++n) {
    tensor.view().Set(static_cast<int64_t>(n), numbers[n]);
  }
  return tensor;
}

std::vector<float> Floats(const Numbers& x, const char* name) {
  const auto found = x.find(name);
  if (found == x.end()) return {};
  return std::vector<float>(found->second.begin(), found->second.end());
}

// Where and how the engine runs.
struct Place {
  Device device = Device::kCpu;
  int threads = 1;  // on the CPU; in the simulator the seed of the order of blocks and threads
  bool counts_banks = false;    // in the simulator
  float begin = 0;              // what the sums are before the call
  std::string* work = nullptr;  // in the simulator: becomes WorkOf the backward pass
};

// A forward and a backward call, whose views, orders and sums are in host memory.
struct Calls {
  FlashCall forward;
  FlashBackwardCall backward;
  ConstTensorView log_sum_exp_gradient;
  ConstTensorView overwritten;
};

// Device memory of tensors of queries [batch, heads, tokens, ...]. Where there is a list, only its
// rows are copied there: the simulator finds kernels that read others.
class QueryMemory {
 public:
  // `is_listed` is of [batch, tokens], and empty where there is no list.
  QueryMemory(DeviceMirror* mirror, CudaRuntime* runtime, const std::vector<uint8_t>& is_listed)
      : mirror_(mirror), runtime_(runtime), is_listed_(is_listed) {}

  absl::StatusOr<ConstTensorView> Copy(const ConstTensorView& host) {
    if (is_listed_.empty()) return mirror_->Copy(host);
    TFB_ASSIGN_OR_RETURN(const TensorView copy, Take(host));
    const int64_t heads = host.dim(1), tokens = host.dim(2), rows = host.dim(0) * heads * tokens;
    const int64_t bytes = host.num_elements() / rows * SizeOf(host.dtype);
    for (int64_t n = 0; n < rows; ++n) {
      if (is_listed_[n / tokens / heads * tokens + n % tokens] == 0) continue;
      TFB_RETURN_IF_ERROR(
          runtime_->CopyToDevice(static_cast<std::byte*>(copy.mutable_data()) + n * bytes,
                                 static_cast<const std::byte*>(host.data) + n * bytes, bytes));
    }
    return copy;
  }
  absl::StatusOr<TensorView> ForWriting(const TensorView& host) {
    return is_listed_.empty() || host.empty() ? mirror_->CopyForWriting(host) : Take(host);
  }

 private:
  absl::StatusOr<TensorView> Take(const ConstTensorView& like) {
    TFB_ASSIGN_OR_RETURN(DeviceBuffer memory,
                         runtime_->Allocate(like.num_elements() * SizeOf(like.dtype)));
    if (runtime_->target() == CudaTarget::kGpu) {  // which does not know what has been written
      TFB_RETURN_IF_ERROR(runtime_->Fill(memory.data(), 0xFF, memory.bytes()));  // with NaN
    }
    const TensorView view(memory.data(), like.dtype, like.shape());
    memory_.push_back(std::move(memory));
    return view;
  }

  DeviceMirror* mirror_;
  CudaRuntime* runtime_;
  const std::vector<uint8_t>& is_listed_;
  std::vector<DeviceBuffer> memory_;
};

// Runs the calls on a CUDA device, with copies of what they name.
absl::Status RunOnCuda(const Setting& s, const Problem& problem, const ScoreRule& rule,
                       const Calls& host, std::map<std::string, std::vector<float>>* sums,
                       const Place& place) {
  if (KernelDevice() == Device::kSimulator) {
    cuda_simulator::Settings settings;
    settings.seed = place.threads;
    settings.counts_bank_conflicts |= place.counts_banks;
    cuda_simulator::Configure(settings);
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(KernelDevice()));
  TFB_ASSIGN_OR_RETURN(const FlashEngine engine,
                       FlashEngine::Create(KernelDevice(), problem, FromFunction(s), rule));
  TFB_ASSIGN_OR_RETURN(
      const FlashBackwardCuda backward,
      FlashBackwardCuda::Create(runtime, problem, BuildSchedule(problem, FromFunction(s)), rule));
  DeviceMirror mirror(runtime);
  std::vector<int32_t> asked_rows, asked_begins = {0};
  std::vector<uint8_t> is_asked;
  for (int64_t n = 0; s.asked_band.has_value() && n < problem.batch * problem.query_tokens; ++n) {
    const int64_t b = n / problem.query_tokens;
    is_asked.push_back(s.IsOverwritten(b, n % problem.query_tokens) ? 0 : 1);
    if (is_asked.back() != 0) asked_rows.push_back(static_cast<int32_t>(n));
    if ((n + 1) % problem.query_tokens == 0) {
      asked_begins.push_back(static_cast<int32_t>(asked_rows.size()));
    }
  }
  QueryMemory of_queries(&mirror, runtime, is_asked);
  FlashCall call = engine.NewCall();
  TFB_ASSIGN_OR_RETURN(call.q, of_queries.Copy(host.forward.q));
  for (ConstTensorView FlashCall::*view : {&FlashCall::k, &FlashCall::v, &FlashCall::key_mask,
                                           &FlashCall::query_ids, &FlashCall::key_ids}) {
    TFB_ASSIGN_OR_RETURN(call.*view, mirror.Copy(host.forward.*view));
  }
  for (TensorView FlashCall::*view : {&FlashCall::out, &FlashCall::out_rest,
                                      &FlashCall::log_sum_exp, &FlashCall::log_sum_exp_rest}) {
    TFB_ASSIGN_OR_RETURN(call.*view, of_queries.ForWriting(host.forward.*view));
  }
  const auto copy_order = [&](const std::vector<int32_t>& tokens,
                              TokenOrder* order) -> absl::Status {
    if (tokens.empty()) return absl::OkStatus();
    TFB_ASSIGN_OR_RETURN(
        const ConstTensorView copy,
        mirror.Copy({tokens.data(), DType::kI32, {static_cast<int64_t>(tokens.size())}}));
    *order = {static_cast<const int32_t*>(copy.data), 0, 0};
    return absl::OkStatus();
  };
  TFB_RETURN_IF_ERROR(copy_order(s.query_order, &call.query_order));
  call.out_by_row = s.out_by_row;
  TFB_RETURN_IF_ERROR(copy_order(s.key_order, &call.key_order));
  TokenRule& tokens = call.rule.tokens;
  for (const int32_t** codes : {&tokens.query_codes, &tokens.key_codes}) {
    if (*codes == nullptr) continue;
    TFB_ASSIGN_OR_RETURN(const ConstTensorView copy,
                         mirror.Copy({*codes, DType::kI32, {kSlots * tokens.slot_stride}}));
    *codes = static_cast<const int32_t*>(copy.data);
  }

  ConstTensorView asked_marks;
  if (s.asked_band.has_value()) {
    const auto copy = [&](const void* data, DType dtype, size_t count) {
      return mirror.Copy({data, dtype, {static_cast<int64_t>(count)}});
    };
    TFB_ASSIGN_OR_RETURN(const auto rows, copy(asked_rows.data(), DType::kI32, asked_rows.size()));
    TFB_ASSIGN_OR_RETURN(const auto begins,
                         copy(asked_begins.data(), DType::kI32, asked_begins.size()));
    TFB_ASSIGN_OR_RETURN(asked_marks, copy(is_asked.data(), DType::kU8, is_asked.size()));
    asked_marks =
        ConstTensorView(asked_marks.data, DType::kU8, {problem.batch, problem.query_tokens});
    call.band = &*s.asked_band;
    call.asked = {rows.At<int32_t>(0), begins.At<int32_t>(0), begins.At<int32_t>(problem.batch),
                  asked_marks.At<uint8_t>(0)};
  }

  FlashBackwardCall of_device = host.backward;
  of_device.forward = &call;
  TFB_ASSIGN_OR_RETURN(of_device.out_gradient, of_queries.Copy(host.backward.out_gradient));
  TFB_ASSIGN_OR_RETURN(const ConstTensorView log_sum_exp_gradient,
                       of_queries.Copy(host.log_sum_exp_gradient));
  TFB_ASSIGN_OR_RETURN(const ConstTensorView overwritten, mirror.Copy(host.overwritten));
  std::map<const float*, float*> copies;
  for (auto& [name, values] : *sums) {
    TFB_ASSIGN_OR_RETURN(
        const TensorView copy,
        mirror.CopyForWriting({values.data(), DType::kF32, {static_cast<int64_t>(values.size())}}));
    copies[values.data()] = static_cast<float*>(copy.mutable_data());
  }
  for (TensorView FlashBackwardCall::*view :
       {&FlashBackwardCall::q_gradient, &FlashBackwardCall::k_gradient,
        &FlashBackwardCall::v_gradient}) {
    const TensorView& own = host.backward.*view;
    if (own.empty()) continue;
    of_device.*view =
        TensorView(copies.at(static_cast<float*>(own.mutable_data())), DType::kF32, own.shape());
  }
  ScoreGradients& terms = of_device.terms;
  for (float** term :
       {&terms.content_bias, &terms.position_bias, &terms.relative_keys, &terms.label_keys,
        &terms.label_biases, &terms.relu_multiplier, &terms.bias, &terms.span}) {
    if (*term != nullptr) *term = copies.at(*term);
  }
  const int64_t rows = call.log_sum_exp.num_elements();
  TFB_ASSIGN_OR_RETURN(const DeviceArray<float> numbers,
                       DeviceArray<float>::Allocate(KernelDevice(), 3 * rows));
  of_device.numbers = {numbers.mutable_data(), numbers.mutable_data() + rows,
                       numbers.mutable_data() + 2 * rows, call.log_sum_exp.dim(2)};
  ScoreSums all;
  all.content_bias = all.labels = all.offsets = all.relative_keys = all.key_order = true;
  const int64_t bytes = static_cast<int64_t>(
      std::max(FlashEngine::WorkspaceBytes(KernelDevice(), problem, s.Has("r"), 1),
               FlashBackwardCuda::WorkspaceBytes(problem, all)));
  TFB_ASSIGN_OR_RETURN(const DeviceArray<char> memory,
                       DeviceArray<char>::Allocate(KernelDevice(), bytes));
  ThreadPool pool(1);
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(reinterpret_cast<std::byte*>(memory.mutable_data()), bytes);
  TFB_RETURN_IF_ERROR(engine.Run(call, execution));
  const bool has_list = s.asked_band.has_value();
  absl::Status status;
  const std::string work = WorkOf([&] {
    status = FlashRowNumbers(runtime, of_device, call.out, log_sum_exp_gradient,
                             backward.FactorsOf(problem, *of_device.forward),
                             has_list ? asked_marks : overwritten, has_list, execution);
    if (status.ok()) status = backward.Run(problem, of_device, execution);
  });
  TFB_RETURN_IF_ERROR(status);
  if (place.work != nullptr) *place.work = work;
  TFB_RETURN_IF_ERROR(runtime->Synchronize());
  return mirror.CopyBack();
}

// Runs the calls on the CPU.
absl::Status RunOnCpu(const Setting& s, const Problem& problem, const FlashEngine& engine,
                      const Calls& calls, int threads) {
  ThreadPool pool(threads);
  const size_t bytes =
      std::max(FlashEngine::WorkspaceBytes(Device::kCpu, problem, s.Has("r"), threads),
               FlashBackwardWorkspaceBytes(problem, s.Has("r"), threads));
  constexpr size_t kGuard = size_t{1} << 20;  // behind the workspace
  Tensor memory(DType::kU8, {static_cast<int64_t>(bytes + kGuard)});
  std::memset(memory.raw(), 0xFF, bytes + kGuard);  // NaN: what is read must have been written
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(memory.raw()), bytes);
  TFB_RETURN_IF_ERROR(engine.Run(calls.forward, execution));
  std::memset(memory.raw(), 0xFF, bytes);

  Tensor delta(DType::kF32, calls.forward.log_sum_exp.shape());
  FlashDelta(calls.forward.out, calls.forward.out_rest, calls.backward.out_gradient,
             calls.log_sum_exp_gradient, delta.view(), &pool);
  const TransposedSchedule transposed(engine.schedule());
  const RelativeKeys* keys = calls.forward.rule.relative_keys;
  const RelativeKeyVectors vectors =
      keys != nullptr ? RelativeKeyVectors(*keys, problem.head_dim, ProductScale(problem, 0))
                      : RelativeKeyVectors();
  FlashBackwardCall backward = calls.backward;
  backward.forward = &calls.forward;
  backward.schedule = &transposed;
  backward.relative_keys = &vectors;
  backward.delta = delta.view();
  TFB_RETURN_IF_ERROR(FlashBackwardCpu(problem, backward, execution));
  const absl::Span<const uint8_t> guard = memory.span<uint8_t>().subspan(bytes);
  EXPECT_EQ(std::count(guard.begin(), guard.end(), 0xFF), static_cast<int64_t>(kGuard))
      << "something was written behind the workspace";
  return absl::OkStatus();
}

// Runs the engine forward and backward; returns its gradients in the order of the numbers.
Numbers EngineGradients(const Setting& s, const Numbers& x, const std::vector<double>& g,
                        const std::vector<double>& e, const Place& place) {
  const Problem& p = s.problem;
  Problem of_places = p;
  of_places.query_tokens = s.queries();
  of_places.kv_tokens = s.keys();
  of_places.causal = false;
  of_places.dtype = s.dtype;
  const int64_t offsets = p.query_tokens + p.kv_tokens + 200;
  const auto table = [&](const char* name) {
    return [&, name](int64_t h, int64_t offset) {
      return static_cast<float>(
          x.at(name)[h * offsets + offset + s.query_position + p.query_tokens]);
    };
  };
  ScoreRule rule;
  rule.query_position = s.query_position;
  const std::vector<float> u = Floats(x, "u"), w = Floats(x, "w"), l = Floats(x, "l"),
                           c = Floats(x, "c"), span = Floats(x, "span");
  if (s.Has("u")) rule.content_bias = u.data();
  if (s.Has("w")) rule.position_bias = w.data();
  RelativeKeys relative;
  if (s.Has("r")) {
    const Tensor r =
        TensorFrom(x.at("r"), {p.query_heads, 2 * s.farthest + 1, p.head_dim}, DType::kF32);
    relative = RelativeKeys(r.view(), -s.farthest, s.farthest,
                            [&](int64_t offset) { return s.KeyOf(offset); });
    rule.relative_keys = &relative;
  }
  const std::vector<float> none(p.query_heads * 2 * p.head_dim);
  if (s.Has("l") || s.Has("c")) {
    rule.label_keys.keys = s.Has("l") ? l.data() : none.data();
    rule.label_keys.heads = p.query_heads;
    if (s.Has("c")) rule.label_keys.biases = c.data();
  }
  DistanceTable factor, bias;
  if (s.Has("factor")) {
    factor =
        DistanceTable(p.query_heads, s.queries() + s.query_position, s.keys(), table("factor"));
    rule.relu_multiplier = factor.entries();
  }
  if (s.Has("bias")) {
    bias = DistanceTable(p.query_heads, s.queries() + s.query_position, s.keys(), table("bias"));
    rule.bias = bias.entries();
  }
  if (s.Has("span")) {
    rule.soft_span = {
        span.data(), static_cast<int64_t>(span.size()), p.query_heads * s.queries(), s.queries(), 1,
        kRamp};
  }
  // Codes of the slots' heads and tokens; those of keys are of other heads, as in SlotShows.
  const int64_t tokens = std::max(p.query_tokens, p.kv_tokens);
  const auto codes = [&](int64_t first_head) {
    std::vector<int32_t> of;
    for (int64_t n = 0; n < kSlots * p.query_heads * tokens; ++n) {
      const int64_t slot = n / tokens / p.query_heads, head = n / tokens % p.query_heads;
      of.push_back(Code(slot, first_head + head, n % tokens));
    }
    return of;
  };
  const std::vector<int32_t> query_codes = codes(0), key_codes = codes(kFirstKeyCodes);
  if (s.has_token_rule) {
    rule.tokens.counts = true;
    rule.tokens.self_bias = kSelfBias;
    rule.tokens.own = 1;
    rule.tokens.query_codes = query_codes.data();
    rule.tokens.key_codes = key_codes.data();
    rule.tokens.slots = kSlots;
    rule.tokens.slot_stride = p.query_heads * tokens;
    rule.tokens.head_stride = tokens;
  }
  const FlashEngine engine =
      FlashEngine::Create(Device::kCpu, of_places, FromFunction(s), rule).value();
  const Shape of_q = {p.batch, p.query_heads, p.query_tokens, p.head_dim},
              of_k = {p.batch, p.kv_heads, p.kv_tokens, p.head_dim},
              of_v = {p.batch, p.kv_heads, p.kv_tokens, p.value_dim},
              of_out = {p.batch, p.query_heads, p.query_tokens, p.value_dim},
              of_rows = {p.batch, p.query_heads, p.query_tokens};
  const Tensor q = TensorFrom(x.at("q"), of_q, s.dtype), k = TensorFrom(x.at("k"), of_k, s.dtype),
               v = TensorFrom(x.at("v"), of_v, s.dtype),
               out_gradient = TensorFrom(g, of_out, s.has_f32_gradient ? DType::kF32 : s.dtype),
               lse_gradient = TensorFrom(e, of_rows, DType::kF32);
  Tensor out(s.dtype, of_out), out_rest(s.dtype, of_out), lse(DType::kF32, of_rows),
      rest(DType::kF32, of_rows), mask(DType::kU8, {p.batch, p.kv_tokens}),
      marks(DType::kU8, {p.batch, p.query_tokens}),
      ids(DType::kI32, {p.batch, std::max(p.query_tokens, p.kv_tokens)});
  for (Tensor* tensor : {&out, &out_rest, &lse, &rest}) Fill(tensor->view(), 0);
  Fill(mask.view(), 1);
  Fill(marks.view(), 0);
  for (int64_t b = 0; b < p.batch; ++b) {
    if (s.hidden_key >= 0) *mask.view().MutableAt<uint8_t>(b, s.hidden_key) = 0;
    for (const int64_t t : s.overwritten) {
      if (s.IsOverwritten(b, t)) *marks.view().MutableAt<uint8_t>(b, t) = 1;
    }
    for (int64_t t = 0; t < ids.dim(1); ++t) *ids.view().MutableAt<int32_t>(b, t) = Id(t);
  }
  Calls calls;
  FlashCall& call = calls.forward = engine.NewCall();
  call.q = q.view();
  call.k = k.view();
  call.v = v.view();
  if (s.hidden_key >= 0) call.key_mask = mask.view();
  call.query_ids = call.key_ids = ids.view();
  call.out = out.view();
  if (s.dtype != DType::kF32) call.out_rest = out_rest.view();
  call.log_sum_exp = lse.view();
  call.log_sum_exp_rest = rest.view();
  if (!s.query_order.empty()) call.query_order = {s.query_order.data(), 0, 0};
  if (!s.key_order.empty()) call.key_order = {s.key_order.data(), 0, 0};
  std::map<std::string, std::vector<float>> sums;
  const auto sum = [&](const char* name, int64_t count) {
    return (sums[name] = std::vector<float>(count, place.begin)).data();
  };
  const int64_t row = RoundUp(p.head_dim, 16);
  calls.log_sum_exp_gradient = lse_gradient.view();
  if (!s.overwritten.empty()) calls.overwritten = marks.view();
  FlashBackwardCall& backward = calls.backward;
  backward.out_gradient = out_gradient.view();
  const auto wants = [&](const char* name) { return s.left_out.count(name) == 0; };
  const auto has = [&](const char* name) { return s.Has(name) && wants(name); };
  if (wants("q")) backward.q_gradient = TensorView(sum("q", q.num_elements()), DType::kF32, of_q);
  if (wants("k")) backward.k_gradient = TensorView(sum("k", k.num_elements()), DType::kF32, of_k);
  if (wants("v")) backward.v_gradient = TensorView(sum("v", v.num_elements()), DType::kF32, of_v);
  if (has("u")) backward.terms.content_bias = sum("u", u.size());
  if (has("w")) backward.terms.position_bias = sum("w", w.size());
  if (has("r")) {
    backward.terms.relative_keys = sum("r", p.query_heads * (2 * s.farthest + 1) * row);
  }
  if (has("l")) backward.terms.label_keys = sum("l", l.size());
  if (has("c")) backward.terms.label_biases = sum("c", c.size());
  if (has("factor")) {
    backward.terms.relu_multiplier = sum("factor", p.query_heads * factor.entries().row);
  }
  if (has("bias")) backward.terms.bias = sum("bias", p.query_heads * bias.entries().row);
  if (has("span")) backward.terms.span = sum("span", span.size());
  const absl::Status status = place.device == Device::kCpu
                                  ? RunOnCpu(s, of_places, engine, calls, place.threads)
                                  : RunOnCuda(s, of_places, rule, calls, &sums, place);
  EXPECT_TRUE(status.ok()) << status;

  Numbers gradients;
  for (const auto& [name, values] : sums) {
    std::vector<double>& of = gradients[name];
    if (name == "r") {
      of.assign(x.at("r").size(), 0.0);
      for (int64_t n = 0; n < p.query_heads * (2 * s.farthest + 1); ++n) {
        const int64_t h = n / (2 * s.farthest + 1), offset = n % (2 * s.farthest + 1) - s.farthest;
        double* key = of.data() + (h * (2 * s.farthest + 1) + s.KeyOf(offset)) * p.head_dim;
        for (int64_t c = 0; c < p.head_dim; ++c) key[c] += values[n * row + c];
      }
    } else if (name == "factor" || name == "bias") {
      of.assign(p.query_heads * offsets, 0.0);
      const DistanceEntries entries = name == "bias" ? bias.entries() : factor.entries();
      for (int64_t h = 0; h < p.query_heads; ++h) {
        for (int64_t o = 1 - s.queries(); o < s.keys(); ++o) {
          of[h * offsets + o + p.query_tokens] =
              values[h * entries.row + entries.zero + o - s.query_position];
        }
      }
    } else {
      of.assign(values.begin(), values.end());
    }
  }
  return gradients;
}

double Norm(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

// Holds the engine's gradients against central differences along random directions. In fp32 a
// derivative along d has an error of some units in the last place of |d| times the norm of the
// gradient, times the root of the depth of its sums.
void ExpectGradients(const Setting& s, Device device) {
  SCOPED_TRACE(s.name);
  Numbers x = DrawNumbers(s);
  const Problem& p = s.problem;
  const std::vector<double> g =
      Draw("g", p.batch * p.query_heads * p.query_tokens * p.value_dim, 1);
  const std::vector<double> e = Draw("e", p.batch * p.query_heads * p.query_tokens, 1);
  if (s.hidden_key >= 0) {  // NaN there must reach nothing; the loss does not read it
    for (int64_t h = 0; h < p.batch * p.kv_heads; ++h) {
      x["k"][(h * p.kv_tokens + s.hidden_key) * p.head_dim] =
          std::numeric_limits<double>::quiet_NaN();
      x["v"][(h * p.kv_tokens + s.hidden_key) * p.value_dim] =
          std::numeric_limits<double>::quiet_NaN();
    }
  }
  const Numbers gradients = EngineGradients(s, x, g, e, {device, 1});
  for (int threads = 2; threads <= (device == Device::kCpu ? 3 : 2); ++threads) {
    ASSERT_EQ(EngineGradients(s, x, g, e, {device, threads}), gradients) << threads;
  }
  for (const auto& [name, gradient] : gradients) {
    ASSERT_EQ(gradient.size(), x.at(name).size()) << name;
    double norm = Norm(gradient);
    ASSERT_TRUE(std::isfinite(norm)) << name;
    for (int trial = 0; trial < (s.terms.empty() ? 2 : 1); ++trial) {
      const std::vector<double> d = Draw(name + std::to_string(trial), gradient.size(), 1);
      const double length = Norm(d), h = 1e-6;
      const auto moved = [&, &name = name](double step) {
        Numbers there = x;
        for (size_t n = 0; n < d.size(); ++n) there[name][n] += step * d[n];
        return Loss(s, there, g, e);
      };
      const double expected = (moved(h) - moved(-h)) / (2 * h);
      const double got = std::inner_product(d.begin(), d.end(), gradient.begin(), 0.0);
      // The gradient's own error is some 1e-6 of its norm, and a random direction meets it at a
      // random angle; the error of the differences, with kinks of ramps and ReLUs, is below 1e-6.
      EXPECT_NEAR(got, expected, 1e-5 * (norm + 1) + 1e-7 * length * norm) << name;
    }
  }
}

class FlashBackward : public testing::TestWithParam<Device> {
 protected:
  // Returns a number of tokens: simulated kernels are slow, and a few tiles tell as much of them.
  static int64_t Tokens(int64_t on_cpu, int64_t on_others) {
    return GetParam() == Device::kCpu ? on_cpu : on_others;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, FlashBackward, testing::ValuesIn(TestedDevices()),
                         [](const auto& test) { return std::string(Name(test.param)); });

TEST_P(FlashBackward, OfPlainAttention) {
  ExpectGradients({"plain", Problem::SelfAttention(2, 2, 130, 16, false)}, GetParam());
  Problem uneven = Problem::SelfAttention(1, 4, 65, 20, false);
  uneven.kv_heads = 2;
  uneven.kv_tokens = 333;
  uneven.value_dim = 7;
  ExpectGradients({"uneven", uneven}, GetParam());
}

TEST_P(FlashBackward, OfCausalAndBandedAttention) {
  Setting s{"causal", Problem::SelfAttention(1, 2, Tokens(330, 210), 16, false)};
  s.sees = [](int64_t i, int64_t j) { return j <= i; };
  ExpectGradients(s, GetParam());
  s.name = "band";
  s.sees = [](int64_t i, int64_t j) { return j <= i && j > i - 70; };
  ExpectGradients(s, GetParam());
  s.name = "every third, and no row at all for some";
  s.sees = [](int64_t i, int64_t j) {
    return (i + j) % 3 == 0 && i % 5 != 0 && (j < 64 || j > 200);
  };
  ExpectGradients(s, GetParam());
}

// Spans hide keys where there are many.
TEST_P(FlashBackward, OfEachTermAndOfAll) {
  const std::vector<std::vector<std::string>> all = {
      {"u"},           {"r"},
      {"r", "w"},      {"l"},
      {"l", "c", "w"}, {"bias"},
      {"factor"},      {"span"},
      {"u", "w", "r"}, {"bias", "factor", "r", "l", "c", "u", "w"}};
  for (const std::vector<std::string>& terms : all) {
    for (const bool causal : {false, true}) {
      const bool has_many = terms.size() > 3 || terms[0] == "span";
      Setting s{causal ? "causal" : "full"};
      s.problem = Problem::SelfAttention(1, 2, Tokens(130, has_many ? 130 : 70), 16, false);
      s.terms = terms;
      for (const std::string& term : terms) s.name += " " + term;
      if (causal) s.sees = [](int64_t i, int64_t j) { return j <= i; };
      ExpectGradients(s, GetParam());
    }
  }
}

TEST_P(FlashBackward, OfTermsWithMoreAndWithFewerKeysThanQueries) {
  for (const std::vector<std::string>& terms :
       {std::vector<std::string>{"span"}, {"bias", "r", "w"}, {"l", "c"}}) {
    for (const int64_t queries : {70, 150}) {
      Setting s{"other numbers of keys", Problem::SelfAttention(1, 2, queries, 8, false)};
      s.problem.kv_tokens = 220 - queries;
      s.terms = terms;
      ExpectGradients(s, GetParam());
    }
  }
}

TEST_P(FlashBackward, OfRelativeKeysOfMoreOffsetsThanThePairsHave) {
  for (const int64_t position : {0, 30}) {
    Setting s{"far", Problem::SelfAttention(1, 2, 70, 8, false)};
    s.terms = {"r", "w"};
    s.farthest = 130;
    s.query_position = position;
    ExpectGradients(s, GetParam());
  }
}

TEST_P(FlashBackward, OfRelativeKeysThatAreTheSameBeyondADistance) {
  for (const int64_t clip : {0, 3, 16, 40}) {
    for (const bool causal : {false, true}) {
      Setting s{"beyond " + std::to_string(clip),
                Problem::SelfAttention(1, 2, Tokens(150, 70), 16, false)};
      s.terms = {"r", "w"};
      s.clip = clip;
      if (causal) s.sees = [](int64_t i, int64_t j) { return j <= i; };
      ExpectGradients(s, GetParam());
    }
  }
}

TEST(FlashBackwardCpu, ACallWithoutWhatItsForwardPassLeftIsRefused) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 8, false);
  ThreadPool pool(1);
  Execution execution;
  execution.pool = &pool;
  FlashCall forward;
  FlashBackwardCall call;
  call.forward = &forward;
  EXPECT_EQ(FlashBackwardCpu(problem, call, execution).ToString(),
            "INTERNAL: a backward call has no schedule of tiles of 64");
  BandSchedule schedules(4);
  forward.schedule = &schedules.Build(4, 4, Band());
  EXPECT_EQ(FlashBackwardCpu(problem, call, execution).ToString(),
            "INTERNAL: a backward call has no log-sum-exp of the forward pass");
}

// As the forward pass refuses them (FlashCall.WhatDoesNotFitIsRefusedOnBothDevices).
TEST(FlashBackward, ARuleWithoutItsIdsOrWithTooManySlotsIsRefused) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 8, false);
  ThreadPool pool(1);
  Execution execution;
  execution.pool = &pool;
  BandSchedule schedules(4);
  Tensor log_sum_exp(DType::kF32, {1, 1, 4}), ids(DType::kI32, {1, 4});
  const float keys[2 * 8] = {};
  FlashCall forward;
  forward.schedule = &schedules.Build(4, 4, Band());
  forward.log_sum_exp = log_sum_exp.view();
  forward.rule.label_keys.keys = keys;
  FlashBackwardCall call;
  call.forward = &forward;
  const char* no_ids = "INTERNAL: a call whose rule has label keys has no ids of queries or keys";
  EXPECT_EQ(FlashBackwardCpu(problem, call, execution).ToString(), no_ids);
  forward.query_ids = ids.view();
  EXPECT_EQ(FlashBackwardCpu(problem, call, execution).ToString(), no_ids);
  forward.query_ids = {};
  forward.key_ids = ids.view();
  EXPECT_EQ(FlashBackwardCpu(problem, call, execution).ToString(), no_ids);
  forward.query_ids = ids.view();
  forward.rule.tokens.counts = true;
  forward.rule.tokens.slots = kMaxTokenSlots + 1;
  EXPECT_EQ(
      FlashBackwardCpu(problem, call, execution).ToString(),
      "INTERNAL: a token rule of 65 slots, of which slot -1 is the call's own; allowed are 1 to "
      "64 slots with codes");
}

// As in the first segments of a long memory.
TEST_P(FlashBackward, OfRelativeKeysThatReachFarBeyondTheTokens) {
  for (const int64_t tokens : {27, 130}) {
    Setting s;
    s.name = std::to_string(tokens) + " tokens";
    s.problem = Problem::SelfAttention(2, 2, tokens, 4, /*causal=*/true);
    s.terms = {"u", "w", "r"};
    s.sees = [](int64_t i, int64_t j) { return j <= i; };
    s.farthest = 1500;
    ExpectGradients(s, GetParam());
  }
}

TEST_P(FlashBackward, HiddenKeysThatAreNotNumbersReachNothing) {
  Setting s{"padding", Problem::SelfAttention(1, 2, Tokens(130, 100), 16, false)};
  s.hidden_key = 70;
  ExpectGradients(s, GetParam());
  s.terms = {"u", "w", "r", "bias"};
  ExpectGradients(s, GetParam());
  s.terms = {"r", "l", "w"};
  ExpectGradients(s, GetParam());
}

TEST_P(FlashBackward, OfOrders) {
  Setting s{"orders", Problem::SelfAttention(1, 2, 330, 16, false)};
  for (int32_t n = 0; n < 150; ++n) {
    if (n % 7 != 3) {
      s.query_order.push_back(n * 2 + 1);
    } else if (GetParam() == Device::kCpu) {
      s.query_order.push_back(-1);
    }
  }
  for (int32_t n = 0; n < 300; ++n) s.key_order.push_back(n * 77 % 289);  // some tokens twice
  s.sees = [](int64_t i, int64_t j) { return j <= 2 * i; };
  ExpectGradients(s, GetParam());
  s.terms = {"bias", "r", "w", "l"};
  ExpectGradients(s, GetParam());
}

// ---- 16 bits ----

void RoundTo(DType dtype, std::vector<double>* numbers) {
  Tensor tensor(dtype, {static_cast<int64_t>(numbers->size())});
  for (size_t n = 0; n < numbers->size(); ++n) {
    tensor.view().Set(static_cast<int64_t>(n), (*numbers)[n]);
    (*numbers)[n] = tensor.view().Get(static_cast<int64_t>(n));
  }
}

// An element of a gradient, and the largest error that it may have.
struct Element16 {
  double value = 0;
  double error = 0;

  void Add(double factor, double number, double bound) {
    value += factor * number;
    error += bound;
  }
};
using Gradients16 = std::map<std::string, std::vector<Element16>>;

// Computes the gradients of q, k and v in float64, and bounds of the errors of kernels that round
// weights and score gradients to 16 bits (core/flash/flash_backward_mma.cuh). u is the unit roundoff of
// the dtype, f that of what is left in fp32: scores of some units and their exponentials. With the
// kernel's weights p (1 + f):
//
//   v_j errs by sum_i (u + f) p_ij |g_i|;
//   D_i by sum_c |g_ic| (u^2 |y_ic| + sum_j (u + f) p_ij |v_jc|), since what rounding took from the
//   output was rounded in turn, and the weights that made it: but for the largest of a row, which is
//   1 before it is divided by the sum;
//   ds_ij by u |ds_ij| + p_ij (error of D_i) + f p_ij (sum_c |g_ic| |v_jc| + |D_i|), which goes into
//   q_i and k_j.
//
// Below 2^-14 numbers of f16 have a spacing of 2^-24, and rounding moves them by half of that.
Gradients16 Expected16(const Setting& s, const Numbers& x, const std::vector<double>& g,
                       const std::vector<double>& e) {
  const Problem& p = s.problem;
  const int64_t D = p.head_dim, Dv = p.value_dim;
  const double scale = 1 / std::sqrt(static_cast<double>(D)), u = UnitRoundoff(s.dtype), f = 1e-5,
               least = s.dtype == DType::kF16 ? std::ldexp(1, -25) : 0;
  const double *const all_q = x.at("q").data(), *const all_k = x.at("k").data(),
                      *const all_v = x.at("v").data();
  Gradients16 of;
  for (const char* name : {"q", "k", "v"}) of[name].resize(x.at(name).size());
  Element16 *const of_q = of["q"].data(), *const of_k = of["k"].data(),
                   *const of_v = of["v"].data();
  for (int64_t bh = 0; bh < p.batch * p.query_heads; ++bh) {
    const int64_t kv = bh / p.group();
    for (int64_t i = 0; i < s.queries(); ++i) {
      const int64_t query = bh * p.query_tokens + (s.out_by_row ? i : s.QueryToken(i));
      const double* q = all_q + (bh * p.query_tokens + s.QueryToken(i)) * D;
      const double* gi = &g[query * Dv];
      std::vector<int64_t> tokens;
      std::vector<double> weights;
      for (int64_t j = 0; j < s.keys(); ++j) {
        if (!s.Sees(bh % p.query_heads, i, j) || s.KeyToken(j) == s.hidden_key) continue;
        tokens.push_back(kv * p.kv_tokens + s.KeyToken(j));
        weights.push_back(scale * std::inner_product(q, q + D, all_k + tokens.back() * D, 0.0));
      }
      const bool is_own = !s.IsOverwritten(bh / p.query_heads, s.QueryToken(i));
      if (tokens.empty() || !is_own) continue;
      const double max = *std::max_element(weights.begin(), weights.end());
      const size_t largest = std::find(weights.begin(), weights.end(), max) - weights.begin();
      double sum = 0;
      for (double& weight : weights) sum += weight = std::exp(weight - max);
      double delta = -e[query], delta_error = 0;
      for (double& weight : weights) weight /= sum;
      for (int64_t c = 0; c < Dv; ++c) {
        double y = 0, size = 0;
        for (size_t n = 0; n < tokens.size(); ++n) {
          const double v = all_v[tokens[n] * Dv + c];
          y += weights[n] * v;
          size += (weights[n] * ((n == largest ? 0 : u) + f) + least) * std::abs(v);
        }
        delta += gi[c] * y;
        delta_error += std::abs(gi[c]) * (u * u * (std::abs(y) + size) + least + size);
      }
      for (size_t n = 0; n < tokens.size(); ++n) {
        const double weight = weights[n];
        const double* k = all_k + tokens[n] * D;
        const double* v = all_v + tokens[n] * Dv;
        double dp = 0, size = std::abs(delta);
        for (int64_t c = 0; c < Dv; ++c) {
          dp += gi[c] * v[c];
          size += std::abs(gi[c] * v[c]);
          of_v[tokens[n] * Dv + c].Add(weight, gi[c], (weight * (u + f) + least) * std::abs(gi[c]));
        }
        const double ds = weight * (dp - delta);
        const double error = u * std::abs(ds) + (1 + u) * weight * (delta_error + f * size) + least;
        for (int64_t c = 0; c < D; ++c) {
          of_q[query * D + c].Add(scale * ds, k[c], scale * error * std::abs(k[c]));
          of_k[tokens[n] * D + c].Add(scale * ds, q[c], scale * error * std::abs(q[c]));
        }
      }
    }
  }
  return of;
}

// The numbers of a setting of 16 bits, which a test may change.
struct Case16 {
  explicit Case16(const Setting& setting) : s(setting), x(DrawNumbers(setting)) {
    const Problem& p = s.problem;
    g = Draw("g", p.batch * p.query_heads * p.query_tokens * p.value_dim, 1);
    e = Draw("e", p.batch * p.query_heads * p.query_tokens, 1);
    for (auto& [name, numbers] : x) RoundTo(s.dtype, &numbers);
    RoundTo(s.dtype, &g);
  }

  double* Query(int64_t head, int64_t token) {
    return &x["q"][(head * s.problem.query_tokens + token) * s.problem.head_dim];
  }
  double* OutGradient(int64_t head, int64_t token) {
    return &g[(head * s.problem.query_tokens + token) * s.problem.value_dim];
  }
  double* Key(int64_t head, int64_t token) {
    return &x["k"][(head * s.problem.kv_tokens + token) * s.problem.head_dim];
  }
  double* Value(int64_t head, int64_t token) {
    return &x["v"][(head * s.problem.kv_tokens + token) * s.problem.value_dim];
  }

  // Holds every element of the gradients against its bound. Where the definition's is not finite, so
  // must be the engine's, and nowhere else.
  void Expect(Device device = KernelDevice()) const {
    SCOPED_TRACE(s.name + " " + s.problem.ToString() + " " + std::string(Name(s.dtype)));
    const Numbers gradients = EngineGradients(s, x, g, e, {device, 1});
    const Numbers again = EngineGradients(s, x, g, e, {device, 2});
    for (const auto& [name, gradient] : gradients) {
      ASSERT_EQ(
          std::memcmp(gradient.data(), again.at(name).data(), gradient.size() * sizeof(double)), 0)
          << name << " in another order of blocks and threads";
    }
    std::vector<double> factors = g;  // tensor cores round them
    const bool on_tensor_cores =
        device != Device::kCpu && std::max(s.problem.head_dim, s.problem.value_dim) <= 128;
    if (on_tensor_cores) RoundTo(s.dtype, &factors);
    for (const auto& [name, expected] : Expected16(s, x, factors, e)) {
      const std::vector<double>& gradient = gradients.at(name);
      ASSERT_EQ(gradient.size(), expected.size()) << name;
      double worst = 0;
      int64_t place = -1;
      for (size_t n = 0; n < expected.size(); ++n) {
        const double value = expected[n].value;
        double share = 0;
        if (!std::isfinite(value) || !std::isfinite(gradient[n])) {
          share = std::isfinite(value) == std::isfinite(gradient[n]) ? 0 : INFINITY;
        } else if (gradient[n] != value) {
          share = std::abs(gradient[n] - value) / expected[n].error;
        }
        if (share > worst) place = static_cast<int64_t>(n);
        worst = std::max(worst, share);
      }
      EXPECT_LE(worst, 1) << name << "[" << place << "] is " << gradient[place] << ", expected "
                          << expected[place].value;
    }
  }

  Setting s;
  Numbers x;
  std::vector<double> g;
  std::vector<double> e;
};

// Makes all scores of a case of 64 channels 2^18.
void MakeScoresEqual(Case16* one) {
  for (const char* name : {"q", "k"}) {
    std::vector<double>& rows = one->x[name];
    std::fill(rows.begin(), rows.end(), 0.0);
    for (size_t n = 0; n < rows.size(); n += 64) rows[n] = *name == 'q' ? 512 : 4096;
  }
}

class FlashBackward16 : public testing::TestWithParam<DType> {
 protected:
  // Returns a case of plain attention.
  static Case16 Make(const std::string& name, const Problem& problem,
                     std::function<bool(int64_t, int64_t)> sees = nullptr) {
    Setting s{name, problem};
    s.dtype = GetParam();
    if (sees != nullptr) s.sees = std::move(sees);
    return Case16(s);
  }
  // The dtypes differ in rounding alone, and kernels in their channels, up to 64 and more: where
  // rounding does not matter, each dtype has the channels of one kernel.
  static int64_t Channels(int64_t of_bf16 = 64) {
    return GetParam() == DType::kBF16 ? of_bf16 : 128;
  }
  static Problem Sized(int64_t heads, int64_t queries, int64_t keys, int64_t head_dim,
                       int64_t value_dim) {
    Problem problem = Problem::SelfAttention(1, heads, queries, head_dim, false);
    problem.kv_tokens = keys;
    problem.value_dim = value_dim;
    return problem;
  }
};
INSTANTIATE_TEST_SUITE_P(In, FlashBackward16, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& dtype) { return std::string(Name(dtype.param)); });

TEST_P(FlashBackward16, MatchesLoopsForEveryHeadDim) {
  for (const int64_t dim : {1, 7, 16, 32, 40, 64, 80, 128}) {
    Make("one size", Sized(1, 70, 90, dim, dim)).Expect();
    Make("another size of values", Sized(1, 70, 90, dim, 129 - dim)).Expect();
  }
}

TEST_P(FlashBackward16, MatchesLoopsAcrossTileEdges) {
  bool causal = GetParam() == DType::kF16;  // the dtypes take turns
  for (const int64_t queries : {1, 31, 32, 33, 63, 64, 65, 130}) {
    for (const int64_t keys : {1, 16, 63, 64, 65, 130, 200}) {
      if (causal) {
        Make("causal", Sized(1, queries, keys, 24, 16), [=](int64_t i, int64_t j) {
          return j <= i + keys - queries;
        }).Expect();
      } else {
        Make("full", Sized(1, queries, keys, 16, 24)).Expect();
      }
      causal = !causal;
    }
  }
}

TEST_P(FlashBackward16, OfGroupedHeadsAndBatches) {
  Problem problem = Problem::SelfAttention(2, 4, 90, 64, false);
  problem.kv_heads = 2;
  Make("grouped", problem).Expect();
  problem = Sized(3, 65, 90, 80, 72);
  problem.kv_heads = 1;
  Make("of one key-value head", problem, [](int64_t i, int64_t j) { return j <= i + 25; }).Expect();
}

TEST_P(FlashBackward16, OfPatternsByHead) {
  Setting s{"patterns by head", Problem::SelfAttention(2, 4, 100, 64, false)};
  s.problem.kv_heads = 2;
  s.dtype = GetParam();
  s.head_sees = [](int64_t h, int64_t i, int64_t j) {
    return h == 0 ? j <= i : h == 1 ? (i / 64 + j / 64) % 2 == 1 : h == 2 ? j >= i : j % 3 == 0;
  };
  Case16(s).Expect();
}

TEST_P(FlashBackward16, OfBandsBlocksAndRowsWithoutKeys) {
  const Problem problem = Sized(1, 210, 210, Channels(), Channels());
  Make("band", problem, [](int64_t i, int64_t j) { return j <= i && j > i - 70; }).Expect();
  Make("blocks", problem, [](int64_t i, int64_t j) { return (i / 64 + j / 64) % 2 == 0; }).Expect();
  Make("every third, and no row at all for some", problem, [](int64_t i, int64_t j) {
    return (i + j) % 3 == 0 && i % 5 != 0 && (j < 64 || j > 200);
  }).Expect();
  Make("queries of whole tiles without keys, and keys that none sees", problem,
       [](int64_t i, int64_t j) { return i >= 128 && (j < 100 || j >= 192); })
      .Expect();
  Make("no pair", problem, [](int64_t, int64_t) { return false; }).Expect();
}

TEST_P(FlashBackward16, OfOrders) {
  const int64_t dim = Channels(32);
  Setting s{"orders", Sized(1, 330, 330, dim, dim)};
  s.dtype = GetParam();
  for (int32_t n = 0; n < 110; ++n) s.query_order.push_back(n * 2 + 1);
  for (int32_t n = 0; n < 190; ++n) s.key_order.push_back(n * 77 % 170);  // some tokens twice
  s.sees = [](int64_t i, int64_t j) { return j <= 2 * i; };
  Case16(s).Expect();
  s.name = "rows of the output by place";
  s.out_by_row = true;
  s.query_order[3] = s.query_order[77] = s.query_order[100];  // one token three times
  Case16(s).Expect();
}

TEST_P(FlashBackward16, PaddingThatIsNotANumberReachesNothing) {
  const int64_t dim = Channels(40);
  for (const bool causal : {false, true}) {
    Setting s{"padding", Sized(2, 100, 77, dim, dim)};
    s.dtype = GetParam();
    s.hidden_key = 70;
    if (causal) s.sees = [](int64_t i, int64_t j) { return j <= i; };
    Case16 one(s);
    for (const int64_t head : {0, 1}) {
      one.Key(head, 70)[3] = NAN;
      one.Value(head, 70)[5] = INFINITY;
    }
    one.Expect();
  }
}

TEST_P(FlashBackward16, KeysThatNoQuerySeesReachNothing) {
  const int64_t dim = Channels();
  Case16 one = Make("hidden by the schedule", Sized(2, 100, 77, dim, dim),
                    [](int64_t i, int64_t j) { return j <= i && j != 70 && j != 20; });
  for (const int64_t head : {0, 1}) {
    one.Key(head, 70)[3] = NAN;
    one.Key(head, 20)[dim - 1] = INFINITY;
    one.Value(head, 20)[5] = NAN;
    one.Value(head, 70)[0] = -INFINITY;
  }
  one.Expect();
}

bool HasKeys(int64_t i, int64_t) { return i != 30 && i != 70; }

// Makes numbers of the two queries without keys in a case of HasKeys not finite.
void ExpectNothingOfQueriesWithoutKeys(Case16 one) {
  for (const int64_t head : {0, 1}) {
    one.Query(head, 30)[2] = NAN;
    one.OutGradient(head, 70)[1] = INFINITY;
  }
  one.Expect();
}

TEST_P(FlashBackward16, QueriesWithoutKeysReachNothing) {
  const int64_t dim = Channels();
  ExpectNothingOfQueriesWithoutKeys(Make("without keys", Sized(2, 100, 77, dim, dim), HasKeys));
}

TEST_P(FlashBackward16, QueriesThatAreNotNumbersReachTheirKeysAlone) {
  const int64_t dim = Channels();
  const auto sees = [](int64_t i, int64_t j) {
    return i == 30 || i == 70 ? j < 10 : (i + j) % 2 == 0;
  };
  Case16 query = Make("a query", Sized(2, 100, 77, dim, dim), sees);
  query.Query(1, 30)[dim - 2] = NAN;
  query.Expect();
  Case16 gradient = Make("a gradient of the output", Sized(2, 100, 77, dim, dim), sees);
  gradient.OutGradient(1, 30)[dim - 2] = NAN;
  gradient.OutGradient(0, 70)[17] = INFINITY;  // in a later step of a block
  gradient.Expect();
}

TEST_P(FlashBackward16, RowsThatAnotherCallWritesGiveNothing) {
  const int64_t dim = Channels();
  Setting s{"overwritten", Sized(2, 200, 77, dim, dim)};
  s.dtype = GetParam();
  s.overwritten = {5, 64, 199};
  for (int64_t t = 70; t < 128; ++t) s.overwritten.push_back(t);
  Case16 one(s);
  for (const int64_t head : {0, 1}) {
    one.Query(head, 64)[1] = NAN;
    one.OutGradient(head, 5)[3] = NAN;
    one.OutGradient(head, 100)[3] = INFINITY;
  }
  one.Expect();
}

// Gives some queries gradients of 0, and expects the same of the others where these hold NaN.
void ExpectNothingOfQueriesThatGiveNothing(Case16 one, int64_t dim) {
  constexpr int64_t kTokens[] = {3, 64, 99};
  for (const int64_t token : kTokens) {
    std::fill_n(one.OutGradient(0, token), dim, 0.0);
    one.e[token] = 0;
  }
  const Gradients16 expected = Expected16(one.s, one.x, one.g, one.e);
  one.Expect();
  for (const int64_t token : kTokens) one.Query(0, token)[1] = NAN;
  const Numbers gradients = EngineGradients(one.s, one.x, one.g, one.e, {KernelDevice(), 1});
  for (const auto& [name, elements] : expected) {
    for (size_t n = 0; n < elements.size(); ++n) {
      ASSERT_NEAR(gradients.at(name)[n], elements[n].value, elements[n].error) << name << n;
    }
  }
}

TEST_P(FlashBackward16, AQueryThatGivesNothingMayHoldAnything) {
  const int64_t dim = Channels();
  ExpectNothingOfQueriesThatGiveNothing(Make("gradients of 0", Sized(1, 100, 77, dim, dim)), dim);
}

// Such a query has no weights, and the infinite gradient of its output gives a D that is no number.
TEST_P(FlashBackward16, AQueryWhoseScoresAreAllMinusInfinityReachesNothing) {
  Case16 one = Make("scores of -inf", Sized(1, 64, 64, 64, 64));
  for (int64_t key = 0; key < 64; ++key) *one.Key(0, key) = -1;
  std::fill_n(one.OutGradient(0, 30), 64, 0.0);
  one.e[30] = 0;
  const Numbers expected = EngineGradients(one.s, one.x, one.g, one.e, {KernelDevice(), 1});
  std::fill_n(one.Query(0, 30), 64, 0.0);
  *one.Query(0, 30) = *one.OutGradient(0, 30) = INFINITY;
  EXPECT_EQ(EngineGradients(one.s, one.x, one.g, one.e, {KernelDevice(), 1}), expected);
}

TEST_P(FlashBackward16, GradientsAreAddedToWhatIsThere) {
  const Case16 one = Make("sums", Sized(2, 70, 90, 40, 24));
  Place place = {KernelDevice(), 1};
  const Numbers gradients = EngineGradients(one.s, one.x, one.g, one.e, place);
  place.begin = 4;
  const Numbers sums = EngineGradients(one.s, one.x, one.g, one.e, place);
  for (const auto& [name, gradient] : gradients) {
    for (size_t n = 0; n < gradient.size(); ++n) {
      ASSERT_FLOAT_EQ(static_cast<float>(sums.at(name)[n]), static_cast<float>(gradient[n]) + 4)
          << name << n;
    }
  }
}

TEST_P(FlashBackward16, OfLargeScores) {
  Case16 one = Make("large scores", Sized(1, 100, 100, 64, 64));
  for (double& q : one.x["q"]) q *= 32;
  one.Expect();
}

// Scores of -200 have a log-sum-exp below -190: weights of keys that do not exist, whose scores are 0,
// would be infinite.
TEST_P(FlashBackward16, OfScoresFarBelowZero) {
  for (const int64_t hidden_key : {-1, 30}) {
    Setting s{"far below 0", Sized(1, 70, 90, 64, 64)};
    s.dtype = GetParam();
    s.hidden_key = hidden_key;
    Case16 one(s);
    for (const auto& [name, first] : {std::pair<const char*, double>{"q", 40}, {"k", -40}}) {
      std::vector<double>& rows = one.x[name];
      for (size_t n = 0; n < rows.size(); n += 64) rows[n] = first;
    }
    one.Expect();
  }
}

// All scores are 2^18, and the log-sum-exp is 2^18 + log(100), of which f32 keeps a multiple of 2^-5:
// without what rounding took from it weights would be wrong by a hundredth.
TEST_P(FlashBackward16, OfLogSumExpsThatRoundingChanges) {
  Case16 one = Make("equal scores", Sized(1, 70, 100, 64, 64));
  MakeScoresEqual(&one);
  one.Expect();
}

// A query's own key has nearly all of its weight, and D_i is nearly g_i . v_i: of an output of 16 bits
// alone, D_i would be off by more than what is left of (g_i . v_i - D_i).
TEST_P(FlashBackward16, OfOneKeyOfNearlyAllWeight) {
  for (const Device device : {Device::kCpu, KernelDevice()}) {
    for (const auto& [dim, value_dim] :
         {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {80, 37}, {136, 136}}) {
      for (const bool causal : {false, true}) {
        Case16 one = Make("one key", Sized(1, 100, 100, dim, value_dim),
                          [=](int64_t i, int64_t j) { return !causal || j <= i; });
        // The own key's score is 12.
        const double factor = 12 / std::sqrt(static_cast<double>(dim));
        for (double& k : one.x["q"]) k *= std::sqrt(factor);
        RoundTo(GetParam(), &one.x["q"]);
        one.x["k"] = one.x["q"];
        one.Expect(device);
        one.s.has_f32_gradient = true;
        one.g = Draw("g", static_cast<int64_t>(one.g.size()), 1);
        RoundTo(DType::kF32, &one.g);
        one.Expect(device);
      }
    }
  }
}

// Returns the kernels that a case runs in the simulator, and the wavefronts that bank conflicts add.
std::pair<std::set<std::string>, int64_t> KernelsOf(const Case16& one) {
  cuda_simulator::TakeBankUses();
  Place place = {KernelDevice(), 1};
  place.counts_banks = true;
  EngineGradients(one.s, one.x, one.g, one.e, place);
  std::set<std::string> kernels;
  int64_t extra = 0;
  for (const cuda_simulator::BankUse& use : cuda_simulator::TakeBankUses()) {
    kernels.insert(use.kernel);
    if (use.kernel == "FlashKeysMma" || use.kernel == "FlashQueriesMma") {
      extra += use.extra;
      if (use.extra > 0) {
        std::cout << use.kernel << " " << use.source << (use.is_store ? " stores" : " loads")
                  << ": " << use.accesses << " accesses, " << use.wavefronts << " wavefronts, "
                  << use.extra << " of conflicts\n";
      }
    }
  }
  return {kernels, extra};
}

TEST_P(FlashBackward16, PlainCallsOfUpTo128ChannelsRunOnTensorCoresWithoutBankConflicts) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone names kernels";
  for (const int64_t dim : {16, 32, 40, 64, 80, 128}) {
    const auto [kernels, extra] = KernelsOf(
        Make("plain", Sized(1, 130, 130, dim, dim), [](int64_t i, int64_t j) { return j <= i; }));
    EXPECT_EQ(kernels.count("FlashKeysMma") + kernels.count("FlashQueriesMma"), 2u) << dim;
    EXPECT_EQ(kernels.count("FlashKeys") + kernels.count("FlashQueries"), 0u) << dim;
    EXPECT_EQ(extra, 0) << dim;
  }
  for (const auto& [dim, value_dim] : {std::pair<int64_t, int64_t>{129, 8}, {8, 129}}) {
    const auto [kernels, extra] = KernelsOf(Make("wide", Sized(1, 10, 10, dim, value_dim)));
    EXPECT_EQ(kernels.count("FlashKeysMma") + kernels.count("FlashQueriesMma"), 0u) << dim;
    EXPECT_EQ(kernels.count("FlashKeys") + kernels.count("FlashQueries"), 2u) << dim;
  }
  Setting rule{"with a rule", Sized(1, 10, 10, 16, 16)};
  rule.dtype = GetParam();
  for (const char* term : {"bias", "u"}) {
    rule.terms = {term};
    const std::set<std::string> kernels = KernelsOf(Case16(rule)).first;
    EXPECT_EQ(kernels.count("FlashKeysMma") + kernels.count("FlashQueriesMma"), 0u) << term;
  }
}

// ---- Products in fp32, and all kinds of calls ----

// Every term of a score but the soft span, which has no gradient by a table.
const std::vector<std::string> kTerms = {"bias", "factor", "r", "l", "c", "u", "w"};

Problem Sized(int64_t heads, int64_t queries, int64_t keys, int64_t head_dim, int64_t value_dim) {
  Problem problem = Problem::SelfAttention(1, heads, queries, head_dim, false);
  problem.kv_tokens = keys;
  problem.value_dim = value_dim;
  return problem;
}

// Kernels have 64, 128 or 256 channels; with more than 64, queries and gradients take turns in shared memory.
TEST_P(FlashBackward, OfEveryHeadDim) {
  for (const auto& [head_dim, value_dim] :
       {std::pair<int64_t, int64_t>{65, 30}, {40, 128}, {129, 70}, {20, 256}}) {
    Setting s{"wide", Sized(1, 70, 90, head_dim, value_dim)};
    s.sees = [](int64_t i, int64_t j) { return j <= i + 20; };
    ExpectGradients(s, GetParam());
    s.terms = kTerms;
    s.farthest = 20;
    ExpectGradients(s, GetParam());
  }
}

TEST_P(FlashBackward, OfTermsWithGroupedHeadsThatSeeOtherKeysAndBatches) {
  Setting s{"grouped", Problem::SelfAttention(2, 4, Tokens(130, 100), 8, false)};
  s.problem.kv_heads = 2;
  s.problem.kv_tokens = 70;
  s.head_sees = [](int64_t h, int64_t i, int64_t j) {
    return h == 0 ? j <= i : h == 1 ? (i / 64 + j / 64) % 2 == 1 : h == 2 ? j >= i : j % 3 == 0;
  };
  s.farthest = 20;
  for (const std::vector<std::string>& terms :
       {std::vector<std::string>(), kTerms, {"u", "span"}, {"l", "w"}}) {
    s.terms = terms;
    ExpectGradients(s, GetParam());
  }
}

TEST_P(FlashBackward, OfTermsWhereQueriesFollowOtherKeys) {
  Setting s{"after 75 keys", Sized(2, 70, 145, 8, 8)};
  s.query_position = 75;
  s.sees = [](int64_t i, int64_t j) { return j <= i + 75; };
  s.farthest = 90;
  s.terms = kTerms;
  ExpectGradients(s, GetParam());
}

TEST_P(FlashBackward, OfTokenRules) {
  for (const bool causal : {false, true}) {
    const auto tokens = static_cast<int32_t>(Tokens(130, 70));
    Setting s{causal ? "causal" : "full", Problem::SelfAttention(1, 4, tokens, 8, false)};
    s.problem.kv_heads = 2;
    s.has_token_rule = true;
    if (causal) s.sees = [](int64_t i, int64_t j) { return j <= i; };
    ExpectGradients(s, GetParam());
    s.terms = {"bias", "r", "w", "l"};
    ExpectGradients(s, GetParam());
    s.terms = {};
    for (int32_t n = 0; n < 90; ++n) s.key_order.push_back(n * 41 % tokens);
    ExpectGradients(s, GetParam());
  }
}

TEST_P(FlashBackward, AGradientThatIsLeftOutChangesNoOther) {
  Setting s{"left out", Sized(2, 70, 90, 8, 8)};
  for (const bool has_span : {false, true}) {
    s.terms = kTerms;
    s.farthest = 20;
    if (has_span) s.terms.push_back("span");
    const Problem& p = s.problem;
    const Numbers x = DrawNumbers(s);
    const std::vector<double> g = Draw("g", p.query_heads * p.query_tokens * p.value_dim, 1);
    const std::vector<double> e = Draw("e", p.query_heads * p.query_tokens, 1);
    s.left_out.clear();
    const Numbers expected = EngineGradients(s, x, g, e, {GetParam(), 1});
    for (const auto& [only, gradient] : expected) {
      s.left_out.clear();
      for (const auto& [name, unused] : expected) {
        if (name != only) s.left_out.insert(name);
      }
      const Numbers alone = EngineGradients(s, x, g, e, {GetParam(), 1});
      ASSERT_EQ(alone.size(), 1u);
      // Sums may be made in another order, which moves elements by some units in the last place.
      std::vector<double> difference = gradient;
      for (size_t n = 0; n < gradient.size(); ++n) difference[n] -= alone.at(only)[n];
      EXPECT_LE(Norm(difference), 1e-6 * Norm(gradient)) << only;
    }
  }
}

TEST_P(FlashBackward, GradientsOfTermsAreAddedToWhatIsThere) {
  Setting s{"sums", Sized(2, 70, 90, 8, 8)};
  s.terms = kTerms;
  s.terms.push_back("span");
  s.farthest = 180;  // so that every relative key has an offset of its own
  const Problem& p = s.problem;
  const Numbers x = DrawNumbers(s);
  const std::vector<double> g = Draw("g", p.query_heads * p.query_tokens * p.value_dim, 1);
  const std::vector<double> e = Draw("e", p.query_heads * p.query_tokens, 1);
  Place place = {GetParam(), 1};
  const Numbers gradients = EngineGradients(s, x, g, e, place);
  place.begin = 4;
  const Numbers sums = EngineGradients(s, x, g, e, place);
  for (const auto& [name, gradient] : gradients) {
    for (size_t n = 0; n < gradient.size(); ++n) {
      if ((name == "bias" || name == "factor") && gradient[n] == 0) continue;  // may be no entry
      // Sums in parts round what was there before once a part.
      ASSERT_NEAR(sums.at(name)[n], gradient[n] + 4, 1e-6 * (std::abs(gradient[n]) + 4) * 4)
          << name << n;
    }
  }
}

class FlashBackwardF32 : public testing::Test {
 protected:
  static Case16 Make(const std::string& name, const Problem& problem,
                     std::function<bool(int64_t, int64_t)> sees = nullptr) {
    Setting s{name, problem};
    if (sees != nullptr) s.sees = std::move(sees);
    return Case16(s);
  }
};

TEST_F(FlashBackwardF32, OfOrdersWithRowsOfTheOutputByPlace) {
  Setting s{"by place", Sized(1, 330, 330, 16, 24)};
  for (int32_t n = 0; n < 150; ++n) s.query_order.push_back(n * 2 + 1);
  s.query_order[3] = s.query_order[77] = s.query_order[100];  // one token three times
  for (int32_t n = 0; n < 300; ++n) s.key_order.push_back(n * 77 % 289);
  s.sees = [](int64_t i, int64_t j) { return j <= 2 * i; };
  s.out_by_row = true;
  Case16(s).Expect();
}

TEST_F(FlashBackwardF32, RowsThatAnotherCallWritesGiveNothing) {
  for (const int64_t dim : {16, 80}) {
    Setting s{"overwritten", Sized(2, 200, 77, dim, dim)};
    s.overwritten = {5, 64, 199};
    for (int64_t t = 70; t < 128; ++t) s.overwritten.push_back(t);
    for (int64_t t = 128; t < 160; ++t) s.overwritten.push_back(t);  // half a tile
    Case16 one(s);
    for (const int64_t head : {0, 1}) {
      one.Query(head, 64)[1] = NAN;
      one.OutGradient(head, 5)[3] = NAN;
      one.OutGradient(head, 100)[3] = INFINITY;
    }
    one.Expect();
    one.s.sees = [](int64_t i, int64_t j) { return j <= i; };
    one.Expect();
  }
}

TEST_F(FlashBackwardF32, NumbersThatAreNotFiniteReachWhatSeesThemAlone) {
  for (const int64_t dim : {16, 80}) {
    const auto sees = [](int64_t i, int64_t j) { return i == 30 ? j < 10 : (i + j) % 2 == 0; };
    Case16 query = Make("a query", Sized(2, 100, 77, dim, dim), sees);
    query.Query(1, 30)[dim - 2] = NAN;
    query.Expect();
    Case16 gradient = Make("a gradient of the output", Sized(2, 100, 77, dim, dim), sees);
    gradient.OutGradient(1, 30)[dim - 2] = NAN;
    gradient.OutGradient(0, 30)[dim - 3] = INFINITY;
    gradient.Expect();
    ExpectNothingOfQueriesWithoutKeys(Make("without keys", Sized(2, 100, 77, dim, dim), HasKeys));
  }
}

TEST_F(FlashBackwardF32, AQueryThatGivesNothingMayHoldAnything) {
  ExpectNothingOfQueriesThatGiveNothing(Make("gradients of 0", Sized(1, 100, 77, 16, 16)), 16);
}

// The log-sum-exp of a row may have a gradient where the output has none.
TEST_F(FlashBackwardF32, OfALogSumExpAlone) {
  Case16 one = Make("gradients of the log-sum-exp", Sized(1, 130, 130, 16, 16));
  std::fill(one.g.begin(), one.g.end(), 0.0);
  one.Expect();
}

// As In/FlashBackward16.OfLogSumExpsThatRoundingChanges.
TEST_F(FlashBackwardF32, OfLogSumExpsThatRoundingChanges) {
  Case16 one = Make("equal scores", Sized(1, 70, 100, 64, 64));
  MakeScoresEqual(&one);
  one.Expect();
}

// Returns a setting of a list of queries (FlashCall::asked): few and late ones in batch row 0, none in
// row 1, and three of four in row 2, whose last tile is whole where the list is to end with a tile.
Setting Listed(const std::string& name, int64_t dim, const Band& band,
               bool ends_with_tile = false) {
  Setting s{name, Sized(2, 200, 270, dim, dim)};
  s.problem.kv_heads = 1;
  s.problem.batch = 3;
  s.asked_band = band;
  s.sees = [band](int64_t i, int64_t j) {
    return j >= band.first_key && j - i >= band.low && j - i <= band.high;
  };
  const int64_t end = ends_with_tile ? 171 : 200;  // 128 or 150 queries
  s.is_overwritten = [end](int64_t b, int64_t i) {
    return b == 0 ? i < 100 || i >= 180 || i % 2 == 1 : b == 1 || i % 4 == 1 || i >= end;
  };
  return s;
}

// Gives a setting of a list an order of its queries, and rows of the output by place. The places that
// name other tokens than their own are listed in batch rows 0 and 2, as these tokens are.
Setting Ordered(Setting s) {
  s.query_order.resize(s.problem.query_tokens);
  std::iota(s.query_order.begin(), s.query_order.end(), 0);
  std::swap(s.query_order[102], s.query_order[104]);
  s.query_order[106] = s.query_order[110];
  s.out_by_row = true;
  return s;
}

TEST_F(FlashBackwardF32, OfListedQueries) {
  // In batch row 2 query 170 ends a tile, and sees key 256, with which a tile begins; query 86 begins
  // a tile, and sees key 63, with which one ends.
  Band causal, window;
  causal.high = window.high = 256 - 170;
  window.low = 63 - 86;
  window.first_key = 5;
  for (const Band& band : {causal, window}) {
    Case16(Listed("a list", 16, band, /*ends_with_tile=*/true)).Expect();
    Case16(Ordered(Listed("a list and an order", 80, band))).Expect();
  }
  Setting relative = Listed("relative keys", 16, window);
  relative.terms = {"u", "w", "r"};
  relative.farthest = 40;
  ExpectGradients(relative, KernelDevice());
  Setting with_bias = Listed("not packed", 16, causal);
  with_bias.terms = {"bias"};
  ExpectGradients(with_bias, KernelDevice());
  // So few queries are not packed.
  Setting s = Listed("a short list", 16, causal);
  s.problem.query_tokens = 3;
  s.is_overwritten = [](int64_t, int64_t i) { return i == 1; };
  Case16(s).Expect();
}

TEST_P(FlashBackward16, OfListedQueries) {
  Band causal;
  causal.high = 70;
  Setting s = Ordered(Listed("a list and an order", 64, causal));
  s.dtype = GetParam();
  Case16(s).Expect();
}

// Returns the work of a backward pass with a list of queries. Of those of batch row 2 the first tile,
// up to query 84, sees no key, and the last, of queries 171 to 199, all of keys 192 to 255. A tile that
// is taken for nothing changes no gradient, but these numbers.
std::string WorkOfList(DType dtype, const std::vector<std::string>& terms) {
  Band window;
  window.first_key = 170;
  window.low = -20;
  window.high = 84;
  Setting s = Listed("a list", 16, window);
  s.dtype = dtype;
  s.terms = terms;
  s.farthest = 40;
  const Case16 one(s);
  std::string work;
  Place place = {KernelDevice(), 1};
  place.work = &work;
  EngineGradients(one.s, one.x, one.g, one.e, place);
  return work;
}

TEST(FlashBackwardCall, TheWorkOfAListIsAsOnRecord) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts work";
  EXPECT_EQ(WorkOfList(DType::kF32, {}), "3 launches, 339 blocks, 349 barriers, 7308 collectives");
  EXPECT_EQ(WorkOfList(DType::kF32, {"u", "w", "r"}),
            "8 launches, 369 blocks, 1199 barriers, 7452 collectives");
  EXPECT_EQ(WorkOfList(DType::kBF16, {}),
            "3 launches, 339 blocks, 237 barriers, 21106 collectives");
}

// A block may go through several tiles of queries of which none has a gradient.
TEST_F(FlashBackwardF32, TilesThatAnotherCallWritesInOneBatchRowGiveNothing) {
  for (const std::vector<std::string>& terms : {std::vector<std::string>(), {"u", "bias"}}) {
    Setting s{"overwritten in batch row 1", Sized(2, 210, 70, 16, 16)};
    s.problem.batch = 2;
    s.terms = terms;
    s.overwritten_batch = 1;
    for (int64_t t = 60; t < 200; ++t) s.overwritten.push_back(t);
    if (terms.empty()) {
      Case16(s).Expect();
    } else {
      ExpectGradients(s, KernelDevice());
    }
  }
}

// Scores of a query that is not a number are none either, and so are the gradients of the relative
// keys in them; those of the others are what they are without the query.
TEST_F(FlashBackwardF32, AQueryThatIsNotANumberReachesTheRelativeKeysOfItsPairsAlone) {
  Setting s{"relative keys", Sized(1, 130, 130, 16, 16)};
  s.terms = {"r"};
  s.sees = [](int64_t i, int64_t j) { return std::abs(j - i) <= (i == 70 ? 5 : 30); };
  Case16 one(s);
  one.Query(0, 70)[2] = NAN;
  const Numbers gradients = EngineGradients(one.s, one.x, one.g, one.e, {KernelDevice(), 1});
  std::fill_n(one.Query(0, 70), 16, 0.0);
  std::fill_n(one.OutGradient(0, 70), 16, 0.0);
  one.e[70] = 0;
  const Numbers without = EngineGradients(one.s, one.x, one.g, one.e, {KernelDevice(), 1});
  const std::vector<double>&of_keys = gradients.at("r"), &expected = without.at("r");
  for (int64_t offset = -s.farthest; offset <= s.farthest; ++offset) {
    for (int64_t c = 0; c < 16; ++c) {
      const int64_t n = s.KeyOf(offset) * 16 + c;
      if (std::abs(offset) <= 5) {
        EXPECT_TRUE(std::isnan(of_keys[n])) << offset;
      } else {
        EXPECT_EQ(of_keys[n], expected[n]) << offset;
      }
    }
  }
}

TEST_P(FlashBackward, OfOrdersInBatchesWithGroupedHeads) {
  Setting s{"orders", Problem::SelfAttention(2, 4, 130, 8, false)};
  s.problem.kv_heads = 2;
  s.problem.value_dim = 5;
  for (int32_t n = 0; n < 70; ++n) s.query_order.push_back((n * 41 + 7) % 130);
  for (int32_t n = 0; n < 90; ++n) s.key_order.push_back(n * 77 % 67);  // some tokens twice
  s.sees = [](int64_t i, int64_t j) { return j <= i + 20; };
  ExpectGradients(s, GetParam());
}

TEST_F(FlashBackwardF32, KeysThatNoQueryOrNotAllQueriesSeeReachNothingElse) {
  const auto sees = [](int64_t i, int64_t j) { return j <= i && j != 20; };
  for (const int64_t dim : {16, 80}) {
    Case16 one = Make("hidden by the schedule", Sized(2, 100, 77, dim, dim), sees);
    for (const int64_t head : {0, 1}) {
      one.Key(head, 20)[dim - 1] = INFINITY;
      one.Value(head, 20)[5] = NAN;
    }
    one.Key(1, 70)[3] = NAN;  // queries before it do not see it
    one.Expect();
  }
  Setting s{"with a content bias", Sized(1, 130, 130, 16, 16)};
  s.terms = {"u"};
  s.sees = sees;
  Case16 one(s);
  const Numbers expected = EngineGradients(one.s, one.x, one.g, one.e, {KernelDevice(), 1});
  one.Key(0, 20)[3] = NAN;
  EXPECT_EQ(EngineGradients(one.s, one.x, one.g, one.e, {KernelDevice(), 1}), expected);
}

}  // namespace
}  // namespace tfb
