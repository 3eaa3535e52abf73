"""The environment of child processes: what they need of the daemon's, and no secret of it."""

import os
from collections.abc import Mapping

__all__ = ["child_environment"]

NAMES = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TMP",
        "TEMP",
        "PWD",
        "TERM",
        "COLUMNS",
        "NO_COLOR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "DILOCOX_HOME",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ]
)
PREFIXES = [
    "LC_",
    "XDG_",
    "PYTHON",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "MALLOC_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "GRPC_",
    "FAKETIME",
    "COVERAGE_",
]
"""Of libraries' settings, which hold no secrets."""


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that a child inherits, and `more`. Keys of an archive, tokens and options of the daemon stay here."""
    passed = {name: value for name, value in os.environ.items() if name in NAMES or name.startswith(tuple(PREFIXES))}
    return {**passed, **(more or {})}
