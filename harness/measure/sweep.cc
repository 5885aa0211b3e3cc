#include "harness/measure/sweep.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/command_line.h"
#include "core/status.h"
#include "harness/measure/machine.h"
#include "harness/measure/progress.h"
#include "harness/measure/sweep_worker.h"
#include "harness/measure/turns.h"
#include "harness/measure/visits.h"
#include "harness/measure/worker.h"
#include "harness/measure/worker_messages.pb.h"
#include "harness/plan/quantities.h"
#include "harness/plan/sweep_plan.h"
#include "results/analysis.h"
#include "results/appender.h"
#include "results/comparison.h"
#include "results/comparison_report.h"
#include "results/files.h"
#include "results/reader.h"
#include "results/report_text.h"
#include "results/statistics.h"

namespace tfb {
namespace {

// --- Signals

volatile std::sig_atomic_t signals_seen = 0;
volatile std::sig_atomic_t last_signal = 0;

extern "C" void NoteSignal(int number) {
  signals_seen = signals_seen + 1;
  last_signal = number;
}

// Counts SIGINT and SIGTERM while it exists, instead of ending the process.
class SignalGuard {
 public:
  SignalGuard() {
    signals_seen = 0;
    struct sigaction action = {};
    action.sa_handler = NoteSignal;  // without SA_RESTART: waiting ends
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  ~SignalGuard() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }

 private:
  struct sigaction interrupt_, terminate_;
};

constexpr double kRedrawSeconds = 0.2;
constexpr int kMostEndsBetweenCases = 3;
constexpr double kLockSeconds = 2;
// The end of an unfinished record's reason that says why there are no times.
constexpr absl::string_view kNotTimed = "times were not measured: ";

bool TakesTurns(const SweepOptions& options) {
  return !options.turns.empty() || !options.other.program.empty();
}

std::string WithoutNotTimed(absl::string_view reason) {
  return std::string(absl::StripSuffix(reason.substr(0, reason.find(kNotTimed)), "; "));
}

class Sweep {
 public:
  Sweep(const SweepOptions& options, const std::vector<Job>& cases)
      : options_(options),
        cases_(cases),
        clock_(*options.measure.clock),
        begin_(clock_.Seconds()),
        names_(NamesOf(cases)),
        visits_(cases.size()) {
    options_.rounds = std::max(options_.rounds, 1);
    // The core time of this process is also the sweep's own.
    options_.measure.load.own_stats.push_back(absl::StrCat("/proc/", getpid(), "/stat"));
  }

  int Run() {
    if (const absl::Status status = Open(); !status.ok()) return Fail(status);
    SignalGuard guard;
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> nowhere(
        is_quiet() ? std::fopen("/dev/null", "w") : nullptr, &CloseFile);
    progress_ =
        std::make_unique<Progress>(nowhere != nullptr ? nowhere.get() : stderr, CountLeft());
    absl::Status status = MeasureAll();
    progress_->Clear();
    if (!status.ok()) return FailWhileMeasuring(status);
    appender_.reset();  // closes the file
    if (!is_quiet()) {
      if (const absl::Status shown = Show(); !shown.ok()) return Fail(shown);
    }
    if (signals_seen > 0) return Interrupted();
    if (!any_ran_ && !follows() && !cases_.empty()) {
      return Fail(absl::UnavailableError(absl::StrCat("no case could run: ", reason_of_skip_)));
    }
    return AnyFailed() ? kExitCheckFailed : kExitDone;
  }

 private:
  int Fail(const absl::Status& status) {
    PrintError(options_.program, status.message());
    return kExitBadUsage;
  }

  // Keeps the cases that were measured. A file without any case is removed, since it would only
  // prevent the next sweep from using its name.
  int FailWhileMeasuring(const absl::Status& status) {
    const absl::StatusOr<ResultFile> file = ReadResultFile(options_.output);
    // The file is removed while it is locked, since another sweep may use it afterwards.
    if (file.ok() && file->results.cases_size() == 0 && is_new_) unlink(options_.output.c_str());
    appender_.reset();
    if (!measures_ || !file.ok() || file->results.cases_size() == 0) return Fail(status);
    if (!is_quiet()) Show().IgnoreError();  // the error that matters is printed below
    return Fail(absl::Status(
        status.code(),
        absl::StrCat(status.message(), "; ", CasesByKey(file->results).size(), " cases are in ",
                     ShortPath(options_.output), ", --resume goes on")));
  }

  bool follows() const { return !options_.turns.empty(); }
  bool is_quiet() const { return options_.quiet || follows(); }
  bool takes_turns() const { return TakesTurns(options_); }
  static int CloseFile(std::FILE* file) { return file == nullptr ? 0 : std::fclose(file); }

  // --- The file, and what it has already

  absl::Status Open() {
    AppenderOptions how;
    is_new_ = access(options_.output.c_str(), F_OK) != 0;
    how.existing =
        options_.resume ? AppenderOptions::Existing::kResume : AppenderOptions::Existing::kRefuse;
    absl::StatusOr<std::unique_ptr<ResultAppender>> opened =
        ResultAppender::Open(options_.output, how);
    // The worker of a sweep that was just killed may not have ended yet, and have the file's lock.
    while (absl::IsUnavailable(opened.status()) && Elapsed() < kLockSeconds) {
      clock_.Wait(0.05);
      opened = ResultAppender::Open(options_.output, how);
    }
    if (absl::IsAlreadyExists(opened.status())) {
      return absl::AlreadyExistsError(absl::StrCat("--output: ", options_.output,
                                                   " is there already; --resume goes on with it"));
    }
    if (!opened.ok()) {
      return absl::Status(opened.status().code(),
                          absl::StrCat("--output: ", opened.status().message()));
    }
    appender_ = *std::move(opened);
    if (appender_->cut_bytes() > 0) {
      PrintError(options_.program, absl::StrCat(options_.output, ": cut off a torn record of ",
                                                appender_->cut_bytes(), " bytes"));
    }
    FindLeft();
    return absl::OkStatus();
  }

  // Finds the cases that the file lacks. A case whose record says "skipped" is tried again: what
  // kept it may be gone.
  void FindLeft() {
    const std::map<std::string, const Case*> recorded = CasesByKey(appender_->existing());
    std::vector<std::string> keys;
    for (const Job& job : cases_) keys.push_back(CaseKey(MakeRecord(job)));
    left_.assign(cases_.size(), true);
    for (size_t i = 0; i < cases_.size(); ++i) {
      const auto found = recorded.find(keys[i]);
      if (found == recorded.end()) continue;
      const Outcome& outcome = found->second->outcome();
      if (outcome.status() == Outcome::STATUS_SKIPPED) {
        skipped_before_[i] = outcome.reason();
      } else if (!options_.retry || outcome.status() == Outcome::STATUS_OK) {
        recorded_before_[i] = found->second;
        tried_in_vain_ += outcome.status() != Outcome::STATUS_OK ? 1 : 0;
        left_[i] = outcome.unfinished();
        origins_.insert(found->second->environment_id());
      }
      if (outcome.status() == Outcome::STATUS_FAILED) failed_.insert(i);
      NoteOutcome(outcome);
    }
    std::map<std::string, std::vector<size_t>> groups;
    for (size_t i = 0; i < cases_.size(); ++i) groups[GroupKey(cases_[i])].push_back(i);
    for (const auto& [key, group] : groups) AddCounterparts(group);
  }

  // Adds the dense counterparts of the remaining cases, which are measured again: a ratio is of two
  // times from one run.
  void AddCounterparts(const std::vector<size_t>& group) {
    std::set<std::string> counterparts;
    for (const size_t i : group) {
      if (!left_[i]) continue;
      const auto spec = cases_[i].technique->Counterpart(cases_[i].problem, cases_[i].options);
      if (spec.ok()) counterparts.insert(spec->technique);
    }
    for (const size_t i : group) {
      if (counterparts.count(cases_[i].technique->info().name) > 0) left_[i] = true;
    }
  }

  size_t CountLeft() const {
    return static_cast<size_t>(std::count(left_.begin(), left_.end(), true));
  }

  // Writes the record to the file, unless the file has one that says skipped for the same reason.
  absl::Status Write(size_t index, const Case& record) {
    left_[index] = false;
    const Outcome& outcome = record.outcome();
    NoteOutcome(outcome);
    const auto before = skipped_before_.find(index);
    const bool known = before != skipped_before_.end() && before->second == outcome.reason() &&
                       outcome.status() == Outcome::STATUS_SKIPPED;
    return known ? absl::OkStatus() : AppendRecord(record);
  }

  // Appends the record. The environment is written before the first one, not when the sweep begins.
  absl::Status AppendRecord(const Case& record) {
    if (!environment_appended_) TFB_RETURN_IF_ERROR(appender_->Append(environment_));
    environment_appended_ = true;
    return appender_->Append(record);
  }

  // Writes the record of an unfinished case, for a sweep that resumes this one. Does nothing where
  // the file already has a complete record.
  absl::Status AppendUnfinished(size_t index, Case record) {
    const auto before = recorded_before_.find(index);
    if (before != recorded_before_.end() && !before->second->outcome().unfinished()) {
      return absl::OkStatus();
    }
    record.mutable_outcome()->set_unfinished(true);
    return AppendRecord(record);
  }

  // Notes whether any case ran, in this sweep or in the one that it resumes.
  void NoteOutcome(const Outcome& outcome) {
    if (outcome.status() == Outcome::STATUS_OK || outcome.status() == Outcome::STATUS_FAILED) {
      any_ran_ = true;
    } else {
      reason_of_skip_ = outcome.reason();
    }
  }

  absl::Status Append(size_t index, const Case& record) {
    const Outcome& outcome = record.outcome();
    if (outcome.status() == Outcome::STATUS_FAILED) {
      failed_.insert(index);
    } else {
      failed_.erase(index);
    }
    open_.erase(index);
    progress_->Finished(absl::StrCat(names_[index], ": ", Summary(record)),
                        outcome.status() == Outcome::STATUS_FAILED ||
                            outcome.status() == Outcome::STATUS_TIMEOUT ||
                            outcome.status() == Outcome::STATUS_OUT_OF_MEMORY);
    return Write(index, record);
  }

  absl::Status AppendUnmeasured(size_t index, Outcome::Status status, absl::string_view reason) {
    KeepInterim();
    const auto held = records_.find(index);
    Case record = held != records_.end() ? held->second : MakeRecord(cases_[index]);
    record.mutable_outcome()->set_status(status);
    record.mutable_outcome()->set_reason(std::string(reason));
    plan_->Finish(index);
    improved_.erase(index);
    return Append(index, record);
  }

  static std::string Summary(const Case& record) {
    const Outcome& outcome = record.outcome();
    std::string text;
    if (const auto time = RunTime(record); time.has_value()) {
      text = absl::StrCat(FormatMilliseconds(time->median), " ms");
    }
    if (outcome.status() == Outcome::STATUS_OK) return text.empty() ? "ok" : text;
    absl::StrAppend(&text, text.empty() ? "" : ", ", Name(outcome.status()), ": ",
                    Printable(outcome.reason()));
    return text;
  }

  // --- Measuring

  absl::Status MeasureAll() {
    const bool is_done = CountLeft() == 0 && !takes_turns();
    if (is_done && origins_.empty()) return absl::OkStatus();
    TFB_RETURN_IF_ERROR(StartWorker());
    TFB_RETURN_IF_ERROR(DescribeHere());
    TFB_RETURN_IF_ERROR(CheckOrigins());
    measures_ = true;
    if (is_done) return absl::OkStatus();
    TFB_RETURN_IF_ERROR(MeasurePeaksHere());
    TFB_RETURN_IF_ERROR(AppendObstacles());
    plan_ = std::make_unique<SweepPlan>(cases_, left_, PlanOptionsOf(options_));
    TFB_RETURN_IF_ERROR(TakeEarlier());
    TFB_RETURN_IF_ERROR(follows() ? Follow() : Lead());
    worker_.reset();
    return absl::OkStatus();
  }

  // Takes over what an earlier sweep on this machine has found: the times of complete cases, and those
  // that it has checked, or timed in part.
  absl::Status TakeEarlier() {
    for (const auto& [index, record] : recorded_before_) {
      const Environment* origin = FindEnvironment(appender_->existing(), record->environment_id());
      const bool is_here = origin != nullptr && MachineDifferences(*origin, environment_).empty();
      if (!is_here) continue;
      if (!record->outcome().unfinished()) {
        if (HasTimes(*record)) plan_->Learn(index, VisitedEarlier(*record));
        continue;
      }
      if (!left_[index]) continue;
      Case all = *record;
      all.clear_environment_id();
      Outcome* outcome = all.mutable_outcome();
      outcome->set_unfinished(false);
      outcome->set_reason(WithoutNotTimed(outcome->reason()));
      visits_[index] = plan_->Resume(index, VisitedEarlier(all));
      records_[index] = all;
      if (visits_[index] >= options_.rounds) TFB_RETURN_IF_ERROR(Append(index, all));
    }
    return absl::OkStatus();
  }
  static bool HasTimes(const Case& record) {
    return record.outcome().status() == Outcome::STATUS_OK &&
           record.outcome().timing().run_ns_size() > 0;
  }

  static bool Stopped() { return signals_seen > 0; }

  absl::Status Lead() {
    std::unique_ptr<OtherSweep> other;
    if (!options_.other.program.empty()) {
      progress_->Show(absl::StrCat("starting ", options_.other.program), Elapsed(), ExpectedLeft());
      TFB_ASSIGN_OR_RETURN(
          other, OtherSweep::Start(options_.other.program, options_.other.arguments, &Stopped));
    }
    for (int turn = 0; !Stopped(); ++turn) {
      const std::optional<Visit> visit = plan_->Next(Elapsed());
      TFB_RETURN_IF_ERROR(AppendLeftOut());
      if (!visit.has_value()) break;
      TFB_RETURN_IF_ERROR(TakeTurns(*visit, turn, other.get()));
    }
    TFB_RETURN_IF_ERROR(AppendImproved());
    if (other == nullptr || Stopped()) return absl::OkStatus();
    TFB_ASSIGN_OR_RETURN(const int exit_status, other->Finish());
    if (exit_status == kExitDone || exit_status == kExitCheckFailed) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat(options_.other.program, " ended with exit status ", exit_status));
  }

  // Lets both sweeps measure the visit; they alternate in going first.
  absl::Status TakeTurns(const Visit& visit, int turn, OtherSweep* other) {
    const auto measure_other = [&]() -> absl::Status {
      if (other == nullptr || Stopped()) return absl::OkStatus();
      progress_->Show(absl::StrCat("the same of ", options_.other.program), Elapsed(),
                      ExpectedLeft());
      const absl::Status status = other->Measure(GroupKey(cases_[visit.items(0).index()]));
      return absl::IsCancelled(status) ? absl::OkStatus() : status;
    };
    if (turn % 2 == 1) TFB_RETURN_IF_ERROR(measure_other());
    TFB_RETURN_IF_ERROR(MeasureVisit(visit));
    return turn % 2 == 0 ? measure_other() : absl::OkStatus();
  }

  absl::Status Follow() {
    TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Turns> turns,
                         Turns::FromFlag(options_.turns, &Stopped));
    while (const std::optional<Turns::Turn> turn = turns->Next()) {
      if (turn->rest) {
        TFB_RETURN_IF_ERROR(FollowToTheEnd());
        continue;
      }
      const Visit visit = plan_->VisitGroup(turn->group);
      if (!visit.items().empty()) TFB_RETURN_IF_ERROR(MeasureVisit(visit));
    }
    return absl::OkStatus();
  }

  // Measures the groups that the leader never asked for, or leaves them out under a time budget.
  absl::Status FollowToTheEnd() {
    for (size_t i = 0; i < cases_.size() && !Stopped(); ++i) {
      while (left_[i] && !Stopped()) {
        const Visit visit = plan_->VisitGroup(GroupKey(cases_[i]));
        if (visit.items().empty()) break;
        if (options_.time_budget > 0) {
          TFB_RETURN_IF_ERROR(LeaveOut(i, "the sweep that this one takes turns with left it out"));
        } else {
          TFB_RETURN_IF_ERROR(MeasureVisit(visit));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status StartWorker() {
    TFB_ASSIGN_OR_RETURN(
        worker_, Worker::Start([this](WorkerSide& side) { WorkForSweep(options_, cases_, side); },
                               HostMemoryLimit(options_.measure.memory_limit, cases_), &clock_));
    return absl::OkStatus();
  }

  static absl::StatusOr<FromWorker> Parsed(const std::string& message) {
    FromWorker answer;
    if (answer.ParseFromString(message)) return answer;
    return absl::InternalError("an answer of the measuring process does not parse");
  }

  absl::StatusOr<Environment> AskForEnvironment(const ToWorker& request, absl::string_view what) {
    TFB_RETURN_IF_ERROR(worker_->Send(request.SerializeAsString()));
    for (;;) {
      progress_->Show(what, Elapsed(), ExpectedLeft());
      std::string message;
      switch (worker_->Wait(kRedrawSeconds, &message)) {
        case Worker::Event::kNothing:
          if (signals_seen > 1) return absl::CancelledError("stopped before the first case");
          continue;
        case Worker::Event::kEnded:
          return absl::InternalError(
              absl::StrCat(what, " ended the process: ", worker_->HowItEnded()));
        case Worker::Event::kMessage:
          TFB_ASSIGN_OR_RETURN(const FromWorker answer, Parsed(message));
          return answer.environment();
      }
    }
  }

  absl::Status DescribeHere() {
    ToWorker request;
    request.set_describe(true);
    TFB_ASSIGN_OR_RETURN(environment_, AskForEnvironment(request, "describing the machine"));
    return absl::OkStatus();
  }

  absl::Status MeasurePeaksHere() {
    ToWorker request;
    request.set_measure_peaks(true);
    TFB_ASSIGN_OR_RETURN(const Environment peaks,
                         AskForEnvironment(request, "measuring the machine's peaks"));
    environment_.MergeFrom(peaks);
    return absl::OkStatus();
  }

  // Cases of another machine, build or version do not count as this one's.
  absl::Status CheckOrigins() const {
    if (options_.allow_different_environment) return absl::OkStatus();
    for (const std::string& id : origins_) {
      const Environment* origin = FindEnvironment(appender_->existing(), id);
      const std::vector<std::string> differences = origin == nullptr
                                                       ? std::vector<std::string>{"unknown"}
                                                       : MachineDifferences(*origin, environment_);
      if (differences.empty()) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "--resume: ", ShortPath(options_.output),
          " has cases of another machine, build or version (there / here: ",
          absl::StrJoin(differences, "; "),
          "); --allow_different_environment takes them as they are, another --output begins anew"));
    }
    return absl::OkStatus();
  }

  // Records of cases that are known not to run, and one line for each reason.
  absl::Status AppendObstacles() {
    std::map<std::string, int> reasons;
    for (size_t i = 0; i < cases_.size(); ++i) {
      if (!left_[i]) continue;
      absl::Status obstacle = cases_[i].obstacle;
      if (cases_[i].device == Device::kCuda && !environment_.no_gpu_reason().empty()) {
        obstacle.Update(absl::UnavailableError(environment_.no_gpu_reason()));
      }
      if (obstacle.ok()) continue;
      Case record = MakeRecord(cases_[i]);
      record.mutable_outcome()->set_status(OutcomeOf(obstacle));
      record.mutable_outcome()->set_reason(std::string(obstacle.message()));
      ++reasons[record.outcome().reason()];
      progress_->Count();
      TFB_RETURN_IF_ERROR(Write(i, record));
    }
    for (const auto& [reason, count] : reasons) {
      progress_->Say(absl::StrCat(count, count == 1 ? " case" : " cases", " skipped: ", reason));
    }
    return absl::OkStatus();
  }

  // Measures until each of the visit's cases has been visited, or the deadline has passed.
  absl::Status MeasureVisit(const Visit& visit) {
    const double deadline = visit.deadline() > 0 ? begin_ + visit.deadline() : 0;
    std::set<size_t> unchecked;  // whose check has hung
    visit_start_unix_ns_ = absl::ToUnixNanos(absl::Now());
    open_.clear();
    for (const Visit::Item& item : visit.items()) open_.insert(item.index());
    while (!open_.empty()) {
      if (deadline > 0 && clock_.Seconds() >= deadline) break;
      if (worker_ == nullptr) TFB_RETURN_IF_ERROR(StartWorker());
      worker_->SetDeadline(deadline);
      TFB_RETURN_IF_ERROR(worker_->Send(RequestFor(visit, unchecked).SerializeAsString()));
      TFB_ASSIGN_OR_RETURN(const bool done, Listen(visit, &unchecked));
      if (signals_seen > 0) return absl::OkStatus();
      KeepInterim();
      if (!done) worker_.reset();  // and the rest of the group once more, by another worker
    }
    // A repetition that the deadline has cut short is not tried again.
    for (const size_t index : open_) {
      if (visit.repeats()) plan_->Finish(index);
    }
    return absl::OkStatus();
  }

  // Returns the request for the cases of the visit that are open.
  ToWorker RequestFor(const Visit& visit, const std::set<size_t>& unchecked) const {
    std::vector<Visit::Item> items;
    for (const Visit::Item& item : visit.items()) {
      if (open_.count(item.index()) > 0) items.push_back(item);
    }
    // Cases that were checked before come last, so that a sweep often stopped makes progress.
    std::stable_partition(items.begin(), items.end(), [this](const Visit::Item& item) {
      return records_.count(item.index()) == 0;
    });
    // Where a group does not fit memory or time at once, the dense counterparts are in its first
    // part.
    std::stable_partition(items.begin(), items.end(), [this](const Visit::Item& item) {
      return IsBaseline(MakeRecord(cases_[item.index()]));
    });
    ToWorker request;
    for (Visit::Item& item : items) {
      const auto record = records_.find(item.index());
      item.set_check(record == records_.end() && unchecked.count(item.index()) == 0);
      if (record != records_.end() && record->second.outcome().status() == Outcome::STATUS_OK &&
          record->second.outcome().has_against_definition()) {
        item.set_known_error(record->second.outcome().against_definition().relative_frobenius());
      }
      *request.mutable_visit()->add_items() = std::move(item);
    }
    return request;
  }

  // Receives records. Returns true when the group is done, false when the worker cannot go on.
  absl::StatusOr<bool> Listen(const Visit& visit, std::set<size_t>* unchecked) {
    bool told = false, hung = false;
    int taken = 0;
    Worker::Activity last = {-1, 0, ""};
    for (;;) {
      std::string message;
      const Worker::Event event = worker_->Wait(kRedrawSeconds, &message);
      if (event == Worker::Event::kEnded) {
        TFB_RETURN_IF_ERROR(RecordEnd(hung ? last : worker_->activity(), hung, unchecked));
        return false;
      }
      if (event == Worker::Event::kMessage) {
        TFB_ASSIGN_OR_RETURN(FromWorker answer, Parsed(message));
        if (!answer.has_report()) {
          // The case that lost the device has its record. Without any record this would never end.
          if (!answer.visit_done() && taken == 0) {
            TFB_RETURN_IF_ERROR(CountEndBetweenCases("the device was lost"));
          }
          return answer.visit_done();
        }
        if (answer.report().finished()) ++taken;
        TFB_RETURN_IF_ERROR(TakeReport(std::move(*answer.mutable_report())));
      }
      if (signals_seen > 0 && !told) {
        worker_->Stop();
        progress_->Say("stopping when the samples at hand are taken; once more to stop at once");
        told = true;
      }
      if (signals_seen > 1) {
        worker_->Kill();
        return true;
      }
      const Worker::Activity now = worker_->activity();
      if (IsHung(now) && !hung) {
        hung = true;
        last = now;
        worker_->Kill();
      }
      if (now.index >= 0) {
        const Job& at = cases_[static_cast<size_t>(now.index)];
        progress_->Show(absl::StrCat(visit.repeats() ? "more samples: " : "",
                                     at.problem.query_tokens, " tokens, ", visit.items_size(),
                                     " cases: ", at.DisplayName(), " (", now.what, ")"),
                        Elapsed(), ExpectedLeft());
      }
    }
  }

  bool IsHung(const Worker::Activity& activity) const {
    const double timeout = options_.measure.case_timeout;
    return timeout > 0 && activity.index >= 0 && activity.seconds > HangSeconds(timeout);
  }

  absl::Status TakeReport(CaseReport report) {
    const size_t index = report.index();
    if (index >= cases_.size()) {
      return absl::InternalError("the measuring process reports a case that does not exist");
    }
    NoteVisit(visit_start_unix_ns_, report.mutable_record());
    if (report.finished()) return TakeVisit(report);
    interim_[index] = std::move(*report.mutable_record());
    // Further samples of a case that has its record can wait.
    if (visits_[index] >= options_.rounds) return absl::OkStatus();
    return AppendUnfinished(index, WithEarlierVisits(index, interim_[index]));
  }

  // Returns the record with the samples of the visits before.
  Case WithEarlierVisits(size_t index, const Case& visit) const {
    const auto held = records_.find(index);
    if (held == records_.end()) return visit;
    Case all = held->second;
    AddVisit(visit, &all);
    return all;
  }

  // Adds the samples of an unfinished visit to the records of its cases.
  void KeepInterim() {
    for (const auto& [index, record] : interim_) {
      records_[index] = WithEarlierVisits(index, record);
      if (visits_[index] >= options_.rounds) improved_.insert(index);
    }
    interim_.clear();
  }

  // Adds the record of one visit to those of earlier visits. The case's record is written after the
  // first rounds, and again at the end where repetitions have added samples.
  absl::Status TakeVisit(const CaseReport& report) {
    const size_t index = report.index();
    open_.erase(index);
    interim_.erase(index);
    const int visits = ++visits_[index];
    const Case& all = records_[index] = WithEarlierVisits(index, report.record());
    plan_->Note(index, VisitedBy(report, all));
    const bool can_go_on = HasTimes(all);
    if (!can_go_on) plan_->Finish(index);
    if (visits > options_.rounds) {
      improved_.insert(index);
      return absl::OkStatus();
    }
    const bool goes_on = visits < options_.rounds && can_go_on;
    return goes_on ? AppendUnfinished(index, all) : Append(index, all);
  }

  // Writes further samples of cases that the file already has: the last record of a case counts.
  absl::Status AppendImproved() {
    for (const size_t index : improved_) {
      TFB_RETURN_IF_ERROR(AppendRecord(records_.at(index)));
    }
    improved_.clear();
    return absl::OkStatus();
  }

  // Counts an end that no case caused, and fails after too many; else the rest is tried again.
  absl::Status CountEndBetweenCases(absl::string_view how) {
    if (++ends_between_cases_ <= kMostEndsBetweenCases) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("the measuring process ended between cases: ", how));
  }

  // Makes the record of the case during which a worker ended.
  absl::Status RecordEnd(const Worker::Activity& at, bool hung, std::set<size_t>* unchecked) {
    if (signals_seen > 1) return absl::OkStatus();
    const size_t index = static_cast<size_t>(at.index);
    if (at.index < 0 || open_.count(index) == 0) {
      return CountEndBetweenCases(worker_->HowItEnded());
    }
    // A case that has its record keeps it where only further samples failed.
    const Worker::End end = worker_->end();
    if (!left_[index] && (hung || end != Worker::End::kOther)) {
      open_.erase(index);
      plan_->Finish(index);
      return absl::OkStatus();
    }
    if (hung && at.what == "check" && unchecked->insert(index).second) return absl::OkStatus();
    if (hung) {
      return AppendUnmeasured(
          index, Outcome::STATUS_TIMEOUT,
          absl::StrCat("\"", at.what, "\" took longer than --case_timeout=",
                       options_.measure.case_timeout, "s; its process was ended"));
    }
    const auto append = [&](Outcome::Status status, absl::string_view how) {
      return AppendUnmeasured(index, status, absl::StrCat("\"", at.what, "\"", how));
    };
    switch (end) {
      case Worker::End::kKilled:
        return append(Outcome::STATUS_OUT_OF_MEMORY,
                      ": the system killed the process, most likely for memory");
      case Worker::End::kNoMemory:
        return append(Outcome::STATUS_OUT_OF_MEMORY, ": an allocation failed");
      case Worker::End::kCpuTime:
        return append(Outcome::STATUS_TIMEOUT, absl::StrCat(": ", worker_->HowItEnded()));
      case Worker::End::kOther:
        break;
    }
    return append(Outcome::STATUS_FAILED,
                  absl::StrCat(" ended the process: ", worker_->HowItEnded()));
  }

  // Leaves out a case. It has no line of its own, but one for all that are left out together.
  absl::Status LeaveOut(size_t index, absl::string_view reason) {
    const auto held = records_.find(index);
    const bool is_checked = held != records_.end();
    if (is_checked && held->second.outcome().timing().run_ns_size() > 0) {
      return Append(index, held->second);
    }
    Case record = is_checked ? held->second : MakeRecord(cases_[index]);
    Outcome* outcome = record.mutable_outcome();
    if (is_checked) {
      // The case keeps its errors, and --resume adds the times.
      outcome->set_unfinished(true);
      outcome->set_reason(absl::StrCat(outcome->reason(), outcome->reason().empty() ? "" : "; ",
                                       kNotTimed, reason));
    } else {
      outcome->set_status(Outcome::STATUS_SKIPPED);
      outcome->set_reason(std::string(reason));
    }
    plan_->Finish(index);
    progress_->Count();
    return Write(index, record);
  }

  // Records the cases that the plan has left out, and says so in one line for each reason.
  absl::Status AppendLeftOut() {
    for (const LeftOut& left_out : plan_->TakeLeftOut()) {
      progress_->Say(absl::StrCat(left_out.cases.size(),
                                  left_out.cases.size() == 1 ? " case" : " cases",
                                  " skipped: ", left_out.reason));
      for (const size_t index : left_out.cases) {
        TFB_RETURN_IF_ERROR(LeaveOut(index, left_out.reason));
      }
    }
    return absl::OkStatus();
  }

  // --- Time

  double Elapsed() const { return clock_.Seconds() - begin_; }

  double ExpectedLeft() const {
    return plan_ == nullptr ? options_.time_budget : plan_->ExpectedSeconds(Elapsed());
  }

  // --- The end

  absl::Status Show() {
    TFB_ASSIGN_OR_RETURN(const ResultFile file, ReadResultFile(options_.output));
    ReportOptions how;
    how.style = StyleFor(STDOUT_FILENO);
    how.paths = {ShortPath(options_.output)};
    if (progress_->finished() == 0) {
      how.notes.push_back(signals_seen > 0 ? "stopped before the first case was done"
                                           : NothingLeft());
    }
    std::fputs(TerminalReport(Analysis(file.results), how).c_str(), stdout);
    if (!options_.other.program.empty()) TFB_RETURN_IF_ERROR(ShowComparison(file.results));
    std::fflush(stdout);
    return absl::OkStatus();
  }

  // Says why a sweep that resumes has measured nothing.
  std::string NothingLeft() const {
    if (cases_.empty()) return "nothing was left to measure: this part of the sweep has no case";
    const std::string text = "nothing was left to measure: the file has every case";
    if (tried_in_vain_ == 0) return text;
    return absl::StrCat(text, ", of which ", tried_in_vain_, " did not run; --retry runs ",
                        tried_in_vain_ == 1 ? "it" : "them", " again");
  }

  absl::Status ShowComparison(const ResultSet& now) const {
    TFB_ASSIGN_OR_RETURN(const ResultFile other, ReadResultFile(options_.other.output));
    const absl::StatusOr<Comparison> comparison = Compare(other.results, now, {});
    const TextStyle style = StyleFor(STDOUT_FILENO);
    const std::string text =
        comparison.ok()
            ? RenderComparison(*comparison, ComparisonFormat::kTerminal, /*all=*/false, style)
            : absl::StrCat("not compared: ", comparison.status().message(), "\n");
    std::printf("\nagainst %s\n\n%sthe same again: bazel run //tools:compare -- %s %s\n",
                options_.other.program.c_str(), text.c_str(),
                ShortPath(options_.other.output).c_str(), ShortPath(options_.output).c_str());
    return absl::OkStatus();
  }

  // Returns the path as the caller would type it in their folder.
  static std::string ShortPath(const std::string& path) {
    const std::filesystem::path folder = CallerPath(".");
    const std::filesystem::path relative =
        std::filesystem::path(path).lexically_relative(folder.lexically_normal());
    const bool below = !relative.empty() && *relative.begin() != "..";
    return below ? relative.string() : path;
  }

  int Interrupted() {
    PrintError(options_.program,
               absl::StrCat("stopped with ", CountLeft(), " of ", cases_.size(),
                            " cases left; to go on: ", options_.command,
                            " --output=", ShortPath(options_.output), " --resume"));
    return 128 + static_cast<int>(last_signal);
  }

  bool AnyFailed() const { return !failed_.empty(); }

  SweepOptions options_;
  const std::vector<Job>& cases_;
  Clock& clock_;
  const double begin_;
  std::unique_ptr<ResultAppender> appender_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Progress> progress_;
  std::unique_ptr<SweepPlan> plan_;
  std::vector<bool> left_;  // by case: no record yet
  Environment environment_;
  bool environment_appended_ = false;
  bool measures_ = false;  // measuring has begun
  // The contents of the file when it was opened: the reasons of skipped cases, the records of all
  // others, and the environments of these.
  std::map<size_t, std::string> skipped_before_;
  std::map<size_t, const Case*> recorded_before_;
  std::set<std::string> origins_;
  std::vector<std::string> names_;   // by case
  std::vector<int> visits_;          // by case
  int64_t visit_start_unix_ns_ = 0;  // of the visit at hand
  std::set<size_t> open_;            // cases that the visit at hand waits for
  std::map<size_t, Case> records_;   // by case: all visits to it
  std::map<size_t, Case> interim_;   // by case: the visit at hand so far
  std::set<size_t> improved_;        // cases with samples that the file lacks
  std::set<size_t> failed_;
  int tried_in_vain_ = 0;  // of the cases that the sweep before has a record of
  bool any_ran_ = false;
  bool is_new_ = false;         // the file was not there before
  std::string reason_of_skip_;  // the last one
  int ends_between_cases_ = 0;
};

}  // namespace

int64_t HostMemoryLimit(int64_t memory_limit, const std::vector<Job>& cases) {
  const bool any_on_gpu = std::any_of(cases.begin(), cases.end(),
                                      [](const Job& job) { return job.device == Device::kCuda; });
  return any_on_gpu ? 0 : memory_limit;
}

SweepPlanOptions PlanOptionsOf(const SweepOptions& options) {
  SweepPlanOptions how;
  how.time_budget = options.time_budget;
  how.repetitions = options.measure.repetitions;
  how.min_time = options.measure.min_time;
  how.rounds = options.rounds;
  how.takes_turns = TakesTurns(options);
  how.cold = options.measure.cold;
  how.graphs = options.measure.graphs;
  return how;
}

int RunSweep(const SweepOptions& options, const std::vector<Job>& cases) {
  return Sweep(options, cases).Run();
}

std::string DefaultResultPath() {
  const std::string stem = absl::StrCat(
      DefaultRunsFolder(), "/",
      absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::LocalTimeZone()), "-", HostName());
  std::string path = stem + ".pb";
  std::error_code error;
  for (int n = 2; std::filesystem::exists(path, error); ++n)
    path = absl::StrCat(stem, "-", n, ".pb");
  return path;
}

}  // namespace tfb
