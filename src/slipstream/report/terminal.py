"""The analysis for people at a terminal: the answer on one screen, the tables behind it."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slipstream.analyze.analysis import Analysis, RankAnalysis
from slipstream.analyze.answer import Answer, answer
from slipstream.analyze.overlap import Account
from slipstream.analyze.tables import CommRow, LaneRow
from slipstream.core.units import format_bytes, format_ns, format_rate, format_share

_BAR = 60
_MOST_ROWS = 24
_PIPE_WIDTH = 140
_WIDEST = 400
_VISIBLE = 0.0005
_PARTS = (
    ("compute", "█", "green"),
    ("hidden", "▓", "cyan"),
    ("exposed", "▒", "red"),
    ("copy and other", "░", "yellow"),
    ("idle", "·", "dim"),
)


def print_analysis(analysis: Analysis, *, tables: bool = True) -> None:
    """Print an analysis to standard output: in colour and fitted to a terminal, plain and 140 wide to anything else."""
    if sys.stdout.isatty():
        console = Console(highlight=False)
        show(analysis, console, tables=tables)
        return
    console = Console(highlight=False, width=_PIPE_WIDTH, file=io.StringIO())
    show(analysis, console, tables=tables)
    text = cast(io.StringIO, console.file).getvalue()
    sys.stdout.write("\n".join(line.rstrip() for line in text.split("\n")))


def show(analysis: Analysis, console: Console, *, tables: bool = True) -> None:
    """Print the answer, then the tables."""
    found = answer(analysis)
    _headline(analysis, found, console)
    _numbers(analysis, found, console)
    for warning in analysis.warnings:
        console.print(f"[yellow]note[/yellow]  {_safe(warning)}")
    if tables:
        # Too wide a table is better folded by the terminal than cut by us: a cut unit is a wrong number.
        wide = Console(
            file=console.file,
            width=_WIDEST,
            highlight=False,
            force_terminal=console.is_terminal,
            no_color=console.no_color,
        )
        for table in (_ranks(analysis), _steps(analysis), _groups(analysis), _collectives(analysis), _lanes(analysis)):
            if table is not None:
                console.print()
                wide.print(table, crop=False, soft_wrap=True)


def _headline(analysis: Analysis, found: Answer, console: Console) -> None:
    account = found.account
    scope = "a step" if found.per_step else "in this trace"
    if account.comm_ns:
        text = (
            f"{format_share(account.hidden_ns, account.comm_ns)} of the communication was hidden; "
            f"{format_ns(account.exposed_ns)} {scope} ({format_share(account.exposed_ns, account.span_ns)}) is exposed."
        )
    else:
        text = "No communication was found."
    ranks = f"{found.ranks} rank{'s' if found.ranks != 1 else ''} (from {analysis.recording.ranks_from})"
    steps = f"{found.steps} step{'s' if found.steps != 1 else ''}"
    steps += f", {found.warmup} of them warm-up and left out" if found.warmup else ""
    console.print(f"[bold]{_safe(text)}[/bold]")
    console.print(f"[dim]{_safe(ranks)}, {_safe(steps)}; means over settled steps and ranks[/dim]")
    console.print(_bar(account))
    console.print()


def _bar(account: Account) -> Text:
    """The step as one bar: each part as wide as its share."""
    alone = account.compute_ns - account.hidden_ns
    rest = account.span_ns - account.compute_ns - account.exposed_ns - account.idle_ns
    parts = (alone, account.hidden_ns, account.exposed_ns, max(rest, 0), account.idle_ns)
    bar, legend = Text("  "), Text("  ")
    for (label, glyph, style), ns in zip(_PARTS, parts, strict=True):
        if ns > _VISIBLE * account.span_ns:
            bar.append(glyph * max(round(_BAR * ns / max(account.span_ns, 1)), 1), style=style)
            legend.append(f"{glyph} {label} {format_share(ns, account.span_ns)}   ", style=style)
    return Text("\n").join((bar, legend))


def _numbers(analysis: Analysis, found: Answer, console: Console) -> None:
    account = found.account
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    wall = f"{format_ns(found.wall_ns)} from the start of a step to the next" if found.wall_ns is not None else ""
    grid.add_row("step" if found.per_step else "span", format_ns(account.span_ns), wall)
    grid.add_row("compute", format_ns(account.compute_ns), format_share(account.compute_ns, account.span_ns))
    grid.add_row("communication", format_ns(account.comm_ns), format_share(account.comm_ns, account.span_ns))
    grid.add_row(
        "  hidden", format_ns(account.hidden_ns), f"{format_share(account.hidden_ns, account.comm_ns)} of communication"
    )
    places = (
        f"= head {format_ns(account.head_ns)} + stall {format_ns(account.stall_ns)} + tail {format_ns(account.tail_ns)}"
    )
    grid.add_row("  exposed", format_ns(account.exposed_ns), places)
    grid.add_row("copy", format_ns(account.copy_ns), format_share(account.copy_ns, account.span_ns))
    between = (found.wall_ns or 0) - account.span_ns
    pause = f", and {format_ns(between)} between steps" if between > 0 else ""
    grid.add_row("idle", format_ns(account.idle_ns), format_share(account.idle_ns, account.span_ns) + pause)
    grid.add_row("dilation", *_dilation(analysis.ranks, found))
    if analysis.worst is not None:
        worst = analysis.worst
        where = f"rank {worst.rank}" + (f", step {worst.step}" if worst.step is not None else "")
        text = (
            f"{worst.op} of group {worst.group} exposed at once on {where}; it ran for {format_ns(worst.duration_ns)}"
        )
        grid.add_row("worst", format_ns(worst.exposed_ns), _safe(text))
    console.print(grid)
    console.print(f"\n[bold]look at[/bold]  {_safe(found.look_at)}")


def _dilation(ranks: Sequence[RankAnalysis], found: Answer) -> tuple[str, str]:
    if found.extra_ns is None or found.dilation_ratio is None or found.net_hidden_ns is None:
        reason = next((rank.dilation.reason for rank in ranks if rank.dilation.reason), "no rank")
        return "-", _safe(f"not measurable: {reason}")
    matched = sum(rank.dilation.matched for rank in ranks)
    beside = sum(rank.dilation.beside for rank in ranks)
    return format_ns(found.extra_ns), (
        f"compute beside communication takes {found.dilation_ratio:.2f}x as long ({matched:,} of {beside:,} spans had "
        f"their like alone); net hidden {format_ns(found.net_hidden_ns)}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        left = column in {"device", "name", "group", "lane", "rank", "step", "wait"}
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    return table


def _account_cells(account: Account) -> list[str]:
    names = ("span", "compute", "comm", "hidden", "exposed", "head", "stall", "tail", "copy", "idle")
    return [format_ns(getattr(account, f"{name}_ns")) for name in names]


_ACCOUNT = ("span", "compute", "comm", "hidden", "exposed", "head", "stall", "tail", "copy", "idle")


def _ranks(analysis: Analysis) -> Table:
    awaited = [format_ns(wait.awaited_ns) for wait in analysis.waits.ranks] if analysis.waits is not None else []
    columns = ("awaited",) if analysis.waits is not None else ()
    table = _table("By rank, whole trace", "rank", "device", *_ACCOUNT, *columns)
    ranks = list(enumerate(analysis.ranks))
    if analysis.waits is not None and len(ranks) > _MOST_ROWS:
        waited = analysis.waits.ranks
        ranks.sort(key=lambda pair: -waited[pair[0]].awaited_ns)
        table.title = "By rank, whole trace; those that others waited for first"
    for index, rank in ranks[:_MOST_ROWS]:
        table.add_row(
            str(rank.timeline.rank),
            _safe(rank.timeline.device),
            *_account_cells(rank.overlap.account),
            *awaited[index : index + 1],
        )
    return _capped(table, len(analysis.ranks))


def _steps(analysis: Analysis) -> Table | None:
    rows = [(rank, step) for rank in analysis.ranks for step in rank.overlap.steps]
    if len(rows) <= len(analysis.ranks):
        return None
    table = _table("By step", "rank", "step", *_ACCOUNT)
    for rank, step in rows[:_MOST_ROWS]:
        label = f"{step.number} warm-up" if step.warmup else str(step.number)
        table.add_row(str(rank.timeline.rank), label, *_account_cells(step.account))
    return _capped(table, len(rows))


def _groups(analysis: Analysis) -> Table | None:
    return _comm_table("By process group, all ranks", analysis.groups, with_op=False)


def _collectives(analysis: Analysis) -> Table | None:
    return _comm_table("By collective, all ranks", analysis.collectives, with_op=True)


def _comm_table(title: str, rows: Sequence[CommRow], *, with_op: bool) -> Table | None:
    if not rows:
        return None
    names = ("name", "group") if with_op else ("group",)
    table = _table(title, *names, "size", "count", "bytes", "bus bw", "hidden", "exposed", "transfer", "wait")
    for row in rows[:_MOST_ROWS]:
        cells = [_safe(row.op)] if with_op else []
        note = " on a compute lane" if row.on_compute_lane * 2 >= row.count else ""
        table.add_row(
            *cells,
            _group_name(row, rows) + note,
            "?" if row.group.size is None else str(row.group.size),
            f"{row.count:,}",
            "?" if row.size_bytes is None else format_bytes(row.size_bytes),
            _bandwidth(row),
            format_ns(row.hidden_ns),
            format_ns(row.exposed_ns),
            _transfer(row),
            _wait(row),
        )
    table.caption = "transfer counts a collective once; the other times are sums over ranks"
    return _capped(table, len(rows))


def _group_name(row: CommRow, rows: Sequence[CommRow]) -> str:
    """The group's label, with its ranks where several groups share the label."""
    if len({other.group for other in rows if other.group.label == row.group.label}) < 2:
        return _safe(row.group.label)
    ranks = ", ".join(map(str, row.group.ranks[:8])) + (", ..." if len(row.group.ranks) > 8 else "")
    return _safe(f"{row.group.label} {row.group.name} [{ranks}]")


def _transfer(row: CommRow) -> str:
    if row.transfer_ns is None:
        return "?"
    return f"{'<= ' if row.partial else ''}{format_ns(row.transfer_ns)}"


def _bandwidth(row: CommRow) -> str:
    if row.busbw is None:
        return "?"
    return f">= {format_rate(row.busbw)}" if row.busbw_includes_wait else format_rate(row.busbw)


def _wait(row: CommRow) -> str:
    if row.wait_ns is not None:
        return f"{'>= ' if row.partial else ''}{format_ns(row.wait_ns)}"
    if row.wait_at_least_ns is None:
        return "?"
    return f"{format_ns(row.wait_at_least_ns)} to {format_ns(row.duration_ns)}"


def _lanes(analysis: Analysis) -> Table:
    rows: list[LaneRow] = [row for rank in analysis.ranks for row in rank.lanes]
    table = _table("By lane", "rank", "lane", "spans", "compute", "comm", "copy")
    for row in rows[:_MOST_ROWS]:
        label = _safe(row.lane) + (" (computes and communicates)" if row.mixed else "")
        times = (format_ns(ns) for ns in (row.compute_ns, row.comm_ns, row.copy_ns))
        table.add_row(str(row.rank), label, f"{row.spans:,}", *times)
    return _capped(table, len(rows))


def _capped(table: Table, count: int) -> Table:
    if count > _MOST_ROWS:
        more = f"{count - _MOST_ROWS} more rows in --json"
        table.caption = f"{table.caption}; {more}" if table.caption else more
    table.caption_justify = "left"
    return table


def _safe(text: str) -> str:
    """Text from a trace as data: no markup, no control characters that a terminal would obey."""
    return escape("".join(c if c.isprintable() else "\ufffd" for c in text))
