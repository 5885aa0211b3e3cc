// The base of techniques whose layer is a RetrievalLayer: their tensors, the problems they take,
// and the model alone as their counterpart.
#ifndef TFB_CORE_RETRIEVAL_RETRIEVAL_TECHNIQUE_H_
#define TFB_CORE_RETRIEVAL_RETRIEVAL_TECHNIQUE_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/retrieval/retrieval_layer.h"
#include "core/status.h"
#include "core/technique.h"

namespace tfb {

// OptionsT is derived from RetrievalOptions.
template <class OptionsT>
class RetrievalTechnique : public TechniqueOf<OptionsT> {
 public:
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem&, const Options& options) const final {
    TFB_ASSIGN_OR_RETURN(const OptionsT parsed, ParseOptions<OptionsT>(options));
    return ModelAlone(this->info().name, parsed);
  }

 protected:
  explicit RetrievalTechnique(TechniqueInfo info) : TechniqueOf<OptionsT>(std::move(info)) {}

  // Creates a layer for a problem that has been checked.
  virtual absl::StatusOr<std::unique_ptr<Layer>> CreateLayer(const Problem& problem,
                                                             const OptionsT& options, Device device,
                                                             uint64_t seed) const = 0;
  virtual absl::Status DefineChecked(const Problem& problem, const OptionsT& options,
                                     const NamedTensors& parameters, const Inputs& inputs,
                                     const DefinitionRequest& request,
                                     NamedTensors* outputs) const = 0;

  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const OptionsT& options) const override {
    return RetrievalInputs(problem, options);
  }

 private:
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const OptionsT& options) const final {
    return RetrievalOutputs(problem, options);
  }
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem, const OptionsT& options,
                                                   Device device, uint64_t seed) const final {
    TFB_RETURN_IF_ERROR(CheckRetrievalProblem(this->info().name, problem));
    TFB_RETURN_IF_ERROR(CheckRetrievalDevice(this->info().name, options, device));
    return CreateLayer(problem, options, device, seed);
  }
  absl::Status Definition(const Problem& problem, const OptionsT& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const final {
    TFB_RETURN_IF_ERROR(CheckRetrievalProblem(this->info().name, problem));
    return DefineChecked(problem, options, parameters, inputs, request, outputs);
  }
};

}  // namespace tfb

#endif  // TFB_CORE_RETRIEVAL_RETRIEVAL_TECHNIQUE_H_
