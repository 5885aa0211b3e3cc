#include "harness/plan/cases.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/random.h"
#include "core/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/measure/machine.h"
#include "harness/testing/toys.h"
#include "results/reader.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class CasesTest : public ::testing::Test {
 protected:
  CasesTest() { AddToys(registry_); }

  std::vector<Job> Cases(const CaseFlags& flags) {
    absl::StatusOr<std::vector<Job>> cases = MakeCases(flags, registry_, ::testing::TempDir());
    EXPECT_TRUE(cases.ok()) << cases.status();
    return cases.ok() ? *std::move(cases) : std::vector<Job>();
  }
  std::string Error(const CaseFlags& flags) {
    const auto cases = MakeCases(flags, registry_, ::testing::TempDir());
    EXPECT_FALSE(cases.ok());
    const std::string message(cases.status().message());
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  static CaseFlags Drawn(const std::string& techniques) {
    CaseFlags flags;
    flags.techniques = techniques;
    flags.inputs = "gaussian";
    flags.lengths = "16";
    return flags;
  }
  static std::vector<std::string> Names(const std::vector<Job>& cases) {
    std::vector<std::string> names;
    for (const Job& c : cases) names.push_back(c.DisplayName());
    return names;
  }
  static std::vector<int64_t> Lengths(const std::vector<Job>& cases) {
    std::vector<int64_t> lengths;
    for (const Job& c : cases) lengths.push_back(c.problem.query_tokens);
    return lengths;
  }

  Registry registry_;
};

TEST_F(CasesTest, RangesDoubleAndListsKeepTheirOrder) {
  EXPECT_THAT(*ParseSizes("lengths", "256:4096", 1, 1 << 20),
              ElementsAre(256, 512, 1024, 2048, 4096));
  EXPECT_THAT(*ParseSizes("lengths", "100,7:30,7", 1, 1 << 20), ElementsAre(100, 7, 14, 28));
  EXPECT_THAT(*ParseSizes("lengths", "5:5", 1, 1 << 20), ElementsAre(5));
}

TEST_F(CasesTest, RangesEndAtTheLastDoubleAndHaveBothLimits) {
  EXPECT_THAT(*ParseSizes("lengths", "3:12", 3, 12), ElementsAre(3, 6, 12));
  EXPECT_THAT(*ParseSizes("lengths", "3:11", 3, 12), ElementsAre(3, 6));
  EXPECT_THAT(*ParseSizes("lengths", " 4 , 3:12,6 ", 3, 12), ElementsAre(4, 3, 6, 12));
  EXPECT_EQ(ParseSizes("lengths", "2:12", 3, 12).status().message(),
            "--lengths: 2; allowed are 3 to 12");
  EXPECT_EQ(ParseSizes("lengths", "3:13", 3, 12).status().message(),
            "--lengths: 13; allowed are 3 to 12");
}

TEST_F(CasesTest, BadRangesNameTheFlagAndTheValue) {
  const auto error = [](absl::string_view text) {
    return std::string(ParseSizes("lengths", text, 1, 4096).status().message());
  };
  EXPECT_EQ(error("0"), "--lengths: 0; allowed are 1 to 4096");
  EXPECT_EQ(error("256:8192"), "--lengths: 8192; allowed are 1 to 4096");
  EXPECT_EQ(error("512:256"), "--lengths: the range 512:256 is empty");
  EXPECT_EQ(error("1:2:3"), "--lengths: \"1:2:3\" is neither a number nor a range like 256:4096");
  EXPECT_EQ(error("many"), "--lengths: \"many\" is neither a number nor a range like 256:4096");
  EXPECT_EQ(error("256,"), "--lengths: empty item in \"256,\"");
  EXPECT_EQ(error("99999999999999999999"),
            "--lengths: \"99999999999999999999\" is neither a number nor a range like 256:4096");
}

TEST_F(CasesTest, EveryCombinationOfTheAxesIsACase) {
  CaseFlags flags = Drawn("toy_mean,toy_full:rounds=2");
  flags.lengths = "16:64";
  flags.heads = "2,4";
  flags.head_dims = "8,16";
  flags.batches = "1,3";
  flags.dtypes = "f32,bf16";
  flags.causal = "true,false";
  flags.threads = "1,2";
  flags.inputs = "gaussian,peaked";
  flags.counterparts = false;
  EXPECT_EQ(Cases(flags).size(), 2u * 3 * 2 * 2 * 2 * 2 * 2 * 2 * 2);
}

TEST_F(CasesTest, EachPassIsACaseInAGroupOfItsOwn) {
  AddDenseToy(registry_);
  CaseFlags flags = Drawn("toy_mean");
  flags.passes = "training,forward,backward";
  flags.lengths = "64,16";
  std::vector<std::string> texts;
  std::set<std::string> groups, keys;
  for (const Job& job : Cases(flags)) {
    texts.push_back(absl::StrCat(job.DisplayName(), " ", job.problem.query_tokens, " ",
                                 Name(MakeRecord(job).key().pass())));
    groups.insert(GroupKey(job));
    keys.insert(CaseKey(MakeRecord(job)));
    EXPECT_EQ(absl::EndsWith(job.ToString(), absl::StrCat("gaussian, ", Name(job.pass))),
              job.pass != Case::PASS_FORWARD)
        << job.ToString();
  }
  EXPECT_THAT(texts, ElementsAre("toy_mean 16 training", "dense 16 training", "toy_mean 16 forward",
                                 "dense 16 forward", "toy_mean 16 backward", "dense 16 backward",
                                 "toy_mean 64 training", "dense 64 training", "toy_mean 64 forward",
                                 "dense 64 forward", "toy_mean 64 backward", "dense 64 backward"));
  EXPECT_EQ(groups.size(), 6u);
  EXPECT_EQ(keys.size(), 12u);
}

TEST_F(CasesTest, APassThatIsNoneIsRefused) {
  CaseFlags flags = Drawn("toy_mean");
  flags.passes = "forward,back";
  EXPECT_EQ(Error(flags), "--pass: \"back\"; allowed are forward, backward, training");
  flags.passes = "unspecified";
  EXPECT_EQ(Error(flags), "--pass: \"unspecified\"; allowed are forward, backward, training");
  flags.passes = "";
  EXPECT_THAT(Error(flags), StartsWith("--pass: "));
}

// Errors are those of the forward pass.
TEST_F(CasesTest, AccuracyCasesBesideOthersAreOfTheForwardPass) {
  const auto passes = [this](const std::string& inputs) {
    NamedTensors tensors;
    for (const char* name : {"q", "k", "v"}) {
      FillNormal(&(tensors[name] = Tensor(DType::kF32, {1, 2, 9, 4})), 1, name);
    }
    EXPECT_TRUE(WriteSafetensors(::testing::TempDir() + "/qkv.safetensors", tensors).ok());
    CaseFlags flags = Drawn(inputs == "text" ? "toy_hidden" : "toy_mean");
    flags.inputs = inputs;
    flags.lengths = "9";
    flags.passes = "backward,training";
    std::vector<std::string> texts;
    for (const Job& job : Cases(flags)) {
      texts.push_back(absl::StrCat(Name(job.purpose), " ", Name(job.pass)));
    }
    return texts;
  };
  EXPECT_THAT(passes("gaussian,qkv.safetensors"),
              ElementsAre("accuracy forward", "scaling backward", "scaling training"));
  EXPECT_THAT(passes("text"),
              ElementsAre("accuracy forward", "scaling backward", "scaling training"));
  EXPECT_THAT(passes("qkv.safetensors"), ElementsAre("accuracy backward", "accuracy training"));
}

TEST_F(CasesTest, CasesOfOneProblemFollowOneAnotherShortOnesFirst) {
  CaseFlags flags = Drawn("toy_mean,toy_wrong");
  flags.lengths = "64,16";
  EXPECT_THAT(Names(Cases(flags)), ElementsAre("toy_mean", "toy_wrong", "toy_mean", "toy_wrong"));
  EXPECT_THAT(Lengths(Cases(flags)), ElementsAre(16, 16, 64, 64));
  const auto cases = Cases(flags);
  EXPECT_EQ(GroupKey(cases[0]), GroupKey(cases[1]));
  EXPECT_NE(GroupKey(cases[0]), GroupKey(cases[2]));
}

TEST_F(CasesTest, GlobsTakeTheTechniquesThatHaveTheOptions) {
  EXPECT_THAT(Names(Cases(Drawn("toy_h*"))),
              ElementsAre("toy_hang", "toy_hidden", "toy_hoarder", "toy_hungry"));
  EXPECT_THAT(Names(Cases(Drawn("toy_h?ngry:mib=3"))), ElementsAre("toy_hungry mib=3"));
}

TEST_F(CasesTest, AStarTakesEverySweepValueOfAnOption) {
  EXPECT_THAT(Names(Cases(Drawn("toy_mean:rounds=*"))),
              ElementsAre("toy_mean", "toy_mean rounds=2", "toy_mean rounds=4"));
  EXPECT_EQ(Cases(Drawn("toy_mean:rounds=*,shade=*")).size(), 6u);
  EXPECT_EQ(Error(Drawn("toy_mean:ms=*")),
            "--techniques: option ms of toy_mean has no values for *; its options that have: "
            "rounds, shade");
}

TEST_F(CasesTest, TheSameCaseIsThereOnce) {
  EXPECT_EQ(Cases(Drawn("toy_mean,toy_mea*,toy_mean:rounds=1")).size(), 1u);
}

TEST_F(CasesTest, ShardsAreDisjointCoverAllAndAreBalanced) {
  CaseFlags flags = Drawn("toy_mean:rounds=*,toy_causal,toy_hidden");
  flags.lengths = "16:4096";
  flags.counterparts = false;
  const std::vector<Job> all = Cases(flags);
  const auto effort = [](const std::vector<Job>& cases) {
    double sum = 0;
    for (const Job& one : cases) sum += RelativeEffort(one);
    return sum;
  };
  double longest = 0;
  for (const Job& one : all) longest = std::max(longest, RelativeEffort(one));
  for (const int count : {1, 2, 3, 7}) {
    std::multiset<std::string> texts;
    double least = effort(all), most = 0;
    for (int part = 1; part <= count; ++part) {
      flags.shard = absl::StrCat(part, "/", count);
      const std::vector<Job> cases = Cases(flags);
      for (const Job& one : cases) texts.insert(one.ToString());
      least = std::min(least, effort(cases));
      most = std::max(most, effort(cases));
    }
    std::multiset<std::string> expected;
    for (const Job& one : all) expected.insert(one.ToString());
    EXPECT_EQ(texts, expected) << count;
    // A part that takes the next case was the smallest, so that two parts differ by one case at
    // most.
    EXPECT_LE(most - least, longest) << count;
    // The longest cases are dealt first, so that with many cases the parts differ by much less.
    if (count <= 3) {
      EXPECT_LE(most - least, 0.1 * most) << count;
    }
  }
}

TEST_F(CasesTest, UnknownTechniqueIsAnsweredWithTheNearestNames) {
  EXPECT_EQ(Error(Drawn("toy_maen")),
            "--techniques: there is no technique \"toy_maen\"; nearest are toy_mean, toy_gate, "
            "toy_hang (sweep --list shows all)");
  EXPECT_EQ(Error(Drawn("big*")),
            "--techniques: no technique matches \"big*\" (sweep --list shows all)");
}

TEST_F(CasesTest, UnknownOptionIsAnsweredWithTheList) {
  EXPECT_EQ(
      Error(Drawn("toy_mean:widow=1")),
      "--techniques: toy_mean: unknown option \"widow\"; known are rounds, shade, ms, mib, from");
  EXPECT_EQ(Error(Drawn("toy_mean:shade=3")),
            "--techniques: toy_mean: option shade is \"3\"; allowed are 0 to 2");
  EXPECT_EQ(Error(Drawn("*:widow=1")),
            "--techniques: no technique that matches \"*\" has the options widow=1 (sweep --list "
            "shows all)");
  EXPECT_THAT(Error(Drawn("")), StartsWith("--techniques: "));
}

TEST_F(CasesTest, BadWordsNameTheirFlag) {
  CaseFlags flags = Drawn("toy_mean");
  flags.devices = "tpu";
  EXPECT_EQ(Error(flags), "--devices: unknown device \"tpu\"; known are cpu, cuda, simulator");
  flags = Drawn("toy_mean");
  flags.dtypes = "f64";
  EXPECT_EQ(Error(flags), "--dtypes: \"f64\"; allowed are f32, bf16, f16");
  flags = Drawn("toy_mean");
  flags.causal = "maybe";
  EXPECT_EQ(Error(flags), "--causal: \"maybe\"; allowed are true, false, auto");
  flags = Drawn("toy_mean");
  flags.inputs = "unreal";
  EXPECT_THAT(Error(flags), StartsWith("--input: input \"unreal\" is unknown; known are "));
  flags = Drawn("toy_mean");
  flags.inputs = "no/such.safetensors";
  EXPECT_THAT(Error(flags), StartsWith("--input: "));
  flags = Drawn("toy_mean");
  flags.head_dims = "512";
  EXPECT_EQ(Error(flags), "--head_dims: 512; allowed are 1 to 256");
  flags = Drawn("toy_mean");
  flags.heads = "12";
  flags.kv_heads = "8";
  EXPECT_EQ(Error(flags), "--kv_heads: query_heads is 12, which kv_heads (8) does not divide");
  flags = Drawn("toy_mean");
  flags.threads = "0";
  EXPECT_THAT(Error(flags), StartsWith("--threads: 0; allowed are 1 to "));
}

TEST_F(CasesTest, ByDefaultATechniqueIsCausalWhereItCanBe) {
  const auto cases = Cases(Drawn("toy_mean,toy_causal,toy_full"));
  ASSERT_EQ(cases.size(), 3u);
  for (const Job& c : cases) {
    EXPECT_EQ(c.problem.causal, c.technique->info().name != "toy_full") << c.ToString();
  }
}

TEST_F(CasesTest, ByDefaultCudaIsForTheTechniquesThatHaveIt) {
  std::set<std::string> on_cpu, on_cuda;
  CaseFlags all = Drawn("*");
  all.cuda_present = true;
  for (const Job& c : Cases(all)) {
    (c.device == Device::kCuda ? on_cuda : on_cpu).insert(c.technique->info().name);
  }
  EXPECT_THAT(on_cuda, ElementsAre("toy_bad_kernel", "toy_bad_launch", "toy_cuda", "toy_device"));
  EXPECT_EQ(on_cpu.count("toy_device"), 1u);
  EXPECT_EQ(on_cpu.count("toy_cuda"), 0u);
  CaseFlags flags = Drawn("toy_mean");
  flags.devices = "cpu,cuda";
  EXPECT_EQ(Cases(flags).size(), 2u);
}

TEST_F(CasesTest, TheSimulatorIsForThoseWhoTakeNoTimes) {
  CaseFlags flags = Drawn("toy_device,toy_mean");
  flags.devices = "simulator";
  EXPECT_EQ(Error(flags),
            "--devices: times in the simulator mean nothing; //harness:check measures its errors");
  flags.simulator = true;
  const auto cases = Cases(flags);
  ASSERT_EQ(cases.size(), 2u);  // one of a technique that has no such implementation: a row
  EXPECT_EQ(MakeRecord(cases[0]).key().device(), DEVICE_TYPE_SIMULATOR);
  EXPECT_EQ(MakeRecord(cases[0]).key().threads(), 0);
}

TEST_F(CasesTest, ThreadsAreNoAxisOfAGpu) {
  CaseFlags flags = Drawn("toy_cuda");
  EXPECT_EQ(
      Error(flags),
      "--techniques: no case is left: nothing that \"toy_cuda\" chooses runs on cpu and reads "
      "the tensors of input \"gaussian\"");
  flags.cuda_present = true;
  flags.threads = "1,2";
  EXPECT_EQ(Cases(flags).size(), 1u);
  EXPECT_EQ(NamesOf(Cases(flags))[0], Cases(flags)[0].ToString());
}

TEST_F(CasesTest, NamesTellThreadsApartWhereTheyDiffer) {
  CaseFlags flags = Drawn("toy_mean");
  flags.lengths = "16";
  flags.threads = "2";
  flags.counterparts = false;
  const std::string alone = NamesOf(Cases(flags)).at(0);
  EXPECT_EQ(alone, Cases(flags).at(0).ToString());
  flags.threads = "1,2";
  EXPECT_EQ(NamesOf(Cases(flags)),
            std::vector<std::string>({alone + ", 1 thread", alone + ", 2 threads"}));
}

TEST_F(CasesTest, RealTensorsMakeAccuracyCasesOfTheirOwnSizes) {
  CaseFlags flags;
  flags.techniques = "toy_mean,toy_hidden";
  const auto cases = Cases(flags);
  int accuracy = 0;
  for (const Job& c : cases) {
    if (c.purpose != Case::PURPOSE_ACCURACY) continue;
    ++accuracy;
    EXPECT_EQ(c.problem.query_tokens, 512);
    EXPECT_EQ(c.problem.query_heads, 12);
    EXPECT_EQ(c.problem.head_dim, 32);
    EXPECT_FALSE(c.problem.causal);
    EXPECT_FALSE(MakeRecord(c).key().input().layer().empty());
  }
  EXPECT_EQ(accuracy, 6);  // three layers
  EXPECT_EQ(cases.size(), 6u + 10);
  EXPECT_EQ(cases[0].purpose, Case::PURPOSE_ACCURACY);
}

TEST_F(CasesTest, LengthsCutFilesAndThoseBeyondAreLeftOut) {
  CaseFlags flags;
  flags.techniques = "toy_mean";
  flags.inputs = "real";
  flags.lengths = "256:4096";
  // Three layers of 512 tokens and one of 4096.
  EXPECT_EQ(Cases(flags).size(), 3u * 2 + 5);
  flags.lengths = "8192";
  EXPECT_EQ(Error(flags),
            "--lengths: no case is left: no input of \"real\" has as many tokens as \"8192\"");
}

TEST_F(CasesTest, AFileWithoutTheTensorsOfATechniqueIsAnObstacleOfThatCase) {
  NamedTensors tensors;
  for (const char* name : {"q", "k", "v"}) {
    FillNormal(&(tensors[name] = Tensor(DType::kF32, {1, 2, 5, 4})), 1, name);
  }
  const std::string path = ::testing::TempDir() + "/only_qkv.safetensors";
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  CaseFlags flags;
  flags.techniques = "toy_mean,toy_hidden";
  flags.inputs = "only_qkv.safetensors";
  const auto cases = Cases(flags);
  ASSERT_EQ(cases.size(), 2u);
  EXPECT_TRUE(cases[0].obstacle.ok());
  EXPECT_EQ(cases[0].problem.query_tokens, 5);
  EXPECT_EQ(MakeRecord(cases[0]).key().input().file(), "only_qkv.safetensors");
  EXPECT_TRUE(absl::IsNotFound(cases[1].obstacle)) << cases[1].obstacle;
}

TEST_F(CasesTest, AGlobChoosesNoCasesOfAFileWithoutTheirTensors) {
  NamedTensors tensors;
  for (const char* name : {"q", "k", "v"}) {
    FillNormal(&(tensors[name] = Tensor(DType::kF32, {1, 2, 5, 4})), 1, name);
  }
  const std::string path = ::testing::TempDir() + "/qkv_for_globs.safetensors";
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  CaseFlags flags;
  flags.techniques = "toy_m*,toy_h*";
  flags.inputs = "qkv_for_globs.safetensors";
  const std::vector<Job> cases = Cases(flags);
  for (const Job& one : cases) EXPECT_TRUE(one.obstacle.ok()) << one.ToString();
  EXPECT_THAT(Names(cases), testing::Contains("toy_mean"));
  EXPECT_THAT(Names(cases), testing::Not(testing::Contains("toy_hidden")));
  flags.techniques = "toy_hidden*";
  EXPECT_THAT(Error(flags), HasSubstr("no case is left"));
}

TEST_F(CasesTest, DevicesDefaultToThosePresent) {
  CaseFlags flags = Drawn("toy_device,toy_mean");
  flags.cuda_present = true;
  std::set<Device> devices;
  for (const Job& one : Cases(flags)) devices.insert(one.device);
  EXPECT_THAT(devices, ElementsAre(Device::kCpu, Device::kCuda));
  flags.cuda_present = false;
  for (const Job& one : Cases(flags)) EXPECT_EQ(one.device, Device::kCpu);
  // A device that is asked for by name makes a case, whose row says why it did not run.
  flags.devices = "cuda";
  EXPECT_EQ(Cases(flags).front().device, Device::kCuda);
}

TEST_F(CasesTest, RecordsNameEveryOptionAndWhatRenderingNeeds) {
  const auto cases = Cases(Drawn("toy_mean:rounds=2"));
  ASSERT_EQ(cases.size(), 1u);
  const Case record = MakeRecord(cases[0]);
  EXPECT_EQ(record.key().options_text(), "from=1,mib=0,ms=0,rounds=2,shade=0");
  EXPECT_EQ(record.key().options().at("rounds"), "2");
  EXPECT_EQ(record.key().threads(), UsableCores());
  EXPECT_EQ(record.technique().display_name(), "toy_mean rounds=2");
  EXPECT_FALSE(record.technique().options_are_default());
  EXPECT_EQ(record.technique().expected_growth(), 1);
  EXPECT_EQ(record.technique().dense_counterpart(), "dense");
  EXPECT_TRUE(record.technique().dense_counterpart_options().empty());
}

TEST_F(CasesTest, TheDenseCounterpartIsAddedOnceBesideEachProblem) {
  AddDenseToy(registry_);
  CaseFlags flags = Drawn("toy_mean,toy_wrong");
  flags.lengths = "16,32";
  const auto cases = Cases(flags);
  EXPECT_THAT(Names(cases),
              ElementsAre("toy_mean", "toy_wrong", "dense", "toy_mean", "toy_wrong", "dense"));
  EXPECT_TRUE(cases[2].added);
  flags.techniques = "toy_mean,dense";
  EXPECT_THAT(Names(Cases(flags)), ElementsAre("toy_mean", "dense", "toy_mean", "dense"));
  flags.techniques = "toy_mean";
  flags.counterparts = false;
  EXPECT_THAT(Names(Cases(flags)), ElementsAre("toy_mean", "toy_mean"));
}

TEST_F(CasesTest, AccuracyCanBeLeftOut) {
  CaseFlags flags = Drawn("toy_mean");
  flags.inputs = "real,gaussian,text";
  flags.lengths = "16";
  std::vector<Case::Purpose> purposes;
  for (const Job& one : Cases(flags)) purposes.push_back(one.purpose);
  EXPECT_THAT(purposes, testing::Contains(Case::PURPOSE_ACCURACY));
  flags.accuracy = false;
  purposes.clear();
  for (const Job& one : Cases(flags)) purposes.push_back(one.purpose);
  EXPECT_THAT(purposes, testing::Not(testing::IsEmpty()));
  EXPECT_THAT(purposes, testing::Each(Case::PURPOSE_SCALING));
}

TEST_F(CasesTest, WithoutAccuracyALongTextIsNotCheckedAndTheOthersAre) {
  CaseFlags flags = Drawn("toy_hidden");
  flags.inputs = "gaussian,text";
  flags.lengths = "512,513";
  for (const bool accuracy : {true, false}) {
    flags.accuracy = accuracy;
    int unchecked = 0;
    for (const Job& one : Cases(flags)) {
      const bool long_text = one.input.text != nullptr && one.problem.query_tokens == 513;
      EXPECT_EQ(one.check, accuracy || !long_text) << one.ToString();
      unchecked += one.check ? 0 : 1;
    }
    EXPECT_EQ(unchecked, accuracy ? 0 : 1);
  }
}

TEST_F(CasesTest, AnInputIsNamedByItsFileAndLayer) {
  EXPECT_EQ(RecordInput({"needle", nullptr}).name(), "needle");
  const auto sources = ParseInputSources("real");
  ASSERT_TRUE(sources.ok()) << sources.status();
  const InputProfile input = RecordInput((*sources)[1]);
  EXPECT_EQ(input.name(), "real");
  EXPECT_EQ(input.file(), "minilm_512.safetensors");
  EXPECT_EQ(input.layer(), "layer2");
  EXPECT_FALSE(input.model().empty());
}

TEST_F(CasesTest, ListShowsEverythingOfATechnique) {
  std::string options;
  for (const char* option : {"rounds=1  (1 to 1000000) times that the work is done; * is 1, 2, 4",
                             "shade=0  (0 to 2) changes nothing; * is 0, 2",
                             "ms=0  (0 to 3600000) milliseconds that a Run waits",
                             "mib=0  (0 to 1099511627776) MiB that are taken",
                             "from=1  (1 to 1099511627776) query tokens from which a Run waits at "
                             "the gate"}) {
    absl::StrAppend(&options, "    :", option, "\n");
  }
  const auto list = [&](const std::string& name) {
    return ListTechniques({*registry_.Find(name)});
  };
  EXPECT_EQ(list("toy_causal"),
            "toy_causal  A toy\n    family toys, own, input qkv, devices cpu, causal only\n"
            "    none\n" +
                options);
  EXPECT_EQ(list("toy_full"),
            "toy_full  A toy\n    family toys, own, input qkv, devices cpu, not causal\n"
            "    none\n" +
                options);
  EXPECT_EQ(ListTechniques({*registry_.Find("toy_hidden"), *registry_.Find("toy_device")}),
            "toy_hidden  A toy\n    family toys, own, input hidden, devices cpu\n    none\n" +
                options +
                "toy_device  A toy\n    family toys, own, input qkv, devices cpu cuda\n"
                "    none\n" +
                options);
}

TEST_F(CasesTest, ARecordHasTheWholeKeyAndWhatIsToldOfTheTechnique) {
  CaseFlags flags = Drawn("toy_device:rounds=2");
  flags.devices = "cpu,cuda,simulator";
  flags.simulator = true;
  flags.dtypes = "bf16,f16,f32";
  flags.heads = "6";
  flags.kv_heads = "2";
  flags.head_dims = "5";
  flags.batches = "3";
  flags.threads = "7";
  flags.seed = 11;
  const std::vector<Job> cases = Cases(flags);
  ASSERT_EQ(cases.size(), 9u);
  const char* devices[] = {"CPU", "CUDA", "SIMULATOR"};
  const char* types[] = {"BF16", "F16", "F32"};
  // Cases of one problem follow one another in the order of the devices and of the types.
  for (int i = 0; i < 9; ++i) {
    Case record = MakeRecord(cases[i]);
    EXPECT_EQ(record.key().options().size(), 5u);
    record.mutable_key()->clear_options();
    EXPECT_EQ(
        record.ShortDebugString(),
        absl::StrCat("key { technique: \"toy_device\" options_text: "
                     "\"from=1,mib=0,ms=0,rounds=2,shade=0\" device: DEVICE_TYPE_",
                     devices[i / 3], " dtype: ELEMENT_TYPE_", types[i % 3],
                     " problem { batch: 3 query_heads: 6 kv_heads: 2 query_tokens: 16 kv_tokens: "
                     "16 head_dim: 5 value_dim: 5 causal: true } input { name: \"gaussian\" } "
                     "seed: 11 ",
                     i / 3 == 0 ? "threads: 7 " : "",
                     "purpose: PURPOSE_SCALING } technique { display_name: "
                     "\"toy_device rounds=2\" title: \"A toy\" family: \"toys\" exactness: "
                     "EXACTNESS_OWN input_kind: INPUT_KIND_QKV dense_counterpart: \"dense\" "
                     "expected_growth: 1 citation: \"none\" }"));
  }
  const Case hidden = MakeRecord(Cases(Drawn("toy_hidden")).at(0));
  EXPECT_EQ(hidden.technique().input_kind(), TechniqueDescription::INPUT_KIND_HIDDEN);
  EXPECT_TRUE(hidden.technique().options_are_default());
}

TEST_F(CasesTest, EffortGrowsWithTheLongerOfTokensAndKeysFromAFixedCost) {
  Job job;
  job.problem.query_tokens = 256;
  job.problem.kv_tokens = 1024;
  EXPECT_DOUBLE_EQ(RelativeEffort(job), 1 + 2);
  std::swap(job.problem.query_tokens, job.problem.kv_tokens);
  EXPECT_DOUBLE_EQ(RelativeEffort(job), 1 + 2);
  job.purpose = Case::PURPOSE_ACCURACY;
  EXPECT_DOUBLE_EQ(RelativeEffort(job), 2 + 2);
  job.pass = Case::PASS_BACKWARD;
  EXPECT_DOUBLE_EQ(RelativeEffort(job), 2 + 2.5 * 2);
  job.pass = Case::PASS_TRAINING;
  EXPECT_DOUBLE_EQ(RelativeEffort(job), 2 + 3.5 * 2);
}

TEST_F(CasesTest, ShardsThatAreNoneAreRefused) {
  CaseFlags flags = Drawn("toy_mean");
  for (const std::string shard :
       {"1", "0/2", "3/2", "1/2/3", "x/2", "1/x", "-1/2", "1/10001", "/", "1/0"}) {
    flags.shard = shard;
    EXPECT_EQ(Error(flags),
              "--shard: \"" + shard + "\"; wanted is a part of up to 10000, as in 2/4");
  }
  flags.shard = "1/10000";
  EXPECT_EQ(Cases(flags).size(), 1u);
  flags.shard = "10000/10000";
  EXPECT_EQ(Cases(flags).size(), 0u);
}

// Three cases of 3, 2 and 2: the two smaller ones are the second part.
TEST_F(CasesTest, TheCaseOfMostEffortIsDealtFirst) {
  CaseFlags flags = Drawn("toy_mean");
  flags.lengths = "512,513,1024";
  flags.shard = "1/2";
  EXPECT_THAT(Lengths(Cases(flags)), ElementsAre(1024));
  flags.shard = "2/2";
  EXPECT_THAT(Lengths(Cases(flags)), ElementsAre(512, 513));
}

TEST_F(CasesTest, TextMakesCausalCasesOfTheModelsSizesWithAnAccuracyCaseBeside) {
  CaseFlags flags = Drawn("toy_hidden");
  flags.inputs = "text";
  flags.lengths = "";
  flags.batches = "2";
  std::vector<Job> cases = Cases(flags);
  ASSERT_EQ(cases.size(), 2u);
  const auto text = [](const Job& job) {
    return absl::StrCat(Case::Purpose_Name(job.purpose), " ", job.problem.ToString(), " ",
                        job.obstacle.message());
  };
  const std::string sizes = "batch 2, 6 heads of 32, ";
  EXPECT_EQ(text(cases[0]), "PURPOSE_ACCURACY " + sizes + "512 tokens, causal, f32 ");
  EXPECT_EQ(text(cases[1]), "PURPOSE_SCALING " + sizes + "16384 tokens, causal, f32 ");
  flags.lengths = "20";
  flags.causal = "false";
  cases = Cases(flags);
  ASSERT_EQ(cases.size(), 2u);
  for (const Job& job : cases) {
    EXPECT_EQ(text(job), Case::Purpose_Name(job.purpose) + " " + sizes +
                             "20 tokens, f32 text is foretold from what is before it: causal only");
  }
  // Where it is not named it has no cases that cannot run.
  flags.techniques = "toy_hid*";
  EXPECT_THAT(Error(flags), HasSubstr("no case is left"));
  flags = Drawn("toy_mean");
  flags.inputs = "text";
  cases = Cases(flags);
  EXPECT_EQ(cases.at(0).obstacle.message(),
            "text makes hidden states; the technique reads q, k and v");
  const InputProfile input = RecordInput(cases[0].input);
  EXPECT_EQ(input.name(), "text");
  EXPECT_EQ(input.file(), "model.safetensors");
  EXPECT_FALSE(input.model().empty());
}

TEST_F(CasesTest, ACaseThatCannotRunHasTheSizesThatItsFileHasOfAnything) {
  NamedTensors tensors;
  FillNormal(&(tensors["x"] = Tensor(DType::kF32, {1, 9, 16})), 1, "x");
  ASSERT_TRUE(WriteSafetensors(::testing::TempDir() + "/only_x.safetensors", tensors).ok());
  CaseFlags flags = Drawn("toy_mean");
  flags.inputs = "only_x.safetensors";
  for (const auto& [lengths, tokens] : {std::pair("", 9), std::pair("4", 4), std::pair("9", 9)}) {
    flags.lengths = lengths;
    const std::vector<Job> cases = Cases(flags);
    ASSERT_EQ(cases.size(), 1u);
    EXPECT_FALSE(cases[0].obstacle.ok());
    EXPECT_EQ(cases[0].problem.query_tokens, tokens);
    EXPECT_EQ(cases[0].problem.kv_tokens, tokens);
  }
  // Lengths beyond the file's are left out for those that it serves.
  flags.techniques = "toy_hidden";
  flags.heads = "4";
  flags.lengths = "4,9,10";
  EXPECT_THAT(Lengths(Cases(flags)), ElementsAre(4, 9));
  EXPECT_EQ(Cases(flags)[0].problem.ToString(), "batch 1, 4 heads of 4, 4 tokens, f32");
}

TEST_F(CasesTest, ARecordHasEachSizeOfAFile) {
  NamedTensors tensors;
  FillNormal(&(tensors["q"] = Tensor(DType::kF32, {2, 6, 5, 4})), 1, "q");
  FillNormal(&(tensors["k"] = Tensor(DType::kF32, {2, 3, 7, 4})), 1, "k");
  FillNormal(&(tensors["v"] = Tensor(DType::kF32, {2, 3, 7, 8})), 1, "v");
  ASSERT_TRUE(WriteSafetensors(::testing::TempDir() + "/sizes.safetensors", tensors).ok());
  CaseFlags flags = Drawn("toy_mean");
  flags.inputs = "sizes.safetensors";
  flags.lengths = "";
  flags.batches = "9";
  EXPECT_EQ(MakeRecord(Cases(flags).at(0)).key().problem().ShortDebugString(),
            "batch: 2 query_heads: 6 kv_heads: 3 query_tokens: 5 kv_tokens: 7 head_dim: 4 "
            "value_dim: 8");
}

TEST_F(CasesTest, ACounterpartIsOfTheSameKindOfInputAndStandsBesideWhatCanRun) {
  AddDenseToy(registry_);
  CaseFlags flags = Drawn("toy_mean");
  flags.inputs = "text";  // which it cannot read
  EXPECT_THAT(Names(Cases(flags)), testing::Each("toy_mean"));
  flags = Drawn("toy_stream");  // its own counterpart
  EXPECT_THAT(Names(Cases(flags)), ElementsAre("toy_stream"));
  EXPECT_FALSE(Cases(flags)[0].added);
}

}  // namespace
}  // namespace tfb
