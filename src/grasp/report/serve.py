"""An artifact that answers: the report's page live in a browser, or its verbs as tools of an agent (MCP).

The verbs are those of Python and of the command line, without what writes a file or reads one by its name: who asks may
be a page or an agent, and reaches nothing but the artifact. The web server listens on this machine alone and only
reads: every request is a GET that names a verb and its arguments, no path of a request becomes the path of a file, and
a page of another site can ask nothing (its Host, or the browser's word on where a request comes from, gives it away).
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
from grasp.artifact.reader import ArtifactReader
from grasp.build.modality import Pictured
from grasp.errors import GraspError, SettingsError
from grasp.extras import require
from grasp.inspect.explain import Explainer
from grasp.predict.scoring_rule import resolve_protocol
from grasp.report.findings import findings
from grasp.report.page import render
from grasp.results import Result
from grasp.runs.alignment import bind_runs
from grasp.runs.retrained import TrainingRuns
from grasp.runs.table import RunTable
from grasp.select.select import select
from grasp.signatures import declared, signed
from grasp.text import json_text, plain, printable

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    Endpoint = Callable[[Request], Response]


Answer = dict[str, Any]

MOST_LINES = 1000  # of an answer
Count = Annotated[int, Field(ge=0, le=MOST_LINES)]
LISTS = ("weight", "floor", "cap")  # arguments that may be given several times
TOP = 10  # rows of `score`, if nothing is said
QUESTIONS = {  # verbs, where they are declared, and what may be given: nothing that names a file
    "predict": ("grasp.api.predict", ("drop", "keep", "by", "weight", "target")),
    "score": ("grasp.api.score", ("target", "unit", "where", "top", "bottom")),
    "explain": ("grasp.inspect.explain", ("row", "target", "unit")),
    "select": (
        "grasp.select.select",
        ("budget", "target", "by", "floor", "cap", "exclude_where", "train_tokens"),
    ),
}


class Ask:
    """An artifact, and its runs if there are any, that answers questions."""

    def __init__(
        self, artifact: ArtifactReader, runs: TrainingRuns | RunTable | None = None, model: Path | str | None = None
    ) -> None:
        self.artifact = artifact
        self._runs = runs
        self._explainer = Explainer(artifact, None if model is None else {"model": {"path": str(model)}})
        self._lock = threading.RLock()  # a model and its caches are for one thread

    def answer(self, verb: str, **asked: Any) -> Answer:
        """What a verb says: headline, notes, columns and lines, and how many `more` lines are left off.

        Of `explain` also the words of the row as shades, or its pictures.
        """
        given = {name: one for name, one in asked.items() if one is not None}
        result: Result
        beside: Answer = {}
        with self._lock:
            if verb == "explain":
                found = self._explainer.explain(given.pop("target", None), given.pop("row"), **given)
                if isinstance(found, Pictured):
                    result, beside = found, {"pictures": found.nearest}
                else:
                    lines = found.questions if found.pairs is None else found.pairs
                    result, beside = Result(lines, found.headline, found.notes), {"shades": found.shades}
                    beside |= {} if found.answer is None else {"answer": found.answer_shades}
            elif verb == "score":
                result = score(self.artifact, **{"top": TOP, **given})
            else:
                result = (predict if verb == "predict" else select)(self.artifact, runs=self._runs, **given)
        names = result.table.column_names
        rows = result.table.slice(0, MOST_LINES).to_pylist()
        answer: Answer = _clean(
            {
                "headline": result.headline,
                "notes": list(result.notes),
                "columns": names,
                "rows": [[row[name] for name in names] for row in rows],
                "more": max(0, result.table.num_rows - MOST_LINES),
            }
            | beside
        )
        return answer


def _clean(value: Any) -> Any:
    """As JSON has it, texts made harmless to a terminal."""
    if isinstance(value, dict):
        return {key: _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    if isinstance(value, str):
        return printable(" ".join(value.splitlines()) or " " * bool(value))
    return json.loads(json_text(value, default=str))


HOST = "127.0.0.1"
NAMES = [HOST, "localhost"]  # by which a browser may ask for it
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
OWN_SITE = ("same-origin", "none")  # what a browser says of a request of our own page, and of a typed address
EXTRA = "serve"
INSTRUCTIONS = (
    "Ask what rows and slices of a training corpus are worth to a model on a target, before training. Start with "
    "predict(by=LABEL) or score; explain says why a row counts; select chooses rows. Conditions are SQL over labels."
)


def serve(
    artifact: ArtifactReader,
    *,
    port: int = 8765,
    runs: TrainingRuns | Path | str | None = None,
    model: Path | str | None = None,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Serve the page of an artifact on this machine until it is interrupted.

    Args:
        port: 0: any that is free.
        runs: runs, retrained or imported: the change in their unit, with an interval.
        model: where the model is now, to explain rows. Default: where it was.
        tell: is given the address.
    Raises:
        MissingExtraError: the extra `serve` is not installed.
        SettingsError: the port is taken.
    """
    uvicorn = require("uvicorn", extra=EXTRA, feature="grasp serve")
    app = web(artifact, runs=runs, model=model)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as place:  # bound before anything is promised
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((HOST, port))
            place.listen()  # who asks early waits
        except OSError as err:
            raise SettingsError(
                f"--port: {port} on {HOST}: {err.strerror}; choose another, or 0 for any that is free"
            ) from err
        if tell is not None:
            tell(f"http://{HOST}:{place.getsockname()[1]}/")
        # A question over h11's own 64 KB would be refused by us or by h11, depending on how it arrives: ours says why.
        config = uvicorn.Config(
            app,
            http="h11",
            h11_max_incomplete_event_size=1 << 20,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        uvicorn.Server(config).run(sockets=[place])


def serve_mcp(
    artifact: ArtifactReader, *, runs: TrainingRuns | Path | str | None = None, model: Path | str | None = None
) -> None:
    """Serve the verbs as tools of the Model Context Protocol over standard input and output, until these end.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
    """
    mcpserver = require("mcp.server.mcpserver", extra=EXTRA, feature="grasp serve --mcp")
    exceptions = require("mcp.server.mcpserver.exceptions", extra=EXTRA, feature="grasp serve --mcp")
    ask = Ask(artifact, None if runs is None else bind_runs(artifact, runs), model)
    targets = ", ".join(f"{name} ({units} units)" for name, units in artifact.manifest.targets.items())
    labels = ", ".join(artifact.manifest.details.get("labels", ())) or "none"
    about = f"{INSTRUCTIONS} This artifact: {artifact.n_rows:,} rows; targets: {targets}; labels: {labels}."
    server = mcpserver.MCPServer("grasp", instructions=plain(about), version=grasp.__version__, log_level="WARNING")
    for verb in QUESTIONS:
        # its mistakes are told to the agent; what else goes wrong is not
        server.add_tool(_question(ask, verb, exceptions.ToolError), annotations={"readOnlyHint": True})
    server.run("stdio")


def _question(ask: Ask, verb: str, error: type[Exception] = GraspError) -> Callable[..., Answer]:
    """A verb as a function of what may be given, which says of itself what the verb declares.

    Args:
        error: what a mistake raises.
    """
    module, names = QUESTIONS[verb]
    declaration = declared(module, verb)
    parameters, texts = {}, []
    for name in names:
        argument = declaration.arguments[name]
        default = TOP if name == "top" else None if argument.repeatable else argument.default
        kind = Count if argument.kind is int else argument.annotation
        parameters[name] = (kind | None if default is None else kind), default
        texts.append(f"    {name}: {argument.about}")

    def asked(**arguments: Any) -> Answer:
        try:
            return ask.answer(verb, **arguments)
        except GraspError as err:
            raise error(plain(err)) from None

    signed(asked, parameters, "\n".join([declaration.about, "", "Args:", *texts]), Answer)
    asked.__name__ = verb
    return asked


def web(
    artifact: ArtifactReader, *, runs: TrainingRuns | Path | str | None = None, model: Path | str | None = None
) -> "Starlette":
    """The application that `serve` runs: `/` the report, `/api/VERB` answers as JSON.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
    """
    require("starlette", extra=EXTRA, feature="grasp serve")
    from starlette.applications import Starlette  # noqa: PLC0415 - an extra
    from starlette.middleware import Middleware  # noqa: PLC0415
    from starlette.middleware.trustedhost import TrustedHostMiddleware  # noqa: PLC0415
    from starlette.responses import HTMLResponse, PlainTextResponse, Response  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    environment = None if runs is None else bind_runs(artifact, runs)
    ask = Ask(artifact, environment, model)

    def own_site(endpoint: "Endpoint") -> "Endpoint":
        """Refuse what a page of another site asks for."""

        def checked(request: "Request") -> "Response":
            if request.headers.get("sec-fetch-site", "none") not in OWN_SITE:
                return PlainTextResponse("error: asked by another site", 403, headers=HEADERS)
            return endpoint(request)

        return checked

    @functools.cache
    def page() -> str:
        command = f"grasp serve {artifact.where}"
        return render(
            findings(
                artifact, resolve_protocol(None, artifact, choosing=True), environment=environment, command=command
            ),
            live="/api",
        )

    def report(request: "Request") -> "Response":
        try:
            return HTMLResponse(page(), headers=HEADERS)
        except GraspError as err:
            return PlainTextResponse(f"error: {plain(err)}", 400, headers=HEADERS)

    def api(request: "Request") -> "Response":
        query = request.query_params  # one that is empty says nothing
        given = {name: [value for value in query.getlist(name) if value.strip()] for name in query}
        arguments = {name: values if name in LISTS else values[-1] for name, values in given.items() if values}
        answer, status = answered(ask, request.path_params["verb"], arguments)
        return Response(json_text(answer, None), status, headers=HEADERS, media_type="application/json")

    return Starlette(
        routes=[
            Route("/", own_site(report), methods=["GET"]),
            Route("/api/{verb}", own_site(api), methods=["GET"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False)],
    )


def answered(ask: Ask, verb: str, arguments: Mapping[str, Any]) -> tuple[Answer, int]:
    """The answer to a request and its HTTP status; a mistake is one line under `error`."""
    if verb not in QUESTIONS:
        return {"error": f"{plain(verb, 60)}: no such verb; expected {', '.join(QUESTIONS)}"}, 404
    _, known = QUESTIONS[verb]
    if unknown := [name for name in arguments if name not in known]:
        return {"error": f"{verb}: got {plain(', '.join(unknown), 60)}, expected {', '.join(known)}"}, 400
    try:
        return validate_call(_question(ask, verb))(**arguments), 200
    except ValidationError as err:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors())
        return {"error": plain(f"{verb}: {wrong}")}, 400
    except GraspError as err:
        return {"error": plain(err)}, 400
