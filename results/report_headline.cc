// Summarizes a result set in three sentences.

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/choices.h"
#include "results/describe.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {
namespace {

// The limits of the relative error against dense, of which the first with a technique faster than
// dense is used: a tenth of the output's norm, then what a reader may still tolerate.
constexpr double kErrorLimits[] = {0.1, 0.3, 0.5};
constexpr size_t kMostReasons = 3;  // in the last sentence

// The choices of one mask.
struct Mask {
  const TableGroup* group = nullptr;
  int64_t tokens = 0;
  ChoiceSet set;
  const Choice* fastest = nullptr;  // within the limit, or null
  bool sure = true;                 // the samples tell it apart from dense
  std::string name() const { return group->first().key().problem().causal() ? "causal" : "full"; }
};

// Returns the fastest within the limit: with `sure` of those significantly faster than dense, else
// of those that are faster in too few samples.
const Choice* FastestWithin(const ChoiceSet& set, double limit, bool sure) {
  const Choice* fastest = nullptr;
  for (const Choice& choice : set.choices) {
    if (choice.series->is_baseline || !choice.speed_up.has_value()) continue;
    const SpeedUpInterval& speed_up = *choice.speed_up;
    const bool faster = sure ? speed_up.distinct && speed_up.ratio > 1
                             : !speed_up.is_95_percent && speed_up.low > 1;
    if (!faster || !(choice.error <= limit)) continue;
    if (fastest == nullptr || choice.time_ns < fastest->time_ns) fastest = &choice;
  }
  return fastest;
}

// Finds the fastest of each mask. Returns the limit that was used, or nothing where no technique is
// faster than dense within any limit.
std::optional<double> FindFastest(std::vector<Mask>* masks) {
  for (const bool sure : {true, false}) {
    for (const double limit : kErrorLimits) {
      bool any = false;
      for (Mask& mask : *masks) {
        mask.fastest = FastestWithin(mask.set, limit, sure);
        mask.sure = sure;
        any = any || mask.fastest != nullptr;
      }
      if (!any) continue;
      for (Mask& mask : *masks) {
        if (mask.fastest != nullptr) continue;
        mask.fastest = FastestWithin(mask.set, limit, false);
        mask.sure = false;
      }
      return limit;
    }
  }
  return std::nullopt;
}

std::string DenseName(const Mask& mask) {
  return mask.set.dense == nullptr ? "dense" : NameInText(*mask.set.dense);
}

std::string LengthText(const Mask& mask) {
  return absl::StrCat(mask.tokens, " ", LengthName(*mask.group));
}

// Returns heads, their dimensions and the batch: "8 heads of 64, batch 4".
std::string ShapeText(const TableGroup& group) {
  ProblemSize problem = group.first().key().problem();
  problem.clear_causal();
  return DescribeProblem(problem, /*with_tokens=*/false);
}

std::string InputText(const TableGroup& group) {
  return absl::StrCat("input ", DescribeInput(group.first().key().input()));
}

// Returns the conditions of a sentence about `mask`: device and element type, and whatever else
// tells its group from the other groups of that pass in which there is a choice.
std::string ConditionsText(const Analysis& analysis, const Mask& mask) {
  const Case::Key& key = mask.group->first().key();
  std::vector<std::string> parts = {std::string(Name(key.device())),
                                    std::string(Name(key.dtype()))};
  if (HasSeveralThreads(*mask.group)) {
    parts.push_back(ThreadsText(*mask.set.choices.front().series));
  }
  const std::vector<TableGroup> groups = ChoiceGroups(analysis, mask.group->pass());
  for (std::string (*text_of)(const TableGroup&) : {&ShapeText, &InputText}) {
    const std::string text = text_of(*mask.group);
    const bool differs = std::any_of(groups.begin(), groups.end(), [&](const TableGroup& other) {
      return text_of(other) != text;
    });
    if (differs) parts.push_back(text);
  }
  if (!mask.group->front().place.empty()) parts.push_back(mask.group->front().place);
  return absl::StrCat(" (", absl::StrJoin(parts, ", "), ", errors on input ", mask.set.inputs, ")");
}

// Returns "under the causal mask near window=256: 5.8x [5.7, 5.9] as fast as dense at 4096 tokens,
// error 0.18".
std::string FastestText(const Mask& mask) {
  const std::string begin = absl::StrCat("under the ", mask.name(), " mask ");
  if (mask.fastest == nullptr) {
    return absl::StrCat(begin, "none is faster than ", DenseName(mask), " at ", LengthText(mask));
  }
  const SpeedUpInterval& speed_up = *mask.fastest->speed_up;
  return absl::StrCat(begin, NameInText(*mask.fastest->series), ": ", FormatRatio(speed_up.ratio),
                      " ", FormatInterval(speed_up.low, speed_up.high), " as fast as ",
                      DenseName(mask), " at ", LengthText(mask), ", error ",
                      FormatError(mask.fastest->error),
                      mask.sure ? "" : ", of too few samples to be sure");
}

// Returns the beginning of a sentence about a pass: "In a training step, with ..." from "With ...".
std::string OfPass(Case::Pass pass, std::string sentence) {
  if (pass == Case::PASS_FORWARD) return sentence;
  sentence.front() = absl::ascii_tolower(static_cast<unsigned char>(sentence.front()));
  return absl::StrCat("In a ", DescribePass(pass), ", ", sentence);
}

std::string FastestSentence(const Analysis& analysis, const std::vector<Mask>& masks,
                            double limit) {
  std::vector<std::string> parts;
  for (const Mask& mask : masks) parts.push_back(FastestText(mask));
  std::string sentence =
      absl::StrCat("With an error of at most ", FormatBound(limit), " against dense ");
  if (limit > kErrorLimits[0]) {
    absl::StrAppend(&sentence, "(with at most ", FormatBound(kErrorLimits[0]),
                    " none is surely faster than ", DenseName(masks.front()), ") ");
  }
  return absl::StrCat(sentence, "the fastest technique is ", absl::StrJoin(parts, "; "),
                      ConditionsText(analysis, masks.front()), ".");
}

// Returns "near window=256 is faster than dense from 707 [690, 725] tokens on under the causal mask
// and takes 4 MiB of memory at 4096 tokens, where dense takes 8 MiB".
std::string CostText(const Mask& mask) {
  const Series& series = *mask.fastest->series;
  const std::optional<std::string> from =
      series.crossover.has_value() ? FasterFromText(*series.crossover) : std::nullopt;
  std::string text = absl::StrCat(
      NameInText(series), mask.sure ? " is faster than " : " seems faster than ", DenseName(mask),
      " ",
      from.has_value() ? absl::StrCat("from ", *from, " ", LengthName(*mask.group), " on")
                       : absl::StrCat("at ", LengthText(mask)),
      " under the ", mask.name(), " mask");
  if (!mask.fastest->memory.has_value()) return text;
  absl::StrAppend(&text, " and takes ", FormatBytes(mask.fastest->memory), " of memory at ",
                  LengthText(mask));
  for (const Choice& choice : mask.set.choices) {
    if (choice.series == mask.set.dense && choice.memory.has_value()) {
      absl::StrAppend(&text, ", where ", DenseName(mask), " takes ", FormatBytes(choice.memory));
    }
  }
  return text;
}

std::string CostSentence(const std::vector<Mask>& masks) {
  std::vector<std::string> parts;
  for (const Mask& mask : masks) {
    if (mask.fastest != nullptr) parts.push_back(CostText(mask));
  }
  return absl::StrCat(absl::StrJoin(parts, "; "), ".");
}

std::string Cases(int64_t count) { return absl::StrCat(count, count == 1 ? " case" : " cases"); }

// Says how many cases did not run, by reason, the most frequent first, and how many failed.
std::string MissingSentence(const Analysis& analysis) {
  std::map<std::string, int64_t> counts;
  int64_t missing = 0, failed = 0;
  for (const Case* result : analysis.cases()) {
    const Outcome& outcome = result->outcome();
    if (outcome.status() == Outcome::STATUS_OK) continue;
    if (outcome.status() == Outcome::STATUS_FAILED) {
      ++failed;
      continue;
    }
    ++missing;
    ++counts[outcome.reason().empty() ? std::string(Name(outcome.status()))
                                      : Printable(outcome.reason())];
  }
  const int64_t all = static_cast<int64_t>(analysis.cases().size());
  const std::string failures =
      failed == 0 ? "no error exceeds its bound" : absl::StrCat(Cases(failed), " failed");
  if (missing == 0) return absl::StrCat("All ", Cases(all), " ran, and ", failures, ".");
  std::vector<std::pair<std::string, int64_t>> reasons(counts.begin(), counts.end());
  std::stable_sort(reasons.begin(), reasons.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<std::string> parts;
  int64_t named = 0;
  for (size_t i = 0; i < std::min(reasons.size(), kMostReasons); ++i) {
    parts.push_back(absl::StrCat(reasons[i].second, " (", reasons[i].first, ")"));
    named += reasons[i].second;
  }
  if (named < missing) {
    parts.push_back(
        absl::StrCat(missing - named, " (", reasons.size() - kMostReasons,
                     reasons.size() == kMostReasons + 1 ? " more reason)" : " more reasons)"));
  }
  return absl::StrCat("Missing are ", missing, " of ", Cases(all),
                      ", which did not run: ", absl::StrJoin(parts, ", "), "; of those that ran, ",
                      failed == 0 ? "no error exceeds its bound" : absl::StrCat(failed, " failed"),
                      ".");
}

}  // namespace

namespace {

// Returns the set of choices that the sentences are about: the first one or, where that has a
// counterpart of its own, the first in which a technique is faster than its counterpart.
ChoiceSet SetOf(std::vector<ChoiceSet> sets) {
  if (sets.front().is_apart() && sets.front().techniques() < 2) {
    for (ChoiceSet& set : sets) {
      if (FastestWithin(set, *std::rbegin(kErrorLimits), /*sure=*/true) != nullptr) return set;
    }
  }
  return sets.front();
}

// Returns the row of the group that others are held against and that was asked for, at a length; or
// null.
const Series* BaselineAt(const TableGroup& group, int64_t tokens) {
  for (const Series* series : group.AllSeries()) {
    if (series->is_common_baseline && series->run_ns.count(tokens) > 0) return series;
  }
  return nullptr;
}

// Returns the sentences where no technique is faster than what it is held against. A counterpart of
// other options than the default ones is none that could be chosen.
std::vector<std::string> NoneIsFaster(const Analysis& analysis, const Mask& mask) {
  const bool own = mask.set.is_apart();
  const Series* choice = own ? BaselineAt(*mask.group, mask.tokens) : mask.set.dense;
  const std::string name = choice == nullptr ? "dense" : NameInText(*choice);
  return {absl::StrCat(
              "No technique with an error of at most ", FormatBound(*std::rbegin(kErrorLimits)),
              " against dense is measurably faster than ", own ? "its dense counterpart" : name,
              " at ", LengthText(mask), ConditionsText(analysis, mask), "."),
          own && choice == nullptr
              ? std::string("Other lengths are in the tables.")
              : absl::StrCat("At that length ", name,
                             " is the choice; other lengths are in the tables.")};
}

std::vector<std::string> SentencesOf(const Analysis& analysis,
                                     const std::vector<TableGroup>& groups) {
  std::vector<Mask> masks;
  for (const TableGroup& group : groups) {
    const int64_t tokens = SharedLength(group);
    masks.push_back({&group, tokens, SetOf(FindChoiceSets(analysis, group, tokens)), nullptr});
  }
  const std::optional<double> limit = FindFastest(&masks);
  if (!limit.has_value()) return NoneIsFaster(analysis, masks.front());
  return {FastestSentence(analysis, masks, *limit), CostSentence(masks)};
}

}  // namespace

std::vector<std::string> RecommendationSentences(const Analysis& analysis) {
  std::vector<std::string> sentences;
  for (const Case::Pass pass : PassesToChooseBy(analysis)) {
    for (std::string& sentence : SentencesOf(analysis, MainGroups(analysis, pass))) {
      sentences.push_back(OfPass(pass, std::move(sentence)));
    }
  }
  return sentences;
}

std::vector<std::string> HeadlineSentences(const Analysis& analysis) {
  if (analysis.cases().empty()) return {};
  std::vector<std::string> sentences = RecommendationSentences(analysis);
  if (sentences.empty()) {
    sentences = {"Nothing can be recommended: no two techniques have both a time and an error.",
                 "No speed-up, no crossover and no memory can be compared."};
  }
  sentences.push_back(MissingSentence(analysis));
  return sentences;
}

}  // namespace report
}  // namespace tfb
