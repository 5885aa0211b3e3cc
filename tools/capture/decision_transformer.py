"""A Decision Transformer that finds short paths in a graph, and the random walks it learns from.

The task of Chen et al. 2021, arXiv:2106.01345v2, appendix A.3: a state is a node of a fixed
directed graph, an action the node to move to, the reward -1 a step until the goal. Only random
walks are seen. The network, for tokens (R_0, s_0, a_0, R_1, ...) of at most STEPS steps:

    token = LN(value W + b + timestep_embedding[t])
    g = h + Attention(LN h),  h' = g + FF(LN g)        layer n = 0 .. LAYERS - 1, relu
    a_t from LN h of s_t's token; s_t+1 and R_t+1 from that of a_t's

The parameters are a dictionary; their names and shapes are those of adaptive/decision_transformer.
"""

import math

import numpy as np
import torch
import torch.nn.functional as functional

NODES, EDGE_PROBABILITY, WALKS, STEPS = 20, 0.1, 1000, 10  # the paper's
LAYERS, HEADS, HEAD_DIM = 3, 2, 32
WIDTH, INNER = HEADS * HEAD_DIM, 4 * HEADS * HEAD_DIM
RETURN_SCALE = 1 / STEPS
TECHNIQUE = (f"decision_transformer:layers={LAYERS},state_dim={NODES},"
             f"action_dim={NODES},max_timestep={STEPS},action_tanh=false")


# ---- The graph and the walks ----


def distances_to(goal, edges):
    """Steps of the shortest path of each node to the goal; -1 where there is none."""
    distances = np.full(len(edges), -1)
    distances[goal] = 0
    for steps in range(1, len(edges)):
        before = distances == steps - 1
        distances[(distances < 0) & (edges[:, before].any(1))] = steps
    return distances


def draw_graph(random):
    """(edges [NODES, NODES] of bool, goal): every node has a path to the goal of at most STEPS."""
    while True:
        edges = random.random_sample((NODES, NODES)) < EDGE_PROBABILITY
        np.fill_diagonal(edges, False)
        goal = random.randint(NODES)
        distances = distances_to(goal, edges)
        if distances.min() >= 0 and distances.max() <= STEPS:
            return edges, goal


def draw_walks(random, edges, goal):
    """[WALKS, STEPS + 1] nodes: from any other node than the goal to it, or for STEPS; then -1."""
    walks = np.full((WALKS, STEPS + 1), -1, np.int32)
    starts = [node for node in range(NODES) if node != goal]
    for walk in walks:
        walk[0] = random.choice(starts)
        for step in range(STEPS):
            walk[step + 1] = random.choice(np.flatnonzero(edges[walk[step]]))
            if walk[step + 1] == goal:
                break
    return walks


# ---- The network ----


def initial_parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = {}

    def matrix(name, rows, columns, deviation):
        parameters[name] = torch.randn(rows, columns, generator=generator) * deviation

    def linear(weight, bias, rows, columns, scale=1.0):
        matrix(weight, rows, columns, scale * rows ** -0.5)
        parameters[bias] = torch.zeros(columns)

    def norm(name):
        parameters[name + ".gamma"] = torch.ones(WIDTH)
        parameters[name + ".beta"] = torch.zeros(WIDTH)

    for modality, channels in (("return", 1), ("state", NODES), ("action", NODES)):
        linear(f"embed.{modality}.w", f"embed.{modality}.b", channels, WIDTH, channels ** 0.5)
    matrix("embed.timestep", STEPS, WIDTH, 1.0)
    norm("embed.norm")
    of_branch = 1 / math.sqrt(2 * LAYERS)
    for n in range(LAYERS):
        attention, ff = f"encoder{n}.attention.", f"encoder{n}.ff."
        for name in "qkv":
            linear(attention + "w_" + name, attention + "b_" + name, WIDTH, WIDTH)
        linear(attention + "w_o", attention + "b_o", WIDTH, WIDTH, of_branch)
        linear(ff + "w1", ff + "b1", WIDTH, INNER)
        linear(ff + "w2", ff + "b2", INNER, WIDTH, of_branch)
        norm(f"encoder{n}.attention_norm")
        norm(f"encoder{n}.ff_norm")
    norm("encoder_norm")
    for modality, channels in (("action", NODES), ("state", NODES), ("return", 1)):
        linear(f"head.{modality}.w", f"head.{modality}.b", WIDTH, channels)
    return parameters


class Network:
    def __init__(self, parameters, dropout=0.0):
        self.parameters, self.dropout = parameters, dropout

    def linear(self, x, weight, bias):
        return x @ self.parameters[weight] + self.parameters[bias]

    def norm(self, x, name):
        return functional.layer_norm(x, (WIDTH,), self.parameters[name + ".gamma"],
                                     self.parameters[name + ".beta"])

    def drop(self, x):
        return functional.dropout(x, self.dropout) if self.dropout else x

    def attention(self, x, prefix):
        q, k, v = (self.linear(x, prefix + "w_" + name, prefix + "b_" + name)
                   .unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for name in "qkv")
        tokens = x.shape[1]
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
        scores = scores + torch.full((tokens, tokens), -math.inf).triu(1)
        mixed = self.drop(scores.softmax(-1)) @ v
        return self.linear(mixed.transpose(1, 2).flatten(2), prefix + "w_o", prefix + "b_o")

    def feed_forward(self, x, prefix):
        inner = self.linear(x, prefix + "w1", prefix + "b1").relu()
        return self.linear(inner, prefix + "w2", prefix + "b2")

    def __call__(self, returns, states, actions, timesteps):
        """Actions' and next states' logits [batch, steps, NODES], next returns [batch, steps].

        Of returns-to-go, nodes, nodes (any where no action is taken yet), timesteps, all [batch,
        steps].
        """
        time = self.parameters["embed.timestep"][timesteps]
        values = (returns[..., None] * RETURN_SCALE, functional.one_hot(states, NODES).float(),
                  functional.one_hot(actions, NODES).float())
        tokens = torch.stack(
            [self.linear(value, f"embed.{name}.w", f"embed.{name}.b") + time
             for name, value in zip(("return", "state", "action"), values)], dim=2).flatten(1, 2)
        h = self.drop(self.norm(tokens, "embed.norm"))
        for n in range(LAYERS):
            x = self.norm(h, f"encoder{n}.attention_norm")
            h = h + self.drop(self.attention(x, f"encoder{n}.attention."))
            x = self.norm(h, f"encoder{n}.ff_norm")
            h = h + self.drop(self.feed_forward(x, f"encoder{n}.ff."))
        h = self.norm(h, "encoder_norm").unflatten(1, (-1, 3))
        action = self.linear(h[:, :, 1], "head.action.w", "head.action.b")
        state = self.linear(h[:, :, 2], "head.state.w", "head.state.b")
        return action, state, self.linear(h[:, :, 2], "head.return.w", "head.return.b")[..., 0]


# ---- Asking for a return ----


@torch.no_grad()
def roll_out(parameters, edges, goal, starts, asked):
    """Steps to the goal of each start, STEPS + 1 where it is not reached, always taking the most
    likely action; R_t+1 = R_t - r_t. A move without an edge stays where it is."""
    network = Network(parameters)
    starts, asked = torch.as_tensor(starts), torch.as_tensor(asked, dtype=torch.float32)
    states, actions = starts[:, None], torch.zeros(len(starts), 1, dtype=torch.int64)
    taken = torch.full((len(starts),), STEPS + 1)
    for t in range(STEPS):
        timesteps = torch.arange(t + 1).expand(len(starts), -1)
        logits, _, _ = network(asked[:, None] + timesteps, states, actions, timesteps)
        actions[:, t] = logits[:, t].argmax(-1)
        moved = torch.from_numpy(edges)[states[:, t], actions[:, t]]
        states = torch.cat([states, torch.where(moved, actions[:, t], states[:, t])[:, None]], 1)
        actions = torch.cat([actions, torch.zeros_like(actions[:, :1])], 1)
        taken = torch.where((states[:, -1] == goal) & (taken > STEPS), t + 1, taken)
    return taken
