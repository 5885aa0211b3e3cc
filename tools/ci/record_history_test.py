#!/usr/bin/env python3
"""tools/ci/record_history on local clones, with a fake sweep and a fake program that keeps the store."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path.cwd() / 'tools/ci'))
from ci_testing import CiTest, HISTORY  # pylint: disable=wrong-import-position

class RecordHistory(CiTest):

    def setUp(self):
        super().setUp()
        self.write('history', HISTORY)
        self.commit(factor='1')

    flags = ['--build=./build.sh', '--history=./history', '--pause=0']

    def record(self, *flags, at=None, output=None, **variables):
        return self.run_script('record_history', f'--output={output or self.output}', *self.flags, *flags, at=at, **variables)

    def files(self, branch='tfb-history'):
        """Returns the names of the runs in the branch of origin."""
        files = self.git('ls-tree', '-r', '--name-only', branch, at=self.origin).split()
        return [name for name in files if not name.endswith('format')]

    def another_clone(self, name):
        """Makes a clone whose results differ."""
        clone = self.folder / name
        self.git('clone', '--quiet', str(self.origin), str(clone), at=self.folder)
        self.write('factor', f'1.{len(name)}', at=clone)
        return clone

    def test_the_first_results_begin_a_branch_of_its_own_and_later_ones_are_added(self):
        commit = self.git('rev-parse', 'HEAD')
        page = self.folder / 'page.html'
        status, out, err = self.record(f'--page={page}', '--', '--techniques=near')
        self.assertEqual((status, err), (0, ''))
        self.assertIn(f'record_history: recorded {self.output}/run.pb\n', out)
        first = self.files()
        self.assertEqual(len(first), 1)
        self.assertTrue(first[0].startswith('runs/'))
        self.assertEqual(page.read_text(), first[0][len('runs/'):] + '\n')
        self.assertEqual((self.output / 'sweep.log').read_text(), 'measuring --techniques=near\n')
        self.assertEqual(self.git('log', '-1', '--format=%s, by %an', 'tfb-history', at=self.origin),
                         f'Results of {commit}, by record_history')
        self.write('factor', '1.25')
        self.assertEqual(self.record()[0], 0)
        self.assertEqual(len(self.files()), 2)
        self.assertLess(set(first), set(self.files()))
        # Two commits, none of which main has; nothing here has changed.
        self.assertEqual(self.git('rev-list', '--count', 'tfb-history', '^main', at=self.origin), '2')
        self.assertEqual(self.git('branch', '--format=%(refname:short)'), 'main')
        self.assertEqual(self.git('rev-parse', 'HEAD'), commit)
        self.assertEqual(self.git('status', '--porcelain'), 'M factor')

    def test_the_real_program_keeps_finds_and_draws(self):
        history = str(pathlib.Path.cwd() / 'tools/history')
        page = self.folder / 'page.html'
        commits = []
        for number in range(12):
            self.environment['GIT_COMMITTER_DATE'] = f'2026-01-{number + 1:02}T00:00:00Z'
            commits.append(self.commit(factor='1' if number < 9 else '1.3', change=str(number)))
            status, out, err = self.record(f'--history={history}', f'--page={page}')
            self.assertEqual(status, 0 if number < 11 else 1, (number, out, err))
        self.assertIn(commits[9][:12], out)
        self.assertIn(commits[8][:12], out)
        self.assertIn(commits[9], page.read_text())
        self.assertEqual(len([name for name in self.files() if name.endswith('.pb.gz')]), 12)

    def test_without_flags_bazel_builds_both_programs(self):
        self.assertEqual(self.run_script('record_history', '--output=build/history')[0], 0)
        self.assertEqual(len(self.files()), 1)
        self.assertEqual(self.git('status', '--porcelain'), '')

    def test_a_push_that_another_job_forestalled_is_tried_again(self):
        other = self.another_clone('other')
        # While the first results are added, another job pushes its own; it does so once.
        self.write('on_add', f'#!/bin/bash\nrm on_add\ncd {other}\n'
                   f'tools/ci/record_history --output={self.folder}/others {" ".join(self.flags)} > /dev/null\n')
        status, out, err = self.record()
        self.assertEqual(status, 0, err)
        self.assertIn('rejected', err)
        self.assertIn('recorded', out)
        self.assertEqual(len(self.files()), 2)
        # Again, with a branch that is there.
        self.write('factor', '1.7', at=other)
        self.write('factor', '1.8')
        self.write('on_add', f'#!/bin/bash\nrm on_add\ncd {other}\n'
                   f'tools/ci/record_history --output={self.folder}/others {" ".join(self.flags)} > /dev/null\n')
        status, _, err = self.record()
        self.assertEqual(status, 0, err)
        self.assertEqual(len(self.files()), 4)

    def test_jobs_that_push_at_once_lose_nothing(self):
        clones = [self.another_clone('x' * n) for n in (1, 2, 3)]
        for expected in (3, 6):
            jobs = [
                self.start('record_history', f'--output={self.folder}/output-{clone.name}', *self.flags, at=clone)
                for clone in clones
            ]
            ended = [(job.communicate()[1], job.wait()) for job in jobs]
            self.assertEqual([status for _, status in ended], [0, 0, 0], ended)
            self.assertEqual(len(self.files()), expected)
            for clone in clones:
                self.write('factor', f'2.{len(clone.name)}', at=clone)

    def test_a_push_that_is_never_taken_keeps_what_was_measured(self):
        self.write('hooks/pre-receive', f'#!/bin/bash\necho try >> {self.folder}/tries\nexit 1\n', at=self.origin)
        status, _, err = self.record()
        self.assertEqual(status, 2)
        self.assertIn('record_history: tfb-history could not be pushed to origin in 5 tries; --run='
                      f'{self.output}/run.pb tries again without a sweep\n', err)
        self.assertEqual((self.folder / 'tries').read_text(), 'try\n' * 5)
        (self.origin / 'hooks/pre-receive').unlink()
        self.write('sweep', '#!/bin/bash\nexit 2\n')
        status, _, err = self.record(f'--run={self.output}/run.pb')
        self.assertEqual((status, err), (0, ''))
        self.assertEqual(len(self.files()), 1)
        status, out, err = self.record(f'--run={self.output}/run.pb')
        self.assertEqual((status, err), (0, ''))
        self.assertIn('record_history: the store has these results already\n', out)
        self.assertEqual(len(self.files()), 1)

    def test_a_remote_that_cannot_be_reached_is_an_error(self):
        status, _, err = self.record(f'--remote={self.folder}/nowhere')
        self.assertEqual(status, 2)
        self.assertIn('could not be pushed', err)

    def test_a_regression_is_recorded_and_is_one(self):
        self.write('slower', '')
        status, out, err = self.record()
        self.assertEqual((status, err), (1, ''))
        self.assertTrue(out.endswith('a regression\n'), out)
        self.assertEqual(len(self.files()), 1)
        self.assertEqual(self.record('--acknowledged=known')[0], 0)

    def test_a_branch_a_folder_and_a_remote_have_names(self):
        self.git('remote', 'rename', 'origin', 'upstream')
        self.assertEqual(self.record('--branch=numbers', '--store=cpu/amd', '--remote=upstream')[0], 0)
        self.assertEqual(len(self.files('numbers')), 1)
        self.assertTrue(self.files('numbers')[0].startswith('cpu/amd/runs/'))

    def test_without_a_branch_the_store_is_a_folder(self):
        store = self.folder / 'kept/store'
        self.assertEqual(self.record('--branch=', f'--store={store}')[0], 0)
        self.write('factor', '1.5')
        self.assertEqual(self.record('--branch=', f'--store={store}')[0], 0)
        self.assertEqual(len(list((store / 'runs').iterdir())), 2)
        self.assertEqual(self.git('branch', '--list', 'tfb-history', at=self.origin), '')

    def test_a_shallow_clone_records_as_well(self):
        self.assertEqual(self.record()[0], 0)
        shallow = self.folder / 'shallow'
        self.git('clone', '--quiet', '--depth=1', '--single-branch', f'file://{self.origin}', str(shallow), at=self.folder)
        self.write('factor', '1.5', at=shallow)
        status, _, err = self.record(at=shallow)
        self.assertEqual((status, err), (0, ''))
        self.assertEqual(len(self.files()), 2)

    def test_what_fails_before_is_two_and_records_nothing(self):
        for name, text, message in [('build.sh', '#!/bin/bash\nexit 1\n', 'the build failed: ./build.sh'),
                                    ('sweep', '#!/bin/bash\nexit 2\n', 'the sweep ended with exit status 2'),
                                    ('sweep', '#!/bin/bash\nexit 0\n', 'the sweep left no results'),
                                    ('history', '#!/bin/bash\nexit 2\n', 'history add failed')]:
            before = (self.clone / name).read_text()
            self.write(name, text)
            status, _, err = self.record()
            self.assertEqual(status, 2, err)
            self.assertIn('record_history: ' + message, err)
            self.write(name, before)
        self.assertEqual(self.git('branch', '--list', 'tfb-history', at=self.origin), '')

    def test_what_fails_unforeseen_is_no_regression(self):
        (self.output / 'run.pb/file').mkdir(parents=True)
        status, _, err = self.record()
        self.assertEqual(status, 2)
        self.assertIn('run.pb', err)

    def test_bad_usage_is_two_and_one_line(self):
        output = f'--output={self.output}'
        self.expect_bad_usage('record_history', [
            ([], '--output=DIR is missing'),
            ([output, '--barnch=x'], 'unknown flag --barnch=x'),
            ([output, '--branch='], '--store=FOLDER is missing, which --branch= requires'),
            ([output, '--branch=a..b'], '--branch=a..b is no name of a branch'),
            ([output, '--store=../x'], '--store=../x: a folder within the branch is wanted'),
            ([output, '--store=/x'], '--store=/x: a folder within the branch is wanted'),
            ([output, '--pause=soon'], '--pause=soon: a number of seconds is wanted'),
            ([output, '--run=/nowhere.pb'], '--run: /nowhere.pb is no file'),
            (['--output=/proc/nowhere'], '--output: /proc/nowhere: cannot write'),
            ([output, '--', '--output=x.pb'], '--output=x.pb is set by this script'),
        ])


if __name__ == '__main__':
    unittest.main()
