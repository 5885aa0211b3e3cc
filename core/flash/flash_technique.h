// The base of techniques that are a plan for engine flash (core/flash/plan.h): attention under some
// pattern, with some terms in its scores. Such a technique says what it is in a few functions of
// the problem, its options and its parameters; layers, on all devices, follow from them.
#ifndef TFB_CORE_FLASH_FLASH_TECHNIQUE_H_
#define TFB_CORE_FLASH_FLASH_TECHNIQUE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/definition.h"
#include "core/flash/plan.h"
#include "core/flash/planned_layer.h"
#include "core/technique.h"

namespace tfb {

// One problem with options and parameters. Its members are references, which are valid as long as
// the layer, or during the call of a definition; a function that a plan keeps copies it.
template <class OptionsT>
struct FlashJob {
  const Problem& problem;
  const OptionsT& options;
  const NamedTensors& parameters;
  uint64_t seed;
  Device device = Device::kCpu;
};

// A parameter whose elements are drawn from N(0, deviation^2).
struct NormalParameter {
  std::string name;
  Shape shape;
  double deviation = 1;
  DType dtype = DType::kF32;
};
// Draws each parameter as the seed's stream of its name. Returns ResourceExhausted where there is
// no memory for one.
absl::StatusOr<NamedTensors> DrawNormal(uint64_t seed,
                                        const std::vector<NormalParameter>& parameters);

// Returns the properties of self-attention whose queries see some keys: `budget_option` says how
// many, and the time grows with tokens^growth.
enum class Masking { kAny, kCausal, kBidirectional };
TechniqueInfo SparseSelfAttention(TechniqueInfo info, std::string budget_option, double growth,
                                  Masking masking = Masking::kAny);

template <class OptionsT>
class FlashTechnique : public TechniqueOf<OptionsT> {
 protected:
  using Job = FlashJob<OptionsT>;

  explicit FlashTechnique(TechniqueInfo info) : TechniqueOf<OptionsT>(std::move(info)) {}

  // Draws the parameters from the job's seed; the job has none yet.
  virtual absl::StatusOr<NamedTensors> Draw(const Job&) const { return NamedTensors(); }
  // Returns what fits a layer's parameters to the inputs of each Setup, or null. It belongs to the
  // layer, and may keep a state.
  virtual PlannedLayer::Fit MakeFit(const Problem&, const OptionsT&) const { return nullptr; }
  // Returns what the engines compute.
  virtual absl::StatusOr<FlashPlan> Describe(const Job& job) const = 0;
  // Returns the definition, which shares no code with the plan. A technique whose definition is no
  // PairScore overrides Definition instead.
  virtual absl::StatusOr<PairScore> DefineScore(const Job&) const {
    return absl::InternalError("a technique defines its score, or overrides Definition");
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem, const OptionsT& options,
                                                   Device device, uint64_t seed) const override {
    TFB_ASSIGN_OR_RETURN(NamedTensors parameters, Draw({problem, options, NamedTensors(), seed}));
    return PlannedLayer::Create(
        problem, this->ReadTensors(problem, options), this->WrittenTensors(problem, options),
        std::move(parameters), device,
        [technique = Registered(), problem, options, device](const NamedTensors& current) {
          return technique->Describe({problem, options, current, 0, device});
        },
        MakeFit(problem, options));
  }
  absl::Status Definition(const Problem& problem, const OptionsT& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    TFB_ASSIGN_OR_RETURN(const PairScore score, DefineScore({problem, options, parameters, 0}));
    DefineMaskedAttention(problem, inputs, request, score, outputs);
    return absl::OkStatus();
  }

 private:
  // Returns the registered technique, where this is another object of it: each Setup of a layer
  // describes the plan again, when such an object may be gone.
  const FlashTechnique* Registered() const {
    const absl::StatusOr<const Technique*> found = Registry::Global().Find(this->info().name);
    const auto* registered = found.ok() ? dynamic_cast<const FlashTechnique*>(*found) : nullptr;
    return registered != nullptr ? registered : this;
  }
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_TECHNIQUE_H_
