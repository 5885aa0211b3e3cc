"""The Universal Transformer encoder that adds numbers, with adaptive computation time.

    x_t = first[a_t] + second[b_t]                       digits of the numbers, least significant first
    u^n = h^(n-1) + PE[t] + PE[n],  a = LN(u + Attention(u)),  h^n = LN(a + FF(a))      h^0 = x
    p^n = sigmoid(u^n . w + b),  N = min {n: p^1 + .. + p^n >= THRESHOLD}, STEPS at most
    y = p^1 h^1 + .. + p^(N-1) h^(N-1) + R h^N           R = 1 - (p^1 + .. + p^(N-1))
    logits of digit t of the sum = y output.w + output.b

as adaptive/universal_transformer has it: a token that has halted keeps h^N, which the others go on
to see. Token 0 is a mark, the digits follow, the last of them zeros. The parameters are a dictionary;
their names and shapes are those of the file.
"""

import torch
import torch.nn.functional as functional

STEPS, HEADS, HEAD_DIM = 8, 4, 16
WIDTH, INNER = HEADS * HEAD_DIM, 4 * HEADS * HEAD_DIM
THRESHOLD = 0.99
DIGITS, MARK = 10, 10  # MARK is the symbol of token 0
TECHNIQUE = f"universal_transformer:steps={STEPS},halting=act,threshold={THRESHOLD}"


def initial_parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = {}

    def matrix(name, rows, columns, deviation):
        parameters[name] = torch.randn(rows, columns, generator=generator) * deviation

    def zeros(name, size):
        parameters[name] = torch.zeros(size)

    def norm(name):
        parameters[name + ".gamma"] = torch.ones(WIDTH)
        zeros(name + ".beta", WIDTH)

    matrix("embedding.first", DIGITS + 1, WIDTH, 1)
    matrix("embedding.second", DIGITS + 1, WIDTH, 1)
    for name in ("w_q", "w_k", "w_v", "w_o"):
        matrix("attention." + name, WIDTH, WIDTH, WIDTH ** -0.5)
    norm("attention_norm")
    matrix("ff.w1", WIDTH, INNER, WIDTH ** -0.5)
    zeros("ff.b1", INNER)
    matrix("ff.w2", INNER, WIDTH, INNER ** -0.5)
    zeros("ff.b2", WIDTH)
    norm("ff_norm")
    zeros("halting.w", WIDTH)
    parameters["halting.b"] = torch.full((1,), -2.0)  # p = 0.12: all steps, to begin with
    matrix("output.w", WIDTH, DIGITS, WIDTH ** -0.5)
    zeros("output.b", DIGITS)
    return parameters


def sinusoids(first, count):
    """Of the positions from `first` on, sines and cosines in turn; [count, WIDTH]."""
    frequencies = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = torch.arange(first, first + count, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(torch.get_default_dtype())


def norm(parameters, name, x):
    return functional.layer_norm(x, (WIDTH,), parameters[name + ".gamma"], parameters[name + ".beta"])


def heads(x):
    """[batch, tokens, WIDTH] to [batch, HEADS, tokens, HEAD_DIM]."""
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def attention(parameters, u, hidden_keys):
    q, k, v = (heads(u @ parameters["attention." + name]) for name in ("w_q", "w_k", "w_v"))
    scores = q @ k.transpose(-1, -2) * HEAD_DIM ** -0.5
    mixed = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2) @ parameters["attention.w_o"]


def block(parameters, u, hidden_keys):
    a = norm(parameters, "attention_norm", u + attention(parameters, u, hidden_keys))
    inner = (a @ parameters["ff.w1"] + parameters["ff.b1"]).relu()
    return norm(parameters, "ff_norm", a + inner @ parameters["ff.w2"] + parameters["ff.b2"])


def embed(parameters, numbers):
    """numbers [batch, tokens, 2]: the two digits of each token."""
    return (functional.embedding(numbers[..., 0], parameters["embedding.first"])
            + functional.embedding(numbers[..., 1], parameters["embedding.second"]))


def inputs_of_steps(x, steps, first_position):
    """What is added to the hidden state before each step."""
    return sinusoids(first_position, x.shape[1]) + sinusoids(1, steps)[:, None]


def fixed_steps(parameters, numbers, mask, first_position=0, steps=STEPS):
    """The hidden states h^1 .. h^steps of a network that never halts."""
    h = embed(parameters, numbers)
    hidden_keys = ~mask[:, None, None]
    states = []
    for added in inputs_of_steps(h, steps, first_position):
        h = block(parameters, h + added, hidden_keys)
        states.append(h)
    return states


def adaptive_steps(parameters, numbers, mask, first_position=0, steps=STEPS, threshold=THRESHOLD):
    """Returns (y, ponder N + R, steps N); the last two are 0 for padding."""
    h = embed(parameters, numbers)
    hidden_keys = ~mask[:, None, None]
    running = mask
    total = torch.zeros(mask.shape)
    ponder, taken = torch.zeros(mask.shape), torch.zeros(mask.shape, dtype=torch.int32)
    y = torch.zeros_like(h)
    for n, added in enumerate(inputs_of_steps(h, steps, first_position), start=1):
        u = h + added
        p = torch.sigmoid(u @ parameters["halting.w"] + parameters["halting.b"])
        halts = running & ((total + p >= threshold) if n < steps else running)
        remainder = 1 - total
        weight = torch.where(halts, remainder, p) * running
        h = torch.where(running[..., None], block(parameters, u, hidden_keys), h)
        y = y + weight[..., None] * h
        ponder = ponder + running + halts * remainder
        taken = taken + running
        total = total + weight
        running = running & ~halts
    return y, ponder, taken


def logits(parameters, state):
    return state @ parameters["output.w"] + parameters["output.b"]
