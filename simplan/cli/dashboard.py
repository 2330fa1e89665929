"""Starts the dashboard as a process that, by default, only this machine can reach."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from importlib.util import find_spec

from simplan.children import exit_code, terminate_child
from simplan.cli.terminal.output import say
from simplan.cli.terminal.processes import ROOT, child_environment, ending_signals_raise
from simplan.errors import Problem, RunError, SpecError

RUN_FLAG = "SIMPLAN_ALLOW_RUN"
"""Environment variable that tells pages whether they may start runs: ``1`` or ``0``."""

_NEEDED = ("streamlit", "plotly", "pandas")


def dashboard_command(*, host: str, port: int, browser: bool, allow_run: bool) -> int:
    """``simplan dashboard``: serves until it is interrupted.

    Raises:
        SpecError: A package of the dashboard is not installed, or the port is in use.
        RunError: The server ended by itself.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing or not (ROOT / "app").is_dir():
        rule = f"the dashboard needs {', '.join(missing) or 'its pages'}, which is not installed here"
        raise SpecError(Problem(field="", rule=rule, fix='install it with: pip install "simplan[app]"'))
    _check_port(host, port)
    local = is_local(host)
    runs = allow_run or local
    if not local:
        say(f"anyone who reaches {host} can see this dashboard" + (" and start runs on this machine" if runs else ""))
    environment = {**child_environment(), RUN_FLAG: "1" if runs else "0"}
    arguments = ["--host", host, "--port", str(port), *(["--browser"] if browser else [])]
    with ending_signals_raise():
        child = subprocess.Popen([sys.executable, "-m", "app", *arguments], env=environment, stdin=subprocess.DEVNULL)
        try:
            code = exit_code(child)
        finally:
            terminate_child(child)
            exit_code(child)
    if code:
        raise RunError(f"the server ended with exit code {code}")
    return 0


def is_local(host: str) -> bool:
    """True for an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(host: str, port: int) -> None:
    """Streamlit would take the next free one in silence."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # the latter for a part of a name of more than 63 letters
        rule = f"cannot be used on {host}: {getattr(error, 'strerror', None) or error}"
        raise SpecError(Problem(field="--port", value=str(port), rule=rule, fix="give another --port")) from None
