#include "core/random.h"

#include <cmath>

namespace tfb {
namespace {

// FNV-1a, 64 bits: the same on every machine, unlike std::hash.
uint64_t HashName(absl::string_view name) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char c : name) hash = (hash ^ c) * 1099511628211u;
  return hash;
}

std::array<uint32_t, 2> Halves(uint64_t value) {
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)};
}

// Centres 53 bits in their interval, so that the result is neither 0 nor 1.
double ToUniform(uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

}  // namespace

std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;  // the golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

RandomStream::RandomStream(uint64_t seed, absl::string_view name)
    : key_(Halves(seed)), name_(Halves(HashName(name))) {}

uint64_t RandomStream::Bits(uint64_t index) const {
  const auto [low, high] = Halves(index);
  const std::array<uint32_t, 4> bits = Philox({low, high, name_[0], name_[1]}, key_);
  return bits[0] | uint64_t{bits[1]} << 32;
}

double RandomStream::Uniform(uint64_t index) const { return ToUniform(Bits(index)); }

double RandomStream::Normal(uint64_t index) const {
  const auto [low, high] = Halves(index);
  const std::array<uint32_t, 4> bits = Philox({low, high, name_[0], name_[1]}, key_);
  const double radius = ToUniform(bits[0] | uint64_t{bits[1]} << 32);
  const double angle = ToUniform(bits[2] | uint64_t{bits[3]} << 32);
  return std::sqrt(-2 * std::log(radius)) * std::cos(2 * M_PI * angle);
}

void FillNormal(Tensor* tensor, uint64_t seed, absl::string_view name, double mean,
                double deviation) {
  const RandomStream stream(seed, name);
  for (int64_t i = 0; i < tensor->num_elements(); ++i) {
    tensor->view().Set(i, mean + deviation * stream.Normal(i));
  }
}

void FillDrawn(Tensor* tensor, Distribution distribution, uint64_t seed, absl::string_view name) {
  const RandomStream stream(seed, name);
  for (int64_t i = 0; i < tensor->num_elements(); ++i) {
    double value = 0;
    switch (distribution) {
      case Distribution::kNormal:
        value = stream.Normal(i);
        break;
      case Distribution::kUniform:
        value = stream.Uniform(i);
        break;
      case Distribution::kGumbel:
        value = -std::log(-std::log(stream.Uniform(i)));
        break;
    }
    tensor->view().Set(i, value);
  }
}

void FillUniform(Tensor* tensor, uint64_t seed, absl::string_view name, double min, double max) {
  const RandomStream stream(seed, name);
  for (int64_t i = 0; i < tensor->num_elements(); ++i) {
    tensor->view().Set(i, min + (max - min) * stream.Uniform(i));
  }
}

}  // namespace tfb
