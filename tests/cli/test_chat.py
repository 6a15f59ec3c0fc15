"""`draftree chat` through a pipe, with a fake engine."""


def test_answers_line_by_line_and_remembers(draftree, engine):
    result = draftree("chat", stdin="first\n\nsecond\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello there\nHello there\n"
    assert result.stderr == ""
    first, second = engine.requests
    assert first["prompt"] == [{"role": "user", "content": "first"}]
    assert [message["role"] for message in second["prompt"]] == ["user", "assistant", "user"]
    assert second["prompt"][1]["content"] == "Hello there"
    assert second["chat"] is True


def test_commands(draftree, engine):
    stdin = (
        "/stats\n/help\nhi\n/stats\n/system Be brief.\nagain\n/clear\nanew\n/nonsense\n/exit\nno"
    )
    result = draftree("chat", "--system", "Be kind.", stdin=stdin)
    assert result.exit_code == 0
    assert [request["system"] for request in engine.requests] == [
        "Be kind.",
        "Be brief.",
        "Be brief.",
    ]
    assert [len(request["prompt"]) for request in engine.requests] == [1, 1, 1]
    assert "There has been no reply yet." in result.stderr
    assert "/clear" in result.stderr
    assert "tokens per second" in result.stderr
    assert "There is no /nonsense" in result.stderr


def test_interrupt_keeps_what_was_said(draftree, engine):
    engine.words = ["Hello", "<ctrl-c>", " never"]
    result = draftree("chat", stdin="first\nsecond\n")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "Hello cut"
    assert engine.requests[1]["prompt"][1] == {"role": "assistant", "content": "Hello cut"}


def test_full_context_is_said_and_leaves_no_trace(draftree, engine):
    engine.words = ["Hello", "<full>"]
    result = draftree("chat", stdin="first\nsecond\n")
    assert result.exit_code == 0
    assert "no longer fits. /clear starts anew." in result.stderr
    assert len(engine.requests[1]["prompt"]) == 1


def test_model_without_template_is_refused(draftree, engine):
    engine.has_template = False
    result = draftree("chat", stdin="hi\n")
    assert result.exit_code == 1
    assert result.stderr == ("error: fake has no chat template; use `draftree run` with it.\n")
