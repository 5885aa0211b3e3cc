#include "harness/measure/visits.h"

#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

Case Parsed(const char* text) {
  Case record;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &record)) << text;
  return record;
}

constexpr char kFirst[] = R"(
  key { technique: "dense" }
  outcome {
    status: STATUS_OK
    elapsed_seconds: 1
    process_peak_bytes: 100
    flops: 7
    against_definition { max_abs: 0.5 }
    timing {
      clock: CLOCK_WALL
      calls_per_sample: 2
      setup_ns: 1
      cold_run_ns: 2
      run_ns: [ 3, 4 ]
      graph_run_ns: 9
      end_to_end_ns: 5
      probe_ns: [ 6, 7 ]
      run_instructions: 8
      segments { tokens_before: 0 tokens: 5 append_ns: 10 }
      segments { tokens_before: 5 tokens: 5 append_ns: 11 }
      discarded_samples: 1
      throttled_samples: 2
      discarded_reason: "first"
      visits { start_unix_ns: 1000 run_samples: 2 }
    }
    machine_load { observed_seconds: 1 cores: 2 }
    device_state_before { clock_mhz: 1 }
    device_state_after { clock_mhz: 2 }
  })";
constexpr char kSecond[] = R"(
  key { technique: "dense" }
  outcome {
    status: STATUS_OK
    elapsed_seconds: 10
    process_peak_bytes: 200
    flops: 70
    timing {
      clock: CLOCK_DEVICE_EVENTS
      calls_per_sample: 3
      setup_ns: 10
      cold_run_ns: 20
      run_ns: 30
      graph_run_ns: 90
      no_graph_reason: "second"
      end_to_end_ns: 50
      probe_ns: 60
      run_instructions: 80
      segments { tokens_before: 0 tokens: 5 append_ns: 100 }
      segments { tokens_before: 5 tokens: 5 append_ns: 110 }
      discarded_samples: 10
      throttled_samples: 20
      discarded_reason: "second"
      visits { start_unix_ns: 3000 run_samples: 1 }
    }
    machine_load { observed_seconds: 3 cores: 4 }
    device_state_before { clock_mhz: 10 }
    device_state_after { clock_mhz: 20 }
  })";

TEST(Visits, SamplesAddUpAndWhatStandsOnceIsTheFirsts) {
  Case all = Parsed(kFirst);
  AddVisit(Parsed(kSecond), &all);
  EXPECT_EQ(all.DebugString(), Parsed(R"(
    key { technique: "dense" }
    outcome {
      status: STATUS_OK
      elapsed_seconds: 11
      process_peak_bytes: 200
      flops: 7
      against_definition { max_abs: 0.5 }
      timing {
        clock: CLOCK_WALL
        calls_per_sample: 3
        setup_ns: [ 1, 10 ]
        cold_run_ns: [ 2, 20 ]
        run_ns: [ 3, 4, 30 ]
        graph_run_ns: [ 9, 90 ]
        no_graph_reason: "second"
        end_to_end_ns: [ 5, 50 ]
        probe_ns: [ 6, 7, 60 ]
        run_instructions: [ 8, 80 ]
        segments { tokens_before: 0 tokens: 5 append_ns: [ 10, 100 ] }
        segments { tokens_before: 5 tokens: 5 append_ns: [ 11, 110 ] }
        discarded_samples: 11
        throttled_samples: 22
        discarded_reason: "first"
        visits { start_unix_ns: 1000 run_samples: 2 }
        visits { start_unix_ns: 3000 run_samples: 1 }
      }
      machine_load { observed_seconds: 4 cores: 4 threads: 0 usable_cores: 0 }
      device_state_before { clock_mhz: 1 }
      device_state_after { clock_mhz: 20 }
    })")
                                   .DebugString());
}

TEST(Visits, AVisitWithSamplesIsNoted) {
  Case record = Parsed("outcome { timing { run_ns: [ 3, 4, 5 ] } }");
  NoteVisit(7000, &record);
  NoteVisit(8000, &record);  // of the finished record, after that of the record so far
  EXPECT_EQ(record.DebugString(), Parsed(R"(outcome { timing {
    run_ns: [ 3, 4, 5 ]
    visits { start_unix_ns: 8000 run_samples: 3 }
  } })")
                                      .DebugString());
  Case checked = Parsed("outcome { timing { setup_ns: 1 } }");
  NoteVisit(7000, &checked);
  EXPECT_EQ(checked.outcome().timing().visits_size(), 0);
}

TEST(Visits, AVisitToACaseThatWasOnlyCheckedGivesItsTimes) {
  Case all = Parsed("outcome { status: STATUS_OK against_definition { max_abs: 0.5 } }");
  AddVisit(Parsed(kSecond), &all);
  Case expected = Parsed(kSecond);
  expected.clear_key();
  expected.mutable_outcome()->clear_flops();
  expected.mutable_outcome()->mutable_against_definition()->set_max_abs(0.5);
  EXPECT_EQ(all.DebugString(), expected.DebugString());
}

TEST(Visits, AVisitWithoutTimesChangesNoneAndItsFailureIsTheCases) {
  Case all = Parsed(kFirst);
  AddVisit(Parsed(R"(outcome {
             status: STATUS_FAILED
             reason: "why"
             process_peak_bytes: 50
             timing { segments { append_ns: 9 } segments {} segments { append_ns: 9 } }
           })"),
           &all);
  Case expected = Parsed(kFirst);
  expected.mutable_outcome()->set_status(Outcome::STATUS_FAILED);
  expected.mutable_outcome()->set_reason("why");
  // Segments join where both visits have them.
  expected.mutable_outcome()->mutable_timing()->mutable_segments(0)->add_append_ns(9);
  EXPECT_EQ(all.DebugString(), expected.DebugString());
  // The first failure is kept.
  AddVisit(Parsed("outcome { status: STATUS_TIMEOUT reason: \"other\" }"), &all);
  EXPECT_EQ(all.outcome().reason(), "why");
  AddVisit(Parsed(kSecond), &all);
  EXPECT_EQ(all.outcome().status(), Outcome::STATUS_FAILED);
}

TEST(Visits, FindingsAreOfTheLastPreparationAndOfAllSamples) {
  CaseReport report;
  report.set_preparation_seconds(5);
  report.set_check_seconds(2);
  report.set_input_seconds(1);
  const Visited none = VisitedBy(report, Case());
  EXPECT_EQ(none.preparation_seconds, 5);
  EXPECT_EQ(none.check_seconds, 2);
  EXPECT_EQ(none.input_seconds, 1);
  EXPECT_EQ(none.samples, 0);
  EXPECT_EQ(none.call_seconds, 0);
  EXPECT_EQ(none.half_width, 0);
  EXPECT_EQ(none.setup_seconds, 0);
  const Visited some = VisitedBy(report, Parsed(R"(outcome {
    status: STATUS_OK
    timing { run_ns: [ 3e9, 5e9, 4e9 ] setup_ns: [ 7e9, 6e9, 9e9 ] }
  })"));
  EXPECT_EQ(some.preparation_seconds, 5);
  EXPECT_EQ(some.samples, 3);
  EXPECT_EQ(some.call_seconds, 4);
  EXPECT_EQ(some.half_width, 0.25);
  EXPECT_EQ(some.setup_seconds, 7);
}

TEST(Visits, AnEarlierPreparationIsWhatSamplesLeaveOfTheTime) {
  Case record = Parsed(R"(outcome {
    status: STATUS_OK
    elapsed_seconds: 100
    timing {
      calls_per_sample: 4
      run_ns: [ 3e9, 1e9, 2e9 ]
      graph_run_ns: 0.5e9
      setup_ns: [ 7e9, 8e9 ]
      cold_run_ns: 9e9
      end_to_end_ns: 10e9
      segments { append_ns: [ 11e9, 1e9 ] }
    }
  })");
  const Visited earlier = VisitedEarlier(record);
  EXPECT_EQ(earlier.preparation_seconds, 100 - (4 * 6.5 + 15 + 9 + 10 + 12));
  EXPECT_EQ(earlier.call_seconds, 2);
  EXPECT_EQ(earlier.samples, 3);
  EXPECT_EQ(earlier.setup_seconds, 7.5);
  record.mutable_outcome()->set_elapsed_seconds(1);  // times of a clock that was set
  EXPECT_EQ(VisitedEarlier(record).preparation_seconds, 0);
  record.mutable_outcome()->clear_timing();
  EXPECT_EQ(VisitedEarlier(record).preparation_seconds, 1);
}

}  // namespace
}  // namespace tfb
