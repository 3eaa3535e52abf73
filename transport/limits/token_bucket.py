"""A rate with a burst, in units that the caller chooses."""

__all__ = ["TokenBucket"]


class TokenBucket:
    """Tokens refill at a rate up to a burst; an action takes one, or is refused."""

    __slots__ = ("_burst", "_filled_at", "_rate", "tokens")

    def __init__(self, rate: float, burst: float, now: float, tokens: float | None = None) -> None:
        """`rate`: tokens a second; `burst`: the most that collect; `tokens`: at the start, None: `burst`."""
        self._rate, self._burst, self._filled_at = rate, burst, now
        self.tokens = burst if tokens is None else tokens

    def take(self, now: float) -> bool:
        """Take one token, and return whether there was one."""
        return self.borrow(now, 0) is not None

    def borrow(self, now: float, most: float) -> float | None:
        """Take a token that may become available later, and return the seconds until then; None if that is more than
        `most` tokens ahead."""
        self.tokens = min(self._burst, self.tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self.tokens - 1 < -most:
            return None
        self.tokens -= 1
        return max(0.0, -self.tokens / self._rate)
