#!/bin/bash
# usage: benchmark_main_test.sh BENCHMARK
# What a technique's benchmark prints, and how it answers bad usage.
set -u
benchmark="$1"
failed=0

fail() {
  echo "FAILED: $1" >&2
  failed=1
}

output="$("$benchmark" --technique=toy_mean:rounds=* --lengths=16,32 --heads=2 --head_dims=8 --setup \
  --benchmark_min_time=0.001 2> /dev/null)" || fail "exit status $?"
for expected in "toy_mean/16x2x8/causal/f32/real_time" "toy_mean:rounds=4/32x2x8/causal/f32/setup/real_time" \
    "dense/32x2x8/causal/f32/real_time" "GFLOP/s=" "of_peak=" "tokens/s="; do
  [[ "$output" == *"$expected"* ]] || fail "\"$expected\" is not in: $output"
done

output="$("$benchmark" --technique=toy_mean --lengths=16 --denormals --benchmark_min_time=0.001 2> /dev/null)" \
  || fail "exit status $?"
[[ "$output" == *"denormal_x="* ]] || fail "\"denormal_x=\" is not in: $output"

# Google Benchmark's own flags hold, and a case that cannot run does not end the others.
output="$("$benchmark" --technique=toy_mean,toy_refuses --lengths=16 --benchmark_filter=toy_ \
  --benchmark_min_time=0.001 2> /dev/null)"
[[ "$output" == *"toy_refuses/16x8x64/causal/f32/real_time "*"the toy refuses to run"* ]] || fail "no reason: $output"
[[ "$output" == *"toy_mean/16x8x64"* && "$output" != *"dense/"* ]] || fail "the filter does not hold: $output"

# On a device; the CPU's techniques stay out of it, with the reason.
output="$("$benchmark" --technique=toy_device,toy_mean --device=simulator --lengths=8 --heads=2 --head_dims=4 --setup \
  --benchmark_min_time=0.001 2> /dev/null)" || fail "exit status $?"
for expected in "toy_device/8x2x4/causal/f32/simulator/real_time" "toy_device/8x2x4/causal/f32/simulator/setup/real_time" \
    "toy_mean has no implementation for device simulator" "tokens/s="; do
  [[ "$output" == *"$expected"* ]] || fail "\"$expected\" is not in: $output"
done
message="$(CUDA_VISIBLE_DEVICES= "$benchmark" --technique=toy_device --device=cuda 2>&1 > /dev/null)"
[[ $? == 2 && "$message" == "benchmark: no CUDA device: "* ]] || fail "no device: $message"

for usage in --technique=toy_maen --lengths=0 --lenghts=1 --threads=none word; do
  message="$("$benchmark" "$usage" 2>&1 > /dev/null)"
  status=$?
  (( status == 2 )) || fail "$usage: exit status $status"
  [[ "$message" == benchmark:* && "$(wc -l <<< "$message")" == 1 ]] || fail "$usage: $message"
done
"$benchmark" --help | grep -q -- --lengths || fail "--help"
exit "$failed"
