#include "harness/measure/check_forecast.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "harness/inputs/inputs.h"
#include "harness/testing/toys.h"

namespace tfb {
namespace {

class Forecast : public ::testing::Test {
 protected:
  Forecast() { AddToys(registry_); }

  Job Make(const std::string& technique, int64_t tokens, Case::Purpose purpose,
           const Options& options = {}) const {
    Job job;
    job.technique = registry_.Find(technique).value();
    job.options = job.technique->Canonical(options).value();
    job.problem.query_tokens = job.problem.kv_tokens = tokens;
    job.purpose = purpose;
    return job;
  }
  Job Scaling(int64_t tokens) const { return Make("toy_mean", tokens, Case::PURPOSE_SCALING); }
  Job Accuracy(int64_t tokens) const { return Make("toy_mean", tokens, Case::PURPOSE_ACCURACY); }

  // Returns why a case is not checked in a visit that allows its check so many seconds.
  std::string Why(const Job& job, double check_seconds = 0, double case_timeout = 0,
                  bool check = true) const {
    Visit::Item wishes;
    wishes.set_check(check);
    wishes.set_check_seconds(check_seconds);
    return forecast_.WhyNotChecked(job, wishes, case_timeout);
  }

  Registry registry_;
  CheckForecast forecast_;
};

TEST_F(Forecast, WhatNothingIsKnownOfIsCheckedUnlessItShallNotBe) {
  EXPECT_EQ(Why(Scaling(1 << 20), 0.001, 0.001), "");
  EXPECT_EQ(Why(Scaling(1), 0, 0, /*check=*/false), "that took longer than --case_timeout");
  Job unchecked = Scaling(1);
  unchecked.check = false;
  EXPECT_EQ(Why(unchecked), "--accuracy=false leaves out those of more than 512 tokens of text");
  Job step = Accuracy(1);
  step.pass = Case::PASS_TRAINING;
  EXPECT_EQ(Why(step), "a training step's are those of its forward and its backward pass");
}

TEST_F(Forecast, ChecksOfGradientsTellNothingOfOthers) {
  Job backward = Accuracy(100);
  backward.pass = Case::PASS_BACKWARD;
  forecast_.Note(backward, 1000);
  EXPECT_EQ(Why(Accuracy(100), 2), "");
  EXPECT_EQ(Why(backward, 2), "that would take about 1e+03 s");
}

TEST_F(Forecast, TheFirstGradientsAreForetoldFromOutputs) {
  Job backward = Accuracy(200);
  backward.pass = Case::PASS_BACKWARD;
  EXPECT_EQ(Why(backward, 0.1), "");
  forecast_.Note(Accuracy(100), 0.5);
  EXPECT_EQ(Why(backward, 31), "that would take about 32 s");
  EXPECT_EQ(Why(backward, 33), "");
  forecast_.Note(backward, 1);
  EXPECT_EQ(Why(backward, 2), "");
}

TEST_F(Forecast, ACheckGrowsAtMostAsTheSquareOfTheTokensAndAtLeastAsThey) {
  forecast_.Note(Scaling(100), 2);
  EXPECT_EQ(Why(Scaling(100), 2), "");
  EXPECT_EQ(Why(Scaling(100), 1.99), "that would take about 2 s");
  EXPECT_EQ(Why(Scaling(200), 8), "");
  EXPECT_EQ(Why(Scaling(200), 7.99), "that would take about 8 s");
  EXPECT_EQ(Why(Scaling(50), 1), "");
  EXPECT_EQ(Why(Scaling(50), 0.99), "that would take about 1 s");
  // The last check counts.
  forecast_.Note(Scaling(200), 2);
  EXPECT_EQ(Why(Scaling(100), 0.99), "that would take about 1 s");
  forecast_.Note(Scaling(0), 2);  // counts as one token
  EXPECT_EQ(Why(Scaling(3), 17), "that would take about 18 s");
}

TEST_F(Forecast, TheKeysOfASingleQueryAreTokensToo) {
  Job one = Scaling(100), longer = Scaling(200);
  one.problem.query_tokens = longer.problem.query_tokens = 1;
  forecast_.Note(one, 2);
  EXPECT_EQ(Why(longer, 7), "that would take about 8 s");
}

TEST_F(Forecast, TheLimitIsTheVisitsOrFiveSecondsOfAScalingCaseOrHalfOfTheTimeout) {
  forecast_.Note(Scaling(10), 5);
  forecast_.Note(Accuracy(10), 5);
  EXPECT_EQ(Why(Scaling(10)), "");
  EXPECT_EQ(Why(Scaling(11)), "that would take about 6.1 s");
  EXPECT_EQ(Why(Scaling(11), 7), "");
  EXPECT_EQ(Why(Accuracy(1000)), "");
  EXPECT_EQ(Why(Accuracy(10), 0, 10), "");
  EXPECT_EQ(Why(Accuracy(10), 0, 9.9), "that would take about 5 s");
  EXPECT_EQ(Why(Scaling(10), 100, 9.9), "that would take about 5 s");
}

TEST_F(Forecast, AScalingCaseIsForetoldFromAnAccuracyCaseWhereItIsTheFirst) {
  forecast_.Note(Accuracy(10), 3);
  EXPECT_EQ(Why(Scaling(10), 1), "that would take about 3 s");
  forecast_.Note(Scaling(10), 0.5);
  EXPECT_EQ(Why(Scaling(10), 1), "");
  EXPECT_EQ(Why(Accuracy(10), 1), "that would take about 3 s");
  // Neither from a scaling case, nor from another technique or other options.
  CheckForecast other;
  other.Note(Scaling(10), 3);
  Visit::Item wishes;
  wishes.set_check(true);
  wishes.set_check_seconds(1);
  for (const Job& job : {Accuracy(10), Make("toy_slow", 10, Case::PURPOSE_SCALING),
                         Make("toy_mean", 10, Case::PURPOSE_SCALING, {{"rounds", "2"}})}) {
    EXPECT_EQ(other.WhyNotChecked(job, wishes, 0), "") << job.ToString();
  }
}

TEST_F(Forecast, AnAddedCounterpartIsForetoldFromOneWithOtherOptions) {
  Job added = Make("toy_mean", 10, Case::PURPOSE_SCALING, {{"rounds", "10"}});
  added.added = true;
  forecast_.Note(added, 3);
  Job longer = Make("toy_mean", 20, Case::PURPOSE_SCALING, {{"rounds", "20"}});
  EXPECT_EQ(Why(longer, 1), "") << "the options were chosen";
  longer.added = true;
  EXPECT_EQ(Why(longer, 1), "that would take about 12 s");
  EXPECT_EQ(Why(Scaling(10), 1), "");
  longer.technique = registry_.Find("toy_full").value();
  EXPECT_EQ(Why(longer, 1), "");
}

TEST_F(Forecast, OfATextEveryCheckTakesAllRows) {
  Job scaling = Scaling(10), accuracy = Accuracy(10);
  scaling.input = accuracy.input = ParseInputSources("text").value().at(0);
  forecast_.Note(scaling, 3);
  EXPECT_EQ(Why(accuracy, 1), "that would take about 3 s");
  EXPECT_EQ(Why(Accuracy(10), 1), "") << "its input is no text";
}

}  // namespace
}  // namespace tfb
