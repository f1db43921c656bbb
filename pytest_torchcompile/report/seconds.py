"""Times as one reads them."""

from __future__ import annotations

__all__ = ["seconds"]


def seconds(value: float) -> str:
    """Seconds in a unit that fits.

    >>> seconds(0.0123), seconds(2.34), seconds(300)
    ('12 ms', '2.3 s', '5.0 min')
    """
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"
