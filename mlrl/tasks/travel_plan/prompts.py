"""What each agent of a trip is shown: query, route, its part of the reference, its share of the budget, the form."""

import math
from collections.abc import Mapping
from typing import Any

from mlrl.tasks.travel_plan.answer import ROLES, owned_slots
from mlrl.tasks.travel_plan.plan import CAR_SEATS, hotel_allowed, required_slots
from mlrl.tasks.travel_plan.reference import plain_name
from mlrl.tasks.travel_plan.trip import Trip

_HINTS = {
    "current_city": '"current_city": the city, or "from A to B" on a day of travel, as in the route',
    "transportation": '"transportation": on a day of travel "Flight F1234567, from A to B", "Self-driving, from A to '
    'B" or "Taxi, from A to B"',
    "accommodation": '"accommodation": "name, city" for each night',
    "breakfast": '"breakfast", "lunch", "dinner": "restaurant, city", none twice',
    "attraction": '"attraction": "name, city", several with ; between, none twice',
}


def role_prompt(
    query: str, trip: Trip, reference: Mapping[str, Any], agent: int, num_agents: int
) -> list[dict[str, str]]:
    """The prompt of an agent."""
    own = ROLES[agent] if num_agents > 1 else ROLES[0] + ROLES[1]
    part = ("travel and lodging", "meals and sights")[agent]
    if num_agents > 1:
        role = f"You plan {part} of this trip; a partner plans {('meals and sights', 'travel and lodging')[agent]}."
    else:
        role = "Plan this trip."
    route = "; ".join(f"day {day}: {trip.scaffold(day)}" for day in range(1, trip.days + 1))
    caps = budget_caps(trip, reference)
    cap = caps[agent] if num_agents > 1 else trip.budget
    slots = len(owned_slots(agent, num_agents, trip.days))
    lines = [
        role,
        f"Request: {query}",
        f"Route: {route}.",
        f"Spend at most ${cap:.0f} for {trip.people} {'person' if trip.people == 1 else 'people'}.",
        reference_text(trip, reference, agent, num_agents),
        f"Answer with one JSON object and nothing else, with {slots} assignments, one for each day (1 to {trip.days}) "
        f'and field:\n{{"agent_id": {agent}, "assignments": [{{"day": 1, "field": "{own[0]}", "value": "…"}}, …]}}',
        "Fields: " + "; ".join(_HINTS[name] for name in own if name in _HINTS) + '. Write "-" where nothing is needed.',
    ]
    return [{"role": "user", "content": "\n".join(lines)}]


def reference_text(trip: Trip, reference: Mapping[str, Any], agent: int, num_agents: int) -> str:
    """The part of the reference that an agent is shown."""
    lines: list[str] = []
    if num_agents == 1 or agent == 0:
        for day, (origin, destination) in sorted(trip.legs.items()):
            ways = [
                f"Flight {f['number']} {f['times']} ${f['price']:g} each"
                for f in _of_leg(reference["flights"], origin, destination)
            ]
            ways += [
                f"{d['mode']} ${d['cost']:g} a car of {CAR_SEATS[d['mode']]}"
                for d in _of_leg(reference["drives"], origin, destination)
            ]
            lines.append(f"Day {day}, from {origin} to {destination}: {'; '.join(ways) or 'nothing known'}")
        for city in _stays(trip):
            for h in _of_city(reference["hotels"], city):
                lines.append(
                    f"Hotel: {h['name']}, {city} | {h['room']} | ${h['price']:g} a night for up to {h['guests']} | "
                    f"at least {h['nights']} nights | {h['rules']}"
                )
    if num_agents == 1 or agent == 1:
        for city in _stays(trip):
            for r in _of_city(reference["restaurants"], city):
                lines.append(f"Restaurant: {r['name']}, {city} | ${r['cost']:g} | {', '.join(r['cuisines'])}")
            lines += [f"Attraction: {a['name']}, {city}" for a in _of_city(reference["attractions"], city)]
    return "\n".join(lines)


def budget_caps(trip: Trip, reference: Mapping[str, Any]) -> tuple[float, float]:
    """What each role may spend: the least that its required slots cost and half of what is then left of the budget.

    The two add up to the budget, also where that is less than the least cost.
    """
    floors = (
        sum(_cheapest_leg(trip, reference, *leg) for leg in trip.legs.values())
        + sum(_cheapest_night(trip, reference, trip.cities(day)[-1]) for day in range(1, trip.days)),
        sum(
            _cheapest_meal(trip, reference, trip.cities(day)[-1])
            for day, name in required_slots(trip)
            if name in ("breakfast", "lunch", "dinner")
        ),
    )
    half = (trip.budget - sum(floors)) / 2
    return floors[0] + half, floors[1] + half


def _cheapest_leg(trip: Trip, reference: Mapping[str, Any], origin: str, destination: str) -> float:
    costs = (
        [] if trip.no_flight else [f["price"] * trip.people for f in _of_leg(reference["flights"], origin, destination)]
    )
    for d in _of_leg(reference["drives"], origin, destination):
        if not (trip.no_driving and d["mode"] == "Self-driving"):
            costs.append(d["cost"] * math.ceil(trip.people / CAR_SEATS[d["mode"]]))
    return min(costs, default=0.0)


def _cheapest_night(trip: Trip, reference: Mapping[str, Any], city: str) -> float:
    allowed = [h for h in _of_city(reference["hotels"], city) if hotel_allowed(h, trip)]
    return min((h["price"] * math.ceil(trip.people / h["guests"]) for h in allowed), default=0.0)


def _cheapest_meal(trip: Trip, reference: Mapping[str, Any], city: str) -> float:
    return min((r["cost"] * trip.people for r in _of_city(reference["restaurants"], city)), default=0.0)


def _of_leg(records: list[dict[str, Any]], origin: str, destination: str) -> list[dict[str, Any]]:
    return [r for r in records if (r["origin"], r["destination"]) == (origin, destination)]


def _of_city(table: Mapping[str, list[dict[str, Any]]], city: str) -> list[dict[str, Any]]:
    return next((records for name, records in table.items() if plain_name(name) == plain_name(city)), [])


def _stays(trip: Trip) -> list[str]:
    """The cities where a night is spent, in order."""
    return list(dict.fromkeys(trip.cities(day)[-1] for day in range(1, trip.days)))
