"""Generate this package from proto/dilocox/v1: `python -m dilocox.protocol.pb.generate [DIR]`."""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"


def generate(target: Path) -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their types into `target`, flat, importable as `dilocox.protocol.pb`."""
    from grpc_tools import protoc

    sources = sorted((PROTO / "dilocox" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{PROTO}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        arguments += [
            f"--plugin={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
            f"--mypy_grpc_out=only_async,quiet:{scratch}",
        ]
        if protoc.main([*arguments, *map(str, sources)]):
            raise SystemExit("protoc failed")
        for source in sorted((Path(scratch) / "dilocox" / "v1").iterdir()):
            text = re.sub(r"from dilocox\.v1 import", "from dilocox.protocol.pb import", source.read_text())
            text = re.sub(r"import dilocox\.v1\.(\w+) as", r"import dilocox.protocol.pb.\1 as", text)
            (target / source.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
