#!/usr/bin/env python3
"""The pages without the packages that they import: pages_test.py LIBRARY, where LIBRARY is libtfb.so."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import types
import unittest

os.environ['TFB_LIBRARY'] = os.path.abspath(sys.argv.pop())
sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / 'tools/python'))
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
            text = sys.modules[path.stem].__doc__
            tried = re.findall(r'^Tried with ([a-z-]+) ([\d.]*\d)', text, re.MULTILINE)
            self.assertEqual(tried, [(about.packages[0], required[about.packages[0]][0])], path)
        self.assertEqual(used, set(required))

    def test_each_page_names_its_source_and_is_listed_in_the_table(self):
        table = (HERE / 'README.md').read_text()
        for path, name, _ in self.contestants:
            self.assertRegex(sys.modules[path.stem].__doc__, r'\nhttps://[^\s]+\n')
            (row,) = re.findall(r'^\| \[%s\]\(%s\) \| (.*) \|$' % (path.stem, path.name), table, re.MULTILINE)
            self.assertIn('`%s`' % name, row)


if __name__ == '__main__':
    unittest.main()
