// Finds the definitions of C++ sources in namespaces, so that a test can find violations of the one
// definition rule. The linker does not: of two inline functions or templates of one name it keeps
// one, and two types of one name make it merge the templates that take them as arguments.
#ifndef TFB_TOOLS_NAMES_DEFINITIONS_H_
#define TFB_TOOLS_NAMES_DEFINITIONS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace tfb::names {

struct Definition {
  // Qualified, and with the parameters where it is a function: "tfb::lsh::LshSizes",
  // "tfb::Dot(const double*a,const double*b,int64_t n)const".
  std::string name;
  int line = 0;
};

// Returns the types, functions, aliases and constants that the source defines, in
// the order of their lines. Those of unnamed namespaces, `static` ones, members of classes and
// main, of which each program has its own, are not among them. `source` is text before
// preprocessing: all branches of an #if count.
std::vector<Definition> DefinitionsIn(absl::string_view source);

// A name that several files define, each as "file:line".
struct Clash {
  std::string name;
  std::vector<std::string> places;
};

// Returns the clashes among files, given as pairs of path and text, by name.
std::vector<Clash> FindClashes(const std::vector<std::pair<std::string, std::string>>& files);

}  // namespace tfb::names

#endif  // TFB_TOOLS_NAMES_DEFINITIONS_H_
