#include "harness/inputs/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "core/random.h"
#include "core/runfiles.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr const char* kProfiles = "real, gaussian, peaked, needle, text";
constexpr const char* kShipped[] = {"harness/inputs/minilm_512.safetensors",
                                    "harness/inputs/minilm_4096.safetensors"};

std::string BaseName(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return std::string(slash == absl::string_view::npos ? path : path.substr(slash + 1));
}

// --- Drawn inputs
// ---------------------------------------------------------------------------------

struct PeakShape {
  int64_t peaks;
  double ratio;  // ratio of the peaks' mass to that of all other keys
  bool distant;  // whether a peak is at least a quarter of the keys away
};
constexpr PeakShape kPeaked = {3, 4, false};
constexpr PeakShape kNeedle = {1, 99, true};

// Returns the score c of the peaks: see the header.
double PeakScore(int64_t keys, int64_t peaks, double ratio, int64_t head_dim) {
  const double n = static_cast<double>(keys);
  const double m = static_cast<double>(peaks);
  const double d = static_cast<double>(head_dim);
  const double wanted = std::max(0.0, std::log(ratio * n / m));
  const double discriminant = 1 - 2 * wanted * m / d;
  return discriminant <= 0 ? d / m : d / m * (1 - std::sqrt(discriminant));
}

// Draws one of keys 0 to keys - 1 that is at least a quarter of them away from `position`, which is
// one of them.
int64_t DistantKey(int64_t keys, int64_t position, double uniform) {
  const int64_t gap = keys / 4;
  const int64_t before = std::max<int64_t>(position - gap + 1, 0);
  const int64_t behind = std::max<int64_t>(keys - (position + gap), 0);
  const int64_t pick = static_cast<int64_t>(uniform * static_cast<double>(before + behind));
  return pick < before ? pick : keys - behind + (pick - before);
}

void ScaleKeysToTheSphere(const TensorView& k) {
  const int64_t channels = k.dim(3);
  for (int64_t row = 0; row < k.num_elements() / channels; ++row) {
    double square = 0;
    for (int64_t c = 0; c < channels; ++c) square += std::pow(k.Get(row * channels + c), 2);
    const double factor = std::sqrt(static_cast<double>(channels) / square);
    for (int64_t c = 0; c < channels; ++c) {
      k.Set(row * channels + c, factor * k.Get(row * channels + c));
    }
  }
}

// Writes every query as the sum of its peaks. Queries that may see no key keep their drawn values.
void PointQueriesAtKeys(const PeakShape& shape, const Problem& problem, uint64_t seed,
                        const ConstTensorView& k, const TensorView& q) {
  const RandomStream random(seed, "input/peaks");
  std::vector<double> sum(problem.head_dim);
  for (int64_t row = 0; row < q.num_elements() / problem.head_dim; ++row) {
    const int64_t i = row % problem.query_tokens;
    const int64_t h = row / problem.query_tokens % problem.query_heads;
    const int64_t b = row / problem.query_tokens / problem.query_heads;
    const int64_t position = i + problem.causal_offset();
    const int64_t keys =
        problem.causal ? std::min(position + 1, problem.kv_tokens) : problem.kv_tokens;
    if (keys < 1) continue;
    const int64_t peaks = std::min(shape.peaks, keys);
    std::fill(sum.begin(), sum.end(), 0);
    for (int64_t p = 0; p < peaks; ++p) {
      const double uniform = random.Uniform(row * shape.peaks + p);
      const int64_t first = p * keys / peaks;
      const int64_t last = (p + 1) * keys / peaks;
      const int64_t j =
          shape.distant ? DistantKey(keys, std::clamp<int64_t>(position, 0, keys - 1), uniform)
                        : first + static_cast<int64_t>(uniform * static_cast<double>(last - first));
      const int64_t offset = k.Offset(b, h / problem.group(), j);
      for (int64_t c = 0; c < problem.head_dim; ++c) sum[c] += k.Get(offset + c);
    }
    const double factor = PeakScore(keys, peaks, shape.ratio, problem.head_dim) /
                          std::sqrt(static_cast<double>(problem.head_dim));
    for (int64_t c = 0; c < problem.head_dim; ++c) {
      q.Set(row * problem.head_dim + c, factor * sum[c]);
    }
  }
}

absl::StatusOr<Tensor> DrawOne(const TensorSpec& spec, uint64_t seed) {
  absl::StatusOr<Tensor> tensor = Tensor::Allocate(spec.dtype, spec.shape);
  if (!tensor.ok()) {
    return absl::Status(tensor.status().code(),
                        absl::StrCat("input ", spec.name, ": ", tensor.status().message()));
  }
  const std::string stream = absl::StrCat("input/", spec.name);
  if (IsFloating(spec.dtype)) {
    FillDrawn(&*tensor, spec.noise.value_or(Distribution::kNormal), seed, stream);
  } else {
    const RandomStream random(seed, stream);
    for (int64_t i = 0; i < tensor->num_elements(); ++i) {
      tensor->view().Set(i, static_cast<double>(random.Bits(i) % kDrawnIds));
    }
  }
  return tensor;
}

absl::StatusOr<NamedTensors> Draw(const std::vector<TensorSpec>& specs, uint64_t seed) {
  NamedTensors tensors;
  for (const TensorSpec& spec : specs) {
    if (spec.optional) continue;
    TFB_ASSIGN_OR_RETURN(tensors[spec.name], DrawOne(spec, seed));
  }
  return tensors;
}

// Does the same where queries are the keys: tokens that are a whole number of periods apart, as
// many as there are peaks, have one vector, scaled to the length that gives their score.
void RepeatQueries(const PeakShape& shape, const Problem& problem, const TensorView& q) {
  const int64_t tokens = problem.query_tokens;
  const int64_t period = (tokens + shape.peaks) / (shape.peaks + 1);  // rounded up
  const double peaks = static_cast<double>(shape.peaks);
  const double length = PeakScore(tokens, 1, shape.ratio / peaks, problem.head_dim);
  for (int64_t row = 0; row < q.num_elements() / problem.head_dim; ++row) {
    const int64_t i = row % tokens, first = (row - i + i % period) * problem.head_dim;
    double square = 0;
    for (int64_t c = 0; c < problem.head_dim; ++c) square += std::pow(q.Get(first + c), 2);
    for (int64_t c = 0; c < problem.head_dim; ++c) {
      q.Set(row * problem.head_dim + c, length / std::sqrt(square) * q.Get(first + c));
    }
  }
}

absl::StatusOr<NamedTensors> DrawPeaks(const PeakShape& shape, absl::string_view profile,
                                       const std::vector<TensorSpec>& specs, const Problem& problem,
                                       uint64_t seed) {
  TFB_ASSIGN_OR_RETURN(NamedTensors tensors, Draw(specs, seed));
  const auto q = tensors.find("q");
  const auto k = tensors.find("k");
  const Shape q_shape = {problem.batch, problem.query_heads, problem.query_tokens,
                         problem.head_dim};
  const Shape k_shape = {problem.batch, problem.kv_heads, problem.kv_tokens, problem.head_dim};
  if (q != tensors.end() && k == tensors.end() && q->second.shape() == q_shape) {
    RepeatQueries(shape, problem, q->second.view());
    return tensors;
  }
  if (q == tensors.end() || k == tensors.end() || q->second.shape() != q_shape ||
      k->second.shape() != k_shape) {
    std::vector<std::string> names;
    for (const TensorSpec& spec : specs) names.push_back(spec.name);
    return absl::UnimplementedError(absl::StrCat("input profile ", profile,
                                                 " makes queries and keys; the technique reads ",
                                                 absl::StrJoin(names, ", ")));
  }
  ScaleKeysToTheSphere(k->second.view());
  PointQueriesAtKeys(shape, problem, seed, k->second.view(), q->second.view());
  return tensors;
}

// --- Files
// ----------------------------------------------------------------------------------------

// Returns "layer12" for "layer12.q"; empty where the name has no layer.
absl::string_view LayerOf(absl::string_view name) {
  const size_t dot = name.find('.');
  if (dot == absl::string_view::npos || !absl::StartsWith(name, "layer")) return "";
  int64_t number;
  if (!absl::SimpleAtoi(name.substr(5, dot - 5), &number) || number < 0) return "";
  return name.substr(0, dot);
}

int64_t LayerNumber(absl::string_view layer) {
  int64_t number = -1;
  return absl::ConsumePrefix(&layer, "layer") && absl::SimpleAtoi(layer, &number) ? number : -1;
}

std::string WithTensor(const CapturedLayer& layer, absl::string_view name) {
  return absl::StrCat(layer.path, ": tensor \"",
                      layer.layer.empty() ? "" : absl::StrCat(layer.layer, "."), name, "\"");
}

// Returns the sizes of the layer's q, k and v, with at most the wanted batch and tokens.
Problem FitQueries(const CapturedLayer& layer, const Problem& wanted) {
  Problem problem = wanted;
  problem.batch = std::min(wanted.batch, layer.batch);
  problem.query_heads = layer.query_heads;
  problem.kv_heads = layer.kv_heads;
  problem.query_tokens = std::min(wanted.query_tokens, layer.query_tokens);
  problem.kv_tokens = std::min(wanted.kv_tokens, layer.kv_tokens);
  problem.head_dim = layer.head_dim;
  problem.value_dim = layer.value_dim;
  return problem;
}

// Reads the sizes from the layer's tensors q, k, v and x.
absl::Status ReadSizes(CapturedLayer* layer) {
  const auto wrong = [layer](absl::string_view name, const Tensor& tensor,
                             absl::string_view expected) {
    return absl::InvalidArgumentError(
        absl::StrCat(WithTensor(*layer, name), " is ", Name(tensor.dtype()), " ",
                     ShapeString(tensor.shape()), "; expected is ", expected));
  };
  const Tensor* q = layer->Find("q");
  const Tensor* k = layer->Find("k");
  const Tensor* v = layer->Find("v");
  const Tensor* x = layer->Find("x");
  if (q != nullptr) {
    constexpr char kForm[] = "floating point [batch, heads, tokens, channels]";
    for (const auto& [name, tensor] : {std::make_pair("q", q), {"k", k}, {"v", v}}) {
      if (tensor != nullptr && (tensor->shape().size() != 4 || !IsFloating(tensor->dtype()))) {
        return wrong(name, *tensor, kForm);
      }
    }
    // A technique whose keys are its queries needs no k.
    const Tensor* keys = k != nullptr ? k : v != nullptr ? v : q;
    layer->batch = q->dim(0);
    layer->query_heads = q->dim(1);
    layer->query_tokens = q->dim(2);
    layer->head_dim = q->dim(3);
    layer->kv_heads = keys->dim(1);
    layer->kv_tokens = keys->dim(2);
    layer->value_dim = v != nullptr ? v->dim(3) : layer->head_dim;
    if (k != nullptr && (k->dim(0) != q->dim(0) || k->dim(3) != q->dim(3))) {
      return wrong("k", *k, absl::StrCat("the batch and channels of q ", ShapeString(q->shape())));
    }
    if (k == nullptr && v != nullptr && v->dim(0) != q->dim(0)) {
      return wrong("v", *v, absl::StrCat("the batch of q ", ShapeString(q->shape())));
    }
    for (int axis : {0, 1, 2}) {
      if (k != nullptr && v != nullptr && v->dim(axis) != k->dim(axis)) {
        return wrong(
            "v", *v,
            absl::StrCat("the sizes of k ", ShapeString(k->shape()), " but for the channels"));
      }
    }
    const absl::Status valid = Validate(FitQueries(*layer, Problem()));
    if (!valid.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(layer->path, ": ", valid.message()));
    }
  }
  if (x != nullptr) {
    if (x->shape().size() != 3 || !IsFloating(x->dtype())) {
      return wrong("x", *x, "floating point [batch, tokens, model_dim]");
    }
    if (layer->has_queries() && x->dim(0) != layer->batch) {
      return wrong("x", *x, absl::StrCat("the batch of q, ", layer->batch));
    }
    layer->batch = x->dim(0);
    layer->hidden_tokens = x->dim(1);
    layer->model_dim = x->dim(2);
  }
  return absl::OkStatus();
}

// Tells whether the layer's tensor can be cut to the spec: batch (the first dimension) and tokens
// (the last but one, or the last of two) may be shorter.
bool CanBeCut(const Shape& from, const Shape& to) {
  if (from.size() != to.size()) return false;
  const size_t token_axis = from.size() >= 3 ? from.size() - 2 : from.size() - 1;
  for (size_t axis = 0; axis < from.size(); ++axis) {
    const bool cut = to[axis] < from[axis] && (axis == 0 || axis == token_axis);
    if (to[axis] != from[axis] && !cut) return false;
  }
  return true;
}

absl::StatusOr<Tensor> Cut(const CapturedLayer& layer, const TensorSpec& spec,
                           const Tensor& tensor) {
  if (!CanBeCut(tensor.shape(), spec.shape)) {
    return absl::InvalidArgumentError(absl::StrCat(WithTensor(layer, spec.name), " has shape ",
                                                   ShapeString(tensor.shape()), "; asked for is ",
                                                   ShapeString(spec.shape)));
  }
  ConstTensorView view = tensor.view();
  for (int axis = 0; axis < view.rank; ++axis) view = Slice(view, axis, 0, spec.shape[axis]);
  if (IsFloating(tensor.dtype()) != IsFloating(spec.dtype) || !CanConvert(view, spec.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(WithTensor(layer, spec.name), " is ", Name(tensor.dtype()),
                     " and cannot be converted to ", Name(spec.dtype)));
  }
  TFB_ASSIGN_OR_RETURN(Tensor cut, Tensor::Allocate(spec.dtype, spec.shape));
  CopyElements(view, cut.view());
  return cut;
}

bool MayBeAbsent(const TensorSpec& spec) { return spec.optional || spec.noise.has_value(); }

// Returns "q, k, v, key_mask (where there is one)".
std::string NamesRead(const std::vector<TensorSpec>& specs) {
  std::vector<std::string> read;
  for (const TensorSpec& spec : specs) {
    read.push_back(absl::StrCat(spec.name, MayBeAbsent(spec) ? " (where there is one)" : ""));
  }
  return absl::StrJoin(read, ", ");
}

// Returns NotFound where the layer lacks required tensors, with the names of all that `reader`
// reads.
absl::Status CheckHasAll(const CapturedLayer& layer, const std::vector<TensorSpec>& specs,
                         absl::string_view reader) {
  std::vector<std::string> missing;
  for (const TensorSpec& spec : specs) {
    if (layer.Find(spec.name) == nullptr && !MayBeAbsent(spec)) missing.push_back(spec.name);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(layer.path, layer.layer.empty() ? "" : " ", layer.layer,
                                          ": has no ", absl::StrJoin(missing, ", "), "; ", reader,
                                          " reads ", NamesRead(specs), "; the file has ",
                                          absl::StrJoin(layer.names(), ", ")));
}

absl::StatusOr<NamedTensors> CutAll(const InputSource& source, const std::vector<TensorSpec>& specs,
                                    uint64_t seed) {
  TFB_RETURN_IF_ERROR(CheckTensorsAreThere(source, specs));
  const CapturedLayer& layer = *source.captured;
  NamedTensors tensors;
  for (const TensorSpec& spec : specs) {
    const Tensor* tensor = layer.Find(spec.name);
    if (tensor == nullptr) {
      if (spec.optional) continue;
      TFB_ASSIGN_OR_RETURN(tensors[spec.name], DrawOne(spec, seed));
      continue;
    }
    TFB_ASSIGN_OR_RETURN(tensors[spec.name], Cut(layer, spec, *tensor));
  }
  return tensors;
}

absl::StatusOr<Problem> FitHidden(const CapturedLayer& layer, const Problem& wanted) {
  Problem problem = wanted;
  problem.batch = std::min(wanted.batch, layer.batch);
  problem.query_tokens = problem.kv_tokens = std::min(wanted.query_tokens, layer.hidden_tokens);
  if (layer.query_heads * layer.head_dim == layer.model_dim) {
    problem.query_heads = layer.query_heads;
    problem.kv_heads = layer.kv_heads;
  }
  if (layer.model_dim % problem.query_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(WithTensor(layer, "x"), " has a model_dim of ",
                                                   layer.model_dim, ", which ", problem.query_heads,
                                                   " heads do not divide"));
  }
  problem.head_dim = problem.value_dim = layer.model_dim / problem.query_heads;
  const absl::Status valid = Validate(problem);
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(layer.path, ": ", valid.message()));
  }
  return problem;
}

}  // namespace

const Tensor* CapturedLayer::Find(absl::string_view name) const {
  if (!layer.empty()) {
    const auto found = contents->tensors.find(absl::StrCat(layer, ".", name));
    if (found != contents->tensors.end()) return &found->second;
  }
  const auto found = contents->tensors.find(name);
  return found == contents->tensors.end() ? nullptr : &found->second;
}

std::vector<std::string> CapturedLayer::names() const {
  std::vector<std::string> names;
  for (const auto& entry : contents->tensors) {
    const absl::string_view of = LayerOf(entry.first);
    if (of.empty()) names.push_back(entry.first);
    if (!of.empty() && of == layer) names.push_back(entry.first.substr(of.size() + 1));
  }
  return names;
}

std::string CapturedLayer::model() const {
  const auto found = contents->metadata.find("model");
  return found == contents->metadata.end() ? "" : found->second;
}

std::string InputSource::ToString() const {
  if (captured == nullptr) return profile;
  return absl::StrCat(profile, " ", captured->file, captured->layer.empty() ? "" : " ",
                      captured->layer);
}

absl::StatusOr<std::vector<CapturedLayer>> ReadCapturedLayers(const std::string& path) {
  TFB_ASSIGN_OR_RETURN(SafetensorsFile file, ReadSafetensors(path));
  const auto contents = std::make_shared<const SafetensorsFile>(std::move(file));
  std::map<std::pair<int64_t, std::string>, CapturedLayer> layers;
  for (const auto& entry : contents->tensors) {
    const std::string name(LayerOf(entry.first));
    CapturedLayer& layer = layers[{LayerNumber(name), name}];
    layer.path = path;
    layer.file = BaseName(path);
    layer.layer = name;
    layer.contents = contents;
  }
  if (layers.empty()) return absl::NotFoundError(absl::StrCat(path, ": has no tensors"));
  std::vector<CapturedLayer> all, with_queries_or_hidden;
  for (auto& [key, layer] : layers) {
    TFB_RETURN_IF_ERROR(ReadSizes(&layer));
    if (layer.has_queries() || layer.has_hidden()) with_queries_or_hidden.push_back(layer);
    all.push_back(std::move(layer));
  }
  // A technique may read neither q nor x.
  return with_queries_or_hidden.empty() ? all : with_queries_or_hidden;
}

absl::StatusOr<std::vector<InputSource>> ParseInputSources(absl::string_view word,
                                                           absl::string_view folder) {
  if (word == "gaussian" || word == "peaked" || word == "needle") {
    return std::vector<InputSource>{{std::string(word), nullptr}};
  }
  if (word == "text") {
    TFB_ASSIGN_OR_RETURN(auto model, ShippedLanguageModel());
    return std::vector<InputSource>{{std::string(word), nullptr, std::move(model)}};
  }
  std::vector<std::string> paths;
  const bool real = word == "real";
  if (real) {
    for (const char* shipped : kShipped) {
      TFB_ASSIGN_OR_RETURN(paths.emplace_back(), RunfilePath(shipped));
    }
  } else if (absl::EndsWith(word, ".safetensors")) {
    const bool relative = word[0] != '/' && !folder.empty();
    paths.push_back(relative ? absl::StrCat(folder, "/", word) : std::string(word));
  } else {
    return absl::InvalidArgumentError(absl::StrCat("input \"", word, "\" is unknown; known are ",
                                                   kProfiles, " and FILE.safetensors"));
  }
  std::vector<InputSource> sources;
  for (const std::string& path : paths) {
    TFB_ASSIGN_OR_RETURN(std::vector<CapturedLayer> layers, ReadCapturedLayers(path));
    for (CapturedLayer& layer : layers) {
      layer.path = real ? layer.file : std::string(word);  // the name by which the caller knows it
      sources.push_back(
          {real ? "real" : "file", std::make_shared<CapturedLayer>(std::move(layer))});
    }
  }
  return sources;
}

absl::StatusOr<Problem> FitProblem(const InputSource& source, InputKind kind,
                                   const Problem& wanted) {
  if (source.text != nullptr) {
    if (kind != InputKind::kQkv) return source.text->Fit(wanted);
    return absl::NotFoundError("text makes hidden states; the technique reads q, k and v");
  }
  if (source.captured == nullptr) return wanted;
  const CapturedLayer& layer = *source.captured;
  const bool qkv = kind == InputKind::kQkv;
  if (qkv ? !layer.has_queries() : !layer.has_hidden()) {
    return absl::NotFoundError(absl::StrCat(source.ToString(), " has no ", qkv ? "q" : "x",
                                            "; it has ", absl::StrJoin(layer.names(), ", ")));
  }
  if (!qkv) return FitHidden(layer, wanted);
  return FitQueries(layer, wanted);
}

namespace {

const TensorSpec* FindSpec(const std::vector<TensorSpec>& specs, absl::string_view name) {
  for (const TensorSpec& spec : specs) {
    if (spec.name == name) return &spec;
  }
  return nullptr;
}

// Tells whether every tensor of the layer that a spec names is at least as long as the spec.
bool HoldsAll(const CapturedLayer& layer, const std::vector<TensorSpec>& specs) {
  for (const TensorSpec& spec : specs) {
    const Tensor* tensor = layer.Find(spec.name);
    if (tensor == nullptr) continue;
    if (tensor->shape().size() != spec.shape.size()) return false;
    for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
      if (tensor->shape()[axis] < spec.shape[axis]) return false;
    }
  }
  return true;
}

// The tensors of a file that a technique with its options reads.
class Reading {
 public:
  Reading(const InputSource& source, const Technique& technique, const Options& options)
      : source_(source), layer_(*source.captured), technique_(technique), options_(options) {}

  // Returns the specs for a problem of some sizes, for their names, which depend on the direction
  // of the mask but on no size.
  absl::StatusOr<std::vector<TensorSpec>> Names(const Problem& wanted) const {
    Problem problem;
    problem.causal = wanted.causal;
    problem.dtype = wanted.dtype;
    return technique_.InputSpecs(problem, options_);
  }

  // Returns the file's sizes, with at most the wanted batch and tokens.
  absl::StatusOr<Problem> Fit(const Problem& wanted) const {
    const auto names = Names(wanted);
    if (!names.ok()) return FitProblem(source_, technique_.info().input_kind, wanted);
    TFB_RETURN_IF_ERROR(CheckHasAll(layer_, *names, technique_.info().name));
    if (FindSpec(*names, "q") != nullptr) return FitQueries(layer_, wanted);
    if (FindSpec(*names, "x") == nullptr) return FitTokens(*names, wanted);
    TFB_ASSIGN_OR_RETURN(Problem problem, FitHidden(layer_, wanted));
    const Tensor* memory = layer_.Find("memory");
    if (FindSpec(*names, "memory") != nullptr && memory->shape().size() == 3) {
      problem.kv_tokens = std::min(wanted.kv_tokens, memory->dim(1));
    }
    return problem;
  }

  // Checks that each tensor with a spec has the spec's shape for the whole file.
  absl::Status CheckSizes(const Problem& wanted) const {
    Problem most = wanted;
    most.batch = most.query_tokens = most.kv_tokens = kMaxTokens;
    TFB_ASSIGN_OR_RETURN(const Problem whole, Fit(most));
    const auto specs = technique_.InputSpecs(whole, options_);
    if (!specs.ok()) return absl::OkStatus();  // creating the layer returns this error
    for (const TensorSpec& spec : *specs) {
      const Tensor* tensor = layer_.Find(spec.name);
      if (tensor == nullptr || tensor->shape() == spec.shape) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(WithTensor(layer_, spec.name), " is ", ShapeString(tensor->shape()),
                       "; beside ", SizesBeside(spec.name, *specs), " ", technique_.info().name,
                       " reads ", ShapeString(spec.shape)));
    }
    return absl::OkStatus();
  }

 private:
  // Returns the problem with `wanted`'s heads and the most tokens for which all tensors of the file
  // have enough rows. This is for techniques that read neither q nor x.
  Problem FitTokens(const std::vector<TensorSpec>& names, const Problem& wanted) const {
    Problem problem = wanted;
    for (const TensorSpec& spec : names) {
      const Tensor* tensor = layer_.Find(spec.name);
      if (tensor != nullptr && !tensor->shape().empty()) {
        problem.batch = std::min(problem.batch, tensor->dim(0));
      }
    }
    const auto has_rows_for = [&](int64_t tokens) {
      problem.query_tokens = problem.kv_tokens = tokens;
      const auto specs = technique_.InputSpecs(problem, options_);
      return specs.ok() && HoldsAll(layer_, *specs);
    };
    int64_t fits = 0, fits_not = 1;
    while (fits_not <= wanted.query_tokens && has_rows_for(fits_not)) {
      fits = fits_not;
      fits_not *= 2;
    }
    fits_not = std::min(fits_not, wanted.query_tokens + 1);
    while (fits_not - fits > 1) {
      const int64_t tokens = fits + (fits_not - fits) / 2;
      (has_rows_for(tokens) ? fits : fits_not) = tokens;
    }
    problem.query_tokens = problem.kv_tokens = fits;
    return problem;
  }

  // Returns "q [1, 2, 30, 8] and k [1, 2, 35, 8]": the tensors that give the sizes of a problem,
  // except `name`.
  std::string SizesBeside(absl::string_view name, const std::vector<TensorSpec>& specs) const {
    std::vector<std::string> giving = {"x", "memory"};
    if (FindSpec(specs, "q") != nullptr) {
      giving = {"q", FindSpec(specs, "k") != nullptr ? "k" : "v"};
    } else if (FindSpec(specs, "x") == nullptr) {
      giving.clear();
      for (const TensorSpec& spec : specs) giving.push_back(spec.name);
    }
    std::vector<std::string> parts;
    for (const std::string& other : giving) {
      const Tensor* tensor = layer_.Find(other);
      if (tensor == nullptr || FindSpec(specs, other) == nullptr || other == name) continue;
      parts.push_back(absl::StrCat(other, " ", ShapeString(tensor->shape())));
    }
    return absl::StrJoin(parts, " and ");
  }

  const InputSource& source_;
  const CapturedLayer& layer_;
  const Technique& technique_;
  const Options& options_;
};

}  // namespace

absl::StatusOr<Problem> FitProblem(const InputSource& source, const Technique& technique,
                                   const Options& options, const Problem& wanted) {
  if (source.captured == nullptr) {
    return FitProblem(source, technique.info().input_kind, wanted);
  }
  const Reading reading(source, technique, options);
  TFB_RETURN_IF_ERROR(reading.CheckSizes(wanted));
  return reading.Fit(wanted);
}

absl::Status CheckTensorsAreThere(const InputSource& source, const std::vector<TensorSpec>& specs) {
  if (source.captured == nullptr) return absl::OkStatus();
  return CheckHasAll(*source.captured, specs, "the technique");
}

std::vector<TensorSpec> DrawnInputs(const InputSource& source,
                                    const std::vector<TensorSpec>& specs) {
  std::vector<TensorSpec> drawn;
  for (const TensorSpec& spec : specs) {
    const bool is_there = source.captured != nullptr && source.captured->Find(spec.name) != nullptr;
    if (!spec.optional && !is_there && source.text == nullptr) drawn.push_back(spec);
  }
  return drawn;
}

absl::Status CheckTensorsAreRead(const InputSource& source, const std::vector<TensorSpec>& specs) {
  if (source.captured == nullptr) return absl::OkStatus();
  std::set<std::string> known = {"q", "k", "v", "x", "tokens"};  // those of the shipped files, too
  for (const TensorSpec& spec : specs) known.insert(spec.name);
  for (const std::string& name : source.captured->names()) {
    if (known.count(name) > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(WithTensor(*source.captured, name),
                                                   " would not be read; what is read are ",
                                                   NamesRead(specs)));
  }
  return absl::OkStatus();
}

absl::StatusOr<NamedTensors> MakeInputs(const InputSource& source,
                                        const std::vector<TensorSpec>& specs,
                                        const Problem& problem, uint64_t seed) {
  if (source.captured != nullptr) return CutAll(source, specs, seed);
  if (source.text != nullptr) return source.text->MakeInputs(specs, problem);
  if (source.profile == "peaked") return DrawPeaks(kPeaked, "peaked", specs, problem, seed);
  if (source.profile == "needle") return DrawPeaks(kNeedle, "needle", specs, problem, seed);
  if (source.profile == "gaussian") return Draw(specs, seed);
  return absl::InvalidArgumentError(
      absl::StrCat("input profile \"", source.profile, "\" is unknown; known are ", kProfiles));
}

}  // namespace tfb
