#!/usr/bin/python3
"""Runs //tools:history, and the script of //harness:regression, on made-up results."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

RUNFILES = pathlib.Path.cwd()
HISTORY = RUNFILES / 'tools/history'
RESULTS = RUNFILES / 'tools/ci/synthetic_results'
REGRESSION = RUNFILES / 'harness/regression_test.sh'


def commit_of(number):
    return f'{number:08d}' + 'ab' * 16


class HistoryTest(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get('TEST_TMPDIR')))
        self.environment = {
            'PATH': os.environ['PATH'], 'HOME': str(self.folder), 'BUILD_WORKING_DIRECTORY': str(self.folder),
            'GIT_CONFIG_GLOBAL': '/dev/null', 'GIT_CONFIG_NOSYSTEM': '1', 'TEST_TMPDIR': str(self.folder),
        }
        for who in ('AUTHOR', 'COMMITTER'):
            self.environment[f'GIT_{who}_NAME'] = 'Tester'
            self.environment[f'GIT_{who}_EMAIL'] = 'tester@example.org'

    def tearDown(self):
        shutil.rmtree(self.folder)

    def run_program(self, *words, **variables):
        return subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=self.folder,
                              env={**self.environment, **variables}, stdin=subprocess.DEVNULL, check=False)

    def history(self, *words):
        return self.run_program(HISTORY, *words)

    def expect(self, status, *words):
        done = self.history(*words)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout if status < 2 else done.stderr

    def write_run(self, number, **flags):
        name = f'run{number}.pb'
        words = [f'--{flag}={value}' for flag, value in {'run': number, 'commit': commit_of(number), **flags}.items()]
        done = self.run_program(RESULTS, f'--output={self.folder / name}', *words)
        self.assertEqual(done.returncode, 0, done.stderr)
        return name

    def files(self, store='store'):
        return {path.relative_to(self.folder): path.read_bytes()
                for path in sorted((self.folder / store).rglob('*')) if path.is_file()}

    def add_runs(self, count, first=1, store='store', **flags):
        names = [self.write_run(number, **flags) for number in range(first, first + count)]
        return self.expect(0, 'add', *names, f'--store={store}')

    def test_a_slower_commit_is_found_acknowledged_and_drawn(self):
        self.add_runs(12)
        self.assertIn('nothing regressed, in 12 runs', self.expect(0, 'check', '--store=store'))
        self.add_runs(3, first=13, factor=1.2)
        text = self.expect(1, 'check', '--store=store')
        self.assertIn(commit_of(13)[:12], text)
        self.assertIn('1.20x', text)

        found = json.loads(self.expect(1, 'check', '--store=store', '--format=json'))
        self.assertTrue(found['regressed'])
        for change in found['changes']:
            self.assertEqual(change['first_with_it']['commit'], commit_of(13))
            self.assertEqual(change['last_before']['commit'], commit_of(12))

        (self.folder / 'accepted').write_text(f'{commit_of(13)[:8]} time technique=near* # wanted\n')
        text = self.expect(0, 'check', '--store=store', '--acknowledged=accepted', '--all')
        self.assertIn('wanted', text)

        self.expect(0, 'page', '--store=store', '--output=page.html', '--title=A title',
                    '--commit_url=https://example.org/%s')
        page = (self.folder / 'page.html').read_text()
        self.assertIn('A title', page)
        self.assertIn(f'https://example.org/{commit_of(13)}', page)

    def test_memory_and_errors_need_one_run(self):
        self.add_runs(1)
        self.add_runs(1, first=2, memory_factor=1.2)
        self.assertIn('working memory', self.expect(1, 'check', '--store=store'))
        self.expect(0, 'check', '--store=store', '--metrics=error,status')
        self.expect(0, 'check', '--store=store', '--memory_threshold=1.5')
        self.add_runs(1, first=3, error_factor=1.5)
        self.assertIn('error against dense', self.expect(1, 'check', '--store=store'))

    def test_machines_are_compared_only_when_asked(self):
        self.add_runs(1)
        self.add_runs(1, first=2, memory_factor=2, processor='Another CPU')
        self.assertIn('on 2 kinds of machines', self.expect(0, 'check', '--store=store'))
        self.expect(1, 'check', '--store=store', '--across_machines')
        listed = self.expect(0, 'list', '--store=store')
        self.assertIn('Another CPU', listed)
        self.assertIn('run2.pb', listed)

    def test_stores_are_merged_without_loss(self):
        self.add_runs(3)
        self.add_runs(3, first=3, store='other')
        self.assertIn('2 runs added, 1 were there already', self.expect(0, 'merge', 'other', '--store=store'))
        self.expect(0, 'merge', 'store', '--store=new')
        self.assertEqual(list(self.files().values()), list(self.files('new').values()))

    def test_a_branch_is_a_store(self):
        self.run_program('git', 'init', '--quiet', '.')
        name = self.write_run(1)
        self.assertIn('added', self.expect(0, 'add', name, '--store=git:results', '--repository=.'))
        self.assertIn('already there', self.expect(0, 'add', name, '--store=git:results', '--repository=.'))
        self.expect(0, 'check', '--store=git:results', '--repository=.')
        self.expect(0, 'merge', 'git:results', '--store=store', '--repository=.')
        self.assertEqual(len(self.files()), 2)

    def test_bad_input_is_one_error_and_the_store_as_it_was(self):
        self.add_runs(2)
        before = self.files()
        whole = (self.folder / 'run1.pb').read_bytes()
        (self.folder / 'cut.pb').write_bytes(whole[:4])
        (self.folder / 'text.pb').write_text('no results\n')
        self.write_run(3, without_processor='true')
        self.write_run(2, factor=2)  # the second run, with other contents
        for words, message in [
                (['add', 'cut.pb'], 'cut.pb'),
                (['add', 'text.pb'], 'text.pb: '),
                (['add', 'none.pb'], 'none.pb: '),
                (['add', 'run3.pb'], 'names no processor'),
                (['add', 'run2.pb'], 'with other contents'),
                (['add', 'run1.pb', 'run3.pb'], 'names no processor'),
                (['add'], 'name the result files'),
                (['merge'], 'name the stores'),
                (['merge', 'none'], 'none: no store'),
                (['check', 'run1.pb'], 'takes no argument'),
                (['check', '--metrics=speed'], '--metrics: "speed" is none of time,'),
                (['check', '--threshold=1'], '--threshold=1'),
                (['check', '--format=xml'], '--format: "xml"'),
                (['check', '--acknowledged=none'], 'none: '),
                (['page'], '--output=FILE.html'),
                (['page', '--output=none/page.html'], 'none/page.html'),
                (['page', '--output=p.html', '--commit_url=example.org'], '--commit_url'),
                (['add', 'run1.pb', '--threshold=2'], 'add: --threshold is a flag of another command; this one takes --store'),
                (['check', '--output', 'x'], 'check: --output is a flag of another command'),
                (['list', '--nosalvage', '--all'], 'list: --all is'),
                (['bisect', '--case=near'], 'bisect: --store is'),
                (['delete'], '"delete" is none of bisect, add, '),
                ([], 'name a command'),
        ]:
            error = self.expect(2, *words, '--store=store')
            self.assertIn(message, error)
            self.assertEqual(len(error.splitlines()), 1 + ('cut.pb' in words), error)
            self.assertEqual(self.files(), before)
        self.assertIn('--store=', self.expect(2, 'check'))
        self.assertIn('run1.pb', self.expect(2, 'check', '--store=run1.pb'))

    def test_help_is_that_of_the_program_unless_the_command_has_its_own(self):
        commands = ('add', 'check', 'page', 'list', 'merge', 'bisect')
        for words in (['--help'], *([command, '--help'] for command in commands if command != 'bisect')):
            text = self.expect(0, *words)
            for command in commands:
                self.assertIn(f'history {command} ', text, words)
            self.assertIn('history bisect --help explains that command.', text)
        text = self.expect(0, 'bisect', '--help')
        self.assertIn('Finds the commit that made a case slower', text)
        self.assertNotIn('history check ', text)
        self.assertIn('name a command: bisect, add, check, list, merge, page; see --help', self.expect(2))

    def test_a_store_of_a_newer_version_or_with_a_cut_run_is_refused(self):
        self.add_runs(2)
        run = sorted((self.folder / 'store/runs').iterdir())[0]
        whole = run.read_bytes()
        run.write_bytes(whole[:-9])
        self.assertIn(f'{run.name}: cut or damaged', self.expect(2, 'check', '--store=store'))
        done = self.history('check', '--store=store', '--salvage')
        self.assertEqual(done.returncode, 0)
        self.assertIn('left out', done.stderr)
        self.assertIn('in 1 run on', done.stdout)
        run.write_bytes(whole)
        (self.folder / 'store/tfb-history').write_text('tfb.History/9\n')
        for words in (['check'], ['add', 'run1.pb'], ['merge', 'store'], ['page', '--output=p.html']):
            self.assertIn('a newer version', self.expect(2, *words, '--store=store'))
        self.assertEqual((self.folder / 'store/tfb-history').read_text(), 'tfb.History/9\n')

    def regression(self, *flags, run):
        (self.folder / 'sweep').write_text('#!/bin/bash\nfor flag; do case "$flag" in --output=*) out="${flag#*=}";; esac; '
                                           f'done\ncp {self.folder / run} "$out"\n')
        (self.folder / 'sweep').chmod(0o755)
        (self.folder / 'history').symlink_to(HISTORY) if not (self.folder / 'history').exists() else None
        return self.run_program(REGRESSION, '--sweep=sweep', '--history=history', '--store=store', *flags)

    def test_the_gate_fails_on_errors_of_any_machine_and_on_memory_of_its_own(self):
        self.add_runs(1)
        before = self.files()
        for flags, status in [({}, 0), ({'error_factor': 1.5}, 1), ({'memory_factor': 1.5}, 1), ({'factor': 1.5}, 0),
                              ({'error_factor': 1.5, 'processor': 'Another'}, 1),
                              ({'memory_factor': 1.5, 'processor': 'Another'}, 0)]:
            done = self.regression(run=self.write_run(2, **flags))
            self.assertEqual(done.returncode, status, f'{flags} {done.stdout} {done.stderr}')
            self.assertEqual(self.files(), before)
        (self.folder / 'accepted').write_text(f'{commit_of(2)[:8]} memory * # wanted\n')
        run = self.write_run(2, memory_factor=1.5)
        self.assertEqual(self.regression('--acknowledged=accepted', run=run).returncode, 0)

    def test_the_gate_judges_times_when_asked(self):
        self.add_runs(14)
        self.add_runs(2, first=15, factor=1.2)
        run = self.write_run(17, factor=1.2)
        self.assertEqual(self.regression(run=run).returncode, 0)
        self.assertEqual(self.regression('--times', run=run).returncode, 1)

    def test_the_gate_says_what_it_could_not_do(self):
        self.add_runs(1)
        run = self.write_run(2)
        self.assertIn('unknown flag --time', self.regression('--time', run=run).stderr)
        self.assertIn('call it by bazel run', self.regression('--record', run=run).stderr)
        done = self.regression(run='none.pb')
        self.assertEqual(done.returncode, 2)
        self.assertIn('run.pb', done.stderr)
        (self.folder / 'store/tfb-history').write_text('tfb.History/9\n')
        self.assertEqual(self.regression(run=run).returncode, 2)


if __name__ == '__main__':
    unittest.main()
