"""The manifest and the script of docs/scaling.md have the form that clusters want."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

from batchradix.cli.main import app

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"


def block(language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.+?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def options_of(command: str) -> set[str]:
    return {word for word in shlex.split(command) if word.startswith("--")}


def known_options() -> set[str]:
    group: Any = typer.main.get_command(app)
    return {spelling for parameter in group.commands["run"].params for spelling in parameter.opts}


def test_the_manifest_is_a_rayjob_whose_workers_have_what_the_command_needs() -> None:
    yaml = pytest.importorskip("yaml")
    job: dict[str, Any] = yaml.safe_load(block("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = job["spec"]
    assert spec.keys() == {
        "entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec",
    }  # fmt: skip
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["batchradix", "run"]
    assert options_of(spec["entrypoint"]) > {"--ray-address", "--workers"}
    assert options_of(spec["entrypoint"]) <= known_options()
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() == {"headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    [group] = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        pod = template["spec"]
        [container] = pod["containers"]
        mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounted.keys() == {one["name"] for one in pod["volumes"]}
        assert all(word.startswith(mounted["data"]) for word in words if word.startswith("/")), (
            "a file of the command is on no volume"
        )
        assert container["resources"]["requests"] == container["resources"]["limits"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"


def test_the_slurm_script_is_one_that_bash_reads() -> None:
    script = block("bash")
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^#SBATCH --([a-z-]+)=\S+$", script, re.MULTILINE)
    command = re.search(r"batchradix run .+", script.replace("\\\n", " "))
    assert command is not None
    assert options_of(command[0]) <= known_options()
