"""Times several implementations in turns, so that a change of clock or load meets all of them alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

SAMPLE_SECONDS = 0.005  # a sample repeats a shorter call until it lasts about so long
WARM_UP_SECONDS = 0.1  # at most, of each implementation
MIN_ROUNDS, MAX_ROUNDS = 5, 101


class Quartiles(NamedTuple):
    """First quartile, median and third quartile."""

    low: float
    median: float
    high: float


def quartiles(values: list[float]) -> Quartiles:
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def in_turns(calls: Mapping[str, Callable[[], object]], budget: float) -> dict[str, list[float]]:
    """Seconds per call of every implementation, one entry a round; `budget` is in seconds for all of them together.

    Each round takes every implementation once, in an order drawn anew, so that none always follows the same other one.
    """
    repeats = {name: _warm_up(call, min(WARM_UP_SECONDS, budget / 10)) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, draw = list(calls), random.Random(0)
    start = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(MAX_ROUNDS):
            if done >= MIN_ROUNDS and time.perf_counter() - start > budget:
                break
            draw.shuffle(order)
            for name in order:
                times[name].append(_sample(calls[name], repeats[name]))
    finally:
        if collecting:
            gc.enable()
    return times


def ratios(numerator: list[float], denominator: list[float]) -> Quartiles:
    """Quartiles of the ratio of two implementations' times, taken round by round."""
    return quartiles([a / b for a, b in zip(numerator, denominator, strict=True)])


def best_rate(call: Callable[[], object], amount: float, seconds: float = 0.3) -> float:
    """Highest `amount` per second that repeated calls reach."""
    repeats = _warm_up(call, seconds / 3)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _sample(call, repeats))
    return amount / best


def _warm_up(call: Callable[[], object], seconds: float) -> int:
    """Calls for about so long, once at least; returns how many calls make a sample long enough to time."""
    end, fastest = time.perf_counter() + seconds, float("inf")
    while fastest == float("inf") or time.perf_counter() < end:
        fastest = min(fastest, _sample(call, 1))
    return max(1, round(SAMPLE_SECONDS / fastest))


def _sample(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
