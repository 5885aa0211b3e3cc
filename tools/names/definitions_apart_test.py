#!/usr/bin/env python3
"""Holds every technique's float64 definition apart from the layer that it judges.

Reads the machine code of a program that links all techniques as a graph: a function refers to those that it calls or whose
address it takes. From a technique's Definition or DefineScore no function of an engine may be reached, and none of its own
package or of the composed layers of core/layers that layers reach, too, except those of SHARED and FITS. Calls through tables
of virtual functions are not seen: so a definition may define a technique inside, which is judged in its place.

  definitions_apart_test.py PROGRAM
"""

import collections
import re
import subprocess
import sys
import unittest

# Functions that layers and definitions share because there is nothing in them to judge: names, sizes and specs of tensors,
# numbers and choices that are the options', and refusals. All functions are listed that builds without inlining have.
SHARED = {
    'bigbird': {'CheckTable'},
    'calm': {'ConfidenceParameters'},
    'compressive': {
        'CompressiveParameters', 'CompressiveSizes', 'ConvolutionPrefix', 'DistancesOf',
        'MemoryQueues', 'max_blocks'
    },
    'decision_transformer': {'ActionTokens', 'HeadsOf', 'ModalitiesOf', 'OptionsOfGpt', 'ReturnTokens', 'StateTokens'},
    'depth_adaptive': {'ClassifierParameters', 'ClassifierPrefix'},
    'encoder_decoder': {'ActivationOf', 'AttentionPlace', 'LayerPlace', 'StackPlace', 'StacksOf'},
    'etc': {'IsSeparate', 'Piece'},
    'gated_transformer_xl': {'GateMatrices', 'HasBias', 'ParametersOf'},
    'hard': {'NoiseName', 'Scale'},
    'image_local': {'Is2d', 'WidthOf'},
    'layers': {
        'AddSpecs', 'BiasPrefix', 'BindInner', 'ChannelsOf', 'CheckCount', 'CheckInner', 'CheckRelativeStack',
        'CheckSelfAttention', 'ExitNorm', 'ExitPrefix', 'ExitStackParameters', 'FeedForwardSpecs', 'FinalMemories',
        'FindParameter', 'FindSpec', 'From', 'FurtherInputs', 'FurtherInputsOf', 'FurtherOf', 'FurtherOutputs',
        'FurtherOutputsOf', 'FurtherProjections', 'HasName', 'HeadsOf', 'IsFurtherOutput', 'LayerPrefix', 'MatrixSpec',
        'MemoriesSpec', 'NormSpecs', 'ParameterSpec', 'Prefix', 'ProjectionCount', 'ShapeOf', 'StackParameters',
        'width', 'WithoutPrefix', 'WithPrefix'
    },
    'learned': {'PlanOf'},
    'linformer': {'Plan'},
    'longformer': {'OwnProjections'},
    'lsh': {
        'LshBuckets', 'LshChunk', 'LshFactors', 'LshIsWhole', 'LshKeyEpsilon', 'LshRounds', 'LshScale', 'LshWraps'
    },
    'memorizing': {'ParametersOf', 'StorePrefix'},
    'multi_head': {'InputsOf'},
    'performer': {'HasScale'},
    'reversible': {'BlockPrefix', 'CheckF', 'InputsOfF'},
    'rope': {'RotaryDims'},
    'routing': {'RoutingScale', 'RoutingSizes'},
    'sinkhorn': {'SizesOf', 'WidthOf'},
    'sinusoidal': {'PlanOf'},
    'transformer_xl': {'ShapeWithSpans'},
    'universal': {'PlanOf'},
}

# What Setup makes of inputs in float64, and what the definition does again where the parameters are not those of a Setup: tables
# that are fitted to the inputs' singular vectors, and norms of the rows that move centroids. Tests of their own judge these.
FITS = {
    'linformer': {'Decompose', 'FitTable', 'FitTables', 'Gather', 'IsUnfitted', 'OfHead', 'PolarFactor', 'Rotation'},
    'routing': {'RoutingNormalized'},
}

# The namespace of the layers that core/layers composes, whose functions many techniques have in common.
LAYERS = 'layers'

# What engines are made of: classes and functions of tfb besides those of techniques.
ENGINES = re.compile(r'^tfb::(?:\(anonymous namespace\)::)?(?:Flash|Planned|BuildSchedule|MatMul|PackedMatrix|FeedForward(?!Dim)|LayerNorm|CudaRuntime|'
                     r'DeviceArray|KeyValueCache|Linear|NormalizeRows|ScoreVectors|LargestTokens|MeanOfGroups|ListRows|CopyRows|'
                     r'InvertedLists|GroupSearch|SearchKeys)')

# Parts of a class that belong to no computation, options and destructors, and what is a library's own.
PLAIN = re.compile(r'^tfb::\w+::\w*Options::|::~|(?:^| )(?:std|absl|__gnu_cxx)::')

# A constructor without arguments, which sets numbers that the source states.
DEFAULTS = re.compile(r'::(\w+)::\1\(\)')

ROOT = re.compile(r'^tfb::(\w+)::(?:\(anonymous namespace\)::)?\w+::(Definition|DefineScore|Describe|MakeLayer|Draw|MakeFit|Finish|Do[A-Z]\w*|Run|Setup|Build|Prepare|Begin|Recall|KeepState|Attend|Decide)\(.*tfb::')


def read_graph(lines):
    """Returns {function: functions that it refers to} of objdump's lines."""
    graph, current = collections.defaultdict(set), None
    for line in lines:
        if line.endswith('>:\n'):
            current = line[line.index('<') + 1:-3]
            graph[current]
        elif current is not None and '<' in line:
            target = re.search(r'<(.*)>', line)
            if target:
                graph[current].add(re.sub(r'\+0x[0-9a-f]+$', '', target.group(1)))
    return graph


def reached(graph, roots):
    seen, left = set(roots), list(roots)
    while left:
        for target in graph[left.pop()]:
            if target in graph and target not in seen:
                seen.add(target)
                left.append(target)
    return seen


def without_parameters(function):
    return re.sub(r'\[(?:abi:cxx11|clone [^\]]*)\]', '', function.replace('(anonymous namespace)::', '')).split('(')[0].strip()


def is_shared(name, function):
    """Returns whether a function of a namespace is one that a definition must not have in common with layers."""
    plain = without_parameters(function)
    return not PLAIN.search(plain) and not DEFAULTS.search(function) and plain.split('::')[-1] not in SHARED.get(name, set()) | FITS.get(name, set())


class Technique:

    def __init__(self):
        self.definitions, self.layers = [], []


def techniques_of(graph):
    """Returns {namespace: the functions from which definitions and layers begin}, LAYERS without definitions."""
    techniques = collections.defaultdict(Technique)
    for function in graph:
        root = ROOT.match(function)
        if root:
            of = techniques[root.group(1)]
            (of.definitions if root.group(2).startswith('Defin') else of.layers).append(function)
    return {name: one for name, one in techniques.items() if one.definitions or name == LAYERS}


def faults(graph):
    """Returns a line for each function that a definition must not reach."""
    found = []
    techniques = techniques_of(graph)
    composed = techniques.pop(LAYERS, Technique()).layers
    for name, technique in sorted(techniques.items()):
        defined, run = reached(graph, technique.definitions), reached(graph, technique.layers + composed)
        found += ['%s: its definition reaches the engine: %s' % (name, function)
                  for function in sorted(defined) if ENGINES.match(function)]
        found += ['%s: its definition and its layers reach %s' % (name, function)
                  for function in sorted(defined & run) for space in (name, LAYERS)
                  if function.startswith('tfb::%s::' % space) and is_shared(space, function)]
    return found


class OfText(unittest.TestCase):
    TEXT = '''
0000000000001000 <tfb::toy::(anonymous namespace)::Toy::Definition(tfb::Problem const&) const>:
    1000:	call   2000 <tfb::toy::%s(long)>
    1008:	lea    0x10(%%rip),%%rax        # 4000 <_ZTV+0x10>
0000000000002000 <tfb::toy::Slopes(long)>:
    2000:	jmp    3000 <tfb::%s(int)+0x8>
0000000000002500 <tfb::toy::Other(long)>:
    2500:	ret
0000000000003000 <tfb::FlashCpu(int)>:
    3000:	ret
0000000000003800 <tfb::Dot(int)>:
    3000:	ret
0000000000004000 <tfb::toy::(anonymous namespace)::Toy::MakeLayer(tfb::Problem const&) const>:
    4000:	call   2500 <tfb::toy::Other(long)>
    4008:	lea    0x10(%%rip),%%rax        # 3000 <tfb::FlashCpu(int)>
'''

    def faults(self, called, reached_there):
        return faults(read_graph((self.TEXT % (called, reached_there)).splitlines(True)))

    def test_what_is_apart_is(self):
        self.assertEqual(self.faults('Slopes', 'Dot'), [])

    def test_an_engine_behind_a_function_of_the_package_is_found(self):
        self.assertEqual(self.faults('Slopes', 'FlashCpu'),
                         ['toy: its definition reaches the engine: tfb::FlashCpu(int)'])

    def test_a_composed_layer_behind_a_function_of_the_package_is_found(self):
        text = self.TEXT.replace('FlashCpu', 'layers::Attend').replace('toy::Other', 'layers::Attend')
        self.assertEqual(faults(read_graph((text % ('Slopes', 'layers::Attend')).splitlines(True))),
                         ['toy: its definition and its layers reach tfb::layers::Attend(int)'])

    def test_a_function_that_both_reach_is_found(self):
        self.assertEqual(self.faults('Other', 'Dot'),
                         ['toy: its definition and its layers reach tfb::toy::Other(long)'])

    def test_a_constructor_that_is_told_something_is_a_function(self):
        for told, faults_of_it in ('()', []), ('(long)', ['toy: its definition and its layers reach tfb::toy::Other::Other(long)']):
            text = self.TEXT.replace('toy::Other(long)', 'toy::Other::Other' + told).replace('toy::%s(long)', 'toy::%s')
            self.assertEqual(faults(read_graph((text % ('Other::Other' + told, 'Dot')).splitlines(True))), faults_of_it)


class OfTheProgram(unittest.TestCase):
    program = ''

    def test_definitions_are_apart_from_layers(self):
        done = subprocess.run(['objdump', '--disassemble', '--demangle', '--no-show-raw-insn', self.program],
                              stdout=subprocess.PIPE, check=True)
        graph = read_graph(done.stdout.decode(errors='replace').splitlines(True))
        techniques = techniques_of(graph)
        self.assertGreaterEqual(len(techniques), 36, 'techniques are not found by their names any more')
        reach_engines = [name for name, one in techniques.items() if any(map(ENGINES.match, reached(graph, one.layers)))]
        self.assertGreaterEqual(len(reach_engines), 20, 'engines are not found by their names any more')
        self.assertEqual(faults(graph), [])


if __name__ == '__main__':
    OfTheProgram.program = sys.argv.pop()
    unittest.main()
