#include "adaptive/universal_transformer/adder.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "adaptive/universal_transformer/universal_transformer.h"
#include "core/random.h"
#include "core/safetensors.h"
#include "core/status.h"

namespace tfb::universal_transformer {
namespace {

absl::Status CheckShape(const std::string& path, const NamedTensors& tensors,
                        const std::string& name, const Shape& shape) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": there is no tensor ", name));
  }
  if (found->second.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", name, " has shape ",
                                                 ShapeString(found->second.shape()),
                                                 "; expected is ", ShapeString(shape)));
}

int32_t DigitFrom(const RandomStream& random, int64_t index) {
  return std::min(9, static_cast<int32_t>(10 * random.Uniform(index)));
}

}  // namespace

Additions DrawAdditions(int64_t count, int64_t digits, double nines, uint64_t seed) {
  const RandomStream first(seed, "first"), second(seed, "second"), nine(seed, "nines");
  Additions all;
  all.count = count;
  all.digits = digits;
  for (int64_t b = 0; b < count; ++b) {
    int32_t carry = 0, reach = 0;
    for (int64_t t = 0; t < all.tokens(); ++t) {
      const int64_t index = b * all.tokens() + t;
      const bool is_digit = t > 0 && t <= digits, is_mark = t == 0;
      const int32_t a = is_mark ? Additions::kMark : is_digit ? DigitFrom(first, index) : 0;
      int32_t c = is_mark ? Additions::kMark : is_digit ? DigitFrom(second, index) : 0;
      if (is_digit && nine.Uniform(index) < nines) c = 9 - a;
      all.first.push_back(a);
      all.second.push_back(c);
      all.sum.push_back(is_mark ? Additions::kMark : (a + c + carry) % 10);
      all.reach.push_back(reach);
      carry = is_mark ? 0 : (a + c + carry) / 10;
      reach = !is_mark && a + c == 9 ? reach + 1 : 1;
    }
  }
  return all;
}

absl::StatusOr<Adder> Adder::Read(const std::string& path) {
  TFB_ASSIGN_OR_RETURN(SafetensorsFile file, ReadSafetensors(path));
  Adder adder;
  const auto technique = ParseTechniqueSpec(file.metadata["technique"]);
  if (technique.ok()) adder.technique_ = *technique;
  const auto options = ParseOptions<UniversalTransformerOptions>(adder.technique_.options);
  if (adder.technique_.technique != "universal_transformer" || !options.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": its technique is \"",
                                                   file.metadata["technique"],
                                                   "\", not a universal_transformer"));
  }
  adder.steps_ = options->steps;
  adder.data_ = file.metadata["data"];
  for (const auto& [name, tensor] : file.tensors) {
    adder.parameters_[name] = tensor.CloneAs(DType::kF32);
  }
  const auto output = adder.parameters_.find("output.w");
  const int64_t width = output == adder.parameters_.end() ? 0 : output->second.dim(0);
  for (const char* name : {"embedding.first", "embedding.second"}) {
    TFB_RETURN_IF_ERROR(CheckShape(path, adder.parameters_, name, {11, width}));
  }
  TFB_RETURN_IF_ERROR(CheckShape(path, adder.parameters_, "output.w", {width, 10}));
  TFB_RETURN_IF_ERROR(CheckShape(path, adder.parameters_, "output.b", {10}));
  if (!absl::SimpleAtoi(file.metadata["heads"], &adder.heads_) || adder.heads_ < 1 ||
      width % adder.heads_ != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": heads is \"", file.metadata["heads"],
                                                   "\", not a divisor of ", width));
  }
  return adder;
}

Problem Adder::ProblemOf(const Additions& additions) const {
  const int64_t width = parameters_.at("output.w").dim(0);
  return Problem::SelfAttention(additions.count, heads_, additions.tokens(), width / heads_);
}

Tensor Adder::Embed(const Additions& additions) const {
  const Problem problem = ProblemOf(additions);
  Tensor x(DType::kF32, {problem.batch, problem.query_tokens, problem.model_dim()});
  const ConstTensorView first = parameters_.at("embedding.first").view();
  const ConstTensorView second = parameters_.at("embedding.second").view();
  float* row = x.span<float>().data();
  for (size_t i = 0; i < additions.first.size(); ++i, row += problem.model_dim()) {
    for (int64_t c = 0; c < problem.model_dim(); ++c) {
      row[c] = *first.At<float>(additions.first[i], c) + *second.At<float>(additions.second[i], c);
    }
  }
  return x;
}

absl::StatusOr<std::unique_ptr<Layer>> Adder::LayerFor(const Additions& additions,
                                                       Options options) const {
  options.insert(technique_.options.begin(), technique_.options.end());
  TFB_ASSIGN_OR_RETURN(std::unique_ptr<Layer> layer,
                       UniversalTransformer().Create(ProblemOf(additions), options, Device::kCpu,
                                                     /*seed=*/1));
  NamedTensors trained;
  for (const auto& [name, tensor] : layer->parameters()) {
    const auto found = parameters_.find(name);
    if (found == parameters_.end()) {
      return absl::InvalidArgumentError(absl::StrCat("the model has no tensor ", name));
    }
    trained[name] = found->second.Clone();
  }
  TFB_RETURN_IF_ERROR(layer->SetParameters(std::move(trained)));
  return layer;
}

int32_t Adder::DigitOf(const float* state) const {
  const ConstTensorView w = parameters_.at("output.w").view();
  const ConstTensorView b = parameters_.at("output.b").view();
  int32_t best = 0;
  float largest = 0;
  for (int32_t digit = 0; digit < 10; ++digit) {
    float logit = *b.At<float>(digit);
    for (int64_t c = 0; c < w.dim(0); ++c) logit += state[c] * *w.At<float>(c, digit);
    if (digit > 0 && logit <= largest) continue;
    best = digit;
    largest = logit;
  }
  return best;
}

Adder::Accuracy Adder::Judge(const Additions& additions, const Tensor& out) const {
  int64_t right = 0, right_sums = 0;
  const float* state = out.span<float>().data();
  for (int64_t b = 0; b < additions.count; ++b) {
    int64_t right_here = 0;
    for (int64_t t = 0; t < additions.tokens(); ++t, state += out.dim(2)) {
      if (t > 0) right_here += DigitOf(state) == additions.sum[b * additions.tokens() + t];
    }
    right += right_here;
    right_sums += right_here == additions.tokens() - 1;
  }
  const double count = static_cast<double>(additions.count);
  return {static_cast<double>(right) / (count * static_cast<double>(additions.tokens() - 1)),
          static_cast<double>(right_sums) / count};
}

}  // namespace tfb::universal_transformer
