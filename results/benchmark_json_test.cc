// The fields that Google Benchmark's tools/compare.py reads (gbench/report.py, gbench/util.py of
// google/benchmark at 267a1115, 2026-08-18).

#include "results/benchmark_json.h"

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/analysis.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using Json = nlohmann::json;
using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;
using ::tfb::synthetic::MakeUnmeasured;

Json Parse(const ResultSet& results) { return Json::parse(RenderBenchmarkJson(Analysis(results))); }

TEST(BenchmarkJson, HasWhatCompareReads) {
  const Json document = Parse(MakeSweep());
  EXPECT_EQ(document["context"]["json_schema_version"], 1);
  for (const char* field : {"date", "host_name", "executable", "num_cpus", "mhz_per_cpu",
                            "cpu_scaling_enabled", "caches", "load_avg", "library_build_type"}) {
    EXPECT_TRUE(document["context"].contains(field)) << field;
  }
  ASSERT_FALSE(document["benchmarks"].empty());
  for (const Json& entry : document["benchmarks"]) {
    for (const char* field : {"name", "run_name", "run_type", "time_unit"}) {
      EXPECT_TRUE(entry[field].is_string()) << entry;
    }
    for (const char* field : {"real_time", "cpu_time", "iterations", "family_index",
                              "per_family_instance_index", "repetitions", "threads"}) {
      EXPECT_TRUE(entry[field].is_number()) << field << " in " << entry;
    }
    if (entry["run_type"] == "aggregate") {
      EXPECT_EQ(entry["name"].get<std::string>(), entry["run_name"].get<std::string>() + "_" +
                                                      entry["aggregate_name"].get<std::string>());
    } else {
      EXPECT_EQ(entry["run_type"], "iteration");
      EXPECT_EQ(entry["name"], entry["run_name"]);
    }
  }
}

TEST(BenchmarkJson, EverySampleIsARepetitionForTheUTest) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec spec;
  spec.median_ns = 1e6;
  *results.add_cases() = MakeCase(spec);
  const Json entries = Parse(results)["benchmarks"];
  std::vector<double> samples;
  std::map<std::string, double> aggregates;
  for (const Json& entry : entries) {
    if (entry["run_type"] == "aggregate") {
      aggregates[entry["aggregate_name"]] = entry["real_time"];
      continue;
    }
    EXPECT_EQ(entry["repetition_index"], samples.size());
    EXPECT_EQ(entry["repetitions"], 11);
    samples.push_back(entry["real_time"]);
  }
  const auto& run_ns = results.cases(0).outcome().timing().run_ns();
  EXPECT_EQ(samples, std::vector<double>(run_ns.begin(), run_ns.end()));
  EXPECT_NEAR(aggregates["mean"], 1e6, 1e-3);
  EXPECT_DOUBLE_EQ(aggregates["median"], 1e6);
  // 11 samples evenly from -1 % to 1 %: a variance of 110 (0.2 %)^2 / 10.
  EXPECT_NEAR(aggregates["stddev"], 1e6 * 0.002 * 3.3166248, 1);
  EXPECT_NEAR(aggregates["cv"], 0.0066332, 1e-6);
}

TEST(BenchmarkJson, TwoSamplesHaveADeviationAndOneHasNone) {
  const auto deviations = [](const std::vector<double>& samples) {
    ResultSet results;
    *results.add_environments() = MakeEnvironment();
    Case& one = *results.add_cases() = MakeCase(CaseSpec());
    one.mutable_outcome()->mutable_timing()->mutable_run_ns()->Assign(samples.begin(),
                                                                      samples.end());
    const Json entries = Parse(results)["benchmarks"];
    std::vector<double> found;
    for (const Json& entry : entries) {
      if (entry.value("aggregate_name", "") == "stddev") found.push_back(entry["real_time"]);
    }
    return found;
  };
  EXPECT_EQ(deviations({8e5}), std::vector<double>());
  ASSERT_EQ(deviations({8e5, 1.2e6}).size(), 1u);
  EXPECT_NEAR(deviations({8e5, 1.2e6})[0], 4e5 / std::sqrt(2.0), 1e-6);
}

TEST(BenchmarkJson, NamesAreUniqueAndTheSameInTwoFiles) {
  ResultSet twice = MakeSweep();
  ResultSet other = MakeSweep();
  other.mutable_environments(0)->set_id("other");
  other.mutable_environments(0)->set_host("bench-2");
  for (Case& result : *other.mutable_cases()) result.set_environment_id("other");
  const auto names = [](const ResultSet& results) {
    std::vector<std::string> names;
    const Json document = Parse(results);
    for (const Json& entry : document["benchmarks"]) {
      if (entry.value("repetition_index", -1) == 0) names.push_back(entry["name"]);
    }
    return names;
  };
  EXPECT_EQ(names(MakeSweep()), names(other));
  EXPECT_EQ(names(MakeSweep())[0], "plain/cpu/f32/1x8x256x64/causal/gaussian/seed:1/threads:2");
  EXPECT_EQ(names(MakeSweep())[1],
            "near:window=256/cpu/f32/1x8x256x64/causal/gaussian/seed:1/threads:2");
  twice.MergeFrom(other);
  const std::vector<std::string> both = names(twice);
  EXPECT_EQ(both.size(), 2 * names(other).size());
  EXPECT_EQ(std::set<std::string>(both.begin(), both.end()).size(), both.size());
}

// compare.py ends with a KeyError on entries without times.
TEST(BenchmarkJson, LeavesOutCasesWithoutTimesAndCountsThem) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  *results.add_cases() = MakeCase(CaseSpec());
  CaseSpec spec;
  spec.technique = "shy";
  *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "no CUDA device");
  const Json document = Parse(results);
  EXPECT_EQ(document["context"]["cases_without_time"], 1);
  for (const Json& entry : document["benchmarks"]) EXPECT_TRUE(entry.contains("real_time"));
  EXPECT_EQ(Parse(ResultSet())["benchmarks"], Json::array());
}

}  // namespace
}  // namespace tfb
