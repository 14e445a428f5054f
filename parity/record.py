"""The form of a golden file: how entries are made, written and read. Needs numpy alone.

    golden/<library>.json   {library, version, cases_sha256, entries: [entry, ...]}
    entry                   {library, version, name, kind, function, settings, case, float32, outputs}
    golden/defaults.json    {library: {version, ...}}

``kind`` is advantage, loss, step (all of a training step's loss), aggregation, kl, kl_reward, rejection or value;
``(name, case)`` is unique; ``settings`` are those the library worked with; ``float32`` names the outputs that the
library rounds. ``outputs`` has arrays in the shape of the case, (P, G) or (P, G, T), and numbers: ``loss``,
``grad_logprobs``, ``advantages``, ``returns`` (only where they are not the advantages), ``metric/...``.
"""

import json
import pathlib

import numpy as np

from parity.cases import digest

GOLDEN = pathlib.Path(__file__).parent / "golden"


def numbers(value):
    """A tensor, array or number as plain Python numbers (float64 keeps all its bits)."""
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    return np.asarray(value).tolist()


def entry(name, function, settings, case, outputs, *, float32=(), **identity):
    """One golden value: what was called with which settings on which case, and what came out.

    ``float32`` names the outputs that the library itself computes, or rounds on the way, in float32.
    """
    outputs = {key: numbers(value) for key, value in outputs.items()}
    return {
        "name": name,
        **identity,
        "function": function,
        "settings": settings,
        "case": case,
        "float32": sorted(float32),
        "outputs": outputs,
    }


def save(folder, library, version, entries):
    """Write ``folder/<library>.json``; refuses a name that stands twice and a number that is not finite."""
    keys = [(item["name"], item["case"]) for item in entries]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise ValueError(f"entries {sorted(twice)} of {library} stand twice; names must be unique within a case")
    lines = ",\n".join(
        json.dumps({"library": library, "version": version, **item}, separators=(",", ":"), allow_nan=False)
        for item in entries
    )
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = f'{{"library":"{library}","version":"{version}","cases_sha256":"{digest()}","entries":[\n{lines}\n]}}\n'
    (folder / f"{library}.json").write_text(text)


def save_defaults(folder, library, version, defaults):
    """Put one library's defaults into ``folder/defaults.json``, beside those of the others."""
    path = pathlib.Path(folder) / "defaults.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    table[library] = {"version": version, **defaults}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def load(library, folder=GOLDEN):
    """A golden file as it was written."""
    return json.loads((pathlib.Path(folder) / f"{library}.json").read_text())


def entries(library, **wanted):
    """The entries of one library whose fields equal ``wanted`` (``kind="loss"``, ``case="far"``, ...)."""
    return [item for item in load(library)["entries"] if all(item.get(key) == value for key, value in wanted.items())]
