#include "results/plot.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "results/markup.h"
#include "results/plot_labels.h"
#include "results/plot_layout.h"
#include "results/plot_style.h"
#include "results/table.h"

namespace tfb {
namespace plot {
namespace {

constexpr double kDegrees = 180 / 3.14159265358979323846;  // of a radian

constexpr double kMarkerRadius = 3;
constexpr int kWidestPointName = 44;  // characters; the description has the whole name

std::string Text(double x, double y, absl::string_view text, absl::string_view attributes = "") {
  return absl::StrCat("<text x=\"", Coordinate(x), "\" y=\"", Coordinate(y), "\"", attributes, ">",
                      EscapeMarkup(text), "</text>");
}

std::string Segment(double x1, double y1, double x2, double y2) {
  return absl::StrCat("M", Coordinate(x1), " ", Coordinate(y1), "L", Coordinate(x2), " ",
                      Coordinate(y2));
}

// Writes the markup of one plot.
class Drawing {
 public:
  Drawing(const Plot& plot, bool interactive)
      : plot_(plot),
        interactive_(interactive),
        layout_(plot),
        frame_(layout_.frame),
        x_(layout_.x),
        y_(layout_.y),
        guide_labels_(PlaceGuideLabels()),
        names_(plot.curves.size()) {
    NameLines(&names_);
    NamePoints(&names_);
  }

  std::string Draw() const {
    return absl::StrCat(Titles(), Keys(), Axes(), Slopes(), Guides(), Curves(), Marks(), List());
  }
  // Returns the height with the list of names that have no room beside their points.
  double height() const {
    return plot_.height + (list_.empty() ? 0 : kLine * static_cast<double>(list_.size()) + 6);
  }

 private:
  bool Shown(const Point& point) const { return IsShown(plot_, point); }

  std::string Titles() const {
    std::string out = plot_.title.empty() ? "" : Text(8, 15, plot_.title, " class=\"title\"");
    double y = 29;
    for (const std::string& line : layout_.subtitle) {
      out += Text(8, y, line, " class=\"subtitle\"");
      y += kLine;
    }
    return out;
  }
  std::string Keys() const {
    std::string out;
    for (size_t i = 0; i < plot_.keys.size(); ++i) {
      const auto [line, x] = layout_.keys[i];
      const double y = frame_.y - 10 - kKeyLine * (layout_.key_lines - 1 - line);
      const std::string swatch = KeySwatch(plot_.keys[i], x, y - 3.5);
      absl::StrAppend(&out, swatch, Text(x + 26, y, plot_.keys[i].text));
    }
    return out;
  }
  static std::string KeySwatch(const KeyEntry& key, double x, double y) {
    std::string out =
        absl::StrCat("<g class=\"", StyleClass(key.style), key.hollow ? " hollow" : "",
                     key.kind == Curve::Kind::kCounterpart ? " faint" : "", "\">");
    if (key.ring) {
      absl::StrAppend(&out, "<circle class=\"ring\" cx=\"", Coordinate(x + 11), "\" cy=\"",
                      Coordinate(y), "\" r=\"5\"/>");
    } else {
      if (key.kind != Curve::Kind::kScatter) {
        const std::string dashes =
            key.kind == Curve::Kind::kCounterpart ? "1.5 2.5" : Dashes(key.style);
        absl::StrAppend(&out, "<path class=\"line\"", DashAttribute(dashes), " d=\"",
                        Segment(x, y, x + 22, y), "\"/>");
      }
      if (key.kind != Curve::Kind::kCounterpart) {
        absl::StrAppend(&out, "<path class=\"marker\" d=\"",
                        MarkerPath(key.style, x + 11, y, kMarkerRadius), "\"/>");
      }
    }
    return out + "</g>";
  }
  static std::string DashAttribute(const std::string& dashes) {
    return dashes.empty() ? "" : Attribute("stroke-dasharray", dashes);
  }

  std::string Axes() const {
    const double right = frame_.x + frame_.width, bottom = frame_.y + frame_.height;
    std::string grid, small, labels;
    for (const Tick& tick : x_.Ticks(kTickSpacingX)) {
      const double x = x_.Pixel(tick.value);
      std::string* path = tick.label.empty() ? &small : &grid;
      *path +=
          tick.label.empty() ? Segment(x, bottom - 3, x, bottom) : Segment(x, frame_.y, x, bottom);
      if (!tick.label.empty()) {
        labels += Text(x, bottom + 14, tick.label, " class=\"tick\" text-anchor=\"middle\"");
      }
    }
    for (const Tick& tick : y_.Ticks(kTickSpacingY)) {
      const double y = y_.Pixel(tick.value);
      std::string* path = tick.label.empty() ? &small : &grid;
      *path += tick.label.empty() ? Segment(frame_.x, y, frame_.x + 3, y)
                                  : Segment(frame_.x, y, right, y);
      if (!tick.label.empty()) {
        labels += Text(frame_.x - 6, y + 3.5, tick.label, " class=\"tick\" text-anchor=\"end\"");
      }
    }
    std::string out = absl::StrCat("<path class=\"grid\" d=\"", grid, "\"/>");
    if (!small.empty()) absl::StrAppend(&out, "<path class=\"frame\" d=\"", small, "\"/>");
    absl::StrAppend(&out, "<path class=\"frame\" d=\"M", Coordinate(frame_.x), " ",
                    Coordinate(frame_.y), "V", Coordinate(bottom), "H", Coordinate(right), "\"/>",
                    labels);
    out += Text(frame_.x + frame_.width / 2, bottom + 31, plot_.x.title, " text-anchor=\"middle\"");
    const double middle = frame_.y + frame_.height / 2;
    out += Text(0, 0, plot_.y.title,
                absl::StrCat(" text-anchor=\"middle\" transform=\"translate(13 ",
                             Coordinate(middle), ") rotate(-90)\""));
    return out;
  }

  // Draws a fan of slopes in the emptier corner: above on the left, or below on the right.
  std::string Slopes() const {
    if (plot_.slopes.empty() || !plot_.x.logarithmic || !plot_.y.logarithmic) return "";
    double steepest = 0;
    for (const Plot::Slope& slope : plot_.slopes) steepest = std::max(steepest, slope.exponent);
    if (!(steepest > 0)) return "";
    // Pixels for a factor of e on each axis.
    const double ex = x_.Pixel(std::exp(1.0)) - x_.Pixel(1),
                 ey = y_.Pixel(1) - y_.Pixel(std::exp(1.0));
    const double width = std::min(frame_.width * 0.22, frame_.height * 0.36 / (steepest * ey / ex));
    const double height = steepest * ey / ex * width;
    constexpr double kLabelWidth = 24;
    const Box upper{frame_.x + 8, frame_.y + 12, width + kLabelWidth, height};
    const Box lower{frame_.x + frame_.width - width - kLabelWidth - 6,
                    frame_.y + frame_.height - height - 8, width + kLabelWidth, height};
    const Box& box = PointsIn(lower) < PointsIn(upper) ? lower : upper;
    std::string out = "<g class=\"slope\" aria-hidden=\"true\">";
    std::vector<double> ends;
    for (const Plot::Slope& slope : plot_.slopes) {
      ends.push_back(box.y + box.height - slope.exponent * ey / ex * width);
      absl::StrAppend(&out, "<path stroke-dasharray=\"3 2\" d=\"",
                      Segment(box.x, box.y + box.height, box.x + width, ends.back()), "\"/>");
    }
    const std::vector<double> places = Spread(ends, kLine - 1, box.y, box.y + box.height + kLine);
    for (size_t i = 0; i < places.size(); ++i) {
      out += Text(box.x + width + 4, places[i] + 3.5, plot_.slopes[i].label);
    }
    return out + "</g>";
  }
  // Returns how many places along all curves lie in `box`.
  int PointsIn(const Box& box) const {
    int inside = 0;
    for (const Curve& curve : plot_.curves) {
      for (size_t i = 0; i < curve.points.size(); ++i) {
        const Point& a = curve.points[i];
        const Point& b = curve.points[std::min(i + 1, curve.points.size() - 1)];
        if (!Shown(a) || !Shown(b)) continue;
        for (int part = 0; part < 8; ++part) {
          const double share = part / 8.0;
          const double x = x_.Pixel(a.x) * (1 - share) + x_.Pixel(b.x) * share;
          const double y = y_.Pixel(a.y) * (1 - share) + y_.Pixel(b.y) * share;
          if (box.Overlaps({x - 4, y - 4, 8, 8})) ++inside;
        }
      }
    }
    return inside;
  }

  std::string PathOf(const std::vector<Point>& points) const {
    std::string path;
    for (const Point& point : points) {
      if (!Shown(point)) continue;
      absl::StrAppend(&path, path.empty() ? "M" : "L", Coordinate(x_.Pixel(point.x)), " ",
                      Coordinate(y_.Pixel(point.y)));
    }
    return path;
  }

  std::string Guides() const {
    std::string out;
    for (size_t i = 0; i < plot_.guides.size(); ++i) {
      const Guide& guide = plot_.guides[i];
      const std::string path = PathOf(guide.points);
      if (path.empty()) continue;
      const char* kind = guide.kind == Guide::Kind::kBound      ? "bound"
                         : guide.kind == Guide::Kind::kFrontier ? "frontier"
                                                                : "trail";
      absl::StrAppend(&out, "<g class=\"guide ", kind, " ", StyleClass(guide.style),
                      "\"><path d=\"", path, "\"/>", GuideLabel(i), "</g>");
    }
    return out;
  }
  // The place of a guide's label.
  struct GuideLabelPlace {
    double x = 0, y = 0;  // of a point on the guide, from which the text is dx, dy away
    double dx = 0, dy = 0;
    double angle = 0;  // in degrees
    const char* anchor = "middle";
    Box box;            // what the label covers; of a sloping one it is empty
    bool last = false;  // whether to take it even where there is no room but for other labels
  };
  static double GuideLabelWidth(const Guide& guide) {
    return TextWidth(guide.label, kFontSize) * 1.08;
  }
  // Returns the places for a label, the best one first. One of a level guide stands above its end, or
  // below where the legend is there. One of a slope stands along it or, where the slope is shorter,
  // level beside it: on the left, where a roof has no points, or on the right.
  std::vector<GuideLabelPlace> LabelPlacesOf(const Guide& guide) const {
    if (guide.label.empty() || guide.points.size() < 2) return {};
    const Point& a = guide.points[guide.points.size() - 2];
    const Point& b = guide.points.back();
    if (!Shown(a) || !Shown(b)) return {};
    const double x1 = x_.Pixel(a.x), y1 = y_.Pixel(a.y), x2 = x_.Pixel(b.x), y2 = y_.Pixel(b.y);
    const double width = GuideLabelWidth(guide), height = kFontSize + 4;
    const double angle = std::atan2(y2 - y1, x2 - x1) * kDegrees;
    if (std::abs(y2 - y1) < 1) {
      return {{x2, y2, 0, -5, angle, "end", {x2 - width, y2 - 5 - kFontSize, width, height}},
              {x2, y2, 0, kFontSize + 2, angle, "end", {x2 - width, y2 + 2, width, height}},
              {x2, y2, 0, -5, angle, "end", {x2 - width, y2 - 5 - kFontSize, width, height}, true}};
    }
    // The width is estimated a little too wide.
    if (std::hypot(x2 - x1, y2 - y1) >= 0.9 * width) {
      return {{(x1 + x2) / 2, (y1 + y2) / 2, 0, -5, angle, "middle", {}}};
    }
    const double y = std::max((y1 + y2) / 2, std::min(y1, y2) + kFontSize);  // the text's middle
    const auto x_at = [&](double height_at) {
      return x1 + (x2 - x1) * std::clamp((height_at - y1) / (y2 - y1), 0.0, 1.0);
    };
    const double left = std::min(x_at(y - height / 2), x_at(y + height / 2));
    const double right = std::max(x_at(y - height / 2), x_at(y + height / 2));
    return {{left, y, -6, 4, 0, "end", {left - 6 - width, y - height / 2, width, height}},
            {right, y, 6, 4, 0, "start", {right + 6, y - height / 2, width, height}}};
  }
  // Tells whether a level label has room: within the frame, or a little above it, and clear of
  // slopes and, below the guide's end, of points. One along a slope has its place in any case.
  bool HasRoom(const GuideLabelPlace& place) const {
    constexpr double kAbove = 4;  // the legend is higher
    if (place.last || place.box.width == 0) return true;
    const Box room{frame_.x, frame_.y - kAbove, frame_.width, frame_.height + kAbove};
    if (place.dx == 0) return place.box.y >= room.y && (place.dy < 0 || PointsIn(place.box) == 0);
    Obstacles obstacles;
    AddGuideLines(&obstacles);
    const bool crossed =
        std::any_of(obstacles.lines.begin(), obstacles.lines.end(),
                    [&place](const Line& line) { return line.Crosses(place.box); });
    return room.Contains(place.box) && !crossed && PointsIn(place.box) == 0;
  }
  // Finds a place for the label of each guide, of level ones first, or none where there is no room.
  std::vector<std::optional<GuideLabelPlace>> PlaceGuideLabels() const {
    std::vector<std::optional<GuideLabelPlace>> found(plot_.guides.size());
    std::vector<Box> taken;
    for (const bool level : {true, false}) {
      for (size_t i = 0; i < plot_.guides.size(); ++i) {
        for (const GuideLabelPlace& place : LabelPlacesOf(plot_.guides[i])) {
          if ((place.dx == 0 && place.box.width > 0) != level) continue;
          const bool covers = std::any_of(taken.begin(), taken.end(), [&place](const Box& box) {
            return box.Overlaps(place.box);
          });
          if (covers || !HasRoom(place)) continue;
          found[i] = place;
          if (place.box.width > 0) taken.push_back(place.box);
          break;
        }
      }
    }
    return found;
  }
  std::string GuideLabel(size_t i) const {
    const std::optional<GuideLabelPlace>& place = guide_labels_[i];
    if (!place.has_value()) return "";
    return Text(place->dx, place->dy, plot_.guides[i].label,
                absl::StrCat(" text-anchor=\"", place->anchor, "\" transform=\"translate(",
                             Coordinate(place->x), " ", Coordinate(place->y), ") rotate(",
                             Coordinate(place->angle), ")\""));
  }

  // Returns the boxes of guides' level labels, which names of points must not cover.
  std::vector<Box> GuideLabelBoxes() const {
    std::vector<Box> boxes;
    for (const std::optional<GuideLabelPlace>& place : guide_labels_) {
      if (place.has_value() && place->box.width > 0) boxes.push_back(place->box);
    }
    return boxes;
  }

  std::string Curves() const {
    std::string faint, rest, reference;  // the baseline is drawn last
    for (size_t i = 0; i < plot_.curves.size(); ++i) {
      const Curve& curve = plot_.curves[i];
      std::string* layer = curve.kind == Curve::Kind::kCounterpart ? &faint
                           : curve.style == kReferenceStyle        ? &reference
                                                                   : &rest;
      *layer += CurveMarkup(curve, names_[i]);
    }
    return absl::StrCat("<g class=\"curves\">", faint, rest, reference, "</g>");
  }

  std::string CurveMarkup(const Curve& curve, const std::string& name) const {
    const std::string path = PathOf(curve.points);
    if (path.empty()) return "";
    const bool faint = curve.kind == Curve::Kind::kCounterpart;
    std::string out = absl::StrCat("<g class=\"curve ", StyleClass(curve.style),
                                   faint ? " faint" : "", curve.hollow ? " hollow" : "", "\"");
    if (interactive_) {
      absl::StrAppend(&out, " tabindex=\"0\" role=\"img\"",
                      Attribute("aria-label", curve.description), Attribute("data-key", curve.key),
                      Attribute("data-family", curve.group), Attribute("data-name", curve.name));
    }
    out += ">";
    if (curve.kind != Curve::Kind::kScatter) {
      if (interactive_) absl::StrAppend(&out, "<path class=\"hit\" d=\"", path, "\"/>");
      absl::StrAppend(&out, "<path class=\"line\"",
                      DashAttribute(faint ? "1.5 2.5" : Dashes(curve.style)), " d=\"", path,
                      "\"/>");
    }
    if (!faint) absl::StrAppend(&out, Whiskers(curve), Markers(curve));
    return absl::StrCat(out, name, "</g>");
  }

  std::string Markers(const Curve& curve) const {
    std::string path;
    for (const Point& point : curve.points) {
      if (!Shown(point)) continue;
      path += MarkerPath(curve.style, x_.Pixel(point.x), y_.Pixel(point.y),
                         curve.kind == Curve::Kind::kScatter ? kMarkerRadius + 0.8 : kMarkerRadius);
    }
    return absl::StrCat("<path class=\"marker\" d=\"", path, "\"/>");
  }

  std::string Whiskers(const Curve& curve) const {
    std::string path;
    for (const Point& point : curve.points) {
      if (!Shown(point) || !point.low.has_value() || !point.high.has_value()) continue;
      if (!CanShow(plot_.y, *point.low) || !CanShow(plot_.y, *point.high)) continue;
      const double bottom = frame_.y + frame_.height;
      const double low = std::clamp(y_.Pixel(*point.low), frame_.y, bottom);
      const double high = std::clamp(y_.Pixel(*point.high), frame_.y, bottom);
      // A whisker within the marker would be invisible.
      if (low - high < 2 * kMarkerRadius) continue;
      path += Segment(x_.Pixel(point.x), low, x_.Pixel(point.x), high);
    }
    return path.empty() ? "" : absl::StrCat("<path class=\"whisker\" d=\"", path, "\"/>");
  }

  const Point* LastShown(const Curve& curve) const {
    const auto last = std::find_if(curve.points.rbegin(), curve.points.rend(),
                                   [this](const Point& point) { return Shown(point); });
    return last == curve.points.rend() ? nullptr : &*last;
  }

  // Places names to the right of the axes, each as near as possible to its curve's end.
  void NameLines(std::vector<std::string>* names) const {
    std::vector<size_t> named;
    std::vector<double> wanted;
    for (size_t i = 0; i < plot_.curves.size(); ++i) {
      const Curve& curve = plot_.curves[i];
      const Point* last = LastShown(curve);
      if (curve.kind != Curve::Kind::kLine || last == nullptr) continue;
      named.push_back(i);
      wanted.push_back(y_.Pixel(last->y));
    }
    const std::vector<double> places =
        Spread(wanted, kLine - 0.5, frame_.y + 2, frame_.y + frame_.height + 4);
    const double x = frame_.x + frame_.width + 16;
    const int room =
        std::max(8, static_cast<int>((plot_.width - x) / TextWidth("n", kFontSize)) - 1);
    for (size_t i = 0; i < named.size(); ++i) {
      const Curve& curve = plot_.curves[named[i]];
      const double end = x_.Pixel(LastShown(curve)->x);
      (*names)[named[i]] = absl::StrCat(
          "<path class=\"leader\" d=\"M", Coordinate(end + 5), " ", Coordinate(wanted[i]), "L",
          Coordinate(std::max(end + 5, x - 9)), " ", Coordinate(wanted[i]), "L", Coordinate(x - 2),
          " ", Coordinate(places[i]), "\"/>",
          Text(x, places[i] + 3.5, CutToWidth(curve.shown_name(), std::min(room, kWidestLineName)),
               " class=\"label\""));
    }
  }

  // Places the names of points. In a file, which has no tooltips, a point whose name has no room
  // gets a number, and its name is in a list below.
  void NamePoints(std::vector<std::string>* names) {
    std::vector<size_t> owners;
    Obstacles obstacles;
    obstacles.texts = GuideLabelBoxes();
    AddGuideLines(&obstacles);
    for (size_t i = 0; i < plot_.curves.size(); ++i) {
      const Curve& curve = plot_.curves[i];
      const Point* last = LastShown(curve);
      if (curve.kind != Curve::Kind::kScatter || last == nullptr) continue;
      obstacles.points.push_back({x_.Pixel(last->x) - 4, y_.Pixel(last->y) - 4, 8, 8});
      owners.push_back(i);
    }
    std::stable_partition(owners.begin(), owners.end(),
                          [this](size_t i) { return plot_.curves[i].name_needed; });
    const std::vector<size_t> unnamed = PlaceNames(owners, false, &obstacles, names);
    if (interactive_ || unnamed.empty()) return;
    PlaceNames(unnamed, true, &obstacles, names);
    std::vector<std::string> entries;
    for (size_t i = 0; i < unnamed.size(); ++i) {
      entries.push_back(absl::StrCat(i + 1, "\u00a0", plot_.curves[unnamed[i]].shown_name()));
    }
    const int columns =
        std::max(20, static_cast<int>((plot_.width - 16) / TextWidth("n", kFontSize)));
    list_ = absl::StrSplit(Wrap(absl::StrJoin(entries, ", "), columns, ""), '\n');
  }

  // Places the names of the curves, or their numbers from 1 on; returns those that have no room.
  std::vector<size_t> PlaceNames(const std::vector<size_t>& owners, bool numbers,
                                 Obstacles* obstacles, std::vector<std::string>* names) const {
    std::vector<PointLabel> labels;
    for (const size_t i : owners) {
      const Curve& curve = plot_.curves[i];
      const Point* last = LastShown(curve);
      labels.push_back({x_.Pixel(last->x), y_.Pixel(last->y),
                        numbers ? absl::StrCat(labels.size() + 1)
                                : CutToWidth(curve.shown_name(), kWidestPointName),
                        curve.name_needed, numbers});
    }
    const std::vector<std::optional<PlacedLabel>> places =
        PlaceLabels(labels, frame_, kFontSize, obstacles);
    std::vector<size_t> unnamed;
    for (size_t i = 0; i < places.size(); ++i) {
      if (!places[i].has_value()) {
        unnamed.push_back(owners[i]);
        continue;
      }
      const Box& box = places[i]->box;
      std::string& name = (*names)[owners[i]];
      if (places[i]->with_leader) {
        const Line leader = LeaderOf(labels[i], box);
        absl::StrAppend(&name, "<path class=\"leader\" d=\"",
                        Segment(leader.x1, leader.y1, leader.x2, leader.y2), "\"/>");
      }
      name += Text(box.x, box.y + box.height - 3, labels[i].text, " class=\"label\"");
    }
    return unnamed;
  }

  void AddGuideLines(Obstacles* obstacles) const {
    for (const Guide& guide : plot_.guides) {
      for (size_t i = 1; i < guide.points.size(); ++i) {
        const Point &a = guide.points[i - 1], &b = guide.points[i];
        if (!Shown(a) || !Shown(b)) continue;
        obstacles->lines.push_back({x_.Pixel(a.x), y_.Pixel(a.y), x_.Pixel(b.x), y_.Pixel(b.y)});
      }
    }
  }

  std::string Marks() const {
    std::string out;
    for (const Mark& mark : plot_.marks) {
      if (!Shown(mark.point)) continue;
      absl::StrAppend(
          &out, "<g class=\"mark ", StyleClass(mark.style), "\"",
          interactive_ ? Attribute("data-key", mark.key) : "", ">",
          interactive_ ? absl::StrCat("<title>", EscapeMarkup(mark.description), "</title>") : "",
          "<circle class=\"ring\" cx=\"", Coordinate(x_.Pixel(mark.point.x)), "\" cy=\"",
          Coordinate(y_.Pixel(mark.point.y)), "\" r=\"6\"/></g>");
    }
    return out;
  }

  std::string List() const {
    std::string out;
    for (size_t i = 0; i < list_.size(); ++i) {
      out += Text(8, plot_.height + kLine * static_cast<double>(i) + 8, list_[i]);
    }
    return out;
  }

  const Plot& plot_;
  const bool interactive_;
  const Layout layout_;
  const Box& frame_;
  const Scale &x_, &y_;
  const std::vector<std::optional<GuideLabelPlace>> guide_labels_;
  std::vector<std::string> names_;  // of each curve, as markup
  std::vector<std::string> list_;   // lines of "1 name, 2 name" below the plot
};

std::string ViewBox(double width, double height) {
  return absl::StrCat("viewBox=\"0 0 ", Coordinate(width), " ", Coordinate(height), "\"");
}

}  // namespace

std::string DrawForPage(const Plot& plot, const std::string& id) {
  const std::string title =
      absl::StrCat(plot.title, plot.subtitle.empty() ? "" : ", ", plot.subtitle);
  return absl::StrCat("<svg class=\"plot\"", Attribute("id", id), " ",
                      ViewBox(plot.width, plot.height), " role=\"group\"",
                      Attribute("aria-label", title), ">", Drawing(plot, true).Draw(), "</svg>");
}

std::string DrawFile(const std::vector<Plot>& plots, int columns, const std::string& title) {
  if (plots.empty() || columns < 1) return "";
  columns = std::min<int>(columns, static_cast<int>(plots.size()));
  double width = 0, height = 0, x = 0, row_height = 0;
  std::string body;
  for (size_t i = 0; i < plots.size(); ++i) {
    if (i > 0 && i % columns == 0) {
      height += row_height;
      x = row_height = 0;
    }
    const Drawing drawing(plots[i], false);
    absl::StrAppend(&body, "<g transform=\"translate(", Coordinate(x), " ", Coordinate(height),
                    ")\">", drawing.Draw(), "</g>\n");
    x += plots[i].width;
    width = std::max(width, x);
    row_height = std::max(row_height, drawing.height());
  }
  height += row_height;
  constexpr double kMillimetre = 96 / 25.4;
  return absl::StrCat("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n",
                      "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\"",
                      Coordinate(width / kMillimetre), "mm\" height=\"",
                      Coordinate(height / kMillimetre), "mm\" ", ViewBox(width, height),
                      ">\n<title>", EscapeMarkup(title), "</title>\n<style>", PaperStyleSheet(),
                      "</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n", body,
                      "</svg>\n");
}

std::string DrawSwatch(int style, Curve::Kind kind) {
  const std::string dashes = Dashes(style);
  std::string out =
      absl::StrCat("<svg class=\"swatch\" viewBox=\"0 0 26 12\" aria-hidden=\"true\"><g class=\"",
                   StyleClass(style), "\">");
  if (kind == Curve::Kind::kLine) {
    absl::StrAppend(&out, "<path class=\"line\"",
                    dashes.empty() ? "" : Attribute("stroke-dasharray", dashes),
                    " d=\"M1 6H25\"/>");
  }
  return absl::StrCat(out, "<path class=\"marker\" d=\"", MarkerPath(style, 13, 6, kMarkerRadius),
                      "\"/></g></svg>");
}

}  // namespace plot
}  // namespace tfb
