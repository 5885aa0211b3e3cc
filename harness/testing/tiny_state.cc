// Defines a small technique that hands its state over, and faulty forms of it, for tests:
//
//   y_t = x_t + s_t,   s_(t+1) = s_t / 2 + x_t
//
// s of the first token is 0, or the input `state` [batch, 1, model_dim] with given_state=1; the
// optional output `state` is s after the last token.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/technique.h"

namespace tfb {
namespace {

enum class Fault {
  kNone,
  kForgets,  // what is given
  kIsStale,  // hands over the state before the last token, not the one after it
};

struct TinyStateOptions {
  int64_t given_state = 0;

  void Describe(OptionBinder& bind) {
    bind.Int("given_state", &given_state, 0, 1, "states that the input `state` holds");
  }
};

std::vector<TensorSpec> StateSpecs(const Problem& problem, int64_t states, bool optional) {
  if (states == 0) return {};
  return {{"state", {problem.batch, 1, problem.model_dim()}, problem.dtype, optional}};
}

std::vector<TensorSpec> Joined(std::vector<TensorSpec> specs, const std::vector<TensorSpec>& more) {
  specs.insert(specs.end(), more.begin(), more.end());
  return specs;
}

std::vector<TensorSpec> InputsOf(const Problem& problem, const TinyStateOptions& options) {
  return Joined(HiddenInputs(problem), StateSpecs(problem, options.given_state, false));
}
std::vector<TensorSpec> OutputsOf(const Problem& problem) {
  return Joined(HiddenOutputs(problem), StateSpecs(problem, 1, true));
}

void RunChannel(const ConstTensorView& x, double s, Fault fault, int64_t b, int64_t c,
                const TensorView& out, const TensorView& state) {
  for (int64_t t = 0; t < x.dim(1); ++t) {
    const double value = x.Get(x.Offset(b, t, c));
    out.Set(out.Offset(b, t, c), value + s);
    if (fault != Fault::kIsStale || t + 1 < x.dim(1)) s = s / 2 + value;
  }
  if (!state.empty()) state.Set(state.Offset(b, 0, c), s);
}

// Computes all channels, for the layer and the definition.
void RunAll(const Inputs& inputs, Fault fault, const Outputs& outputs) {
  const ConstTensorView x = inputs.Get("x"), given = inputs.Get("state");
  for (int64_t b = 0; b < x.dim(0); ++b) {
    for (int64_t c = 0; c < x.dim(2); ++c) {
      const bool begins = given.empty() || fault == Fault::kForgets;
      const double s = begins ? 0 : given.Get(given.Offset(b, 0, c));
      RunChannel(x, s, fault, b, c, outputs.Get("out"), outputs.Get("state"));
    }
  }
}

class TinyStateLayer : public Layer {
 public:
  TinyStateLayer(const Problem& problem, const TinyStateOptions& options, Fault fault)
      : Layer(problem, InputsOf(problem, options), OutputsOf(problem)), fault_(fault) {}

  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs, const Execution&) override {
    RunAll(inputs, fault_, outputs);
    return absl::OkStatus();
  }

 private:
  Fault fault_;
};

class TinyState : public TechniqueOf<TinyStateOptions> {
 public:
  TinyState(const std::string& name, Fault fault) : TechniqueOf(Info(name)), fault_(fault) {}

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const TinyStateOptions& options, Device,
                                                   uint64_t) const override {
    return std::make_unique<TinyStateLayer>(problem, options, fault_);
  }
  absl::Status Definition(const Problem& problem, const TinyStateOptions&, const NamedTensors&,
                          const Inputs& inputs, const DefinitionRequest&,
                          NamedTensors* outputs) const override {
    for (const TensorSpec& spec : OutputsOf(problem)) {
      (*outputs)[spec.name] = Tensor(DType::kF64, spec.shape);
    }
    RunAll(inputs, Fault::kNone, MutableViewsOf(*outputs));
    return absl::OkStatus();
  }
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const TinyStateOptions& options) const override {
    return InputsOf(problem, options);
  }
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const TinyStateOptions&) const override {
    return OutputsOf(problem);
  }

 private:
  static TechniqueInfo Info(const std::string& name) {
    TechniqueInfo info;
    info.name = name;
    info.family = "memory";
    info.title = "A state in plain loops";
    info.citation = "made up for tests";
    info.input_kind = InputKind::kHidden;
    info.exactness = Exactness::kOwn;
    info.growth = 1;
    return info;
  }

  Fault fault_;
};

bool RegisterAll() {
  Registry& registry = Registry::Global();
  registry.Add(std::make_unique<TinyState>("tiny_state", Fault::kNone));
  registry.Add(std::make_unique<TinyState>("tiny_state_forgets", Fault::kForgets));
  registry.Add(std::make_unique<TinyState>("tiny_state_is_stale", Fault::kIsStale));
  return true;
}

const bool registered = RegisterAll();

}  // namespace
}  // namespace tfb
