#!/bin/bash
# usage: without_kernels_test.sh CHECK
# A program that was linked without kernels works on the CPU, and says what to type for the other devices.
set -u

check="$1"
failures=0
expect() {  # STATUS PATTERN FLAG...
  local output status
  output="$("$check" --techniques=tiny --input=gaussian --lengths=40 "${@:3}" 2>&1)"
  status=$?
  if (( status != $1 )) || ! grep -q -e "$2" <<< "$output"; then
    echo "${*:3}: expected exit code $1 and \"$2\"; it was $status, after" "$output"
    failures=$((failures + 1))
  fi
}

expect 0 "tiny" --devices=cpu
expect 2 "--devices: this program was built without the simulator.*--config=simulator" --devices=simulator
expect 0 "this program was built without CUDA kernels.*--config=cuda" --devices=cpu,cuda
exit "$((failures > 0))"
