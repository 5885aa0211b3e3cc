// Utilities that tests of language models with a datastore share.
#ifndef TFB_MEMORY_KNN_LM_RETRIEVAL_TESTING_H_
#define TFB_MEMORY_KNN_LM_RETRIEVAL_TESTING_H_

#include <cstring>
#include <string>

#include "core/random.h"
#include "core/technique.h"
#include "core/testing.h"
#include "gtest/gtest.h"

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
    return RunTechnique(technique, problem, ViewsOf(inputs), {With(more), device, 1, parameters, 2})
        .value();
  }
  // Returns all gradients, of random gradients of the output.
  RunAndGradients RunBackward(const Options& more = {}, const NamedTensors* parameters = nullptr,
                              Device device = Device::kCpu) const {
    const Options all = With(more);
    NamedTensors g;
    g["out"] = Tensor(problem.dtype,
                      {problem.batch, problem.query_tokens, std::stoll(all.at("vocabulary"))});
    FillNormal(&g["out"], 7, "gradient");
    return BackwardOfTechnique(technique, problem, ViewsOf(inputs), g,
                               {all, device, 1, parameters, 2})
        .value();
  }

  Options With(const Options& more) const {
    Options all = options;
    for (const auto& [name, value] : more) all[name] = value;
    return all;
  }
};

// Expects gradients of a device to be those of the CPU. An element is a sum of products of factors that
// each have the errors of a forward pass, which are within Fp32Bound.
inline void ExpectSameGradients(const NamedTensors& of_cpu, const NamedTensors& of_device) {
  ASSERT_EQ(of_cpu.size(), of_device.size());
  for (const auto& [name, gradient] : of_cpu) {
    EXPECT_GT(MaxAbs(gradient.view()), 0) << name;
    EXPECT_LE(MaxDifference(gradient.view(), of_device.at(name).view()), Fp32Bound(gradient.view()))
        << name;
  }
}
inline void ExpectSameBits(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    EXPECT_EQ(std::memcmp(tensor.raw(), b.at(name).raw(), tensor.bytes()), 0) << name;
  }
}

// Expects a kernel device to give the gradients of the CPU, and the same bits in every run.
template <class Retrieval>
void ExpectGradientsOfTheCpu(const Retrieval& random, const Options& more,
                             const NamedTensors* parameters = nullptr) {
  const RunAndGradients of_cpu = random.RunBackward(more, parameters);
  const RunAndGradients of_device = random.RunBackward(more, parameters, KernelDevice());
  ExpectSameGradients(of_cpu.inputs, of_device.inputs);
  ExpectSameGradients(of_cpu.parameters, of_device.parameters);
  const RunAndGradients again = random.RunBackward(more, parameters, KernelDevice());
  ExpectSameBits(of_device.inputs, again.inputs);
  ExpectSameBits(of_device.parameters, again.parameters);
}

}  // namespace tfb::knn_lm

#endif  // TFB_MEMORY_KNN_LM_RETRIEVAL_TESTING_H_
