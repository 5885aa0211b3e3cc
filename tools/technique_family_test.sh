#!/bin/bash
# usage: technique_family_test.sh FAMILY/BUILD NAME...
# Fails where the family's folder in the source tree has a folder that is not among the names. The source tree is found
# through the BUILD file, which Bazel hands to a test as a link.
set -eu

build_file="$1"
shift
family="${build_file%/BUILD}"
real_build_file="$(readlink -f "$build_file")"
source_folder="$(dirname "$real_build_file")"

listed=" $* "
status=0
for folder in "$source_folder"/*/; do
  [[ -f "$folder/BUILD" ]] || continue  # no technique, such as files of one to come
  name="$(basename "$folder")"
  if [[ "$listed" != *" $name "* ]]; then
    echo "$family/$name is not in the list of $family/BUILD: add the line \"$name\"," >&2
    status=1
  fi
done
echo "$family: $# listed"
exit "$status"
