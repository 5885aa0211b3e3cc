// `history bisect` as a program of its own.

#include "core/command_line.h"
#include "tools/history_bisect.h"

int main(int argc, char** argv) {
  return tfb::RunMain("bisect", tfb::kBisectUsage, {argv, argv + argc}, tfb::RunBisect);
}
