// Tests engine flash's backward pass against central differences of the formula in float64, term by
// term: see core/flash/flash.h.
#include "core/flash/flash_backward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/cuda/mirror.h"
#include "core/cuda/simulator/simulator.h"
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
  int64_t hidden_key = -1;                // is padding
  std::vector<int32_t> query_order = {};  // tokens by place; -1 for none
  std::vector<int32_t> key_order = {};
  DType dtype = DType::kF32;
  int64_t farthest = 50;            // offset of the farthest relative keys
  int64_t clip = int64_t{1} << 20;  // those beyond this distance are the one at this distance

  bool Has(const std::string& term) const {
    return std::find(terms.begin(), terms.end(), term) != terms.end();
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
  int64_t KeyToken(int64_t place) const { return key_order.empty() ? place : key_order[place]; }
  // Returns the number of an offset's relative key.
  int64_t KeyOf(int64_t offset) const {
    const int64_t last = std::min(clip, farthest);
    return std::min(std::max(offset, -last), last) + farthest;
  }
};

constexpr double kRamp = 40;

int Id(int64_t token) { return static_cast<int>(token % 3 == 0); }

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
  const auto at = [&](const char* name, int64_t n) {
    const auto found = x.find(name);
    return found == x.end() ? 0.0 : found->second[n];
  };
  double loss = 0;
  for (int64_t bh = 0; bh < p.batch * p.query_heads; ++bh) {
    const int64_t h = bh % p.query_heads, kv = bh / p.group();
    for (int64_t i = 0; i < s.queries(); ++i) {
      const int64_t a = s.QueryToken(i);
      if (a < 0) continue;
      double sum = 0, max = -std::numeric_limits<double>::infinity();
      std::vector<double> scores, ramps;
      std::vector<int64_t> tokens;
      for (int64_t j = 0; j < s.keys(); ++j) {
        const int64_t b = s.KeyToken(j);
        if (!s.sees(i, j) || b == s.hidden_key) continue;
        double ramp = 1;
        if (s.Has("span")) {
          const double z = at("span", bh * s.queries() + i);
          const double distance = static_cast<double>(i + p.causal_offset() - j);
          ramp = std::min(1.0, std::max(0.0, (kRamp + z - distance) / kRamp));
          if (ramp == 0) continue;
        }
        double score = 0;
        for (int64_t c = 0; c < D; ++c) {
          const double q = at("q", (bh * p.query_tokens + a) * D + c);
          score += (q + at("u", h * D + c)) * at("k", (kv * p.kv_tokens + b) * D + c);
          const double positioned = q + at("w", h * D + c);
          if (s.Has("r") && std::abs(j - i) <= s.farthest) {
            score += positioned * at("r", (h * (2 * s.farthest + 1) + s.KeyOf(j - i)) * D + c);
          }
          if (s.Has("l")) score += positioned * at("l", (h * 2 + (Id(a) == Id(b))) * D + c);
        }
        if (s.Has("c")) score += at("c", h * 2 + (Id(a) == Id(b)));
        score *= scale;
        const int64_t offset = h * offsets + j - i + p.query_tokens;
        if (s.Has("factor")) score = std::max(score, 0.0) * at("factor", offset);
        if (s.Has("bias")) score += at("bias", offset);
        scores.push_back(score);
        ramps.push_back(ramp);
        tokens.push_back(b);
        max = std::max(max, score);
      }
      if (scores.empty()) continue;
      for (size_t n = 0; n < scores.size(); ++n) sum += ramps[n] * std::exp(scores[n] - max);
      loss += e[bh * p.query_tokens + a] * (max + std::log(sum));
      for (size_t n = 0; n < scores.size(); ++n) {
        const double weight = ramps[n] * std::exp(scores[n] - max) / sum;
        for (int64_t c = 0; c < p.value_dim; ++c) {
          loss += weight * g[(bh * p.query_tokens + a) * p.value_dim + c] *
                  at("v", (kv * p.kv_tokens + tokens[n]) * p.value_dim + c);
        }
      }
    }
  }
  return loss;
}

class FromFunction : public Pattern {
 public:
  explicit FromFunction(const Setting& setting) : setting_(setting) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    for (int64_t j = 0; j < setting_.keys(); ++j) {
      if (setting_.sees(i, j)) keys->Add(j, j + 1);
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
};

// A forward and a backward call, whose views, orders and sums are in host memory.
struct Calls {
  FlashCall forward;
  FlashBackwardCall backward;
  ConstTensorView log_sum_exp_gradient;
};

// Runs the calls on a CUDA device, with copies of what they name.
absl::Status RunOnCuda(const Setting& s, const Problem& problem, const ScoreRule& rule,
                       const Calls& host, std::map<std::string, std::vector<float>>* sums,
                       int seed) {
  if (KernelDevice() == Device::kSimulator) {
    cuda_simulator::Settings settings;
    settings.seed = seed;
    cuda_simulator::Configure(settings);
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(KernelDevice()));
  TFB_ASSIGN_OR_RETURN(const FlashEngine engine,
                       FlashEngine::Create(KernelDevice(), problem, FromFunction(s), rule));
  TFB_ASSIGN_OR_RETURN(
      const FlashBackwardCuda backward,
      FlashBackwardCuda::Create(runtime, problem, BuildSchedule(problem, FromFunction(s)), rule));
  DeviceMirror mirror(runtime);
  FlashCall call = engine.NewCall();
  for (ConstTensorView FlashCall::*view :
       {&FlashCall::q, &FlashCall::k, &FlashCall::v, &FlashCall::key_mask, &FlashCall::query_ids,
        &FlashCall::key_ids}) {
    TFB_ASSIGN_OR_RETURN(call.*view, mirror.Copy(host.forward.*view));
  }
  for (TensorView FlashCall::*view :
       {&FlashCall::out, &FlashCall::log_sum_exp, &FlashCall::log_sum_exp_rest}) {
    TFB_ASSIGN_OR_RETURN(call.*view, mirror.CopyForWriting(host.forward.*view));
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
  TFB_RETURN_IF_ERROR(copy_order(s.key_order, &call.key_order));

  FlashBackwardCall of_device = host.backward;
  of_device.forward = &call;
  TFB_ASSIGN_OR_RETURN(of_device.out_gradient, mirror.Copy(host.backward.out_gradient));
  TFB_ASSIGN_OR_RETURN(const ConstTensorView log_sum_exp_gradient,
                       mirror.Copy(host.log_sum_exp_gradient));
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
  TFB_RETURN_IF_ERROR(
      FlashRowNumbers(runtime, of_device, call.out, log_sum_exp_gradient, {}, true, execution));
  TFB_RETURN_IF_ERROR(backward.Run(problem, of_device, execution));
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
  FlashDelta(calls.forward.out, calls.backward.out_gradient, calls.log_sum_exp_gradient,
             delta.view(), &pool);
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
      return static_cast<float>(x.at(name)[h * offsets + offset + p.query_tokens]);
    };
  };
  ScoreRule rule;
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
    factor = DistanceTable(p.query_heads, s.queries(), s.keys(), table("factor"));
    rule.relu_multiplier = factor.entries();
  }
  if (s.Has("bias")) {
    bias = DistanceTable(p.query_heads, s.queries(), s.keys(), table("bias"));
    rule.bias = bias.entries();
  }
  if (s.Has("span")) {
    rule.soft_span = {
        span.data(), static_cast<int64_t>(span.size()), p.query_heads * s.queries(), s.queries(), 1,
        kRamp};
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
               out_gradient = TensorFrom(g, of_out, s.dtype),
               lse_gradient = TensorFrom(e, of_rows, DType::kF32);
  Tensor out(s.dtype, of_out), lse(DType::kF32, of_rows), rest(DType::kF32, of_rows),
      mask(DType::kU8, {p.batch, p.kv_tokens}),
      ids(DType::kI32, {p.batch, std::max(p.query_tokens, p.kv_tokens)});
  for (Tensor* tensor : {&out, &lse, &rest}) Fill(tensor->view(), 0);
  Fill(mask.view(), 1);
  for (int64_t b = 0; b < p.batch; ++b) {
    if (s.hidden_key >= 0) *mask.view().MutableAt<uint8_t>(b, s.hidden_key) = 0;
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
  call.log_sum_exp = lse.view();
  call.log_sum_exp_rest = rest.view();
  if (!s.query_order.empty()) call.query_order = {s.query_order.data(), 0, 0};
  if (!s.key_order.empty()) call.key_order = {s.key_order.data(), 0, 0};
  std::map<std::string, std::vector<float>> sums;
  const auto sum = [&](const char* name, int64_t count) {
    return (sums[name] = std::vector<float>(count)).data();
  };
  const int64_t row = RoundUp(p.head_dim, 16);
  calls.log_sum_exp_gradient = lse_gradient.view();
  FlashBackwardCall& backward = calls.backward;
  backward.out_gradient = out_gradient.view();
  backward.q_gradient = TensorView(sum("q", q.num_elements()), DType::kF32, of_q);
  backward.k_gradient = TensorView(sum("k", k.num_elements()), DType::kF32, of_k);
  backward.v_gradient = TensorView(sum("v", v.num_elements()), DType::kF32, of_v);
  if (s.Has("u")) backward.terms.content_bias = sum("u", u.size());
  if (s.Has("w")) backward.terms.position_bias = sum("w", w.size());
  if (s.Has("r")) {
    backward.terms.relative_keys = sum("r", p.query_heads * (2 * s.farthest + 1) * row);
  }
  if (s.Has("l")) backward.terms.label_keys = sum("l", l.size());
  if (s.Has("c")) backward.terms.label_biases = sum("c", c.size());
  if (s.Has("factor")) {
    backward.terms.relu_multiplier = sum("factor", p.query_heads * factor.entries().row);
  }
  if (s.Has("bias")) backward.terms.bias = sum("bias", p.query_heads * bias.entries().row);
  if (s.Has("span")) backward.terms.span = sum("span", span.size());
  const absl::Status status = place.device == Device::kCpu
                                  ? RunOnCpu(s, of_places, engine, calls, place.threads)
                                  : RunOnCuda(s, of_places, rule, calls, &sums, place.threads);
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
          of[h * offsets + o + p.query_tokens] = values[h * entries.row + entries.zero + o];
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
  for (const int threads : {2, 3}) {
    ASSERT_EQ(EngineGradients(s, x, g, e, {device, threads}), gradients) << threads;
  }
  for (const auto& [name, gradient] : gradients) {
    ASSERT_EQ(gradient.size(), x.at(name).size()) << name;
    double norm = Norm(gradient);
    ASSERT_TRUE(std::isfinite(norm)) << name;
    for (int trial = 0; trial < (s.terms.empty() ? 2 : 1); ++trial) {
      const std::vector<double> d = Draw(name + std::to_string(trial), gradient.size(), 1);
      const double length = Norm(d), h = 1e-6;
      const auto moved = [&](double step) {
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

class FlashBackward : public testing::TestWithParam<Device> {};
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
  Setting s{"causal", Problem::SelfAttention(1, 2, 330, 16, false)};
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

TEST_P(FlashBackward, OfEachTermAndOfAll) {
  const std::vector<std::vector<std::string>> all = {
      {"u"},           {"r"},
      {"r", "w"},      {"l"},
      {"l", "c", "w"}, {"bias"},
      {"factor"},      {"span"},
      {"u", "w", "r"}, {"bias", "factor", "r", "l", "c", "u", "w"}};
  for (const std::vector<std::string>& terms : all) {
    for (const bool causal : {false, true}) {
      Setting s;
      s.terms = terms;
      s.name = causal ? "causal" : "full";
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
      Setting s{"other numbers of keys", Problem::SelfAttention(2, 2, queries, 8, false)};
      s.problem.kv_tokens = 220 - queries;
      s.terms = terms;
      ExpectGradients(s, GetParam());
    }
  }
}

TEST_P(FlashBackward, OfRelativeKeysThatAreTheSameBeyondADistance) {
  for (const int64_t clip : {0, 3, 16, 40}) {
    for (const bool causal : {false, true}) {
      Setting s{"beyond " + std::to_string(clip), Problem::SelfAttention(1, 2, 150, 16, false)};
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
  Setting s{"padding"};
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

}  // namespace
}  // namespace tfb
