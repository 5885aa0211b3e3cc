"""Writes results/history/testdata/ruptures.txt: the change points that ruptures finds in made-up series; see golden.py.

ruptures (Truong, Oudre & Vayatis, Signal Processing 167 (2020) 107299) is another implementation of offline change point
detection. Its PELT (Killick, Fearnhead & Eckley, JASA 107 (2012) 1590-1598) minimises the squares about the segments' means,
with segments of at least three values and a penalty of `PENALTY` variances of the noise for each change.

Each line of the file is a series: the indices that begin a new level, a colon, and the values in units of 1e-5.
"""

import argparse
import pathlib

import numpy as np
import ruptures

SERIES, RUNS, SIGMA, PENALTY = 40, 120, 0.005, 30


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--output', type=pathlib.Path, required=True, help='top of the source tree')
    output = parser.parse_args().output
    generator = np.random.default_rng(20261123)
    lines = []
    for _ in range(SERIES):
        begins = np.sort(generator.choice(np.arange(8, RUNS - 8, 8), size=generator.integers(0, 5), replace=False))
        steps = generator.choice([-1, 1], size=len(begins)) * generator.uniform(0.03, 0.1, size=len(begins))
        values = SIGMA * generator.standard_normal(RUNS)
        for begin, step in zip(begins, steps):
            values[begin:] += step
        scaled = np.round(values * 1e5).astype(int)
        found = ruptures.Pelt(model='l2', min_size=3, jump=1).fit(scaled * 1e-5).predict(pen=PENALTY * SIGMA**2)
        lines.append(' '.join(map(str, found[:-1])) + ': ' + ' '.join(map(str, scaled)))
    (output / 'results/history/testdata/ruptures.txt').write_text('\n'.join(lines) + '\n')


if __name__ == '__main__':
    main()
