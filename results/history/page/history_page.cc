#include "results/history/page/history_page.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "results/history/page/history_data.h"
#include "results/history/page/history_page_assets.h"
#include "results/history/page/ranking.h"
#include "results/history/page/series_text.h"
#include "results/markup.h"
#include "results/page_assets.h"
#include "results/table.h"

namespace tfb {
namespace {

// A thousand runs of eight hundred cases take 1 MB of this; what is left of 5 MB is for the texts of
// runs, cases and changes.
constexpr size_t kMostSeriesBytes = 3000000;
constexpr size_t kMostRows = 200;  // of a table; the panels show all changes
constexpr size_t kTallTable = 15;  // rows beyond which a table scrolls within the page
constexpr size_t kOpenRows = 10;   // up to which a table that matters less is not folded
constexpr size_t kAbbreviation = 8;

std::string Counted(size_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string Date(int64_t unix_s) {
  return absl::FormatTime("%Y-%m-%d", absl::FromUnixSeconds(unix_s), absl::UTCTimeZone());
}
std::string DateOf(const RunInfo& run) {
  return Date(run.commit_unix_s.value_or(run.start_unix_s));
}

std::string PercentEncoded(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.') {
      out += c;
    } else {
      absl::StrAppend(&out, "%", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
  }
  return out;
}

// What the page calls the changes of each kind.
struct KindText {
  absl::string_view title;         // of their table
  absl::string_view one, several;  // in the verdict
  absl::string_view size_class;
};
constexpr KindText kKindTexts[kChangeKinds] = {
    {"Regressions that nobody has acknowledged", "unacknowledged regression",
     "unacknowledged regressions", "bad"},
    {"Acknowledged regressions", "is acknowledged", "are acknowledged", "strong"},
    {"Recovered", "has recovered", "have recovered", "strong"},
    {"Improvements", "is an improvement", "are improvements", "good"},
    {"Worse, but no regressions", "is worse but no regression", "are worse but no regressions",
     "strong"},
};
const KindText& TextOf(ChangeKind kind) { return kKindTexts[static_cast<int>(kind)]; }

class Page {
 public:
  Page(const History& history, const std::vector<Change>& changes,
       const HistoryPageOptions& options)
      : history_(history), changes_(changes), options_(options) {
    for (int kind = 0; kind < kChangeKinds; ++kind) {
      by_kind_[kind] = ChangesOf(static_cast<ChangeKind>(kind), history_, changes_);
    }
    for (const Machine& machine : history_.machines) runs_ += machine.runs.size();
  }

  std::string Render() const {
    std::string out = absl::StrCat(BeginPage(Title(), absl::StrCat(kPageStyle, kHistoryPageStyle)),
                                   "<header class=\"top\">\n", Element("h1", Title()), Verdict(),
                                   Notes(), Machines(), "</header>\n");
    if (runs_ == 0) return out + "<main></main>\n</body>\n</html>\n";
    const SeriesTexts texts = MakeSeriesTexts(history_, changes_, kMostSeriesBytes);
    return absl::StrCat(
        out, "<main>\n", Changes(), "<section id=\"series\"><h2>Series</h2>\n", WhatIsKept(texts),
        "<noscript><p class=\"strong\">The panels are drawn by a script, which this browser does "
        "not run.</p></noscript>\n</section>\n</main>\n",
        Controls(),
        "<div id=\"cases\" class=\"cases\"></div>\n"
        "<dialog id=\"large\" aria-labelledby=\"large-title\"></dialog>\n",
        Footer(), "<script type=\"application/json\" id=\"data\"",
        Attribute("data-commit-url", CommitUrl()), ">", HistoryJson(history_, changes_, texts),
        "</script>\n<script>\n", kHistoryPageScript, "</script>\n</body>\n</html>\n");
  }

 private:
  std::string Title() const {
    return options_.title.empty() ? "History" : Printable(options_.title);
  }
  std::string CommitUrl() const {
    return IsCommitUrl(options_.commit_url) ? options_.commit_url : "";
  }
  const std::vector<int>& Of(ChangeKind kind) const { return by_kind_[static_cast<int>(kind)]; }
  const RunInfo& RunOf(const HistorySeries& series, int place) const {
    return history_.machines[series.machine].runs[series.runs[place]];
  }

  // Returns the commit, linked where its address is known, with its subject as a hint.
  std::string Commit(const RunInfo& run) const {
    const std::string name = run.commit.empty() ? absl::StrCat("run ", Printable(run.name))
                                                : Printable(run.commit.substr(0, kAbbreviation));
    const std::string hint =
        run.commit_subject.empty() ? "" : Attribute("title", Printable(run.commit_subject));
    const std::string changed =
        run.dirty ? "<abbr title=\"with changes that are not committed\">+</abbr>" : "";
    const bool linked = !run.commit.empty() && !CommitUrl().empty();
    const std::string url =
        linked ? absl::StrReplaceAll(CommitUrl(), {{"%s", PercentEncoded(run.commit)}}) : "";
    return absl::StrCat(linked ? absl::StrCat("<a class=\"commit\" rel=\"noreferrer\"",
                                              Attribute("href", url), hint, ">")
                               : absl::StrCat("<span class=\"commit\"", hint, ">"),
                        EscapeMarkup(name), linked ? "</a>" : "</span>", changed);
  }

  std::string Verdict() const {
    if (runs_ == 0) return Element("p", "No runs: the store is empty.", " class=\"message\"");
    const size_t regressions = Of(ChangeKind::kRegression).size();
    std::set<std::pair<int, std::string>> cases;
    for (const HistorySeries& series : history_.series) {
      if (series.tokens > 0) cases.emplace(series.machine, series.key);
    }
    const KindText& text = TextOf(ChangeKind::kRegression);
    std::string out =
        absl::StrCat("<p class=\"message\"><span class=\"", regressions > 0 ? "bad" : "count",
                     "\">", regressions > 0 ? absl::StrCat(regressions) : "No", " ",
                     regressions == 1 ? text.one : text.several, "</span> on ",
                     Counted(history_.machines.size(), "machine"), " over ", Counted(runs_, "run"),
                     " of ", Counted(cases.size(), "case"), ".");
    std::vector<std::string> others;
    for (int kind = 1; kind < kChangeKinds; ++kind) {
      const size_t count = by_kind_[kind].size();
      if (count == 0) continue;
      others.push_back(
          absl::StrCat(count, " ", count == 1 ? kKindTexts[kind].one : kKindTexts[kind].several));
    }
    if (!others.empty()) {
      absl::StrAppend(&out, " Of the other changes, ", absl::StrJoin(others, ", "), ".");
    }
    out += "</p>\n";
    if (history_.machines.front().runs.empty()) return out;
    const RunInfo& latest = history_.machines.front().runs.back();
    absl::StrAppend(&out, "<p class=\"message\">The latest run is of ",
                    latest.commit.empty() ? "" : "commit ", Commit(latest));
    if (!latest.commit_subject.empty()) {
      absl::StrAppend(&out, ", “", EscapeMarkup(Printable(latest.commit_subject)), "”,");
    }
    absl::StrAppend(&out, " on <span class=\"date\">", DateOf(latest), "</span>.</p>\n");
    return out;
  }

  std::string Notes() const {
    std::string out;
    for (const std::string& note : options_.notes) {
      out += Element("p", Printable(note), " class=\"strong\"");
    }
    return out;
  }

  std::string Machines() const {
    if (history_.machines.empty()) return "";
    std::string out = "<ol class=\"machines\">\n";
    for (const Machine& machine : history_.machines) {
      out += Element(
          "li",
          absl::StrCat(Printable(machine.signature), ": ", Counted(machine.runs.size(), "run"),
                       machine.runs.empty() ? ""
                                            : absl::StrCat(", ", DateOf(machine.runs.front()),
                                                           " to ", DateOf(machine.runs.back()))));
    }
    return out + "</ol>\n";
  }

  std::string Changes() const {
    std::string out = "<section id=\"changes\"><h2>What changed</h2>\n";
    if (changes_.empty()) {
      out += Element("p", "No level of any series changed by more than its noise.");
    }
    for (int kind = 0; kind < kChangeKinds; ++kind) out += ChangesOfKind(kind);
    return out + "</section>\n";
  }

  std::string ChangesOfKind(int kind) const {
    const std::vector<int>& own = by_kind_[kind];
    if (own.empty()) return "";
    const std::string title = absl::StrCat(kKindTexts[kind].title, ": ", own.size());
    const std::string id = absl::StrCat("changes-", kind + 1);
    std::string table = absl::StrCat(
        "<div class=\"table", std::min(own.size(), kMostRows) > kTallTable ? " tall" : "",
        "\" tabindex=\"0\" role=\"region\"", Attribute("aria-labelledby", id),
        "><table><thead><tr><th scope=\"col\">case</th><th scope=\"col\" class=\"l\">metric</th>"
        "<th scope=\"col\">change</th><th scope=\"col\">from → to</th>"
        "<th scope=\"col\" class=\"l\">commit</th></tr></thead>\n<tbody>\n");
    for (size_t i = 0; i < std::min(own.size(), kMostRows); ++i) table += Row(changes_[own[i]]);
    table += "</tbody></table></div>\n";
    if (own.size() > kMostRows) {
      table +=
          Element("p", absl::StrCat("The panels mark ", own.size() - kMostRows, " smaller ones."),
                  " class=\"note\"");
    }
    const bool matters = kind <= static_cast<int>(ChangeKind::kAcknowledged);
    if (matters) return absl::StrCat(Element("h3", title, Attribute("id", id)), table);
    return absl::StrCat("<details", own.size() <= kOpenRows ? " open" : "", ">",
                        Element("summary", title, Attribute("id", id)), table, "</details>\n");
  }

  std::string Row(const Change& change) const {
    const HistorySeries& series = history_.series[change.series];
    const std::string machine =
        history_.machines.size() > 1 ? absl::StrCat(", machine ", series.machine + 1) : "";
    const std::string interval = SizeInterval(history_, change);
    return absl::StrCat(
        "<tr><td><a", Attribute("href", "#series=" + SeriesId(history_, series)), ">",
        EscapeMarkup(Printable(series.name)), "</a> <small class=\"faint\">",
        EscapeMarkup(Printable(series.problem)), machine, "</small></td><td class=\"l\">",
        EscapeMarkup(MetricTitle(series.metric)), "</td><td class=\"",
        TextOf(KindOf(change)).size_class, "\">", EscapeMarkup(SizeText(history_, change)),
        interval.empty() ? "" : absl::StrCat("<br><small class=\"faint\">", interval, "</small>"),
        "</td><td>",
        HasRatio(history_, change)
            ? EscapeMarkup(absl::StrCat(FormatValue(series.metric, change.before), " → ",
                                        FormatValue(series.metric, change.after)))
            : "",
        "</td><td class=\"l w\">", Commits(series, change), Remarks(series, change),
        "</td></tr>\n");
  }

  // Says between which commits the change lies, and what the later one is about.
  std::string Commits(const HistorySeries& series, const Change& change) const {
    const RunInfo& from = RunOf(series, change.at - 1);
    const RunInfo& to = RunOf(series, change.at);
    const int between = series.runs[change.at] - series.runs[change.at - 1] - 1;
    std::string out;
    if (!from.commit.empty() && from.commit == to.commit) {
      out = absl::StrCat(Commit(to), " in both runs");
    } else if (between > 0) {
      out = absl::StrCat("between ", Commit(from), " and ", Commit(to), ", with ",
                         Counted(between, "run"), " between them that ",
                         between == 1 ? "has" : "have", " no value");
    } else {
      out = absl::StrCat(Commit(from), " → ", Commit(to));
    }
    const std::string from_date = DateOf(from), to_date = DateOf(to);
    absl::StrAppend(&out, ", <span class=\"date\">",
                    from_date == to_date ? "" : absl::StrCat(from_date, " to "), to_date,
                    "</span>");
    if (!to.commit_subject.empty()) {
      absl::StrAppend(&out, "<br>", EscapeMarkup(Printable(to.commit_subject)));
    }
    return out;
  }

  std::string Remarks(const HistorySeries& series, const Change& change) const {
    std::vector<std::string> remarks;
    if (series.metric == HISTORY_METRIC_STATUS && change.worse && !series.reason.empty()) {
      remarks.push_back("the last reason: " + series.reason);
    }
    if (!change.acknowledged.empty()) remarks.push_back("acknowledged: " + change.acknowledged);
    if (!change.reason.empty()) remarks.push_back("no regression: " + change.reason);
    if (!change.build_differences.empty()) {
      remarks.push_back("the build changed, too: " + absl::StrJoin(change.build_differences, "; "));
    }
    std::string out;
    for (const std::string& remark : remarks) {
      absl::StrAppend(&out, "<br><small class=\"faint\">", EscapeMarkup(Printable(remark)),
                      "</small>");
    }
    if (change.recovered) {
      const RunInfo& back = RunOf(series, change.recovered_at);
      absl::StrAppend(&out, "<br><small class=\"faint\">recovered with ", Commit(back), ", ",
                      DateOf(back), "</small>");
    }
    return out;
  }

  std::string WhatIsKept(const SeriesTexts& texts) const {
    size_t longest = 0;
    for (const HistorySeries& series : history_.series) {
      longest = std::max(longest, series.values.size());
    }
    const int group = LargestGroup(static_cast<int>(longest), texts.detail);
    const std::string older =
        group == 1
            ? " Every value is kept"
            : absl::StrCat(" The latest ", texts.detail.latest, " values and ", texts.detail.around,
                           " on either side of a change are kept one by one, and older ones as "
                           "the median, least and greatest of up to ",
                           group, " runs,");
    return Element(
        "p",
        absl::StrCat("Each panel shows a metric of a case over the runs of a machine, the latest "
                     "at the right; of all metrics, less is better. Cases with regressions come "
                     "first, then those with other changes, then by noise. A vertical line "
                     "marks a change, and horizontal ones the levels before and after it.",
                     older,
                     " within 0.1%; metrics with few different values are kept exactly. "
                     "Levels and changes are computed from the exact values."),
        " class=\"caption\"");
  }

  // The script shows the controls, which do not work without it.
  std::string Controls() const {
    std::set<std::string> families;
    std::set<HistoryMetric> metrics;
    for (const HistorySeries& series : history_.series) {
      if (!series.family.empty()) families.insert(Printable(series.family));
      metrics.insert(series.metric);
    }
    std::string out =
        "<div class=\"controls\" role=\"search\"><form hidden>\n"
        "<label>Show <input name=\"text\" type=\"search\" size=\"14\" "
        "placeholder=\"case or problem\" autocomplete=\"off\"></label>\n";
    if (history_.machines.size() > 1) {
      out += "<label>on <select name=\"machine\"><option value=\"\">all machines</option>";
      for (size_t m = 0; m < history_.machines.size(); ++m) {
        absl::StrAppend(&out, "<option", Attribute("value", absl::StrCat(m + 1)), ">", m + 1, ": ",
                        EscapeMarkup(CutToWidth(Printable(history_.machines[m].signature), 40)),
                        "</option>");
      }
      out += "</select></label>\n";
    }
    out += "<label>family <select name=\"family\"><option value=\"\">all</option>";
    for (const std::string& family : families) {
      absl::StrAppend(&out, "<option", Attribute("value", family), ">", EscapeMarkup(family),
                      "</option>");
    }
    out +=
        "</select></label>\n<label>metric <select name=\"metric\"><option value=\"\">all</option>";
    for (const HistoryMetric metric : metrics) {
      absl::StrAppend(&out, "<option", Attribute("value", MetricName(metric)), ">",
                      EscapeMarkup(MetricTitle(metric)), "</option>");
    }
    return out +
           "</select></label>\n"
           "<label>runs <select name=\"last\"><option value=\"\">all</option>"
           "<option value=\"300\">last 300</option><option value=\"100\">last 100</option>"
           "<option value=\"30\">last 30</option></select></label>\n"
           "<label>sort by <select name=\"sort\"><option value=\"\">what matters now</option>"
           "<option value=\"latest\">latest change</option>"
           "<option value=\"noise\">noise</option><option value=\"case\">case</option>"
           "</select></label>\n"
           "<label><input name=\"changed\" type=\"checkbox\" value=\"1\">changed only</label>\n"
           "<button type=\"reset\">Show all</button>\n"
           "<output aria-live=\"polite\"></output>\n</form></div>\n";
  }

  std::string Footer() const {
    return absl::StrCat(
        "<footer>\n",
        Element("p",
                "A panel takes the arrow keys, Home and End for its runs, Page Up and Page "
                "Down for its changes, and Enter to be shown large."),
        "</footer>\n");
  }

  const History& history_;
  const std::vector<Change>& changes_;
  const HistoryPageOptions& options_;
  std::vector<int> by_kind_[kChangeKinds];
  size_t runs_ = 0;
};

}  // namespace

bool IsCommitUrl(absl::string_view url) {
  return (absl::StartsWith(url, "https://") || absl::StartsWith(url, "http://")) &&
         absl::StrContains(url, "%s");
}

std::string RenderHistoryPage(const History& history, const std::vector<Change>& changes,
                              const HistoryPageOptions& options) {
  return Page(history, changes, options).Render();
}

}  // namespace tfb
