#include "harness/inputs/technique_help.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/header_text.h"
#include "core/status.h"
#include "harness/inputs/technique_tensors.h"
#include "results/table.h"

namespace tfb {
namespace {

constexpr int kColumns = 100;
constexpr size_t kNamedParameters = 8;  // the most that a line names

// The meanings of tensors that many techniques read or write. The technique's header explains the
// others.
const std::pair<const char*, const char*> kCommonTensors[] = {
    {"q", "queries"},
    {"k", "keys"},
    {"v", "values"},
    {"x", "hidden states"},
    {"memory", "hidden states that keys and values are made from"},
    {"key_mask", "1 where the key is a token, 0 where it is padding"},
    {"out", "the result"},
    {"log_sum_exp", "natural logarithm of the sum of exponentials of a row's scores"}};

std::string Meaning(const std::string& name) {
  for (const auto& [common, meaning] : kCommonTensors) {
    if (name == common) return meaning;
  }
  return "see the text above";
}

std::string Name(Distribution distribution) {
  switch (distribution) {
    case Distribution::kNormal:
      return "N(0, 1)";
    case Distribution::kUniform:
      return "uniform between 0 and 1";
    case Distribution::kGumbel:
      return "Gumbel";
  }
  return "";
}

std::string Need(const TensorSpec& spec) {
  if (spec.optional) return "optional";
  if (!spec.noise.has_value()) return "required";
  return absl::StrCat("drawn where absent: ", Name(*spec.noise));
}

void Append(const std::string& heading, Table table, std::string* page) {
  TextStyle style;
  style.width = kColumns;
  style.unicode = false;
  absl::StrAppend(page, heading, "\n", ToTerminal(table, style), "\n");
}

TableColumn Column(const char* header, int least_width = 0) {
  TableColumn column;
  column.header = header;
  column.least_width = least_width;
  return column;
}

std::vector<TableCell> ShapeCells(const NamedTensorSpec& tensor) {
  return {tensor.spec.name, absl::StrCat("[", absl::StrJoin(tensor.symbols, ", "), "]"),
          ShapeString(tensor.spec.shape), std::string(tfb::Name(tensor.spec.dtype))};
}

void AppendOptions(const Job& job, std::string* page) {
  const TechniqueInfo& info = job.technique->info();
  if (info.options.empty()) {
    absl::StrAppend(page, "Options: none.\n\n");
    return;
  }
  const bool some_given =
      std::any_of(info.options.begin(), info.options.end(), [&](const OptionSpec& option) {
        return job.options.at(option.name) != option.default_value;
      });
  Table table;
  table.columns = {Column("option"), Column("default"), Column("range", 16), Column("meaning", 30)};
  if (some_given) table.columns.insert(table.columns.begin() + 1, Column("given"));
  for (const OptionSpec& option : info.options) {
    table.rows.push_back({option.name, option.default_value, option.range, option.help});
    if (!some_given) continue;
    const std::string& value = job.options.at(option.name);
    const bool is_given = value != option.default_value;
    table.rows.back().insert(table.rows.back().begin() + 1, is_given ? value : "");
  }
  Append("Options", std::move(table), page);
}

void AppendInputsAndOutputs(const TechniqueTensors& tensors, std::string* page) {
  Table inputs;
  inputs.columns = {Column("input", 8), Column("shape", 20), Column("here", 10),
                    Column("type"),     Column("is", 10),    Column("meaning", 16)};
  for (const NamedTensorSpec& tensor : tensors.inputs) {
    inputs.rows.push_back(ShapeCells(tensor));
    inputs.rows.back().insert(inputs.rows.back().end(),
                              {Need(tensor.spec), Meaning(tensor.spec.name)});
  }
  Append("Inputs", std::move(inputs), page);
  Table outputs;
  outputs.columns = {Column("output", 8), Column("shape", 20), Column("here", 10),
                     Column("type"),      Column("is", 10),    Column("meaning", 16)};
  for (const NamedTensorSpec& tensor : tensors.outputs) {
    outputs.rows.push_back(ShapeCells(tensor));
    outputs.rows.back().insert(
        outputs.rows.back().end(),
        {tensor.spec.optional ? "optional" : "always", Meaning(tensor.spec.name)});
  }
  Append("Outputs", std::move(outputs), page);
}

void AppendParameters(const TechniqueTensors& tensors, std::string* page) {
  if (!tensors.parameters_status.ok()) {
    absl::StrAppend(page,
                    "Parameters: not known for these sizes: ", tensors.parameters_status.message(),
                    "\n\n");
    return;
  }
  if (tensors.parameters.empty()) {
    absl::StrAppend(page, "Parameters: none.\n\n");
    return;
  }
  Table table;
  table.columns = {Column("parameter"), Column("shape", 20), Column("here", 10), Column("type"),
                   Column("is")};
  for (const NamedTensorSpec& tensor : JoinLayers(tensors.parameters)) {
    table.rows.push_back(ShapeCells(tensor));
    table.rows.back().emplace_back(tensor.drawn ? "drawn from the seed" : "not drawn");
  }
  Append("Parameters (--parameters=FILE gives them, --dump_parameters=FILE writes them)",
         std::move(table), page);
}

std::string Sizes(const Job& job, absl::string_view sizes_from) {
  std::vector<std::string> sizes;
  for (const NamedSize& size : ProblemSizes(job.problem)) {
    if (absl::StrContains(size.name, ' ')) continue;
    sizes.push_back(absl::StrCat(size.name, " ", size.value));
  }
  return Wrap(
      absl::StrCat("Sizes ", sizes_from, ": ", absl::StrJoin(sizes, ", "),
                   " = query_heads head_dim; ", job.problem.causal ? "causal" : "not causal"),
      kColumns, "  ");
}

// Returns "dense", in quotes where the shell would interpret the text.
std::string SpecText(const Job& job) {
  const TechniqueInfo& info = job.technique->info();
  TechniqueSpec spec{info.name, {}};
  for (const OptionSpec& option : info.options) {
    const std::string& value = job.options.at(option.name);
    if (value != option.default_value) spec.options[option.name] = value;
  }
  const std::string text = ToString(spec);
  return text.find_first_of("[]*") == std::string::npos ? text : absl::StrCat("'", text, "'");
}

// Returns the flags without which --input would give another problem.
std::string ProblemFlags(const Job& job, const std::vector<NamedTensorSpec>& inputs) {
  const Problem& problem = job.problem;
  std::string flags;
  if (problem.causal) absl::StrAppend(&flags, " --causal");
  if (problem.dtype != DType::kF32) absl::StrAppend(&flags, " --dtype=", tfb::Name(problem.dtype));
  const bool has_heads = std::any_of(inputs.begin(), inputs.end(), [](const NamedTensorSpec& one) {
    return one.spec.name == "q";
  });
  if (!has_heads && problem.query_heads != Problem().query_heads) {
    absl::StrAppend(&flags, " --heads=", problem.query_heads);
  }
  return flags;
}

void AppendExample(const Job& job, const TechniqueTensors& tensors, std::string* page) {
  const std::string command =
      absl::StrCat("bazel run //harness:apply -- --technique=", SpecText(job),
                   ProblemFlags(job, tensors.inputs));
  absl::StrAppend(
      page,
      "Example: write a file of drawn tensors with these names and shapes, put your own "
      "in their\nplace, and apply the technique to them.\n\n  ",
      command, " --draw_input=in.safetensors\n  ", command,
      " --input=in.safetensors --output=out.safetensors\n");
}

}  // namespace

absl::StatusOr<std::string> TechniqueHelp(const Job& job, absl::string_view sizes_from) {
  TFB_ASSIGN_OR_RETURN(const TechniqueTensors tensors,
                       DescribeTensors(*job.technique, job.options, job.problem, job.seed));
  const TechniqueInfo& info = job.technique->info();
  const HeaderText text = FindHeaderText(info.name.c_str());
  std::string page = absl::StrCat(info.name, ": ", info.title, "\n", info.citation, "\n\n");
  for (const char* part : {text.head, text.of_class}) {
    if (*part != '\0') absl::StrAppend(&page, part, "\n");
  }
  AppendOptions(job, &page);
  absl::StrAppend(&page, Sizes(job, sizes_from), "\n\n");
  AppendInputsAndOutputs(tensors, &page);
  AppendParameters(tensors, &page);
  AppendExample(job, tensors, &page);
  return page;
}

std::vector<std::string> DrawnLines(const std::vector<TensorSpec>& inputs,
                                    const std::vector<std::string>& drawn,
                                    const NamedTensors& parameters, uint64_t seed) {
  std::vector<std::string> lines;
  for (const TensorSpec& spec : inputs) {
    lines.push_back(absl::StrCat("input ", spec.name, " ", ShapeString(spec.shape), " ",
                                 tfb::Name(spec.dtype), " is drawn from seed ", seed, ", ",
                                 Name(spec.noise.value_or(Distribution::kNormal)),
                                 "; give it as tensor \"", spec.name, "\" in --input"));
  }
  if (drawn.empty()) return lines;
  std::vector<NamedTensorSpec> all;
  for (const std::string& name : drawn) {
    const Tensor& tensor = parameters.at(name);
    all.push_back({{name, tensor.shape(), tensor.dtype()}, {}});
  }
  const std::vector<NamedTensorSpec> joined = JoinLayers(all);
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(joined.size(), kNamedParameters); ++i) {
    names.push_back(absl::StrCat(joined[i].spec.name, " ", ShapeString(joined[i].spec.shape)));
  }
  const size_t more = joined.size() - names.size();
  lines.push_back(absl::StrCat("parameters are drawn from seed ", seed, ": ",
                               absl::StrJoin(names, "; "),
                               more > 0 ? absl::StrCat(" and ", more, " more") : "",
                               "; give them by these names in --parameters"));
  return lines;
}

}  // namespace tfb
