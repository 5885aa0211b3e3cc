#include "results/history/bisect_report.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "results/table.h"

namespace tfb {
namespace {

constexpr int kDigits = 3;

std::string Ratio(double ratio) { return absl::StrCat(FormatSignificant(ratio, kDigits), "x"); }

// Returns "run time over dense 1.31x [1.28, 1.34], 0.95 -> 1.25".
std::string WholeChange(const PairReading& pair) {
  if (pair.what == "status") return absl::StrCat("status ", pair.base, " -> ", pair.now);
  return absl::StrCat(pair.what, " ", FormatChange(pair),
                      pair.base.empty() ? "" : absl::StrCat(", ", pair.base, " -> ", pair.now));
}

// Returns the logarithm of a ratio, or nothing where it is not positive and finite.
std::optional<double> LogOf(const PairReading& pair) {
  const double ratio = pair.reading.ratio;
  if (!(ratio > 0) || !std::isfinite(ratio)) return std::nullopt;
  return std::log(ratio);
}

void AppendFound(const BisectResult& result, std::string* text) {
  const Commit& commit = result.commit;
  absl::StrAppend(text, commit.hash, "\nAuthor: ", Printable(commit.author),
                  "\nDate:   ", commit.date, "\n\n    ", Printable(commit.subject), "\n\n",
                  "changed ", result.own.subject, ":\n  ", WholeChange(result.own),
                  " over the commit before it, ", result.before.short_hash,
                  result.own.reading.low < result.own.reading.high ? " (95% interval)" : "", "\n");
  for (const std::string& difference : result.own.build_differences) {
    absl::StrAppend(text, "  ", Printable(difference), "\n");
  }
  if (!result.own.reason.empty()) absl::StrAppend(text, "  ", Printable(result.own.reason), "\n");
  if (commit.parents.size() > 1) {
    const std::string& name = commit.short_hash;
    absl::StrAppend(text, "It is a merge. To search the merged branch: --good=$(git merge-base ",
                    name, "^1 ", name, "^2) --bad=", name, "^2\n");
  }
}

void AppendUnclear(const BisectResult& result, std::string* text) {
  if (result.left == 1) {
    absl::StrAppend(text, "The steps lead to ", ShortTitle(result.commit),
                    ", but do not prove it:\n", result.why, "\n");
    return;
  }
  absl::StrAppend(text, "It is one of ", CountOf(result.left, "commit"),
                  ", or several of them, after ", ShortTitle(result.before), " up to ",
                  ShortTitle(result.commit), ":\n", result.why, "\n");
}

// Says what part of the whole change came before and after the commit that was found.
void AppendRest(const BisectResult& result, std::string* text) {
  const std::optional<double> whole = LogOf(result.whole), before = LogOf(result.until_before),
                              until = LogOf(result.until_commit);
  if (!whole.has_value() || !before.has_value() || !until.has_value()) return;
  const double least = std::log(result.least_change);
  if (std::fabs(*before) > least) {
    absl::StrAppend(text, "Before it the case changed as well, ", Ratio(std::exp(*before)),
                    ": bisect again with --bad=", result.before.short_hash, "\n");
  }
  if (std::fabs(*whole - *until) > least) {
    absl::StrAppend(text, "After it the case changed as well, ", Ratio(std::exp(*whole - *until)),
                    ": bisect again with --good=", result.commit.short_hash, "\n");
  }
}

// A commit of the line with its change since the good one.
struct Point {
  const Commit* commit;
  const PairReading* pair;
};

// Names the two neighbours, of the commits that were measured, with the largest change.
void AppendLargestStep(const std::vector<Point>& points, std::string* text) {
  double largest = 0;
  size_t at = 0;
  for (size_t i = 1; i < points.size(); ++i) {
    const std::optional<double> from = LogOf(*points[i - 1].pair), to = LogOf(*points[i].pair);
    if (!from.has_value() || !to.has_value()) return;
    if (std::fabs(*to - *from) <= std::fabs(largest)) continue;
    largest = *to - *from;
    at = i;
  }
  if (at == 0) return;
  absl::StrAppend(text, "The largest change between two of them is ", Ratio(std::exp(largest)),
                  ", after ", points[at - 1].commit->short_hash, " up to ",
                  points[at].commit->short_hash, ".\n");
}

void AppendMeasured(const BisectResult& result, std::string* text) {
  const PairReading none;
  std::vector<Point> points = {{&result.good, &none}};
  absl::StrAppend(text, "\nBy turns with ", ShortTitle(result.good), ", good:\n");
  for (const TriedCommit& tried : result.tried) {
    const bool is_measured = tried.passed_over.empty();
    if (is_measured) points.push_back({&tried.commit, &tried.pair});
    absl::StrAppend(text, "  ", ShortTitle(tried.commit), ": ",
                    is_measured ? FormatChange(tried.pair) : tried.passed_over, "\n");
  }
  points.push_back({&result.bad, &result.whole});
  absl::StrAppend(text, "  ", ShortTitle(result.bad), ", bad: ", WholeChange(result.whole), "\n");
  if (result.verdict == BisectResult::Verdict::kUnclear) AppendLargestStep(points, text);
}

}  // namespace

std::string RenderBisect(const BisectResult& result) {
  std::string text;
  switch (result.verdict) {
    case BisectResult::Verdict::kNoDifference:
      absl::StrAppend(&text, "No clear difference between good and bad: ", result.why, "\n");
      break;
    case BisectResult::Verdict::kFound:
      AppendFound(result, &text);
      AppendRest(result, &text);
      break;
    case BisectResult::Verdict::kRange:
    case BisectResult::Verdict::kUnclear:
      AppendUnclear(result, &text);
      break;
  }
  AppendMeasured(result, &text);
  absl::StrAppend(&text, "\nResults and logs: ", result.folder, "\n");
  return text;
}

std::string FormatChange(const PairReading& pair) {
  if (pair.what == "status") return pair.now;
  const Reading& reading = pair.reading;
  if (!(reading.low < reading.high)) return Ratio(reading.ratio);
  return absl::StrCat(Ratio(reading.ratio), " [", FormatSignificant(reading.low, kDigits), ", ",
                      FormatSignificant(reading.high, kDigits), "]");
}

std::string ShortTitle(const Commit& commit) {
  return absl::StrCat(commit.short_hash, " \"", Printable(commit.subject), "\"");
}

std::string CountOf(int count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

}  // namespace tfb
