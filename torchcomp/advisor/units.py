"""Units: numbers as people read them, with two digits for measured ones and three for others."""

from collections.abc import Callable, Sequence

from torchcomp.exchange.traffic import three_digits

_Units = Sequence[tuple[str, float]]

_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_RUNS = (("h", 1.0), ("min", 1 / 60), ("s", 1 / 3600))
_VOLUMES = (("PB", 1e6), ("TB", 1e3), ("GB", 1.0), ("MB", 1e-3), ("kB", 1e-6), ("B", 1e-9))


def duration(seconds: float) -> str:
    """Return a measured duration: "31 us", "4.2 ms", "1.8 s"."""
    return _shown(seconds, _TIMES, _two_digits)


def rate(bytes_per_second: float) -> str:
    """Return a bandwidth in bits: "9.4 Mbit/s", "1.2 Gbit/s"."""
    return _shown(8 * bytes_per_second, (("Gbit/s", 1e9), ("Mbit/s", 1e6)), _two_digits)


def size(nbytes: float) -> str:
    """Return a size in decimal units: "4.1 kB", "17 MB"."""
    if nbytes < 1e3:
        return f"{nbytes:.0f} bytes"
    return _shown(nbytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), _two_digits)


def step_time(seconds: float) -> str:
    """Return a predicted duration: "0.12 ms", "12.3 ms", "1.5 s"."""
    return _shown(seconds, _TIMES[:2], three_digits)


def span(hours: float) -> str:
    """Return the time of a run: "0.36 s", "1.98 min", "1,234 h"."""
    return _shown(hours, _RUNS, three_digits)


def volume(gigabytes: float) -> str:
    """Return the bytes of a run: "30 kB", "1.5 TB"."""
    return _shown(gigabytes, _VOLUMES, three_digits)


def _shown(value: float, units: _Units, text: Callable[[float], str]) -> str:
    """Return a number in the first unit that it reaches, or else in the last one."""
    unit, factor = next((each for each in units if value >= each[1]), units[-1])
    return f"{text(value / factor)} {unit}"


def _two_digits(number: float) -> str:
    return f"{number:.1f}" if number < 9.95 else f"{number:,.0f}"
