#!/usr/bin/env python3
"""gpu_first_hour.py with programs and tools that do as they are told, which need no GPU."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
FOLDER = pathlib.Path.cwd() / 'tools/gpu_first_hour'
SPEC = importlib.util.spec_from_file_location('gpu_first_hour', FOLDER / 'gpu_first_hour.py')
script = importlib.util.module_from_spec(SPEC)
sys.modules['gpu_first_hour'] = script
SPEC.loader.exec_module(script)

TOOLS = ('compute-sanitizer', 'ncu', 'nvidia-smi')
WORK = """288 cases: 200 ok, 0 failed, 88 unsupported
[  PASSED  ] 7 tests.
==PROF== Profiling "Near" - 0: 0%....50%....100% - 8 passes"""
FAMILY = {
    'smoke': ['near'],
    'sweeps': [{'name': 'near and far', 'flags': ['--techniques=near,far']}],
    'decoding': [{'name': 'one query', 'flags': ['--techniques=near']},
                 {'name': 'groups', 'query_heads': 32, 'flags': ['--techniques=far']}],
    'profiles': [{'kernel': 'Near<.*>', 'flags': ['--techniques=near', '--input=groups']}],
    'tests': ['family/near/near_test'],
}


class GpuFirstHour(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get('TEST_TMPDIR')))
        self.binaries = self.folder / 'binaries'
        self.output = self.folder / 'results'
        self.calls = self.folder / 'calls'
        self.tools = self.folder / 'bin'
        for tool in TOOLS:
            self.make(self.tools / tool)
        self.write_family(FAMILY)
        for step in script.plan(self.binaries, self.output, FAMILY):
            for command in (step.command, step.dry):
                for word in command[:1] + [word for word in command if word.startswith(str(self.binaries))]:
                    if '/' in word:
                        self.make(pathlib.Path(word))

    def make(self, path, lines=None):
        """Makes a program that notes its call and does what `lines` say, or prints what all programs print that did their work."""
        if lines is None:
            lines = f"cat << 'END'\n{WORK}\nEND"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "${{TFB_KERNEL_DEVICE:-}} $PWD $0 $*" >> {self.calls}\n{lines}\n', encoding='utf-8')
        path.chmod(0o755)

    def write_family(self, contents):
        (self.binaries / 'family').mkdir(parents=True, exist_ok=True)
        (self.binaries / 'family/gpu_first_hour.json').write_text(json.dumps(contents), encoding='utf-8')

    def command(self, *flags):
        """The script's call, with one job unless the flags say more."""
        return [sys.executable, str(FOLDER / 'gpu_first_hour.py'), f'--binaries={self.binaries}', f'--output={self.output}', '--jobs=1',
                *flags]

    def environment(self):
        return {'PATH': f'{self.tools}:/usr/bin:/bin', 'HOME': str(self.folder)}

    def run_script(self, *flags):
        done = subprocess.run(self.command(*flags), capture_output=True, text=True, env=self.environment(), cwd=self.folder,
                              check=False)
        return done.returncode, done.stdout, done.stderr

    def rows(self):
        """Returns the table as {step: (result, reason)}, in its order."""
        found = {}
        for line in (self.output / 'summary.txt').read_text(encoding='utf-8').splitlines()[1:]:
            name, status, reason = re.fullmatch(r'(.*?) +(passed|failed|timed out|not run) +[0-9.]+ *(.*)', line).groups()
            found[name] = (status, reason)
        return found

    def called(self):
        return self.calls.read_text(encoding='utf-8').splitlines() if self.calls.exists() else []

    def test_where_all_steps_pass_the_exit_code_is_0_and_each_has_a_row_and_a_log(self):
        code, out, err = self.run_script()
        self.assertEqual((code, err), (0, ''), out)
        steps = script.plan(self.binaries, self.output, FAMILY)
        self.assertEqual(self.rows(), {step.name: ('passed', '') for step in steps})
        self.assertEqual(len(list(self.output.glob('*.log'))), len(steps))
        self.assertEqual(len(self.called()), len(steps))
        self.assertIn((self.output / 'summary.txt').read_text(encoding='utf-8'), out)

    def test_conformance_is_three_processes_and_the_large_case_is_alone_and_last(self):
        self.run_script('--only=conformance')
        calls = self.called()
        self.assertEqual(len(calls), 3)
        for call in calls:
            self.assertTrue(call.startswith(f'cuda {self.binaries} {self.binaries}/harness/all_conformance --devices=cuda'), call)
        self.assertEqual([re.search('--gtest_filter=(-?)', call).group(1) for call in calls], ['-', '-', ''])
        shards = [step.environment.get('GTEST_SHARD_INDEX') for step in script.plan(self.binaries, self.output, FAMILY)[-3:]]
        self.assertEqual(shards, ['0', '1', None])

    def test_conformance_has_as_many_shards_as_there_are_jobs(self):
        code, out, _ = self.run_script('--only=conformance', '--jobs=5')
        self.assertEqual(code, 0, out)
        self.assertEqual(list(self.rows()), [f'conformance {n} of 5' for n in range(1, 6)] + ['conformance, the case of tens of GiB'])
        self.assertEqual(len(self.called()), 6)
        self.assertIn('tens_of_GiB', sorted(self.output.glob('*.log'))[-1].name)

    def test_what_measures_time_or_fills_the_memory_is_alone(self):
        alone = {step.name for step in script.plan(self.binaries, self.output, FAMILY) if step.alone}
        self.assertEqual(alone, {'test harness/measure/device_peaks_test', 'sweep near and far', 'report near and far',
                                 'sweep groups', 'report groups', 'sweep one query', 'report one query', 'ncu Near<.*>',
                                 'conformance, the case of tens of GiB'})

    def run_steps(self, steps, jobs):
        self.output.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            return script.run_all(steps, script.parse([f'--jobs={jobs}']), (self.folder, self.output))

    def test_so_many_jobs_run_side_by_side_and_others_alone_and_the_table_keeps_its_order(self):
        running, met = self.folder / 'running', self.folder / 'met'
        running.mkdir()
        met.mkdir()
        # Three wait for each other, and one that is alone wants nobody else to run.
        self.make(self.folder / 'together', f'touch {running}/$1 {met}/$1\nuntil [[ $(ls {met} | wc -l) == 3 ]]; do sleep 0.01; done\n'
                  f'rm {running}/$1')
        self.make(self.folder / 'alone', f'[[ -z "$(ls {running})" ]] || exit 1\ntouch {running}/$1; sleep 0.3; rm {running}/$1')
        steps = []
        for n in range(6):
            name = 'together' if n % 2 == 0 else 'alone'
            steps.append(script.Step(f'{n}', [str(self.folder / name), f'{n}'], 60, alone=name == 'alone'))
        results = self.run_steps(steps, 3)
        self.assertEqual([(result.step.name, result.status) for result in results], [(f'{n}', 'passed') for n in range(6)])
        self.assertEqual(list(self.rows()), [f'{n}' for n in range(6)])
        self.assertEqual([call.split()[-1] for call in self.called()[3:]], ['1', '3', '5'])
        logs = sorted(path.name for path in self.output.glob('*.log'))
        self.assertEqual(logs, [f'0{n + 1}_{n}.log' for n in range(6)])

    def test_no_more_than_so_many_jobs_run(self):
        running = self.folder / 'running'
        running.mkdir()
        self.make(self.folder / 'count', f'touch {running}/$$; n=$(ls {running} | wc -l); sleep 0.1; rm {running}/$$; [[ $n -le 2 ]]')
        results = self.run_steps([script.Step(f'{n}', [str(self.folder / 'count')], 60) for n in range(8)], 2)
        self.assertEqual({result.status for result in results}, {'passed'})

    def test_a_step_that_fails_stops_no_other(self):
        self.make(self.binaries / 'harness/check', 'echo it is wrong; exit 3')
        self.make(self.binaries / 'core/cuda/blas_test', 'kill -SEGV $$')
        (self.binaries / 'core/flash/flash_test').unlink()
        code, out, _ = self.run_script()
        self.assertEqual(code, 1, out)
        rows = self.rows()
        self.assertEqual(rows['smoke of every head_dim'], ('failed', 'exit code 3'))
        self.assertEqual(rows['test core/cuda/blas_test'], ('failed', f'signal {signal.SIGSEGV.value}'))
        self.assertEqual(rows['test core/flash/flash_test'],
                         ('not run', f'No such file or directory: {self.binaries}/core/flash/flash_test'))
        self.assertEqual(rows['conformance, the case of tens of GiB'], ('passed', ''))
        log = next(self.output.glob('*smoke_of_every_head_dim.log')).read_text(encoding='utf-8')
        self.assertIn('harness/check', log.splitlines()[0])
        self.assertEqual(log.splitlines()[1], 'it is wrong')

    def test_a_step_that_did_nothing_does_not_pass_though_its_program_says_so(self):
        for words, program, step, reason in (
            ('288 cases: 0 ok, 0 failed, 288 unsupported', 'harness/check', 'smoke of every technique', 'its output has no '),
            ('[  PASSED  ] 0 tests.', 'harness/all_conformance', 'conformance, the case of tens of GiB', 'its output has no '),
            ('[  SKIPPED ] 1 test\n[  PASSED  ] 2 tests.', 'core/cuda/blas_test', 'test core/cuda/blas_test', 'its output has '),
            ('[  SKIPPED ] 1 test\n[  PASSED  ] 2 tests.', 'family/near/near_test', 'test family/near/near_test',
             'its output has ')):
            self.make(self.binaries / program, f"cat << 'END'\n{words}\nEND")
            self.output = self.folder / step.replace('/', '_')
            self.assertEqual(self.run_script(f'--only=^{step}$')[0], 1, step)
            status, why = self.rows()[step]
            self.assertEqual(status, 'failed')
            self.assertTrue(why.startswith(reason), why)
        # Tests of kernels skip what a simulator alone can tell.
        self.make(self.binaries / 'core/flash/flash_test', "cat << 'END'\n[  SKIPPED ] 1 test\n[  PASSED  ] 2 tests.\nEND")
        self.output = self.folder / 'kernels'
        self.assertEqual(self.run_script('--only=flash/flash_test')[0], 0)
        # A profiler that met no kernel of that name says so in its own way.
        self.make(self.tools / 'ncu', 'echo "==WARNING== No kernels were profiled."')
        self.output = self.folder / 'profile'
        self.assertEqual(self.run_script('--only=ncu')[0], 1)

    def test_a_missing_tool_is_named_and_its_steps_are_not_run(self):
        (self.tools / 'ncu').unlink()
        code, _, _ = self.run_script()
        self.assertEqual(code, 1)
        not_run = {name: row for name, row in self.rows().items() if row[0] != 'passed'}
        self.assertEqual(not_run, {'ncu Near<.*>': ('not run', 'ncu is not on PATH')})

    def test_a_step_that_hangs_is_ended_with_all_that_it_started_and_the_next_one_runs(self):
        pid = self.folder / 'pid'
        hang = self.folder / 'hang'
        self.make(hang, f'trap "" TERM\nsleep 1000 & echo $! > {pid}\nwait\nwait')
        script.GRACE_SECONDS = 0.5
        for jobs in (1, 2):
            pid.unlink(missing_ok=True)
            self.output = self.folder / f'results{jobs}'
            steps = [script.Step('hangs', [str(hang)], 2), script.Step('passes', ['sleep', '1'], 600),
                     script.Step('ends', ['sleep', '0'], 600)]
            results = self.run_steps(steps, jobs)
            self.assertEqual([(result.status, result.reason) for result in results],
                             [('timed out', 'after 2 s'), ('passed', ''), ('passed', '')])
            self.assertFalse(script.all_passed(results, dry_run=False))
            # A step's time is its own, not that of the one that is killed beside it.
            self.assertLess(results[1].seconds, 2)
            self.wait_for_end(pid)

    def wait_for_end(self, pid):
        """Waits until the process has ended whose id a file holds. Its parent is gone, so that init reaps it when it likes."""
        state = pathlib.Path(f'/proc/{pid.read_text(encoding="utf-8").strip()}/stat')
        while state.exists() and state.read_text(encoding='utf-8').split()[2] != 'Z':
            time.sleep(0.01)

    def test_a_dry_run_shows_every_command_and_runs_what_needs_no_gpu(self):
        for tool in TOOLS:
            (self.tools / tool).unlink()
        code, out, _ = self.run_script('--dry_run')
        self.assertEqual(code, 0, out)
        steps = script.plan(self.binaries, self.output, FAMILY)
        for step in steps:
            self.assertIn(script.shown(step.command, step.environment), out)
        ran = [step for step in steps if step.dry and not step.alone] + [step for step in steps if step.dry and step.alone]
        self.assertEqual([call.strip() for call in self.called()], [f'{self.binaries} {" ".join(step.dry)}' for step in ran])
        for step in steps:
            self.assertEqual(self.rows()[step.name], ('passed', '') if step.dry else ('not run', 'needs a GPU'))
        for call in self.called():
            self.assertTrue(re.search('probe|--devices=cpu|--gtest_list_tests', call), call)

    def test_a_dry_run_fails_where_what_needs_no_gpu_does(self):
        self.make(self.binaries / 'harness/check', 'exit 1')
        self.assertEqual(self.run_script('--dry_run')[0], 1)

    def test_a_signal_ends_the_step_and_the_table_is_written(self):
        self.make(self.binaries / 'core/cuda/device_probe_test', 'sleep 1000')
        process = subprocess.Popen(self.command(), env=self.environment(), stdout=subprocess.DEVNULL)
        while not any('device_probe_test' in call for call in self.called()):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(), 128 + signal.SIGTERM)
        rows = list(self.rows().items())
        self.assertEqual(rows[:2], [('nvidia-smi', ('passed', '')), ('probe', ('not run', 'stopped'))])
        self.assertEqual({status for _, (status, _) in rows[1:]}, {'not run'})

    def test_a_signal_ends_all_that_run_side_by_side(self):
        pids = [self.folder / f'pid{n}' for n in range(3)]
        for pid, program in zip(pids, ('core/cuda/device_probe_test', 'harness/check', 'harness/sweep')):
            self.make(self.binaries / program, f'trap "" TERM\nsleep 1000 & echo $! > {pid}.new; mv {pid}.new {pid}\nwait\nwait')
        process = subprocess.Popen(self.command('--jobs=3', '--only=probe|head_dim|nvidia|sweep'), env=self.environment(),
                                   stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        while ' nvidia-smi: passed' not in process.stdout.readline():
            self.assertIsNone(process.poll())
        while not (pids[0].exists() and pids[1].exists()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(), 128 + signal.SIGINT)
        for pid in pids[:2]:
            self.wait_for_end(pid)
        self.assertFalse(pids[2].exists())
        rows = self.rows()
        self.assertEqual(rows.pop('nvidia-smi'), ('passed', ''))
        self.assertEqual(set(rows.values()), {('not run', 'stopped')})

    def test_wrong_calls_are_refused_with_the_reason(self):
        self.assertEqual(self.run_script('--only=nothing')[::2], (2, 'gpu_first_hour: --only=nothing leaves no step\n'))
        self.assertEqual(self.run_script()[::2], (2, f'gpu_first_hour: --output={self.output}: File exists\n'))
        self.output = self.folder / 'more'
        self.assertEqual(self.run_script('--jobs=0')[::2], (2, 'gpu_first_hour: --jobs=0: allowed are 1 and more\n'))
        self.write_family({'sweep': []})
        code, _, err = self.run_script()
        self.assertEqual(code, 2)
        self.assertIn('gpu_first_hour.json: unknown key sweep; allowed are smoke, ', err)

    def test_the_decoding_tensors_are_a_safetensors_file_of_one_query_and_many_keys(self):
        path = self.folder / 'd.safetensors'
        script.write_decoding_tensors(path, query_heads=6, tokens=300, heads=2, channels=16)
        data = path.read_bytes()
        (size,) = struct.unpack('<Q', data[:8])
        header = json.loads(data[8:8 + size])
        self.assertEqual((8 + size) % 8, 0)
        self.assertEqual([header[name]['shape'] for name in 'qkv'], [[1, 6, 1, 16], [1, 2, 300, 16], [1, 2, 300, 16]])
        self.assertEqual([header[name]['data_offsets'] for name in 'qkv'], [[0, 384], [384, 38784], [38784, 77184]])
        self.assertEqual(len(data), 8 + size + 77184)

    def test_each_case_of_decoding_and_its_profile_have_tensors_of_its_query_heads(self):
        self.assertEqual(script.decoding_inputs(self.output, FAMILY), {
            'one query': (self.output / 'one_query.safetensors', 8), 'groups': (self.output / 'groups.safetensors', 32)})
        steps = {step.name: step.command for step in script.plan(self.binaries, self.output, FAMILY)}
        for step, path in (('sweep one query', 'one_query'), ('sweep groups', 'groups'), ('ncu Near<.*>', 'groups')):
            self.assertIn(f'--input={self.output / path}.safetensors', steps[step])

    def test_the_build_file_carries_every_program_that_the_steps_name(self):
        family = json.loads((pathlib.Path.cwd() / 'attention/gpu_first_hour.json').read_text(encoding='utf-8'))
        carried = set(re.findall('"//([^"]+)"', (FOLDER / 'BUILD').read_text(encoding='utf-8').split('\nsh_test(')[0]))
        steps = script.plan(pathlib.Path('/b'), self.output, {**family, 'tests': []})
        named = {word[len('/b/'):] for step in steps for word in step.command if word.startswith('/b/')}
        self.assertEqual({path.replace(':', '/') for path in carried if not path.startswith('attention')}, named)


if __name__ == '__main__':
    unittest.main()
