"""FAISS in the search of a kNN language model; what follows the search is NumPy.

Tried with faiss-cpu 1.15.1.
https://github.com/facebookresearch/faiss/wiki/Faiss-indexes

`flat` compares a state with all keys, `inverted_lists` with those of the nearest clusters. They compute knn_lm for the
neighbours that FAISS finds, which they return. Clusters are trained and filled in the constructor, by FAISS's k-means,
so that an approximate search finds other neighbours than ours: recall is what tells them apart.
"""

import faiss
import numpy
from tfb.contestant import definition

ABOUT = {'packages': ('faiss-cpu', 'numpy'), 'title': 'FAISS'}
NAMES = ('entries', 'k', 'lambda', 'temperature', 'vocabulary')


@definition('knn_lm:entries=65536,k=32', options=NAMES, **ABOUT)
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


@definition('knn_lm:entries=65536,k=32,search=approximate', options=NAMES + ('lists', 'probes'), **ABOUT)
class inverted_lists(flat):

    def make(self, options, keys):
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(keys.shape[1]), keys.shape[1], int(options['lists']))
        index.nprobe = int(options['probes'])
        index.train(keys)
        return index
