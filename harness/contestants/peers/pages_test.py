#!/usr/bin/env python3
"""The pages without the packages that they import: pages_test.py LIBTFB PAGE..., where pages in C++ are compiled."""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import sys
import types
import unittest

ARGUMENTS = list(sys.argv)
LIBRARIES = [os.path.abspath(path) for path in sys.argv[2:]]
os.environ['TFB_LIBRARY'] = os.path.abspath(sys.argv[1])
del sys.argv[1:]
sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / 'tools/python'))
import sanitized  # pylint: disable=wrong-import-position
sanitized.run_with_runtime_of(os.environ['TFB_LIBRARY'], ARGUMENTS)
import tfb  # pylint: disable=wrong-import-position
from tfb import contestant  # pylint: disable=wrong-import-position


def stand_in(name):
    if name.startswith('__'):
        raise AttributeError(name)
    return StandIn


class StandInType(type):

    def __getattr__(cls, name):
        return stand_in(name)


class StandIn(metaclass=StandInType):
    """A module's class, function or decorator, as far as a page uses it when it is loaded."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, decorated):
        return decorated


class StandInModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the packages that pages use, wherever they are installed."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = stand_in
        return module

    def exec_module(self, module):
        pass


def requirements():
    """Returns the version, megabytes to download and megabytes on disk of each package."""
    lines = [line for line in (HERE / 'requirements.txt').read_text().splitlines() if not line.startswith('#')]
    matches = [re.fullmatch(r'([a-z-]+)==([\d.]+)  # (\d+) (\d+)', line) for line in lines]
    return {match.group(1): match.groups()[1:] for match in matches}


MODULES = {
    'faiss-cpu': 'faiss', 'torch': 'torch', 'jax': 'jax', 'transformers': 'transformers',
    'performer-pytorch': 'performer_pytorch', 'reformer-pytorch': 'reformer_pytorch', 'linformer': 'linformer',
    'routing-transformer': 'routing_transformer', 'sinkhorn-transformer': 'sinkhorn_transformer',
    'local-attention': 'local_attention'
}
PAGES = sorted(path for path in HERE.glob('*.py') if path.stem != 'pages_test')


def contestants_of_library(path):
    """Returns the page in C++ and, by name, what the library that it is compiled to says of its techniques."""
    library = ctypes.CDLL(path)
    library.tfb_techniques.restype = ctypes.c_char_p
    page = HERE / (pathlib.Path(path).stem[len('lib'):] + '.cc')
    return page, {about.pop('name'): about for about in json.loads(library.tfb_techniques())}


def tried_with(text):
    """Returns the packages that the text of a page says it was tried with, with their versions."""
    (line,) = re.findall(r'^Tried with (.*)$', text, re.MULTILINE)
    return re.findall(r'(?:^|, )([a-z-]+) ([\d.]*\d)', line)


def text_of(page):
    """Returns the text at the beginning of a page."""
    if page.suffix == '.py':
        return sys.modules[page.stem].__doc__
    lines = page.read_text().splitlines()
    return '\n'.join(line[3:] for line in lines[:lines.index('')])


class Pages(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        sys.meta_path.insert(0, StandInModules(set(MODULES.values())))
        cls.contestants = [(path, name, types.SimpleNamespace(**contestant.said_of(code)))
                           for path in PAGES for name, code in contestant._load(str(path)).items()]

    def test_there_are_pages(self):
        self.assertGreaterEqual(len(PAGES), 14)

    def test_a_contestant_says_what_it_is_itself_and_not_what_one_that_it_extends_is(self):
        said = [(path, vars(about)) for path, _, about in self.contestants]
        for one in said:
            self.assertEqual(said.count(one), 1, one)

    def test_no_page_hides_a_module_that_others_import(self):
        for path in PAGES:
            self.assertNotIn(path.stem, list(MODULES.values()) + ['numpy', 'tfb'])

    def test_each_definition_is_a_technique_of_ours_that_takes_the_problems(self):
        for path, name, about in self.contestants:
            self.assertTrue(about.causal, (path, name))
            for causal in about.causal:
                tfb.Layer(about.definition, tokens=512, heads=4, head_dim=16, causal=causal)

    def test_options_that_may_vary_are_options_of_the_definition(self):
        options = {one['name']: {option['name'] for option in one['options']} for one in tfb.techniques()}
        for path, name, about in self.contestants:
            self.assertLessEqual(set(about.options), options[about.definition.partition(':')[0]], (path, name))

    def test_each_has_a_title(self):
        for path, name, about in self.contestants:
            self.assertTrue(about.title, (path, name))

    def test_requirements_are_the_packages_of_the_pages_in_the_versions_that_they_name(self):
        required, used = requirements(), set()
        for path, _, about in self.contestants:
            self.assertLessEqual(set(about.packages), set(required), path)
            used.update(about.packages)
            self.assertEqual(tried_with(text_of(path)), [(about.packages[0], required[about.packages[0]][0])], path)
        for path, _ in map(contestants_of_library, LIBRARIES):
            for package, version in tried_with(text_of(path)):
                self.assertEqual(version, required[package][0], path)
                used.add(package)
        self.assertEqual(used, set(required))

    def test_each_page_names_its_source_and_is_listed_in_the_table(self):
        table = (HERE / 'README.md').read_text()
        pages = [(path, name) for path, name, _ in self.contestants]
        pages += [(path, name) for path, about in map(contestants_of_library, LIBRARIES) for name in about]
        for path, name in pages:
            self.assertRegex(text_of(path), r'\nhttps://[^\s]+\n')
            (row,) = re.findall(r'^\| \[%s\]\(%s\) \| (.*) \|$' % (path.stem, path.name), table, re.MULTILINE)
            self.assertIn('`%s`' % name, row)

    def test_a_library_says_what_its_techniques_are(self):
        self.assertTrue(LIBRARIES)
        names = [one['name'] for one in tfb.techniques()]
        for path, contestants in map(contestants_of_library, LIBRARIES):
            for name, about in contestants.items():
                self.assertIn(about['definition'], names, (path, name))
                self.assertTrue(about['title'], (path, name))


if __name__ == '__main__':
    unittest.main()
