#include "harness/contestants/shared_library.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/judge/evaluate.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

constexpr char kToy[] = "harness/contestants/libtoy.so", kOurs[] = "harness/c/libtfb.so";

// A registry that has the definitions too, as the global one has.
const Technique& Contestant(absl::string_view name) {
  static const bool added = [] {
    for (const char* path : {kToy, kOurs}) {
      const auto file = std::make_shared<SharedLibrary>(path);
      const auto list = file->List();
      EXPECT_TRUE(list.ok()) << list.status();
      const absl::Status status = AddContestants(file, *list, &Registry::Global());
      EXPECT_TRUE(status.ok()) << status;
    }
    return true;
  }();
  EXPECT_TRUE(added);
  return **Registry::Global().Find(name);
}

absl::StatusOr<Accuracy> Judged(const Technique& technique, const Problem& problem,
                                const Options& options = {}) {
  const auto specs = technique.InputSpecs(problem, options);
  EXPECT_TRUE(specs.ok()) << specs.status();
  std::vector<TensorSpec> needed;
  for (const TensorSpec& spec : *specs) {
    if (!spec.optional) needed.push_back(spec);
  }
  const NamedTensors inputs = RandomInputs(needed, 3);
  ThreadPool pool(2);
  EvaluateRequest request;
  request.job.technique = &technique;
  request.job.options = *technique.Canonical(options);
  request.job.problem = problem;
  request.inputs = &inputs;
  request.pool = &pool;
  return Evaluate(request);
}

TEST(SharedLibrary, OfPlainCIsJudgedByTheDefinitionThatItNames) {
  const Problem problem = Problem::SelfAttention(2, 2, 50, 16, true);
  const auto right = Judged(Contestant("dense@toy"), problem);
  ASSERT_TRUE(right.ok()) << right.status();
  EXPECT_TRUE(right->passed) << right->failure;
  EXPECT_EQ(right->counterpart, "dense");
  const auto wrong = Judged(Contestant("wrong@toy"), problem);
  ASSERT_TRUE(wrong.ok()) << wrong.status();
  EXPECT_FALSE(wrong->passed);
  EXPECT_THAT(wrong->failure, HasSubstr("bound"));
  const auto kept = Judged(Contestant("keeps_its_result@toy"), problem);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_FALSE(kept->passed);
  // Options of the definition are those that the library states.
  const auto half = Judged(Contestant("half@toy"), Problem::SelfAttention(1, 2, 50, 16));
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_TRUE(half->passed) << half->failure;
}

TEST(SharedLibrary, SaysWhatItsResultsDependOn) {
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  const auto about = [&](const std::string& name) {
    const auto layer = Contestant(name).Create(problem, {}, Device::kCpu, 1);
    return dynamic_cast<ContestantLayer&>(**layer).about();
  };
  EXPECT_EQ(about("dense@toy"),
            (std::map<std::string, std::string>{{"toy", "1.0"}, {"loops", "3"}}));
  EXPECT_TRUE(about("dense@tfb").empty());
}

TEST(SharedLibrary, WhatWritesIntoItsInputsSpoilsNoOthers) {
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  const Technique& technique = Contestant("writes_inputs@toy");
  const NamedTensors inputs = RandomInputs(*technique.InputSpecs(problem, {}), 3);
  const NamedTensors before = RandomInputs(*technique.InputSpecs(problem, {}), 3);
  const auto layer = technique.Create(problem, {}, Device::kCpu, 1);
  ASSERT_TRUE(layer.ok()) << layer.status();
  ThreadPool pool(1);
  EXPECT_FALSE(RunOnce(layer->get(), Device::kCpu, ViewsOf(inputs), &pool).ok());
  for (const auto& [name, tensor] : before) {
    EXPECT_EQ(std::memcmp(tensor.raw(), inputs.at(name).raw(), tensor.bytes()), 0) << name;
  }
}

TEST(SharedLibrary, OfOursGivesTheSameBitsForEveryTechnique) {
  for (const Technique* technique : Registry::Global().All()) {
    const TechniqueInfo& info = technique->info();
    if (info.name.find('@') != std::string::npos) continue;
    const Technique& theirs = Contestant(info.name + "@tfb");
    const Problem problem = Problem::SelfAttention(1, 2, 96, 16, info.supports_causal);
    const auto a = Judged(*technique, problem), b = Judged(theirs, problem);
    ASSERT_TRUE(a.ok() && b.ok()) << info.name << ": " << a.status() << ", " << b.status();
    EXPECT_TRUE(b->passed) << info.name << ": " << b->failure;
    const Tensor &x = a->outputs.at("out"), &y = b->outputs.at("out");
    ASSERT_EQ(x.bytes(), y.bytes()) << info.name;
    EXPECT_EQ(std::memcmp(x.raw(), y.raw(), x.bytes()), 0) << info.name;
    EXPECT_EQ(theirs.info().options.size(), info.options.size());
    EXPECT_EQ(a->workspace_bytes, b->workspace_bytes) << info.name;
  }
}

TEST(SharedLibrary, OptionsReachTheLibraryAndTheDefinition) {
  const Problem problem = Problem::SelfAttention(1, 2, 96, 16, true);
  const auto narrow = Judged(Contestant("longformer@tfb"), problem, {{"window", "8"}});
  ASSERT_TRUE(narrow.ok()) << narrow.status();
  EXPECT_TRUE(narrow->passed) << narrow->failure;
  EXPECT_GT(narrow->against_dense->relative_frobenius, 0.1);
  EXPECT_EQ(
      Contestant("longformer@tfb").Canonical({{"windw", "8"}}).status().message(),
      "unknown option \"windw\"; known are window, one_sided, dilation, globals, max_globals, "
      "projections");
  const auto layer =
      Contestant("longformer@tfb").Create(problem, {{"window", "-1"}}, Device::kCpu, 1);
  EXPECT_THAT(std::string(layer.status().message()), HasSubstr("window"));
}

TEST(SharedLibrary, WhatALayerCannotDoIsItsStatus) {
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  EXPECT_EQ(Judged(Contestant("refuses@toy"), problem).status(),
            absl::UnimplementedError("not today"));
  EXPECT_EQ(Judged(Contestant("fails@toy"), problem).status(),
            absl::InternalError("the kernel fell over"));
  EXPECT_EQ(Judged(Contestant("reads_more@toy"), problem).status(),
            absl::UnimplementedError("it reads bias, which its definition does not have"));
  EXPECT_EQ(Judged(Contestant("writes_inputs@toy"), problem).status(),
            absl::InternalError("the layer wrote into its inputs"));
  Problem causal = problem;
  causal.causal = true;
  EXPECT_EQ(Contestant("half@toy").Create(causal, {}, Device::kCpu, 1).status().code(),
            absl::StatusCode::kUnimplemented);
  // A mask that is not read is not ignored.
  const Technique& dense = Contestant("dense@toy");
  NamedTensors inputs = RandomInputs(*dense.InputSpecs(problem, {}), 3);
  inputs["key_mask"] = Tensor(DType::kU8, {1, 50});
  Fill(inputs["key_mask"].view(), 1);
  EXPECT_EQ(RunTechnique(dense, problem, ViewsOf(inputs), {}).status(),
            absl::UnimplementedError("it does not read key_mask"));
}

TEST(SharedLibrary, ThatCannotBeLoadedIsAnErrorOfItsName) {
  const auto ask = [](const char* how, double seconds = 60) {
    setenv("TOY_LOAD", how, 1);
    const absl::Status status = SharedLibrary(kToy, seconds).List().status();
    unsetenv("TOY_LOAD");
    return status;
  };
  EXPECT_EQ(ask("crash"), absl::InvalidArgumentError(
                              absl::StrCat(kToy, ": loading it ended with signal 6 (Aborted)")));
  EXPECT_EQ(ask("version"), absl::InvalidArgumentError(absl::StrCat(
                                kToy, " has version 2 of the interface; this program has 1")));
  EXPECT_EQ(ask("list"), absl::InvalidArgumentError(absl::StrCat(kToy, " lists no techniques")));
  EXPECT_EQ(ask("hang", 1),
            absl::DeadlineExceededError(absl::StrCat(kToy, ": loading it took more than 1 s")));
  EXPECT_EQ(SharedLibrary("nowhere.so").List().status(),
            absl::NotFoundError("nowhere.so: there is no such file"));
  EXPECT_EQ(SharedLibrary("/etc/hostname").List().status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tfb
