#include "harness/conformance/drawn.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace tfb::conformance {

namespace {

// Returns lists for a stack of kLayersOfLists layers: the usual technique in both, and in the first
// before one that differs from it in a number or a choice of true and false.
std::vector<std::string> ListsToTry(const OptionSpec& option) {
  const std::string& usual = option.default_value;
  std::vector<std::string> lists = {absl::StrCat(kLayersOfLists, "*", usual)};
  const auto technique = Registry::Global().Find(usual);
  if (!technique.ok()) return lists;
  for (const OptionSpec& inside : (*technique)->info().options) {
    if (inside.type != "bool" && inside.type != "real") continue;
    const char* value = inside.type == "real"            ? "0.5"
                        : inside.default_value == "true" ? "false"
                                                         : "true";
    lists.push_back(absl::StrCat(usual, "/", usual, "[", inside.name, "=", value, "]"));
  }
  return lists;
}

}  // namespace

Range RangeOf(const OptionSpec& option) {
  Range range;
  const std::vector<absl::string_view> ends = absl::StrSplit(option.range, " to ");
  EXPECT_EQ(ends.size(), 2u) << option.name << " has range " << option.range;
  if (ends.size() != 2) return range;
  EXPECT_TRUE(absl::SimpleAtod(ends[0], &range.min)) << option.range;
  EXPECT_TRUE(absl::SimpleAtod(ends[1], &range.max)) << option.range;
  return range;
}

std::vector<std::string> ValuesToTry(const OptionSpec& option, int64_t tokens, bool few) {
  if (option.type == "bool") return {"true", "false"};
  if (option.type == "choice") return absl::StrSplit(option.range, " | ");
  if (option.type == "int") {
    const Range range = RangeOf(option);
    // Layers between the first and the last of a stack are the same code again and again.
    const int64_t most = option.name == "layers" ? 3 : 1000;
    std::vector<int64_t> candidates = {static_cast<int64_t>(range.min), 1, tokens - 1, tokens + 1};
    if (!few) candidates.insert(candidates.end(), {0, 2, 3, 5, 8, tokens, 2 * tokens, 1000});
    std::set<int64_t> values;
    for (const int64_t value : candidates) {
      const bool in_range =
          static_cast<double>(value) >= range.min && static_cast<double>(value) <= range.max;
      if (in_range && std::abs(value) <= most) values.insert(value);
    }
    std::vector<std::string> texts;
    for (const int64_t value : values) texts.push_back(absl::StrCat(value));
    return texts;
  }
  if (option.type == "real") {
    std::vector<std::string> texts = option.sweep;
    double value;
    if (absl::SimpleAtod(option.default_value, &value) && value != 0) {
      const Range range = RangeOf(option);
      for (const double factor : {0.5, 2.0}) {
        if (factor * value >= range.min && factor * value <= range.max) {
          texts.push_back(absl::StrCat(factor * value));
        }
      }
    }
    return texts;
  }
  if (option.type == "techniques") return ListsToTry(option);
  return {};
}

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

std::mt19937_64 RandomOf(const TechniqueInfo& info) {
  std::seed_seq seeds(info.name.begin(), info.name.end());
  std::vector<uint32_t> seed(1);
  seeds.generate(seed.begin(), seed.end());
  return std::mt19937_64(seed[0] + FromEnvironment("TFB_PROPERTY_SEED", 0));
}

int64_t Below(int64_t bound, std::mt19937_64* random) {
  return static_cast<int64_t>((*random)() % static_cast<uint64_t>(bound));
}

Problem ProblemAtRandom(int64_t most_tokens, std::mt19937_64* random) {
  constexpr int64_t kChannels[] = {1, 3, 8, 16, 20, 32, 64};
  const auto channels = [&] { return kChannels[Below(std::size(kChannels), random)]; };
  const auto one_in = [&](int64_t n) { return Below(n, random) == 0; };
  Problem problem = Problem::SelfAttention(1 + Below(2, random), 1 + Below(3, random),
                                           1 + Below(most_tokens, random), channels(), one_in(2));
  if (one_in(3)) problem.query_heads *= 2;
  if (one_in(4)) problem.kv_tokens = 1 + Below(most_tokens, random);
  if (one_in(4)) problem.value_dim = channels();
  if (one_in(4)) {
    problem.dtype = one_in(2) ? DType::kBF16 : DType::kF16;
    // A norm of a handful of channels amplifies roundings of 16 bits beyond any bound.
    problem.head_dim = std::max<int64_t>(problem.head_dim, 16);
  }
  return problem;
}

namespace {

// Draws a list of small numbers, or of one, for the heads of the problem.
std::string ListAtRandom(const Problem& problem, std::mt19937_64* random) {
  constexpr int64_t kNumbers[] = {1, 2, 3, 5};
  const int64_t sizes[] = {1, problem.query_heads, problem.kv_heads};
  std::vector<int64_t> list(static_cast<size_t>(sizes[Below(std::size(sizes), random)]));
  for (int64_t& number : list) number = kNumbers[Below(std::size(kNumbers), random)];
  return absl::StrJoin(list, "/");
}

// Returns the choices, and the values of true and false, that no default is.
std::vector<std::pair<std::string, std::string>> OtherChoices(const TechniqueInfo& info) {
  std::vector<std::pair<std::string, std::string>> choices;
  for (const OptionSpec& option : info.options) {
    if (option.type != "bool" && option.type != "choice") continue;
    for (const std::string& value : ValuesToTry(option, /*tokens=*/1, /*few=*/true)) {
      if (value != option.default_value) choices.emplace_back(option.name, value);
    }
  }
  return choices;
}

}  // namespace

Options OptionsAtRandom(const TechniqueInfo& info, const Problem& problem, int64_t number,
                        std::mt19937_64* random) {
  Options options;
  for (const OptionSpec& option : info.options) {
    if (Below(5, random) >= 2) continue;
    const std::vector<std::string> values =
        option.type == "ints" ? std::vector<std::string>{ListAtRandom(problem, random)}
                              : ValuesToTry(option, problem.query_tokens, /*few=*/false);
    if (values.empty()) continue;
    options[option.name] = values[Below(static_cast<int64_t>(values.size()), random)];
    if (option.type == "techniques") options["layers"] = absl::StrCat(kLayersOfLists);
  }
  const auto choices = OtherChoices(info);
  if (!choices.empty() && number % 2 == 0) {
    const auto& [name, value] = choices[static_cast<size_t>(number / 2) % choices.size()];
    options[name] = value;
  }
  return options;
}

}  // namespace tfb::conformance
