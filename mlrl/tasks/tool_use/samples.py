"""Requests of our own that need several calls: the samples of the tasks bfcl and bfcl_multiturn."""

from typing import Any

from mlrl.tasks.task_data import Row


def _function(name: str, description: str, required: int, /, **parameters: tuple[str, str]) -> dict[str, Any]:
    """A schema; the first `required` parameters have to be given. Each is (type, description)."""
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "dict",
            "properties": {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()},
            "required": list(parameters)[:required],
        },
    }


def _row(prompt: str, functions: list[dict[str, Any]], *calls: str, turn: int = 0) -> Row:
    return {"user_prompt": prompt, "function": functions, "ground_truth": list(calls), "turn_index": turn}


_LIGHT = _function(
    "light.set",
    "Sets a lamp to a brightness.",
    2,
    room=("string", "The room of the lamp."),
    percent=("integer", "Brightness from 0 to 100."),
)
_ALARM = _function(
    "alarm.add", "Adds an alarm.", 1, time=("string", "Time as HH:MM."), label=("string", "What it is for.")
)
_WEATHER = _function("weather.today", "Today's weather.", 1, city=("string", "The city."))
_CONVERT = _function(
    "money.convert",
    "Converts an amount of money.",
    3,
    amount=("float", "The amount."),
    source=("string", "Currency code that it is in."),
    target=("string", "Currency code that is wanted."),
)
_AREA = _function(
    "circle.area", "Area of a circle.", 1, radius=("float", "The radius."), unit=("string", "Unit of the radius.")
)
_LIST = _function("list.add", "Adds one thing to the shopping list.", 1, item=("string", "The thing."))
_TRAIN = _function(
    "train.search",
    "Looks up trains.",
    2,
    start=("string", "City of departure."),
    end=("string", "City of arrival."),
    seats=("integer", "Seats that are needed, 1 if not given."),
)

PARALLEL_ROWS: list[Row] = [
    _row(
        "Dim the lamp in the kitchen to 30 percent and turn the one in the hall up to 80.",
        [_LIGHT, _ALARM],
        "light.set(room='kitchen', percent=30)",
        "light.set(room='hall', percent=80)",
    ),
    _row(
        "What is the weather in Lisbon, in Oslo and in Quito today?",
        [_WEATHER],
        "weather.today(city='Lisbon')",
        "weather.today(city='Oslo')",
        "weather.today(city='Quito')",
    ),
    _row(
        "How much are 250 euros in yen, and how much are 90 dollars in euros? Codes: EUR, JPY, USD.",
        [_CONVERT, _WEATHER],
        "money.convert(amount=250, source='EUR', target='JPY')",
        "money.convert(amount=90, source='USD', target='EUR')",
    ),
    {
        "user_prompt": "I need the area of circles with a radius of 2 and of 3.5 metres.",
        "function": [_AREA],
        "ground_truth": [
            {"circle.area": {"radius": [2], "unit": ["m", "metres", "meters", ""]}},
            {"circle.area": {"radius": [3.5], "unit": ["m", "metres", "meters", ""]}},
        ],
    },
    _row(
        "Put milk, rice, soap and apples on my shopping list, each by itself.",
        [_LIST, _ALARM],
        "list.add(item='milk')",
        "list.add(item='rice')",
        "list.add(item='soap')",
        "list.add(item='apples')",
    ),
    {
        "user_prompt": "Find trains from Lyon to Geneva for three people, and from Geneva to Bern for one.",
        "function": [_TRAIN, _WEATHER],
        "ground_truth": [
            {"train.search": {"start": ["Lyon"], "end": ["Geneva"], "seats": [3]}},
            {"train.search": {"start": ["Geneva"], "end": ["Bern"], "seats": [1, ""]}},
        ],
    },
    _row(
        "Wake me at 06:30, remind me at 12:00 of lunch, and tell me today's weather in Turin. The label of the first "
        "alarm is wake, that of the second lunch.",
        [_ALARM, _WEATHER, _LIGHT],
        "alarm.add(time='06:30', label='wake')",
        "alarm.add(time='12:00', label='lunch')",
        "weather.today(city='Turin')",
    ),
    _row(
        "Switch off the lamps in the attic and in the cellar by setting them to 0.",
        [_LIGHT, _LIST],
        "light.set(room='attic', percent=0)",
        "light.set(room='cellar', percent=0)",
    ),
    _row(
        "Add candles to the shopping list and set the lamp in the dining room to 15 percent.",
        [_LIST, _LIGHT],
        "list.add(item='candles')",
        "light.set(room='dining room', percent=15)",
    ),
    _row(
        "Check the weather in Kyoto and in Nara, and convert 100 USD to JPY.",
        [_WEATHER, _CONVERT],
        "weather.today(city='Kyoto')",
        "weather.today(city='Nara')",
        "money.convert(amount=100, source='USD', target='JPY')",
    ),
]

_ENTER = _function("enter", "Goes into a folder of the current one.", 1, folder=("string", "Its name."))
_MAKE = _function("make_folder", "Makes a folder in the current one.", 1, name=("string", "Its name."))
_MOVE = _function(
    "move", "Moves a file of the current folder.", 2, file=("string", "Its name."), folder=("string", "Where it goes.")
)
_SORT = _function("sort_lines", "Sorts the lines of a file.", 1, file=("string", "Its name."))
_LOCK = _function("doors.lock", "Locks or opens all doors of the car.", 1, locked=("boolean", "Whether to lock."))
_START = _function("engine.start", "Starts the engine.", 0)
_ROUTE = _function("route.plan", "Plans a route.", 1, city=("string", "Where to."))
_FILES, _CAR = [_ENTER, _MAKE, _MOVE, _SORT], [_LOCK, _START, _ROUTE]

ORDERED_ROWS: list[Row] = [
    _row(
        "Go into the folder notes, make a folder old there and move june.txt into it.",
        _FILES,
        "enter(folder='notes')",
        "make_folder(name='old')",
        "move(file='june.txt', folder='old')",
    ),
    _row(
        "User: Go into notes.\nCalls: enter(folder='notes')\nUser: Sort names.txt, then move it to done.",
        _FILES,
        "sort_lines('names.txt')",
        "move(file='names.txt', folder='done')",
        turn=1,
    ),
    _row("Sort the lines of words.txt.", _FILES, "sort_lines(file='words.txt')"),
    _row(
        "Make the folders a and b, then go into b.",
        _FILES,
        "make_folder(name='a')",
        "make_folder(name='b')",
        "enter(folder='b')",
    ),
    _row(
        "User: Make a folder tax.\nCalls: make_folder(name='tax')\nUser: Move a.pdf and b.pdf into it and enter it.",
        _FILES,
        "move(file='a.pdf', folder='tax')",
        "move(file='b.pdf', folder='tax')",
        "enter(folder='tax')",
        turn=1,
    ),
    _row("Lock the doors and start the engine.", _CAR, "doors.lock(locked=True)", "engine.start()"),
    _row("Start the car, then plan a route to Porto.", _CAR, "engine.start()", "route.plan(city='Porto')"),
    _row(
        "User: Lock all doors.\nCalls: doors.lock(locked=True)\nUser: We are there. Open them again.",
        _CAR,
        "doors.lock(locked=False)",
        turn=1,
    ),
    _row(
        "Plan a route to Ghent, lock the doors and then start the engine.",
        _CAR,
        "route.plan(city='Ghent')",
        "doors.lock(locked=True)",
        "engine.start()",
    ),
    _row("Go into music, then into jazz.", _FILES, "enter(folder='music')", "enter(folder='jazz')"),
]
