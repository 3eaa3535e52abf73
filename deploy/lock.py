"""`make lock`: hashes of everything that images and CI install, from the versions in constraints.txt.

`cpu.lock` and `cuda.lock` are for images; the two for CI add the tests' packages. PyPI has torch's CUDA build.
PyTorch's index has the CPU build, with only one usable hash: that of the wheel which pip finds here, for this Python
and this processor.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

__all__ = ["main"]

DEPLOY = Path(__file__).parent
ROOT = DEPLOY.parent
ONLY_CUDA = re.compile(r"(nvidia-|cuda-|triton)")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def plugin_requirements(name: str, *extras: str) -> list[str]:
    """Return the requirements of a plugin that are not of this project."""
    project = tomllib.loads((ROOT / "plugins" / name / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    return [each for each in wanted if not each.startswith("dilocox")]


def compiled(requirements: Sequence[str], *options: str) -> list[str]:
    """Return the project's requirements and these, each with its hashes, by name: for every Python that we support."""
    quiet = ["--no-annotate", "--no-header", "--quiet"]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as more:
        more.write("\n".join(requirements))
        more.flush()
        arguments = ["pyproject.toml", more.name, *options, "-c", "constraints.txt", "--generate-hashes", "--universal", *quiet]
        command = [sys.executable, "-m", "uv", "pip", "compile", *arguments]
        found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [entry.rstrip() for entry in re.split(r"\n(?=\S)", found.stdout.strip())]


def cpu_wheel_hashes(torch: str) -> list[str]:
    """Return the hashes of torch's CPU build, if pip finds one."""
    version = torch.split()[0]
    with tempfile.TemporaryDirectory() as folder:
        for wanted in (f"{version}+cpu", version):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*pip, "--extra-index-url", CPU_INDEX, wanted], capture_output=True)
            if wheels := sorted(Path(folder).glob("torch-*+cpu-*.whl")):
                return [sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    return []


def main() -> None:
    of_image = plugin_requirements("tee")
    # The gate compiles and runs the contract of settlement, and makes erasure shards.
    of_tests = [*of_image, *plugin_requirements("settlement", "test"), *plugin_requirements("availability")]
    everything = compiled(of_tests, "--extra=dev")
    image = compiled(of_image)
    torch = next(entry for entry in image if entry.startswith("torch=="))
    hashes = [f"--hash=sha256:{digest}" for digest in cpu_wheel_hashes(torch)]
    with_cpu = " \\\n    ".join([torch.split()[0], *hashes])

    def without_cuda(entries: list[str]) -> list[str]:
        return [with_cpu if entry == torch else entry for entry in entries if not ONLY_CUDA.match(entry)]

    for name, entries in (
        ("cuda", image),
        ("cpu", without_cuda(image)),
        ("ci-cpu", without_cuda(everything)),
        ("ci-cuda", everything),
    ):
        text = "\n".join(["# Written by `make lock`.", *entries])
        (DEPLOY / f"{name}.lock").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
