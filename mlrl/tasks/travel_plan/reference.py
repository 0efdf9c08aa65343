"""What is known of the places of a trip: flights, drives, hotels, restaurants and attractions, by city.

Read from the ``{description: records}`` form of the TravelPlanner data, where records are a list of dicts, or a text in
place of it: one sentence for a drive, a printed table for the rest.
"""

import re
from collections.abc import Mapping
from typing import Any

COLUMNS = {
    "Attractions": ("Name", "Latitude", "Longitude", "Address", "Phone", "Website", "City"),
    "Restaurants": ("Name", "Average Cost", "Cuisines", "Aggregate Rating", "City"),
    "Accommodations": (
        "NAME",
        "price",
        "room type",
        "house_rules",
        "minimum nights",
        "maximum occupancy",
        "review rate number",
        "city",
    ),
    "Flight": (
        "Flight Number",
        "Price",
        "DepTime",
        "ArrTime",
        "ActualElapsedTime",
        "FlightDate",
        "OriginCityName",
        "DestCityName",
        "Distance",
    ),
}
_PLACES = re.compile(r"(Attractions|Restaurants|Accommodations) in (.+)")
_FLIGHT = re.compile(r"Flight from (.+) to (.+) on (\d{4}-\d\d-\d\d)")
_DRIVE = re.compile(r"(Self-driving|Taxi) from (.+) to (.+)")
_COST = re.compile(r"cost:\s*\$?([\d,.]*\d)")


def read_reference(descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """The records of a trip, as plain data.

    Returns:
        ``restaurants``, ``hotels``, ``attractions``: city → list of records with a ``name`` and what counts;
        ``flights``: list with number, origin, destination, date, price, times; ``drives``: list with mode, origin,
        destination, cost; ``legs``: list of ``[date, origin, destination]`` in the order of the dates.
    """
    found: dict[str, Any] = {
        "restaurants": {},
        "hotels": {},
        "attractions": {},
        "flights": [],
        "drives": [],
        "legs": [],
    }
    for description, content in descriptions.items():
        places, flight, drive = (p.fullmatch(description.strip()) for p in (_PLACES, _FLIGHT, _DRIVE))
        if places:
            kind, city = places[1], plain_city(places[2])
            records = _records(content, COLUMNS[kind])
            table, read = _PLACE_READERS[kind]
            found[table].setdefault(city, []).extend(read(record) for record in records)
        elif flight:
            origin, destination = plain_city(flight[1]), plain_city(flight[2])
            found["legs"].append([flight[3], origin, destination])
            for record in _records(content, COLUMNS["Flight"]):
                found["flights"].append(
                    {
                        "number": str(record["Flight Number"]).strip(),
                        "origin": origin,
                        "destination": destination,
                        "date": flight[3],
                        "price": float(record["Price"]),
                        "times": f"{record['DepTime']}-{record['ArrTime']}",
                    }
                )
        elif drive:
            cost = _COST.search(content) if isinstance(content, str) else None
            if cost:
                ends = {"origin": plain_city(drive[2]), "destination": plain_city(drive[3])}
                found["drives"].append({"mode": drive[1], **ends, "cost": float(cost[1].replace(",", ""))})
    found["legs"].sort()
    return found


def plain_city(name: str) -> str:
    """A city without the state in parentheses that some plans write behind it."""
    return re.sub(r"\s*\([^()]*\)\s*$", "", name).strip()


def one_line(name: Any) -> str:
    """A name on one line; printed tables have a line break as backslash and n."""
    return " ".join(str(name).replace("\\n", "\n").split())


def plain_name(name: str) -> str:
    """A place's name for comparison: on one line, without case."""
    return one_line(name).casefold()


def _restaurant(record: Mapping[str, Any]) -> dict[str, Any]:
    cuisines = [cuisine.strip() for cuisine in str(record["Cuisines"]).split(",")]
    return {"name": one_line(record["Name"]), "cost": float(record["Average Cost"]), "cuisines": cuisines}


def _hotel(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": one_line(record["NAME"]),
        "price": float(record["price"]),
        "room": str(record["room type"]).strip(),
        "rules": str(record["house_rules"]).strip(),
        "nights": int(float(record["minimum nights"])),
        "guests": int(float(record["maximum occupancy"])),
    }


def _attraction(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": one_line(record["Name"])}


_PLACE_READERS = {
    "Attractions": ("attractions", _attraction),
    "Restaurants": ("restaurants", _restaurant),
    "Accommodations": ("hotels", _hotel),
}


def _records(content: Any, columns: tuple[str, ...]) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return read_table(content, columns)
    return list(content or [])


def read_table(text: str, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a table printed with right-aligned columns, maybe behind row numbers; [] for any other text.

    A value ends where its column's heading ends.
    """
    lines = text.splitlines()
    if len(lines) < 2:
        return []
    ends, position = [], 0
    for column in columns:
        start = lines[0].find(column, position)
        if start == -1:
            return []
        position = start + len(column)
        ends.append(position)
    numbered = all(re.match(r"\d+\s", line) for line in lines[1:]) and lines[0][:1] == " "
    rows = []
    for line in lines[1:]:
        if numbered:
            index = re.match(r"\d+", line)[0]
            line = " " * len(index) + line[len(index) :]
        starts = [0, *ends[:-1]]
        values = (line[start:end].strip() for start, end in zip(starts, ends, strict=True))
        rows.append(dict(zip(columns, values, strict=True)))
    return rows
