// Tests that the same inputs give the same bits: twice, on any number of threads, and whatever else
// is in the batch; and that the past does not depend on the future.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "harness/conformance/allocation_meter.h"
#include "harness/conformance/trial.h"
#include "harness/inputs/inputs.h"

namespace tfb::conformance {
namespace {

void TwoRunsGiveTheSameBits(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors first = trial->Run();
  ExpectSameBits(first, trial->Run(RunSettings::WithoutSetup()), "the first run and the second");
  ExpectSameBits(first, trial->Run(), "before and after another Setup");
}

void TwoLayersOfASeedGiveTheSameBits(const Job& job) {
  const auto one = Trial::Make(job);
  const auto other = Trial::Make(job);
  if (one == nullptr || other == nullptr) return;
  ExpectSameBits(one->layer().parameters(), other->layer().parameters(), "parameters");
  ExpectSameBits(one->Run(), other->Run(), "two layers of a seed");
}

void AnyNumberOfThreadsGivesTheSameBits(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors one = trial->Run(RunSettings::Threads(1));
  // On a device the threads are the host's, which do not matter there.
  const bool on_cpu = job.device == Device::kCpu;
  for (const int threads : on_cpu ? std::vector<int>{2, 3, 7} : std::vector<int>{7}) {
    ExpectSameBits(one, trial->Run(RunSettings::Threads(threads)), absl::StrCat("1 and ", threads));
  }
}

// Tests the same of the definition, whose work a pool's threads share.
void AnyNumberOfThreadsDefinesTheSameBits(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors alone = trial->Define(/*weights=*/true);
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    ExpectSameBits(alone, trial->Define(/*weights=*/true, &pool),
                   absl::StrCat("a definition without a pool and with one of ", threads));
  }
}

// Compares batch 0 alone and beside another: draws depend only on (seed, batch, head, token). Where
// cuBLAS computes products, whose order of sums depends on the number of rows, both results are held
// to the bounds of the definition of that batch in place of the bits.
void ABatchDoesNotDependOnItsCompany(const Job& job) {
  const auto both = Trial::Make(job);
  Problem single = job.problem;
  single.batch = 1;
  const auto alone = both == nullptr ? nullptr : Trial::Make(On(single, job));
  if (alone == nullptr) return;
  for (auto& [name, tensor] : alone->inputs()) {
    ASSERT_EQ(tensor.dim(0), 1) << name << " has no batch";
    CopyElements(Slice(std::as_const(both->inputs()).at(name).view(), 0, 0, 1), tensor.view());
  }
  for (const auto& [name, tensor] : alone->layer().parameters()) {
    const Tensor& other = both->layer().parameters().at(name);
    if (other.shape() == tensor.shape()) continue;
    return Skip(absl::StrCat("parameter ", name, " has the batch's size"));
  }
  ExpectSameBits(alone->layer().parameters(), both->layer().parameters(), "parameters");
  const int64_t products = CublasProducts(job.device);
  const NamedTensors of_both = both->Run(), of_one = alone->Run();
  if (of_both.empty() || of_one.empty()) return;
  NamedTensors firsts;
  for (const auto& [name, tensor] : of_one) {
    firsts[name] = Tensor(tensor.dtype(), tensor.shape());
    CopyElements(Slice(of_both.at(name).view(), 0, 0, 1), firsts[name].view());
  }
  const char kWhat[] = "alone and beside another batch";
  if (CublasProducts(job.device) == products) return ExpectSameBits(of_one, firsts, kWhat);
  alone->ExpectMatchesDefinition(of_one);
  alone->ExpectMatchesDefinition(firsts);
  const NamedTensors defined = alone->Define();
  for (const auto& [name, tensor] : of_one) {
    if (defined.count(name) > 0) continue;
    EXPECT_TRUE(SameBits(tensor.view(), firsts.at(name).view())) << kWhat << ": " << name;
  }
}

void OtherSeedsDrawOtherParameters(const Job& job) {
  const auto one = Trial::Make(job, kSeed);
  const auto other = Trial::Make(job, kSeed + 1);
  if (one == nullptr || other == nullptr) return;
  if (one->layer().parameters().empty()) return Skip("the technique has no parameters");
  bool differ = false;
  for (const auto& [name, tensor] : one->layer().parameters()) {
    const Tensor& drawn = other->layer().parameters().at(name);
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      differ |= tensor.view().Get(i) != drawn.view().Get(i);
    }
  }
  if (!differ) Skip("the parameters are not drawn: they are the same for all seeds");
}

// Overwrites everything after token t: keys and values of the future, and the queries there.
void ChangeFuture(const Problem& problem, int64_t t, const NamedTensors& drawn,
                  NamedTensors* inputs) {
  for (auto& [name, tensor] : *inputs) {
    if (drawn.count(name) == 0) continue;  // this input is the selection
    const int axis = TokenAxis(tensor.view());
    const bool of_keys = name == "k" || name == "v" || name == "key_mask";
    const int64_t first = t + 1 + (of_keys ? problem.causal_offset() : 0);
    const int64_t count = tensor.dim(axis) - first;
    if (count <= 0) continue;
    CopyElements(Slice(std::as_const(drawn).at(name).view(), axis, first, count),
                 Slice(tensor.view(), axis, first, count));
  }
}

// The results of Setup, and the groups of tokens by content, are frozen: they may depend on the
// future.
void TheFutureDoesNotReachThePast(const Job& job) {
  const auto trial = Trial::Make(job);
  const auto other = trial == nullptr ? nullptr : Trial::Make(job, kSeed + 1);
  if (other == nullptr) return;
  NamedTensors before = trial->Run();
  if (before.empty()) return;
  const std::string& selection = job.technique->info().selection;
  if (!selection.empty()) {
    trial->inputs()[selection] = before.at(selection).Clone();
    before = trial->Run();
    if (before.empty()) return;
  }
  const NamedTensors setup_inputs = Copies(trial->inputs());
  std::vector<int64_t> last_tokens = {0, 62, 63, 64, 100, job.problem.query_tokens - 2};
  if (job.device == Device::kSimulator && !IsExhaustive()) last_tokens = {62, 63};
  for (const int64_t t : last_tokens) {
    trial->inputs() = Copies(setup_inputs);
    ChangeFuture(job.problem, t, other->inputs(), &trial->inputs());
    RunSettings settings;
    settings.setup_inputs = &setup_inputs;
    ExpectSameTokens(before, trial->Run(settings), t + 1, job.problem,
                     absl::StrCat("tokens after ", t, " changed"));
  }
}

void RunAllocatesNothing(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const bool on_cpu = job.device == Device::kCpu;
  for (const int threads : on_cpu ? std::vector<int>{1, 2} : std::vector<int>{2}) {
    ThreadPool pool(threads);
    const auto bound = Bind(trial.get(), &pool);
    ASSERT_TRUE(bound.ok()) << bound.status();
    ASSERT_TRUE(bound->Setup().ok());
    ASSERT_TRUE(bound->Synchronize().ok());
    // The first run counts as well: a layer must not postpone allocations to it.
    for (int run = 0; run < 2; ++run) {
      const AllocationMeter meter(bound->runtime);
      const absl::Status status = bound->Run();
      const int64_t allocations = meter.count();
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(allocations, 0) << "in run " << run << " with " << threads << " threads";
    }
    EXPECT_TRUE(bound->Synchronize().ok());
  }
}

std::vector<Problem> CausalProblems() {
  Problem more_keys = Usual(true);
  more_keys.kv_tokens = 200;
  return {Usual(true), more_keys};
}

std::vector<Problem> UsualIn16Bits() {
  return {Usual(false, DType::kBF16), Usual(true, DType::kF16)};
}

// Returns the share of the elements that differ.
double ShareThatDiffers(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  int64_t differing = 0;
  for (int64_t n = 0; n < a.num_elements(); ++n) {
    const double x = a.view().Get(n), y = b.view().Get(n);
    differing += !(x == y || (std::isnan(x) && std::isnan(y)));
  }
  return static_cast<double>(differing) /
         static_cast<double>(std::max<int64_t>(1, a.num_elements()));
}

// A definition may follow the layer's choice only among scores that are equal in fp32: of the
// choices of a run on other inputs it follows hardly any (at most for a token or two).
void ADefinitionFollowsNoChoiceOfARunOnOtherInputs(const Job& job) {
  const auto trial = Trial::Make(job);
  const auto other = trial == nullptr ? nullptr : Trial::Make(job, kSeed + 1);
  if (other == nullptr) return;
  const NamedTensors choices = other->Run();
  const auto define = [&](const NamedTensors* computed) {
    return trial->DefineOn(ViewsOf(trial->inputs()), trial->layer().parameters(),
                           /*weights=*/false, computed);
  };
  const NamedTensors own = define(nullptr), with = define(&choices);
  if (own.empty() || with.empty()) return;
  EXPECT_LE(ShareThatDiffers(own.at("out"), with.at("out")), 0.02);
}

}  // namespace

std::vector<Case> DeterminismCases() {
  std::vector<Problem> all = UsualBoth();
  for (const Problem& problem : UsualIn16Bits()) all.push_back(problem);
  Case company = {"ABatchDoesNotDependOnItsCompany", "35", UsualBoth(),
                  ABatchDoesNotDependOnItsCompany};
  // With fewer tokens a device would split the keys over its blocks, the more the smaller the
  // batch, and the order of sums would depend on it.
  company.simulated_size = SimulatedSize::kSameSizes;
  return {
      {"TwoRunsGiveTheSameBits", "35", all, TwoRunsGiveTheSameBits},
      {"TwoLayersOfASeedGiveTheSameBits", "35", UsualBoth(), TwoLayersOfASeedGiveTheSameBits},
      {"AnyNumberOfThreadsGivesTheSameBits", "35", all, AnyNumberOfThreadsGivesTheSameBits},
      {"AnyNumberOfThreadsDefinesTheSameBits", "", UsualBoth(),
       AnyNumberOfThreadsDefinesTheSameBits},
      company,
      {"OtherSeedsDrawOtherParameters", "35", {Usual(true)}, OtherSeedsDrawOtherParameters},
      OfCausality(
          {"TheFutureDoesNotReachThePast", "", CausalProblems(), TheFutureDoesNotReachThePast}),
      {"RunAllocatesNothing", "", all, RunAllocatesNothing},
      {"ADefinitionFollowsNoChoiceOfARunOnOtherInputs",
       "",
       {Usual(true)},
       ADefinitionFollowsNoChoiceOfARunOnOtherInputs},
  };
}

}  // namespace tfb::conformance
