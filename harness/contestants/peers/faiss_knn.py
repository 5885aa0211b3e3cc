"""FAISS in the search of a kNN language model; what follows the search is NumPy.

Tried with faiss-cpu 1.15.1.
https://github.com/facebookresearch/faiss/wiki/Faiss-indexes

`flat` compares a state with all keys and computes knn_lm exactly. `inverted_lists` compares it with the keys of the
nearest clusters, which the constructor trains and fills, and approximates knn_lm by the neighbours that it finds there.
The neighbours are the output of this name.
"""

import faiss
import numpy
from tfb.contestant import definition

ABOUT = {'packages': ('faiss-cpu', 'numpy'), 'title': 'FAISS'}
NAMES = ('entries', 'k', 'lambda', 'temperature', 'vocabulary')


@definition('knn_lm:entries=65536,k=32', options=NAMES, outputs=('neighbours',), **ABOUT)
class flat:

    def __init__(self, problem, options, parameters):
        faiss.omp_set_num_threads(problem.threads)
        self.neighbours, self.share = int(options['k']), numpy.float32(options['lambda'])
        self.temperature = numpy.float32(options['temperature'])
        self.output, self.values = parameters['output'], parameters['datastore.values'].astype('int64')
        self.index = self.make(options, parameters['datastore.keys'])
        self.index.add(parameters['datastore.keys'])

    def make(self, options, keys):
        return faiss.IndexFlatL2(keys.shape[1])

    def __call__(self, x, context):
        logits = x.reshape(-1, x.shape[2]) @ self.output.T
        p = numpy.exp(logits - logits.max(1, keepdims=True))
        p *= (1 - self.share) / p.sum(1, keepdims=True)
        distances, neighbours = self.index.search(context.reshape(len(p), -1), self.neighbours)
        weights = numpy.exp((distances[:, :1] - distances) / self.temperature)
        weights *= self.share / weights.sum(1, keepdims=True)
        numpy.add.at(p, (numpy.arange(len(p))[:, None], self.values[neighbours]), weights)
        return {
            'out': numpy.log(p).reshape(*x.shape[:2], -1),
            'neighbours': neighbours.astype('int32').reshape(*x.shape[:2], -1)
        }


@definition('knn_lm:entries=65536,k=32', exact=False, options=NAMES + ('lists', 'probes'), **ABOUT)
class inverted_lists(flat):

    def make(self, options, keys):
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(keys.shape[1]), keys.shape[1], int(options['lists']))
        index.nprobe = int(options['probes'])
        index.train(keys)
        return index
