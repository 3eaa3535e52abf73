"""Separate wall clock of each member, by libfaketime: the kernel has only one, and a time namespace shifts only the other
clocks.

Its version 0.9.10 ends `time.sleep` with EINVAL; our daemons wait for events instead. Without the library (Debian: `apt
install faketime`) no clock is stepped, and the bench reports it.
"""

from pathlib import Path

__all__ = ["Clocks"]

LIBRARIES = "usr/lib/*/faketime/libfaketimeMT.so.1"


class Clocks:
    def __init__(self, folder: Path) -> None:
        """Store the folder of one file per member, which its processes read every second."""
        self._folder = folder
        self._library = next(Path("/").glob(LIBRARIES), None)

    @property
    def there(self) -> bool:
        return self._library is not None

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.clock"

    def prefix(self, name: str) -> tuple[str, ...]:
        """Return the prefix of a command that must read this member's wall clock. The monotonic clock does not change."""
        if self._library is None:
            return ()
        self.step(name, "+0")
        settings = {
            "LD_PRELOAD": self._library,
            "FAKETIME_TIMESTAMP_FILE": self._file(name),
            "FAKETIME_CACHE_DURATION": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
            "NO_FAKE_STAT": 1,
        }
        return ("env", *(f"{key}={value}" for key, value in settings.items()))

    def step(self, name: str, by: str) -> None:
        """Set the clock off the true time by signed seconds; "+0" sets it right again."""
        scratch = self._file(name).with_suffix(".new")
        scratch.write_text(by)
        scratch.replace(self._file(name))
