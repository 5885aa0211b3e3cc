#include "core/layers/layer_definitions.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace tfb::layers {

void DefineNormOfRow(const double* gamma, const double* beta, int64_t width, double* row) {
  const double n = static_cast<double>(width);
  double mean = 0, variance = 0;
  for (int64_t c = 0; c < width; ++c) mean += row[c] / n;
  for (int64_t c = 0; c < width; ++c) variance += (row[c] - mean) * (row[c] - mean) / n;
  for (int64_t c = 0; c < width; ++c) {
    row[c] = gamma[c] * (row[c] - mean) / std::sqrt(variance + 1e-5) + beta[c];
  }
}

Tensor DefineNorm(const NamedTensors& parameters, const std::string& name, const Tensor& h) {
  const DoubleTensor gamma(parameters.at(name + ".gamma").view());
  const DoubleTensor beta(parameters.at(name + ".beta").view());
  Tensor result = h.Clone();
  for (int64_t first = 0; first < h.num_elements(); first += gamma.size()) {
    DefineNormOfRow(gamma.data(), beta.data(), gamma.size(), result.span<double>().data() + first);
  }
  return result;
}

double DefineActivation(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kGelu:
      return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
    case Activation::kGeluTanh:
      return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    case Activation::kGeluSigmoid:
      return x / (1 + std::exp(-1.702 * x));
    case Activation::kTanh:
      return std::tanh(x);
    case Activation::kNone:
      break;
  }
  return x;
}

Tensor DefineFeedForward(const NamedTensors& parameters, const std::string& name,
                         Activation activation, const Tensor& h, ThreadPool* pool) {
  const auto parameter = [&](const char* of) {
    return DoubleTensor(parameters.at(name + of).view());
  };
  const DoubleTensor w2 = parameter(".w2"), b2 = parameter(".b2");
  const int64_t rows = h.num_elements() / b2.size();
  std::vector<double> inner =
      Affine(h.span<double>().data(), rows, parameter(".w1"), parameter(".b1"), pool);
  for (double& value : inner) value = DefineActivation(activation, value);
  const std::vector<double> y = Affine(inner.data(), rows, w2, b2, pool);
  Tensor result(DType::kF64, h.shape());
  std::copy(y.begin(), y.end(), result.span<double>().begin());
  return result;
}

double DefineSinusoid(const SinusoidForm& form, int64_t channels, int64_t p, int64_t c) {
  const int64_t sines = channels - channels / 2;
  const bool interleaved = form.layout == SinusoidLayout::kInterleaved;
  const bool is_sine = interleaved ? c % 2 == 0 : c < sines;
  const int64_t j = interleaved ? c / 2 : c % sines;
  double wavelengths = static_cast<double>(channels) / 2;
  if (form.frequencies == SinusoidFrequencies::kInclusive) {
    wavelengths = static_cast<double>(sines) - 1;
  }
  const double exponent = j == 0 ? 0 : static_cast<double>(j) / wavelengths;
  const double angle = static_cast<double>(p) / std::pow(form.base, exponent);
  return is_sine ? std::sin(angle) : std::cos(angle);
}

}  // namespace tfb::layers
