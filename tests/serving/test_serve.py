"""grasp serve in a process of its own, queried over HTTP and by an MCP client, with hostile texts and queries."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import quote, urlencode

import anyio
import pytest

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.pipeline.pipeline import build_artifact
from tests.cli.grasp_command import refused
from tests.pipeline.world import world

for module in ("starlette", "uvicorn", "jinja2"):
    pytest.importorskip(module, reason="the extra serve is not installed")

HOSTILE = "water {{7*7}} <script>alert('x')</script> \x1b[31mred\x1b[0m \u202e light {% raw %} cell river"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def art(root):
    """Texts that no page and no terminal may take for its own."""
    world(root / "world")
    lines = [
        {"row_id": f"r{i}", "text": f"{HOSTILE} {i}", "topic": ["<b>earth</b>", "sky\x1b[2J", "life"][i % 3]}
        for i in range(24)
    ]
    (root / "hostile.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = world(root / "world", corpus={"path": str(root / "hostile.jsonl"), "max_length": 128})
    return build_artifact(settings, root / "art")


@contextmanager
def served(*arguments):
    """A server; gives the port that it tells."""
    command = [sys.executable, "-m", "grasp", "serve", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:"), process.stderr.read()
            yield int(line.split(":")[2].split("/")[0])
        finally:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert out == ""
            assert "stopped" in err.splitlines(), err
            assert "Traceback" not in err


@pytest.fixture(scope="module")
def port(art):
    with served(art, "--port", 0) as place:
        yield place


def ask(port, path, *, method="GET", headers=None, body=None):
    """Status, headers, body; the path goes as it is written."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host="Host" in (headers or {}))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        if body is not None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the server may answer before the body is sent
                connection.send(body)
        with closing(connection.getresponse()) as reply:
            return reply.status, reply.headers, reply.read().decode()


def first_line(port, *head, pause=0.0):
    """What is answered to a request of these lines, sent in pieces of 16 KB, without the body that they may promise."""
    request = "\r\n".join([*head, "Host: localhost", "", ""]).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, connection.makefile("rb") as reply:
        for start in range(0, len(request), 1 << 14):
            connection.sendall(request[start : start + (1 << 14)])
            time.sleep(pause)
        return reply.readline().decode().rstrip()


def api(port, verb, **arguments):
    status, headers, text = ask(port, f"/api/{verb}?{urlencode(arguments, doseq=True)}")
    assert headers["Content-Type"] == "application/json"
    return status, json.loads(text)


def test_the_verbs_answer_what_python_answers(art, port):
    artifact = grasp.open(art)
    status, answer = api(port, "predict", drop="topic = 'life'")
    assert status == 200
    predicted = artifact.predict(drop="topic = 'life'")
    assert answer["headline"] == predicted.headline
    assert answer["rows"][0][-1] == pytest.approx(predicted.to_pandas()["change"][0])
    _, answer = api(port, "predict", weight=["topic = 'life': 0.5", "row_id = 'r1': 2"])
    assert answer["rows"][0][-1] == pytest.approx(
        artifact.predict(weight={"topic = 'life'": 0.5, "row_id = 'r1'": 2.0}).to_pandas()["change"][0]
    )
    _, answer = api(port, "score", top=3, where="topic = 'life'")
    names = [line[answer["columns"].index("row_id")] for line in answer["rows"]]
    assert names == artifact.score(top=3, where="topic = 'life'").to_pandas()["row_id"].tolist()
    _, answer = api(port, "explain", row=names[0], unit="facts-2")
    explanation = artifact.explain("facts", names[0], unit="facts-2")
    assert answer["headline"] == explanation.headline
    assert [share for _, share in answer["shades"]] == pytest.approx([share for _, share in explanation.shades])
    assert [word.strip() for word, _ in answer["answer"]] == [word.strip() for word, _ in explanation.answer_shades]
    _, answer = api(port, "select", budget="25%", by="topic", cap="life:50%")
    assert len(answer["rows"]) == 6


def test_a_mistake_is_one_line_of_json(port):
    for verb, arguments, keyword in [
        ("score", {"target": "nope"}, "target: got ['nope'], the artifact has ['facts']"),
        ("score", {"top": "many"}, "score: top: Input should be a valid integer"),
        ("score", {"top": "1001"}, "less than or equal to 1000"),
        ("score", {"colour": "red"}, "score: got colour, expected target, unit, where, top, bottom"),
        ("explain", {}, "explain: row: Missing required argument"),
        ("explain", {"row": "nope"}, "row: got 'nope'"),
        ("predict", {}, "expected one of drop, keep, weight"),
        ("predict", {"weight": "topic"}, "weight: got 'topic', expected EXPR:NUMBER"),
        ("select", {"budget": "much"}, "budget"),
    ]:
        status, answer = api(port, verb, **arguments)
        assert (status, list(answer)) == (400, ["error"])
        assert keyword in answer["error"]
        assert "\n" not in answer["error"]


def test_expressions_reach_no_file(port, root):
    (root / "secret.csv").write_text("a\n1\n")
    for expression in (
        f"(SELECT count(*) FROM '{root}/secret.csv') > 0",
        f"row_id IN (SELECT content FROM read_text('{root}/secret.csv'))",
        "getenv('HOME') = 'x'",
        "topic = 'life'; COPY (SELECT 1) TO 'x'",
    ):
        status, answer = api(port, "predict", drop=expression)
        assert status == 400
        assert "expression" in answer["error"]
    status, answer = api(port, "predict", subsets="/etc/passwd")
    assert (status, answer["error"].startswith("predict: got subsets, expected drop")) == (400, True)
    status, answer = api(port, "select", budget="10%", exclude="/etc/passwd")
    assert (status, answer["error"].startswith("select: got exclude, expected")) == (400, True)


def test_nothing_but_the_verbs_is_there(port, art):
    inside = ("manifest.json", "rows.parquet")
    for path in (
        "/../../../../etc/passwd",
        "/api/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        f"/{quote(str(art / 'manifest.json'), safe='')}",
        *(f"/{name}" for name in inside),
        "/api/manifest.json",
        "/api/export",
        "/ask",
        "/api/__init__",
    ):
        status, _, text = ask(port, path)
        assert status == 404, path
        assert "root:" not in text
        assert "fingerprints" not in text


def test_it_only_reads(port):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(port, "/api/predict", method=method)[0] == 405
    assert first_line(port, "POST /api/score HTTP/1.1", "Content-Length: 67108864").endswith(" 405 Method Not Allowed")
    assert ask(port, f"/api/predict?drop={'x' * 200_000}")[0] == 400
    status, answer = api(port, "predict", drop="topic = 'life' OR " * 3000 + "topic = 'sky'")
    assert (status, "characters" in answer["error"]) == (400, True)
    assert api(port, "score", top=1)[0] == 200


def test_a_long_question_is_answered_alike_however_it_arrives(port):
    condition = "topic = 'life' OR " * 3000 + "topic = 'sky'"
    start = f"GET /api/predict?{urlencode({'drop': condition})} HTTP/1.1"
    assert first_line(port, start, pause=0.05).endswith(" 400 Bad Request")
    assert first_line(port, start).endswith(" 400 Bad Request")


def test_connections_that_never_end_keep_nobody_waiting(port):
    with ExitStack() as stack:
        for _ in range(60):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            slow.sendall(b"GET /api/score?top=1 HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert api(port, "score", top=1)[0] == 200


def test_a_page_of_another_site_asks_nothing(port):
    assert ask(port, "/", headers={"Host": "evil.example"})[0] == 400
    assert ask(port, "/api/score", headers={"Host": "127.0.0.1.evil.example"})[0] == 400
    assert ask(port, "/api/score", headers={"Host": f"localhost:{port}"})[0] == 200
    assert ask(port, "/api/score", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(port, "/api/score", headers={"Sec-Fetch-Site": "same-origin"})[0] == 200
    assert ask(port, "/api/score", headers={"Origin": "http://evil.example"})[1]["Access-Control-Allow-Origin"] is None


def test_text_of_the_corpus_is_escaped_on_the_page(port):
    status, headers, text = ask(port, "/")
    assert status == 200
    for harm in ("<script>alert", "<b>earth", "\x1b", "\u202e"):
        assert harm not in text
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert 'data-live="/api"' in text


def test_a_port_in_use_is_refused(art):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port_in_use = other.getsockname()[1]
        assert f"--port: {port_in_use} on 127.0.0.1: Address already in use; choose another, or 0" in refused(
            "serve", art, "--port", port_in_use
        )
        with pytest.raises(SettingsError, match="Address already in use"):
            grasp.serve(grasp.open(art), port=port_in_use)


def test_it_listens_on_this_machine_alone(port):
    with open("/proc/net/tcp") as file:
        listening = [line.split()[1] for line in file if f":{port:04X}" in line.split()[1]]
    assert set(listening) == {f"0100007F:{port:04X}"}


def test_without_the_extra_it_is_named(art, monkeypatch):
    for module, flag in (("uvicorn", ()), ("mcp.server.mcpserver", ("--mcp",))):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert f"needs `{module}`, which is not installed: pip install " in refused(
                "serve", art, "--port", 0, *flag
            )


# -------------------------------------------------------------------------------------------------- agents


def test_an_agent_asks_by_mcp(art):
    mcp = pytest.importorskip("mcp")
    server = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "grasp", "serve", str(art), "--mcp"], env=dict(os.environ)
    )

    async def talk():
        async with mcp.stdio_client(server) as (read, write), mcp.ClientSession(read, write) as session:
            hello = await session.initialize()
            tools = (await session.list_tools()).tools
            calls = {
                "predict": {"drop": "topic = 'life'"},
                "score": {"top": 2},
                "explain": {"row": "r3", "unit": "facts-2"},
                "select": {"budget": "25%"},
            }
            answers = {name: await session.call_tool(name, arguments) for name, arguments in calls.items()}
            wrong = [
                await session.call_tool("predict", {"drop": "getenv('HOME') = 'x'"}),
                await session.call_tool("explain", {"row": "nope"}),
                await session.call_tool("predict", {"drop": "topic = 'life' OR " * 60_000 + "true"}),
                await session.call_tool("score", {"top": 10**9}),
            ]
            return hello, tools, answers, wrong

    hello, tools, answers, wrong = anyio.run(talk)
    assert "targets: facts (6 units); labels: topic" in hello.instructions
    assert [tool.name for tool in tools] == ["predict", "score", "explain", "select"]
    assert all(tool.annotations.read_only_hint for tool in tools)
    assert "condition on labels" in tools[0].description
    artifact = grasp.open(art)
    answers_by_verb = {name: json.loads(answer.content[0].text) for name, answer in answers.items()}
    assert not any(answer.is_error for answer in answers.values())
    dropped = artifact.predict(drop="topic = 'life'")
    assert answers_by_verb["predict"]["headline"] == dropped.headline
    assert answers_by_verb["predict"]["rows"][0][-1] == pytest.approx(dropped.to_pandas()["change"][0])
    assert len(answers_by_verb["score"]["rows"]) == 2
    assert answers_by_verb["explain"]["headline"] == artifact.explain("facts", "r3", unit="facts-2").headline
    assert len(answers_by_verb["select"]["rows"]) == 6
    assert all("\x1b" not in str(answer) for answer in answers_by_verb.values())
    assert all(answer.is_error for answer in wrong)
    assert "expression" in wrong[0].content[0].text
    assert "row: got 'nope'" in wrong[1].content[0].text


def test_serving_does_not_change_the_artifact(art, port):
    before = ArtifactReader.open(art).manifest.files
    assert api(port, "select", budget="50%")[0] == 200
    assert ArtifactReader.open(art).manifest.files == before
    assert not [path for path in art.iterdir() if path.name.startswith(("export", "cache"))]
