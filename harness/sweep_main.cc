// Compares every technique with dense attention on the same inputs, and measures how each scales.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/command_line.h"
#include "core/status.h"
#include "harness/contestants/flags.h"
#include "harness/measure/device_presence.h"
#include "harness/measure/machine.h"
#include "harness/measure/sweep.h"
#include "harness/plan/cases.h"
#include "harness/plan/quantities.h"
#include "results/files.h"

ABSL_FLAG(bool, list, false, "Print the techniques with their options and defaults, and exit.");
ABSL_FLAG(bool, dry_run, false, "Print the cases in the order in which they would run, and exit.");

ABSL_FLAG(std::string, techniques, "*",
          "What to run: names or globs, each with options, as in "
          "dense,longformer:window=256,performer:features=*. A value of * takes every value that "
          "--list shows for the option.");
ABSL_FLAG(std::string, devices, "", "Of cpu, cuda. Empty: those that are present.");
ABSL_FLAG(std::string, dtypes, "f32", "Of f32, bf16, f16: the type of inputs and outputs.");
ABSL_FLAG(std::string, lengths, "",
          "Tokens: numbers, or ranges that double, as in 100,256:4096. Empty: 256:4096 for drawn "
          "inputs, the tensors' own for real ones and files.");
ABSL_FLAG(std::string, heads, "8", "Query heads.");
ABSL_FLAG(std::string, kv_heads, "", "Key-value heads. Empty: as many as query heads.");
ABSL_FLAG(std::string, head_dims, "64", "Channels of a head, 1 to 256.");
ABSL_FLAG(std::string, batches, "1", "Sequences in a batch.");
ABSL_FLAG(std::string, causal, "auto",
          "Of true, false, auto. auto: causal with drawn inputs and not causal with real ones and "
          "files, where the technique has that form; else the other.");
ABSL_FLAG(std::string, threads, "", "Threads on the CPU. Empty: as many as usable cores.");
ABSL_FLAG(
    std::string, input, "real,gaussian",
    "Of real, gaussian, peaked, needle, text, FILE.safetensors. Tensors of real models and files "
    "make accuracy cases of their own sizes; drawn ones make scaling cases over --lengths.");
ABSL_FLAG(
    std::string, pass, "forward",
    "Of forward, backward, training. forward: a run, as in inference. backward: the backward pass "
    "of a run that kept what it needs. training: such a run and its backward pass, which is the "
    "step. Errors are the forward pass's: captured tensors beside other inputs are for that "
    "alone.");
ABSL_FLAG(uint64_t, seed, 1, "Of drawn inputs, output gradients and parameters.");
ABSL_FLAG(
    bool, counterparts, true,
    "Also run the dense counterpart of each case, so that there is a ratio. Beside a contestant "
    "ours runs in any case.");

ABSL_FLAG(
    bool, accuracy, true,
    "Also hold techniques against their definitions and against dense attention, on real "
    "tensors and on the beginning of a text. false: without these cases; those that are timed are "
    "still checked once, but for texts of more than 512 tokens.");

ABSL_FLAG(
    int, accuracy_rows, 64,
    "Query tokens that the errors of an accuracy case are measured on, evenly spread; networks "
    "are evaluated as a whole. 0: all, which takes longer. //harness:check measures all.");
ABSL_FLAG(
    int, repetitions, 33,
    "Samples of a steady run at most. Every case gets at least three; what the time budget has "
    "room for beyond goes where the interval of the median is widest.");
ABSL_FLAG(
    bool, cold, true,
    "Also time single runs after the caches were overwritten, which takes longer than a short "
    "run does.");
ABSL_FLAG(bool, graphs, true,
          "On a GPU, also time each run as one CUDA graph, which leaves out what the host does for "
          "every kernel.");
ABSL_FLAG(std::string, min_time, "10ms",
          "A sample averages as many calls as last this long. Without a unit: seconds.");
ABSL_FLAG(std::string, case_timeout, "60s",
          "A case that takes longer is stopped: a row that says so. Without a unit: seconds. 0: no "
          "limit.");
ABSL_FLAG(
    std::string, time_budget, "5m",
    "For the whole sweep; without a unit: seconds. Accuracy takes at most a third; then lengths "
    "are measured from the "
    "shortest on, and one that would not fit, by what the shorter ones took, is left out for all "
    "techniques alike, with a line that says so; what is left buys samples. A length that has "
    "begun is finished, for at most a fifth more. 0: no limit.");
ABSL_FLAG(std::string, memory_limit, "",
          "Of a case, as in 16GiB: checked before it is allocated. Empty: 80% of what is free.");

ABSL_FLAG(std::string, output, "",
          "The result file. Empty: results/runs/<time>-<host>.pb in the repository.");
ABSL_FLAG(bool, resume, false,
          "Go on with the file of --output: cases that it has are not run again.");
ABSL_FLAG(
    bool, retry, false,
    "With --resume: run cases again that failed, timed out or found no memory, as with another "
    "--case_timeout, --memory_limit or build.");

ABSL_FLAG(bool, allow_different_environment, false,
          "With --resume: also go on with a file of another machine, build or version.");

ABSL_FLAG(std::string, shard, "",
          "A part of the cases, as in 2/4 for the second of four parts of about equal effort: for "
          "sweeps on several machines, whose files //tools:merge joins. Empty: all.");
ABSL_FLAG(int, rounds, 0,
          "Visits to each case over which its samples are spread, everything being created anew in "
          "between. 0: 1, and 4 with --interleave_with.");
ABSL_FLAG(
    std::string, interleave_with, "",
    "The sweep of another build, as in /tmp/base/bazel-bin/harness/sweep: both measure the same "
    "cases in turns, so that the machine's moods meet both alike, and are compared at the "
    "end. Its results go to OUTPUT-base.pb.");
ABSL_FLAG(std::string, turns, "", "Set by --interleave_with for the other build.");

namespace tfb {
namespace {

constexpr char kProgram[] = "sweep";
constexpr int kInterleavedRounds = 4;
constexpr char kUsage[] =
    "sweep [flags]\n"
    "Measures error, time and memory of every technique beside dense attention: accuracy on real\n"
    "tensors, then scaling over lengths. Without flags it takes five minutes.\n\n"
    "Exit status: 0 done, 1 a case failed (an error beyond its bound, a crash), 2 bad usage, or\n"
    "no case could run, 130 stopped by Ctrl-C: the file is valid and --resume goes on.";

CaseFlags CaseFlagsFromFlags() {
  CaseFlags flags;
  flags.techniques = absl::GetFlag(FLAGS_techniques);
  flags.devices = absl::GetFlag(FLAGS_devices);
  if (flags.devices.empty()) flags.cuda_present = CudaDeviceIsPresent();
  flags.dtypes = absl::GetFlag(FLAGS_dtypes);
  flags.lengths = absl::GetFlag(FLAGS_lengths);
  flags.heads = absl::GetFlag(FLAGS_heads);
  flags.kv_heads = absl::GetFlag(FLAGS_kv_heads);
  flags.head_dims = absl::GetFlag(FLAGS_head_dims);
  flags.batches = absl::GetFlag(FLAGS_batches);
  flags.causal = absl::GetFlag(FLAGS_causal);
  flags.inputs = absl::GetFlag(FLAGS_input);
  flags.threads = absl::GetFlag(FLAGS_threads);
  flags.passes = absl::GetFlag(FLAGS_pass);
  flags.seed = absl::GetFlag(FLAGS_seed);
  flags.counterparts = absl::GetFlag(FLAGS_counterparts);
  flags.accuracy = absl::GetFlag(FLAGS_accuracy);
  flags.shard = absl::GetFlag(FLAGS_shard);
  return flags;
}

absl::StatusOr<int64_t> MemoryLimitFromFlags() {
  const std::string limit = absl::GetFlag(FLAGS_memory_limit);
  return limit.empty() ? DefaultMemoryLimit() : ParseBytes("memory_limit", limit);
}

absl::StatusOr<SweepOptions> OptionsFromFlags() {
  SweepOptions options;
  options.measure.repetitions = absl::GetFlag(FLAGS_repetitions);
  if (options.measure.repetitions < 1 || options.measure.repetitions > 100000) {
    return absl::InvalidArgumentError(
        absl::StrCat("--repetitions: ", options.measure.repetitions, "; allowed are 1 to 100000"));
  }
  options.measure.accuracy_rows = absl::GetFlag(FLAGS_accuracy_rows);
  if (options.measure.accuracy_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--accuracy_rows: ", options.measure.accuracy_rows, "; allowed are 0 and more"));
  }
  TFB_ASSIGN_OR_RETURN(options.measure.min_time,
                       ParseSeconds("min_time", absl::GetFlag(FLAGS_min_time)));
  TFB_ASSIGN_OR_RETURN(options.measure.case_timeout,
                       ParseSeconds("case_timeout", absl::GetFlag(FLAGS_case_timeout)));
  TFB_ASSIGN_OR_RETURN(options.time_budget,
                       ParseSeconds("time_budget", absl::GetFlag(FLAGS_time_budget)));
  TFB_ASSIGN_OR_RETURN(options.measure.memory_limit, MemoryLimitFromFlags());
  options.measure.cold = absl::GetFlag(FLAGS_cold);
  options.measure.graphs = absl::GetFlag(FLAGS_graphs);
  options.resume = absl::GetFlag(FLAGS_resume);
  options.retry = absl::GetFlag(FLAGS_retry);
  if (options.retry && !options.resume) {
    return absl::InvalidArgumentError("--retry: goes with --resume");
  }
  options.allow_different_environment = absl::GetFlag(FLAGS_allow_different_environment);
  const std::string output = absl::GetFlag(FLAGS_output);
  if (options.resume && output.empty()) {
    return absl::InvalidArgumentError("--resume: name the file to go on with by --output=FILE");
  }
  options.output = output.empty() ? DefaultResultPath() : CallerPath(output);
  options.program = kProgram;
  options.workspace = WorkspaceFolder();
  options.turns = absl::GetFlag(FLAGS_turns);
  options.rounds = absl::GetFlag(FLAGS_rounds);
  if (options.rounds < 0 || options.rounds > options.measure.repetitions) {
    return absl::InvalidArgumentError(absl::StrCat("--rounds: ", options.rounds,
                                                   "; allowed are 0 to --repetitions, which is ",
                                                   options.measure.repetitions));
  }
  const bool takes_turns = !options.turns.empty() || !absl::GetFlag(FLAGS_interleave_with).empty();
  if (options.rounds == 0) {
    options.rounds = takes_turns ? std::min(kInterleavedRounds, options.measure.repetitions) : 1;
  }
  return options;
}

bool IsFlag(absl::string_view word, absl::string_view name) {
  return word == absl::StrCat("--", name) || absl::StartsWith(word, absl::StrCat("--", name, "="));
}

// Returns the words of a command line without the given flags and the words that are their values.
std::vector<std::string> Without(const std::vector<absl::string_view>& names,
                                 const std::vector<std::string>& argv) {
  std::vector<std::string> words;
  for (size_t i = 1; i < argv.size(); ++i) {
    const auto name = std::find_if(names.begin(), names.end(),
                                   [&](absl::string_view one) { return IsFlag(argv[i], one); });
    if (name == names.end()) {
      words.push_back(argv[i]);
    } else if (*name != "resume" && *name != "retry" && argv[i].find('=') == std::string::npos) {
      ++i;
    }
  }
  return words;
}

// The other build gets the same flags, but its own file.
absl::StatusOr<SweepOptions::Other> OtherFromFlags(const std::vector<std::string>& argv,
                                                   const SweepOptions& options) {
  SweepOptions::Other other;
  other.program = CallerPath(absl::GetFlag(FLAGS_interleave_with));
  if (access(other.program.c_str(), X_OK) != 0) {
    return absl::NotFoundError(
        absl::StrCat("--interleave_with: ", other.program, ": ", std::strerror(errno)));
  }
  other.output = absl::StrCat(absl::StripSuffix(options.output, ".pb"), "-base.pb");
  other.arguments = Without({"interleave_with", "output", "resume", "retry"}, argv);
  other.arguments.push_back(absl::StrCat("--output=", other.output));
  const bool exists = access(other.output.c_str(), F_OK) == 0;
  if (options.resume && exists) other.arguments.push_back("--resume");
  if (options.retry && exists) other.arguments.push_back("--retry");
  if (!options.resume && exists) {
    return absl::AlreadyExistsError(absl::StrCat("--interleave_with: ", other.output,
                                                 " is there already; --resume goes on with it"));
  }
  return other;
}

// Returns the command line of the same sweep without the two flags for resuming.
std::string Command(const std::vector<std::string>& argv) {
  std::string command =
      WorkspaceFolder().empty() ? argv[0] : std::string("bazel run //harness:sweep --");
  for (const std::string& word : Without({"output", "resume", "retry"}, argv)) {
    const bool plain = word.find_first_of(" *?'\"$&;|<>()[]{}\\") == std::string::npos;
    absl::StrAppend(&command, " ", plain ? word : absl::StrCat("'", word, "'"));
  }
  return command;
}

absl::StatusOr<int> Sweep(const std::vector<std::string>& argv) {
  Registry& registry = Registry::Global();
  CaseFlags flags = CaseFlagsFromFlags();
  TFB_ASSIGN_OR_RETURN(const int64_t memory_limit, MemoryLimitFromFlags());
  TFB_RETURN_IF_ERROR(AddContestantsFromFlags(memory_limit, &registry, &flags.techniques));
  if (absl::GetFlag(FLAGS_list)) {
    TFB_ASSIGN_OR_RETURN(const auto chosen, ChooseTechniques(flags.techniques, registry));
    std::vector<const Technique*> techniques;
    for (const ChosenTechnique& one : chosen) {
      if (std::find(techniques.begin(), techniques.end(), one.technique) == techniques.end()) {
        techniques.push_back(one.technique);
      }
    }
    std::fputs(ListTechniques(techniques).c_str(), stdout);
    return kExitDone;
  }
  TFB_ASSIGN_OR_RETURN(SweepOptions options, OptionsFromFlags());
  TFB_ASSIGN_OR_RETURN(const std::vector<Job> cases, MakeCases(flags, registry, CallerPath(".")));
  if (absl::GetFlag(FLAGS_dry_run)) {
    for (const std::string& name : NamesOf(cases)) std::printf("%s\n", name.c_str());
    std::printf("%zu cases\n", cases.size());
    return kExitDone;
  }
  if (!absl::GetFlag(FLAGS_interleave_with).empty()) {
    TFB_ASSIGN_OR_RETURN(options.other, OtherFromFlags(argv, options));
  }
  options.command = Command(argv);
  options.command_line = argv;
  return RunSweep(options, cases);
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv, argv + argc);
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, words, [&] { return tfb::Sweep(words); });
}
