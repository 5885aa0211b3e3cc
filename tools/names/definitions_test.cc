#include "tools/names/definitions.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::names {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> NamesIn(absl::string_view source) {
  std::vector<std::string> names;
  for (const Definition& definition : DefinitionsIn(source)) names.push_back(definition.name);
  return names;
}

TEST(Definitions, TypesAreQualified) {
  EXPECT_THAT(NamesIn(R"cc(
                namespace a::b {
                struct Declared;
                struct Defined {
                  int x = 0;
                  void F() {}
                  struct Inner {};
                };
                class Derived final : public Defined {};
                struct alignas(16) Aligned {};
                enum class Kind : int { kOne, kTwo };
                template <class T, class = std::enable_if_t<(sizeof(T) > 2)>>
                struct Of {
                  T t;
                };
                template <>
                struct Of<float> {
                  float f;
                };
                }  // namespace a::b
                struct Outside {
                } outside;
              )cc"),
              ElementsAre("a::b::Defined", "a::b::Derived", "a::b::Aligned", "a::b::Kind",
                          "a::b::Of", "a::b::Of<float>", "Outside"));
}

TEST(Definitions, FunctionsHaveTheirParameters) {
  EXPECT_THAT(NamesIn(R"cc(
                namespace a {
                int Declared(int x);
                inline int Twice(int x) { return 2 * x; }
                template <class T>
                T Twice(const T& x) {
                  if (x) {
                    return x;
                  }
                  return x + x;
                }
                int Of::Member(int x) const { return x; }
                Of::Of() : x_{1}, y_(2) {}
                bool operator==(Of a, Of b) { return a.x == b.x; }
                static int Internal() { return 1; }
                struct Of* Make() {
                  return nullptr;
                }
                Of& Of::operator=(const Of& other) { return *this; }
                __global__ void __launch_bounds__(128) Kernel(int x) {}
                extern "C" {
                void C(int) {}
                }
                }  // namespace a
              )cc"),
              ElementsAre("a::Twice(int x)", "a::Twice(const T&x)", "a::Of::Member(int x)const",
                          "a::Of::Of()", "a::operator==(Of a,Of b)", "a::Make()",
                          "a::Of::operator=(const Of&other)", "a::Kernel(int x)", "a::C(int)"));
}

TEST(Definitions, ConstantsAndAliasesCount) {
  EXPECT_THAT(NamesIn(R"cc(
                namespace a {
                constexpr int kOne = 1;
                constexpr double kMany[2] = {1, 2};
                const auto f = [](int x) { return x; };
                using Alias = std::vector<int>;
                using std::string;
                extern const char kText[];
                static int internal = 3;
                }  // namespace a
              )cc"),
              ElementsAre("a::kOne", "a::kMany", "a::f", "a::Alias"));
}

TEST(Definitions, WhatOneFileKeepsToItselfDoesNotCount) {
  EXPECT_THAT(NamesIn(R"cc(
                namespace a {
                namespace {
                struct Mine {};
                int F() { return 1; }
                }  // namespace
                }  // namespace a
                int main() { return 0; }
              )cc"),
              IsEmpty());
}

TEST(Definitions, CommentsLiteralsAndMacrosAreNoCode) {
  EXPECT_THAT(NamesIn("// struct A {};\n/* struct B {}; */\n#define C struct D { \\\n int x; };\n"
                      "const char kText[] = \"struct E {};\"; const char kQuote = '\"';\n"
                      "const char kRaw[] = R\"x(struct F {}; \")x\"; const int kBig = 1'000'000;\n"
                      "struct G {};\n"),
              ElementsAre("kText", "kQuote", "kRaw", "kBig", "G"));
}

TEST(Definitions, LinesAreThoseOfTheName) {
  const std::vector<Definition> found = DefinitionsIn("\n/*\n*/struct A {\n};\n\nint\nF() {}\n");
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].line, 3);
  EXPECT_EQ(found[1].line, 7);
}

TEST(Clashes, AreNamesThatTwoFilesDefine) {
  const std::string sort = "namespace tfb { struct Arguments { int rows; }; }";
  const std::vector<Clash> clashes = FindClashes(
      {{"a/sort.h", sort},
       {"b/sort.h", "namespace tfb {\nstruct Arguments { long rows; };\n}"},
       {"c/sort.h", "namespace tfb::c { struct Arguments {}; }"},
       {"d/sort.h", "#if X\nnamespace d { struct A {}; }\n#else\nnamespace d { struct A {}; }\n"}});
  ASSERT_EQ(clashes.size(), 1u);
  EXPECT_EQ(clashes[0].name, "tfb::Arguments");
  EXPECT_THAT(clashes[0].places, ElementsAre("a/sort.h:1", "b/sort.h:2"));
}

TEST(Clashes, ABrokenSourceEnds) {
  EXPECT_THAT(NamesIn("namespace a { struct B {"), ElementsAre("a::B"));
  EXPECT_THAT(NamesIn("} } int x = \"abc;\nint y = 1;"), ElementsAre("x"));
  EXPECT_THAT(NamesIn("template <"), IsEmpty());
  EXPECT_THAT(NamesIn("R\"(never closed"), IsEmpty());
}

}  // namespace
}  // namespace tfb::names
