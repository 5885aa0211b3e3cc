// Tests for errors that only a device can make: dependence on the order of its threads, waiting,
// and results that differ from the CPU's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "harness/conformance/gradient_trial.h"
#include "harness/conformance/stream_trial.h"
#include "harness/conformance/trial.h"
#include "harness/judge/errors.h"

namespace tfb::conformance {
namespace {

// Blocks run in any order, and so do threads between two barriers: the simulator tries two orders,
// or several where IsExhaustive, and a GPU has a different one every time.
void AnyOrderOfBlocksAndThreadsGivesTheSameBits(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors one = trial->Run(RunSettings::Schedule(1));
  for (uint64_t schedule = 2; schedule <= (IsExhaustive() ? 4 : 2); ++schedule) {
    ExpectSameBits(one, trial->Run(RunSettings::Schedule(schedule)),
                   absl::StrCat("schedules 1 and ", schedule));
  }
}

// Binds the trial's layer and sets it up. Returns nothing where that fails, with the test failed.
std::optional<BoundLayer> BoundAndSetUp(Trial* trial, ThreadPool* pool) {
  absl::StatusOr<BoundLayer> bound = Bind(trial, pool);
  absl::Status status = bound.status();
  if (status.ok()) status = bound->Setup();
  if (status.ok()) status = bound->Synchronize();
  EXPECT_TRUE(status.ok()) << status;
  return status.ok() ? std::optional<BoundLayer>(*std::move(bound)) : std::nullopt;
}

// Run must not wait for the device, so that other streams and the host can work meanwhile.
void RunDoesNotWaitForTheDevice(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  ThreadPool pool(2);
  const std::optional<BoundLayer> bound = BoundAndSetUp(trial.get(), &pool);
  if (!bound.has_value()) return;
  for (int run = 0; run < 2; ++run) {
    const int64_t before = bound->runtime->waits();
    const absl::Status status = bound->Run();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(bound->runtime->waits() - before, 0) << "in run " << run;
    ASSERT_TRUE(bound->Synchronize().ok());
  }
}

// A run that is captured in a CUDA graph computes the same whenever the graph is launched. A capture
// refuses calls that wait or allocate, and work on another stream than the caller's.
void AGraphOfARunGivesTheSameBits(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  ThreadPool pool(2);
  const std::optional<BoundLayer> bound = BoundAndSetUp(trial.get(), &pool);
  if (!bound.has_value()) return;
  ASSERT_TRUE(bound->Run().ok());
  const absl::StatusOr<NamedTensors> eager = bound->Results();
  ASSERT_TRUE(eager.ok()) << eager.status();
  const auto graph = DeviceGraph::Capture(bound->runtime, [&](void* stream) {
    Execution execution = bound->execution;
    execution.stream = stream;
    return bound->layer->Run(bound->inputs, bound->outputs, execution);
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (int launch = 0; launch < 2; ++launch) {
    for (const auto& [name, output] : bound->outputs) {
      const size_t bytes = static_cast<size_t>(output.num_elements()) * SizeOf(output.dtype);
      ASSERT_TRUE(bound->runtime->Fill(output.mutable_data(), 0xFF, bytes).ok()) << name;
    }
    const absl::Status status = graph->Launch();
    ASSERT_TRUE(status.ok()) << status;
    const absl::StatusOr<NamedTensors> replayed = bound->Results();
    ASSERT_TRUE(replayed.ok()) << replayed.status();
    ExpectSameBits(*eager, *replayed, absl::StrCat("eager and launch ", launch, " of the graph"));
  }
}

// The same of each segment of a stream: its graph computes what Append did at its place in the
// sequence. Between them the layer is Reset, and what it keeps is as before the first segment.
void AGraphOfEachAppendGivesTheSameBits(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const auto stream = StreamTrial::Make(trial.get());
  if (stream == nullptr) return;
  const int64_t size = std::min<int64_t>(48, stream->layer().max_segment_tokens());
  const absl::Status appended = stream->AppendAll({size});
  if (IsRefusal(appended)) return Skip(std::string(appended.message()));
  ASSERT_TRUE(appended.ok()) << appended;
  const NamedTensors eager = Copies(stream->outputs());
  ASSERT_TRUE(stream->layer().Reset().ok());
  const absl::Status captured = stream->CaptureAll({size});
  ASSERT_TRUE(captured.ok()) << captured;
  for (int launch = 0; launch < 2; ++launch) {
    ASSERT_TRUE(stream->layer().Reset().ok());
    const absl::Status status = stream->LaunchAll();
    ASSERT_TRUE(status.ok()) << status;
    ExpectSameBits(eager, stream->outputs(), absl::StrCat("eager and launch ", launch));
  }
}

// The same of a backward pass. What a Run keeps is read, and written by no launch.
void AGraphOfABackwardPassGivesTheSameBits(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors eager = trial->Backward();
  StepSettings settings = StepSettings::WithoutSetup();
  settings.in_graph = true;
  ExpectSameBits(eager, trial->Backward(settings), "the eager pass and a launch of the graph");
}

// Tells whether an output of integers, such as the keys that were found, differs between the two.
bool ChoseOtherwise(const NamedTensors& a, const NamedTensors& b) {
  for (const auto& [name, tensor] : a) {
    if (IsFloating(tensor.dtype())) continue;
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      if (tensor.view().Get(i) != b.at(name).view().Get(i)) return true;
    }
  }
  return false;
}

// Compares with the CPU's layer with the same parameters on the same inputs. Each is within its
// bound of the definition, so the two differ by at most twice the bound.
void TheDeviceAgreesWithTheCpu(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  Job on_cpu = job;
  on_cpu.device = Device::kCpu;
  if (!RunsOn(job.technique->info(), Device::kCpu)) return Skip("there is no layer of the CPU");
  const auto cpu = Trial::Make(on_cpu, kSeed + 1);
  if (cpu == nullptr) return;
  const absl::Status set = cpu->layer().SetParameters(trial->layer().parameters());
  ASSERT_TRUE(set.ok()) << set;
  cpu->inputs() = Copies(trial->inputs());
  const NamedTensors expected = cpu->Run(), outputs = trial->Run();
  ASSERT_EQ(outputs.size(), expected.size());
  // A later layer chooses by scores of states in 16 bits, and sums in another order round
  // differently. The definition accepts a choice that it finds as good as its own.
  if (SizeOf(job.problem.dtype) == 2 && ChoseOtherwise(outputs, expected)) {
    trial->ExpectMatchesDefinition(outputs);
    cpu->ExpectMatchesDefinition(expected);
    return;
  }
  const NamedTensors reference = trial->Define();
  const int64_t keys = std::max(job.problem.kv_tokens, job.problem.query_tokens);
  for (const auto& [name, output] : outputs) {
    const ConstTensorView other = expected.at(name).view();
    double bound = 0;  // of integers
    if (name == "log_sum_exp") {
      bound = 2 * LogSumExpBound(keys, LargestMagnitude(other));
    } else if (IsFloating(output.dtype())) {
      bound = 2 * AbsoluteBound(output.dtype(), keys) * trial->ScaleOf(name, other, reference);
    }
    double largest = 0;
    int64_t place = -1;
    for (int64_t i = 0; i < output.num_elements(); ++i) {
      const double y = output.view().Get(i), r = other.Get(i);
      if (y == r || std::abs(y - r) <= largest) continue;
      largest = std::abs(y - r);
      place = i;
    }
    EXPECT_TRUE(largest <= bound) << name << ": element " << place << " is "
                                  << output.view().Get(place) << " on the device and "
                                  << other.Get(place) << " on the CPU, allowed is a difference of "
                                  << bound;
  }
}

}  // namespace

std::vector<Case> DeviceCases() {
  std::vector<Problem> all = UsualBoth();
  all.push_back(Usual(false, DType::kBF16));
  all.push_back(Usual(true, DType::kF16));
  std::vector<Case> cases = {
      {"AnyOrderOfBlocksAndThreadsGivesTheSameBits", "35", all,
       AnyOrderOfBlocksAndThreadsGivesTheSameBits},
      {"RunDoesNotWaitForTheDevice", "", {Usual(true)}, RunDoesNotWaitForTheDevice},
      {"AGraphOfARunGivesTheSameBits", "", UsualBoth(), AGraphOfARunGivesTheSameBits},
      {"AGraphOfEachAppendGivesTheSameBits", "", {Usual(true)}, AGraphOfEachAppendGivesTheSameBits},
      {"AGraphOfABackwardPassGivesTheSameBits", "", UsualBoth(),
       AGraphOfABackwardPassGivesTheSameBits},
      {"TheDeviceAgreesWithTheCpu", "29", all, TheDeviceAgreesWithTheCpu},
  };
  for (Case& one : cases) {
    one.of_devices = true;
    one.all_options_simulated = one.name == "TheDeviceAgreesWithTheCpu";
    one.of_gradients = one.name == "AGraphOfABackwardPassGivesTheSameBits";
  }
  return cases;
}

}  // namespace tfb::conformance
