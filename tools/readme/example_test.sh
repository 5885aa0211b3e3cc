#!/bin/bash
# usage: example_test.sh EXAMPLE README SOURCE
# Runs the example, whose equal values must come back, and fails where core/README.md does not show its source as it stands.
set -eu
example="$1" readme="$2" source="$3"

output="$("$example")"
if [[ "$output" != "out[0] = 0.5" ]]; then
  echo "the example printed: $output" >&2
  exit 1
fi

# The source below its first comment line, as a block of the README.
code="$(tail -n +2 "$source")"
if [[ "$(cat "$readme")" != *"$code"* ]]; then
  echo "core/README.md does not show tools/readme/example.cc as it stands" >&2
  exit 1
fi
