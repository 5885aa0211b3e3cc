"""What the tests of tools/ci share: a repository with a fake build and a fake sweep, and its clones.

The tests run in the runfiles, where tools/ci/SCRIPT, tools/compare and tools/ci/synthetic_results are.
"""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPTS = ['common.sh', 'compare_builds', 'post_comment', 'prepare', 'record_history']
RUNFILES = pathlib.Path.cwd()

# "Builds" the sweep, which is a script, too.
BUILD = '''#!/bin/bash
mkdir -p bazel-bin/harness && cp sweep bazel-bin/harness/sweep
'''

# Stands for Bazel where a script's default is to build by it.
BAZEL = '''#!/bin/bash
[[ "$1" == build ]] || exit 9
for target in "${@:2}"; do
  case "$target" in
    //harness:sweep) ./build.sh ;;
    //tools:compare) mkdir -p bazel-bin/tools && ln -sf "$COMPARE" bazel-bin/tools/compare ;;
    //tools:history) mkdir -p bazel-bin/tools && cp history bazel-bin/tools/history ;;
    *) exit 9 ;;
  esac
done
'''

# A sweep whose techniques take as long as the file `factor` of its own tree says. With --interleave_with it runs the other
# one, as the real one does.
SWEEP = '''#!/bin/bash
tree="$(cd "$(dirname "$0")/../.." && pwd)" output="" other="" rest=()
for flag in "$@"; do
  case "$flag" in
    --help) echo "flags: --interleave_with --output --turns"; exit 0 ;;
    --output=*) output="${flag#*=}" ;;
    --interleave_with=*) other="${flag#*=}" ;;
    --turns=*) ;;
    --techniques=* | --time_budget=*) rest+=("$flag") ;;
    *) echo "sweep: unknown flag $flag" >&2; exit 2 ;;
  esac
done
echo "measuring ${rest[*]}"
if [[ -n "$other" ]]; then
  "$other" "${rest[@]}" --output="${output%.pb}-base.pb" --turns=3,4 || (( $? == 1 )) || exit 2
fi
"$SYNTHETIC_RESULTS" --output="$output" --factor="$(cat "$tree/factor")" --processor="$(cat "$tree/processor" 2> /dev/null)" \\
  --commit="$(git -C "$BUILD_WORKSPACE_DIRECTORY" rev-parse HEAD)" || exit 2
exit "$(cat "$tree/status" 2> /dev/null || echo 0)"
'''

# Keeps each result file under a name of its contents, and begins a store only in an empty folder, as the real program does.
# Runs ./on_add, where there is such a file, before it adds. A file `slower` is a regression, unless one is acknowledged.
HISTORY = '''#!/bin/bash
command="$1" store="" runs=() acknowledged="" output=""
shift
for flag in "$@"; do
  case "$flag" in
    --store=*) store="${flag#*=}" ;;
    --acknowledged=*) acknowledged="${flag#*=}" ;;
    --output=*) output="${flag#*=}" ;;
    *) runs+=("$flag") ;;
  esac
done
case "$command" in
  add)
    [[ ! -x on_add ]] || ./on_add
    mkdir -p "$store"
    [[ -e "$store/format" || -z "$(ls -A "$store")" ]] || { echo "$store: no store, and not empty" >&2; exit 2; }
    echo 1 > "$store/format"
    mkdir -p "$store/runs"
    for run in "${runs[@]}"; do cp "$run" "$store/runs/$(cksum < "$run" | cut -d ' ' -f 1).pb" || exit 2; done ;;
  check) [[ -n "$acknowledged" || ! -e slower ]] || { echo "a regression"; exit 1; } ;;
  page) ls "$store/runs" > "$output" ;;
esac
'''


class CiTest(unittest.TestCase):
    """A repository `origin` with the scripts, and a clone of it."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get('TEST_TMPDIR'))).resolve()
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.environment = {
            'GIT_CONFIG_GLOBAL': '/dev/null',
            'GIT_CONFIG_NOSYSTEM': '1',
            'HOME': str(self.folder),
            'LC_ALL': 'C.UTF-8',
            'PATH': f'{self.folder}/bin:{os.environ["PATH"]}',
            'COMPARE': str(RUNFILES / 'tools/compare'),
            'SYNTHETIC_RESULTS': str(RUNFILES / 'tools/ci/synthetic_results'),
        }
        self.origin = self.folder / 'origin.git'
        self.clone = self.folder / 'clone'
        self.output = self.folder / 'output'
        self.git('init', '--quiet', '--bare', '--initial-branch=main', str(self.origin), at=self.folder)
        self.git('clone', '--quiet', str(self.origin), str(self.clone), at=self.folder)
        (self.clone / 'tools/ci').mkdir(parents=True)
        for script in SCRIPTS:
            shutil.copy(RUNFILES / 'tools/ci' / script, self.clone / 'tools/ci')
        self.write('.gitignore', '/bazel-*\n/build/\n.bazelrc.setup\n.bazelrc.user\n')
        self.write('build.sh', BUILD)
        self.write('sweep', SWEEP)
        self.write('bin/bazel', BAZEL, at=self.folder)

    def write(self, name, text, at=None):
        path = (at or self.clone) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith('#!') else 0o644)

    def git(self, *arguments, at=None):
        """Runs git in the clone, or at another place, and returns what it prints."""
        done = subprocess.run(['git', '-c', 'user.name=Somebody', '-c', 'user.email=somebody@example.org', *arguments],
                              cwd=at or self.clone, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True, check=False)
        self.assertEqual(done.returncode, 0, (arguments, done.stderr))
        return done.stdout.strip()

    def commit(self, push=True, **files):
        """Commits files with these names and contents, and returns the commit's hash."""
        for name, text in files.items():
            if text is None:
                (self.clone / name).unlink()
            else:
                self.write(name, text)
        self.git('add', '--all')
        self.git('commit', '--quiet', '--allow-empty', '--message=a commit')
        if push:
            self.git('push', '--quiet', 'origin', 'HEAD:main')
        return self.git('rev-parse', 'HEAD')

    def start(self, script, *flags, at=None, **variables):
        return subprocess.Popen([str((at or self.clone) / 'tools/ci' / script), *flags], cwd=at or self.clone,
                                env={**self.environment, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, universal_newlines=True, start_new_session=True)

    def run_script(self, script, *flags, at=None, **variables):
        """Runs a script of the clone. Returns its exit status, standard output and standard error."""
        with self.start(script, *flags, at=at, **variables) as process:
            out, err = process.communicate()
        return process.returncode, out, err

    def expect_bad_usage(self, script, rows):
        """Checks that each list of flags gives exit status 2 and one line that has the text beside it."""
        for flags, text in rows:
            status, out, err = self.run_script(script, *flags)
            self.assertEqual((status, out), (2, ''), flags)
            self.assertTrue(err.startswith(script + ': ') and err.count('\n') == 1, err)
            self.assertIn(text, err)
