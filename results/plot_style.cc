#include "results/plot_style.h"

#include <cmath>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "results/markup.h"
#include "results/plot.h"

namespace tfb {
namespace plot {
namespace {

// Each colour has a contrast of at least 4.5 to white, so that names may be written in it.
// results/page.css has the same colours, and lighter ones for a dark page.
constexpr const char* kPaperColours[kStyles] = {"#1d5fa8", "#b3470b", "#1a7440", "#8a2f8f",
                                                "#856000", "#0c7080", "#b0235f"};

int Wrapped(int style) { return ((style % kStyles) + kStyles) % kStyles; }

std::string Polygon(double x, double y, std::initializer_list<std::pair<double, double>> corners) {
  std::string path;
  for (const auto& [dx, dy] : corners) {
    absl::StrAppend(&path, path.empty() ? "M" : "L", Coordinate(x + dx), " ", Coordinate(y + dy));
  }
  return path + "Z";
}

}  // namespace

std::string StyleClass(int style) {
  return style == kReferenceStyle ? "ref" : absl::StrCat("s", Wrapped(style));
}

std::string Dashes(int style) {
  constexpr const char* kDashes[kStyles] = {"",     "7 3",   "2 2.5",      "8 3 2 3",
                                            "12 3", "4 2.5", "8 3 2 3 2 3"};
  return style == kReferenceStyle ? "" : kDashes[Wrapped(style)];
}

std::string MarkerPath(int style, double x, double y, double radius) {
  const double r = radius;
  if (style == kReferenceStyle) {
    return Polygon(x, y, {{-r, -r}, {r, -r}, {r, r}, {-r, r}});
  }
  // Beyond the seventh style the colours repeat, with other markers.
  switch (Wrapped(style + style / kStyles)) {
    case 1:
      return Polygon(x, y, {{0, -1.25 * r}, {1.2 * r, 0.85 * r}, {-1.2 * r, 0.85 * r}});
    case 2:
      return Polygon(x, y, {{0, -1.35 * r}, {1.35 * r, 0}, {0, 1.35 * r}, {-1.35 * r, 0}});
    case 3:
      return Polygon(x, y, {{0, 1.25 * r}, {1.2 * r, -0.85 * r}, {-1.2 * r, -0.85 * r}});
    case 4:  // a cross with thick arms
      return Polygon(x, y,
                     {{-.4 * r, -1.2 * r},
                      {.4 * r, -1.2 * r},
                      {.4 * r, -.4 * r},
                      {1.2 * r, -.4 * r},
                      {1.2 * r, .4 * r},
                      {.4 * r, .4 * r},
                      {.4 * r, 1.2 * r},
                      {-.4 * r, 1.2 * r},
                      {-.4 * r, .4 * r},
                      {-1.2 * r, .4 * r},
                      {-1.2 * r, -.4 * r},
                      {-.4 * r, -.4 * r}});
    case 5:  // a flat bar
      return Polygon(
          x, y,
          {{-1.4 * r, -.55 * r}, {1.4 * r, -.55 * r}, {1.4 * r, .55 * r}, {-1.4 * r, .55 * r}});
    case 6:  // a pentagon
      return Polygon(
          x, y,
          {{0, -1.2 * r}, {1.15 * r, -.35 * r}, {.7 * r, r}, {-.7 * r, r}, {-1.15 * r, -.35 * r}});
    default:
      return absl::StrCat("M", Coordinate(x - r), " ", Coordinate(y), "a", Coordinate(r), " ",
                          Coordinate(r), " 0 1 0 ", Coordinate(2 * r), " 0a", Coordinate(r), " ",
                          Coordinate(r), " 0 1 0 ", Coordinate(-2 * r), " 0Z");
  }
}

std::string PaperStyleSheet() {
  std::string rules =
      "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:10.5px;fill:#222}"
      ".title{font-size:12px;font-weight:bold}.subtitle,.tick,.slope text,.guide text{fill:#555}"
      ".grid{stroke:#e4e4e4;stroke-width:.75;fill:none}.frame{stroke:#888;stroke-width:.75;fill:"
      "none}"
      ".line{fill:none;stroke-width:1.6;stroke-linejoin:round}"
      ".faint .line{stroke-width:2.2}"
      ".marker{stroke-width:1.2}.hollow .marker,.ring{fill:#fff}"
      ".ring{fill-opacity:0;stroke-width:1.4}.whisker{stroke-width:1;fill:none}"
      ".label{paint-order:stroke;stroke:#fff;stroke-width:2.5px;stroke-linejoin:round}"
      ".guide text{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}"
      ".leader{stroke-width:.6;stroke-opacity:.7;fill:none}"
      ".guide path,.slope path{fill:none;stroke:#777;stroke-width:.9}"
      ".guide.trail path{stroke-opacity:.6}.guide.frontier path{stroke:#222;stroke-width:1.1}"
      ".ref .line{stroke-width:2.2}";
  const auto add = [&rules](const std::string& name, const std::string& colour) {
    for (const char* part : {".line", ".marker", ".whisker", ".leader", ".ring"}) {
      absl::StrAppend(&rules, ".", name, " ", part, part == std::string(".ring") ? "" : ",");
    }
    absl::StrAppend(&rules, ",.", name, ".trail path{stroke:", colour, "}");
    absl::StrAppend(&rules, ".", name, ":not(.hollow) .marker{fill:", colour, "}");
    absl::StrAppend(&rules, ".", name, " .label{fill:", colour, "}");
  };
  for (int style = 0; style < kStyles; ++style) add(StyleClass(style), kPaperColours[style]);
  add("ref", "#222");
  return rules;
}

}  // namespace plot
}  // namespace tfb
