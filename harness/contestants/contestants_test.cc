#include "harness/contestants/contestants.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/contestants/contestant.h"
#include "harness/contestants/shared_library.h"
#include "harness/plan/cases.h"
#include "results/reader.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr char kToy[] = "harness/contestants/libtoy.so", kOurs[] = "harness/c/libtfb.so";
constexpr char kPython[] = "harness/contestants/toy_contestants.py";

// A technique that is only a name.
std::unique_ptr<Technique> MakeNamed(const std::string& name) {
  class Named : public TechniqueOf<NoOptions> {
   public:
    explicit Named(TechniqueInfo info) : TechniqueOf(std::move(info)) {}

   protected:
    absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem&, const NoOptions&, Device,
                                                     uint64_t) const override {
      return absl::UnimplementedError("a name has no layer");
    }
    absl::Status Definition(const Problem&, const NoOptions&, const NamedTensors&, const Inputs&,
                            const DefinitionRequest&, NamedTensors*) const override {
      return absl::UnimplementedError("a name has no definition");
    }
  };
  TechniqueInfo info;
  info.name = name;
  return std::make_unique<Named>(info);
}

TEST(Contestants, AListThatIsNotAsTheHeaderSaysAddsNothing) {
  const struct {
    const char* json;
    const char* message;
  } kLists[] = {
      {"{", "its list of techniques is no JSON array"},
      {"{}", "its list of techniques is no JSON array"},
      {"[1]", "an element is no object"},
      {"[{}]", "an element has no name"},
      {R"([{"name": "a b"}])", "\"a b\" is no name: it may have letters, digits and _"},
      {R"([{"name": "x"}])", "x: definition: "},
      {R"([{"name": "x", "definition": "dens"}])",
       "x: definition: there is no technique \"dens\"; nearest are "},
      {R"([{"name": "x", "definition": "dense", "options": [3]}])",
       "x: an option is neither an object nor a name"},
      {R"([{"name": "x", "definition": "dense", "options": ["scal"]}])",
       "x: its definition has no option \"scal\""},
      {R"([{"name": "x", "definition": "dense:scale=-"}])", "x: definition: "},
      {R"([{"name": "x", "definition": "dense", "outputs": [1]}])", "x: an output is no name"},

      {R"([{"name": "x", "definition": "dense"}, {"name": "x", "definition": "dense"}])",
       "x@y is listed twice"},
  };
  const auto file = std::make_shared<SharedLibrary>("/a/liby.so");
  for (const auto& list : kLists) {
    const absl::Status status = AddContestants(file, list.json, &Registry::Global());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << list.json;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("/a/liby.so: ", list.message)));
    EXPECT_FALSE(Registry::Global().Find("x@y").ok());
  }
}

TEST(Contestants, AnOptionThatIsANameIsTheDefinitionsWithTheStatedValue) {
  Registry& registry = Registry::Global();
  const auto file = std::make_shared<SharedLibrary>("options.so");
  ASSERT_EQ(AddContestants(file, R"([{"name": "w", "definition": "longformer:window=16,dilation=2",
                                      "options": ["window"], "exact": false}])",
                           &registry),
            absl::OkStatus());
  const Technique& technique = **registry.Find("w@options");
  ASSERT_EQ(technique.info().options.size(), 1u);
  EXPECT_EQ(*technique.Canonical({}), (Options{{"window", "16"}}));
  EXPECT_EQ(technique.info().exactness, Exactness::kApproximate);
  const ContestantTechnique* contestant = AsContestant(technique);
  ASSERT_NE(contestant, nullptr);
  EXPECT_EQ(contestant->contestant().definition, "longformer:window=16,dilation=2");
  EXPECT_FALSE(contestant->contestant().exact);
  const auto definition = contestant->DefinitionOf({{"window", "8"}});
  ASSERT_TRUE(definition.ok()) << definition.status();
  EXPECT_EQ(definition->technique, "longformer");
  EXPECT_EQ(definition->options.at("window"), "8");
  EXPECT_EQ(definition->options.at("dilation"), "2");
  EXPECT_EQ(definition->options.size(), (*registry.Find("longformer"))->info().options.size());
  EXPECT_EQ(AsContestant(**registry.Find("dense")), nullptr);
}

TEST(Contestants, WriteWhatTheySayOfTheDefinitionsOutputs) {
  Registry& registry = Registry::Global();
  ASSERT_EQ(AddContestants(std::make_shared<SharedLibrary>("outputs.so"),
                           R"([{"name": "plain", "definition": "dense"},
                               {"name": "more", "definition": "dense", "outputs": ["log_sum_exp"]},
                               {"name": "none", "definition": "dense", "outputs": ["buckets"]}])",
                           &registry),
            absl::OkStatus());
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  const auto names = [&](const std::string& name) {
    std::vector<std::string> found;
    const Technique& technique = **registry.Find(name + "@outputs");
    const auto specs = technique.OutputSpecs(problem, {});
    EXPECT_TRUE(specs.ok()) << specs.status();
    for (const TensorSpec& spec : *specs) {
      EXPECT_FALSE(spec.optional) << spec.name;
      found.push_back(spec.name);
    }
    return found;
  };
  EXPECT_EQ(names("plain"), std::vector<std::string>{"out"});
  EXPECT_EQ(names("more"), (std::vector<std::string>{"out", "log_sum_exp"}));
  EXPECT_EQ((*registry.Find("none@outputs"))->OutputSpecs(problem, {}).status(),
            absl::InvalidArgumentError("its definition has no output \"buckets\""));
}

TEST(Contestants, ASweepHasTheTechniqueOfOursThatComputesTheSameBesideEach) {
  Registry& registry = Registry::Global();
  const auto file = std::make_shared<SharedLibrary>("beside.so");
  ASSERT_EQ(AddContestants(file, R"([{"name": "w", "definition": "longformer:dilation=2",
                                      "options": ["window"]}])",
                           &registry),
            absl::OkStatus());
  CaseFlags flags;
  flags.techniques = "w@beside:window=16";
  flags.devices = "cpu";
  flags.inputs = "gaussian";
  flags.lengths = "64";
  flags.threads = "1";
  const auto cases = MakeCases(flags, registry, ".");
  ASSERT_TRUE(cases.ok()) << cases.status();
  std::vector<std::string> names;
  for (const Job& job : *cases) names.push_back(job.DisplayName());
  EXPECT_THAT(names, UnorderedElementsAre("w@beside window=16", "longformer dilation=2 window=16",
                                          "dense"));
  flags.counterparts = false;
  EXPECT_EQ(MakeCases(flags, registry, ".")->size(), 2u);
  flags.ours = false;
  EXPECT_EQ(MakeCases(flags, registry, ".")->size(), 1u);
  const Case record = MakeRecord(cases->front());
  const TechniqueDescription::Contestant& said = record.technique().contestant();
  EXPECT_EQ(said.definition(), "longformer:dilation=2");
  EXPECT_EQ(said.definition_technique(), "longformer");
  for (const Job& job : *cases) {
    const bool same = CanonicalOptions(MakeRecord(job).key()) == said.definition_options_text();
    EXPECT_EQ(same, job.technique->info().name == "longformer");
    EXPECT_EQ(job.added, job.technique->info().name == "dense");
  }
}

TEST(Contestants, OfAFlagAreAddedAndThoseThatCannotBeUsedHaveARowWithTheReason) {
  PythonSettings python;
  python.interpreter = "/usr/bin/python3";
  const auto add = [&](const std::string& files, Registry* registry, std::string* techniques) {
    return AddContestantFiles(files, python, registry, techniques);
  };
  Registry registry;
  for (const char* name : {"dense", "longformer", "multi_head"}) registry.Add(MakeNamed(name));
  std::string techniques = "dense";
  setenv("TOY_LOAD", "list", 1);
  ASSERT_EQ(
      add(absl::StrCat(kToy, ",no-where.so,no-where.py,", kPython, ":wrong,", kPython, ":dense"),
          &registry, &techniques),
      absl::OkStatus());
  unsetenv("TOY_LOAD");
  EXPECT_EQ(techniques, "dense,*@toy,*@no_where,*@no_where,*@toy_contestants");
  EXPECT_TRUE(registry.Find("wrong@toy_contestants").ok());
  EXPECT_TRUE(registry.Find("dense@toy_contestants").ok());
  EXPECT_FALSE(registry.Find("raises@toy_contestants").ok());  // not named
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  EXPECT_THAT(
      std::string(
          (*registry.Find("unknown@toy"))->Create(problem, {}, Device::kCpu, 1).status().message()),
      HasSubstr("libtoy.so lists no techniques"));
  EXPECT_THAT(std::string((*registry.Find("unknown@no_where"))
                              ->Create(problem, {}, Device::kCpu, 1)
                              .status()
                              .message()),
              HasSubstr("no-where.so: there is no such file"));
  EXPECT_THAT(std::string((*registry.Find("unknown2@no_where"))
                              ->Create(problem, {}, Device::kCpu, 1)
                              .status()
                              .message()),
              HasSubstr("no-where.py: there is no such file"));
  techniques = "dense@toy";
  ASSERT_EQ(add(kOurs, &registry, &techniques).code(), absl::StatusCode::kOk);
  EXPECT_EQ(techniques, "dense@toy");  // named already
  EXPECT_EQ(add("mine.txt", &registry, &techniques),
            absl::InvalidArgumentError("mine.txt is neither a shared library (FILE.so) nor Python "
                                       "(FILE.py, FILE.py:FUNCTION), nor a folder of these"));
}

TEST(Contestants, OfAFolderAreThoseOfItsFilesButForTests) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "folder";
  std::filesystem::create_directories(folder / "below.py");
  std::filesystem::create_directories(folder / "empty");
  std::filesystem::copy_file(kToy, folder / "libtoy.so");
  for (const char* name : {"b.py", "a.py", "a_test.py", "notes.txt"}) {
    std::ofstream(folder / name) << "from tfb.contestant import definition\n"
                                    "@definition('dense')\n"
                                    "def mine(q, k, v):\n"
                                    "  pass\n";
  }
  PythonSettings python;
  python.interpreter = "/usr/bin/python3";
  Registry registry;
  registry.Add(MakeNamed("dense"));
  std::string techniques = "dense";
  ASSERT_EQ(AddContestantFiles(folder.string(), python, &registry, &techniques), absl::OkStatus());
  EXPECT_EQ(techniques, "dense,*@a,*@b,*@toy");
  for (const char* name : {"mine@a", "mine@b", "unknown@toy"}) {
    EXPECT_TRUE(registry.Find(name).ok()) << name;
  }
  const std::string empty = (folder / "empty").string();
  EXPECT_EQ(AddContestantFiles(empty, python, &registry, &techniques),
            absl::NotFoundError(empty + " has no FILE.py and no FILE.so"));
}

}  // namespace
}  // namespace tfb
