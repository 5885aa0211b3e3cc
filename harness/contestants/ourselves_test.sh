#!/bin/bash
# usage: ourselves_test.sh SWEEP PYTHON_FILE LIBRARY PACKAGE RENDER
# Our own techniques as contestants, through the Python package: they are right, and each is found beside ours.
set -u
export PYTHONPATH="$PWD/$(dirname "$(dirname "$4")")" TFB_LIBRARY="$PWD/$3" TFB_PROGRAMS="$TEST_TMPDIR"
cp "$PWD/$5" "$TEST_TMPDIR/render"
# The runtime of a sanitizer that the library was built with has to be loaded before Python, which keeps memory to its end.
runtime="$(ldd "$TFB_LIBRARY" | sed -n 's/.*lib[at]san\S* => \(\S*\).*/\1/p')"
[[ -z "$runtime" ]] || export LD_PRELOAD="$runtime" ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0"
names=(dense longformer lsh performer t5_bias hard multi_head)
"$PWD/$1" --contestants="$PWD/$2" --python=/usr/bin/python3 --techniques="$(IFS=,; echo "${names[*]/%/@ourselves}")" --lengths=64 --heads=2 \
  --head_dims=8 --accuracy=false --input=gaussian --repetitions=3 --threads=2 --output="$TEST_TMPDIR/c.pb" > "$TEST_TMPDIR/out" 2> "$TEST_TMPDIR/err"
status=$?
failed=0
[[ $status == 0 ]] || { echo "exit status $status"; failed=1; }
for name in "${names[@]}"; do
  for who in "$name" "$name@ourselves"; do
    grep -qE -- "^\[[0-9]+/[0-9]+\] $who, cpu, .*: [0-9.]+ ms\$" "$TEST_TMPDIR/err" || { echo "no time: $who"; failed=1; }
  done
done
said="$(/usr/bin/python3 "$PWD/$2" "$TEST_TMPDIR/c.pb" | tail -1)"
[[ "$said" =~ ^[0-9]+\ of\ ${#names[@]}\ times\ differ\ by\ more\ than\ 3\ %$ ]] || { echo "it says: $said"; failed=1; }
if (( failed )); then
  cat "$TEST_TMPDIR/out" "$TEST_TMPDIR/err"
  exit 1
fi
