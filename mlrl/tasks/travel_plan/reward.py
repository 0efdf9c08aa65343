"""The reward of a pair of answers to a trip, with all that it is made of: reward, metrics and tests read one `Score`.

    R = .06·V + .02·J + J·(.14·B + .60·B^.65·Q^.35 + .08·g + .10·G)
        − .10·rejected − .05·conflict − .05·overlap − .10·copy − .05·over_length,      clamped to [−0.25, 1]

    V   share of agents whose action is valid: a JSON object only, with one assignment for each owned slot
    J   1 where all actions are valid and every filled slot of the merged plan is readable and fits the route of its day
    g   required slots that the reference knows / required slots
    coverage  required slots that are filled / required slots
    Q   (.10 + .90·g)·(.45·coverage + .55·g)
    B   .20·mean + .80·min over the two roles of (required slots that are known and allowed / required slots)
    G   1 where g is 1, every filled slot is known and allowed, the cuisines that were asked for are there and the cost
        is within the budget
    rejected     mean share of an agent's assignments that are unreadable, of no slot, or the second of a slot; 1 for an
                 answer without any
    conflict     share of the filled slots of agent 1's role that are in no city of the plan's current_city of that day
    overlap      mean share of an agent's assignments to slots of its partner
    copy         mean of clamp((share of the 8-grams outside the JSON that stand in the reference − .20)/.60)
    over_length  share of agents with more than 240 + 180·(owned slots) characters

Known, allowed, filled and fits are those of `mlrl.tasks.travel_plan.plan`. A pair that fills nothing gets .08, a pair
without a valid action 0 at most, with one valid action .03 at most, a perfect pair 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlrl.tasks.travel_plan.answer import EMPTY, ROLES, Action, Slot, merged, read_action
from mlrl.tasks.travel_plan.plan import (
    MEALS,
    Checked,
    check_plan,
    cuisines_met,
    named_place,
    required_slots,
)
from mlrl.tasks.travel_plan.reference import plain_name
from mlrl.tasks.travel_plan.trip import Trip


@dataclass(frozen=True)
class Score:
    """Everything that is known of the answers to a trip."""

    trip: Trip
    actions: tuple[Action, ...]
    plan: dict[Slot, str]
    """The merged values, empty ones left out"""
    checked: dict[Slot, Checked]
    required: tuple[Slot, ...]
    cuisines: frozenset[str]
    copy: float

    def _share(self, slots: Sequence[Slot], quality: str) -> float:
        """Share of the slots that are filled and have a quality of `Checked`."""
        return sum(slot in self.checked and getattr(self.checked[slot], quality) for slot in slots) / len(slots)

    @property
    def validity(self) -> float:
        return sum(action.valid for action in self.actions) / len(self.actions)

    @property
    def joint(self) -> float:
        return float(self.validity == 1.0 and all(check.fits for check in self.checked.values()))

    @property
    def grounded(self) -> float:
        return self._share(self.required, "grounded")

    @property
    def coverage(self) -> float:
        return sum(slot in self.plan for slot in self.required) / len(self.required)

    @property
    def quality(self) -> float:
        return (0.10 + 0.90 * self.grounded) * (0.45 * self.coverage + 0.55 * self.grounded)

    @property
    def balance(self) -> float:
        shares = [self._share([slot for slot in self.required if slot[1] in role], "valid") for role in ROLES]
        return 0.20 * sum(shares) / len(shares) + 0.80 * min(shares)

    @property
    def cost(self) -> float:
        """Dollars for all travellers."""
        return math.fsum(check.cost for check in self.checked.values())

    @property
    def in_budget(self) -> bool:
        return self.cost <= self.trip.budget

    @property
    def success(self) -> float:
        """G."""
        return float(
            self.grounded == 1.0
            and all(check.valid for check in self.checked.values())
            and self.cuisines.issuperset(self.trip.cuisines)
            and self.in_budget
        )

    @property
    def rejected(self) -> float:
        return sum(action.rejected for action in self.actions) / len(self.actions)

    @property
    def overlap(self) -> float:
        return sum(action.foreign for action in self.actions) / len(self.actions)

    @property
    def over_length(self) -> float:
        return sum(action.too_long for action in self.actions) / len(self.actions)

    @property
    def conflict(self) -> float:
        filled = [slot for slot in self.plan if slot[1] in ROLES[1]]
        return sum(self._elsewhere(*slot) for slot in filled) / len(filled) if filled else 0.0

    def _elsewhere(self, day: int, name: str) -> bool:
        """Whether a place of agent 1's is in no city that the plan's current_city of the day names."""
        parts = self.plan[day, name].split(";") if name == "attraction" else [self.plan[day, name]]
        cities = {plain_name(named_place(part)[1]) for part in parts if part.strip()}
        here = f" {plain_name(self.plan.get((day, 'current_city'), ''))} "
        return not cities or not all(city and city in here for city in cities)

    @property
    def total(self) -> float:
        """The reward."""
        bottleneck = self.balance
        value = math.fsum(
            (
                0.06 * self.validity,
                0.02 * self.joint,
                0.14 * self.joint * bottleneck,
                0.60 * self.joint * bottleneck**0.65 * self.quality**0.35,
                0.08 * self.joint * self.grounded,
                0.10 * self.joint * self.success,
                -0.10 * self.rejected,
                -0.05 * self.conflict,
                -0.05 * self.overlap,
                -0.10 * self.copy,
                -0.05 * self.over_length,
            )
        )
        return min(1.0, max(-0.25, value))

    def commonsense(self) -> list[bool]:
        """Complete, on route, known, no place twice, one's own car always or never; an empty plan has none."""
        transport = [value.lower() for (_, name), value in self.plan.items() if name == "transportation"]
        driving = sum(value.startswith("self-driving") for value in transport)
        places = [check for (_, name), check in self.checked.items() if name in ROLES[1] and check.grounded]
        checks = [
            self.coverage == 1.0,
            all(check.fits for check in self.checked.values()),
            all(check.grounded for check in self.checked.values()),
            all(check.valid for check in places),
            driving in (0, len(transport)),
        ]
        return [bool(self.checked) and passed for passed in checks]

    def wishes(self) -> list[bool]:
        """The budget, and what else the query asks for."""
        hotels = [check for (_, name), check in self.checked.items() if name == "accommodation"]
        rides = [check for (_, name), check in self.checked.items() if name == "transportation"]
        found = [self.in_budget and self.coverage == 1.0]
        if self.trip.cuisines:
            found.append(self.cuisines.issuperset(self.trip.cuisines))
        if self.trip.rule or self.trip.room:
            found.append(bool(hotels) and all(check.valid for check in hotels))
        if self.trip.no_flight or self.trip.no_driving:
            found.append(bool(rides) and all(check.valid for check in rides))
        return found

    def metrics(self) -> dict[str, float]:
        """All numbers by name."""
        filled = len(self.checked)
        precision = sum(check.grounded for check in self.checked.values()) / filled if filled else 0.0
        g = self.grounded
        paid = [slot for slot in self.required if slot[1] in ("transportation", "accommodation", *MEALS)]
        cost_known = self._share(paid, "grounded")
        margin = min(1.0, max(0.0, 2.0 - self.cost / self.trip.budget))
        days = range(1, self.trip.days + 1)
        commonsense, wishes = self.commonsense(), self.wishes()
        success = float(all(commonsense) and all(wishes))
        return {
            "reward": self.total,
            "action_validity": self.validity,
            "team_action_success": self.joint,
            "required_cooperative_contribution": self.balance,
            "required_grounded_recall": g,
            "entity_grounding_precision": precision,
            "grounding_f1": 2 * precision * g / (precision + g) if precision + g else 0.0,
            "required_cost_completeness": cost_known,
            "reference_budget_soft": g * cost_known * margin,
            "reference_budget_pass": float(cost_known == 1.0 and self.in_budget),
            "route_scaffold_match": self._share([(day, "current_city") for day in days], "fits"),
            "reference_plan_delivery": float(self.validity == 1.0),
            "required_plan_completion": self.coverage,
            "reference_commonsense_micro": sum(commonsense) / len(commonsense),
            "reference_hard_micro": sum(wishes) / len(wishes),
            "reference_plan_success": success,
            "collaboration_success": success * self.joint,
            "cost": self.cost,
            "rejected": self.rejected,
            "conflict": self.conflict,
            "overlap": self.overlap,
            "copy": self.copy,
            "over_length": self.over_length,
        }


def score(answers: Sequence[str], trip: Trip, reference: Mapping[str, Any], shown: Sequence[str] = ()) -> Score:
    """Scores the answers of a team to a trip.

    Args:
        shown: what each agent was shown of the reference, for the copy rate.
    """
    actions = tuple(read_action(answer, i, len(answers), trip.days) for i, answer in enumerate(answers))
    plan = {slot: value for slot, value in merged(actions).items() if value != EMPTY}
    checked = check_plan(plan, trip, reference)
    copies = [copy_rate(action.outside, text) for action, text in zip(actions, shown, strict=False)]
    return Score(
        trip=trip,
        actions=actions,
        plan=plan,
        checked=checked,
        required=tuple(required_slots(trip)),
        cuisines=frozenset(cuisines_met(plan, checked, reference)),
        copy=sum(copies) / len(copies) if copies else 0.0,
    )


def copy_rate(text: str, reference: str, size: int = 8) -> float:
    """clamp((share of the word n-grams of a text that stand in the reference − .20)/.60) to [0, 1]."""
    grams = _grams(text, size)
    if not grams:
        return 0.0
    known = set(_grams(reference, size))
    share = sum(gram in known for gram in grams) / len(grams)
    return min(1.0, max(0.0, (share - 0.20) / 0.60))


def _grams(text: str, size: int) -> list[tuple[str, ...]]:
    tokens = text.split()
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
