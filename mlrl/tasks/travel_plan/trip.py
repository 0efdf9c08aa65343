"""What is asked of a trip: route, people, budget and wishes, from the fields of a row or out of the query's text."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from mlrl import ConfigError
from mlrl.tasks.travel_plan.reference import plain_city

CUISINES = ("American", "Chinese", "French", "Indian", "Italian", "Mediterranean", "Mexican")
RULES = {
    "smoking": "smok(?:e|ing)",
    "parties": "parties",
    "children under 10": "children",
    "visitors": "visitors?",
    "pets": "pets?",
}
"""What a traveller may need to be allowed, and what shows the wish in a query; a hotel forbids it as "No pets" """
ROOMS = {
    "private room": ("Private room",),
    "entire room": ("Entire home/apt",),
    "not shared room": ("Private room", "Entire home/apt"),
    "shared room": ("Shared room",),
}
"""Wishes for a room, and the room types that each allows"""

_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Trip:
    """A trip; days count from 1."""

    days: int
    people: int
    budget: float
    legs: dict[int, tuple[str, str]]
    """Day → (origin, destination)"""
    rule: str = ""
    """A key of `RULES`, or nothing"""
    room: str = ""
    """A key of `ROOMS`, or nothing"""
    cuisines: tuple[str, ...] = ()
    no_flight: bool = False
    no_driving: bool = False

    def cities(self, day: int) -> tuple[str, ...]:
        """Where one is on a day: origin and destination on the day of a leg, else one city."""
        if day in self.legs:
            return self.legs[day]
        return (self.legs[max(d for d in self.legs if d < day)][1],)

    def scaffold(self, day: int) -> str:
        """The day's entry of current_city."""
        cities = self.cities(day)
        return f"from {cities[0]} to {cities[1]}" if len(cities) == 2 else cities[0]

    @property
    def home(self) -> str:
        """Where the trip starts."""
        return self.legs[1][0]

    @property
    def level(self) -> str:
        """easy without a wish, medium with one, hard with more."""
        wishes = sum(map(bool, (self.rule, self.room, self.cuisines, self.no_flight or self.no_driving)))
        return ("easy", "medium", "hard")[min(wishes, 2)]


def read_trip(row: Mapping[str, Any], legs: list[list[str]]) -> Trip:
    """The trip of a row with `query`; the fields people_number, budget and local_constraint count where it has them.

    Args:
        legs: ``[date, origin, destination]`` in order, as `mlrl.tasks.travel_plan.reference` finds them.

    Raises:
        ConfigError: no legs, or no budget.
    """
    query = str(row.get("query", ""))
    if not legs:
        raise ConfigError(f"task_args.data_path: no flights by date in the reference of {query[:80]!r}.")
    first = date.fromisoformat(legs[0][0])
    days = {(date.fromisoformat(day) - first).days + 1: (origin, destination) for day, origin, destination in legs}
    budget = row.get("budget") or _budget(query)
    if budget is None:
        raise ConfigError(f"task_args.data_path: no budget in {query[:80]!r}.")
    wishes = row.get("local_constraint")
    wishes = ast.literal_eval(wishes) if isinstance(wishes, str) else wishes
    wishes = _from_fields(wishes) if wishes else _from_query(query)
    people = int(row.get("people_number") or _people(query))
    return Trip(days=max(days), people=people, budget=float(budget), legs=days, **wishes)


def _from_fields(wishes: Mapping[str, Any]) -> dict[str, Any]:
    rule, room, travel = (str(wishes.get(key) or "") for key in ("house rule", "room type", "transportation"))
    cuisines = wishes.get("cuisine") or ()
    return {
        "rule": rule if rule in RULES else "",
        "room": room if room in ROOMS else "",
        "cuisines": tuple([cuisines] if isinstance(cuisines, str) else cuisines),
        "no_flight": travel == "no flight",
        "no_driving": travel == "no self-driving",
    }


def _from_query(query: str) -> dict[str, Any]:
    text = query.lower()
    if "no specific preferences" in text:
        return {}
    negated = r"\b(?:no|not|non|avoid|don't|without)\b[^.]*?"
    room = next((word for word in ("private room", "entire room", "shared room") if word in text), "")
    if room == "shared room" and re.search(r"(?:not|non)[ -]+(?:be )?shared room", text):
        room = "not shared room"
    return {
        "rule": next((rule for rule, sign in RULES.items() if re.search(rf"\b{sign}\b", text)), ""),
        "room": room,
        "cuisines": tuple(c for c in CUISINES if re.search(rf"\b{c.lower()}\b", text)),
        "no_flight": bool(re.search(negated + r"\b(?:flights?|fly(?:ing)?)\b", text)),
        "no_driving": bool(re.search(negated + r"(?:self-driv|drive ourselves|driving)", text)),
    }


def _budget(query: str) -> float | None:
    found = re.search(r"\$\s*([\d,]*\d)", query)
    return float(found[1].replace(",", "")) if found else None


def _people(query: str) -> int:
    number = rf"(\d+|{'|'.join(_NUMBERS)})"
    text = query.lower()
    for pattern in (
        rf"\b(?:group|party) of {number}\b",
        rf"\b{number} (?:people|persons?|individuals|travell?ers)\b",
        rf"\bfor {number}(?=,| departing| leaving|\.)",
    ):
        found = re.search(pattern, text)
        if found:
            return int(found[1]) if found[1].isdigit() else _NUMBERS.index(found[1]) + 1
    return 2 if re.search(r"\b(?:a pair|a couple)\b", text) else 1


def trip_fields(trip: Trip) -> dict[str, Any]:
    """A trip as plain data for a row."""
    legs = [[day, origin, destination] for day, (origin, destination) in sorted(trip.legs.items())]
    return {
        "days": trip.days,
        "people": trip.people,
        "budget": trip.budget,
        "legs": legs,
        "rule": trip.rule,
        "room": trip.room,
        "cuisines": list(trip.cuisines),
        "no_flight": trip.no_flight,
        "no_driving": trip.no_driving,
    }


def trip_of(fields: Mapping[str, Any]) -> Trip:
    """The trip of `trip_fields`."""
    legs = {int(day): (plain_city(origin), plain_city(destination)) for day, origin, destination in fields["legs"]}
    return Trip(**{**fields, "legs": legs, "cuisines": tuple(fields["cuisines"])})
