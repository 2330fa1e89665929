"""Unit constants, and formatting of quantities as text.

Internally, all values are bytes, seconds, FLOPs and bytes per second, and names end in their unit (``_s``, ``_bytes``,
``_bytes_per_s``, ``_flop_per_s``). Output uses GiB and MiB for memory, GB/s for links, ms for times, TFLOP/s for rates.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def counted(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "device"), counted(8, "device")
    ('1 device', '8 devices')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(num_bytes: float, digits: int | None = None) -> str:
    """Format memory in binary units, with as many significant digits as given.

    >>> format_bytes(1.5 * GIB), format_bytes(300 * MIB), format_bytes(12)
    ('1.50 GiB', '300.0 MiB', '12 B')
    >>> format_bytes(1.23456 * MIB, digits=4)
    '1.235 MiB'
    """
    for unit, name, decimals in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(num_bytes) >= unit:
            scaled = num_bytes / unit
            return f"{scaled:.{decimals}f} {name}" if digits is None else f"{_rounded(scaled, digits)} {name}"
    return f"{num_bytes:.0f} B"


def format_time(seconds: float, digits: int | None = None) -> str:
    """Format a duration with three or four significant digits, or with as many as given.

    >>> format_time(0.0123), format_time(2.5), format_time(4.2e-5), format_time(0.0)
    ('12.3 ms', '2.500 s', '42.0 us', '0 s')
    >>> format_time(0.123456, digits=4)
    '123.5 ms'
    """
    magnitude = abs(seconds)
    if magnitude == 0.0:
        return "0 s"
    if digits is not None:
        factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e-3, "ms")) if magnitude >= f), (1e-6, "us"))
        return f"{_rounded(seconds / factor, digits)} {unit}"
    if magnitude >= 1.0:
        return f"{seconds:.3f} s"
    if magnitude >= 1e-1:
        return f"{seconds * 1e3:.0f} ms"
    if magnitude >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.1f} us"


def format_span(seconds: float) -> str:
    """Format a long duration in the largest unit of which it has one, with three significant digits.

    >>> format_span(2_700_000), format_span(5400), format_span(90), format_span(30), format_span(0)
    ('31.2 days', '1.50 h', '1.50 min', '30.0 s', '0 s')
    """
    factor, unit = span_unit(seconds)
    return f"{format_in(seconds, factor)} {unit}"


def span_unit(seconds: float) -> tuple[float, str]:
    """Seconds and name of the largest unit of which a duration has one: days, hours, minutes or seconds."""
    units = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))
    return next(((factor, unit) for factor, unit in units if abs(seconds) >= factor), (1.0, "s"))


def format_in(seconds: float, factor: float, digits: int = 3) -> str:
    """Format a duration in a unit with significant digits, without the unit's name.

    >>> format_in(2_700_000, 86_400), format_in(2_592_000, 86_400)
    ('31.2', '30.0')
    """
    value = seconds / factor
    return "0" if value == 0 else f"{value:#.{digits}g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def format_rate(bytes_per_s: float, digits: int = 3) -> str:
    """Format a link or memory rate in decimal units, as vendors do.

    >>> format_rate(1.04e15), format_rate(3.35e12), format_rate(450e9), format_rate(2.5e6)
    ('1.04 PB/s', '3.35 TB/s', '450 GB/s', '2.5 MB/s')
    """
    units = ((1e15, "PB/s"), (1e12, "TB/s"), (1e9, "GB/s"))
    factor, unit = next(((f, u) for f, u in units if bytes_per_s >= f), (1e6, "MB/s"))
    return f"{_rounded(bytes_per_s / factor, digits)} {unit}"


def format_flop_per_s(flop_per_s: float) -> str:
    """Format a compute rate.

    >>> format_flop_per_s(989e12), format_flop_per_s(91.2e9)
    ('989 TFLOP/s', '91.2 GFLOP/s')
    """
    if flop_per_s >= 1e12:
        return f"{flop_per_s / 1e12:.4g} TFLOP/s"
    return f"{flop_per_s / 1e9:.3g} GFLOP/s"


def format_flops(flops: float) -> str:
    """Format a number of FLOPs with four significant digits.

    >>> format_flops(8.6123e12), format_flops(2 * 256**3)
    ('8.612 TFLOP', '33.55 MFLOP')
    """
    units = ((1e12, "TFLOP"), (1e9, "GFLOP"))
    factor, unit = next(((f, u) for f, u in units if flops >= f), (1e6, "MFLOP"))
    return f"{_rounded(flops / factor, 4)} {unit}"


def format_count(number: float) -> str:
    """Format a large count, shortened.

    >>> format_count(7_615_616), format_count(124_439_808), format_count(512)
    ('7.62 M', '124 M', '512')
    >>> format_count(1e15)
    '1,000 T'
    """
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= factor:
            return f"{_rounded(number / factor, 3)} {suffix}"
    return f"{number:,.0f}"


def _rounded(value: float, digits: int) -> str:
    """Significant digits of a number, and never a power of ten."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"


def format_number(value: float) -> str:
    """Format a number with at least four significant digits, and never as a power of ten.

    >>> format_number(0.123456), format_number(17.5), format_number(131_072)
    ('0.1235', '17.5', '131,072')
    """
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def format_number_evenly(value: float) -> str:
    """Format a number like ``format_number``, but keep trailing zeros, for columns of numbers.

    >>> format_number_evenly(0.123456), format_number_evenly(18.0), format_number_evenly(131_072)
    ('0.1235', '18.00', '131,072')
    """
    return f"{value:#.4g}" if 0 < abs(value) < 999.95 else f"{value:,.0f}"


def faster_or_slower(time_s: float, than_s: float, digits: int = 1) -> str:
    """Format a difference in speed: the longer of two times over the shorter one, minus 1.

    >>> faster_or_slower(5.0, than_s=20.0), faster_or_slower(20.0, than_s=5.0)
    ('300.0 % faster', '300.0 % slower')
    """
    is_slower = time_s > than_s
    ratio = time_s / than_s if is_slower else than_s / time_s
    return f"{format_percent(ratio - 1, digits)} {'slower' if is_slower else 'faster'}"


def format_percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction as percent.

    >>> format_percent(0.4567)
    '45.7 %'
    >>> format_percent(-1e-9)
    '0.0 %'
    """
    return f"{100 * fraction:z.{digits}f} %"


def format_value(value: float, unit: str) -> str:
    """Format a value of a term in seconds, in bytes or without a unit.

    >>> format_value(-0.0123, "s"), format_value(1.5 * GIB, "bytes"), format_value(12_345.6, "")
    ('-12.3 ms', '1.50 GiB', '12,346')
    """
    if unit not in ("s", "bytes"):
        return format_number(value)
    sign = "-" if value < 0 else ""
    return sign + (format_time(abs(value)) if unit == "s" else format_bytes(abs(value)))


def format_difference(value: float, unit: str) -> str:
    """Format a difference of two values with its sign.

    >>> format_difference(0.0123, "s"), format_difference(-0.0123, "s")
    ('+12.3 ms', '-12.3 ms')
    """
    return format_value(value, unit) if value < 0 else f"+{format_value(value, unit)}"
