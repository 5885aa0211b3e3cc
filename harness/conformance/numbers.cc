// Tests numbers that break arithmetic: large, tiny, equal, tied; 16 bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/denormals.h"
#include "gtest/gtest.h"
#include "harness/conformance/trial.h"
#include "harness/judge/evaluate.h"

namespace tfb::conformance {
namespace {

using Change = std::function<void(const Problem&, NamedTensors*)>;

void Scale(Tensor* tensor, double factor) {
  for (int64_t i = 0; i < tensor->num_elements(); ++i) {
    tensor->view().Set(i, factor * tensor->view().Get(i));
  }
}

double LongestRow(const ConstTensorView& view) {
  const DoubleTensor rows(view);
  double longest = 0;
  for (int64_t row = 0; row < rows.size() / std::max<int64_t>(view.dim(3), 1); ++row) {
    longest = std::max(longest, Dot(rows.Row(row), rows.Row(row), view.dim(3)));
  }
  return std::sqrt(longest);
}

// Returns the extra error of an estimator of dense attention, which takes differences of exponents
// as large as |q||k| / sqrt(d), and so of their roundings, where dense attention has only the
// scores: eight of them in log_sum_exp.
double RoundingOfExponents(const Problem& problem, NamedTensors& inputs) {
  return 8 * UnitRoundoff(DType::kF32) * LongestRow(inputs["q"].view()) *
         LongestRow(KeysOf(inputs).view()) / std::sqrt(static_cast<double>(problem.head_dim));
}

// Changes the drawn inputs, runs, and compares.
Case Changed(const std::string& name, const std::string& numbers, std::vector<Problem> problems,
             const Tolerance& tolerance, const Change& change) {
  return {name, numbers, std::move(problems), [=](const Job& job) {
            const auto trial = Trial::Make(job);
            if (trial == nullptr || !trial->RequireQkv()) return;
            change(job.problem, &trial->inputs());
            Tolerance allowed = tolerance;
            if (job.technique->info().exactness != Exactness::kExact) {
              allowed.log_sum_exp = RoundingOfExponents(job.problem, trial->inputs());
            }
            trial->ExpectRunMatchesDefinition(allowed);
          }};
}

// Makes scores of about +-1e4, of both signs, since the draws have them.
void LargeScores(const Problem& problem, NamedTensors* inputs) {
  const double rms = std::sqrt(1e4 / std::sqrt(std::sqrt(static_cast<double>(problem.head_dim))));
  Scale(&inputs->at("q"), rms);
  if (inputs->count("k") > 0) Scale(&inputs->at("k"), rms);
}

// Gives key 77 a score of 1e5 with every query; the others have about 1.
void OneScoreOf1e5(const Problem& problem, NamedTensors* inputs) {
  const TensorView q = inputs->at("q").view();
  const TensorView k = KeysOf(*inputs).view();
  const double root = std::sqrt(static_cast<double>(problem.head_dim));
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      for (int64_t i = 0; i < problem.query_tokens; ++i) q.Set(q.Offset(b, h, i, 0), 1);
    }
    for (int64_t h = 0; h < problem.kv_heads; ++h) k.Set(k.Offset(b, h, 77, 0), 1e5 * root);
  }
}

void Denormal(const Problem&, NamedTensors* inputs) {
  for (auto& [name, tensor] : *inputs) {
    if (name == "q" || name == "k" || name == "v") Scale(&tensor, 1e-40);
  }
}

void EqualKeys(const Problem& problem, NamedTensors* inputs) {
  const TensorView k = KeysOf(*inputs).view();
  for (int64_t j = 1; j < problem.kv_tokens; ++j) {
    CopyElements(Slice(k, 2, 0, 1), Slice(k, 2, j, 1));
  }
}

void ZeroQueries(const Problem&, NamedTensors* inputs) { Fill(inputs->at("q").view(), 0); }
void ZeroKeys(const Problem&, NamedTensors* inputs) { Fill(KeysOf(*inputs).view(), 0); }
void ConstantValues(const Problem&, NamedTensors* inputs) { Fill(inputs->at("v").view(), -3.25); }
void ZeroValues(const Problem&, NamedTensors* inputs) { Fill(inputs->at("v").view(), 0); }

// Makes keys 2 j and 2 j + 1 equal, but not their values.
void TiedKeys(const Problem& problem, NamedTensors* inputs) {
  const TensorView k = KeysOf(*inputs).view();
  for (int64_t j = 0; j + 1 < problem.kv_tokens; j += 2) {
    CopyElements(Slice(k, 2, j, 1), Slice(k, 2, j + 1, 1));
  }
}

// Makes features such as exp(w.x - |x|^2 / 2) tiny, and with them the sum that divides.
void LongVectors(const Problem&, NamedTensors* inputs) {
  Scale(&inputs->at("q"), 4);
  if (inputs->count("k") > 0) Scale(&inputs->at("k"), 4);
}

void HugeValues(const Problem&, NamedTensors* inputs) { Scale(&inputs->at("v"), 1e30); }

// Makes elements of +-300: products of 9e4 and sums of them overflow 16 bits, not fp32.
void OverflowingProducts(const Problem&, NamedTensors* inputs) {
  for (Tensor* of : {&inputs->at("q"), &KeysOf(*inputs)}) {
    Tensor& tensor = *of;
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      tensor.view().Set(i, tensor.view().Get(i) < 0 ? -300 : 300);
    }
  }
}

// Where all values are the same, the output equals them, whatever the weights.
void ConstantValuesComeBack(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr || !trial->RequireQkv() || !trial->RequireExact()) return;
  Fill(trial->inputs().at("v").view(), -3.25);
  const NamedTensors weights = trial->Define(/*weights=*/true);
  const NamedTensors outputs = trial->Run();
  const auto found = weights.find("weights");
  if (outputs.empty() || found == weights.end()) return;
  // This holds only where the definition is a mean of the values: its weights sum to 1 and give its
  // output.
  const Tensor& out = outputs.at("out");
  const int64_t keys = job.problem.kv_tokens;
  const int64_t rows = out.num_elements() / job.problem.value_dim;
  int64_t checked = 0;
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) sum += found->second.view().Get(row * keys + j);
    const double defined = weights.at("out").view().Get(row * job.problem.value_dim);
    if (std::abs(sum - 1) > 1e-9 || std::abs(defined + 3.25) > 1e-9) continue;
    for (int64_t c = 0; c < job.problem.value_dim; ++c) {
      ASSERT_NEAR(out.view().Get(row * job.problem.value_dim + c), -3.25, 3.25 * 2e-5)
          << "row " << row;
    }
    ++checked;
  }
  if (checked == 0) return Skip("the definition is no mean of the values");
  EXPECT_GE(2 * checked, rows) << "too few rows are means of the values";
}

// Returns the floating-point numbers of a tensor, as they are stored.
std::set<double> ValuesOf(const NamedTensors& tensors) {
  std::set<double> values;
  for (const auto& [name, tensor] : tensors) {
    for (int64_t i = 0; IsFloating(tensor.dtype()) && i < tensor.num_elements(); ++i) {
      values.insert(tensor.view().Get(i));
    }
  }
  return values;
}

// An engine that keeps the rule of core/denormals.h writes a denormal number only where it copies
// one. An engine thread that does not flush them would write others: on inputs this small, sums,
// products and means are denormal. cuBLAS does not flush them, and need not, since a GPU is as fast on
// them: a layer that has it compute products on a GPU may write what it computed.
void NoDenormalIsComputed(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors drawn = Copies(trial->inputs());
  const FloatingPointControl before = FloatingPointControl::Current();
  const int64_t products = CublasProducts(job.device);
  std::string computed;
  for (const double scale : {1e-38, 1e-40}) {
    trial->inputs() = Copies(drawn);
    for (auto& [name, tensor] : trial->inputs()) {
      if (IsFloating(tensor.dtype())) Scale(&tensor, scale);
    }
    std::set<double> copied = ValuesOf(trial->inputs());
    copied.merge(ValuesOf(trial->layer().parameters()));
    for (const auto& [name, tensor] : trial->Run()) {
      for (int64_t i = 0; tensor.dtype() == DType::kF32 && i < tensor.num_elements(); ++i) {
        const double value = tensor.view().Get(i);
        if (std::fpclassify(static_cast<float>(value)) != FP_SUBNORMAL) continue;
        if (computed.empty() && copied.count(value) == 0) {
          computed = absl::StrCat(name, "[", i, "] is ", value);
        }
      }
    }
  }
  EXPECT_EQ(FloatingPointControl::Current(), before) << "the caller's floating-point state changed";
  if (CublasProducts(job.device) == products) {
    EXPECT_EQ(computed, "");
  } else if (!computed.empty()) {
    Skip(absl::StrCat("cuBLAS flushes no denormal number: ", computed));
  }
}

// The error in 16 bits is at most twice that of the dense counterpart in the same precision.
void SixteenBitsAreAsGoodAsDenseAttention(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  ThreadPool pool(2);
  EvaluateRequest request;
  request.job = job;
  request.inputs = &trial->inputs();
  request.pool = &pool;
  const auto accuracy = Evaluate(request);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_TRUE(accuracy->passed) << accuracy->failure;
  if (!accuracy->no_dense_reason.empty()) {
    std::cout << "  no ratio to dense attention: " << accuracy->no_dense_reason << "\n";
  }
}

std::vector<Problem> SixteenBit(const std::vector<int64_t>& tokens) {
  std::vector<Problem> problems;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool causal : {false, true}) {
      for (const int64_t count : tokens) {
        problems.push_back(Problem::SelfAttention(2, 2, count, 16, causal, dtype));
      }
    }
  }
  return problems;
}

}  // namespace

std::vector<Case> NumberCases() {
  const Tolerance conditioned = Tolerance::Conditioned();
  // Engines take a denormal value for 0 (core/denormals.h): a mean of values is off by at most the
  // largest of those, which is below the smallest normal number.
  const Tolerance denormal = Tolerance::Absolute(std::numeric_limits<float>::min());
  return {
      Changed("ScoresOf1e4", "22", UsualBoth(), conditioned, LargeScores),
      Changed("OneScoreOf1e5AmongSmallOnes", "22", UsualBoth(), conditioned, OneScoreOf1e5),
      Changed("DenormalInputs", "23", UsualBoth(), denormal, Denormal),
      {"NoDenormalIsComputed", "23", UsualBoth(), NoDenormalIsComputed},
      Changed("EqualKeys", "24", UsualBoth(), {}, EqualKeys),
      Changed("ZeroQueries", "25", UsualBoth(), {}, ZeroQueries),
      Changed("ZeroKeys", "24, 25", UsualBoth(), {}, ZeroKeys),
      Changed("ConstantValues", "26", UsualBoth(), {}, ConstantValues),
      Changed("ZeroValues", "26", UsualBoth(), {}, ZeroValues),
      {"ConstantValuesComeBack", "26", UsualBoth(), ConstantValuesComeBack},
      Changed("HugeValues", "22", UsualBoth(), {}, HugeValues),
      Changed("ProductsThatOverflow16Bits", "27", SixteenBit({130}), conditioned,
              OverflowingProducts),
      Changed("LongVectorsWhoseFeaturesVanish", "28", UsualBoth(), conditioned, LongVectors),
      Changed("TiedKeys", "29", UsualBoth(), {}, TiedKeys),
      {"SixteenBitsAreAsGoodAsDenseAttention", "27", SixteenBit({1, 65, 130}),
       SixteenBitsAreAsGoodAsDenseAttention},
  };
}

}  // namespace tfb::conformance
