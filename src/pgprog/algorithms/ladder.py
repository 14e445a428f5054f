"""The ladder: five algorithms, one small file each, all a call of ``update`` with an A of their own."""

from collections.abc import Callable

from pgprog.algorithms import actor_critic, grpo, ppo, reinforce, rloo
from pgprog.algorithms.update import Advantage, Metrics

TRAIN_STEPS: dict[str, Callable[..., Metrics]] = {
    "reinforce": reinforce.train_step,
    "actor_critic": actor_critic.train_step,
    "ppo": ppo.train_step,
    "rloo": rloo.train_step,
    "grpo": grpo.train_step,
}
ADVANTAGES: dict[str, Advantage] = {
    "reinforce": reinforce.advantage,
    "actor_critic": actor_critic.advantage,
    "ppo": ppo.advantage,
    "rloo": rloo.advantage,
    "grpo": grpo.advantage,
}
