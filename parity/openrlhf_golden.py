"""Golden values of OpenRLHF: its loss classes, its KL estimators and the advantages of its experience maker.

    python -m parity.openrlhf_golden FOLDER

The packages' ``__init__`` files need CUDA libraries, so the modules are imported beneath bare packages. The losses are
float64; KL (``.float()``) and whatever the experience maker whitens are float32 in the library itself.
"""

# ruff: noqa: E402 (the environment is set, and packages are replaced, before the library is imported)
import ast
import importlib.metadata
import importlib.util
import logging
import pathlib
import sys
import types
import warnings
from types import SimpleNamespace

import torch
import transformers  # noqa: F401  (before the stubs: it asks which packages are there)

from parity.cases import LOSS_CASES, cases
from parity.record import entry, save, save_defaults
from parity.stubs import bare_package, stub

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
ROOT = pathlib.Path(importlib.util.find_spec("openrlhf").origin).parent
for part in ("models", "trainer", "trainer/ray", "utils"):
    bare_package("openrlhf." + part.replace("/", "."), ROOT / part)
stub("deepspeed", "ray")
launcher = sys.modules["openrlhf.trainer.ray.launcher"] = types.ModuleType("openrlhf.trainer.ray.launcher")
launcher.RayActorGroup = object

from openrlhf.models.loss import PolicyLoss, ValueLoss, aggregate_loss
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

VERSION = "0.11.2"
OUTPUTS = ("loss", "metric/clip_ratio", "metric/ppo_kl", "metric/vllm_kl", "metric/is_filter_ratio")


def flat(array):
    """(P, G, ...) as a tensor (P G, ...)."""
    return torch.tensor(array).flatten(0, 1)


def live(array):
    return flat(array).requires_grad_()


def like(case, tensor):
    """(P G, T) back to (P, G, T)."""
    return tensor.reshape(case.mask.shape)


LOSSES = {  # name -> arguments of PolicyLoss, whether the denominators are those of the whole batch
    "ppo/token_mean": ({}, False),
    "ppo/seq_mean": ({"token_level_loss": False}, False),
    "ppo/seq_mean_whole_batch": ({"token_level_loss": False}, True),
    "ppo/clip_higher": ({"clip_eps_high": 0.28}, False),
    "ppo/dual_clip": ({"dual_clip": 3.0}, False),
    "gspo": ({"policy_loss_type": "gspo"}, False),
    "gspo/paper": ({"policy_loss_type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}, False),
}
CORRECTIONS = {
    "token_mask": {"is_correction_level": "token", "is_correction_mode": "mask"},
    "token_clip": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "seq_mask": {"is_correction_level": "seq", "is_correction_mode": "mask"},
    "token_binary_kl": {
        "is_correction_level": "token",
        "is_correction_gating": "binary_kl",
        "is_correction_threshold": [0.0, 0.05],
    },
}


def loss_entry(name, case_name, case, settings, *, whole=False):
    mask = flat(case.mask)
    logprobs = live(case.logprobs)
    totals = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)} if whole else {}
    out = PolicyLoss(**settings)(
        logprobs,
        flat(case.old_logprobs),
        flat(case.advantages)[:, None] * mask,
        action_mask=mask,
        rollout_log_probs=flat(case.sampler_logprobs),
        **totals,
    )
    out[0].backward()
    outputs = {key: value for key, value in zip(OUTPUTS, out, strict=True) if value is not None}
    outputs["grad_logprobs"] = like(case, logprobs.grad)
    rounded = [key for key in ("metric/clip_ratio", "metric/is_filter_ratio") if key in outputs]
    names = ("clip_eps_low", "clip_eps_high", "dual_clip", "token_level_loss", "policy_loss_type")
    made = PolicyLoss(**settings)
    recorded = {key: getattr(made, key) for key in names} | settings | totals
    return entry(f"loss/{name}", "PolicyLoss", recorded, case_name, outputs, float32=rounded, kind="loss")


def aggregation_entry(name, case_name, case, settings):
    """``aggregate_loss`` of the token advantages; ``grad_loss_mat`` is the weight of every token."""
    matrix = live(case.token_advantages)
    loss = aggregate_loss(matrix, flat(case.mask), **settings)
    loss.backward()
    out = {"loss": loss, "grad_loss_mat": like(case, matrix.grad)}
    return entry(f"aggregation/{name}", "aggregate_loss", settings, case_name, out, kind="aggregation")


def kl_entry(case_name, case, estimator, unbiased):
    logprobs = live(case.logprobs)
    settings = {"kl_estimator": estimator, "unbiased_gradient": unbiased}
    kl = compute_approx_kl(logprobs, flat(case.ref_logprobs), flat(case.old_logprobs), **settings)
    kl.sum().backward()
    out = {"kl": like(case, kl), "grad_logprobs": like(case, logprobs.grad)}
    name = f"kl/{estimator}" + ("_unbiased" if unbiased else "")
    return entry(name, "compute_approx_kl", settings, case_name, out, float32=list(out), kind="kl")


def value_entry(name, case_name, case, settings):
    values = live(case.new_values)
    loss = ValueLoss(**settings)(values, flat(case.values), flat(case.returns), action_mask=flat(case.mask))
    loss.backward()
    out = {"loss": loss, "grad_values": like(case, values.grad)}
    return entry(f"value/{name}", "ValueLoss", settings, case_name, out, kind="value")


ESTIMATORS = {  # name -> estimator, settings
    "gae": ("gae", {}),
    "gae_discounted": ("gae", {"gamma": 0.9, "lambd": 0.95}),
    "reinforce": ("reinforce", {}),
    "reinforce_discounted": ("reinforce", {"gamma": 0.9}),
    "reinforce_baseline": ("reinforce_baseline", {}),
    "reinforce_baseline_mean_only": ("reinforce_baseline", {"no_std_norm": True}),
    "rloo": ("rloo", {}),
    "rloo_kl": ("rloo", {"kl_coef": 0.01}),
    "group_norm": ("group_norm", {}),
    "group_norm_kl": ("group_norm", {"kl_coef": 0.01}),
    "dr_grpo": ("dr_grpo", {}),
    "flash_reinforce": ("flash_reinforce", {}),
}
WHITENED = ("gae", "reinforce", "reinforce_baseline")  # .float() in the library


def advantage_entry(name, case_name, case):
    """``compute_advantages_and_returns`` on one experience that holds the whole batch."""
    estimator, given = ESTIMATORS[name]
    settings = {"gamma": 1.0, "lambd": 1.0, "no_std_norm": False, "kl_coef": 0.0} | given
    _, group, width = case.mask.shape
    mask = flat(case.mask).long()
    args = SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator=estimator, **{key: settings[key] for key in ("gamma", "lambd", "no_std_norm")}
            )
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=group, max_new_tokens=width),
        reward=SimpleNamespace(
            clip_range=(-10.0, 10.0),
            overlong_buffer_len=None,
            overlong_penalty_factor=0,
            stop_properly_penalty_coef=None,
        ),
    )
    maker = object.__new__(RemoteExperienceMaker)
    maker.args, maker.strategy, maker.advantage_estimator = args, SimpleNamespace(args=args), estimator
    maker.kl_ctl = SimpleNamespace(value=settings["kl_coef"])
    batch = Experience(
        index=list(range(len(mask))),
        rewards=flat(case.rewards),
        kl=compute_approx_kl(flat(case.old_logprobs), flat(case.ref_logprobs)).double(),
        action_mask=mask,
        info={},
        values=flat(case.values) if estimator == "gae" else None,
        sequences=torch.zeros_like(mask),
    )
    (batch,) = maker.compute_advantages_and_returns([batch])
    out = {"advantages": like(case, batch.advantages)}
    if not torch.equal(batch.advantages, batch.returns):
        out["returns"] = like(case, batch.returns)
    rounded = [key for key in out if settings["kl_coef"] or (key == "advantages" and estimator in WHITENED)]
    recorded = {"estimator": estimator, "reward_clip_range": [-10.0, 10.0]} | settings
    function = "RemoteExperienceMaker.compute_advantages_and_returns"
    return entry(f"advantage/{name}", function, recorded, case_name, out, float32=rounded, kind="advantage")


def entries():
    table = cases()
    for case_name in LOSS_CASES:
        case = table[case_name]
        for name in ESTIMATORS:
            yield advantage_entry(name, case_name, case)
        for name, (settings, whole) in LOSSES.items():
            yield loss_entry(name, case_name, case, settings, whole=whole)
    for case_name in ("far", "empty"):
        case = table[case_name]
        for name, settings in CORRECTIONS.items():
            if (case_name, name) != ("empty", "seq_mask"):  # 0/0 at the empty row: the loss is NaN
                yield loss_entry(f"ppo/sampler_{name}", case_name, case, settings)
        totals = {"batch_num_tokens": int(case.mask.sum()), "global_batch_size": case.rewards.size}
        for name, settings in {
            "token_mean": {"token_level_loss": True},
            "seq_mean": {"token_level_loss": False},
            "seq_mean_whole_batch": {"token_level_loss": False} | totals,
        }.items():
            yield aggregation_entry(name, case_name, case, settings)
        for name, settings in {
            "clip_0.5": {"clip_eps": 0.5},
            "unclipped": {},
            "seq_mean": {"clip_eps": 0.5, "token_level_loss": False},
        }.items():
            yield value_entry(name, case_name, case, settings)
    for case_name in ("mild", "far", "extreme"):
        for estimator in ("k1", "k2", "k3"):
            for unbiased in (False, True):
                yield kl_entry(case_name, table[case_name], estimator, unbiased)
    yield loss_entry("ppo/token_mean", "extreme", table["extreme"], {})
    yield loss_entry("gspo", "extreme", table["extreme"], {"policy_loss_type": "gspo"})


DEFAULTS = (
    *(f"algo.advantage.{name}" for name in ("estimator", "gamma", "lambd", "no_std_norm")),
    *(f"algo.advantage.is_correction_{name}" for name in ("level", "mode", "gating", "threshold")),
    *("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"),
    *(f"algo.kl.{name}" for name in ("init_coef", "estimator", "use_loss", "unbiased_gradient", "target")),
    *(f"actor.{name}" for name in ("eps_clip", "eps_clip_low_high", "dual_clip", "loss_agg_mode")),
    *("actor.policy_loss_type", "actor.entropy_coef", "critic.value_clip", "reward.clip_range"),
    *("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.temperature", "rollout.top_p"),
    *("train.batch_size", "train.max_epochs"),
)


def defaults():
    """What ``cli/train_ppo_ray.py`` gives to ``add_argument`` as default (read from its syntax tree, not run)."""
    table = {}
    for node in ast.walk(ast.parse((ROOT / "cli" / "train_ppo_ray.py").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
            name = next((a.value for a in node.args if isinstance(a, ast.Constant)), "").removeprefix("--")
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if name in DEFAULTS and "default" in keywords:
                table[name] = ast.literal_eval(keywords["default"])
            elif name in DEFAULTS:  # a bare flag, or no default
                table[name] = False if "action" in keywords else None
    if missing := set(DEFAULTS) - set(table):
        raise ValueError(f"train_ppo_ray.py has no arguments {sorted(missing)}")
    return table


def main(out):
    found = importlib.metadata.version("openrlhf")
    if found != VERSION:
        raise SystemExit(f"openrlhf {found} is installed; these values are those of {VERSION}")
    torch.set_default_dtype(torch.float64)
    save_defaults(out, "openrlhf", VERSION, {"train_ppo_ray": defaults()})
    save(out, "openrlhf", VERSION, list(entries()))


if __name__ == "__main__":
    main(sys.argv[1])
