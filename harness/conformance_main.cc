// Main of every technique's conformance test: holds the layers of --technique, or of every
// technique that is linked in, against the technique's own definition in float64.
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "core/status.h"
#include "core/technique.h"

ABSL_FLAG(std::string, technique, "", "the technique to test; empty for all that are linked in");

namespace tfb {
namespace {

// max|error| <= kBound max|expected| in f32, for rows of up to 16K keys.
constexpr double kBound = 2e-5;

absl::Status Compare(const NamedTensors& got, const NamedTensors& expected) {
  for (const auto& [name, tensor] : got) {
    const auto found = expected.find(name);
    if (found == expected.end())
      return absl::InternalError(absl::StrCat("no definition of ", name));
    double largest = 1, error = 0;
    ForEachOffset(tensor.view(), found->second.view(), [&](int64_t a, int64_t b) {
      const double actual = tensor.view().Get(a), wanted = found->second.view().Get(b);
      if (actual == wanted) return;  // infinities too
      largest = std::max(largest, std::abs(wanted));
      const double difference = std::abs(actual - wanted);
      error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    });
    if (error > kBound * largest) {
      return absl::InternalError(
          absl::StrCat(name, " is wrong by ", error, "; allowed are ", kBound * largest));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOn(const Technique& technique, const Problem& problem) {
  constexpr uint64_t kSeed = 1;
  TFB_ASSIGN_OR_RETURN(const auto input_specs, technique.InputSpecs(problem, {}));
  TFB_ASSIGN_OR_RETURN(const auto output_specs, technique.OutputSpecs(problem, {}));
  TFB_ASSIGN_OR_RETURN(auto layer, technique.Create(problem, {}, Device::kCpu, kSeed));
  NamedTensors inputs, outputs, expected;
  for (const TensorSpec& spec : input_specs) {
    if (spec.optional) continue;
    if (!IsFloating(spec.dtype)) return absl::UnimplementedError("integer inputs");
    FillNormal(&(inputs[spec.name] = Tensor(spec.dtype, spec.shape)), kSeed, spec.name);
  }
  for (const TensorSpec& spec : output_specs) {
    Fill((outputs[spec.name] = Tensor(spec.dtype, spec.shape)).view(), NAN);
  }
  ThreadPool pool(2);
  // Tensor memory is aligned as a workspace must be.
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(pool.threads())) + 1});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  TFB_RETURN_IF_ERROR(layer->Setup(ViewsOf(inputs), execution));
  TFB_RETURN_IF_ERROR(layer->Run(ViewsOf(inputs), MutableViewsOf(outputs), execution));
  TFB_RETURN_IF_ERROR(
      technique.Define(problem, {}, layer->parameters(), ViewsOf(inputs), {}, &expected));
  return Compare(outputs, expected);
}

int Main() {
  std::vector<const Technique*> techniques = Registry::Global().All();
  if (const std::string name = absl::GetFlag(FLAGS_technique); !name.empty()) {
    const absl::StatusOr<const Technique*> found = Registry::Global().Find(name);
    if (!found.ok()) {
      std::fprintf(stderr, "--technique: %s\n", std::string(found.status().message()).c_str());
      return 2;
    }
    techniques = {*found};
  }
  int failed = 0;
  for (const Technique* technique : techniques) {
    for (const int64_t tokens : {1, 63, 64, 65, 200}) {
      for (const bool causal : {false, true}) {
        const Problem problem = Problem::SelfAttention(2, 2, tokens, 16, causal);
        const absl::Status status = CheckOn(*technique, problem);
        const bool skipped = absl::IsUnimplemented(status) || absl::IsInvalidArgument(status);
        if (!status.ok() && !skipped) ++failed;
        std::printf("%s %s, %s: %s\n",
                    status.ok() ? "ok     "
                    : skipped   ? "skipped"
                                : "FAILED ",
                    technique->info().name.c_str(), problem.ToString().c_str(),
                    std::string(status.message()).c_str());
      }
    }
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return tfb::Main();
}
