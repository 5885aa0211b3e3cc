#!/bin/bash
# A part of a sweep as a shard of a Bazel test; its results are among the test's outputs.
# usage: sweep_shards.sh SWEEP [FLAGS OF SWEEP]
set -eu
sweep="$1"
shift
if [[ -n "${TEST_SHARD_STATUS_FILE:-}" ]]; then touch "$TEST_SHARD_STATUS_FILE"; fi
exec "$sweep" --shard="$(( ${TEST_SHARD_INDEX:-0} + 1 ))/${TEST_TOTAL_SHARDS:-1}" \
  --output="$TEST_UNDECLARED_OUTPUTS_DIR/shard.pb" "$@"
