// Tests for errors that only a device can make: dependence on the order of its threads, waiting,
// and results that differ from the CPU's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/conformance/gradient_trial.h"
#include "harness/conformance/stream_trial.h"
#include "harness/conformance/trial.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/device_memory.h"
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

// Makes work in the simulator as late as CUDA permits while it exists.
class LateStreams {
 public:
  LateStreams() : usual_(cuda_simulator::CurrentSettings()) {
    cuda_simulator::Settings settings = usual_;
    settings.streams_are_late = true;
    cuda_simulator::Configure(settings);
  }
  ~LateStreams() { cuda_simulator::Configure(usual_); }
  LateStreams(const LateStreams&) = delete;
  LateStreams& operator=(const LateStreams&) = delete;

 private:
  const cuda_simulator::Settings usual_;
};

// The tensors that the calls of a layer wrote, and what it says of its Run.
struct CallsOfALayer {
  NamedTensors outputs;
  std::map<std::string, double> statistics;
  NamedTensors gradients;      // where it has a backward pass
  NamedTensors first_segment;  // where it streams, before and after Reset
  NamedTensors after_reset;
};

// Appends the first tokens, and after Reset again.
absl::Status AppendTwice(const BoundLayer& bound, StreamingLayer* layer, CallsOfALayer* calls) {
  const int64_t count = std::min(bound.layer->problem().query_tokens, layer->max_segment_tokens());
  const std::vector<TensorSpec> specs = SegmentOutputs(*layer, count);
  const Inputs segment = SegmentOf(*layer, bound.inputs, 0, count);
  DeviceTensors written[2];
  TFB_RETURN_IF_ERROR(layer->Reset());
  for (DeviceTensors& outputs : written) {
    TFB_ASSIGN_OR_RETURN(outputs, DeviceTensors::Allocate(bound.device(), specs, true));
    const absl::Status status = layer->Append(segment, outputs.outputs(), bound.execution);
    if (IsRefusal(status)) return absl::OkStatus();
    TFB_RETURN_IF_ERROR(status);
    TFB_RETURN_IF_ERROR(layer->Reset());
  }
  TFB_ASSIGN_OR_RETURN(calls->after_reset, written[1].Download(bound.execution.stream));
  TFB_ASSIGN_OR_RETURN(calls->first_segment, written[0].Download(bound.execution.stream));
  return absl::OkStatus();
}

// Makes the calls of a new layer of the job on the stream, and waits for none of them before its
// results are read on that stream.
absl::StatusOr<CallsOfALayer> CallOnStream(Trial* trial, void* stream) {
  ThreadPool pool(2);
  TFB_ASSIGN_OR_RETURN(BoundLayer bound, Bind(trial, &pool));
  bound.execution.stream = stream;
  const bool has_backward = bound.layer->CheckBackward().ok();
  NamedTensors output_gradients;
  BackwardMemory backward;
  if (has_backward) {
    TFB_ASSIGN_OR_RETURN(output_gradients, DrawOutputGradients(*bound.layer, kSeed));
    TFB_ASSIGN_OR_RETURN(backward, BindBackward(ViewsOf(output_gradients), &bound));
  }
  const size_t bytes = has_backward ? bound.layer->backward_workspace_bytes(pool.threads()) : 0;
  TFB_ASSIGN_OR_RETURN(
      const DeviceMemory workspace,
      DeviceMemory::Allocate(bound.device(), std::max(bytes, bound.execution.workspace.size())));
  bound.execution.workspace = workspace.bytes();
  TFB_RETURN_IF_ERROR(bound.runtime->SynchronizeAll());
  CallsOfALayer calls;
  TFB_RETURN_IF_ERROR(bound.Setup());
  if (has_backward) TFB_RETURN_IF_ERROR(bound.SetUpBackward());
  TFB_RETURN_IF_ERROR(bound.Run());
  if (has_backward) TFB_RETURN_IF_ERROR(bound.Backward());
  TFB_ASSIGN_OR_RETURN(calls.outputs, bound.Results());
  if (has_backward) {
    TFB_ASSIGN_OR_RETURN(calls.gradients, backward.input_gradients.Download(stream));
    TFB_ASSIGN_OR_RETURN(NamedTensors others, backward.parameter_gradients.Download(stream));
    for (auto& [name, tensor] : others) calls.gradients["of " + name] = std::move(tensor);
  }
  TFB_RETURN_IF_ERROR(bound.Run());
  calls.statistics = bound.layer->statistics();
  auto* const streaming = dynamic_cast<StreamingLayer*>(bound.layer);
  if (!WhyNoSegments(*trial, streaming).empty()) return calls;
  TFB_RETURN_IF_ERROR(AppendTwice(bound, streaming, &calls));
  return calls;
}

// A caller's stream need not wait for the default stream, as PyTorch's do not. All that a layer enqueues
// is on that stream, but for what Setup waits for: no call relies on work of another stream, and
// statistics wait for the Run.
void OnAStreamOfItsOwnItComputesTheSameBits(const Job& job) {
  const auto usual = Trial::Make(job), other = Trial::Make(job);
  if (usual == nullptr || other == nullptr) return;
  const absl::StatusOr<CallsOfALayer> expected = CallOnStream(usual.get(), nullptr);
  ASSERT_TRUE(expected.ok()) << expected.status();
  const absl::StatusOr<CudaRuntime*> runtime = RuntimeOf(job.device);
  ASSERT_TRUE(runtime.ok()) << runtime.status();
  const absl::StatusOr<DeviceStream> stream = DeviceStream::Make(*runtime);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const LateStreams late;
  const absl::StatusOr<CallsOfALayer> calls = CallOnStream(other.get(), stream->get());
  ASSERT_TRUE(calls.ok()) << calls.status();
  ExpectSameBits(expected->outputs, calls->outputs, "the default stream and another");
  ExpectSameBits(expected->gradients, calls->gradients, "backward, the default stream and another");
  ExpectSameBits(expected->first_segment, calls->first_segment,
                 "Append, the default stream and another");
  ExpectSameBits(calls->first_segment, calls->after_reset, "before and after Reset");
  EXPECT_EQ(expected->statistics, calls->statistics);
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
    EXPECT_TRUE(largest <= bound) << name << ": element "
                                  << ShapeString(
                                         PlaceIn(output.shape(), std::max<int64_t>(place, 0)))
                                  << " is " << output.view().Get(place) << " on the device and "
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
      {"OnAStreamOfItsOwnItComputesTheSameBits",
       "",
       {Usual(true)},
       OnAStreamOfItsOwnItComputesTheSameBits},
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
