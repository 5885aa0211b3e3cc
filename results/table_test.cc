#include "results/table.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Table SmallTable() {
  Table table;
  table.title = "Things";
  table.columns = {{"name", false, 6}, {"first\nnumber", true}, {"second", true}};
  table.rows = {{"a", "1", "22.5"}, {"a long name", "1000", "-"}};
  table.notes = {"a note"};
  return table;
}

TEST(Table, AlignsColumnsAndSetsHeadersAgainstTheBottom) {
  EXPECT_EQ(ToTerminal(SmallTable(), TextStyle()),
            "Things\n"
            "              first\n"
            "name         number  second\n"
            "a                 1    22.5\n"
            "a long name    1000       -\n"
            "a note\n");
}

TEST(Table, BreaksNamesWhereTheTerminalIsNarrowAndCutsLongWords) {
  TextStyle style;
  style.width = 24;
  Table table = SmallTable();
  table.rows.push_back({"interminable", "2", "3"});
  EXPECT_EQ(ToTerminal(table, style),
            "Things\n"
            "           first\n"
            "name      number  second\n"
            "a              1    22.5\n"
            "a long      1000       -\n"
            "  name\n"
            "intermi…       2       3\n"
            "a note\n");
}

TEST(Table, IsShownInPartsWhereCuttingIsNotEnough) {
  TextStyle style;
  style.width = 19;
  EXPECT_EQ(ToTerminal(SmallTable(), style),
            "Things\n"
            "              first\n"
            "name         number\n"
            "a                 1\n"
            "a long name    1000\n"
            "\n"
            "name         second\n"
            "a              22.5\n"
            "a long name       -\n"
            "a note\n");
}

TEST(Table, WithoutWidthNothingIsCut) {
  TextStyle style;
  style.width = 0;
  Table table = SmallTable();
  table.rows[0][0] = std::string(500, 'x');
  EXPECT_NE(ToTerminal(table, style).find(std::string(500, 'x')), std::string::npos);
}

TEST(Table, OfWidthOneItsTitleAndNotesHaveALineForEachWord) {
  TextStyle style;
  style.width = 1;
  Table table;
  table.title = "a b c";
  table.columns = {{"n"}};
  table.rows = {{"1"}};
  table.notes = {"d e"};
  EXPECT_EQ(ToTerminal(table, style), "a\n  b\n  c\nn\n1\nd\n  e\n");
}

TEST(Table, ColourSurroundsCellsWithoutChangingTheirPlaces) {
  TextStyle style;
  style.colour = true;
  Table table;
  table.columns = {{"v", true}, {"w"}};
  table.rows = {{{"bad", Emphasis::kBad}, "x"}};
  EXPECT_EQ(ToTerminal(table, style),
            "\x1b[2m  v  w\x1b[0m\n"
            "\x1b[1;31mbad\x1b[0m  x\n");
}

TEST(Table, ShowsDetailsByRankWhereTheyFit) {
  Table table;
  table.columns = {{"name"}, {"ms", true, 0, 1}, {"speed-up", true, 0, 2}};
  table.rows = {{"a", "10", "-"},
                {"b",
                 {"9.1", Emphasis::kNone, "1.1x", Emphasis::kFaint},
                 {"1.1x", Emphasis::kNone, "[1.0, 1.2]", Emphasis::kFaint}}};
  TextStyle style;
  EXPECT_EQ(ToTerminal(table, style),
            "name        ms         speed-up\n"
            "a      10          -\n"
            "b     9.1 1.1x  1.1x [1.0, 1.2]\n");
  style.width = 30;
  EXPECT_EQ(ToTerminal(table, style),
            "name        ms  speed-up\n"
            "a      10              -\n"
            "b     9.1 1.1x      1.1x\n");
  EXPECT_EQ(WithShownDetails(table, style).rows[1][2].detail, "");
  EXPECT_EQ(WithShownDetails(table, style).rows[1][1].detail, "1.1x");
  style.width = 20;
  EXPECT_EQ(ToTerminal(table, style),
            "name   ms  speed-up\n"
            "a      10         -\n"
            "b     9.1      1.1x\n");
  EXPECT_NE(ToMarkdown(table).find("| b | 9.1 1.1x | 1.1x [1.0, 1.2] |"), std::string::npos);
}

TEST(Table, TextThatIsBrokenLeavesRoomForItsDetail) {
  Table table;
  table.columns = {{"name", false, 8, 1}, {"ms", true}};
  table.rows = {{{"one two three", Emphasis::kNone, "a+b", Emphasis::kFaint}, "10"},
                {{"unbreakable", Emphasis::kNone, "c", Emphasis::kFaint}, "9"}};
  TextStyle style;
  EXPECT_EQ(ToTerminal(table, style),
            "name               ms\n"
            "one two three a+b  10\n"
            "unbreakable     c   9\n");
  style.width = 17;
  EXPECT_EQ(ToTerminal(table, style),
            "name           ms\n"
            "one two   a+b  10\n"
            "  three\n"
            "unbreaka…   c   9\n");
  // The text has 8 columns, or there is no detail; and no column is wider than its lines.
  style.width = 16;
  EXPECT_EQ(ToTerminal(table, style),
            "name          ms\n"
            "one two  a+b  10\n"
            "  three\n"
            "unbreak…   c   9\n");
  style.width = 15;
  EXPECT_EQ(ToTerminal(table, style),
            "name         ms\n"
            "one two      10\n"
            "  three\n"
            "unbreakable   9\n");
  table.rows.pop_back();
  style.width = 19;
  EXPECT_EQ(ToTerminal(table, style),
            "name         ms\n"
            "one two a+b  10\n"
            "  three\n");
}

// A table with a column of every kind, and the words that any form of it has to show.
Table MixedTable() {
  Table table;
  table.title = "All kinds of columns";
  table.columns = {{"name", false, 5}, {"", true}, {"one\ntwo", true, 0, 1}, {"a text", false, 4}};
  table.rows = {{"alpha beta gamma", "", {"10", Emphasis::kNone, "+-1", Emphasis::kFaint}, "x y z"},
                {"delta", "", "9", "one two three four"}};
  table.notes = {"a note of several words", "and another"};
  return table;
}

TEST(Table, WithoutAWidthNothingIsBroken) {
  TextStyle style;
  style.width = 0;
  const std::string unlimited =
      "All kinds of columns\n"
      "                       one\n"
      "name                   two  a text\n"
      "alpha beta gamma    10 +-1  x y z\n"
      "delta                9      one two three four\n"
      "a note of several words\n"
      "and another\n";
  EXPECT_EQ(ToTerminal(MixedTable(), style), unlimited);
}

TEST(Table, NoLineIsWiderThanTheTerminalAndNoneIsNarrowerThanItCanBe) {
  const auto widest_line = [](const std::string& text) {
    int widest = 0;
    std::string line;
    for (std::stringstream lines(text); std::getline(lines, line);) {
      widest = std::max(widest, DisplayWidth(line));
    }
    return widest;
  };
  TextStyle style;
  style.width = 0;
  Table table = MixedTable();
  table.title.clear();
  table.notes.clear();
  const std::string unlimited = ToTerminal(table, style);
  // The last column is aligned left, and its longest text ends the widest line.
  const int natural = widest_line(unlimited);
  for (style.width = natural; style.width < natural + 3; ++style.width) {
    EXPECT_EQ(ToTerminal(table, style), unlimited) << style.width;
  }
  // 7 columns of "a text" are the widest that cannot be narrowed: they stand beside the name.
  for (style.width = 15; style.width < natural; ++style.width) {
    const std::string text = ToTerminal(table, style);
    EXPECT_NE(text, unlimited) << style.width;
    EXPECT_LE(widest_line(text), style.width) << text;
    for (const char* word : {"alpha", "delta", "10", "9", "one", "two", "four"}) {
      EXPECT_NE(text.find(word), std::string::npos) << style.width << ": " << word << "\n" << text;
    }
  }
}

TEST(Table, AColumnIsNotNarrowerThanItsHeader) {
  Table table;
  table.columns = {{"long header", false, 3}, {"n", true}};
  table.rows = {{"a few short words here", "1"}};
  TextStyle style;
  style.width = 10;
  EXPECT_EQ(ToTerminal(table, style),
            "long header  n\n"
            "a few short  1\n"
            "  words\n"
            "  here\n");
}

// `rows` rows behind two reference rows, in groups of two names.
Table LongTable(int rows) {
  Table table;
  table.columns = {{"name"}, {"n", true}};
  table.reference_rows = 2;
  table.AddRow({"dense", "1"}, "none");
  table.AddRow({"flash", "2"}, "none");
  for (int i = 0; i < rows; ++i) {
    table.AddRow({"row", "3"}, i < 3 ? "first group of rows" : "second");
  }
  return table;
}

TEST(Table, ALongTableRepeatsItsReferenceRowsForEachGroupButTheFirst) {
  const auto text = [](Table table, int width) {
    TextStyle style;
    style.width = width;
    return ToTerminal(table, style);
  };
  const auto rows = [](int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all += "row    3\n";
    return all;
  };
  const std::string head = "name   n\ndense  1\nflash  2\n", again = "dense  1\nflash  2\n";
  EXPECT_EQ(text(LongTable(23), 120), head + rows(23));  // 25 rows are not long
  EXPECT_EQ(text(LongTable(24), 120),
            head + "first group of rows\n" + rows(3) + "second\n" + again + rows(21));
  EXPECT_EQ(text(LongTable(24), 0), text(LongTable(24), 120));
  EXPECT_EQ(text(LongTable(24), 10),
            head + "first gro…\n" + rows(3) + "second\n" + again + rows(21));
  Table table = LongTable(24);
  table.reference_rows = 0;
  EXPECT_EQ(text(table, 120), head + rows(24));
  table = LongTable(24);
  table.row_groups.pop_back();
  EXPECT_EQ(text(table, 120), head + rows(24));
  table = LongTable(24);
  table.reference_rows = 100;  // all of them
  EXPECT_EQ(text(table, 120), head + rows(24));
}

TEST(Table, MarkdownEscapesWhatWouldBreakIt) {
  Table table;
  table.columns = {{"a|b"}, {"n\nm", true}};
  table.rows = {{"<script>", "x_y (<= 2)"}, {{"no", Emphasis::kBad}, "`*`"}};
  EXPECT_EQ(ToMarkdown(table),
            "| a\\|b | n m |\n"
            "| --- | ---: |\n"
            "| &lt;script> | x\\_y (<= 2) |\n"
            "| **no** | \\`\\*\\` |\n");
}

TEST(DisplayWidth, CountsColumnsAndNotBytes) {
  EXPECT_EQ(DisplayWidth("abc"), 3);
  EXPECT_EQ(DisplayWidth("é…·"), 3);
  EXPECT_EQ(DisplayWidth("e\xcc\x81"), 1);  // a combining acute accent
  EXPECT_EQ(DisplayWidth("注意"), 4);
  EXPECT_EQ(DisplayWidth("\xff\xc3"), 2);  // invalid bytes
}

TEST(CutToWidth, NeverCutsWithinACharacter) {
  EXPECT_EQ(CutToWidth("注意力", 6), "注意力");
  EXPECT_EQ(CutToWidth("注意力", 5), "注意…");
  EXPECT_EQ(CutToWidth("注意力", 4), "注…");
  EXPECT_EQ(CutToWidth("abc", 1), "…");
  EXPECT_EQ(CutToWidth("abc", 0), "");
}

TEST(Wrap, BreaksAtSpacesAndLeavesLongWordsWhole) {
  EXPECT_EQ(Wrap("one two three", 7, "  "), "one two\n  three");
  EXPECT_EQ(Wrap("extraordinary x", 5, ""), "extraordinary\nx");
}

std::string Utf8(uint32_t code) {
  std::string text;
  const auto more = [&](int shift) { text += static_cast<char>(0x80 | ((code >> shift) & 0x3f)); };
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xc0 | code >> 6);
    more(0);
  } else if (code < 0x10000) {
    text += static_cast<char>(0xe0 | code >> 12);
    more(6);
    more(0);
  } else {
    text += static_cast<char>(0xf0 | code >> 18);
    more(12);
    more(6);
    more(0);
  }
  return text;
}

TEST(Printable, ReplacesControlAndDirectionOfAllCharacters) {
  for (uint32_t code = 0; code < 0x110000; ++code) {
    const bool harmful = code < 0x20 || (code >= 0x7f && code <= 0x9f) ||
                         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
    ASSERT_EQ(Printable(Utf8(code)), harmful ? "?" : Utf8(code)) << code;
    const std::string ascii = ToAscii(Utf8(code));
    if (code >= 0x80 && code != 0xb7 && code != 0x2026 && code != 0xb5) {
      ASSERT_EQ(ascii, std::string(static_cast<size_t>(DisplayWidth(Utf8(code))), '?')) << code;
    }
  }
}

// The East Asian Width and general category of Unicode's character database on both sides of a
// block's ends.
TEST(DisplayWidth, IsThatOfTheBlockUpToItsEnds) {
  const struct {
    uint32_t code;
    int width;
  } kRows[] = {{0x2ff, 1},   {0x300, 0},   {0x36f, 0},   {0x370, 1},   {0x200b, 0},  {0x2010, 1},
               {0xfeff, 0},  {0x10ff, 1},  {0x1100, 2},  {0x115f, 2},  {0x1160, 1},  {0x303e, 2},
               {0x303f, 1},  {0xac00, 2},  {0xd7a3, 2},  {0xd7a4, 1},  {0xff60, 2},  {0xff61, 1},
               {0x1f2ff, 1}, {0x1f300, 2}, {0x1f64f, 2}, {0x1f650, 1}, {0x20000, 2}, {0x3fffd, 2}};
  for (const auto& row : kRows) {
    EXPECT_EQ(DisplayWidth(Utf8(row.code)), row.width) << std::hex << row.code;
  }
}

TEST(DisplayWidth, EachByteOfWhatIsNoCharacterCountsOne) {
  for (const char* bytes : {"\x80", "\xbf", "\xc0", "\xc1", "\xc2", "\xdf", "\xe0", "\xef", "\xf0",
                            "\xf4", "\xf5", "\xff"}) {
    EXPECT_EQ(DisplayWidth(bytes), 1) << static_cast<int>(bytes[0]);
    EXPECT_EQ(Printable(bytes), "?");
    EXPECT_EQ(Printable(std::string(bytes) + "a"), "?a");
  }
  EXPECT_EQ(DisplayWidth("\xe6\xb3"), 2);  // cut
  EXPECT_EQ(Printable("\xe6\xb3"
                      "a"),
            "??a");                             // broken off in the third byte
  EXPECT_EQ(Printable("\xf0\x9f\x98"), "???");  // cut in the fourth byte
  EXPECT_EQ(Printable("\xf0\x9f\x98\x80"), "\xf0\x9f\x98\x80");
}

TEST(Wrap, FillsEveryLineAsFarAsItGoes) {
  const struct {
    int width;
    const char* text;
  } kRows[] = {{1, "aa\n-b\n-cc\n-dddd"}, {4, "aa b\n-cc\n-dddd"}, {5, "aa b\n-cc\n-dddd"},
               {6, "aa b\n-cc\n-dddd"},   {7, "aa b cc\n-dddd"},   {11, "aa b cc\n-dddd"},
               {12, "aa b cc dddd"}};
  for (const auto& row : kRows)
    EXPECT_EQ(Wrap("aa b cc dddd", row.width, "-"), row.text) << row.width;
  EXPECT_EQ(Wrap("a bbb cc", 6, "--"), "a bbb\n--cc");
  EXPECT_EQ(Wrap("a bb ccc", 6, "--"), "a bb\n--ccc");
  EXPECT_EQ(Wrap("a bb cc dd", 6, "--"), "a bb\n--cc\n--dd");  // the indent counts
  EXPECT_EQ(Wrap("", 6, "--"), "");
  EXPECT_EQ(Wrap("a  b", 6, ""), "a  b");
}

TEST(Printable, LeavesNoEscapeSequence) {
  EXPECT_EQ(Printable("a\x1b[2Jb\n\x7f"), "a?[2Jb??");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m"),
            "?31m");  // a control sequence in one character
  EXPECT_EQ(Printable("a\xe2\x80\xae"
                      "b"),
            "a?b");  // right-to-left override
  EXPECT_EQ(Printable("注 é"), "注 é");
}

TEST(ToAscii, KeepsWidths) { EXPECT_EQ(ToAscii("a · b… é 注"), "a | b~ ? ??"); }

TEST(Format, SignificantDigits) {
  EXPECT_EQ(FormatSignificant(0.51234), "0.512");
  EXPECT_EQ(FormatSignificant(12.345), "12.3");
  EXPECT_EQ(FormatSignificant(9.996), "10.0");
  EXPECT_EQ(FormatSignificant(1234.5), "1234");
  EXPECT_EQ(FormatSignificant(0.000012345), "1.23e-5");
  EXPECT_EQ(FormatSignificant(-2.0), "-2.00");
  EXPECT_EQ(FormatSignificant(0.0), "0");
  EXPECT_EQ(FormatSignificant(1e12), "1.00e12");
}

TEST(Format, AbsentAndNotFiniteNumbersSaySo) {
  EXPECT_EQ(FormatSignificant(std::nullopt), "-");
  EXPECT_EQ(FormatError(std::nullopt), "-");
  EXPECT_EQ(FormatBytes(std::nullopt), "-");
  EXPECT_EQ(FormatPercent(std::nullopt), "-");
  EXPECT_EQ(FormatRatio(std::nullopt), "-");
  EXPECT_EQ(FormatMilliseconds(std::nullopt), "-");
  EXPECT_EQ(FormatScaled(std::nullopt, "B/s"), "-");
  EXPECT_EQ(FormatError(kInfinity), "inf");
  EXPECT_EQ(FormatSignificant(-kInfinity), "-inf");
  EXPECT_EQ(FormatMilliseconds(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(FormatPercent(kInfinity), "inf");
}

TEST(Format, Errors) {
  EXPECT_EQ(FormatError(2e-7), "2e-7");
  EXPECT_EQ(FormatError(2.14e-7), "2.1e-7");
  EXPECT_EQ(FormatError(0.18), "0.18");
  EXPECT_EQ(FormatError(0.0012), "1.2e-3");
  EXPECT_EQ(FormatError(0.0), "0");
}

TEST(Format, BytesPercentRatioAndScale) {
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(4 << 20), "4 MiB");
  EXPECT_EQ(FormatPercent(0.614), "61%");
  EXPECT_EQ(FormatPercent(0.0341), "3.4%");
  EXPECT_EQ(FormatRatio(8.14), "8.1x");
  EXPECT_EQ(FormatInterval(7.91, 8.34), "[7.9, 8.3]");
  EXPECT_EQ(FormatInterval(8.11, 8.14), "[8.11, 8.14]");
  EXPECT_EQ(FormatInterval(0.93, 0.998), "[0.930, 0.998]");
  EXPECT_EQ(FormatRatio(123.4), "123x");
  EXPECT_EQ(FormatScaled(4.2e11, "FLOP/s"), "420 GFLOP/s");
  EXPECT_EQ(FormatScaled(20e9, "B/s"), "20 GB/s");
}

TEST(Format, NumbersOnBothSidesOfEveryLimit) {
  const auto of = [](std::string (*format)(std::optional<double>)) { return format; };
  const auto significant = [](std::optional<double> x) { return FormatSignificant(x); };
  const auto two_digits = [](std::optional<double> x) { return FormatSignificant(x, 2); };
  const auto scaled = [](std::optional<double> x) { return FormatScaled(x, "B"); };
  const struct {
    std::string (*format)(std::optional<double>);
    double value;
    const char* text;
  } kRows[] = {
      {of(significant), 9999999, "9999999"},
      {of(significant), 1e7, "1.00e7"},
      {of(significant), -1e7, "-1.00e7"},
      {of(significant), 1e-4, "0.000100"},
      {of(significant), 0.00009999, "1.00e-4"},
      {of(significant), 0.001, "0.00100"},
      {of(significant), 0.01, "0.0100"},
      {of(significant), 0.9994, "0.999"},
      {of(significant), 0.9996, "1.00"},
      {of(significant), 99.94, "99.9"},
      {of(significant), 99.96, "100"},
      {of(significant), 1000, "1000"},
      {of(significant), 1e-10, "1.00e-10"},
      {of(significant), 1e100, "1.00e100"},
      {of(two_digits), 9.94, "9.9"},
      {of(two_digits), 9.96, "10"},
      {of(two_digits), 123, "123"},
      {of(FormatError), 0.0095, "0.0095"},
      {of(FormatError), 0.0094, "9.4e-3"},
      {of(FormatError), -0.0094, "-9.4e-3"},
      {of(FormatError), -0.5, "-0.50"},
      {of(FormatError), 1e-10, "1e-10"},
      {of(FormatError), 100, "100"},
      {of(FormatBound), 0.5, "0.5"},
      {of(FormatBound), 10, "10"},
      {of(FormatBound), 4, "4"},
      {of(FormatBound), 2e-6, "2e-6"},
      {of(FormatBound), 0.05, "0.05"},
      {of(FormatBytes), 0, "0 B"},
      {of(FormatBytes), 1023, "1023 B"},
      {of(FormatBytes), 1024, "1 KiB"},
      {of(FormatBytes), 1000 * 1024.0, "1000 KiB"},
      {of(FormatBytes), 1024 * 1024.0, "1 MiB"},
      {of(FormatBytes), 1.25 * (1 << 30), "1.25 GiB"},
      {of(FormatBytes), 1024.0 * (1 << 30), "1 TiB"},
      {of(FormatBytes), 2048.0 * 1024 * (1 << 30), "2048 TiB"},
      {of(FormatPercent), 0, "0%"},
      {of(FormatPercent), 0.095, "10%"},
      {of(FormatPercent), 0.0949, "9.5%"},
      {of(FormatPercent), 0.001, "0.10%"},
      {of(FormatPercent), 1.5, "150%"},
      {of(scaled), 0, "0 B"},
      {of(scaled), 999, "999 B"},
      {of(scaled), 1000, "1 kB"},
      {of(scaled), -2500, "-2.5 kB"},
      {of(scaled), 1e6, "1 MB"},
      {of(scaled), 1e15, "1 PB"},
      {of(scaled), 2e18, "2000 PB"},
  };
  for (const auto& row : kRows) EXPECT_EQ(row.format(row.value), row.text) << row.value;
  EXPECT_EQ(FormatMilliseconds(1.5e6), "1.50");
  EXPECT_EQ(FormatInterval(0.98, 1.02), "[0.980, 1.02]");
  EXPECT_EQ(FormatInterval(0.9996, 1.0004), "[0.9996, 1.000]");  // four digits are the most
  EXPECT_EQ(FormatInterval(2, 2), "[2.000, 2.000]");
  EXPECT_EQ(FormatInterval(1.04, 1.2), "[1.04, 1.20]");
  EXPECT_EQ(FormatInterval(0.5, 1.04), "[0.500, 1.04]");
}

}  // namespace
}  // namespace tfb
