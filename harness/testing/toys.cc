#include "harness/testing/toys.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "harness/testing/tiny_attention.h"
#include "harness/testing/tiny_kernels.h"

namespace tfb {
namespace {

struct ToyOptions {
  int64_t rounds = 1;
  int64_t shade = 0;
  int64_t ms = 0;
  int64_t mib = 0;
  int64_t from = 1;

  void Describe(OptionBinder& bind) {
    bind.Int("rounds", &rounds, 1, 1000000, "times that the work is done", {1, 2, 4});
    bind.Int("shade", &shade, 0, 2, "changes nothing", {0, 2});
    bind.Int("ms", &ms, 0, 3600000, "milliseconds that a Run waits");
    bind.Int("mib", &mib, 0, int64_t{1} << 40, "MiB that are taken");
    bind.Int("from", &from, 1, int64_t{1} << 40, "query tokens from which a Run waits at the gate");
  }
};

enum class Deed {
  kNone,
  kWrong,
  kUnable,
  kRefuses,
  kHungry,
  kHoards,
  kCrashes,
  kHangs,
  kWaitsAtGate,
  kBadLaunch,
  kBadKernel,
};

double RunSeconds(const ToyOptions& options, const ToyTime& time) {
  return static_cast<double>(options.ms) / 1000 +
         static_cast<double>(options.rounds) * time.seconds_per_round;
}

// y_i = mean of v_j over the keys that row i sees.
class MeanLayer : public Layer {
 public:
  MeanLayer(const Problem& problem, const ToyOptions& options, Deed deed, const ToyTime& time)
      : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)),
        options_(options),
        deed_(deed),
        time_(time) {}

  size_t workspace_bytes(int threads) const override {
    if (deed_ == Deed::kHungry) return static_cast<size_t>(options_.mib) << 20;
    return static_cast<size_t>(threads) * 64;
  }
  Cost cost() const override {
    const Problem& p = problem();
    return {2.0 * options_.rounds * p.batch * p.query_heads * p.query_tokens * p.value_dim, {}};
  }
  std::map<std::string, double> statistics() const override {
    return {{"rounds", options_.rounds}};
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    time_.clock->Wait(time_.seconds_per_round);
    if (deed_ == Deed::kHoards) hoard_.assign(options_.mib << 20, 1);
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs, const Execution&) override {
    if (deed_ == Deed::kRefuses) return absl::InternalError("the toy refuses to run");
    if (deed_ == Deed::kCrashes) {
      signal(SIGSEGV, SIG_DFL);  // sanitizers catch it
      raise(SIGSEGV);
    }
    if (deed_ == Deed::kHangs) {
      time_.clock->Wait(3600);
      for (;;) pause();
    }
    if (deed_ == Deed::kWaitsAtGate) WaitAtGate();
    time_.clock->Wait(RunSeconds(options_, time_));
    for (int64_t round = 0; round < options_.rounds; ++round) Fill(inputs.Get("v"), outputs);
    return absl::OkStatus();
  }

 private:
  void WaitAtGate() const {
    const char* gate = std::getenv("TFB_TOY_GATE");
    if (gate == nullptr || problem().query_tokens < options_.from) return;
    std::ofstream(std::string(gate) + ".reached") << "reached";
    while (access(gate, F_OK) == 0) usleep(1000);
  }
  void Fill(const ConstTensorView& v, const Outputs& outputs) {
    const Problem& p = problem();
    const TensorView out = outputs.Get("out"), lse = outputs.Get("log_sum_exp");
    std::vector<double> sum(p.value_dim);
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.query_heads; ++h) {
        std::fill(sum.begin(), sum.end(), 0);
        int64_t seen = 0;
        for (int64_t i = 0; i < p.query_tokens; ++i) {
          const int64_t end = p.causal ? i + p.causal_offset() + 1 : p.kv_tokens;
          for (; seen < end; ++seen) {
            for (int64_t c = 0; c < p.value_dim; ++c) {
              sum[c] += v.Get(v.Offset(b, h / p.group(), seen, c));
            }
          }
          for (int64_t c = 0; c < p.value_dim; ++c) {
            out.Set(out.Offset(b, h, i, c),
                    (seen > 0 ? sum[c] / seen : 0) + (deed_ == Deed::kWrong ? 1 : 0));
          }
          if (!lse.empty()) lse.Set(lse.Offset(b, h, i), std::log(static_cast<double>(seen)));
        }
      }
    }
  }

  ToyOptions options_;
  Deed deed_;
  ToyTime time_;
  std::vector<char> hoard_;
};

// Computes the same on a device: attention whose scores are all 0.
class MeanDeviceLayer : public Layer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Make(const Problem& problem,
                                                     const ToyOptions& options, Deed deed,
                                                     const ToyTime& time, Device device) {
    TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, CudaRuntime::For(device));
    std::unique_ptr<MeanDeviceLayer> layer(
        new MeanDeviceLayer(problem, options, deed, time, runtime));
    TFB_ASSIGN_OR_RETURN(layer->gain_, runtime->Allocate(problem.query_heads * sizeof(float)));
    TFB_RETURN_IF_ERROR(runtime->Fill(layer->gain_.data(), 0, layer->gain_.bytes()));
    return layer;
  }

  size_t workspace_bytes(int) const override {
    const Problem& p = problem();
    const int64_t scores = p.batch * p.query_heads * p.query_tokens * (p.kv_tokens + 1);
    return std::max<size_t>(scores * sizeof(float), static_cast<size_t>(options_.mib) << 20);
  }
  Cost cost() const override {
    const Problem& p = problem();
    return {2.0 * options_.rounds * p.batch * p.query_heads * p.query_tokens * p.value_dim, {}};
  }

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    const Problem& p = problem();
    const int64_t rows = p.batch * p.query_heads * p.query_tokens;
    const ConstTensorView q = inputs.Get("q"), k = inputs.Get("k"), v = inputs.Get("v");
    TinyCall call = MakeTinyCall(q, k, v, {}, p.causal);
    call.gain = gain_.As<float>();
    TinyTensors tensors;
    tensors.q = ToDeviceView(q);
    tensors.k = ToDeviceView(k);
    tensors.v = ToDeviceView(v);
    tensors.out = ToDeviceView(outputs.Get("out"));
    tensors.log_sum_exp = ToDeviceView(outputs.Get("log_sum_exp"));
    tensors.weights = reinterpret_cast<float*>(execution.workspace.data());
    tensors.factors = tensors.weights + rows * p.kv_tokens;
    if (deed_ == Deed::kBadKernel) tensors.out.data = reinterpret_cast<void*>(uintptr_t{64});
    time_.clock->Wait(RunSeconds(options_, time_));
    if (deed_ == Deed::kBadLaunch) {  // one block more than a grid may have
      return ToStatus(KernelsOn<TinyKernels>(runtime_->target())
                          .sum_in_any_order({tensors.weights, tensors.factors, nullptr,
                                             int64_t{1} << 31, p.kv_tokens},
                                            execution.stream));
    }
    for (int64_t round = 0; round < options_.rounds; ++round) {
      TFB_RETURN_IF_ERROR(RunTinyAttention(runtime_->device(), call, tensors, execution));
    }
    return absl::OkStatus();
  }

 private:
  MeanDeviceLayer(const Problem& problem, const ToyOptions& options, Deed deed, const ToyTime& time,
                  CudaRuntime* runtime)
      : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)),
        options_(options),
        deed_(deed),
        time_(time),
        runtime_(runtime) {}

  ToyOptions options_;
  Deed deed_;
  ToyTime time_;
  CudaRuntime* runtime_;
  DeviceBuffer gain_;  // 0, by head
};

class MeanToy : public TechniqueOf<ToyOptions> {
 public:
  MeanToy(TechniqueInfo info, Deed deed, const ToyTime& time)
      : TechniqueOf(std::move(info)), deed_(deed), time_(time) {}

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const ToyOptions& options, Device device,
                                                   uint64_t) const override {
    if (deed_ == Deed::kUnable) return absl::UnimplementedError("the toy is unable to");
    if (device == Device::kCpu) return std::make_unique<MeanLayer>(problem, options, deed_, time_);
    if (!RunsOn(info(), Device::kCpu)) return absl::InternalError("the toy has no kernels");
    return MeanDeviceLayer::Make(problem, options, deed_, time_, device);
  }
  absl::Status Definition(const Problem& problem, const ToyOptions&, const NamedTensors&,
                          const Inputs& inputs, const DefinitionRequest& request,
                          NamedTensors* outputs) const override {
    DefineAttention(
        problem, inputs, request,
        [&](int64_t, int64_t, int64_t i, int64_t j) {
          return problem.causal && j > i + problem.causal_offset() ? kNotSeen : 0.0;
        },
        outputs);
    return absl::OkStatus();
  }

 private:
  Deed deed_;
  ToyTime time_;
};

class CopyLayer : public StreamingLayer {
 public:
  CopyLayer(const Problem& p, const ToyTime& time)
      : StreamingLayer(p, HiddenInputs(p), HiddenOutputs(p),
                       {{"x", {p.batch, kSegmentTokens, p.model_dim()}, p.dtype, false}},
                       {{"out", {p.batch, kSegmentTokens, p.model_dim()}, p.dtype, false}},
                       /*max_segment_tokens=*/16),
        time_(time) {}
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }
  absl::Status Reset() override {
    appended_ = 0;
    return absl::OkStatus();
  }

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs, const Execution&) override {
    time_.clock->Wait(time_.seconds_per_round);
    CopyElements(inputs.Get("x"), outputs.Get("out"));
    return absl::OkStatus();
  }
  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution&) override {
    time_.clock->Wait(static_cast<double>(tokens) * time_.seconds_per_round);
    appended_ += tokens;
    if (appended_ > problem().query_tokens)
      return absl::OutOfRangeError("more tokens than there are");
    CopyElements(segment.Get("x"), outputs.Get("out"));
    return absl::OkStatus();
  }

 private:
  int64_t appended_ = 0;
  ToyTime time_;
};

class WholeCopyLayer : public Layer {
 public:
  WholeCopyLayer(const Problem& p, const ToyTime& time)
      : Layer(p, HiddenInputs(p), HiddenOutputs(p)), time_(time) {}
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs, const Execution&) override {
    time_.clock->Wait(time_.seconds_per_round);
    CopyElements(inputs.Get("x"), outputs.Get("out"));
    return absl::OkStatus();
  }

 private:
  ToyTime time_;
};

class CopyToy : public TechniqueOf<ToyOptions> {
 public:
  CopyToy(TechniqueInfo info, bool streams, const ToyTime& time)
      : TechniqueOf(std::move(info)), streams_(streams), time_(time) {}

  // Returns the toy itself.
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem&, const Options&) const override {
    return TechniqueSpec{info().name, {}};
  }

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem, const ToyOptions&,
                                                   Device, uint64_t) const override {
    if (streams_) return std::make_unique<CopyLayer>(problem, time_);
    return std::make_unique<WholeCopyLayer>(problem, time_);
  }
  absl::Status Definition(const Problem&, const ToyOptions&, const NamedTensors&,
                          const Inputs& inputs, const DefinitionRequest&,
                          NamedTensors* outputs) const override {
    Tensor out(DType::kF64, inputs.Get("x").shape());
    CopyElements(inputs.Get("x"), out.view());
    (*outputs)["out"] = std::move(out);
    return absl::OkStatus();
  }

 private:
  bool streams_;
  ToyTime time_;
};

TechniqueInfo Info(absl::string_view name) {
  TechniqueInfo info;
  info.name = std::string(name);
  info.family = "toys";
  info.title = "A toy";
  info.citation = "none";
  info.exactness = Exactness::kOwn;
  info.budget_option = "rounds";
  info.growth = 1;
  info.devices = {Device::kCpu};
  return info;
}

}  // namespace

void AddToys(Registry& registry, const ToyTime& time) {
  const auto add_mean = [&](absl::string_view name, Deed deed) {
    registry.Add(std::make_unique<MeanToy>(Info(name), deed, time));
  };
  add_mean("toy_mean", Deed::kNone);
  add_mean("toy_wrong", Deed::kWrong);
  add_mean("toy_unable", Deed::kUnable);
  add_mean("toy_refuses", Deed::kRefuses);
  add_mean("toy_slow", Deed::kNone);
  add_mean("toy_hungry", Deed::kHungry);
  add_mean("toy_hoarder", Deed::kHoards);
  add_mean("toy_crash", Deed::kCrashes);
  add_mean("toy_hang", Deed::kHangs);
  add_mean("toy_gate", Deed::kWaitsAtGate);
  TechniqueInfo causal = Info("toy_causal");
  causal.supports_noncausal = false;
  registry.Add(std::make_unique<MeanToy>(causal, Deed::kNone, time));
  TechniqueInfo full = Info("toy_full");
  full.supports_causal = false;
  registry.Add(std::make_unique<MeanToy>(full, Deed::kNone, time));
  TechniqueInfo cuda = Info("toy_cuda");
  cuda.devices = {Device::kCuda};
  registry.Add(std::make_unique<MeanToy>(cuda, Deed::kNone, time));
  const auto add_device = [&](absl::string_view name, Deed deed) {
    TechniqueInfo info = Info(name);
    info.devices = {Device::kCpu, Device::kCuda};
    registry.Add(std::make_unique<MeanToy>(info, deed, time));
  };
  add_device("toy_device", Deed::kNone);
  add_device("toy_bad_launch", Deed::kBadLaunch);
  add_device("toy_bad_kernel", Deed::kBadKernel);
  TechniqueInfo hidden = Info("toy_hidden");
  hidden.input_kind = InputKind::kHidden;
  registry.Add(std::make_unique<CopyToy>(hidden, /*streams=*/false, time));
  hidden.name = "toy_stream";
  registry.Add(std::make_unique<CopyToy>(hidden, /*streams=*/true, time));
}

void AddDenseToy(Registry& registry, const ToyTime& time) {
  registry.Add(std::make_unique<MeanToy>(Info("dense"), Deed::kNone, time));
}

}  // namespace tfb
