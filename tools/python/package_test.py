#!/usr/bin/python3
"""Uses the package as a user does, from the wheel's contents: package_test.py FOLDER_OF_WHEEL README LIBRARY."""

import copy
import inspect
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import unittest
import unittest.mock
import zipfile

import numpy

import sanitized

sanitized.run_with_runtime_of(sys.argv[3], sys.argv)
del sys.argv[3]
README = pathlib.Path(sys.argv.pop(2)).read_text()
FOLDER = tempfile.TemporaryDirectory()
with zipfile.ZipFile(next(pathlib.Path(sys.argv.pop(1)).glob('*.whl'))) as wheel:
    for name in wheel.namelist():
        os.chmod(wheel.extract(name, FOLDER.name), wheel.getinfo(name).external_attr >> 16)
sys.path.insert(0, FOLDER.name)
import tfb  # pylint: disable=wrong-import-position


def draw(*shape, dtype='float32', seed=1):
    return numpy.random.default_rng(seed).standard_normal(shape).astype(dtype)


def softmax_attention(q, k, v, causal):
    scores = numpy.einsum('bhid,bhjd->bhij', q, k).astype('float64') / numpy.sqrt(q.shape[3])
    if causal:
        scores[..., numpy.triu(numpy.ones(scores.shape[2:], bool), 1)] = -numpy.inf
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    return numpy.einsum('bhij,bhjd->bhid', weights / weights.sum(-1, keepdims=True), v)


class Attention(unittest.TestCase):

    def test_is_softmax_attention_where_it_is_dense(self):
        q, k, v = draw(3, 2, 4, 50, 16)
        for causal in (False, True):
            y = tfb.attention('dense', q, k, v, causal=causal)
            self.assertIsInstance(y, numpy.ndarray)
            self.assertEqual((y.shape, y.dtype), (q.shape, q.dtype))
            numpy.testing.assert_allclose(y, softmax_attention(q, k, v, causal), atol=2e-6)

    def test_reads_arrays_where_they_lie(self):
        q, k, v = draw(3, 2, 50, 4, 16).transpose(0, 1, 3, 2, 4)  # tokens before heads
        numpy.testing.assert_array_equal(tfb.attention('dense', q, k, v),
                                         tfb.attention('dense', *(numpy.ascontiguousarray(one) for one in (q, k, v))))

    def test_takes_half_precision_groups_of_heads_and_a_mask(self):
        q, k, v = draw(1, 4, 30, 16, dtype='float16'), draw(1, 2, 40, 16, dtype='float16'), draw(1, 2, 40, 8, dtype='float16')
        mask = numpy.arange(40)[None] < 33
        y = tfb.attention('dense', q, k, v, key_mask=mask)
        self.assertEqual((y.shape, y.dtype), ((1, 4, 30, 8), numpy.float16))
        shorter = tfb.attention('dense', q, k[:, :, :33], v[:, :, :33])
        numpy.testing.assert_allclose(y.astype('float32'), shorter.astype('float32'), atol=2e-3)

    def test_of_techniques_that_do_not_read_k(self):
        q, k, v = draw(3, 1, 2, 64, 16)
        self.assertEqual(tfb.attention('lsh:rounds=2', q, k, v).shape, v.shape)

    def test_threads_may_call_at_once(self):
        q, k, v = draw(3, 1, 2, 64, 16)
        expected, found = tfb.attention('dense', q, k, v), []
        threads = [threading.Thread(target=lambda: found.append(tfb.attention('dense', q, k, v))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(found), 4)
        for y in found:
            numpy.testing.assert_array_equal(y, expected)

    def test_is_fitted_to_the_arrays_of_each_call(self):
        technique = 'linformer:k=8,projection=fit'
        first, second = draw(3, 1, 2, 40, 16), draw(3, 1, 2, 40, 16, seed=2)

        def alone(q, k, v):
            return tfb.Layer(technique, tokens=40, heads=2, head_dim=16).run(q=q, k=k, v=v)

        for arrays in (first, second, first):
            numpy.testing.assert_array_equal(tfb.attention(technique, *arrays), alone(*arrays))
        y, grad_out = alone(*second), draw(1, 2, 40, 16, seed=3)
        self.assertTrue(tfb.error(technique, *second, out=y)['passed'])  # the layer had the first arrays before
        fitted = tfb.gradients(technique, *second, grad_out)
        tfb.attention(technique, *first)
        for name, gradient in tfb.gradients(technique, *second, grad_out).inputs.items():
            numpy.testing.assert_array_equal(gradient, fitted.inputs[name])

    def test_redraws_in_each_call_where_it_is_asked_to(self):
        q, k, v = draw(3, 1, 2, 40, 16)
        for technique in ('performer', 'rfa'):
            first, second, third = (tfb.attention(technique + ':redraw=true', q, k, v) for _ in range(3))
            self.assertTrue((first != second).any() and (second != third).any())
            self.assertTrue(tfb.error(technique + ':redraw=true', q, k, v, out=third)['passed'])
            numpy.testing.assert_array_equal(tfb.attention(technique, q, k, v), first)

    def test_of_an_optional_input_that_is_none(self):
        q, k, v = draw(3, 1, 2, 40, 16)
        expected = tfb.attention('dense', q, k, v)
        numpy.testing.assert_array_equal(tfb.attention('dense', q, k, v, key_mask=None), expected)
        found = tfb.gradients('dense', q, k, v, expected, key_mask=None).inputs
        self.assertEqual(list(found), ['q', 'k', 'v'])
        self.assertTrue(tfb.error('dense', q, k, v, key_mask=None)['passed'])

    @unittest.skipIf('libtsan' in os.environ.get('LD_PRELOAD', ''), 'thread sanitizer has no threads behind a fork')
    def test_a_process_that_forks_has_layers_of_its_own(self):
        self.run_alone("""
            import os, numpy, sys, tfb
            q = numpy.ones((1, 2, 40, 16), 'float32')
            expected = tfb.attention('dense', q, q, q, threads=2)
            layer = tfb.Layer('dense', tokens=40, heads=2, head_dim=16, threads=2)
            parent, child = os.getpid(), os.fork()
            if child == 0:
                try:
                    layer.run(q=q, k=q, v=q)
                    sys.exit('the layer runs')
                except tfb.FailedPreconditionError as error:
                    assert 'made in process %d before a fork' % parent in str(error), error
                assert repr(layer) == '<tfb.Layer of process %d, before a fork>' % parent
                assert (tfb.attention('dense', q, q, q, threads=2) == expected).all()
                del layer
                sys.exit()
            assert os.waitpid(child, 0)[1] == 0
            assert (layer.run(q=q, k=q, v=q) == expected).all()
        """)

    def run_alone(self, code):
        subprocess.run([sys.executable, '-c', textwrap.dedent(code)], check=True, timeout=60,
                       env=dict(os.environ, PYTHONPATH=FOLDER.name))


def softmax_gradients(q, k, v, grad_out, causal):
    """Returns the gradients of softmax_attention, in float64."""
    q, k, v, grad_out = (one.astype('float64') for one in (q, k, v, grad_out))
    scale = 1 / numpy.sqrt(q.shape[3])
    scores = numpy.einsum('bhid,bhjd->bhij', q, k) * scale
    if causal:
        scores[..., numpy.triu(numpy.ones(scores.shape[2:], bool), 1)] = -numpy.inf
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = numpy.einsum('bhid,bhjd->bhij', grad_out, v)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    return {
        'q': numpy.einsum('bhij,bhjd->bhid', of_scores, k),
        'k': numpy.einsum('bhij,bhid->bhjd', of_scores, q),
        'v': numpy.einsum('bhij,bhid->bhjd', weights, grad_out)
    }


class Gradients(unittest.TestCase):

    # The C interface's and the engines' tests have bounds; a wrong factor, sign or order is beyond this one.
    def expect_close(self, found, expected):
        self.assertEqual(found.shape, expected.shape)
        self.assertEqual(found.dtype, numpy.float32)
        self.assertLess(numpy.linalg.norm(found - expected), 1e-4 * numpy.linalg.norm(expected))

    def test_are_those_of_softmax_attention_where_it_is_dense(self):
        q, k, v, grad_out = draw(4, 2, 4, 50, 16)
        for causal in (False, True):
            found = tfb.gradients('dense', q, k, v, grad_out, causal=causal)
            expected = softmax_gradients(q, k, v, grad_out, causal)
            self.assertEqual((list(found.inputs), found.parameters), (['q', 'k', 'v'], {}))
            for name, gradient in found.inputs.items():
                self.assertIsInstance(gradient, numpy.ndarray)
                self.expect_close(gradient, expected[name])

    def test_of_arrays_where_they_lie(self):
        q, k, v, grad_out = draw(4, 2, 50, 4, 16).transpose(0, 1, 3, 2, 4)
        found = tfb.gradients('dense', q, k, v, grad_out)
        for name, gradient in tfb.gradients('dense', *map(numpy.ascontiguousarray, (q, k, v, grad_out))).inputs.items():
            numpy.testing.assert_array_equal(found.inputs[name], gradient)

    def test_of_parameters_are_slopes_of_the_definition(self):
        q, k, v, grad_out = draw(4, 1, 2, 40, 16)
        layer = tfb.Layer('t5_bias', tokens=40, heads=2, head_dim=16, causal=True)
        beta = layer.parameters()['beta'].astype('float64')
        direction = draw(*beta.shape, seed=2).astype('float64')
        direction /= numpy.linalg.norm(direction)

        def loss(shift):
            layer.set_parameters({'beta': (beta + shift * direction).astype('float32')})
            return (layer.define(q=q, k=k, v=v)['out'] * grad_out).sum()

        # The parameter is float32: a step far above its spacing, whose own error is of the second order.
        expected = (loss(1e-2) - loss(-1e-2)) / 2e-2
        found = tfb.gradients('t5_bias', q, k, v, grad_out, causal=True)
        self.assertEqual((list(found.inputs), list(found.parameters)), (['q', 'k', 'v'], ['beta']))
        self.assertEqual(found.parameters['beta'].dtype, numpy.float32)
        self.assertAlmostEqual((found.parameters['beta'] * direction).sum() / expected, 1, delta=1e-3)

    def test_of_half_precision_and_groups_of_heads(self):
        q, k, v = draw(1, 4, 30, 16, dtype='float16'), draw(1, 2, 40, 16, dtype='float16'), draw(1, 2, 40, 8, dtype='float16')
        found = tfb.gradients('dense', q, k, v, draw(1, 4, 30, 8, dtype='float16')).inputs
        self.assertEqual({name: (one.shape, one.dtype) for name, one in found.items()},
                         {name: (one.shape, one.dtype) for name, one in (('q', q), ('k', k), ('v', v))})

    def test_of_masked_keys_are_zero(self):
        q, k, v, grad_out = draw(4, 1, 2, 40, 16)
        k[:, :, 33:] = numpy.nan
        found = tfb.gradients('dense', q, k, v, grad_out, key_mask=numpy.arange(40)[None] < 33).inputs
        self.assertTrue(all(numpy.isfinite(one).all() for one in found.values()))
        self.assertFalse(found['k'][:, :, 33:].any() or found['v'][:, :, 33:].any())

    def test_of_a_layers_runs_in_any_order(self):
        layer = tfb.Layer('longformer:window=16', tokens=40, heads=2, head_dim=16)
        runs = []
        for seed in (1, 2):
            q, k, v = draw(3, 1, 2, 40, 16, seed=seed)
            inputs = dict(q=q, k=k, v=v)
            outputs, kept = layer.run_kept(['out', 'log_sum_exp'], **inputs)
            numpy.testing.assert_array_equal(outputs['out'], layer.run(**inputs))
            runs.append((inputs, outputs, kept))
        grad_out = draw(1, 2, 40, 16, seed=3)
        for inputs, outputs, kept in runs:
            found = layer.backward(kept, outputs, {'out': grad_out}, **inputs).inputs
            for name, gradient in tfb.gradients('longformer:window=16', grad_out=grad_out, **inputs).inputs.items():
                numpy.testing.assert_array_equal(found[name], gradient)
            self.assertEqual(list(layer.backward(kept, outputs, {'out': grad_out}, ['v'], **inputs).inputs), ['v'])
            misplaced = numpy.empty(kept.size + 1, 'uint8')[1:]
            misplaced[:] = kept
            again = layer.backward(misplaced, outputs, {'out': grad_out}, **inputs).inputs
            numpy.testing.assert_array_equal(again['q'], found['q'])
            # The log-sum-exp does not depend on the values.
            of_log_sum_exp = layer.backward(kept, outputs, {'log_sum_exp': draw(1, 2, 40)}, **inputs).inputs
            self.assertTrue(of_log_sum_exp['q'].any())
            self.assertFalse(of_log_sum_exp['v'].any())

    def test_of_an_input_and_a_parameter_of_one_name_are_two(self):
        q, k, v, grad_out = draw(4, 1, 2, 40, 16)
        found = tfb.gradients('transformer_xl_relative', q, k, v, grad_out)
        self.assertEqual(found.inputs['v'].shape, v.shape)
        self.assertEqual(found.parameters['v'].shape, (2, 16))

    def test_are_described(self):
        known = 0
        for one in tfb.techniques():
            layer = tfb.Layer(one['name'], tokens=96, heads=2, head_dim=16, causal=one['causal'][-1])
            try:
                layer.check_backward()
            except tfb.UnimplementedError as error:
                self.assertTrue(str(error))
                with self.assertRaises(tfb.UnimplementedError) as caught:
                    layer.run_kept()
                self.assertEqual(str(caught.exception), str(error))
                continue
            known += 1
            said = layer.describe_backward()
            names = {spec.name for spec in said['input_gradients'] + said['parameter_gradients']}
            self.assertFalse(names & set(said['stopped']))
            self.assertLessEqual(names, {spec.name for spec in layer.inputs} | set(layer.parameters()))
            self.assertEqual(layer.kept_bytes(), said['kept_bytes'])
        self.assertGreaterEqual(known, 15)

    def test_of_every_technique_with_arrays_of_numpy(self):
        nothing_kept = []
        for one in tfb.techniques():
            layer = tfb.Layer(one['name'], tokens=32, heads=2, head_dim=8, causal=one['causal'][-1])
            try:
                size = layer.kept_bytes()
            except tfb.UnimplementedError:
                continue
            inputs = {
                spec.name: draw(*spec.shape) if spec.dtype == 'f32' else numpy.zeros(spec.shape, 'int32')
                for spec in layer.inputs
                if not spec.optional
            }
            others = []
            for run in range(8 if size == 0 else 1):
                outputs, kept = layer.run_kept(**inputs)
                others.append((kept, numpy.empty(48 + 16 * run, 'uint8')))  # further memory begins elsewhere
                self.assertTrue(layer.backward(kept, outputs, {'out': outputs['out']}, **inputs).inputs)
            if size == 0:
                nothing_kept.append(one['name'])
                nothing = numpy.empty(99, 'uint8')[1:][:0]
                self.assertNotEqual(nothing.__array_interface__['data'][0] % 64, 0)
                self.assertTrue(layer.backward(nothing, outputs, {'out': outputs['out']}, **inputs).inputs)
        self.assertIn('gated_transformer_xl', nothing_kept)

    def test_that_cannot_be_are_refused(self):
        q, k, v, grad_out = draw(4, 1, 2, 40, 16)
        layer = tfb.Layer('dense', tokens=40, heads=2, head_dim=16)
        outputs, kept = layer.run_kept(q=q, k=k, v=v)

        def expect(kind, message, call):
            with self.assertRaises(kind) as caught:
                call()
            self.assertEqual(str(caught.exception), message)

        expect(tfb.InvalidArgumentError, 'output gradient out has shape [1, 2, 39, 16]; expected is [1, 2, 40, 16]',
               lambda: tfb.gradients('dense', q, k, v, grad_out[:, :, :39]))
        expect(tfb.InvalidArgumentError, 'output out [1, 2, 40, 16] is missing',
               lambda: layer.backward(kept, {}, {'out': grad_out}, q=q, k=k, v=v))
        expect(tfb.InvalidArgumentError, 'kept memory has 8 bytes; the layer needs %d' % kept.size,
               lambda: layer.backward(kept[:8], outputs, {'out': grad_out}, q=q, k=k, v=v))
        expect(tfb.NotFoundError, 'there is no gradient of "w"',
               lambda: layer.backward(kept, outputs, {'out': grad_out}, ['w'], q=q, k=k, v=v))
        expect(tfb.NotFoundError, 'there is no output "weights"; the layer writes out, log_sum_exp',
               lambda: layer.run_kept(['weights'], q=q, k=k, v=v))


class Errors(unittest.TestCase):

    def test_of_a_technique_are_within_its_bound_and_beside_dense_attention(self):
        q, k, v = draw(3, 1, 2, 200, 16)
        found = tfb.error('longformer:window=32', q, k, v, causal=True)
        self.assertTrue(found['passed'])
        self.assertLess(found['definition']['max_abs_over_max_value'], found['definition']['bound'])
        self.assertGreater(found['dense']['relative_frobenius'], 0.1)
        self.assertTrue(0 < found['kept_mass'] < 1 and 0 < found['recall'] < 1)

    def test_of_the_callers_own_result(self):
        q, k, v = draw(3, 1, 2, 60, 16)
        own = softmax_attention(q, k, v, True).astype('float32')
        self.assertTrue(tfb.error('dense', q, k, v, out=own, causal=True)['passed'])
        own[0, 1, 7, 3] += 0.25
        found = tfb.error('dense', q, k, v, out=own, causal=True)
        self.assertFalse(found['passed'])
        self.assertAlmostEqual(found['definition']['max_abs'], 0.25, 5)


class Exceptions(unittest.TestCase):

    def expect(self, kinds, message, call):
        with self.assertRaises(kinds[0]) as caught:
            call()
        for kind in kinds:
            self.assertIsInstance(caught.exception, kind)
        self.assertEqual(str(caught.exception), message)

    def test_have_the_librarys_message(self):
        q, k, v = draw(3, 1, 2, 60, 16)
        self.expect([tfb.NotFoundError, tfb.Error, KeyError], 'there is no technique "dens"; nearest are dense, etc, calm',
                    lambda: tfb.attention('dens', q, k, v))
        self.expect([tfb.InvalidArgumentError, ValueError],
                    'unknown option "windw"; known are window, one_sided, dilation, globals, max_globals, projections',
                    lambda: tfb.attention('longformer:windw=3', q, k, v))
        self.expect([tfb.InvalidArgumentError], 'input k has shape [1, 2, 60, 3]; expected is [1, 2, 60, 16]',
                    lambda: tfb.attention('dense', q, k[..., :3], v))
        self.expect([tfb.InvalidArgumentError], 'q has shape [2, 60, 16]; it must be [batch, heads, tokens, channels]',
                    lambda: tfb.attention('dense', q[0], k, v))
        self.expect([tfb.InvalidArgumentError], 'there is no input "mask"',
                    lambda: tfb.attention('dense', q, k, v, mask=numpy.ones((1, 60), bool)))
        self.expect([tfb.UnimplementedError, NotImplementedError], 'strided is causal only',
                    lambda: tfb.attention('strided', q, k, v))
        self.expect([TypeError], 'list is no array: it has no __dlpack__', lambda: tfb.attention('dense', q, k, v, key_mask=[1]))

    def test_of_numbers_and_texts_that_the_library_would_cut(self):
        q, k, v = draw(3, 1, 2, 60, 16)
        self.expect([tfb.InvalidArgumentError], 'tokens is 18446744073709551621; allowed are 0 to 1099511627776',
                    lambda: tfb.Layer('dense', tokens=2**64 + 5))
        self.expect([tfb.InvalidArgumentError], 'threads is 1099511627776; allowed are 0 to 4096',
                    lambda: tfb.attention('dense', q, k, v, threads=2**40))
        self.expect([TypeError], 'threads is None; it must be an integer', lambda: tfb.attention('dense', q, k, v, threads=None))
        self.expect([tfb.InvalidArgumentError], 'seed is 18446744073709551616; allowed are 0 to 18446744073709551615',
                    lambda: tfb.Layer('dense', tokens=4, seed=2**64))
        self.expect([tfb.InvalidArgumentError], "technique is 'dense\\x00x'; it must have no NUL",
                    lambda: tfb.attention('dense\0x', q, k, v))
        self.expect([tfb.InvalidArgumentError], "device is 'cpu\\x00'; it must have no NUL",
                    lambda: tfb.Layer('dense', tokens=4, device='cpu\0'))
        self.expect([tfb.InvalidArgumentError], "name is 'q\\x00'; it must have no NUL",
                    lambda: tfb.Layer('dense', tokens=4).run(**{'q\0': q}))
        self.expect([TypeError], "technique is b'dense'; it must be a str", lambda: tfb.attention(b'dense', q, k, v))

    def test_an_interrupt_ends_a_call(self):
        # A shell that starts a program in the background lets it ignore interrupts.
        code = ('import numpy, signal, sys, tfb\n'
                'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
                'q = numpy.zeros((1, 1, 1 << 19, 16), "float32")\n'
                'tfb.attention("dense", q[:, :, :8], q[:, :, :8], q[:, :, :8])\n'
                'try:\n'
                '    print("ready", flush=True)\n'
                '    tfb.attention("dense", q, q, q)\n'
                'except KeyboardInterrupt:\n'
                '    print("interrupted")\n')
        process = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=FOLDER.name))
        process.stdout.readline()
        process.send_signal(signal.SIGINT)  # once more would do no harm; minutes of work are left
        self.assertEqual(process.communicate()[0], b'interrupted\n')


class Layers(unittest.TestCase):

    def test_read_hidden_states_and_have_parameters(self):
        layer = tfb.Layer('multi_head:inner=longformer[window=16]', tokens=80, heads=2, head_dim=16)
        x = draw(1, 80, 32)
        parameters = layer.parameters()
        self.assertEqual(sorted(parameters), ['w_k', 'w_o', 'w_q', 'w_v'])
        y = layer.run(x=x)
        numpy.testing.assert_allclose(y, layer.define(x=x)['out'], atol=1e-4)
        layer.set_parameters({'w_o': numpy.zeros((32, 32), 'float64')})
        self.assertFalse(layer.run(x=x).any())
        self.assertTrue(parameters['w_o'].any())  # a copy

    def test_write_further_outputs_and_into_arrays(self):
        q, k, v = draw(3, 1, 2, 40, 16)
        layer = tfb.Layer('dense', tokens=40, heads=2, head_dim=16)
        out = numpy.empty_like(q)
        found = layer.run_for(['out', 'log_sum_exp'], into={'out': out}, q=q, k=k, v=v)
        self.assertIs(found['out'], out)
        scores = numpy.einsum('bhid,bhjd->bhij', q, k) / 4
        numpy.testing.assert_allclose(found['log_sum_exp'], numpy.log(numpy.exp(scores).sum(-1)), atol=1e-5)
        weights = layer.define(['weights'], q=q, k=k, v=v)['weights']
        numpy.testing.assert_allclose(weights.sum(-1), 1, atol=1e-12)

    def test_write_into_no_array_that_must_not_change(self):
        q, k, v = draw(3, 1, 2, 40, 16)
        layer = tfb.Layer('dense', tokens=40, heads=2, head_dim=16)
        expected = layer.run(q=q, k=k, v=v)

        def write(out):
            return layer.run_for(['out'], into={'out': out}, q=q, k=k, v=v)['out']

        def expect_refused(out, message):
            with self.assertRaises(tfb.InvalidArgumentError) as caught:
                write(out)
            self.assertIn(message, str(caught.exception))

        path = os.path.join(FOLDER.name, 'zeros')
        pathlib.Path(path).write_bytes(bytes(q.nbytes))
        frozen = numpy.zeros_like(q)
        frozen.flags.writeable = False
        for out in (frozen, numpy.frombuffer(bytes(q.nbytes), 'float32').reshape(q.shape),
                    numpy.memmap(path, 'float32', 'r', shape=q.shape)):
            expect_refused(out, 'output out is read-only')
            self.assertFalse(out.any())
        with unittest.mock.patch.dict(sys.modules, jax=types.ModuleType('jax')):
            expect_refused(type('ArrayImpl', (), {'__module__': 'jaxlib.jax'})(), 'output out is an array of JAX')
        row = numpy.zeros((1, 2, 41, 16), 'float32')
        one_place = numpy.lib.stride_tricks.as_strided(row, q.shape, (*row.strides[:2], 0, 4))
        windows = numpy.lib.stride_tricks.as_strided(row, q.shape, (*row.strides[:2], 32, 4))
        for out in (one_place, windows):
            expect_refused(out, 'output out overlaps itself')
        self.assertFalse(row.any())
        for out in (numpy.empty((1, 40, 2, 16), 'float32').transpose(0, 2, 1, 3), numpy.empty_like(q)[:, :, ::-1],
                    numpy.memmap(path, 'float32', 'r+', shape=q.shape)):
            numpy.testing.assert_array_equal(write(out), expected)
        empty = tfb.Layer('dense', tokens=0, kv_tokens=4, heads=2, head_dim=16)
        empty.run_for(['out'], into={'out': q[:, :, :0]}, q=q[:, :, :0], k=k[:, :, :4], v=v[:, :, :4])

    def test_cannot_be_copied(self):
        layer = tfb.Layer('dense', tokens=4)
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with self.assertRaises(TypeError) as caught:
                make(layer)
            self.assertEqual(str(caught.exception), 'a tfb.Layer cannot be copied or pickled; keep its parameters()')

    def test_read_arrays_of_subclasses_and_of_a_numpy_without_dlpack(self):

        class Older(numpy.ndarray):

            @property
            def __dlpack__(self):
                raise AttributeError('__dlpack__')

        q, k, v = draw(3, 1, 2, 40, 16)
        found = tfb.attention('dense', *(one.view(Older) for one in (q, k, v)))
        numpy.testing.assert_array_equal(found, tfb.attention('dense', q, k, v))

    def test_define_weights_by_the_problems_sizes(self):
        q, v, x = draw(1, 2, 64, 16), draw(1, 2, 64, 16), draw(1, 64, 32)
        for technique, causal, inputs in (('lsh', False, dict(q=q, v=v)), ('routing', True, dict(q=q, v=v)),
                                          ('multi_head', False, dict(x=x))):
            layer = tfb.Layer(technique, tokens=64, heads=2, head_dim=16, causal=causal)
            weights = layer.define(['weights'], **inputs)['weights']
            self.assertEqual(weights.shape, (1, 2, 64, 64))
            sums = weights.sum(-1)
            numpy.testing.assert_allclose(sums[sums != 0], 1, atol=1e-12)
            self.assertTrue(sums.any())

    def test_define_float64_where_jax_has_none(self):
        made = numpy.zeros(3)
        array = type('ArrayImpl', (), {'__module__': 'jaxlib.jax'})()
        for has_float64 in (False, True):
            jax = types.SimpleNamespace(config=types.SimpleNamespace(jax_enable_x64=has_float64),
                                        numpy=types.SimpleNamespace(asarray=lambda one: 'of JAX'))
            with unittest.mock.patch.dict(sys.modules, {'jax': jax}):
                self.assertIs(tfb._arrays.of_kind(array, made), 'of JAX' if has_float64 else made)
                self.assertEqual(tfb._arrays.of_kind(array, made.astype('float32')), 'of JAX')

    def test_have_parameters_of_half_precision(self):
        for dtype in ('f16', 'bf16'):
            layer = tfb.Layer('adaptive_span', tokens=32, heads=2, head_dim=8, causal=True, dtype=dtype)
            parameters = layer.parameters()
            position = parameters['position'].astype('float32')
            self.assertTrue(0 < abs(position).max() < 100)
            layer.set_parameters({'position': 2 * position})
            numpy.testing.assert_array_equal(layer.parameters()['position'].astype('float32'), 2 * position)

    def test_append_sets_up(self):
        for technique in ('performer', 'transformer_xl', 'knn_lm'):
            layer, other = (tfb.Layer(technique, tokens=64, heads=2, head_dim=16, causal=True) for _ in range(2))
            inputs = {spec.name: draw(*spec.shape) for spec in layer.inputs if not spec.optional}
            segment = {name: one[:, :, :8] if one.ndim == 4 else one[:, :8] for name, one in inputs.items()}
            other.setup(**inputs)
            expected = other.append(**segment)
            numpy.testing.assert_array_equal(layer.append(**segment), expected)
            layer.append(**segment)
            layer.set_parameters(layer.parameters())
            numpy.testing.assert_array_equal(layer.append(**segment), expected)  # a new sequence has begun

    def test_append_nothing_to_a_sequence_that_an_interrupt_ended(self):
        layer = tfb.Layer('performer', tokens=64, heads=2, head_dim=16, causal=True)
        segment = {name: draw(1, 2, 8, 16) for name in ('q', 'k', 'v')}
        first = layer.append(**segment)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with self.assertRaises(KeyboardInterrupt):
            layer._check_call(1)  # as of a call that was interrupted
        signal.signal(signal.SIGINT, before)
        with self.assertRaises(tfb.FailedPreconditionError) as caught:
            layer.append(**segment)
        self.assertIn('the sequence is lost', str(caught.exception))
        layer.reset()
        numpy.testing.assert_array_equal(layer.append(**segment), first)

    def test_read_segments(self):
        layer = tfb.Layer('transformer_xl', tokens=256, heads=2, head_dim=16, causal=True)
        x = draw(1, 256, 32)
        whole = layer.run(x=x)
        step = layer.streaming['split_tokens']
        layer.reset()
        parts = [layer.append(x=x[:, begin:begin + step]) for begin in range(0, 256, step)]
        numpy.testing.assert_allclose(numpy.concatenate(parts, 1), whole, atol=1e-5)
        layer.reset()
        numpy.testing.assert_array_equal(layer.append(x=x[:, :step]), parts[0])

    def test_of_every_technique_are_made(self):
        known = tfb.techniques()
        self.assertGreaterEqual(len(known), 38)
        for one in known:
            layer = tfb.Layer(one['name'], tokens=96, heads=2, head_dim=16, causal=one['causal'][-1])
            self.assertIn('out', [spec.name for spec in layer.outputs])


class Sweeps(unittest.TestCase):

    def test_are_records_frames_and_pages(self):
        path = os.path.join(FOLDER.name, 'results.pb')
        swept = tfb.sweep(['dense', 'longformer:window=32'], '128,256', path, accuracy=False, repetitions=3, heads=1, head_dims=16)
        results = tfb.read(path)
        self.assertEqual(results, swept)
        self.assertEqual({(one['key']['technique'], one['key']['query_tokens']) for one in results},
                         {(name, tokens) for name in ('dense', 'longformer') for tokens in (128, 256)})
        self.assertGreater(results[0]['times']['run_median_ns'], 0)
        self.assertIn('longformer', results.table())
        page = os.path.join(FOLDER.name, 'report.html')
        results.html(page)
        self.assertIn('<svg', pathlib.Path(page).read_text())
        # Dense and longformer of a length are measured in the same visits.
        pandas = types.SimpleNamespace(DataFrame=lambda rows: rows)
        with unittest.mock.patch.dict(sys.modules, pandas=pandas):
            rows = results.frame()
        runs = [row for row in rows if row['quantity'] == 'run_ns']
        for one in results:
            name, tokens = one['key']['technique'], one['key']['query_tokens']
            numbers = [row['sample'] for row in runs if (row['technique'], row['query_tokens']) == (name, tokens)]
            self.assertEqual(numbers, list(range(len(one['samples']['run_ns']))))
        for tokens in (128, 256):
            visits = {row['technique']: set() for row in runs}
            for row in runs:
                if row['query_tokens'] == tokens:
                    visits[row['technique']].add(row['visit'])
            self.assertNotIn(0, visits['longformer'])
            self.assertLessEqual(visits['longformer'], visits['dense'])
        self.assertEqual({row['visit'] for row in rows if row['quantity'] != 'run_ns'}, {0})

    def test_measure_the_step_of_training(self):
        results = tfb.sweep(['dense'], '64', accuracy=False, repetitions=3, heads=1, head_dims=16, pass_='forward,training')
        by_pass = {one['key']['pass']: one for one in results}
        self.assertEqual(sorted(by_pass), ['forward', 'training'])
        forward, training = by_pass['forward'], by_pass['training']
        self.assertEqual(training['outcome']['status'], 'ok', training['outcome'])
        self.assertGreater(training['costs']['kept_bytes'], 64 * 16 * 4)
        self.assertEqual(training['costs']['flops'], 3.5 * forward['costs']['flops'])

    def test_of_what_is_not_there_fail(self):
        with self.assertRaises(tfb.InvalidArgumentError) as caught:
            tfb.read('/nowhere/x.pb')
        self.assertIn('/nowhere/x.pb', str(caught.exception))
        with self.assertRaises(TypeError):
            tfb.sweep([1.5])
        with self.assertRaises(ValueError):
            tfb.sweep([softmax_attention, softmax_attention])

    def test_say_why_they_fail(self):
        for technique, message in (('dens', 'there is no technique "dens"'), ('dense:scale=x', 'option scale is "x"')):
            with self.assertRaises(tfb.InvalidArgumentError) as caught:
                tfb.sweep([technique], '64')
            self.assertRegex(str(caught.exception), '(?s)^sweep ended with status [0-9]+: .*' + message)
        for techniques, lengths, what in (([], '64', 'techniques'), (['dense'], [], 'lengths'), (['dense'], '', 'lengths')):
            with self.assertRaises(tfb.InvalidArgumentError) as caught:
                tfb.sweep(techniques, lengths)
            self.assertEqual(str(caught.exception), 'there are no %s to sweep over' % what)

    def test_of_one_technique_and_a_terminal(self):
        # Standard error is a terminal, and stays one for the program.
        code = textwrap.dedent("""
            import tfb
            results = tfb.sweep('dense', [64], accuracy=False, repetitions=3, heads=1, head_dims=16, causal=False)
            assert [one['key']['technique'] for one in results] == ['dense'], results
            try:
                tfb.sweep('dens', [64])
            except ValueError as error:
                assert 'there is no technique' in str(error), error
        """)
        near, far = os.openpty()
        environment = dict(os.environ, PYTHONPATH=FOLDER.name, TERM='xterm')
        with subprocess.Popen([sys.executable, '-c', code], stderr=far, env=environment) as process:
            os.close(far)
            shown = b''
            while True:
                try:
                    shown += os.read(near, 4096)
                except OSError:  # all have ended
                    break
        os.close(near)
        self.assertEqual(process.returncode, 0, shown)
        self.assertIn(b'there is no technique', shown)
        self.assertIn(b'\r', shown.replace(b'\r\n', b''))  # progress, in one line

    def test_have_the_callers_functions_beside_the_techniques(self):

        @tfb.definition('dense')
        def exact(q, k, v, causal):
            return softmax_attention(q, k, v, causal).astype('float32')

        def mean(v):
            return numpy.broadcast_to(v.mean(2, keepdims=True), v.shape).astype('float32')

        @tfb.definition('dense')
        def fails(q):
            raise RuntimeError('fell over')

        results = tfb.sweep([exact, mean, fails, 'dense'], '64', accuracy=False, repetitions=3, heads=1, head_dims=16, causal=False,
                            threads=1, input='gaussian')
        found = {one['key']['technique']: one for one in results}
        self.assertEqual(set(found), {'exact@python', 'mean@python', 'fails@python', 'dense'})
        self.assertEqual(found['exact@python']['outcome']['status'], 'ok')
        self.assertGreater(found['exact@python']['times']['run_median_ns'], 0)
        self.assertEqual(found['mean@python']['outcome']['status'], 'ok')
        self.assertGreater(found['mean@python']['errors']['definition_relative_frobenius'], 0.1)
        self.assertEqual(found['fails@python']['outcome']['status'], 'failed')
        self.assertIn('RuntimeError: fell over (package_test', found['fails@python']['outcome']['reason'])


class Wheel(unittest.TestCase):

    def test_needs_a_numpy_with_dlpack(self):
        (metadata,) = pathlib.Path(FOLDER.name).glob('*.dist-info/METADATA')
        self.assertIn('\nRequires-Dist: numpy>=1.22\n', metadata.read_text())


class Documentation(unittest.TestCase):

    def test_the_readmes_lines_run(self):
        (lines,) = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
        subprocess.run([sys.executable, '-c', lines], check=True, cwd=FOLDER.name, stdout=subprocess.DEVNULL,
                       env=dict(os.environ, PYTHONPATH=FOLDER.name))
        self.assertTrue(os.path.exists(os.path.join(FOLDER.name, 'report.html')))

    def test_everything_public_has_a_docstring_and_types(self):
        for name in tfb.__all__:
            one = getattr(tfb, name)
            self.assertTrue(inspect.getdoc(one), name)
            functions = [one] if inspect.isfunction(one) else [
                member for label, member in vars(one).items() if inspect.isfunction(member) and not label.startswith('_')
            ]
            for function in functions:
                self.assertTrue(inspect.getdoc(function), function)
                parameters = [p for p in inspect.signature(function).parameters.values() if p.name != 'self']
                for parameter in parameters:
                    self.assertIsNot(parameter.annotation, inspect.Parameter.empty, '%s: %s' % (function, parameter))


if __name__ == '__main__':
    unittest.main()
