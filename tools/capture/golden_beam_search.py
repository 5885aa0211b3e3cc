"""Writes core/decoding/testdata: see golden.py, whose rules hold here too.

Neither package runs without its models, so their rules of finishing are restated here from their
text, each in the form that it has there: fairseq's with a list that is filled in the order of the
candidates, Tensor2Tensor's with arrays of `beam` places whose empty ones score minus infinity.
"""

import pathlib

import numpy as np
import torch

import golden
from golden import case, draw

FIRST = len(golden.CASES)
END = 0
SYMBOLS, LENGTH, TABLES = 5, 6, 3
INFINITY = 1e7  # Tensor2Tensor's


def next_scores(table, sequences, log_probabilities):
    """log P of each sequence followed by each symbol."""
    last = [s[-1] if s else END for s in sequences]
    return log_probabilities[:, None] + table[len(sequences[0]), last]


def best(scores, count):
    """Flat indices of the largest, ties to the earlier."""
    return np.argsort(-scores.reshape(-1), kind="stable")[:count]


def fairseq(table, beam, alpha, early_stopping):
    """sequence_generator.py: len_penalty, and stop_early as until version 0.8."""
    alive, log_probabilities = [()], np.zeros(1)
    finalized = []
    for step in range(LENGTH):
        scores = next_scores(table, alive, log_probabilities)
        if step == LENGTH - 1:
            scores[:, np.arange(SYMBOLS) != END] = -np.inf
        chosen = best(scores, 2 * beam)
        chosen = chosen[np.isfinite(scores.reshape(-1)[chosen])]
        candidates = [(alive[i // SYMBOLS] + (int(i % SYMBOLS),), scores.reshape(-1)[i])
                      for i in chosen]
        for sequence, log_probability in candidates[:beam]:
            if sequence[-1] != END:
                continue
            hypothesis = (log_probability / (step + 1) ** alpha, sequence)
            if len(finalized) < beam:
                finalized.append(hypothesis)
            elif not early_stopping and hypothesis[0] > min(finalized)[0]:
                finalized[finalized.index(min(finalized))] = hypothesis
        if len(finalized) == beam and (
                early_stopping or
                min(finalized)[0] >= max(c[1] for c in candidates) / LENGTH ** alpha):
            break
        going_on = [c for c in candidates if c[0][-1] != END][:beam]
        if not going_on:
            break
        alive = [c[0] for c in going_on]
        log_probabilities = np.array([c[1] for c in going_on])
    return sorted(finalized, key=lambda hypothesis: -hypothesis[0])


def tensor2tensor(table, beam, alpha, early_stopping):
    """utils/beam_search.py: stop_early; alive and finished have `beam` places each."""
    alive = [()] * beam
    log_probabilities = np.array([0.0] + [-INFINITY] * (beam - 1))
    finished = [()] * beam
    finished_scores = np.full(beam, -INFINITY)
    is_finished = np.zeros(beam, bool)
    for i in range(LENGTH):
        bound = log_probabilities[0] / ((5 + LENGTH) / 6) ** alpha
        if (finished_scores.max() if early_stopping else finished_scores.min()) > bound:
            break
        penalty = ((5 + i + 1) / 6) ** alpha
        scores = next_scores(table, alive, log_probabilities) / penalty
        chosen = best(scores, 2 * beam)
        sequences = [alive[c // SYMBOLS] + (int(c % SYMBOLS),) for c in chosen]
        scores = scores.reshape(-1)[chosen]
        ends = np.array([sequence[-1] == END for sequence in sequences])

        going_on = best(scores - ends * INFINITY, beam)
        alive = [sequences[c] for c in going_on]
        log_probabilities = scores[going_on] * penalty

        all_scores = np.concatenate([finished_scores, scores - ~ends * INFINITY])
        kept = best(all_scores, beam)
        finished = [(finished + sequences)[c] for c in kept]
        finished_scores = all_scores[kept]
        is_finished = np.concatenate([is_finished, ends])[kept]
    if not is_finished.any():
        return list(zip(log_probabilities, alive))
    return [(score, sequence) for score, sequence, ended in
            zip(finished_scores, finished, is_finished) if ended and score > -INFINITY / 2]


@case("core/decoding/testdata/rules", "torch.log_softmax", 801)
def rules():
    tables = torch.log_softmax(2 * draw(TABLES, LENGTH, SYMBOLS, SYMBOLS), -1).numpy()
    cases, alphas, found = [], [], []
    for table in range(TABLES):
        for rule, search in enumerate((fairseq, tensor2tensor)):
            for beam in (1, 2, 4):
                for early_stopping in (True, False):
                    for alpha in (0.0, 0.6, 1.5):
                        cases.append((table, rule, beam, early_stopping))
                        alphas.append(alpha)
                        found.append(search(tables[table], beam, alpha, early_stopping))
    symbols = np.full((len(cases), 4, LENGTH), -1, np.int32)
    scores = np.zeros((len(cases), 4))
    for n, hypotheses in enumerate(found):
        for rank, (score, sequence) in enumerate(hypotheses):
            symbols[n, rank, :len(sequence)] = sequence
            scores[n, rank] = score

    def formula(t):
        """The scores of the symbols."""
        expected = np.zeros_like(scores)
        for n, rank in np.argwhere(symbols[:, :, 0] >= 0):
            y = [s for s in symbols[n, rank] if s >= 0]
            log_p = sum(tables[cases[n][0], i, y[i - 1] if i else END, s] for i, s in enumerate(y))
            length = len(y) if cases[n][1] == 0 else (5 + len(y)) / 6
            expected[n, rank] = log_p / length ** alphas[n] if y[-1] == END else log_p
        return {"scores": expected}

    return {"log_probabilities": tables, "cases": np.array(cases, np.int32),
            "alphas": np.array(alphas), "symbols": symbols, "scores": scores,
            "counts": np.array([len(hypotheses) for hypotheses in found], np.int32)}, {
        "end_symbol": END,
        "log_probabilities": "[table, position, symbol before (the end symbol at first), symbol]",
        "cases": "table; 0 for fairseq's rule with length^alpha and a forced end, 1 for "
                 "Tensor2Tensor's with ((5 + length) / 6)^alpha; beam; 1 for early stopping",
        "formula": "scores are log P / penalty of the symbols, and log P where none has ended; "
                   "counts tells how many sequences there are",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
