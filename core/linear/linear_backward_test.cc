// Tests the backward pass of engine linear, on the CPU and on CUDA devices in the simulator, against
// central differences of the formula of linear.h in float64, evaluated pair by pair.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/mirror.h"
#include "core/cuda/simulator/simulator.h"
#include "core/linear/linear.h"
#include "core/linear/linear_cuda.h"
#include "core/linear/linear_layer.h"
#include "core/linear/linear_testing.h"
#include "core/random.h"
#include "core/status.h"
#include "core/tested_devices.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// The inputs and the gradients of the outputs in float64, by name: q, k, v, w, gate; out and
// log_sum_exp.
using Reals = std::map<std::string, std::vector<double>>;

std::vector<double> RealsOf(const Tensor& tensor) {
  std::vector<double> reals(tensor.num_elements());
  for (int64_t n = 0; n < tensor.num_elements(); ++n) reals[n] = tensor.view().Get(n);
  return reals;
}

double Norm(const double* x, int64_t count) {
  double square = 0;
  for (int64_t n = 0; n < count; ++n) square += x[n] * x[n];
  return std::sqrt(square);
}

// One row of queries and the keys that it sees.
struct Row {
  std::vector<int64_t> keys;
  std::vector<double> weights;  // a_ij, not divided by D_i
  std::vector<double> decays;   // the factor of the gates in each
  std::vector<double> phi;      // features of the query
  double query_s = 0;           // s and S_i, 0 without stabiliser
  double key_s = 0;
  double denominator = 0;
  bool is_held = false;  // by the floor
  std::vector<double> y;
  double log_sum_exp = 0;
};

// The formula.
class Formula {
 public:
  Formula(const LinearCase& c, const LinearTensors& tensors, const Reals& reals)
      : p_(c.problem),
        map_(c.map),
        tensors_(tensors),
        q_(DataOf(reals, "q")),
        k_(DataOf(reals, "k")),
        v_(DataOf(reals, "v")),
        w_(DataOf(reals, "w")),
        gate_(DataOf(reals, "gate")) {
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.kv_heads; ++h) {
        for (int64_t j = 0; j < p_.kv_tokens; ++j) {
          const int64_t row = (b * p_.kv_heads + h) * p_.kv_tokens + j;
          projections_.push_back(Project(k_ + row * p_.head_dim, h));
        }
      }
    }
    features_.resize(projections_.size());
  }

  // Returns the row of projections, and -|x|^2 / 2 behind them where the map has exponentials.
  std::vector<double> Project(const double* row, int64_t head) const {
    std::vector<double> x(row, row + p_.head_dim);
    const double length = Norm(row, p_.head_dim);
    for (double& value : x) {
      value *= map_.input_scale;
      if (map_.unit) value = length == 0 ? 0 : value / (length + map_.length_epsilon);
    }
    std::vector<double> projections;
    const double* matrix = w_ + (map_.per_head ? head * map_.projections * p_.head_dim : 0);
    for (int64_t r = 0; r < map_.projections; ++r) {
      const double* w = matrix + r * p_.head_dim;
      double sum = 0;
      for (int64_t c = 0; c < p_.head_dim; ++c) sum += w[c] * x[c];
      projections.push_back(sum);
    }
    for (int64_t r = 0; map_.feature == Feature::kExpPair && r < map_.projections; ++r) {
      projections.push_back(-projections[r]);
    }
    projections.push_back(-Norm(x.data(), p_.head_dim) * Norm(x.data(), p_.head_dim) / 2);
    return projections;
  }

  bool IsStabilised() const {
    return IsExponential(map_.feature) && map_.stabiliser != KeyStabiliser::kNone;
  }
  static double MaximumOf(const std::vector<double>& projections) {
    return *std::max_element(projections.begin(), projections.end() - 1);
  }
  std::vector<double> FeaturesOf(const std::vector<double>& projections, double s) const {
    std::vector<double> features;
    for (size_t r = 0; r + 1 < projections.size(); ++r) {
      const double x = projections[r];
      features.push_back(IsExponential(map_.feature)      ? std::exp(x + projections.back() - s)
                         : map_.feature == Feature::kRelu ? std::max(x, 0.0)
                                                          : std::sin(x));
    }
    for (size_t r = 0; map_.feature == Feature::kSinCos && r + 1 < projections.size(); ++r) {
      features.push_back(std::cos(projections[r]));
    }
    for (double& feature : features) feature = map_.constant * (feature + map_.epsilon);
    return features;
  }

  bool IsToken(int64_t b, int64_t j) const {
    return tensors_.key_mask.empty() ||
           tensors_.key_mask.span<uint8_t>()[b * p_.kv_tokens + j] != 0;
  }
  const std::vector<double>& ProjectionsOf(int64_t b, int64_t kv_head, int64_t j) const {
    return projections_[(b * p_.kv_heads + kv_head) * p_.kv_tokens + j];
  }

  // Returns features of a key. They are computed anew where the stabiliser is not that of the last
  // call for the key.
  const std::vector<double>& KeyFeatures(int64_t b, int64_t kv_head, int64_t j, double s) const {
    CachedFeatures& cached = features_[(b * p_.kv_heads + kv_head) * p_.kv_tokens + j];
    if (cached.features.empty() || cached.s != s) {
      cached = {s, FeaturesOf(ProjectionsOf(b, kv_head, j), s)};
    }
    return cached.features;
  }

  // Returns u . k_j + b.
  double LogitOf(int64_t b, int64_t kv_head, int64_t j) const {
    const double* gate = gate_ + kv_head * (p_.head_dim + 1);
    const double* key = k_ + ((b * p_.kv_heads + kv_head) * p_.kv_tokens + j) * p_.head_dim;
    double logit = gate[p_.head_dim];
    for (int64_t c = 0; c < p_.head_dim; ++c) logit += gate[c] * key[c];
    return logit;
  }

  Row Evaluate(int64_t b, int64_t h, int64_t i) const {
    Row row;
    const int64_t kv_head = h / p_.group();
    double key_s = -kInfinity;
    for (int64_t j = 0; j < p_.kv_tokens; ++j) {
      if (!IsToken(b, j)) continue;
      const bool seen = !p_.causal || j <= i + p_.causal_offset();
      if (seen) row.keys.push_back(j);
      if (seen || map_.stabiliser == KeyStabiliser::kSequence) {
        key_s = std::max(key_s, MaximumOf(ProjectionsOf(b, kv_head, j)));
      }
    }
    row.y.assign(p_.value_dim, 0.0);
    row.log_sum_exp = -kInfinity;
    if (row.keys.empty()) return row;
    const std::vector<double> query =
        Project(q_ + ((b * p_.query_heads + h) * p_.query_tokens + i) * p_.head_dim, kv_head);
    const double query_s = IsStabilised() ? MaximumOf(query) : 0;
    if (!IsStabilised()) key_s = 0;
    row.phi = FeaturesOf(query, query_s);
    row.query_s = query_s;
    row.key_s = key_s;
    for (const int64_t j : row.keys) {
      const std::vector<double>& phi_k = KeyFeatures(b, kv_head, j, key_s);
      double weight = 0;
      for (size_t r = 0; r < row.phi.size(); ++r) weight += row.phi[r] * phi_k[r];
      row.weights.push_back(weight);
    }
    row.decays.assign(row.keys.size(), 1.0);
    double keeps = 1;  // the product of the later keys' gates
    for (size_t n = row.keys.size(); map_.gated && n-- > 0;) {
      const double logit = LogitOf(b, kv_head, row.keys[n]);
      row.decays[n] = keeps / (1 + std::exp(logit));
      row.weights[n] *= row.decays[n];
      keeps /= 1 + std::exp(-logit);
    }
    double& sum = row.denominator;
    for (const double weight : row.weights) sum += weight;
    for (const double feature : row.phi) sum += map_.denominator_epsilon * feature;
    row.is_held = std::abs(sum) < map_.denominator_floor;
    if (row.is_held) sum = std::copysign(map_.denominator_floor, sum);
    for (size_t n = 0; n < row.keys.size(); ++n) {
      const double* value =
          v_ + ((b * p_.kv_heads + kv_head) * p_.kv_tokens + row.keys[n]) * p_.value_dim;
      const double share = sum == 0 ? 0 : row.weights[n] / sum;
      for (int64_t c = 0; sum != 0 && c < p_.value_dim; ++c) row.y[c] += share * value[c];
    }
    row.log_sum_exp = std::log(std::abs(sum)) + query_s + key_s;
    return row;
  }

  // Calls body(batch, query head, token) for all rows.
  template <class Body>
  void ForEachRow(Body body) const {
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.query_heads; ++h) {
        for (int64_t i = 0; i < p_.query_tokens; ++i) body(b, h, i);
      }
    }
  }

  // Returns the sum of products of a row's outputs and their gradients. `index` counts all rows.
  double LossOf(const Row& row, int64_t index, const Reals& gradients) const {
    double loss = 0;
    const double* g = gradients.at("out").data() + index * p_.value_dim;
    for (int64_t c = 0; c < p_.value_dim; ++c) loss += g[c] * row.y[c];
    if (row.denominator != 0) loss += gradients.at("log_sum_exp")[index] * row.log_sum_exp;
    return loss;
  }

 private:
  // Returns null for a tensor that the case does not have.
  static const double* DataOf(const Reals& reals, const char* name) {
    const auto found = reals.find(name);
    return found == reals.end() ? nullptr : found->second.data();
  }

  const Problem& p_;
  const FeatureMap& map_;
  const LinearTensors& tensors_;
  const double *const q_, *const k_, *const v_, *const w_, *const gate_;
  std::vector<std::vector<double>> projections_;  // of keys
  struct CachedFeatures {
    double s;
    std::vector<double> features;
  };
  mutable std::vector<CachedFeatures> features_;  // of keys
};

struct Gradients {
  Tensor q, k, v, w, gate;
  const Tensor& at(const std::string& name) const {
    return name == "q" ? q : name == "k" ? k : name == "v" ? v : name == "w" ? w : gate;
  }
};

// A case with the gradients of its outputs, and where it runs.
struct BackwardCase {
  BackwardCase(const LinearCase& case_of, Device runs_on)
      : c(case_of), device(runs_on), tensors(c) {
    const Problem& p = c.problem;
    Tensor drawn(DType::kF32, {p.batch, p.query_heads, p.query_tokens, p.value_dim});
    FillNormal(&drawn, c.seed, "out_gradient");
    out_gradient = drawn.CloneAs(p.dtype);
    log_sum_exp_gradient = Tensor(DType::kF32, {p.batch, p.query_heads, p.query_tokens});
    FillNormal(&log_sum_exp_gradient, c.seed, "log_sum_exp_gradient");
  }
  LinearCase c;
  Device device;
  LinearTensors tensors;
  Tensor out_gradient, log_sum_exp_gradient;
  // On CUDA devices: see LinearCuda.
  int64_t max_blocks = 0x7fffffff;
  int64_t max_held_heads = 0x7fffffff;
  bool counts_bank_conflicts = false;  // in the simulator
};

Gradients EmptyGradients(const BackwardCase& of) {
  const LinearTensors& tensors = of.tensors;
  Gradients gradients{tensors.q.Clone(), tensors.k.Clone(), tensors.v.Clone(), tensors.w.Clone(),
                      tensors.gate.empty() ? Tensor() : tensors.gate.Clone()};
  for (Tensor* tensor : {&gradients.q, &gradients.k, &gradients.v, &gradients.w, &gradients.gate}) {
    if (!tensor->empty()) Fill(tensor->view(), std::nan(""));
  }
  return gradients;
}

// Returns the call that writes all gradients.
LinearBackwardCall CallOf(const BackwardCase& of, const LinearCall& run, Gradients& gradients) {
  LinearBackwardCall call;
  static_cast<LinearInputs&>(call) = run;
  call.out = run.out;
  call.out_gradient = of.out_gradient.view();
  call.log_sum_exp_gradient = of.log_sum_exp_gradient.view();
  call.q_gradient = gradients.q.view();
  call.k_gradient = gradients.k.view();
  call.v_gradient = gradients.v.view();
  call.w_gradient = gradients.w.view();
  if (!of.c.map.per_head) {
    call.w_gradient = TensorView(gradients.w.raw(), DType::kF32, run.w.shape());
  }
  call.gate_gradient = gradients.gate.view();
  return call;
}

absl::Status RunOnCpu(const BackwardCase& of, const LinearCall& run, const LinearBackwardCall& call,
                      int threads) {
  const Problem& p = of.c.problem;
  ThreadPool pool(threads);
  GuardedMemory kept(LinearKeptBytes(p, of.c.map));
  {
    GuardedMemory workspace(LinearWorkspaceBytes(p, of.c.map, threads));
    TFB_RETURN_IF_ERROR(LinearCpu(p, run, {&pool, workspace.span(), nullptr, kept.span()}));
  }
  GuardedMemory workspace(LinearBackwardWorkspaceBytes(p, of.c.map, threads));
  return LinearBackwardCpu(p, call, {&pool, workspace.span(), nullptr, kept.span()});
}

// `seed` is that of the order of blocks and threads. The simulator finds what is read without being
// written, and what is outside of the workspace.
absl::Status RunOnSimulator(const BackwardCase& of, LinearCall run, LinearBackwardCall call,
                            int seed) {
  cuda_simulator::Settings settings;
  settings.seed = seed;
  settings.counts_bank_conflicts |= of.counts_bank_conflicts;
  cuda_simulator::Configure(settings);
  const Problem& p = of.c.problem;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(KernelDevice()));
  TFB_ASSIGN_OR_RETURN(LinearCuda linear, LinearCuda::Create(runtime, p, of.c.map, run.w,
                                                             /*streams=*/false, run.gate));
  linear.set_max_blocks(of.max_blocks);
  linear.set_max_held_heads(of.max_held_heads);
  DeviceMirror mirror(runtime);
  for (ConstTensorView* view : {&run.q, &run.k, &run.v, &run.key_mask}) {
    TFB_ASSIGN_OR_RETURN(*view, mirror.Copy(*view));
  }
  for (TensorView* view : {&run.out, &run.log_sum_exp, &call.q_gradient, &call.k_gradient,
                           &call.v_gradient, &call.w_gradient, &call.gate_gradient}) {
    TFB_ASSIGN_OR_RETURN(*view, mirror.CopyForWriting(*view));
  }
  for (ConstTensorView* view : {&call.out_gradient, &call.log_sum_exp_gradient}) {
    TFB_ASSIGN_OR_RETURN(*view, mirror.Copy(*view));
  }
  static_cast<LinearInputs&>(call) = run;
  call.out = run.out;
  const size_t bytes = LinearCuda::WorkspaceBytes(*runtime, p, of.c.map);
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer workspace, runtime->Allocate(bytes));
  const size_t backward_bytes = LinearCuda::BackwardWorkspaceBytes(p, of.c.map);
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer backward_workspace, runtime->Allocate(backward_bytes));
  ThreadPool pool(1);
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(workspace.As<std::byte>(), bytes);
  TFB_RETURN_IF_ERROR(linear.Run(p, run, execution));
  execution.workspace = absl::MakeSpan(backward_workspace.As<std::byte>(), backward_bytes);
  TFB_RETURN_IF_ERROR(linear.Backward(p, call, execution));
  return mirror.CopyBack();
}

// Runs a call and a backward pass of it, which `change` may change before.
template <class Change>
void RunBoth(const BackwardCase& of, LinearCall run, LinearResults& results, Gradients& gradients,
             int threads, Change change) {
  if (run.out.empty()) run.out = results.out.view();
  run.log_sum_exp = results.log_sum_exp.view();
  LinearBackwardCall call = CallOf(of, run, gradients);
  change(call);
  const absl::Status status = of.device == Device::kCpu ? RunOnCpu(of, run, call, threads)
                                                        : RunOnSimulator(of, run, call, threads);
  ASSERT_TRUE(status.ok()) << status;
}
Gradients RunBackward(const BackwardCase& of, int threads = 1) {
  LinearResults results = EmptyResults(of.c.problem);
  Gradients gradients = EmptyGradients(of);
  RunBoth(of, of.tensors.Call(of.c), results, gradients, threads, [](LinearBackwardCall&) {});
  return gradients;
}

Reals RealsOf(const BackwardCase& of) {
  Reals reals;
  for (const auto& [name, tensor] :
       std::vector<std::pair<std::string, const Tensor*>>{{"q", &of.tensors.q},
                                                          {"k", &of.tensors.k},
                                                          {"v", &of.tensors.v},
                                                          {"w", &of.tensors.w},
                                                          {"gate", &of.tensors.gate}}) {
    if (!tensor->empty()) reals[name] = RealsOf(*tensor);
  }
  return reals;
}
Reals GradientsOfOutputs(const BackwardCase& of) {
  return {{"out", RealsOf(of.out_gradient)}, {"log_sum_exp", RealsOf(of.log_sum_exp_gradient)}};
}

// The formula of a case as it is, evaluated in every row.
struct Definition {
  explicit Definition(const BackwardCase& of)
      : reals(RealsOf(of)), of_outputs(GradientsOfOutputs(of)), formula(of.c, of.tensors, reals) {
    formula.ForEachRow(
        [&](int64_t b, int64_t h, int64_t i) { rows.push_back(formula.Evaluate(b, h, i)); });
  }
  Definition(const Definition&) = delete;
  Definition& operator=(const Definition&) = delete;

  const Reals reals, of_outputs;
  const Formula formula;
  std::vector<Row> rows;
};

double DotOf(const double* x, const double* y, int64_t count) {
  double sum = 0;
  for (int64_t c = 0; c < count; ++c) sum += x[c] * y[c];
  return sum;
}

// The derivative of the loss along a direction of one tensor, and the bound of the error of a
// product of that direction with a gradient in fp32.
//
// The derivative is a sum over rows i and keys j of t_ij = (y'_i . v_j - y'_i . y_i + l'_i) / D_i
// times the change of a_ij, which is a sum over features; or, for values, of a_ij / D_i times y'_i
// . (change of v_j). Roundings that are common to the features of a pair act in proportion to that
// change, and independent ones add up in quadrature: the size of a pair's term is that of t_ij's
// three parts, times |change| + sqrt(sum of squares of its features' parts). The error of D_i acts
// on all terms of its row in the same way. The number of roundings is that of the exponents (see
// ExpectClose), ten operations, and sqrt(n) for sums of n numbers (features, a chunk's tokens,
// chunks, channels), whose errors are below 4 sqrt(n) u but for a probability of 7e-4 (Higham and
// Mary, SIAM J. Sci. Comput. 41, 2019).
struct Derivative {
  double difference;  // central
  double bound;
};

Derivative DerivativeAlong(const BackwardCase& of, const Definition& definition,
                           const std::string& name, const std::vector<double>& direction,
                           const Tensor& gradient) {
  const Reals &reals = definition.reals, &of_outputs = definition.of_outputs;
  const Formula& at = definition.formula;
  const Problem& p = of.c.problem;
  const FeatureMap& map = of.c.map;
  const std::vector<double>& x = reals.at(name);
  const double* const values = reals.at("v").data();
  // A step across the corner of a ReLU would count as an error.
  const double step = (map.feature == Feature::kRelu ? 1e-7 : 1e-5) * Norm(x.data(), x.size());
  Reals above = reals, below = reals;
  for (size_t n = 0; n < x.size(); ++n) {
    above[name][n] += step * direction[n];
    below[name][n] -= step * direction[n];
  }
  const Formula plus(of.c, of.tensors, above), minus(of.c, of.tensors, below);
  const double h = 2 * step;
  double loss_plus = 0, loss_minus = 0;

  const bool of_values = name == "v";
  const double unit16 = p.dtype == DType::kF32 ? 0 : UnitRoundoff(p.dtype);
  double size = 0, of_16_bits = 0, losses = 1;
  std::vector<double> columns(p.batch * p.kv_heads * p.kv_tokens, 0.0);  // sums over rows
  at.ForEachRow([&](int64_t b, int64_t head, int64_t i) {
    const int64_t kv_head = head / p.group();
    const int64_t index = (b * p.query_heads + head) * p.query_tokens + i;
    const Row& row = definition.rows[index];
    const Row row_plus = plus.Evaluate(b, head, i), row_minus = minus.Evaluate(b, head, i);
    loss_plus += plus.LossOf(row_plus, index, of_outputs);
    loss_minus += minus.LossOf(row_minus, index, of_outputs);
    if (row.denominator == 0) return;
    const double* g = of_outputs.at("out").data() + index * p.value_dim;
    const double y = DotOf(g, row.y.data(), p.value_dim);
    const double e = of_outputs.at("log_sum_exp")[index];
    losses += std::abs(y) + std::abs(e * row.log_sum_exp);
    double sum = 0, square = 0, change_of_sum = 0;
    for (size_t n = 0; n < row.keys.size(); ++n) {
      const int64_t j = row.keys[n], key = (b * p.kv_heads + kv_head) * p.kv_tokens + j;
      const std::vector<double>&phi = at.KeyFeatures(b, kv_head, j, row.key_s),
            &phi_plus = plus.KeyFeatures(b, kv_head, j, row_plus.key_s),
            &phi_minus = minus.KeyFeatures(b, kv_head, j, row_minus.key_s);
      double change = 0, squares = 0;
      for (size_t r = 0; r < phi.size(); ++r) {
        const double part = row.decays[n] * row.phi[r] * phi[r];
        const double change_of_part = (row_plus.decays[n] * row_plus.phi[r] * phi_plus[r] -
                                       row_minus.decays[n] * row_minus.phi[r] * phi_minus[r]) /
                                      h;
        square += part * part;
        squares += of_values ? part * part : change_of_part * change_of_part;
        change += of_values ? part : change_of_part;
      }
      const double* v = values + key * p.value_dim;
      const double of_outputs_size =
          of_values ? std::abs(DotOf(g, direction.data() + key * p.value_dim, p.value_dim))
                    : std::abs(DotOf(g, v, p.value_dim)) + std::abs(y) + std::abs(e);
      sum += of_outputs_size * (std::abs(change) + std::sqrt(squares));
      change_of_sum += change;
      columns[key] += (std::abs(DotOf(g, v, p.value_dim)) + std::abs(y)) *
                      std::abs(row.weights[n] / row.denominator);
    }
    const double denominator = std::abs(row.denominator);
    size += sum / denominator * (2 + std::sqrt(square) / denominator);
    // The stabilisers are also terms of the log-sum-exp.
    size += std::abs(e) *
            (std::abs(row_plus.query_s - row_minus.query_s) +
             std::abs(row_plus.key_s - row_minus.key_s)) /
            h;
    double products = 0;
    for (int64_t c = 0; c < p.value_dim; ++c) products += std::abs(g[c] * row.y[c]);
    if (!of_values) of_16_bits += products * std::abs(change_of_sum) / denominator;
  });
  for (size_t n = 0; n < x.size() && unit16 != 0 && gradient.dtype() == p.dtype; ++n) {
    if (direction[n] != 0) of_16_bits += std::abs(gradient.view().Get(n) * direction[n]);
  }
  // Gradients of gates are differences of sums over the later rows and keys.
  double of_gates = 0;
  if (map.gated && (name == "k" || name == "gate")) {
    for (int64_t key = 0; key < p.batch * p.kv_heads * p.kv_tokens; ++key) {
      const int64_t j = key % p.kv_tokens, row = key / p.kv_tokens;
      const int64_t b = row / p.kv_heads, kv_head = row % p.kv_heads;
      of_gates += std::abs(plus.LogitOf(b, kv_head, j) - minus.LogitOf(b, kv_head, j)) / h;
    }
    of_gates *= Norm(columns.data(), columns.size());
  }
  const double head_dim = static_cast<double>(p.head_dim), magnitude = of.c.magnitude;
  // The length of x, which is head_dim^(1/4) magnitude unless it is input_scale.
  const double length = map.unit ? map.input_scale : std::pow(head_dim, 0.25) * magnitude;
  const double exponents =
      map.unit && !IsExponential(map.feature) ? 0 : std::sqrt(head_dim) * length + length * length;
  const double lengths =
      static_cast<double>(map.features() + kLinearChunk + std::max(p.head_dim, p.value_dim) +
                          std::max(p.query_tokens * p.group(), p.kv_tokens) / kLinearChunk);
  const double roundings = 10 + 4 * std::sqrt(lengths) + 2 * exponents +
                           (map.gated ? static_cast<double>(kLinearChunk) : 0);
  return {(loss_plus - loss_minus) / h,
          UnitRoundoff(DType::kF32) * roundings * (size + of_gates) + unit16 * of_16_bits +
              // The terms of the loss are rounded to float64, some ten times.
              std::ldexp(10, -53) * losses / h};
}

double ProductOf(const Tensor& gradient, const std::vector<double>& direction) {
  double product = 0;
  for (size_t n = 0; n < direction.size(); ++n) {
    // A direction of 0 skips what has no gradient.
    if (direction[n] != 0) product += gradient.view().Get(n) * direction[n];
  }
  return product;
}

// Compares the derivative along `direction` of one tensor.
void ExpectDerivative(const BackwardCase& of, const Definition& definition,
                      const Gradients& gradients, const std::string& name,
                      const std::vector<double>& direction) {
  const Tensor& gradient = gradients.at(name);
  const Derivative expected = DerivativeAlong(of, definition, name, direction, gradient);
  ASSERT_NEAR(ProductOf(gradient, direction), expected.difference, expected.bound)
      << Describe(of.c) << ", " << name;
}

std::vector<double> UnitDirection(const std::string& name, size_t count, uint64_t seed) {
  const RandomStream stream(seed, absl::StrCat("direction ", name));
  std::vector<double> direction(count);
  for (size_t n = 0; n < count; ++n) direction[n] = stream.Normal(n);
  const double norm = Norm(direction.data(), count);
  for (double& x : direction) x /= norm;
  return direction;
}

void ExpectSameBits(const BackwardCase& of, const Gradients& gradients, const Gradients& expected) {
  for (const auto& entry : RealsOf(of)) {
    EXPECT_TRUE(SameBits(gradients.at(entry.first), expected.at(entry.first)))
        << Describe(of.c) << ", " << entry.first;
  }
}

// On the CPU expects also the same bits with other threads. The simulator finds all races in one order
// of threads and blocks, and nothing of the backward pass is atomic.
void ExpectGradientsOfFormula(const BackwardCase& of) {
  const Definition definition(of);
  const Gradients gradients = RunBackward(of, 1);
  if (of.device == Device::kCpu) ExpectSameBits(of, RunBackward(of, 3), gradients);
  for (const auto& [name, x] : definition.reals) {
    if (x.empty()) continue;
    ExpectDerivative(of, definition, gradients, name, UnitDirection(name, x.size(), of.c.seed));
  }
}

class LinearBackward : public testing::TestWithParam<Device> {
 protected:
  static BackwardCase Case(const LinearCase& c) { return BackwardCase(c, GetParam()); }
  static void ExpectGradientsOfFormula(const BackwardCase& of) {
    tfb::ExpectGradientsOfFormula(of);
  }
  static void ExpectGradientsOfFormula(const LinearCase& c) { ExpectGradientsOfFormula(Case(c)); }
};
INSTANTIATE_TEST_SUITE_P(Devices, LinearBackward, testing::ValuesIn(TestedDevices()),
                         [](const auto& test) { return std::string(Name(test.param)); });

TEST_P(LinearBackward, EveryElementIsTheDerivativeOfTheFormula) {
  for (const bool causal : {false, true}) {
    for (const Feature feature :
         {Feature::kExp, Feature::kExpPair, Feature::kRelu, Feature::kSinCos}) {
      const bool of_direction = feature == Feature::kSinCos;
      LinearCase c{LinearProblem(7, 9, causal, 2, 4), of_direction
                                                          ? DirectionMap(feature, 5, causal)
                                                          : LinearMap(feature, 5, 4, 1e-2)};
      c.problem.value_dim = 3;
      c.problem.kv_heads = 1;
      if (!of_direction) c.map.denominator_epsilon = 1e-1;
      c.masked = true;
      const BackwardCase of = Case(c);
      const Definition definition(of);
      const Gradients gradients = RunBackward(of);
      for (const auto& [name, x] : definition.reals) {
        for (size_t n = 0; n < x.size(); ++n) {
          std::vector<double> direction(x.size(), 0.0);
          direction[n] = 1;
          ExpectDerivative(of, definition, gradients, name, direction);
        }
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaOnTokensAroundTheEdgesOfChunksAndBlocks) {
  for (const int64_t tokens : {0, 1, 3, 31, 33, 63, 64, 65, 128, 511, 513}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-3}) {
        if (tokens > 200 && epsilon == 0) continue;  // with it there are sums of values, too
        ExpectGradientsOfFormula({LinearProblem(tokens, tokens, causal, tokens < 200 ? 2 : 1, 8),
                                  LinearMap(Feature::kExp, 8, 8, epsilon)});
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaWithEachFeatureStabiliserAndEpsilon) {
  for (const Feature feature : kFeatures) {
    for (const KeyStabiliser stabiliser :
         {KeyStabiliser::kRunning, KeyStabiliser::kSequence, KeyStabiliser::kNone}) {
      if (!IsExponential(feature) && stabiliser != KeyStabiliser::kNone) continue;
      for (const bool causal : {false, true}) {
        for (const double epsilon : {0.0, 1e-6, 1e-2}) {
          for (const double denominator_epsilon : {0.0, 1e-1}) {
            LinearCase c{LinearProblem(90, 90, causal, 1, 8), LinearMap(feature, 12, 8, epsilon)};
            c.map.stabiliser = stabiliser;
            c.map.denominator_epsilon = denominator_epsilon;
            c.masked = true;
            ExpectGradientsOfFormula(c);
          }
        }
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaWhereBlocksFollowEachOther) {
  for (const KeyStabiliser stabiliser : {KeyStabiliser::kRunning, KeyStabiliser::kSequence}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(1100, 1100, causal, 1, 8), LinearMap(Feature::kExp, 8, 8, 1e-2)};
      c.map.stabiliser = stabiliser;
      ExpectGradientsOfFormula(c);
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaAtEveryHeadAndValueWidth) {
  for (const int64_t head_dim : {1, 7, 64, 80}) {
    for (const int64_t value_dim : {1, 33, 64, 80}) {
      for (const bool causal : {false, true}) {
        LinearCase c{LinearProblem(70, 70, causal, 1, head_dim),
                     LinearMap(Feature::kExp, 9, head_dim, 1e-3)};
        c.problem.value_dim = value_dim;
        c.seed = head_dim + value_dim;
        ExpectGradientsOfFormula(c);
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaWithAnyNumberOfFeatures) {
  for (const int64_t projections : {1, 5, 65, 130}) {
    for (const Feature feature : kFeatures) {
      for (const bool causal : {false, true}) {
        ExpectGradientsOfFormula(
            {LinearProblem(40, 40, causal), LinearMap(feature, projections, 8, 1e-3)});
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaWhereKeysAndQueriesDifferInNumber) {
  for (const auto& [queries, keys] : std::vector<std::pair<int64_t, int64_t>>{{1, 200},
                                                                              {3, 64},
                                                                              {5, 130},
                                                                              {64, 65},
                                                                              {65, 64},
                                                                              {130, 5},
                                                                              {100, 1},
                                                                              {0, 9},
                                                                              {9, 0},
                                                                              {70, 190},
                                                                              {190, 70}}) {
    for (const bool causal : {false, true}) {
      for (const int64_t heads : {1, 2}) {
        ExpectGradientsOfFormula(
            {LinearProblem(queries, keys, causal, heads), LinearMap(Feature::kExp, 8, 16, 1e-3)});
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaWithGroupedHeadsBatchesAndAMatrixPerHead) {
  for (const auto& [query_heads, kv_heads] :
       std::vector<std::pair<int64_t, int64_t>>{{4, 1}, {4, 2}, {3, 3}}) {
    for (const bool per_head : {false, true}) {
      for (const bool causal : {false, true}) {
        LinearCase c{LinearProblem(90, 100, causal, query_heads, 8),
                     LinearMap(Feature::kExp, 8, 8, 1e-3)};
        c.problem.batch = 2;
        c.problem.kv_heads = kv_heads;
        c.map.per_head = per_head;
        c.masked = true;
        ExpectGradientsOfFormula(c);
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaOnDirectionsWithGatesAndWithout) {
  for (const Feature feature : {Feature::kSinCos, Feature::kRelu}) {
    for (const bool gated : {false, true}) {
      for (const int64_t tokens : {1, 64, 130, 530}) {
        for (const float length_epsilon : {0.0f, 0.5f}) {
          if (tokens == 530 && length_epsilon != 0) continue;  // it acts on each token alone
          const bool is_short = tokens < 200;
          LinearCase c{LinearProblem(tokens, tokens, true, is_short ? 2 : 1, 8),
                       DirectionMap(feature, is_short ? 40 : 6, gated)};
          c.map.length_epsilon = length_epsilon;
          c.map.per_head = gated;
          c.masked = tokens == 130;
          c.magnitude = 3;
          ExpectGradientsOfFormula(c);
          if (gated) continue;
          c.problem.causal = false;
          ExpectGradientsOfFormula(c);
        }
      }
    }
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaOnDirectionsWithExponentials) {
  for (const Feature feature : {Feature::kExp, Feature::kExpPair}) {
    for (const KeyStabiliser stabiliser : {KeyStabiliser::kRunning, KeyStabiliser::kNone}) {
      for (const bool causal : {false, true}) {
        for (const double epsilon : {0.0, 1e-2}) {
          LinearCase c{LinearProblem(90, 90, causal, 2, 8), LinearMap(feature, 12, 8, epsilon)};
          c.map.stabiliser = stabiliser;
          c.map.unit = true;
          c.map.input_scale = 1.25;
          c.map.length_epsilon = epsilon == 0 ? 0 : 2;
          c.magnitude = 3;
          ExpectGradientsOfFormula(c);
        }
      }
    }
  }
}

TEST_P(LinearBackward, GatesWorkWhereKeysAndQueriesDifferInNumberAndHeadsAreGrouped) {
  for (const int64_t queries : {30, 150}) {
    LinearCase c{LinearProblem(queries, 100, true, 4, 16),
                 DirectionMap(Feature::kSinCos, 40, true)};
    c.problem.kv_heads = 2;
    c.problem.value_dim = 24;
    c.problem.batch = 2;
    c.map.per_head = true;
    ExpectGradientsOfFormula(c);
  }
}

TEST_P(LinearBackward, AHeldDenominatorIsAConstant) {
  for (const bool gated : {false, true}) {
    LinearCase c{LinearProblem(80, 80, true), DirectionMap(Feature::kRelu, 8, gated)};
    c.map.denominator_floor = 0.3;
    const BackwardCase of = Case(c);
    const Reals reals = RealsOf(of);
    const Formula formula(c, of.tensors, reals);
    int64_t held = 0;
    formula.ForEachRow([&](int64_t b, int64_t h, int64_t i) {
      held += formula.Evaluate(b, h, i).is_held ? 1 : 0;
    });
    EXPECT_GT(held, 0);
    EXPECT_LT(held, 160);
    ExpectGradientsOfFormula(of);
  }
}

TEST_P(LinearBackward, IsThatOfTheFormulaInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(100, 100, causal), LinearMap(Feature::kExp, 16, 16, 1e-6)};
      c.problem.dtype = dtype;
      ExpectGradientsOfFormula(c);
      c.map = DirectionMap(Feature::kSinCos, 40, causal);
      ExpectGradientsOfFormula(c);
    }
  }
}

TEST_P(LinearBackward, FollowsAMaximumThatRisesAndOneThatFalls) {
  for (const bool rising : {true, false}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-3}) {
        BackwardCase of =
            Case({LinearProblem(150, 150, causal, 1, 8), LinearMap(Feature::kExp, 16, 8, epsilon)});
        for (int64_t j = 0; j < 150; ++j) {
          const double factor = 6.0 * static_cast<double>(rising ? j : 149 - j) / 150;
          for (int64_t n = 0; n < 8; ++n) {
            of.tensors.k.span<float>()[j * 8 + n] *= static_cast<float>(factor);
            of.tensors.q.span<float>()[j * 8 + n] *= 2;
          }
        }
        of.c.magnitude = 6;
        ExpectGradientsOfFormula(of);
      }
    }
  }
}

TEST_P(LinearBackward, QueriesKeysAndWHaveNoGradientWhereValuesAreConstant) {
  for (const Feature feature : kFeatures) {
    for (const bool causal : {false, true}) {
      BackwardCase of = Case({LinearProblem(130, 130, causal), LinearMap(feature, 16, 16, 1e-3)});
      Fill(of.tensors.v.view(), 1);
      Fill(of.log_sum_exp_gradient.view(), 0);
      const Gradients gradients = RunBackward(of);
      const Definition definition(of);
      for (const char* name : {"q", "k", "w"}) {
        const Tensor& gradient = gradients.at(name);
        const std::vector<double> direction = UnitDirection(name, gradient.num_elements(), 5);
        // The terms y' . (v_j - y_i) cancel up to their roundings.
        const Derivative derivative = DerivativeAlong(of, definition, name, direction, gradient);
        EXPECT_NEAR(ProductOf(gradient, direction), 0, derivative.bound);
      }
    }
  }
}

bool AllZero(const ConstTensorView& view) {
  bool zero = true;
  ForEachOffset(view, view, [&](int64_t offset, int64_t) { zero = zero && view.Get(offset) == 0; });
  return zero;
}

TEST_P(LinearBackward, MaskedKeysHaveNoGradientAndNaNThereReachesNothing) {
  for (const bool causal : {false, true}) {
    for (const bool gated : {false, true}) {
      if (gated && !causal) continue;
      LinearCase c{LinearProblem(140, 140, causal, 3),
                   gated ? DirectionMap(Feature::kSinCos, 16, true)
                         : LinearMap(Feature::kExp, 16, 16, 1e-4)};
      c.masked = true;
      BackwardCase of = Case(c);
      of.tensors.key_mask.span<uint8_t>()[0] = 0;  // the first row sees nothing, where causal
      const Gradients clean = RunBackward(of);
      for (int64_t j = 0; j < 140; ++j) {
        if (of.tensors.key_mask.span<uint8_t>()[j] != 0) continue;
        EXPECT_TRUE(AllZero(Slice(clean.k.view(), 2, j, 1))) << j;
        EXPECT_TRUE(AllZero(Slice(clean.v.view(), 2, j, 1))) << j;
        Fill(Slice(of.tensors.k.view(), 2, j, 1), std::nan(""));
        Fill(Slice(of.tensors.v.view(), 2, j, 1), std::nan(""));
      }
      if (causal) {
        EXPECT_TRUE(AllZero(Slice(clean.q.view(), 2, 0, 1)));
        Fill(Slice(of.out_gradient.view(), 2, 0, 1), std::nan(""));
        Fill(Slice(of.log_sum_exp_gradient.view(), 2, 0, 1), std::nan(""));
      }
      const Gradients poisoned = RunBackward(of);
      for (const char* name : {"q", "k", "v", "w"}) {
        EXPECT_TRUE(SameBits(clean.at(name), poisoned.at(name))) << name;
      }
      if (gated) {
        EXPECT_TRUE(SameBits(clean.gate, poisoned.gate));
      }
    }
  }
}

TEST_P(LinearBackward, RowsBeforeAllKeysHaveNoGradientAndNaNThereReachesNothing) {
  BackwardCase of = Case({LinearProblem(100, 70, true), LinearMap(Feature::kExp, 16, 16, 1e-4)});
  const Gradients clean = RunBackward(of);
  EXPECT_TRUE(AllZero(Slice(clean.q.view(), 2, 0, 30)));
  for (Tensor* tensor : {&of.tensors.q, &of.out_gradient, &of.log_sum_exp_gradient}) {
    Fill(Slice(tensor->view(), 2, 0, 30), std::nan(""));
  }
  const Gradients poisoned = RunBackward(of);
  for (const char* name : {"q", "k", "v", "w"}) {
    EXPECT_TRUE(SameBits(clean.at(name), poisoned.at(name))) << name;
  }
}

TEST_P(LinearBackward, GradientsAreZeroWhereEveryKeyIsMasked) {
  for (const bool causal : {false, true}) {
    for (const double epsilon : {0.0, 1e-4}) {
      LinearCase c{LinearProblem(70, 70, causal), LinearMap(Feature::kExp, 16, 16, epsilon)};
      c.map.denominator_epsilon = epsilon;
      c.masked = true;
      BackwardCase of = Case(c);
      Fill(of.tensors.key_mask.view(), 0);
      Fill(of.tensors.k.view(), std::nan(""));
      const Gradients gradients = RunBackward(of);
      for (const char* name : {"q", "k", "v", "w"}) {
        EXPECT_TRUE(AllZero(gradients.at(name).view())) << name;
      }
    }
  }
}

// Tells whether tokens [begin, end) have the same bits in both, and no NaN.
bool SameTokens(const Tensor& a, const Tensor& b, int64_t begin, int64_t end) {
  const ConstTensorView x = Slice(a.view(), 2, begin, end - begin),
                        y = Slice(b.view(), 2, begin, end - begin);
  bool same = true;
  ForEachOffset(x, y, [&](int64_t m, int64_t n) { same = same && x.Get(m) == y.Get(n); });
  return same;
}

TEST_P(LinearBackward, ANaNReachesExactlyTheTokensThatTheMaskLetsItReach) {
  // The CPU takes 8 chunks of 64 as a block.
  const int64_t tokens = GetParam() == Device::kCpu ? 600 : 140;
  for (const bool gated : {false, true}) {
    LinearCase c{
        LinearProblem(tokens, tokens, true, 2),
        gated ? DirectionMap(Feature::kSinCos, 16, true) : LinearMap(Feature::kExp, 16, 16, 1e-4)};
    const Gradients clean = RunBackward(Case(c));
    for (const int64_t place : {int64_t{5}, int64_t{77}, tokens - 10}) {
      // Earlier queries do not see a key or value.
      for (const bool in_values : {false, true}) {
        BackwardCase poisoned = Case(c);
        Fill(Slice((in_values ? poisoned.tensors.v : poisoned.tensors.k).view(), 2, place, 1),
             std::nan(""));
        const Gradients gradients = RunBackward(poisoned);
        EXPECT_TRUE(SameTokens(gradients.q, clean.q, 0, place)) << place;
        EXPECT_TRUE(std::isnan(*gradients.q.view().At<float>(0, 1, place, 0)));
        EXPECT_TRUE(std::isnan(*gradients.k.view().At<float>(0, 1, place, 0)));
        EXPECT_TRUE(std::isnan(*gradients.k.view().At<float>(0, 1, 0, 0)));
      }
      // Later keys are not seen by a query.
      for (const char which : {'q', 'g', 'l'}) {
        BackwardCase poisoned = Case(c);
        Tensor& tensor = which == 'q'   ? poisoned.tensors.q
                         : which == 'g' ? poisoned.out_gradient
                                        : poisoned.log_sum_exp_gradient;
        Fill(Slice(tensor.view(), 2, place, 1), std::nan(""));
        const Gradients gradients = RunBackward(poisoned);
        EXPECT_TRUE(SameTokens(gradients.q, clean.q, 0, place)) << which << place;
        EXPECT_TRUE(SameTokens(gradients.q, clean.q, place + 1, tokens)) << which << place;
        EXPECT_TRUE(SameTokens(gradients.k, clean.k, place + 1, tokens)) << which << place;
        EXPECT_TRUE(SameTokens(gradients.v, clean.v, place + 1, tokens)) << which << place;
        EXPECT_TRUE(std::isnan(*gradients.q.view().At<float>(0, 0, place, 0)));
        EXPECT_TRUE(std::isnan(*gradients.k.view().At<float>(0, 0, place, 0)));
        EXPECT_TRUE(std::isnan(*gradients.k.view().At<float>(0, 0, 0, 0)));
      }
    }
  }
}

TEST_P(LinearBackward, GradientsOfAllThatARowOfNaNKeysAloneSeesAreNaN) {
  ForEachNaNKeys(kKeysOfGroups, [](const NaNKeys& keys) {
    const Problem& p = keys.c.problem;
    if (GetParam() != Device::kCpu && (p.kv_tokens > 130 || keys.c.map.projections > 40)) return;
    const LinearResults expected = DefineLinear(keys.c, keys.tensors);
    BackwardCase of = Case(keys.c);
    if (keys.c.masked) of.tensors.key_mask = keys.clean.key_mask.Clone();
    const Gradients clean = RunBackward(of);
    CopyElements(keys.tensors.k.view(), of.tensors.k.view());
    const Gradients gradients = RunBackward(of, 2);
    const auto expect = [&](const char* name, const ConstTensorView& found,
                            const ConstTensorView& other, bool is_nan) {
      ForEachOffset(found, other, [&](int64_t at, int64_t of_other) {
        const double x = found.Get(at);
        ASSERT_TRUE(is_nan ? std::isnan(x) : x == other.Get(of_other))
            << Describe(keys.c) << ", " << name << ", element " << at << ": " << x;
      });
    };
    const auto expect_of_token = [&](const char* name, int64_t head, int64_t token, bool is_nan) {
      const auto of_token = [&](const Gradients& all) {
        return Slice(Slice(all.at(name).view(), 1, head, 1), 2, token, 1);
      };
      expect(name, of_token(gradients), of_token(clean), is_nan);
    };
    for (int64_t h = 0; h < p.query_heads; ++h) {
      for (int64_t i = 0; i < p.query_tokens; ++i) {
        expect_of_token("q", h, i, std::isnan(*expected.log_sum_exp.view().At<double>(0, h, i)));
      }
      // The last row is NaN, and sees all keys.
      for (int64_t j = 0; j < p.kv_tokens; ++j) {
        const bool is_seen = !keys.c.masked || of.tensors.key_mask.span<uint8_t>()[j];
        expect_of_token("k", h, j, is_seen && h == 0);
        expect_of_token("v", h, j, is_seen && h == 0);
      }
      if (keys.c.map.gated) {
        expect("gate", Slice(gradients.gate.view(), 0, h, 1), Slice(clean.gate.view(), 0, h, 1),
               h == 0);
      }
    }
    // A row of W whose features are 0 has no gradient.
    if (keys.c.map.feature == Feature::kRelu) return;
    expect("w", gradients.w.view(), clean.w.view(), true);
  });
}

TEST_P(LinearBackward, ReadsAndWritesViewsOfAnyStride) {
  for (const bool causal : {false, true}) {
    LinearCase c{LinearProblem(100, 100, causal, 3, 12), LinearMap(Feature::kExp, 16, 12, 1e-4)};
    c.problem.batch = 2;
    const BackwardCase of = Case(c);
    const Gradients expected = RunBackward(of);
    // The layout is [batch, tokens, channels, heads], heads fastest.
    const auto scatter = [](const Tensor& from, Tensor* storage) {
      const Shape s = from.shape();
      *storage = Tensor(from.dtype(), {s[0], s[2], s[3], s[1]});
      TensorView view = Transpose(Transpose(storage->view(), 1, 3), 2, 3);
      CopyElements(from.view(), view);
      return view;
    };
    Tensor q, k, v, out, out_gradient, q_gradient, k_gradient, v_gradient,
        w_gradient(DType::kF32, {12, 16});
    LinearResults results = EmptyResults(c.problem);
    Gradients unused = EmptyGradients(of), gathered = EmptyGradients(of);
    LinearCall run = of.tensors.Call(c);
    run.q = scatter(of.tensors.q, &q);
    run.k = scatter(of.tensors.k, &k);
    run.v = scatter(of.tensors.v, &v);
    run.out = scatter(results.out, &out);
    LinearBackwardCall written;
    RunBoth(of, run, results, unused, 2, [&](LinearBackwardCall& call) {
      call.out_gradient = scatter(of.out_gradient, &out_gradient);
      call.q_gradient = scatter(unused.q, &q_gradient);
      call.k_gradient = scatter(unused.k, &k_gradient);
      call.v_gradient = scatter(unused.v, &v_gradient);
      call.w_gradient = Transpose(w_gradient.view(), 0, 1);
      written = call;
    });
    CopyElements(written.q_gradient, gathered.q.view());
    CopyElements(written.k_gradient, gathered.k.view());
    CopyElements(written.v_gradient, gathered.v.view());
    CopyElements(written.w_gradient, TensorView(gathered.w.raw(), DType::kF32, {16, 12}));
    for (const char* name : {"q", "k", "v", "w"}) {
      EXPECT_TRUE(SameBits(gathered.at(name), expected.at(name))) << name;
    }
  }
}

TEST_P(LinearBackward, AGradientThatIsLeftOutChangesNoOther) {
  for (const bool causal : {false, true}) {
    LinearCase c{LinearProblem(100, 100, causal), LinearMap(Feature::kExp, 16, 16, 1e-2)};
    if (causal) c.map.stabiliser = KeyStabiliser::kSequence;
    const BackwardCase of = Case(c);
    const Gradients expected = RunBackward(of);
    for (const std::string only : {"q", "k", "v", "w"}) {
      LinearResults results = EmptyResults(c.problem);
      Gradients gradients = EmptyGradients(of);
      RunBoth(of, of.tensors.Call(c), results, gradients, 2, [&](LinearBackwardCall& call) {
        if (only != "q") call.q_gradient = TensorView();
        if (only != "k") call.k_gradient = TensorView();
        if (only != "v") call.v_gradient = TensorView();
        if (only != "w") call.w_gradient = TensorView();
      });
      EXPECT_TRUE(SameBits(gradients.at(only), expected.at(only))) << only;
    }
  }
}

TEST_P(LinearBackward, AnOutputGradientThatIsLeftOutIsZero) {
  for (const bool causal : {false, true}) {
    for (const bool without_out : {false, true}) {
      const LinearCase c{LinearProblem(100, 100, causal), LinearMap(Feature::kExp, 16, 16, 1e-2)};
      BackwardCase of = Case(c);
      LinearResults results = EmptyResults(c.problem);
      Gradients gradients = EmptyGradients(of);
      RunBoth(of, of.tensors.Call(c), results, gradients, 1, [&](LinearBackwardCall& call) {
        (without_out ? call.out_gradient : call.log_sum_exp_gradient) = ConstTensorView();
      });
      Fill((without_out ? of.out_gradient : of.log_sum_exp_gradient).view(), 0);
      const Gradients expected = RunBackward(of);
      for (const char* name : {"q", "k", "v", "w"}) {
        EXPECT_TRUE(SameBits(gradients.at(name), expected.at(name))) << name;
      }
    }
  }
}

TEST(LinearBackwardCpu, KeptMemoryIsSmallAndTheScratchOfCausalRunsDoesNotGrow) {
  const FeatureMap map = LinearMap(Feature::kExp, 256, 64);
  const Problem p = LinearProblem(16384, 16384, true, 8, 64);
  // Queries, keys, values and outputs are 4 x 32 MiB.
  EXPECT_LT(LinearKeptBytes(p, map), size_t{20} << 20);
  EXPECT_EQ(LinearBackwardWorkspaceBytes(LinearProblem(2000, 2000, true, 1, 64), map, 2),
            LinearBackwardWorkspaceBytes(LinearProblem(2000000, 2000000, true, 1, 64), map, 2));
}

// A key is projected and added to the sums, a query projected and multiplied by them; the backward
// pass makes three projections and two products with sums of each, and computes causal sums again.
TEST(LinearBackward, CostsAreThoseOfItsProductsAndOfEveryTensorTwice) {
  for (const bool causal : {false, true}) {
    Problem p = LinearProblem(10, 7, causal, 6, 3);
    p.batch = 2;
    p.kv_heads = 3;
    p.value_dim = 5;
    FeatureMap map = LinearMap(Feature::kExpPair, 4, 3);
    map.per_head = true;
    // Three of the ten queries see no key where the last query sees all seven.
    const double keys = 2 * 3 * 7, rows = 2 * 6 * (causal ? 7 : 10);
    const double projection = 2 * 4 * 3, sums = 2 * 8 * (5 + 1);
    EXPECT_EQ(LinearCost(p, map).flops, (keys + rows) * (projection + sums));
    EXPECT_EQ(LinearBackwardCost(p, map).flops,
              (keys + rows) * (3 * projection + 2 * sums) + (causal ? keys * sums : 0));
    // Queries, keys, values, outputs, and a matrix of each key-value head.
    const double tensors = 2 * 6 * 10 * 3 + keys * (3 + 5) + 2 * 6 * 10 * 5 + 3 * 4 * 3;
    EXPECT_EQ(LinearCost(p, map).bytes, 4 * tensors);
    EXPECT_EQ(LinearBackwardCost(p, map).bytes, 2 * 4 * tensors);
  }
}

TEST(LinearBackwardCuda, BlocksAndHeadsThatTakeTurnsGiveTheSameBits) {
  for (const bool gated : {false, true}) {
    LinearCase c{LinearProblem(70, 80, true, 4), gated ? DirectionMap(Feature::kSinCos, 16, true)
                                                       : LinearMap(Feature::kExp, 16, 16, 1e-2)};
    c.problem.batch = 2;
    c.problem.kv_heads = 2;
    c.map.per_head = gated;
    BackwardCase of(c, KernelDevice());
    const Gradients expected = RunBackward(of);
    ExpectSameBits(of, RunBackward(of, /*threads=*/3), expected);  // another order
    of.max_blocks = 3;
    ExpectSameBits(of, RunBackward(of), expected);
    for (const int64_t heads : {1, 3}) {
      of.max_held_heads = heads;
      ExpectSameBits(of, RunBackward(of), expected);
    }
  }
}

TEST(LinearBackwardCuda, WarpsMeetNoBankTwice) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator counts bank conflicts";
  BackwardCase of({LinearProblem(70, 70, true, 1, 64), LinearMap(Feature::kExp, 64, 64, 1e-2)},
                  KernelDevice());
  of.counts_bank_conflicts = true;
  cuda_simulator::TakeBankUses();
  RunBackward(of);
  const std::vector<cuda_simulator::BankUse> uses = cuda_simulator::TakeBankUses();
  int64_t wavefronts = 0;
  for (const cuda_simulator::BankUse& use : uses) {
    if (use.kernel.rfind("LinearBackward<", 0) != 0) continue;
    wavefronts += use.wavefronts;
    EXPECT_EQ(use.extra, 0) << cuda_simulator::Describe(uses);
  }
  EXPECT_GT(wavefronts, 0);
}

TEST(LinearBackwardCuda, TheScratchIsLinearInTokensAndForSomeHeadsAtATime) {
  const FeatureMap map = LinearMap(Feature::kExp, 256, 64);
  const auto bytes = [&](int64_t tokens, int64_t heads, bool causal) {
    return LinearCuda::BackwardWorkspaceBytes(LinearProblem(tokens, tokens, causal, heads, 64),
                                              map);
  };
  for (const bool causal : {false, true}) {
    EXPECT_LE(bytes(200000, 1, causal), 2 * bytes(100000, 1, causal));
    EXPECT_EQ(bytes(16384, 100, causal), bytes(16384, 200, causal));
    EXPECT_LE(bytes(32768, 128, causal), size_t{256} << 20);
    EXPECT_EQ(bytes(65536, 128, causal), bytes(65536, 1, causal));
  }
  EXPECT_EQ(bytes(65536, 128, true) >> 20, 492u);
}

// Features of sines and cosines have sums of both signs.
TEST_P(LinearBackward, AHeldDenominatorKeepsItsSign) {
  for (const bool gated : {false, true}) {
    LinearCase c{LinearProblem(80, 80, true), DirectionMap(Feature::kSinCos, 1, gated)};
    c.map.denominator_floor = 0.3;
    c.magnitude = 3;
    const BackwardCase of = Case(c);
    const Reals reals = RealsOf(of);
    const Formula formula(c, of.tensors, reals);
    int64_t held_below_zero = 0;
    formula.ForEachRow([&](int64_t b, int64_t h, int64_t i) {
      const Row row = formula.Evaluate(b, h, i);
      held_below_zero += row.is_held && row.denominator < 0 ? 1 : 0;
    });
    EXPECT_GT(held_below_zero, 0);
    ExpectGradientsOfFormula(of);
  }
}

// The projections of padding are 0, which the stabiliser must not take for a token's.
TEST_P(LinearBackward, MaximaBelowZeroAreThoseOfTheTokensAlone) {
  for (const KeyStabiliser stabiliser : {KeyStabiliser::kRunning, KeyStabiliser::kSequence}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(90, 90, causal), LinearMap(Feature::kExp, 1, 8, 1e-2)};
      c.map.stabiliser = stabiliser;
      c.masked = true;
      BackwardCase of = Case(c);
      for (float& x : of.tensors.w.span<float>()) x = std::abs(x);
      for (float& x : of.tensors.k.span<float>()) x = -std::abs(x);
      of.tensors.key_mask.span<uint8_t>()[0] = 0;
      ExpectGradientsOfFormula(of);
    }
  }
}

// The square of a length is no factor of a ReLU's features, and without a stabiliser it leaves epsilon
// alone of an exponential's.
TEST_P(LinearBackward, IsThatOfTheFormulaWhereSquaresOfQueriesOrKeysAreBeyondFp32) {
  for (const Feature feature : {Feature::kRelu, Feature::kExp}) {
    for (const bool causal : {false, true}) {
      for (Tensor LinearTensors::*longer : {&LinearTensors::q, &LinearTensors::k}) {
        LinearCase c{LinearProblem(90, 90, causal),
                     LinearMap(feature, 12, 16, feature == Feature::kExp ? 1e-2 : 0)};
        c.map.stabiliser = KeyStabiliser::kNone;
        BackwardCase of = Case(c);
        for (float& x : (of.tensors.*longer).span<float>()) x *= 1e20f;
        ExpectGradientsOfFormula(of);
      }
    }
  }
}

// Without epsilon a key whose square is beyond fp32 is as one that is masked, with it as a shorter one
// whose exponentials are 0, too.
TEST_P(LinearBackward, KeysWhoseSquaresAreBeyondFp32ChangeNothingThroughTheirExponentials) {
  ForEachLongKeys(kKeysOfGroups, [](const LongKeys& keys) {
    const Problem& p = keys.c.problem;
    if (!IsExponential(keys.c.map.feature) || keys.c.map.unit) return;
    // The simulator takes calls of one and of three chunks. The features of pairs would take as long
    // again.
    if (GetParam() != Device::kCpu &&
        (p.kv_tokens < 70 || p.kv_tokens > 140 || keys.c.map.feature != Feature::kExp)) {
      return;
    }
    const auto run = [&](const LinearTensors& tensors, bool is_masked) {
      BackwardCase of = Case(keys.c);
      CopyElements(tensors.k.view(), of.tensors.k.view());
      of.tensors.key_mask = Tensor(DType::kU8, {1, p.kv_tokens});
      for (int64_t j = 0; j < p.kv_tokens; ++j) {
        const bool is_hidden = is_masked && j >= keys.first && j < keys.last;
        of.tensors.key_mask.span<uint8_t>()[j] =
            !is_hidden && (!keys.c.masked || tensors.key_mask.span<uint8_t>()[j] != 0);
      }
      return RunBackward(of, 2);
    };
    const Gradients gradients = run(keys.tensors, false),
                    expected = run(keys.shorter, keys.c.map.epsilon == 0);
    for (const char* name : {"q", "k", "v"}) {
      const ConstTensorView found = Slice(gradients.at(name).view(), 1, 0, 1),
                            other = Slice(expected.at(name).view(), 1, 0, 1);
      ForEachOffset(found, other, [&](int64_t at, int64_t of_other) {
        ASSERT_EQ(found.Get(at), other.Get(of_other))
            << Describe(keys.c) << ", " << name << ", element " << at;
      });
    }
  });
}

// The features of the query are finite, all 0.
TEST_P(LinearBackward, AnInfiniteQueryReachesExactlyTheKeysThatItSees) {
  constexpr int64_t kTokens = 140, kPlace = 77;
  LinearCase c{LinearProblem(kTokens, kTokens, true, 1), LinearMap(Feature::kRelu, 64, 16, 1e-2)};
  BackwardCase of = Case(c);
  for (float& x : of.tensors.w.span<float>()) x = std::abs(x);
  const Gradients clean = RunBackward(of);
  of.tensors.q.span<float>()[kPlace * 16 + 3] = -std::numeric_limits<float>::infinity();
  const Gradients gradients = RunBackward(of);
  EXPECT_TRUE(std::isnan(*gradients.q.view().At<float>(0, 0, kPlace, 0)));
  for (const int64_t key : {int64_t{0}, kPlace}) {
    EXPECT_TRUE(std::isnan(*gradients.k.view().At<float>(0, 0, key, 0))) << key;
  }
  EXPECT_TRUE(SameTokens(gradients.q, clean.q, 0, kPlace));
  EXPECT_TRUE(SameTokens(gradients.q, clean.q, kPlace + 1, kTokens));
  EXPECT_TRUE(SameTokens(gradients.k, clean.k, kPlace + 1, kTokens));
}

// D is a constant where the floor holds it, and 0 where all features are.
TEST_P(LinearBackward, ANaNGradientOfTheLogSumExpReachesNothingThroughAConstantDenominator) {
  for (const bool causal : {false, true}) {
    for (const double floor : {0.0, 0.3}) {
      LinearCase c{LinearProblem(80, 80, causal), LinearMap(Feature::kRelu, 4, 16, 0)};
      c.map.denominator_floor = floor * (causal ? 1 : 20);
      BackwardCase of = Case(c);
      const Reals reals = RealsOf(of);
      const Formula formula(c, of.tensors, reals);
      const Gradients clean = RunBackward(of);
      int64_t constant = 0;
      formula.ForEachRow([&](int64_t b, int64_t h, int64_t i) {
        const Row row = formula.Evaluate(b, h, i);
        if (!row.is_held && row.denominator != 0) return;
        ++constant;
        *of.log_sum_exp_gradient.view().MutableAt<float>(b, h, i) = std::nanf("");
      });
      EXPECT_GT(constant, 0);
      EXPECT_LT(constant, 160);
      const Gradients poisoned = RunBackward(of);
      for (const char* name : {"q", "k", "v", "w"}) {
        EXPECT_TRUE(SameBits(clean.at(name), poisoned.at(name))) << name << floor << causal;
      }
    }
  }
}

// The maximum over the sequence is a later key's, which the row does not see but depends on.
TEST_P(LinearBackward, ANaNReachesTheKeyWithTheMaximumOfTheSequence) {
  constexpr int64_t kTokens = 140, kPlace = 20, kMaximum = 100;
  LinearCase c{LinearProblem(kTokens, kTokens, true, 1), LinearMap(Feature::kExp, 16, 16, 1e-2)};
  c.map.stabiliser = KeyStabiliser::kSequence;
  for (const char which : {'q', 'g', 'l'}) {
    BackwardCase of = Case(c);
    for (int64_t c = 0; c < 16; ++c) of.tensors.k.span<float>()[kMaximum * 16 + c] *= 3;
    const Gradients clean = RunBackward(of);
    Tensor& tensor = which == 'q'   ? of.tensors.q
                     : which == 'g' ? of.out_gradient
                                    : of.log_sum_exp_gradient;
    Fill(Slice(tensor.view(), 2, kPlace, 1), std::nan(""));
    const Gradients poisoned = RunBackward(of);
    for (int64_t j = kPlace + 1; j < kTokens; ++j) {
      if (j == kMaximum) {
        EXPECT_TRUE(std::isnan(*poisoned.k.view().At<float>(0, 0, j, 0))) << which;
      } else {
        EXPECT_TRUE(SameTokens(poisoned.k, clean.k, j, j + 1)) << which << j;
      }
    }
    EXPECT_TRUE(SameTokens(poisoned.v, clean.v, kPlace + 1, kTokens)) << which;
  }
}

TEST_P(LinearBackward, ANaNOfAGradientReachesTheValuesThatItsRowSees) {
  for (const bool causal : {false, true}) {
    for (const int64_t place : {5, 77}) {
      BackwardCase of =
          Case({LinearProblem(140, 140, causal, 1), LinearMap(Feature::kExp, 16, 16, 1e-4)});
      Fill(Slice(of.out_gradient.view(), 2, place, 1), std::nan(""));
      const Gradients gradients = RunBackward(of);
      for (int64_t j = 0; j < 140; ++j) {
        EXPECT_EQ(std::isnan(*gradients.v.view().At<float>(0, 0, j, 0)), !causal || j <= place)
            << j;
      }
    }
  }
}

TEST_P(LinearBackward, AQueryWithoutKeysMayHoldAnything) {
  LinearCase c{LinearProblem(140, 140, true, 3), LinearMap(Feature::kExp, 16, 16, 1e-4)};
  c.masked = true;
  BackwardCase of = Case(c);
  of.tensors.key_mask.span<uint8_t>()[0] = 0;
  const Gradients clean = RunBackward(of);
  Fill(Slice(of.tensors.q.view(), 2, 0, 1), std::nan(""));
  const Gradients poisoned = RunBackward(of);
  for (const char* name : {"q", "k", "v", "w"}) {
    EXPECT_TRUE(SameBits(clean.at(name), poisoned.at(name))) << name;
  }
}

}  // namespace
}  // namespace tfb
