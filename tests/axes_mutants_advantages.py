"""Faults planted in the advantages and in the critic of prefixes, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_advantages.py [WORD ...]
"""

import sys

import mutants
from mutants import ADVANTAGES, Mutant

GROUP, TOKEN, CRITIC = "test_advantages.py", "test_token_advantages.py", "test_prefix_critic.py"

ADVANTAGE_MUTANTS = [
    # ---- of a group and of the batch ----
    Mutant(
        "group mean is that of the batch",
        ADVANTAGES,
        "return _centred(r, valid, (-1,))",
        "return _centred(r, valid, (-2, -1))",
        GROUP,
        "B2",
    ),
    Mutant(
        "group mean of a group of one",
        ADVANTAGES,
        "r, valid = _check_group(rewards, valid)\n    return _centred",
        "r, valid = _check(rewards, valid)\n    return _centred",
        GROUP,
        "B6",
    ),
    Mutant(
        "batch_scaled divides by the group's std",
        ADVANTAGES,
        "std = _variance(_centred(r, valid, (-2, -1)), valid, (-2, -1), ddof",
        "std = _variance(_centred(r, valid, (-1,)), valid, (-1,), ddof",
        GROUP,
        "B7",
    ),
    Mutant(
        "batch_scaled divides by the std of what is centred",
        ADVANTAGES,
        "_variance(_centred(r, valid, (-2, -1)), valid, (-2, -1), ddof",
        "_variance(_centred(r, valid, (-1,)), valid, (-2, -1), ddof",
        GROUP,
    ),
    Mutant(
        "batch_scaled subtracts the batch's mean",
        ADVANTAGES,
        "_centred(r, valid, (-1,)) / (std + eps)",
        "_centred(r, valid, (-2, -1)) / (std + eps)",
        GROUP,
        "B4",
    ),
    Mutant(
        "batch_scaled without its guard", ADVANTAGES, "torch.where((std != 0) & valid,", "torch.where(valid,", GROUP
    ),
    Mutant(
        "batch_scaled has another eps",
        ADVANTAGES,
        "ddof: int = 1, eps: float = 1e-4",
        "ddof: int = 1, eps: float = 1e-5",
        GROUP,
    ),
    # ---- the optimal constant ----
    Mutant(
        "the optimal constant holds its own sample",
        ADVANTAGES,
        "if leave_own_out else _sum",
        "if False else _sum",
        GROUP,
        "B11",
    ),
    Mutant(
        "the others are all", ADVANTAGES, "pad(flat, (1, -1)).cumsum(-1)", "pad(flat, (0, 0)).cumsum(-1)", GROUP, "B11"
    ),
    Mutant(
        "the others by subtraction",
        ADVANTAGES,
        "return (before + after).view_as(x)",
        "return _sum(x) - x",
        GROUP,
    ),
    Mutant(
        "weights of the optimal constant are ignored",
        ADVANTAGES,
        "total(w * r) / total(w)",
        "total(r) / total(torch.ones_like(w))",
        GROUP,
    ),
    Mutant(
        "weights by the norm, not its square",
        ADVANTAGES,
        "squared_norms.detach(), 0)",
        "squared_norms.detach().sqrt(), 0)",
        TOKEN,
    ),
    Mutant("no norm, no mean", ADVANTAGES, "torch.where(total(w) > 0,", "torch.where(total(w) >= 0,", GROUP),
    Mutant("a live gradient through the norms", ADVANTAGES, "squared_norms.detach()", "squared_norms", GROUP, "G3"),
    Mutant("a negative norm passes", ADVANTAGES, "((w >= 0) & w.isfinite())", "w.isfinite()", GROUP),
    Mutant("norms broadcast", ADVANTAGES, "if squared_norms.shape != rewards.shape:", "if False:", GROUP, "B10"),
    # ---- per token ----
    Mutant("the return is the reward", ADVANTAGES, "x[..., t] + decay * y, y)", "x[..., t] + 0 * y, y)", TOKEN, "G2"),
    Mutant("masked tokens are discounted", ADVANTAGES, "decay * y, y)", "decay * y, decay * y)", TOKEN, "D2"),
    Mutant("the return forgets at a masked token", ADVANTAGES, "decay * y, y)", "decay * y, 0)", TOKEN),
    Mutant("return to go forwards", ADVANTAGES, "found.insert(0, y)", "found.append(y)", TOKEN),
    Mutant(
        "reward to go does not discount",
        ADVANTAGES,
        "rewards, mask), mask, gamma)",
        "rewards, mask), mask, 1.0)",
        TOKEN,
    ),
    Mutant(
        "the outcome stands at the last position",
        ADVANTAGES,
        "last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)",
        "last = mask & (torch.arange(mask.shape[-1]) == mask.shape[-1] - 1)",
        TOKEN,
        "D2",
    ),
    Mutant(
        "the outcome stands before the first hole",
        ADVANTAGES,
        "(mask.flip(-1).cumsum(-1).flip(-1) == 1)",
        "~torch.nn.functional.pad(mask[..., 1:], (0, 1))",
        TOKEN,
    ),
    Mutant("the outcome at every token", ADVANTAGES, "torch.where(last, rewards", "torch.where(mask, rewards", TOKEN),
    Mutant(
        "cut off counts as ended",
        ADVANTAGES,
        "if bootstrap is None else bootstrap.detach()",
        "if bootstrap is None else 0 * bootstrap.detach()",
        TOKEN,
        "G1",
    ),
    Mutant(
        "the bootstrap is one step late",
        ADVANTAGES,
        "after = torch.where(mask[..., t], V[..., t], after)",
        "after = V[..., t]",
        TOKEN,
        "G1",
    ),
    Mutant("GAE's values are live", ADVANTAGES, "mask, values.detach(), 0)", "mask, values, 0)", TOKEN, "G3"),
    Mutant("GAE's bootstrap is live", ADVANTAGES, "else bootstrap.detach()", "else bootstrap", TOKEN, "G3"),
    Mutant(
        "GAE has V of the next token alone",
        ADVANTAGES,
        "gamma * after - V[..., t]",
        "gamma * after - after",
        TOKEN,
        "G4",
    ),
    Mutant("discounts may be anything", ADVANTAGES, "if not 0 <= value <= 1:", "if False:", TOKEN),
    Mutant("masked numbers are read", ADVANTAGES, "x = torch.where(mask, x, 0)", "x = x.nan_to_num()", TOKEN, "D3"),
    Mutant("NaN at a token passes", ADVANTAGES, "if finite and not x.isfinite().all():", "if False:", TOKEN),
    # ---- whitening ----
    Mutant(
        "whitening without a mean",
        ADVANTAGES,
        "mask & (var != 0), A / scale",
        "mask & (var != 0), (A + 1) / scale",
        TOKEN,
    ),
    Mutant("eps of whitening outside the root", ADVANTAGES, "else var + eps).sqrt()", "else var).sqrt() + eps", TOKEN),
    Mutant("whitening always floors", ADVANTAGES, "if floor else var + eps", "if True else var + eps", TOKEN),
    Mutant(
        "whitening never floors",
        ADVANTAGES,
        "var.clamp(min=eps) if floor else",
        "var.clamp(min=eps) if False else",
        TOKEN,
    ),
    Mutant(
        "whitened by row", ADVANTAGES, "var = _variance(A, mask, (-3, -2, -1)", "var = _variance(A, mask, (-1,)", TOKEN
    ),
    Mutant(
        "centred by prompt",
        ADVANTAGES,
        "finite=False), mask, (-3, -2, -1))",
        "finite=False), mask, (-2, -1))",
        TOKEN,
        "B4",
    ),
    Mutant(
        "replicas are whitened together",
        ADVANTAGES,
        "var = _variance(A, mask, (-3, -2, -1), ddof, eps)",
        "var = _variance(A, mask, (-3, -2, -1), ddof, eps)\n    var = torch.zeros_like(var) + var.mean()",
        TOKEN,
    ),
    Mutant(
        "equal tokens are divided by nothing",
        ADVANTAGES,
        "torch.where(mask & (var != 0), A",
        "torch.where(mask, A",
        TOKEN,
    ),
    Mutant(
        "REINFORCE++ is not whitened",
        ADVANTAGES,
        "return whiten(reward_to_go(",
        "return (lambda x, *_, **__: x)(reward_to_go(",
        TOKEN,
    ),
    Mutant(
        "REINFORCE++ does not discount",
        ADVANTAGES,
        "reward_to_go(rewards, mask, gamma=gamma)",
        "reward_to_go(rewards, mask)",
        TOKEN,
    ),
    Mutant(
        "REINFORCE++ baseline is the raw reward",
        ADVANTAGES,
        "A = group_mean(rewards, valid)",
        "A = group_mean(rewards, valid) * 0 + rewards",
        TOKEN,
        "B3",
    ),
    Mutant("what is alone is whitened", ADVANTAGES, "valid & (valid.sum(-1, keepdim=True) > 1)", "valid", TOKEN),
    # ---- the critic of prefixes ----
    Mutant(
        "a value has read its own token",
        "policy.py",
        "tokens.reshape(K, P * G, T)[..., :-1].mT",
        "tokens.reshape(K, P * G, T).roll(-1, -1)[..., :-1].mT",
        CRITIC,
        "D1",
    ),
    Mutant(
        "values after the end",
        "policy.py",
        "self.task.mask(tokens), values.mT",
        "self.task.mask(tokens) | True, values.mT",
        CRITIC,
    ),
    Mutant(
        "values of the wrong completion",
        "policy.py",
        "values.mT.reshape(tokens.shape), 0)",
        "values.reshape(tokens.shape), 0)",
        CRITIC,
    ),
    Mutant(
        "a value by a product with one column",
        "policy.py",
        "(self.states(targets, tokens) * self.value_weight).sum(-1)",
        "(self.states(targets, tokens) @ self.value_weight.mT).squeeze(-1)",
        CRITIC,
    ),
    Mutant(
        "the critic's trunk gets no gradient",
        "policy.py",
        "(self.states(targets, tokens) *",
        "(self.states(targets, tokens).detach() *",
        CRITIC,
    ),
    Mutant(
        "the critic's replicas share a head",
        "policy.py",
        "* self.value_weight).sum(-1) + self.value_bias\n        return torch.where",
        "* self.value_weight[:1]).sum(-1) + self.value_bias\n        return torch.where",
        CRITIC,
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = ADVANTAGE_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
