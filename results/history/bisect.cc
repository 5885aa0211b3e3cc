#include "results/history/bisect.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/status.h"
#include "results/history/bisect_folder.h"
#include "results/history/bisect_report.h"
#include "results/history/bisect_search.h"
#include "results/reader.h"

namespace tfb {
namespace {

constexpr int kSamplesPerRound = 8;
constexpr int kMostRepetitions = 10000, kMostLooks = 12;
constexpr int kMostSweepRepetitions = 100000;  // that the sweep takes

std::string Duration(double seconds) {
  if (seconds < 100) return absl::StrFormat("%.0f s", seconds);
  return absl::StrFormat("%.0f min", seconds / 60);
}

absl::string_view Word(const PairReading& pair) {
  switch (pair.verdict) {
    case Verdict::kRegressed:
      return "worse";
    case Verdict::kImproved:
      return "better";
    case Verdict::kSame:
      return "the same";
    case Verdict::kAmbiguous:
    case Verdict::kNotJudged:
      return "not clear";
  }
  return "";
}

bool IsChange(const PairReading& pair) {
  return pair.verdict == Verdict::kRegressed || pair.verdict == Verdict::kImproved;
}

// Tells whether a change is known to a quarter, so that its half way is clear of both sides.
bool IsKnownWell(const Reading& reading) {
  return std::log(reading.high / reading.low) / 2 <= std::fabs(std::log(reading.ratio)) / 4;
}

// One question, from the two commits to the answer.
class Bisection {
 public:
  Bisection(const BisectOptions& options, const BisectProgress& progress)
      : options_(options), progress_(progress) {}

  absl::StatusOr<BisectResult> Run() {
    result_.least_change = options_.least_change;
    TFB_RETURN_IF_ERROR(Prepare());
    TFB_ASSIGN_OR_RETURN(folder_,
                         BisectFolder::Open(options_, *repository_, Question(), progress_));
    result_.folder = folder_->path();
    TFB_ASSIGN_OR_RETURN(const bool differ, CompareEnds());
    if (!differ) return result_;
    SayHowLong();
    TFB_ASSIGN_OR_RETURN(
        const SearchResult found,
        SearchForChange(static_cast<int>(line_.size()), result_.whole.reading,
                        {options_.least_change, options_.looks},
                        [this](const SearchStep& step) { return MeasureStep(step); }));
    TFB_RETURN_IF_ERROR(Conclude(found));
    for (auto& [index, tried] : tried_) result_.tried.push_back(std::move(tried));
    return result_;
  }

 private:
  // --- The question

  absl::Status Prepare() {
    TFB_ASSIGN_OR_RETURN(wanted_, ParseBisectCase(options_.wanted));
    if (!(options_.least_change > 1) || std::isinf(options_.least_change)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--least_change=", options_.least_change, ": a factor above 1 is wanted"));
    }
    if (options_.repetitions < 3 || options_.repetitions > kMostRepetitions) {
      return absl::InvalidArgumentError(absl::StrCat("--repetitions=", options_.repetitions,
                                                     ": allowed are 3 to ", kMostRepetitions));
    }
    if (options_.looks < 1 || options_.looks > kMostLooks) {
      return absl::InvalidArgumentError(
          absl::StrCat("--looks=", options_.looks, ": allowed are 1 to ", kMostLooks));
    }
    if (options_.program.empty() || options_.program[0] == '/') {
      return absl::InvalidArgumentError(
          absl::StrCat("--program=", options_.program,
                       ": a path relative to the checkout is wanted, as each commit builds its "
                       "own"));
    }
    if (options_.build.empty()) {
      return absl::InvalidArgumentError("--build: name the command that builds a commit");
    }
    TFB_ASSIGN_OR_RETURN(Repository repository, Repository::Open(options_.repository));
    repository_ = std::make_unique<Repository>(std::move(repository));
    TFB_ASSIGN_OR_RETURN(const std::string bad, Resolve("--bad", options_.bad));
    TFB_ASSIGN_OR_RETURN(std::string good, Resolve("--good", options_.good));
    TFB_RETURN_IF_ERROR(FindGood(bad, &good));
    TFB_ASSIGN_OR_RETURN(line_, repository_->FirstParentLine(good, bad));
    result_.good = line_.front();
    result_.bad = line_.back();
    const int changes = static_cast<int>(line_.size()) - 1;
    progress_(absl::StrCat("good is ", ShortTitle(result_.good)));
    progress_(absl::StrCat("bad is ", ShortTitle(result_.bad), ", ", CountOf(changes, "commit"),
                           " later on the first-parent line: about ",
                           CountOf(StepsToFind(changes + 1), "step")));
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Resolve(absl::string_view flag, const std::string& name) const {
    if (name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": name a commit"));
    }
    absl::StatusOr<std::string> hash = repository_->Resolve(name);
    if (hash.ok()) return hash;
    return absl::Status(hash.status().code(), absl::StrCat(flag, ": ", hash.status().message()));
  }

  // Replaces a good commit that is no ancestor of the bad one by the last common ancestor.
  absl::Status FindGood(const std::string& bad, std::string* good) const {
    if (*good == bad) {
      return absl::InvalidArgumentError(
          absl::StrCat("--good and --bad are the same commit, ", bad));
    }
    TFB_ASSIGN_OR_RETURN(const bool is_newer, repository_->IsAncestor(bad, *good));
    if (is_newer) {
      return absl::InvalidArgumentError(
          absl::StrCat("--good=", options_.good, " is newer than --bad=", options_.bad,
                       ", whose descendant it is; exchange the two to find what made a case "
                       "better"));
    }
    TFB_ASSIGN_OR_RETURN(const bool is_older, repository_->IsAncestor(*good, bad));
    if (is_older) return absl::OkStatus();
    absl::StatusOr<std::string> base = repository_->MergeBase(*good, bad);
    if (!base.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--good=", options_.good,
                                                     " is no ancestor of --bad=", options_.bad,
                                                     ": ", base.status().message()));
    }
    TFB_ASSIGN_OR_RETURN(const Commit commit, repository_->Describe(*base));
    progress_(absl::StrCat("--good=", options_.good, " is no ancestor of --bad=", options_.bad,
                           "; their last common ancestor is taken as good: ", ShortTitle(commit)));
    *good = *base;
    return absl::OkStatus();
  }

  std::map<std::string, std::string> Question() const {
    return {{"repository", repository_->top()},
            {"good", result_.good.hash},
            {"bad", result_.bad.hash},
            {"case", options_.wanted},
            {"metric", std::string(Name(options_.metric))},
            {"least_change", absl::StrCat(options_.least_change)},
            {"build", options_.build},
            {"program", options_.program},
            {"sweep_flags", options_.sweep_flags},
            {"repetitions", absl::StrCat(options_.repetitions)},
            {"budget", options_.budget}};
  }

  // --- Measuring

  std::vector<std::string> FlagsOf(int look) const {
    std::vector<std::string> flags = SweepFlags(wanted_);
    flags.push_back(absl::StrCat("--time_budget=", options_.budget));
    if (!IsNoisy(options_.metric)) {
      flags.insert(flags.end(), {"--repetitions=3", "--rounds=1"});
      return flags;
    }
    // Each look after the first takes as many samples as all before.
    const int repetitions =
        std::min(options_.repetitions << std::max(0, look - 1), kMostSweepRepetitions);
    flags.push_back(absl::StrCat("--repetitions=", repetitions));
    flags.push_back(absl::StrCat("--rounds=", std::max(1, repetitions / kSamplesPerRound)));
    return flags;
  }

  // The record of a commit that cannot be measured says why.
  struct Measured {
    std::optional<PairReading> pair;
    std::string failure;
  };

  absl::StatusOr<Measured> Measure(const Commit& base, const Commit& commit, int look,
                                   bool failures_are_remembered) {
    BuildRecord builds[2];
    for (const Commit* one : {&base, &commit}) {
      TFB_ASSIGN_OR_RETURN(BuildRecord build, folder_->Build(*one));
      if (!build.failure.empty()) {
        if (failures_are_remembered) TFB_RETURN_IF_ERROR(folder_->Remember(*one, build));
        return Measured{std::nullopt, absl::StrCat(build.failure, "; its log is ", build.log)};
      }
      last_build_seconds_ = build.seconds;
      builds[one == &base ? 0 : 1] = std::move(build);
    }
    if (builds[0].program == builds[1].program) {
      PairReading same;
      same.what = result_.whole.what.empty() ? "program" : result_.whole.what;
      same.now = result_.whole.base;
      same.reason = "the same program";
      return Measured{std::move(same), ""};
    }
    std::vector<ResultSet> before, after;
    for (int i = 0; i <= look; ++i) {
      TFB_ASSIGN_OR_RETURN(const MeasurementRecord record,
                           folder_->Measure(base, commit, i, FlagsOf(i)));
      if (!record.failure.empty()) {
        if (failures_are_remembered) {
          TFB_RETURN_IF_ERROR(folder_->Remember(base, commit, i, record));
        }
        return Measured{std::nullopt, absl::StrCat(record.failure, "; its log is ", record.log)};
      }
      last_measurement_seconds_ = record.seconds;
      TFB_ASSIGN_OR_RETURN(ResultFile of_base, ReadResultFile(record.base_file));
      TFB_ASSIGN_OR_RETURN(ResultFile of_commit, ReadResultFile(record.new_file));
      before.push_back(std::move(of_base.results));
      after.push_back(std::move(of_commit.results));
    }
    absl::StatusOr<PairReading> pair = ReadPair(before, after, wanted_, options_.metric,
                                                options_.least_change, result_.whole.what);
    if (!pair.ok()) return Measured{std::nullopt, std::string(pair.status().message())};
    return Measured{*std::move(pair), ""};
  }

  // Measures two commits until it is clear whether they differ; the two ends, whose half way the
  // steps are compared with, also until it is clear by how much.
  absl::StatusOr<Measured> MeasureUntilClear(const Commit& base, const Commit& commit,
                                             bool are_ends) {
    Measured measured;
    for (int look = 0; look < options_.looks; ++look) {
      TFB_ASSIGN_OR_RETURN(measured,
                           Measure(base, commit, look, /*failures_are_remembered=*/!are_ends));
      if (!measured.pair.has_value()) return measured;
      const PairReading& pair = *measured.pair;
      progress_(absl::StrCat(commit.short_hash, " over ", base.short_hash, ": ", pair.what, " ",
                             FormatChange(pair), ", ", Word(pair)));
      const bool is_clear = IsChange(pair) && (!are_ends || IsKnownWell(pair.reading));
      if (is_clear || pair.verdict == Verdict::kSame || !IsNoisy(options_.metric)) break;
    }
    return measured;
  }

  // Measures bad against good. Returns whether they clearly differ; where not, the result says so.
  absl::StatusOr<bool> CompareEnds() {
    TFB_ASSIGN_OR_RETURN(const Measured ends,
                         MeasureUntilClear(result_.good, result_.bad, /*are_ends=*/true));
    if (!ends.pair.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat("good (", result_.good.short_hash,
                                                        ") and bad (", result_.bad.short_hash,
                                                        ") cannot be compared: ", ends.failure));
    }
    result_.whole = *ends.pair;
    if (IsChange(result_.whole)) return true;
    result_.verdict = BisectResult::Verdict::kNoDifference;
    if (!result_.whole.reason.empty()) absl::StrAppend(&result_.why, result_.whole.reason, "; ");
    if (result_.whole.reason == "the same program") {
      absl::StrAppend(&result_.why,
                      "the commits in between changed nothing that --program is made of");
    } else if (!IsNoisy(options_.metric)) {
      absl::StrAppend(&result_.why, "--metric chooses another quantity");
    } else if (result_.whole.verdict == Verdict::kSame) {
      absl::StrAppend(&result_.why,
                      "a smaller change is found with a lower --least_change, which is ",
                      options_.least_change, ", and more --repetitions");
    } else {
      absl::StrAppend(&result_.why, MoreLooks(),
                      "; a machine that does nothing else helps, and --sweep_flags=--min_time=1ms "
                      "where a run is shorter than that");
    }
    return false;
  }

  std::string MoreLooks() const {
    return absl::StrCat("--looks=", std::min(options_.looks + 2, kMostLooks),
                        " goes on with more samples");
  }

  void SayHowLong() {
    const int steps = StepsToFind(static_cast<int>(line_.size())) + 1;
    const double step = last_build_seconds_ + last_measurement_seconds_;
    progress_(absl::StrCat("about ", CountOf(steps, "step"), " of ", Duration(step), " (build ",
                           Duration(last_build_seconds_), ", measurement ",
                           Duration(last_measurement_seconds_), "), ", Duration(steps * step),
                           " in all"));
  }

  absl::StatusOr<std::optional<Reading>> MeasureStep(const SearchStep& step) {
    const Commit& commit = line_[static_cast<size_t>(step.commit)];
    TFB_ASSIGN_OR_RETURN(Measured measured, Measure(result_.good, commit, step.look,
                                                    /*failures_are_remembered=*/true));
    const bool is_third = options_.metric == BisectMetric::kStatus && measured.pair.has_value() &&
                          measured.pair->now != result_.whole.base &&
                          measured.pair->now != result_.whole.now;
    if (is_third) {
      measured.failure =
          absl::StrCat("its status is neither that of good nor that of bad: ", measured.pair->now);
      measured.pair.reset();
    }
    std::string line =
        absl::StrCat(CountOf(step.high - step.low, "commit"), " left: ", ShortTitle(commit));
    TriedCommit& tried = tried_[step.commit];
    tried.commit = commit;
    if (!measured.pair.has_value()) {
      tried.passed_over = measured.failure;
      progress_(absl::StrCat(line, ": passed over: ", measured.failure));
      return std::optional<Reading>();
    }
    tried.pair = *measured.pair;
    progress_(absl::StrCat(line, ": ", FormatChange(tried.pair), " of good",
                           tried.pair.reason == "the same program" ? ", being the same program"
                           : step.look > 0                         ? ", with more samples"
                                                                   : ""));
    return std::optional<Reading>(tried.pair.reading);
  }

  // --- The answer

  PairReading PairOf(int index) const {
    const auto found = tried_.find(index);
    if (found != tried_.end()) return found->second.pair;
    return index == 0 ? PairReading() : result_.whole;
  }

  absl::Status Conclude(const SearchResult& found) {
    result_.before = line_[static_cast<size_t>(found.low)];
    result_.commit = line_[static_cast<size_t>(found.high)];
    result_.left = found.high - found.low;
    result_.until_before = PairOf(found.low);
    result_.until_commit = PairOf(found.high);
    switch (found.end) {
      case SearchResult::End::kOneCommit:
        return Confirm();
      case SearchResult::End::kPassedOver:
        result_.verdict = BisectResult::Verdict::kRange;
        result_.why = "none of the commits in between can be built and measured";
        break;
      case SearchResult::End::kSpread:
        result_.why = absl::StrCat(
            "the change is spread over many commits: what is left between these is below "
            "--least_change=",
            options_.least_change);
        break;
      case SearchResult::End::kUnclear:
        result_.why =
            absl::StrCat("the samples do not tell on which side the next commit is; ", MoreLooks());
        break;
    }
    return absl::OkStatus();
  }

  // Measures the commit against the one before it.
  absl::Status Confirm() {
    result_.own = result_.whole;
    if (line_.size() > 2) {
      progress_(absl::StrCat("confirming ", ShortTitle(result_.commit), " against ",
                             result_.before.short_hash));
      TFB_ASSIGN_OR_RETURN(const Measured own, MeasureUntilClear(result_.before, result_.commit,
                                                                 /*are_ends=*/false));
      if (!own.pair.has_value()) {
        result_.why =
            absl::StrCat("it cannot be measured against the commit before it: ", own.failure);
        return absl::OkStatus();
      }
      result_.own = *own.pair;
    }
    if (result_.own.verdict == result_.whole.verdict) {
      result_.verdict = BisectResult::Verdict::kFound;
    } else {
      result_.why =
          absl::StrCat("measured against the commit before it, it is ", Word(result_.own), ": ",
                       FormatChange(result_.own),
                       "; the change may be spread over several commits, or ", MoreLooks());
    }
    return absl::OkStatus();
  }

  const BisectOptions options_;
  const BisectProgress progress_;
  BisectCase wanted_;
  std::unique_ptr<Repository> repository_;
  std::unique_ptr<BisectFolder> folder_;
  std::vector<Commit> line_;  // from good to bad
  std::map<int, TriedCommit> tried_;
  double last_build_seconds_ = 0, last_measurement_seconds_ = 0;
  BisectResult result_;
};

}  // namespace

absl::StatusOr<BisectResult> Bisect(const BisectOptions& options, const BisectProgress& progress) {
  return Bisection(options, progress).Run();
}

}  // namespace tfb
