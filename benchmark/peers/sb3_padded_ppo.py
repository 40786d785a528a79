"""Stable-Baselines3 (MaskablePPO) on zero-padded graph observations: a system to compare with.

    pip install -r benchmark/peers/requirements-sb3.txt    # in a virtual environment of its own
    python benchmark/peers/sb3_padded_ppo.py --env-id envs:PoissonGraph-v0 --total-timesteps 100000

Stable-Baselines3 stores arrays of fixed shape, so each graph is padded to the largest one that the
environment declares, with 4 edges per node. The policy removes the padding again before its graph
network, which is that of list_of_data_ppo.py, as are all hyperparameters. Prints the steps per
second of the whole training and the mean return of the last 100 episodes.
"""

import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium import spaces
from list_of_data_ppo import Args, GraphAgent, full_id
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

EDGES_PER_NODE = 4


class PadGraph(gym.ObservationWrapper):
    """{"graph", "action_mask"} as a Dict of Box: nodes [max_nodes, F], edges [4 * max_nodes, 2],
    size (nodes, edges).

    Raises ValueError for a graph with edge features, more than max_nodes nodes or more than 4 *
    max_nodes edges.
    """

    def __init__(self, env):
        super().__init__(env)
        space = env.observation_space["graph"]
        if space.edge_space is not None:
            raise ValueError("PadGraph has no room for edge features")
        self.max_nodes = int(env.action_space.n)
        self.max_edges = EDGES_PER_NODE * self.max_nodes
        self.num_features = space.node_space.shape[0]
        shape = (self.max_nodes, self.num_features)
        self.observation_space = spaces.Dict(
            nodes=spaces.Box(-np.inf, np.inf, shape, np.float32),
            edges=spaces.Box(0, self.max_nodes, (self.max_edges, 2), np.int16),
            size=spaces.Box(0, self.max_edges, (2,), np.int32),
        )

    def observation(self, observation):
        graph = observation["graph"]
        num_nodes, num_edges = len(graph.nodes), len(graph.edge_links)
        if num_nodes > self.max_nodes or num_edges > self.max_edges:
            raise ValueError(
                f"a graph of {num_nodes} nodes and {num_edges} edges exceeds {self.max_nodes} and "
                f"{self.max_edges}"
            )
        nodes = np.zeros((self.max_nodes, self.num_features), np.float32)
        nodes[:num_nodes] = graph.nodes
        edges = np.zeros((self.max_edges, 2), np.int16)
        edges[:num_edges] = graph.edge_links
        self.mask = np.zeros(self.max_nodes, bool)
        self.mask[:num_nodes] = observation["action_mask"]
        return {"nodes": nodes, "edges": edges, "size": np.array([num_nodes, num_edges], np.int32)}

    def action_masks(self):
        """bool [max_nodes], for MaskablePPO."""
        return self.mask


class GraphExtractor(BaseFeaturesExtractor):
    """Padded observations to [B, max_nodes + 1]: a score for each node (0 for padding), then the
    value."""

    def __init__(self, observation_space, args):
        self.max_nodes, num_features = observation_space["nodes"].shape
        super().__init__(observation_space, self.max_nodes + 1)
        self.agent = GraphAgent(num_features, args)

    def forward(self, observation):
        size = observation["size"].long()
        device = size.device
        is_node = torch.arange(self.max_nodes, device=device) < size[:, :1]
        is_edge = torch.arange(observation["edges"].shape[1], device=device) < size[:, 1:]
        graph = torch.arange(len(size), device=device)
        ptr = torch.cat([size.new_zeros(1), size[:, 0].cumsum(0)])
        offset = ptr[:-1].repeat_interleave(size[:, 1])[:, None]
        links = observation["edges"][is_edge].long() + offset
        batch = graph.repeat_interleave(size[:, 0])
        score, value = self.agent(observation["nodes"][is_node], links.T, batch, ptr)
        padded = score.new_zeros(is_node.shape).masked_scatter(is_node, score)
        return torch.cat([padded, value[:, None]], 1)


class SplitHeads(nn.Module):
    """The two parts of GraphExtractor's output, in the place of Stable-Baselines3's MLP
    extractor."""

    def __init__(self, max_nodes):
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = max_nodes, 1

    def forward(self, features):
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features):
        return features[:, :-1]

    def forward_critic(self, features):
        return features[:, -1:]


class NodePolicy(MaskableMultiInputActorCriticPolicy):
    """Scores of the nodes are the logits; nothing is added after GraphExtractor."""

    def _build_mlp_extractor(self):
        self.mlp_extractor = SplitHeads(self.features_dim - 1)

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_net, self.value_net = nn.Identity(), nn.Identity()
        options = self.optimizer_kwargs
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **options)


def main(args):
    batch_size = args.num_envs * args.num_steps
    make = lambda: Monitor(PadGraph(gym.make(full_id(args.env_id), disable_env_checker=True)))
    network = dict(
        features_extractor_class=GraphExtractor, features_extractor_kwargs={"args": args}
    )
    network["ortho_init"] = False  # GraphAgent initialises itself
    same = ("gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "seed")
    settings = {name: getattr(args, name) for name in same}
    settings |= dict(clip_range=args.clip_coef, clip_range_vf=args.clip_coef)
    settings |= dict(n_steps=args.num_steps, n_epochs=args.update_epochs, policy_kwargs=network)
    settings |= dict(learning_rate=lambda remaining: args.learning_rate * remaining)
    settings |= dict(batch_size=batch_size // args.num_minibatches)
    settings |= dict(device="auto" if args.cuda else "cpu")
    model = MaskablePPO(NodePolicy, DummyVecEnv([make] * args.num_envs), **settings)
    total_timesteps = args.total_timesteps // batch_size * batch_size
    start_time = time.perf_counter()
    model.learn(total_timesteps)
    seconds = time.perf_counter() - start_time
    returns = [episode["r"] for episode in model.ep_info_buffer]
    print(f"SPS {total_timesteps / seconds:.0f}")
    print(f"mean return {np.mean(returns):.3f} (last {len(returns)} episodes)")


if __name__ == "__main__":
    main(tyro.cli(Args))
