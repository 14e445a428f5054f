"""Golden values of TRL: its own trainers, built by their own constructors, with generation and log-probs replaced.

    python -m parity.trl_golden FOLDER

A real ``GRPOTrainer``/``RLOOTrainer`` (a one-layer model, never trained) makes each value. Replaced are ``_generate``
(completions of the case's lengths), ``_get_per_token_logps_and_entropies`` (the case's numbers) and, where float64 is
wanted, ``_calculate_rewards`` (it rounds to float32); advantages come out of ``_generate_and_score_completions``, and
losses out of ``compute_loss`` on the very dictionary that this returned. Fully masked rows are completions without an
end-of-sequence token under ``mask_truncated_completions``.
"""

import logging
import math
import os
import sys
import tempfile
import warnings

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import split_tensor_dict

from parity.cases import LOSS_CASES, cases
from parity.record import entry, save, save_defaults

VERSION = "1.16.0"
PAD, EOS, WORD = 0, 1, 2
MAX_COMPLETION_LENGTH = 10  # wider than every case: a loss that divides by the padded width shows it
TRAINERS = {"GRPOTrainer": (GRPOTrainer, GRPOConfig), "RLOOTrainer": (RLOOTrainer, RLOOConfig)}
# The settings that an entry records, read back from the trainer's own configuration.
ADVANTAGE_SETTINGS = {
    "GRPOTrainer": ("scale_rewards", "multi_objective_aggregation"),
    "RLOOTrainer": ("beta", "normalize_advantages", "reward_clip_range"),
}
LOSS_SETTINGS = {
    "GRPOTrainer": (
        *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta"),
        *("use_bias_correction_kl", "max_completion_length", "num_iterations", "gradient_accumulation_steps"),
        *("top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef", "mask_truncated_completions"),
    ),
    "RLOOTrainer": ("epsilon", "epsilon_high", "mask_truncated_completions"),
}
VLLM_SETTINGS = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))
OTHER_SETTINGS = {
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}


def tiny_model_folder() -> str:
    """A folder with a one-layer model (where beta > 0, the trainer loads its reference from there)."""
    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=3,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": EOS, "a": WORD}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="a")


class Harness:
    """One trainer on one case."""

    def __init__(self, folder, case, trainer="GRPOTrainer", *, vllm=False, reward_dtype=torch.float64, **settings):
        self.name, self.vllm, self.reward_dtype = trainer, vllm, reward_dtype
        self.mask = torch.tensor(case.mask).flatten(0, 1)
        flat = {name: torch.tensor(getattr(case, name)).flatten(0, 1) for name in ("rewards", "advantages")}
        self.rewards, self.advantages = flat["rewards"], flat["advantages"]
        self.old, self.reference, self.sampler, self.entropies, self.logprobs = (
            torch.tensor(getattr(case, name)).flatten(0, 1)
            for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs", "entropies", "logprobs")
        )
        self.shape = case.mask.shape
        if not case.mask.any(-1).all():
            settings["mask_truncated_completions"] = True
        make, configuration = TRAINERS[trainer]
        micro_batches = settings.get("gradient_accumulation_steps", 1)
        torch.set_default_dtype(torch.float32)  # as the trainer expects of its model
        self.args = configuration(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            per_device_train_batch_size=len(self.rewards) // micro_batches,
            num_generations=self.shape[1],
            max_completion_length=MAX_COMPLETION_LENGTH,
            **settings,
        )
        self.trainer = make(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=self.reward,
            args=self.args,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * self.shape[0]),
            processing_class=tokenizer(),
        )
        self.trainer.model.train()  # the training loop's own step before a loss is taken
        self.trainer.current_gradient_accumulation_steps = micro_batches  # the same
        self.trainer.use_vllm = vllm  # after the constructor, which would start the engine
        self.trainer._generate = self.generate
        self.trainer._get_per_token_logps_and_entropies = self.logps
        if reward_dtype == torch.float64:
            self.trainer._calculate_rewards = lambda *_: self.rewards[:, None].clone()
            torch.set_default_dtype(torch.float64)
        self.inputs = self.trainer._generate_and_score_completions([{"prompt": "a"}] * len(self.rewards))
        torch.testing.assert_close(self.inputs["completion_mask"].bool(), self.mask, rtol=0, atol=0)

    def reward(self, completions, **_):
        return self.rewards.tolist()

    def generate(self, prompts):
        width, lengths = self.mask.shape[1], self.mask.sum(1).tolist()
        ids = [[WORD] * (n - 1) + [EOS] if n else [WORD] * width for n in lengths]
        texts = ["a"] * len(ids)
        if self.name == "RLOOTrainer":
            return [[WORD]] * len(ids), ids, texts
        sampled = [row[: len(i)] for row, i in zip(self.sampler.tolist(), ids, strict=True)] if self.vllm else None
        return [[WORD]] * len(ids), ids, None, texts, sampled, {}, None, None

    def logps(self, model, *_, **__):
        if self.trainer.ref_model is not None and model is self.trainer.ref_model:
            return self.reference, None, None
        return (self.live, self.live_entropies, None) if torch.is_grad_enabled() else (self.old, None, None)

    def loss(self, *, own_advantages=False):
        """Loss and gradients of ``compute_loss``, added over the micro-batches as the training loop adds them."""
        inputs = dict(self.inputs)
        if not own_advantages:
            inputs["advantages"] = self.advantages
        parts = self.args.gradient_accumulation_steps
        logprobs = self.logprobs.clone().requires_grad_()
        entropies = self.entropies.clone().requires_grad_()
        self.trainer._metrics["train"].clear()
        losses = []
        for part, chunk in enumerate(split_tensor_dict(inputs, parts)):
            rows = slice(part * len(logprobs) // parts, (part + 1) * len(logprobs) // parts)
            self.live, self.live_entropies = logprobs[rows], entropies[rows]
            losses.append(self.trainer.compute_loss(self.trainer.model, chunk))
        loss = sum(losses)
        loss.backward()
        out = {"loss": loss, "grad_logprobs": logprobs.grad.reshape(self.shape)}
        if entropies.grad is not None and entropies.grad.any():
            out["grad_entropies"] = entropies.grad.reshape(self.shape)
        metrics = {
            f"metric/{key}": values[0]
            for key, values in self.trainer._metrics["train"].items()
            if parts == 1 and math.isfinite(values[0])
        }
        return out | metrics

    def settings(self, *names):
        return {"trainer": self.name} | {name: getattr(self.args, name) for name in names}


def loss_entry(folder, name, case_name, case, trainer="GRPOTrainer", vllm=False, **settings):
    settings = ({"num_iterations": 2} if trainer == "GRPOTrainer" else {}) | settings  # 2: old_logprobs are in use
    harness = Harness(folder, case, trainer, vllm=vllm, **settings)
    out = harness.loss()
    names = LOSS_SETTINGS[trainer] + (VLLM_SETTINGS if vllm else ()) + OTHER_SETTINGS.get(settings.get("loss_type"), ())
    if vllm:
        weights = harness.inputs["importance_sampling_ratio"]
        out["sampler_weights"] = weights.reshape(*harness.shape[:2], -1)
    recorded = harness.settings(*names) | {"vllm": vllm}
    rounded = [key for key in out if "clip_ratio" in key]
    function = f"{trainer}.compute_loss"
    return entry(name, function, recorded, case_name, out, float32=rounded, kind="loss")


def advantage_entry(folder, name, case_name, case, trainer="GRPOTrainer", reward_dtype=torch.float64, **settings):
    harness = Harness(folder, case, trainer, reward_dtype=reward_dtype, **settings)
    out = {"advantages": harness.inputs["advantages"].reshape(harness.shape[:2])}
    recorded = harness.settings(*ADVANTAGE_SETTINGS[trainer]) | {"reward_dtype": str(reward_dtype).split(".")[1]}
    rounded = ["advantages"] if reward_dtype == torch.float32 else []
    function = f"{trainer}._generate_and_score_completions"
    return entry(name, function, recorded, case_name, out, float32=rounded, kind="advantage")


def step_entry(folder, name, case_name, case, trainer="GRPOTrainer", **settings):
    """From rewards to gradient, with the library's defaults but for ``settings``."""
    harness = Harness(folder, case, trainer, **settings)
    out = {"advantages": harness.inputs["advantages"].reshape(harness.shape[:2])} | harness.loss(own_advantages=True)
    recorded = harness.settings(*ADVANTAGE_SETTINGS[trainer], *LOSS_SETTINGS[trainer])
    rounded = [key for key in out if "clip_ratio" in key]
    function = f"{trainer}._generate_and_score_completions + compute_loss"
    return entry(name, function, recorded, case_name, out, float32=rounded, kind="step")


GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo", "vespo")
VARIATIONS = {  # name -> settings; on top of loss_type grpo and token level where they say nothing else
    "clip_higher": {"epsilon_high": 0.28},
    "clip_higher_sequence": {"epsilon_high": 0.28, "importance_sampling_level": "sequence"},
    "gspo_paper": {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
    "delta": {"delta": 2.0},
    "delta_sequence": {"delta": 1.1, "importance_sampling_level": "sequence"},
    "kl_biased": {"beta": 0.04, "use_bias_correction_kl": False},
    "kl_corrected": {"beta": 0.04, "use_bias_correction_kl": True},
    "kl_biased_sequence": {
        "beta": 0.04,
        "use_bias_correction_kl": False,
        "importance_sampling_level": "sequence",
    },
    "kl_corrected_sequence": {
        "beta": 0.04,
        "use_bias_correction_kl": True,
        "importance_sampling_level": "sequence",
    },
    "kl_corrected_dapo": {"beta": 0.04, "use_bias_correction_kl": True, "loss_type": "dapo"},
    "kl_biased_dr_grpo": {"beta": 0.04, "use_bias_correction_kl": False, "loss_type": "dr_grpo"},
    "kl_corrected_delta": {"beta": 0.04, "use_bias_correction_kl": True, "delta": 2.0},
    "cispo_5": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo_5_sequence": {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"},
    "entropy_bonus": {"entropy_coef": 0.01},
    "entropy_bonus_dapo": {"entropy_coef": 0.01, "loss_type": "dapo"},
    "top_entropy": {"top_entropy_quantile": 0.5},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "accumulated_grpo": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    "accumulated_bnpo": {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "bnpo"},
    "accumulated_dr_grpo": {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "dr_grpo"},
    "accumulated_dapo": {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "dapo"},
}
SAMPLER_VARIATIONS = {
    f"sampler_{mode}{suffix}": {"vllm": True, "vllm_importance_sampling_mode": mode} | bounds
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for suffix, bounds in (
        ("", {}),
        ("_two_sided", {"vllm_importance_sampling_clip_min": 0.3, "vllm_importance_sampling_clip_max": 4.0}),
    )
}
STEPS = {
    "step/defaults": {},
    "step/defaults_off_policy": {"num_iterations": 2},
    "step/grpo_paper": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False, "num_iterations": 2},
    "step/dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "num_iterations": 2},
    "step/gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "step/rloo_defaults": {"trainer": "RLOOTrainer"},
}


def entries(folder):
    table = cases()
    for case_name in LOSS_CASES:
        case = table[case_name]
        for scale in ("group", "batch", "none"):
            yield advantage_entry(folder, f"advantage/{scale}", case_name, case, scale_rewards=scale)
        gdpo = {"multi_objective_aggregation": "normalize_then_sum"}
        yield advantage_entry(folder, "advantage/normalize_then_sum", case_name, case, **gdpo)
        yield advantage_entry(folder, "advantage/group_float32", case_name, case, reward_dtype=torch.float32)
        for name, settings in {
            "rloo": {"beta": 0.0},
            "rloo_kl": {"beta": 0.05},
            "rloo_normalized": {"beta": 0.0, "normalize_advantages": True},
            "rloo_clipped": {"beta": 0.05, "reward_clip_range": (0.1, 0.9)},
        }.items():
            yield advantage_entry(folder, f"advantage/{name}", case_name, case, "RLOOTrainer", **settings)
        for loss_type in GRPO_LOSSES:
            for level in ("token", "sequence"):
                settings = {"loss_type": loss_type, "importance_sampling_level": level}
                yield loss_entry(folder, f"loss/{loss_type}/{level}", case_name, case, **settings)
        for high in (None, 0.28):
            name = "loss/rloo/clip_higher" if high else "loss/rloo"
            yield loss_entry(folder, name, case_name, case, "RLOOTrainer", epsilon_high=high)
        for name, settings in STEPS.items():
            yield step_entry(folder, name, case_name, case, **settings)
        if case_name in ("far", "empty"):
            for name, settings in (VARIATIONS | SAMPLER_VARIATIONS).items():
                yield loss_entry(folder, f"loss/{name}", case_name, case, **{"loss_type": "grpo"} | settings)
        if case_name == "mild":
            for name, settings in SAMPLER_VARIATIONS.items():
                yield loss_entry(folder, f"loss/{name}", case_name, case, **{"loss_type": "dapo"} | settings)


DEFAULTS = {
    "GRPOConfig": (
        *("loss_type", "scale_rewards", "multi_objective_aggregation", "importance_sampling_level", "epsilon"),
        *("epsilon_high", "delta", "beta", "use_bias_correction_kl", "num_iterations", "num_generations"),
        *("max_completion_length", "mask_truncated_completions", "top_entropy_quantile", "entropy_coef"),
        *("off_policy_mask_threshold", "vllm_importance_sampling_correction", "temperature", "top_p"),
        *("learning_rate", "max_grad_norm", "steps_per_generation", "gradient_accumulation_steps"),
        *(VLLM_SETTINGS + OTHER_SETTINGS["sapo"] + OTHER_SETTINGS["vespo"]),
    ),
    "RLOOConfig": (
        *("epsilon", "epsilon_high", "beta", "num_iterations", "num_generations", "normalize_advantages"),
        *("reward_clip_range", "max_completion_length", "mask_truncated_completions", "temperature", "top_p"),
        *("learning_rate", "max_grad_norm", "steps_per_generation", "gradient_accumulation_steps"),
    ),
}


def defaults(folder):
    made = {"GRPOConfig": GRPOConfig, "RLOOConfig": RLOOConfig}
    return {
        name: {key: getattr(made[name](output_dir=folder, use_cpu=True, bf16=False), key) for key in keys}
        for name, keys in DEFAULTS.items()
    }


def main(out):
    if trl.__version__ != VERSION:
        raise SystemExit(f"trl {trl.__version__} is installed; these values are those of {VERSION}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    folder = tiny_model_folder()
    save_defaults(out, "trl", VERSION, defaults(folder))
    save(out, "trl", VERSION, list(entries(folder)))


if __name__ == "__main__":
    main(sys.argv[1])
