"""Generate code from proto/: `python -m dilocox.protocol.pb.generate [DIR]`. The package gets the messages
between peers, and the plugin for 0G those that 0G publishes. With DIR all go there."""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ZEROG = ROOT / "plugins" / "zerog"
PACKAGES = (
    (ROOT / "proto", "dilocox/v1", "dilocox.protocol.pb", ROOT / "protocol" / "pb"),
    (ZEROG / "proto", "zerog", "dilocox_zerog.pb", ZEROG / "dilocox_zerog" / "pb"),
)
"""A folder of .proto files, the folder in it, the package and the folder that the code goes to."""


def generate(target: Path | None = None) -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their types, flat; into `target`, or each where it belongs."""
    for proto, source, package, folder in PACKAGES:
        _generate(proto, source, package, target or folder)


def _generate(proto: Path, source: str, package: str, target: Path) -> None:
    from grpc_tools import protoc

    sources = sorted((proto / source).glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{proto}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        arguments += [
            f"--plugin={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
            f"--mypy_grpc_out=only_async,quiet:{scratch}",
        ]
        if protoc.main([*arguments, *map(str, sources)]):
            raise SystemExit("protoc failed")
        inside = re.escape(source.replace("/", "."))
        for made in sorted((Path(scratch) / source).iterdir()):
            text = re.sub(rf"from {inside} import", f"from {package} import", made.read_text())
            text = re.sub(rf"import {inside}\.(\w+) as", rf"import {package}.\1 as", text)
            (target / made.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
