#!/usr/bin/env python3
"""tools/mutate without Bazel: what its patterns edit, that it restores files, and that its table adds up."""

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.dont_write_bytecode = True
SCRIPT = pathlib.Path(__file__).resolve().parent / 'mutate'
LOADER = importlib.machinery.SourceFileLoader('mutate', str(SCRIPT))
mutate = importlib.util.module_from_spec(importlib.util.spec_from_loader('mutate', LOADER))
LOADER.exec_module(mutate)

SOURCE = '''#include "a.h"  // 1 < 2
#define N 3

// Returns 4 + 5.
int64_t Keys(const Problem& p, int64_t begin) {
  if (p.causal && !wide) return absl::InvalidArgumentError("7 < 8");
  const std::vector<int> low(p.head_dim, 0);
  return 2 * std::min(begin + 1, p.kv_tokens);
}
'''


def results(text, pattern):
    return {edit.apply(text) for edit in mutate.edits_of('a.cc', text) if edit.pattern == pattern}


class FakeBazel(mutate.Bazel):
    """Has //PACKAGE:NAME_test for each NAME of {path: names}, which depends on the file at that path."""

    def __init__(self, root, names_of_path):
        super().__init__(root, ['bazel'], 60)
        for path in names_of_path:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).parent.joinpath('BUILD').write_text('')
        self.tests = [
            target('//%s:%s_test' % (os.path.dirname(path), name),
                   files={'//%s:%s' % (os.path.dirname(path), os.path.basename(path))})
            for path, names in names_of_path.items() for name in names
        ]
        self.calls = []

    def test(self, labels):
        """A test fails where the text of its file holds FAIL and its name, and is not built where that holds BREAK."""
        self.calls.append(labels)
        statuses = {}
        for label in labels:
            (file,) = next(test.files for test in self.tests if test.label == label)
            text = (self.root / file[2:].replace(':', '/')).read_text()
            name = label.partition(':')[2]
            if 'BREAK' not in text:
                statuses[label] = 'FAILED' if 'FAIL ' + name in text else 'TIMEOUT' if 'HANG ' + name in text else 'PASSED'
        return statuses


def target(label, size='medium', tags=(), files=()):
    rule = '<rule class="cc_test" name="%s"><string name="size" value="%s"/><list name="tags">%s</list></rule>' % (
        label, size, ''.join('<string value="%s"/>' % tag for tag in tags))
    return mutate.TestTarget(xml.etree.ElementTree.fromstring(rule), set(files))


class Patterns(unittest.TestCase):

    def expect(self, pattern, line, *mutants):
        self.assertEqual(results(line, pattern), set(mutants), pattern)

    def test_each_makes_the_edits_that_its_name_says(self):
        self.expect('comparison', 'x = a < b;', 'x = a <= b;', 'x = a >= b;')
        self.expect('comparison', 'x = a == b;', 'x = a != b;')
        self.expect('arithmetic', 'x = (a + b) / c;', 'x = (a - b) / c;', 'x = (a + b) * c;')
        self.expect('assignment', 'x += y;', 'x -= y;', 'x = y;')
        self.expect('logic', 'x = a && b;', 'x = a || b;')
        self.expect('not', 'return !found;', 'return found;')
        self.expect('constant', 'x[i + 1] = 0;', 'x[i + 2] = 0;', 'x[i + 0] = 0;', 'x[i + 1] = 1;')
        self.expect('dropped term', 'f(a + b.c[0], d);', 'f(a, d);')
        self.expect('dropped factor', 'f(a * b.c);', 'f(b.c);', 'f(a);')
        self.expect('factor two', 'x = 2.0 * y;', 'x = y;')
        self.expect('min and max', 'x = std::min(a, b);', 'x = std::max(a, b);')
        self.expect('condition', 'if (f(a) && b) c();', 'if (!(f(a) && b)) c();')
        self.expect('truth', 'x = true;', 'x = false;')
        self.expect('size', 'x = p.head_dim;', 'x = p.value_dim;')
        self.expect('heads', 'x = p.kv_heads;', 'x = p.query_heads;')
        self.expect('tokens', 'x = p.kv_tokens;', 'x = p.query_tokens;')
        self.expect('end', 'x = begin;', 'x = end;')
        self.expect('end', 'x = y.front();', 'x = y.back();')
        self.expect('error', '  TFB_RETURN_IF_ERROR(Check(a));', '  ;')
        self.expect('error', '  return absl::NotFoundError(a);', '  return absl::OkStatus();')
        self.expect('statement', '\n  total = a;\n', '\n\n')
        self.expect('statement', '\n  parts.push_back(a);\n', '\n\n')
        self.expect('statement', 'continue;', ';')

    def test_templates_pointers_and_iterators_are_no_operators(self):
        for line in ('std::vector<int> x;', 'const float* x;', 'f(*x, &y, -z);', 'a.begin();'):
            self.assertEqual(results(line, 'comparison') | results(line, 'arithmetic') | results(line, 'end'), set(), line)

    def test_every_pattern_has_a_place_in_some_line_of_this_test(self):
        named = set(re.findall(r"expect\('([^']+)'", pathlib.Path(__file__).read_text()))
        self.assertEqual(named, {pattern[0] for pattern in mutate.PATTERNS})

    def test_comments_texts_and_the_preprocessor_stay(self):
        self.assertEqual(len(mutate.blank(SOURCE)), len(SOURCE))
        for edit in mutate.edits_of('a.cc', SOURCE):
            mutant = edit.apply(SOURCE)
            self.assertNotEqual(mutant, SOURCE)
            self.assertEqual(mutant.splitlines()[:4], SOURCE.splitlines()[:4])
            self.assertTrue('"7 < 8"' in mutant or edit.pattern == 'error')

    def test_a_check_of_the_compiler_is_a_test_and_no_product(self):
        source = 'static_assert(kTile * 2 == 128 &&\n              kRows < 9);\nint x = 7;\n'
        self.assertEqual({edit.line_number(source) for edit in mutate.edits_of('a.cc', source)}, {3})
        self.assertEqual(list(mutate.edits_of('a.cc', '  assert(size == 0 ||\n         size < 9);\n')), [])

    def test_the_size_of_an_array_that_is_a_parameter_stays(self):
        self.assertEqual(list(mutate.edits_of('a.cc', 'void Load(float d[4], const unsigned a[4]);\n')), [])
        for line in ('f(a, x[4]);', 'f(x[4]);', 'return x[4];', 'float x[4];'):
            self.assertIn('constant', {edit.pattern for edit in mutate.edits_of('a.cc', line)}, line)

    def test_a_diff_and_the_changed_lines_show_the_edit(self):
        edit = next(edit for edit in mutate.edits_of('d/a.cc', SOURCE) if edit.pattern == 'min and max')
        self.assertEqual(
            edit.lines(SOURCE),
            ('return 2 * std::min(begin + 1, p.kv_tokens);', 'return 2 * std::max(begin + 1, p.kv_tokens);'))
        self.assertIn('--- a/d/a.cc\n+++ b/d/a.cc\n', edit.diff(SOURCE))
        self.assertIn('\n-  return 2 * std::min(begin', edit.diff(SOURCE))


class Files(unittest.TestCase):

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)
        (self.root / 'a.cc').write_text(SOURCE)

    def test_an_edit_is_made_and_taken_back_even_when_interrupted(self):
        edit = mutate.edits_of('a.cc', SOURCE)[0]
        for interruption in (None, KeyboardInterrupt, SystemExit):
            try:
                with mutate.edited(self.root, edit):
                    self.assertEqual((self.root / 'a.cc').read_text(), edit.apply(SOURCE))
                    if interruption:
                        raise interruption
            except (KeyboardInterrupt, SystemExit):
                pass
            self.assertEqual((self.root / 'a.cc').read_text(), SOURCE)

    def test_a_seed_draws_the_same_edits_and_none_twice(self):

        def drawn(seed):
            edits = mutate.draw(self.root, ['a.cc'], random.Random(seed))
            return [(edit.begin, edit.replacement, edit.pattern) for edit in edits]

        self.assertEqual(drawn(1), drawn(1))
        self.assertNotEqual(drawn(1), drawn(2))
        self.assertEqual(len(set(drawn(1))), len(drawn(1)))
        self.assertEqual(len(drawn(1)), len(mutate.edits_of('a.cc', SOURCE)))

    def test_those_that_survived_are_found_again_by_what_was_printed(self):

        (self.root / 'b.cc').write_text('x = 2 * y;\nf();\nx = 2 * y;\n')
        edits = list(mutate.draw(self.root, ['a.cc', 'b.cc'], random.Random(1)))
        score = mutate.Score()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for edit in edits:
                trial = mutate.Trial(FakeBazel(self.root, {}), edit, (self.root / edit.path).read_text())
                trial.verdict, trial.what = ('survived', '3 tests') if edit.pattern == 'factor two' else ('noticed', '//:a_test')
                mutate.settle([trial], score, len(edits))
        twos = {(edit.path, edit.begin) for edit in edits if edit.pattern == 'factor two'}
        self.assertEqual(len(twos), 3)
        again = list(mutate.survivors(self.root, printed.getvalue()))
        self.assertEqual({(edit.path, edit.begin) for edit in again}, twos)
        (self.root / 'b.cc').unlink()
        with contextlib.redirect_stdout(io.StringIO()) as warned:
            self.assertEqual([edit.path for edit in mutate.survivors(self.root, printed.getvalue())], ['a.cc'])
        self.assertEqual(warned.getvalue(), 'no longer there: b.cc: x = 2 * y;\n' * 2)

    def test_product_sources_leave_out_tests(self):
        for name in ('a_test.cc', 'toys.cc', 'results/synthetic.h', 'harness/conformance/masks.cc', 'b.cu', 'c.py'):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text('')
        for command in (['init', '--quiet'], ['add', '.']):
            subprocess.run(['git'] + command, cwd=str(self.root), check=True)
        self.assertEqual(sorted(mutate.product_sources(self.root, ['.'])), ['a.cc', 'b.cu'])


class Tests(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def judge(self, bazel, edits, together=8):
        """Tries edits, pairs of a path and a text that replaces the file; returns {path: verdict}, the score and what is printed."""
        score, verdicts = mutate.Score(), {}
        whole = [mutate.Edit(path, 'constant', 0, len((self.root / path).read_text()), text) for path, text in edits]
        add = score.add
        score.add = lambda edit, verdict, diff: (verdicts.update({edit.path: verdict}), add(edit, verdict, diff))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            mutate.try_edits(bazel, whole, score, len(whole), together)
        return verdicts, score, printed.getvalue()

    def test_those_of_the_file_come_first_then_its_package_then_others_then_slow_ones(self):
        tests = [
            target('//d:b_test', files=['//d:a.cc', '//d:b.cc', '//d:c.cc']),
            target('//d:c_test', files=['//d:a.cc', '//d:c.cc']),
            target('//d:a_test', 'small'),
            target('//d:a_sweep_test', 'large'),
            target('//e:a_test'),
            target('//d:a_cuda_conformance_test', 'large', ['gpu']),
            target('//d:by_hand_test', tags=['manual']),
        ]
        self.assertEqual(
            mutate.stages('d/a.cc', tests), [['//d:a_test'], ['//d:c_test', '//d:b_test'],
                                             ['//d:a_cuda_conformance_test', '//d:a_sweep_test'], ['//e:a_test']])
        self.assertEqual(
            mutate.stages('d/a_cuda.cu', tests)[:2],
            [['//d:a_test'], ['//d:a_cuda_conformance_test', '//d:c_test', '//d:b_test']])

    def test_a_stage_of_many_tests_is_several_calls(self):
        tests = [target('//d:%d_test' % n) for n in range(2 * mutate.TESTS_OF_CALL + 1)]
        self.assertEqual([len(stage) for stage in mutate.stages('d/a.cc', tests)], [mutate.TESTS_OF_CALL] * 2 + [1])

    def test_a_test_depends_on_the_files_of_the_rules_it_depends_on(self):
        tests = mutate.read_tests('''<query>
            <rule class="cc_library" name="//d:d"><rule-input name="//d:d.cc"/><rule-input name="//d:made.cc"/></rule>
            <rule class="genrule" name="//d:make"><rule-input name="//d:made.in"/><rule-output name="//d:made.cc"/></rule>
            <rule class="cc_test" name="//e:e_test"><rule-input name="//e:e_test.cc"/><rule-input name="//d:d"/>
                <rule-input name="@abseil//:base"/></rule>
            <rule class="cc_test" name="//e:f_test"><rule-input name="//e:f_test.cc"/></rule>
            <source-file name="//d:d.cc"/></query>''')
        self.assertEqual({test.label: test.files for test in tests}, {
            '//e:e_test': {'//e:e_test.cc', '//d:d.cc', '//d:made.in'},
            '//e:f_test': {'//e:f_test.cc'}
        })

    def test_a_pattern_names_the_tests_of_a_package_or_a_folder(self):
        test = target('//d/e:a_test')
        for pattern in ('//d/e:all', '//d/...', '//d/e/...'):
            self.assertTrue(test.matches(pattern), pattern)
        for pattern in ('//d:all', '//d/e2/...'):
            self.assertFalse(test.matches(pattern), pattern)

    def test_the_first_stage_that_fails_decides(self):
        for path in ('a/a.cc', 'b/b.cc', 'c/c.cc', 'd/d.cc'):
            self.write(path, 'sound')
        names = ['a', 'b', 'c', 'd', 'x', 'y']
        bazel = FakeBazel(self.root, {path: names for path in ('a/a.cc', 'b/b.cc', 'c/c.cc', 'd/d.cc')})
        verdicts, score, printed = self.judge(bazel, [('a/a.cc', 'FAIL a_test'), ('b/b.cc', 'HANG y_test'), ('c/c.cc', 'BREAK'),
                                                      ('d/d.cc', 'unnoticed')])
        self.assertEqual(verdicts, {'a/a.cc': 'noticed', 'b/b.cc': 'noticed', 'd/d.cc': 'survived'})
        self.assertEqual(score.broken, 1)
        self.assertIn('noticed (//a:a_test, ', printed)
        self.assertIn('noticed (//b:y_test, timeout, ', printed)
        self.assertIn('survived (6 tests, ', printed)
        self.assertNotIn('//a:b_test', {label for call in bazel.calls for label in call})
        self.assertEqual({(self.root / path).read_text() for path in verdicts}, {'sound'})

    def test_edits_share_a_call_where_no_test_depends_on_two_of_their_files(self):
        for path in ('a/a.cc', 'b/b.cc', 'c/c.cc'):
            self.write(path, 'sound')
        bazel = FakeBazel(self.root, {path: [path[0]] for path in ('a/a.cc', 'b/b.cc', 'c/c.cc')})
        next(test for test in bazel.tests if test.label == '//b:b_test').files.add('//a:a.cc')

        def first(order, most):
            trials = [mutate.Trial(bazel, mutate.Edit('%s/%s.cc' % (name, name), 'constant', 0, 1, 'S'), 'sound') for name in order]
            return ''.join(trial.edit.path[0] for trial, _ in mutate.apart(trials, set(), most))

        self.assertEqual(first('abcc', 8), 'ac')
        self.assertEqual(first('bac', 8), 'cb')
        self.assertEqual(first('ac', 1), 'a')
        # Two go together rather than the one that excludes both.
        next(test for test in bazel.tests if test.label == '//c:c_test').files.add('//b:b.cc')
        self.assertEqual(first('bac', 8), 'ac')

    def test_a_test_that_fails_without_an_edit_is_left_out(self):
        self.write('a/a.cc', 'FAIL b_test')
        bazel = FakeBazel(self.root, {'a/a.cc': ['b', 'c']})
        verdicts, _, printed = self.judge(bazel, [('a/a.cc', 'FAIL b_test, FAIL c_test')])
        self.assertEqual(verdicts, {'a/a.cc': 'noticed'})
        self.assertEqual(bazel.unsound, {'//a:b_test'})
        self.assertIn('//a:b_test fails without an edit, and is left out\n', printed)
        self.assertIn('noticed (//a:c_test, ', printed)
        verdicts, _, _ = self.judge(bazel, [('a/a.cc', 'FAIL b_test')])
        self.assertEqual(verdicts, {'a/a.cc': 'survived'})

    def test_as_many_edits_are_judged_as_asked_for_beside_those_that_do_not_compile(self):
        self.write('a/a.cc', 'sound')
        bazel = FakeBazel(self.root, {'a/a.cc': ['a']})
        edits = [mutate.Edit('a/a.cc', 'constant', 0, 5, text) for text in ['BREAK', 'FAIL a_test', 'BREAK', 'x', 'y', 'z']]
        score = mutate.Score()
        with contextlib.redirect_stdout(io.StringIO()):
            mutate.try_edits(bazel, edits, score, 2, 8)
        self.assertEqual((score.total(), score.broken, len(score.survivors)), (2, 2, 1))


class Report(unittest.TestCase):

    def test_the_table_adds_up(self):
        score = mutate.Score()
        edits = {path: mutate.Edit(path, 'constant', 0, 1, '2') for path in ('a/b/c/d.cc', 'a/b/e.cc', 'results/f.cc')}
        for path, verdict in (('a/b/c/d.cc', 'noticed'), ('a/b/e.cc', 'survived'), ('results/f.cc', 'noticed'),
                              ('results/f.cc', 'noticed')):
            score.add(edits[path], verdict, 'diff of ' + path)
        self.assertEqual(score.table().splitlines()[1:], [
            'a/b            1      2',
            'results        2      2',
            'all            3      4',
        ])
        self.assertEqual(score.share(), 0.75)
        self.assertIn('75.0 % noticed', score.report())
        self.assertIn('diff of a/b/e.cc', score.report())
        self.assertNotIn('diff of results', score.report())

    def test_edits_that_change_nothing_are_read_with_their_reasons(self):
        text = '# why\n\na/b.cc\n- x <  y\n+ x <= y\n= they are never equal\n- z\n+\n= z is unused\n'
        self.assertEqual(
            mutate.read_equivalent(text), {
                ('a/b.cc', 'x < y', 'x <= y'): 'they are never equal',
                ('a/b.cc', 'z', ''): 'z is unused'
            })
        with self.assertRaises(ValueError):
            mutate.read_equivalent('a/b.cc\n- x\n= no line after\n')

    def test_edits_that_only_a_gpu_runs_are_judged_where_there_is_one(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path in ('cudnn.cc', 'other.cc'):
                (root / path).write_text('int a = 1;\n')
            edits = [mutate.Edit(path, 'constant', 8, 9, '2') for path in ('cudnn.cc', 'other.cc')]
            for has_gpu, left in ((False, ['other.cc']), (True, ['cudnn.cc', 'other.cc'])):
                score = mutate.Score()
                paths = [edit.path for edit in mutate.judged(edits, root, {}, has_gpu, score)]
                self.assertEqual(paths, left)
                self.assertEqual(score.of_gpus, 2 - len(left))

    def test_the_file_of_those_edits_can_be_read(self):
        mutate.read_equivalent((SCRIPT.parent / 'mutate_equivalent').read_text())

    def test_sizes_that_a_package_refuses_to_differ_are_not_exchanged_there(self):
        text = '  int64_t a = query_tokens + kv_heads;\n'
        patterns = lambda path: {edit.pattern for edit in mutate.edits_of(path, text)}
        self.assertLessEqual({'tokens', 'heads'}, patterns('core/a.cc'))
        for package, equal in mutate.EQUAL_SIZES.items():
            self.assertFalse(patterns(package + '/a.cc') & equal, package)

    def test_wrong_flags_are_refused(self):
        for flags in (['--count=0'], ['--least=1.5'], ['--timeout=0'], ['--together=0'], ['--again=/no/such/file'], ['--no_such_flag']):
            done = subprocess.run([sys.executable, str(SCRIPT)] + flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.assertEqual(done.returncode, 2, flags)
            self.assertIn(flags[0].split('=')[0], done.stderr.decode())


if __name__ == '__main__':
    unittest.main()
