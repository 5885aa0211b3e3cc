#!/bin/bash
# usage: redraw_test.sh REDRAW RENDER PROTOC README DESCRIPTORS
# Tests tools/redraw_readme on a result file of made-up numbers, and the markers of the repository's README.
set -euo pipefail
redraw="$PWD/$1" render="$PWD/$2" protoc="$PWD/$3" readme="$PWD/$4" descriptors="$PWD/$5"
export RENDER="$render"
fail() { echo "redraw_test: $*" >&2; exit 1; }
rows_of() { sed -n '/^<!-- redraw_readme begin/,/^<!-- redraw_readme end/p' "$1" | sed -n 's/^| `\([^`]*\)` .*/\1/p'; }

# The repository's README has the markers once each, and shows the picture.
[[ "$(grep -c '^<!-- redraw_readme begin.* -->$' "$readme")" == 1 ]] || fail "README.md does not have one begin marker"
[[ "$(grep -c '^<!-- redraw_readme end -->$' "$readme")" == 1 ]] || fail "README.md does not have one end marker"
grep -q '](docs/sweep.svg)' "$readme" || fail "README.md does not show docs/sweep.svg"
[[ "$(wc -l < "$readme")" -lt 150 ]] || fail "README.md has 150 lines or more"

# Dense attention takes 40 ms, and technique n of 13 takes 40 / n ms; three families take turns. A quarter of that at half the length.
one_case() {  # name family purpose tokens error nanoseconds pass
  printf 'cases { environment_id: "e" key { technique: "%s" device: DEVICE_TYPE_CPU dtype: ELEMENT_TYPE_F32 seed: 1 threads: 2\n' "$1"
  printf 'problem { batch: 1 query_heads: 8 kv_heads: 8 query_tokens: %d kv_tokens: %d head_dim: 64 value_dim: 64 causal: true }\n' "$4" "$4"
  printf 'input { name: "gaussian" } purpose: %s pass: %s }\n' "$3" "${7:-PASS_FORWARD}"
  printf 'technique { display_name: "%s" title: "Attention, \\"%s\\"" family: "%s" exactness: EXACTNESS_EXACT\n' "$1" "$1" "$2"
  printf 'input_kind: INPUT_KIND_QKV weights: WEIGHTS_NONE dense_counterpart: "dense" options_are_default: true expected_growth: 2 }\n'
  printf 'outcome { status: STATUS_OK peak_workspace_bytes: 2097152 parameter_bytes: 0 against_dense { relative_frobenius: %s }\n' "$5"
  if [[ -n "$6" ]]; then
    printf 'timing { clock: CLOCK_WALL run_ns: [%d, %d, %d, %d, %d, %d, %d, %d] }' "$6" "$6" "$6" "$6" "$6" "$6" "$6" "$6"
  fi
  printf '} }\n'
}
{
  printf 'format: "tfb.ResultSet/1"\nenvironments { id: "e" cpu_model: "Processor, made up" threads: 2 logical_cores: 2 }\n'
  for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do
    name="$(printf 'near%02d' "$n")" family="$(cut -d ' ' -f $((n % 3 + 1)) <<< "attention memory positional")" time=$((40000000 / (n == 0 ? 1 : n)))
    if [[ "$n" == 0 ]]; then name=dense; fi
    one_case "$name" "$family" PURPOSE_ACCURACY 512 "0.$((n + 10))" ""
    one_case "$name" "$family" PURPOSE_SCALING 1024 0 $((time / 16))
    one_case "$name" "$family" PURPOSE_SCALING 2048 0 $((time / 4))
    one_case "$name" "$family" PURPOSE_SCALING 4096 0 "$time"
  done
} > "$TEST_TMPDIR/results.textproto"
"$protoc" --descriptor_set_in="$descriptors" --encode=tfb.ResultSet results/results.proto < "$TEST_TMPDIR/results.textproto" > "$TEST_TMPDIR/results.pb"

copy="$TEST_TMPDIR/README.md" picture="$TEST_TMPDIR/docs/sweep.svg"
printf 'Before.\n\n<!-- redraw_readme begin techniques= -->\n\nold rows\n\n<!-- redraw_readme end -->\n\nBehind.\n' > "$copy"
run() { bash "$redraw" --readme="$copy" --picture="$picture" "$@" "$TEST_TMPDIR/results.pb"; }
run

# Twelve rows, the fastest first, dense attention among them; the slowest of the others are left out.
expected="$(printf 'near%02d\n' 13 12 11 10 9 8 7 6 5 4 3; echo dense)"
[[ "$(rows_of "$copy")" == "$expected" ]] || fail "the rows are $(rows_of "$copy")"
row='| `near10` | Attention, "near10" | 0.2 | 10x | 2 MiB | 1024 tokens or fewer |'
grep -qxF "$row" "$copy" || fail "there is no row $row in $(cat "$copy")"
grep -q '^Medians at 4096 tokens on 2 threads of Processor, made up;' "$copy" || fail "the caption is wrong: $(cat "$copy")"
if grep -q 'old rows' "$copy"; then fail "the old rows are still there"; fi
[[ "$(head -1 "$copy") $(tail -1 "$copy")" == "Before. Behind." ]] || fail "text around the markers has changed"
grep -q '<svg' "$picture" || fail "there is no picture"

# A second run changes nothing.
cp "$copy" "$copy.once"
cp "$picture" "$picture.once"
run
cmp "$copy" "$copy.once" || fail "a second run changed the README"
cmp "$picture" "$picture.once" || fail "a second run changed the picture"

# Training steps beside the runs change nothing.
cp "$TEST_TMPDIR/results.pb" "$TEST_TMPDIR/forward.pb"
{ cat "$TEST_TMPDIR/results.textproto"
  for name in dense near01 near13; do one_case "$name" attention PURPOSE_SCALING 4096 0 1000000 PASS_TRAINING; done
} | "$protoc" --descriptor_set_in="$descriptors" --encode=tfb.ResultSet results/results.proto > "$TEST_TMPDIR/results.pb"
run
cmp "$copy" "$copy.once" || fail "training steps changed the README"
cmp "$picture" "$picture.once" || fail "training steps changed the picture"
mv "$TEST_TMPDIR/forward.pb" "$TEST_TMPDIR/results.pb"

# A list chooses the rows, on the command line and in the marker.
run --techniques=near02,dense
[[ "$(rows_of "$copy")" == "$(printf 'near02\ndense')" ]] || fail "--techniques gave $(rows_of "$copy")"
sed -i 's/techniques= -->/techniques=near05,near01 -->/' "$copy"
run
[[ "$(rows_of "$copy")" == "$(printf 'near05\nnear01')" ]] || fail "the marker's list gave $(rows_of "$copy")"
# near01 takes as long as dense attention at every length.
grep -q '^| `near01` .* | 1.0x | 2 MiB | unclear |$' "$copy" || fail "a crossover is claimed that is unclear: $(cat "$copy")"

# Without markers, or without rows, it fails and changes nothing.
cp "$copy" "$copy.once"
if run --techniques=missing; then fail "a list of unknown techniques is accepted"; fi
cmp "$copy" "$copy.once" || fail "a failed run changed the README"
echo "no markers" > "$copy"
if run; then fail "a README without markers is accepted"; fi
echo "passed"
