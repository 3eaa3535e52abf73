"""`dilocox init --like`: the settings of a run file for machines that a text names."""

import json
import re
from collections.abc import Mapping
from typing import Any

from dilocox.cli.common import fail
from dilocox.cli.exit_codes import Exit
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.limits.rate_limits import bits_per_second

__all__ = ["fitted", "with_settings"]

LIKE = re.compile(r"(?:(?P<boxes>\d{1,3})x)?(?P<devices>\d{1,3})x(?P<device>[A-Za-z0-9.-]+) *@ *(?P<bandwidth>\S+)")
EXAMPLE = '"8xh100 @1gbit", or "2x8xa100-40 @200mbit" for clusters of two hosts'


def fitted(text: str, clusters: int, like: str) -> tuple[str, list[str]]:
    """Return a run file's text with the settings for `clusters` clusters of such machines, and sentences about them."""
    from dilocox.node.planning.fitting import fit
    from dilocox.node.planning.plan import Setting
    from dilocox.node.planning.step_model import KINDS, Kind

    found = LIKE.fullmatch(like.strip())
    kind = Kind.named(found["device"]) if found else None
    if found is None or kind is None or not int(found["devices"]) or found["boxes"] == "0":
        fail(f"--like {like}", Exit.USAGE, f"such as {EXAMPLE}; devices are {', '.join(KINDS)}, or a peak in TFLOP/s")
    machines = Setting(clusters, int(found["boxes"] or 1), int(found["devices"]), found["device"], found["bandwidth"])
    line = bits_per_second(found["bandwidth"], "--like")
    result = fit(Manifest.from_toml(text), machines, kind, line)
    for lack in result.cluster.choice.lacking[:1]:
        fail(lack.sentence(f"a {found['device']}"), Exit.USAGE, "name more devices, others, or a smaller --preset")
    made_for = (
        f"{clusters} clusters, {machines.boxes} x {machines.devices} x {machines.device} each, lines of {machines.bandwidth}"
    )
    text = re.sub(
        r"^# `dilocox plan` takes for it: .*\n", f"# Fitted by `dilocox init --like`: {made_for}.\n", text, flags=re.M
    )
    text = re.sub(r"\A(#[^\n]*) in \w+ stages", r"\1", text)
    advice = result.advice
    hides = "the link hides the exchange" if advice.hides else "no rounds hide the exchange on this link"
    method = advice.estimate.method
    says = f"{method.name}, H = {method.inner_steps:,}: {hides}; {advice.estimate.tokens_per_second:,.0f} tokens/s"
    return with_settings(text, result.settings), [*result.cluster.choice.sentences(), says]


def with_settings(text: str, settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a run file's text with these values, by section. [compression] is replaced as a whole; elsewhere comments stay."""
    for section, values in settings.items():
        if section == "compression":
            lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            whole = re.compile(r"^\[compression\]\n.*?(?=^\[)", re.MULTILINE | re.DOTALL)
            text = whole.sub(f"[compression]\n{lines}\n", text, count=1)
            continue
        for key, value in values.items():
            line = f"{key} = {json.dumps(value)}"
            pattern = rf"(^\[{section}\][^\n]*\n(?:(?!\[)[^\n]*\n)*?){key} = [^#\n]*?(?=\s*(?:#[^\n]*)?\n)"
            text, count = re.subn(pattern, rf"\g<1>{line}", text, count=1, flags=re.MULTILINE)
            if not count:
                text = re.sub(rf"(^\[{section}\][^\n]*\n)", rf"\g<1>{line}\n", text, count=1, flags=re.MULTILINE)
    return text
