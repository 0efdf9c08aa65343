import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.travel import item_score
from mlrl.tasks.travel_plan.answer import ROLES, owned_slots, read_action, written
from mlrl.tasks.travel_plan.plan import check_plan, required_slots
from mlrl.tasks.travel_plan.prompts import budget_caps, reference_text
from mlrl.tasks.travel_plan.reward import copy_rate, score
from mlrl.tasks.travel_plan.trip import Trip, trip_of
from tests.texts import HOSTILE, THOUSAND, logged, pairs, pieces, rewards

# Three days for 2 people, A → B → A, $600. Required: 3 current_city, 2 transportation, 2 accommodation and on day 2
# breakfast, lunch, dinner, attraction: 11 slots, 7 of agent 0 and 4 of agent 1.
TRIP = Trip(days=3, people=2, budget=600.0, legs={1: ("A", "B"), 3: ("B", "A")}, cuisines=("Thai",), rule="pets")
ENDS, BACK = {"origin": "A", "destination": "B"}, {"origin": "B", "destination": "A"}
REFERENCE = {
    "restaurants": {"B": [{"name": name, "cost": cost, "cuisines": [kind]} for name, cost, kind in [
        ("Mill", 10.0, "Thai"), ("Dock, the Bar", 20.0, "Tea"), ("Inn", 30.0, "Thai")]]},
    "hotels": {"B": [
        {"name": "Loft", "price": 50.0, "room": "Private room", "rules": "No smoking", "nights": 2, "guests": 1},
        {"name": "Kennel-free", "price": 40.0, "room": "Private room", "rules": "No pets", "nights": 1, "guests": 2},
        {"name": "Castle", "price": 90.0, "room": "Entire home/apt", "rules": "None", "nights": 3, "guests": 9},
    ]},
    "attractions": {"B": [{"name": "Park"}, {"name": "Zoo"}]},
    "flights": [{"number": "F1234567", **ENDS, "date": "d", "price": 60.0, "times": "t"}],
    "drives": [{"mode": "Taxi", **BACK, "cost": 30.0}, {"mode": "Self-driving", **BACK, "cost": 8.0}],
}  # fmt: skip
BEST = {
    (1, "current_city"): "from A to B",
    (2, "current_city"): "B",
    (3, "current_city"): "from B to A",
    (1, "transportation"): "Flight F1234567, from A to B",
    (3, "transportation"): "Taxi, from B to A",
    (1, "accommodation"): "Loft, B",
    (2, "accommodation"): "Loft, B",
    (2, "breakfast"): "Mill, B",
    (2, "lunch"): "Dock, the Bar, B",
    (2, "dinner"): "Inn, B",
    (2, "attraction"): "Park, B; Zoo, B",
}
COST = 2 * 60 + 30 + 2 * 2 * 50 + 2 * (10 + 20 + 30)  # flight for two, one taxi, two rooms for two nights, meals: 470


def plan(changes):
    return BEST | changes


def scored(values, num_agents=2):
    return score([written(values, agent, num_agents, 3) for agent in range(num_agents)], TRIP, REFERENCE)


def test_required_slots():
    assert sorted(required_slots(TRIP)) == sorted(BEST)
    assert len(owned_slots(0, 2, 3)) == 9
    assert len(owned_slots(1, 2, 3)) == 12
    assert len(owned_slots(0, 1, 3)) == 21


def test_a_perfect_pair_gets_one():
    for num_agents in (1, 2):
        found = scored(BEST, num_agents)
        assert found.total == 1.0
        assert found.cost == COST
        assert set(found.metrics().values()) <= {0.0, 1.0, float(COST)}
        assert found.metrics()["collaboration_success"] == 1.0


def test_a_pair_that_fills_nothing_gets_008():
    assert scored({}).total == 0.06 + 0.02
    others = {key: value for key, value in scored({}).metrics().items() if key != "reward"}
    said = {"action_validity", "team_action_success", "reference_plan_delivery"}
    assert {key for key, value in others.items() if value} == said


def reward(validity=1.0, joint=1.0, g=1.0, coverage=1.0, balance=1.0, success=0.0, penalty=0.0):
    quality = (0.10 + 0.90 * g) * (0.45 * coverage + 0.55 * g)
    inner = 0.14 * balance + 0.60 * balance**0.65 * quality**0.35 + 0.08 * g + 0.10 * success
    return 0.06 * validity + 0.02 * joint + joint * inner - penalty


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # lunch left out: 10 of 11 known and filled; roles 7/7 and 3/4: B = .2·.875 + .8·.75
        ({(2, "lunch"): "-"}, {"g": 10 / 11, "coverage": 10 / 11, "balance": 0.2 * 0.875 + 0.8 * 0.75}),
        # lunch made up: filled, but not known
        ({(2, "lunch"): "Nowhere, B"}, {"g": 10 / 11, "coverage": 1, "balance": 0.2 * 0.875 + 0.8 * 0.75}),
        # the same restaurant twice: known, but one of them not allowed
        ({(2, "lunch"): "Mill, B"}, {"balance": 0.2 * 0.875 + 0.8 * 0.75}),
        # the hotel forbids pets: 5 of agent 0's 7
        (
            {(1, "accommodation"): "Kennel-free, B", (2, "accommodation"): "Kennel-free, B"},
            {"balance": 0.2 * (5 / 7 + 1) / 2 + 0.8 * 5 / 7},
        ),
        # Castle wants three nights
        (
            {(1, "accommodation"): "Castle, B", (2, "accommodation"): "Castle, B"},
            {"balance": 0.2 * (5 / 7 + 1) / 2 + 0.8 * 5 / 7},
        ),
        # one night in each: Loft wants two nights, Kennel-free forbids pets
        ({(2, "accommodation"): "Kennel-free, B"}, {"balance": 0.2 * (5 / 7 + 1) / 2 + 0.8 * 5 / 7}),
        # all allowed, but Thai is not served: the two Thai restaurants stay away
        (
            {(2, "breakfast"): "-", (2, "dinner"): "-"},
            {"g": 9 / 11, "coverage": 9 / 11, "balance": 0.2 * 0.75 + 0.8 * 0.5},
        ),
        # one more attraction that nobody knows, on a day where none is required: G is lost
        ({(1, "attraction"): "Moon, B"}, {}),
        # and one that is known: still perfect
        ({(1, "attraction"): "-", (1, "dinner"): "-"}, {"success": 1}),
    ],
)
def test_plans_that_keep_to_the_route(changes, expected):
    found = scored(plan(changes))
    assert found.joint == 1.0
    assert found.total == pytest.approx(reward(**expected))


@pytest.mark.parametrize(
    "changes",
    [
        {(2, "current_city"): "A"},
        {(2, "current_city"): "from A to B"},
        {(1, "transportation"): "Flight F1234567, from B to A"},
        {(1, "transportation"): "by balloon"},
        {(2, "transportation"): "Taxi, from A to B"},  # a day without a leg
        {(1, "accommodation"): "Loft, A"},
        {(1, "accommodation"): "Loft"},
        {(3, "accommodation"): "Loft, B"},  # back at home
    ],
)
def test_plans_that_leave_the_route(changes):
    found = scored(plan(changes))
    assert found.joint == 0.0
    conflict = 4 / 4 if (2, "current_city") in changes and changes[2, "current_city"] == "A" else 0.0
    assert found.total == pytest.approx(0.06 - 0.05 * conflict)


def test_a_meal_in_another_city_is_a_conflict():
    # 1 of the 4 filled slots of agent 1; its city is not on the route either
    found = scored(plan({(2, "lunch"): "Mill, C"}))
    assert found.conflict == 0.25
    assert found.total == pytest.approx(0.06 - 0.05 / 4)


@pytest.mark.parametrize(
    ("value", "day", "fits", "grounded", "valid", "cost"),
    [
        ("Flight Number: F1234567, from A(Texas) to B (Ohio), Departure Time: 1:00", 1, 1, 1, 1, 120.0),
        ("flight F1234567, from A to B", 1, 1, 1, 1, 120.0),
        ("Flight F7654321, from A to B", 1, 1, 0, 0, 0.0),
        ("Taxi, from A to B", 1, 1, 0, 0, 0.0),  # not known in this direction
        ("Taxi, from B to A, duration: 1 hour", 3, 1, 1, 1, 30.0),
        ("Self-driving, from B to A, cost: 1", 3, 1, 1, 1, 8.0),
        ("Self-driving F1234567, from B to A", 3, 0, 0, 0, 0.0),  # both modes
    ],
)
def test_transportation(value, day, fits, grounded, valid, cost):
    check = check_plan({(day, "transportation"): value}, TRIP, REFERENCE)[day, "transportation"]
    assert (check.fits, check.grounded, check.valid, check.cost) == (fits, grounded, valid, cost)


def test_forbidden_ways():
    strict = Trip(3, 6, 600.0, TRIP.legs, no_flight=True, no_driving=True)
    ways = {(1, "transportation"): "Flight F1234567, from A to B", (3, "transportation"): "Self-driving, from B to A"}
    checked = check_plan(ways, strict, REFERENCE)
    assert [(check.grounded, check.valid) for check in checked.values()] == [(True, False)] * 2
    assert [check.cost for check in checked.values()] == [6 * 60.0, 2 * 8.0]  # six people: two cars of five


def test_over_budget_loses_g_only():
    poor = Trip(3, 2, COST - 1, TRIP.legs, cuisines=("Thai",), rule="pets")
    found = score([written(BEST, agent, 2, 3) for agent in (0, 1)], poor, REFERENCE)
    assert found.total == pytest.approx(0.9)
    metrics = found.metrics()
    assert metrics["reference_budget_pass"] == 0.0
    assert metrics["reference_budget_soft"] == pytest.approx(2 - COST / (COST - 1))
    assert metrics["reference_hard_micro"] == pytest.approx(2 / 3)  # cuisine and hotel, not the budget
    free = Trip(3, 2, COST / 2, TRIP.legs)
    found = score([written(BEST, agent, 2, 3) for agent in (0, 1)], free, REFERENCE)
    assert found.metrics()["reference_budget_soft"] == 0.0


GOOD = [written(BEST, agent, 2, 3) for agent in (0, 1)]


def edited(agent, **changes):
    return json.dumps(json.loads(GOOD[agent]) | changes)


def entries(agent):
    return json.loads(GOOD[agent])["assignments"]


@pytest.mark.parametrize(
    ("answer", "valid", "rejected", "foreign"),
    [
        (GOOD[0], True, 0, 0),
        (f"```json\n{GOOD[0]}\n```", True, 0, 0),
        (f"Here it is: {GOOD[0]}", False, 0, 0),
        (f"{GOOD[0]} {GOOD[0]}", False, 0, 0),
        (edited(0, agent_id=1), False, 0, 0),
        (edited(0, agent_id="0"), False, 0, 0),
        (edited(0, agent_id=False), False, 0, 0),
        (edited(0, assignments=entries(0)[:-1]), False, 0, 0),
        (edited(0, assignments=[*entries(0), entries(0)[0]]), False, 1 / 10, 0),
        (edited(0, assignments=[*entries(0), entries(1)[0]]), False, 0, 1 / 10),
        (edited(0, assignments=[*entries(0), {"day": 4, "field": "current_city", "value": "-"}]), False, 1 / 10, 0),
        (edited(0, assignments=[*entries(0)[1:], {"day": 1, "field": "current_city", "value": ""}]), False, 1 / 9, 0),
        (edited(0, assignments=[*entries(0)[1:], "text"]), False, 1 / 9, 0),
        (edited(0, assignments=[]), False, 1, 0),
        (edited(0, assignments="none"), False, 1, 0),
        (GOOD[0][:-5], False, 1, 0),
        ("", False, 1, 0),
        ("[]", False, 1, 0),
    ],
)
def test_actions(answer, valid, rejected, foreign):
    action = read_action(answer, 0, 2, 3)
    assert (action.valid, action.rejected, action.foreign) == (valid, pytest.approx(rejected), pytest.approx(foreign))


def test_marks_of_invalid_pairs():
    assert score(["", ""], TRIP, REFERENCE).total == pytest.approx(-0.10)
    assert score([GOOD[0], ""], TRIP, REFERENCE).total == pytest.approx(0.03 - 0.05)
    assert score([GOOD[0], GOOD[1] + "."], TRIP, REFERENCE).total == pytest.approx(0.03)
    assert score([GOOD[0] + ".", GOOD[1] + "."], TRIP, REFERENCE).total == 0.0
    # agent 1 writes for agent 0: all 9 slots are its partner's; − .05·1/2
    assert score([GOOD[0], edited(0, agent_id=1)], TRIP, REFERENCE).total == pytest.approx(0.03 - 0.025)


def test_over_length():
    # 240 + 180·9 = 1860 characters for agent 0
    padded = GOOD[0] + " " * (1860 - len(GOOD[0]))
    assert score([padded, GOOD[1]], TRIP, REFERENCE).total == 1.0
    assert score([padded + " ", GOOD[1]], TRIP, REFERENCE).total == pytest.approx(1 - 0.05 / 2)


@pytest.mark.parametrize(("shared", "rate"), [(0, 0.0), (2, 0.0), (5, 0.5), (8, 1.0), (10, 1.0)])
def test_copy_rate(shared, rate):
    # 17 words have ten 8-grams; those of the first words stand in the reference: (share − .2)/.6
    text = [f"w{i}" for i in range(17)]
    reference = " ".join(text[: shared + 7] if shared else ["other"])
    assert copy_rate(" ".join(text), reference) == pytest.approx(rate)


def test_copies_outside_of_the_object_cost():
    shown = [reference_text(TRIP, REFERENCE, agent, 2) for agent in (0, 1)]
    assert score(GOOD, TRIP, REFERENCE, shown).total == 1.0
    copied = score([f"{shown[0]}\n{GOOD[0]}", GOOD[1]], TRIP, REFERENCE, shown)
    assert copied.copy == 0.5  # of one agent
    assert copied.total == pytest.approx(0.03 - 0.05)


def test_budget_caps():
    # Least: flight 2·60 + drive 8 and two nights in Loft for two at 2·50 (Kennel-free forbids pets, Castle is 90): 90 a
    # night is less than 100: 128 + 180; three meals at 2·10: 60. Left: 600 − 308 − 60 = 232, half of it each.
    assert budget_caps(TRIP, REFERENCE) == (308 + 116, 60 + 116)
    poor = Trip(3, 2, 300.0, TRIP.legs, rule="pets")
    assert sum(budget_caps(poor, REFERENCE)) == 300.0


def test_prompts():
    task = load_task("travel")
    item = task.train_dataset[0]
    trip = trip_of(item["trip"])
    first, second = (prompt[0]["content"] for prompt in Environment(task, 2).initial_prompts(item))
    (alone,) = (prompt[0]["content"] for prompt in Environment(task, 1).initial_prompts(item))
    for text in (first, second, alone):
        assert item["query"] in text
        assert all(trip.scaffold(day) in text for day in range(1, trip.days + 1))
    assert ("Hotel:" in first, "Hotel:" in second, "Hotel:" in alone) == (True, False, True)
    assert ("Restaurant:" in first, "Restaurant:" in second, "Restaurant:" in alone) == (False, True, True)
    assert f'"agent_id": {1}' in second
    with pytest.raises(ConfigError, match="num_agents=3"):
        Environment(task, 3).initial_prompts(item)
    with pytest.raises(ConfigError, match="num_turns=2"):
        Environment(task, 2, 2)


def solved(item):
    """A plan that takes the cheapest that is allowed everywhere, restaurants with the wanted cuisines first."""
    trip, reference = trip_of(item["trip"]), item["reference"]
    values, used = {}, set()
    for day, name in required_slots(trip):
        city = trip.cities(day)[-1]
        if name == "current_city":
            options = [trip.scaffold(day)]
        elif name == "transportation":
            leg = trip.scaffold(day)
            options = [f"{mode}, {leg}" for mode in ("Taxi", "Self-driving")]
            options += [f"Flight {f['number']}, {leg}" for f in reference["flights"]]
        elif name == "accommodation":
            options = [f"{h['name']}, {city}" for h in reference["hotels"][city]]
        elif name == "attraction":
            options = [f"{a['name']}, {city}" for a in reference["attractions"][city]]
        else:
            wanted = sorted(reference["restaurants"][city], key=lambda r: not set(r["cuisines"]) & set(trip.cuisines))
            options = [f"{r['name']}, {city}" for r in wanted if r["name"] not in used]
        fine = []
        for option in options:
            nights = {(d, name): option for d in range(1, trip.days) if trip.cities(d)[-1] == city}
            trial = nights if name == "accommodation" else {(day, name): option}
            checked = check_plan(trial, trip, reference)[day, name]
            if checked.valid:
                fine.append((0 if name in ROLES[1] else checked.cost, len(fine), option))
        values[day, name] = min(fine)[2]
        used.add(values[day, name].rpartition(",")[0])
    return trip, values


def test_every_trip_of_our_own_can_be_planned():
    task = load_task("travel")
    rows = [*task.train_dataset, *task.eval_dataset]
    assert (len(task.train_dataset), len(task.eval_dataset)) == (8, 2)
    for item in rows:
        trip, values = solved(item)
        answers = [written(values, agent, 2, trip.days) for agent in (0, 1)]
        assert rewards(task, item, *([answer] for answer in answers)) == [1.0], item["query"]
        assert logged(task, item, *answers)["reward"] == 1.0


ANSWER = st.one_of(
    HOSTILE,
    pieces(
        '{"agent_id": ', "0", "1", ', "assignments": [', *[json.dumps(entry) for entry in entries(0)[:3]], ",", "]}"
    ),
    st.sampled_from([*GOOD, edited(1, assignments=entries(1)[2:]), edited(0, assignments=[*entries(0), *entries(1)])]),
    st.lists(st.sampled_from([*entries(0), *entries(1), {"day": 1}]), max_size=25).map(
        lambda chosen: json.dumps({"agent_id": len(chosen) % 2, "assignments": chosen})
    ),
)


@THOUSAND
@given(pairs(ANSWER))
def test_any_answers_are_rewarded_within_the_range(drawn):
    for answers in drawn:
        found = score(answers, TRIP, REFERENCE, ["Hotel: Loft", "Restaurant: Mill"])
        assert -0.25 <= found.total <= 1.0
        metrics = found.metrics()
        assert metrics["reward"] == found.total
        assert all(0.0 <= value <= 1.0 for name, value in metrics.items() if name not in ("reward", "cost"))
        if found.validity == 0:
            assert found.total <= 0.0
        elif found.validity < 1:
            assert found.total <= 0.03


def test_the_logger_has_the_reward():
    task = load_task("travel")
    item = task.train_dataset[0]
    for answers in [("", ""), ("{}", GOOD[0]), tuple(GOOD)]:
        assert logged(task, item, *answers)["reward"] == rewards(task, item, *([a] for a in answers))[0]
        assert logged(task, item, *answers)["reward"] == item_score(item, answers).total


def test_sources_that_cannot_be_had(tmp_path):
    with pytest.raises(ConfigError, match="Give one of them"):
        load_task("travel", {"data_path": "a", "dataset": "b"})
    with pytest.raises(ConfigError, match="dataset='mlrl-tests/none'"):
        load_task("travel", {"dataset": "mlrl-tests/none"})
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps({'query': 'x'})}\n" * 2)
    with pytest.raises(ConfigError, match="row 0 has the fields query"):
        load_task("travel", {"data_path": str(path)})
