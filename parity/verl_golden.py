"""Golden values of verl: its own functions, called as its trainer calls them (masks of its dtypes, uids, DataProto).

    python -m parity.verl_golden FOLDER

Everything is float64 but for what an entry lists under ``float32``. Packages that verl imports at the top of a module
and that none of these functions uses are stubs (ray, peft, ...).
"""

# ruff: noqa: E402 (the environment is set, and packages are replaced, before the library is imported)
import importlib.metadata
import logging
import math
import os
import pathlib
import sys
import warnings

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
import transformers  # noqa: F401  (before the stubs: it asks which packages are there)

from parity.cases import LOSS_CASES, cases
from parity.record import entry, save, save_defaults
from parity.stubs import stub

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
stub("ray", "peft", "cachetools", "torchdata", "uvicorn", "fastapi")

import verl
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

VERSION = "0.9.1"
MODES = {  # name -> loss_agg_mode, loss_scale_factor
    "token_mean": ("token-mean", None),
    "token_sum": ("token-sum", None),
    "seq_mean_token_sum": ("seq-mean-token-sum", None),
    "seq_mean_token_mean": ("seq-mean-token-mean", None),
    "seq_mean_token_sum_norm": ("seq-mean-token-sum-norm", None),
    "seq_mean_token_sum_norm_10": ("seq-mean-token-sum-norm", 10),
}


def flat(array):
    """(P, G, ...) as a tensor (P G, ...)."""
    return torch.tensor(array).flatten(0, 1)


def live(array):
    return flat(array).requires_grad_()


def like(case, tensor):
    """(P G, T) back to (P, G, T)."""
    return tensor.reshape(case.mask.shape)


def finite(metrics):
    values = {f"metric/{key}": getattr(value, "value", value) for key, value in metrics.items()}
    values = {key: value.item() if torch.is_tensor(value) else value for key, value in values.items()}
    return {key: float(value) for key, value in values.items() if math.isfinite(value)}


# Advantages

ESTIMATORS = {  # name -> estimator, settings
    "gae": ("gae", {"gamma": 1.0, "lam": 1.0}),
    "gae_discounted": ("gae", {"gamma": 0.9, "lam": 0.95}),
    "grpo": ("grpo", {"norm_adv_by_std_in_grpo": True}),
    "grpo_mean_only": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    "grpo_vectorized": ("grpo_vectorized", {"norm_adv_by_std_in_grpo": True}),
    "grpo_vectorized_mean_only": ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}),
    "grpo_passk": ("grpo_passk", {"norm_adv_by_std_in_grpo": True}),
    "rloo": ("rloo", {}),
    "rloo_vectorized": ("rloo_vectorized", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {"gamma": 1.0}),
    "reinforce_plus_plus_discounted": ("reinforce_plus_plus", {"gamma": 0.9}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "remax": ("remax", {}),
    "opo": ("opo", {}),
    "gpg": ("gpg", {}),
}


def advantage_entry(name, case_name, case):
    """``compute_advantage`` of the trainer; the reward is at the last response token, as the agent loop puts it.

    ``grpo_vectorized`` takes its statistics in float32, so it gets float32 rewards: a float64 0.95 less a float32 mean
    would be a difference that is not there.
    """
    estimator, settings = ESTIMATORS[name]
    dtype = torch.float32 if estimator == "grpo_vectorized" else torch.float64
    prompts, group, _ = case.mask.shape
    tensors = {"token_level_rewards": flat(case.token_rewards).to(dtype), "response_mask": flat(case.mask).long()}
    if estimator == "gae":
        tensors["values"] = flat(case.values)
    if estimator == "remax":
        tensors["reward_baselines"] = torch.tensor(case.greedy_rewards).repeat_interleave(group)
    data = DataProto.from_dict(
        tensors=tensors,
        non_tensors={"uid": np.repeat([f"prompt {i}" for i in range(prompts)], group).astype(object)},
    )
    config = AlgoConfig(adv_estimator=estimator, **settings)
    data = ray_trainer.compute_advantage(
        data,
        estimator,
        gamma=config.gamma,
        lam=config.lam,
        num_repeat=group,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        config=config,
    )
    advantages, returns = data.batch["advantages"], data.batch["returns"]
    out = {"advantages": like(case, advantages)}
    if not torch.equal(advantages, returns):
        out["returns"] = like(case, returns)
    rounded = list(out) if dtype == torch.float32 else []
    recorded = {"estimator": estimator, "reward_dtype": str(dtype).split(".")[1]} | settings
    function = "ray_trainer.compute_advantage"
    return entry(f"advantage/{name}", function, recorded, case_name, out, float32=rounded, kind="advantage")


def kl_in_reward_entry(case_name, case, penalty):
    data = DataProto.from_dict(
        tensors={
            "token_level_scores": flat(case.token_rewards),
            "response_mask": flat(case.mask).long(),
            "old_log_probs": flat(case.old_logprobs),
            "ref_log_prob": flat(case.ref_logprobs),
        }
    )
    controller = core_algos.FixedKLController(kl_coef=0.05)
    data, metrics = ray_trainer.apply_kl_penalty(data, controller, kl_penalty=penalty)
    out = {"token_rewards": like(case, data.batch["token_level_rewards"])} | finite(metrics)
    settings = {"kl_penalty": penalty, "kl_coef": 0.05}
    return entry(f"kl_in_reward/{penalty}", "ray_trainer.apply_kl_penalty", settings, case_name, out, kind="kl_reward")


# Losses

LOSSES = {  # name -> loss_mode, aggregation (a name of MODES), settings of the actor
    **{f"vanilla/{mode}": ("vanilla", mode, {}) for mode in MODES},
    "vanilla/clip_higher": ("vanilla", "token_mean", {"clip_ratio_high": 0.28}),
    "vanilla/dual_clip_10": ("vanilla", "token_mean", {"clip_ratio_c": 10.0}),
    "gspo/token_mean": ("gspo", "token_mean", {}),
    "gspo/seq_mean_token_mean": ("gspo", "seq_mean_token_mean", {}),
    "gspo/paper": ("gspo", "seq_mean_token_mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "cispo/token_mean": ("cispo", "token_mean", {}),
    "cispo/upper_5": ("cispo", "token_mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    "gpg/token_mean": ("gpg", "token_mean", {}),
    "sapo": ("sapo", "seq_mean_token_mean", {}),
    "geo_mean": ("geo_mean", "token_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
}
ACTOR_SETTINGS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def actor(mode, **settings):
    name, factor = MODES[mode]
    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=name,
        loss_scale_factor=factor,
        **settings,
    )


def recorded(config, *more):
    names = ("loss_agg_mode", "loss_scale_factor", *ACTOR_SETTINGS, *more)
    return {name: getattr(config, name) for name in names}


def loss_entry(name, case_name, case, *, advantages="advantages", weights=None, label=None):
    """A policy loss of the registry with its own, local denominators (``global_batch_info`` empty)."""
    loss_mode, mode, settings = LOSSES[name]
    config = actor(mode, **settings)
    if config.loss_scale_factor is not None:
        config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    mask = flat(case.mask)
    logprobs = live(case.logprobs)
    given = flat(getattr(case, advantages))
    loss, metrics = core_algos.get_policy_loss_fn(loss_mode)(
        old_log_prob=flat(case.old_logprobs),
        log_prob=logprobs,
        advantages=given if given.ndim == 2 else given[:, None] * mask,
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    out = {"loss": loss, "grad_logprobs": like(case, logprobs.grad)} | finite(metrics)
    if weights is not None:
        out["rollout_is_weights"] = like(case, weights)
    function = f"core_algos.get_policy_loss_fn({loss_mode!r})"
    settings = {"loss_mode": loss_mode, "advantages": advantages} | recorded(config) | (label[1] if label else {})
    name = label[0] if label else f"loss/{name}"
    return entry(name, function, settings, case_name, out, kind="loss")


CORRECTIONS = {
    f"{level}_{name}": {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
    for level in ("token", "sequence")
    for name, threshold, normalize in (
        ("truncate", 2.0, False),
        ("mask", "0.5_2.0", False),
        ("truncate_normalized", 2.0, True),
    )
}
REJECTIONS = {
    "token_k1": "0.5_2.0",
    "token_k2": "0.05",
    "token_k3": "0.05",
    "seq_sum_k1": "0.5_2.0",
    "seq_mean_k1": "0.9_1.1",
    "seq_mean_k3": "0.05",
    "seq_max_k2": "0.1",
}


def corrected_entry(name, case_name, case):
    """The clipped loss under the weights training policy / sampler, both by verl's functions."""
    settings = CORRECTIONS[name]
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        flat(case.old_logprobs) - flat(case.sampler_logprobs), flat(case.mask).long(), **settings
    )
    label = f"loss/vanilla/rollout_{name}", settings
    return loss_entry("vanilla/token_mean", case_name, case, weights=weights, label=label)


def rejection_entry(option, case_name, case):
    threshold = REJECTIONS[option]
    kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        flat(case.old_logprobs) - flat(case.sampler_logprobs), flat(case.mask).long(), option, threshold
    )
    settings = {"rollout_rs": option, "rollout_rs_threshold": threshold}
    function = "rollout_corr_helper.compute_rollout_rejection_mask"
    out = {"mask": like(case, kept).double()}
    return entry(f"rejection/{option}", function, settings, case_name, out, kind="rejection")


def reinforce_entry(case_name, case, correction):
    """The loss of bypass mode without clipping: weight new policy / sampler times A times the log-prob."""
    mask, logprobs = flat(case.mask), live(case.logprobs)
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        (logprobs - flat(case.sampler_logprobs)).detach(), mask.long(), **CORRECTIONS[correction]
    )
    config = actor("token_mean")
    loss, metrics = core_algos.compute_policy_loss_reinforce(
        rollout_log_prob=flat(case.sampler_logprobs),
        log_prob=logprobs,
        advantages=flat(case.advantages)[:, None] * mask,
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    out = {"loss": loss, "grad_logprobs": like(case, logprobs.grad)} | finite(metrics)
    settings = {"loss_agg_mode": config.loss_agg_mode} | CORRECTIONS[correction]
    function = "core_algos.compute_policy_loss_reinforce"
    return entry(f"loss/reinforce/{correction}", function, settings, case_name, out, kind="loss")


STEPS = {  # name -> aggregation, settings of the actor
    **{mode: (mode, {}) for mode in MODES},
    "defaults_kl": ("token_mean", {"use_kl_loss": True}),
    "kl_and_entropy": ("token_mean", {"use_kl_loss": True, "kl_loss_coef": 0.04, "entropy_coeff": 0.01}),
    "kl_straight_through": (
        "seq_mean_token_mean",
        {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "k3+"},
    ),
    "dapo": ("token_mean", {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}),
    "dr_grpo": ("seq_mean_token_sum_norm_10", {}),
}


def step_entry(name, case_name, case):
    """``ppo_loss``, the whole loss of the actor, with the denominators that the trainer passes (one parallel rank).

    Every row of the batch counts: ``global_batch_size = P G``, and ``batch_num_tokens`` is the mask's sum.
    """
    mode, settings = STEPS[name]
    config = actor(mode, **settings)
    mask = flat(case.mask)
    rows, width = mask.shape
    lengths = [n if n else width for n in mask.sum(1).tolist()]  # an empty row is a response that was masked out
    attention = torch.tensor([[1] + [int(t < n) for t in range(width)] for n in lengths])
    data = TensorDict(
        {
            "prompts": torch.ones(rows, 1, dtype=torch.long),
            "responses": torch.ones(rows, width, dtype=torch.long),
            "attention_mask": attention,
            "response_mask": mask.long(),
            "old_log_probs": flat(case.old_logprobs),
            "ref_log_prob": flat(case.ref_logprobs),
            "advantages": flat(case.advantages)[:, None] * mask,
        },
        batch_size=[rows],
    )
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=rows)
    logprobs, entropies = live(case.logprobs), live(case.entropies)

    def packed(values):  # prompt and response of every row, one after the other; position t predicts token t + 1
        rows = zip(values, lengths, strict=True)
        return torch.cat([torch.cat([row[:n], row.new_zeros(1)]) for row, n in rows])

    output = {"log_probs": packed(logprobs)}
    if config.entropy_coeff:
        output["entropy"] = packed(entropies)
    loss, metrics = ppo_loss(config, output, data)
    loss.backward()
    out = {"loss": loss, "grad_logprobs": like(case, logprobs.grad)}
    if config.entropy_coeff:
        out["grad_entropies"] = like(case, entropies.grad)
    values = {
        key: value.values[0] if hasattr(value, "values") else value
        for key, value in metrics.items()
        if key not in ("actor/pg_loss", "kl_coef")
    }
    out |= finite(values)
    kept = recorded(config, "use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff")
    function = "losses.ppo_loss"
    return entry(f"step/{name}", function, kept, case_name, out, kind="step")


def aggregation_entry(mode, case_name, case, *, whole):
    """``agg_loss`` of the token advantages; ``grad_loss_mat`` is the weight of every token."""
    name, factor = MODES[mode]
    mask, matrix = flat(case.mask), live(case.token_advantages)
    totals = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)} if whole else {}
    settings = {"loss_agg_mode": name, "loss_scale_factor": factor} | totals
    loss = core_algos.agg_loss(matrix, mask, **settings)
    loss.backward()
    out = {"loss": loss, "grad_loss_mat": like(case, matrix.grad)}
    name = f"aggregation/{mode}" + ("/whole_batch" if whole else "")
    return entry(name, "core_algos.agg_loss", settings, case_name, out, kind="aggregation")


def kl_entry(estimator, case_name, case):
    logprobs = live(case.logprobs)
    kl = core_algos.kl_penalty(logprobs, flat(case.ref_logprobs), estimator)
    kl.sum().backward()
    out = {"kl": like(case, kl), "grad_logprobs": like(case, logprobs.grad)}
    return entry(f"kl/{estimator}", "core_algos.kl_penalty", {"kl_penalty": estimator}, case_name, out, kind="kl")


def value_entry(name, case_name, case, mode, cliprange):
    values = live(case.new_values)
    loss, clipped = core_algos.compute_value_loss(
        vpreds=values,
        returns=flat(case.returns),
        values=flat(case.values),
        response_mask=flat(case.mask),
        cliprange_value=cliprange,
        loss_agg_mode=MODES[mode][0],
    )
    loss.backward()
    out = {"loss": loss, "grad_values": like(case, values.grad), "metric/vf_clipfrac": clipped}
    settings = {"cliprange_value": cliprange, "loss_agg_mode": MODES[mode][0]}
    function = "core_algos.compute_value_loss"
    return entry(f"value/{name}", function, settings, case_name, out, kind="value")


def entries():
    table = cases()
    for case_name in (*LOSS_CASES, "single"):
        for name in ESTIMATORS:
            if (case_name, name) != ("single", "grpo_passk"):  # raises: it needs two
                yield advantage_entry(name, case_name, table[case_name])
    for case_name in LOSS_CASES:
        case = table[case_name]
        for name in LOSSES:
            yield loss_entry(name, case_name, case)
        label = "loss/vanilla/token_advantages", {}
        yield loss_entry("vanilla/token_mean", case_name, case, advantages="token_advantages", label=label)
    for case_name in ("mild", "far", "empty"):
        case = table[case_name]
        for penalty in ("kl", "low_var_kl"):
            yield kl_in_reward_entry(case_name, case, penalty)
        for estimator in ("k1", "k2", "k3", "abs", "k1+", "k3+"):
            yield kl_entry(estimator, case_name, case)
        for option in REJECTIONS:
            yield rejection_entry(option, case_name, case)
    for case_name in ("far", "empty"):
        case = table[case_name]
        for name in CORRECTIONS:
            yield corrected_entry(name, case_name, case)
        for correction in ("token_truncate", "sequence_truncate"):
            yield reinforce_entry(case_name, case, correction)
        for name in STEPS:
            yield step_entry(name, case_name, case)
        for mode in MODES:
            for whole in (False, True):
                yield aggregation_entry(mode, case_name, case, whole=whole)
        for name, mode, cliprange in (
            ("clip_0.5", "token_mean", 0.5),
            ("clip_0.2", "token_mean", 0.2),
            ("unclipped", "token_mean", 1e6),
            ("seq_mean_token_mean", "seq_mean_token_mean", 0.5),
        ):
            yield value_entry(name, case_name, case, mode, cliprange)
    for estimator in ("k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs", "k1+", "k3+", "low_var_kl+"):
        yield kl_entry(estimator, "extreme", table["extreme"])
    for name in ("vanilla/token_mean", "gspo/token_mean", "cispo/token_mean"):
        yield loss_entry(name, "extreme", table["extreme"])


DEFAULTS = {
    "actor": (
        *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "loss_scale_factor"),
        *("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff", "ppo_epochs", "ppo_mini_batch_size"),
        *("tau_pos", "tau_neg"),
    ),
    "algorithm": (
        *("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty", "kl_ctrl"),
        "filter_groups",
    ),
    "critic": ("cliprange_value",),
    "rollout": ("n", "temperature", "top_p", "calculate_log_probs"),
}


def defaults():
    """From the yaml files that ppo_trainer.yaml is composed of, and from the dataclasses beneath them."""
    root = pathlib.Path(verl.__file__).parent / "trainer" / "config"
    files = {
        "actor": OmegaConf.load(root / "actor" / "actor.yaml"),
        "algorithm": OmegaConf.load(root / "ppo_trainer.yaml").algorithm,
        "critic": OmegaConf.load(root / "critic" / "critic.yaml"),
        "rollout": OmegaConf.load(root / "rollout" / "rollout.yaml"),
    }
    table = {}
    for section, names in DEFAULTS.items():
        plain = OmegaConf.to_container(files[section], resolve=False)
        table[section] = {name: plain[name] for name in names}
    actor_file = OmegaConf.to_container(files["actor"], resolve=False)
    table["actor"]["policy_loss.loss_mode"] = actor_file["policy_loss"]["loss_mode"]
    table["rollout_correction"] = OmegaConf.to_container(
        OmegaConf.load(root / "algorithm" / "rollout_correction.yaml"), resolve=False
    )
    bare = RolloutCorrectionConfig()
    table["RolloutCorrectionConfig"] = {name: getattr(bare, name) for name in table["rollout_correction"]}
    table["data"] = {"train_batch_size": OmegaConf.load(root / "data" / "legacy_data.yaml").train_batch_size}
    return table


def main(out):
    found = importlib.metadata.version("verl")
    if found != VERSION:
        raise SystemExit(f"verl {found} is installed; these values are those of {VERSION}")
    torch.set_default_dtype(torch.float64)
    save_defaults(out, "verl", VERSION, defaults())
    save(out, "verl", VERSION, list(entries()))


if __name__ == "__main__":
    main(sys.argv[1])
