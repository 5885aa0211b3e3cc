#include "results/merge.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/message.h"
#include "google/protobuf/unknown_field_set.h"
#include "google/protobuf/util/message_differencer.h"
#include "results/reader.h"

namespace tfb {
namespace {

using google::protobuf::util::MessageDifferencer;

bool SameUnknownFields(const google::protobuf::Message& a, const google::protobuf::Message& b) {
  std::string a_bytes, b_bytes;
  a.GetReflection()->GetUnknownFields(a).SerializeToString(&a_bytes);
  b.GetReflection()->GetUnknownFields(b).SerializeToString(&b_bytes);
  return a_bytes == b_bytes;
}

// Merges files one by one.
class Merger {
 public:
  absl::Status Add(const std::string& path, Damage damage) {
    absl::StatusOr<ResultFile> file = ReadResultFile(path, damage);
    if (!file.ok()) return file.status();
    if (std::string note = WhatWasLeftOut(*file); !note.empty()) {
      merged_.notes.push_back(std::move(note));
    }
    int64_t orphans = 0;
    ++merged_.files;
    std::set<std::string> here;
    for (const Environment& environment : file->results.environments()) {
      const absl::Status added = AddEnvironment(environment, path);
      if (!added.ok()) return added;
      here.insert(environment.id());
    }
    for (Case& result : *file->results.mutable_cases()) {
      if (here.count(result.environment_id()) == 0) {
        if (file->damaged_bytes > 0) {
          ++orphans;
          continue;
        }
        return absl::FailedPreconditionError(absl::StrCat(path, ": a case names environment \"",
                                                          result.environment_id(),
                                                          "\", which is not there"));
      }
      AddCase(std::move(result));
    }
    if (orphans > 0) {
      merged_.notes.push_back(
          absl::StrCat(path, ": left out: ", orphans, " cases whose environment is damaged"));
    }
    const google::protobuf::Reflection& reflection = *ResultSet::GetReflection();
    reflection.MutableUnknownFields(&merged_.results)
        ->MergeFrom(reflection.GetUnknownFields(file->results));
    if (merged_.results.format().empty()) merged_.results.set_format(file->results.format());
    return absl::OkStatus();
  }

  Merged Finish() && {
    for (size_t i = 0; i < cases_.size(); ++i) {
      if (last_[keys_[i]] == i) {
        *merged_.results.add_cases() = std::move(cases_[i]);
      } else {
        ++merged_.replaced_cases;
      }
    }
    return std::move(merged_);
  }

 private:
  absl::Status AddEnvironment(const Environment& environment, const std::string& path) {
    const auto [known, added] = environments_.emplace(environment.id(), path);
    if (added) {
      *merged_.results.add_environments() = environment;
      return absl::OkStatus();
    }
    const Environment& first = *FindEnvironment(merged_.results, environment.id());
    if (!MessageDifferencer::Equals(first, environment) || !SameUnknownFields(first, environment)) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": environment \"", environment.id(), "\" is another one than in ",
                       known->second, "; are these results of one and the same process?"));
    }
    ++merged_.repeated_environments;
    return absl::OkStatus();
  }

  void AddCase(Case result) {
    keys_.push_back(absl::StrCat(CaseKey(result), " in ", result.environment_id()));
    last_[keys_.back()] = cases_.size();
    cases_.push_back(std::move(result));
  }

  Merged merged_;
  std::map<std::string, std::string> environments_;  // by id: the file that has it
  std::vector<Case> cases_;
  std::vector<std::string> keys_;
  std::map<std::string, size_t> last_;
};

}  // namespace

absl::StatusOr<Merged> MergeResultFiles(const std::vector<std::string>& paths, Damage damage) {
  Merger merger;
  for (const std::string& path : paths) {
    const absl::Status added = merger.Add(path, damage);
    if (!added.ok()) return added;
  }
  return std::move(merger).Finish();
}

}  // namespace tfb
