"""What the frozen model learns of looking things up: SPALM's gate, Memorizing's gates and scales.

As in language_model_extras.py each function returns (tensors, record).
"""

import math

import torch
import torch.nn.functional as functional

import language_model as model
from language_model_extras import JUDGED_BYTES, byte_loss, excerpts, minimize

# ---- SPALM ----

NEIGHBOURS = 8
DATASTORE_BYTES = 1 << 18  # the end of the datastore's text
QUERIES = 32768
GATE_DECAY = 1e-2  # towards equal parts: the base trusts itself too much on text that it has read


def streams(tokens, count):
    """A text cut into equal parts, each with the byte after it; [count, length + 1]."""
    length = (len(tokens) - 1) // count
    return torch.stack([tokens[s * length:(s + 1) * length + 1] for s in range(count)])


@torch.no_grad()
def states(parameters, read):
    """(key, final normalised state, next byte) of each byte but the last, stream after stream."""
    keys, finals, memories = [], [], None
    for x, _ in model.segments(read):
        hidden, memories, key = model.forward(parameters, x, memories)
        keys.append(key)
        finals.append(model.norm(parameters, "final_norm", hidden[-1]))
    return torch.cat(keys, 1).flatten(0, 1), torch.cat(finals, 1).flatten(0, 1), read[:, 1:].flatten()


@torch.no_grad()
def nearest(queries, keys, count):
    """Rows of the keys with the least squared distance, [queries, count]."""
    squares = keys.square().sum(1)
    found = []
    for some in queries.split(256):
        found.append((squares - 2 * some @ keys.T).topk(count, largest=False).indices)
    return torch.cat(found)


def mix_of_neighbours(parameters, finals, neighbours):
    """m = sum_i softmax_i(y_i . h) y_i over the next bytes [rows, count] of the neighbours."""
    y = parameters["output"][neighbours]
    return (((y @ finals[:, :, None]).squeeze(-1).softmax(-1)[:, None]) @ y).squeeze(1)


def spalm_gate(parameters, training, datastore, held_out, seed):
    """SPALM, TACL 2021: z = (1 - g) m + g h with g = sigmoid(w . h); w alone is learned.

    The queries are training text from before the datastore's, so that none finds itself.
    """
    keys, _, next_bytes = states(parameters, streams(datastore[-DATASTORE_BYTES:], 32))
    generator = torch.Generator().manual_seed(seed)
    read = excerpts(training[:-len(datastore)], 16, QUERIES // 16, generator)
    learned_from = examples(parameters, read, keys, next_bytes)
    judged_by = examples(parameters, streams(held_out, 1)[:, :QUERIES // 4 + 1], keys, next_bytes)
    w = torch.zeros(model.WIDTH)
    own = gate_losses(parameters, w, *judged_by)[1]
    minimize(lambda: gate_losses(parameters, w, *learned_from)[0] + GATE_DECAY * w.square().sum(), [w],
             60)
    trained, trained_own = gate_losses(parameters, w, *learned_from)
    record = (f"L-BFGS of 60 iterations on {QUERIES} bytes, {NEIGHBOURS} neighbours of {len(keys)}; "
              f"without to with, nats: {trained_own.item():.4f} to {trained.item():.4f}, "
              f"{len(judged_by[0])} held-out bytes {own.item():.4f} to "
              f"{gate_losses(parameters, w, *judged_by)[0].item():.4f}")
    return {"spalm.gate": w}, record


def examples(parameters, read, keys, next_bytes):
    """(h, m, next byte) of streams."""
    queries, finals, y = states(parameters, read)
    mixes = mix_of_neighbours(parameters, finals, next_bytes[nearest(queries, keys, NEIGHBOURS)])
    return finals, mixes, y


def gate_losses(parameters, w, finals, mixes, y):
    """With the neighbours, and without."""
    g = torch.sigmoid(finals @ w)[:, None]
    output = parameters["output"].T
    return (functional.cross_entropy(((1 - g) * mixes + g * finals) @ output, y),
            functional.cross_entropy(finals @ output, y))


# ---- Memorizing ----

MEMORY_LAYER = 4
RETRIEVED = 32
STORE_TOKENS = 8192
DOCUMENT_SEGMENTS = 80
DOCUMENTS = 4  # batches of them, one after the other


class Memorizing:
    """Attention whose layer MEMORY_LAYER also reads a store: arXiv:2203.08913v1, section 3.

    Keys and queries of unit length; score scale_h q . k of the RETRIEVED best per head, out of the
    tokens that have left the layer's own memory; o = g o_store + (1 - g) o_local.
    """

    def __init__(self, gate, log_scale):
        self.gate, self.log_scale = gate, log_scale
        self.forget()

    def forget(self):
        self.keys = self.values = None

    def __call__(self, parameters, n, x, context):
        if n != MEMORY_LAYER:
            return model.plain_attention(parameters, n, x, context)
        k, v = model.keys_and_values(parameters, n, context)
        local = model.attention_weights(parameters, n, x, k) @ v
        out = local
        if self.keys is not None:
            q = functional.normalize(model.heads(x @ parameters[f"layer{n}.w_q"]), dim=-1)
            g = torch.sigmoid(self.gate)[:, None, None, None]
            out = g * self.read(q) + (1 - g) * local
        self.keep(k.detach(), v.detach(), x.shape[1])
        return model.merge_heads(out)

    def read(self, q):
        scores = q @ self.keys.transpose(-1, -2)
        best, found = scores.topk(min(RETRIEVED, scores.shape[-1]), sorted=False)
        weights = (self.log_scale.exp()[:, None, None, None] * best).softmax(-1)
        # The weights where their keys are, 0 elsewhere: a product instead of a gathered copy.
        return torch.zeros_like(scores).scatter(-1, found, weights) @ self.values

    def keep(self, k, v, tokens):
        """The part of the context that the next segment's memory will not hold."""
        leaving = k.shape[2] - model.MEMORY
        if leaving <= 0:
            return
        k, v = functional.normalize(k[:, :, :leaving], dim=-1), v[:, :, :leaving]
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self.keys, self.values = k[:, :, -STORE_TOKENS:], v[:, :, -STORE_TOKENS:]


def memorizing_gates(parameters, tokens, held_out, seed):
    generator = torch.Generator().manual_seed(seed)
    gate = torch.full((model.HEADS,), -1.0, requires_grad=True)
    log_scale = torch.full((model.HEADS,), math.log(8), requires_grad=True)
    optimizer = torch.optim.Adam([gate, log_scale], lr=0.05)
    attention, steps = Memorizing(gate, log_scale), DOCUMENTS * DOCUMENT_SEGMENTS
    for step in range(steps):
        if step % DOCUMENT_SEGMENTS == 0:
            read = excerpts(tokens, 4, DOCUMENT_SEGMENTS * model.SEGMENT, generator)
            source, memories = model.segments(read), None
            attention.forget()
        x, y = next(source)
        hidden, memories, _ = model.forward(parameters, x, memories, attention=attention)
        loss = byte_loss(parameters, hidden, y)
        if not loss.requires_grad:  # nothing is stored yet
            continue
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    judged = held_out[-JUDGED_BYTES - 1:][None]
    attention.forget()
    with torch.no_grad():
        bits = model.bits_per_byte(parameters, judged, attention=attention)[-1]
    own = model.bits_per_byte(parameters, judged)[-1]
    record = (f"Adam, {steps} steps of 512 bytes in documents of {DOCUMENT_SEGMENTS * model.SEGMENT}, "
              f"{RETRIEVED} of up to {STORE_TOKENS} entries; the last {JUDGED_BYTES} held-out bytes "
              f"{own:.4f} to {bits:.4f} bits per byte")
    name = f"layer{MEMORY_LAYER}.memory."
    return {name + "gate": gate.detach(), name + "scale": log_scale.detach().exp()}, record
