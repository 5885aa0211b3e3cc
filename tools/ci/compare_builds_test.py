#!/usr/bin/env python3
"""tools/ci/compare_builds on a local clone, with a fake build and a fake sweep, and with the real //tools:compare."""

import os
import pathlib
import signal
import sys
import unittest

sys.path.insert(0, str(pathlib.Path.cwd() / 'tools/ci'))
from ci_testing import BAZEL, CiTest, RUNFILES, SWEEP  # pylint: disable=wrong-import-position

COMPARE = RUNFILES / 'tools/compare'


class CompareBuilds(CiTest):

    def compare(self, *flags, base='HEAD^1', build='./build.sh', **variables):
        """Compares two commits. Checks what holds however that ends, and returns exit status, comment and errors."""
        status, out, err = self.run_script('compare_builds', f'--base={base}', f'--output={self.output}', f'--build={build}',
                                           f'--compare={COMPARE}', *flags, **variables)
        self.assertEqual((self.output / 'verdict').read_text(), f'{status}\n', (out, err))
        comment = (self.output / 'comment.md').read_text()
        checked = self.run_script('post_comment', f'--comment={self.output}/comment.md')
        self.assertEqual(checked, (0, '', ''), comment)
        # Nothing stays behind in the repository.
        self.assertEqual(self.git('worktree', 'list', '--porcelain').count('worktree '), 1)
        self.assertEqual(sorted(path.name for path in self.output.iterdir() if path.is_dir()), [])
        return status, comment, err

    def heading(self, comment):
        marker, heading = comment.split('\n')[:2]
        self.assertEqual(marker, '<!-- transformer-family-bench -->')
        return heading

    def test_a_regression_is_one_and_is_shown_with_both_commits(self):
        base = self.commit(factor='1')
        head = self.commit(factor='1.5')
        status, comment, err = self.compare('--pull_request=7', '--', '--techniques=near')
        self.assertEqual((status, err), (1, ''))
        self.assertTrue(self.heading(comment).startswith('### Regressed: 5 slower or worse, 0 faster or better, '), comment)
        self.assertIn('| **SLOWER** | `near window=256, cpu f32, 256 tokens,', comment)
        self.assertIn(f'| commit | `{base}` | `{head}` |', comment)
        self.assertEqual((self.output / 'pull_request').read_text(), '7\n')
        self.assertEqual((self.output / 'sweep.log').read_text(), 'measuring --techniques=near\n' * 2)
        for name in ('base.pb', 'new.pb'):
            self.assertTrue((self.output / name).is_file(), name)
        # A second comparison replaces the first.
        self.commit(factor='1.5')
        status, comment, err = self.compare()
        self.assertEqual((status, err), (0, ''))
        self.assertTrue(self.heading(comment).startswith('### Unchanged: '), comment)
        self.assertFalse((self.output / 'pull_request').exists())

    def test_an_improvement_is_none(self):
        self.commit(factor='1.5')
        self.commit(factor='1')
        status, comment, _ = self.compare()
        self.assertEqual(status, 0)
        self.assertTrue(self.heading(comment).startswith('### Improved: 0 slower or worse, 5 faster or better, '), comment)

    def test_head_is_what_is_checked_out_with_its_changes_or_another_commit(self):
        base = self.commit(factor='1')
        self.commit(factor='1.5')
        self.write('factor', '1')
        self.assertEqual(self.compare()[0], 0)
        self.assertEqual(self.compare('--head=HEAD')[0], 1)
        self.assertEqual(self.compare('--head=main', base=base)[0], 1)
        self.assertEqual(self.git('status', '--porcelain'), 'M factor')

    def test_without_flags_bazel_builds_all_three_programs(self):
        self.commit(factor='1')
        self.commit(factor='1.5')
        # Settings that are not committed hold for base's build, too.
        self.write('.bazelrc.user', 'build --jobs=1')
        self.write('bin/bazel', BAZEL.replace('exit 9\n', 'exit 9\n[[ -f .bazelrc.user ]] || exit 9\n', 1), at=self.folder)
        status, _, err = self.run_script('compare_builds', '--base=HEAD^1', '--output=build/comparison')
        self.assertEqual((status, err), (1, ''))
        self.assertTrue((self.clone / 'build/comparison/new.pb').is_file())
        self.assertEqual(self.git('status', '--porcelain'), '')

    def test_a_commit_that_does_not_build_gives_a_comment_with_the_end_of_the_log(self):
        nasty = 'error: @octocat ![a](http://b.c) </details> `x` | \x1b[31mred\x1b[0m'
        broken = f'#!/bin/bash\nfor i in $(seq 1000); do echo "line $i"; done\ncat >&2 <<"EOF"\n{nasty}\n\nEOF\nexit 1\n'
        self.commit(factor='1', **{'build.sh': broken})
        self.commit(**{'build.sh': '#!/bin/bash\nmkdir -p bazel-bin/harness && cp sweep bazel-bin/harness/\n'})
        status, comment, err = self.compare()
        self.assertEqual(status, 2)
        self.assertEqual(self.heading(comment), '### Cannot be judged: `base does not build`')
        self.assertIn('\n\n    line ', comment)
        self.assertIn('\n    line 1000\n    error: @octocat ![a](http://b.c) </details> `x` | red\n', comment)
        self.assertNotIn('    line 900\n', comment)
        self.assertEqual(err, f'compare_builds: base does not build; see {self.output}/base.log\n')
        self.commit(**{'build.sh': broken})
        status, comment, _ = self.compare(base='HEAD^1')
        self.assertEqual((status, self.heading(comment)), (2, '### Cannot be judged: `head does not build`'))

    def test_a_base_without_such_a_sweep_gives_a_comment(self):
        sweeps = [
            (None, 'base has no bazel-bin/harness/sweep after its build'),
            ('#!/bin/bash\nexit 1\n', 'the sweep of base does not start'),
            ('#!/bin/bash\necho flags: --output\n',
             'the sweep of base has no flag --turns, and cannot take turns with another build'),
            (SWEEP.replace('echo "measuring', 'exit 3; echo "'), 'the sweep ended with exit status 2'),
            (SWEEP.replace('"$SYNTHETIC_RESULTS"', 'true'), 'the sweep left no results of both builds'),
        ]
        build = '#!/bin/bash\n[[ ! -e sweep ]] || { mkdir -p bazel-bin/harness && cp sweep bazel-bin/harness/; }\n'
        for text, sentence in sweeps:
            self.write('sweep', SWEEP)
            self.commit(factor='1', sweep=text, **{'build.sh': build})
            self.commit(sweep=SWEEP)
            status, comment, err = self.compare()
            self.assertEqual((status, self.heading(comment)), (2, f'### Cannot be judged: `{sentence}`'))
            self.assertTrue(err.startswith(f'compare_builds: {sentence}'), err)

    def test_cases_that_fail_are_compared(self):
        self.commit(factor='1', status='1')
        self.commit(factor='1.5')
        self.assertEqual(self.compare()[0], 1)

    def test_results_that_cannot_be_compared_give_the_reason(self):
        self.commit(factor='1', processor='One')
        self.commit(processor='Another @octocat `x`')
        status, comment, err = self.compare()
        self.assertEqual(status, 2)
        self.assertEqual(self.heading(comment), '### Cannot be judged: the two results cannot be compared')
        self.assertIn("`the environments differ: processor: One / Another @octocat 'x'; --allow_different_env", comment)
        self.assertTrue(err.startswith('compare: the environments differ: processor'), err)

    def test_times_that_cannot_be_judged_are_no_success(self):
        self.commit(factor='1', sweep=SWEEP.replace('--factor=', '--few_samples --factor='))
        self.commit(factor='1.5')
        status, comment, err = self.compare()
        self.assertEqual(status, 2)
        self.assertTrue(self.heading(comment).startswith('### Cannot be judged: 0 slower or worse, 0 faster or better, '), comment)
        self.assertRegex(comment, r'\n\nThere is no verdict: of \d+ times 0 are ambiguous and \d+ not judged\.\n\n')
        self.assertRegex(err, r'^compare: cannot be judged: of \d+ times 0 are ambiguous and \d+ not judged\n$')

    def test_a_base_that_a_shallow_clone_lacks_is_fetched(self):
        base = self.commit(factor='1')
        self.commit(factor='1.5')
        self.git('config', 'uploadpack.allowAnySHA1InWant', 'true', at=self.origin)
        shallow = self.folder / 'shallow'
        self.git('clone', '--quiet', '--depth=1', f'file://{self.origin}', str(shallow), at=self.folder)
        status, _, err = self.run_script('compare_builds', f'--base={base}', f'--output={self.output}', '--build=./build.sh',
                                         f'--compare={COMPARE}', at=shallow)
        self.assertEqual((status, err), (1, ''))
        # The parent of a shallow clone's commit has no name that the remote knows.
        status, _, err = self.run_script('compare_builds', '--base=HEAD^1', f'--output={self.output}', at=shallow)
        self.assertEqual(status, 2)
        self.assertEqual(
            err, 'compare_builds: the commit HEAD^1 of base is not in this clone, nor can it be fetched from origin\n')
        # A name that git could take for a flag is none.
        self.assertEqual(self.compare(base='--upload-pack=touch /tmp/x')[0], 2)

    def test_what_is_in_the_way_stays(self):
        self.commit(factor='1')
        self.commit()
        (self.output / 'base').mkdir(parents=True)
        (self.output / 'base/mine').write_text('precious')
        status, _, err = self.run_script('compare_builds', '--base=HEAD^1', f'--output={self.output}', '--build=./build.sh')
        self.assertEqual(status, 2)
        self.assertIn('is in the way', err)
        self.assertEqual((self.output / 'base/mine').read_text(), 'precious')

    def test_a_worktree_whose_making_was_interrupted_is_removed(self):
        self.commit(factor='1')
        self.commit(factor='1.5')
        self.output.mkdir()
        self.git('worktree', 'add', '--quiet', '--detach', '--lock', str(self.output / 'base'))
        (self.output / 'base/.git').unlink()
        self.assertEqual(self.compare()[0], 1)

    def test_a_job_that_is_killed_leaves_a_comment_and_the_next_one_works(self):
        self.commit(factor='1')
        self.commit(factor='1.5')
        fifo = self.folder / 'fifo'
        os.mkfifo(fifo)
        with self.start('compare_builds', '--base=HEAD^1', f'--output={self.output}',
                        f'--build=echo started > {fifo}; exec sleep 600') as process:
            self.assertEqual(fifo.read_text(), 'started\n')
            os.killpg(process.pid, signal.SIGKILL)
        self.assertEqual((self.output / 'verdict').read_text(), '2\n')
        comment = (self.output / 'comment.md').read_text()
        self.assertEqual(self.heading(comment), '### Cannot be judged: `the measurement was stopped before its end`')
        self.assertEqual(self.run_script('post_comment', f'--comment={self.output}/comment.md')[0], 0)
        self.assertEqual(self.compare()[0], 1)

    def test_what_fails_unforeseen_is_no_regression(self):
        self.commit(factor='1')
        self.commit(factor='1.5')
        (self.output / 'comment.md/file').mkdir(parents=True)
        status, _, err = self.run_script('compare_builds', '--base=HEAD^1', f'--output={self.output}', '--build=./build.sh')
        self.assertEqual(status, 2)
        self.assertIn('comment.md', err)

    def test_bad_usage_is_two_and_one_line(self):
        self.commit(factor='1')
        output = f'--output={self.output}'
        self.expect_bad_usage('compare_builds', [
            ([], '--base=COMMIT is missing'),
            (['--base=HEAD'], '--output=DIR is missing'),
            (['--base=', output], 'unknown flag --base='),
            (['--base=HEAD', output, '--haed=HEAD'], 'unknown flag --haed=HEAD'),
            (['--base=HEAD', '--output=/proc/nowhere'], '--output: /proc/nowhere: cannot write'),
            (['--base=HEAD', output, '--program=/bin/true'], '--program=/bin/true: a path within the tree is wanted'),
            (['--base=HEAD', output, '--pull_request=7;x'], '--pull_request=7;x: a number is wanted'),
            (['--base=HEAD', output, '--', '--output=x.pb'], '--output=x.pb is set by this script'),
            (['--base=HEAD', output, '--', '--interleave_with', 'x'], '--interleave_with is set by this script'),
        ])


if __name__ == '__main__':
    unittest.main()
