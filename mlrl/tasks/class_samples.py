"""Classes of our own for class completion, in ClassEval's form, so that the task runs without any download."""

import ast
import textwrap
from typing import Any


def _sample(solution: str, cases: dict[str, str]) -> dict[str, Any]:
    """A row out of a finished class, and for each method (or `together`) the body of a test of it."""
    solution = textwrap.dedent(solution).strip() + "\n"
    node = ast.parse(solution).body[-1]
    imports = [ast.unparse(line) for line in ast.parse(solution).body[:-1]]
    methods = [method for method in node.body if isinstance(method, ast.FunctionDef) and method.name != "__init__"]
    names = [method.name for method in methods]
    info = [{"method_name": m.name, "dependencies": {"method_dependencies": _called(m, names)}} for m in methods]
    tests = "\n\n".join(_test_class(node.name, name, textwrap.dedent(body)) for name, body in cases.items())
    return {
        "task_id": f"sample/{node.name}",
        "class_name": node.name,
        "skeleton": "\n".join([*imports, *([""] if imports else []), _without_bodies(node, keep_methods=True)]),
        "class_constructor": _without_bodies(node, keep_methods=False),
        "import_statement": imports,
        "methods_info": info,
        "test": f"import unittest\n\n\n{tests}\n",
        "solution_code": solution,
    }


def _called(method: ast.FunctionDef, names: list[str]) -> list[str]:
    attributes = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return [name for name in names if name in attributes and name != method.name]


def _without_bodies(node: ast.ClassDef, keep_methods: bool) -> str:
    """The class with its docstring and constructor; its other methods with docstrings alone, or not at all."""
    copy = ast.parse(ast.unparse(node)).body[0]
    body = []
    for part in copy.body:
        if isinstance(part, ast.FunctionDef) and part.name != "__init__":
            part.body = part.body[:1]
            if not keep_methods:
                continue
        body.append(part)
    copy.body = body
    return ast.unparse(copy)


def _test_class(class_name: str, name: str, body: str) -> str:
    method = "test_" + name
    title = "".join(part.capitalize() for part in name.split("_"))
    lines = textwrap.indent(body.strip(), "        ")
    return f"class {class_name}Test{title}(unittest.TestCase):\n    def {method}(self):\n{lines}"


CLASSES = (
    _sample(
        '''
        class Stack:
            """A stack of values with the largest one at hand."""

            def __init__(self):
                self.values = []

            def push(self, value):
                """Put a value on top."""
                self.values.append(value)

            def pop(self):
                """Take the top value off and return it; None if there is none."""
                return self.values.pop() if self.values else None

            def largest(self):
                """Return the largest value; None if there is none."""
                return max(self.values, default=None)

            def drain(self):
                """Pop every value and return them as a list, top first."""
                return [self.pop() for _ in range(len(self.values))]
        ''',
        {
            "push": "s = Stack()\ns.push(3)\ns.push(1)\nself.assertEqual(s.values, [3, 1])",
            "pop": "s = Stack()\nself.assertIsNone(s.pop())\ns.values = [3, 1]\nself.assertEqual(s.pop(), 1)",
            "largest": "s = Stack()\nself.assertIsNone(s.largest())\n"
            "s.values = [3, 1]\nself.assertEqual(s.largest(), 3)",
            "drain": "s = Stack()\ns.values = [3, 1]\n"
            "self.assertEqual(s.drain(), [1, 3])\nself.assertEqual(s.values, [])",
        },
    ),
    _sample(
        '''
        class Account:
            """A bank account in whole cents that keeps a list of what was booked."""

            def __init__(self, balance=0):
                self.balance = balance
                self.bookings = []

            def book(self, amount):
                """Change the balance by an amount and note the amount in bookings."""
                self.balance += amount
                self.bookings.append(amount)

            def withdraw(self, amount):
                """Book a withdrawal if the balance covers it; return whether it did."""
                if amount > self.balance:
                    return False
                self.book(-amount)
                return True

            def statement(self):
                """Return the bookings as texts such as '+5' and '-3', in order."""
                return [f"{amount:+d}" for amount in self.bookings]
        ''',
        {
            "book": "a = Account(5)\na.book(3)\nself.assertEqual((a.balance, a.bookings), (8, [3]))",
            "withdraw": "a = Account(5)\nself.assertFalse(a.withdraw(6))\nself.assertTrue(a.withdraw(5))\n"
            "self.assertEqual((a.balance, a.bookings), (0, [-5]))",
            "statement": "a = Account()\na.bookings = [5, -3]\nself.assertEqual(a.statement(), ['+5', '-3'])",
        },
    ),
    _sample(
        '''
        class Polynomial:
            """A polynomial by its coefficients, the constant first."""

            def __init__(self, coefficients):
                self.coefficients = list(coefficients)

            def value(self, x):
                """Return the value at x."""
                return sum(c * x**i for i, c in enumerate(self.coefficients))

            def derivative(self):
                """Return the derivative as a new Polynomial."""
                return Polynomial([i * c for i, c in enumerate(self.coefficients)][1:])

            def slope(self, x):
                """Return the value of the derivative at x."""
                return self.derivative().value(x)

            def degree(self):
                """Return the largest power with a coefficient that is not 0; -1 if there is none."""
                return max((i for i, c in enumerate(self.coefficients) if c), default=-1)
        ''',
        {
            "value": "self.assertEqual(Polynomial([1, 2, 3]).value(2), 17)\n"
            "self.assertEqual(Polynomial([]).value(2), 0)",
            "derivative": "self.assertEqual(Polynomial([1, 2, 3]).derivative().coefficients, [2, 6])",
            "slope": "self.assertEqual(Polynomial([1, 2, 3]).slope(2), 14)",
            "degree": "self.assertEqual(Polynomial([1, 2, 0]).degree(), 1)\n"
            "self.assertEqual(Polynomial([0]).degree(), -1)",
        },
    ),
    _sample(
        '''
        import re


        class WordIndex:
            """An index of the numbered lines in which words stand."""

            def __init__(self):
                self.lines = {}

            def words(self, text):
                """Return the words of a text in lower case, as a list; a word is a run of letters."""
                return re.findall("[a-z]+", text.lower())

            def add(self, number, text):
                """Note the line number for every word of the text, each number once a word."""
                for word in self.words(text):
                    numbers = self.lines.setdefault(word, [])
                    if number not in numbers:
                        numbers.append(number)

            def find(self, word):
                """Return the sorted line numbers of a word in either case."""
                return sorted(self.lines.get(word.lower(), []))

            def most_frequent(self):
                """Return the word with the most lines, of several the first in the alphabet; None without words."""
                return min(self.lines, key=lambda word: (-len(self.lines[word]), word), default=None)
        ''',
        {
            "words": "self.assertEqual(WordIndex().words('The sea, the SKY.'), ['the', 'sea', 'the', 'sky'])",
            "add": "w = WordIndex()\nw.add(1, 'a b a')\nw.add(2, 'B')\n"
            "self.assertEqual(w.lines, {'a': [1], 'b': [1, 2]})",
            "find": "w = WordIndex()\nw.lines = {'a': [3, 1]}\n"
            "self.assertEqual((w.find('A'), w.find('x')), ([1, 3], []))",
            "most_frequent": "w = WordIndex()\nself.assertIsNone(w.most_frequent())\n"
            "w.lines = {'b': [1], 'a': [1], 'c': []}\nself.assertEqual(w.most_frequent(), 'a')",
        },
    ),
    _sample(
        '''
        class Temperature:
            """Readings of a thermometer in degrees Celsius."""

            def __init__(self, readings):
                self.readings = list(readings)

            def mean(self):
                """Return the mean reading; 0 without readings."""
                return sum(self.readings) / len(self.readings) if self.readings else 0

            def above_mean(self):
                """Return the readings above the mean, in order."""
                return [reading for reading in self.readings if reading > self.mean()]

            def in_fahrenheit(self):
                """Return all readings in degrees Fahrenheit."""
                return [reading * 9 / 5 + 32 for reading in self.readings]
        ''',
        {
            "mean": "self.assertEqual(Temperature([10, 20]).mean(), 15)\nself.assertEqual(Temperature([]).mean(), 0)",
            "above_mean": "self.assertEqual(Temperature([10, 20, 30, 12]).above_mean(), [20, 30])",
            "in_fahrenheit": "self.assertEqual(Temperature([0, 100]).in_fahrenheit(), [32, 212])",
        },
    ),
    _sample(
        '''
        class Grid:
            """A rectangular field of single letters, given as a list of equally long texts."""

            def __init__(self, rows):
                self.rows = list(rows)

            def at(self, x, y):
                """Return the letter in column x of row y; None outside of the grid."""
                inside = 0 <= y < len(self.rows) and 0 <= x < len(self.rows[y])
                return self.rows[y][x] if inside else None

            def neighbours(self, x, y):
                """Return the letters right, left, below and above of a place, in this order, those inside alone."""
                places = ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1))
                return [self.at(*place) for place in places if self.at(*place) is not None]

            def count(self, letter):
                """Return how often a letter stands in the grid."""
                return sum(row.count(letter) for row in self.rows)

            def turned(self):
                """Return a new Grid with rows and columns exchanged."""
                return Grid("".join(column) for column in zip(*self.rows))
        ''',
        {
            "at": "g = Grid(['ab', 'cd'])\nself.assertEqual((g.at(1, 0), g.at(2, 0), g.at(0, -1)), ('b', None, None))",
            "neighbours": "self.assertEqual(Grid(['abc', 'def', 'ghi']).neighbours(1, 1), ['f', 'd', 'h', 'b'])\n"
            "self.assertEqual(Grid(['ab']).neighbours(0, 0), ['b'])",
            "count": "self.assertEqual(Grid(['aba', 'aaa']).count('a'), 5)",
            "turned": "self.assertEqual(Grid(['ab', 'cd']).turned().rows, ['ac', 'bd'])",
        },
    ),
    _sample(
        '''
        class Timetable:
            """Departures of trains: the minute of the day by the name of the train."""

            def __init__(self):
                self.departures = {}

            def minutes(self, clock):
                """Return the minute of the day of a time such as '07:05'."""
                hours, minutes = clock.split(":")
                return 60 * int(hours) + int(minutes)

            def add(self, train, clock):
                """Note the departure of a train at a time such as '07:05'."""
                self.departures[train] = self.minutes(clock)

            def next_after(self, clock):
                """Return the train that leaves first at or after a time; None if there is none."""
                later = {t: m for t, m in self.departures.items() if m >= self.minutes(clock)}
                return min(later, key=later.get, default=None)
        ''',
        {
            "minutes": "self.assertEqual(Timetable().minutes('07:05'), 425)",
            "add": "t = Timetable()\nt.add('north', '00:30')\nself.assertEqual(t.departures, {'north': 30})",
            "next_after": "t = Timetable()\nt.departures = {'north': 30, 'south': 90}\n"
            "self.assertEqual((t.next_after('00:31'), t.next_after('02:00')), ('south', None))",
        },
    ),
    _sample(
        '''
        class Recipe:
            """A recipe: grams of each ingredient, for a number of people."""

            def __init__(self, people, grams):
                self.people = people
                self.grams = dict(grams)

            def total(self):
                """Return the grams of all ingredients together."""
                return sum(self.grams.values())

            def scaled(self, people):
                """Return a new Recipe for another number of people."""
                return Recipe(people, {name: grams * people / self.people for name, grams in self.grams.items()})

            def shopping_list(self, stock):
                """Return what is missing, as a dictionary of grams, given a dictionary of what is there."""
                missing = {name: grams - stock.get(name, 0) for name, grams in self.grams.items()}
                return {name: grams for name, grams in missing.items() if grams > 0}

            def portion(self):
                """Return the grams that one person gets."""
                return self.total() / self.people
        ''',
        {
            "total": "self.assertEqual(Recipe(2, {'rice': 200, 'peas': 50}).total(), 250)",
            "scaled": "r = Recipe(2, {'rice': 200}).scaled(3)\n"
            "self.assertEqual((r.people, r.grams), (3, {'rice': 300}))",
            "shopping_list": "r = Recipe(2, {'rice': 200, 'peas': 50})\n"
            "self.assertEqual(r.shopping_list({'rice': 150, 'peas': 60}), {'rice': 50})",
            "portion": "self.assertEqual(Recipe(2, {'rice': 200, 'peas': 50}).portion(), 125)",
        },
    ),
)
