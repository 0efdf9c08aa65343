"""Ten trips of our own between towns that do not exist: the sample of the task travel, in the form of the data."""

from datetime import date, timedelta
from itertools import pairwise
from typing import Any

from mlrl.tasks.task_data import Row

_TOWNS = ("Alderwick", "Brackholm", "Corrin Bay", "Dunmere", "Eastfell", "Farlough")
_RESTAURANTS = (
    "Copper Pot",
    "Lantern House",
    "Old Mill",
    "Green Table",
    "Harbour Kitchen",
    "Two Doves",
    "Salt and Rye",
)
_CUISINES = ("Italian, Cafe", "Indian, Tea", "American, BBQ", "French, Bakery", "Mexican, Pizza", "Chinese, Seafood")
_SIGHTS = ("Clock Museum", "Botanic Garden", "Castle Hill", "River Walk", "Toy Collection")
_HOTELS = (  # name, price, room, rules, least nights, guests
    ("Attic Room", 60, "Private room", "No parties", 1, 2),
    ("Whole Cottage", 110, "Entire home/apt", "No smoking & No visitors", 2, 4),
    ("Loft above the Bakery", 90, "Entire home/apt", "No pets", 1, 3),
    ("Shared Dormitory", 25, "Shared room", "No children under 10", 1, 1),
)
_START = date(2025, 5, 4)

_TRIPS: tuple[tuple[tuple[int, ...], int, int, dict[str, Any]], ...] = (  # route of towns, people, budget, wishes
    ((0, 1), 1, 600, {}),
    ((1, 2), 2, 1100, {}),
    ((2, 3, 4), 1, 1000, {}),
    ((3, 0), 2, 1200, {"room type": "entire room"}),
    ((4, 5), 3, 1500, {"cuisine": ["Italian", "Indian"]}),
    ((5, 0, 2), 2, 2000, {"house rule": "pets"}),
    ((0, 3), 4, 2200, {"house rule": "smoking", "room type": "private room"}),
    ((1, 4, 5), 1, 1100, {"transportation": "no flight"}),
    ((2, 5), 1, 600, {"transportation": "no self-driving"}),
    ((4, 1, 3), 2, 1900, {"cuisine": ["French"]}),
)


def trips() -> list[Row]:
    """Rows with query, people_number, budget, local_constraint, reference_information; 3 days, or 5 for two towns."""
    return [_trip(*trip) for trip in _TRIPS]


def _trip(route: tuple[int, ...], people: int, budget: int, wishes: dict[str, Any]) -> Row:
    towns = [_TOWNS[i] for i in (*route, route[0])]
    days = 2 * len(towns) - 3
    reference: dict[str, Any] = {}
    for i in route[1:]:
        reference |= _places(i)
    for leg, (origin, destination) in enumerate(pairwise(towns)):
        reference |= _ways(origin, destination, _START + timedelta(days=2 * leg), leg + sum(route))
    where = " and ".join(towns[1:-1])
    told = [f"; {key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in wishes.items()]
    query = f"Plan {days} days for {people} from {towns[0]} to {where}, from May {_START.day}, up to ${budget}"
    return {
        "query": f"{query}{''.join(told)}.",
        "people_number": people,
        "budget": budget,
        "local_constraint": wishes,
        "reference_information": reference,
    }


def _places(i: int) -> dict[str, Any]:
    town = _TOWNS[i]
    hotels = [
        {
            "NAME": name,
            "price": price + 5 * i,
            "room type": room,
            "house_rules": rules,
            "minimum nights": nights,
            "maximum occupancy": guests,
        }
        for name, price, room, rules, nights, guests in _HOTELS
    ]
    restaurants = [
        {"Name": f"{name} {town}", "Average Cost": 12 + 7 * ((i + k) % 4), "Cuisines": _CUISINES[(i + k) % 6]}
        for k, name in enumerate(_RESTAURANTS)
    ]
    return {
        f"Attractions in {town}": [{"Name": f"{name} of {town}"} for name in _SIGHTS],
        f"Restaurants in {town}": restaurants,
        f"Accommodations in {town}": hotels,
    }


def _ways(origin: str, destination: str, day: date, k: int) -> dict[str, Any]:
    distance = 90 + 40 * (k % 5)
    flight = {
        "Flight Number": f"F{3500000 + 977 * k}",
        "Price": 45 + distance // 4,
        "DepTime": f"{8 + k % 9:02d}:15",
        "ArrTime": f"{9 + k % 9:02d}:40",
    }
    ends = f"from {origin} to {destination}"
    return {
        f"Flight {ends} on {day}": [flight],
        f"Self-driving {ends}": f"self-driving, {ends}, distance: {distance} km, cost: {distance // 10}",
        f"Taxi {ends}": f"taxi, {ends}, distance: {distance} km, cost: {distance}",
    }
