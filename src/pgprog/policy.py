"""The policy, its critic, and the rollout: sample without gradient, score with it.

K independent policies advance in one batched pass: every parameter carries a leading replica axis and replicas never
mix. What an algorithm sees is two calls, *sample* and *score*, and ``rollout``, which makes a batch of both.
Shapes: K replicas, P prompts, G completions of each prompt, T tokens, V tokens to choose from, H hidden units.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pgprog.env import DigitSum
from pgprog.gru import Step, gather_inputs, scan, step, token_scores
from pgprog.noise import ReplicaGenerator

PROMPT_WIDTH = 3.0  # of the radial basis functions, in units of the target
PROMPT_FAN_IN = 2  # a target excites features with sum of squares 3 sqrt(pi): this makes their map's variance about 1
UPDATE_GATE_BIAS = 1.0  # a GRU that starts by keeping its state carries the target to the last token


class Rollout(NamedTuple):
    """A batch of completions, scored by the policy that made them."""

    targets: Int[Tensor, "K P"]
    tokens: Int[Tensor, "K P G T"]
    mask: Bool[Tensor, "K P G T"]
    """True at the tokens of a completion, its EOS included."""
    logprobs: Float[Tensor, "K P G T"]
    """log pi(token_t | prompt, tokens_<t), with gradient; 0 where masked."""
    entropies: Float[Tensor, "K P G T"]
    """Entropy of the policy at each token in nats, with gradient; 0 where masked."""
    rewards: Float[Tensor, "K P G"]
    success: Bool[Tensor, "K P G"]
    values: Float[Tensor, "K P"] | None = None
    """The critic's V(prompt) before the update, without gradient, where there is a critic."""
    prefix_values: Float[Tensor, "K P G T"] | None = None
    """The critic's V(prompt, tokens_<t) before the update, no gradient, 0 where masked, where it values prefixes."""
    old_logprobs: Float[Tensor, "K P G T"] | None = None
    """The denominator of the ratio, without gradient; None: ``logprobs`` before the first step, a ratio of 1."""
    sampler_logprobs: Float[Tensor, "K P G T"] | None = None
    """Of the distribution that the tokens came from, without gradient, where that is not the policy that is trained."""
    ref_logprobs: Float[Tensor, "K P G T"] | None = None
    """Of the frozen reference, without gradient, where there is one."""
    token_rewards: Float[Tensor, "K P G T"] | None = None
    """What each token is paid, 0 where masked, where that matters; ``rewards`` is its sum per sequence."""
    valid: Bool[Tensor, "K P G"] | None = None
    """The completions that count; None: all."""
    sampled: Float[Tensor, "K"] | None = None
    """How many completions each replica drew for this batch, where it did not keep them all."""


def rollout(policy: "Policy", generator: ReplicaGenerator, prompts: int, group_size: int = 1) -> Rollout:
    """Draw prompts, sample ``group_size`` completions of each without gradient, then score them with it.

    Scoring apart from sampling is how language models are trained (a fast sampler, a differentiable scorer); here
    both are the same parameters, so the ratio of new to old probabilities starts at exactly 1.

    The entropies are there for the bonus that every rung adds to its objective. Lesson: without it (``--entropy-coef
    0``) a policy may settle on a few digits before it has learned to read the prompt, and what is never sampled is
    never rewarded; with too much of it, it stays random. It is annealed to zero, so that the final policy maximises J
    alone.
    """
    targets = policy.task.sample_targets(generator, prompts)
    trace = Trace()
    tokens = policy.sample(targets, group_size, generator, trace)
    return scored(policy, targets, tokens, trace)


def scored(
    policy: "Policy", targets: Int[Tensor, "K P"], tokens: Int[Tensor, "K P G T"], trace: "Trace | None" = None
) -> Rollout:
    """A batch of these completions, whoever made them, as the policy sees them; with gradient."""
    logprobs, entropies = policy.score(targets, tokens, trace)
    return Rollout(
        targets=targets,
        tokens=tokens,
        mask=policy.task.mask(tokens),
        logprobs=logprobs,
        entropies=entropies,
        rewards=policy.task.reward(targets, tokens, logprobs.dtype),
        success=policy.task.success(targets, tokens),
    )


@dataclass
class Trace:
    """What ``sample`` computes on its way, for ``score`` to take over: its parameters are the same."""

    start: Float[Tensor, "K P H"] | None = None
    """The state before each prompt's tokens, with gradient."""
    steps: list[Step] = field(default_factory=list)
    """Every step from there on."""


class Reader(nn.Module):
    """A GRU that reads the prompt and then tokens; K replicas with their parameters stacked.

    What a policy or a value of prefixes is the head of. Replica k's initial parameters depend on
    ``generator.seeds[k]`` alone.
    """

    def __init__(
        self, task: DigitSum, generator: ReplicaGenerator, hidden: int = 64, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.task = task
        H = hidden
        if task.prompt_form == "state":
            self.register_buffer("prompt_features", radial_basis(task.max_target, dtype), persistent=False)
            self.prompt_weight = uniform_parameter(generator, task.max_target + 1, H, dtype=dtype, fan_in=PROMPT_FAN_IN)
            self.prompt_bias = uniform_parameter(generator, 1, H, dtype=dtype, fan_in=H)
        # A linear map of a one-hot token is a table: its rows are the input's share of the three gates.
        self.input_gates = uniform_parameter(generator, task.vocab_size + 1, 3 * H, dtype=dtype, fan_in=H)
        self.recurrent_weight = uniform_parameter(generator, H, 3 * H, dtype=dtype, fan_in=H)
        self.recurrent_bias = uniform_parameter(generator, 1, 3 * H, dtype=dtype, fan_in=H)
        with torch.no_grad():
            self.recurrent_bias[..., H : 2 * H] += UPDATE_GATE_BIAS

    @property
    def replicas(self) -> int:
        return self.recurrent_weight.shape[0]

    def read_prompts(self, targets: Int[Tensor, "K P"]) -> Float[Tensor, "K P H"]:
        """The state after the whole prompt, before the first token of a completion; with gradient."""
        hidden = self.before_prompt(targets)
        for tokens in self.task.prompt_tokens(targets).unbind(-1):
            hidden = self.read(tokens, hidden)
        return hidden

    def before_prompt(self, targets: Int[Tensor, "K P"]) -> Float[Tensor, "K P H"]:
        """The state before the first token of the prompt, with gradient."""
        if self.task.prompt_form == "tokens":
            return self.recurrent_weight.new_zeros(*targets.shape, self.recurrent_weight.shape[1])
        features = F.embedding(targets, self.get_buffer("prompt_features"))
        return torch.tanh(torch.baddbmm(self.prompt_bias, features, self.prompt_weight))

    def read(self, tokens: Int[Tensor, "K N"], hidden: Float[Tensor, "K N H"]) -> Float[Tensor, "K N H"]:
        """The state after one more token in each row; with gradient."""
        return self.advance(tokens, hidden).h

    def advance(self, tokens: Int[Tensor, "K N"], hidden: Float[Tensor, "K P H"]) -> Step:
        """The same, with all that the step computes on its way; rows may share a state, see ``gru.step``."""
        return step(gather_inputs(self.input_gates, tokens), hidden, self.recurrent_weight, self.recurrent_bias)

    def states(
        self, targets: Int[Tensor, "K P"], tokens: Int[Tensor, "K P G T"], trace: Trace | None = None
    ) -> Float[Tensor, "K T N H"]:
        """The state before each token of N = P G completions, with gradient; the last token is never read.

        Differentiable once.
        """
        K, P, G, T = tokens.shape
        trace = trace or Trace()
        start = self.before_prompt(targets) if trace.start is None else trace.start
        prompt, by_step = self.task.prompt_tokens(targets).mT, tokens.reshape(K, P * G, T)[..., :-1].mT
        weights = (self.input_gates, self.recurrent_weight, self.recurrent_bias)
        return scan(prompt, by_step, start, *weights, trace.steps)


class Policy(Reader):
    """What is read decides the next token; parameters and replicas as in ``Reader``.

        pi = softmax(logits / temperature), within its nucleus and renormalised where top_p < 1

    The policy is what comes out of this, for ``sample`` and ``score`` alike. Lesson: a temperature on one side only
    gives ratios that are not 1 before anything is learned.
    """

    temperature: float = 1.0
    """In (0, inf); set it after construction."""
    top_p: float = 1.0
    """In (0, 1]; the same. A token outside the nucleus has log-probability -inf."""

    def __init__(
        self, task: DigitSum, generator: ReplicaGenerator, hidden: int = 64, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(task, generator, hidden, dtype)
        V, H = task.vocab_size, hidden
        self.head_weight = uniform_parameter(generator, H, V, dtype=dtype, fan_in=H)
        self.head_bias = uniform_parameter(generator, 1, V, dtype=dtype, fan_in=H)

    @torch.no_grad()
    def sample(
        self,
        targets: Int[Tensor, "K P"],
        group_size: int,
        generator: ReplicaGenerator,
        trace: Trace | None = None,
    ) -> Int[Tensor, "K P G T"]:
        """Draw ``group_size`` completions of each prompt, (K, P, G, T) tokens, without gradient.

        Each token inverts the cumulative distribution at one uniform number. After EOS, EOS is repeated as padding.
        ``trace``, an empty one, receives what was computed on the way.
        """
        K, P = targets.shape
        T, task = self.task.seq_len, self.task
        noise = generator.uniform(P, group_size, T, dtype=self.head_weight.dtype).view(K, P * group_size, T)
        with torch.set_grad_enabled(trace is not None):
            start = self.before_prompt(targets)
        if trace is not None:
            trace.start = start
        hidden = start.detach()

        def read(tokens: Int[Tensor, "K N"]) -> Float[Tensor, "K N H"]:
            made = self.advance(tokens, hidden)
            if trace is not None:
                trace.steps.append(made)
            return made.h

        for token in task.prompt_tokens(targets).unbind(-1):
            hidden = read(token)
        tokens = torch.empty(K, P * group_size, T, dtype=torch.long)
        for t in range(T):
            if t > 0:
                hidden = read(tokens[..., t - 1])
            cdf = self.log_pi(hidden).exp().cumsum(1)
            if t == 0:
                cdf = cdf.repeat_interleave(group_size, dim=2)
            tokens[..., t] = (cdf[:, :-1] <= (noise[..., t] * cdf[:, -1]).unsqueeze(1)).sum(1)
            if task.variable_length and t > 0:
                tokens[..., t].masked_fill_(tokens[..., t - 1] == task.eos, task.eos)
        return tokens.view(K, P, group_size, T)

    def score(
        self, targets: Int[Tensor, "K P"], tokens: Int[Tensor, "K P G T"], trace: Trace | None = None
    ) -> tuple[Float[Tensor, "K P G T"], Float[Tensor, "K P G T"]]:
        """Return log pi(token_t | prompt, tokens_<t) and the entropy at each token, with gradient, 0 where masked.

        ``trace`` is that of ``sample``, where it made these tokens with the same parameters. Differentiable once.
        """
        K, P, G, T = tokens.shape
        by_step = tokens.reshape(K, P * G, T).mT.flatten(1)  # (K, T N)
        # The distribution of token t is read off the state before it: the last token is scored but never read.
        states = self.states(targets, tokens, trace).flatten(1, 2)
        if self.top_p == 1:
            scores = token_scores(states, self.head_weight, self.head_bias, by_step, self.temperature)
        else:
            log_pi = self.log_pi(states)
            floored = log_pi.clamp(min=torch.finfo(log_pi.dtype).min)  # 0 log 0 = 0
            scores = log_pi.gather(1, by_step.unsqueeze(1)).squeeze(1), -(log_pi.exp() * floored).sum(1)
        logprobs, entropies = (x.view(K, T, P * G).mT.reshape(K, P, G, T) for x in scores)
        if not self.task.variable_length:
            return logprobs, entropies
        mask = self.task.mask(tokens)
        return logprobs.where(mask, 0), entropies.where(mask, 0)

    def log_pi(self, hidden: Float[Tensor, "K N H"]) -> Float[Tensor, "K V N"]:
        """Log-probabilities of every token after each state; V stands before N, where a short axis costs least."""
        return self.log_softmax(torch.baddbmm(self.head_bias.mT, self.head_weight.mT, hidden.mT))

    def log_softmax(self, logits: Float[Tensor, "K V N"]) -> Float[Tensor, "K V N"]:
        """Log-probabilities at the policy's temperature, -inf outside the nucleus; the nucleus has no gradient."""
        if self.temperature != 1:
            logits = logits / self.temperature
        log_pi = logits.log_softmax(1)
        if self.top_p < 1:
            log_pi = log_pi.masked_fill(~nucleus(log_pi.detach().exp(), self.top_p), -torch.inf).log_softmax(1)
        return log_pi

    def distributions(self, targets: Int[Tensor, "K P"], tokens: Int[Tensor, "K P G T"]) -> Float[Tensor, "K P G T V"]:
        """log pi(a | prompt, tokens_<t) of every token a, with gradient; differentiable any number of times.

        Nothing is masked: what stands after the end of a completion is finite, or -inf outside the nucleus, and means
        nothing. Slower than ``score``, which has a backward pass of its own.
        """
        groups = tokens.shape[1:3]
        hidden = self.read_prompts(targets).unsqueeze(2).expand(-1, -1, groups[1], -1).flatten(1, 2)
        each = [self.log_pi(hidden)]
        for read in tokens.flatten(1, 2).unbind(-1)[:-1]:
            hidden = self.read(read, hidden)
            each.append(self.log_pi(hidden))
        return torch.stack(each, dim=-1).permute(0, 2, 3, 1).unflatten(1, groups)


class Critic(nn.Module):
    """V(prompt), the expected reward of a prompt: one hidden layer over the same features of the target; K replicas."""

    def __init__(
        self, task: DigitSum, generator: ReplicaGenerator, hidden: int = 64, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.register_buffer("prompt_features", radial_basis(task.max_target, dtype), persistent=False)
        self.hidden_weight = uniform_parameter(
            generator, task.max_target + 1, hidden, dtype=dtype, fan_in=PROMPT_FAN_IN
        )
        self.hidden_bias = uniform_parameter(generator, 1, hidden, dtype=dtype, fan_in=hidden)
        self.value_weight = uniform_parameter(generator, 1, hidden, dtype=dtype, fan_in=hidden)
        self.value_bias = uniform_parameter(generator, 1, dtype=dtype, fan_in=hidden)

    def forward(self, targets: Int[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        """Return V(prompt), with gradient to the critic."""
        features = F.embedding(targets, self.get_buffer("prompt_features"))
        hidden = torch.tanh(torch.baddbmm(self.hidden_bias, features, self.hidden_weight))
        # A sum, for a product with one column takes another kernel where K = 1, which rounds differently.
        return (hidden * self.value_weight).sum(-1) + self.value_bias


class PrefixCritic(Reader):
    """V(prompt, tokens_<t), the expected return from token t on: a GRU of its own; K replicas."""

    def __init__(
        self, task: DigitSum, generator: ReplicaGenerator, hidden: int = 64, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(task, generator, hidden, dtype)
        self.value_weight = uniform_parameter(generator, 1, 1, hidden, dtype=dtype, fan_in=hidden)
        self.value_bias = uniform_parameter(generator, 1, 1, dtype=dtype, fan_in=hidden)

    def forward(self, targets: Int[Tensor, "K P"], tokens: Int[Tensor, "K P G T"]) -> Float[Tensor, "K P G T"]:
        """Return V before each token, 0 where masked, with gradient to the critic; differentiable once.

        The first is V(prompt), alike for the G completions; that of token t has read tokens_<t, never token t.
        """
        # A sum, as in Critic: a product with one column would round one replica otherwise than many.
        values = (self.states(targets, tokens) * self.value_weight).sum(-1) + self.value_bias
        return torch.where(self.task.mask(tokens), values.mT.reshape(tokens.shape), 0)


def nucleus(pi: Float[Tensor, "K V N"], top_p: float) -> Bool[Tensor, "K V N"]:
    """The smallest set of most probable tokens whose probabilities reach ``top_p``; of equals the first token first.

    A token is in it where those before it, most probable first, do not reach ``top_p`` yet: the first always is.
    """
    ranked, order = pi.sort(dim=1, descending=True, stable=True)
    before = F.pad(ranked.cumsum(1)[:, :-1], (0, 0, 1, 0))
    return torch.zeros_like(pi, dtype=torch.bool).scatter(1, order, before < top_p)


def radial_basis(max_target: int, dtype: torch.dtype) -> Float[Tensor, "targets features"]:
    """Encode each target as exp(-(T - c)^2 / (2 width^2)), c = 0..max_target: near targets share features."""
    targets = torch.arange(max_target + 1, dtype=dtype)
    return torch.exp(-((targets[:, None] - targets) ** 2) / (2 * PROMPT_WIDTH**2))


def uniform_parameter(generator: ReplicaGenerator, *shape: int, dtype: torch.dtype, fan_in: int) -> nn.Parameter:
    """A (K, *shape) parameter, uniform in +-1/sqrt(fan_in)."""
    return nn.Parameter((2 * generator.uniform(*shape, dtype=dtype) - 1) / fan_in**0.5)
