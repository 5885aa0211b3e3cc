"""For tests of a library that may be built with a sanitizer, whose runtime has to be loaded before anything else."""

import os
import re
import subprocess
import sys


def run_with_runtime_of(library, arguments):
    """Runs Python again on sys.argv as it was, with the runtime of the library's sanitizer, unless there is none or it is loaded."""
    libraries = subprocess.run(['ldd', library], capture_output=True, text=True, check=True).stdout
    runtime = re.search(r'lib[at]san\.so\S* => (\S+)', libraries)
    if runtime is None or 'LD_PRELOAD' in os.environ:
        return
    os.environ['LD_PRELOAD'] = runtime.group(1)
    # Python keeps memory to its end.
    os.environ['ASAN_OPTIONS'] = os.environ.get('ASAN_OPTIONS', '') + ':detect_leaks=0'
    os.execv(sys.executable, [sys.executable, *arguments])
