"""The text of the reference language model: the King James Bible, in its training and held-out parts.

The text of 1611 is in the public domain; Debian's bible-kjv-text carries it, bible-kjv the program
that prints it. Both are fetched with apt-get and unpacked into a scratch folder: no root, nothing
installed. A verse is a line, without its number; a chapter is a heading ("Exodus 2"), an empty line,
its verses, an empty line.
"""

import hashlib
import os
import pathlib
import re
import subprocess

PACKAGES = {"bible-kjv": "4.38", "bible-kjv-text": "4.38"}
SHA256 = "dbd05e2e52ecd8fa20be8da9c0eac0dbe2fb8744939cb37cc454686e241bdb02"
LICENCE = "public domain (King James Version, 1611); packages bible-kjv, bible-kjv-text of Debian 12"

FIRST_HELD_OUT = "1 Thessalonians"  # to Revelation, the end
FIRST_OF_DATASTORE = "Daniel"       # to Colossians, the end of the training text


def fetch(scratch):
    """Returns the folder with the unpacked packages."""
    root = pathlib.Path(scratch) / "bible"
    if not (root / "usr/lib/bible.data").exists():
        root.mkdir(parents=True, exist_ok=True)
        for package, version in PACKAGES.items():
            subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=root, check=True)
            (archive,) = root.glob(f"{package}_{version}_*.deb")
            subprocess.run(["dpkg", "-x", archive.name, "."], cwd=root, check=True)
    return root


def whole_text(scratch):
    """Returns the Bible as bytes; raises where they are not those that the model was trained on."""
    root = fetch(scratch)
    environment = {**os.environ, "LC_ALL": "C"}
    printed = subprocess.run(
        [root / "usr/bin/bible", "-p", root / "usr/lib", "-l1000000", "Gen1:1-Rev22:21"],
        env=environment, check=True, stdout=subprocess.PIPE).stdout
    text = re.sub(rb"(?m)^  \d+ ", b"", printed).lstrip(b"\n")
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        raise ValueError(f"the text has SHA-256 {found}, not {SHA256}")
    return text


def parts(text):
    """Returns (training, held out, datastore); the datastore is the end of the training part."""
    def chapter_one_of(book):
        return text.index(f"\n{book} 1\n\n".encode()) + 1
    held_out = chapter_one_of(FIRST_HELD_OUT)
    return text[:held_out], text[held_out:], text[chapter_one_of(FIRST_OF_DATASTORE):held_out]
