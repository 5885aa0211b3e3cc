// Opens pages in a headless Chromium in tests.
//
// The tests fail without Chromium (Debian: chromium, which tools/setup installs).
#ifndef TFB_RESULTS_IN_CHROMIUM_H_
#define TFB_RESULTS_IN_CHROMIUM_H_

#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace tfb {

class InChromium : public ::testing::Test {
 protected:
  void SetUp() override;

  // Returns the document opened at `address`, e.g. "#family=memory", after its script and `probe`,
  // which is markup at the end of the body. The script variable `problems` lists errors, warnings
  // and what the page's policy blocked. Expects that the browser logs nothing.
  std::string Open(std::string page, const std::string& probe, const std::string& address,
                   const std::string& more_flags = "");

  // Returns the JSON that a probe wrote to the element <pre id="probe"> of a document.
  nlohmann::json Probed(const std::string& dom);

  // Returns what the browser last wrote to its log.
  std::string log() const;

 private:
  std::filesystem::path folder_;
};

}  // namespace tfb

#endif  // TFB_RESULTS_IN_CHROMIUM_H_
