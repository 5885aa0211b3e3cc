#!/usr/bin/env python3
"""Packs the Python package into a wheel.

  make_wheel.py OUTPUT_FOLDER LIBRARY PROGRAM... --data [FILE PLACE_IN_PACKAGE]... --sources SOURCE...

Beside the library lie the shared libraries that it needs and that no Linux promises, under the names by which it asks for
them. The tag says the C library of this machine, which is the oldest that the code runs with. Equal files give equal wheels.
"""

import base64
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

VERSION = '0.1.0'
NAME = 'transformer_family_bench'
# What every Linux with this C library has.
SYSTEM = re.compile(r'^(ld-linux.*|linux-vdso|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so')

METADATA = """\
Metadata-Version: 2.1
Name: transformer-family-bench
Version: %s
Summary: Every technique of efficient attention, checked against float64 definitions, on NumPy, PyTorch and JAX arrays
Requires-Python: >=3.9
Requires-Dist: numpy>=1.22
Provides-Extra: frame
Requires-Dist: pandas; extra == 'frame'
""" % VERSION


def needed_libraries(library):
    """Returns the paths of the shared libraries to pack, by the names that are asked for."""
    said = subprocess.run(['ldd', library], check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout
    found = dict(re.findall(r'^\s*(\S+) => (\S+) \(0x', said, re.MULTILINE))
    missing = re.findall(r'^\s*(\S+) => not found', said, re.MULTILINE)
    if missing:
        sys.exit('make_wheel: %s needs %s, which is not found' % (library, ', '.join(missing)))
    return {name: path for name, path in found.items() if not SYSTEM.match(name)}


def tag():
    major, minor = platform.libc_ver()[1].split('.')[:2]
    return 'py3-none-manylinux_%s_%s_%s' % (major, minor, platform.machine())


def main():
    folder, library, *rest = sys.argv[1:]
    data_at, sources_at = rest.index('--data'), rest.index('--sources')
    programs, data, sources = rest[:data_at], rest[data_at + 1:sources_at], rest[sources_at + 1:]
    files = {'tfb/libtfb.so': library}
    files.update(('tfb/' + name, path) for name, path in needed_libraries(library).items())
    files.update(('tfb/bin/' + os.path.basename(path), path) for path in programs)
    files.update(('tfb/' + os.path.basename(path), path) for path in sources)
    files.update(('tfb/' + place, path) for path, place in zip(data[::2], data[1::2]))
    contents = {name: pathlib.Path(path).read_bytes() for name, path in files.items()}

    info = '%s-%s.dist-info/' % (NAME, VERSION)
    contents[info + 'METADATA'] = METADATA.encode()
    contents[info + 'WHEEL'] = ('Wheel-Version: 1.0\nGenerator: make_wheel\nRoot-Is-Purelib: false\nTag: %s\n' % tag()).encode()
    record = []
    for name in sorted(contents):
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b'=').decode()
        record.append('%s,sha256=%s,%d\n' % (name, digest, len(contents[name])))
    record.append(info + 'RECORD,,\n')
    contents[info + 'RECORD'] = ''.join(record).encode()

    path = os.path.join(folder, '%s-%s-%s.whl' % (NAME, VERSION, tag()))
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as wheel:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if re.match(r'tfb/(bin/)?[^/]*$', name) and not name.endswith('.py') else 0o100644) << 16
            wheel.writestr(entry, contents[name])


if __name__ == '__main__':
    main()
