#include "core/header_text.h"

#include <map>
#include <string>

namespace tfb {
namespace {

std::map<std::string, HeaderText>& Texts() {
  static auto& texts = *new std::map<std::string, HeaderText>;  // never destroyed
  return texts;
}

}  // namespace

bool RegisterHeaderText(const char* technique, const HeaderText& text) {
  Texts()[technique] = text;
  return true;
}

HeaderText FindHeaderText(const char* technique) {
  const auto found = Texts().find(technique);
  return found == Texts().end() ? HeaderText() : found->second;
}

}  // namespace tfb
