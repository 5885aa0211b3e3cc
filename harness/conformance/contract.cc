// Tests the guarantees of a layer to its callers: parameters can be replaced, and invalid calls are
// refused with a reason.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/safetensors.h"
#include "gtest/gtest.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {
namespace {

// Parameters that a technique computes instead of drawing are replaced like any others.
void ChangedParametersChangeTheLayer(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  if (trial->layer().parameters().empty()) return Skip("the technique has no parameters");
  const NamedTensors smaller = Smaller(trial->layer().parameters());
  const absl::Status set = trial->layer().SetParameters(smaller);
  ASSERT_TRUE(set.ok()) << set;
  trial->ExpectRunMatchesDefinition();
}

// A layer that gets another's parameters, through a file, computes the same as that layer.
void ParametersMakeTheLayer(const Job& job) {
  const auto trial = Trial::Make(job, kSeed);
  const auto other = trial == nullptr ? nullptr : Trial::Make(job, kSeed + 1);
  if (other == nullptr) return;
  if (trial->layer().parameters().empty()) return Skip("the technique has no parameters");
  const std::string path = absl::StrCat(::testing::TempDir(), "/parameters.", getpid());
  ASSERT_TRUE(WriteSafetensors(path, other->layer().parameters()).ok());
  const auto file = ReadSafetensors(path);
  unlink(path.c_str());
  ASSERT_TRUE(file.ok()) << file.status();
  const NamedTensors before = trial->Run();
  const absl::Status set = trial->layer().SetParameters(file->tensors);
  ASSERT_TRUE(set.ok()) << set;
  ExpectSameBits(trial->layer().parameters(), other->layer().parameters(), "parameters");
  other->inputs() = Copies(trial->inputs());
  const NamedTensors outputs = trial->Run();
  ExpectSameBits(outputs, other->Run(), "the layer given parameters and the one they are from");
  trial->ExpectMatchesDefinition(outputs);
}

void WrongParametersAreRefused(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  NamedTensors unknown;
  unknown["no_such_parameter"] = Tensor(DType::kF32, {1});
  const absl::Status status = trial->layer().SetParameters(unknown);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "no_such_parameter")) << status;
  for (const auto& [name, tensor] : trial->layer().parameters()) {
    Shape longer = tensor.shape();
    ++longer[0];
    NamedTensors wrong;
    wrong[name] = Tensor(tensor.dtype(), longer);
    Fill(wrong[name].view(), 0);
    const absl::Status refused = trial->layer().SetParameters(wrong);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_TRUE(absl::StrContains(refused.message(), name)) << refused;
    if (IsFloating(tensor.dtype()) || tensor.num_elements() == 0) continue;
    // A number that is not whole, none at all, and one beyond any integer.
    for (const double value : {0.5, std::nan(""), 1e10}) {
      wrong[name] = Tensor(DType::kF64, tensor.shape());
      Fill(wrong[name].view(), value);
      EXPECT_EQ(trial->layer().SetParameters(wrong).code(), absl::StatusCode::kInvalidArgument)
          << name << " of " << value;
    }
  }
}

void ExpectError(const absl::Status& status, absl::StatusCode code, absl::string_view part) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
}

void WrongCallsAreRefusedWithAReason(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  Layer& layer = trial->layer();
  ThreadPool pool(2);
  const auto bound = Bind(trial.get(), &pool);
  ASSERT_TRUE(bound.ok()) << bound.status();
  const Execution good = bound->execution;
  const size_t needed = layer.workspace_bytes(good.pool->threads());
  const Inputs& inputs = bound->inputs;
  const Outputs& outputs = bound->outputs;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectError(layer.Run(inputs, outputs, good), absl::StatusCode::kFailedPrecondition, "Setup");
  ASSERT_TRUE(layer.Setup(inputs, good).ok());
  if (needed > 0) {
    std::byte* const bytes = good.workspace.data();
    ExpectError(layer.Run(inputs, outputs, {good.pool, absl::MakeSpan(bytes, needed - 1), nullptr}),
                kInvalid, absl::StrCat(needed));
    ExpectError(layer.Run(inputs, outputs, {good.pool, absl::MakeSpan(bytes + 1, needed), nullptr}),
                kInvalid, "aligned");
  }
  ExpectError(layer.Run(inputs, outputs, {nullptr, good.workspace, nullptr}), kInvalid, "pool");
  ExpectError(layer.Run({}, outputs, good), kInvalid, "missing");
  ExpectError(layer.Run(inputs, {}, good), kInvalid, "output out");
  Inputs more = inputs;
  more.Set("no_such_input", inputs.begin()->second);
  ExpectError(layer.Run(more, outputs, good), kInvalid, "no_such_input");
  for (const auto& [name, view] : inputs) {
    if (view.dim(0) == 0) continue;
    Inputs wrong = inputs;
    wrong.Set(name, Slice(view, 0, 0, view.dim(0) - 1));
    ExpectError(layer.Run(wrong, outputs, good), kInvalid, name);
    ConstTensorView other_type = view;
    other_type.dtype = view.dtype == DType::kF64 ? DType::kF32 : DType::kF64;
    wrong.Set(name, other_type);
    ExpectError(layer.Run(wrong, outputs, good), kInvalid, "f64");
  }
  EXPECT_TRUE(bound->Run().ok());
  EXPECT_TRUE(bound->Synchronize().ok());
}

void OptionalOutputsMayBeLeftOut(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors all = trial->Run();
  if (all.empty()) return;
  ThreadPool pool(2);
  const auto bound = Bind(trial.get(), &pool, /*optional_outputs=*/false);
  ASSERT_TRUE(bound.ok()) << bound.status();
  if (bound->outputs.size() == all.size()) return Skip("the technique has no optional output");
  const absl::Status status = bound->Run();
  ASSERT_TRUE(status.ok()) << status;
  const auto written = bound->Results();
  ASSERT_TRUE(written.ok()) << written.status();
  NamedTensors required;
  for (const auto& [name, tensor] : *written) required[name] = all.at(name).Clone();
  ExpectSameBits(required, *written, "with and without optional outputs");
}

// The requested rows equal those rows of the whole.
void ADefinitionOfSomeRowsIsPartOfTheWhole(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors whole = trial->Define();
  const std::vector<int64_t> rows = {0, 5, 64, job.problem.query_tokens - 1};
  NamedTensors some;
  DefinitionRequest request;
  request.rows = rows;
  const absl::Status status =
      job.technique->Define(job.problem, job.options, trial->layer().parameters(),
                            ViewsOf(trial->inputs()), request, &some);
  ASSERT_TRUE(status.ok()) << status;
  const Tensor& out = some.at("out");
  if (out.shape() == whole.at("out").shape()) return Skip("the definition evaluates all rows");
  const int axis = TokenAxis(out.view());
  ASSERT_EQ(out.dim(axis), static_cast<int64_t>(rows.size()));
  for (size_t r = 0; r < rows.size(); ++r) {
    NamedTensors a, b;
    Shape one = out.shape();
    one[axis] = 1;
    a["out"] = Tensor(DType::kF64, one);
    b["out"] = Tensor(DType::kF64, one);
    CopyElements(Slice(out.view(), axis, static_cast<int64_t>(r), 1), a["out"].view());
    CopyElements(Slice(whole.at("out").view(), axis, rows[r], 1), b["out"].view());
    ExpectSameBits(a, b, absl::StrCat("row ", rows[r]));
  }
}

}  // namespace

std::vector<Case> ContractCases() {
  return {
      {"ParametersMakeTheLayer", "", UsualBoth(), ParametersMakeTheLayer},
      {"ChangedParametersChangeTheLayer", "", UsualBoth(), ChangedParametersChangeTheLayer},
      {"WrongParametersAreRefused", "", UsualBoth(), WrongParametersAreRefused},
      {"WrongCallsAreRefusedWithAReason", "", UsualBoth(), WrongCallsAreRefusedWithAReason},
      {"OptionalOutputsMayBeLeftOut", "", UsualBoth(), OptionalOutputsMayBeLeftOut},
      {"ADefinitionOfSomeRowsIsPartOfTheWhole", "", UsualBoth(),
       ADefinitionOfSomeRowsIsPartOfTheWhole},
  };
}

}  // namespace tfb::conformance
