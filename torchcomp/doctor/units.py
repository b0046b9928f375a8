"""Units: numbers as people read them."""


def duration(seconds: float) -> str:
    """Return a duration with two digits or more: "31 us", "4.2 ms", "1.8 s"."""
    if seconds < 1e-3:
        return f"{_digits(seconds * 1e6)} us"
    return f"{_digits(seconds * 1e3)} ms" if seconds < 1 else f"{_digits(seconds)} s"


def rate(bytes_per_second: float) -> str:
    """Return a bandwidth in bits: "9.4 Mbit/s", "1.2 Gbit/s"."""
    bits = 8 * bytes_per_second
    return f"{_digits(bits / 1e6)} Mbit/s" if bits < 1e9 else f"{_digits(bits / 1e9)} Gbit/s"


def size(nbytes: float) -> str:
    """Return a size in decimal units: "4.1 kB", "17 MB"."""
    for unit, value in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= value:
            return f"{_digits(nbytes / value)} {unit}"
    return f"{nbytes:.0f} bytes"


def _digits(number: float) -> str:
    return f"{number:.1f}" if number < 9.95 else f"{number:,.0f}"
