#include "results/table.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace tfb {
namespace {

constexpr int kGapColumns = 2;               // between two columns of a table
constexpr absl::string_view kIndent = "  ";  // of the second and later lines of a text
constexpr size_t kLongTable = 25;            // rows beyond which reference rows are repeated
constexpr int kDetailRanks = 2;

// Decodes the character at the beginning of `text`, and stores its length in `bytes`. An invalid
// byte gives its own value.
uint32_t DecodeUtf8(absl::string_view text, int* bytes) {
  const auto at = [&](int i) { return static_cast<unsigned char>(text[i]); };
  const int length = at(0) < 0x80   ? 1
                     : at(0) < 0xc2 ? 0
                     : at(0) < 0xe0 ? 2
                     : at(0) < 0xf0 ? 3
                     : at(0) < 0xf5 ? 4
                                    : 0;
  *bytes = 1;
  if (length <= 1 || text.size() < static_cast<size_t>(length)) return at(0);
  uint32_t code = at(0) & (0xff >> (length + 1));
  for (int i = 1; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return at(0);
    code = code << 6 | (at(i) & 0x3f);
  }
  *bytes = length;
  return code;
}

struct CodeRange {
  uint32_t first, last;
};

// Blocks suffice instead of Unicode's tables, since these are names of techniques and models.
constexpr CodeRange kZeroWidth[] = {{0x300, 0x36f},   {0x483, 0x489},   {0x591, 0x5bd},
                                    {0x610, 0x61a},   {0x64b, 0x65f},   {0x200b, 0x200f},
                                    {0x202a, 0x202e}, {0x2060, 0x2064}, {0x20d0, 0x20f0},
                                    {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}, {0xfeff, 0xfeff}};
constexpr CodeRange kDoubleWidth[] = {{0x1100, 0x115f},   {0x2e80, 0x303e},   {0x3041, 0x33ff},
                                      {0x3400, 0x4dbf},   {0x4e00, 0x9fff},   {0xa000, 0xa4cf},
                                      {0xac00, 0xd7a3},   {0xf900, 0xfaff},   {0xfe30, 0xfe6f},
                                      {0xff00, 0xff60},   {0xffe0, 0xffe6},   {0x1f300, 0x1f64f},
                                      {0x1f680, 0x1f6ff}, {0x1f900, 0x1f9ff}, {0x20000, 0x3fffd}};

template <size_t kCount>
bool Within(const CodeRange (&ranges)[kCount], uint32_t code) {
  return std::any_of(std::begin(ranges), std::end(ranges), [code](const CodeRange& range) {
    return range.first <= code && code <= range.last;
  });
}

int WidthOf(uint32_t code) {
  if (Within(kZeroWidth, code)) return 0;
  return Within(kDoubleWidth, code) ? 2 : 1;
}

// `shown` is how `text`, which is not wider than `width`, is written.
std::string Pad(absl::string_view text, int width, bool right, absl::string_view shown) {
  const std::string space(width - DisplayWidth(text), ' ');
  return right ? absl::StrCat(space, shown) : absl::StrCat(shown, space);
}

std::vector<std::string> HeaderLines(const TableColumn& column) {
  return absl::StrSplit(column.header, '\n');
}

int HeaderWidth(const TableColumn& column) {
  int width = 0;
  for (const std::string& line : HeaderLines(column)) width = std::max(width, DisplayWidth(line));
  return width;
}

// Columns that the details of column `c` take, the space before them included: 0 where their rank
// is above `rank`, or where there are none.
int DetailWidth(const Table& table, size_t c, int rank) {
  if (table.columns[c].detail_rank == 0 || table.columns[c].detail_rank > rank) return 0;
  int widest = 0;
  for (const auto& row : table.rows) widest = std::max(widest, DisplayWidth(row[c].detail));
  return widest == 0 ? 0 : widest + 1;
}

// Returns the widths of columns with the details of all ranks up to `rank`.
std::vector<int> NaturalWidths(const Table& table, int rank) {
  std::vector<int> widths;
  for (size_t c = 0; c < table.columns.size(); ++c) {
    int width = 0;
    for (const auto& row : table.rows) width = std::max(width, DisplayWidth(row[c].text));
    width += DetailWidth(table, c, rank);
    widths.push_back(std::max(width, HeaderWidth(table.columns[c])));
  }
  return widths;
}

int TotalWidth(const std::vector<int>& widths, const std::vector<int>& columns) {
  int total = -kGapColumns;
  for (const int c : columns) total += widths[c] + kGapColumns;
  return total;
}

// Narrows the columns that may be narrowed until `columns` fit, the widest first; none below its
// header, and none but for its text: the details of ranks up to `rank` stay whole.
void Shrink(const Table& table, const std::vector<int>& columns, int limit, int rank,
            std::vector<int>* widths) {
  while (TotalWidth(*widths, columns) > limit) {
    int widest = -1;
    for (const int c : columns) {
      const TableColumn& column = table.columns[c];
      if (column.least_width == 0) continue;
      const int least =
          std::max(column.least_width + DetailWidth(table, c, rank), HeaderWidth(column));
      if ((*widths)[c] > least && (widest < 0 || (*widths)[c] > (*widths)[widest])) widest = c;
    }
    if (widest < 0) return;
    --(*widths)[widest];
  }
}

// Returns the highest rank with whose details the table fits, with columns narrowed where allowed.
int RankThatFits(const Table& table, int limit) {
  std::vector<int> all(table.columns.size());
  std::iota(all.begin(), all.end(), 0);
  for (int rank = kDetailRanks; rank > 0; --rank) {
    if (limit == 0) return rank;
    std::vector<int> widths = NaturalWidths(table, rank);
    Shrink(table, all, limit, rank, &widths);
    if (TotalWidth(widths, all) <= limit) return rank;
  }
  return 0;
}

// Assigns columns to parts.
std::vector<std::vector<int>> Parts(const Table& table, std::vector<int> widths, int limit,
                                    int rank) {
  std::vector<int> all(table.columns.size());
  std::iota(all.begin(), all.end(), 0);
  if (limit == 0) return {all};
  Shrink(table, all, limit, rank, &widths);
  if (TotalWidth(widths, all) <= limit) return {all};
  const int repeated = std::min<int>(table.repeated_columns, all.size());
  const std::vector<int> head(all.begin(), all.begin() + repeated);
  std::vector<std::vector<int>> parts;
  std::vector<int> part = head;
  for (size_t c = repeated; c < all.size(); ++c) {
    part.push_back(all[c]);
    if (TotalWidth(widths, part) > limit && part.size() > head.size() + 1) {
      part.pop_back();
      parts.push_back(part);
      part = head;
      part.push_back(all[c]);
    }
  }
  parts.push_back(part);
  return parts;
}

// Returns the lines of a cell in a column of `width`: one line, unless the column may be narrowed.
std::vector<std::string> CellLines(const std::string& text, const TableColumn& column, int width) {
  if (column.least_width == 0 || DisplayWidth(text) <= width) return {CutToWidth(text, width)};
  std::vector<std::string> lines;
  for (const absl::string_view line : absl::StrSplit(Wrap(text, width, kIndent), '\n')) {
    lines.push_back(CutToWidth(line, width));
  }
  return lines;
}

// Reduces narrowed columns to the width that their cells need once they are broken into lines, with
// the details of all ranks up to `rank`.
void Tighten(const Table& table, const std::vector<int>& columns, int rank,
             std::vector<int>* widths) {
  for (const int c : columns) {
    const TableColumn& column = table.columns[c];
    if (column.least_width == 0) continue;
    const int detail = DetailWidth(table, c, rank);
    int needed = HeaderWidth(column);
    for (const auto& row : table.rows) {
      for (const std::string& line : CellLines(row[c].text, column, (*widths)[c] - detail)) {
        needed = std::max(needed, DisplayWidth(line) + detail);
      }
    }
    (*widths)[c] = std::min(needed, (*widths)[c]);
  }
}

std::string TrimmedRight(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

// Writes some columns of a table.
class PartWriter {
 public:
  PartWriter(const Table& table, const std::vector<int>& columns, const std::vector<int>& widths,
             int rank, const TextStyle& style)
      : table_(table), columns_(columns), widths_(widths), style_(style) {
    for (size_t c = 0; c < table.columns.size(); ++c) {
      detail_widths_.push_back(DetailWidth(table, c, rank));
    }
  }

  std::string Write() {
    Headers();
    const size_t references = std::min<size_t>(table_.reference_rows, table_.rows.size());
    const bool in_groups = table_.rows.size() > kLongTable && references > 0 &&
                           table_.row_groups.size() == table_.rows.size();
    for (size_t r = 0; r < table_.rows.size(); ++r) {
      const bool begins = in_groups && r >= references &&
                          (r == references || table_.row_groups[r] != table_.row_groups[r - 1]);
      if (begins) {
        const std::string& group = table_.row_groups[r];
        AddLine(style_.width > 0 ? CutToWidth(group, style_.width) : group, Emphasis::kFaint);
        for (size_t again = 0; r > references && again < references; ++again) Row(again);
      }
      Row(r);
    }
    return std::move(out_);
  }

 private:
  void AddLine(std::string line, Emphasis emphasis) {
    absl::StrAppend(&out_, Emphasise(TrimmedRight(std::move(line)), emphasis, style_), "\n");
  }

  void Headers() {
    size_t header_lines = 0;
    for (const int c : columns_) {
      header_lines = std::max(header_lines, HeaderLines(table_.columns[c]).size());
    }
    for (size_t l = 0; l < header_lines; ++l) {
      std::string line;
      for (const int c : columns_) {
        const std::vector<std::string> lines = HeaderLines(table_.columns[c]);
        const size_t missing = header_lines - lines.size();
        const std::string text = l < missing ? "" : lines[l - missing];
        if (c != columns_.front()) line.append(kGapColumns, ' ');
        line += Pad(text, widths_[c], table_.columns[c].right, text);
      }
      AddLine(std::move(line), Emphasis::kFaint);
    }
  }

  void Row(size_t r) {
    const std::vector<TableCell>& row = table_.rows[r];
    std::vector<std::vector<std::string>> cells;  // lines of each column
    size_t row_lines = 1;
    for (const int c : columns_) {
      cells.push_back(CellLines(row[c].text, table_.columns[c], widths_[c] - detail_widths_[c]));
      row_lines = std::max(row_lines, cells.back().size());
    }
    for (size_t l = 0; l < row_lines; ++l) {
      std::string line;
      for (size_t i = 0; i < columns_.size(); ++i) {
        const int c = columns_[i];
        const std::string text = l < cells[i].size() ? cells[i][l] : "";
        if (i > 0) line.append(kGapColumns, ' ');
        line += Pad(text, widths_[c] - detail_widths_[c], table_.columns[c].right,
                    Emphasise(text, row[c].emphasis, style_));
        line += DetailText(row[c], detail_widths_[c], l == 0);
      }
      AddLine(std::move(line), Emphasis::kNone);
    }
  }

  std::string DetailText(const TableCell& cell, int width, bool first_line) const {
    if (width == 0) return "";
    const std::string detail = first_line ? cell.detail : "";
    return absl::StrCat(
        " ", Pad(detail, width - 1, true, Emphasise(detail, cell.detail_emphasis, style_)));
  }

  const Table& table_;
  const std::vector<int>& columns_;
  const std::vector<int>& widths_;
  const TextStyle& style_;
  std::vector<int> detail_widths_;
  std::string out_;
};

std::string WithoutExponentZeros(std::string text) {
  return absl::StrReplaceAll(text, {{"e-0", "e-"}, {"e+0", "e"}, {"e+", "e"}});
}

// Writes "4.00" as "4", "2.0e-7" as "2e-7".
std::string WithoutTrailingZeros(const std::string& text) {
  const size_t point = text.find('.');
  if (point == std::string::npos) return text;
  const size_t exponent = std::min(text.find('e'), text.size());
  size_t end = exponent;
  while (text[end - 1] == '0') --end;
  if (text[end - 1] == '.') --end;
  return text.substr(0, end) + text.substr(exponent);
}

}  // namespace

std::string ToTerminal(const Table& table, const TextStyle& style) {
  const int rank = RankThatFits(table, style.width);
  const std::vector<int> widths = NaturalWidths(table, rank);
  const std::vector<std::vector<int>> parts = Parts(table, widths, style.width, rank);
  std::string out;
  if (!table.title.empty()) {
    const std::string title =
        style.width > 0 ? Wrap(table.title, style.width, kIndent) : table.title;
    absl::StrAppend(&out, Emphasise(title, Emphasis::kStrong, style), "\n");
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    std::vector<int> part_widths = widths;
    if (style.width > 0) Shrink(table, parts[p], style.width, rank, &part_widths);
    Tighten(table, parts[p], rank, &part_widths);
    if (p > 0) out += "\n";
    out += PartWriter(table, parts[p], part_widths, rank, style).Write();
  }
  for (const std::string& note : table.notes) {
    const std::string wrapped = style.width > 0 ? Wrap(note, style.width, kIndent) : note;
    absl::StrAppend(&out, Emphasise(wrapped, Emphasis::kFaint, style), "\n");
  }
  return style.unicode ? out : ToAscii(out);
}

Table WithShownDetails(Table table, const TextStyle& style) {
  const int rank = RankThatFits(table, style.width);
  for (size_t c = 0; c < table.columns.size(); ++c) {
    if (DetailWidth(table, c, rank) > 0) continue;
    for (auto& row : table.rows) row[c].detail.clear();
  }
  return table;
}

std::string MarkdownText(absl::string_view text) {
  // A bracket alone is not a link, so "[0.9, 1.1]" stays readable in the source.
  const std::string escaped = absl::StrReplaceAll(text, {{"\\", "\\\\"},
                                                         {"|", "\\|"},
                                                         {"\n", " "},
                                                         {"`", "\\`"},
                                                         {"*", "\\*"},
                                                         {"_", "\\_"},
                                                         {"](", "\\]("},
                                                         {"][", "\\]["},
                                                         {"]:", "\\]:"},
                                                         {"&", "&amp;"}});
  // Only a < that could begin a tag is escaped, so "<= 2e-6" stays readable in the source.
  std::string out;
  for (size_t i = 0; i < escaped.size(); ++i) {
    const char next = i + 1 < escaped.size() ? escaped[i + 1] : ' ';
    const bool tag = escaped[i] == '<' && next != ' ' && next != '=';
    absl::StrAppend(&out, tag ? "&lt;" : absl::string_view(&escaped[i], 1));
  }
  return out;
}

std::string ToMarkdown(const Table& table) {
  std::string out;
  if (!table.title.empty()) absl::StrAppend(&out, "### ", MarkdownText(table.title), "\n\n");
  for (const TableColumn& column : table.columns) {
    absl::StrAppend(&out, "| ", MarkdownText(column.header), " ");
  }
  out += "|\n";
  for (const TableColumn& column : table.columns) out += column.right ? "| ---: " : "| --- ";
  out += "|\n";
  for (const auto& row : table.rows) {
    for (const TableCell& cell : row) {
      const std::string text =
          MarkdownText(cell.detail.empty() ? cell.text : absl::StrCat(cell.text, " ", cell.detail));
      const bool bold = cell.emphasis == Emphasis::kBad && !text.empty();
      absl::StrAppend(&out, "| ", bold ? "**" : "", text, bold ? "**" : "", " ");
    }
    out += "|\n";
  }
  for (const std::string& note : table.notes) absl::StrAppend(&out, "\n", MarkdownText(note), "\n");
  return out;
}

int DisplayWidth(absl::string_view text) {
  int width = 0;
  while (!text.empty()) {
    int bytes = 0;
    width += WidthOf(DecodeUtf8(text, &bytes));
    text.remove_prefix(bytes);
  }
  return width;
}

std::string CutToWidth(absl::string_view text, int width) {
  if (DisplayWidth(text) <= width) return std::string(text);
  if (width <= 0) return "";
  int used = 0;
  size_t end = 0;
  while (end < text.size()) {
    int bytes = 0;
    const int next = WidthOf(DecodeUtf8(text.substr(end), &bytes));
    if (used + next > width - 1) break;
    used += next;
    end += bytes;
  }
  return absl::StrCat(text.substr(0, end), "…");
}

std::string Wrap(absl::string_view text, int width, absl::string_view indent) {
  std::string out;
  int used = 0;
  bool line_begins = true;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    const int needed = DisplayWidth(word);
    if (!line_begins && used + 1 + needed > width) {
      absl::StrAppend(&out, "\n", indent);
      used = DisplayWidth(indent);
      line_begins = true;
    }
    if (!line_begins) {
      out += ' ';
      ++used;
    }
    absl::StrAppend(&out, word);
    used += needed;
    line_begins = false;
  }
  return out;
}

std::string Emphasise(absl::string_view text, Emphasis emphasis, const TextStyle& style) {
  if (!style.colour || emphasis == Emphasis::kNone || text.empty()) return std::string(text);
  const char* code = "";
  switch (emphasis) {
    case Emphasis::kStrong:
      code = "1";
      break;
    case Emphasis::kGood:
      code = "32";
      break;
    case Emphasis::kBad:
      code = "1;31";
      break;
    default:
      code = "2";
      break;
  }
  return absl::StrCat("\x1b[", code, "m", text, "\x1b[0m");
}

std::string Printable(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    int bytes = 0;
    const uint32_t code = DecodeUtf8(text, &bytes);
    const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0) ||
                         (bytes == 1 && code >= 0x80) || (code >= 0x202a && code <= 0x202e) ||
                         (code >= 0x2066 && code <= 0x2069) || code == 0x2028 || code == 0x2029;
    absl::StrAppend(&out, control ? absl::string_view("?") : text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return out;
}

std::string ToAscii(absl::string_view text) {
  const std::string replaced = absl::StrReplaceAll(text, {{"·", "|"}, {"…", "~"}, {"µ", "u"}});
  std::string out;
  for (absl::string_view rest = replaced; !rest.empty();) {
    int bytes = 0;
    const uint32_t code = DecodeUtf8(rest, &bytes);
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else {
      out.append(WidthOf(code), '?');
    }
    rest.remove_prefix(bytes);
  }
  return out;
}

std::string FormatSignificant(std::optional<double> value, int digits) {
  if (!value.has_value()) return "-";
  const double x = *value;
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  if (x == 0) return "0";
  const double magnitude = std::fabs(x);
  if (magnitude >= 1e7 || magnitude < 1e-4) {
    return WithoutExponentZeros(absl::StrFormat("%.*e", digits - 1, x));
  }
  // The number of decimals comes from the rounded number, so that 9.996 is 10.0 and not 10.00.
  const double rounded = std::stod(absl::StrFormat("%.*e", digits - 1, magnitude));
  const int exponent = static_cast<int>(std::floor(std::log10(rounded) + 1e-9));
  return absl::StrFormat("%.*f", std::max(0, digits - 1 - exponent), x);
}

std::string FormatError(std::optional<double> value) {
  if (!value.has_value()) return "-";
  const double x = *value;
  if (x == 0 || !std::isfinite(x) || std::fabs(x) >= 0.0095) return FormatSignificant(x, 2);
  return WithoutTrailingZeros(WithoutExponentZeros(absl::StrFormat("%.1e", x)));
}

std::string FormatBound(std::optional<double> value) {
  return WithoutTrailingZeros(FormatError(value));
}

std::string FormatMilliseconds(std::optional<double> ns) {
  return ns.has_value() ? FormatSignificant(*ns * 1e-6) : "-";
}

std::string FormatBytes(std::optional<double> bytes) {
  if (!bytes.has_value()) return "-";
  double value = *bytes;
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (unit < 4 && value >= 1024) {
    value /= 1024;
    ++unit;
  }
  return absl::StrCat(
      unit == 0 ? absl::StrFormat("%.0f", value) : WithoutTrailingZeros(FormatSignificant(value)),
      " ", units[unit]);
}

std::string FormatPercent(std::optional<double> share) {
  if (!share.has_value()) return "-";
  if (!std::isfinite(*share)) return FormatSignificant(share);
  const double percent = *share * 100;
  return absl::StrCat(percent >= 9.5 || percent == 0 ? absl::StrFormat("%.0f", percent)
                                                     : FormatSignificant(percent, 2),
                      "%");
}

std::string FormatRatio(std::optional<double> ratio) {
  return ratio.has_value() ? absl::StrCat(FormatSignificant(*ratio, 2), "x") : "-";
}

std::string FormatInterval(double low, double high) {
  std::string from, to;
  const auto is_one = [](const std::string& text) { return std::atof(text.c_str()) == 1; };
  for (int digits = 2; digits <= 4 && (from == to || is_one(from) || is_one(to)); ++digits) {
    from = FormatSignificant(low, digits);
    to = FormatSignificant(high, digits);
  }
  return absl::StrCat("[", from, ", ", to, "]");
}

std::string FormatScaled(std::optional<double> value, absl::string_view unit) {
  if (!value.has_value()) return "-";
  double x = *value;
  const char* const prefixes[] = {"", "k", "M", "G", "T", "P"};
  int prefix = 0;
  while (prefix < 5 && std::fabs(x) >= 1000) {
    x /= 1000;
    ++prefix;
  }
  return absl::StrCat(WithoutTrailingZeros(FormatSignificant(x)), " ", prefixes[prefix], unit);
}

}  // namespace tfb
