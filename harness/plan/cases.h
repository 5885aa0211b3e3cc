// Makes the list of a sweep's cases from its flags: every technique and options at every problem, on
// every device, for every input. Nothing runs here.
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

// The flags as the caller typed them. Each is a list that commas separate; the cases are every
// combination.
struct CaseFlags {
  // Names or globs, each with ":option=value,option=value". A value of * takes every value that the
  // option lists for sweeps. A glob with options takes the techniques that have all of these
  // options.
  std::string techniques = "*";
  // The devices are cpu, cuda and, where `simulator` is true, simulator. An empty text means the CPU
  // and, where `cuda_present` is true, CUDA for the techniques that have it.
  std::string devices;
  bool cuda_present = false;
  bool simulator = false;
  std::string dtypes = "f32";
  // Tokens: numbers, and ranges "256:4096" that double. Empty: kDefaultLengths for drawn inputs,
  // as many tokens as the file has for captured ones ("real": of the files with at most
  // kRealTokens), kTextLengths for text. Lengths beyond a file's are left out.
  std::string lengths;
  std::string heads = "8";
  std::string kv_heads;  // empty: as many as heads
  std::string head_dims = "64";
  std::string batches = "1";
  // true, false, or auto: with drawn inputs causal where the technique has such a form, with
  // captured ones (whose model saw all tokens) not causal where it has.
  std::string causal = "auto";
  // Profiles and files (harness/inputs/inputs.h). Captured tensors make accuracy cases of the
  // file's sizes, drawn ones scaling cases, and text scaling cases with an accuracy case of
  // kRealTokens beside them, since the definitions of networks take minutes at such lengths.
  // Options that are not given are those of the language model, where it has them. A technique that
  // a glob has chosen has no cases for an input without the tensors that it reads; one that is
  // named has cases with an obstacle.
  std::string inputs = "real,gaussian";
  std::string threads;  // sizes of the CPU pool; empty: every usable core
  uint64_t seed = 1;
  // Adds the dense counterpart of a technique at each of its problems where the caller did not name
  // it.
  bool counterparts = true;
  // false: scaling cases alone, which are still checked once, but for those of a text of more than
  // kRealTokens.
  bool accuracy = true;
  // "2/4": the second of four parts of about equal effort, each with the counterparts of its own
  // cases. Empty: all.
  std::string shard;
};
inline constexpr absl::string_view kDefaultLengths = "256:4096";
inline constexpr absl::string_view kTextLengths = "16384";
inline constexpr int64_t kRealTokens = 512;

// The cases, without repetition, in the order in which to run them: accuracy before scaling, short
// before long, and cases that differ in nothing but the technique and its options one after the
// other. InvalidArgument, NotFound: the message begins with the flag. `folder` is what the paths in
// `inputs` are relative to.
absl::StatusOr<std::vector<Job>> MakeCases(const CaseFlags& flags, const Registry& registry,
                                           absl::string_view folder);

// Returns the effort of a case relative to others when nothing else is known: fixed costs, and a part
// that grows with tokens.
double RelativeEffort(const Job& job);

// Returns the case's input profile: its name and, for a file, the file, layer and model.
InputProfile RecordInput(const InputSource& source);
// The record of a case without an outcome: its key and what rendering has to know of the technique.
Case MakeRecord(const Job& job);
// Adds "bits_per_byte" to the statistics of a case of text. `parameters` are the layer's.
void RecordText(const Job& job, const NamedTensors& parameters, const NamedTensors& outputs,
                Outcome* outcome);
// Equal for cases that differ in nothing but technique and options: those that are measured side by
// side.
std::string GroupKey(const Job& job);

// One paragraph a technique: name, family, exactness, devices, options with their defaults and
// ranges.
std::string ListTechniques(const std::vector<const Technique*>& techniques);

}  // namespace tfb

#endif  // TFB_HARNESS_PLAN_CASES_H_
