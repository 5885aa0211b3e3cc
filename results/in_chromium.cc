#include "results/in_chromium.h"

#include <stdlib.h>
#include <sys/wait.h>

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

// Runs before the page's own script.
constexpr char kWatch[] = R"(<script>
window.problems = [];
window.addEventListener('error', (event) => problems.push(event.message));
document.addEventListener('securitypolicyviolation', (event) => problems.push(event.blockedURI));
['error', 'warn'].forEach((name) => { console[name] = (...words) => problems.push(words.join(' ')); });
</script>)";

std::string Contents(const fs::path& path) {
  std::stringstream contents;
  contents << std::ifstream(path, std::ios::binary).rdbuf();
  return contents.str();
}

}  // namespace

void InChromium::SetUp() {
  folder_ = fs::path(::testing::TempDir()) /
            ::testing::UnitTest::GetInstance()->current_test_info()->name();
  fs::remove_all(folder_);
  fs::create_directories(folder_);
  setenv("HOME", folder_.c_str(), 1);  // where a browser without a home would fail
}

std::string InChromium::Open(std::string page, const std::string& probe, const std::string& address,
                             const std::string& more_flags) {
  page = absl::StrReplaceAll(page, {{"<style>", absl::StrCat(kWatch, "<style>")},
                                    {"</body>", absl::StrCat(probe, "</body>")}});
  std::ofstream(folder_ / "page.html") << page;
  const std::string command = absl::StrCat(
      "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage "
      "--disable-background-networking --disable-component-update --no-first-run "
      "--enable-logging=stderr --virtual-time-budget=3000 --window-size=1240,1000 ",
      more_flags, " --user-data-dir=", (folder_ / "profile").string(), " --dump-dom 'file://",
      (folder_ / "page.html").string(), address, "' >", (folder_ / "dom").string(), " 2>",
      (folder_ / "log").string());
  const int status = system(command.c_str());
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << "chromium is wanted (Debian: chromium); it said: " << log();
  EXPECT_FALSE(absl::StrContains(log(), "CONSOLE")) << log();
  return Contents(folder_ / "dom");
}

nlohmann::json InChromium::Probed(const std::string& dom) {
  const std::string begin = "<pre id=\"probe\">";
  const size_t at = dom.find(begin);
  if (at == std::string::npos) return nlohmann::json();
  const size_t from = at + begin.size();
  const std::string text = absl::StrReplaceAll(dom.substr(from, dom.find("</pre>", from) - from),
                                               {{"&lt;", "<"}, {"&gt;", ">"}, {"&amp;", "&"}});
  return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string InChromium::log() const { return Contents(folder_ / "log"); }

}  // namespace tfb
