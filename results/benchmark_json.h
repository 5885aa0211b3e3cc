// Times as Google Benchmark writes them, for its tools/compare.py and whatever else reads that.
#ifndef TFB_RESULTS_BENCHMARK_JSON_H_
#define TFB_RESULTS_BENCHMARK_JSON_H_

#include <string>

#include "results/analysis.h"

namespace tfb {

// {"context": {...}, "benchmarks": [...]}, of json_schema_version 1. Every sample of a warm run is an
// iteration entry with its repetition_index, so that compare.py's U test works on the samples that
// were taken; with two of them or more, mean, median, stddev and cv follow as aggregates. A
// benchmark's name is "technique:option/device/dtype/…", so that two files agree on it; the
// label of its first entry has every option. Only wall time is measured: cpu_time repeats it. Cases without a run time
// are left out, since compare.py ends with an error on entries without times; the context counts
// them.
std::string RenderBenchmarkJson(const Analysis& analysis);

}  // namespace tfb

#endif  // TFB_RESULTS_BENCHMARK_JSON_H_
