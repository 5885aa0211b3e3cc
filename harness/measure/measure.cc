#include "harness/measure/measure.h"

#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/status.h"
#include "harness/contestants/interface.h"
#include "harness/judge/accuracy_record.h"
#include "harness/judge/device_memory.h"
#include "harness/judge/evaluate.h"
#include "harness/judge/judge_gradients.h"
#include "harness/measure/affinity.h"
#include "harness/measure/machine.h"
#include "harness/measure/sample_trial.h"

namespace tfb {
namespace {

// Returns the bytes of all tensors, infinite where the product of sizes is.
double BytesOf(const std::vector<TensorSpec>& specs, bool optional_too) {
  double bytes = 0;
  for (const TensorSpec& spec : specs) {
    if (spec.optional && !optional_too) continue;
    double elements = 1;
    for (const int64_t size : spec.shape) elements *= static_cast<double>(size);
    bytes += elements * static_cast<double>(SizeOf(spec.dtype));
  }
  return bytes;
}

double BytesOf(const NamedTensors& tensors) {
  double bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += static_cast<double>(tensor.bytes());
  return bytes;
}

std::string SpecsKey(const std::vector<TensorSpec>& specs) {
  std::string key;
  for (const TensorSpec& spec : specs) {
    absl::StrAppend(&key, spec.name, Name(spec.dtype), ShapeString(spec.shape), spec.optional, ";");
  }
  return key;
}

std::string Gibibytes(double bytes) {
  return absl::StrCat(std::round(bytes / (1 << 30) * 100) / 100, " GiB");
}

// Returns the bytes that the heap holds, 0 where the C library cannot say, as under sanitizers.
int64_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

// The most bytes of freed chunks that the C library may keep.
constexpr int64_t kHeapNoise = 64 << 10;

bool HasBackward(const Job& job) { return job.pass != Case::PASS_FORWARD; }

// Returns the workspace of all calls of the case.
size_t WorkspaceBytes(const Layer& layer, const Job& job) {
  const size_t run = layer.workspace_bytes(job.threads);
  return HasBackward(job) ? std::max(run, layer.backward_workspace_bytes(job.threads)) : run;
}

// Returns the bytes of all gradients of inputs and parameters.
double GradientBytes(const Layer& layer) {
  return BytesOf(layer.input_gradients(), true) + BytesOf(layer.parameter_gradients(), true);
}

std::optional<double> Sum(std::optional<double> a, std::optional<double> b) {
  if (!a.has_value() || !b.has_value()) return std::nullopt;
  return *a + *b;
}

// Returns the cost of one call of the case's pass.
Cost CostOf(const Layer& layer, Case::Pass pass) {
  if (pass == Case::PASS_FORWARD) return layer.cost();
  const Cost backward = layer.backward_cost();
  if (pass == Case::PASS_BACKWARD) return backward;
  const Cost run = layer.cost();
  return {Sum(run.flops, backward.flops), Sum(run.bytes, backward.bytes)};
}

// Judges a run, or its backward pass where the request has output gradients. Returns
// ResourceExhausted where there is no memory for float64 copies.
absl::Status JudgeAndRecord(const EvaluateRequest& request, const Layer& layer, const LayerRun& run,
                            Outcome* outcome) {
  try {
    if (request.output_gradients != nullptr) {
      TFB_ASSIGN_OR_RETURN(const std::vector<GradientError> errors,
                           JudgeGradients(request, layer, run));
      RecordGradients(errors, outcome);
      return absl::OkStatus();
    }
    TFB_ASSIGN_OR_RETURN(const Accuracy accuracy, Judge(request, layer.parameters(), run.outputs));
    RecordAccuracy(accuracy, outcome);
    return absl::OkStatus();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory for float64");
  }
}

}  // namespace

// Tracks the device memory that a layer allocates, beside the tensors of its caller.
class DeviceBytes {
 public:
  // `runtime` is null for the CPU, whose memory is not tracked.
  explicit DeviceBytes(CudaRuntime* runtime) : runtime_(runtime), before_(Allocated()) { Reset(); }

  // Notes that the layer has been made.
  void NoteLayer() { NoteRun(0); }
  // Notes that the layer has been set up and run by a caller with this much memory.
  void NoteRun(size_t of_caller) {
    if (runtime_ == nullptr) return;
    peak_ = std::max(peak_, runtime_->peak_bytes() - before_ - static_cast<int64_t>(of_caller));
    kept_ = Allocated() - before_;
    Reset();
  }

  int64_t peak() const { return peak_; }
  int64_t kept() const { return kept_; }

 private:
  int64_t Allocated() const { return runtime_ == nullptr ? 0 : runtime_->allocated_bytes(); }
  void Reset() {
    if (runtime_ != nullptr) runtime_->ResetPeak();
  }

  CudaRuntime* runtime_;
  int64_t before_;
  int64_t peak_ = 0, kept_ = 0;
};

double HangSeconds(double case_timeout) {
  return case_timeout + std::clamp(case_timeout / 2, 1.0, 30.0);
}

Outcome::Status OutcomeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return Outcome::STATUS_OK;
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInvalidArgument:
      return Outcome::STATUS_UNSUPPORTED;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnavailable:
      return Outcome::STATUS_SKIPPED;
    case absl::StatusCode::kResourceExhausted:
      return Outcome::STATUS_OUT_OF_MEMORY;
    case absl::StatusCode::kDeadlineExceeded:
      return Outcome::STATUS_TIMEOUT;
    default:
      return Outcome::STATUS_FAILED;
  }
}

// Forwards records of cases that are being timed, several at a time: a report wakes the receiving
// process, which may disturb the next sample.
class InterimReports {
 public:
  InterimReports(const MeasureHooks& hooks, Clock* clock)
      : hooks_(hooks), clock_(clock), last_(clock->Seconds()) {}

  void Add(CaseReport report) {
    waiting_[report.index()] = std::move(report);
    if (clock_->Seconds() < last_ + kSeconds) return;
    for (auto& waiting : waiting_) hooks_.report(std::move(waiting.second));
    waiting_.clear();
    last_ = clock_->Seconds();
  }

 private:
  static constexpr double kSeconds = 1;

  const MeasureHooks& hooks_;
  Clock* clock_;
  double last_;
  std::map<size_t, CaseReport> waiting_;
};

// A case in progress: the objects that it owns while the batch is timed, and its report so far.
struct Measurer::Prepared {
  const Job* job = nullptr;
  CaseReport report;
  std::unique_ptr<Layer> layer;
  const NamedTensors* inputs = nullptr;  // of the host
  DeviceTensors outputs;
  NamedTensors output_gradients;  // of the host; these two are of passes with a backward pass
  BackwardMemory backward;
  TimedCase timed;
  std::unique_ptr<SampleTrial> trial;  // of a contestant
  bool waits = false;  // for the next batch: it does not fit beside the cases of this one
};

// Cases that are timed together, and the memory that they share.
struct Measurer::Batch {
  // The key is made of the specs: inputs of one problem and seed with equal specs are the same.
  // Each is placed in the memory of the device once, for the check and for the times.
  struct PlacedInputs {
    NamedTensors host;
    DeviceTensors placed;
  };
  std::map<std::string, PlacedInputs> inputs;
  std::vector<std::unique_ptr<Prepared>> cases;
  int threads = 1;
  CudaRuntime* runtime = nullptr;  // null: the CPU
  DeviceMemory workspace;          // as large as any case asks for
  double workspace_bytes = 0;
  double held_bytes = 0;  // inputs, outputs and parameters of all
};

// The counter is opened before there is a pool, whose threads it must count.
Measurer::Measurer(const MeasureOptions& options) : options_(options) {
  absl::StatusOr<std::unique_ptr<InstructionCounter>> counter = InstructionCounter::Open();
  if (counter.ok()) instructions_ = *std::move(counter);
}

ThreadPool* Measurer::Pool(int threads) {
  std::unique_ptr<ThreadPool>& pool = pools_[threads];
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(threads);
  return pool.get();
}

// Returns null where the device has no memory for it; then there are no cold runs.
std::function<absl::Status()> Measurer::Flusher(const Batch& batch) {
  if (!options_.cold) return nullptr;
  if (batch.runtime == nullptr) {
    std::unique_ptr<CpuCacheFlusher>& flusher = flushers_[batch.threads];
    if (flusher == nullptr) {
      flusher = std::make_unique<CpuCacheFlusher>(Pool(batch.threads));
      const double begin = options_.clock->Seconds();
      (*flusher)().IgnoreError();  // there is none
      flush_seconds_[batch.threads] = options_.clock->Seconds() - begin;
    }
    return [flusher = flusher.get()] { return (*flusher)(); };
  }
  std::unique_ptr<DeviceCacheFlusher>& flusher = device_flushers_[batch.runtime];
  if (flusher == nullptr) {
    absl::StatusOr<std::unique_ptr<DeviceCacheFlusher>> made =
        DeviceCacheFlusher::Make(batch.runtime);
    if (!made.ok()) return nullptr;
    flusher = *std::move(made);
  }
  return [flusher = flusher.get()] { return (*flusher)(); };
}

DeviceMonitor* Measurer::Monitor(CudaRuntime* runtime) {
  if (runtime == nullptr || runtime->target() != CudaTarget::kGpu) return nullptr;
  const auto [entry, is_new] = monitors_.emplace(runtime, nullptr);
  if (is_new) {
    absl::StatusOr<std::unique_ptr<DeviceMonitor>> opened =
        OpenNvml(runtime->properties().pci_bus_id);
    if (opened.ok()) entry->second = *std::move(opened);
  }
  return entry->second.get();
}

bool Measurer::Measure(const std::vector<Job>& jobs, const Visit& visit,
                       const MeasureHooks& hooks) {
  std::vector<Visit::Item> waiting(visit.items().begin(), visit.items().end());
  while (!waiting.empty() && !Stopped(hooks)) {
    Batch batch;
    std::vector<Visit::Item> later;
    // Where time is short, the cases prepared in the first third of it are timed before the rest is
    // prepared.
    const double prepare_until =
        options_.clock->Seconds() + (hooks.seconds_left == nullptr
                                         ? std::numeric_limits<double>::infinity()
                                         : hooks.seconds_left() / 3);
    for (const Visit::Item& item : waiting) {
      if (Stopped(hooks)) break;
      const bool late = !batch.cases.empty() && options_.clock->Seconds() > prepare_until;
      if (late || !Prepare(jobs.at(item.index()), item, hooks, &batch)) later.push_back(item);
    }
    Time(hooks, &batch);
    waiting = std::move(later);
  }
  return !device_lost_;
}

bool Measurer::Prepare(const Job& job, const Visit::Item& wishes, const MeasureHooks& hooks,
                       Batch* batch) {
  const double begin = options_.clock->Seconds();
  hooks.on_activity(wishes.index(), "create");
  auto prepared = std::make_unique<Prepared>();
  prepared->job = &job;
  prepared->timed.wishes = wishes;
  CaseReport& report = prepared->report;
  report.set_index(wishes.index());
  *report.mutable_record() = MakeRecord(job);
  Outcome* outcome = report.mutable_record()->mutable_outcome();
  absl::Status status = job.obstacle;
  if (status.ok()) status = WithMemory([&] { return Fill(hooks, batch, prepared.get()); });
  // A device that has no memory for a case beside the others may have it for that case alone.
  const bool on_device = job.device != Device::kCpu;
  prepared->waits |= on_device && absl::IsResourceExhausted(status) && !batch->cases.empty();
  if (prepared->waits) return false;
  device_lost_ |=
      on_device && !status.ok() && RuntimeOf(job.device).ok() && !DeviceStatus(job.device).ok();
  report.set_preparation_seconds(options_.clock->Seconds() - begin);
  outcome->set_elapsed_seconds(report.preparation_seconds());
  outcome->set_process_peak_bytes(PeakResidentBytes());
  if (!status.ok()) {
    outcome->set_status(OutcomeOf(status));
    outcome->set_reason(std::string(status.message()));
  }
  report.set_finished(!status.ok() || !options_.times);
  hooks.report(report);
  if (report.finished()) return true;
  batch->threads = job.threads;
  batch->cases.push_back(std::move(prepared));
  return true;
}

absl::Status Measurer::Fill(const MeasureHooks& hooks, Batch* batch, Prepared* prepared) {
  const Job& job = *prepared->job;
  const Technique& technique = *job.technique;
  Case& record = *prepared->report.mutable_record();
  Outcome* outcome = record.mutable_outcome();
  TFB_RETURN_IF_ERROR(CheckSupported(technique.info(), job.problem, job.device));
  TFB_ASSIGN_OR_RETURN(batch->runtime, RuntimeOf(job.device));
  TFB_ASSIGN_OR_RETURN(const auto input_specs, technique.InputSpecs(job.problem, job.options));
  TFB_ASSIGN_OR_RETURN(const auto output_specs, technique.OutputSpecs(job.problem, job.options));

  // This comes before anything is allocated. The check has guarded outputs and a copy of them.
  const auto fits = [&](double more, double workspace) -> absl::Status {
    if (options_.memory_limit <= 0) return absl::OkStatus();
    const double limit = static_cast<double>(options_.memory_limit);
    const double held = batch->cases.empty() ? 0 : batch->held_bytes;
    if (more + 2 * workspace > limit) {
      return absl::ResourceExhaustedError(absl::StrCat("needs ", Gibibytes(more + 2 * workspace),
                                                       "; --memory_limit is ", Gibibytes(limit)));
    }
    if (held + more + workspace + std::max(workspace, batch->workspace_bytes) > limit) {
      prepared->waits = true;
      return absl::AbortedError("no memory is left beside the others");
    }
    return absl::OkStatus();
  };
  const double tensor_bytes = BytesOf(input_specs, false) + 3 * BytesOf(output_specs, true);
  TFB_RETURN_IF_ERROR(fits(tensor_bytes, 0));

  TFB_RETURN_IF_ERROR(PlaceInputs(input_specs, batch, prepared));

  const int64_t heap_before = HeapBytes();
  DeviceBytes device_bytes(batch->runtime);
  TFB_ASSIGN_OR_RETURN(prepared->layer, job.CreateLayer());
  device_bytes.NoteLayer();
  Layer& layer = *prepared->layer;
  auto& description = *record.mutable_technique();
  description.set_weights(layer.parameters().empty() ? TechniqueDescription::WEIGHTS_NONE
                                                     : TechniqueDescription::WEIGHTS_SEEDED);
  if (const auto& text = job.input.text; text != nullptr) {
    hooks.on_activity(prepared->report.index(), "parameters");
    TFB_ASSIGN_OR_RETURN(NamedTensors trained, text->ParametersOf(layer));
    TFB_RETURN_IF_ERROR(layer.SetParameters(std::move(trained)));
    description.set_weights(TechniqueDescription::WEIGHTS_TRAINED);
    description.set_weights_file(text->file());
  }
  const double parameter_bytes = BytesOf(layer.parameters());
  const double workspace = static_cast<double>(WorkspaceBytes(layer, job));
  double gradient_bytes = 0, backward_bytes = 0;  // backward_bytes: of all that is bound for it
  if (HasBackward(job)) {
    TFB_RETURN_IF_ERROR(layer.CheckBackward());
    gradient_bytes = GradientBytes(layer);
    backward_bytes = static_cast<double>(KeptMemoryBytes(layer)) + gradient_bytes +
                     BytesOf(layer.output_gradients(), true);
  }
  // The check has guarded gradients and a copy of them, too.
  TFB_RETURN_IF_ERROR(
      fits(tensor_bytes + parameter_bytes + backward_bytes + 2 * gradient_bytes, workspace));
  TFB_RETURN_IF_ERROR(Check(hooks, prepared, &device_bytes));
  const double gradients_given = BytesOf(prepared->output_gradients);
  const int64_t heap_after = HeapBytes() - static_cast<int64_t>(gradients_given);
  const auto* contestant = dynamic_cast<ContestantLayer*>(&layer);
  const bool is_remote = contestant != nullptr && contestant->times_itself();
  if (contestant != nullptr) {
    for (const auto& [name, value] : contestant->about()) {
      (*description.mutable_contestant()->mutable_about())[name] = value;
    }
  }
  if (options_.times) TFB_RETURN_IF_ERROR(Bind(batch, prepared));

  const double input_bytes = BytesOf(*prepared->inputs);
  const double output_bytes = BytesOf(output_specs, false);
  const bool is_backward = job.pass == Case::PASS_BACKWARD;
  // Nobody here knows the memory of another process.
  if (!is_remote) {
    outcome->set_peak_workspace_bytes(is_backward ? layer.backward_workspace_bytes(job.threads)
                                                  : WorkspaceBytes(layer, job));
  }
  outcome->set_parameter_bytes(static_cast<uint64_t>(parameter_bytes));
  // A backward pass reads what the run wrote.
  outcome->set_input_bytes(
      static_cast<uint64_t>(input_bytes + gradients_given + (is_backward ? output_bytes : 0)));
  outcome->set_output_bytes(
      static_cast<uint64_t>((is_backward ? 0 : output_bytes) + gradient_bytes));
  if (HasBackward(job)) outcome->set_kept_bytes(KeptBytes(layer));
  const Cost cost = CostOf(layer, job.pass);
  if (cost.flops.has_value()) outcome->set_flops(*cost.flops);
  if (cost.bytes.has_value()) outcome->set_bytes_moved(*cost.bytes);
  auto& statistics = *outcome->mutable_statistics();
  for (const auto& [name, value] : layer.statistics()) statistics[name] = value;
  // The layer keeps schedules, tables, indices and parameters between runs.
  if (heap_after > heap_before + kHeapNoise && !is_remote) {
    statistics["layer_heap_bytes"] = static_cast<double>(heap_after - heap_before);
  }
  if (batch->runtime != nullptr) {
    statistics["layer_device_bytes"] = static_cast<double>(device_bytes.kept());
    outcome->set_device_peak_bytes(
        device_bytes.peak() +
        static_cast<int64_t>(input_bytes + output_bytes + backward_bytes + workspace));
  }
  batch->held_bytes += parameter_bytes + output_bytes + backward_bytes;
  return absl::OkStatus();
}

// Makes the inputs, and copies them to the memory of the device, unless the batch has them.
absl::Status Measurer::PlaceInputs(const std::vector<TensorSpec>& specs, Batch* batch,
                                   Prepared* prepared) {
  const Job& job = *prepared->job;
  const std::string key = SpecsKey(specs);
  auto inputs = batch->inputs.find(key);
  if (inputs == batch->inputs.end()) {
    const double begin = options_.clock->Seconds();
    absl::StatusOr<NamedTensors> made = MakeInputs(job.input, specs, job.problem, job.seed);
    // An input that does not fit the problem is not an error of the technique.
    if (absl::IsInvalidArgument(made.status())) return absl::NotFoundError(made.status().message());
    if (!made.ok()) return made.status();
    TFB_ASSIGN_OR_RETURN(DeviceTensors placed, DeviceTensors::Of(job.device, ViewsOf(*made)));
    batch->held_bytes += BytesOf(*made);
    inputs =
        batch->inputs.emplace(key, Batch::PlacedInputs{*std::move(made), std::move(placed)}).first;
    prepared->report.set_input_seconds(options_.clock->Seconds() - begin);
  }
  prepared->inputs = &inputs->second.host;
  prepared->timed.bound.inputs = inputs->second.placed.inputs();
  return absl::OkStatus();
}

// Binds the layer to the memory in which the case will be timed, without the workspace, which may
// have to grow for other cases of the batch.
absl::Status Measurer::Bind(Batch* batch, Prepared* prepared) {
  const Job& job = *prepared->job;
  BoundLayer& bound = prepared->timed.bound;
  bound.layer = prepared->layer.get();
  bound.runtime = batch->runtime;
  bound.execution.pool = Pool(job.threads);
  TFB_ASSIGN_OR_RETURN(prepared->outputs,
                       DeviceTensors::Allocate(job.device, bound.layer->outputs(),
                                               /*optional_too=*/false));
  bound.outputs = prepared->outputs.outputs();
  prepared->timed.pass = job.pass;
  if (HasBackward(job)) {
    TFB_ASSIGN_OR_RETURN(prepared->backward,
                         BindBackward(ViewsOf(prepared->output_gradients), &bound));
  }
  // There is at least one byte, so that there is an address.
  const size_t bytes = std::max<size_t>(WorkspaceBytes(*prepared->layer, job), 1);
  if (const size_t before = batch->workspace.bytes().size(); bytes > before) {
    batch->workspace = DeviceMemory();  // not both at once
    absl::StatusOr<DeviceMemory> larger = DeviceMemory::Allocate(job.device, bytes);
    const absl::Status status = larger.status();
    if (!status.ok()) larger = DeviceMemory::Allocate(job.device, before);
    if (larger.ok()) batch->workspace = *std::move(larger);
    TFB_RETURN_IF_ERROR(status);
  }
  batch->workspace_bytes = static_cast<double>(batch->workspace.bytes().size());
  PrepareTrial(prepared);
  return absl::OkStatus();
}

// Lets a contestant's samples be judged, where its check has not been left out, on inputs of its
// own.
void Measurer::PrepareTrial(Prepared* prepared) {
  const Job& job = *prepared->job;
  const Outcome& outcome = prepared->report.record().outcome();
  const bool is_contestant = dynamic_cast<ContestantLayer*>(prepared->layer.get()) != nullptr;
  if (!is_contestant || job.device != Device::kCpu) return;
  const Visit::Item& wishes = prepared->timed.wishes;
  if (!outcome.has_against_definition() && !wishes.has_known_error()) return;
  if (outcome.status() != Outcome::STATUS_OK) return;  // its check has failed already
  SampleTrial::Subject subject;
  subject.request.job = job;
  subject.request.inputs = prepared->inputs;
  subject.request.pool = Pool(job.threads);
  subject.request.registry = options_.registry;
  subject.layer = prepared->layer.get();
  subject.usual_error = outcome.has_against_definition()
                            ? outcome.against_definition().relative_frobenius()
                            : wishes.known_error();
  prepared->trial = std::make_unique<SampleTrial>(std::move(subject));
  prepared->timed.trial = prepared->trial.get();
  prepared->timed.bound.inputs = prepared->trial->inputs();
}

// Runs the layer once in guarded memory, with its backward pass where the case has one, and holds
// it against its definition and dense attention.
absl::Status Measurer::Check(const MeasureHooks& hooks, Prepared* prepared,
                             DeviceBytes* device_bytes) {
  const Job& job = *prepared->job;
  Outcome* outcome = prepared->report.mutable_record()->mutable_outcome();
  hooks.on_activity(prepared->report.index(), "first run");
  const double run_begin = options_.clock->Seconds();
  EvaluateRequest request;
  request.job = job;
  request.inputs = prepared->inputs;
  const int64_t rows =
      job.purpose == Case::PURPOSE_SCALING ? options_.sampled_rows : options_.accuracy_rows;
  if (rows > 0) request.rows = SampleRows(job.problem.query_tokens, rows, job.seed);
  request.pool = Pool(job.threads);
  request.registry = options_.registry;
  NamedTensors output_gradients;  // of the rows that are checked
  if (HasBackward(job)) {
    TFB_ASSIGN_OR_RETURN(prepared->output_gradients,
                         DrawOutputGradients(*prepared->layer, job.seed));
    output_gradients = KeepRows(prepared->output_gradients, job.problem, request.rows);
    request.output_gradients = &output_gradients;
  }
  absl::StatusOr<LayerRun> run =
      RunOnce(prepared->layer.get(), job.device, prepared->timed.bound.inputs, Pool(job.threads),
              request.output_gradients);
  if (!run.ok()) {
    // The technique supports the problem, so any other status is its failure.
    const bool known =
        absl::IsUnimplemented(run.status()) || absl::IsResourceExhausted(run.status());
    return known ? run.status() : absl::InternalError(run.status().message());
  }
  device_bytes->NoteRun(run->device_bytes);
  outcome->set_status(Outcome::STATUS_OK);
  RecordText(job, prepared->layer->parameters(), run->outputs, outcome);
  const double run_seconds = options_.clock->Seconds() - run_begin;
  if (options_.case_timeout > 0 && run_seconds > options_.case_timeout) {
    return TooLong(absl::StrFormat("setup and one %s took %.2g s",
                                   HasBackward(job) ? "training step" : "run", run_seconds));
  }

  const std::string reason =
      check_forecast_.WhyNotChecked(job, prepared->timed.wishes, options_.case_timeout);
  if (!reason.empty()) {
    outcome->set_reason(absl::StrCat("errors were not measured: ", reason));
    return absl::OkStatus();
  }
  hooks.on_activity(prepared->report.index(), "check");
  const double begin = options_.clock->Seconds();
  const absl::Status judged = JudgeAndRecord(request, *prepared->layer, *run, outcome);
  if (absl::IsResourceExhausted(judged)) {
    outcome->set_reason(absl::StrCat("errors were not measured: ", judged.message()));
    return absl::OkStatus();
  }
  if (!judged.ok()) {
    return absl::InternalError(absl::StrCat("the check failed: ", judged.message()));
  }
  prepared->report.set_check_seconds(options_.clock->Seconds() - begin);
  check_forecast_.Note(job, prepared->report.check_seconds());
  return absl::OkStatus();
}

absl::Status Measurer::TooLong(absl::string_view what) const {
  return absl::DeadlineExceededError(
      absl::StrCat(what, "; --case_timeout is ", options_.case_timeout, " s"));
}

void Measurer::Time(const MeasureHooks& hooks, Batch* batch) {
  if (batch->cases.empty() || Stopped(hooks)) return;
  std::vector<TimedCase> timed;
  for (const auto& prepared : batch->cases) {
    timed.push_back(std::move(prepared->timed));
    timed.back().bound.execution.workspace = batch->workspace.bytes();
    if (options_.case_timeout > 0) {
      timed.back().timeout_seconds =
          std::max(options_.case_timeout - prepared->report.preparation_seconds(), 1e-3);
    }
  }
  TimingOptions options;
  options.clock = options_.clock;
  options.probe = options_.probe;
  options.repetitions = options_.repetitions;
  options.min_time = options_.min_time;
  options.graph = options_.graphs;
  options.flush_caches = Flusher(*batch);
  if (batch->runtime == nullptr) options.flush_seconds = flush_seconds_[batch->threads];
  options.monitor = Monitor(batch->runtime);
  if (instructions_ != nullptr) options.instructions = [this] { return instructions_->Read(); };
  options.on_sample = [&](size_t index, absl::string_view what) {
    hooks.on_activity(batch->cases[index]->report.index(), what);
  };
  options.stopped = hooks.stopped;
  InterimReports reports(hooks, options_.clock);
  options.on_enough = [&](size_t index, const Timing& so_far) {
    CaseReport report = batch->cases[index]->report;
    *report.mutable_record()->mutable_outcome()->mutable_timing() = so_far;
    reports.Add(std::move(report));
  };
  const bool any_contestant =
      std::any_of(batch->cases.begin(), batch->cases.end(), [](const auto& prepared) {
        return dynamic_cast<ContestantLayer*>(prepared->layer.get()) != nullptr;
      });
  const std::vector<int> cpus =
      any_contestant && batch->runtime == nullptr ? FirstCpus(batch->threads) : std::vector<int>();
  const LoadReading load_before = ReadMachineLoad(options_.load);
  {
    const PinnedThreads pinned(cpus);
    MeasureSideBySide(options, &timed);
  }
  // All cases of the batch were timed in the same interval.
  const MachineLoad load =
      LoadBetween(load_before, ReadMachineLoad(options_.load), batch->threads, UsableCores());
  device_lost_ |= batch->runtime != nullptr && !batch->runtime->Synchronize().ok();
  for (size_t i = 0; i < timed.size(); ++i) {
    // A case that was stopped too early counts as not begun.
    if (absl::IsCancelled(timed[i].status)) continue;
    CaseReport& report = batch->cases[i]->report;
    for (const int cpu : cpus) timed[i].timing.add_cpus(cpu);
    RecordTimes(timed[i], load, /*monitored=*/options.monitor != nullptr, &report);
    report.set_finished(true);
    hooks.report(std::move(report));
  }
}

void Measurer::RecordTimes(const TimedCase& timed, const MachineLoad& load, bool monitored,
                           CaseReport* report) const {
  Outcome* outcome = report->mutable_record()->mutable_outcome();
  *outcome->mutable_timing() = timed.timing;
  *outcome->mutable_machine_load() = load;
  if (monitored) {
    *outcome->mutable_device_state_before() = timed.state_first;
    *outcome->mutable_device_state_after() = timed.state_last;
  }
  outcome->set_elapsed_seconds(report->preparation_seconds() + timed.spent_seconds);
  outcome->set_process_peak_bytes(PeakResidentBytes());
  if (!timed.status.ok() && outcome->status() == Outcome::STATUS_OK) {
    const absl::Status status =
        absl::IsDeadlineExceeded(timed.status) ? TooLong(timed.status.message()) : timed.status;
    outcome->set_status(OutcomeOf(status));
    outcome->set_reason(std::string(status.message()));
  }
  if (!timed.stream_status.ok()) {
    outcome->set_reason(
        absl::StrCat(outcome->reason(), outcome->reason().empty() ? "" : "; ",
                     "segments were not measured: ", timed.stream_status.message()));
  }
}

}  // namespace tfb
