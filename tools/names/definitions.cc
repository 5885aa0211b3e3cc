#include "tools/names/definitions.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tfb::names {
namespace {

struct Token {
  std::string text;
  int line;
};

bool IsWordCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Splits a source into words and punctuation, without comments, literals and preprocessor lines.
// "::" is one token; a literal of characters is the token "".
class Lexer {
 public:
  explicit Lexer(absl::string_view source) : source_(source) {}

  std::vector<Token> Tokens() {
    while (at_ < source_.size()) Next();
    return std::move(tokens_);
  }

 private:
  char Peek(size_t ahead = 0) const {
    return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0';
  }
  void Skip(size_t count) {
    for (size_t end = std::min(source_.size(), at_ + count); at_ < end; ++at_) {
      line_ += source_[at_] == '\n';
    }
  }
  // Skips up to and including `end`, or the rest where it does not occur.
  void SkipBeyond(absl::string_view end) {
    const size_t found = source_.find(end, at_);
    Skip(found == absl::string_view::npos ? source_.size() : found + end.size() - at_);
  }

  void Next() {
    const char c = Peek();
    if (c == '\n' || std::isspace(static_cast<unsigned char>(c))) {
      line_is_empty_ = line_is_empty_ || c == '\n';
      return Skip(1);
    }
    if (c == '/' && Peek(1) == '/') return SkipLine();
    if (c == '/' && Peek(1) == '*') return SkipBeyond("*/");
    if (c == '#' && line_is_empty_) return SkipLine();
    line_is_empty_ = false;
    if (c == '"' || c == '\'') return SkipLiteral(c);
    if (IsWordCharacter(c)) return TakeWord();
    const size_t size = c == ':' && Peek(1) == ':' ? 2 : 1;
    tokens_.push_back({std::string(source_.substr(at_, size)), line_});
    Skip(size);
  }

  // A line that ends in a backslash continues on the next one.
  void SkipLine() {
    while (at_ < source_.size() && Peek() != '\n') Skip(Peek() == '\\' ? 2 : 1);
  }

  void SkipLiteral(char quote) {
    tokens_.push_back({"", line_});
    for (Skip(1); at_ < source_.size() && Peek() != quote && Peek() != '\n';) {
      Skip(Peek() == '\\' ? 2 : 1);
    }
    Skip(1);
  }

  void TakeWord() {
    size_t size = 0;
    // 1'000'000 is one number.
    const bool is_number = std::isdigit(static_cast<unsigned char>(Peek()));
    while (IsWordCharacter(Peek(size)) ||
           (is_number && Peek(size) == '\'' && IsWordCharacter(Peek(size + 1)))) {
      ++size;
    }
    const std::string word(source_.substr(at_, size));
    if (Peek(size) == '"' && !word.empty() && word.back() == 'R') {
      Skip(size + 1);
      const size_t open = source_.find('(', at_);
      const std::string delimiter(
          source_.substr(at_, open == absl::string_view::npos ? 0 : open - at_));
      tokens_.push_back({"", line_});
      return SkipBeyond(absl::StrCat(")", delimiter, "\""));
    }
    tokens_.push_back({word, line_});
    Skip(size);
  }

  absl::string_view source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_is_empty_ = true;  // so far
  std::vector<Token> tokens_;
};

// Tells whether the parenthesis after such a word is not that of a function's parameters.
bool HasArguments(const std::string& word) {
  return word == "__attribute__" || word == "__launch_bounds__" || word == "alignas" ||
         word == "decltype";
}

bool IsTypeKeyword(const std::string& word) {
  return word == "class" || word == "struct" || word == "union" || word == "enum";
}

// Joins tokens, with a space between words.
std::string Join(const std::vector<Token>& tokens, size_t begin, size_t end) {
  std::string text;
  for (size_t i = begin; i < end; ++i) {
    const std::string& next = tokens[i].text;
    if (!text.empty() && !next.empty() && IsWordCharacter(text.back()) &&
        IsWordCharacter(next[0])) {
      text += ' ';
    }
    text += next;
  }
  return text;
}

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  std::vector<Definition> Definitions() {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const std::string& text = tokens_[i].text;
      if (text == ";") {
        EndDeclaration(i);
        begin_ = i + 1;
      } else if (text == "{") {
        i = OpenBrace(i);
      } else if (text == "}") {
        if (!namespaces_.empty()) namespaces_.pop_back();
        begin_ = i + 1;
      }
    }
    return std::move(found_);
  }

 private:
  // Returns the place of the bracket that closes the one at `open`.
  size_t Closing(size_t open) const {
    int depth = 0;
    for (size_t i = open; i < tokens_.size(); ++i) {
      const std::string& text = tokens_[i].text;
      depth += text == "{" || text == "(" || text == "[";
      depth -= text == "}" || text == ")" || text == "]";
      if (depth == 0) return i;
    }
    return tokens_.size() - 1;
  }

  // Returns where the declaration that ends before `end` begins, behind `template <...>`.
  size_t BehindTemplate(size_t end) const {
    size_t begin = begin_;
    while (begin < end && tokens_[begin].text == "template") {
      int depth = 0;
      for (++begin; begin < end; ++begin) {
        if (tokens_[begin].text == "(") begin = Closing(begin);
        depth += tokens_[begin].text == "<";
        depth -= tokens_[begin].text == ">";
        if (depth == 0) break;
      }
      ++begin;
    }
    return std::min(begin, end);
  }

  // Returns the first parenthesis that is not of an attribute, or `end`.
  size_t FindParameters(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (tokens_[i].text != "(") continue;
      if (i == begin || !HasArguments(tokens_[i - 1].text)) return i;
      i = Closing(i);
    }
    return end;
  }

  size_t Find(size_t begin, size_t end, absl::string_view text) const {
    size_t i = begin;
    while (i < end && tokens_[i].text != text) ++i;
    return i;
  }

  // Handles the brace of a namespace, or skips what it opens; returns the last place handled.
  size_t OpenBrace(size_t brace) {
    const size_t begin = BehindTemplate(brace);
    const size_t keyword = Find(begin, brace, "namespace");
    if (keyword < brace && keyword - begin <= 1) {  // inline namespace
      namespaces_.push_back(Join(tokens_, keyword + 1, brace));
      begin_ = brace + 1;
      return brace;
    }
    if (begin < brace && tokens_[begin].text == "extern" && brace - begin <= 2) {  // extern "C"
      namespaces_.push_back("extern");
      begin_ = brace + 1;
      return brace;
    }
    const size_t closing = Closing(brace);
    const size_t parameters = FindParameters(begin, brace);
    const bool is_operator = Find(begin, parameters, "operator") < parameters;
    // The semicolon behind a variable ends it, and so for a type.
    if (!is_operator && Find(begin, brace, "=") < parameters) return closing;
    if (parameters == brace) {
      for (size_t i = begin; i < brace && !is_type_; ++i) {
        if (IsTypeKeyword(tokens_[i].text)) AddType(i, brace);
      }
      return closing;
    }
    // The members that a constructor initialises in braces come before its body.
    if (Find(Closing(parameters), brace, ":") < brace && IsWordCharacter(LastOf(brace - 1))) {
      return closing;
    }
    AddFunction(begin, parameters, brace);
    begin_ = closing + 1;
    return closing;
  }

  char LastOf(size_t token) const {
    const std::string& text = tokens_[token].text;
    return text.empty() ? ' ' : text.back();
  }

  void AddType(size_t keyword, size_t brace) {
    is_type_ = true;
    size_t name = keyword + 1;
    if (tokens_[name].text == "class" || tokens_[name].text == "struct") ++name;  // enum class
    while (name + 1 < brace && HasArguments(tokens_[name].text)) name = Closing(name + 1) + 1;
    size_t end = Find(name, brace, ":");
    if (end > name && tokens_[end - 1].text == "final") --end;
    // An unnamed type of a variable or alias defines no name.
    if (end > name) Add(Join(tokens_, name, end), name);
  }

  void AddFunction(size_t begin, size_t parenthesis, size_t brace) {
    if (Find(begin, parenthesis, "static") < parenthesis) return;
    if (parenthesis == begin) return;
    size_t name = parenthesis - 1;
    if (Find(begin, parenthesis, "operator") < parenthesis) {
      name = Find(begin, parenthesis, "operator");
    }
    while (name >= begin + 2 && tokens_[name - 1].text == "::") name -= 2;  // of a member
    size_t end = Closing(parenthesis) + 1;
    if (end < brace && tokens_[end].text == "const") ++end;
    Add(Join(tokens_, name, std::min(end, brace)), name);
  }

  // Handles aliases and constants, which end with a semicolon. Declarations define nothing.
  void EndDeclaration(size_t end) {
    if (is_type_) {
      is_type_ = false;
      return;
    }
    const size_t begin = BehindTemplate(end);
    const size_t equals = Find(begin, end, "=");
    if (begin == end || equals == end || equals == begin) return;
    if (Find(begin, equals, "(") < equals || Find(begin, equals, "static") < equals) return;
    if (Find(begin, equals, "operator") < equals) return;
    size_t name = equals - 1;
    while (name > begin && tokens_[name].text == "]") {  // of an array
      while (name > begin && tokens_[name].text != "[") --name;
      --name;
    }
    if (tokens_[name].text != ">") Add(tokens_[name].text, name);  // not of a specialisation
  }

  void Add(const std::string& name, size_t at) {
    std::string qualified;
    for (const std::string& scope : namespaces_) {
      if (scope.empty()) return;
      if (scope != "extern") absl::StrAppend(&qualified, scope, "::");
    }
    if (qualified.empty() && tokens_[at].text == "main") return;
    found_.push_back({absl::StrCat(qualified, name), tokens_[at].line});
  }

  const std::vector<Token> tokens_;
  std::vector<std::string> namespaces_;  // that are open; "" for unnamed ones
  size_t begin_ = 0;                     // of the declaration at hand
  bool is_type_ = false;                 // the declaration at hand defines a type
  std::vector<Definition> found_;
};

}  // namespace

std::vector<Definition> DefinitionsIn(absl::string_view source) {
  return Parser(Lexer(source).Tokens()).Definitions();
}

std::vector<Clash> FindClashes(const std::vector<std::pair<std::string, std::string>>& files) {
  struct Places {
    std::set<std::string> files;
    std::vector<std::string> lines;
  };
  std::map<std::string, Places> by_name;
  for (const auto& [path, text] : files) {
    for (const Definition& definition : DefinitionsIn(text)) {
      Places& places = by_name[definition.name];
      // One file may define a name in both branches of an #if.
      if (places.files.insert(path).second) {
        places.lines.push_back(absl::StrCat(path, ":", definition.line));
      }
    }
  }
  std::vector<Clash> clashes;
  for (const auto& [name, places] : by_name) {
    if (places.files.size() > 1) clashes.push_back({name, places.lines});
  }
  return clashes;
}

}  // namespace tfb::names
