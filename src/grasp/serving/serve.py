"""Server of an artifact: the live report in a browser, or the commands as tools of the Model Context Protocol (MCP).

Start with `serve` or `serve_mcp`. The commands are those of Python and the command line, without the arguments that
write a file or read one by name, so that a client has access to the artifact only.

The web server listens on the loopback interface and is read-only. Every request is a GET with a command and its
arguments; no request path is used as a file path. Requests of other sites are rejected by their Host header (DNS
rebinding) or their Sec-Fetch-Site header (cross-site requests).
"""

import functools
import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError, validate_call

import grasp
from grasp.api.predict import predict
from grasp.api.score import score
from grasp.artifact.reader import ArtifactReader, Opened
from grasp.errors import GraspError, SettingsError
from grasp.extras import require
from grasp.inspect.explain import Explainer
from grasp.inspect.explanation import Explanation
from grasp.predict.default_protocol import resolve_protocol
from grasp.report.findings import collect_findings
from grasp.report.page import render
from grasp.results import Result
from grasp.runs.imported_runs import bind_runs
from grasp.runs.table import RunTable
from grasp.runs.training_runs import TrainingRuns
from grasp.select.select import select
from grasp.signatures import parse_signature, signed
from grasp.text import json_text, plain, printable

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Answer = dict[str, Any]

MAX_ROWS = 1000  # rows of an answer
Count = Annotated[int, Field(ge=0, le=MAX_ROWS)]
REPEATABLE = ("weight", "floor", "cap")  # arguments that may be repeated in a query string
TOP = 10  # default number of rows of `score`
SERVED_VERBS = {  # command -> its module and the arguments that are exposed; none of them names a file
    "predict": ("grasp.api.predict", ("drop", "keep", "by", "weight", "target")),
    "score": ("grasp.api.score", ("target", "unit", "where", "top", "bottom")),
    "explain": ("grasp.inspect.explain", ("row", "target", "unit")),
    "select": (
        "grasp.select.select",
        ("budget", "target", "by", "floor", "cap", "exclude_where", "train_tokens"),
    ),
}


class QueryService:
    """Answers commands about an artifact and, if there are any, its runs; safe to use from several threads."""

    def __init__(
        self, artifact: ArtifactReader, runs: TrainingRuns | RunTable | None = None, model: Path | str | None = None
    ) -> None:
        self.artifact = artifact
        self._runs = runs
        self._explainer = Explainer(artifact, None if model is None else {"model": {"path": str(model)}})
        self._lock = threading.RLock()  # a model and its caches are not thread-safe

    def answer(self, verb: str, **arguments: Any) -> Answer:
        """Run a command and return its headline, notes, columns and rows, and the number of `more` rows omitted.

        The answer of `explain` also has the words of the row with their contributions, or figures.
        """
        arguments = {name: value for name, value in arguments.items() if value is not None}
        result: Result
        details: Answer = {}
        with self._lock:
            if verb == "explain":
                explanation = self._explainer.explain(arguments.pop("target", None), arguments.pop("row"), **arguments)
                if not isinstance(explanation, Explanation):
                    result, details = explanation, {"figures": explanation.figures}
                else:
                    table = explanation.questions if explanation.pairs is None else explanation.pairs
                    result = Result(table, explanation.headline, explanation.notes)
                    details = {"shades": explanation.shades}
                    details |= {} if explanation.answer is None else {"answer": explanation.answer_shades}
            elif verb == "score":
                result = score(self.artifact, **{"top": TOP, **arguments})
            else:
                result = (predict if verb == "predict" else select)(self.artifact, runs=self._runs, **arguments)
        names = result.table.column_names
        rows = result.table.slice(0, MAX_ROWS).to_pylist()
        answer: Answer = _json_values(
            {
                "headline": result.headline,
                "notes": list(result.notes),
                "columns": names,
                "rows": [[row[name] for name in names] for row in rows],
                "more": max(0, result.table.num_rows - MAX_ROWS),
            }
            | details
        )
        return answer


def _json_values(value: Any) -> Any:
    """Convert a value to JSON types; control characters, which a terminal would interpret, are removed from texts."""
    if isinstance(value, dict):
        return {key: _json_values(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(part) for part in value]
    if isinstance(value, str):
        return printable(" ".join(value.splitlines()) or " " * bool(value))
    return json.loads(json_text(value, default=str))


HOST = "127.0.0.1"
ALLOWED_HOSTS = [HOST, "localhost"]  # accepted Host headers
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
ALLOWED_FETCH_SITES = ("same-origin", "none")  # Sec-Fetch-Site of requests by the page itself, and of a typed URL
EXTRA = "serve"
INSTRUCTIONS = (
    "Predict how rows and slices of a training corpus change a model's results on a target, before training. Start "
    "with predict(by=LABEL) or score; explain shows why a row helps or hurts; select selects rows. Conditions are SQL "
    "expressions over labels."
)


def serve(
    art: Opened,
    *,
    port: int = 8765,
    runs: TrainingRuns | Path | str | None = None,
    model: Path | str | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve the report of an artifact on this machine until interrupted.

    Args:
        art: artifact to serve.
        port: port to listen on; 0 selects a free port.
        runs: retrained or imported runs; changes are then in the unit of the runs, with confidence intervals.
        model: path of the model, which explains rows. Default: the path recorded by the build.
        on_start: callback that receives the URL as soon as the server accepts connections.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
        SettingsError: the port is in use.
    """
    uvicorn = require("uvicorn", extra=EXTRA, feature="grasp serve")
    app = web(art.files, runs=runs, model=model)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:  # bound before the URL is announced
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen()  # requests before uvicorn runs wait in the backlog
        except OSError as err:
            raise SettingsError(
                f"--port: {port} on {HOST}: {err.strerror}; choose another, or 0 for a free port"
            ) from err
        if on_start is not None:
            on_start(f"http://{HOST}:{listener.getsockname()[1]}/")
        # h11 rejects requests over 64 KB by default, but only if they arrive in pieces. A higher limit leaves the
        # rejection to our own check, whose message states the reason.
        config = uvicorn.Config(
            app,
            http="h11",
            h11_max_incomplete_event_size=1 << 20,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        uvicorn.Server(config).run(sockets=[listener])


def serve_mcp(
    artifact: ArtifactReader, *, runs: TrainingRuns | Path | str | None = None, model: Path | str | None = None
) -> None:
    """Serve the commands as tools of the Model Context Protocol over standard input and output.

    Returns when standard input ends.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
    """
    mcpserver = require("mcp.server.mcpserver", extra=EXTRA, feature="grasp serve --mcp")
    exceptions = require("mcp.server.mcpserver.exceptions", extra=EXTRA, feature="grasp serve --mcp")
    service = QueryService(artifact, None if runs is None else bind_runs(artifact, runs), model)
    targets = ", ".join(f"{name} ({units} units)" for name, units in artifact.manifest.targets.items())
    labels = ", ".join(artifact.manifest.details.get("labels", ())) or "none"
    about = f"{INSTRUCTIONS} This artifact: {artifact.n_rows:,} rows; targets: {targets}; labels: {labels}."
    server = mcpserver.MCPServer("grasp", instructions=plain(about), version=grasp.__version__, log_level="WARNING")
    for verb in SERVED_VERBS:
        # The agent sees the text of a ToolError; details of any other exception are withheld.
        server.add_tool(_query_function(service, verb, exceptions.ToolError), annotations={"readOnlyHint": True})
    server.run("stdio")


def _query_function(service: QueryService, verb: str, error: type[Exception] = GraspError) -> Callable[..., Answer]:
    """Return a command as a function of its exposed arguments, with the signature and documentation of the command."""
    module, names = SERVED_VERBS[verb]
    declaration = parse_signature(module, verb)
    parameters, texts = {}, []
    for name in names:
        argument = declaration.arguments[name]
        default = TOP if name == "top" else None if argument.repeatable else argument.default
        annotation = Count if argument.kind is int else argument.annotation
        parameters[name] = (annotation | None if default is None else annotation), default
        texts.append(f"    {name}: {argument.about}")

    def query(**arguments: Any) -> Answer:
        try:
            return service.answer(verb, **arguments)
        except GraspError as err:
            raise error(plain(err)) from None

    signed(query, parameters, "\n".join([declaration.about, "", "Args:", *texts]), Answer)
    query.__name__ = verb
    return query


def web(
    artifact: ArtifactReader, *, runs: TrainingRuns | Path | str | None = None, model: Path | str | None = None
) -> "Starlette":
    """Return the ASGI application of `serve`: the report at `/`, answers as JSON at `/api/VERB`.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
    """
    require("starlette", extra=EXTRA, feature="grasp serve")
    from starlette.applications import Starlette  # noqa: PLC0415 - an extra
    from starlette.middleware import Middleware  # noqa: PLC0415
    from starlette.middleware.trustedhost import TrustedHostMiddleware  # noqa: PLC0415
    from starlette.responses import HTMLResponse, PlainTextResponse, Response  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    bound_runs = None if runs is None else bind_runs(artifact, runs)
    service = QueryService(artifact, bound_runs, model)

    @functools.cache
    def page() -> str:
        command = f"grasp serve {artifact.location}"
        return render(
            collect_findings(artifact, resolve_protocol(None, artifact), runs=bound_runs, command=command),
            live="/api",
        )

    def endpoint(request: "Request") -> "Response":
        if request.headers.get("sec-fetch-site", "none") not in ALLOWED_FETCH_SITES:  # a page of another site asks
            return PlainTextResponse("error: cross-site request", 403, headers=HEADERS)
        verb = request.path_params.get("verb")
        if verb is None:
            try:
                return HTMLResponse(page(), headers=HEADERS)
            except GraspError as err:
                return PlainTextResponse(f"error: {plain(err)}", 400, headers=HEADERS)
        query = request.query_params
        values_by_name = {name: [value for value in query.getlist(name) if value.strip()] for name in query}
        arguments = {
            name: values if name in REPEATABLE else values[-1]
            for name, values in values_by_name.items()
            if values  # an empty argument counts as absent
        }
        answer, status = respond(service, verb, arguments)
        return Response(json_text(answer, None), status, headers=HEADERS, media_type="application/json")

    return Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path in ("/", "/api/{verb}")],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=ALLOWED_HOSTS, www_redirect=False)],
    )


def respond(service: QueryService, verb: str, arguments: Mapping[str, Any]) -> tuple[Answer, int]:
    """Return the answer to a request and its HTTP status; an error is one line under the key `error`."""
    if verb not in SERVED_VERBS:
        return {"error": f"{plain(verb, 60)}: unknown command; expected {', '.join(SERVED_VERBS)}"}, 404
    _, known = SERVED_VERBS[verb]
    if unknown := [name for name in arguments if name not in known]:
        return {"error": f"{verb}: got {plain(', '.join(unknown), 60)}, expected {', '.join(known)}"}, 400
    try:
        return validate_call(_query_function(service, verb))(**arguments), 200
    except ValidationError as err:
        messages = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in err.errors())
        return {"error": plain(f"{verb}: {messages}")}, 400
    except GraspError as err:
        return {"error": plain(err)}, 400
