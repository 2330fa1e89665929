"""Device-hours, money and energy of simulated runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simplan.goodput.sections import Power, RunPrice
from simplan.goodput.setup import Runs, RunSetup

HOUR_S = 3600.0
USES = ("in_use", "in_use_spot", "waiting", "spares")
"""Uses of nodes, in the order of ``Runs.node_s``."""

Floats = NDArray[np.float64]


def device_hours(setup: RunSetup, runs: Runs) -> Floats:
    """(runs, uses) Hours of all devices of nodes that are paid for, spares included, by use."""
    return runs.node_s * (setup.devices_per_node / HOUR_S)


def costs(setup: RunSetup, runs: Runs, price: RunPrice) -> Floats:
    """(runs,) Price of the device-hours. Nodes of a spot job that wait have the price of spot nodes."""
    spot = price.device_hour if price.spot_device_hour is None else price.spot_device_hour
    idle = price.device_hour if price.idle_device_hour is None else price.idle_device_hour
    by_use = (price.device_hour, spot, spot if setup.is_spot else price.device_hour, idle)
    paid: Floats = device_hours(setup, runs) @ np.asarray(by_use)
    return paid


def energies_kwh(setup: RunSetup, runs: Runs, power: Power) -> Floats:
    """(runs,) Kilowatt-hours of the site: nodes in use draw power under load, waiting ones and spares idle power."""
    idle_w = power.device_w if power.idle_w is None else power.idle_w
    watts = np.asarray((power.device_w, power.device_w, idle_w, idle_w))
    energies: Floats = device_hours(setup, runs) @ watts * (power.pue / 1000.0)
    return energies
