#!/bin/bash
# Runs install_peers on a made-up machine, whose python3 makes environments with a pip that writes down what it is asked for, and
# whose g++ does the same.
set -u

machine="$(mktemp -d "$TEST_TMPDIR/XXXXXX")"
here="$machine/checkout/harness/contestants/peers"
mkdir -p "$machine/bin" "$here"
cp harness/contestants/peers/install_peers "$here"
cat > "$here/requirements.txt" << 'END'
# A comment, 1 2
first==1.0  # 30 100
second==2.0  # 4 5
third==3.0  # 600 7
END
cat > "$machine/bin/python3" << 'END'
#!/bin/bash
[[ "$1 $2" == '-m venv' ]] && [[ "$3" != */cannot ]] || exit 1
mkdir -p "$3/bin"
cat > "$3/bin/pip" << 'PIP'
#!/bin/bash
folder="$(dirname "$0")/.."
echo "$*" >> "$folder/asked"
[[ "${*: -1}" != "$(cat "$folder/fails" 2> /dev/null)" ]] || exit 1
[[ "${*: -1}" == first* ]] && mkdir -p "$folder/include/oneapi/dnnl" && touch "$folder/include/oneapi/dnnl/dnnl_graph.hpp"
[[ "${*: -1}" == second* ]] && mkdir -p "$folder/include/tbb" && touch "$folder/include/tbb/task_arena.h"
exit 0
PIP
chmod +x "$3/bin/pip"
END
cat > "$machine/bin/g++" << 'END'
#!/bin/bash
printf '%s\n' "$@" > "$(dirname "$0")/../compiled"
[[ "$*" != */cannot_compile/* ]]
END
chmod +x "$machine/bin/python3" "$machine/bin/g++"

status=0
expect() {
  # shellcheck disable=SC2053  # the right side is a pattern
  if [[ "$2" != $3 ]]; then
    printf '%s is\n%s\nnot\n%s\n' "$1" "$2" "$3" >&2
    status=1
  fi
}
run() {
  out="$(PATH="$machine/bin:$PATH" "$here/install_peers" "$@" 2> "$machine/err" < /dev/null)"
  code=$?
  err="$(cat "$machine/err")"
}

says_how_much_it_is_and_does_nothing_before_it_may() {
  run
  expect status "$code" 1
  expect stdout "$out" "*$machine/checkout/build/peers:*first==1.0 * 30 MB * 100 MB*together, at most * 634 MB * 112 MB"
  expect stderr "$err" '*--yes'
  [[ ! -e "$machine/checkout/build" ]] || expect folder made none
}

installs_each_package_at_its_version() {
  run --yes
  expect status "$code" 0
  expect stdout "$out" "*together*installing first==1.0*third==3.0*compiling*$machine/checkout/build/peers/bin/python has all of it*"
  expect pip "$(sed 's/.*--constraint=[^ ]*requirements.txt //' "$machine/checkout/build/peers/asked")" \
    $'first==1.0\nsecond==2.0\nthird==3.0'
}

compiles_the_page_with_what_is_in_the_environment() {
  local compiled
  compiled="$(tr '\n' ' ' < "$machine/compiled")"
  expect g++ "$compiled" "*-shared *-isystem $machine/checkout/build/peers/include *-L$machine/checkout/build/peers/lib *"
  expect g++ "$compiled" "* $here/onednn_sdpa.cc -o $machine/checkout/build/peers/lib/libonednn_sdpa.so *-rpath,\$ORIGIN*"
  run --yes "$machine/cannot_compile"
  expect status "$code" 1
  expect stderr "$err" "*needs g++ and *could not install $machine/cannot_compile/lib/libonednn_sdpa.so;*"
}

goes_on_where_a_package_fails_and_names_it_at_the_end() {
  mkdir -p "$machine/mine"
  echo second==2.0 > "$machine/mine/fails"
  run "$machine/mine" --yes
  expect status "$code" 1
  expect pip "$(wc -l < "$machine/mine/asked")" 3
  expect stderr "$err" "tools/setup: could not install second==2.0 $machine/mine/lib/libonednn_sdpa.so;*"
  rm "$machine/mine/fails"
  run --yes "$machine/mine"
  expect status "$code" 0
}

refuses_what_it_does_not_know_and_a_machine_without_environments() {
  run --no
  expect status "$code" 2
  expect stderr "$err" 'usage: *; not --no'
  run --yes "$machine/cannot"
  expect status "$code" 1
  expect stderr "$err" '*python3-venv)'
}

says_how_much_it_is_and_does_nothing_before_it_may
installs_each_package_at_its_version
compiles_the_page_with_what_is_in_the_environment
goes_on_where_a_package_fails_and_names_it_at_the_end
refuses_what_it_does_not_know_and_a_machine_without_environments
exit "$status"
