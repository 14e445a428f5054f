"""Against what a user would pick instead: TRL's GRPOTrainer on the same task, beside GRPO here, in one run.

*The same task.* A target from 0..45 stands in the prompt as two digit tokens and ``=``; the completion is at most five
tokens, ten digits or EOS; reward 1 exactly when the digits before EOS sum to the target. Here that is
``--variable-length --prompt-form tokens``. 64 prompts x 8 completions a step on both sides, groups z-scored, KL term 0,
one gradient step per batch, float32, the gradient's norm clipped at 1.

*The same size.* A Llama of two layers whose parameter count is within a few per cent of the GRU's, made from a
configuration (nothing is downloaded); ``--hidden 64 --intermediate 128`` is a larger one that learns more from each
completion. Both counts are printed. TRL gets two threads, which is its faster setting here, and pgprog one thread.

*Settings of TRL, and why*: ``use_cpu``, ``bf16`` off (on by default, and slow on most CPUs), no gradient checkpointing
(on by default; it trades time for memory, which is not short here), no logging, no saving, no progress bar, no
workers that load data. ``loss_type`` stays at TRL's default, dapo: at most five tokens long, completions differ little
in weight. TRL generates with transformers; vLLM needs a GPU. Learning rate, its schedule and entropy bonus are
arguments; docs/speed.md says which were tried.

*Measured*: completions per second, from the median step after the first (which pays for starting); pgprog before and
after TRL, of which the slower counts. Success in the batch against wall time of training, start-up and imports aside
(they are reported). A third curve is pgprog as it comes, with the target as its initial state and five digits.

    pip install -e ".[trl]" && python benchmarks/versus_trl.py [--trl-steps 300] [--steps 400] [--out DIR]
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from rich.table import Table

from measuring import OUT, head, report, table
from pgprog.experiment.config import CompareConfig, RunConfig
from pgprog.experiment.learner import make_learner
from pgprog.experiment.loop import run

DIGITS, LENGTH, MAX_TARGET = 10, 5, 45
WORDS = [*map(str, range(DIGITS)), "<eos>", "="]
SMOOTH = 15  # steps
COLOURS = {"pgprog": "#2f5f9e", "pgprog as it comes": "#8fb1dc", "TRL": "#b5473c"}
INSTALL = 'TRL is not installed: pip install "trl==1.16.0" transformers accelerate datasets, or -e ".[trl]"'


@dataclass(frozen=True)
class Args:
    """What to measure."""

    steps: int = 400
    """Of pgprog."""
    trl_steps: int = 300
    prompts: int = 64
    group_size: int = 8
    trl_lr: float = 2e-3
    trl_lr_schedule: Literal["constant", "linear"] = "constant"
    trl_entropy_coef: float = 0.0
    hidden: int = 32
    """Of TRL's model."""
    intermediate: int = 48
    """Of TRL's model."""
    trl_threads: int = 2
    seed: int = 0
    out: Path = OUT
    """Receives versus_trl.json, .png and .svg."""
    json: bool = False
    """Print JSON in place of the table."""


@dataclass
class Side:
    """One learner's run."""

    parameters: int
    start_seconds: float
    """Making model and trainer, before the first step; imports aside."""
    seconds: list[float]
    """Wall time since training began, at the end of each step."""
    success: list[float]
    """Of the completions of each step."""

    def completions_per_second(self, completions: int) -> float:
        """From the median step after the first."""
        steps = [b - a for a, b in zip(self.seconds, self.seconds[1:], strict=False)]
        return completions / statistics.median(steps)


def ours(config: RunConfig, seed: int) -> Side:
    """GRPO here, one replica, one thread."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    parameters = sum(p.numel() for p in make_learner(config, [seed]).policy.parameters())
    side = Side(parameters, time.perf_counter() - started, [], [])
    began = time.perf_counter()

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        side.seconds.append(time.perf_counter() - began)
        side.success.append(metrics["success"].item())

    run(config, [seed], None, on_step)
    return side


def trl(args: Args) -> Side:
    """TRL's GRPOTrainer on the same task."""
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(args.trl_threads)
    torch.manual_seed(args.seed)
    started = time.perf_counter()
    tokenizer = make_tokenizer()
    model = make_model(args)
    side = Side(sum(p.numel() for p in model.parameters()), 0.0, [], [])

    def digit_sum(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float]:
        rewards = [reward(ids, goal) for ids, goal in zip(completion_ids, target, strict=True)]
        side.success.append(statistics.fmean(rewards))
        return rewards

    class Clock(TrainerCallback):
        """Notes when each step ends; training begins with the first step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()
            side.start_seconds = self.began - started

        def on_step_end(self, *_: Any, **__: Any) -> None:
            side.seconds.append(time.perf_counter() - self.began)

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=digit_sum,
            args=trl_config(args, directory),
            train_dataset=make_prompts(args),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)  # prints the last log, whatever logging_strategy is
        trainer.train()
    return side


def reward(ids: Iterable[int], target: int) -> float:
    """1 exactly when the tokens before EOS are digits that sum to the target."""
    total = 0
    for token in ids:
        if token == WORDS.index("<eos>"):
            break
        if token >= DIGITS:
            return 0.0
        total += token
    return float(total == target)


def make_tokenizer() -> Any:
    """One word, one token; made in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        pad_token="<eos>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(args: Args) -> Any:
    """A small Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    eos = WORDS.index("<eos>")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return AutoModelForCausalLM.from_config(config)


def make_prompts(args: Args) -> Any:
    """Enough uniform targets for every step."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(args.seed)
    targets = torch.randint(0, MAX_TARGET + 1, (args.prompts * args.trl_steps,), generator=generator).tolist()
    return Dataset.from_dict({"prompt": [f"{n // 10} {n % 10} =" for n in targets], "target": targets})


def trl_config(args: Args, directory: str) -> Any:
    """See the head of this file for the reasons."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=args.prompts * args.group_size,
        num_generations=args.group_size,
        max_steps=args.trl_steps,
        max_completion_length=LENGTH,
        learning_rate=args.trl_lr,
        lr_scheduler_type=args.trl_lr_schedule,
        entropy_coef=args.trl_entropy_coef,
        beta=0.0,
        temperature=1.0,
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )


def measure(args: Args) -> tuple[dict[str, Side], dict[str, list[float]]]:
    """The three runs, and completions per second of each run that was made."""
    plain = CompareConfig(prompts=args.prompts, group_size=args.group_size).run_config("grpo", args.steps)
    same = replace(plain, variable_length=True, prompt_form="tokens")
    ours(replace(same, steps=5), args.seed)  # warm
    sides = {"pgprog": ours(same, args.seed), "pgprog as it comes": ours(plain, args.seed)}
    sides["TRL"] = trl(args)
    again = {"pgprog": ours(same, args.seed), "pgprog as it comes": ours(plain, args.seed)}
    batch = args.prompts * args.group_size
    rates = {name: [s[name].completions_per_second(batch) for s in (sides, again) if name in s] for name in sides}
    return sides, rates


def reached(side: Side, level: float) -> float | None:
    """Seconds until the smoothed success stands at a level."""
    curve = smooth(side)
    above = np.flatnonzero(curve[1] >= level)
    return float(curve[0][above[0]]) if len(above) else None


def smooth(side: Side) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and the mean success of the last SMOOTH steps."""
    width = min(SMOOTH, len(side.success))
    means = np.convolve(side.success, np.ones(width) / width, mode="valid")
    return np.array(side.seconds)[width - 1 :], means


def draw(sides: dict[str, Side]) -> Figure:
    """Success against wall time; the axis is logarithmic, for the sides are far apart."""
    figure, panel = plt.subplots(figsize=(7, 3.8))
    for name, side in sides.items():
        seconds, success = smooth(side)
        label = f"{name}, {side.parameters:,} parameters"
        panel.semilogx(seconds, success, color=COLOURS[name], label=label, lw=1.5)
    panel.set(xlabel="seconds of training, start-up aside", ylabel=f"success of the batch, mean of {SMOOTH} steps")
    panel.set(ylim=(0, 1))
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.16))
    panel.set_title("GRPO on the digit sum, one seed: 64 prompts x 8 completions a step")
    return figure


def summarise(sides: dict[str, Side], rates: dict[str, list[float]]) -> dict[str, Any]:
    """The numbers, and every step of every side as rows."""
    last = {name: float(smooth(side)[1][-1]) for name, side in sides.items()}
    level = last["TRL"]
    return {
        "completions_per_second": rates,
        "ratio": min(rates["pgprog"]) / max(rates["TRL"]),
        "success_at_the_end": last,
        "seconds": {name: side.seconds[-1] for name, side in sides.items()},
        "seconds_to_trls_last_success": {name: reached(side, level) for name, side in sides.items()},
        "parameters": {name: side.parameters for name, side in sides.items()},
        "start_seconds": {name: side.start_seconds for name, side in sides.items()},
        "rows": [
            {"side": name, "step": i + 1, "seconds": seconds, "success": success}
            for name, side in sides.items()
            for i, (seconds, success) in enumerate(zip(side.seconds, side.success, strict=True))
        ],
    }


def show(args: Args, result: dict[str, Any]) -> list[Table | str]:
    """A row per side, and the ratio."""
    rows = []
    for name, rates in result["completions_per_second"].items():
        time_there = result["seconds_to_trls_last_success"][name]
        rows.append(
            [
                name,
                f"{result['parameters'][name]:,}",
                f"{min(rates):,.0f}",
                f"{result['seconds'][name]:.1f}",
                f"{result['success_at_the_end'][name]:.3f}",
                "" if time_there is None else f"{time_there:.1f}",
            ]
        )
    columns = ["", "parameters", "completions/s", "s in all", "success", "s to TRL's"]
    title = f"GRPO, {args.prompts} x {args.group_size} a step: {args.steps} steps, TRL {args.trl_steps}"
    said = f"pgprog samples and learns from {result['ratio']:.1f} times as many completions a second."
    return [table(title, columns, rows), said]


def installed() -> bool:
    """Whether TRL can be imported."""
    try:
        from trl import GRPOTrainer  # noqa: F401
    except ImportError:
        return False
    return True


def main(args: Args) -> int:
    started = time.perf_counter()
    if not installed():
        print(INSTALL, file=sys.stderr)
        return 2
    imported = time.perf_counter() - started
    sides, rates = measure(args)
    measured = summarise(sides, rates) | {"trl_import_seconds": imported}
    result = head() | {"args": {**asdict(args), "out": str(args.out)}} | measured
    report("versus_trl", result, show(args, result), args.out, args.json, lambda: draw(sides))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
