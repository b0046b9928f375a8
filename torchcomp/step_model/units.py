"""Times and sizes as text, with three digits."""

from torchcomp.traffic import three_digits

_UNITS = (("PB", 1e6), ("TB", 1e3), ("GB", 1.0), ("MB", 1e-3), ("kB", 1e-6))


def duration(seconds: float) -> str:
    """Return seconds or milliseconds with three digits."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{three_digits(seconds)} s"


def span(hours: float) -> str:
    """Return the time of a run in hours, minutes or seconds, with three digits."""
    for unit, size in (("h", 1), ("min", 60), ("s", 3600)):
        if hours * size >= 1:
            return f"{three_digits(hours * size)} {unit}"
    return f"{3600 * hours:.2g} s"


def volume(gigabytes: float) -> str:
    """Return bytes in a decimal unit, with three digits."""
    for unit, size in _UNITS:
        if gigabytes >= size:
            return f"{three_digits(gigabytes / size)} {unit}"
    return f"{round(1e9 * gigabytes)} B"
