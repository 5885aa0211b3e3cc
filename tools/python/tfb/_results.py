"""Sweeps and their result files, by the programs that lie in the package."""

import fcntl
import json
import os
import pty
import re
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import tty
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from tfb import _library, contestant


# Of the program `sweep`: all is measured, and the failed cases' records say why.
_SOME_CASE_FAILED = 1


def _program(name: str) -> str:
    folder = os.environ.get('TFB_PROGRAMS') or os.path.join(os.path.dirname(os.path.abspath(__file__)), 'bin')
    return os.path.join(folder, name)


def _text_of(program: str, *arguments: str) -> str:
    """Returns what the program writes. Raises InvalidArgumentError with its message where it fails."""
    ran = subprocess.run([_program(program)] + list(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if ran.returncode != 0:
        raise _library.InvalidArgumentError(ran.stderr.decode(errors='replace').strip())
    return ran.stdout.decode()


class Results(List[Dict[str, Any]]):
    """The records of result files, one a case, as `render --format=json` writes them.

    A record has "key" (technique, options, device, sizes, input), "technique", "outcome", "times" in nanoseconds, "costs",
    "errors" and "samples".

    Attributes:
      paths: the files.
      environments: the machines and builds of the cases, by name.
    """

    def __init__(self, paths: Sequence[str]):
        read = json.loads(_text_of('render', '--format=json', *paths))
        super().__init__(read['cases'])
        self.paths = list(paths)
        self.environments = read['environments']

    def frame(self) -> Any:
        """Returns a pandas DataFrame in long format: a row for each measurement.

        Columns are those of the case's key, "quantity" (such as run_median_ns or definition_max_abs), "value", "sample": the
        place of a raw sample (of run_ns, cold_run_ns, setup_ns, ...) among those of its quantity, -1 for what is no sample; and
        "visit" for a sample of run_ns: when the sweep began the visit that took it, in Unix nanoseconds, which cases that were
        measured side by side have in common; 0 for others, and where the file does not say.
        """
        import pandas
        rows = []
        for record in self:
            key = dict(record['key'], options=','.join('%s=%s' % one for one in sorted(record['key']['options'].items())),
                       status=record['outcome']['status'], environment=record['environment'])
            for part in ('times', 'costs', 'errors'):
                for quantity, value in record.get(part, {}).items():
                    if isinstance(value, (int, float)) and not isinstance(value, bool):
                        rows.append(dict(key, quantity=quantity, value=float(value), sample=-1, visit=0))
            samples = record.get('samples', {})
            visits = [visit['start_unix_ns'] for visit in samples.get('visits', []) for _ in range(visit['run_samples'])]
            for quantity, values in samples.items():
                for sample, value in enumerate(values):
                    if isinstance(value, (int, float)):  # segments of streams, and visits, are objects
                        visit = visits[sample] if quantity == 'run_ns' and sample < len(visits) else 0
                        rows.append(dict(key, quantity=quantity, value=float(value), sample=sample, visit=visit))
        return pandas.DataFrame(rows)

    def html(self, path: str) -> None:
        """Writes one page with tables and plots, which needs nothing else."""
        _text_of('render', '--format=html', '--output=' + os.path.abspath(path), *self.paths)

    def table(self) -> str:
        """Returns the tables as text."""
        return _text_of('render', '--format=terminal', '--colour=never', *self.paths)


def read(*paths: Union[str, 'os.PathLike[str]']) -> Results:
    """Returns the records of result files.

    Raises:
      InvalidArgumentError: a file cannot be read, or is damaged.
    """
    if not paths:
        raise _library.InvalidArgumentError('there is no file to read')
    return Results([os.path.abspath(os.fspath(path)) for path in paths])


class _StandardError:
    """Standard error for a program: this one's, whose end is remembered. A terminal stays one, on which progress is redrawn."""
    kRemembered = 4096  # bytes
    kLines = 8

    def __init__(self) -> None:
        if os.isatty(2):
            self._read, self.descriptor = pty.openpty()
            tty.setraw(self.descriptor)  # the terminal behind it turns line feeds into its own
            size = fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)
        else:
            self._read, self.descriptor = os.pipe()
        self._end = b''
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while True:
            try:
                read = os.read(self._read, 4096)
            except OSError:  # a terminal's end
                read = b''
            if not read:
                break
            self._end = (self._end + read)[-self.kRemembered:]
            try:
                os.write(2, read)
            except OSError:  # nobody reads it
                pass
        os.close(self._read)

    def started(self) -> None:
        """The program has a descriptor of its own."""
        os.close(self.descriptor)

    def last_lines(self) -> str:
        """Returns the last lines, without colours, of a program that has ended."""
        self._thread.join(5)  # a process that it left may hold the other end
        text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', self._end.decode(errors='replace'))
        lines = [line.strip() for line in re.split(r'[\r\n]+', text)]
        return '\n'.join([line for line in lines if line][-self.kLines:])


def sweep(techniques: Union[str, Sequence[Union[str, Callable[..., Any]]]],
          lengths: Union[str, Sequence[int]] = '1k:16k',
          output: Optional[Union[str, 'os.PathLike[str]']] = None,
          **flags: Any) -> Results:
    """Measures errors and times of techniques over lengths, with dense attention beside them.

    A function or class of the caller's is measured beside the techniques, on the same tensors and in turns with them, as
    NAME@python. What it computes it says by the decorator `tfb.definition`; without one it approximates dense attention. It runs
    in this process, on this thread; the option contestants="FILE.py:NAME,..." runs functions of files in processes of their own.

    Progress goes to standard error. An interrupted sweep leaves its file, which `flags` of resume=True goes on with.

    Args:
      techniques: names with options, and functions: ["dense", "longformer:window=256", mine]. A text is one of them.
      lengths: "1k:16k" for every power of two between them, "1024,4096", or numbers.
      output: the result file; by default a new one in a temporary folder.
      **flags: further flags of the program `sweep`, such as time_budget="2m", threads=1, causal=True, dtypes="f32,bf16", and
        pass_="forward,training" for --pass. `python`, the interpreter of contestants, is this one.

    Raises:
      TypeError: a technique is neither a text nor a function.
      ValueError: two functions have the same name.
      InvalidArgumentError: there are no techniques or lengths, the program refused a flag, or no case could run; the last lines
        of the program's standard error are in the message. A case that failed has a record with the reason.
    """
    techniques = [techniques] if isinstance(techniques, str) else list(techniques)
    text = lengths if isinstance(lengths, str) else ','.join(str(length) for length in lengths)
    for what, are_there in (('techniques', techniques), ('lengths', text)):
        if not are_there:
            raise _library.InvalidArgumentError('there are no %s to sweep over' % what)
    functions: Dict[str, Any] = {}
    for technique in techniques:
        if isinstance(technique, str):
            continue
        name = getattr(technique, '__name__', '')
        if not callable(technique) or not name.isidentifier():
            raise TypeError('%r is no technique: sweep takes names with options, and functions' % (technique,))
        if name in functions:
            raise ValueError('two functions are called %s' % name)
        functions[name] = technique
    if output is None:
        output = os.path.join(tempfile.mkdtemp(prefix='tfb_'), 'results.pb')
    path = os.path.abspath(os.fspath(output))
    named = [one if isinstance(one, str) else one.__name__ + '@python' for one in techniques]
    arguments = ['--techniques=' + ','.join(named), '--lengths=' + _in_numbers(text), '--output=' + path]
    flags.setdefault('python', sys.executable)
    errors = _StandardError()
    with tempfile.TemporaryDirectory(prefix='tfb_') as folder:
        status = _run(arguments, functions, flags, os.path.join(folder, 'socket'), errors)
    said = errors.last_lines()
    if status not in (0, _SOME_CASE_FAILED):
        raise _library.InvalidArgumentError('sweep ended with status %d: %s' % (status, said))
    return Results([path])


def _run(arguments: List[str], functions: Dict[str, Any], flags: Dict[str, Any], place: str, errors: _StandardError) -> int:
    """Runs the program `sweep`, and serves the functions to it meanwhile. Returns its exit status."""

    def start() -> 'subprocess.Popen[bytes]':
        try:
            return subprocess.Popen(_command(arguments, flags), stdout=subprocess.DEVNULL, stderr=errors.descriptor)
        finally:
            errors.started()

    if not functions:
        with start() as program:
            try:
                return program.wait()
            except BaseException:
                program.terminate()
                raise
    flags['contestants'] = ','.join(filter(None, ['socket:' + place, flags.get('contestants', '')]))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        listening.settimeout(0.1)
        with start() as program:
            try:
                while program.poll() is None:
                    try:
                        connection, _ = listening.accept()
                    except socket.timeout:
                        continue
                    with connection:
                        connection.setblocking(True)
                        contestant.Server(functions).serve(connection, greet=True)
            except BaseException:
                program.terminate()
                raise
            return program.returncode


def _command(arguments: List[str], flags: Dict[str, Any]) -> List[str]:
    words = [_program('sweep')] + arguments
    for name, value in flags.items():
        # A name that is a word of Python, as pass is, has a "_" behind it.
        words.append('--%s=%s' % (name.rstrip('_'), str(value).lower() if isinstance(value, bool) else value))
    return words


def _in_numbers(lengths: str) -> str:
    """Returns "1024:16384" for "1k:16k"."""
    parts = []
    for part in lengths.replace(':', ' : ').replace(',', ' , ').split():
        parts.append(str(int(part[:-1]) * 1024) if part[-1] in 'kK' and part[:-1].isdigit() else part)
    return ''.join(parts)
