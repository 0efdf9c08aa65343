"""A merged plan against the reference of its trip: what is required, fits the route, is known, allowed, and costs."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlrl.tasks.travel_plan.answer import EMPTY, ROLES, Slot
from mlrl.tasks.travel_plan.reference import plain_city, plain_name
from mlrl.tasks.travel_plan.trip import ROOMS, Trip

MEALS = ("breakfast", "lunch", "dinner")
CAR_SEATS = {"Self-driving": 5, "Taxi": 4}

_LEG = re.compile(r"\bfrom\s+(.+?)\s+to\s+(.+?)(?=\s*(?:,|;|$))", re.IGNORECASE)
_NUMBER = re.compile(r"\bF\d{5,8}\b")


@dataclass(frozen=True)
class Checked:
    """One slot that is not empty."""

    fits: bool
    """Readable, and in keeping with the day's route"""
    grounded: bool
    """It fits, and the reference knows it"""
    valid: bool
    """It is grounded, and neither a wish of the query nor a rule of the place is against it"""
    cost: float = 0.0
    """For all travellers; of a hotel, one night"""


def required_slots(trip: Trip) -> list[Slot]:
    """current_city on every day, transportation on days of a leg, accommodation on all days but the last, meals and
    attraction on days without a leg."""
    slots = []
    for day in range(1, trip.days + 1):
        slots.append((day, "current_city"))
        if day in trip.legs:
            slots.append((day, "transportation"))
        else:
            slots += [(day, name) for name in ROLES[1]]
        if day < trip.days:
            slots.append((day, "accommodation"))
    return slots


def check_plan(plan: Mapping[Slot, str], trip: Trip, reference: Mapping[str, Any]) -> dict[Slot, Checked]:
    """Checks each slot of a plan that is not empty."""
    hotels = Counter(hotel_key(plan.get((day, "accommodation"), "")) for day in range(1, trip.days + 1))
    seen: set[tuple[str, str]] = set()
    checked = {}
    for slot in sorted(slot for slot, value in plan.items() if value != EMPTY):
        day, name = slot
        value = plan[slot]
        if name == "current_city":
            fits = same_route(value, trip.scaffold(day))
            checked[slot] = Checked(fits, fits, fits)
        elif name == "transportation":
            checked[slot] = _check_transport(value, day, trip, reference)
        elif name == "accommodation":
            checked[slot] = _check_hotel(value, day, hotels, trip, reference)
        else:
            table = "restaurants" if name in MEALS else "attractions"
            checked[slot] = _check_places(value, day, table, seen, trip, reference)
    return checked


def same_route(value: str, scaffold: str) -> bool:
    """Whether a text names the same city, or the same leg, as the scaffold."""
    leg, wanted = _LEG.search(value), _LEG.search(scaffold)
    if not leg or not wanted:
        return not leg and not wanted and plain_name(plain_city(value)) == plain_name(scaffold)
    return all(plain_name(plain_city(a)) == plain_name(b) for a, b in zip(leg.groups(), wanted.groups(), strict=True))


def named_place(value: str) -> tuple[str, str]:
    """(name, city) of "name, city"; the city is empty where there is no comma."""
    name, _, city = value.strip().rpartition(",")
    return name.strip(), plain_city(city) if name.strip() else ""


def hotel_key(value: str) -> tuple[str, str]:
    """A hotel for counting nights."""
    name, city = named_place(value)
    return plain_name(name), plain_name(city)


def _check_transport(value: str, day: int, trip: Trip, reference: Mapping[str, Any]) -> Checked:
    leg, number = _LEG.search(value), _NUMBER.search(value)
    lower = value.lower()
    mode = next((mode for mode in ("Self-driving", "Taxi") if lower.startswith(mode.lower())), None)
    if leg is None or day not in trip.legs or (mode is None) == (number is None):
        return Checked(False, False, False)
    origin, destination = trip.legs[day]
    if not same_route(value, f"from {origin} to {destination}"):
        return Checked(False, False, False)
    ends = {"origin": origin, "destination": destination}
    if mode is None:
        found = next((f for f in reference["flights"] if f["number"] == number[0] and ends.items() <= f.items()), None)
        cost = found["price"] * trip.people if found else 0.0
        return Checked(True, found is not None, found is not None and not trip.no_flight, cost)
    found = next((d for d in reference["drives"] if d["mode"] == mode and ends.items() <= d.items()), None)
    cost = found["cost"] * math.ceil(trip.people / CAR_SEATS[mode]) if found else 0.0
    allowed = mode != "Self-driving" or not trip.no_driving
    return Checked(True, found is not None, found is not None and allowed, cost)


def _check_hotel(
    value: str, day: int, nights: Counter[tuple[str, str]], trip: Trip, reference: Mapping[str, Any]
) -> Checked:
    name, city = named_place(value)
    if not name or day == trip.days or plain_name(city) != plain_name(trip.cities(day)[-1]):
        return Checked(False, False, False)
    found = [h for h in _places(reference["hotels"], city) if plain_name(h["name"]) == plain_name(name)]
    if not found:
        return Checked(True, False, False)
    allowed = [h for h in found if hotel_allowed(h, trip) and nights[hotel_key(value)] >= h["nights"]]
    hotel = (allowed or found)[0]
    return Checked(True, True, bool(allowed), hotel["price"] * math.ceil(trip.people / hotel["guests"]))


def hotel_allowed(hotel: Mapping[str, Any], trip: Trip) -> bool:
    """Whether a hotel meets the wishes for rules and room."""
    forbidden = trip.rule and f"no {trip.rule}" in hotel["rules"].lower()
    return not forbidden and (not trip.room or hotel["room"] in ROOMS[trip.room])


def _check_places(
    value: str, day: int, table: str, seen: set[tuple[str, str]], trip: Trip, reference: Mapping[str, Any]
) -> Checked:
    """One restaurant, or attractions with semicolons between; no place twice in a plan."""
    parts = [part for part in value.split(";") if part.strip()] if table == "attractions" else [value]
    places = [named_place(part) for part in parts]
    cities = {plain_name(city) for city in trip.cities(day)} - {plain_name(trip.home)}
    if not places or not all(name and plain_name(city) in cities for name, city in places):
        return Checked(False, False, False)
    found = [
        next((p for p in _places(reference[table], city) if plain_name(p["name"]) == plain_name(name)), None)
        for name, city in places
    ]
    keys = [(table, *map(plain_name, place)) for place in places]
    fresh = len(set(keys)) == len(keys) and not seen.intersection(keys)
    seen.update(keys)
    grounded = all(place is not None for place in found)
    cost = found[0]["cost"] * trip.people if table == "restaurants" and grounded else 0.0
    return Checked(True, grounded, grounded and fresh, cost)


def _places(table: Mapping[str, list[dict[str, Any]]], city: str) -> list[dict[str, Any]]:
    return next((places for name, places in table.items() if plain_name(name) == plain_name(city)), [])


def cuisines_met(plan: Mapping[Slot, str], checked: Mapping[Slot, Checked], reference: Mapping[str, Any]) -> set[str]:
    """All cuisines of the plan's restaurants that are known."""
    met = set()
    for (day, name), check in checked.items():
        if name in MEALS and check.grounded:
            restaurant, city = named_place(plan[day, name])
            for place in _places(reference["restaurants"], city):
                if plain_name(place["name"]) == plain_name(restaurant):
                    met.update(place["cuisines"])
    return met
