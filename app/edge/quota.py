"""How much a caller may ask for: requests and tokens in a minute, and how many requests at once."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from app.config.http import RateLimits
from app.edge.shares import IngressLimits, LeasedLimit
from app.errors import RateLimitError, RequestError

# Of the mean time that a caller's request runs: each new one counts so much.
_WEIGHT = 0.1
# Of names of addresses' limits.
_PREFIX = "address:"


class Quota:
    """What one caller may still ask for. It is taken at the start of a request and given back, where that applies, at
    its end. Levels are those of all ingresses together.

    Args:
        name: of the caller, the same in every ingress.
        shares: of this ingress; `None`: it shares nothing.
    """

    def __init__(self, limits: RateLimits, shares: IngressLimits | None = None, name: str = "") -> None:
        self._shares = shares or IngressLimits()
        self._name = name
        self._num_running = 0
        self._changed_at = self._shares.clock()
        self._ran_s = 0.0  # all that run together, since one has ended
        self._mean_s = 1.0  # that a request runs
        self._running: LeasedLimit | None = None
        self._requests: LeasedLimit | None = None
        self._tokens: LeasedLimit | None = None
        self.limit(limits)

    def limit(self, limits: RateLimits) -> None:
        """Change the limits; requests that run stay counted."""
        self.limits = limits
        self._running = self._resized(self._running, "running", limits.concurrent_requests, refills=False)
        self._requests = self._resized(self._requests, "requests", limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, "tokens", limits.tokens_per_minute)

    def begin(self) -> None:
        """A request begins; `end` must follow.

        Raises:
            RateLimitError: not now.
        """
        if self._tokens is not None and (level := self._tokens.level) <= 0:
            raise RateLimitError(
                f"you may use {self._tokens.most} tokens a minute, and have used them; wait, or ask for less",
                (1 - level) * 60 / self._tokens.most,
            )
        running = self._running
        if running is not None and running.try_take(1) > 0:
            raise RateLimitError(
                f"{running.most} of your requests are being answered, as many as may be; wait for one to end",
                self._mean_s / running.most,
            )
        if self._requests is not None and (wait_s := self._requests.try_take(1)) > 0:
            if running is not None:
                running.charge_usage(-1)
            raise RateLimitError(f"you may send {self._requests.most} requests a minute; wait", wait_s)
        self._count(1)

    def end(self) -> None:
        """The request that began has ended."""
        assert self._num_running > 0
        self._count(-1)
        self._mean_s += _WEIGHT * (self._ran_s - self._mean_s)  # Little: all time, by the number of those that end
        self._ran_s = 0.0
        if self._running is not None:
            self._running.charge_usage(-1)

    def take_prompt(self, num_tokens: int) -> None:
        """A prompt is going to be computed.

        Raises:
            RateLimitError: it is more than is left now.
            RequestError: it is more than will ever be left.
        """
        if self._tokens is None:
            return
        if num_tokens > self._tokens.most:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and you may use {self._tokens.most} a minute: shorten it"
            )
        if (wait_s := self._tokens.try_take(num_tokens)) > 0:
            raise RateLimitError(
                f"you may use {self._tokens.most} tokens a minute, and fewer are left than the {num_tokens} of "
                "this prompt; wait, or shorten it",
                wait_s,
            )

    def owe_tokens(self, num_tokens: int) -> None:
        """So many were generated. A negative number: a prompt was not computed after all."""
        if self._tokens is not None:
            self._tokens.charge_usage(num_tokens)

    @property
    def is_fresh(self) -> bool:
        """Whether a new quota would be the same."""
        return not self._num_running and all(limit.is_fresh for limit in self._limits())

    def close(self) -> None:
        """It is forgotten."""
        for limit in self._limits():
            limit.close()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-…`: what is left, and how long until all is there again."""
        found: list[tuple[bytes, bytes]] = []
        for name, limit in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if limit is not None:
                level = limit.level
                full_in_s = (limit.most - level) * 60 / limit.most
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % limit.most),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(level, 0.0)),  # a debt is nothing left to clients
                    (b"x-ratelimit-reset-" + name, b"%.3fs" % full_in_s),
                ]
        return found

    def _count(self, change: int) -> None:
        now = self._shares.clock()
        self._ran_s += self._num_running * (now - self._changed_at)
        self._changed_at = now
        self._num_running += change

    def _limits(self) -> list[LeasedLimit]:
        return [limit for limit in (self._running, self._requests, self._tokens) if limit is not None]

    def _resized(
        self, limit: LeasedLimit | None, what: str, most: int | None, *, refills: bool = True
    ) -> LeasedLimit | None:
        if most is None:
            if limit is not None:
                limit.close()
            return None
        if limit is None:
            limit = self._shares.limit(f"{self._name}/{what}", most, refills=refills)
            if not refills:
                limit.charge_usage(self._num_running)
        elif limit.most != most:
            limit.resize(most)
        return limit


class AddressQuotas:
    """A quota for each client address, of bounded number.

    An address is forgotten only when its quota is as good as new, so nobody gains by making the server forget. When
    there is no such one, further addresses share one quota.
    """

    def __init__(self, limits: RateLimits, max_addresses: int, shares: IngressLimits | None = None) -> None:
        self._limits = limits
        self._max_addresses = max_addresses
        self._shares = shares or IngressLimits()
        self._shares.unknown = self._hear_of
        self._quotas: OrderedDict[str, Quota] = OrderedDict()  # the one that has called last is last
        self._shared = Quota(limits, self._shares, _PREFIX + "*")

    def quota_of(self, address: str) -> Quota:
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
            self._quotas.pop(oldest).close()
        quota = self._quotas[address] = Quota(self._limits, self._shares, _PREFIX + address)
        return quota

    def _hear_of(self, name: str) -> None:
        """An address has used much of a limit in another ingress."""
        if name.startswith(_PREFIX):
            self.quota_of(name.removeprefix(_PREFIX).rpartition("/")[0])


def _network_of(address: str) -> str:
    """The /64 of an IPv6 address; IPv4 addresses written as IPv6 ones, and what is none, stay themselves."""
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:  # proxies write what they like
        return address[:64]
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
