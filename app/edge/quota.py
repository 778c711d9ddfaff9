"""How much a caller may ask for: token buckets, and how many requests at once."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from app.edge.settings import RateLimits
from app.errors import RateLimitError, RequestError

Clock = Callable[[], float]


class TokenBucket:
    """Fills evenly up to a minute's worth; what is taken may have to be paid back. Any thread may call it.

    Args:
        per_minute: how much it holds, and how much flows in within a minute. It begins full.
    """

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()
        self._lock = threading.Lock()

    def take(self, amount: float) -> float:
        """Take it if it is there. Returns 0.0, or for how many seconds to wait when it is not."""
        with self._lock:
            missing = amount - self._fill()
            if missing > 0:
                return missing * 60 / self.per_minute
            self._level -= amount
            return 0.0

    def owe(self, amount: float) -> None:
        """Take it whether it is there or not; a negative amount is given back."""
        with self._lock:
            self._level = min(self._fill() - amount, self.per_minute)

    def resize(self, per_minute: int) -> None:
        """From now on; the share that was left stays the same."""
        with self._lock:
            self._level = self._fill() * per_minute / self.per_minute
            self.per_minute = per_minute

    @property
    def level(self) -> float:
        """What is there now; negative while there is something to pay back."""
        with self._lock:
            return self._fill()

    def _fill(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_at) * self.per_minute / 60)
        self._filled_at = now
        return self._level


class Quota:
    """What one caller may still ask for. It is taken at the start of a request and given back, where that applies, at
    its end."""

    def __init__(self, limits: RateLimits, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._num_running = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.limits = limits
        self.limit(limits)

    def limit(self, limits: RateLimits) -> None:
        """Change the limits; requests that run stay counted."""
        self.limits = limits
        self._requests = self._resized(self._requests, limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, limits.tokens_per_minute)

    def begin(self) -> None:
        """A request begins; `end` must follow.

        Raises:
            RateLimitError: not now.
        """
        most = self.limits.concurrent_requests
        if most is not None and self._num_running >= most:
            raise RateLimitError(
                f"{most} of your requests are being answered, as many as may be; wait for one to end", 1.0
            )
        if self._tokens is not None and (level := self._tokens.level) <= 0:
            raise RateLimitError(
                f"you may use {self._tokens.per_minute} tokens a minute, and have used them; wait, or ask for less",
                (1 - level) * 60 / self._tokens.per_minute,
            )
        if self._requests is not None and (wait_s := self._requests.take(1)) > 0:
            raise RateLimitError(f"you may send {self._requests.per_minute} requests a minute; wait", wait_s)
        self._num_running += 1

    def end(self) -> None:
        """The request that began has ended."""
        assert self._num_running > 0
        self._num_running -= 1

    def take_prompt(self, num_tokens: int) -> None:
        """A prompt is going to be computed.

        Raises:
            RateLimitError: it is more than is left now.
            RequestError: it is more than will ever be left.
        """
        if self._tokens is None:
            return
        if num_tokens > self._tokens.per_minute:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and you may use {self._tokens.per_minute} a minute: shorten it"
            )
        if (wait_s := self._tokens.take(num_tokens)) > 0:
            raise RateLimitError(
                f"you may use {self._tokens.per_minute} tokens a minute, and fewer are left than the {num_tokens} of "
                "this prompt; wait, or shorten it",
                wait_s,
            )

    def owe_tokens(self, num_tokens: int) -> None:
        """So many were generated. A negative number: a prompt was not computed after all."""
        if self._tokens is not None:
            self._tokens.owe(num_tokens)

    @property
    def is_fresh(self) -> bool:
        """Whether a new quota would be the same."""
        buckets = (self._requests, self._tokens)
        return not self._num_running and all(b is None or b.level >= b.per_minute for b in buckets)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-…`: what is left, and how long until all is there again."""
        found: list[tuple[bytes, bytes]] = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                level = bucket.level
                full_in_s = (bucket.per_minute - level) * 60 / bucket.per_minute
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(level, 0.0)),  # a debt is nothing left to clients
                    (b"x-ratelimit-reset-" + name, b"%.3fs" % full_in_s),
                ]
        return found

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket


class AddressQuotas:
    """A quota for each client address, of bounded number.

    An address is forgotten only when its quota is as good as new, so nobody gains by making the server forget. When
    there is no such one, further addresses share one quota.
    """

    def __init__(self, limits: RateLimits, max_addresses: int, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        self._max_addresses = max_addresses
        self._clock = clock
        self._quotas: OrderedDict[str, Quota] = OrderedDict()  # the one that has called last is last
        self._shared = Quota(limits, clock)

    def __len__(self) -> int:
        return len(self._quotas)

    def of(self, address: str) -> Quota:
        """IPv6 addresses count by network: a client has 2⁶⁴ of them."""
        if ":" in address:
            address = _network_of(address)
        quota = self._quotas.get(address)
        if quota is not None:
            self._quotas.move_to_end(address)
            return quota
        if len(self._quotas) >= self._max_addresses:
            oldest = next(iter(self._quotas))
            if not self._quotas[oldest].is_fresh:
                return self._shared
            del self._quotas[oldest]
        quota = self._quotas[address] = Quota(self._limits, self._clock)
        return quota


def _network_of(address: str) -> str:
    """The /64 of an IPv6 address; IPv4 addresses written as IPv6 ones, and what is none, stay themselves."""
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:  # proxies write what they like
        return address[:64]
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
