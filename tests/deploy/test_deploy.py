"""Deployment files: manifests against the published schemas, commands in them against weft's options."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main as front

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="bundles the schemas of Kubernetes")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
CLAIMS = {
    "compose.yaml": "NEVER RUN",
    "weft.service": "NEVER STARTED",
    "leaderworkerset.yaml": "NEVER APPLIED",
}


def manifests() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text(encoding="utf-8")))


def vendored(name: str) -> Any:
    pytest.importorskip("check_jsonschema", reason="bundles the schemas of Compose and of workflows")
    path = files("check_jsonschema").joinpath(f"builtin_schemas/vendor/{name}.json")
    return json.loads(path.read_text(encoding="utf-8"))


def parse(words: list[str]) -> dict[str, Any]:
    """Return the options of a command of weft; an unknown or malformed one raises."""
    return dict(front.load(words[0]).make_context(words[0], words[1:]).params)


def check_kubernetes(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def check_leader_worker_set(manifest: Any) -> None:
    jsonschema.validate(manifest, json.loads(Path(__file__).with_name("leaderworkerset.json").read_text()))
    for name in ("leaderTemplate", "workerTemplate"):
        template = manifest["spec"]["leaderWorkerTemplate"][name]
        metadata = {"name": "pod", **template["metadata"]}
        check_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def test_kubernetes_manifests_match_the_published_schemas() -> None:
    first, *others = manifests()
    check_leader_worker_set(first)
    for manifest in others:
        check_kubernetes(manifest)
    assert [manifest["kind"] for manifest in others] == ["Service", "NetworkPolicy"]


def test_a_wrong_field_is_seen_at_every_level() -> None:
    first, service, policy = manifests()
    template = first["spec"]["leaderWorkerTemplate"]
    for level in (first["spec"], template, template["workerTemplate"]["spec"]["containers"][0]):
        level["replica"] = 1
        with pytest.raises(Exception, match="replica"):
            check_leader_worker_set(first)
        del level["replica"]
    for manifest in (service, policy):
        manifest["spec"]["ingres"] = []
        with pytest.raises(Exception, match="ingres"):
            check_kubernetes(manifest)


def test_pods_run_one_command_and_the_policy_and_the_service_select_them() -> None:
    first, service, policy = manifests()
    template = first["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    commands = [each["spec"]["containers"][0]["args"] for each in (leader, worker)]
    assert commands[0] == commands[1]
    options = parse(commands[0])
    assert (str(options["model"]), options["ranks"], options["host"]) == ("/model", 8, "0.0.0.0")
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    for each in (leader, worker):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    probes = leader["spec"]["containers"][0]
    assert [probes[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")] == [
        "/live",
        "/live",
        "/health",
    ]


def test_compose_file_matches_the_published_schema_and_starts_a_server() -> None:
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(content, vendored("compose-spec"))
    command = [word.replace("${RANKS:-8}", "8") for word in content["services"]["weft"]["command"]]
    assert parse(command)["ranks"] == 8


def test_unit_file_starts_a_server() -> None:
    text = (DEPLOY / "weft.service").read_text(encoding="utf-8")
    [line] = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")]
    assert parse(shlex.split(line)[1:])["port"] == 8000


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.name)
def test_workflows_match_the_published_schema(path: Path) -> None:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["on"] = content.pop(True)  # YAML 1.1 reads the key as a boolean
    jsonschema.validate(content, vendored("github-workflows"))


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""
WEFT = '#!/bin/bash\nprintf "%s\\0" "$SLURM_NODEID" "$@" >> "$RECORD"; printf "\\n" >> "$RECORD"\n'


@pytest.mark.parametrize(
    "name, args, verb",
    [
        ("serve", ["/models/wan"], "serve"),
        ("train", ["recipes/shapes.toml", "runs/first"], "train"),
        ("generate", ["/models/wan", "a loom at work", "loom.mp4"], "generate"),
    ],
)
def test_batch_files_run_the_same_command_on_every_node(
    name: str, args: list[str], verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, text in {"srun": SRUN, "weft": WEFT}.items():
        (tmp_path / command).write_text(text)
        (tmp_path / command).chmod(0o755)
    record = tmp_path / "record"
    path = DEPLOY / "slurm" / f"{name}.sbatch"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/user", "RECORD": str(record)}
    subprocess.run(["bash", str(path), *args], env=environment, check=True, timeout=60)
    calls = [line.split("\0")[:-1] for line in record.read_text().splitlines()]
    assert [call[0] for call in calls] == ["0", "1"]
    assert calls[0][1:] == calls[1][1:]
    assert calls[0][1] == verb
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[03-04]"}
    for variable, value in slurm.items():
        monkeypatch.setenv(variable, value)
    options = parse(calls[0][1:])
    assert options["ranks"] == 8
    if verb != "generate":
        assert (options["nodes"], options["node"], options["master"]) == (2, 1, "gpu[03-04]")
    refused = subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "1:" in refused.stderr


def test_every_file_says_that_it_was_never_applied() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert CLAIMS.get(path.name, "NEVER SUBMITTED") in path.read_text(encoding="utf-8"), path
