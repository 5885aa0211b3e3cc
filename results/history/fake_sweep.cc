// Stands for a sweep in tests of bisections: writes the results of two cases, "near" and its
// counterpart "plain", whose times are drawn with noise.
//
// The variable FAKE_SWEEP_BEHAVIOUR says how the build differs from others, as in
// "time=1.3 error=0.02": a factor on the time of near, the noise of its times, its error against
// dense, its workspace in bytes (memory), its status (failed or unsupported), its window, the
// version of the compiler, and the exit status of a sweep that writes nothing (exit).
// FAKE_SWEEP_LOG is a file that gets a line for each measurement. FAKE_SWEEP_SIGNAL, "NUMBER
// SIGNAL", lets that measurement send the signal to the process that started it, and wait for its
// own end.

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "results/appender.h"
#include "results/results.pb.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using Values = std::map<std::string, std::string>;

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

double NumberOr(const Values& values, const std::string& name, double otherwise) {
  const auto found = values.find(name);
  double number = otherwise;
  if (found != values.end() && !absl::SimpleAtod(found->second, &number)) abort();
  return number;
}

std::string TextOr(const Values& values, const std::string& name, const std::string& otherwise) {
  const auto found = values.find(name);
  return found == values.end() ? otherwise : found->second;
}

Values ParseFlags(int argc, char** argv) {
  Values flags;
  for (int i = 1; i < argc; ++i) {
    absl::string_view word = argv[i];
    absl::ConsumePrefix(&word, "--");
    const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    flags[parts.first] = parts.second;
  }
  return flags;
}

constexpr double kNoise = 0.02;

// Draws times with normal noise, one in thirty of them half as long again.
class Noise {
 public:
  explicit Noise(const std::string& name) {
    std::seed_seq seed(name.begin(), name.end());
    random_.seed(seed);
  }
  double Uniform() { return static_cast<double>((random_() >> 11) + 1) * 0x1p-53; }
  double Time(double median_ns, double deviation) {
    const double normal = std::sqrt(-2 * std::log(Uniform())) * std::cos(2 * M_PI * Uniform());
    return median_ns * std::exp(deviation * normal) * (Uniform() < 1.0 / 30 ? 1.5 : 1);
  }

 private:
  std::mt19937_64 random_;
};

void DrawTimes(double median_ns, double deviation, double mood, int count, Noise* noise,
               Timing* timing) {
  for (auto* samples :
       {timing->mutable_run_ns(), timing->mutable_probe_ns(), timing->mutable_setup_ns()}) {
    samples->Clear();
  }
  for (int i = 0; i < count; ++i) {
    timing->add_run_ns(noise->Time(mood * median_ns, deviation));
    timing->add_probe_ns(noise->Time(mood * 1e4, kNoise));
  }
}

Case NearCase(const synthetic::CaseSpec& spec, const Values& behaviour) {
  Case near = synthetic::MakeCase(spec);
  Outcome* outcome = near.mutable_outcome();
  outcome->set_peak_workspace_bytes(static_cast<uint64_t>(NumberOr(behaviour, "memory", 1 << 20)));
  outcome->mutable_against_dense()->set_relative_frobenius(NumberOr(behaviour, "error", 0.01));
  const std::string status = TextOr(behaviour, "status", "");
  if (status == "failed") {
    outcome->set_status(Outcome::STATUS_FAILED);
    outcome->set_reason("an error beyond its bound");
  } else if (status == "unsupported") {
    outcome->set_status(Outcome::STATUS_UNSUPPORTED);
    outcome->set_reason("not this problem");
  }
  return near;
}

int Write(const Values& flags, const Values& behaviour) {
  const std::string output = TextOr(flags, "output", "");
  const std::string name = output.substr(output.rfind('/') + 1);
  // How fast the machine is just then, which both builds share.
  const double mood =
      0.8 +
      0.4 *
          Noise(std::string(absl::StripSuffix(absl::StripSuffix(name, ".pb"), "-base"))).Uniform();
  Noise noise(absl::StrCat(name, Variable("FAKE_SWEEP_BEHAVIOUR")));
  const int count = static_cast<int>(NumberOr(flags, "repetitions", 33));
  ResultSet results;
  Environment* environment = results.add_environments();
  *environment = synthetic::MakeEnvironment();
  environment->clear_git_commit();
  environment->set_compiler(TextOr(behaviour, "compiler", "g++ 12.2.0"));
  synthetic::CaseSpec plain;
  plain.tokens = static_cast<int64_t>(NumberOr(flags, "lengths", 1024));
  synthetic::CaseSpec near = plain;
  near.technique = "near";
  near.option_name = "window";
  near.option_value = TextOr(behaviour, "window", "256");
  *results.add_cases() = synthetic::MakeCase(plain);
  *results.add_cases() = NearCase(near, behaviour);
  const double medians[] = {1e6, 0.5e6 * NumberOr(behaviour, "time", 1)};
  const double deviations[] = {kNoise, NumberOr(behaviour, "noise", kNoise)};
  for (int i = 0; i < 2; ++i) {
    DrawTimes(medians[i], deviations[i], mood, count, &noise,
              results.mutable_cases(i)->mutable_outcome()->mutable_timing());
  }
  if (!WriteResultFile(output, results).ok()) return 2;
  return results.cases(1).outcome().status() == Outcome::STATUS_FAILED ? 1 : 0;
}

// Runs the other build on the same flags.
bool RunOther(const Values& flags) {
  const std::string output = TextOr(flags, "output", "");
  const std::string command =
      absl::StrCat("'", flags.at("interleave_with"),
                   "' --turns=0,1 '--output=", absl::StripSuffix(output, ".pb"),
                   "-base.pb' --repetitions=", TextOr(flags, "repetitions", "33"),
                   " --lengths=", TextOr(flags, "lengths", "1024"));
  const int status = system(command.c_str());
  return WIFEXITED(status) && WEXITSTATUS(status) <= 1;
}

// Notes the measurement in the log, and returns its number.
int NoteMeasurement(const Values& flags) {
  const std::string path = Variable("FAKE_SWEEP_LOG");
  if (path.empty()) return 0;
  std::ofstream(path, std::ios::app)
      << TextOr(flags, "output", "") << " " << TextOr(flags, "repetitions", "") << "\n";
  std::ifstream log(path);
  int lines = 0;
  for (std::string line; std::getline(log, line);) ++lines;
  return lines;
}

void SendSignal(int measurement) {
  const std::vector<std::string> words = absl::StrSplit(Variable("FAKE_SWEEP_SIGNAL"), ' ');
  int number = 0, signal = 0;
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &number) ||
      !absl::SimpleAtoi(words[1], &signal) || number != measurement) {
    return;
  }
  kill(getppid(), signal);
  for (;;) pause();
}

int Main(int argc, char** argv) {
  const Values flags = ParseFlags(argc, argv);
  Values behaviour;
  for (const absl::string_view word :
       absl::StrSplit(Variable("FAKE_SWEEP_BEHAVIOUR"), ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    behaviour[parts.first] = parts.second;
  }
  const int exit_status = static_cast<int>(NumberOr(behaviour, "exit", 0));
  if (exit_status != 0) {
    std::fprintf(stderr, "sweep: this build cannot\n");
    return exit_status;
  }
  if (flags.count("interleave_with") > 0) {
    SendSignal(NoteMeasurement(flags));
    if (!RunOther(flags)) return 2;
  }
  return Write(flags, behaviour);
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) { return tfb::Main(argc, argv); }
