"""The container's health check: exit 0 while this machine's daemon answers. `python -m dilocox.cli.health`."""

import sys
import urllib.request

from dilocox.cli.common import API_SECONDS, known_homes
from dilocox.transport.data_directory import running_daemon


def main() -> None:
    for home in known_homes(None):
        if (facts := running_daemon(home)) is not None:
            with urllib.request.urlopen(facts["api"] + "/livez", timeout=API_SECONDS):
                return
    sys.exit("no daemon runs here")


if __name__ == "__main__":
    main()
