"""Writes adaptive/calm/testdata/trained and adaptive/depth_adaptive/testdata/trained.

What the reference language model says of the next byte when its tokens leave early, computed in
float64 token by token: each token goes through the layers until its rule lets it leave; in the layers
above, its keys and values are made of the state that it left with. The rules are those of calm and
depth_adaptive, with the weights of harness/inputs/language_model. Of classifiers that have probabilities
of leaving after each layer, those of every tenth token are kept.
"""

import math
import pathlib

import numpy as np
import torch

import golden
import language_model as model
import tensor_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "harness/inputs/language_model"
TOKENS = 300
EVERY = 10  # tokens from one whose probabilities are kept to the next


class Stream:
    """The stack, fed one token after another."""

    def __init__(self, parameters, rule):
        self.parameters, self.rule, self.position = parameters, rule, 0
        self.keys = [[] for _ in range(model.LAYERS)]
        self.values = [[] for _ in range(model.LAYERS)]

    def layer(self, n, h, active):
        """Appends the token's key and value, and returns its new state where it is active."""
        p, name = self.parameters, f"layer{n}."
        x = model.norm(p, name + "attention_norm", h)
        self.keys[n].append(x @ p[name + "w_k"])
        self.values[n].append(x @ p[name + "w_v"])
        if not active:
            return h
        first = max(0, self.position // model.SEGMENT * model.SEGMENT - model.MEMORY)
        shape = (-1, model.HEADS, model.HEAD_DIM)
        k = torch.stack(self.keys[n][first:]).view(shape)
        v = torch.stack(self.values[n][first:]).view(shape)
        q = (x @ p[name + "w_q"]).view(model.HEADS, model.HEAD_DIM)
        distances = torch.arange(self.position - first, -1, -1)
        r = (model.sinusoids(distances) @ p[name + "w_r"]).view(shape)
        scores = torch.einsum("hc,jhc->jh", q + p[name + "u"], k)
        scores = scores + torch.einsum("hc,jhc->jh", q + p[name + "v"], r)
        weights = (scores / math.sqrt(model.HEAD_DIM)).softmax(0)
        mixed = torch.einsum("jh,jhc->hc", weights, v).flatten()
        g = h + mixed @ p[name + "w_o"]
        return g + model.feed_forward(p, n, model.norm(p, name + "ff_norm", g))

    def read(self, byte):
        """Returns (exit, logits of the next byte, probabilities of the exits or None)."""
        h, left, states = self.parameters["embedding"][byte], None, []
        for n in range(model.LAYERS):
            before = h
            h = self.layer(n, h, active=left is None)
            if left is None and (n + 1 == model.LAYERS or self.rule(self, n + 1, h, before)):
                left = n + 1
            states.append(h)
        self.position += 1
        probabilities = getattr(self.rule, "probabilities", lambda *_: None)
        return left, self.logits(left, h), probabilities(self, states)

    def logits(self, n, h):
        return model.norm(self.parameters, model.exit_names()[n - 1], h) @ self.parameters["output"].T


# ---- Rules: rule(stream, n, h^n, h^(n-1)) says whether the token leaves after layer n ----


def softmax_response(threshold):
    def rule(stream, n, h, _):
        best = stream.logits(n, h).softmax(0).topk(2).values
        return best[0] - best[1] >= threshold
    return rule


def saturation(threshold):
    def rule(_stream, n, h, before):
        return n > 1 and torch.cosine_similarity(h, before, dim=0) >= threshold
    return rule


def classifier(threshold):
    def rule(stream, n, h, _):
        name = f"exit{n - 1}.confidence."
        return torch.sigmoid(h @ stream.parameters[name + "w"]
                             + stream.parameters[name + "b"])[0] >= threshold
    return rule


def max_probability(*thresholds):
    def rule(stream, n, h, _):
        return stream.logits(n, h).softmax(0).max() >= thresholds[n - 1]
    return rule


def geometric(prefix):
    def rule(stream, n, h, _):
        w, b = (stream.parameters[f"{prefix}.geometric.{name}"] for name in "wb")
        return torch.sigmoid(w[n - 1] @ h + b[n - 1]) > 0.5

    def probabilities(stream, states):
        w, b = (stream.parameters[f"{prefix}.geometric.{name}"] for name in "wb")
        chi = torch.sigmoid((w * torch.stack(states[:-1])).sum(1) + b)
        goes_on = torch.cat([torch.ones(1), (1 - chi).cumprod(0)])
        return goes_on * torch.cat([chi, torch.ones(1)])
    rule.probabilities = probabilities
    return rule


def multinomial(prefix):
    def rule(stream, n, h, _):
        if n == 1:
            w, b = (stream.parameters[f"{prefix}.multinomial.{name}"] for name in "wb")
            stream.scores = h @ w + b
            stream.chosen = int(stream.scores.argmax()) + 1
        return n >= stream.chosen
    rule.probabilities = lambda stream, _: stream.scores.softmax(0)
    return rule


def sequence(prefix):
    def rule(stream, n, h, _):
        if n == 1:
            if stream.position == 0:
                stream.states, stream.chosen = [], model.LAYERS
                stream.scores = torch.full((model.LAYERS,), -math.inf)
                stream.scores[-1] = 0
            elif stream.position % model.SEGMENT == 0:
                w, b = (stream.parameters[f"{prefix}.sequence.{name}"] for name in "wb")
                mean = torch.stack(stream.states[-model.SEGMENT:]).mean(0)
                stream.scores = mean @ w + b
                stream.chosen = int(stream.scores.argmax()) + 1
            stream.states.append(h)
        return n >= stream.chosen
    rule.probabilities = lambda stream, _: stream.scores.softmax(0)
    return rule


def run(parameters, text, rule):
    """Returns {exits, bits of the next bytes, and exit_probabilities [TOKENS / EVERY, LAYERS] if any}."""
    stream, exits, bits, probabilities = Stream(parameters, rule), [], [], []
    for here, following in zip(text[:-1], text[1:]):
        left, logits, q = stream.read(here)
        exits.append(left)
        bits.append(-logits.log_softmax(0)[following].item() / math.log(2))
        if q is not None:
            probabilities.append(q.numpy())
    tensors = {"exits": np.array(exits, np.int32), "bits": np.array(bits)}
    if probabilities:
        tensors["exit_probabilities"] = np.stack(probabilities[::EVERY])
    return tensors


def write(target, rules, parameters, text):
    tensors = {}
    for name, rule in rules.items():
        tensors.update({f"{name}.{key}": t for key, t in run(parameters, text, rule).items()})
        print(f"{name}: exit {tensors[name + '.exits'].mean():.3f}, "
              f"{tensors[name + '.bits'].mean():.4f} bits per byte")
    target.parent.mkdir(exist_ok=True)
    has_probabilities = any(name.endswith(".exit_probabilities") for name in tensors)
    size = tensor_file.write(target, tensors, {
        "made_by": "tools/capture/golden_exits.py, torch in float64, token by token",
        "weights": "harness/inputs/language_model/model.safetensors, exits.safetensors",
        "tokens": f"the first {TOKENS} bytes of held_out.txt; bits are -log2 p of the byte after each",
        **({"exit_probabilities": f"of every {EVERY}th token from the first"} if has_probabilities
           else {}),
        "segment_tokens": model.SEGMENT,
        "memory_tokens": model.MEMORY,
        "command": "python3 tools/capture/golden_exits.py",
        "versions": f"torch {torch.__version__}, numpy {np.__version__}",
    })
    print(f"{target.relative_to(ROOT)}: {size} bytes")


def main():
    parameters = {}
    for name in ("model", "exits"):
        arrays, _ = tensor_file.read(SOURCE / f"{name}.safetensors")
        parameters.update({key: torch.from_numpy(a.astype(np.float64)) for key, a in arrays.items()})
    text = (SOURCE / "held_out.txt").read_bytes()[:TOKENS + 1]
    with golden.in_float64():
        # Where nothing leaves, it is the network as it reads segments.
        tokens = torch.tensor(list(text[:TOKENS]))[None]
        out, memories = [], None
        for segment in tokens.split(model.SEGMENT, 1):
            hidden, memories, _ = model.forward(parameters, segment, memories)
            out.append(model.final_logits(parameters, hidden)[0])
        log_p = torch.cat(out).log_softmax(-1)
        expected = -log_p[torch.arange(TOKENS), torch.tensor(list(text[1:]))] / math.log(2)
        whole = run(parameters, text, lambda *_: False)["bits"]
        worst = abs(whole - expected.numpy()).max()
        if worst > 1e-9:
            raise SystemExit(f"the stream differs from the network by {worst:.1e} bits")
        write(ROOT / "adaptive/calm/testdata/trained.safetensors", {
            "softmax": softmax_response(0.8),
            "saturation": saturation(0.95),
            "classifier": classifier(0.9),
        }, parameters, text)
        write(ROOT / "adaptive/depth_adaptive/testdata/trained.safetensors", {
            "geometric": geometric("likelihood.2"),
            "multinomial": multinomial("correctness.3"),
            "sequence": sequence("likelihood.1"),
            "confidence": max_probability(0.9, 0.8, 0.7, 0.6, 0.5),
        }, parameters, text)


if __name__ == "__main__":
    main()
