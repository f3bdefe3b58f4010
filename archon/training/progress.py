"""Progress display: a live table and bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

ROWS_SHOWN = 12
LINE_SECONDS = 2.0


class Display:
    """Standard output of a run. The run goes on if output fails: a closed pipe or terminal, or a full disk."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; it is dropped once writing has failed."""
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(lambda stream: stream.flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[Any], Any]) -> None:
        try:
            action(self._stream)
        except UnicodeError:
            raise
        except (OSError, ValueError) as error:  # ValueError: closed by Python code
            lost, self._stream = self._stream, open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
            # Later prints, and the flush at the end of the process, must not fail either.
            if sys.stdout is lost:
                sys.stdout = self._stream
            with suppress(OSError, ValueError):
                os.dup2(self._stream.fileno(), lost.fileno())
            with suppress(OSError, ValueError):
                sys.stderr.write(f"archon: standard output cannot be written ({error}); the run goes on without it\n")


def open_display() -> Any:
    """Return the display of this process; None without standard output."""
    return None if sys.stdout is None else Display(sys.stdout)


class Progress:
    """Context manager that displays a loop of `total` steps.

    A terminal shows the last `ROWS_SHOWN` steps in a table above a bar with elapsed and remaining time. Otherwise it
    prints lines `rl 12/300  loss 0.1234  …`: at most one per `LINE_SECONDS`, and always the last step.
    """

    def __init__(self, title: str, total: int, *, start: int, columns: Sequence[str], console: Console):
        self.title, self.total, self.step = title, total, start
        self.columns = tuple(columns)
        self._console = console
        self._rows: list[tuple[int, dict[str, Any]]] = []
        self._unprinted: dict[str, Any] | None = None
        self._last_line = float("-inf")
        self._live: Live | None = None
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=total, completed=start)
            self._live = Live(self._bar, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        elif self._unprinted is not None:
            self._print(self._unprinted)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Display a finished step with the metrics of `columns`, or all metrics if `columns` is empty."""
        self.step = step
        shown = {name: metrics[name] for name in (self.columns or metrics) if name in metrics}
        if self._live:
            self._rows = [*self._rows, (step, shown)][-ROWS_SHOWN:]
            self._bar.update(self._task, completed=step)
            self._live.update(Group(self._table(), self._bar))
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._print(shown)
        else:
            self._unprinted = shown

    def _print(self, shown: Mapping[str, Any]) -> None:
        numbers = "  ".join(f"{name} {format_number(value)}" for name, value in shown.items())
        self._console.print(
            f"{self.title} {self.step}/{self.total}  {numbers}".rstrip(), soft_wrap=True, markup=False, highlight=False
        )
        self._last_line, self._unprinted = time.monotonic(), None

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        present = dict.fromkeys(name for _, shown in self._rows for name in shown)
        names = [name for name in self.columns or present if name in present]
        for heading in ["step", *names]:
            table.add_column(heading, justify="right", no_wrap=True)
        for step, shown in self._rows:
            table.add_row(str(step), *(format_number(shown[name]) if name in shown else "" for name in names))
        return table


def format_number(value: Any) -> str:
    """Format a number with four significant digits and thousands separators; other values with `str`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3e}"
    return f"{value:.4g}"
