#include "harness/measure/visits.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "harness/measure/machine_load.h"
#include "results/statistics.h"

namespace tfb {
namespace {

// Returns the time that samples took. Those of runs are of several calls each.
double SecondsOfSamples(const Timing& timing) {
  const auto sum = [](const auto& samples) {
    return std::accumulate(samples.begin(), samples.end(), 0.0);
  };
  const double calls = static_cast<double>(std::max<int64_t>(timing.calls_per_sample(), 1));
  double nanoseconds = calls * (sum(timing.run_ns()) + sum(timing.graph_run_ns())) +
                       sum(timing.setup_ns()) + sum(timing.cold_run_ns()) +
                       sum(timing.end_to_end_ns());
  for (const SegmentTiming& segment : timing.segments()) nanoseconds += sum(segment.append_ns());
  return nanoseconds / 1e9;
}

}  // namespace

void NoteVisit(int64_t start_unix_ns, Case* record) {
  const int samples = record->outcome().timing().run_ns_size();
  if (samples == 0) return;
  Timing* timing = record->mutable_outcome()->mutable_timing();
  timing->clear_visits();
  Timing::Visit* visit = timing->add_visits();
  visit->set_start_unix_ns(start_unix_ns);
  visit->set_run_samples(samples);
}

void AddVisit(const Case& visit, Case* all) {
  const Timing& more = visit.outcome().timing();
  Outcome* outcome = all->mutable_outcome();
  Timing* timing = outcome->mutable_timing();
  if (timing->clock() == Timing::CLOCK_UNSPECIFIED) timing->set_clock(more.clock());
  if (more.calls_per_sample() > 0) timing->set_calls_per_sample(more.calls_per_sample());
  timing->mutable_setup_ns()->MergeFrom(more.setup_ns());
  timing->mutable_cold_run_ns()->MergeFrom(more.cold_run_ns());
  timing->mutable_run_ns()->MergeFrom(more.run_ns());
  timing->mutable_visits()->MergeFrom(more.visits());
  timing->mutable_graph_run_ns()->MergeFrom(more.graph_run_ns());
  if (timing->no_graph_reason().empty()) timing->set_no_graph_reason(more.no_graph_reason());
  timing->mutable_end_to_end_ns()->MergeFrom(more.end_to_end_ns());
  timing->mutable_probe_ns()->MergeFrom(more.probe_ns());
  timing->mutable_run_instructions()->MergeFrom(more.run_instructions());
  if (timing->segments_size() == 0) {
    *timing->mutable_segments() = more.segments();
  } else {
    const int segments = std::min(timing->segments_size(), more.segments_size());
    for (int i = 0; i < segments; ++i) {
      timing->mutable_segments(i)->mutable_append_ns()->MergeFrom(more.segments(i).append_ns());
    }
  }
  timing->set_discarded_samples(timing->discarded_samples() + more.discarded_samples());
  timing->set_throttled_samples(timing->throttled_samples() + more.throttled_samples());
  if (timing->discarded_reason().empty()) timing->set_discarded_reason(more.discarded_reason());
  outcome->set_elapsed_seconds(outcome->elapsed_seconds() + visit.outcome().elapsed_seconds());
  outcome->set_process_peak_bytes(
      std::max(outcome->process_peak_bytes(), visit.outcome().process_peak_bytes()));
  if (visit.outcome().has_machine_load()) {
    AddLoad(visit.outcome().machine_load(), outcome->mutable_machine_load());
  }
  if (!outcome->has_device_state_before() && visit.outcome().has_device_state_before()) {
    *outcome->mutable_device_state_before() = visit.outcome().device_state_before();
  }
  if (visit.outcome().has_device_state_after()) {
    *outcome->mutable_device_state_after() = visit.outcome().device_state_after();
  }
  if (outcome->status() == Outcome::STATUS_OK && visit.outcome().status() != Outcome::STATUS_OK) {
    outcome->set_status(visit.outcome().status());
    outcome->set_reason(visit.outcome().reason());
  }
}

Visited VisitedBy(const CaseReport& visit, const Case& all) {
  Visited visited;
  visited.preparation_seconds = visit.preparation_seconds();
  visited.check_seconds = visit.check_seconds();
  visited.input_seconds = visit.input_seconds();
  const Timing& timing = all.outcome().timing();
  visited.samples = timing.run_ns_size();
  if (const auto setup = Median(timing.setup_ns()); setup.has_value()) {
    visited.setup_seconds = setup->median / 1e9;
  }
  if (const auto time = RunTime(all); time.has_value()) {
    visited.call_seconds = time->median / 1e9;
    visited.half_width = time->relative_half_width();
  }
  return visited;
}

Visited VisitedEarlier(const Case& record) {
  const Outcome& outcome = record.outcome();
  CaseReport report;
  report.set_preparation_seconds(
      std::max(outcome.elapsed_seconds() - SecondsOfSamples(outcome.timing()), 0.0));
  return VisitedBy(report, record);
}

}  // namespace tfb
