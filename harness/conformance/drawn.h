// Draws problems and options for cases.
#ifndef TFB_HARNESS_CONFORMANCE_DRAWN_H_
#define TFB_HARNESS_CONFORMANCE_DRAWN_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"

namespace tfb::conformance {

struct Range {
  double min = 0, max = 0;
};
// Parses the range "0 to 128" as two numbers.
Range RangeOf(const OptionSpec& option);

// The number of layers of the stacks whose lists of techniques are tried.
constexpr int64_t kLayersOfLists = 2;
// Returns the values of an option worth trying with a sequence of `tokens`: its choices, or the
// ends of its range where their magnitude is that of the sequence's length, and numbers around that
// length. With `few` it leaves out the numbers between these. Lists of numbers have none, see
// OptionsAtRandom; lists of techniques are for a stack with layers=kLayersOfLists.
std::vector<std::string> ValuesToTry(const OptionSpec& option, int64_t tokens, bool few);

// Returns the number in an environment variable, or `otherwise` where it is not set.
int64_t FromEnvironment(const char* name, int64_t otherwise);
// Returns the random generator of a technique. TFB_PROPERTY_SEED is added to its seed.
std::mt19937_64 RandomOf(const TechniqueInfo& info);
// Returns a number in [0, bound).
int64_t Below(int64_t bound, std::mt19937_64* random);
// Draws a problem, with sizes around those of tiles and far from them, grouped heads, different
// numbers of queries and keys, and sometimes a 16-bit dtype.
Problem ProblemAtRandom(int64_t most_tokens, std::mt19937_64* random);
// Draws values for two in five options. Every other draw, of ascending numbers, also has one choice, or one
// of true and false, each in its turn, that is no default. Lists of integers have one number, or as many as
// the problem has query heads or key-value heads.
Options OptionsAtRandom(const TechniqueInfo& info, const Problem& problem, int64_t number,
                        std::mt19937_64* random);

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_DRAWN_H_
