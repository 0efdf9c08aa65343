import pytest

from mlrl.errors import ConfigError
from mlrl.tasks.travel_plan.reference import COLUMNS, plain_city, plain_name, read_reference, read_table
from mlrl.tasks.travel_plan.rows import selected, stratified, travel_row
from mlrl.tasks.travel_plan.trip import Trip, read_trip, trip_fields, trip_of


def printed(columns, rows, index=None):
    """A table as pandas prints it: right-aligned columns, row numbers on the left where there are some."""
    widths = [max(len(str(row[i])) for row in (columns, *rows)) for i in range(len(columns))]
    lines = [
        " ".join(str(value).rjust(width) for value, width in zip(row, widths, strict=True)) for row in (columns, *rows)
    ]
    if index is not None:
        margin = max(len(str(i)) for i in index)
        lines = [f"{str(i).ljust(margin)}  {line}" for i, line in zip(["", *index], lines, strict=True)]
    return "\n".join(lines)


RESTAURANTS = [("Café Nº 5", 20, "Tea, French", 4.5, "Rockford"), ("A 2 Z, the Diner", 7, "Pizza", 3.0, "Rockford")]
HOTELS = [("Loft\\nby the Sea", 90.0, "Private room", "No pets & No parties", 2.0, 3, 4.0, "Rockford")]
FLIGHTS = [("F3573659", 474, "15:40", "17:04", "2 hours", "2022-03-16", "St. Petersburg", "Rockford", 1049.0)]
DESCRIPTIONS = {
    "Restaurants in Rockford": printed(COLUMNS["Restaurants"], RESTAURANTS, index=[39, 2470]),
    "Accommodations in Rockford": printed(COLUMNS["Accommodations"], HOTELS),
    "Attractions in Rockford": printed(COLUMNS["Attractions"], [("Park", 1.0, 2.0, "1 Road", "n/a", "x", "Rockford")]),
    "Flight from St. Petersburg to Rockford on 2022-03-16": printed(COLUMNS["Flight"], FLIGHTS),
    "Flight from Rockford to St. Petersburg on 2022-03-18": "There is no flight.",
    "Self-driving from St. Petersburg to Rockford": "self-driving, from St. Petersburg to Rockford, cost: 1,071",
    "Taxi from St. Petersburg to Rockford": "No valid information.",
}


def test_a_reference_of_printed_tables():
    found = read_reference(DESCRIPTIONS)
    assert found["restaurants"]["Rockford"] == [
        {"name": "Café Nº 5", "cost": 20.0, "cuisines": ["Tea", "French"]},
        {"name": "A 2 Z, the Diner", "cost": 7.0, "cuisines": ["Pizza"]},
    ]
    hotel = {"name": "Loft by the Sea", "price": 90.0, "room": "Private room", "rules": "No pets & No parties"}
    assert found["hotels"]["Rockford"] == [hotel | {"nights": 2, "guests": 3}]
    assert found["attractions"]["Rockford"] == [{"name": "Park"}]
    ends = {"origin": "St. Petersburg", "destination": "Rockford"}
    assert found["flights"] == [
        {"number": "F3573659", **ends, "date": "2022-03-16", "price": 474.0, "times": "15:40-17:04"}
    ]
    assert found["drives"] == [{"mode": "Self-driving", **ends, "cost": 1071.0}]
    assert found["legs"] == [["2022-03-16", "St. Petersburg", "Rockford"], ["2022-03-18", "Rockford", "St. Petersburg"]]


def test_records_give_the_same_as_tables():
    records = {
        "Restaurants in Rockford": [dict(zip(COLUMNS["Restaurants"], row, strict=True)) for row in RESTAURANTS],
        "Flight from St. Petersburg to Rockford on 2022-03-16": [
            dict(zip(COLUMNS["Flight"], row, strict=True)) for row in FLIGHTS
        ],
    }
    tables = read_reference({key: DESCRIPTIONS[key] for key in records})
    assert read_reference(records) == tables


@pytest.mark.parametrize("text", ["", "No valid information.", "one\ntwo", "Name City\nPark Rome"])
def test_texts_that_are_no_table(text):
    assert read_table(text, COLUMNS["Attractions"]) == []


def test_names():
    assert plain_city("Houston(Texas)") == plain_city("Houston (Texas)") == "Houston"
    assert plain_name("  The\nOld  MILL ") == "the old mill"


LEGS = [["2022-03-01", "A", "B"], ["2022-03-03", "B", "C"], ["2022-03-05", "C", "A"]]


def test_the_route_follows_the_dates():
    trip = read_trip({"query": "A trip for $1,000."}, LEGS)
    assert (trip.days, trip.home, trip.budget, trip.people, trip.level) == (5, "A", 1000.0, 1, "easy")
    assert [trip.scaffold(day) for day in range(1, 6)] == ["from A to B", "B", "from B to C", "C", "from C to A"]
    assert trip_of(trip_fields(trip)) == trip


@pytest.mark.parametrize(
    ("query", "people"),
    [
        ("for a single person", 1),
        ("a solo trip", 1),
        ("for 1 person", 1),
        ("for a group of 8,", 8),
        ("a party of 5", 5),
        ("for two people departing", 2),
        ("for two departing from Rome", 2),
        ("for three individuals", 3),
        ("for a pair, departing", 2),
        ("a group of three with", 3),
    ],
)
def test_people(query, people):
    assert read_trip({"query": f"A trip {query} with a budget of $900."}, LEGS).people == people


@pytest.mark.parametrize(
    ("query", "wishes"),
    [
        ("departing from St. Petersburg", {}),
        ("pet-friendly places", {"rule": "pets"}),
        ("we bring our pets, in private rooms", {"rule": "pets", "room": "private room"}),
        ("hotels where parties are allowed", {"rule": "parties"}),
        ("a party of 5", {}),
        ("smoking must be allowed", {"rule": "smoking"}),
        ("with children under the age of 10", {"rule": "children under 10"}),
        ("visitors allowed, entire rooms", {"rule": "visitors", "room": "entire room"}),
        ("no shared rooms please", {"room": "shared room"}),
        ("a room that is not shared room", {"room": "not shared room"}),
        ("Italian and American food", {"cuisines": ("American", "Italian")}),
        ("we do not plan on self-driving", {"no_driving": True}),
        ("prefer non-self-driving transportation", {"no_driving": True}),
        ("it must not involve any flights", {"no_flight": True}),
        ("avoid flying", {"no_flight": True}),
        ("by flight or by self-driving", {}),
        ("We have no specific preferences about house rules, cuisine, pets", {}),
    ],
)
def test_wishes(query, wishes):
    trip = read_trip({"query": f"A trip for $900. It is {query}."}, LEGS)
    default = {"rule": "", "room": "", "cuisines": (), "no_flight": False, "no_driving": False}
    assert {key: getattr(trip, key) for key in default} == default | wishes


def test_fields_go_before_the_query():
    row = {
        "query": "A trip for two with pets for $900.",
        "people_number": 3,
        "budget": 500,
        "local_constraint": "{'house rule': 'smoking', 'cuisine': ['Indian'], 'room type': None, "
        "'transportation': 'no flight'}",
    }
    trip = read_trip(row, LEGS)
    assert (trip.people, trip.budget, trip.rule, trip.room, trip.cuisines) == (3, 500.0, "smoking", "", ("Indian",))
    assert trip.no_flight
    assert trip.level == "hard"


@pytest.mark.parametrize(("query", "legs", "message"), [("$5", [], "no flights by date"), ("free", LEGS, "no budget")])
def test_queries_without_what_is_needed(query, legs, message):
    with pytest.raises(ConfigError, match=message):
        read_trip({"query": query}, legs)


def test_rows_in_both_forms():
    query = "A 3-day trip from St. Petersburg to Rockford for $1,700."
    listed = [{"Description": key, "Content": value} for key, value in DESCRIPTIONS.items()]
    chat = [
        {"role": "system", "content": "Plan."},
        {"role": "user", "content": f"Given Information:{listed}\nQuery:{query}\n"},
        {"role": "assistant", "content": "[{'days': 1}]"},
    ]
    by_chat = travel_row({"messages": chat}, 7)
    assert by_chat == travel_row({"query": query, "reference_information": str(listed), "annotated_plan": "x"}, 7)
    assert by_chat == travel_row({"query": query, "reference_information": DESCRIPTIONS}, 7)
    assert (by_chat["query"], by_chat["level"], by_chat["trip"]["days"]) == (query, "easy", 3)
    for row in ({"query": query}, {"messages": [{"role": "user", "content": "Hello"}]}):
        with pytest.raises(ConfigError, match="row 7 has the fields"):
            travel_row(row, 7)


def rows_of(*kinds):
    return [{"id": i, "level": level, "trip": {"days": days}} for i, (days, level) in enumerate(kinds)]


def test_the_split_takes_a_share_of_each_kind():
    rows = rows_of(*[(3, "easy")] * 20, *[(5, "easy")] * 20, *[(3, "medium")] * 20, *[(5, "medium")] * 20)
    train, held_out = stratified(rows, 0.25, seed=42)
    assert (len(train), len(held_out)) == (60, 20)
    for kind in {(row["trip"]["days"], row["level"]) for row in rows}:
        assert sum((row["trip"]["days"], row["level"]) == kind for row in held_out) == 5
    assert stratified(rows, 0.25, seed=42)[1] == held_out
    assert stratified(rows, 0.25, seed=43)[1] != held_out


@pytest.mark.parametrize(
    ("days", "levels", "message"),
    [("3", "soft", "levels='soft'"), ("x", "easy", "days='x'"), ("7", "easy", "none of the 1 rows")],
)
def test_rows_to_take(days, levels, message):
    rows = rows_of((3, "easy"))
    assert selected(rows, "3,5", "easy, hard") == rows
    with pytest.raises(ConfigError, match=message):
        selected(rows, days, levels)
    with pytest.raises(ConfigError, match="eval_share=0"):
        stratified(rows, 0, 1)


def test_levels_count_wishes():
    trip = Trip(3, 1, 1.0, {})
    assert trip.level == "easy"
    assert Trip(3, 1, 1.0, {}, no_flight=True, no_driving=True).level == "medium"
    assert Trip(3, 1, 1.0, {}, rule="pets", cuisines=("Indian",)).level == "hard"
