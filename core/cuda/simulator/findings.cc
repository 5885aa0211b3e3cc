#include "core/cuda/simulator/findings.h"

#include <cstdarg>
#include <cstdio>
#include <utility>

#include "core/cuda/simulator/source_line.h"

namespace cuda_simulator {

std::string Format(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

std::string Text(const Index3& index) { return Format("(%u, %u, %u)", index.x, index.y, index.z); }

const char* Name(FindingKind kind) {
  switch (kind) {
    case FindingKind::kOutOfBounds:
      return "out of bounds";
    case FindingKind::kMisaligned:
      return "misaligned";
    case FindingKind::kUnwrittenRead:
      return "unwritten read";
    case FindingKind::kRace:
      return "race";
    case FindingKind::kDivergentBarrier:
      return "divergent barrier";
    case FindingKind::kLaneOutsideMask:
      return "lane outside mask";
    case FindingKind::kBadLaunch:
      return "bad launch";
    case FindingKind::kStackOverflow:
      return "stack overflow";
    case FindingKind::kBadInstruction:
      return "bad instruction";
    case FindingKind::kBadBarrier:
      return "bad barrier";
    case FindingKind::kMissingFence:
      return "missing fence";
    case FindingKind::kUnfinishedWork:
      return "unfinished work";
  }
  return "unknown";
}

void FindingLog::StartLaunch(const char* kernel, int max_findings) {
  kernel_ = kernel;
  max_findings_ = max_findings;
  findings_.clear();
  sites_.clear();
}

bool FindingLog::Wants(FindingKind kind, const void* site) {
  for (size_t f = 0; f < findings_.size(); ++f) {
    if (findings_[f].kind != kind || sites_[f] != site) continue;
    ++findings_[f].times;
    return false;
  }
  return !is_full();
}

void FindingLog::Add(FindingKind kind, const Index3& block, const Index3& thread, const void* site,
                     std::string what) {
  Finding finding;
  finding.kind = kind;
  finding.kernel = kernel_;
  finding.block = block;
  finding.thread = thread;
  finding.message = std::move(what);
  findings_.push_back(std::move(finding));
  sites_.push_back(site);
}

void FindingLog::FinishLaunch() {
  if (findings_.empty()) return;
  const std::vector<std::string> lines = SourceLines(sites_);
  for (size_t f = 0; f < findings_.size(); ++f) {
    Finding& finding = findings_[f];
    finding.source = lines[f];
    std::string where = finding.kernel;
    if (finding.kind != FindingKind::kBadLaunch) {
      where += ", block " + Text(finding.block) + ", thread " + Text(finding.thread);
    }
    if (!finding.source.empty()) where += ", " + finding.source;
    finding.message = where + ": " + finding.message;
  }
}

std::string FindingLog::Summary() const {
  std::string summary = "simulated kernel: " + findings_[0].message;
  if (findings_[0].times > 1) {
    summary += Format("; %lld times", static_cast<long long>(findings_[0].times));
  }
  if (findings_.size() > 1) summary += Format("; and %zu more findings", findings_.size() - 1);
  return summary;
}

}  // namespace cuda_simulator
