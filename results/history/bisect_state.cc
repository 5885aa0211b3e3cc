#include "results/history/bisect_state.h"

#include <errno.h>

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "core/output_file.h"
#include "core/status.h"
#include "nlohmann/json.hpp"

namespace tfb {
namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "tfb.Bisect/1";

Json ToJson(const BuildRecord& build) {
  return {{"program", build.program},
          {"failure", build.failure},
          {"log", build.log},
          {"seconds", build.seconds}};
}

// Take a JSON value of the form that ToJson gives it, and throw where it has another one.
BuildRecord BuildFrom(const Json& json) {
  return {json.at("program").get<std::string>(), json.at("failure").get<std::string>(),
          json.at("log").get<std::string>(), json.at("seconds").get<double>()};
}

MeasurementRecord MeasurementFrom(const Json& json) {
  return {json.at("base_file").get<std::string>(), json.at("new_file").get<std::string>(),
          json.at("failure").get<std::string>(), json.at("log").get<std::string>(),
          json.at("seconds").get<double>()};
}

BisectState StateFrom(const Json& json) {
  BisectState state;
  for (const auto& [name, value] : json.at("question").items()) {
    state.question[name] = value.get<std::string>();
  }
  for (const auto& [commit, build] : json.at("builds").items()) {
    state.builds[commit] = BuildFrom(build);
  }
  for (const Json& one : json.at("measurements")) {
    state.measurements[{one.at("base").get<std::string>(), one.at("new").get<std::string>(),
                        one.at("look").get<int>()}] = MeasurementFrom(one);
  }
  return state;
}

}  // namespace

absl::StatusOr<BisectState> ReadBisectState(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open() && errno == ENOENT) return BisectState();
  std::stringstream text;
  text << file.rdbuf();
  try {
    const Json json = Json::parse(text.str());
    if (json.at("format") == kFormat) return StateFrom(json);
  } catch (const Json::exception&) {
    // It is none of this format, either.
  }
  return absl::DataLossError(
      absl::StrCat(path, ": is not the state of a bisection; --restart begins anew"));
}

absl::Status WriteBisectState(const std::string& path, const BisectState& state) {
  Json builds = Json::object(), measurements = Json::array();
  for (const auto& [commit, build] : state.builds) builds[commit] = ToJson(build);
  for (const auto& [key, one] : state.measurements) {
    const auto& [base, commit, look] = key;
    measurements.push_back({{"base", base},
                            {"new", commit},
                            {"look", look},
                            {"base_file", one.base_file},
                            {"new_file", one.new_file},
                            {"failure", one.failure},
                            {"log", one.log},
                            {"seconds", one.seconds}});
  }
  const Json json = {{"format", kFormat},
                     {"question", state.question},
                     {"builds", builds},
                     {"measurements", measurements}};
  // Names of branches and messages of programs may be no UTF-8.
  return WriteFile(path, json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace tfb
