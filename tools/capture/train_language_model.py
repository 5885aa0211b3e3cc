"""Trains the reference language model of //harness/inputs/language_model and writes its files.

The base model learns first, then, with the base frozen, what the techniques that extend it need
(language_model_extras.py). README.md beside this file has the commands. A run that was stopped
continues where the scratch folder's files end; a stage depends on the seed, the steps and the number
of threads alone, so that a continued run gives the same bytes.
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
import language_model_retrieval as retrieval
import language_model_text
import tensor_file

BATCH = 16
EXCERPT = 32            # segments that are read one after the other, before memories are emptied
WARM_UP = 200           # steps
PEAK_RATE = 2e-3
LAST_RATE = 0.03        # of the peak
WEIGHT_DECAY = 0.05     # of matrices
LARGEST_GRADIENT = 1.0  # norm
CHECKPOINT = 4          # excerpts


def progress(*words):
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


def as_tokens(text):
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


def exit_losses(logits, y):
    """The mean cross-entropy of each exit, in nats."""
    exits = len(logits)
    losses = functional.cross_entropy(logits.flatten(0, -2), y.expand(exits, *y.shape).flatten(),
                                      reduction="none")
    return losses.view(exits, -1).mean(1)


def learning_rate(step, steps):
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


class BaseTraining:
    """AdamW on the mean of the exits' losses, weighted by depth as in CALM, arXiv:2207.07061."""

    def __init__(self, seed, steps, checkpoint):
        self.seed, self.steps, self.checkpoint = seed, steps, checkpoint
        self.parameters = model.initial_parameters(seed)
        self.step, self.loss = 0, float("nan")  # of the last exit, averaged over 100 steps or so
        decayed = [p for p in self.parameters.values() if p.dim() == 2]
        others = [p for p in self.parameters.values() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0}],
            betas=(0.9, 0.98))
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            for name, value in saved["parameters"].items():
                self.parameters[name].copy_(value)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.loss = saved["step"], saved["loss"]
        for parameter in self.parameters.values():
            parameter.requires_grad_()

    def save(self):
        saved = {"parameters": {name: p.detach() for name, p in self.parameters.items()},
                 "optimizer": self.optimizer.state_dict(), "step": self.step, "loss": self.loss}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)

    def learn(self, x, y, memories):
        hidden, memories, _ = model.forward(self.parameters, x, memories)
        losses = exit_losses(model.all_logits(self.parameters, hidden), y)
        weights = torch.arange(1.0, len(losses) + 1)
        (losses @ weights / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), LARGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        own = losses[-1].item()
        self.loss = own if math.isnan(self.loss) else 0.99 * self.loss + 0.01 * own
        return memories

    def run(self, training, watched):
        while self.step < self.steps:
            excerpt = self.step // EXCERPT
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + excerpt)
            read = extras.excerpts(training, BATCH, EXCERPT * model.SEGMENT, generator)
            memories = None
            for x, y in list(model.segments(read))[:self.steps - self.step]:
                memories = self.learn(x, y, memories)
            progress(f"step {self.step} of {self.steps}, {self.loss / math.log(2):.3f} bits per byte")
            if (excerpt + 1) % CHECKPOINT == 0 or self.step == self.steps:
                self.save()
            if (excerpt + 1) % 16 == 0:
                bits = model.bits_per_byte(self.parameters, watched)
                progress("held out:", " ".join(f"{b:.3f}" for b in bits))


# ---- The file ----


def in_half_precision(tensors):
    """float32 values that float16 has: what is frozen is what ships."""
    return {name: value.detach().half().float() for name, value in tensors.items()}


def stage(path, function, *inputs):
    """What the function returns, from the file where an earlier run has left it."""
    if not path.exists():
        result = function(*inputs)
        torch.save(result, path)
    result = torch.load(path)
    progress(path.stem, result[-1])
    return result


def listed(bits):
    return ", ".join(f"{value:.4f}" for value in bits)


def learn_extras(base, folder, seed, training, held_out, datastore):
    """Returns ({name: tensor}, {metadata key: record})."""
    functions = {
        "confidence": (extras.confidences, training, seed + 1),
        "span": (extras.spans_of_heads, training, held_out, seed + 2),
        "convolution": (extras.convolutions, training, seed + 3),
        "spalm": (retrieval.spalm_gate, training, datastore, held_out, seed + 4),
        "memorizing": (retrieval.memorizing_gates, training, held_out, seed + 5),
    }
    tensors, records = {}, {}
    for name, (function, *inputs) in functions.items():
        learned, records[name] = stage(folder / f"{name}.pt", function, base, *inputs)
        tensors.update(learned)
    return tensors, records


def evaluate(parameters, frozen, held_out):
    exact, rounded = (model.bits_per_byte(p, held_out[None]) for p in (parameters, frozen))
    return exact, rounded, f"held-out bits per byte: {listed(exact)}; in float16: {listed(rounded)}"


def metadata(training, options, loss, exact, rounded, records):
    text = language_model_text
    return {
        "technique": model.TECHNIQUE,
        "heads": str(model.HEADS),
        "model": f"bytes to next byte; {model.HEADS} heads of {model.HEAD_DIM}; embedding, technique, "
                 "final_norm, output; exitN.norm and the same output after layer N",
        "trained_segment": model.SEGMENT,
        "trained_memory": model.MEMORY,
        "data": f"King James Version: {text.LICENCE}, "
                + ", ".join(f"{name} {version}" for name, version in text.PACKAGES.items()),
        "data_sha256": text.SHA256,
        "parts": f"training Genesis to Colossians, {len(training)} bytes; datastore.txt its end from "
                 f"{text.FIRST_OF_DATASTORE}; held_out.txt {text.FIRST_HELD_OUT} to Revelation",
        "seed": options.seed,
        "steps": f"{options.steps} of {BATCH} x {model.SEGMENT} bytes",
        "optimizer": f"AdamW, betas 0.9 and 0.98, weight decay {WEIGHT_DECAY}, rate {PEAK_RATE}, "
                     f"{WARM_UP} steps of warm-up, cosine to {LAST_RATE} of it, gradient norm "
                     f"{LARGEST_GRADIENT}; mean of the exits' losses weighted 1 to {model.LAYERS}",
        "training_bits_per_byte": f"{loss / math.log(2):.4f}, averaged over the last hundred steps or so",
        "held_out_bits_per_byte": listed(exact) + " (exits 0 to 4, the model; one stream, float32)",
        "held_out_bits_per_byte_float16": listed(rounded),
        **{f"learned_{name}": record for name, record in records.items()},
        "versions": f"torch {torch.__version__}, numpy {np.__version__}, {options.threads} threads",
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the three files")
    parser.add_argument("--scratch", type=pathlib.Path, required=True,
                        help="folder for packages and checkpoints, outside the repository")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3200, help="of the base model")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    text = language_model_text.whole_text(options.scratch)
    training, held_out, datastore = language_model_text.parts(text)
    folder = options.scratch / f"seed{options.seed}_steps{options.steps}"
    folder.mkdir(exist_ok=True)
    base = BaseTraining(options.seed, options.steps, folder / "base.pt")
    train_tokens, held_tokens = as_tokens(training), as_tokens(held_out)
    base.run(train_tokens, held_tokens[:8 * 8192].view(8, 8192))

    parameters = {name: value.detach() for name, value in base.parameters.items()}
    frozen = in_half_precision(parameters)
    exact, rounded, _ = stage(folder / "evaluation.pt", evaluate, parameters, frozen, held_tokens)
    learned, records = learn_extras(frozen, folder, options.seed, train_tokens, held_tokens,
                                    as_tokens(datastore))
    options.out.mkdir(parents=True, exist_ok=True)
    arrays = {name: value.half().numpy() for name, value in {**frozen, **learned}.items()}
    described = metadata(training, options, base.loss, exact, rounded, records)
    size = tensor_file.write(options.out / "model.safetensors", arrays, described)
    (options.out / "held_out.txt").write_bytes(held_out)
    (options.out / "datastore.txt").write_bytes(datastore)
    progress(f"wrote {options.out}, {(size + len(held_out) + len(datastore)) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
