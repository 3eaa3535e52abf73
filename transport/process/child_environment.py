"""The environment of child processes: what they need of the daemon's, and no secret of it."""

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

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
        "TRANSFORMERS_CACHE",
        # Compilers of Triton and torch.compile, and what they look for.
        "CC",
        "CXX",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "LDFLAGS",
        "CFLAGS",
        "CXXFLAGS",
        "MAX_JOBS",
        "CONDA_PREFIX",
        "CONDA_DEFAULT_ENV",
        "GPU_DEVICE_ORDINAL",
        "CURL_CA_BUNDLE",
        "REQUESTS_CA_BUNDLE",
        "NO_PROXY",
        "no_proxy",
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
    "ROCM_",
    "ROCBLAS_",
    "HIPBLASLT_",
    "MIOPEN_",
    "RCCL_",
    "AMD_",
    "AMDGPU_",
    "UCX_",
    "FI_",
    "IBV_",
    "MLX5_",
    "INDUCTOR_",
    "KINETO_",
    "GRPC_",
    "FAKETIME",
    "COVERAGE_",
]
"""Prefixes of libraries' settings."""
PROXIES = frozenset(["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"])
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""Part of a name whose value is a secret, whatever library reads it."""


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that a child inherits, and `more`. Keys of an archive, tokens, passwords of proxies and options of the
    daemon are left out."""
    passed = {name: value for name, value in os.environ.items() if _passes(name, value)}
    return {**passed, **(more or {})}


def _passes(name: str, value: str) -> bool:
    if SECRET.search(name):
        return False
    return name in NAMES or name.startswith(tuple(PREFIXES)) or (name in PROXIES and not _has_user(value))


def _has_user(url: str) -> bool:
    """Return whether a proxy's URL has a user or password, or cannot be read."""
    try:
        return "@" in urlsplit(url if "//" in url else f"//{url}").netloc
    except ValueError:
        return True
