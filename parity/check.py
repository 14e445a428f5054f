"""Compare freshly made golden files with the committed ones.

    python -m parity.check FOLDER

Structure, names, settings and defaults must be equal; numbers to RTOL and ATOL, or to FLOAT32_RTOL and FLOAT32_ATOL
where an entry says that the library itself works in float32.
"""

import json
import pathlib
import sys

import numpy as np

from parity.record import GOLDEN, load

LIBRARIES = ("trl", "verl", "openrlhf")
RTOL, ATOL = 1e-12, 1e-14
FLOAT32_RTOL, FLOAT32_ATOL = 1e-5, 1e-6


def differences(fresh, committed):
    """One line for each place where two golden files of a library disagree."""
    for key in ("library", "version", "cases_sha256"):
        if fresh[key] != committed[key]:
            yield f"{key}: {fresh[key]!r} now, {committed[key]!r} committed"
    fresh, committed = (
        {(item["name"], item["case"]): item for item in table["entries"]} for table in (fresh, committed)
    )
    for key in fresh.keys() - committed.keys():
        yield f"{key} is new"
    for key in committed.keys() - fresh.keys():
        yield f"{key} is gone"
    for key in [key for key in committed if key in fresh]:
        new, old = fresh[key], committed[key]
        for field in sorted((new.keys() | old.keys()) - {"outputs"}):
            if new.get(field) != old.get(field):
                yield f"{key} {field}: {new.get(field)!r} now, {old.get(field)!r} committed"
        if new["outputs"].keys() != old["outputs"].keys():
            yield f"{key} outputs: {sorted(new['outputs'])} now, {sorted(old['outputs'])} committed"
            continue
        for name, value in old["outputs"].items():
            rtol, atol = (FLOAT32_RTOL, FLOAT32_ATOL) if name in old["float32"] else (RTOL, ATOL)
            now, then = np.array(new["outputs"][name]), np.array(value)
            if now.shape != then.shape or not np.allclose(now, then, rtol=rtol, atol=atol):
                gap = np.abs(now - then).max() if now.shape == then.shape else f"shapes {now.shape} and {then.shape}"
                yield f"{key} {name}: differs by {gap}"


def main(folder):
    lines, counted = [], 0
    for library in LIBRARIES:
        fresh, committed = load(library, folder), load(library)
        lines += [f"{library}: {line}" for line in differences(fresh, committed)]
        counted += len(committed["entries"])
    defaults = [json.loads((pathlib.Path(place) / "defaults.json").read_text()) for place in (folder, GOLDEN)]
    if defaults[0] != defaults[1]:
        lines.append("defaults.json differs: compare the two files")
    for line in lines:
        print(line)
    if lines:
        raise SystemExit(
            f"{len(lines)} differences; if the change is wanted, copy {folder} to parity/golden and say why"
        )
    print(f"{counted} golden values of {', '.join(LIBRARIES)} are as committed")


if __name__ == "__main__":
    main(sys.argv[1])
