"""Every file in configs/ is well-formed, refers to what exists, and says that it has not been tried on a cluster if it has not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from tmrun.cli import main
from tmrun.core import ledger
from tmrun.core.keys import Keys
from tmrun.core.membership import Job
from tmrun.core.model import Host

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
KUBERNETES = [d for path in sorted((CONFIGS / "kubernetes").glob("*.yaml")) for d in yaml.safe_load_all(path.read_text())]
RULES: list[dict[str, Any]] = yaml.safe_load((CONFIGS / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana" / "tmrun.json").read_text())


@pytest.mark.parametrize("resource", KUBERNETES, ids=lambda r: f"{r['kind']} {r['metadata']['name']}")
def test_manifests_follow_the_schema(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, "1.30", strict=True)


def _flags(words: list[str]) -> list[str]:
    return [w for w in words if w.startswith("--")]


def _parse(verb: str, words: list[str]) -> None:
    command = main.cli.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    command.make_context(verb, words)


def test_the_pods_commands_parse_and_drain_before_they_are_killed() -> None:
    pod = next(r for r in KUBERNETES if r["kind"] == "Job")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _parse(container["command"][1], container["args"])
    drain = container["lifecycle"]["preStop"]["exec"]["command"]
    _parse(drain[1], drain[2:])
    assert "--self" in drain and pod["terminationGracePeriodSeconds"] > 600
    assert pod["restartPolicy"] == "Never"


def test_etcd_listens_with_certificates_only() -> None:
    (container,) = next(r for r in KUBERNETES if r["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"]
    listening = [a for a in container["args"] if a.startswith("--listen")]
    assert all("https://" in a or "127.0.0.1" in a for a in listening)
    assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(container["args"])


@pytest.mark.parametrize("path", sorted(p for p in CONFIGS.rglob("*") if p.suffix in (".sh", ".sbatch")), ids=lambda p: p.name)
def test_scripts_pass_shellcheck_and_their_flags_exist(path: Path) -> None:
    done = subprocess.run([Path(sys.executable).parent / "shellcheck", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = path.read_text()
    for verb, rest in re.findall(r"tmrun (run|drain) ((?:[^\n]|\\\n)*?)(?:\n\n|\n$|\$\{?@)", text.replace("\\\n", " ")):
        command = main.cli.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        known = {o for p in command.params for o in p.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, (path.name, verb)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_unit_is_one(tmp_path: Path) -> None:
    path = CONFIGS / "systemd" / "tmrun@.service"
    argv = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "tmrun" in line]
    assert (done.returncode, ours) == (0, [])


def _metrics() -> set[str]:
    job = Job(Keys("job"))
    found = ledger.of_node(ledger.Ledger(), job, Host("a"), 0.0, store_answers=True) + ledger.of_job(job, 0.0)
    return {f.name + ("_total" if f.kind == "counter" else "") for f in found}


def _queries() -> list[str]:
    panels = [t["expr"].replace("$job", "x") for p in DASHBOARD["panels"] for t in p["targets"]]
    marks = [a["expr"].replace("$job", "x") for a in DASHBOARD["annotations"]["list"]]
    return [*(r["expr"] for r in RULES), *panels, *marks]


@pytest.mark.parametrize("query", sorted(set(_queries())))
def test_queries_parse_and_ask_for_metrics_that_there_are(query: str) -> None:
    promql_parser.parse(query)
    assert set(re.findall(r"\btmrun_\w+", query)) <= _metrics()


def test_every_alert_says_what_to_do_with_commands_that_exist() -> None:
    for rule in RULES:
        action = rule["annotations"]["action"]
        assert rule["labels"]["severity"] in ("warning", "critical") and action
        for verb in re.findall(r"`tmrun ([a-z-]+)", action):
            assert verb in main._VERBS


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_what_has_not_been_tried_says_so() -> None:
    for path in CONFIGS.rglob("*"):
        if path.parent.name in ("slurm", "kubernetes", "systemd", "ssh"):
            assert "not yet run on a real" in " ".join(path.read_text().replace("#", " ").split()), path
