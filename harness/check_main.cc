// Compares every technique's errors with their bounds, without timing.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/command_line.h"
#include "core/status.h"
#include "harness/contestants/flags.h"
#include "harness/inputs/inputs.h"
#include "harness/judge/device_memory.h"
#include "harness/measure/machine.h"
#include "harness/measure/sweep_worker.h"
#include "harness/measure/worker.h"
#include "harness/measure/worker_messages.pb.h"
#include "harness/plan/cases.h"
#include "results/analysis.h"
#include "results/describe.h"
#include "results/files.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_text.h"
#include "results/table.h"

ABSL_FLAG(std::string, techniques, "*",
          "What to check: names or globs that commas separate, each with options, as in "
          "NAME:option=value,option=value. A value of * takes every value that the option lists "
          "for sweeps.");
ABSL_FLAG(
    std::string, devices, "",
    "Of cpu, cuda, simulator, which runs the code for GPUs on the host: slowly, so with short "
    "--lengths. Empty: the CPU, and CUDA for the techniques that have it.");
ABSL_FLAG(std::string, pass, "forward",
          "Of forward, backward. forward: the outputs of a run. backward: the gradients that the "
          "backward pass writes, held against derivatives of the definition.");
ABSL_FLAG(std::string, dtypes, "f32,bf16", "Of f32, bf16, f16: the type of inputs and outputs.");
ABSL_FLAG(std::string, input, "real,gaussian,peaked,needle",
          "Of real, gaussian, peaked, needle, text, FILE.safetensors.");
ABSL_FLAG(std::string, lengths, "",
          "Tokens: numbers, or ranges that double, as in 100,256:4096. Empty: 500 of drawn inputs, "
          "the tensors' own of real ones (up to 512 tokens) and files.");
ABSL_FLAG(std::string, heads, "4", "Query heads of drawn inputs.");
ABSL_FLAG(std::string, kv_heads, "", "Key-value heads. Empty: as many as query heads.");
ABSL_FLAG(std::string, head_dims, "64", "Channels of a head of drawn inputs, 1 to 256.");
ABSL_FLAG(std::string, batches, "1", "Sequences in a batch of drawn inputs.");
ABSL_FLAG(std::string, causal, "auto",
          "Of true, false, auto. auto: causal with drawn inputs and not causal with real ones and "
          "files, where the technique has that form; else the other.");
ABSL_FLAG(int64_t, rows, 128,
          "Query tokens of each case that are held against float64, the first, the last and those "
          "at edges of tiles among them; 0 for all.");
ABSL_FLAG(int, threads, 0, "Threads on the CPU. 0: as many as usable cores.");
ABSL_FLAG(uint64_t, seed, 1, "Of drawn inputs, of parameters and of the choice of rows.");
ABSL_FLAG(bool, verbose, false, "Print each case as it is done.");

namespace tfb {
namespace {

constexpr char kProgram[] = "check";
constexpr char kUsage[] =
    "check [flags]\n"
    "Runs every technique once on real and drawn tensors and holds its errors against float64 to\n"
    "their bounds (harness/judge/errors.h says where they are from). Nothing is timed.\n\n"
    "Exit status: 0 all errors are within their bounds, 1 one is not or a technique failed,\n"
    "2 bad usage, or no case could be checked.";

// The number of tokens of drawn inputs: no multiple of a tile, so that the last tile is partial.
constexpr char kDrawnLengths[] = "500";

bool IsDrawn(absl::string_view input) {
  const auto sources = ParseInputSources(input);
  return sources.ok() && sources->front().captured == nullptr;
}

// Returns the cases of all inputs; drawn ones have lengths of their own.
absl::StatusOr<std::vector<Job>> MakeAllCases() {
  CaseFlags flags;
  flags.techniques = absl::GetFlag(FLAGS_techniques);
  TFB_RETURN_IF_ERROR(
      AddContestantsFromFlags(/*memory_limit=*/0, &Registry::Global(), &flags.techniques));
  flags.devices = absl::GetFlag(FLAGS_devices);
  flags.simulator = true;
  if (absl::StrContains(flags.devices, Name(Device::kSimulator))) {
    const absl::Status linked = RuntimeOf(Device::kSimulator).status();
    if (!linked.ok())
      return absl::InvalidArgumentError(absl::StrCat("--devices: ", linked.message()));
  }
  flags.dtypes = absl::GetFlag(FLAGS_dtypes);
  flags.heads = absl::GetFlag(FLAGS_heads);
  flags.kv_heads = absl::GetFlag(FLAGS_kv_heads);
  flags.head_dims = absl::GetFlag(FLAGS_head_dims);
  flags.batches = absl::GetFlag(FLAGS_batches);
  flags.causal = absl::GetFlag(FLAGS_causal);
  flags.passes = absl::GetFlag(FLAGS_pass);
  if (absl::StrContains(flags.passes, Name(Case::PASS_TRAINING))) {
    return absl::InvalidArgumentError(
        "--pass: the errors of a training step are those of forward,backward");
  }
  flags.seed = absl::GetFlag(FLAGS_seed);
  const int threads = absl::GetFlag(FLAGS_threads);
  if (threads < 0 || threads > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("--threads: ", threads, "; allowed are 0 to 4096"));
  }
  flags.threads = absl::StrCat(threads == 0 ? UsableCores() : threads);
  flags.counterparts = flags.ours = false;
  const std::string lengths = absl::GetFlag(FLAGS_lengths);
  std::vector<Job> all;
  for (absl::string_view input : absl::StrSplit(absl::GetFlag(FLAGS_input), ',')) {
    flags.inputs = std::string(input);
    flags.lengths = lengths.empty() && IsDrawn(input) ? kDrawnLengths : lengths;
    TFB_ASSIGN_OR_RETURN(std::vector<Job> cases,
                         MakeCases(flags, Registry::Global(), CallerPath(".")));
    for (Job& one : cases) {
      // Text makes an accuracy case beside each of these.
      if (one.input.text != nullptr && one.purpose == Case::PURPOSE_SCALING) continue;
      one.purpose = Case::PURPOSE_ACCURACY;
      all.push_back(std::move(one));
    }
  }
  return all;
}

// Checks cases in a process of their own, so that a case that crashes, or destroys a GPU's context,
// does not end the next one.
class CaseProcess {
 public:
  explicit CaseProcess(const std::vector<Job>& cases) : cases_(cases) {
    options_.measure.times = false;
    options_.measure.case_timeout = 0;
    options_.measure.sampled_rows = options_.measure.accuracy_rows = absl::GetFlag(FLAGS_rows);
  }

  absl::StatusOr<Case> Check(size_t index) {
    if (worker_ == nullptr) {
      TFB_ASSIGN_OR_RETURN(
          worker_, Worker::Start([this](WorkerSide& side) { WorkForSweep(options_, cases_, side); },
                                 /*memory_limit=*/0));
    }
    ToWorker request;
    Visit::Item* item = request.mutable_visit()->add_items();
    item->set_index(index);
    item->set_check(true);
    TFB_RETURN_IF_ERROR(worker_->Send(request.SerializeAsString()));
    Case record;
    for (bool done = false; !done;) {
      std::string message;
      const Worker::Event event = worker_->Wait(kWaitSeconds, &message);
      if (event == Worker::Event::kNothing) continue;
      FromWorker answer;
      if (event == Worker::Event::kEnded) {
        record = MakeRecord(cases_[index]);
        record.mutable_outcome()->set_status(Outcome::STATUS_FAILED);
        record.mutable_outcome()->set_reason(
            absl::StrCat("it ended the process: ", worker_->HowItEnded()));
      } else if (!answer.ParseFromString(message)) {
        return absl::InternalError("the record of a case does not parse");
      }
      if (answer.has_report()) record = std::move(*answer.mutable_report()->mutable_record());
      done = !answer.has_report();
      if (done && !answer.visit_done()) worker_.reset();
    }
    return record;
  }

 private:
  static constexpr double kWaitSeconds = 1;

  SweepOptions options_;
  const std::vector<Job>& cases_;
  std::unique_ptr<Worker> worker_;
};

void Print(const ResultSet& results) {
  const TextStyle style = StyleFor(fileno(stdout));
  const Analysis analysis(results);
  for (const Table& table : report::AccuracyTables(analysis, /*details=*/false)) {
    std::printf("%s\n", ToTerminal(table, style).c_str());
  }
  for (const report::OutcomeLine& line : report::OutcomeLines(analysis)) {
    std::printf("%s\n",
                Emphasise(line.text, line.bad ? Emphasis::kBad : Emphasis::kNone, style).c_str());
  }
}

absl::StatusOr<int> Check() {
  if (absl::GetFlag(FLAGS_rows) < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rows: ", absl::GetFlag(FLAGS_rows), "; allowed are 0 and more"));
  }
  TFB_ASSIGN_OR_RETURN(const std::vector<Job> cases, MakeAllCases());
  if (cases.empty()) return absl::InvalidArgumentError("these flags leave no case to check");
  const bool verbose = absl::GetFlag(FLAGS_verbose);
  CaseProcess process(cases);
  ResultSet results;
  results.add_environments()->set_id("check");
  const bool shows_progress = !verbose && isatty(fileno(stderr)) != 0;
  bool failed = false, checked = false;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (shows_progress) {
      std::fprintf(stderr, "\r\033[K%zu of %zu: %s", i + 1, cases.size(),
                   CutToWidth(cases[i].ToString(), 60).c_str());
    }
    Case* record = results.add_cases();
    TFB_ASSIGN_OR_RETURN(*record, process.Check(i));
    record->set_environment_id("check");
    const Outcome::Status status = record->outcome().status();
    failed |= status == Outcome::STATUS_FAILED;
    checked |= status == Outcome::STATUS_OK || status == Outcome::STATUS_FAILED;
    if (verbose) {
      std::printf("%s: %s %s\n", DescribeCase(*record).c_str(), std::string(Name(status)).c_str(),
                  record->outcome().reason().c_str());
      std::fflush(stdout);
    }
  }
  if (shows_progress) std::fputs("\r\033[K", stderr);
  Print(results);
  if (!checked) {
    return absl::UnavailableError(absl::StrCat(
        "no case could be checked: ", Printable(results.cases().rbegin()->outcome().reason())));
  }
  return failed ? kExitCheckFailed : kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::Check);
}
