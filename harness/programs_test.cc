// Tests the programs check and apply as a caller runs them, over the tiny technique and its faults.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
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

  // Returns a text with a # for each number that is measured, which stand first in the column of
  // values, and with the digits of a mean cosine as d.
  static std::string Masked(const std::string& text) {
    static const std::regex& measured =
        *new std::regex("(^|\n)([^\n]{38} )[0-9.e-]+( relative|( \\(<=))");
    static const std::regex& bound = *new std::regex("(dense attention in bf16 # .<= )[0-9.]+");
    std::string masked = std::regex_replace(text, measured, "$1$2#$3");
    masked = std::regex_replace(masked, bound, "$1#");
    for (size_t at = masked.find("mean cosine "); at < masked.size() && masked[at] != '(';) {
      if (absl::ascii_isdigit(masked[at])) masked[at] = 'd';
      ++at;
    }
    return masked;
  }

  // Runs a program and expects this error, and nothing else.
  void ExpectRefusal(const std::string& program, const std::string& arguments,
                     const std::string& error) {
    const Finished finished = Run(program, arguments);
    EXPECT_EQ(finished.exit_code, 2) << arguments;
    EXPECT_EQ(finished.err, error + "\n") << arguments;
    EXPECT_EQ(finished.out, "") << arguments;
  }

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

TEST_F(Programs, ApplyPrintsEachErrorWithItsBoundAndWhatWasWritten) {
  WriteQkv("qkv.safetensors");
  const Finished right = Apply(
      "--technique=tiny:window=8 --causal --input=qkv.safetensors --output=out.safetensors "
      "--dump_parameters=p.safetensors --rows=8 --dtype=bf16 --seed=3");
  EXPECT_EQ(right.exit_code, 0) << right.err;
  EXPECT_EQ(Masked(right.out),
            "tiny:window=8\n"
            "batch 1, 4 heads of 16 (values of 8) over 2 key-value heads, 90 tokens over 100 keys, "
            "causal, bf16, file qkv.safetensors, on cpu\n"
            "\n"
            "error against its definition           # relative, 32 of 360 rows checked\n"
            "  largest, over the largest value      # (<= 0.02)\n"
            "  of log_sum_exp                       # (<= 2.2e-5)\n"
            "  over that of dense attention in bf16 # (<= #)\n"
            "error against dense attention          # relative, mean cosine d.dddd (tiny)\n"
            "kept mass of its attention             0.288\n"
            "divergence from it (KL, nats)          1.66\n"
            "recall of its top 32                   0.303\n"
            "output written to                      " +
                Path("out.safetensors") + "\nparameters written to                  " +
                Path("p.safetensors") + "\n");
  EXPECT_EQ(right.err,
            "apply: parameters are drawn from seed 3: gain [4]; give them by these names in "
            "--parameters\n");
  const auto file = ReadSafetensors(Path("out.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  const std::map<std::string, std::string> metadata(file->metadata.begin(), file->metadata.end());
  EXPECT_EQ(metadata, (std::map<std::string, std::string>{
                          {"technique", "tiny"},
                          {"options", "window=8"},
                          {"problem",
                           "batch 1, 4 heads of 16 (values of 8) over 2 key-value heads, 90 tokens "
                           "over 100 keys, causal, bf16"},
                          {"device", "cpu"},
                          {"input", "file qkv.safetensors"},
                          {"seed", "3"},
                          {"made_by", "Transformer Family Bench, //harness:apply"}}));
  const Finished wrong = Apply("--technique=tiny_wrong_scale --input=qkv.safetensors --rows=0");
  EXPECT_EQ(wrong.exit_code, 1) << wrong.err;
  const std::string exceeded = wrong.out.substr(wrong.out.find("FAILED"));
  EXPECT_EQ(Masked(wrong.out.substr(0, wrong.out.size() - exceeded.size())),
            "tiny_wrong_scale:window=1099511627776\n"
            "batch 1, 4 heads of 16 (values of 8) over 2 key-value heads, 90 tokens over 100 keys, "
            "f32, file qkv.safetensors, on cpu\n"
            "\n"
            "error against its definition           # relative\n"
            "  largest, over the largest value      # (<= 2e-5)  EXCEEDED\n"
            "  of log_sum_exp                       # (<= 2.4e-5)  EXCEEDED\n"
            "error against dense attention          # relative, mean cosine d.ddd (tiny)\n"
            "kept mass of its attention             1.00\n"
            "divergence from it (KL, nats)          0\n"
            "recall of its top 32                   1.00\n");
  // A technique without parameters, and without a dense counterpart that is linked in.
  const Finished toy = Apply(
      "--technique=toy_mean --input=qkv.safetensors --dump_parameters=none.safetensors "
      "--threads=1");
  EXPECT_EQ(toy.exit_code, 0) << toy.err;
  EXPECT_EQ(toy.err, "");
  EXPECT_EQ(Masked(toy.out),
            "toy_mean:from=1,mib=0,ms=0,rounds=1,shade=0\n"
            "batch 1, 4 heads of 16 (values of 8) over 2 key-value heads, 90 tokens over 100 keys, "
            "f32, file qkv.safetensors, on cpu\n"
            "\n"
            "error against its definition           # relative\n"
            "  largest, over the largest value      # (<= 2e-5)\n"
            "  of log_sum_exp                       # (<= 2.3e-5)\n"
            "error against dense attention          not known: there is no technique \"dense\"; "
            "nearest are tiny, toy_device, toy_gate\n"
            "rounds                                 1.00\n"
            "parameters written to                  " +
                Path("none.safetensors") +
                "\n"
                "toy_mean has no parameters: that file is empty\n");
}

TEST_F(Programs, EveryFlagHasItsDefault) {
  const auto defaults = [this](const std::string& program) {
    std::string flags;
    for (const absl::string_view line : absl::StrSplit(Run(program, "--help").out, '\n')) {
      if (absl::StartsWith(line, "  --")) absl::StrAppend(&flags, line.substr(2), "\n");
    }
    return flags;
  };
  EXPECT_EQ(defaults("tiny_apply"),
            "--backward  (default: false)\n"
            "--causal  (default: false)\n"
            "--contestants  (default: none)\n"
            "--device  (default: cpu)\n"
            "--draw_input  (default: none)\n"
            "--dtype  (default: f32)\n"
            "--dump_parameters  (default: none)\n"
            "--heads  (default: 0)\n"
            "--input  (default: none)\n"
            "--layer  (default: none)\n"
            "--options  (default: none)\n"
            "--output  (default: none)\n"
            "--parameters  (default: none)\n"
            "--python  (default: python3)\n"
            "--rows  (default: 256)\n"
            "--seed  (default: 1)\n"
            "--technique  (default: none)\n"
            "--threads  (default: 0)\n");
  EXPECT_EQ(defaults("tiny_check"),
            "--batches  (default: 1)\n"
            "--causal  (default: auto)\n"
            "--contestants  (default: none)\n"
            "--devices  (default: none)\n"
            "--dtypes  (default: f32,bf16)\n"
            "--head_dims  (default: 64)\n"
            "--heads  (default: 4)\n"
            "--input  (default: real,gaussian,peaked,needle)\n"
            "--kv_heads  (default: none)\n"
            "--lengths  (default: none)\n"
            "--pass  (default: forward)\n"
            "--python  (default: python3)\n"
            "--rows  (default: 128)\n"
            "--seed  (default: 1)\n"
            "--techniques  (default: *)\n"
            "--threads  (default: 0)\n"
            "--verbose  (default: false)\n");
}

TEST_F(Programs, RefusalsNameTheFlagAndWhatIsAllowed) {
  WriteQkv("qkv.safetensors");
  WriteQkv("parameters.safetensors");
  const std::string unknown =
      "apply: --input: input \"qkv.bin\" is unknown; known are real, gaussian, peaked, needle, "
      "text "
      "and FILE.safetensors";
  for (const auto& [arguments, error] : std::vector<std::pair<std::string, std::string>>{
           {"--heads=-1", "apply: --heads: -1; allowed are 0 to 1099511627776"},
           {"--heads=1099511627777",
            "apply: --heads: 1099511627777; allowed are 0 to 1099511627776"},
           {"--rows=-1", "apply: --rows: -1; allowed are 0 and more"},
           {"--threads=-1", "apply: --threads: -1; allowed are 0 to 4096"},
           {"--threads=4097", "apply: --threads: 4097; allowed are 0 to 4096"},
           {"--dtype=i32", "apply: --dtype: dtype is i32; allowed are f32, bf16, f16"},
           {"--device=tpu",
            "apply: --device: unknown device \"tpu\"; known are cpu, cuda, simulator"},
           {"--layer=layer1",
            "apply: --layer: qkv.safetensors has no \"layer1\"; it has tensors without a layer"},
           {"--input=real",
            "apply: --layer: real has several; name one of layer0, layer2, layer5, "
            "minilm_4096/layer2"},
           {"--input=real --layer=layer7",
            "apply: --layer: real has no \"layer7\"; it has layer0, layer2, layer5, "
            "minilm_4096/layer2"},
           {"--input=", "apply: --input: name a safetensors file"},
           {"--input=qkv.bin", unknown},
           {"--input=needle",
            "apply: --input: \"needle\" is drawn; tensors of your own are asked for"},
           {"--technique=toy_causal", "apply: --causal: toy_causal is causal only: give it"},
           {"--technique=toy_full --causal", "apply: --causal: toy_full has no causal form"},
           // The largest numbers pass, and what is refused is behind them.
           {"--threads=4096 --heads=1099511627776 --rows=0 --technique=toy_full --causal",
            "apply: --causal: toy_full has no causal form"},
           {"--technique=toy_unable", "apply: the toy is unable to"},
           {"--technique=tiny:window",
            "apply: --technique: \"window\" in the options of tiny is not option=value"},
           {"--options=window",
            "apply: --options: \"window\" in the options of tiny is not option=value"},
           {"--output=qkv.safetensors", "apply: --output: is the file of --input, qkv.safetensors"},
           {"--dump_parameters=qkv.safetensors",
            "apply: --dump_parameters: is the file of --input, qkv.safetensors"},
           {"--parameters=parameters.safetensors --output=parameters.safetensors",
            "apply: --output: is the file of --parameters, parameters.safetensors"},
           {"--output=new.safetensors --dump_parameters=new.safetensors",
            "apply: --dump_parameters: is the file of --output, new.safetensors"},
           {"--draw_input=qkv.safetensors",
            "apply: --draw_input: is the file of --input, qkv.safetensors"},
           {"--draw_input=new.safetensors",
            "apply: --draw_input: writes drawn tensors in place of all else; leave out --input"},
           {"--input= --draw_input=new.safetensors --technique=toy_unable",
            "apply: the toy is unable to"},
           {"--input= --draw_input=new.safetensors --technique=toy_causal",
            "apply: --causal: toy_causal is causal only: give it"}}) {
    ExpectRefusal("tiny_apply", "--technique=tiny --input=qkv.safetensors " + arguments, error);
  }
  EXPECT_NE(access(Path("new.safetensors").c_str(), F_OK), 0) << "nothing is written";
  for (const auto& [arguments, error] : std::vector<std::pair<std::string, std::string>>{
           {"--rows=-1", "check: --rows: -1; allowed are 0 and more"},
           {"--threads=-1", "check: --threads: -1; allowed are 0 to 4096"},
           {"--threads=4097", "check: --threads: 4097; allowed are 0 to 4096"},
           {"--devices=simulator,x",
            "check: --devices: unknown device \"x\"; known are cpu, cuda, simulator"},
           {"--threads=4096 --rows=0 --devices=simulator,x",
            "check: --devices: unknown device \"x\"; known are cpu, cuda, simulator"}}) {
    ExpectRefusal("tiny_check", "--techniques=tiny --input=gaussian " + arguments, error);
  }
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

TEST_F(Programs, ApplyWritesTheGradientsOfALoss) {
  ASSERT_EQ(Apply("--technique=tiny --heads=2 --backward --draw_input=drawn.safetensors").exit_code,
            0);
  NamedTensors drawn = Read("drawn.safetensors");
  ASSERT_EQ(drawn.count("grad_out"), 1u);
  EXPECT_EQ(drawn.at("grad_out").shape(), drawn.at("q").shape());
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const Finished finished =
        Apply(absl::StrCat("--technique=tiny --input=drawn.safetensors --backward "
                           "--output=out.safetensors --dtype=",
                           dtype));
    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    const NamedTensors out = Read("out.safetensors");
    EXPECT_EQ(out.count("out"), 1u);
    for (const char* name : {"q", "k", "v", "gain"}) {
      const Tensor& gradient = out.at(absl::StrCat("grad_", name));
      EXPECT_EQ(Name(gradient.dtype()), std::string(name) == "gain" ? "f32" : dtype);
      double squares = 0;
      for (int64_t n = 0; n < gradient.num_elements(); ++n) {
        squares += gradient.view().Get(n) * gradient.view().Get(n);
      }
      EXPECT_GT(squares, 0);
      // The norm is printed with three digits.
      const std::string begin = absl::StrCat("norm of grad_", name);
      const size_t at = finished.out.find(begin);
      ASSERT_NE(at, std::string::npos) << finished.out;
      EXPECT_NEAR(std::atof(finished.out.c_str() + at + begin.size()), std::sqrt(squares),
                  5e-3 * std::sqrt(squares));
    }
  }
  // Twice the gradient of the output makes twice the gradients, exactly.
  const NamedTensors once = Read("out.safetensors");
  for (int64_t n = 0; n < drawn.at("grad_out").num_elements(); ++n) {
    drawn.at("grad_out").view().Set(n, 2 * drawn.at("grad_out").view().Get(n));
  }
  ASSERT_TRUE(WriteSafetensors(Path("twice.safetensors"), drawn).ok());
  ASSERT_EQ(
      Apply("--technique=tiny --input=twice.safetensors --backward --output=twice_out.safetensors")
          .exit_code,
      0);
  ASSERT_EQ(Apply("--technique=tiny --input=drawn.safetensors --backward --output=out.safetensors")
                .exit_code,
            0);
  const NamedTensors one = Read("out.safetensors"), two = Read("twice_out.safetensors");
  for (const char* name : {"grad_q", "grad_k", "grad_v", "grad_gain"}) {
    for (int64_t n = 0; n < one.at(name).num_elements(); ++n) {
      ASSERT_EQ(two.at(name).view().Get(n), 2 * one.at(name).view().Get(n)) << name;
    }
  }
}

TEST_F(Programs, ApplyReadsTheGradientOfLogSumExpToo) {
  NamedTensors tensors;
  for (const char* name : {"q", "k", "v", "grad_out"}) {
    FillNormal(&(tensors[name] = Tensor(DType::kF32, {1, 2, 9, 8})), 1, name);
  }
  const auto gradient_of_k = [&] {
    EXPECT_TRUE(WriteSafetensors(Path("loss.safetensors"), tensors).ok());
    EXPECT_EQ(Apply("--technique=tiny --input=loss.safetensors --backward "
                    "--output=loss_out.safetensors")
                  .exit_code,
              0);
    return Read("loss_out.safetensors").at("grad_k").Clone();
  };
  const Tensor without = gradient_of_k();
  FillNormal(&(tensors["grad_log_sum_exp"] = Tensor(DType::kF32, {1, 2, 9})), 1, "e");
  const Tensor with = gradient_of_k();
  EXPECT_NE(without.view().Get(0), with.view().Get(0));
}

TEST_F(Programs, ApplyRefusesABackwardPassWithoutItsGradients) {
  WriteQkv("qkv.safetensors");
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=qkv.safetensors --backward",
                 "has no grad_out; the technique reads grad_out, grad_log_sum_exp (where there is "
                 "one); the file has k, q, v");
  ExpectRefusal("tiny_apply", "--technique=tiny_wrong_scale --input=qkv.safetensors --backward",
                "apply: a layer with a fault has no backward pass");
  ExpectRefusal("tiny_apply",
                "--technique=tiny_wrong_scale --backward --draw_input=new.safetensors",
                "apply: a layer with a fault has no backward pass");
  NamedTensors tensors;
  for (const char* name : {"q", "k", "v"}) {
    FillNormal(&(tensors[name] = Tensor(DType::kF32, {1, 2, 9, 8})), 1, name);
  }
  FillNormal(&(tensors["grad_out"] = Tensor(DType::kF32, {1, 2, 10, 8})), 1, "g");
  ASSERT_TRUE(WriteSafetensors(Path("long.safetensors"), tensors).ok());
  ExpectRefusal("tiny_apply", "--technique=tiny --input=long.safetensors --backward",
                "apply: --backward: grad_out is [1, 2, 10, 8]; the output is [1, 2, 9, 8]");
  // Without the flag it is a tensor that would be passed over.
  ExpectBadUsage("tiny_apply", "--technique=tiny --input=long.safetensors",
                 "\"grad_out\" would not be read");
}

TEST_F(Programs, ApplySaysWhichGradientsAreNotFinite) {
  NamedTensors tensors;
  for (const char* name : {"q", "k", "v", "grad_out"}) {
    FillNormal(&(tensors[name] = Tensor(DType::kF32, {1, 1, 4, 8})), 1, name);
  }
  tensors.at("grad_out").view().Set(5, std::numeric_limits<double>::infinity());
  ASSERT_TRUE(WriteSafetensors(Path("infinite.safetensors"), tensors).ok());
  const Finished finished =
      Apply("--technique=tiny --causal --input=infinite.safetensors --backward");
  EXPECT_EQ(finished.exit_code, 1);
  // Query 0 sees key 0 alone, whose value has one channel with the infinite gradient.
  EXPECT_THAT(finished.out,
              AllOf(HasSubstr("NaN or infinite: 1 of 32 elements"),
                    HasSubstr("FAILED: a gradient has elements that are NaN or infinite\n")));
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
  const Finished finished =
      Apply("--technique=tiny --options=window=4 --heads=2 --dtype=f16 --help");
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_EQ(
      finished.out,
      "tiny: Windowed attention in plain loops\n"
      "made up for tests\n"
      "\n"
      "A small technique for tests of the harness: windowed attention in plain loops, with faults "
      "that\n"
      "can be switched on, so that a test can show that a check finds its fault.\n"
      "\n"
      "Options\n"
      "option  given  default        range               meaning\n"
      "window  4      1099511627776  0 to 1099511627776  tokens on each side that a query sees\n"
      "\n"
      "Sizes by default: batch 1, query_heads 2, kv_heads 2, query_tokens 512, kv_tokens 512, "
      "head_dim 64,\n"
      "  value_dim 64, model_dim 128 = query_heads head_dim; not causal\n"
      "\n"
      "Inputs\n"
      "input     shape                      here             type  is        meaning\n"
      "q         [batch, query_heads,       [1, 2, 512, 64]  f16   required  queries\n"
      "            query_tokens, head_dim]\n"
      "k         [batch, kv_heads,          [1, 2, 512, 64]  f16   required  keys\n"
      "            kv_tokens, head_dim]\n"
      "v         [batch, kv_heads,          [1, 2, 512, 64]  f16   required  values\n"
      "            kv_tokens, value_dim]\n"
      "key_mask  [batch, kv_tokens]         [1, 512]         u8    optional  1 where the key is a "
      "token,\n"
      "                                                                        0 where it is "
      "padding\n"
      "\n"
      "Outputs\n"
      "output       shape                       here             type  is        meaning\n"
      "out          [batch, query_heads,        [1, 2, 512, 64]  f16   always    the result\n"
      "               query_tokens, value_dim]\n"
      "log_sum_exp  [batch, query_heads,        [1, 2, 512]      f32   optional  natural logarithm "
      "of the\n"
      "               query_tokens]                                                sum of "
      "exponentials of a\n"
      "                                                                            row's scores\n"
      "\n"
      "Parameters (--parameters=FILE gives them, --dump_parameters=FILE writes them)\n"
      "parameter  shape          here  type  is\n"
      "gain       [query_heads]  [2]   f32   drawn from the seed\n"
      "\n"
      "Example: write a file of drawn tensors with these names and shapes, put your own in their\n"
      "place, and apply the technique to them.\n"
      "\n"
      "  bazel run //harness:apply -- --technique=tiny:window=4 --dtype=f16 "
      "--draw_input=in.safetensors\n"
      "  bazel run //harness:apply -- --technique=tiny:window=4 --dtype=f16 --input=in.safetensors "
      "--output=out.safetensors\n");
  // A technique that is causal alone is explained without the flag.
  const Finished causal = Apply("--technique=toy_causal --help");
  EXPECT_EQ(causal.exit_code, 0) << causal.err;
  EXPECT_THAT(causal.out, AllOf(HasSubstr(" = query_heads head_dim; causal\n"),
                                HasSubstr(" --technique=toy_causal --causal --draw_input="),
                                HasSubstr("\nParameters: none.\n")));
  ExpectRefusal("tiny_apply", "--technique=toy_full --causal --help",
                "apply: --causal: toy_full has no causal form");
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
  const Finished drawn = Apply("--technique=tiny --heads=2 --draw_input=template.safetensors");
  EXPECT_EQ(drawn.exit_code, 0) << drawn.err;
  EXPECT_EQ(drawn.out, "k [1, 2, 512, 64], q [1, 2, 512, 64], v [1, 2, 512, 64] written to " +
                           Path("template.safetensors") + "\n");
  const Finished applied = Apply("--technique=tiny --input=template.safetensors");
  EXPECT_EQ(applied.exit_code, 0) << applied.err;
  ExpectBadUsage("tiny_apply",
                 "--technique=tiny --input=template.safetensors --draw_input=template.safetensors",
                 "--draw_input: is the file of --input");
  const NamedTensors before = Read("template.safetensors");
  ExpectBadUsage("tiny_apply", "--technique=tiny --draw_input=template.safetensors --seed=9",
                 "is there already");
  EXPECT_EQ(Read("template.safetensors").at("q").view().Get(0), before.at("q").view().Get(0));
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

TEST_F(Programs, CheckTakesEveryInputAtItsLengthInBothTypesByDefault) {
  const Finished toy = Run("toy_check", "--techniques=toy_mean --devices=cpu --rows=4 --verbose");
  EXPECT_EQ(toy.exit_code, 0) << toy.err;
  std::string expected;
  for (const int layer : {0, 2, 5}) {
    for (const char* type : {"f32", "bf16"}) {
      absl::StrAppend(&expected, "toy_mean, cpu ", type,
                      ", 512 tokens, 12 heads of 32, real (minilm_512.safetensors, layer layer",
                      layer, "): ok \n");
    }
  }
  for (const char* input : {"gaussian", "peaked", "needle"}) {
    for (const char* type : {"f32", "bf16"}) {
      absl::StrAppend(&expected, "toy_mean, cpu ", type, ", 500 tokens, 4 heads of 64, causal, ",
                      input, ": ok \n");
    }
  }
  EXPECT_EQ(toy.out.substr(0, toy.out.find("Accuracy: ")), expected);
  EXPECT_THAT(toy.out, ::testing::EndsWith("\n12 cases: 12 ok, 0 failed\n"));
  // Every flag of the cases, and text as accuracy alone.
  const Finished flags = Run("toy_check",
                             "--techniques=toy_mean --devices=cpu --rows=4 --verbose --dtypes=f16 "
                             "--heads=6 --kv_heads=2 --head_dims=8 --batches=3 --causal=false "
                             "--lengths=20,30 --input=gaussian");
  EXPECT_EQ(flags.out.substr(0, flags.out.find("Accuracy: ")),
            "toy_mean, cpu f16, 20 tokens, 6 heads on 2 of 8, batch 3, gaussian: ok \n"
            "toy_mean, cpu f16, 30 tokens, 6 heads on 2 of 8, batch 3, gaussian: ok \n");
  const Finished text =
      Run("toy_check",
          "--techniques=toy_hidden --devices=cpu --dtypes=f32 --verbose --lengths=20 "
          "--input=text");
  EXPECT_EQ(
      text.out.substr(0, text.out.find("Accuracy: ")),
      "toy_hidden, cpu f32, 20 tokens, 6 heads of 32, causal, text (model.safetensors): ok \n");
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

TEST_F(Programs, ACheckOfNothingIsAnError) {
  const Finished finished =
      Run("toy_check",
          "--techniques=toy_unable --devices=cpu --lengths=40 --input=gaussian "
          "--dtypes=f32");
  EXPECT_EQ(finished.exit_code, 2) << finished.out;
  EXPECT_THAT(finished.err, HasSubstr("check: no case could be checked: "));
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
