"""What the frozen model's layers learn: confidence of exits, spans of heads, compression of memories.

Each function takes the base parameters and tokens of the training text and returns (tensors, record):
what goes into the file, and for its metadata what was done and what it gained. language_model_retrieval.py
has what reads a datastore or a store of keys.
"""

import math

import torch
import torch.nn.functional as functional

import language_model as model

# ---- Text ----


def excerpts(tokens, count, length, generator):
    """Some of the text's parts of length + 1 bytes, [count, length + 1]."""
    begins = torch.randint(0, len(tokens) - length, (count,), generator=generator)
    return torch.stack([tokens[begin:begin + length + 1] for begin in begins.tolist()])


def endless_segments(tokens, batch, per_excerpt, generator):
    """(x, y, whether memories are empty now), one excerpt after another."""
    while True:
        read = excerpts(tokens, batch, per_excerpt * model.SEGMENT, generator)
        for number, (x, y) in enumerate(model.segments(read)):
            yield x, y, number == 0


# ---- Exits ----


def confidences(parameters, tokens, seed):
    """The probability that an exit's most likely byte is the model's: sigmoid(w . h^(n+1) + b).

    CALM, arXiv:2207.07061: a classifier for each exit, trained on the frozen model. Logistic
    regression by L-BFGS on standardised channels; mean and deviation are then folded into w and b.
    """
    source = endless_segments(tokens, 16, 8, torch.Generator().manual_seed(seed))
    states, agreements, memories = [], [], None
    for _ in range(48):
        x, _, begins = next(source)
        with torch.no_grad():
            hidden, memories, _ = model.forward(parameters, x, None if begins else memories)
            best = model.all_logits(parameters, hidden).argmax(-1)
        states.append(torch.stack(hidden[1:-1]).flatten(1, 2))
        agreements.append((best[:-1] == best[-1]).flatten(1))
    states, agreements = torch.cat(states, 1), torch.cat(agreements, 1).float()
    tensors, record = {}, []
    for n, (h, agrees) in enumerate(zip(states, agreements)):
        mean, deviation = h.mean(0), h.std(0)
        h = (h - mean) / deviation
        w, b = torch.zeros(model.WIDTH), torch.zeros(1)

        def loss(h=h, agrees=agrees, w=w, b=b):
            return functional.binary_cross_entropy_with_logits(h @ w + b, agrees)

        minimize(loss, [w, b], 40)
        rate = agrees.mean().item()
        before = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        record.append(f"exit {n}: agrees {rate:.4f}, loss {before:.4f} to {loss().item():.4f} nats")
        tensors[f"exit{n}.confidence.w"] = w / deviation
        tensors[f"exit{n}.confidence.b"] = b - (w * mean / deviation).sum()
    return tensors, "L-BFGS of 40 iterations on 98304 bytes; constant to learned, " + "; ".join(record)


def minimize(loss, variables, iterations):
    """L-BFGS; the variables are plain tensors before and after."""
    for variable in variables:
        variable.requires_grad_()
    optimizer = torch.optim.LBFGS(variables, max_iter=iterations, history_size=20,
                                  line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    for variable in variables:
        variable.requires_grad_(False)


# ---- Spans ----

RAMP = 32
LONGEST = 512
SPAN_STEPS = 280
SPAN_RATE = 4.0       # tokens a step, at first
FIRST_PENALTY = 3e-5  # nats a token of mean span
ALLOWED_RISE = 0.008  # of the loss; below the 1 % that it may rise on other text
JUDGED_BYTES = 32768


def attention_with_spans(spans):
    """Adaptive span, arXiv:1905.07799: weights times m_z(d), normalised again; spans [LAYERS, HEADS]."""
    def attention(parameters, n, x, context):
        k, v = model.keys_and_values(parameters, n, context)
        weights = model.attention_weights(parameters, n, x, k)
        tokens, keys = weights.shape[-2:]
        distance = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
        kept = ((RAMP + spans[n][:, None, None] - distance) / RAMP).clamp(0, 1)
        weights = weights * kept[:, None]
        return model.merge_heads(weights / weights.sum(-1, keepdim=True) @ v)
    return attention


def spans_of_heads(parameters, tokens, held_out, seed):
    """Spans z as short as the loss allows.

    The penalty on the mean of z rises while the loss is less than ALLOWED_RISE above that of the
    whole memory on the same bytes, and falls while it is more.
    """
    source = endless_segments(tokens, 8, 12, torch.Generator().manual_seed(seed))
    spans = torch.full((model.LAYERS, model.HEADS), 256.0, requires_grad=True)
    optimizer = torch.optim.Adam([spans], lr=SPAN_RATE)
    penalty, rise, whole, cut = FIRST_PENALTY, 0.0, None, None
    attention = attention_with_spans(spans)
    for step in range(SPAN_STEPS):
        x, y, begins = next(source)
        with torch.no_grad():
            hidden, whole, _ = model.forward(parameters, x, None if begins else whole)
            reference = byte_loss(parameters, hidden, y)
        hidden, cut, _ = model.forward(parameters, x, None if begins else cut, attention=attention)
        loss = byte_loss(parameters, hidden, y)
        optimizer.param_groups[0]["lr"] = SPAN_RATE * (1 - step / SPAN_STEPS)
        optimizer.zero_grad()
        (loss + penalty * spans.mean()).backward()
        optimizer.step()
        with torch.no_grad():
            spans.clamp_(0, LONGEST)
        rise = 0.9 * rise + 0.1 * (loss.item() / reference.item() - 1)
        penalty *= math.exp(0.02 * max(-1.0, min(1.0, 1 - rise / ALLOWED_RISE)))
    found, judged = spans.detach(), held_out[:JUDGED_BYTES + 1][None]
    own = model.bits_per_byte(parameters, judged)[-1]
    bits = model.bits_per_byte(parameters, judged, attention=attention_with_spans(found))[-1]
    record = (f"Adam, {SPAN_STEPS} steps of 1024 bytes, ramp {RAMP}; mean span 256 to {found.mean():.1f}, "
              f"loss up by {100 * rise:.2f} %; the first {JUDGED_BYTES} held-out bytes {own:.4f} to "
              f"{bits:.4f} bits per byte")
    return {f"layer{n}.span": found[n] for n in range(model.LAYERS)}, record


def byte_loss(parameters, hidden, y):
    return functional.cross_entropy(model.final_logits(parameters, hidden).flatten(0, 1), y.flatten())


# ---- Compression ----

RATE = 4
COMPRESSION_STEPS = 240


def convolve(w, b, x):
    """y_t = b + sum_i x[4 t + i] w[i] of evicted states [batch, tokens, WIDTH]."""
    return x.unflatten(1, (-1, RATE)).flatten(2) @ w.flatten(0, 1) + b


def convolve_dilated(w, b, x):
    """y_t = b + sum_i x[4 t + 3 - 2 i] w[i]; what is before x is 0."""
    padded = functional.pad(x, (0, 0, RATE - 1, 0))  # x[p] is padded[p + 3]
    taps = [padded[:, 2 * (RATE - 1 - i):][:, ::RATE][:, :x.shape[1] // RATE] for i in range(RATE)]
    return sum(tap @ w[i] for i, tap in enumerate(taps)) + b


def content_attention(parameters, n, x, context):
    """Attention without positions; x and context are hidden states before the norm."""
    name = f"layer{n}.attention_norm"
    q = model.heads(model.norm(parameters, name, x) @ parameters[f"layer{n}.w_q"])
    k, v = model.keys_and_values(parameters, n, model.norm(parameters, name, context))
    return (q @ k.transpose(-1, -2) * model.HEAD_DIM ** -0.5).softmax(-1) @ v


def convolutions(parameters, tokens, seed):
    """Compressive Transformer, arXiv:1911.05507, algorithm 2: the attention-reconstruction loss.

    A layer's queries read the block that leaves its memory, and the block compressed; the squared
    difference is the loss, stated here relative to the mean square of what they read.
    """
    source = endless_segments(tokens, 8, 12, torch.Generator().manual_seed(seed))
    kinds = {"convolution": convolve, "dilated_convolution": convolve_dilated}
    learned = {}
    for n in range(model.LAYERS):
        for kind in kinds:
            mean_of_four = torch.eye(model.WIDTH).expand(RATE, -1, -1) / RATE
            learned[f"layer{n}.{kind}.w"] = mean_of_four.clone().requires_grad_()
            learned[f"layer{n}.{kind}.b"] = torch.zeros(model.WIDTH, requires_grad=True)
    optimizer = torch.optim.Adam(learned.values())
    history, memories, step = {kind: [] for kind in kinds}, None, 0
    while step < COMPRESSION_STEPS:
        x, _, begins = next(source)
        evicted = None if begins or memories[0].shape[1] < model.MEMORY else [
            memory[:, :model.SEGMENT] for memory in memories]
        with torch.no_grad():
            hidden, memories, _ = model.forward(parameters, x, None if begins else memories)
        if evicted is None:
            continue
        losses = reconstruction_losses(parameters, learned, kinds, hidden, evicted)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / COMPRESSION_STEPS)
        optimizer.zero_grad()
        sum(sum(of_layers) for of_layers in losses.values()).backward()
        optimizer.step()
        for kind, of_layers in losses.items():
            history[kind].append(sum(loss.item() for loss in of_layers) / model.LAYERS)
        step += 1
    record = f"Adam, {step} steps of 1024 bytes, relative squared error of the attention: " + "; ".join(
        f"{kind} {values[0]:.4f} (mean of four) to {sum(values[-20:]) / 20:.4f}"
        for kind, values in history.items())
    return {name: value.detach() for name, value in learned.items()}, record


def reconstruction_losses(parameters, learned, kinds, hidden, evicted):
    losses = {kind: [] for kind in kinds}
    for n, old in enumerate(evicted):
        with torch.no_grad():
            wanted = content_attention(parameters, n, hidden[n], old)
        for kind, compress in kinds.items():
            new = compress(learned[f"layer{n}.{kind}.w"], learned[f"layer{n}.{kind}.b"], old)
            error = content_attention(parameters, n, hidden[n], new) - wanted
            losses[kind].append(error.square().mean() / wanted.square().mean())
    return losses
