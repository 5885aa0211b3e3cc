#include "results/well_formed.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tfb {
namespace {

class Checker {
 public:
  Checker(absl::string_view markup, bool html) : all_(markup), rest_(markup), html_(html) {}

  std::string Check() {
    if (!html_ && absl::StartsWith(rest_, "<?xml ")) Skip(rest_.find("?>") + 2);
    if (html_) absl::ConsumePrefix(&rest_, "<!DOCTYPE html>");
    while (!rest_.empty() && problem_.empty()) {
      if (rest_[0] == '<') {
        Tag();
      } else if (rest_[0] == '&') {
        Reference();
      } else {
        Skip(1);
      }
    }
    if (problem_.empty() && !open_.empty()) Fail(absl::StrCat(open_.back(), " is not closed"));
    return problem_;
  }

 private:
  void Skip(size_t count) { rest_.remove_prefix(std::min(count, rest_.size())); }
  void Fail(absl::string_view what) {
    if (!problem_.empty()) return;
    const size_t at = all_.size() - rest_.size();
    problem_ = absl::StrCat(what, " at ", at, ": ", all_.substr(at, 60));
  }

  void Reference() {
    const size_t end = rest_.find(';');
    if (end == absl::string_view::npos || end > 8) return Fail("stray &");
    const absl::string_view name = rest_.substr(1, end - 1);
    static const std::set<absl::string_view> kKnown = {"amp", "lt", "gt", "quot", "#39"};
    if (kKnown.count(name) == 0) return Fail("unknown reference");
    Skip(end + 1);
  }

  std::string Name() {
    size_t length = 0;
    while (length < rest_.size() && (absl::ascii_isalnum(rest_[length]) ||
                                     absl::StrContains("-:_", rest_.substr(length, 1)))) {
      ++length;
    }
    const std::string name(rest_.substr(0, length));
    Skip(length);
    return name;
  }

  void Tag() {
    Skip(1);
    const bool end = absl::ConsumePrefix(&rest_, "/");
    const std::string name = Name();
    if (name.empty()) return Fail("stray <");
    if (end) {
      if (open_.empty() || open_.back() != name) return Fail(absl::StrCat("end of ", name));
      open_.pop_back();
      if (!absl::ConsumePrefix(&rest_, ">")) Fail("end tag");
      return;
    }
    Attributes();
    if (!problem_.empty()) return;
    if (absl::ConsumePrefix(&rest_, "/>")) return;
    if (!absl::ConsumePrefix(&rest_, ">")) return Fail("tag");
    static const std::set<std::string> kVoid = {"meta", "input", "br"};
    if (html_ && kVoid.count(name) > 0) return;
    open_.push_back(name);
    if (html_ && (name == "style" || name == "script")) {
      const size_t close = rest_.find(absl::StrCat("</", name, ">"));
      if (close == absl::string_view::npos) return Fail("no end");
      Skip(close);
    }
  }

  void Attributes() {
    std::set<std::string> names;
    while (!rest_.empty() && absl::ascii_isspace(rest_[0])) {
      while (!rest_.empty() && absl::ascii_isspace(rest_[0])) Skip(1);
      const std::string name = Name();
      if (name.empty()) return;
      if (!names.insert(name).second) return Fail(absl::StrCat(name, " twice"));
      if (!absl::ConsumePrefix(&rest_, "=")) {
        if (!html_) return Fail(absl::StrCat(name, " without a value"));
        continue;
      }
      if (!absl::ConsumePrefix(&rest_, "\"")) return Fail("attribute without quotes");
      while (!rest_.empty() && rest_[0] != '"' && problem_.empty()) {
        if (rest_[0] == '<') return Fail("< in an attribute");
        if (rest_[0] == '&') {
          Reference();
        } else {
          Skip(1);
        }
      }
      Skip(1);
    }
  }

  const absl::string_view all_;
  absl::string_view rest_;
  const bool html_;
  std::vector<std::string> open_;
  std::string problem_;
};

}  // namespace

std::string MarkupProblem(absl::string_view markup, bool html) {
  return Checker(markup, html).Check();
}

}  // namespace tfb
