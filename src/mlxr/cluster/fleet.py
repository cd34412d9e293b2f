"""The replicas that the front knows: where they are, which of them takes a request, and which have gone.

A replica is known from its first report on. It gets requests until it says that it drains, cannot be reached, or has
said nothing for a while; streams that wait for one that has gone are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from time import monotonic

from mlxr.cluster.replica import REPORT_S, Report
from mlxr.cluster.replica_client import Connect, Lines, connect
from mlxr.cluster.router import ROUTERS, Choice, NoReplica, Router, Routing

STALE_S = 5.0  # without a report


class Member:
    """One replica, and the connections to it."""

    def __init__(self, name: str, url: str, connect: Connect) -> None:
        self.name, self.url = name, url
        self.lines = Lines(url, connect)
        self.seen_s = monotonic()


class Fleet:
    """All replicas, for one event loop."""

    def __init__(self, connect: Connect = connect, routing: Routing = Routing.PREFIX) -> None:
        self._connect, self._make_router = connect, ROUTERS[routing]
        self._members: dict[str, Member] = {}
        self._router: Router | None = None  # until a report says how large pages are
        self._has_come = asyncio.Condition()
        self._turn = 0

    @property
    def members(self) -> list[Member]:
        """Those that take requests."""
        router = self._router
        return [] if router is None else [member for member in self._members.values() if member.name in router]

    async def note(self, report: Report) -> bool:
        """Take in a report; whether the next one should name all pages."""
        name = report.replica
        if self._router is None:
            self._router = self._make_router(report.page_size)
        member, now_s = self._members.get(name), monotonic()
        if member is None:
            member = self._members[name] = Member(name, report.url, self._connect)
        age_s = max(0.0, now_s - member.seen_s - REPORT_S)  # a report is made that long after the one before came here
        member.seen_s = now_s
        if report.is_draining:
            self._router.remove(name)
            return False
        if name not in self._router:
            self._router.add(name)
            async with self._has_come:
                self._has_come.notify_all()
        self._router.note_load(name, report.load, age_s)
        self._router.note_pages(name, report.pages)
        return self._router.wants_whole(name)

    def settle(self, number: int) -> None:
        """The first token to the request of a choice has come; see `Router.settle`."""
        if self._router is not None:
            self._router.settle(number)

    def end(self, number: int) -> None:
        """The request of a choice has left its replica; see `Router.end`."""
        if self._router is not None:
            self._router.end(number)

    def find(self, name: str) -> Member | None:
        """One that is known by name."""
        return self._members.get(name)

    def suspend(self, member: Member) -> None:
        """No more requests for one that cannot be reached, until it reports again."""
        if self._router is not None:
            self._router.remove(member.name)

    def bury_silent(self) -> list[Member]:
        """Give up those that have not reported for a while, if others have: else it is this end that hears nothing.

        Their lines are the caller's to close.
        """
        newest_s, buried = max((member.seen_s for member in self._members.values()), default=0.0), []
        for name, member in list(self._members.items()):
            if newest_s - member.seen_s > STALE_S:
                self.suspend(member)
                del self._members[name]
                buried.append(member)
        return buried

    async def choose(
        self, keys: Sequence[bytes], tokens: int, without: Collection[str], wait_s: float
    ) -> tuple[Member, Choice]:
        """The replica for a request of that many tokens; where none is left, those in `without` count again.

        Waits `wait_s` for one to come; then raises NoReplica.
        """
        end_s = monotonic() + wait_s
        while True:
            router = self._router
            if router is not None and len(router):
                left = without if any(member.name not in without for member in self.members) else ()
                choice = router.choose(keys, tokens, left)
                return self._members[choice.replica], choice
            if monotonic() >= end_s:
                raise NoReplica("no replica is ready")
            await self._wait(end_s - monotonic())

    async def take_turn(self, without: Collection[str], wait_s: float) -> Member:
        """One replica after the other, for what all can do alike and fast."""
        if not self.members:
            await self.choose((), 1, without, wait_s)
        fitting = [member for member in self.members if member.name not in without] or self.members
        self._turn += 1
        return fitting[self._turn % len(fitting)]

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds), self._has_come:
                await self._has_come.wait()
        except TimeoutError:
            return
