#!/usr/bin/env python3
"""The recipes github.yml, github_comment.yml and gitlab.yml: their commands are run, one after the other, on a local clone.

No parser of YAML is installed everywhere, so the files keep to a form that lines tell: commands are `run: COMMAND`,
`run: >-` with the command in the lines below, or the items of `script:` and `before_script:`.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path.cwd() / 'tools/ci'))
from ci_testing import CiTest, HISTORY, RUNFILES, SCRIPTS  # pylint: disable=wrong-import-position
from post_comment_test import GitHubServer, HEAD, TOKEN  # pylint: disable=wrong-import-position

RECIPES = ['github.yml', 'github_comment.yml', 'gitlab.yml']
# Before the checkout, or before tools/setup, there are neither scripts nor git.
INSTALL_GIT = 'apt-get update && apt-get install -y --no-install-recommends ca-certificates git'
# Versions that exist.
ACTIONS = {
    'actions/cache@v4', 'actions/cache/restore@v4', 'actions/checkout@v4', 'actions/download-artifact@v4',
    'actions/upload-artifact@v4'
}


def lines_of(recipe):
    return (RUNFILES / 'tools/ci' / recipe).read_text().splitlines()


def indent_of(line):
    return len(line) - len(line.lstrip(' '))


def jobs_of(recipe):
    """Returns the lines of each job by its name; those of GitLab's template are in both jobs."""
    lines = lines_of(recipe)
    depth = 2 if 'jobs:' in lines else 0
    if depth:
        lines = lines[lines.index('jobs:') + 1:]
    jobs, name = {}, None
    for line in lines:
        begin = re.fullmatch(' ' * depth + r'([.\w]+):', line)
        if begin:
            name = begin.group(1)
            jobs[name] = []
        elif name is not None:
            jobs[name].append(line)
    template = jobs.pop('.benchmarks', [])
    return {name: template + job for name, job in jobs.items()}


def commands_of(lines):
    """Returns the commands in their order."""
    commands, script_indent = [], None
    for number, line in enumerate(lines):
        run = re.fullmatch(r' *(?:- )?run: (.*)', line)
        if run and run.group(1) == '>-':
            block = []
            for below in lines[number + 1:]:
                if indent_of(below) <= line.index('run:'):
                    break
                block.append(below.strip())
            commands.append(' '.join(block))
        elif run:
            commands.append(run.group(1))
        if line.strip() in ('script:', 'before_script:'):
            script_indent = indent_of(line)
        elif script_indent is not None:
            item = re.fullmatch(' ' * (script_indent + 2) + r'- (.*)', line)
            if item:
                commands.append(item.group(1))
            elif not line.strip().startswith('#'):
                script_indent = None
    return commands


class Recipes(CiTest):

    def test_every_command_is_a_script_of_this_folder_with_flags_that_its_help_has(self):
        sweep_flags = set(re.findall(r'ABSL_FLAG\(\s*[\w:]+, (\w+)', (RUNFILES / 'harness/sweep_main.cc').read_text()))
        help_of = {script: self.run_script(script, '--help')[1] for script in SCRIPTS if script != 'common.sh'}
        used = set()
        for recipe in RECIPES:
            # Also in what a user may take out of a comment.
            comments = [line.strip()[4:] for line in lines_of(recipe) if line.strip().startswith('# - tools/')]
            for command in commands_of(lines_of(recipe)) + comments:
                if command == INSTALL_GIT:
                    continue
                words = shlex.split(re.sub(r'\$\{\{.*?\}\}', 'X', command))
                script = words[0][len('tools/ci/'):]
                self.assertEqual(words[0], 'tools/ci/' + script)
                self.assertTrue(os.access(self.clone / words[0], os.X_OK), command)
                used.add(script)
                end = words.index('--') if '--' in words else len(words)
                for word in words[1:end]:
                    self.assertRegex(help_of[script], re.escape(word.split('=')[0]) + r'\b', command)
                for word in words[end + 1:]:
                    self.assertIn(word[2:].split('=')[0], sweep_flags, command)
        self.assertEqual(used, set(help_of))

    def test_helps_name_every_flag(self):
        for script in ('compare_builds', 'prepare', 'record_history'):
            status, text, err = self.run_script(script, '--help')
            self.assertEqual((status, err), (0, ''))
            self.assertTrue(text.startswith(f'usage: tools/ci/{script} '), text)
            self.assertIn('Exit status', text)
            source = (RUNFILES / 'tools/ci' / script).read_text()
            for flag in re.findall(r'^ +(--\w+)=\??\*\)', source, re.MULTILINE):
                self.assertIn(f'\n  {flag}=', text)

    def test_recipes_need_no_secret_and_say_what_each_job_may(self):
        for recipe in RECIPES:
            text = '\n'.join(lines_of(recipe))
            self.assertNotRegex(text, r'secrets\.|\t')
            self.assertTrue(all(indent_of(line) % 2 == 0 for line in lines_of(recipe) if not line.strip().startswith('|')))
            self.assertLessEqual(set(re.findall(r'uses: (\S+)', text)), ACTIONS)
            if recipe != 'gitlab.yml':
                self.assertIn('\npermissions: {}\n', text)
            for name, job in jobs_of(recipe).items():
                if recipe != 'gitlab.yml':
                    self.assertIn('    permissions:', job, name)
                    self.assertTrue(any('timeout-minutes: ' in line for line in job), name)
                # What a stranger may write, such as a title or a branch's name, is no part of a command.
                for value in re.findall(r'\$\{\{ *(.*?) *\}\}', ' '.join(commands_of(job))):
                    self.assertIn(value, ('github.event.pull_request.number', 'github.event.workflow_run.head_sha'))

    def test_the_page_names_every_script_and_recipe(self):
        page = (RUNFILES / 'tools/ci/README.md').read_text()
        for name in RECIPES + [script for script in SCRIPTS if script != 'common.sh']:
            self.assertIn(f'({name})', page)

    # --- What the jobs do

    def setUp(self):
        super().setUp()
        self.write('bin/apt-get', '#!/bin/bash\necho "apt-get $*"\n', at=self.folder)
        self.write('tools/setup', '#!/bin/bash\necho set up\n')
        self.write('history', HISTORY)
        self.base = self.commit(factor='1')

    def run_job(self, recipe, job, values, **variables):
        """Runs the commands of a job in the clone up to its end, as both systems do, and returns their exit statuses."""
        statuses = {}
        for command in commands_of(jobs_of(recipe)[job]):
            for name, value in values.items():
                command = command.replace('${{ ' + name + ' }}', value)
            self.assertNotIn('${{', command)
            done = subprocess.run(['sh', '-e', '-c', command], cwd=self.clone, env={**self.environment, **variables},
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  universal_newlines=True, check=False)
            statuses[command.split(' ')[0]] = done.returncode
            self.assertIn(done.returncode, (0, 1), done.stdout)
        return statuses

    def expect_artifacts(self, recipe, job):
        """Checks that the files which the job keeps are there."""
        paths = [line.strip().lstrip('- ') for line in jobs_of(recipe)[job] if re.match(r' +(- )?build/[\w/*.]+$', line)]
        self.assertGreater(len(paths), 2)
        for path in paths:
            self.assertTrue(list(self.clone.glob(path)), path)

    def test_github_compares_a_pull_request_and_posts_the_comment_from_another_workflow(self):
        # What GitHub checks out: the merge of the pull request into its base.
        self.git('checkout', '--quiet', '-b', 'work')
        self.commit(push=False, factor='1.5')
        self.git('checkout', '--quiet', 'main')
        self.git('merge', '--quiet', '--no-ff', 'work')
        summary = self.folder / 'summary'
        statuses = self.run_job('github.yml', 'compare', {'github.event.pull_request.number': '7'},
                                GITHUB_STEP_SUMMARY=str(summary))
        self.assertEqual(statuses, {'apt-get': 0, 'tools/ci/prepare': 0, 'tools/ci/compare_builds': 1,
                                    'tools/ci/post_comment': 0})
        self.expect_artifacts('github.yml', 'compare')
        comment = (self.clone / 'build/comparison/comment.md').read_text()
        self.assertIn('\n### Regressed: 5 slower or worse, ', comment)
        self.assertIn(f'| commit | `{self.base}` |', comment)
        self.assertIn(comment, summary.read_text())
        self.assertEqual(self.git('status', '--porcelain'), '')

        server = GitHubServer(self)
        (self.folder / 'temporary').mkdir()
        (self.clone / 'build/comparison').rename(self.folder / 'temporary/comparison')
        statuses = self.run_job('github_comment.yml', 'comment', {'github.event.workflow_run.head_sha': HEAD},
                                RUNNER_TEMP=str(self.folder / 'temporary'), GITHUB_TOKEN=TOKEN, **server.variables)
        self.assertEqual(statuses, {'tools/ci/post_comment': 0})
        self.assertEqual(server.writes(), [('POST /repos/us/it/issues/7/comments', {'body': comment})])

    def test_github_records_the_history(self):
        statuses = self.run_job('github.yml', 'history', {})
        self.assertEqual(statuses, {'apt-get': 0, 'tools/ci/prepare': 0, 'tools/ci/record_history': 0})
        self.expect_artifacts('github.yml', 'history')
        self.assertEqual(len(self.git('ls-tree', '--name-only', 'tfb-history:runs', at=self.origin).split()), 1)

    def test_gitlab_compares_a_merge_request(self):
        self.commit(factor='1')
        statuses = self.run_job('gitlab.yml', 'compare', {}, CI_MERGE_REQUEST_DIFF_BASE_SHA=self.base)
        self.assertEqual(statuses, {'apt-get': 0, 'tools/ci/prepare': 0, 'tools/ci/compare_builds': 0})
        self.expect_artifacts('gitlab.yml', 'compare')

    def test_gitlab_records_the_history(self):
        statuses = self.run_job('gitlab.yml', 'history', {})
        self.assertEqual(statuses, {'apt-get': 0, 'tools/ci/prepare': 0, 'tools/ci/record_history': 0})
        self.expect_artifacts('gitlab.yml', 'history')
        self.assertEqual(len(self.git('ls-tree', '--name-only', 'tfb-history:runs', at=self.origin).split()), 1)


if __name__ == '__main__':
    unittest.main()
