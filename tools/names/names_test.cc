// Passes where no two sources of a program of all techniques define the same name. The arguments
// are the sources.
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tools/names/definitions.h"

int main(int argc, char** argv) {
  std::vector<std::pair<std::string, std::string>> files;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i]);
    std::stringstream text;
    if (!(text << file.rdbuf())) {
      std::cerr << argv[i] << ": cannot be read\n";
      return 1;
    }
    files.emplace_back(argv[i], text.str());
  }
  const std::vector<tfb::names::Clash> clashes = tfb::names::FindClashes(files);
  size_t definitions = 0;
  for (const auto& file : files) definitions += tfb::names::DefinitionsIn(file.second).size();
  for (const tfb::names::Clash& clash : clashes) {
    std::cerr << clash.name << " is defined more than once:\n";
    for (const std::string& place : clash.places) std::cerr << "  " << place << "\n";
  }
  std::cout << files.size() << " files, " << definitions << " definitions, " << clashes.size()
            << " clashes\n";
  // With fewer the list of sources is wrong.
  return clashes.empty() && definitions > 1000 ? 0 : 1;
}
