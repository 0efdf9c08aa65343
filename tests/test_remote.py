"""The HTTP client against a server on this machine."""

import itertools
import json
import logging
import threading
import time

import pytest

from mlrl.errors import ConfigError
from mlrl.remote import RemoteError, RemoteModel, RemoteRequest, RemoteSettings
from mlrl.remote_formats import MalformedAnswerError, parse_answers
from tests.http_server import FakeServer, Reply

KEY = "sk-planted-5f2c9e"


@pytest.fixture
def serve(monkeypatch):
    """Starts servers and makes clients for them that retry at once."""
    monkeypatch.setenv("NO_PROXY", "*")
    opened = []

    def start(answer, **settings):
        server = FakeServer(answer)
        defaults = {"backoff_s": 0.001, "timeout_s": 5.0}
        model = RemoteModel(RemoteSettings(**{"url": server.url, **defaults, **settings}))
        opened.extend([model, server])
        return server, model

    yield start
    for resource in opened:
        resource.close()


def generic(*texts):
    return Reply({"completions": list(texts)})


def openai(*texts):
    choices = [{"index": i, "message": {"role": "assistant", "content": text}} for i, text in enumerate(texts)]
    return Reply({"choices": choices})


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def test_generic_format(serve):
    server, model = serve(lambda number, body: generic("a", "b"), max_new_tokens=9, temperature=0.5, top_k=3)
    request = RemoteRequest("Hello", 2, context={"agent_idx": 1})
    assert model.complete([request]) == [["a", "b"]]
    assert server.asked[0].body == {
        "agent_idx": 1, "prompt": "Hello", "num_return_sequences": 2, "max_new_tokens": 9, "temperature": 0.5,
        "top_p": 1.0, "top_k": 3,
    }  # fmt: skip
    assert "Authorization" not in server.asked[0].headers


def test_generic_format_reads_the_named_field(serve):
    _, model = serve(lambda number, body: Reply({"outputs": ["x"]}), response_field="outputs")
    assert model.complete([RemoteRequest("Hello")]) == [["x"]]


def test_openai_format(serve, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    server, model = serve(
        lambda number, body: openai("a", "b", "c"), format="openai", model="m", key_env="SOME_KEY", max_new_tokens=9,
        extra_body={"max_tokens": None, "max_completion_tokens": 9, "seed": 4},
    )  # fmt: skip
    assert model.complete([RemoteRequest(CHAT, 3)]) == [["a", "b", "c"]]
    assert server.asked[0].body == {
        "model": "m", "messages": CHAT, "n": 3, "max_completion_tokens": 9, "temperature": 1.0, "top_p": 1.0, "seed": 4
    }  # fmt: skip
    assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"


def test_anthropic_format(serve, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    server, model = serve(
        lambda number, body: Reply({"content": blocks}), format="anthropic", model="m", key_env="SOME_KEY"
    )
    assert model.complete([RemoteRequest(CHAT, 2)]) == [["ab", "ab"]]
    assert len(server.asked) == 2  # one answer a request
    assert server.asked[0].body == {
        "model": "m", "system": "Be brief.", "messages": CHAT[1:], "max_tokens": 512, "temperature": 1.0
    }  # fmt: skip
    headers = server.asked[0].headers
    assert headers["x-api-key"] == KEY
    assert headers["anthropic-version"] == "2023-06-01"
    assert "Authorization" not in headers


def test_openai_responses_format(serve):
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    output = [{"type": "reasoning", "summary": []}, {"type": "message", "content": parts}]
    server, model = serve(lambda number, body: Reply({"output": output}), format="openai_responses", model="m")
    assert model.complete([RemoteRequest("Hello")]) == [["ab"]]
    assert server.asked[0].body == {
        "model": "m", "input": [{"role": "user", "content": "Hello"}], "max_output_tokens": 512, "temperature": 1.0,
        "top_p": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "reply", "expected"),
    [
        ("generic", generic("a", None, "c"), ["a", None, "c"]),
        ("openai", openai("a", None, "c"), ["a", None, "c"]),
        ("anthropic", Reply({"content": []}), [None, None, None]),
        ("openai_responses", Reply({"output": [{"type": "message", "content": [{"type": "refusal"}]}]}), [None] * 3),
    ],
)
def test_null_content_keeps_its_place(serve, format, reply, expected):
    _, model = serve(lambda number, body: reply, format=format, model="m")
    assert model.complete([RemoteRequest("Hello", 3)]) == [expected]
    assert model.stats.empty == expected.count(None)
    assert not model.stats.failures


def test_choices_come_in_the_order_of_their_index(serve):
    reply = Reply({"choices": [{"index": i, "message": {"content": str(i)}} for i in (2, 0, 1)]})
    _, model = serve(lambda number, body: reply, format="openai", model="m")
    assert model.complete([RemoteRequest("Hello", 3)]) == [["0", "1", "2"]]


def test_fewer_choices_than_asked_are_asked_again_and_too_many_are_cut(serve):
    def answer(number, body):
        return openai(*[f"{number}.{i}" for i in range(2)])

    server, model = serve(answer, format="openai", model="m")
    assert model.complete([RemoteRequest("Hello", 5)]) == [["0.0", "0.1", "1.0", "1.1", "2.0"]]
    assert [asked.body["n"] for asked in server.asked] == [5, 3, 1]


def test_no_choice_at_all_is_a_failure_of_that_request_only(serve):
    def answer(number, body):
        return openai() if body["messages"][0]["content"] == "bad" else openai("fine")

    _, model = serve(answer, format="openai", model="m")
    assert model.complete([RemoteRequest("good"), RemoteRequest("bad"), RemoteRequest("good too")]) == [
        ["fine"], [None], ["fine"]
    ]  # fmt: skip
    assert dict(model.stats.failures) == {"no answer": 1}


@pytest.mark.parametrize("status", [500, 503, 529, 408])
def test_server_errors_twice_then_success(serve, status):
    def answer(number, body):
        return Reply({"error": "busy"}, status) if number < 2 else generic("a")

    server, model = serve(answer)
    assert model.complete([RemoteRequest("Hello")]) == [["a"]]
    assert (len(server.asked), model.stats.attempts, model.stats.retries) == (3, 3, 2)


@pytest.mark.parametrize("form", ["number", "date"])
def test_retry_after_is_waited_for(serve, form):
    def answer(number, body):
        after = "0.3" if form == "number" else time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
        return Reply({}, 429, {"Retry-After": after}) if number == 0 else generic("a")

    server, model = serve(answer, max_wait_s=0.4)  # which bounds the wait for the date, 20 s away
    assert model.complete([RemoteRequest("Hello")]) == [["a"]]
    assert 0.29 <= server.asked[1].at - server.asked[0].at < 10


def test_back_off_doubles_and_jitters(serve):
    server, model = serve(lambda number, body: Reply({}, 500), max_retries=4, backoff_s=0.02)
    assert model.complete([RemoteRequest("Hello")]) == [[None]]
    times = [asked.at for asked in server.asked]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # waits are 0.02·2^a times a number from 0.5 to 1.5
    for attempt, gap in enumerate(gaps):
        assert 0.5 * 0.02 * 2**attempt <= gap
    assert len(gaps) == 4
    assert dict(model.stats.failures) == {"server error": 1}


def test_a_time_out_costs_its_own_answers_only(serve):
    def answer(number, body):
        return Reply({"completions": ["late"]}, delay_s=3.0 if body["prompt"] == "slow" else 0.0)

    _, model = serve(answer, timeout_s=0.15, max_retries=1)
    start = time.monotonic()
    assert model.complete([RemoteRequest("fast"), RemoteRequest("slow")]) == [["late"], [None]]
    assert time.monotonic() - start < 2.5
    assert dict(model.stats.failures) == {"timeout": 1}
    assert model.stats.first_failure == "no answer within 0.15 s"


def test_an_answer_that_drips_is_a_time_out(serve):
    # every byte comes within the time limit, all of them do not
    _, model = serve(
        lambda number, body: Reply({"completions": ["a" * 100]}, drip_s=0.05), timeout_s=0.2, max_retries=0
    )
    start = time.monotonic()
    assert model.complete([RemoteRequest("Hello")]) == [[None]]
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b'{"completions": ["cut o', {"completions": "text"}])
def test_malformed_answers_are_retried_and_then_counted(serve, body):
    _, model = serve(lambda number, _: Reply(body), max_retries=2)
    assert model.complete([RemoteRequest("Hello")]) == [[None]]
    assert model.stats.attempts == 3
    assert dict(model.stats.failures) == {"malformed": 1}
    assert "not of the format generic" in model.stats.first_failure


@pytest.mark.parametrize(
    ("format", "payload", "message"),
    [
        ("generic", {"completions": [["nested"]]}, "no list of texts under 'completions'"),
        ("generic", ["a"], "a list where a JSON object belongs"),
        ("openai", {"choices": {}}, "'choices'"),
        ("openai", {"choices": [{"text": "a"}]}, "without 'message'"),
        ("openai", {"choices": [{"message": {"content": 3}}]}, "a int where a text belongs"),
        ("anthropic", {"content": "a"}, "'content'"),
        ("openai_responses", {"result": []}, "'output'"),
    ],
)
def test_what_is_malformed_is_said(format, payload, message):
    with pytest.raises(MalformedAnswerError, match=message):
        parse_answers(format, payload)


def test_nobody_there_is_a_failure_not_a_crash(serve):
    server, _ = serve(lambda number, body: generic("a"))
    server.close()
    with RemoteModel(RemoteSettings(server.url, backoff_s=0.001, max_retries=1)) as model:
        assert model.complete([RemoteRequest("Hello")]) == [[None]]
    assert dict(model.stats.failures) == {"connection": 1}


def test_a_refused_prompt_is_not_retried_and_costs_nothing_else(serve):
    def answer(number, body):
        return Reply({"error": "too long"}, 400) if body["prompt"] == "long" else generic("a")

    server, model = serve(answer)
    assert model.complete([RemoteRequest("long"), RemoteRequest("short")]) == [[None], ["a"]]
    assert len(server.asked) == 2
    assert dict(model.stats.failures) == {"refused": 1}
    assert "too long" in model.stats.first_failure


@pytest.mark.parametrize(
    "reply",
    [
        Reply({"error": "bad key"}, 401),
        Reply({"error": "no such model"}, 404),
        Reply({}, 302, {"Location": "http://elsewhere.invalid"}),
        Reply({"error": {"code": "insufficient_quota"}}, 429),
    ],
)
def test_what_no_retry_mends_ends_at_once(serve, monkeypatch, reply):
    monkeypatch.setenv("SOME_KEY", KEY)
    server, model = serve(lambda number, body: reply, key_env="SOME_KEY", max_concurrency=2)
    with pytest.raises(RemoteError, match=f"status {reply.status}.*SOME_KEY"):
        model.complete([RemoteRequest(str(i)) for i in range(40)])
    assert len(server.asked) <= 4


def test_concurrency_is_bounded_and_order_is_kept(serve):
    def answer(number, body):
        return Reply({"completions": [body["prompt"]]}, delay_s=0.03 if number % 2 else 0.0)

    server, model = serve(answer, max_concurrency=3)
    prompts = [str(i) for i in range(20)]
    assert model.complete([RemoteRequest(prompt) for prompt in prompts]) == [[prompt] for prompt in prompts]
    assert 2 <= server.most_under_way <= 3


def test_the_budget_counts_every_attempt(serve):
    def answer(number, body):
        return Reply({}, 500) if number % 2 == 0 else generic("a")

    server, model = serve(answer, max_requests=5, max_concurrency=1)
    answers = model.complete([RemoteRequest(str(i)) for i in range(4)])
    # attempts 0–1 and 2–3 answer two requests, attempt 4 fails, and then nothing is left
    assert answers == [["a"], ["a"], [None], [None]]
    assert len(server.asked) == 5
    assert dict(model.stats.failures) == {"budget": 2}
    assert "budget of 5 requests" in model.stats.first_failure


def test_answers_are_cached_by_request_and_draw(serve, tmp_path):
    def answer(number, body):
        return generic(*[f"{number}.{i}" for i in range(body["num_return_sequences"])])

    cache = tmp_path / "answers.jsonl"
    server, model = serve(answer, cache=cache, max_concurrency=1)
    first = model.complete([RemoteRequest("Hello", 2, ("round", 1))])
    assert model.complete([RemoteRequest("Hello", 2, ("round", 1))]) == first == [["0.0", "0.1"]]
    assert model.complete([RemoteRequest("Hello", 2, ("round", 2))]) == [["1.0", "1.1"]]  # another draw
    assert model.complete([RemoteRequest("Hello", 3, ("round", 1))]) == [["0.0", "0.1", "2.0"]]  # one more of it
    assert len(server.asked) == 3
    with cache.open("a") as file:
        file.write('{"request": "cut o')  # as a killed run leaves it
    with RemoteModel(RemoteSettings(server.url, cache=cache)) as later:
        assert later.complete([RemoteRequest("Hello", 2, ("round", 2))]) == [["1.0", "1.1"]]
        assert later.stats.cached == 2
    with RemoteModel(RemoteSettings(server.url, cache=cache, temperature=0.3)) as other:
        assert other.complete([RemoteRequest("Hello", 1, ("round", 1))]) == [["3.0"]]


def test_a_null_answer_is_cached_and_a_failure_is_not(serve):
    def answer(number, body):
        return generic(None) if body["prompt"] == "null" else generic("a") if number > 1 else Reply({}, 500)

    server, model = serve(answer, max_retries=0, max_concurrency=1)
    requests = [RemoteRequest("null"), RemoteRequest("fails")]
    assert model.complete(requests) == [[None], [None]]
    assert model.complete(requests) == [[None], ["a"]]
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_the_key_is_nowhere(serve, monkeypatch, tmp_path, caplog, status):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SOME_KEY", KEY)

    def answer(number, body):  # a server that repeats what it was sent
        return Reply({"completions": [f"your key is {KEY}"]}, status)

    cache = tmp_path / "answers.jsonl"
    _, model = serve(answer, key_env="SOME_KEY", cache=cache, max_retries=1)
    seen = [repr(model.settings), str(vars(model.stats))]
    try:
        seen.append(str(model.complete([RemoteRequest("Hello")])))
    except RemoteError as error:
        seen += [str(error), repr(error.__cause__), repr(error.__context__)]
    seen += [str(vars(model.stats)), caplog.text, cache.read_text() if cache.exists() else ""]
    assert status == 401 or "[key]" in "".join(seen) or status == 500
    assert KEY not in "".join(seen)


@pytest.mark.parametrize("before", [0, 280, 1990])
@pytest.mark.parametrize("escaped", [False, True])
def test_no_part_of_a_key_is_in_what_is_said_of_a_long_answer(serve, monkeypatch, before, escaped):
    key = "sk-planted/5f2c9e/0123456789/abcdef"
    monkeypatch.setenv("SOME_KEY", key)
    sent = key.replace("/", "\\/") if escaped else key
    said = f"{'x' * before} {sent} is no key".encode()
    _, model = serve(lambda number, body: Reply(said, 401), key_env="SOME_KEY")
    with pytest.raises(RemoteError, match="status 401") as caught:
        model.complete([RemoteRequest("Hello")])
    assert "sk-p" not in str(caught.value)


def test_a_key_variable_that_is_not_set_or_unusable(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match="key_env='SOME_KEY': no such environment variable"):
        RemoteModel(RemoteSettings("http://127.0.0.1:9/x", key_env="SOME_KEY"))
    monkeypatch.setenv("SOME_KEY", "sk-\u00e9")
    with pytest.raises(ConfigError, match="not plain ASCII") as caught:
        RemoteModel(RemoteSettings("http://127.0.0.1:9/x", key_env="SOME_KEY"))
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "host/v1"}, "url='host/v1': is no HTTP address"),
        ({"url": "http://[bad/v1"}, "is no HTTP address"),
        ({"url": f"https://me:{KEY}@host/v1"}, "url: holds a secret"),
        ({"url": f"https://host/v1?key={KEY}"}, "url: holds a secret"),
        ({"headers": {"X-Api-Key": KEY}}, "headers: 'X-Api-Key' holds a secret"),
        ({"headers": {"Authorization": KEY}}, "headers: 'Authorization' holds a secret"),
        ({"extra_body": {"auth": {"api_key": KEY}}}, "extra_body: 'auth' holds a secret"),
        ({"extra_body": {"nested": {"api_key": KEY}}}, "extra_body: 'api_key' holds a secret"),
        ({"format": "open_ai"}, "format='open_ai': unknown word. Use one of generic, openai"),
        ({"format": "openai"}, "model=None: format openai needs one"),
        ({"max_concurrency": 0}, "max_concurrency=0"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_wrong_settings_are_named_and_no_secret_is_repeated(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        RemoteSettings(**{"url": "https://host/v1", **settings})
    assert KEY not in str(caught.value)


def test_ordinary_fields_are_not_taken_for_secrets():
    names = {"max_tokens": 3, "prompt_cache_key": "a", "top_logprobs": 2, "reasoning": {"effort": "low"}}
    assert RemoteSettings("https://host/v1?api-version=2", extra_body=names).extra_body == names


def test_progress_is_heard(serve):
    _, model = serve(lambda number, body: generic("a", "b"), max_concurrency=2)
    heard, lock = [], threading.Lock()

    def hear(count):
        with lock:
            heard.append(count)

    model.complete([RemoteRequest(str(i), 2) for i in range(3)], hear)
    assert heard == [2, 2, 2]


def test_the_cache_file_is_json_lines_without_prompts(serve, tmp_path):
    cache = tmp_path / "deep" / "answers.jsonl"
    _, model = serve(lambda number, body: generic("\u00e4 \ud83d"), cache=cache)  # a lone surrogate, as JSON can hold
    model.complete([RemoteRequest("a private prompt")])
    entry = json.loads(cache.read_text())
    assert entry["text"] == "\u00e4 \ud83d"
    assert "private" not in cache.read_text()
