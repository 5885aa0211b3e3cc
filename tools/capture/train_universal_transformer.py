"""Trains the Universal Transformer of //adaptive/universal_transformer/model and writes its file.

The task is addition: two numbers of the same length, digit under digit, least significant first; the
digits of their sum, at the same tokens. Where two digits add up to 9 the carry from the right decides
what goes on to the left, so a digit may depend on others far away. README.md beside this file has the
commands. A run that was stopped continues from the scratch folder's checkpoint and gives the same
bytes.
"""

import argparse
import math
import pathlib
import sys
import time

import torch
import torch.nn.functional as functional

import tensor_file
import universal_transformer as model

BATCH = 64
LARGEST_LENGTH = 24      # digits of a number while training
LARGEST_OFFSET = 100     # of positions, so that those of longer problems have been seen
WITHOUT_HALTING = 0.4    # of the steps, at the beginning; then every second step halts
TAU = 0.01               # price of a step of pondering
WARM_UP = 200            # steps
PEAK_RATE = 2e-3
LAST_RATE = 0.02         # of the peak
LARGEST_GRADIENT = 1.0   # norm
CHECKPOINT = 500         # steps
IGNORED = -100


def progress(*words):
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


def problems(count, smallest, largest, generator, nines=None):
    """Draws additions: (numbers [count, tokens, 2], sums [count, tokens], mask [count, tokens]).

    Each has smallest to largest digits, of which a part, drawn for the problem or `nines`, add up to
    9. Tokens: a mark, whose sum is ignored, the digits, a place for the last carry, and padding.
    """
    lengths = torch.randint(smallest, largest + 1, (count, 1), generator=generator)
    tokens = largest + 2
    first, second = torch.randint(0, 10, (2, count, tokens), generator=generator)
    part = torch.rand(count, 1, generator=generator) if nines is None else nines
    second = torch.where(torch.rand(count, tokens, generator=generator) < part, 9 - first, second)
    place = torch.arange(tokens)
    numbers = torch.stack([first, second], dim=-1)
    numbers[(place > lengths) | (place == 0)] = 0
    sums = torch.full((count, tokens), IGNORED)
    carry = torch.zeros(count, dtype=torch.long)
    for t in range(1, tokens):
        total = numbers[:, t].sum(-1) + carry
        sums[:, t], carry = total % 10, total // 10
    mask = place <= lengths + 1
    sums[~mask] = IGNORED
    numbers[:, 0] = model.MARK
    return numbers, sums, mask


def loss_of(logits, sums):
    return functional.cross_entropy(logits.flatten(0, -2), sums.flatten(), ignore_index=IGNORED)


def learning_rate(step, steps):
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


class Training:
    """Adam on the loss with all steps, each step's state weighted by its number, and on ACT's."""

    def __init__(self, seed, steps, checkpoint):
        self.seed, self.steps, self.checkpoint = seed, steps, checkpoint
        self.parameters = model.initial_parameters(seed)
        self.optimizer = torch.optim.Adam(self.parameters.values(), betas=(0.9, 0.98))
        self.step = 0
        self.losses = {"fixed": math.nan, "act": math.nan, "ponder": math.nan}  # running averages
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            for name, value in saved["parameters"].items():
                self.parameters[name].copy_(value)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.losses = saved["step"], saved["losses"]
        for parameter in self.parameters.values():
            parameter.requires_grad_()
            if self.optimizer.state[parameter]:  # 0, not none, where a step leaves the gate alone
                parameter.grad = torch.zeros_like(parameter)

    def save(self):
        saved = {"parameters": {name: p.detach() for name, p in self.parameters.items()},
                 "optimizer": self.optimizer.state_dict(), "step": self.step, "losses": self.losses}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)

    def record(self, name, value):
        old = self.losses[name]
        self.losses[name] = value if math.isnan(old) else 0.98 * old + 0.02 * value

    def loss(self, numbers, sums, mask, offset, halts):
        if not halts:
            states = model.fixed_steps(self.parameters, numbers, mask, offset)
            losses = [loss_of(model.logits(self.parameters, state), sums) for state in states]
            self.record("fixed", losses[-1].item())
            weighted = sum(n * loss for n, loss in enumerate(losses, start=1))
            return weighted / (len(losses) * (len(losses) + 1) / 2)
        y, ponder, _ = model.adaptive_steps(self.parameters, numbers, mask, offset)
        loss = loss_of(model.logits(self.parameters, y), sums)
        mean_ponder = ponder.sum() / mask.sum()
        self.record("act", loss.item())
        self.record("ponder", mean_ponder.item())
        return loss + TAU * mean_ponder

    def learn(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        largest = int(torch.randint(4, LARGEST_LENGTH + 1, (), generator=generator))
        offset = int(torch.randint(0, LARGEST_OFFSET + 1, (), generator=generator))
        halts = self.step >= WITHOUT_HALTING * self.steps and self.step % 2 == 1
        self.loss(*problems(BATCH, 1, largest, generator), offset, halts).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), LARGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.step += 1

    def run(self):
        while self.step < self.steps:
            self.learn()
            if self.step % 100 == 0:
                progress(f"step {self.step} of {self.steps},",
                         ", ".join(f"{name} {value:.4f}" for name, value in self.losses.items()))
            if self.step % CHECKPOINT == 0 or self.step == self.steps:
                self.save()
                progress(described(evaluate(self.parameters, self.seed)))


# ---- What came of it ----


def accuracies(logits, sums):
    """(share of the digits, share of the problems) that are right."""
    counted = sums != IGNORED
    right = (logits.argmax(-1) == sums) | ~counted
    return ((right & counted).sum() / counted.sum()).item(), right.all(1).double().mean().item()


@torch.no_grad()
def evaluate(parameters, seed, digits=24, count=256, nines=0.5):
    """[(name, digits right, problems right, mean steps)] of problems drawn anew."""
    generator = torch.Generator().manual_seed(seed + 77)
    numbers, sums, mask = problems(count, digits, digits, generator, nines)
    rows = []
    for n, state in enumerate(model.fixed_steps(parameters, numbers, mask), start=1):
        rows.append((f"{n} steps", *accuracies(model.logits(parameters, state), sums), n))
    y, _, taken = model.adaptive_steps(parameters, numbers, mask)
    mean_steps = (taken.sum() / mask.sum()).item()
    rows.append(("act", *accuracies(model.logits(parameters, y), sums), mean_steps))
    return rows


def described(rows):
    return "; ".join(f"{name}: {digits:.4f} {all_digits:.3f}" + (f" ({steps:.2f})" if name == "act" else "")
                     for name, digits, all_digits, steps in rows)


def metadata(options, losses, parameters, frozen):
    return {
        "technique": model.TECHNIQUE,
        "heads": str(model.HEADS),
        "model": "digits of two numbers to digits of their sum; embedding.first + embedding.second, "
                 "technique, output",
        "data": f"additions drawn by train_universal_transformer.py: 1 to {LARGEST_LENGTH} digits, least "
                f"significant first, of which a uniform part add up to 9; positions from 0 to "
                f"{LARGEST_OFFSET} on",
        "seed": options.seed,
        "steps": f"{options.steps} of {BATCH} problems, the first {WITHOUT_HALTING} of them without "
                 "halting, then every second",
        "optimizer": f"Adam, betas 0.9 and 0.98, rate {PEAK_RATE}, {WARM_UP} steps of warm-up, cosine to "
                     f"{LAST_RATE} of it, gradient norm {LARGEST_GRADIENT}; ponder cost {TAU}",
        "training_loss": ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
                         + ", averaged over the last fifty of their steps or so",
        "accuracy": described(evaluate(parameters, options.seed))
                    + " (digits and whole problems of 24 digits, half of them adding up to 9; mean steps)",
        "accuracy_float16": described(evaluate(frozen, options.seed)),
        "versions": f"torch {torch.__version__}, {options.threads} threads",
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the file")
    parser.add_argument("--scratch", type=pathlib.Path, required=True,
                        help="folder for checkpoints, outside the repository")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    folder = options.scratch / f"seed{options.seed}_steps{options.steps}"
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(options.seed, options.steps, folder / "training.pt")
    training.run()
    parameters = {name: value.detach() for name, value in training.parameters.items()}
    half = {name: value.half() for name, value in parameters.items()}
    frozen = {name: value.float() for name, value in half.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    size = tensor_file.write(options.out / "model.safetensors",
                             {name: value.numpy() for name, value in half.items()},
                             metadata(options, training.losses, parameters, frozen))
    progress(f"wrote {options.out}, {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
