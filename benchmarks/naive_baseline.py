"""FROZEN. The yardstick of ``benchmarks/speed.py``: the five algorithms written straight down. Do not make it faster.

What someone writes first: one seed at a time, ``nn.Embedding`` and ``nn.GRUCell``, a token at a time, a
``torch.distributions.Categorical`` for each, two ``torch.optim.Adam``, one thread. Task, batch sizes, steps, learning
rates, entropy bonus and clipping are the project's defaults; one step per rung, four epochs for PPO, which samples
without a graph. It shares no code with ``src/``. What is easy to save is saved: the algorithms with one epoch learn
from the graph of their own sampling, and the distributions do not validate their arguments.

    python benchmarks/naive_baseline.py [--seeds 5] [--steps 1500] [--algos reinforce ppo]
"""

import time
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss

LENGTH, DIGITS = 5, 10
MAX_TARGET = (DIGITS - 1) * LENGTH
PROMPTS, GROUP, HIDDEN, EMBEDDING = 64, 8, 64, 32
EPOCHS, CLIP, MAX_NORM = 4, 0.2, 1.0
LR = {"reinforce": 6e-3, "actor_critic": 6e-3, "ppo": 6e-3 / EPOCHS, "rloo": 9e-3, "grpo": 9e-3}
CRITIC_LR = 1e-2
ENTROPY_COEF = {"reinforce": 0.02, "actor_critic": 0.02, "ppo": 0.05, "rloo": 0.02, "grpo": 0.02}
EVALUATION_COMPLETIONS = 256


@dataclass(frozen=True)
class Run:
    """One seed of one algorithm."""

    success: float
    train_seconds: float
    evaluate_seconds: float


class Policy(nn.Module):
    """A GRU whose initial state is the embedding of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(MAX_TARGET + 1, HIDDEN)
        self.token = nn.Embedding(DIGITS + 1, EMBEDDING)
        self.cell = nn.GRUCell(EMBEDDING, HIDDEN)
        self.head = nn.Linear(HIDDEN, DIGITS)

    def forward(self, targets: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probabilities and entropies, each (N, LENGTH); samples the tokens that are not given."""
        hidden = self.prompt(targets)
        token = torch.full_like(targets, DIGITS)
        tokens, logprobs, entropies = [], [], []
        for t in range(LENGTH):
            hidden = self.cell(self.token(token), hidden)
            pi = Categorical(logits=self.head(hidden), validate_args=False)
            token = pi.sample() if given is None else given[:, t]
            tokens.append(token)
            logprobs.append(pi.log_prob(token))
            entropies.append(pi.entropy())
        return torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(entropies, 1)


class Critic(nn.Module):
    """V(prompt)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(MAX_TARGET + 1, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, targets: Tensor) -> Tensor:
        return self.net(targets).squeeze(-1)


def advantage(algo: str, rewards: Tensor, values: Tensor | None) -> Tensor:
    """A of each completion, (N,)."""
    if algo == "reinforce":
        return rewards - rewards.mean()
    if values is not None:
        a = rewards - values.detach()
        return (a - a.mean()) / (a.std() + 1e-8) if algo == "ppo" else a
    r = rewards.view(-1, GROUP)
    if algo == "rloo":
        return (r - (r.sum(1, keepdim=True) - r) / (GROUP - 1)).flatten()
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-6)).flatten()


def train(algo: str, steps: int, seed: int) -> Run:
    """Train one seed, then evaluate it on every target."""
    torch.manual_seed(seed)
    policy, critic = Policy(), Critic()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LR[algo])
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=CRITIC_LR)
    started = time.perf_counter()
    for step in range(steps):
        left = 1 - step / steps
        optimizer.param_groups[0]["lr"] = LR[algo] * left
        critic_optimizer.param_groups[0]["lr"] = CRITIC_LR * left
        targets = torch.randint(0, MAX_TARGET + 1, (PROMPTS,))
        if algo in ("rloo", "grpo"):
            targets = targets.repeat_interleave(GROUP)
        with torch.set_grad_enabled(algo != "ppo"):
            tokens, logprobs, entropies = policy(targets)
        rewards = (tokens.sum(1) == targets).float()
        values = critic(targets) if algo in ("actor_critic", "ppo") else None
        A = advantage(algo, rewards, values)
        old = logprobs.detach()
        for epoch in range(EPOCHS if algo == "ppo" else 1):
            if algo == "ppo":
                _, logprobs, entropies = policy(targets, tokens)
                ratio = (logprobs - old).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.min(ratio * A[:, None], clipped * A[:, None]).sum(1).mean()
            else:
                loss = -(logprobs.sum(1) * A).mean()
            loss = loss - ENTROPY_COEF[algo] * left * entropies.sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
            optimizer.step()
            if values is not None:
                critic_optimizer.zero_grad()
                mse_loss(values if epoch == 0 else critic(targets), rewards).backward()
                critic_optimizer.step()
    trained = time.perf_counter()
    success = evaluate(policy)
    return Run(success, trained - started, time.perf_counter() - trained)


@torch.no_grad()
def evaluate(policy: Policy) -> float:
    targets = torch.arange(MAX_TARGET + 1).repeat_interleave(EVALUATION_COMPLETIONS)
    tokens, _, _ = policy(targets)
    return (tokens.sum(1) == targets).float().mean().item()


@dataclass(frozen=True)
class Args:
    """What to run."""

    seeds: int = 5
    steps: int = 1500
    """Of the algorithms with one completion per prompt; rloo and grpo take 4/15 of it."""
    algos: tuple[str, ...] = tuple(LR)


def steps_of(algo: str, steps: int) -> int:
    """The default comparison's batches of an algorithm: 1500, or 400 with eight completions per prompt."""
    return max(1, round(steps * 4 / 15)) if algo in ("rloo", "grpo") else steps


def main(args: Args) -> None:
    torch.set_num_threads(1)
    for algo in args.algos:
        for seed in range(args.seeds):
            run = train(algo, steps_of(algo, args.steps), seed)
            seconds = run.train_seconds + run.evaluate_seconds
            print(f"{algo:<14} seed {seed}: success {run.success:.3f}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
