"""Problems of our own for the function-writing tasks, in HumanEval's form, so that they run without any download."""


def _problem(name: str, arguments: str, words: str, body: str, cases: list[tuple[str, str]]) -> dict[str, str]:
    """A row; `cases` are (arguments of a call, expected value) as source, `body` a solution."""
    asserts = "\n".join(f"    assert candidate({given}) == {expected}" for given, expected in cases)
    return {
        "task_id": f"sample/{name}",
        "prompt": f'def {name}({arguments}):\n    """{words}"""\n',
        "entry_point": name,
        "canonical_solution": "".join(f"    {line}\n" for line in body.splitlines()),
        "test": f"def check(candidate):\n{asserts}\n",
    }


PROBLEMS = (
    _problem(
        "mean_of_squares",
        "numbers",
        "Return the mean of the squares of a list of numbers, and 0 for an empty list.",
        "return sum(n * n for n in numbers) / len(numbers) if numbers else 0",
        [("[1, 2, 3]", "14 / 3"), ("[]", "0"), ("[-2]", "4"), ("[0, 4]", "8")],
    ),
    _problem(
        "longest_word",
        "sentence",
        "Return the longest word of a sentence; of several equally long ones the first, and '' where there is none.",
        "return max(sentence.split(), key=len, default='')",
        [("'the sea is wide'", "'wide'"), ("'one two'", "'one'"), ("'  '", "''"), ("'a bb ccc dd'", "'ccc'")],
    ),
    _problem(
        "is_balanced",
        "text",
        "Tell whether every opening bracket of (), [] and {} in a text is closed by its partner in the right order.",
        "pairs, open_ones = {')': '(', ']': '[', '}': '{'}, []\n"
        "for letter in text:\n"
        "    if letter in pairs.values():\n"
        "        open_ones.append(letter)\n"
        "    elif letter in pairs and (not open_ones or open_ones.pop() != pairs[letter]):\n"
        "        return False\n"
        "return not open_ones",
        [("'(a[b]{c})'", "True"), ("'(]'", "False"), ("''", "True"), ("'(('", "False"), ("')('", "False")],
    ),
    _problem(
        "primes_below",
        "limit",
        "Return the list of all prime numbers below a limit, in rising order.",
        "return [n for n in range(2, limit) if all(n % d for d in range(2, int(n**0.5) + 1))]",
        [("10", "[2, 3, 5, 7]"), ("2", "[]"), ("3", "[2]"), ("30", "[2, 3, 5, 7, 11, 13, 17, 19, 23, 29]")],
    ),
    _problem(
        "run_lengths",
        "text",
        "Return the runs of equal letters in a text as a list of (letter, length) pairs.",
        "runs = []\n"
        "for letter in text:\n"
        "    if runs and runs[-1][0] == letter:\n"
        "        runs[-1] = (letter, runs[-1][1] + 1)\n"
        "    else:\n"
        "        runs.append((letter, 1))\n"
        "return runs",
        [("'aab'", "[('a', 2), ('b', 1)]"), ("''", "[]"), ("'abba'", "[('a', 1), ('b', 2), ('a', 1)]")],
    ),
    _problem(
        "change_for",
        "amount",
        "Return the fewest coins of 50, 20, 10, 5, 2 and 1 that make up an amount, as a list from large to small.",
        "coins = []\n"
        "for coin in (50, 20, 10, 5, 2, 1):\n"
        "    coins += [coin] * (amount // coin)\n"
        "    amount %= coin\n"
        "return coins",
        [("0", "[]"), ("8", "[5, 2, 1]"), ("99", "[50, 20, 20, 5, 2, 2]"), ("100", "[50, 50]")],
    ),
    _problem(
        "count_vowels_by_word",
        "sentence",
        "Return a dictionary from each word of a sentence to its number of vowels (a, e, i, o, u in either case).",
        "return {word: sum(letter in 'aeiou' for letter in word.lower()) for word in sentence.split()}",
        [("'See the Owl'", "{'See': 2, 'the': 1, 'Owl': 1}"), ("''", "{}"), ("'sky'", "{'sky': 0}")],
    ),
    _problem(
        "rotate",
        "matrix",
        "Return a matrix, given as a list of rows, turned by 90 degrees clockwise.",
        "return [list(row) for row in zip(*matrix[::-1])]",
        [("[[1, 2], [3, 4]]", "[[3, 1], [4, 2]]"), ("[[1, 2, 3]]", "[[1], [2], [3]]"), ("[]", "[]")],
    ),
    _problem(
        "digits_until_single",
        "number",
        "Add up the digits of a whole number of at least 0 again and again until one digit is left, and return how "
        "often that took.",
        "steps = 0\nwhile number > 9:\n    number, steps = sum(map(int, str(number))), steps + 1\nreturn steps",
        [("7", "0"), ("19", "2"), ("999", "2"), ("10", "1"), ("199", "3")],
    ),
    _problem(
        "merge_sorted",
        "first, second",
        "Merge two sorted lists into one sorted list that holds each value only once.",
        "return sorted({*first, *second})",
        [("[1, 3], [2, 3]", "[1, 2, 3]"), ("[], []", "[]"), ("[1, 1], []", "[1]"), ("[5], [4]", "[4, 5]")],
    ),
)
