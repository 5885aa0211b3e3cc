"""Sweeps and their result files, by the programs that lie in the package."""

import json
import os
import subprocess
import tempfile
from typing import Any, Dict, List, Optional, Sequence, Union

from tfb import _library


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

        Columns are those of the case's key, "quantity" (such as run_median_ns or definition_max_abs) and "value".
        """
        import pandas
        rows = []
        for record in self:
            key = dict(record['key'], options=','.join('%s=%s' % one for one in sorted(record['key']['options'].items())),
                       status=record['outcome']['status'], environment=record['environment'])
            for part in ('times', 'costs', 'errors'):
                for quantity, value in record.get(part, {}).items():
                    if isinstance(value, (int, float)) and not isinstance(value, bool):
                        rows.append(dict(key, quantity=quantity, value=float(value)))
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


def sweep(techniques: Sequence[str],
          lengths: Union[str, Sequence[int]] = '1k:16k',
          output: Optional[Union[str, 'os.PathLike[str]']] = None,
          **flags: Any) -> Results:
    """Measures errors and times of techniques over lengths, with dense attention beside them.

    Progress goes to standard error. An interrupted sweep leaves its file, which `flags` of resume=True goes on with.

    Args:
      techniques: names with options: ["dense", "longformer:window=256"].
      lengths: "1k:16k" for every power of two between them, "1024,4096", or numbers.
      output: the result file; by default a new one in a temporary folder.
      **flags: further flags of the program `sweep`, such as time_budget="2m", threads=1, causal=True, dtypes="f32,bf16".

    Raises:
      TypeError: a technique is no text.
      InvalidArgumentError: the program refused a flag, or failed.
    """
    for technique in techniques:
        if not isinstance(technique, str):
            raise TypeError('%r is no technique: sweep takes names with options' % (technique,))
    if output is None:
        output = os.path.join(tempfile.mkdtemp(prefix='tfb_'), 'results.pb')
    path = os.path.abspath(os.fspath(output))
    text = lengths if isinstance(lengths, str) else ','.join(str(length) for length in lengths)
    arguments = ['--techniques=' + ','.join(techniques), '--lengths=' + _in_numbers(text), '--output=' + path]
    for name, value in flags.items():
        arguments.append('--%s=%s' % (name, str(value).lower() if isinstance(value, bool) else value))
    ran = subprocess.run([_program('sweep')] + arguments, stdout=subprocess.DEVNULL)
    if ran.returncode != 0:
        raise _library.InvalidArgumentError('sweep ended with status %d; what it says stands on standard error' %
                                            ran.returncode)
    return Results([path])


def _in_numbers(lengths: str) -> str:
    """Returns "1024:16384" for "1k:16k"."""
    parts = []
    for part in lengths.replace(':', ' : ').replace(',', ' , ').split():
        parts.append(str(int(part[:-1]) * 1024) if part[-1] in 'kK' and part[:-1].isdigit() else part)
    return ''.join(parts)
