#include "harness/plan/cases.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "harness/contestants/interface.h"
#include "harness/measure/machine.h"
#include "results/reader.h"

namespace tfb {
namespace {

// The parsed values of the axes.
struct Axes {
  std::vector<ChosenTechnique> techniques;
  std::vector<Device> devices;
  bool devices_given = false;
  std::vector<DType> dtypes;
  std::vector<int64_t> lengths;  // empty: not given
  std::vector<int64_t> heads, kv_heads, head_dims, batches;
  std::vector<std::optional<bool>> causal;  // none: auto
  std::vector<InputSource> inputs;
  std::vector<int64_t> threads;
  std::vector<Case::Pass> passes;
};

constexpr int64_t kMaxThreads = 4096;

absl::Status ParseListed(const CaseFlags& flags, absl::string_view folder, Axes* axes) {
  axes->devices_given = !flags.devices.empty();
  const std::string present = flags.cuda_present ? "cpu,cuda" : "cpu";
  TFB_ASSIGN_OR_RETURN(const auto devices,
                       ParseWords("devices", axes->devices_given ? flags.devices : present));
  for (const std::string& word : devices) {
    const absl::StatusOr<Device> device = ParseDevice(word);
    if (!device.ok()) return FlagError("devices", device.status());
    if (*device == Device::kSimulator && !flags.simulator) {
      return FlagError("devices",
                       "times in the simulator mean nothing; //harness:check measures its errors");
    }
    axes->devices.push_back(*device);
  }
  TFB_ASSIGN_OR_RETURN(const auto dtypes, ParseWords("dtypes", flags.dtypes));
  for (const std::string& word : dtypes) {
    const absl::StatusOr<DType> dtype = ParseDType(word);
    if (!dtype.ok() || (*dtype != DType::kF32 && *dtype != DType::kBF16 && *dtype != DType::kF16)) {
      return FlagError("dtypes", absl::StrCat("\"", word, "\"; allowed are f32, bf16, f16"));
    }
    axes->dtypes.push_back(*dtype);
  }
  TFB_ASSIGN_OR_RETURN(const auto causal, ParseWords("causal", flags.causal));
  for (const std::string& word : causal) {
    if (word == "auto") {
      axes->causal.push_back(std::nullopt);
    } else if (word == "true" || word == "false") {
      axes->causal.push_back(word == "true");
    } else {
      return FlagError("causal", absl::StrCat("\"", word, "\"; allowed are true, false, auto"));
    }
  }
  TFB_ASSIGN_OR_RETURN(const auto passes, ParseWords("pass", flags.passes));
  for (const std::string& word : passes) {
    constexpr Case::Pass kPasses[] = {Case::PASS_FORWARD, Case::PASS_BACKWARD, Case::PASS_TRAINING};
    const auto* found = std::find_if(std::begin(kPasses), std::end(kPasses),
                                     [&](Case::Pass pass) { return Name(pass) == word; });
    if (found == std::end(kPasses)) {
      return FlagError("pass",
                       absl::StrCat("\"", word, "\"; allowed are forward, backward, training"));
    }
    axes->passes.push_back(*found);
  }
  TFB_ASSIGN_OR_RETURN(const auto inputs, ParseWords("input", flags.inputs));
  for (const std::string& word : inputs) {
    const absl::StatusOr<std::vector<InputSource>> sources = ParseInputSources(word, folder);
    if (!sources.ok()) return FlagError("input", sources.status());
    axes->inputs.insert(axes->inputs.end(), sources->begin(), sources->end());
  }
  return absl::OkStatus();
}

absl::StatusOr<Axes> ParseAxes(const CaseFlags& flags, const Registry& registry,
                               absl::string_view folder) {
  Axes axes;
  TFB_ASSIGN_OR_RETURN(axes.techniques, ChooseTechniques(flags.techniques, registry));
  TFB_RETURN_IF_ERROR(ParseListed(flags, folder, &axes));
  if (!flags.lengths.empty()) {
    TFB_ASSIGN_OR_RETURN(axes.lengths, ParseSizes("lengths", flags.lengths, 1, kMaxSize));
  }
  TFB_ASSIGN_OR_RETURN(axes.heads, ParseSizes("heads", flags.heads, 1, kMaxSize));
  if (!flags.kv_heads.empty()) {
    TFB_ASSIGN_OR_RETURN(axes.kv_heads, ParseSizes("kv_heads", flags.kv_heads, 1, kMaxSize));
  }
  TFB_ASSIGN_OR_RETURN(axes.head_dims, ParseSizes("head_dims", flags.head_dims, 1, kMaxHeadDim));
  TFB_ASSIGN_OR_RETURN(axes.batches, ParseSizes("batches", flags.batches, 1, kMaxSize));
  if (flags.threads.empty()) {
    axes.threads = {UsableCores()};
  } else {
    TFB_ASSIGN_OR_RETURN(axes.threads, ParseSizes("threads", flags.threads, 1, kMaxThreads));
  }
  return axes;
}

// Returns the tokens of a captured layer for the technique's kind of input; 0 where it has no
// tensor of that kind.
int64_t CapturedTokens(const CapturedLayer& layer, InputKind kind) {
  return kind == InputKind::kQkv ? layer.query_tokens : layer.hidden_tokens;
}

// Collects cases without duplicates.
class CaseList {
 public:
  void Add(Job job) {
    if (!keys_.insert(CaseKey(MakeRecord(job))).second) return;
    cases_.push_back(std::move(job));
  }
  std::vector<Job>& cases() { return cases_; }

 private:
  std::vector<Job> cases_;
  std::set<std::string> keys_;
};

// Returns the problems of the axes for one technique and input, without the direction of the mask.
absl::StatusOr<std::vector<Problem>> Problems(const Axes& axes, const InputSource& input,
                                              InputKind kind) {
  std::vector<Problem> problems;
  const bool captured = input.captured != nullptr;
  std::vector<int64_t> lengths = axes.lengths;
  if (lengths.empty() && captured) lengths = {kMaxSize};  // as long as the file
  if (lengths.empty()) {
    TFB_ASSIGN_OR_RETURN(
        lengths,
        ParseSizes("lengths", input.text != nullptr ? kTextLengths : kDefaultLengths, 1, kMaxSize));
  }
  for (const DType dtype : axes.dtypes) {
    for (const int64_t batch : axes.batches) {
      for (const int64_t heads : axes.heads) {
        for (const int64_t kv_heads :
             axes.kv_heads.empty() ? std::vector<int64_t>{heads} : axes.kv_heads) {
          for (const int64_t head_dim : axes.head_dims) {
            for (const int64_t length : lengths) {
              Problem problem = Problem::SelfAttention(batch, heads, length, head_dim);
              problem.dtype = dtype;
              problem.kv_heads = kv_heads;
              if (const absl::Status status = Validate(problem); !status.ok() && !captured) {
                return FlagError(kv_heads == heads ? "heads" : "kv_heads", status);
              }
              const int64_t most = captured ? CapturedTokens(*input.captured, kind) : 0;
              if (most > 0 && length != kMaxSize && length > most) continue;
              problems.push_back(problem);
            }
          }
        }
      }
    }
  }
  return problems;
}

bool IsCausal(std::optional<bool> asked, const TechniqueInfo& info, bool captured) {
  if (asked.has_value()) return *asked;
  return captured ? !info.supports_noncausal : info.supports_causal;
}

// Sets the sizes and, for a captured input or text, the obstacle where it lacks tensors.
void Fit(const InputSource& input, const Problem& wanted, Job* job) {
  job->problem = wanted;
  const InputKind kind = job->technique->info().input_kind;
  if (input.text != nullptr) {
    job->problem = input.text->Fit(wanted);
    job->obstacle = FitProblem(input, kind, wanted).status();
    if (job->obstacle.ok() && !wanted.causal) {
      job->obstacle =
          absl::UnimplementedError("text is foretold from what is before it: causal only");
    }
    return;
  }
  if (input.captured == nullptr) return;
  const absl::StatusOr<Problem> fitted = FitProblem(input, *job->technique, job->options, wanted);
  if (fitted.ok()) {
    job->problem = *fitted;
    const auto specs = job->technique->InputSpecs(*fitted, job->options);
    if (specs.ok()) job->obstacle = CheckTensorsAreThere(input, *specs);
    return;
  }
  job->obstacle = fitted.status();
  // The key of a case that cannot run: the sizes that the file has of anything.
  const CapturedLayer& layer = *input.captured;
  const int64_t tokens = layer.tokens();
  job->problem.query_tokens = std::min(wanted.query_tokens, tokens);
  job->problem.kv_tokens = std::min(wanted.kv_tokens, tokens);
}

bool IsWantedByDefault(const Axes& axes, const InputSource& input) {
  // The long shipped file is for sweeps over lengths: the definitions of all its rows take minutes.
  if (input.profile != "real" || !axes.lengths.empty()) return true;
  return input.captured->tokens() <= kRealTokens;
}

// Returns the passes of the input's cases.
std::vector<Case::Pass> PassesOn(const Axes& axes, const InputSource& input) {
  const bool all_captured =
      std::all_of(axes.inputs.begin(), axes.inputs.end(),
                  [](const InputSource& one) { return one.captured != nullptr; });
  if (input.captured == nullptr || all_captured) return axes.passes;
  return {Case::PASS_FORWARD};
}

absl::Status AddCases(const CaseFlags& flags, const Axes& axes, const ChosenTechnique& chosen,
                      const InputSource& input, CaseList* list) {
  const TechniqueInfo& info = chosen.technique->info();
  const bool captured = input.captured != nullptr;
  TFB_ASSIGN_OR_RETURN(const std::vector<Problem> problems, Problems(axes, input, info.input_kind));
  Options options = chosen.options;
  if (input.text != nullptr) {
    const absl::StatusOr<Options> fitted =
        chosen.technique->Canonical(input.text->FitOptions(info, chosen.given));
    if (!fitted.ok()) {
      return FlagError("techniques", absl::StrCat(info.name,
                                                  ", with the options of the language "
                                                  "model: ",
                                                  fitted.status().message()));
    }
    options = *fitted;
  }
  for (const Device device : axes.devices) {
    if (!axes.devices_given && !RunsOn(info, device)) continue;
    for (const Problem& problem : problems) {
      for (const std::optional<bool> causal : axes.causal) {
        for (const int64_t threads : axes.threads) {
          Job added;
          added.technique = chosen.technique;
          added.options = options;
          added.device = device;
          added.input = input;
          added.threads = static_cast<int>(threads);
          added.seed = flags.seed;
          added.purpose = captured ? Case::PURPOSE_ACCURACY : Case::PURPOSE_SCALING;
          Problem wanted = problem;
          wanted.causal = IsCausal(causal, info, captured);
          Fit(input, wanted, &added);
          if (!chosen.named && !added.obstacle.ok()) continue;
          added.check =
              flags.accuracy || input.text == nullptr || added.problem.query_tokens <= kRealTokens;
          for (const Case::Pass pass : PassesOn(axes, input)) {
            added.pass = pass;
            if (flags.accuracy || !captured) list->Add(added);
          }
          if (input.text == nullptr || !flags.accuracy) continue;
          added.pass = Case::PASS_FORWARD;
          added.purpose = Case::PURPOSE_ACCURACY;
          added.problem.query_tokens = added.problem.kv_tokens =
              std::min(kRealTokens, added.problem.query_tokens);
          list->Add(std::move(added));
        }
      }
    }
  }
  return absl::OkStatus();
}

// Assigns each case to the part with the least effort so far, those of most effort first.
absl::Status KeepShard(absl::string_view shard, CaseList* list) {
  if (shard.empty()) return absl::OkStatus();
  constexpr int kMostShards = 10000;
  const std::vector<absl::string_view> parts = absl::StrSplit(shard, '/');
  int wanted = 0, count = 0;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &wanted) ||
      !absl::SimpleAtoi(parts[1], &count) || wanted < 1 || wanted > count || count > kMostShards) {
    return FlagError("shard", absl::StrCat("\"", shard, "\"; wanted is a part of up to ",
                                           kMostShards, ", as in 2/4"));
  }
  std::vector<Job> cases = std::move(list->cases());
  std::vector<size_t> order(cases.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return RelativeEffort(cases[a]) > RelativeEffort(cases[b]);
  });
  std::vector<double> efforts(static_cast<size_t>(count), 0.0);
  std::vector<bool> kept(cases.size());
  for (const size_t i : order) {
    const auto least = std::min_element(efforts.begin(), efforts.end());
    *least += RelativeEffort(cases[i]);
    kept[i] = least - efforts.begin() == wanted - 1;
  }
  *list = CaseList();
  for (size_t i = 0; i < cases.size(); ++i) {
    if (kept[i]) list->Add(std::move(cases[i]));
  }
  return absl::OkStatus();
}

// Adds the technique on the input of the case `beside`, where it can be compared with that case.
void AddBeside(const Registry& registry, const TechniqueSpec& spec, bool is_counterpart, Job beside,
               CaseList* list) {
  const absl::StatusOr<const Technique*> technique = registry.Find(spec.technique);
  if (!technique.ok()) return;  // not linked in: the case stands alone
  const absl::StatusOr<Options> options = (*technique)->Canonical(spec.options);
  if (!options.ok() || !beside.obstacle.ok()) return;
  // A counterpart with another kind of input has another problem, so times are not comparable.
  if ((*technique)->info().input_kind != beside.technique->info().input_kind) return;
  beside.technique = *technique;
  beside.options = *options;
  beside.added = is_counterpart;
  list->Add(std::move(beside));
}

// Adds the technique of this suite that computes what a contestant does, and the dense counterpart of
// each case, as the flags say.
void AddBesideEach(const CaseFlags& flags, const Registry& registry, CaseList* list) {
  const size_t named = list->cases().size();
  for (size_t i = 0; i < named; ++i) {
    const Job job = list->cases()[i];
    const ContestantTechnique* contestant = AsContestant(*job.technique);
    if (flags.ours && contestant != nullptr) {
      const auto definition = contestant->DefinitionOf(job.options);
      if (definition.ok()) AddBeside(registry, *definition, /*is_counterpart=*/false, job, list);
    }
    if (!flags.counterparts) continue;
    const auto counterpart = job.technique->Counterpart(job.problem, job.options);
    if (counterpart.ok()) AddBeside(registry, *counterpart, /*is_counterpart=*/true, job, list);
  }
}
DeviceType DeviceTypeOf(Device device) {
  switch (device) {
    case Device::kCpu:
      return DEVICE_TYPE_CPU;
    case Device::kCuda:
      return DEVICE_TYPE_CUDA;
    case Device::kSimulator:
      return DEVICE_TYPE_SIMULATOR;
  }
  return DEVICE_TYPE_UNSPECIFIED;
}

ElementType ElementTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ELEMENT_TYPE_F32;
    case DType::kBF16:
      return ELEMENT_TYPE_BF16;
    case DType::kF16:
      return ELEMENT_TYPE_F16;
    case DType::kF64:
      return ELEMENT_TYPE_F64;
    default:
      return ELEMENT_TYPE_UNSPECIFIED;
  }
}

TechniqueDescription::Exactness ExactnessOf(Exactness exactness) {
  switch (exactness) {
    case Exactness::kExact:
      return TechniqueDescription::EXACTNESS_EXACT;
    case Exactness::kApproximate:
      return TechniqueDescription::EXACTNESS_APPROXIMATE;
    case Exactness::kOwn:
      return TechniqueDescription::EXACTNESS_OWN;
  }
  return TechniqueDescription::EXACTNESS_UNSPECIFIED;
}

TechniqueDescription::InputKind InputKindOf(InputKind kind) {
  switch (kind) {
    case InputKind::kQkv:
      return TechniqueDescription::INPUT_KIND_QKV;
    case InputKind::kHidden:
      return TechniqueDescription::INPUT_KIND_HIDDEN;
    case InputKind::kTokens:
      return TechniqueDescription::INPUT_KIND_TOKENS;
  }
  return TechniqueDescription::INPUT_KIND_UNSPECIFIED;
}

void SetProblem(const Problem& problem, ProblemSize* size) {
  size->set_batch(problem.batch);
  size->set_query_heads(problem.query_heads);
  size->set_kv_heads(problem.kv_heads);
  size->set_query_tokens(problem.query_tokens);
  size->set_kv_tokens(problem.kv_tokens);
  size->set_head_dim(problem.head_dim);
  size->set_value_dim(problem.value_dim);
  size->set_causal(problem.causal);
}

}  // namespace

int64_t LengthOf(const Job& job) {
  return std::max(job.problem.query_tokens, job.problem.kv_tokens);
}

double RelativeEffort(const Job& job) {
  // Checks over all rows weigh as much as the longer of the usual lengths.
  const double fixed = job.purpose == Case::PURPOSE_ACCURACY ? 2 : 1;
  // A backward pass of attention has 5 matrix products where a run has 2 (FlashAttention-2,
  // arXiv:2307.08691v1, section 4.1).
  const double runs = job.pass == Case::PASS_BACKWARD   ? 2.5
                      : job.pass == Case::PASS_TRAINING ? 3.5
                                                        : 1;
  return fixed + runs * static_cast<double>(LengthOf(job)) / 512;
}

namespace {

absl::Status NoCaseLeft(const CaseFlags& flags, const Axes& axes) {
  if (!flags.lengths.empty() && !axes.inputs.empty() && axes.inputs.front().captured != nullptr) {
    return FlagError("lengths", absl::StrCat("no case is left: no input of \"", flags.inputs,
                                             "\" has as many tokens as \"", flags.lengths, "\""));
  }
  std::vector<absl::string_view> devices;
  for (const Device device : axes.devices) devices.push_back(Name(device));
  return FlagError("techniques",
                   absl::StrCat("no case is left: nothing that \"", flags.techniques,
                                "\" chooses runs on ", absl::StrJoin(devices, " or "),
                                " and reads the tensors of input \"", flags.inputs, "\""));
}

}  // namespace

absl::StatusOr<std::vector<Job>> MakeCases(const CaseFlags& flags, const Registry& registry,
                                           absl::string_view folder) {
  TFB_ASSIGN_OR_RETURN(const Axes axes, ParseAxes(flags, registry, folder));
  CaseList list;
  for (const InputSource& input : axes.inputs) {
    if (!IsWantedByDefault(axes, input)) continue;
    for (const ChosenTechnique& chosen : axes.techniques) {
      TFB_RETURN_IF_ERROR(AddCases(flags, axes, chosen, input, &list));
    }
  }
  if (list.cases().empty()) {
    return NoCaseLeft(flags, axes);
  }
  TFB_RETURN_IF_ERROR(KeepShard(flags.shard, &list));
  AddBesideEach(flags, registry, &list);

  std::vector<Job> cases = std::move(list.cases());
  std::vector<std::pair<std::string, size_t>> groups;  // by first appearance
  const auto rank = [&groups](const Job& c) {
    const std::string key = GroupKey(c);
    const auto found = std::find_if(groups.begin(), groups.end(),
                                    [&](const auto& group) { return group.first == key; });
    if (found != groups.end()) return found->second;
    groups.emplace_back(key, groups.size());
    return groups.size() - 1;
  };
  using Order = std::tuple<bool, int64_t, size_t>;
  std::vector<std::pair<Order, size_t>> order;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Job& c = cases[i];
    order.push_back({{c.purpose != Case::PURPOSE_ACCURACY, LengthOf(c), rank(c)}, i});
  }
  std::sort(order.begin(), order.end());
  std::vector<Job> sorted;
  for (const auto& [key, index] : order) sorted.push_back(std::move(cases[index]));
  return sorted;
}

InputProfile RecordInput(const InputSource& source) {
  InputProfile input;
  input.set_name(source.profile);
  if (source.text != nullptr) {
    input.set_file(source.text->file().substr(source.text->file().rfind('/') + 1));
    input.set_model(source.text->data());
  }
  if (source.captured == nullptr) return input;
  input.set_file(source.captured->file);
  input.set_layer(source.captured->layer);
  input.set_model(source.captured->model());
  return input;
}

std::vector<std::string> NamesOf(const std::vector<Job>& cases) {
  bool several = false;
  for (const Job& one : cases) several |= one.threads != cases.front().threads;
  std::vector<std::string> names;
  for (const Job& one : cases) {
    names.push_back(one.ToString());
    if (!several || one.device != Device::kCpu) continue;
    absl::StrAppend(&names.back(), ", ", one.threads, one.threads == 1 ? " thread" : " threads");
  }
  return names;
}

Case MakeRecord(const Job& job) {
  const TechniqueInfo& info = job.technique->info();
  Case record;
  Case::Key* key = record.mutable_key();
  key->set_technique(info.name);
  key->mutable_options()->insert(job.options.begin(), job.options.end());
  key->set_options_text(CanonicalOptions(*key));
  key->set_device(DeviceTypeOf(job.device));
  key->set_dtype(ElementTypeOf(job.problem.dtype));
  SetProblem(job.problem, key->mutable_problem());
  *key->mutable_input() = RecordInput(job.input);
  key->set_seed(job.seed);
  key->set_threads(job.device == Device::kCpu ? job.threads : 0);
  key->set_purpose(job.purpose);
  key->set_pass(job.pass);

  TechniqueDescription* technique = record.mutable_technique();
  technique->set_display_name(job.DisplayName());
  technique->set_title(info.title);
  technique->set_citation(info.citation);
  technique->set_family(info.family);
  technique->set_exactness(ExactnessOf(info.exactness));
  technique->set_input_kind(InputKindOf(info.input_kind));
  technique->set_options_are_default(job.ChangedOptions().empty());
  technique->set_expected_growth(info.growth);
  if (const ContestantTechnique* contestant = AsContestant(*job.technique); contestant != nullptr) {
    TechniqueDescription::Contestant* said = technique->mutable_contestant();
    said->set_file(contestant->contestant().file);
    said->set_definition(contestant->contestant().definition);
    said->set_approximates(!contestant->contestant().exact);
    if (const auto definition = contestant->DefinitionOf(job.options); definition.ok()) {
      said->set_definition_technique(definition->technique);
      said->set_definition_options_text(
          CanonicalOptions({definition->options.begin(), definition->options.end()}));
    }
  }
  const absl::StatusOr<TechniqueSpec> counterpart =
      job.technique->Counterpart(job.problem, job.options);
  if (counterpart.ok()) {
    technique->set_dense_counterpart(counterpart->technique);
    technique->mutable_dense_counterpart_options()->insert(counterpart->options.begin(),
                                                           counterpart->options.end());
  }
  return record;
}

void RecordText(const Job& job, const NamedTensors& parameters, const NamedTensors& outputs,
                Outcome* outcome) {
  if (job.input.text == nullptr) return;
  const absl::StatusOr<double> bits = job.input.text->BitsPerByte(
      job.technique->info().input_kind, job.problem, outputs.at("out").view(), parameters);
  if (bits.ok()) (*outcome->mutable_statistics())["bits_per_byte"] = *bits;
}

std::string GroupKey(const Job& job) {
  Case::Key key = MakeRecord(job).key();
  key.clear_technique();
  key.clear_options();
  key.clear_options_text();
  return CaseKey(key);
}

std::string ListTechniques(const std::vector<const Technique*>& techniques) {
  std::string text;
  for (const Technique* technique : techniques) {
    const TechniqueInfo& info = technique->info();
    std::vector<absl::string_view> devices;
    for (const Device device : info.devices) devices.push_back(Name(device));
    absl::StrAppend(&text, info.name, "  ", info.title, "\n    family ", info.family, ", ",
                    Name(info.exactness), ", input ", Name(info.input_kind), ", devices ",
                    absl::StrJoin(devices, " "),
                    !info.supports_noncausal ? ", causal only"
                    : info.supports_causal   ? ""
                                             : ", not causal",
                    "\n    ", info.citation, "\n");
    for (const OptionSpec& option : info.options) {
      absl::StrAppend(
          &text, "    :", option.name, "=", option.default_value, "  (", option.range, ") ",
          option.help,
          option.sweep.empty() ? "" : absl::StrCat("; * is ", absl::StrJoin(option.sweep, ", ")),
          "\n");
    }
  }
  return text;
}

}  // namespace tfb
