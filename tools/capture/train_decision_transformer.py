"""Trains the Decision Transformer of //adaptive/decision_transformer/model and writes its file.

README.md beside this file has the command. A run that was stopped continues where the scratch
folder's checkpoint ends, and gives the same bytes. The scratch folder also keeps the last
checkpoints, whose mean ships, and the mean before it is rounded.
"""

import argparse
import math
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as functional

import decision_transformer as model
import tensor_file
import training_extras

BATCH = 64
WARM_UP = 100
PEAK_RATE = 1e-3
LAST_RATE = 0.05        # of the peak
WEIGHT_DECAY = 0.1      # of matrices
LARGEST_GRADIENT = 0.25  # norm; the authors'
DROPOUT = 0.1           # the authors'
CHECKPOINT = 200        # steps


def progress(*words):
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


class Trajectories:
    """Walks as returns-to-go, states, actions and timesteps."""

    def __init__(self, walks):
        self.walks = torch.from_numpy(walks).long()
        self.lengths = (self.walks >= 0).sum(1) - 1  # in steps

    def batch(self, generator):
        """Walks from a random step on, then padding, which no token before it sees.

        Returns (returns, states, actions, timesteps, next states, kept), each [BATCH, STEPS].
        """
        chosen = torch.randint(len(self.walks), (BATCH,), generator=generator)
        lengths = self.lengths[chosen, None]
        begin = (torch.rand(BATCH, 1, generator=generator) * lengths).long()
        timesteps = begin + torch.arange(model.STEPS)
        kept = timesteps < lengths
        returns = torch.where(kept, timesteps - lengths, 0).float()
        walks = self.walks[chosen].clamp(min=0)
        states = walks.gather(1, timesteps.clamp(max=model.STEPS))
        actions = walks.gather(1, (timesteps + 1).clamp(max=model.STEPS))
        return returns, states, actions, timesteps.clamp(max=model.STEPS - 1), actions, kept


def learning_rate(step, steps):
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


class Training:
    """AdamW on the action's cross-entropy; state and return heads learn from the same tokens, their
    losses weighted by options.other_heads (the authors' code has 0)."""

    def __init__(self, options, checkpoint):
        self.options, self.checkpoint = options, checkpoint
        self.parameters = model.initial_parameters(options.seed)
        self.step, self.losses, self.kept = 0, None, []
        decayed = [p for p in self.parameters.values() if p.dim() == 2]
        others = [p for p in self.parameters.values() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": WEIGHT_DECAY},
             {"params": others, "weight_decay": 0}],
            betas=(0.9, 0.98))
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            for name, value in saved["parameters"].items():
                self.parameters[name].copy_(value)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.losses, self.kept = saved["step"], saved["losses"], saved["kept"]
        for parameter in self.parameters.values():
            parameter.requires_grad_()

    def values(self):
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def save(self):
        self.kept = (self.kept + [self.values()])[-self.options.average:]
        saved = {"parameters": self.values(), "optimizer": self.optimizer.state_dict(),
                 "step": self.step, "losses": self.losses, "kept": self.kept}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.checkpoint)

    def loss(self, batch):
        returns, states, actions, timesteps, next_states, kept = batch
        network = model.Network(self.parameters, DROPOUT)
        action, state, next_return = network(returns, states, actions, timesteps)
        losses = torch.stack([
            training_extras.smoothed_cross_entropy(action[kept], actions[kept],
                                                   self.options.label_smoothing).mean(),
            functional.cross_entropy(state[kept], next_states[kept]),
            functional.mse_loss(next_return[kept], (returns[kept] + 1) * model.RETURN_SCALE)])
        weights = torch.tensor([1.0, self.options.other_heads, self.options.other_heads])
        return losses @ weights, losses.detach()

    def run(self, trajectories, watch):
        while self.step < self.options.steps:
            torch.manual_seed(self.options.seed * 1_000_003 + self.step)  # of the dropout
            generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
            loss, parts = self.loss(trajectories.batch(generator))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), LARGEST_GRADIENT)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.options.steps)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.losses = parts if self.losses is None else 0.99 * self.losses + 0.01 * parts
            if self.step % CHECKPOINT == 0 or self.step == self.options.steps:
                self.save()
                progress(f"step {self.step} of {self.options.steps}, losses of action, state and "
                         "return " + " ".join(f"{value:.4f}" for value in self.losses.tolist()))
                watch(self.values())


def report(parameters, edges, goal):
    """One line: mean steps for each asked return, beside the shortest paths'."""
    starts = np.array([node for node in range(model.NODES) if node != goal])
    words = []
    for asked in range(-1, -model.STEPS - 1, -1):
        taken = model.roll_out(parameters, edges, goal, starts, np.full(len(starts), asked))
        reached = taken <= model.STEPS
        steps = taken[reached].float().mean().item() if reached.any() else math.nan
        words.append(f"{asked}: {steps:.2f} ({int(reached.sum())})")
    shortest = model.distances_to(goal, edges)[starts]
    asked = model.roll_out(parameters, edges, goal, starts, -shortest)
    words.append(f"shortest {shortest.mean():.2f}, asked for it "
                 f"{asked.float().mean().item():.2f}, "
                 f"found {int((asked.numpy() == shortest).sum())}")
    return "; ".join(words)


def metadata(options, training, walks, edges, goal, lines):
    shortest = model.distances_to(goal, edges)
    lengths = (walks >= 0).sum(1) - 1
    reached = (walks == goal).any(1)
    return {
        "technique": model.TECHNIQUE,
        "heads": str(model.HEADS),
        "model": f"random walks to shortest paths; {model.HEADS} heads of {model.HEAD_DIM}",
        "return_scale": repr(model.RETURN_SCALE),
        "data": f"{model.WALKS} random walks of at most {model.STEPS} steps on a random graph of "
                f"{model.NODES} nodes, each edge with probability {model.EDGE_PROBABILITY}, drawn "
                f"here from seed {options.seed}; {int(reached.sum())} reach the goal, in "
                f"{lengths[reached].mean():.2f} steps on average; shortest paths have "
                f"{shortest.max()} steps at most",
        "seed": options.seed,
        "steps": f"{options.steps} of {BATCH} walks from a random step on",
        "optimizer": f"AdamW, betas 0.9 and 0.98, weight decay {WEIGHT_DECAY}, rate {PEAK_RATE}, "
                     f"{WARM_UP} steps of warm-up, cosine to {LAST_RATE} of it, gradient norm "
                     f"{LARGEST_GRADIENT}, dropout {DROPOUT}, label smoothing "
                     f"{options.label_smoothing}; mean of the last {len(training.kept)} "
                     f"checkpoints, {CHECKPOINT} steps apart",
        "losses": "action, next state and next return at the end, averaged over a hundred steps: "
                  + ", ".join(f"{value:.4f}" for value in training.losses.tolist())
                  + f"; the last two weighted {options.other_heads}",
        **lines,
        "versions": f"torch {torch.__version__}, numpy {np.__version__}, {options.threads} threads",
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the file")
    parser.add_argument("--scratch", type=pathlib.Path, required=True,
                        help="folder for the checkpoint, outside the repository")
    parser.add_argument("--seed", type=int, default=6,
                        help="with 6 the walks have no shortest path from 4 of the 19 starts")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--average", type=int, default=5, help="last checkpoints whose mean ships")
    parser.add_argument("--label_smoothing", type=float, default=0.1,
                        help="of the action's target; 0 is plain cross-entropy")
    parser.add_argument("--other_heads", type=float, default=0.1,
                        help="weight of the losses of next state and next return")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    random = np.random.RandomState(options.seed)
    edges, goal = model.draw_graph(random)
    walks = model.draw_walks(random, edges, goal)
    options.scratch.mkdir(parents=True, exist_ok=True)
    training = Training(options, options.scratch / f"seed{options.seed}_steps{options.steps}.pt")
    training.run(Trajectories(walks), lambda values: progress(report(values, edges, goal)))

    for n, values in enumerate(training.kept):  # for //tools:average_checkpoints
        arrays = {name: value.numpy() for name, value in values.items()}
        tensor_file.write(options.scratch / f"checkpoint{n}.safetensors", arrays, {})
    mean = training_extras.average_checkpoints(training.kept)
    tensor_file.write(options.scratch / "mean.safetensors",
                      {name: value.numpy() for name, value in mean.items()}, {})
    frozen = {name: value.half().float() for name, value in mean.items()}
    lines = {"roll_outs_last_checkpoint": report(training.values(), edges, goal),
             "roll_outs": report(frozen, edges, goal)}
    progress(lines)
    arrays = {name: value.half().numpy() for name, value in frozen.items()}
    arrays["graph.edges"] = edges.astype(np.int32)
    arrays["graph.goal"] = np.array([goal], np.int32)
    arrays["graph.walks"] = walks
    options.out.mkdir(parents=True, exist_ok=True)
    size = tensor_file.write(options.out / "model.safetensors", arrays,
                             metadata(options, training, walks, edges, goal, lines))
    progress(f"wrote {options.out}, {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
