from mlrl.wording import counted


def test_a_number_with_its_noun():
    assert [counted(number, "turn") for number in (0, 1, 2, 1792)] == ["0 turns", "1 turn", "2 turns", "1,792 turns"]
