#!/usr/bin/env python3
"""Checks tfb.torch, by hand, where PyTorch and the wheel are installed; the tests of the tree need no PyTorch.

    tools/setup --peers --yes
    bazel build //tools/python:wheel && build/peers/bin/pip install bazel-bin/tools/python/wheel/*.whl
    build/peers/bin/python tools/python/torch_check.py
"""

import math
import pathlib
import re
import sys
import textwrap
import unittest
import unittest.mock

del sys.path[0]  # of the sources, which lack the library
import tfb.torch  # pylint: disable=wrong-import-position
import torch  # pylint: disable=wrong-import-position

TECHNIQUE = 'longformer:window=16'
README = pathlib.Path(__file__).with_name('README.md')


def tensors(*shape, **more):
    return [torch.randn(*shape, **more) for _ in range(3)]


def inputs_of_gradients(*shape, **more):
    return tensors(*shape, requires_grad=True, **more)


def plain_attention(q, k, v, allowed, bias):
    """Returns softmax(q k^T / sqrt(head_dim) + bias) v over the allowed pairs, and the softmax."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3]) + bias
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return weights @ v, weights


def gradient_bounds(q, k, v, grad_out, weights, bias):
    """Returns how far fp32 gradients of plain_attention may be from exact ones, of tensors in float64.

    A score is a sum of head_dim products, so as many unit roundoffs of their magnitudes off; that is the relative error of
    its weight and of the weights' sum. Sums over the tokens and the exponential add their own: e. The gradient of a value
    has e of each term that it sums; that of a score e |dp - D|, and dp's and D's errors, times the weight, where M, a bound
    of sum_c |g_c v_c|, bounds dp and D.
    """
    unit = torch.finfo(torch.float32).eps / 2
    group, channels, tokens = q.shape[1] // k.shape[1], q.shape[3], k.shape[2]
    k_all, v_all = (one.abs().repeat_interleave(group, 1) for one in (k, v))
    scores = q.abs() @ k_all.mT / math.sqrt(channels) + abs(bias)
    e = 2 * channels * unit * scores.max() + (tokens + 8) * unit
    most = (grad_out.abs() @ v_all.mT).max()
    of_score = (2 * e + 2 * (v.shape[3] * unit + e)) * most / math.sqrt(channels)
    of_key = weights.sum(2).unflatten(1, (k.shape[1], group)).sum(2)[..., None]
    return of_score * k.abs().max(), of_score * q.abs().max() * of_key, e * grad_out.abs().max() * of_key


class Torch(unittest.TestCase):

    def test_the_operator_is_tfb_attention(self):
        q, k, v = tensors(2, 4, 40, 16)
        for causal in (False, True):
            expected = tfb.attention(TECHNIQUE, q, k, v, causal=causal)
            self.assertTrue(torch.equal(torch.ops.tfb.attention(q, k, v, TECHNIQUE, causal, False)[0], expected))
            self.assertTrue(torch.equal(tfb.torch.attention(q, k, v, TECHNIQUE, causal=causal), expected))

    def test_pytorch_finds_nothing_wrong_with_the_operator(self):
        for q, k, v in (tensors(2, 4, 40, 16), tensors(1, 2, 9, 8, dtype=torch.bfloat16)):
            torch.library.opcheck(torch.ops.tfb.attention.default, (q, k, v, TECHNIQUE, True, False))
        q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 40, 16)
        torch.library.opcheck(torch.ops.tfb.attention.default, (q, k, torch.randn(1, 2, 40, 24), 'dense', True, False))

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

    def test_negated_views_and_subclasses_are_read(self):
        q, k, v = tensors(1, 2, 40, 16)
        expected = tfb.attention('dense', -q, k, v)
        negated = torch.complex(k, q).conj().imag
        self.assertTrue(negated.is_neg())
        self.assertTrue(torch.equal(tfb.attention('dense', negated, k, v), expected))
        self.assertTrue(torch.equal(tfb.torch.attention(negated, k, v, 'dense'), expected))

        class Own(torch.Tensor):
            pass

        found = tfb.attention('dense', (-q).as_subclass(Own), k, v)
        self.assertIsInstance(found, torch.Tensor)
        self.assertTrue(torch.equal(found, expected))

    def test_gradients_are_refused_where_autograd_would_compute_them(self):
        q, k, v = tensors(1, 2, 40, 16)
        expected = tfb.attention('dense', q, k, v)
        q.requires_grad_()
        with self.assertRaisesRegex(ValueError, 'detach'):
            tfb.attention('dense', q, k, v)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                self.assertTrue(torch.equal(tfb.attention('dense', q, k, v), expected))
        layer = tfb.Layer('t5_bias', tokens=40, heads=2, head_dim=16)
        layer.set_parameters({name: torch.nn.Parameter(torch.from_numpy(one)) for name, one in layer.parameters().items()})
        with torch.no_grad():
            outputs, kept = layer.run_kept(q=q, k=k, v=v)
        other = tfb.Layer('t5_bias', tokens=40, heads=2, head_dim=16)  # not set up
        found = [one.backward(kept, outputs, {'out': q}, q=q, k=k, v=v).inputs['q'] for one in (layer, other)]
        self.assertTrue(torch.equal(*found))

    def test_outputs_that_must_not_be_written_are_refused(self):
        q, k, v = tensors(1, 2, 40, 16)
        layer = tfb.Layer('dense', tokens=40, heads=2, head_dim=16)
        for out in (torch.zeros(1, 2, 1, 16).expand(1, 2, 40, 16), torch._neg_view(torch.zeros(1, 2, 40, 16)),
                    torch.zeros(1, 2, 40, 16, requires_grad=True)):
            with self.assertRaises(ValueError):
                layer.run_for(['out'], into={'out': out}, q=q, k=k, v=v)
        out = torch.ones(1, 2, 40, 16)
        w = torch.ones((), requires_grad=True)
        y = (w * out).sum()
        layer.run_for(['out'], into={'out': out}, q=q, k=k, v=v)
        with self.assertRaisesRegex(RuntimeError, 'modified by an inplace operation'):
            y.backward()

    def test_a_fit_is_of_the_tensors_of_its_call(self):
        technique = 'linformer:k=8,projection=fit'
        first, second = (inputs_of_gradients(1, 2, 40, 16) for _ in range(2))
        grad_out = torch.randn(1, 2, 40, 16)
        outs = [tfb.torch.attention(*one, technique) for one in (first, second)]
        for inputs, out in zip((first, second), outs):
            plain = [one.detach() for one in inputs]
            self.assertTrue(torch.equal(out, tfb.attention(technique, *plain)))
            found = torch.autograd.grad(out, inputs, grad_out)
            expected = tfb.gradients(technique, *plain, grad_out).inputs
            for name, one in zip('qkv', found):
                torch.testing.assert_close(one, expected[name])

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

    def check_gradients(self, technique, q, k, v, causal, allowed, bias=torch.zeros(())):
        out = tfb.torch.attention(q, k, v, technique, causal=causal)
        grad_out = torch.randn(out.shape)
        found = torch.autograd.grad(out, (q, k, v), grad_out)
        exact = [one.detach().double().requires_grad_() for one in (q, k, v)]
        expected, weights = plain_attention(*exact, allowed, bias.double())
        expected = torch.autograd.grad(expected, exact, grad_out.double())
        with torch.no_grad():
            bounds = gradient_bounds(*exact, grad_out.double(), weights, bias.double())
        for name, one, other, bound in zip('qkv', found, expected, bounds):
            self.assertEqual((one.dtype, one.shape), (torch.float32, other.shape))
            self.assertTrue(((one - other).abs() <= bound).all(), '%s: gradient of %s' % (technique, name))
            self.assertGreater(other.abs().mean(), 20 * bound.mean(), 'a bound that would not find an error')

    def test_gradients_are_those_of_pytorchs_autograd_in_float64(self):
        i, j = torch.arange(40)[:, None], torch.arange(40)
        everything, earlier = torch.ones(40, 40, dtype=torch.bool), j <= i
        self.check_gradients('dense', *inputs_of_gradients(2, 4, 40, 16), False, everything)
        self.check_gradients('dense', *inputs_of_gradients(2, 4, 40, 16), True, earlier)
        self.check_gradients(TECHNIQUE, *inputs_of_gradients(2, 4, 40, 16), False, (i - j).abs() <= 8)
        slopes = 2.0**(-2 * torch.arange(1, 5))[:, None, None]
        self.check_gradients('alibi', *inputs_of_gradients(2, 4, 40, 16), True, earlier, slopes * (j - i))
        # Grouped heads, fewer queries than keys, and other channels of values.
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in ((2, 4, 9, 16), (2, 2, 40, 16), (2, 2, 40, 24)))
        self.check_gradients('dense', q, k, v, True, j <= i[:9] + 31)

    def test_pytorch_finds_nothing_wrong_with_the_gradients(self):
        for q, k, v in (inputs_of_gradients(2, 4, 40, 16), inputs_of_gradients(1, 2, 9, 8, dtype=torch.bfloat16)):
            torch.library.opcheck(torch.ops.tfb.attention.default, (q, k, v, TECHNIQUE, True, True))
            out, kept = torch.ops.tfb.attention(q, k, v, TECHNIQUE, True, True)
            arguments = [one.detach() for one in (torch.randn_like(out), q, k, v, out, kept)]
            for needed in ([True, True, True], [False, True, False]):
                torch.library.opcheck(torch.ops.tfb.attention_backward.default, (*arguments, TECHNIQUE, True, needed))

    def test_gradients_are_computed_where_they_are_needed(self):
        q, k, v = tensors(1, 2, 32, 8)
        k.requires_grad_()
        tfb.torch.attention(q, k, v, TECHNIQUE).sum().backward()
        expected = tfb.gradients(TECHNIQUE, q, k.detach(), v, torch.ones(1, 2, 32, 8))
        self.assertTrue(torch.equal(k.grad, expected.inputs['k']))
        self.assertEqual((q.grad, v.grad), (None, None))
        with torch.no_grad():
            self.assertFalse(tfb.torch.attention(q, k, v, TECHNIQUE).requires_grad)

    def test_compiled_code_differentiates_in_one_graph(self):

        def loss(q, k, v):
            return tfb.torch.attention(q * 2, k, v, TECHNIQUE, causal=True).square().sum()

        for dynamic, lengths in ((False, (64,)), (None, (64, 48, 40)), (True, (64, 48))):
            torch.compiler.reset()
            compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
            for tokens in lengths:
                inputs = inputs_of_gradients(1, 2, tokens, 32)
                expected = torch.autograd.grad(loss(*inputs), inputs)
                for one, other in zip(torch.autograd.grad(compiled(*inputs), inputs), expected):
                    torch.testing.assert_close(one, other)

    def test_a_module_is_trained(self):
        torch.manual_seed(1)
        project = torch.nn.Linear(16, 48)
        optimizer = torch.optim.Adam(project.parameters(), lr=0.02)
        x = torch.randn(1, 30, 16)
        wanted = x.roll(1, 1)  # each token's predecessor
        losses = []
        for _ in range(60):
            q, k, v = project(x).view(1, 30, 3, 2, 8).permute(2, 0, 3, 1, 4)
            out = tfb.torch.attention(q, k, v, 'alibi', causal=True).transpose(1, 2).flatten(2)
            losses.append((out - wanted)[:, 1:].square().mean())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        self.assertLess(losses[-1].item(), 0.75 * losses[0].item())

    def test_a_technique_without_a_backward_pass_runs_and_says_why(self):
        # Which techniques have none changes; the tests of the C interface go through them.
        reason = tfb.UnimplementedError('the layer has no backward pass')
        q, k, v = inputs_of_gradients(1, 2, 32, 8)
        with unittest.mock.patch.multiple(tfb.Layer, check_backward=unittest.mock.Mock(side_effect=reason),
                                          describe_backward=unittest.mock.Mock(side_effect=reason)):
            out = tfb.torch.attention(q, k, v, TECHNIQUE)
            self.assertTrue(torch.equal(out, tfb.attention(TECHNIQUE, q.detach(), k.detach(), v.detach())))
            with self.assertRaisesRegex(tfb.UnimplementedError, 'the layer has no backward pass'):
                out.sum().backward()

    def test_gradients_that_stop_are_zero(self):
        q, k, v = inputs_of_gradients(1, 2, 32, 8)
        tfb.torch.attention(q, k, v, 'hard').sum().backward()  # an argmax: constant in the scores
        self.assertFalse(q.grad.any() or k.grad.any())
        self.assertEqual(v.grad.sum(), 1 * 2 * 32 * 8)  # each query takes one value

    def test_the_readmes_example_runs(self):
        (example,) = re.findall(r'(    import tfb.torch, torch\n(?:    .*\n)+)', README.read_text())
        exec(textwrap.dedent(example), {})


if __name__ == '__main__':
    unittest.main()
