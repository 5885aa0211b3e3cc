#include "core/options.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct ExampleOptions {
  int64_t window = 512;
  double base = 10000;
  bool shared = true;
  std::vector<int64_t> dilation = {1};
  enum class Kind { kSoft, kHard } kind = Kind::kSoft;

  void Describe(OptionBinder& bind) {
    bind.Int("window", &window, 0, 4096, "keys seen", {64, 128});
    bind.Real("base", &base, 1, 1e12, "base of the frequencies");
    bind.Bool("shared", &shared, "whether tables are shared");
    bind.Ints("dilation", &dilation, 1, 16, "gap per head");
    bind.Choice("kind", &kind, {{"soft", Kind::kSoft}, {"hard", Kind::kHard}}, "how it weighs");
  }
};

std::string ErrorOf(const Options& options) {
  return std::string(ParseOptions<ExampleOptions>(options).status().message());
}

TEST(Options, EachTypeIsParsedAndTheRestKeepsItsDefault) {
  const ExampleOptions options =
      ParseOptions<ExampleOptions>(
          {{"window", "64"}, {"shared", "false"}, {"dilation", "1/2/16"}, {"kind", "hard"}})
          .value();
  EXPECT_EQ(options.window, 64);
  EXPECT_EQ(options.base, 10000);
  EXPECT_FALSE(options.shared);
  EXPECT_THAT(options.dilation, ElementsAre(1, 2, 16));
  EXPECT_EQ(options.kind, ExampleOptions::Kind::kHard);
}

TEST(Options, ErrorsNameTheOptionTheValueAndWhatIsAllowed) {
  EXPECT_EQ(ErrorOf({{"window", "4097"}}), "option window is \"4097\"; allowed are 0 to 4096");
  EXPECT_EQ(ErrorOf({{"window", "many"}}), "option window is \"many\"; allowed are 0 to 4096");
  EXPECT_EQ(ErrorOf({{"base", "nan"}}), "option base is \"nan\"; allowed are 1 to 1e+12");
  EXPECT_EQ(ErrorOf({{"dilation", "1//2"}}),
            "option dilation is \"1//2\"; allowed are a/b/..., each 1 to 16");
  EXPECT_EQ(ErrorOf({{"kind", "medium"}}), "option kind is \"medium\"; allowed are soft | hard");
  EXPECT_EQ(ErrorOf({{"width", "3"}}),
            "unknown option \"width\"; known are window, base, shared, dilation, kind");
}

TEST(Options, ProblemsAndOptionsHaveUpToTwoToTheFortyTokens) {
  Problem problem = Problem::SelfAttention(1, 1, int64_t{1} << 40, 8);
  EXPECT_TRUE(Validate(problem).ok());
  ++problem.query_tokens;
  EXPECT_EQ(
      Validate(problem),
      absl::InvalidArgumentError("query_tokens is 1099511627777; allowed are 0 to 1099511627776"));
  EXPECT_EQ(kMaxTokens, int64_t{1} << 40);
}

TEST(Options, SpecsShowDefaultsRangesAndSweeps) {
  ExampleOptions options;
  OptionBinder binder;
  options.Describe(binder);
  const std::vector<OptionSpec> specs = binder.Specs();
  ASSERT_EQ(specs.size(), 5u);
  EXPECT_EQ(specs[0].default_value, "512");
  EXPECT_THAT(specs[0].sweep, ElementsAre("64", "128"));
  EXPECT_EQ(specs[1].default_value, "10000");
  EXPECT_EQ(specs[4].range, "soft | hard");
  EXPECT_EQ(ToString(binder.Values()), "base=10000,dilation=1,kind=soft,shared=true,window=512");
}

TEST(Options, RealsArePrintedWithTheFewestDigitsThatReadBack) {
  const std::vector<std::pair<double, std::string>> cases = {{1, "1"},
                                                             {100000, "100000"},
                                                             {1000000, "1e+06"},
                                                             {1234567, "1234567"},
                                                             {1.1, "1.1"},
                                                             {1 + 1e-15, "1.000000000000001"},
                                                             {1.1 + 2.2, "3.3000000000000003"}};
  for (const auto& [value, text] : cases) {
    ExampleOptions options;
    options.base = value;
    OptionBinder binder;
    options.Describe(binder);
    EXPECT_EQ(binder.Values().at("base"), text);
    EXPECT_EQ(ParseOptions<ExampleOptions>(binder.Values()).value().base, value);
  }
}

TEST(Options, TheEndsOfARangeAreInsideOfIt) {
  EXPECT_EQ(ParseOptions<ExampleOptions>({{"base", "1"}})->base, 1);
  EXPECT_EQ(ParseOptions<ExampleOptions>({{"base", "1e12"}})->base, 1e12);
  EXPECT_EQ(ParseOptions<ExampleOptions>({{"window", "0"}})->window, 0);
  EXPECT_EQ(ParseOptions<ExampleOptions>({{"window", "4096"}})->window, 4096);
  EXPECT_EQ(ErrorOf({{"base", "0.999"}}), "option base is \"0.999\"; allowed are 1 to 1e+12");
  EXPECT_EQ(ErrorOf({{"base", "1.001e12"}}), "option base is \"1.001e12\"; allowed are 1 to 1e+12");
  EXPECT_EQ(ErrorOf({{"window", "-1"}}), "option window is \"-1\"; allowed are 0 to 4096");
}

TEST(TechniqueSpecs, ListsSplitAtCommasAndOptionsStayWithTheirTechnique) {
  const std::vector<TechniqueSpec> specs =
      ParseTechniqueSpecs("dense,longformer:window=256,dilation=1/2,performer:features=*").value();
  ASSERT_EQ(specs.size(), 3u);
  EXPECT_EQ(ToString(specs[0]), "dense");
  EXPECT_EQ(ToString(specs[1]), "longformer:dilation=1/2,window=256");
  EXPECT_EQ(ToString(specs[2]), "performer:features=*");
}

// The options of a technique that is made with another one, which is "near" or "far".
struct OuterOptions {
  int64_t depth = 1;
  TechniqueSpec inner = {"near", {}};
  void Describe(OptionBinder& bind) {
    bind.Int("depth", &depth, 1, 9, "how many of it");
    const auto check = [](TechniqueSpec* spec) {
      if (spec->technique != "near" && spec->technique != "far") {
        return absl::NotFoundError("nearest are far, near");
      }
      spec->options.erase("default");
      return absl::OkStatus();
    };
    bind.Technique("inner", &inner, "near or far", check, "what is inside");
  }
};

// The options of a stack that is made with techniques which are "near" or "far".
struct StackOptions {
  int64_t depth = 1;
  TechniqueList inner = {{{"near", {}}}};
  void Describe(OptionBinder& bind) {
    bind.Int("depth", &depth, 1, 9, "how many of it");
    const auto check = [](TechniqueSpec* spec) {
      spec->options.erase("default");
      return spec->technique == "near" || spec->technique == "far"
                 ? absl::OkStatus()
                 : absl::NotFoundError(absl::StrCat("no ", spec->technique));
    };
    bind.Techniques("inner", &inner, "near or far", check, "what is inside");
  }
};

TEST(Options, AListOfTechniquesHasCountsAndPatterns) {
  const auto inner = [](absl::string_view text) {
    const auto parsed = ParseOptions<StackOptions>({{"inner", std::string(text)}});
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed->inner;
  };
  EXPECT_EQ(ToBracketedString(StackOptions().inner), "near");
  EXPECT_EQ(inner("near/far[a=1/2]/near").specs.size(), 3u);
  EXPECT_EQ(inner("near/far[a=1/2]/near").Of(1).options.at("a"), "1/2");
  EXPECT_EQ(inner("far").Of(7).technique, "far");
  EXPECT_EQ(inner("3*near/2*far").specs.size(), 5u);
  EXPECT_EQ(inner("3*near/2*far").Of(3).technique, "far");
  EXPECT_EQ(inner("2*(near/2*far[b=x[c=1],default=3])/near").specs.size(), 7u);
  EXPECT_EQ(inner("2*(near/2*far)/near").Of(4).technique, "far");
  EXPECT_EQ(inner("(near/far)").specs.size(), 2u);
  EXPECT_EQ(inner("1000*near").specs.size(), 1000u);
  EXPECT_EQ(inner("500*(near/far)").specs.size(), 1000u);
}

TEST(Options, AListOfTechniquesHasOneCanonicalText) {
  const auto canonical = [](absl::string_view text) {
    return ToBracketedString(ParseOptions<StackOptions>({{"inner", std::string(text)}})->inner);
  };
  for (const char* text : {"near", "2*near", "near/far", "3*near/2*far", "16*(near/far)",
                           "4*(3*near/far[a=1])", "near/2*far/near", "far[a=1/2]/far[a=2*x/(y)]"}) {
    EXPECT_EQ(canonical(text), text);
  }
  EXPECT_EQ(canonical("near/near/near"), "3*near");
  EXPECT_EQ(canonical("1*(near)"), "near");
  EXPECT_EQ(canonical("near/far/near/far"), "2*(near/far)");
  EXPECT_EQ(canonical("2*(near/2*far)/2*(near/far/far)"), "4*(near/2*far)");
  EXPECT_EQ(canonical("far[default=1]/near/far"), "far/near/far");
}

TEST(Options, AListOfTechniquesThatIsWrongIsRefused) {
  const auto error = [](absl::string_view text) {
    return std::string(
        ParseOptions<StackOptions>({{"inner", std::string(text)}}).status().message());
  };
  for (const char* text : {"",
                           "/",
                           "near/",
                           "/near",
                           "0*near",
                           "-1*near",
                           "*near",
                           "2*",
                           "near*2",
                           "2*2*near",
                           "(near",
                           "near)",
                           "near)/(far",
                           "near]/[far",
                           "2*(near",
                           "2*()",
                           "(near)(far)",
                           "2*((near/far)/near)",
                           "1001*near",
                           "500*(near/far/near)",
                           "near[a=1",
                           "near]",
                           "999999999999*near"}) {
    EXPECT_THAT(error(text), HasSubstr("allowed are near or far")) << text;
  }
  EXPECT_THAT(error("near/farther"), HasSubstr("no farther"));
}

TEST(Options, AListThatIsTooLongOrTooShortNamesBothCounts) {
  const TechniqueList list = {{{"near", {}}, {"far", {}}, {"near", {}}}};
  EXPECT_TRUE(list.CheckCount("inner", "layers=3", {3}).ok());
  EXPECT_TRUE(StackOptions().inner.CheckCount("inner", "layers=3", {3}).ok());
  EXPECT_EQ(list.CheckCount("inner", "layers=2", {2, 4}).message(),
            "option inner names 3 techniques; allowed with layers=2 are 1 or 2 or 4");
}

TEST(Options, ATechniqueHasItsOptionsInBrackets) {
  const auto inner = [](absl::string_view text) {
    return ParseOptions<OuterOptions>({{"inner", std::string(text)}})->inner;
  };
  EXPECT_EQ(ToBracketedString(OuterOptions().inner), "near");
  EXPECT_EQ(ToBracketedString(inner("far")), "far");
  EXPECT_EQ(ToBracketedString(inner("far[b=1/2,a=x[y=1,z=2],default=0]")),
            "far[a=x[y=1,z=2],b=1/2]");
  EXPECT_EQ(inner("far[a=x[y=1,z=2]]").options.at("a"), "x[y=1,z=2]");
  EXPECT_TRUE(inner("far[default=0]").options.empty());
}

TEST(Options, AnUnfitTechniqueIsAnErrorWithTheReason) {
  const auto error = [](absl::string_view text) {
    return std::string(
        ParseOptions<OuterOptions>({{"inner", std::string(text)}}).status().message());
  };
  EXPECT_EQ(error("fear"),
            "option inner is \"fear\"; allowed are near or far; nearest are far, near");
  for (const char* text :
       {"far[", "far]", "far[]", "far[a]", "far[a=1,a=2]", "far[a=1]b", "[a=1]", "far[a=1]]"}) {
    EXPECT_EQ(error(text),
              std::string("option inner is \"") + text + "\"; allowed are near or far");
  }
}

TEST(TechniqueSpecs, CommasAndColonsInBracketsBelongToTheOption) {
  const std::vector<TechniqueSpec> specs =
      ParseTechniqueSpecs("outer:bias=true,inner=longformer[window=64,dilation=1/2],dense").value();
  ASSERT_EQ(specs.size(), 2u);
  EXPECT_EQ(specs[0].options.at("inner"), "longformer[window=64,dilation=1/2]");
  EXPECT_EQ(ToString(specs[0]), "outer:bias=true,inner=longformer[window=64,dilation=1/2]");
  EXPECT_EQ(ToString(specs[1]), "dense");
}

TEST(TechniqueSpecs, MalformedTextIsAnErrorThatQuotesIt) {
  const auto error = [](absl::string_view text) {
    return std::string(ParseTechniqueSpecs(text).status().message());
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"dense,,rope", "empty item in \"dense,,rope\""},
      {"", "empty item in \"\""},
      {"window=3", "option \"window=3\" has no technique before it: write technique:window=3"},
      {"longformer:window", "\"window\" in the options of longformer is not option=value"},
      {"longformer:window=", "\"window=\" in the options of longformer is not option=value"},
      {"longformer:=1", "\"=1\" in the options of longformer is not option=value"},
      {"longformer:window=1,=2", "\"=2\" in the options of longformer is not option=value"},
      {"longformer:window=1,window=2", "option \"window\" of longformer is given twice"},
      {"outer:inner=dense[scale=1", "the brackets in \"outer:inner=dense[scale=1\" do not match"},
      {"outer:inner=dense]", "the brackets in \"outer:inner=dense]\" do not match"},
      {"outer]:[inner", "the brackets in \"outer]:[inner\" do not match"},
      {"outer):(inner", "the brackets in \"outer):(inner\" do not match"},
      {"long former", "\"long former\" is not a technique's name"},
      {":window=1", "\"\" is not a technique's name"}};
  for (const auto& [text, message] : cases) EXPECT_EQ(error(text), message) << text;
  EXPECT_EQ(std::string(ParseTechniqueSpec("a,b").status().message()),
            "\"a,b\" names 2 techniques; one is asked for");
}

TEST(TechniqueSpecs, SpacesAroundAnItemDoNotCount) {
  EXPECT_EQ(ToString(ParseTechniqueSpec(" dense:scale=2 ").value()), "dense:scale=2");
  EXPECT_EQ(ToString(ParseTechniqueSpecs("dense, rope").value()[1]), "rope");
}

// The number of characters to insert, delete or replace, by its recursion.
size_t Distance(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return a.size() + b.size();
  const std::string shorter_a = a.substr(1), shorter_b = b.substr(1);
  return std::min({Distance(shorter_a, b) + 1, Distance(a, shorter_b) + 1,
                   Distance(shorter_a, shorter_b) + (a[0] == b[0] ? 0 : 1)});
}

TEST(NearestNames, OfAllShortWordsAreThoseOfTheRecursion) {
  std::vector<std::string> words = {""};
  for (size_t n = 0; n < 31; ++n) {  // up to 5 letters long
    for (const char letter : {'a', 'b'}) words.push_back(words[n] + letter);
  }
  for (const std::string& given : words) {
    std::vector<std::string> expected = words;
    std::sort(expected.begin(), expected.end(), [&](const std::string& a, const std::string& b) {
      return std::make_pair(Distance(given, a), a) < std::make_pair(Distance(given, b), b);
    });
    EXPECT_EQ(NearestNames(given, words, 100), expected) << given;
  }
}

TEST(NearestNames, AreOrderedByEditDistance) {
  EXPECT_THAT(NearestNames("longfomer", {"dense", "longformer", "performer"}, 2),
              ElementsAre("longformer", "performer"));
  EXPECT_THAT(NearestNames("DENSE", {"alibi", "dense", "etc"}, 1), ElementsAre("dense"));
}

}  // namespace
}  // namespace tfb
