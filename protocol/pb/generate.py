"""Generate code from proto/: `python -m dilocox.protocol.pb.generate [DIR]`. Into this package what peers say to each other, into
around/zerog/pb what 0G publishes; with DIR all of it there."""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
PACKAGES = {
    "dilocox/v1": ("dilocox.protocol.pb", ROOT / "protocol" / "pb"),
    "zerog": ("dilocox.around.zerog.pb", ROOT / "around" / "zerog" / "pb"),
}
"""The package and folder that the files of a folder of proto/ go to."""


def generate(target: Path | None = None) -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their types, flat; into `target`, or each where it belongs."""
    for source, (package, folder) in PACKAGES.items():
        _generate(source, package, target or folder)


def _generate(source: str, package: str, target: Path) -> None:
    from grpc_tools import protoc

    sources = sorted((PROTO / source).glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{PROTO}", f"-I{files('grpc_tools') / '_proto'}"]
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
