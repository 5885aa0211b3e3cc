#!/usr/bin/env python3
"""tools/ci/prepare on a local clone, with a fake tools/setup."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path.cwd() / 'tools/ci'))
from ci_testing import CiTest  # pylint: disable=wrong-import-position


class Prepare(CiTest):

    def setUp(self):
        super().setUp()
        self.write('tools/setup', '#!/bin/bash\necho set up\n')

    def test_sets_up_and_leaves_bazels_cache_alone(self):
        self.assertEqual(self.run_script('prepare'), (0, 'set up\n', ''))
        self.assertFalse((self.clone / '.bazelrc.user').exists())

    def test_names_the_cache_once_beside_what_the_file_has(self):
        self.write('.bazelrc.user', 'build --jobs=1\n')
        for _ in range(2):
            self.assertEqual(self.run_script('prepare', '--disk_cache=build/bazel-disk'), (0, 'set up\n', ''))
        cache = self.clone / 'build/bazel-disk'
        self.assertTrue(cache.is_dir())
        self.assertEqual((self.clone / '.bazelrc.user').read_text(), f'build --jobs=1\nbuild --disk_cache={cache}\n')

    def test_empties_a_cache_that_is_too_large(self):
        cache = self.clone / 'build/bazel-disk'
        cache.mkdir(parents=True)
        (cache / 'object').write_bytes(b'x' * (3 << 20))
        self.run_script('prepare', f'--disk_cache={cache}')
        self.assertTrue((cache / 'object').exists())
        status, out, _ = self.run_script('prepare', f'--disk_cache={cache}', '--most_gib=0')
        self.assertEqual((status, out), (0, f'set up\nprepare: {cache} is larger than 0 GiB, and begins anew\n'))
        self.assertEqual(list(cache.iterdir()), [])

    def test_a_set_up_that_fails_is_one(self):
        self.write('tools/setup', '#!/bin/bash\nexit 1\n')
        self.assertEqual(self.run_script('prepare'), (1, '', 'prepare: tools/setup failed\n'))

    def test_bad_usage_is_two_and_one_line(self):
        self.expect_bad_usage('prepare', [(['--cache=x'], 'unknown flag --cache=x'),
                                          (['--most_gib=many'], '--most_gib=many: a number is wanted')])


if __name__ == '__main__':
    unittest.main()
