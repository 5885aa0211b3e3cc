#include "results/markup.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tfb {
namespace {

// Returns the length of the UTF-8 sequence at the beginning of `text`, or 0 where XML forbids it.
size_t AllowedSequence(absl::string_view text) {
  const auto byte = [&text](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return first >= 0x20 || first == '\t' || first == '\n' ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 0;
  if (length == 0 || first > 0xf4 || text.size() < length) return 0;
  uint32_t code = first & (0xff >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  const bool control = code < 0xa0;
  const bool no_character = code == 0xfffe || code == 0xffff;
  return overlong || surrogate || control || no_character || code > 0x10ffff ? 0 : length;
}

}  // namespace

std::string EscapeMarkup(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = AllowedSequence(text);
    if (length == 0) {
      out += "\xef\xbf\xbd";  // U+FFFD
      text.remove_prefix(1);
      continue;
    }
    switch (text[0]) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out.append(text.data(), length);
    }
    text.remove_prefix(length);
  }
  return out;
}

std::string Coordinate(double value) {
  if (!std::isfinite(value)) return "0";
  std::string text = absl::StrFormat("%.1f", value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string Attribute(absl::string_view name, absl::string_view value) {
  return absl::StrCat(" ", name, "=\"", EscapeMarkup(value), "\"");
}

std::string Element(absl::string_view name, absl::string_view text, absl::string_view attributes) {
  return absl::StrCat("<", name, attributes, ">", EscapeMarkup(text), "</", name, ">\n");
}

std::string BeginPage(absl::string_view title, absl::string_view styles) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      // The browser blocks all that a file tries to load, and scripts but the page's own.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n",
      Element("title", title), "<style>\n", styles, "</style>\n</head>\n<body>\n");
}

}  // namespace tfb
