"""Tests of the deployment files: access to secrets, and the cost of the health probe."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def mounts(service: str) -> dict[str, tuple[str, bool]]:
    """Return volume -> (its mount path, whether it is writable)."""
    parts = [text.split(":") for text in SERVICES[service]["volumes"]]
    return {part[0]: (part[1], part[2:] != ["ro"]) for part in parts}


def test_no_node_mounts_a_volume_in_which_the_coordinator_writes_keys():
    nodes = sorted(set(SERVICES) - {"coordinator"})
    assert len(nodes) == 3
    own = mounts("coordinator")
    for node in nodes:
        shared = set(own) & set(mounts(node))
        assert shared == {"link"}
        assert not mounts(node)["link"][1], "a node could put another link there"
        assert [name for name, (place, _) in mounts(node).items() if place == "/data"] == [node], "a home of its own"
    script = SERVICES["coordinator"]["command"][0]
    assert script.splitlines()[0] == "cd /data"  # run.toml, run.key and, as $DILOCOX_HOME is /data, the coordinator's identity
    assert script.count(own["link"][0]) == script.count(f"--link-file {own['link'][0]}/link") == 1
    assert "DILOCOX_HOME=/data" in (ROOT / "Dockerfile").read_text()
    assert not any("environment" in service for service in SERVICES.values())


def published(ports: list[str]) -> dict[str, str]:
    """Return host's port -> container's, all on loopback."""
    assert all(port.startswith("127.0.0.1:") for port in ports), "the API has no password for reading"
    return dict(port.split(":")[1:] for port in ports)


def test_every_page_of_compose_is_on_the_host_s_loopback_alone():
    found = [published(service["ports"]) for service in SERVICES.values()]
    assert [set(ports.values()) for ports in found] == [{"7402"}] * 4
    assert sorted(port for ports in found for port in ports) == ["7402", "7403", "7404", "7405"]
    assert all("--api 0.0.0.0:7402" in service["command"][0] for service in SERVICES.values())


def test_readme_image_and_compose_agree_on_ports_and_devices():
    readme, image = (ROOT / "README.md").read_text(), (ROOT / "Dockerfile").read_text()
    (line,) = re.findall(r"^docker run .*\\\n.*$", readme, re.MULTILINE)
    (same,) = re.findall(r"^#   docker run (.*) \\\n#       (.*)$", image, re.MULTILINE)
    assert (
        re.findall(r"-p (\S+)", line) == re.findall(r"-p (\S+)", same[0]) == ["7410:7410", "7411:7411", "127.0.0.1:7412:7412"]
    )
    assert all("--api 0.0.0.0:7412" in text for text in (line, same[1]))
    assert "EXPOSE 7400 7401 7402 7410 7411 7412" in image
    assert "docker exec mine dilocox status" in readme
    assert "--name mine" in line
    assert "--gpus all" in readme


def test_docker_test_says_why_it_is_skipped(tmp_path: Path):
    script = str(ROOT / "deploy" / "docker_test.py")
    ran = subprocess.run([sys.executable, script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "docker-test: skipped: there is no docker on this machine\n")
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\nexit 1\n")
    engine.chmod(0o755)
    ran = subprocess.run([sys.executable, script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (
        0,
        "docker-test: skipped: no container engine answers on this machine (docker info)\n",
    )


def names_and_versions(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\\n]+)", text, re.MULTILINE)
    return {re.sub(r"[._-]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("name", ["cpu", "cuda", "ci-cpu", "ci-cuda"])
def test_what_images_and_ci_install_is_known_by_hash_and_of_the_versions_that_were_tested(name: str):
    text = (ROOT / "deploy" / f"{name}.lock").read_text()
    locked, tested = names_and_versions(text), names_and_versions((ROOT / "constraints.txt").read_text())
    entries = re.split(r"\n(?=[A-Za-z])", text.partition("\n")[2])
    assert len(entries) == len(locked) > 50
    assert all("--hash=sha256:" in entry for entry in entries)
    assert {name: locked[name] for name in tested.keys() & locked.keys()} == {n: v for n, v in tested.items() if n in locked}
    assert any(package.startswith("nvidia-") for package in locked) == name.endswith("cuda")
    assert ("pytest" in locked) == name.startswith("ci")
    assert "torch" in locked


def test_images_and_ci_install_by_hash():
    assert "--require-hashes -r packages.lock" in (ROOT / "Dockerfile").read_text()
    assert "--require-hashes -r $(LOCK)" in (ROOT / "Makefile").read_text()
    assert "LOCK=deploy/ci-cpu.lock" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("plugin", re.findall(r" \./plugins/(\w+)", (ROOT / "Dockerfile").read_text()))
def test_plugin_of_the_image_is_copied_and_what_it_needs_is_locked(plugin: str):
    assert f"!plugins/{plugin}\n" in (ROOT / ".dockerignore").read_text()
    project = tomllib.loads((ROOT / "plugins" / plugin / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=\[]", each)[0] for each in project["dependencies"]} - {"dilocox"}
    for name in ("cpu", "cuda", "ci-cpu", "ci-cuda"):
        assert needed <= names_and_versions((ROOT / "deploy" / f"{name}.lock").read_text()).keys(), name


def test_everything_comes_back_after_a_reboot_and_no_node_loops_hot():
    assert {service["restart"] for service in SERVICES.values()} == {"unless-stopped"}
    assert all("sleep 60" in SERVICES[name]["command"][0] for name in SERVICES if name != "coordinator")


def test_the_health_probe_is_light_and_the_one_that_the_image_runs(tmp_path: Path):
    probe = "dilocox.transport.process.health"
    assert f'"-m", "{probe}"' in (ROOT / "Dockerfile").read_text()
    script = f"import sys, {probe}; sys.exit(any(name in sys.modules for name in ('typer', 'grpc', 'cryptography', 'numpy')))"
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0
    nobody = subprocess.run([sys.executable, "-P", "-m", probe], env={"DILOCOX_HOME": str(tmp_path)}, capture_output=True)
    assert nobody.returncode == 1
    assert b"no daemon" in nobody.stderr
