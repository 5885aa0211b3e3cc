// Writes times in Google Benchmark's format, for its tools/compare.py and other programs.
#ifndef TFB_RESULTS_BENCHMARK_JSON_H_
#define TFB_RESULTS_BENCHMARK_JSON_H_

#include <string>

#include "results/analysis.h"

namespace tfb {

// Returns {"context": {...}, "benchmarks": [...]} of json_schema_version 1. Every sample of a warm
// run is an iteration entry with its repetition_index, so that compare.py's U test works on the
// samples themselves; where there are two or more, mean, median, stddev and cv follow as
// aggregates. A benchmark's name, "technique:option/device/dtype/…", is the same in two files;
// the label of its first entry has every option. Only wall time is measured: cpu_time repeats it.
// Cases without a run time are only counted in the context, since compare.py fails on them.
std::string RenderBenchmarkJson(const Analysis& analysis);

}  // namespace tfb

#endif  // TFB_RESULTS_BENCHMARK_JSON_H_
