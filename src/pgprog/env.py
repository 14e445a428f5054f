"""The task: given a target T, emit digits that sum to T.

Reward 1 exactly when the digits sum to the target, else 0: the shape of a final-answer check in mathematics, at a size
where every completion can be enumerated. Shapes: P prompts, G completions of each, T tokens; any leading axes.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pgprog.noise import ReplicaGenerator

HALFWAY_REWARD = 0.3


@dataclass(frozen=True)
class DigitSum:
    """The digit-sum task and its reward.

    Tokens ``0 .. digits - 1`` are the digits. In the variable-length form ``eos`` is one more token of the policy; it
    counts in the mask, and what follows it is padding. ``bos`` opens a completion and is never emitted.

    Raises:
        ValueError: ``seq_len`` < 1, ``digits`` < 2, or an unknown form.
    """

    seq_len: int = 5
    """L: the length of a completion, or the most digits of one in the variable-length form."""
    digits: int = 10
    """How many digits there are: 10 gives 0..9."""
    variable_length: bool = False
    """The policy may stop early with EOS; an empty completion sums to 0; L digits need no EOS."""
    targets: Literal["uniform", "sum"] = "uniform"
    """Targets uniform over 0..(digits - 1) L, or distributed as the sum of L random digits."""
    prompt_form: Literal["state", "tokens"] = "state"
    """T as the policy's initial state, or as digit tokens that the same GRU reads."""
    reward_form: Literal["outcome", "halfway", "potential"] = "outcome"
    """What is paid: see ``process_rewards``."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len {self.seq_len}: a completion needs at least one token, give 1 or more")
        if self.digits < 2:
            raise ValueError(f"digits {self.digits}: one digit leaves nothing to choose, give 2 or more")
        for name, choices in FORMS.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}")

    @property
    def max_target(self) -> int:
        return (self.digits - 1) * self.seq_len

    @property
    def vocab_size(self) -> int:
        """V: how many tokens the policy can emit."""
        return self.digits + self.variable_length

    @property
    def eos(self) -> int:
        """The last token of the policy in the variable-length form; no token at all in the fixed form."""
        return self.digits

    @property
    def bos(self) -> int:
        """Stands between prompt and completion; read by the policy, never emitted."""
        return self.vocab_size

    @property
    def target_width(self) -> int:
        """How many digits write the largest target, in base ``digits``."""
        width = 1
        while self.digits**width <= self.max_target:
            width += 1
        return width

    def sample_targets(self, generator: ReplicaGenerator, prompts: int) -> Int[Tensor, "K P"]:
        """Draw the prompts of one step, (K, P) integers in 0..max_target."""
        if self.targets == "uniform":
            return (generator.uniform(prompts) * (self.max_target + 1)).long()
        return (generator.uniform(prompts, self.seq_len) * self.digits).long().sum(-1)

    def target_weights(self) -> Float[Tensor, "targets"]:
        """The probability with which each target, 0 .. max_target, is drawn; in float64."""
        if self.targets == "uniform":
            return torch.full((self.max_target + 1,), 1 / (self.max_target + 1), dtype=torch.float64)
        weights = np.ones(1)
        for _ in range(self.seq_len):
            weights = np.convolve(weights, np.full(self.digits, 1 / self.digits))
        return torch.from_numpy(weights)

    def prompt_tokens(self, targets: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch S"]:
        """Write each target as the tokens that precede a completion.

        ``[bos]`` where the target is the initial state; else its digits in base ``digits``, most significant first and
        padded with zeros to ``target_width``, then ``bos``. Raises ValueError for a target outside 0..max_target.
        """
        outside = (targets < 0) | (targets > self.max_target)
        if outside.any():
            raise ValueError(
                f"target {int(targets[outside][0])} cannot be prompted: "
                f"{self.seq_len} digits reach 0..{self.max_target}"
            )
        bos = torch.full_like(targets, self.bos).unsqueeze(-1)
        if self.prompt_form == "state":
            return bos
        powers = torch.tensor([self.digits**i for i in reversed(range(self.target_width))], device=targets.device)
        return torch.cat([targets.unsqueeze(-1) // powers % self.digits, bos], dim=-1)

    def mask(self, tokens: Int[Tensor, "*batch T"]) -> Bool[Tensor, "*batch T"]:
        """True at every token of the completion, its EOS included; False after it. All True in the fixed form."""
        if not self.variable_length:
            return torch.ones_like(tokens, dtype=torch.bool)
        ended = (tokens == self.eos).cumsum(-1)
        return (ended == 0) | ((ended == 1) & (tokens == self.eos))

    def digit_sums(self, tokens: Int[Tensor, "*batch T"]) -> Int[Tensor, "*batch"]:
        """Sum the digits before EOS; what stands after EOS does not count."""
        counts = self.mask(tokens) & (tokens != self.eos)
        return (tokens * counts).sum(-1)

    def success(
        self, targets: Int[Tensor, "*batch P"], tokens: Int[Tensor, "*batch P G T"]
    ) -> Bool[Tensor, "*batch P G"]:
        """True where a completion's digits sum to its prompt's target."""
        return self.digit_sums(tokens) == targets.unsqueeze(-1)

    def reward(
        self, targets: Int[Tensor, "*batch P"], tokens: Int[Tensor, "*batch P G T"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch P G"]:
        """Score a batch of completions in one call: the sum over tokens of ``process_rewards``, no gradient.

        1 or 0 with the outcome reward; with ``halfway`` in {0, 0.3, 1, 1.3}; with ``potential`` 0 or -1, which is the
        outcome reward less the constant Phi(s_0) = 1.
        """
        if self.reward_form == "outcome":
            return self.success(targets, tokens).to(dtype)
        return self.process_rewards(targets, tokens, dtype).sum(-1)

    def process_rewards(
        self, targets: Int[Tensor, "*batch P"], tokens: Int[Tensor, "*batch P G T"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch P G T"]:
        """Pay each token, (..., P, G, T); 0 after the end of a completion; no gradient.

        - ``outcome``: [sum == T] at the last token.
        - ``halfway``: the same, and 0.3 at the first token that takes the sum past T / 2. This changes the objective:
          an overshooting completion keeps its 0.3.
        - ``potential``: Phi(s') - Phi(s), with Phi = 1 while the target can still be reached (Ng, Harada & Russell
          1999). At the end Phi is [sum == T], so this is the outcome reward plus a shaping term whose potential ends at
          0: the sum over a completion telescopes to [sum == T] - 1, and only the token that loses the target is
          charged.
        """
        mask = self.mask(tokens)
        sums = (tokens * (mask & (tokens != self.eos))).cumsum(-1)
        goal = targets[..., None, None]
        last = mask & ~torch.nn.functional.pad(mask[..., 1:], (0, 1))
        if self.reward_form == "potential":
            left = self.seq_len - torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
            left = torch.where(last, 0, left)  # after EOS, or after L digits, nothing can be added
            missing = goal - sums
            phi = ((missing >= 0) & (missing <= (self.digits - 1) * left)).to(dtype)
            before = torch.cat([torch.ones_like(phi[..., :1]), phi[..., :-1]], dim=-1)
            return (phi - before) * mask
        rewards = (last & (sums == goal)).to(dtype)
        if self.reward_form == "halfway":
            past = (2 * sums > goal) & mask
            rewards = rewards + HALFWAY_REWARD * (past & (past.cumsum(-1) == 1)).to(dtype)
        return rewards


FORMS = {
    "targets": ("uniform", "sum"),
    "prompt_form": ("state", "tokens"),
    "reward_form": ("outcome", "halfway", "potential"),
}
