"""The plain answer: one account for a typical step, and one line on what to look at."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream.analyze.analysis import Analysis, RankAnalysis
from slipstream.analyze.overlap import Account
from slipstream.core.units import format_ns, format_share

_NOTHING_TO_WIN = 0.03
"""Exposed share of the step below which there is nothing worth doing about it."""

_MUCH_IDLE = 0.2
"""Share of the step for which an idle device is worth a word before communication is."""

_CULPRIT = 1.5
"""How many times the even share of all waiting one rank must cause to be named."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A typical step: means over the settled steps of all ranks, so that the parts still add up.

    `account` covers the whole trace where steps are not known (`per_step` false). `wall_ns` is from the start of a
    step to the start of the next. `extra_ns` is the dilation, over the ranks where it could be measured.
    """

    account: Account
    wall_ns: int | None
    per_step: bool
    ranks: int
    steps: int
    warmup: int
    extra_ns: int | None
    dilation_ratio: float | None
    look_at: str

    @property
    def net_hidden_ns(self) -> int | None:
        """Hidden time less what it cost compute."""
        return None if self.extra_ns is None else self.account.hidden_ns - self.extra_ns


def answer(analysis: Analysis) -> Answer:
    """Sum an analysis up."""
    settled = [step for rank in analysis.ranks for step in rank.overlap.steps if not step.warmup]
    per_step = bool(settled) and any(len(rank.overlap.steps) > 1 or _marked(rank) for rank in analysis.ranks)
    accounts = [step.account for step in settled] if per_step else [rank.overlap.account for rank in analysis.ranks]
    walls = [step.wall_ns for step in settled if step.wall_ns is not None]
    account = _mean(accounts)
    wall_ns = round(sum(walls) / len(walls)) if per_step and walls else None
    return Answer(
        account=account,
        wall_ns=wall_ns,
        per_step=per_step,
        ranks=len({(rank.timeline.rank, rank.timeline.device) for rank in analysis.ranks}),
        steps=len({step.number for rank in analysis.ranks for step in rank.overlap.steps}),
        warmup=len({step.number for rank in analysis.ranks for step in rank.overlap.steps if step.warmup}),
        extra_ns=_extra(analysis.ranks, per_step),
        dilation_ratio=_ratio(analysis.ranks),
        look_at=_look_at(analysis, account, wall_ns),
    )


def _marked(rank: RankAnalysis) -> bool:
    return not rank.timeline.steps_from.startswith(("none", "not marked"))


def _mean(accounts: list[Account]) -> Account:
    """Field by field, rounded so that the laws between the fields still hold."""
    count = max(len(accounts), 1)
    total = Account.total(accounts)
    mean = {f.name: round(getattr(total, f.name) / count) for f in fields(Account)}
    mean["exposed_ns"] = mean["head_ns"] + mean["stall_ns"] + mean["tail_ns"]
    mean["comm_ns"] = mean["hidden_ns"] + mean["exposed_ns"]
    return Account(**mean)


def _extra(ranks: tuple[RankAnalysis, ...], per_step: bool) -> int | None:
    measured = [rank for rank in ranks if rank.dilation.extra_ns is not None]
    if not measured:
        return None
    parts = sum(len(rank.overlap.steps) if per_step else 1 for rank in measured)
    return round(sum(rank.dilation.extra_ns or 0 for rank in measured) / max(parts, 1))


def _ratio(ranks: tuple[RankAnalysis, ...]) -> float | None:
    measured = [rank.dilation for rank in ranks if rank.dilation.extra_ns is not None]
    alone = sum(dilation.alone_ns for dilation in measured)
    return sum(dilation.took_ns for dilation in measured) / alone if alone else None


def _look_at(analysis: Analysis, account: Account, wall_ns: int | None) -> str:
    """What to look at first: the largest thing that is wrong, with its evidence."""
    if not account.comm_ns:
        return _no_communication(analysis)
    if not account.compute_ns:
        return "There is no compute in this trace, so nothing to hide communication behind."
    little = account.exposed_ns <= _NOTHING_TO_WIN * account.span_ns
    if little and not (idle := _idle(account, wall_ns)):
        return f"Nothing to win here: {format_share(account.exposed_ns, account.span_ns)} of the step is exposed."
    if little:
        return f"Communication is hidden ({format_share(account.exposed_ns, account.span_ns)} exposed). {idle}"
    return (
        _waiting(analysis)
        or _on_compute_lane(analysis)
        or _idle(account, wall_ns)
        or _too_much(analysis, account)
        or _by_place(analysis, account)
    )


def _no_communication(analysis: Analysis) -> str:
    if any(rank.overlap.account.comm_ns for rank in analysis.ranks):
        return "All communication lies outside the steps: check where they are marked."
    if any(len(rank.overlap.shares.rows) for rank in analysis.ranks):
        return "Communication takes no measurable time in this trace; nothing to hide."
    return "No communication was recognised in this trace: see the notes."


def _waiting(analysis: Analysis) -> str:
    """Waiting for peers is most of the exposed time; or a quarter with one culprit, behind whom the rest queues up."""
    waits = analysis.waits
    exposed = sum(rank.overlap.account.exposed_ns for rank in analysis.ranks)
    if waits is None or not waits.matched or 4 * (waiting := sum(r.exposed_wait_ns for r in waits.ranks)) < exposed:
        return ""
    late = max(waits.ranks, key=lambda rank: rank.awaited_ns)
    is_culprit = late.awaited_ns > max(_CULPRIT / len(waits.ranks), 0.3) * waiting
    if 2 * waiting < exposed and not is_culprit:
        return ""
    lead = f"Waiting, not bandwidth: {format_share(waiting, exposed)} of the exposed time is spent waiting for a peer"
    if 2 * waiting < exposed:
        lead += ", and what is queued behind waits with it"
    if not is_culprit:
        return f"{lead}, each rank in its turn: even out the work (data lengths, host jitter) before the network."
    return (
        f"{lead}. Rank {late.rank} comes last in {late.times_last} of {waits.matched} collectives and accounts for "
        f"{format_share(late.awaited_ns, waiting)} of that: look at its work before the network."
    )


def _on_compute_lane(analysis: Analysis) -> str:
    rows = [row for row in analysis.collectives if row.on_compute_lane]
    exposed = sum(row.exposed_ns for row in analysis.collectives)
    blocked = sum(row.exposed_ns for row in rows if 2 * row.on_compute_lane >= row.count)
    if 2 * blocked < exposed:
        return ""
    names = ", ".join(sorted({row.op for row in rows}))
    return f"{names} run on a lane that also computes, where they cannot overlap it: give them a stream of their own."


def _idle(account: Account, wall_ns: int | None) -> str:
    """The device has nothing to do for longer than communication is exposed, in the step or before the next one."""
    whole = max(wall_ns or 0, account.span_ns)
    idle = account.idle_ns + whole - account.span_ns
    if idle <= account.exposed_ns or idle < _MUCH_IDLE * whole:
        return ""
    return (
        f"The device is idle for {format_share(idle, whole)} of the step, longer than communication is exposed: the "
        "host (or the data) is late; look there first."
    )


def _too_much(analysis: Analysis, account: Account) -> str:
    if account.comm_ns <= account.compute_ns:
        return ""
    return (
        f"Communication ({format_ns(account.comm_ns)}) takes longer than compute ({format_ns(account.compute_ns)}), "
        f"{_mostly(analysis)}: it cannot all be hidden at this number of tokens per GPU."
    )


def _by_place(analysis: Analysis, account: Account) -> str:
    who, exposed = _mostly(analysis), account.exposed_ns
    if 2 * account.tail_ns >= exposed:
        return (
            f"{format_share(account.tail_ns, exposed)} of the exposed time is tail, behind the last compute that feeds "
            f"it ({who}): make the last bucket or shard smaller, or put the optimizer step behind it."
        )
    if 2 * account.head_ns >= exposed:
        return (
            f"{format_share(account.head_ns, exposed)} of the exposed time is head, before the first compute ({who}): "
            "start the first gather behind the previous step's optimizer."
        )
    return (
        f"There is enough compute to hide all communication, but {format_ns(account.stall_ns)} a step stall between "
        f"head and tail ({who}): look for late launches, serialised groups and waits for the host."
    )


def _mostly(analysis: Analysis) -> str:
    worst = analysis.collectives[0]
    return f"mostly {worst.op}" + (f" of group {worst.group.label}" if worst.group.label != "unnamed" else "")
