// Makes the list of a sweep's cases from its flags: every technique with its options at every
// problem, on every device, for every input. Runs nothing.
#ifndef TFB_HARNESS_PLAN_CASES_H_
#define TFB_HARNESS_PLAN_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/technique.h"
#include "harness/inputs/job.h"
#include "harness/plan/choice.h"
#include "results/results.pb.h"

namespace tfb {

// The flags as the caller typed them. Each is a comma-separated list; the cases are all
// combinations.
struct CaseFlags {
  // Names or globs, each with ":option=value,option=value". The value * selects every value that
  // the option lists for sweeps. A glob with options selects the techniques that have all of these
  // options.
  std::string techniques = "*";
  // cpu, cuda or, where `simulator` is true, simulator. An empty list means the CPU and, where
  // `cuda_present` is true, CUDA for the techniques that have it.
  std::string devices;
  bool cuda_present = false;
  bool simulator = false;
  std::string dtypes = "f32";
  // Tokens: numbers, and ranges "256:4096" of powers of two. An empty list means kDefaultLengths
  // for drawn inputs, the file's tokens for captured ones ("real": of the files with at most
  // kRealTokens), and kTextLengths for text. Lengths beyond a file's are left out.
  std::string lengths;
  std::string heads = "8";
  std::string kv_heads;  // empty: as many as heads
  std::string head_dims = "64";
  std::string batches = "1";
  // true, false, or auto, which means causal for drawn inputs and non-causal for captured ones
  // (whose model saw all tokens), where the technique has that form.
  std::string causal = "auto";
  // Profiles and files (harness/inputs/inputs.h). Captured tensors give accuracy cases of the
  // file's sizes, drawn ones scaling cases, and text scaling cases with an accuracy case of
  // kRealTokens beside them, since the definitions of networks take minutes at the scaling lengths.
  // Options that are not given are those of the language model, where it has them. Where an input
  // lacks tensors that a technique reads, the technique has no cases if a glob selected it, and
  // cases with an obstacle if it is named.
  std::string inputs = "real,gaussian";
  std::string threads;  // sizes of the CPU pool; empty: every usable core
  // forward, backward, training. Errors are those of the forward pass: captured tensors beside
  // other inputs, and the beginning of a text, give cases of that pass alone.
  std::string passes = "forward";
  uint64_t seed = 1;
  // Whether to add the dense counterpart of a technique at each of its problems.
  bool counterparts = true;
  // Whether to add, beside a contestant, the technique of this suite that computes the same.
  bool ours = true;
  // Whether to include accuracy cases. Scaling cases are checked once in any case, except those of
  // a text of more than kRealTokens.
  bool accuracy = true;
  // "2/4": the second of four parts of about equal effort, each with the counterparts of its own
  // cases; empty for all.
  std::string shard;
};
inline constexpr absl::string_view kDefaultLengths = "256:4096";
inline constexpr absl::string_view kTextLengths = "16384";
inline constexpr int64_t kRealTokens = 512;

// Returns the cases, without duplicates, in the order in which to run them: accuracy before
// scaling, short before long, and cases that differ only in the technique and its options one after
// the other. Returns InvalidArgument or NotFound with a message that begins with the flag. Paths in
// `inputs` are relative to `folder`.
absl::StatusOr<std::vector<Job>> MakeCases(const CaseFlags& flags, const Registry& registry,
                                           absl::string_view folder);

// Returns the number of queries, or of keys where those are more.
int64_t LengthOf(const Job& job);
// Estimates the effort of a case relative to others without any times: a fixed part, and one that
// grows with tokens.
double RelativeEffort(const Job& job);

// Returns a text for each case, that of Job::ToString, with the threads where the cases have several.
std::vector<std::string> NamesOf(const std::vector<Job>& cases);

// Returns the case's input profile: its name and, for a file, the file, layer and model.
InputProfile RecordInput(const InputSource& source);
// Returns the record of a case without an outcome: its key and the technique's description.
Case MakeRecord(const Job& job);
// Adds "bits_per_byte" to the statistics of a case of text. `parameters` are the layer's.
void RecordText(const Job& job, const NamedTensors& parameters, const NamedTensors& outputs,
                Outcome* outcome);
// Returns a key that is equal for cases that differ only in technique and options, which are
// measured side by side.
std::string GroupKey(const Job& job);

// Returns one paragraph per technique: name, family, exactness, devices, options with their
// defaults and ranges.
std::string ListTechniques(const std::vector<const Technique*>& techniques);

}  // namespace tfb

#endif  // TFB_HARNESS_PLAN_CASES_H_
