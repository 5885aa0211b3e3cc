#!/usr/bin/env python3
"""tools/ci/post_comment against a server on this machine, which records the requests."""

import http.server
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import sys
import threading
import unittest
import urllib.parse

sys.path.insert(0, str(pathlib.Path.cwd() / 'tools/ci'))
from ci_testing import CiTest  # pylint: disable=wrong-import-position

sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader('post_comment', 'tools/ci/post_comment')
post_comment = importlib.util.module_from_spec(importlib.util.spec_from_loader('post_comment', LOADER))
LOADER.exec_module(post_comment)

MARKER = '<!-- transformer-family-bench -->'
COMMENT = MARKER + '\n### Unchanged: 0 slower or worse\n\n| verdict | case |\n| --- | --- |\n| SAME | `near@mine` |\n'
BOT = {'login': 'github-actions[bot]'}
HEAD = 'a' * 40
TOKEN = 'token-of-the-job'


class Server(http.server.BaseHTTPRequestHandler):
    """The few calls of GitHub's REST API for the repository us/it, whose pull request 7 has the head HEAD."""

    def answer(self, status, content=None, location=None):
        data = json.dumps(content).encode()
        self.send_response(status)
        if location:
            self.send_header('Location', location)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_call(self):
        server = self.server
        length = int(self.headers.get('Content-Length') or 0)
        content = json.loads(self.rfile.read(length)) if length else None
        url = urllib.parse.urlparse(self.path)
        call = f'{self.command} {url.path}'
        server.calls.append((call, content, self.headers.get('Authorization')))
        if call in server.special:
            return self.answer(*server.special[call])
        if call == 'GET /repos/us/it/pulls/7':
            return self.answer(200, {'number': 7, 'head': {'sha': HEAD}})
        if call == 'GET /repos/us/it/issues/7/comments':
            query = urllib.parse.parse_qs(url.query)
            size, page = int(query['per_page'][0]), int(query['page'][0])
            return self.answer(200, server.comments[size * (page - 1):size * page])
        if call == 'POST /repos/us/it/issues/7/comments':
            return self.answer(201, {'id': 1000})
        if self.command == 'PATCH' and any(url.path == f'/repos/us/it/issues/comments/{comment["id"]}'
                                           for comment in server.comments):
            return self.answer(200, {'id': 1})
        return self.answer(404, {'message': 'Not Found'})

    do_GET = do_POST = do_PATCH = handle_call  # the names that http.server calls

    def log_message(self, *arguments):  # pylint: disable=arguments-differ
        pass


class GitHubServer:
    """Runs the server until the test ends."""

    def __init__(self, test):
        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Server)
        self.server.calls, self.server.comments, self.server.special = [], [], {}
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        test.addCleanup(self.server.server_close)
        test.addCleanup(self.server.shutdown)
        self.variables = {
            'GITHUB_API_URL': f'http://127.0.0.1:{self.server.server_port}',
            'GITHUB_REPOSITORY': 'us/it',
            'no_proxy': '*',
        }

    def writes(self):
        """Returns the calls that change something, with their contents."""
        return [(call, content) for call, content, _ in self.server.calls if not call.startswith('GET ')]


class PostComment(CiTest):

    def setUp(self):
        super().setUp()
        github = GitHubServer(self)
        self.server, self.writes = github.server, github.writes
        self.environment.update(github.variables, GITHUB_TOKEN=TOKEN)
        self.comment = self.folder / 'comment.md'
        self.comment.write_text(COMMENT)

    def post(self, *flags, **variables):
        status, out, err = self.run_script('post_comment', f'--comment={self.comment}', *flags, **variables)
        self.assertNotIn(TOKEN, out + err)
        if status != 0:
            self.assertTrue(err.startswith('post_comment: ') and err.count('\n') == 1, err)
        return status, out, err

    def test_the_first_comment_is_created_with_the_jobs_own_token(self):
        self.server.comments = [{'id': 1, 'user': {'login': 'somebody'}, 'body': 'hello'}]
        status, out, err = self.post('--pull_request=7', f'--head={HEAD}')
        self.assertEqual((status, out, err), (0, 'post_comment: wrote comment 1000 of pull request 7\n', ''))
        self.assertEqual(self.writes(), [('POST /repos/us/it/issues/7/comments', {'body': COMMENT})])
        self.assertEqual({token for _, _, token in self.server.calls}, {f'Bearer {TOKEN}'})

    def test_a_later_comment_takes_the_place_of_the_first(self):
        others = [{'id': i, 'user': {'login': 'somebody'}, 'body': 'hello'} for i in range(130)]
        others[3]['body'] = MARKER + '\nnot ours'
        others[4]['user'] = None
        others[5].update(user=BOT, body='of another workflow')
        others[6].update(user=BOT, body=None)
        self.server.comments = others + [{'id': 501, 'user': BOT, 'body': MARKER + '\nold'}]
        status, out, err = self.post('--pull_request=7')
        self.assertEqual((status, out, err), (0, 'post_comment: updated comment 501 of pull request 7\n', ''))
        self.assertEqual(self.writes(), [('PATCH /repos/us/it/issues/comments/501', {'body': COMMENT})])
        self.post('--pull_request=7', '--author=somebody')
        self.assertEqual(self.writes()[-1][0], 'PATCH /repos/us/it/issues/comments/3')

    def test_a_comment_that_somebody_deleted_meanwhile_is_written_anew(self):
        self.server.comments = [{'id': 501, 'user': BOT, 'body': MARKER}]
        self.server.special = {'PATCH /repos/us/it/issues/comments/501': (404, {})}
        self.assertEqual(self.post('--pull_request=7')[0], 0)
        self.assertEqual(self.writes()[-1][0], 'POST /repos/us/it/issues/7/comments')

    def test_the_number_of_an_artifact_must_be_that_of_the_measured_commit(self):
        number = self.folder / 'pull_request'
        number.write_text('7\n')
        self.assertEqual(self.post(f'--pull_request_file={number}', f'--head={HEAD}')[0], 0)
        self.assertEqual(len(self.writes()), 1)
        status, _, err = self.post(f'--pull_request_file={number}', '--head=' + 'b' * 40)
        self.assertEqual(status, 1)
        self.assertIn(f'the head of pull request 7 is {HEAD}, and not bbbb', err)
        number.write_text('8')
        status, _, err = self.post(f'--pull_request_file={number}', f'--head={HEAD}')
        self.assertEqual((status, err), (1, 'post_comment: us/it has no pull request 8\n'))
        calls = len(self.server.calls)
        for text in ('', '0', '-7', '7/../../other', '7\n8', '\u0667', '7 --head=x', '1' * 11, '7' * 100):
            number.write_text(text)
            status, _, err = self.post(f'--pull_request_file={number}')
            self.assertEqual(status, 1, text)
        self.assertEqual(len(self.server.calls), calls)
        self.assertEqual(len(self.writes()), 1)

    def test_the_token_of_a_fork_is_told_where_to_go(self):
        self.server.special = {
            'POST /repos/us/it/issues/7/comments': (403, {'message': 'Resource not accessible by integration'})}
        status, _, err = self.post('--pull_request=7')
        self.assertEqual(status, 2)
        self.assertIn('403 {"message": "Resource not accessible by integration"}', err)
        self.assertIn('tools/ci/github_comment.yml posts those', err)

    def test_errors_of_the_api_are_errors(self):
        for special in [(500, {'message': 'oops'}), (302, {}, 'http://127.0.0.1:1/elsewhere')]:
            self.server.special = {'GET /repos/us/it/pulls/7': special}
            status, _, err = self.post('--pull_request=7')
            self.assertEqual(status, 2)
            self.assertIn(f'/repos/us/it/pulls/7: {special[0]} ', err)
        self.assertEqual(len(self.server.calls), 2)
        self.assertEqual(self.post('--pull_request=7', GITHUB_API_URL='http://127.0.0.1:1')[0], 2)
        self.assertEqual(self.writes(), [])

    def test_what_is_too_long_is_not_posted(self):
        row = '| SAME | `near@mine` |\n'
        self.comment.write_text(COMMENT + row * ((60000 - len(COMMENT)) // len(row)))
        self.assertEqual(self.post('--pull_request=7')[0], 0)
        self.comment.write_text(COMMENT + row * (1 + (60000 - len(COMMENT)) // len(row)))
        status, _, err = self.post('--pull_request=7')
        self.assertEqual((status, err), (1, f'post_comment: {self.comment}: longer than 60000 bytes\n'))
        self.assertEqual(len(self.writes()), 1)

    def test_what_is_no_plain_file_is_not_read(self):
        secret = self.folder / 'secret'
        secret.write_text(COMMENT)
        self.comment.unlink()
        self.comment.symlink_to(secret)
        self.assertEqual(self.post('--pull_request=7')[0], 2)
        self.comment.unlink()
        os.mkfifo(self.comment)
        self.assertEqual(self.post('--pull_request=7')[0], 1)
        self.comment.unlink()
        status, _, err = self.post('--pull_request=7')
        self.assertEqual((status, err), (2, f'post_comment: {self.comment}: cannot read: No such file or directory\n'))
        self.comment.write_bytes(COMMENT.encode() + b'\xff')
        self.assertEqual(self.post('--pull_request=7')[0], 1)
        self.assertEqual(self.server.calls, [])

    def test_what_would_notify_link_or_show_anything_is_not_posted(self):
        harmless = ['', 'Words, and `@octocat <img> ![a](b) #1 | x`'.replace('|', '/'), '`a` and `b`', '\n    @octocat | `x\n',
                    '<details><summary>1 more</summary>\n\n| `@a` |\n| --- |\n\n</details>\n', '**SLOWER**', '1.05 times']
        for text in harmless:
            self.assertIsNone(post_comment.problem_of(COMMENT + '\n' + text + '\n'), text)
        hostile = [
            '@octocat', 'a@b.org', '![x](y)', '[x](y)', '[x]: y', '<img src=x>', '<b>', '<!-- x', 'http://x.y', 'see www.x.y',
            '#1', 'GH-1', 'x/y#1', '&#64;octocat', 'a \\` @octocat `', '`@octocat', '`a` @octocat `b`', '``a` @octocat `b``',
            '```\n@octocat\n```', '~~~\n@octocat\n~~~', '| `a | b` @octocat', '<details>\n`@octocat`\n</details>',
            '<details>`@octocat`</details>', 'text\n    @octocat', '- a\n\n    @octocat', '1. a\n\n    @octocat',
            '>    @octocat', '\t@octocat', '   @octocat', '\n    a\r@octocat', '`a\r@octocat`', '\n    a\x0b', '/merge',
            '<details open>', '$x$', '\u2028@x', '    \n @octocat',
        ]
        for text in hostile:
            self.assertIsNotNone(post_comment.problem_of(COMMENT + '\n' + text + '\n'), text)
        self.assertIsNotNone(post_comment.problem_of('### Unchanged\n'))
        self.comment.write_text(COMMENT + '\n@octocat\n')
        status, _, err = self.post('--pull_request=7')
        self.assertEqual((status, err),
                         (1, f'post_comment: {self.comment}: line 8 has markup that no comment of ours has\n'))
        self.assertEqual(self.server.calls, [])

    def test_without_a_pull_request_it_only_appends_to_the_jobs_summary(self):
        summary = self.folder / 'summary'
        summary.write_text('before\n')
        for _ in range(2):
            self.assertEqual(self.post(GITHUB_STEP_SUMMARY=str(summary), GITHUB_TOKEN='', GITHUB_REPOSITORY=''), (0, '', ''))
        self.assertEqual(summary.read_text(), 'before\n' + (COMMENT + '\n') * 2)
        self.assertEqual(self.server.calls, [])
        self.assertEqual(self.post(GITHUB_STEP_SUMMARY='/nowhere/x')[0], 2)
        self.assertEqual(self.post('--pull_request=7', GITHUB_STEP_SUMMARY=str(summary))[0], 0)
        self.assertEqual(summary.read_text().count(MARKER), 3)
        self.assertEqual(len(self.writes()), 1)

    def test_variables_that_are_missing_or_wrong_are_named(self):
        for name, value in [('GITHUB_TOKEN', ''), ('GITHUB_REPOSITORY', ''), ('GITHUB_REPOSITORY', 'us/it/../x'),
                            ('GITHUB_API_URL', 'nowhere')]:
            status, _, err = self.post('--pull_request=7', **{name: value})
            self.assertEqual(status, 2)
            self.assertIn('nowhere' if name == 'GITHUB_API_URL' else name, err)
        status, _, err = self.run_script('post_comment', '--pull_request=7')
        self.assertEqual(status, 2)
        self.assertIn('--comment', err)


if __name__ == '__main__':
    unittest.main()
