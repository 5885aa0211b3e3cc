#!/bin/bash
# Runs a sweep and compares it with the runs of a store (regression.bzl). The rule sets the first flags.
#   --times    compares times as well, with the store's runs of this kind of machine
#   --record   adds the run to the store itself, and compares nothing
set -euo pipefail

fail() {  # SENTENCE
  echo "regression: $1" >&2
  exit 2
}

sweep="" history="" store="" acknowledged="" times="" record="" sweep_flags=()
for argument in "$@"; do
  case "$argument" in
    --sweep=?*) sweep="$PWD/${argument#*=}" ;;
    --history=?*) history="$PWD/${argument#*=}" ;;
    --store=?*) store="${argument#*=}" ;;
    --acknowledged=?*) acknowledged="$PWD/${argument#*=}" ;;
    --sweep_flag=*) sweep_flags+=("${argument#*=}") ;;
    --times) times=1 ;;
    --record) record=1 ;;
    *) fail "unknown flag $argument; known are --times and --record" ;;
  esac
done

scratch="${TEST_TMPDIR:-$(mktemp -d)}/regression"
mkdir -p "$scratch"
trap 'rm -rf "$scratch"' EXIT

# The store that is added to: a copy, or the one of the source tree.
if [[ -n "$record" ]]; then
  [[ -n "${BUILD_WORKSPACE_DIRECTORY:-}" ]] || fail "--record: call it by bazel run"
  target="$BUILD_WORKSPACE_DIRECTORY/$store"
else
  target="$scratch/store"
  cp -rL "$store" "$target"
  chmod -R u+w "$target"
  unset BUILD_WORKSPACE_DIRECTORY  # what is tested need not be what the workspace has now
fi
unset BUILD_WORKING_DIRECTORY

status=0
"$sweep" "${sweep_flags[@]}" --output="$scratch/run.pb" > "$scratch/sweep.log" 2>&1 < /dev/null || status=$?
# 1: a case failed, which its row says.
if (( status > 1 )); then
  tail -n 20 "$scratch/sweep.log" >&2
  fail "the sweep ended with exit status $status"
fi
"$history" add "$scratch/run.pb" --store="$target"
[[ -z "$record" ]] || exit 0

check() {  # METRICS FLAGS...
  local status=0
  "$history" check --store="$target" ${acknowledged:+--acknowledged="$acknowledged"} --metrics="$1" "${@:2}" || status=$?
  (( status <= 1 )) || fail "the store cannot be checked"
  regressed=$(( regressed | status ))
}
regressed=0
check status,error,error_against_dense --across_machines
check "memory${times:+,time,machine_time,setup}"
if (( regressed )); then
  echo "regression: a line in the file of acknowledgements, with a reason, takes a change as it is; see regression.bzl" >&2
fi
exit "$regressed"
