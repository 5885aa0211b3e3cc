// The options of a technique are a plain struct with defaults, which is bound once to names, ranges
// and help.
//
//   struct LongformerOptions {
//     int64_t window = 512;
//     void Describe(OptionBinder& bind) {
//       bind.Int("window", &window, 0, kMaxTokens, "keys seen beside the query's own");
//     }
//   };
//
// From that one declaration come parsing, error messages, --list, canonical text and the sweep of a
// budget.
#ifndef TFB_CORE_OPTIONS_H_
#define TFB_CORE_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/problem.h"
#include "core/status.h"

namespace tfb {

constexpr int64_t kMaxTokens = kMaxSize;

// Option values as text, by name: as a user typed them, or canonical with every option present.
using Options = std::map<std::string, std::string, std::less<>>;

// One option as a user sees it.
struct OptionSpec {
  std::string name;
  // "int", "real", "bool", "choice", "ints", "technique", "techniques"
  std::string type;
  std::string default_value;  // canonical text
  std::string range;          // "0 to 1099511627776", "softmax | relu"
  std::string help;
  std::vector<std::string> sweep;  // what `name=*` expands to; empty where it cannot be swept
};

// A technique and its options as written on a command line: "longformer:window=256,dilation=1/2".
struct TechniqueSpec {
  std::string technique;
  Options options;
};

// The techniques of a stack's layers: one for all layers, or one for each.
//
// As text they stand one behind the other with `/` between them, as the numbers of a list do. A
// count before `*` repeats what follows, a technique or several in parentheses:
//
//   longformer[window=32]/longformer[window=64]      two layers, the windows of which grow
//   10*dense/2*routing                               routing in the last 2 of 12 layers
//   16*(strided/fixed)                               32 layers by turns
struct TechniqueList {
  static constexpr int64_t kMaxSize = 1000;

  std::vector<TechniqueSpec> specs;

  // Returns the technique of a layer, counted from 0. The list begins anew behind its end.
  const TechniqueSpec& Of(int64_t layer) const {
    return specs[static_cast<size_t>(layer) % specs.size()];
  }
  // Returns InvalidArgument, with the number of techniques and the allowed ones, unless there is
  // one technique or one of the counts. `option` is the list's name, and `of` says what has the
  // counts: "layers=2".
  absl::Status CheckCount(absl::string_view option, absl::string_view of,
                          const std::vector<int64_t>& counts) const;
};

// Collects an options struct's fields. The pointers must outlive the binder.
class OptionBinder {
 public:
  void Int(absl::string_view name, int64_t* value, int64_t min, int64_t max, absl::string_view help,
           const std::vector<int64_t>& sweep = {});
  void Real(absl::string_view name, double* value, double min, double max, absl::string_view help,
            const std::vector<double>& sweep = {});
  void Bool(absl::string_view name, bool* value, absl::string_view help);
  // A list of integers, written 1/1/2/4.
  void Ints(absl::string_view name, std::vector<int64_t>* value, int64_t min, int64_t max,
            absl::string_view help);
  // An option whose value is a technique that this one is made with, its own options in brackets:
  // longformer[window=64]. `check` returns an error where that technique is not acceptable, and may
  // put its options into canonical form.
  void Technique(absl::string_view name, TechniqueSpec* value, absl::string_view range,
                 const std::function<absl::Status(TechniqueSpec*)>& check, absl::string_view help);
  // An option whose value is a list of such techniques. `check` is called for each of them.
  void Techniques(absl::string_view name, TechniqueList* value, absl::string_view range,
                  const std::function<absl::Status(TechniqueSpec*)>& check, absl::string_view help);
  template <class Enum>
  void Choice(absl::string_view name, Enum* value,
              const std::vector<std::pair<std::string, Enum>>& choices, absl::string_view help) {
    std::vector<std::string> names;
    for (const auto& choice : choices) names.push_back(choice.first);
    AddChoice(
        name, names, help, [value, choices](size_t index) { *value = choices[index].second; },
        [value, choices] {
          size_t index = 0;
          while (index < choices.size() && choices[index].second != *value) ++index;
          return index;
        });
  }

  // Writes the given options through the bound pointers. Returns InvalidArgument for an unknown
  // name, with the list of the known ones, and for a bad value, with its range.
  absl::Status Parse(const Options& options);
  std::vector<OptionSpec> Specs() const;
  Options Values() const;  // Returns every option with its canonical text.

 private:
  struct Entry {
    OptionSpec spec;
    // Returns false where the text is not of the type or out of range.
    std::function<bool(absl::string_view)> parse;
    std::function<std::string()> print;
    std::function<absl::Status()> check;  // checks the parsed value; may be empty
  };
  void Add(OptionSpec spec, std::function<bool(absl::string_view)> parse,
           std::function<std::string()> print);
  void AddChoice(absl::string_view name, const std::vector<std::string>& names,
                 absl::string_view help, std::function<void(size_t)> set,
                 std::function<size_t()> get);
  std::vector<Entry> entries_;
};

template <class T>
absl::StatusOr<T> ParseOptions(const Options& text) {
  T options;
  OptionBinder binder;
  options.Describe(binder);
  TFB_RETURN_IF_ERROR(binder.Parse(text));
  return options;
}

absl::StatusOr<TechniqueSpec> ParseTechniqueSpec(absl::string_view text);
// Splits "dense,longformer:window=256,dilation=2,performer" into its three techniques: an item with
// '=' but no ':' before it belongs to the technique before it. Commas in brackets do not split.
absl::StatusOr<std::vector<TechniqueSpec>> ParseTechniqueSpecs(absl::string_view text);
std::string ToString(const TechniqueSpec& spec);
std::string ToString(const Options& options);  // "dilation=1,window=256"
// Returns "longformer[dilation=1,window=256]", which can be the value of an option.
std::string ToBracketedString(const TechniqueSpec& spec);

// Returns the shortest text of the list: 16*(strided/fixed).
std::string ToBracketedString(const TechniqueList& list);

// Returns the known names nearest to `name` by edit distance, whatever the case of their letters,
// best first, for "did you mean".
std::vector<std::string> NearestNames(absl::string_view name, const std::vector<std::string>& known,
                                      size_t count = 3);

// The options of a technique that has none.
struct NoOptions {
  void Describe(OptionBinder&) {}
};

}  // namespace tfb

#endif  // TFB_CORE_OPTIONS_H_
