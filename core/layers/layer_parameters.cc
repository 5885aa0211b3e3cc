#include "core/layers/layer_parameters.h"

#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "core/status.h"

namespace tfb::layers {

ParameterSpec MatrixSpec(const std::string& name, int64_t in, int64_t out) {
  return {name, {in, out}, 0, 1 / std::sqrt(static_cast<double>(in))};
}

std::vector<ParameterSpec> NormSpecs(const std::string& name, int64_t width) {
  return {{name + ".gamma", {width}, 1, 0}, {name + ".beta", {width}, 0, 0}};
}

std::vector<ParameterSpec> FeedForwardSpecs(const std::string& name, int64_t width, int64_t inner) {
  const ParameterSpec first = MatrixSpec(name + ".w1", width, inner);
  const ParameterSpec second = MatrixSpec(name + ".w2", inner, width);
  return {first,
          {name + ".b1", {inner}, 0, first.deviation},
          second,
          {name + ".b2", {width}, 0, second.deviation}};
}

std::vector<ParameterSpec> WithPrefix(absl::string_view prefix, std::vector<ParameterSpec> specs) {
  for (ParameterSpec& spec : specs) spec.name = absl::StrCat(prefix, spec.name);
  return specs;
}

void AddSpecs(std::vector<ParameterSpec> more, std::vector<ParameterSpec>* specs) {
  specs->insert(specs->end(), std::make_move_iterator(more.begin()),
                std::make_move_iterator(more.end()));
}

absl::Status DrawParameters(const std::vector<ParameterSpec>& specs, uint64_t seed,
                            NamedTensors* parameters) {
  for (const ParameterSpec& spec : specs) {
    TFB_ASSIGN_OR_RETURN(Tensor parameter, Tensor::Allocate(DType::kF32, spec.shape));
    FillNormal(&parameter, seed, spec.name, spec.mean, spec.deviation);
    (*parameters)[spec.name] = std::move(parameter);
  }
  return absl::OkStatus();
}

absl::Status CheckParameters(const std::vector<ParameterSpec>& specs,
                             const NamedTensors& parameters) {
  for (const ParameterSpec& spec : specs) {
    const auto found = parameters.find(spec.name);
    if (found == parameters.end() || found->second.shape() != spec.shape) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", spec.name, " ", ShapeString(spec.shape), " is ",
                       found == parameters.end() ? "missing" : ShapeString(found->second.shape())));
    }
  }
  return absl::OkStatus();
}

ConstTensorView FindParameter(const NamedTensors& parameters, absl::string_view name) {
  const auto found = parameters.find(std::string(name));
  return found == parameters.end() ? ConstTensorView() : ConstTensorView(found->second.view());
}

absl::StatusOr<LayerNorm> MakeLayerNorm(Device device, const NamedTensors& parameters,
                                        absl::string_view name) {
  return LayerNorm::Create(device, parameters.at(absl::StrCat(name, ".gamma")).view(),
                           parameters.at(absl::StrCat(name, ".beta")).view());
}

absl::StatusOr<FeedForward> MakeFeedForward(Device device, const NamedTensors& parameters,
                                            absl::string_view name, Activation activation,
                                            Activation output) {
  const auto matrix = [&](absl::string_view number) {
    return PackedMatrix::Create(device, parameters.at(absl::StrCat(name, ".w", number)).view(),
                                parameters.at(absl::StrCat(name, ".b", number)).view());
  };
  TFB_ASSIGN_OR_RETURN(PackedMatrix first, matrix("1"));
  TFB_ASSIGN_OR_RETURN(PackedMatrix second, matrix("2"));
  return FeedForward(std::move(first), std::move(second), activation, output);
}

NormNames::NormNames(absl::string_view name)
    : gamma(absl::StrCat(name, ".gamma")), beta(absl::StrCat(name, ".beta")) {}

FeedForwardNames::FeedForwardNames(absl::string_view name)
    : w1(absl::StrCat(name, ".w1")),
      b1(absl::StrCat(name, ".b1")),
      w2(absl::StrCat(name, ".w2")),
      b2(absl::StrCat(name, ".b2")) {}

}  // namespace tfb::layers
