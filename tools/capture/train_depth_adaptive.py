"""Trains the exit classifiers of adaptive/depth_adaptive on the frozen reference model.

Elbayad et al., arXiv:1910.10073v4, section 3: at which of its N exits a token, or a sequence, is best
left is told by an oracle, and a classifier learns to foretell that from a state.

    oracle of tokens      q*_t = argmax_n (sum_t' exp(-|t - t'|^2 / sigma) A^n_t' - lambda n)
    oracle of a sequence  q*   = argmax_n (mean_t A^n_t - lambda n)

with A^n_t = log p(y_t | exit n), "likelihood", or whether exit n's most likely byte is y_t,
"correctness"; ties go to the smallest n. For each oracle the penalty lambda takes five values, those
with which its mean exit on the text read here lies at SHARES of the way from 1 to where it is with
next to no penalty. Three linear classifiers of each:

    sequence      softmax(W s + b)                  s the mean of h^1 over the segment before
    multinomial   softmax(W h^1_t + b)
    geometric     chi^n = sigmoid(w_n . h^n_t + b_n), n < N: leave at the first n with chi^n > 1/2

The source's s is the mean of its encoder's output; this model has none. Logistic regressions by L-BFGS
on standardised channels, with mean and deviation folded into the weights afterwards.
"""

import argparse
import math
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as functional

import language_model as model
import language_model_extras as extras
import language_model_text
import tensor_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "harness/inputs/language_model/model.safetensors"
SHARES = [0.2, 0.4, 0.6, 0.8, 0.95]
LEAST_PENALTY = 1e-4  # breaks ties that rounding has broken already
SIGMA = 4.0          # of the kernel over tokens, squared tokens
RADIUS = 8           # tokens beyond which the kernel, below 2e-7, is cut
BATCH, SEGMENTS = 16, 8
DECAY = 1e-3         # of squared weights, per example; 1e-2 where the examples are segments


def progress(*words):
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


# ---- What the frozen model makes of text ----


@torch.no_grad()
def observe(parameters, tokens, excerpts, seed):
    """Returns (states [N, excerpts, BATCH, tokens, WIDTH], likelihood and correctness [N, ...])."""
    generator = torch.Generator().manual_seed(seed)
    states, likelihood, correct = [], [], []
    for number in range(excerpts):
        read = extras.excerpts(tokens, BATCH, SEGMENTS * model.SEGMENT, generator)
        memories, parts = None, []
        for x, y in model.segments(read):
            hidden, memories, _ = model.forward(parameters, x, memories)
            log_p = model.all_logits(parameters, hidden).log_softmax(-1)
            picked = log_p.gather(-1, y.expand(model.LAYERS, *y.shape)[..., None])[..., 0]
            parts.append((torch.stack(hidden[1:]).half(), picked, (log_p.argmax(-1) == y).float()))
        for kept, part in zip((states, likelihood, correct), zip(*parts)):
            kept.append(torch.cat(part, 2))
        progress(f"read excerpt {number + 1} of {excerpts}")
    return tuple(torch.stack(kept, 1) for kept in (states, likelihood, correct))


# ---- Oracles ----


def smoothed(scores):
    """sum_t' exp(-|t - t'|^2 / SIGMA) scores_t' along the last axis."""
    distance = torch.arange(-RADIUS, RADIUS + 1.0)
    kernel = torch.exp(-distance ** 2 / SIGMA)[None, None]
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return functional.conv1d(flat, kernel, padding=RADIUS).view(scores.shape)


def best_exits(scores, penalty):
    """argmax over the first axis of scores - penalty n; ties to the smallest."""
    layers = torch.arange(1.0, len(scores) + 1).view(-1, *[1] * (scores.dim() - 1))
    return (scores - penalty * layers).numpy().argmax(0)  # the first of equals


def penalty_for(scores, share):
    """By bisection. Returns (penalty, mean exit)."""
    def mean_exit(penalty):
        return best_exits(scores, penalty).mean() + 1

    low, high = LEAST_PENALTY, 100.0
    wanted = 1 + share * (mean_exit(low) - 1)
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_exit(middle) > wanted else (low, middle)
    return high, mean_exit(high)


# ---- Classifiers ----


def standardised(x):
    mean, deviation = x.mean(0), x.std(0)
    return (x - mean) / deviation, mean, deviation


def softmax_regression(x, labels, decay):
    """Returns (W [WIDTH, N], b [N])."""
    z, mean, deviation = standardised(x)
    w, b = torch.zeros(model.WIDTH, model.LAYERS), torch.zeros(model.LAYERS)
    labels = torch.from_numpy(labels)

    def loss():
        return functional.cross_entropy(z @ w + b, labels) + decay * w.square().sum()

    extras.minimize(loss, [w, b], 30)
    w = w / deviation[:, None]
    return w, b - mean @ w


def geometric_regressions(states, labels):
    """Returns (w [N - 1, WIDTH], b [N - 1]): exit n against later ones, of tokens not left before."""
    labels = torch.from_numpy(labels)
    weights, biases = [], []
    for n in range(model.LAYERS - 1):
        kept = labels >= n
        z, mean, deviation = standardised(states[n][kept].float())
        leaves = (labels[kept] == n).float()
        w, b = torch.zeros(model.WIDTH), torch.zeros(1)

        def loss(z=z, leaves=leaves, w=w, b=b):
            return (functional.binary_cross_entropy_with_logits(z @ w + b, leaves)
                    + DECAY * w.square().sum())

        extras.minimize(loss, [w, b], 30)
        weights.append(w / deviation)
        biases.append(b[0] - (w * mean / deviation).sum())
    return torch.stack(weights), torch.stack(biases)


def learn(states, scores, oracle):
    """Returns ({name: tensor}, [record of a level])."""
    layers, excerpts, batch, tokens = scores.shape
    of_tokens = smoothed(scores).flatten(1)
    of_segments = scores.unflatten(-1, (-1, model.SEGMENT)).mean(-1)
    first = states[0].flatten(0, 2).float()
    means = states[0].unflatten(2, (-1, model.SEGMENT)).float().mean(3)
    flat = states.flatten(1, 3)
    tensors, records = {}, []
    for share in SHARES:
        (penalty, exit_of_tokens) = penalty_for(of_tokens, share)
        (of_segment, exit_of_segments) = penalty_for(of_segments, share)
        prefix, labels = f"{oracle}.{len(records)}.", best_exits(of_tokens, penalty)
        tensors[prefix + "multinomial.w"], tensors[prefix + "multinomial.b"] = softmax_regression(
            first, labels, DECAY)
        tensors[prefix + "geometric.w"], tensors[prefix + "geometric.b"] = geometric_regressions(
            flat, labels)
        of_next = best_exits(of_segments[..., 1:].flatten(1), of_segment)
        tensors[prefix + "sequence.w"], tensors[prefix + "sequence.b"] = softmax_regression(
            means[:, :, :-1].flatten(0, 2), of_next, 10 * DECAY)
        records.append(f"lambda {penalty:.4f} gives exit {exit_of_tokens:.2f} of tokens, "
                       f"{of_segment:.4f} gives {exit_of_segments:.2f} of segments")
        progress(oracle, records[-1])
    return tensors, records


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path,
                        default=ROOT / "harness/inputs/language_model/exits.safetensors")
    parser.add_argument("--scratch", type=pathlib.Path, required=True,
                        help="folder for packages, outside the repository")
    parser.add_argument("--excerpts", type=int, default=12, help="of 16 x 1024 bytes")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main():
    options = arguments()
    torch.set_num_threads(1)
    arrays, _ = tensor_file.read(SOURCE)
    parameters = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
    training, _, _ = language_model_text.parts(language_model_text.whole_text(options.scratch))
    tokens = torch.from_numpy(np.frombuffer(training, np.uint8).astype(np.int64))
    observed = options.scratch / f"depth_adaptive_{options.seed}_{options.excerpts}.pt"
    if not observed.exists():
        torch.save(observe(parameters, tokens, options.excerpts, options.seed + 6), observed)
    states, likelihood, correct = torch.load(observed)
    tensors, records = {}, {}
    for oracle, scores in (("likelihood", likelihood), ("correctness", correct)):
        learned, records[oracle] = learn(states, scores, oracle)
        tensors.update(learned)
    size = tensor_file.write(options.out, {name: t.half().numpy() for name, t in tensors.items()}, {
        "made_by": "tools/capture/train_depth_adaptive.py",
        "method": "arXiv:1910.10073v4, section 3; linear classifiers of the frozen model, L-BFGS of 30 "
                  f"iterations; kernel sigma {SIGMA}",
        "model": "harness/inputs/language_model/model.safetensors",
        "data": f"{options.excerpts} x {BATCH} x {SEGMENTS * model.SEGMENT} bytes of its training text",
        "seed": options.seed,
        **{f"levels_{oracle}": "oracle's means: " + "; ".join(lines)
           for oracle, lines in records.items()},
        "versions": f"torch {torch.__version__}, numpy {np.__version__}, 1 thread",
    })
    progress(f"wrote {options.out}, {size} bytes")


if __name__ == "__main__":
    main()
