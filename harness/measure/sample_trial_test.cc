#include "harness/measure/sample_trial.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/contestants/interface.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

// A technique whose definition is that the output is twice the input.
class Twice : public ContestantTechnique {
 public:
  explicit Twice(bool exact) : ContestantTechnique(Info(), {"file", "twice", exact}) {}

  absl::StatusOr<TechniqueSpec> DefinitionOf(const Options&) const override {
    return TechniqueSpec{"twice", {}};
  }
  absl::StatusOr<Options> Canonical(const Options&) const override { return Options(); }
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options&) const override {
    return HiddenInputs(problem);
  }
  absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& problem,
                                                      const Options&) const override {
    return HiddenOutputs(problem);
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem, const Options&, Device,
                                                uint64_t) const override {
    class Empty : public Layer {
     public:
      explicit Empty(const Problem& problem)
          : Layer(problem, HiddenInputs(problem), HiddenOutputs(problem)) {}
      size_t workspace_bytes(int) const override { return 0; }
      Cost cost() const override { return {}; }

     protected:
      absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
        return absl::OkStatus();
      }
    };
    return std::make_unique<Empty>(problem);
  }
  absl::Status Define(const Problem&, const Options&, const NamedTensors&, const Inputs& inputs,
                      const DefinitionRequest& request, NamedTensors* outputs) const override {
    const ConstTensorView x = inputs.Get("x");
    const std::vector<int64_t> rows(request.rows.begin(), request.rows.end());
    Tensor& out = (*outputs)["out"] =
        Tensor(DType::kF64, {x.dim(0), static_cast<int64_t>(rows.size()), x.dim(2)});
    for (int64_t b = 0; b < x.dim(0); ++b) {
      for (size_t n = 0; n < rows.size(); ++n) {
        const auto row = static_cast<int64_t>(n);
        for (int64_t c = 0; c < x.dim(2); ++c) {
          out.view().Set((b * out.shape()[1] + row) * x.dim(2) + c,
                         2 * x.Get((b * x.dim(1) + rows[n]) * x.dim(2) + c));
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  static TechniqueInfo Info() {
    TechniqueInfo info;
    info.name = "twice@file";
    info.input_kind = InputKind::kHidden;
    return info;
  }
};

// A trial of the technique on 40 tokens of 2 sequences, and the memory of its outputs.
class SampleTrialTest : public ::testing::Test {
 protected:
  SampleTrialTest() { Make(/*exact=*/true, 0); }

  void Make(bool exact, double usual_error) {
    technique_ = std::make_unique<Twice>(exact);
    const Problem problem = Problem::SelfAttention(2, 1, 40, 6);
    original_["x"] = Tensor(DType::kF32, {2, 40, 6});
    FillNormal(&original_["x"], 1, "x");
    out_ = Tensor(DType::kF32, {2, 40, 6});
    outputs_.Set("out", out_.view());
    layer_ = technique_->Create(problem, {}, Device::kCpu, 1).value();
    SampleTrial::Subject subject;
    subject.request.job.technique = technique_.get();
    subject.request.job.problem = problem;
    subject.request.inputs = &original_;
    subject.layer = layer_.get();
    subject.usual_error = usual_error;
    trial_ = std::make_unique<SampleTrial>(subject);
  }

  void Write(double factor) {
    const ConstTensorView x = trial_->inputs().Get("x");
    for (int64_t n = 0; n < out_.num_elements(); ++n) out_.view().Set(n, factor * x.Get(n));
  }
  // Returns the message of a trial whose judged call and timed calls are these.
  std::string Message(const std::function<void()>& judged, const std::function<void()>& timed) {
    const absl::Status begin = trial_->Begin(outputs_, [&] {
      judged();
      return absl::OkStatus();
    });
    EXPECT_TRUE(begin.ok()) << begin;
    timed();
    return std::string(trial_->End(outputs_).message());
  }
  std::function<void()> Right() {
    return [this] { Write(2); };
  }

  std::unique_ptr<Twice> technique_;
  NamedTensors original_;
  Tensor out_;
  Outputs outputs_;
  std::unique_ptr<Layer> layer_;
  std::unique_ptr<SampleTrial> trial_;
};

TEST_F(SampleTrialTest, WhatIsRightPassesAnyNumberOfTimes) {
  for (int n = 0; n < 20; ++n) EXPECT_EQ(Message(Right(), Right()), "");
}

TEST_F(SampleTrialTest, EachHasNewInputsWhichAreTheTokensTurned) {
  const auto copy = [this] {
    const ConstTensorView x = trial_->inputs().Get("x");
    std::vector<float> numbers(static_cast<const float*>(x.data),
                               static_cast<const float*>(x.data) + x.num_elements());
    return numbers;
  };
  std::vector<std::vector<float>> seen = {copy()};
  for (int n = 0; n < 4; ++n) {
    EXPECT_EQ(Message(Right(), Right()), "");
    const std::vector<float> now = copy();
    EXPECT_NE(now, seen.back());
    // The row that follows another one does so in the original as well, sequence by sequence.
    const float* original = static_cast<const float*>(original_["x"].raw());
    for (const int64_t b : {0, 1}) {
      int64_t steps = 0;
      while (std::memcmp(&now[b * 240 + 6 * steps], original + b * 240, 24) != 0) ++steps;
      ASSERT_LT(steps, 40);
      for (int64_t t = 0; t < 40; ++t) {
        EXPECT_EQ(
            std::memcmp(&now[b * 240 + 6 * ((t + steps) % 40)], original + b * 240 + 6 * t, 24), 0);
      }
    }
    seen.push_back(now);
  }
}

TEST_F(SampleTrialTest, WhatIsWrongIsFound) {
  const auto nothing = [] {};
  const auto stale = [&, kept = std::vector<double>()]() mutable {
    if (kept.empty()) {
      Write(2);
      for (int64_t n = 0; n < out_.num_elements(); ++n) kept.push_back(out_.view().Get(n));
    }
    for (int64_t n = 0; n < out_.num_elements(); ++n) out_.view().Set(n, kept[n]);
  };
  std::function<void()> last = stale;
  EXPECT_EQ(Message(last, last), "");
  EXPECT_THAT(Message(last, last),
              HasSubstr("a call on new inputs, while it was timed: max error over max value is "));
  // It returns before it has written, which the next calls hide.
  EXPECT_THAT(Message(nothing, Right()), HasSubstr("are NaN or infinite"));
  EXPECT_EQ(Message(Right(), [&] { Write(2.01); }),
            "its timed calls gave another out than the one before on the same inputs");
  EXPECT_EQ(Message(Right(),
                    [&] {
                      Write(2);
                      const_cast<float*>(
                          static_cast<const float*>(trial_->inputs().Get("x").data))[3] = 1;
                    }),
            "it wrote into its input x");
  // Another order of summation is none of these.
  EXPECT_EQ(Message(Right(), [&] { Write(2 * (1 + 1e-6)); }), "");
  EXPECT_EQ(trial_->Begin(outputs_, [] { return absl::InternalError("fell over"); }),
            absl::InternalError("fell over"));
}

TEST_F(SampleTrialTest, WhatApproximatesMayBeAsFarAsItsCheckWas) {
  Make(/*exact=*/false, 0.2);
  const auto off_by = [&](double factor) { return [this, factor] { Write(2 * factor); }; };
  EXPECT_EQ(Message(off_by(1.45), off_by(1.45)), "");
  EXPECT_EQ(Message(off_by(1.55), off_by(1.55)),
            "a call on new inputs, while it was timed: its relative error is 0.55, that of its "
            "check 0.2");
}

}  // namespace
}  // namespace tfb
