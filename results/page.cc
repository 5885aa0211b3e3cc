#include "results/page.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "results/figures.h"
#include "results/markup.h"
#include "results/page_assets.h"
#include "results/plot.h"
#include "results/reader.h"
#include "results/report.h"

namespace tfb {
namespace {

constexpr size_t kTallTable = 60;  // rows beyond which a table scrolls within the page
constexpr absl::string_view kNoCases =
    "No cases: the sweep was stopped before its first case ended, or its selection was empty.";

absl::string_view ClassOf(Emphasis emphasis) {
  switch (emphasis) {
    case Emphasis::kNone:
      return "";
    case Emphasis::kStrong:
      return "strong";
    case Emphasis::kGood:
      return "good";
    case Emphasis::kBad:
      return "bad";
    case Emphasis::kFaint:
      return "faint";
  }
  return "";
}

// Returns ` class="l w good"`. Cells are aligned right without class "l". The style sheet aligns
// the first column, of names, to the left without a class.
std::string CellClass(const Table& table, size_t place, Emphasis emphasis) {
  const TableColumn& column = table.columns[place];
  std::vector<absl::string_view> classes;
  if (place > 0 && !column.right) classes.push_back("l");
  if (place > 0 && column.least_width > 0) classes.push_back("w");
  if (!ClassOf(emphasis).empty()) classes.push_back(ClassOf(emphasis));
  return classes.empty() ? "" : Attribute("class", absl::StrJoin(classes, " "));
}

std::string Detail(const TableCell& cell) {
  if (cell.detail.empty()) return "";
  const absl::string_view name = ClassOf(cell.detail_emphasis);
  return absl::StrCat(" <small", name.empty() ? "" : Attribute("class", name), ">",
                      EscapeMarkup(cell.detail), "</small>");
}

// Builds the page from top to bottom.
class Page {
 public:
  Page(const Analysis& analysis, const PageOptions& options)
      : analysis_(analysis), options_(options) {}

  std::string Render() {
    // The body comes first, since it determines the sections.
    Summary();
    ScalingSections();
    FigureSection("Error against cost", FrontierFigures(analysis_, nullptr));
    Cards();
    TableSection("Accuracy", report::AccuracyTables(analysis_, true));
    TableSection("Streaming", report::StreamingTables(analysis_, true));
    Details();
    Outcomes();
    Environments();
    body_ += "</section>\n";
    return absl::StrCat(BeginPage(Title(), kPageStyle), Header(), Controls(), "<main>\n", body_,
                        "</main>\n", Footer(), "<script>\n", kPageScript,
                        "</script>\n</body>\n</html>\n");
  }

 private:
  std::string Title() const {
    std::vector<std::string> hosts;
    for (const Environment* machine : analysis_.machines()) {
      const std::string host = Printable(machine->host());
      if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
    }
    return absl::StrCat("Transformer family bench", hosts.empty() ? "" : ": ",
                        absl::StrJoin(hosts, ", "));
  }

  std::string Header() const {
    std::string out = absl::StrCat("<header class=\"top\">\n", Element("h1", Title()));
    for (const std::string& line : report::HeaderLines(analysis_, false)) {
      out += Element("p", line, " class=\"lead\"");
    }
    out += "<nav aria-label=\"Sections\"><ol>\n";
    for (const auto& [id, title] : sections_) {
      absl::StrAppend(&out, "<li><a href=\"#", id, "\">", EscapeMarkup(title), "</a></li>\n");
    }
    return out + "</ol></nav>\n</header>\n";
  }

  // The script shows the controls, which do not work without it.
  std::string Controls() const {
    std::string out =
        "<div class=\"controls\" role=\"search\"><form hidden>\n"
        "<label>Show <input name=\"text\" type=\"search\" size=\"24\" "
        "placeholder=\"technique or option\" autocomplete=\"off\"></label>\n"
        "<label>of family <select name=\"family\"><option value=\"\">all</option>";
    for (const std::string& family : Families()) {
      absl::StrAppend(&out, "<option", Attribute("value", family), ">", EscapeMarkup(family),
                      "</option>");
    }
    return out +
           "</select></label>\n<button type=\"reset\">Show all</button>\n"
           "<output aria-live=\"polite\"></output>\n</form></div>\n";
  }
  std::set<std::string> Families() const {
    std::set<std::string> families;
    for (const Case* result : analysis_.cases()) {
      if (!result->technique().family().empty()) {
        families.insert(Printable(result->technique().family()));
      }
    }
    return families;
  }

  std::string Footer() const {
    std::string out = "<footer>\n";
    for (const std::string& note : options_.notes) out += Element("p", Printable(note));
    for (const std::string& path : options_.paths) {
      out += Element("p", absl::StrCat("results: ", Printable(path)));
    }
    return out + "</footer>\n";
  }

  void Section(absl::string_view title) {
    if (!sections_.empty()) body_ += "</section>\n";
    const std::string id = absl::StrCat("section-", sections_.size() + 1);
    sections_.emplace_back(id, std::string(title));
    absl::StrAppend(&body_, "<section", Attribute("id", id), ">", Element("h2", title));
  }

  void AddTable(const Table& table) {
    if (table.rows.empty()) return;
    body_ += ToHtml(table, absl::StrCat("table-", ++tables_));
  }

  void Folded(absl::string_view summary, const std::vector<Table>& tables) {
    if (tables.empty()) return;
    absl::StrAppend(&body_, "<details>", Element("summary", summary));
    for (const Table& table : tables) AddTable(table);
    body_ += "</details>\n";
  }

  void Summary() {
    Section("Summary");
    if (analysis_.cases().empty()) body_ += Element("p", kNoCases);
    for (const std::string& sentence : report::HeadlineSentences(analysis_)) {
      body_ += Element("p", sentence, " class=\"message\"");
    }
    const std::vector<report::OutcomeLine> outcomes = report::OutcomeLines(analysis_);
    body_ += Element("p", outcomes.back().text,
                     outcomes.back().bad ? " class=\"bad\"" : " class=\"count\"");
    for (const std::string& note : options_.notes) {
      body_ += Element("p", Printable(note), " class=\"strong\"");
    }
    const report::ChoiceReport choices = report::ChoiceTables(analysis_);
    for (const Table& table : choices.first) AddTable(table);
    const std::string legend = report::LegendLine(choices.first);
    if (!legend.empty()) body_ += Element("p", legend, " class=\"note\"");
    Folded(absl::StrCat("Choices in ", choices.more.size(), " more groups of cases"), choices.more);
  }

  // Writes a section for each group of cases: its figures, then its table.
  void ScalingSections() {
    const std::vector<Figure> scaling = ScalingFigures(analysis_, nullptr);
    std::vector<std::string> titles;
    std::map<std::string, std::vector<const Figure*>> figures;
    const std::vector<Figure> memory = MemoryFigures(analysis_, nullptr);
    const std::vector<Figure> roofline = RooflineFigures(analysis_, nullptr);
    for (const std::vector<Figure>* kind : {&scaling, &memory, &roofline}) {
      for (const Figure& figure : *kind) {
        if (figures.count(figure.title) == 0) titles.push_back(figure.title);
        figures[figure.title].push_back(&figure);
      }
    }
    for (const std::string& title : titles) {
      Section(absl::StrCat("Scaling: ", title));
      for (const Figure* figure : figures[title]) AddFigure(*figure, true);
    }
    std::vector<Table> tables = report::ScalingTables(analysis_);
    for (Table& table : report::DuelTables(analysis_)) tables.push_back(std::move(table));
    TableSection("Scaling in numbers", tables);
    const std::string legend = report::LegendLine(tables);
    if (!tables.empty() && !legend.empty()) body_ += Element("p", legend, " class=\"note\"");
  }

  void FigureSection(absl::string_view title, const std::vector<Figure>& figures) {
    if (figures.empty()) return;
    Section(title);
    for (const Figure& figure : figures) AddFigure(figure, false);
  }

  void TableSection(absl::string_view title, const std::vector<Table>& tables) {
    if (tables.empty()) return;
    Section(title);
    for (const Table& table : tables) AddTable(table);
  }

  void Cards() {
    const std::vector<report::TechniqueCard> cards = report::TechniqueCards(analysis_);
    if (cards.empty()) return;
    Section("Techniques");
    body_ += Element("p",
                     "The speed-up over the technique's own counterpart with its interval, the "
                     "median error against dense, and the memory with its ratio to the "
                     "counterpart's.",
                     " class=\"caption\"");
    body_ += "<div class=\"cards\">\n";
    for (const report::TechniqueCard& card : cards) {
      absl::StrAppend(&body_, "<section class=\"card\">", Element("h3", card.name));
      if (!card.title.empty()) body_ += Element("p", card.title);
      if (!card.citation.empty()) body_ += Element("p", card.citation, " class=\"note\"");
      if (!card.counterpart.empty()) body_ += Element("p", card.counterpart, " class=\"note\"");
      AddTable(card.numbers);
      body_ += "</section>\n";
    }
    body_ += "</div>\n";
  }

  void Details() {
    const std::vector<Table> costs = report::CostTables(analysis_);
    const std::vector<Table> extrapolation = report::ExtrapolationTables(analysis_);
    const std::vector<Table> statistics = report::StatisticsTables(analysis_);
    if (costs.empty() && extrapolation.empty() && statistics.empty()) return;
    Section("Details");
    Folded("Costs told apart: setup, cold and warm runs, rates, memory", costs);
    Folded("Extrapolation: how attention changes when sequences grow", extrapolation);
    Folded("What the techniques report by name", statistics);
  }

  void Outcomes() {
    Section("What did not run");
    const Table table = report::OutcomeTable(analysis_);
    if (table.rows.empty())
      body_ += Element("p", "Every case ran, and no error exceeds its bound.");
    AddTable(table);
  }

  void Environments() {
    const std::vector<Table> tables = report::EnvironmentTables(analysis_);
    TableSection(tables.size() == 1 ? "Environment" : "Environments", tables);
  }

  static absl::string_view Heading(FigureKind kind) {
    switch (kind) {
      case FigureKind::kScaling:
        return "Time over tokens";
      case FigureKind::kMemory:
        return "Memory over tokens";
      case FigureKind::kRoofline:
        return "Roofline";
      case FigureKind::kFrontier:
        return "Error against cost";
    }
    return "";
  }

  void AddFigure(const Figure& figure, bool by_kind) {
    body_ += "<section>";
    body_ += Element("h3", by_kind ? std::string(Heading(figure.kind)) : figure.title);
    body_ += Element("p", figure.caption, " class=\"caption\"");
    std::vector<plot::Plot> panels;
    Table single;
    for (const plot::Plot& panel : figure.panels) {
      if (PointsOf(panel) > 1) {
        panels.push_back(panel);
      } else {
        AddSinglePoint(panel, &single);
      }
    }
    if (!panels.empty()) {
      const bool wide = panels.size() == 1 && panels.front().width > 700;
      absl::StrAppend(&body_, "<div class=\"panels", wide ? " wide" : "", "\" data-plot=\"",
                      Name(figure.kind), "\">\n");
      for (plot::Plot& panel : panels) AddPanel(std::move(panel));
      body_ += "</div>\n";
    }
    AddTable(single);
    Folded("The numbers behind it", {figure.data});
    body_ += "</section>\n";
  }

  // Counts the points of the panel's techniques without their counterparts, or of all curves where
  // there are only counterparts.
  static size_t PointsOf(const plot::Plot& panel) {
    size_t points = 0, all = 0;
    for (const plot::Curve& curve : panel.curves) {
      all += curve.points.size();
      const bool reference =
          curve.style == plot::kReferenceStyle || curve.kind == plot::Curve::Kind::kCounterpart;
      if (!reference) points += curve.points.size();
    }
    return points > 0 ? points : all;
  }

  // Adds a panel of one point to the table as a row.
  static void AddSinglePoint(const plot::Plot& panel, Table* table) {
    const auto text = [](const plot::Axis& axis, double value) {
      return axis.format ? axis.format(value) : FormatSignificant(value);
    };
    table->columns = {{"technique"}, {panel.x.title, true}, {panel.y.title, true}};
    for (const plot::Curve& curve : panel.curves) {
      if (curve.points.size() != 1) continue;
      const plot::Point& point = curve.points.front();
      table->AddRow({curve.name, text(panel.x, point.x), text(panel.y, point.y)}, curve.group);
    }
  }

  void AddPanel(plot::Plot panel) {
    // Keys are long and frequent, so numbers replace them.
    std::map<std::string, std::string> keys;
    const auto shorten = [&keys](std::string* key) {
      *key = keys.emplace(*key, absl::StrCat("k", keys.size())).first->second;
    };
    for (plot::Curve& curve : panel.curves) shorten(&curve.key);
    for (plot::Mark& mark : panel.marks) shorten(&mark.key);
    const std::string legend = Legend(&panel);
    absl::StrAppend(&body_, "<figure><div class=\"scroll\">",
                    plot::DrawForPage(panel, absl::StrCat("plot-", ++plots_)), "</div>\n", legend,
                    "<p class=\"readout\" aria-live=\"polite\"></p></figure>\n");
  }

  // Writes a button for each key, in the style of its first curve; none where all curves have names
  // at their ends. The panel's own legend loses the entries that the buttons explain.
  static std::string Legend(plot::Plot* panel) {
    const bool scattered = std::any_of(
        panel->curves.begin(), panel->curves.end(),
        [](const plot::Curve& curve) { return curve.kind == plot::Curve::Kind::kScatter; });
    if (!scattered) return "";
    std::string out = "<ul class=\"legend\" aria-label=\"Hide and show\">\n";
    std::set<std::string> seen, texts;
    for (const plot::Curve& curve : panel->curves) {
      if (!seen.insert(curve.key).second) continue;
      const std::string& text = curve.legend.empty() ? curve.name : curve.legend;
      texts.insert(text);
      absl::StrAppend(&out, "<li><button type=\"button\" aria-pressed=\"true\"",
                      Attribute("data-key", curve.key), ">",
                      plot::DrawSwatch(curve.style, curve.kind), EscapeMarkup(text),
                      "</button></li>\n");
    }
    panel->keys.erase(
        std::remove_if(panel->keys.begin(), panel->keys.end(),
                       [&texts](const plot::KeyEntry& key) { return texts.count(key.text) > 0; }),
        panel->keys.end());
    return out + "</ul>";
  }

  const Analysis& analysis_;
  const PageOptions& options_;
  std::string body_;
  std::vector<std::pair<std::string, std::string>> sections_;  // id and title
  int tables_ = 0;
  int plots_ = 0;
};

}  // namespace

std::string ToHtml(const Table& table, const std::string& id) {
  std::string out = "<section>";
  if (!table.title.empty()) out += Element("h3", table.title, Attribute("id", id + "-title"));
  const bool tall = table.rows.size() > kTallTable;
  // An element that scrolls must be focusable by the keyboard.
  absl::StrAppend(&out, "<div class=\"table", tall ? " tall" : "",
                  "\" tabindex=\"0\" role=\"region\"",
                  table.title.empty() ? Attribute("aria-label", "Table")
                                      : Attribute("aria-labelledby", id + "-title"),
                  "><table", Attribute("id", id), "><thead><tr>");
  for (size_t c = 0; c < table.columns.size(); ++c) {
    const TableColumn& column = table.columns[c];
    absl::StrAppend(&out, "<th scope=\"col\"", c > 0 && !column.right ? " class=\"l\"" : "", ">",
                    absl::StrReplaceAll(EscapeMarkup(column.header), {{"\n", "<br>"}}), "</th>");
  }
  out += "</tr></thead>\n<tbody>\n";
  for (size_t r = 0; r < table.rows.size(); ++r) {
    absl::StrAppend(
        &out, "<tr",
        r < table.row_groups.size() ? Attribute("data-family", table.row_groups[r]) : "", ">");
    for (size_t c = 0; c < table.rows[r].size() && c < table.columns.size(); ++c) {
      const TableCell& cell = table.rows[r][c];
      absl::StrAppend(&out, "<td", CellClass(table, c, cell.emphasis), ">", EscapeMarkup(cell.text),
                      Detail(cell), "</td>");
    }
    out += "</tr>\n";
  }
  out += "</tbody></table></div>\n";
  for (const std::string& note : table.notes) out += Element("p", note, " class=\"note\"");
  return out + "</section>\n";
}

std::string RenderPage(const Analysis& analysis, const PageOptions& options) {
  return Page(analysis, options).Render();
}

}  // namespace tfb
