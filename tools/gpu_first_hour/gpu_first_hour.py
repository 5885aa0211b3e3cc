#!/usr/bin/env python3
"""Runs everything that asks a GPU, once, on a machine that may have neither Bazel nor a network.

Steps run under time limits, each with a log of its own in the folder of results: first those that may share the GPU, --jobs of them
at a time, then those that measure time or take much memory, one after the other. A step that fails, hangs or lacks a tool stops no
other. The last lines are a table of all steps; the exit code is 0 where all passed, 1 where one did not, 2 for wrong flags, and
128 + signal where the script is stopped.

Build and pack it on a machine with the repository and a CUDA toolkit, and carry it over:

  bazel build --config=portable --config=cuda --//:cuda_archs=sm_80,sm_90a //tools/gpu_first_hour
  tar -chzf first_hour.tar.gz -C bazel-bin/tools/gpu_first_hour gpu_first_hour gpu_first_hour.runfiles \\
    -C /usr/lib/x86_64-linux-gnu libbenchmark.so.1debian
  scp first_hour.tar.gz MACHINE:
  ssh MACHINE 'tar -xf first_hour.tar.gz && LD_LIBRARY_PATH=$PWD ./gpu_first_hour --output=first_hour'

The other machine needs an x86-64 processor with AVX2, Python 3.8, a C library as new as that of the first, the driver, and for some
steps cuBLAS, cuDNN, compute-sanitizer and ncu, each of which is a step that says so where it is missing. cuBLAS and cuDNN are often
in a Python environment alone, of PyTorch say: LD_LIBRARY_PATH may name its folders site-packages/nvidia/cu13/lib (or cublas/lib) and
site-packages/nvidia/cudnn/lib, too. On a machine with all of it, `bazel run //tools/gpu_first_hour` is enough. With one job it takes
about an hour on an H200, of which the time limits of all steps are several. With 15 jobs on 16 cores and an H100, conformance and the
tests took 85 seconds.

  --dry_run shows the commands, and runs what can run without a GPU: the probe, the lists of tests, and on the CPU the errors of the
  techniques that are measured.

What is measured, profiled and tested by name stands in gpu_first_hour.json in the folder of each family of techniques:

  smoke     techniques whose engines are tried with every head_dim
  sweeps    {"name": ..., "flags": [flags of the sweep]}
  decoding  {"name": ..., "query_heads": 8 or more, "flags": [...]}, likewise, of one query beside many keys of 8 heads
  profiles  {"kernel": regular expression, "flags": [flags of check]}, for ncu; --input may be the name of such a case
  tests     programs that skip no test, by their path in the repository

Sweeps time runs both kernel by kernel and as one CUDA graph. The test core/cuda/hopper_test holds wgmma's descriptors of matrices
against their truth table.
"""

import argparse
import array
import dataclasses
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time

GPU_ENVIRONMENT = {'TFB_REQUIRE_GPU': '1', 'TFB_KERNEL_DEVICE': 'cuda'}
MINUTE = 60
# Between being asked to end and being killed.
GRACE_SECONDS = 5
# Between two looks at what runs.
POLL_SECONDS = 0.02
# The most steps at a time, unless --jobs says more.
MOST_JOBS = 12
# The signals that have asked the script to end.
STOPS = []

DTYPES = 'f32,bf16,f16'
# One channel; below, at and above what kernels have tiles for; the largest.
HEAD_DIMS = '1,7,16,31,32,33,40,64,65,80,96,127,128,129,192,256'
# Programs that find no GPU, or no library, may exit with 0; these texts tell that they did what they are for.
CHECKED = r'(?m)^[0-9]+ cases: [1-9][0-9]* ok, 0 failed'
TESTED = r'\[  PASSED  \] [1-9]'
SKIPPED = r'\[  SKIPPED \]'
PROFILED = r'==PROF== Profiling'

# Tests of kernels that are no technique's own, by their path in the repository.
KERNEL_TESTS = [
    'core/cuda/device_work_test', 'core/cuda/for_each_test', 'core/cuda/hopper_test', 'core/cuda/sum_in_runs_test',
    'core/layers/layers_test', 'core/layers/list_rows_test', 'core/layers/copy_rows_test', 'core/flash/flash_test',
    'core/flash/flash_mma_test', 'core/flash/flash_decode_mma_test', 'core/flash/flash_parts_test',
    'core/flash/flash_backward_test', 'core/flash/gradient_sums_test', 'core/flash/token_rule_test',
    'core/flash/planned_layer_test', 'core/flash/key_value_cache_test', 'core/linear/linear_cuda_test',
    'core/linear/linear_backward_test', 'core/gather/gather_test', 'core/search/search_test',
    'harness/judge/evaluate_device_test', 'harness/measure/device_peaks_test'
]
TESTS_OF_TIMES = ['harness/measure/device_peaks_test']
LIBRARY_TESTS = ['core/cuda/blas_test']
# A case of conformance that allocates tens of GiB.
LARGE_CASE = '*.OffsetsBeyond31Bits/*'

PASSED, FAILED, TIMED_OUT, NOT_RUN = 'passed', 'failed', 'timed out', 'not run'


@dataclasses.dataclass
class Step:
    """A command with its time limit.

    It passes where it exits with 0, and its output has a match of each of `shows` and none of `hides`. `needs` names programs on
    PATH. `dry` is what runs of it without a GPU, whose output may be any; [] for nothing. Where it is `alone`, no other step runs
    beside it.
    """
    name: str
    command: list
    seconds: float
    environment: dict = dataclasses.field(default_factory=dict)
    needs: tuple = ()
    shows: tuple = ()
    hides: tuple = ()
    dry: list = dataclasses.field(default_factory=list)
    alone: bool = False


@dataclasses.dataclass
class Result:
    step: Step
    status: str
    seconds: float = 0
    reason: str = ''


def binaries_folder(given):
    """Returns the folder in which programs have their paths in the repository: --binaries, or the runfiles of this script."""
    if given:
        return pathlib.Path(given).resolve()
    script = pathlib.Path(sys.argv[0]).absolute()
    for candidate in (os.environ.get('RUNFILES_DIR'), f'{script}.runfiles', f'{script.parent}/gpu_first_hour.runfiles'):
        if candidate and (pathlib.Path(candidate) / 'transformer_family_bench').is_dir():
            return (pathlib.Path(candidate) / 'transformer_family_bench').resolve()
    return pathlib.Path(__file__).resolve().parent.parent.parent


def read_families(binaries):
    """Returns the contents of all gpu_first_hour.json, joined."""
    joined = {'smoke': [], 'sweeps': [], 'decoding': [], 'profiles': [], 'tests': []}
    for path in sorted(binaries.glob('*/gpu_first_hour.json')):
        for key, values in json.loads(path.read_text(encoding='utf-8')).items():
            if key not in joined:
                raise ValueError(f'{path}: unknown key {key}; allowed are {", ".join(joined)}')
            joined[key] += values
    return joined


def write_decoding_tensors(path, query_heads, tokens=8192, heads=8, channels=128):
    """Writes q of one token, and k and v of many, N(0, 1) with repetitions, as a safetensors file."""
    generator = random.Random(1)
    block = array.array('f', (generator.gauss(0, 1) for _ in range(65521))).tobytes()  # a prime: no two rows are alike
    header, data, begin = {}, [], 0
    for name, of_tensor, rows in (('q', query_heads, 1), ('k', heads, tokens), ('v', heads, tokens)):
        size = 4 * of_tensor * rows * channels
        header[name] = {'dtype': 'F32', 'shape': [1, of_tensor, rows, channels], 'data_offsets': [begin, begin + size]}
        data.append((block * (size // len(block) + 1))[:size])
        begin += size
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    path.write_bytes(struct.pack('<Q', len(text)) + text + b''.join(data))


def decoding_inputs(output, families):
    """Returns the tensors of each case of decoding, by its name: their file and number of query heads."""
    return {case['name']: (output / f'{case["name"].replace(" ", "_")}.safetensors', case.get('query_heads', 8))
            for case in families['decoding']}


def plan(binaries, output, families, shards=2):
    """Returns all steps, in the order of the table, with conformance in so many shards."""
    def program(path):
        return str(binaries / path)

    check, sweep, render = program('harness/check'), program('harness/sweep'), program('tools/render')
    conformance = program('harness/all_conformance')
    smoke = ','.join(families['smoke'])
    inputs = {name: path for name, (path, _) in decoding_inputs(output, families).items()}
    steps = [
        Step('nvidia-smi', ['nvidia-smi', '-q'], MINUTE, needs=('nvidia-smi',)),
        Step('probe', [program('core/cuda/device_probe_test')], 2 * MINUTE, GPU_ENVIRONMENT, shows=(TESTED,),
             dry=[program('core/cuda/device_probe_test')]),
    ]

    errors = [check, '--input=gaussian', '--heads=2', f'--dtypes={DTYPES}']
    steps += [
        Step('smoke of every head_dim', errors + ['--devices=cuda', f'--techniques={smoke}', f'--head_dims={HEAD_DIMS}',
                                                  '--lengths=1,100,333'], 10 * MINUTE, shows=(CHECKED,),
             dry=errors + ['--devices=cpu', f'--techniques={smoke}', '--head_dims=7', '--lengths=20']),
        Step('smoke of every technique', errors + ['--devices=cuda', '--lengths=100'], 10 * MINUTE, shows=(CHECKED,)),
        Step('smoke of every backward pass', errors + ['--devices=cuda', '--pass=backward', '--lengths=100'], 10 * MINUTE,
             shows=(CHECKED,)),
    ]

    smallest = [check, '--devices=cuda', f'--techniques={smoke}', '--input=gaussian', '--heads=1', '--head_dims=16,64',
                '--dtypes=f32,bf16', '--lengths=33']
    for tool in ('memcheck', 'racecheck', 'synccheck', 'initcheck'):
        steps.append(Step(f'sanitizer {tool}', ['compute-sanitizer', '--tool', tool, '--target-processes', 'all',
                                                '--error-exitcode', '9', *smallest], 8 * MINUTE, needs=('compute-sanitizer',),
                          shows=(CHECKED,)))

    # The least technique that there is, which shows the harness's own errors first.
    tiny = [program('harness/tiny_conformance'), '--technique=tiny', '--devices=cuda']
    steps.append(Step('test of the tiny technique', tiny, 5 * MINUTE, GPU_ENVIRONMENT, shows=(TESTED,),
                      dry=tiny + ['--gtest_list_tests']))
    # Tests of kernels skip what a simulator alone can tell; those of NVIDIA's libraries skip where there is none.
    for test in KERNEL_TESTS + LIBRARY_TESTS + families['tests']:
        command = [program(test)]
        steps.append(Step(f'test {test}', command, 5 * MINUTE, GPU_ENVIRONMENT, shows=(TESTED,),
                          hides=() if test in KERNEL_TESTS else (SKIPPED,), dry=command + ['--gtest_list_tests'],
                          alone=test in TESTS_OF_TIMES))

    # Sweeps measure the GPU's peaks themselves, which the reports show.
    for case in families['sweeps'] + families['decoding']:
        name = case['name']
        file = output / f'{name.replace(" ", "_")}.pb'
        flags = ['--input=gaussian', '--accuracy=false', *case['flags']]
        if case in families['decoding']:
            # Cases of a file's tensors have times and errors.
            flags = [f'--input={inputs[name]}', *case['flags']]
        steps += [
            Step(f'sweep {name}', [sweep, '--devices=cuda', '--time_budget=4m', f'--output={file}', *flags], 8 * MINUTE,
                 dry=[sweep, '--devices=cpu', '--dry_run', *flags], alone=True),
            Step(f'report {name}', [render, '--format=json', f'--output={file.with_suffix(".json")}', str(file)], MINUTE,
                 alone=True),
        ]

    for case in families['profiles']:
        kernel = case['kernel']
        file = output / f'ncu_{re.sub("[^A-Za-z0-9]+", "_", kernel)}'
        flags = [f'--input={inputs[flag[8:]]}' if flag.startswith('--input=') and flag[8:] in inputs else flag
                 for flag in case['flags']]
        profile = ['ncu', '--target-processes', 'all', '--kernel-name', f'regex:{kernel}', '--launch-count', '1', '--set', 'full',
                   '--export', str(file), '--force-overwrite']
        steps.append(Step(f'ncu {kernel}', profile + [check, '--devices=cuda', '--rows=1', *flags], 5 * MINUTE, needs=('ncu',),
                          shows=(PROFILED,), alone=True))

    every = [conformance, '--devices=cuda']
    for shard in range(shards):
        steps.append(Step(f'conformance {shard + 1} of {shards}', every + [f'--gtest_filter=-{LARGE_CASE}'], 20 * MINUTE,
                          {**GPU_ENVIRONMENT, 'GTEST_TOTAL_SHARDS': str(shards), 'GTEST_SHARD_INDEX': str(shard)}, shows=(TESTED,),
                          dry=every + ['--gtest_list_tests'] if shard == 0 else []))
    steps.append(Step('conformance, the case of tens of GiB', every + [f'--gtest_filter={LARGE_CASE}'], 20 * MINUTE,
                      GPU_ENVIRONMENT, shows=(TESTED,), alone=True))
    return steps


class Stopped(Exception):
    """A signal asked the script to end."""


def signal_group(process, kind):
    """Signals the process and all that it started."""
    try:
        os.killpg(process.pid, kind)
    except ProcessLookupError:
        pass


class Run:
    """A command that runs in a folder, with its output in the file `log`."""

    def __init__(self, command, environment, seconds, folder, log):
        self.seconds = seconds
        self.killed_at = None  # where it was asked to end: when it is killed
        self.process, self.refusal = None, ''
        with open(log, 'w', encoding='utf-8') as file:
            file.write(f'{shown(command, environment)}\n')
            file.flush()
            self.begin = time.monotonic()
            try:
                self.process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                                                stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            except OSError as error:
                self.refusal = f'{error.strerror}: {command[0]}'

    def poll(self):
        """Returns (status, reason) where the command has ended, or None. Ends it, and what it started, after its time."""
        if self.process is None:
            return NOT_RUN, self.refusal
        code, now = self.process.poll(), time.monotonic()
        if self.killed_at is None:
            if code is not None:
                return (PASSED, '') if code == 0 else (FAILED, f'exit code {code}' if code > 0 else f'signal {-code}')
            if now - self.begin >= self.seconds:
                self.ask_to_end()
            return None
        if code is None and now < self.killed_at:
            return None
        self.kill()
        return TIMED_OUT, f'after {self.seconds:g} s'

    def ask_to_end(self):
        self.killed_at = time.monotonic() + GRACE_SECONDS
        signal_group(self.process, signal.SIGTERM)

    def kill(self):
        """Kills what of it did not listen."""
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()


def end(runs):
    """Ends commands, and all that they started, which may not listen."""
    for run in runs:
        run.ask_to_end()
    while any(run.poll() is None for run in runs):
        time.sleep(POLL_SECONDS)


def shown(command, environment):
    return ' '.join([f'{name}={value}' for name, value in environment.items()] + [shlex.join(command)])


def judge(step, output):
    """Returns (status, reason) of a command that exited with 0."""
    for pattern in step.shows:
        if not re.search(pattern, output):
            return FAILED, f'its output has no {pattern}'
    for pattern in step.hides:
        if re.search(pattern, output):
            return FAILED, f'its output has {pattern}'
    return PASSED, ''


class Running:
    """A step that runs."""

    def __init__(self, step, number, arguments, folders):
        binaries, output = folders
        self.step = step
        self.dry_run = arguments.dry_run
        self.log = output / f'{number:02d}_{re.sub("[^A-Za-z0-9]+", "_", step.name)}.log'
        self.run, self.refusal = None, ''
        missing = [tool for tool in step.needs if shutil.which(tool) is None]
        command = step.dry if arguments.dry_run else step.command
        if not command:
            self.refusal = 'needs a GPU'
        elif missing:
            self.refusal = f'{", ".join(missing)} is not on PATH'
        else:
            environment = {'RUNFILES_DIR': str(binaries.parent), **({} if arguments.dry_run else step.environment)}
            self.run = Run(command, environment, step.seconds * arguments.patience, binaries, self.log)

    def result(self):
        """Returns the result, or None where the step runs yet."""
        if self.run is None:
            return Result(self.step, NOT_RUN, reason=self.refusal)
        ended = self.run.poll()
        if ended is None:
            return None
        seconds = time.monotonic() - self.run.begin
        status, reason = ended
        if status == PASSED and not self.dry_run:
            status, reason = judge(self.step, self.log.read_text(encoding='utf-8', errors='replace').split('\n', 1)[1])
        return Result(self.step, status, seconds, reason)


def table(results):
    width = max([4] + [len(result.step.name) for result in results])
    lines = [f'{"step":<{width}}  {"result":<9}  {"seconds":>8}']
    for result in results:
        lines.append(f'{result.step.name:<{width}}  {result.status:<9}  {result.seconds:8.1f}  {result.reason}'.rstrip())
    return '\n'.join(lines) + '\n'


def run_together(steps, jobs, arguments, folders, results):
    """Runs numbered steps, so many at a time, and puts their results by number."""
    waiting, running = list(steps), {}
    try:
        while waiting or running:
            if STOPS:
                raise Stopped(STOPS[0])
            while waiting and len(running) < jobs:
                number, step = waiting.pop(0)
                print(f'[{number}] {step.name}: {shown(step.command, step.environment)}', flush=True)
                running[number] = Running(step, number, arguments, folders)
            ended = {number: one.result() for number, one in running.items()}
            for number, result in ended.items():
                if result is None:
                    continue
                results[number] = result
                del running[number]
                print(f'[{number}] {result.step.name}: {result.status} {result.reason}'.rstrip(), flush=True)
            if running and not any(ended.values()):
                time.sleep(POLL_SECONDS)
    finally:
        end([one.run for one in running.values() if one.run is not None])


def run_all(steps, arguments, folders):
    """Runs the steps, and returns their results in the steps' order; those that a signal left out are `not run`."""
    numbered = list(enumerate(steps, 1))
    found = {}
    try:
        run_together([entry for entry in numbered if not entry[1].alone], arguments.jobs, arguments, folders, found)
        run_together([entry for entry in numbered if entry[1].alone], 1, arguments, folders, found)
    finally:
        results = [found.get(number, Result(step, NOT_RUN, reason='stopped')) for number, step in numbered]
        text = table(results)
        _, output = folders
        (output / 'summary.txt').write_text(text, encoding='utf-8')
        print(f'\n{text}\nlogs and results are in {output}', flush=True)
    return results


def all_passed(results, dry_run):
    """Without a GPU, what needs one counts as nothing."""
    return all(result.status == PASSED or dry_run and not result.step.dry for result in results)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--output', default='gpu_first_hour_results', help='the folder of logs and results; it must not exist')
    parser.add_argument('--binaries', default='', help='a folder with the programs, such as bazel-bin; by default the runfiles')
    parser.add_argument('--only', default='', help='runs the steps whose names match this regular expression')
    parser.add_argument('--jobs', type=int, default=min(MOST_JOBS, max(1, (os.cpu_count() or 1) // 2)),
                        help='steps at a time that measure no time; conformance has as many shards, and at least 2')
    parser.add_argument('--patience', type=float, default=1, help='a factor of all time limits')
    parser.add_argument('--dry_run', action='store_true', help='shows the commands, and runs what can run without a GPU')
    return parser.parse_args(argv)


def stop(number, _):
    STOPS.append(number)


def main(argv):
    arguments = parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    os.chdir(os.environ.get('BUILD_WORKING_DIRECTORY', '.'))
    if arguments.jobs < 1:
        print(f'gpu_first_hour: --jobs={arguments.jobs}: allowed are 1 and more', file=sys.stderr)
        return 2
    output = pathlib.Path(arguments.output).resolve()
    try:
        output.mkdir(parents=True)
    except OSError as error:
        print(f'gpu_first_hour: --output={arguments.output}: {error.strerror}', file=sys.stderr)
        return 2
    binaries = binaries_folder(arguments.binaries)
    try:
        families = read_families(binaries)
        steps = [step for step in plan(binaries, output, families, max(2, arguments.jobs)) if re.search(arguments.only, step.name)]
    except (ValueError, re.error) as error:
        print(f'gpu_first_hour: {error}', file=sys.stderr)
        return 2
    if not steps:
        print(f'gpu_first_hour: --only={arguments.only} leaves no step', file=sys.stderr)
        return 2
    for path, query_heads in decoding_inputs(output, families).values():
        write_decoding_tensors(path, query_heads)
    try:
        results = run_all(steps, arguments, (binaries, output))
    except Stopped as stopped:
        return 128 + stopped.args[0]
    return 0 if all_passed(results, arguments.dry_run) else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
