"""Quotas of callers: requests and tokens per minute, and concurrent requests."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from folio.app.config.http import RateLimits
from folio.app.edge.limits import IngressLimits, LeasedLimit
from folio.app.errors import RateLimitError, RequestError
from folio.app.http.errors import whole_seconds

# Weight of a new measurement in the mean time that a caller's request runs.
_MEAN_WEIGHT = 0.1
# Prefix of the names of addresses' limits.
_PREFIX = "address:"


class Quota:
    """The limits of one caller over all ingresses. A request takes from them at its start, and at its end gives back
    what it held.

    Args:
        name: of the caller, the same in every ingress.
    """

    def __init__(self, limits: RateLimits, ingress_limits: IngressLimits, name: str = "") -> None:
        self._ingress_limits = ingress_limits
        self._name = name
        self._num_running = 0
        self._changed_at = self._ingress_limits.clock()
        self._ran_s = 0.0  # by all requests together, since the last one ended
        self._mean_run_s = 1.0
        self._running: LeasedLimit | None = None
        self._requests: LeasedLimit | None = None
        self._tokens: LeasedLimit | None = None
        self.set_limits(limits)

    def set_limits(self, limits: RateLimits) -> None:
        """Change the limits; running requests stay counted."""
        self.limits = limits
        self._running = self._resized(self._running, "running", limits.concurrent_requests, refills=False)
        self._requests = self._resized(self._requests, "requests", limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, "tokens", limits.tokens_per_minute)

    def begin(self) -> None:
        """Count a request as running, until `end`.

        Raises:
            RateLimitError: a limit is used up for now.
        """
        if self._tokens is not None and (level := self._tokens.level) <= 0:
            raise _rate_limit_error("tokens_per_minute", self._tokens, (1 - level) * 60 / self._tokens.limit)
        running = self._running
        if running is not None and running.try_take(1) > 0:
            raise RateLimitError(
                f"concurrency limit reached (concurrent_requests={running.limit}); send the request again when another "
                "of yours has ended",
                self._mean_run_s / running.limit,
            )
        if self._requests is not None and (wait_s := self._requests.try_take(1)) > 0:
            if running is not None:
                running.charge_usage(-1)
            raise _rate_limit_error("requests_per_minute", self._requests, wait_s)
        self._count(1)

    def end(self) -> None:
        """Count the request as ended."""
        assert self._num_running > 0
        self._count(-1)
        self._mean_run_s += _MEAN_WEIGHT * (self._ran_s - self._mean_run_s)  # Little's law
        self._ran_s = 0.0
        if self._running is not None:
            self._running.charge_usage(-1)

    def spare_wait_s(self) -> float:
        """Seconds until half of each limit is left: work without hurry leaves room for the caller's other requests."""
        waits = [0.0]
        for limit in self._limits():
            missing = limit.limit / 2 - limit.level
            if missing > 0:
                waits.append(self._mean_run_s / limit.limit if limit is self._running else missing * 60 / limit.limit)
        return max(waits)

    def take_prompt(self, num_tokens: int) -> None:
        """Charge a prompt before it is computed.

        Raises:
            RateLimitError: fewer tokens are left now.
            RequestError: the prompt exceeds the limit itself.
        """
        if self._tokens is None:
            return
        if num_tokens > self._tokens.limit:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, more than the limit (tokens_per_minute={self._tokens.limit}); "
                "shorten the prompt"
            )
        if (wait_s := self._tokens.try_take(num_tokens)) > 0:
            raise _rate_limit_error(
                "tokens_per_minute", self._tokens, wait_s, f"the prompt has {num_tokens} tokens and fewer are left: "
            )

    def owe_tokens(self, num_tokens: int) -> None:
        """Charge generated tokens; a negative number gives back a prompt that was not computed."""
        if self._tokens is not None:
            self._tokens.charge_usage(num_tokens)

    @property
    def is_fresh(self) -> bool:
        """Whether a new quota would be the same."""
        return not self._num_running and all(limit.is_fresh for limit in self._limits())

    def close(self) -> None:
        for limit in self._limits():
            limit.close()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-…` headers: limit, what remains, and seconds until the limit is full again."""
        found: list[tuple[bytes, bytes]] = []
        for name, limit in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if limit is not None:
                level = limit.level
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % limit.limit),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(level, 0.0)),  # clients expect no negative number
                    (b"x-ratelimit-reset-" + name, b"%.3fs" % ((limit.limit - level) * 60 / limit.limit)),
                ]
        return found

    def _count(self, change: int) -> None:
        now = self._ingress_limits.clock()
        self._ran_s += self._num_running * (now - self._changed_at)
        self._changed_at = now
        self._num_running += change

    def _limits(self) -> list[LeasedLimit]:
        return [limit for limit in (self._running, self._requests, self._tokens) if limit is not None]

    def _resized(
        self, limit: LeasedLimit | None, kind: str, bound: int | None, *, refills: bool = True
    ) -> LeasedLimit | None:
        if bound is None:
            if limit is not None:
                limit.close()
            return None
        if limit is None:
            limit = self._ingress_limits.add_limit(f"{self._name}/{kind}", bound, refills=refills)
            if not refills:
                limit.charge_usage(self._num_running)
        elif limit.limit != bound:
            limit.resize(bound)
        return limit


def _rate_limit_error(name: str, limit: LeasedLimit, wait_s: float, reason: str = "") -> RateLimitError:
    again = f"send the request again in {whole_seconds(wait_s)} s"
    return RateLimitError(f"{reason}rate limit reached ({name}={limit.limit}); {again}", wait_s)


class AddressQuotas:
    """A quota for each client address, of bounded number.

    Only addresses with a fresh quota are forgotten, so that forgetting gives no address more. While no quota is fresh,
    further addresses share one quota.
    """

    def __init__(self, limits: RateLimits, max_addresses: int, ingress_limits: IngressLimits) -> None:
        self._limits = limits
        self._max_addresses = max_addresses
        self._ingress_limits = ingress_limits
        self._ingress_limits.on_unknown = self._add_announced
        self._quotas: OrderedDict[str, Quota] = OrderedDict()  # by last call, the latest last
        self._shared = Quota(limits, self._ingress_limits, _PREFIX + "*")

    def quota_of(self, address: str) -> Quota:
        """IPv6 addresses count by network, because a client has 2⁶⁴ addresses."""
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
        quota = self._quotas[address] = Quota(self._limits, self._ingress_limits, _PREFIX + address)
        return quota

    def _add_announced(self, name: str) -> None:
        """Add the quota of an address that has used much of a limit in another ingress."""
        if name.startswith(_PREFIX):
            self.quota_of(name.removeprefix(_PREFIX).rpartition("/")[0])


def _network_of(address: str) -> str:
    """The /64 of an IPv6 address. IPv4-mapped addresses become IPv4; any other text stays as it is."""
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:  # from a proxy's header
        return address[:64]
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
