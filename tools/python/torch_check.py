#!/usr/bin/env python3
"""Checks tfb.torch, by hand, where PyTorch and the wheel are installed; the tests of the tree need no PyTorch.

    tools/setup --peers --yes
    bazel build //tools/python:wheel && build/peers/bin/pip install bazel-bin/tools/python/wheel/*.whl
    build/peers/bin/python tools/python/torch_check.py
"""

import sys
import unittest

del sys.path[0]  # of the sources, which lack the library
import tfb.torch  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position

TECHNIQUE = 'longformer:window=16'


def tensors(*shape, **more):
    return [torch.randn(*shape, **more) for _ in range(3)]


class Torch(unittest.TestCase):

    def test_the_operator_is_tfb_attention(self):
        q, k, v = tensors(2, 4, 40, 16)
        for causal in (False, True):
            expected = tfb.attention(TECHNIQUE, q, k, v, causal=causal)
            self.assertTrue(torch.equal(torch.ops.tfb.attention(q, k, v, TECHNIQUE, causal), expected))
            self.assertTrue(torch.equal(tfb.torch.attention(q, k, v, TECHNIQUE, causal=causal), expected))

    def test_pytorch_finds_nothing_wrong_with_the_operator(self):
        for q, k, v in (tensors(2, 4, 40, 16), tensors(1, 2, 9, 8, dtype=torch.bfloat16)):
            torch.library.opcheck(torch.ops.tfb.attention.default, (q, k, v, TECHNIQUE, True))
        q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 40, 16)
        torch.library.opcheck(torch.ops.tfb.attention.default, (q, k, torch.randn(1, 2, 40, 24), 'dense', True))

    def test_compiled_code_calls_it_in_one_graph(self):
        q, k, v = tensors(1, 2, 64, 32)

        def layer(q, k, v):
            return tfb.torch.attention(q * 2, k, v, TECHNIQUE, causal=True).relu()

        self.assertTrue(torch.allclose(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v), atol=1e-6))
        dynamic = torch.compile(layer, fullgraph=True, dynamic=True)
        for tokens in (64, 48):
            q, k, v = tensors(1, 2, tokens, 32)
            self.assertTrue(torch.allclose(dynamic(q, k, v), layer(q, k, v), atol=1e-6))

    def test_an_exported_program_calls_it(self):

        class Layer(torch.nn.Module):

            def forward(self, q, k, v):
                return tfb.torch.attention(q, k, v, TECHNIQUE)

        q, k, v = tensors(1, 2, 32, 8)
        exported = torch.export.export(Layer(), (q, k, v))
        self.assertIn('tfb.attention', str(exported.graph))
        self.assertTrue(torch.equal(exported.module()(q, k, v), tfb.attention(TECHNIQUE, q, k, v)))

    def test_errors_are_those_of_tfb(self):
        q, k, v = tensors(1, 2, 32, 8)
        with self.assertRaisesRegex(tfb.NotFoundError, 'nothing'):
            tfb.torch.attention(q, k, v, 'nothing')
        with self.assertRaisesRegex(tfb.InvalidArgumentError, 'window'):
            tfb.torch.attention(q, k, v, 'longformer:window=x')
        with self.assertRaisesRegex(tfb.InvalidArgumentError, r'k has shape \[2, 32, 8\]'):
            tfb.torch.attention(q, k[0], v, 'dense')
        with self.assertRaisesRegex(tfb.InvalidArgumentError, r'k has shape \[2, 32, 8\]'):
            tfb.torch.attention(q.to('meta'), k[0].to('meta'), v.to('meta'), 'dense')

    def test_a_backward_pass_says_that_there_is_no_gradient(self):
        q, k, v = tensors(1, 2, 32, 8, requires_grad=True)
        out = tfb.torch.attention(q, k, v, TECHNIQUE)
        self.assertTrue(torch.equal(out, tfb.attention(TECHNIQUE, q.detach(), k.detach(), v.detach())))
        with self.assertRaisesRegex(RuntimeError, 'no gradient yet'):
            out.sum().backward()
        with torch.no_grad():
            self.assertFalse(tfb.torch.attention(q, k, v, TECHNIQUE).requires_grad)


if __name__ == '__main__':
    unittest.main()
