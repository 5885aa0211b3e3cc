#include "harness/inputs/language_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "Eigen/Core"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/runfiles.h"
#include "core/safetensors.h"
#include "core/search/datastore.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr char kFolder[] = "harness/inputs/language_model";
constexpr char kMoreParameters[] = "exits.safetensors";
constexpr char kKeys[] = "datastore.keys";
constexpr char kValues[] = "datastore.values";
constexpr char kFinalNorm[] = "final_norm.gamma";
constexpr double kNormEpsilon = 1e-5;
constexpr int64_t kStatesAtATime = 4096;  // tokens per segment of the layer that reads long texts

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using ConstMap = Eigen::Map<const Matrix>;

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream contents;
  contents << file.rdbuf();
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  return std::move(contents).str();
}

ConstMap MapOf(const Tensor& tensor) {
  return ConstMap(static_cast<const float*>(tensor.raw()), tensor.dim(0), tensor.dim(1));
}

// Returns a copy of one batch row of a layer's output, f32 [tokens, channels].
Tensor RowsOf(const ConstTensorView& out, int64_t b) {
  Tensor rows(DType::kF32, {out.dim(1), out.dim(2)});
  CopyElements(Slice(out, 0, b, 1),
               TensorView(rows.raw(), DType::kF32, {1, out.dim(1), out.dim(2)}));
  return rows;
}

// Returns -log p(byte) in nats, from unnormalised logarithms of probabilities.
double Surprise(const float* scores, int64_t vocabulary, uint8_t byte) {
  const float max = *std::max_element(scores, scores + vocabulary);
  double sum = 0;
  for (int64_t y = 0; y < vocabulary; ++y) sum += std::exp(static_cast<double>(scores[y] - max));
  return std::log(sum) - static_cast<double>(scores[byte] - max);
}

// Returns the path of the datastore that is kept between runs.
std::string CachePath(const DatastoreFormat& format, int64_t entries) {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::string folder = "/tmp";
  if (home != nullptr) folder = absl::StrCat(home, "/.cache");
  if (cache != nullptr && cache[0] == '/') folder = cache;
  absl::StrAppend(&folder, "/transformer-family-bench");
  return absl::StrCat(folder, "/datastore-", absl::Hex(format.model, absl::kZeroPad16), "-",
                      absl::Hex(*format.text, absl::kZeroPad16), "-", entries, ".safetensors");
}

absl::Status Save(const std::string& path, const DatastoreFormat& format,
                  const NamedTensors& tensors) {
  std::error_code ignored;  // the writer reports what is wrong with the folder
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  TFB_ASSIGN_OR_RETURN(const auto writer, DatastoreWriter::Create(path, format));
  TFB_RETURN_IF_ERROR(writer->Append(tensors.at(kKeys).view(), tensors.at(kValues).view()));
  return writer->Finish();
}

// A layer that reads a text of any length, segment by segment.
class Reader {
 public:
  static absl::StatusOr<std::unique_ptr<Reader>> Create(const Technique& technique,
                                                        const Problem& problem,
                                                        const Options& options,
                                                        const LanguageModel& model) {
    auto reader = std::make_unique<Reader>();
    TFB_ASSIGN_OR_RETURN(reader->layer_,
                         technique.Create(problem, options, Device::kCpu, /*seed=*/1));
    reader->stream_ = dynamic_cast<StreamingLayer*>(reader->layer_.get());
    if (reader->stream_ == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(technique.info().name, " cannot be appended to"));
    }
    TFB_ASSIGN_OR_RETURN(NamedTensors parameters, model.ParametersOf(*reader->layer_));
    TFB_RETURN_IF_ERROR(reader->layer_->SetParameters(std::move(parameters)));
    reader->workspace_ =
        Tensor(DType::kU8,
               {static_cast<int64_t>(reader->layer_->workspace_bytes(reader->pool_.threads()))});
    reader->execution_.pool = &reader->pool_;
    reader->execution_.workspace = absl::MakeSpan(static_cast<std::byte*>(reader->workspace_.raw()),
                                                  reader->workspace_.bytes());
    Tensor x(DType::kF32, {1, problem.query_tokens, problem.model_dim()});
    Fill(x.view(), 0);
    TFB_RETURN_IF_ERROR(reader->layer_->Setup({{"x", x.view()}}, reader->execution_));
    return reader;
  }

  int64_t segment_tokens() const { return stream_->max_segment_tokens(); }
  absl::Status Append(const ConstTensorView& x, const TensorView& out, const TensorView& context) {
    return stream_->Append({{"x", x}}, {{"out", out}, {"context", context}}, execution_);
  }

 private:
  ThreadPool pool_{2};
  std::unique_ptr<Layer> layer_;
  StreamingLayer* stream_ = nullptr;
  Tensor workspace_;
  Execution execution_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const LanguageModel>> LanguageModel::Read(
    const std::string& folder) {
  std::shared_ptr<LanguageModel> model(new LanguageModel());
  model->path_ = absl::StrCat(folder, "/model.safetensors");
  TFB_ASSIGN_OR_RETURN(SafetensorsFile file, ReadSafetensors(model->path_));
  model->fingerprint_ = Fingerprint(file.tensors);
  for (const auto& [name, tensor] : file.tensors) {
    model->parameters_[name] = tensor.CloneAs(DType::kF32);
  }
  const std::string exits = absl::StrCat(folder, "/", kMoreParameters);
  if (std::filesystem::exists(exits)) {
    TFB_ASSIGN_OR_RETURN(SafetensorsFile more, ReadSafetensors(exits));
    for (const auto& [name, tensor] : more.tensors) {
      model->parameters_[name] = tensor.CloneAs(DType::kF32);
    }
  }
  const auto wrong = [&](absl::string_view name, absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(model->path_, ": metadata \"", name, "\" is \"",
                                                   file.metadata[std::string(name)], "\"; ", why));
  };
  const absl::StatusOr<TechniqueSpec> stack = ParseTechniqueSpec(file.metadata["technique"]);
  if (!stack.ok()) return wrong("technique", stack.status().message());
  model->stack_ = *stack;
  if (!absl::SimpleAtoi(file.metadata["heads"], &model->heads_) || model->heads_ < 1) {
    return wrong("heads", "expected is a number of heads");
  }
  model->data_ = file.metadata["data"];
  TFB_RETURN_IF_ERROR(model->Check());
  TFB_ASSIGN_OR_RETURN(model->held_out_, ReadText(absl::StrCat(folder, "/held_out.txt")));
  TFB_ASSIGN_OR_RETURN(model->datastore_text_, ReadText(absl::StrCat(folder, "/datastore.txt")));
  return std::shared_ptr<const LanguageModel>(std::move(model));
}

absl::Status LanguageModel::Check() const {
  const auto expect = [this](const std::string& name, const Shape& shape) {
    const auto found = parameters_.find(name);
    if (found != parameters_.end() && found->second.shape() == shape) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": tensor \"", name, "\" is ",
                     found == parameters_.end() ? "not there" : ShapeString(found->second.shape()),
                     "; expected is ", ShapeString(shape)));
  };
  const auto found = parameters_.find("embedding");
  if (found == parameters_.end() || found->second.shape().size() != 2) {
    return expect("embedding", {256, 0});
  }
  const Shape matrix = {256, model_dim()};
  TFB_RETURN_IF_ERROR(expect("embedding", matrix));
  TFB_RETURN_IF_ERROR(expect("output", matrix));
  TFB_RETURN_IF_ERROR(expect(kFinalNorm, {model_dim()}));
  TFB_RETURN_IF_ERROR(expect("final_norm.beta", {model_dim()}));
  if (model_dim() % heads_ == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path_, ": ", heads_, " heads do not divide ", model_dim(), " channels"));
}

Problem LanguageModel::Fit(const Problem& wanted) const {
  Problem problem = wanted;
  problem.query_heads = problem.kv_heads = heads_;
  problem.head_dim = problem.value_dim = model_dim() / heads_;
  problem.kv_tokens = problem.query_tokens;
  return problem;
}

Options LanguageModel::FitOptions(const TechniqueInfo& info, const Options& given) const {
  Options options = given;
  for (const OptionSpec& option : info.options) {
    const auto own = stack_.options.find(option.name);
    if (own != stack_.options.end()) options.insert(*own);
  }
  return options;
}

absl::StatusOr<absl::string_view> LanguageModel::HeldOut(const Problem& problem, int64_t b) const {
  const int64_t bytes = static_cast<int64_t>(held_out_.size());
  const int64_t share = bytes / std::max<int64_t>(problem.batch, 1);
  if (problem.query_tokens >= share) {
    return absl::InvalidArgumentError(
        absl::StrCat(problem.batch, " x ", problem.query_tokens,
                     " tokens, and the byte behind each; the held-out text has ", bytes, " bytes"));
  }
  return absl::string_view(held_out_).substr(b * share, problem.query_tokens + 1);
}

void LanguageModel::Embed(absl::string_view bytes, const TensorView& x) const {
  for (int64_t t = 0; t < static_cast<int64_t>(bytes.size()); ++t) {
    const float* row = embedding().view().At<float>(static_cast<uint8_t>(bytes[t]));
    CopyElements(ConstTensorView(row, DType::kF32, {1, 1, model_dim()}), Slice(x, 1, t, 1));
  }
}

void LanguageModel::Normalise(float* h, int64_t tokens) const {
  const float* gamma = static_cast<const float*>(parameters_.at(kFinalNorm).raw());
  const float* beta = static_cast<const float*>(parameters_.at("final_norm.beta").raw());
  const double n = static_cast<double>(model_dim());
  for (int64_t t = 0; t < tokens; ++t, h += model_dim()) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < model_dim(); ++c) mean += h[c] / n;
    for (int64_t c = 0; c < model_dim(); ++c) variance += (h[c] - mean) * (h[c] - mean) / n;
    const double scale = 1 / std::sqrt(variance + kNormEpsilon);
    for (int64_t c = 0; c < model_dim(); ++c) {
      h[c] = static_cast<float>((h[c] - mean) * scale * gamma[c] + beta[c]);
    }
  }
}

absl::StatusOr<ModelStates> LanguageModel::StatesOf(absl::string_view bytes) const {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(stack_.technique));
  TFB_ASSIGN_OR_RETURN(const Options options, technique->Canonical(stack_.options));
  const int64_t tokens = static_cast<int64_t>(bytes.size()), width = model_dim();
  Problem problem = Fit(Problem::SelfAttention(1, 1, std::min(tokens, kStatesAtATime), 1, true));
  TFB_ASSIGN_OR_RETURN(const auto reader, Reader::Create(*technique, problem, options, *this));
  ModelStates states;
  TFB_ASSIGN_OR_RETURN(states.x, Tensor::Allocate(DType::kF32, {tokens, width}));
  TFB_ASSIGN_OR_RETURN(states.context, Tensor::Allocate(DType::kF32, {tokens, width}));
  Tensor x(DType::kF32, {1, reader->segment_tokens(), width});
  for (int64_t begin = 0; begin < tokens; begin += reader->segment_tokens()) {
    const int64_t count = std::min(reader->segment_tokens(), tokens - begin);
    const auto rows = [&](Tensor& tensor) {
      return TensorView(static_cast<float*>(tensor.raw()) + begin * width, DType::kF32,
                        {1, count, width});
    };
    const TensorView segment = Slice(x.view(), 1, 0, count);
    Embed(bytes.substr(begin, count), segment);
    TFB_RETURN_IF_ERROR(reader->Append(segment, rows(states.x), rows(states.context)));
  }
  Normalise(static_cast<float*>(states.x.raw()), tokens);
  return states;
}

absl::StatusOr<NamedTensors> LanguageModel::MakeInputs(const std::vector<TensorSpec>& specs,
                                                       const Problem& problem) const {
  const bool reads_states = std::any_of(specs.begin(), specs.end(), [](const TensorSpec& spec) {
    return spec.name == "context" && !spec.optional;
  });
  NamedTensors inputs;
  for (const TensorSpec& spec : specs) {
    if (spec.optional) continue;
    if (spec.name != "x" && !(reads_states && spec.name == "context")) {
      return absl::UnimplementedError(
          absl::StrCat("text makes hidden states; the technique reads ", spec.name));
    }
    TFB_ASSIGN_OR_RETURN(inputs[spec.name], Tensor::Allocate(spec.dtype, spec.shape));
  }
  if (inputs.count("x") == 0)
    return absl::UnimplementedError("the technique reads no hidden states");
  for (int64_t b = 0; b < problem.batch; ++b) {
    TFB_ASSIGN_OR_RETURN(absl::string_view bytes, HeldOut(problem, b));
    bytes.remove_suffix(1);
    const auto row = [&](const char* name) { return Slice(inputs.at(name).view(), 0, b, 1); };
    if (!reads_states) {
      Embed(bytes, row("x"));
      continue;
    }
    TFB_ASSIGN_OR_RETURN(const ModelStates states, StatesOf(bytes));
    const auto copy = [&](const Tensor& from, const TensorView& to) {
      CopyElements(ConstTensorView(from.raw(), DType::kF32, {1, from.dim(0), from.dim(1)}), to);
    };
    copy(states.x, row("x"));
    copy(states.context, row("context"));
  }
  return inputs;
}

absl::StatusOr<NamedTensors> LanguageModel::ParametersOf(const Layer& layer) const {
  NamedTensors parameters;
  for (const auto& [name, tensor] : layer.parameters()) {
    if (name == kKeys || name == kValues) {
      if (parameters.count(name) > 0) continue;
      TFB_ASSIGN_OR_RETURN(NamedTensors datastore, DatastoreOf(tensor.dim(0)));
      for (auto& [part, contents] : datastore) {
        const DType dtype = layer.parameters().at(part).dtype();
        parameters[part] =
            contents.dtype() == dtype ? std::move(contents) : contents.CloneAs(dtype);
      }
      continue;
    }
    const auto found = parameters_.find(name);
    if (found == parameters_.end() || found->second.shape() != tensor.shape()) {
      return absl::UnimplementedError(absl::StrCat(
          "the language model has no parameter ", name, " ", ShapeString(tensor.shape()),
          found == parameters_.end()
              ? ""
              : absl::StrCat("; its is ", ShapeString(found->second.shape()))));
    }
    parameters[name] = found->second.CloneAs(tensor.dtype());
  }
  return parameters;
}

absl::StatusOr<NamedTensors> LanguageModel::DatastoreOf(int64_t entries) const {
  const int64_t bytes = static_cast<int64_t>(datastore_text_.size());
  if (entries >= bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(entries, " entries; the text of the datastore has ", bytes,
                     " bytes, so that allowed are 1 to ", bytes - 1));
  }
  const absl::string_view text = absl::string_view(datastore_text_).substr(bytes - entries - 1);
  DatastoreFormat format;
  format.dim = model_dim();
  format.model = fingerprint_;
  format.text = Fingerprint(text);
  const std::string path = CachePath(format, entries);
  NamedTensors tensors;
  if (const auto saved = Datastore::Open(path, format); saved.ok() && saved->entries() == entries) {
    NamedTensors mapped = saved->Tensors();
    tensors[kKeys] = std::move(mapped.at("keys"));
    tensors[kValues] = std::move(mapped.at("values"));
    return tensors;
  }
  TFB_ASSIGN_OR_RETURN(ModelStates states, StatesOf(text.substr(0, entries)));
  tensors[kKeys] = std::move(states.context);
  tensors[kValues] = Tensor(DType::kU8, {entries});
  std::memcpy(tensors[kValues].raw(), text.data() + 1, entries);
  const absl::Status saved = Save(path, format, tensors);
  if (!saved.ok()) {
    std::fprintf(stderr, "the datastore is not kept for the next run: %s\n",
                 std::string(saved.message()).c_str());
  }
  return tensors;
}

absl::StatusOr<double> LanguageModel::BitsPerByte(InputKind kind, const Problem& problem,
                                                  const ConstTensorView& out,
                                                  const NamedTensors& of_layer) const {
  constexpr int64_t kRows = 256;  // rows of logits at a time
  Matrix logits;
  double nats = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    TFB_ASSIGN_OR_RETURN(const absl::string_view bytes, HeldOut(problem, b));
    Tensor rows = RowsOf(out, b);
    const bool hidden = kind != InputKind::kTokens;
    if (hidden && of_layer.count(kFinalNorm) == 0) {
      Normalise(static_cast<float*>(rows.raw()), rows.dim(0));
    }
    for (int64_t begin = 0; begin < rows.dim(0); begin += kRows) {
      const int64_t count = std::min(kRows, rows.dim(0) - begin);
      if (hidden) {
        logits.noalias() =
            MapOf(rows).middleRows(begin, count) * MapOf(parameters_.at("output")).transpose();
      } else {
        logits = MapOf(rows).middleRows(begin, count);
      }
      for (int64_t r = 0; r < count; ++r) {
        nats += Surprise(logits.data() + r * vocabulary(), vocabulary(),
                         static_cast<uint8_t>(bytes[begin + r + 1]));
      }
    }
  }
  const double tokens = static_cast<double>(problem.batch * problem.query_tokens);
  return nats / std::log(2.0) / std::max(tokens, 1.0);
}

absl::StatusOr<std::shared_ptr<const LanguageModel>> ShippedLanguageModel() {
  static const absl::StatusOr<std::shared_ptr<const LanguageModel>>* model = [] {
    const absl::StatusOr<std::string> path =
        RunfilePath(absl::StrCat(kFolder, "/model.safetensors"));
    return new absl::StatusOr<std::shared_ptr<const LanguageModel>>(
        path.ok() ? LanguageModel::Read(path->substr(0, path->rfind('/')))
                  : absl::StatusOr<std::shared_ptr<const LanguageModel>>(path.status()));
  }();
  return *model;
}

}  // namespace tfb
