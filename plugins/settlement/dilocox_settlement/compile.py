"""`python -m dilocox_settlement.compile`: settlement.json from settlement.vy, by the compiler that it names."""

import json
from pathlib import Path
from typing import Any

__all__ = ["ARTIFACT", "SOURCE", "compiled"]

SOURCE = Path(__file__).with_name("settlement.vy")
ARTIFACT = Path(__file__).with_name("settlement.json")


def compiled() -> dict[str, Any]:
    """Return ABI and bytecode. Raises ImportError if no compiler is installed."""
    from vyper import compile_code

    found = compile_code(SOURCE.read_text(), output_formats=["abi", "bytecode"])
    return {"abi": found["abi"], "bytecode": found["bytecode"]}


def main() -> None:
    ARTIFACT.write_text(json.dumps(compiled(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
