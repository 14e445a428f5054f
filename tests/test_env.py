"""The task against plain loops, over every sequence of tokens."""

import itertools
import statistics

import pytest
import torch

import oracles
from oracles import close, same
from pgprog.env import FORMS, HALFWAY_REWARD, DigitSum
from pgprog.noise import ReplicaGenerator

SIZES = [
    {"seq_len": 1, "digits": 2},
    {"seq_len": 1, "digits": 10},
    {"seq_len": 2, "digits": 3},
    {"seq_len": 3, "digits": 4},
    {"seq_len": 4, "digits": 2},
    {"seq_len": 1, "digits": 2, "variable_length": True},
    {"seq_len": 2, "digits": 4, "variable_length": True},
    {"seq_len": 3, "digits": 3, "variable_length": True},
    {"seq_len": 4, "digits": 2, "variable_length": True},
]


def everything(task):
    """Every target, each with every sequence of tokens: (P,), (P, G, T) and the same as lists."""
    targets = list(range(oracles.largest_target(task) + 1))
    sequences = oracles.all_sequences(task)
    tokens = torch.tensor(sequences).expand(len(targets), -1, -1)
    return torch.tensor(targets), tokens, targets, sequences


def table(function, task, targets, sequences):
    return torch.tensor([[function(task, target, s) for s in sequences] for target in targets])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS["reward_form"])
def test_rewards_of_every_sequence_equal_the_oracle(size, form):
    task = DigitSum(**size, reward_form=form)
    targets, tokens, T, sequences = everything(task)
    close(task.process_rewards(targets, tokens, torch.float64), table(oracles.token_rewards, task, T, sequences))
    close(task.reward(targets, tokens, torch.float64), table(oracles.reward, task, T, sequences))
    same(task.success(targets, tokens), table(oracles.success, task, T, sequences))


@pytest.mark.parametrize("size", SIZES)
def test_masks_and_digit_sums_of_every_sequence_equal_the_oracle(size):
    task = DigitSum(**size)
    sequences = oracles.all_sequences(task)
    tokens = torch.tensor(sequences)
    lengths = [oracles.length(task, s) for s in sequences]
    same(task.mask(tokens), torch.tensor([[t < n for t in range(task.seq_len)] for n in lengths]))
    same(task.digit_sums(tokens), torch.tensor([sum(oracles.content(task, s)) for s in sequences]))


def test_the_mask_counts_eos_and_nothing_after_it():
    task = DigitSum(seq_len=4, digits=3, variable_length=True)  # EOS is 3
    tokens = torch.tensor([[3, 3, 3, 3], [3, 2, 1, 0], [1, 3, 3, 2], [1, 0, 2, 3], [1, 0, 2, 2]])
    assert task.mask(tokens).sum(-1).tolist() == [1, 1, 2, 4, 4]
    assert task.digit_sums(tokens).tolist() == [0, 0, 1, 3, 5]


@pytest.mark.parametrize("form", FORMS["reward_form"])
def test_what_stands_after_eos_does_not_matter(form):
    task = DigitSum(seq_len=3, digits=3, variable_length=True, reward_form=form)
    targets, tokens, _, sequences = everything(task)
    padded = torch.tensor([[*s[: oracles.length(task, s)], 3, 3, 3][:3] for s in sequences]).expand_as(tokens)
    assert (padded != tokens).any()
    same(task.process_rewards(targets, tokens), task.process_rewards(targets, padded))
    same(task.reward(targets, tokens), task.reward(targets, padded))
    same(task.mask(tokens), task.mask(padded))


@pytest.mark.parametrize("form", FORMS["reward_form"])
def test_leading_axes_are_independent(form):
    task = DigitSum(seq_len=3, digits=2, variable_length=True, reward_form=form)
    sequences = oracles.all_sequences(task)
    targets = torch.tensor([[[0, 3], [1, 2]], [[2, 2], [3, 0]]])
    tokens = torch.tensor(sequences[:24]).view(2, 2, 2, 3, 3)
    together = task.process_rewards(targets, tokens, torch.float64)
    for i, j, p, g in itertools.product(range(2), range(2), range(2), range(3)):
        one = oracles.token_rewards(task, int(targets[i, j, p]), tuple(tokens[i, j, p, g].tolist()))
        close(together[i, j, p, g], one)
    close(task.reward(targets, tokens, torch.float64), together.sum(-1))


@pytest.mark.parametrize("size", SIZES)
def test_potential_rewards_telescope_to_the_outcome_less_one(size):
    task, outcome = DigitSum(**size, reward_form="potential"), DigitSum(**size)
    targets, tokens, _, _ = everything(task)
    same(task.reward(targets, tokens), outcome.reward(targets, tokens) - 1)


@pytest.mark.parametrize("size", SIZES)
def test_potential_rewards_are_the_outcome_plus_a_shaping_whose_potential_ends_at_zero(size):
    """r_t = [t is last][sum == T] + F(s_t+1) - F(s_t), F = can still be reached, and 0 at the end."""
    task, outcome = DigitSum(**size, reward_form="potential"), DigitSum(**size)
    targets, tokens, T, sequences = everything(task)

    def shaping(task, target, tokens):
        n = oracles.length(task, tokens)
        F = [float(oracles.reachable(task, target, list(tokens[:t]))) for t in range(n)] + [0.0]
        return [F[t + 1] - F[t] for t in range(n)] + [0.0] * (len(tokens) - n)

    close(
        task.process_rewards(targets, tokens, torch.float64),
        outcome.process_rewards(targets, tokens, torch.float64) + table(shaping, task, T, sequences),
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_lost_target_is_charged_once_and_a_kept_one_never(size):
    task = DigitSum(**size, reward_form="potential")
    targets, tokens, _, _ = everything(task)
    rewards = task.process_rewards(targets, tokens)
    same((rewards == -1).sum(-1), 1 - task.success(targets, tokens).long())
    assert set(rewards.unique().tolist()) <= {-1.0, 0.0}


def test_halfway_pays_strictly_past_half_of_the_target_and_once():
    task = DigitSum(seq_len=3, digits=6, reward_form="halfway")
    rows = [[2, 0, 2], [2, 1, 1], [3, 0, 1], [5, 5, 5], [0, 0, 0]]
    paid = task.process_rewards(torch.tensor([4]), torch.tensor([rows]), torch.float64)
    close(paid[0], [[0, 0, 1.3], [0, 0.3, 1], [0.3, 0, 1], [0.3, 0, 0], [0, 0, 0]])
    assert HALFWAY_REWARD == 0.3


@pytest.mark.parametrize("form", FORMS["reward_form"])
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_have_the_dtype_asked_for_whatever_the_default(form, default, dtype):
    """0.3 made in float32 and read in float64 is 0.30000001192..."""
    task = DigitSum(seq_len=3, digits=4, reward_form=form)
    targets, tokens, T, sequences = everything(task)
    torch.set_default_dtype(default)
    rewards, process = task.reward(targets, tokens, dtype), task.process_rewards(targets, tokens, dtype)
    torch.set_default_dtype(torch.float64)
    same(process, table(oracles.token_rewards, task, T, sequences).to(dtype))
    assert rewards.dtype == dtype


def test_rewards_are_float32_unless_asked_otherwise():
    task = DigitSum(seq_len=1, digits=2)
    assert task.reward(torch.tensor([1]), torch.tensor([[[1]]])).dtype == torch.float32


# ---- targets ----

DELTA, Z = 0.01, 5  # a shift of a probability by 0.01 is to be seen at z = 5: n = (z / delta)^2 p (1 - p)


@pytest.mark.parametrize("targets", ["uniform", "sum"])
@pytest.mark.parametrize("seed", [0, 1])
def test_targets_follow_their_distribution(targets, seed):
    """z = 5 for each target; the pmf is counted over all rows of digits."""
    task = DigitSum(seq_len=3, digits=3, targets=targets, variable_length=True)
    sums = [sum(digits) for digits in itertools.product(range(3), repeat=3)]
    pmf = [sums.count(s) / len(sums) if targets == "sum" else 1 / 7 for s in range(7)]
    n = round((Z / DELTA) ** 2 * max(p * (1 - p) for p in pmf))
    drawn = task.sample_targets(ReplicaGenerator([9, seed]), n)
    assert drawn.shape == (2, n) and drawn.dtype == torch.int64
    counts = torch.bincount(drawn[1], minlength=7)
    assert len(counts) == 7
    for count, p in zip(counts.tolist(), pmf, strict=True):
        assert abs(count / n - p) < Z * (p * (1 - p) / n) ** 0.5
    # Mean and spread, which many small shifts in one direction would move.
    mean, variance = sum(s * p for s, p in enumerate(pmf)), sum(s * s * p for s, p in enumerate(pmf))
    variance -= mean**2
    assert abs(statistics.fmean(drawn[1].tolist()) - mean) < Z * (variance / n) ** 0.5


def test_targets_of_a_replica_do_not_depend_on_its_neighbours():
    for targets in FORMS["targets"]:
        task = DigitSum(targets=targets)
        beside = task.sample_targets(ReplicaGenerator([0, 1, 2], step=4), 16)
        same(task.sample_targets(ReplicaGenerator([1], step=4), 16)[0], beside[1])


# ---- prompts ----


@pytest.mark.parametrize("size", [*SIZES, {"seq_len": 5, "digits": 10}, {"seq_len": 12, "digits": 10}])
@pytest.mark.parametrize("form", FORMS["prompt_form"])
def test_prompts_of_every_target_equal_the_oracle(size, form):
    task = DigitSum(**size, prompt_form=form)
    targets = list(range(oracles.largest_target(task) + 1))
    written = task.prompt_tokens(torch.tensor(targets))
    same(written, torch.tensor([oracles.prompt(task, target) for target in targets]))
    twice = torch.tensor(targets).expand(2, 3, -1)
    same(task.prompt_tokens(twice), written.expand(2, 3, -1, -1))


def test_prompts_by_hand():
    assert DigitSum(prompt_form="tokens").prompt_tokens(torch.tensor([45, 7])).tolist() == [[4, 5, 10], [0, 7, 10]]
    variable = DigitSum(prompt_form="tokens", variable_length=True)  # EOS is 10, BOS is 11
    assert variable.prompt_tokens(torch.tensor([30])).tolist() == [[3, 0, 11]]
    assert DigitSum(seq_len=12, prompt_form="tokens").prompt_tokens(torch.tensor([9])).tolist() == [[0, 0, 9, 10]]
    assert DigitSum(seq_len=2, digits=2, prompt_form="tokens").prompt_tokens(torch.tensor([2])).tolist() == [[1, 0, 2]]
    assert DigitSum().prompt_tokens(torch.tensor([45, 7])).tolist() == [[10], [10]]


@pytest.mark.parametrize("form", FORMS["prompt_form"])
@pytest.mark.parametrize("target", [-1, 46])
def test_a_target_out_of_reach_cannot_be_prompted(form, target):
    with pytest.raises(ValueError, match=f"target {target} cannot be prompted: 5 digits reach 0..45"):
        DigitSum(prompt_form=form).prompt_tokens(torch.tensor([[3, target]]))


def test_the_numbers_of_a_task():
    fixed, variable = DigitSum(seq_len=5, digits=10), DigitSum(seq_len=5, digits=10, variable_length=True)
    assert [fixed.max_target, fixed.vocab_size, fixed.bos, fixed.target_width] == [45, 10, 10, 2]
    assert [variable.max_target, variable.vocab_size, variable.eos, variable.bos] == [45, 11, 10, 11]
    assert fixed.eos not in range(fixed.vocab_size)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_len": 0}, "seq_len 0: a completion needs at least one token"),
        ({"seq_len": -3}, "seq_len -3"),
        ({"digits": 1}, "digits 1: one digit leaves nothing to choose"),
        ({"targets": "normal"}, "targets 'normal' is unknown: choose one of uniform, sum"),
        ({"prompt_form": "text"}, "prompt_form 'text' is unknown: choose one of state, tokens"),
        ({"reward_form": "dense"}, "reward_form 'dense' is unknown: choose one of outcome, halfway, potential"),
    ],
)
def test_a_wrong_task_is_refused_by_name(fields, message):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=message):
        DigitSum(**fields)
