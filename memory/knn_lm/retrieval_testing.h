// Utilities that tests of language models with a datastore share.
#ifndef TFB_MEMORY_KNN_LM_RETRIEVAL_TESTING_H_
#define TFB_MEMORY_KNN_LM_RETRIEVAL_TESTING_H_

#include <string>

#include "core/technique.h"
#include "core/testing.h"

namespace tfb::knn_lm {

// A random model and datastore of usual sizes, from which `neighbours` are retrieved.
template <typename RetrievingTechnique, int neighbours>
struct RandomRetrieval {
  RetrievingTechnique technique;
  Problem problem = Problem::SelfAttention(2, 2, 37, 8);
  Options options = {{"vocabulary", "40"}, {"entries", "300"}, {"k", std::to_string(neighbours)}};
  NamedTensors inputs = RandomInputs(technique.InputSpecs(problem, options).value(), 5);

  NamedTensors Parameters() const {
    const auto layer = technique.Create(problem, options, Device::kCpu, 1).value();
    NamedTensors copies;
    for (const auto& [name, tensor] : layer->parameters()) copies[name] = tensor.Clone();
    return copies;
  }
  NamedTensors Run(const Options& more = {}, const NamedTensors* parameters = nullptr,
                   Device device = Device::kCpu) const {
    Options all = options;
    for (const auto& [name, value] : more) all[name] = value;
    return RunTechnique(technique, problem, ViewsOf(inputs), {all, device, 1, parameters, 2})
        .value();
  }
};

}  // namespace tfb::knn_lm

#endif  // TFB_MEMORY_KNN_LM_RETRIEVAL_TESTING_H_
