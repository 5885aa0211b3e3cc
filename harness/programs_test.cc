// Tests the programs check and apply as a caller runs them, over the tiny technique and its faults.
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/random.h"
#include "core/runfiles.h"
#include "core/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Finished {
  int exit_code = -1;
  std::string out;
  std::string err;
};

std::string ReadAll(const std::string& path) {
  std::string text;
  FILE* file = fopen(path.c_str(), "r");
  char buffer[4096];
  for (size_t got; file != nullptr && (got = fread(buffer, 1, sizeof(buffer), file)) > 0;) {
    text.append(buffer, got);
  }
  if (file != nullptr) fclose(file);
  return text;
}

class Programs : public ::testing::Test {
 protected:
  Programs() : folder_(::testing::TempDir() + "/programs") { mkdir(folder_.c_str(), 0777); }

  // Runs a program as `bazel run` starts it: with the caller's folder in the environment.
  Finished Run(const std::string& program, const std::string& arguments) {
    Finished finished;
    const auto binary = RunfilePath("harness/" + program);
    EXPECT_TRUE(binary.ok()) << binary.status();
    if (!binary.ok()) return finished;
    const std::string command =
        absl::StrCat("BUILD_WORKING_DIRECTORY='", folder_, "' ", *binary, " ", arguments, " > '",
                     folder_, "/out' 2> '", folder_, "/err'");
    const int status = std::system(command.c_str());
    finished.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    finished.out = ReadAll(folder_ + "/out");
    finished.err = ReadAll(folder_ + "/err");
    return finished;
  }
  Finished Apply(const std::string& arguments) { return Run("tiny_apply", arguments); }

  void ExpectBadUsage(const std::string& program, const std::string& arguments,
                      const std::string& part) {
    const Finished finished = Run(program, arguments);
    EXPECT_EQ(finished.exit_code, 2) << arguments;
    EXPECT_THAT(finished.err, HasSubstr(part)) << arguments;
    const std::vector<std::string> lines = absl::StrSplit(finished.err, '\n');
    EXPECT_EQ(lines.size(), 2u) << finished.err;  // one line, and nothing after its end
    EXPECT_EQ(finished.out, "") << arguments;
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  // Writes q, k and v of 4 heads over 2, 90 queries over 100 keys.
  void WriteQkv(const std::string& name, const std::string& prefix = "") {
    NamedTensors tensors;
    tensors[prefix + "q"] = Tensor(DType::kF32, {1, 4, 90, 16});
    tensors[prefix + "k"] = Tensor(DType::kF32, {1, 2, 100, 16});
    tensors[prefix + "v"] = Tensor(DType::kF32, {1, 2, 100, 8});
    for (auto& [key, tensor] : tensors) FillNormal(&tensor, 1, key);
    ASSERT_TRUE(WriteSafetensors(Path(name), tensors).ok());
  }

  NamedTensors Read(const std::string& name) {
    auto file = ReadSafetensors(Path(name));
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? std::move(file->tensors) : NamedTensors();
  }

  std::string folder_;
};

TEST_F(Programs, ApplyWritesWhatTheTechniqueComputesAndPrintsItsErrors) {
  WriteQkv("qkv.safetensors");
  const Finished finished = Apply(
      "--technique=tiny --options=window=8 --causal --input=qkv.safetensors "
      "--output=out.safetensors");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("tiny:window=8"), HasSubstr("causal"),
                                  HasSubstr("error against its definition"), HasSubstr("(<= 2e-5)"),
                                  HasSubstr("error against dense attention"), HasSubstr("(tiny)"),
                                  HasSubstr("kept mass"), HasSubstr(Path("out.safetensors"))));
  const auto file = ReadSafetensors(Path("out.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors.at("out").shape(), Shape({1, 4, 90, 8}));
  EXPECT_EQ(file->tensors.at("log_sum_exp").shape(), Shape({1, 4, 90}));
  EXPECT_EQ(file->metadata.at("technique"), "tiny");
  EXPECT_EQ(file->metadata.at("options"), "window=8");
}

TEST_F(Programs, ApplyTakesOptionsWithTheTechniqueToo) {
  WriteQkv("qkv.safetensors");
  const Finished finished = Apply("--technique=tiny:window=8 --input=qkv.safetensors");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("tiny:window=8"));
  ExpectBadUsage("tiny_apply",
                 "--technique=tiny:window=8 --options=window=9 --input=qkv.safetensors",
                 "option \"window\" of tiny is given twice");
}

TEST_F(Programs, DumpedParametersMakeTheSameOutputUnderAnotherSeed) {
  WriteQkv("qkv.safetensors");
  const std::string common = "--technique=tiny --input=qkv.safetensors ";
  ASSERT_EQ(
      Apply(common + "--seed=1 --output=a.safetensors --dump_parameters=p.safetensors").exit_code,
      0);
  ASSERT_EQ(Apply(common + "--seed=2 --output=b.safetensors").exit_code, 0);
  ASSERT_EQ(Apply(common + "--seed=2 --parameters=p.safetensors --output=c.safetensors").exit_code,
            0);
  EXPECT_EQ(Read("p.safetensors").at("gain").shape(), Shape({4}));
  const auto a = *SerializeSafetensors(Read("a.safetensors"));
  const auto b = *SerializeSafetensors(Read("b.safetensors"));
  const auto c = *SerializeSafetensors(Read("c.safetensors"));
  EXPECT_NE(a, b);
  EXPECT_EQ(a, c);
}

TEST_F(Programs, ApplyConvertsToTheDtypeThatIsAskedFor) {
  WriteQkv("qkv.safetensors");
  for (const char* dtype : {"bf16", "f16"}) {
    const Finished finished = Apply(absl::StrCat(
        "--technique=tiny --input=qkv.safetensors --output=out.safetensors --dtype=", dtype));
    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_THAT(finished.out, HasSubstr(absl::StrCat("over that of dense attention in ", dtype)));
    EXPECT_EQ(Name(Read("out.safetensors").at("out").dtype()), dtype);
  }
}

TEST_F(Programs, ApplyReadsTheLayerThatIsNamed) {
  const Finished finished = Apply("--technique=tiny --input=real --layer=layer2");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_THAT(finished.out,
              AllOf(HasSubstr("12 heads of 32, 512 tokens"), HasSubstr("rows checked")));
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=real",
                 "--layer: real has several; name one of layer0, layer2, layer5");
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=real --layer=layer7", "has no \"layer7\"");
}

TEST_F(Programs, ApplyExitsWith1WhenAnErrorExceedsItsBoundAndWritesAllTheSame) {
  WriteQkv("qkv.safetensors");
  const Finished finished =
      Apply("--technique=tiny_wrong_scale --input=qkv.safetensors --output=wrong.safetensors");
  EXPECT_EQ(finished.exit_code, 1);
  EXPECT_THAT(finished.out, AllOf(HasSubstr("EXCEEDED"), HasSubstr("FAILED: max error")));
  EXPECT_EQ(Read("wrong.safetensors").count("out"), 1u);
}

TEST_F(Programs, ApplyRefusesTensorsThatItWouldCutOrPassOver) {
  NamedTensors tensors;
  tensors["q"] = Tensor(DType::kF32, {1, 4, 90, 16});
  tensors["k"] = Tensor(DType::kF32, {1, 2, 100, 16});
  tensors["v"] = Tensor(DType::kF32, {1, 2, 100, 8});
  for (auto& [key, tensor] : tensors) FillNormal(&tensor, 1, key);
  tensors["key_mask"] = Tensor(DType::kU8, {1, 105});
  Fill(tensors.at("key_mask").view(), 1);
  ASSERT_TRUE(WriteSafetensors(Path("long_mask.safetensors"), tensors).ok());
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=long_mask.safetensors",
                 "\"key_mask\" is [1, 105]; beside q [1, 4, 90, 16] and k [1, 2, 100, 16] tiny "
                 "reads [1, 100]");
  tensors.erase("key_mask");
  tensors["key_padding"] = Tensor(DType::kU8, {1, 100});
  Fill(tensors.at("key_padding").view(), 1);
  ASSERT_TRUE(WriteSafetensors(Path("misspelt.safetensors"), tensors).ok());
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=misspelt.safetensors",
                 "\"key_padding\" would not be read; what is read are q, k, v, key_mask (where "
                 "there is one)");
}

TEST_F(Programs, ApplySaysThatNothingOfTheOutputIsANumber) {
  NamedTensors tensors;
  for (const char* name : {"q", "k", "v"}) {
    tensors[name] = Tensor(DType::kF32, {1, 4, 30, 16});
    Fill(tensors[name].view(), std::numeric_limits<double>::quiet_NaN());
  }
  ASSERT_TRUE(WriteSafetensors(Path("nan.safetensors"), tensors).ok());
  const Finished finished = Apply("--technique=tiny --input=nan.safetensors");
  EXPECT_EQ(finished.exit_code, 1) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("elements that are NaN or infinite"),
                                  HasSubstr("1920 of 1920, as in its definition"),
                                  HasSubstr("FAILED: nothing was compared")));
}

TEST_F(Programs, ApplyAnswersBadUsageInOneLineThatNamesTheFlag) {
  WriteQkv("qkv.safetensors");
  WriteQkv("named.safetensors", "query_");
  const std::string input = " --input=qkv.safetensors";
  ExpectBadUsage("tiny_apply", "--input=qkv.safetensors", "--technique: name one of tiny");
  ExpectBadUsage("tiny_apply", "--technique=tyny" + input, "nearest are tiny");
  ExpectBadUsage("tiny_apply", "--technique=tiny --options=widow=3" + input,
                 "--options: unknown option \"widow\"; known are window");
  ExpectBadUsage("tiny_apply", "--technique=tiny --options=window=-3" + input,
                 "--options: option window is \"-3\"; allowed are 0 to");
  ExpectBadUsage("tiny_apply", "--technique=tiny", "--input: name a safetensors file");
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=absent.safetensors",
                 Path("absent.safetensors"));
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=gaussian", "is drawn");
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=qkv.bin", "FILE.safetensors");
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=named.safetensors",
                 "has no q, k, v; tiny reads q, k, v, key_mask (where there is one); the file has "
                 "query_k, query_q, query_v");
  ExpectBadUsage("tiny_apply", "--technique=tiny --device=tpu" + input, "--device: unknown device");
  ExpectBadUsage("tiny_apply", "--technique=tiny --dtype=f8" + input, "--dtype: unknown dtype");
  ExpectBadUsage("tiny_apply", "--technique=tiny --dtype=i32" + input,
                 "--dtype: dtype is i32; allowed are f32, bf16, f16");
  ExpectBadUsage("tiny_apply", "--technique=tiny --rows=-1" + input, "--rows: -1");
  ExpectBadUsage("tiny_apply", "--technique=tiny --threads=-1" + input, "--threads: -1");
  ExpectBadUsage("tiny_apply", "--technique=tiny --parameters=qkv.safetensors" + input,
                 "--parameters: there is no parameter \"k\"; the layer has gain");
  ExpectBadUsage("tiny_apply", "--technique=tiny --output=absent/out.safetensors" + input,
                 "--output: ");
  ExpectBadUsage("tiny_apply", "--technique=tiny --output=./qkv.safetensors" + input,
                 "--output: is the file of --input");
  ExpectBadUsage("tiny_apply",
                 "--technique=tiny --output=a.safetensors --dump_parameters=a.safetensors" + input,
                 "--dump_parameters: is the file of --output");
  ASSERT_EQ(mkfifo(Path("fifo.safetensors").c_str(), 0600), 0);
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=fifo.safetensors", "not a regular file");
  ExpectBadUsage("tiny_apply", "--technique=tiny extra" + input, "\"extra\" is no flag");
  ExpectBadUsage("tiny_apply", "--technique=tiny --inputs=x", "did you mean --input?");
}

TEST_F(Programs, ApplyRunsInTheSimulatorAndFallsBackToNothing) {
  WriteQkv("qkv.safetensors");
  const Finished finished =
      Apply("--technique=tiny --device=simulator --input=qkv.safetensors --output=sim.safetensors");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("on simulator"));
  ASSERT_EQ(Apply("--technique=tiny --input=qkv.safetensors --output=cpu.safetensors").exit_code,
            0);
  const Tensor simulated = Read("sim.safetensors").at("out").Clone();
  const Tensor on_cpu = Read("cpu.safetensors").at("out").Clone();
  for (int64_t i = 0; i < simulated.num_elements(); ++i) {
    EXPECT_NEAR(simulated.view().Get(i), on_cpu.view().Get(i), 1e-5);
  }
  setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  ExpectBadUsage("tiny_apply", "--technique=tiny --device=cuda --input=qkv.safetensors",
                 "no CUDA device: ");
}

TEST_F(Programs, HelpOfATechniqueIsAPageAboutIt) {
  const Finished finished = Apply("--technique=tiny --options=window=4 --help");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_THAT(finished.out,
              AllOf(HasSubstr("windowed attention in plain loops"), HasSubstr("0 to 1099511627776"),
                    HasSubstr("tokens on each side that a query sees"),
                    HasSubstr("query_tokens 512"), HasSubstr("[1, 8, 512, 64]"),
                    HasSubstr("[batch, kv_tokens]"), HasSubstr("[query_heads]"),
                    HasSubstr("--technique=tiny:window=4 --input=in.safetensors")));
  ExpectBadUsage("tiny_apply", "--technique=tyny --help", "nearest are tiny");
  ExpectBadUsage("tiny_apply", "--technique=tiny --options=widow=3 --help", "known are window");
}

TEST_F(Programs, HelpOfATechniqueHasTheSizesOfTheInput) {
  WriteQkv("qkv.safetensors");
  const Finished finished = Apply("--technique=tiny --help --input=qkv.safetensors --causal");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("Sizes of file qkv.safetensors: batch 1"),
                                  HasSubstr("[1, 4, 90, 16]"), HasSubstr("[1, 2, 100, 8]"),
                                  HasSubstr("--technique=tiny --causal --input")));
}

TEST_F(Programs, DrawnInputsCanBeAppliedTo) {
  const Finished drawn = Apply("--technique=tiny --heads=2 --draw_input=drawn.safetensors");
  EXPECT_EQ(drawn.exit_code, 0) << drawn.err;
  EXPECT_THAT(drawn.out, HasSubstr("q [1, 2, 512, 64]"));
  const Finished applied = Apply("--technique=tiny --input=drawn.safetensors");
  EXPECT_EQ(applied.exit_code, 0) << applied.err;
  ExpectBadUsage("tiny_apply",
                 "--technique=tiny --input=drawn.safetensors --draw_input=drawn.safetensors",
                 "--draw_input: is the file of --input");
  for (const std::string other : {"input", "parameters", "output", "dump_parameters"}) {
    ExpectBadUsage(
        "tiny_apply",
        "--technique=tiny --draw_input=other.safetensors --" + other + "=further.safetensors",
        "--draw_input: writes drawn tensors in place of all else; leave out --" + other);
  }
}

TEST_F(Programs, ApplySaysWhichParametersAreDrawnAndNotThoseThatAreGiven) {
  WriteQkv("qkv.safetensors");
  const std::string run = "--technique=tiny --input=qkv.safetensors --seed=5";
  const Finished drawn = Apply(run + " --dump_parameters=parameters.safetensors");
  EXPECT_EQ(drawn.exit_code, 0) << drawn.err;
  EXPECT_EQ(drawn.err,
            "apply: parameters are drawn from seed 5: gain [4]; give them by these names in "
            "--parameters\n");
  const Finished given = Apply(run + " --parameters=parameters.safetensors");
  EXPECT_EQ(given.exit_code, 0) << given.err;
  EXPECT_EQ(given.err, "");
}

TEST_F(Programs, HelpExplainsEveryFlag) {
  for (const char* program : {"tiny_apply", "tiny_check"}) {
    const Finished finished = Run(program, "--help");
    EXPECT_EQ(finished.exit_code, 0);
    EXPECT_THAT(finished.out, AllOf(HasSubstr("Exit status"), HasSubstr("--input"),
                                    HasSubstr("--seed"), HasSubstr("--threads")));
  }
  EXPECT_THAT(Apply("--help").out, HasSubstr("--technique=NAME[:option=value,...] --help"));
}

TEST_F(Programs, CheckPassesARightTechniqueOnAllInputs) {
  const Finished drawn =
      Run("tiny_check",
          "--techniques=tiny --devices=cpu --rows=32 --lengths=70 --input=gaussian,peaked,needle");
  EXPECT_EQ(drawn.exit_code, 0) << drawn.out << drawn.err;
  EXPECT_THAT(drawn.out, AllOf(HasSubstr("input needle"), HasSubstr("input peaked"),
                               HasSubstr("bf16"), HasSubstr("6 cases: 6 ok, 0 failed")));
  const Finished real =
      Run("tiny_check",
          "--techniques=tiny --devices=cpu --rows=32 --lengths=100 --input=real --dtypes=f32");
  EXPECT_EQ(real.exit_code, 0) << real.out << real.err;
  EXPECT_THAT(real.out, AllOf(HasSubstr("layers 0, 2, 5"), HasSubstr("4 cases: 4 ok")));
}

TEST_F(Programs, CheckExitsWith1WhenAnErrorExceedsItsBound) {
  const Finished finished =
      Run("tiny_check",
          "--techniques=tiny,tiny_wrong_scale --devices=cpu --input=gaussian --lengths=40 "
          "--dtypes=f32");
  EXPECT_EQ(finished.exit_code, 1) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("tiny_wrong_scale"), HasSubstr("1 failed")));
}

TEST_F(Programs, CheckOfDevicesSaysWhatItDidNotRun) {
  setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  const Finished finished = Run("tiny_check",
                                "--techniques=tiny --devices=cpu,simulator,cuda --lengths=40 "
                                "--input=gaussian --verbose");
  EXPECT_EQ(finished.exit_code, 0) << finished.out << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("6 cases: 4 ok"), HasSubstr("simulator"),
                                  HasSubstr("no CUDA device: ")));
}

TEST_F(Programs, ACaseOfCheckThatEndsItsProcessIsARow) {
  const Finished finished = Run("toy_check",
                                "--techniques=toy_mean,toy_crash,toy_causal --devices=cpu "
                                "--lengths=40 --input=gaussian --dtypes=f32,bf16");
  EXPECT_EQ(finished.exit_code, 1) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("6 cases: 4 ok, 2 failed"),
                                  HasSubstr("it ended the process: signal")));
}

// A GPU that is lost to a kernel is available again to the next case.
TEST_F(Programs, ACaseOfCheckThatLosesTheDeviceIsARow) {
  setenv("TFB_DEFER_ERRORS", "1", /*overwrite=*/1);
  const Finished finished = Run("toy_check",
                                "--techniques=toy_bad_kernel,toy_bad_launch,toy_device "
                                "--devices=simulator --lengths=40 --input=gaussian --dtypes=f32");
  EXPECT_EQ(finished.exit_code, 1) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("3 cases: 1 ok, 2 failed"));
}

TEST_F(Programs, CheckReadsFilesOfTheCallersOwn) {
  WriteQkv("qkv.safetensors");
  const Finished finished =
      Run("tiny_check",
          "--techniques=tiny --devices=cpu --input=qkv.safetensors --causal=true --dtypes=f32");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("90 queries, 100 keys"), HasSubstr("1 ok")));
}

TEST_F(Programs, CheckAnswersBadUsageInOneLineThatNamesTheFlag) {
  ExpectBadUsage("tiny_check", "--techniques=tyny", "tiny");
  ExpectBadUsage("tiny_check", "--input=gausian", "gausian");
  ExpectBadUsage("tiny_check", "--rows=-2", "--rows: -2");
  ExpectBadUsage("tiny_check", "--threads=-2", "--threads: -2");
  ExpectBadUsage("tiny_check", "--lengths=none", "none");
  ExpectBadUsage("tiny_check", "--techniqes=tiny", "--techniques");
}

}  // namespace
}  // namespace tfb
