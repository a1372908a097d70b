"""The short table of `gpu_check.py`: what agrees, how fast it is, what was skipped, what failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_LINES = 40
WIDTH = 110
MOST_SKIPPED = 6
LEAST_FAILED = 4  # lines, whatever else there is to say
_INDENT = 9
_CEILINGS = {"GB/s": "copy", "TFLOP/s": "product"}

Result = Mapping[str, Any]


def is_good(result: Result) -> bool:
    return result["error"] is None and all(check["ok"] for check in result["checks"])


def table(machine: Mapping[str, Any], results: Sequence[Result], file: str) -> list[str]:
    """At most `MOST_LINES` lines of at most `WIDTH` characters; ``file`` has the rest."""
    lines = [_cut(_machine(machine, results))]
    lines += _pack("ok", [_agreement(r) for r in results if is_good(r) and not _is_skipped(r)])
    lines += _speeds(results)
    lines += _skips(results, file)
    failed = [line for result in results if not is_good(result) for line in _failure(result)]
    room = max(MOST_LINES - len(lines), LEAST_FAILED)
    if len(failed) > room:
        failed = [*failed[: room - 1], f"{'':{_INDENT}}more is in {file}"]
    return [*lines[: MOST_LINES - len(failed)], *failed]


def _machine(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in machine["versions"])
    name = machine.get("name") or machine["device"]
    return f"{name}, {versions}: {len(results)} parts in {machine['seconds']:.0f} s"


def _is_skipped(result: Result) -> bool:
    return bool(result["skips"]) and not result["checks"] and not result["speeds"]


def _agreement(result: Result) -> str:
    checks = result["checks"]
    agreed = f"{sum(check['ok'] for check in checks)} of {len(checks)} agree, " if checks else ""
    return f"{result['part']} {agreed}{result['seconds']:.0f}/{result['limit_s']:.0f} s"


def _speeds(results: Sequence[Result]) -> list[str]:
    """A group is what stands before a colon in labels, else the part."""
    ceilings = {
        speed["label"]: speed["rate"]
        for result in results
        if result["part"] == "ceilings"
        for speed in result["speeds"]
    }
    groups: dict[str, list[str]] = {}
    for result in results:
        for speed in result["speeds"]:
            group, colon, label = speed["label"].partition(": ")
            if not colon:
                group, label = result["part"], speed["label"]
            groups.setdefault(group, []).append(_speed(label, speed, ceilings))
    return [line for group, cells in groups.items() for line in _pack(group, cells)]


def _speed(label: str, speed: Mapping[str, Any], ceilings: Mapping[str, float]) -> str:
    rate, unit = speed["rate"], speed["unit"]
    shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    ceiling = ceilings.get(_CEILINGS.get(unit, ""))
    share = f" ({rate / ceiling:.0%})" if ceiling and label not in ceilings else ""
    return f"{label} {shown} {unit}{share}"


def _skips(results: Sequence[Result], file: str) -> list[str]:
    """Each reason once, behind a part that gave it."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        for skip in result["skips"]:
            reasons.setdefault(skip["why"], []).append(result["part"])
    lines = []
    for why, parts in list(reasons.items())[:MOST_SKIPPED]:
        more = f" +{len(parts) - 1}" if len(parts) > 1 else ""
        lines.append(_cut(f"{'skipped':{_INDENT}}{parts[0]}{more}: {why}"))
    if len(reasons) > MOST_SKIPPED:
        lines.append(f"{'':{_INDENT}}{len(reasons) - MOST_SKIPPED} more reasons are in {file}")
    return lines


def _failure(result: Result) -> Iterable[str]:
    yield f"{'FAILED':{_INDENT}}{_agreement(result)}"
    if result["error"] is not None:
        yield _cut(f"{'':{_INDENT}}{result['error'].strip().splitlines()[-1]}")
    for check in result["checks"]:
        if not check["ok"]:
            yield _cut(f"{'':{_INDENT}}{check['label']}: {check['error']}")


def _pack(name: str, cells: Sequence[str]) -> list[str]:
    """As many cells a line as fit, behind the name."""
    lines: list[str] = []
    for cell in cells:
        if lines and len(lines[-1]) + len(cell) + 3 <= WIDTH:
            lines[-1] += f" · {cell}"
        else:
            lines.append(f"{'' if lines else name:{_INDENT - 1}} {cell}")
    return [_cut(line) for line in lines]


def _cut(line: str) -> str:
    line = " ".join(line.splitlines())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
