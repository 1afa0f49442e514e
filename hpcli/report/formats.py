"""Numbers as text. Every function takes any float: a run that diverges must still be able to say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

NORM_DIGITS = 6
MISSING = "-"


def loss_text(value: float | None) -> str:
    """A loss with four decimals; in scientific notation where that would be long."""
    if value is None:
        return MISSING
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def norm_text(value: float | None, digits: int = NORM_DIGITS) -> str:
    """A norm with ``digits`` significant digits; 17 tell any two doubles apart."""
    return MISSING if value is None else f"{value:.{digits}g}"


def digits_that_tell_apart(values: Iterable[float | None]) -> int:
    """The fewest significant digits, at least six, that give different numbers different texts."""
    distinct = {value for value in values if value is not None and isfinite(value)}
    for digits in range(NORM_DIGITS, 17):
        if len({norm_text(value, digits) for value in distinct}) == len(distinct):
            return digits
    return 17


def coefficient_text(value: float | None) -> str:
    """A clip coefficient, which lies between 0 and 1: three decimals, or three digits where it is tiny."""
    if value is None:
        return MISSING
    return f"{value:.3f}" if value == 0 or 0.01 <= value < 1000 else f"{value:.3g}"


def rate_text(value: float | None) -> str:
    """Tokens per second, without decimals from ten upwards."""
    if value is None:
        return f"{MISSING} tokens/s"
    return f"{value:,.0f} tokens/s" if 10 <= value < 1e12 else f"{value:.2g} tokens/s"


def duration_text(seconds: float | None) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    if seconds is None or not isfinite(seconds):
        return "?"
    if seconds >= 1e8:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """``1 rank``, ``1,024 ranks``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def ranks_text(ranks: Sequence[int], most: int = 12) -> str:
    """Ranks in ascending order with runs folded: ``ranks 0-3, 5``. At most ``most`` runs are written out."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    more = "" if len(runs) <= most else f", ... ({len(ranks):,} ranks)"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + more


def bytes_text(count: int) -> str:
    """Bytes with the unit of 1,024 that gives from 1 to 1,023 of it, three digits: ``12.3 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.5 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{count:,} B"
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:,.{digits}f} {unit}"
